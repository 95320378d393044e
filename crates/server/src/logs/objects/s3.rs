//! A bucket of an S3-compatible store for logs.
//!
//! The store must support `If-None-Match: *` on writes; without it two writers could replace each other's objects.
//! [`Bucket::check`] tests this at the start.

use std::{io, time::Duration};

pub use windlass_objects::{S3Bucket, S3Credentials, S3Location};

use super::{Bucket, BucketFuture, HEADER_BYTES, OBJECT_BYTES_MAX, ObjectPage};

/// Checks that the bucket exists, is writable, and refuses to write a name twice.
async fn check_conditional_writes(bucket: &S3Bucket) -> io::Result<()> {
    let name = format!("check/{:016x}", getrandom::u64().map_err(io::Error::other)?);
    let first = bucket.put_new(&name, b"first".to_vec()).await?;
    let second = bucket.put_new(&name, b"second".to_vec()).await?;
    bucket.delete(&name).await?;
    if first && !second {
        return Ok(());
    }
    Err(io::Error::new(
        io::ErrorKind::Unsupported,
        "the object store does not support `If-None-Match: *` on writes; two servers could overwrite \
         each other's logs",
    ))
}

impl Bucket for S3Bucket {
    fn link_new_file<'a>(&'a self, name: &'a str, bytes: Vec<u8>) -> BucketFuture<'a, bool> {
        Box::pin(self.put_new(name, bytes))
    }

    fn get<'a>(&'a self, name: &'a str, limit: Option<usize>) -> BucketFuture<'a, Option<Vec<u8>>> {
        Box::pin(self.get(name, limit.unwrap_or(HEADER_BYTES + OBJECT_BYTES_MAX)))
    }

    fn list<'a>(&'a self, prefix: &'a str, after: Option<&'a str>) -> BucketFuture<'a, ObjectPage> {
        Box::pin(self.list(prefix, after))
    }

    fn delete<'a>(&'a self, name: &'a str) -> BucketFuture<'a, ()> {
        Box::pin(self.delete(name))
    }

    fn check(&self) -> BucketFuture<'_, ()> {
        Box::pin(check_conditional_writes(self))
    }

    /// A list is a request that costs money.
    fn fresh_for(&self) -> Duration {
        Duration::from_secs(5)
    }
}
