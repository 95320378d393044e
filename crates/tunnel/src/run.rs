//! Commands on a host, and files brought there.

use russh::ChannelMsg;

use crate::{Connection, TunnelError};

/// Output kept of a command; more is thrown away.
const OUTPUT_MAX: usize = 1 << 20;
const UPLOAD_CHUNK: usize = 256 * 1024;

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Output {
    /// `None`: killed by a signal, or the connection went.
    pub status: Option<u32>,
    pub stdout: Vec<u8>,
    pub stderr: Vec<u8>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Uploaded {
    /// Bytes that were there from an earlier, broken attempt.
    pub resumed_at: u64,
}

impl Connection {
    /// Runs a shell command with `stdin`, to its end.
    #[expect(
        clippy::wildcard_enum_match_arm,
        reason = "a foreign enum that grows; only these say something here"
    )]
    pub async fn run(&self, command: &str, stdin: &[u8]) -> Result<Output, TunnelError> {
        let channel = self.session().await?;
        let failed = |source| self.protocol("run a command", source);
        channel.exec(true, command).await.map_err(failed)?;
        let (mut from, to) = channel.split();
        let mut output = Output { status: None, stdout: Vec::new(), stderr: Vec::new() };
        let send = async {
            for chunk in stdin.chunks(UPLOAD_CHUNK) {
                to.data_bytes(chunk.to_vec()).await?;
            }
            to.eof().await
        };
        let receive = async {
            while let Some(message) = from.wait().await {
                match message {
                    ChannelMsg::Data { data } => keep(&mut output.stdout, &data),
                    ChannelMsg::ExtendedData { data, .. } => keep(&mut output.stderr, &data),
                    ChannelMsg::ExitStatus { exit_status } => output.status = Some(exit_status),
                    ChannelMsg::Failure => return Err(russh::Error::RequestDenied),
                    _ => {}
                }
            }
            Ok(())
        };
        // A command may end without reading all its input: that is its own affair.
        let (_sent, received) = tokio::join!(send, receive);
        received.map_err(failed)?;
        let _ = to.close().await;
        Ok(output)
    }

    /// Runs a command that must succeed, and gives back what it said.
    pub async fn read(&self, command: &str, stdin: &[u8]) -> Result<String, TunnelError> {
        let output = self.run(command, stdin).await?;
        if output.status == Some(0) {
            return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
        }
        Err(TunnelError::Command {
            host: self.name.clone(),
            command: command.to_owned(),
            status: output.status.map_or_else(|| "a signal".to_owned(), |code| code.to_string()),
            said: String::from_utf8_lossy(&output.stderr).trim().to_owned(),
        })
    }

    /// Brings a program to `path` on the host, going on where a broken attempt stopped. It appears there whole, with
    /// the right checksum, or not at all. The path is ours and needs no quoting; the login shell may be any.
    pub async fn upload(&self, path: &str, bytes: &[u8], sha256: &str) -> Result<Uploaded, TunnelError> {
        let part = format!("{path}.{}.part", &sha256[..16.min(sha256.len())]);
        let there = self.read(&shell(&format!("wc -c < {part} 2>/dev/null || echo 0")), b"").await?;
        let there = there.trim().parse::<usize>().unwrap_or(0).min(bytes.len());
        self.read(&shell(&format!("umask 077 && cat >> {part}")), &bytes[there..]).await?;
        let summed = self.read(&shell(&format!("sha256sum < {part}")), b"").await?;
        let summed = summed.split_whitespace().next().unwrap_or_default().to_owned();
        if summed != sha256 {
            self.read(&shell(&format!("rm -f {part}")), b"").await?;
            let (host, here) = (self.name.clone(), sha256.to_owned());
            return Err(TunnelError::Damaged { host, here, there: summed });
        }
        self.read(&shell(&format!("chmod 755 {part} && mv -f {part} {path}")), b"").await?;
        Ok(Uploaded { resumed_at: there as u64 })
    }
}

/// The same command for whatever shell the user has: it contains no single quote.
fn shell(command: &str) -> String {
    format!("exec /bin/sh -c '{command}'")
}

fn keep(kept: &mut Vec<u8>, data: &[u8]) {
    let room = OUTPUT_MAX.saturating_sub(kept.len());
    kept.extend_from_slice(&data[..data.len().min(room)]);
}
