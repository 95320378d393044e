//! Channel as a stream, drained continuously by a separate task.
//!
//! The SSH library delivers the data of all channels from one loop and waits for each receiver, so a receiver must
//! never wait for its reader. The pump buffers what the reader has not consumed yet, up to a cap; beyond it the channel
//! is closed, and the reader gets an error after the buffered bytes.

use std::{
    collections::VecDeque,
    io,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, Waker},
};

use parking_lot::Mutex;
use russh::{Channel, ChannelStream, client::Msg};
use tokio::{
    io::{AsyncRead, AsyncReadExt, AsyncWrite, ReadBuf, WriteHalf},
    task::JoinHandle,
};

/// Size of one packet of the SSH library.
const CHUNK_BYTES: usize = 32 * 1024;

/// Channel to a socket on a host. Dropping it closes the channel.
pub struct Stream {
    received: Arc<Mutex<ReceiveBuffer>>,
    writer: WriteHalf<ChannelStream<Msg>>,
    pump: JoinHandle<()>,
}

#[derive(Default)]
struct ReceiveBuffer {
    chunks: VecDeque<(Vec<u8>, usize)>,
    buffered: usize,
    end: Option<StreamEnd>,
    reader: Option<Waker>,
}

#[derive(Clone, Copy)]
enum StreamEnd {
    Eof,
    TooSlow,
}

impl Stream {
    pub(crate) fn new(channel: Channel<Msg>, cap: usize) -> Self {
        let (mut reader, writer) = tokio::io::split(channel.into_stream());
        let received = Arc::new(Mutex::new(ReceiveBuffer::default()));
        let kept = Arc::clone(&received);
        let pump = tokio::spawn(async move {
            let mut chunk = Vec::with_capacity(CHUNK_BYTES);
            loop {
                match reader.read_buf(&mut chunk).await {
                    Ok(0) | Err(_) => return kept.lock().finish(StreamEnd::Eof),
                    Ok(_) if kept.lock().push(&chunk, cap) => chunk.clear(),
                    Ok(_) => break,
                }
            }
            kept.lock().finish(StreamEnd::TooSlow);
            // Until the reader has noticed and dropped its half, incoming data must not block the other channels.
            while matches!(reader.read_buf(&mut chunk).await, Ok(n) if n > 0) {
                chunk.clear();
            }
        });
        Self { received, writer, pump }
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        // The library closes the channel once both halves are dropped.
        self.pump.abort();
    }
}

impl ReceiveBuffer {
    /// Appends data. Returns false if the reader is too far behind.
    fn push(&mut self, data: &[u8], cap: usize) -> bool {
        if self.buffered + data.len() > cap {
            return false;
        }
        self.buffered += data.len();
        self.chunks.push_back((data.to_vec(), 0));
        self.wake_reader();
        true
    }

    fn finish(&mut self, end: StreamEnd) {
        self.end = Some(end);
        self.wake_reader();
    }

    fn wake_reader(&mut self) {
        if let Some(waker) = self.reader.take() {
            waker.wake();
        }
    }
}

impl AsyncRead for Stream {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let mut inbox = self.received.lock();
        let Some((chunk, from)) = inbox.chunks.front_mut() else {
            return match inbox.end {
                Some(StreamEnd::Eof) => Poll::Ready(Ok(())),
                Some(StreamEnd::TooSlow) => Poll::Ready(Err(io::Error::new(
                    io::ErrorKind::ConnectionAborted,
                    "the reader was too slow",
                ))),
                None => {
                    inbox.reader = Some(cx.waker().clone());
                    Poll::Pending
                }
            };
        };
        let rest = &chunk[*from..];
        let n = rest.len().min(buf.remaining());
        buf.put_slice(&rest[..n]);
        *from += n;
        if *from == chunk.len() {
            inbox.chunks.pop_front();
        }
        inbox.buffered -= n;
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for Stream {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.writer).poll_write(cx, buf)
    }
    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.writer).poll_flush(cx)
    }
    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.writer).poll_shutdown(cx)
    }
}
