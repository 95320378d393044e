//! What the program writes, on its way to the server: in order, byte for byte, each byte once.

use std::collections::BTreeMap;

use tokio_util::bytes::Bytes;
use windlass_api::queue::{Client, QueueError};

/// In one call.
const PIECE: usize = 512 * 1024;
/// Kept while the server is away; what is older is not dropped, the program waits.
pub(super) struct Report {
    client: Client,
    uuid: String,
    streams: BTreeMap<&'static str, Stream>,
}

#[derive(Default)]
struct Stream {
    sent: u64,
    waiting: Vec<u8>,
}

impl Report {
    pub(super) fn new(client: Client, uuid: &str) -> Self {
        Self { client, uuid: uuid.to_owned(), streams: BTreeMap::new() }
    }

    pub(super) fn add(&mut self, stream: &'static str, bytes: &[u8]) {
        self.streams.entry(stream).or_default().waiting.extend_from_slice(bytes);
    }

    /// Sends all there is. What was not taken is sent again, from the same place on.
    pub(super) async fn send(&mut self) -> Result<(), QueueError> {
        for (name, stream) in &mut self.streams {
            while !stream.waiting.is_empty() {
                let piece = &stream.waiting[..stream.waiting.len().min(PIECE)];
                let path = format!("containers/{}/output?stream={name}&offset={}", self.uuid, stream.sent);
                self.client.post_bytes(&path, Bytes::copy_from_slice(piece)).await?;
                let length = piece.len();
                stream.sent += length as u64;
                stream.waiting.drain(..length);
            }
        }
        Ok(())
    }
}
