//! A channel as a stream, drained without end by a task of its own.
//!
//! The SSH library delivers data of all channels from one loop and waits for each receiver. A receiver must
//! therefore never wait for its reader. The pump keeps what the reader has not taken yet, up to a cap; beyond it
//! the channel is closed and the reader gets an error after the bytes it still has.

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

/// One packet of the SSH library.
const CHUNK: usize = 32 * 1024;

/// A channel to a socket on a host. Dropping it closes the channel.
pub struct Stream {
    inbox: Arc<Mutex<Inbox>>,
    writer: WriteHalf<ChannelStream<Msg>>,
    pump: JoinHandle<()>,
}

#[derive(Default)]
struct Inbox {
    chunks: VecDeque<(Vec<u8>, usize)>,
    held: usize,
    end: Option<End>,
    reader: Option<Waker>,
}

#[derive(Clone, Copy)]
enum End {
    Eof,
    TooSlow,
}

impl Stream {
    pub(crate) fn new(channel: Channel<Msg>, cap: usize) -> Self {
        let (mut reader, writer) = tokio::io::split(channel.into_stream());
        let inbox = Arc::new(Mutex::new(Inbox::default()));
        let kept = Arc::clone(&inbox);
        let pump = tokio::spawn(async move {
            let mut chunk = Vec::with_capacity(CHUNK);
            loop {
                match reader.read_buf(&mut chunk).await {
                    Ok(0) | Err(_) => return kept.lock().finish(End::Eof),
                    Ok(_) if kept.lock().take(&chunk, cap) => chunk.clear(),
                    Ok(_) => break,
                }
            }
            kept.lock().finish(End::TooSlow);
            // Until the reader has noticed and dropped its half, what comes must not stand in the way of the others.
            while matches!(reader.read_buf(&mut chunk).await, Ok(n) if n > 0) {
                chunk.clear();
            }
        });
        Self { inbox, writer, pump }
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        // With the reading half gone, and ours, the library closes the channel.
        self.pump.abort();
    }
}

impl Inbox {
    /// False when the reader is too far behind.
    fn take(&mut self, data: &[u8], cap: usize) -> bool {
        if self.held + data.len() > cap {
            return false;
        }
        self.held += data.len();
        self.chunks.push_back((data.to_vec(), 0));
        self.wake();
        true
    }

    fn finish(&mut self, end: End) {
        self.end = Some(end);
        self.wake();
    }

    fn wake(&mut self) {
        if let Some(waker) = self.reader.take() {
            waker.wake();
        }
    }
}

impl AsyncRead for Stream {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let mut inbox = self.inbox.lock();
        let Some((chunk, from)) = inbox.chunks.front_mut() else {
            return match inbox.end {
                Some(End::Eof) => Poll::Ready(Ok(())),
                Some(End::TooSlow) => Poll::Ready(Err(io::Error::new(
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
        inbox.held -= n;
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
