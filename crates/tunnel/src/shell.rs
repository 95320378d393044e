//! Interactive shells.

use std::sync::Arc;

use bytes::Bytes;
use russh::{ChannelMsg, ChannelReadHalf, ChannelWriteHalf, client};
use tokio::io::{AsyncRead, AsyncWrite};

use crate::{Connection, SshDestination, TunnelError};

const TERMINAL: &str = "xterm-256color";

/// Size of a terminal in characters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TerminalSize {
    pub columns: u32,
    pub rows: u32,
}

/// Event of a shell.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ShellEvent {
    Output(Bytes),
    /// It ended with this status.
    Exit(u32),
}

/// Output of a shell.
pub struct ShellOutput {
    channel: ChannelReadHalf,
    /// Must live as long as the channel.
    _connection: Arc<Connection>,
}

/// Input of a shell.
pub struct ShellInput {
    channel: ChannelWriteHalf<client::Msg>,
}

impl Connection {
    /// Logs in over an existing stream.
    pub async fn open_over(
        stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
        target: &SshDestination,
        cap: usize,
    ) -> Result<Self, TunnelError> {
        Self::handshake(stream, None, target, cap).await.map(|(connection, _)| connection)
    }

    /// Starts a login shell in a terminal.
    pub async fn open_shell(
        self: Arc<Self>,
        size: TerminalSize,
    ) -> Result<(ShellOutput, ShellInput), TunnelError> {
        let channel = self.open_session().await?;
        let failed = |source| self.protocol_error("start a shell", source);
        channel.request_pty(false, TERMINAL, size.columns, size.rows, 0, 0, &[]).await.map_err(failed)?;
        channel.request_shell(false).await.map_err(failed)?;
        let (output, input) = channel.split();
        Ok((ShellOutput { channel: output, _connection: self }, ShellInput { channel: input }))
    }
}

impl ShellOutput {
    /// Next event; `None` at the end of the connection.
    #[expect(
        clippy::wildcard_enum_match_arm,
        reason = "a foreign enum that grows; only these say something here"
    )]
    pub async fn next(&mut self) -> Option<ShellEvent> {
        loop {
            return Some(match self.channel.wait().await? {
                ChannelMsg::Data { data } | ChannelMsg::ExtendedData { data, .. } => ShellEvent::Output(data),
                ChannelMsg::ExitStatus { exit_status } => ShellEvent::Exit(exit_status),
                _ => continue,
            });
        }
    }
}

impl ShellInput {
    /// Writes to the terminal; an error if the shell has ended.
    pub async fn write(&self, bytes: Bytes) -> Result<(), Arc<russh::Error>> {
        self.channel.data_bytes(bytes).await.map_err(Arc::new)
    }

    pub async fn resize(&self, size: TerminalSize) -> Result<(), Arc<russh::Error>> {
        self.channel.window_change(size.columns, size.rows, 0, 0).await.map_err(Arc::new)
    }

    /// Ends the shell.
    pub async fn close(&self) {
        // A shell that has ended needs no end.
        let _ = self.channel.close().await;
    }
}

impl std::fmt::Debug for ShellOutput {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ShellOutput").finish_non_exhaustive()
    }
}

impl std::fmt::Debug for ShellInput {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ShellInput").finish_non_exhaustive()
    }
}
