//! Commands on a host, and file uploads.

use russh::ChannelMsg;

use crate::{Connection, TunnelError};

/// Maximum size of the captured output of a command; the rest is discarded.
const OUTPUT_MAX: usize = 1 << 20;
const UPLOAD_CHUNK: usize = 256 * 1024;

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CommandOutput {
    /// `None`: killed by a signal, or the connection was lost.
    pub status: Option<u32>,
    pub stdout: Vec<u8>,
    pub stderr: Vec<u8>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UploadedFile {
    /// Path of the complete file, with the correct checksum. No other process uses the name.
    pub path: String,
    /// Bytes that existed from an earlier, interrupted attempt.
    pub resumed_at: u64,
}

impl Connection {
    /// Runs a shell command with `stdin`, until it exits.
    #[expect(
        clippy::wildcard_enum_match_arm,
        reason = "a foreign enum that grows; only these say something here"
    )]
    pub async fn run(&self, command: &str, stdin: &[u8]) -> Result<CommandOutput, TunnelError> {
        let channel = self.open_session().await?;
        let failed = |source| self.protocol_error("run a command", source);
        channel.exec(true, command).await.map_err(failed)?;
        let (mut from, to) = channel.split();
        let mut output = CommandOutput { status: None, stdout: Vec::new(), stderr: Vec::new() };
        let send = async {
            for chunk in stdin.chunks(UPLOAD_CHUNK) {
                to.data_bytes(chunk.to_vec()).await?;
            }
            to.eof().await
        };
        let receive = async {
            while let Some(message) = from.wait().await {
                match message {
                    ChannelMsg::Data { data } => append_bounded(&mut output.stdout, &data),
                    ChannelMsg::ExtendedData { data, .. } => append_bounded(&mut output.stderr, &data),
                    ChannelMsg::ExitStatus { exit_status } => output.status = Some(exit_status),
                    ChannelMsg::Failure => return Err(russh::Error::RequestDenied),
                    _ => {}
                }
            }
            Ok(())
        };
        // A command may exit without reading all its input; that is not an error.
        let (_sent, received) = tokio::join!(send, receive);
        received.map_err(failed)?;
        let _ = to.close().await;
        Ok(output)
    }

    /// Runs a command that must succeed, and returns its output.
    pub async fn run_checked(&self, command: &str, stdin: &[u8]) -> Result<String, TunnelError> {
        let output = self.run(command, stdin).await?;
        if output.status == Some(0) {
            return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
        }
        Err(TunnelError::Command {
            host: self.name.clone(),
            command: command.to_owned(),
            status: output.status.map_or_else(|| "a signal".to_owned(), |code| code.to_string()),
            message: String::from_utf8_lossy(&output.stderr).trim().to_owned(),
        })
    }

    /// Uploads a program to a unique name on the host that begins with `stem`. Resumes an interrupted attempt.
    /// Concurrent attempts do not interfere: a partial file belongs to the process in its name while that process
    /// lives. The stem is chosen by us and needs no quoting; the login shell may be any.
    pub async fn upload(&self, stem: &str, bytes: &[u8], sha256: &str) -> Result<UploadedFile, TunnelError> {
        let stem = format!("{stem}.{}", &sha256[..16.min(sha256.len())]);
        let (left, resumed_at) = match self.find_partial_upload(&stem, bytes.len()).await? {
            Some((left, size)) => (format!("mv {left} $m && "), size),
            None => (String::new(), 0),
        };
        let receive = format!("umask 077; m={stem}.$$.part; {left}echo $$ && exec cat >> $m");
        let pid = self.run_checked(&sh_command(&receive), &bytes[resumed_at..]).await?;
        let path = format!("{stem}.{}.part", pid.trim());
        let summed = self.run_checked(&sh_command(&format!("sha256sum < {path}")), b"").await?;
        let summed = summed.split_whitespace().next().unwrap_or_default().to_owned();
        if summed != sha256 {
            self.run_checked(&sh_command(&format!("rm -f {path}")), b"").await?;
            let (host, here) = (self.name.clone(), sha256.to_owned());
            return Err(TunnelError::ChecksumMismatch { host, here, there: summed });
        }
        Ok(UploadedFile { path, resumed_at: resumed_at as u64 })
    }

    /// Finds a partial file that no process writes any more, and its size. Complete files are skipped: they may be
    /// about to be used.
    async fn find_partial_upload(
        &self,
        stem: &str,
        whole: usize,
    ) -> Result<Option<(String, usize)>, TunnelError> {
        let command = format!(
            "for f in {stem}.*.part; do p=${{f%.part}}; [ -f $f ] && [ ! -e /proc/${{p##*.}} ] || continue; \
             n=$(($(wc -c < $f))); [ $n -lt {whole} ] || continue; echo $f $n; break; done"
        );
        let message = self.run_checked(&sh_command(&command), b"").await?;
        let found = message.trim().split_once(' ');
        let found = found.and_then(|(path, size)| Some((path.to_owned(), size.parse().ok()?)));
        // The output of a host is not trusted.
        Ok(found.filter(|(path, size)| path.starts_with(stem) && *size < whole))
    }
}

/// Wraps a command for any login shell. The command must not contain a single quote.
fn sh_command(command: &str) -> String {
    format!("exec /bin/sh -c '{command}'")
}

fn append_bounded(kept: &mut Vec<u8>, data: &[u8]) {
    let room = OUTPUT_MAX.saturating_sub(kept.len());
    kept.extend_from_slice(&data[..data.len().min(room)]);
}
