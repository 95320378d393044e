//! Downloads of layers, which survive broken connections and mirrors.

use std::{collections::VecDeque, time::Duration};

use http_body_util::BodyExt as _;
use hyper::body::{Bytes, Incoming};
use ring::digest::Context;
use tokio::time::timeout;

use crate::{
    Layer, RegistryError,
    client::{ATTEMPTS_MAX, Client, ImageRequest, size_mismatch},
    http::FetchError,
};

/// Time without new bytes after which a layer download counts as stalled.
const CHUNK_TIMEOUT: Duration = Duration::from_secs(60);

/// Hosts from which a layer is downloaded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LayerHosts {
    /// The mirrors of the registry, then the registry.
    MirrorsFirst,
    Registry,
}

/// Layer download. Resumes at the current byte when the connection breaks, at the next host if the present one is a mirror.
pub struct LayerDownload<'a> {
    client: &'a Client,
    call: ImageRequest<'a>,
    /// Hosts that remain.
    hosts: VecDeque<ImageRequest<'a>>,
    layer: Layer,
    offset: u64,
    hash: Context,
    body: Incoming,
    /// Consecutive broken connections since the last received byte.
    failed_attempts: u32,
}

impl<'a> LayerDownload<'a> {
    /// `from` is the number of bytes that were received before, with their hash.
    pub(crate) fn new(
        client: &'a Client,
        call: ImageRequest<'a>,
        hosts: VecDeque<ImageRequest<'a>>,
        layer: Layer,
        (offset, hash): (u64, Context),
        body: Incoming,
    ) -> Self {
        Self { client, call, hosts, layer, offset, hash, body, failed_attempts: 0 }
    }

    /// Returns the next bytes, or `None` at the end, after the digest was verified.
    pub async fn next_chunk(&mut self) -> Result<Option<Bytes>, RegistryError> {
        loop {
            let invalid = |problem| RegistryError::Invalid { name: self.call.name.clone(), problem };
            let broken = match timeout(CHUNK_TIMEOUT, self.body.frame()).await {
                Ok(Some(Ok(frame))) => match frame.into_data() {
                    Ok(bytes) if bytes.is_empty() => continue,
                    Ok(bytes) => {
                        self.offset += bytes.len() as u64;
                        if self.offset > self.layer.size {
                            return Err(invalid(format!(
                                "a layer exceeds its declared size of {} bytes",
                                self.layer.size
                            )));
                        }
                        self.hash.update(&bytes);
                        self.failed_attempts = 0;
                        return Ok(Some(bytes));
                    }
                    Err(_) => continue,
                },
                Ok(None) if self.offset == self.layer.size => {
                    let found = self.received_digest();
                    if found == self.layer.digest {
                        return Ok(None);
                    }
                    let wanted = &self.layer.digest;
                    return Err(invalid(format!(
                        "layer digest mismatch: received {found}, expected {wanted}"
                    )));
                }
                Ok(None) if self.received_digest() == self.layer.digest => {
                    return Err(invalid(size_mismatch(self.offset, self.layer.size)));
                }
                Ok(None) => FetchError::Timeout { host: self.call.host.to_owned() },
                Ok(Some(Err(source))) => FetchError::Http { host: self.call.host.to_owned(), source },
                Err(_) => FetchError::Timeout { host: self.call.host.to_owned() },
            };
            let (name, layer) = (self.call.name, &self.layer);
            if !self.hosts.is_empty() {
                (self.call, self.body) =
                    self.client.open_at_any(&mut self.hosts, name, layer, self.offset).await?;
                continue;
            }
            self.failed_attempts += 1;
            if self.failed_attempts >= ATTEMPTS_MAX {
                return Err(self.call.unreachable_error(broken));
            }
            let call = ImageRequest { name, host: self.call.host, credentials: self.call.credentials };
            (_, self.body) = self.client.open_blob(call, &layer.digest, layer.size, self.offset).await?;
        }
    }

    fn received_digest(&self) -> String {
        format!("sha256:{}", hex::encode(self.hash.clone().finish()))
    }

    /// Returns the number of bytes received and their running hash, to resume the download later.
    pub fn progress(&self) -> (u64, Context) {
        (self.offset, self.hash.clone())
    }
}

impl std::fmt::Debug for LayerDownload<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Blob")
            .field("digest", &self.layer.digest)
            .field("at", &self.offset)
            .finish_non_exhaustive()
    }
}
