//! The connection's socket, with a handle to abort it and a throttle.
//!
//! The throttle is for channels that are held (`inflow`): their clients send two bytes for every two they may, as fast
//! as the network allows, while some hundred times a second are enough.
//!
//! The library's loop cannot be stopped while it exchanges keys or waits for a client that does not close; a socket
//! that fails always ends it.

use std::{
    io,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
    time::Duration,
};

use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::TcpStream,
    time::{Instant, Sleep, sleep},
};
use tokio_util::sync::{CancellationToken, WaitForCancellationFutureOwned};

use super::receive_buffer::ConnectionBacklog;

/// Delay of the next read after a small packet, while a channel is held.
const READ_DELAY: Duration = Duration::from_millis(3);
/// Size in bytes from which a packet counts as large.
const SMALL_PACKET_BYTES: usize = 128;
/// The library reads a packet's length, then the packet: a read of at most this size is for a length.
const LENGTH_BYTES: usize = 16;

pub(super) struct ThrottledSocket {
    socket: TcpStream,
    total: Arc<ConnectionBacklog>,
    brake: Pin<Box<Sleep>>,
    braking: bool,
    cut: Pin<Box<WaitForCancellationFutureOwned>>,
    is_cut: bool,
}

impl ThrottledSocket {
    pub(super) fn new(socket: TcpStream, cut: CancellationToken, total: Arc<ConnectionBacklog>) -> Self {
        Self {
            socket,
            total,
            brake: Box::pin(sleep(Duration::ZERO)),
            braking: false,
            cut: Box::pin(cut.cancelled_owned()),
            is_cut: false,
        }
    }

    fn check_aborted(&mut self, context: &mut Context<'_>) -> io::Result<()> {
        if !self.is_cut {
            self.is_cut = self.cut.as_mut().poll(context).is_ready();
        }
        if self.is_cut { Err(io::ErrorKind::ConnectionAborted.into()) } else { Ok(()) }
    }
}

impl AsyncRead for ThrottledSocket {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        self.check_aborted(context)?;
        if self.braking {
            ready!(self.brake.as_mut().poll(context));
            self.braking = false;
        }
        let (requested, before) = (buffer.remaining(), buffer.filled().len());
        ready!(Pin::new(&mut self.socket).poll_read(context, buffer))?;
        if requested > LENGTH_BYTES
            && buffer.filled().len() - before < SMALL_PACKET_BYTES
            && self.total.any_held()
        {
            self.braking = true;
            self.brake.as_mut().reset(Instant::now() + READ_DELAY);
        }
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for ThrottledSocket {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.check_aborted(context)?;
        Pin::new(&mut self.socket).poll_write(context, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.socket).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.socket).poll_shutdown(context)
    }
}
