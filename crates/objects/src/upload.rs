//! Files of any size as objects: small ones in one call, larger ones in parts.

use std::{io, path::Path};

use hyper::{StatusCode, body::Bytes};
use tokio::{fs::File, io::AsyncReadExt as _};

use super::{S3Bucket, S3Call, response_error, xml_elements};

/// Size of a part. Stores accept 10,000 parts of at least 5 MiB.
const PART_BYTES: usize = 16 << 20;

impl S3Bucket {
    /// Writes a file as an object; replaces an existing one.
    pub async fn upload(&self, name: &str, file: &Path) -> io::Result<()> {
        self.upload_in_parts(name, file, PART_BYTES).await
    }

    async fn upload_in_parts(&self, name: &str, file: &Path, part_bytes: usize) -> io::Result<()> {
        let mut file = File::open(file).await?;
        let first = read_part(&mut file, part_bytes).await?;
        if first.len() < part_bytes {
            return self.put(name, first).await;
        }
        let upload = self.begin_upload(name).await?;
        let sent = self.send_parts(name, &upload, first, &mut file, part_bytes).await;
        if sent.is_err() {
            // Parts that no object uses cost money.
            let query = vec![("uploadId".to_owned(), upload)];
            let _ = self.call("DELETE", name, query, Bytes::new()).await;
        }
        sent
    }

    /// Writes an object; replaces an existing one.
    pub async fn put(&self, name: &str, bytes: Bytes) -> io::Result<()> {
        let answer = self.call("PUT", name, Vec::new(), bytes).await?;
        answer.expect_ok("write an object").map(|_| ())
    }

    async fn begin_upload(&self, name: &str) -> io::Result<String> {
        let query = vec![("uploads".to_owned(), String::new())];
        let answer = self.call("POST", name, query, Bytes::new()).await?.expect_ok("begin an upload")?;
        let text = String::from_utf8_lossy(&answer.body).into_owned();
        let id = xml_elements(&text, "UploadId").next().map(str::to_owned);
        id.ok_or_else(|| io::Error::other("the object store returned no id for an upload"))
    }

    async fn send_parts(
        &self,
        name: &str,
        upload: &str,
        first: Bytes,
        file: &mut File,
        part_bytes: usize,
    ) -> io::Result<()> {
        let mut part = first;
        let mut parts = String::new();
        let id = || ("uploadId".to_owned(), upload.to_owned());
        for number in 1.. {
            let query = vec![("partNumber".to_owned(), number.to_string()), id()];
            let answer = self.call("PUT", name, query, part).await?.expect_ok("write a part of an object")?;
            let tag =
                answer.etag.ok_or_else(|| io::Error::other("the object store returned no tag for a part"))?;
            parts += &format!("<Part><PartNumber>{number}</PartNumber><ETag>{tag}</ETag></Part>");
            part = read_part(file, part_bytes).await?;
            if part.is_empty() {
                break;
            }
        }
        let body = format!("<CompleteMultipartUpload>{parts}</CompleteMultipartUpload>");
        let answer =
            self.call("POST", name, vec![id()], body.into()).await?.expect_ok("complete an upload")?;
        // Stores begin the response before they know the result.
        let failed = String::from_utf8_lossy(&answer.body).contains("<Error>");
        if failed { Err(response_error("complete an upload", StatusCode::OK, &answer.body)) } else { Ok(()) }
    }

    async fn call(
        &self,
        method: &'static str,
        name: &str,
        query: Vec<(String, String)>,
        body: Bytes,
    ) -> io::Result<super::S3Answer> {
        let name = self.full_name(name);
        self.send_with_retries(&S3Call { method, name: &name, query, headers: Vec::new(), body }).await
    }
}

async fn read_part(file: &mut File, size: usize) -> io::Result<Bytes> {
    let mut part = Vec::new();
    let limit = u64::try_from(size).unwrap_or(u64::MAX);
    file.take(limit).read_to_end(&mut part).await?;
    Ok(part.into())
}
