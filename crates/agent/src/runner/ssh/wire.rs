//! The connection's socket, with a handle to cut it.
//!
//! The library's loop cannot be told to end while it exchanges keys or waits for a client that does not close;
//! a socket that fails ends it always.

use std::{
    io,
    pin::Pin,
    task::{Context, Poll},
};

use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::TcpStream,
};
use tokio_util::sync::{CancellationToken, WaitForCancellationFutureOwned};

pub(super) struct Wire {
    socket: TcpStream,
    cut: Pin<Box<WaitForCancellationFutureOwned>>,
    is_cut: bool,
}

impl Wire {
    pub(super) fn new(socket: TcpStream, cut: CancellationToken) -> Self {
        Self { socket, cut: Box::pin(cut.cancelled_owned()), is_cut: false }
    }

    fn check(&mut self, context: &mut Context<'_>) -> io::Result<()> {
        if !self.is_cut {
            self.is_cut = self.cut.as_mut().poll(context).is_ready();
        }
        if self.is_cut { Err(io::ErrorKind::ConnectionAborted.into()) } else { Ok(()) }
    }
}

impl AsyncRead for Wire {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        self.check(context)?;
        Pin::new(&mut self.socket).poll_read(context, buffer)
    }
}

impl AsyncWrite for Wire {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.check(context)?;
        Pin::new(&mut self.socket).poll_write(context, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.socket).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.socket).poll_shutdown(context)
    }
}
