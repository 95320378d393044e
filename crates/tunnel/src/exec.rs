//! Commands on a host, and files brought there.

use russh::ChannelMsg;

use crate::{Connection, TunnelError};

/// Output kept of a command; more is thrown away.
const OUTPUT_MAX: usize = 1 << 20;
const UPLOAD_CHUNK: usize = 256 * 1024;

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CommandOutput {
    /// `None`: killed by a signal, or the connection went.
    pub status: Option<u32>,
    pub stdout: Vec<u8>,
    pub stderr: Vec<u8>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UploadedFile {
    /// Where it is now, with the right checksum. Nobody else uses the name.
    pub path: String,
    /// Bytes that were there from an earlier, broken attempt.
    pub resumed_at: u64,
}

impl Connection {
    /// Runs a shell command with `stdin`, to its end.
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
        // A command may end without reading all its input: that is its own affair.
        let (_sent, received) = tokio::join!(send, receive);
        received.map_err(failed)?;
        let _ = to.close().await;
        Ok(output)
    }

    /// Runs a command that must succeed, and gives back what it said.
    pub async fn run_checked(&self, command: &str, stdin: &[u8]) -> Result<String, TunnelError> {
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

    /// Brings a program to the host, to a name of its own that begins with `stem`. It goes on where a broken attempt
    /// stopped; attempts at the same time do not touch each other: a part belongs to the process in its name, while
    /// that lives. The stem is ours and needs no quoting; the login shell may be any.
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

    /// A part that nobody writes any more, and its size. One that is whole may be about to be used.
    async fn find_partial_upload(
        &self,
        stem: &str,
        whole: usize,
    ) -> Result<Option<(String, usize)>, TunnelError> {
        let look = format!(
            "for f in {stem}.*.part; do p=${{f%.part}}; [ -f $f ] && [ ! -e /proc/${{p##*.}} ] || continue; \
             n=$(($(wc -c < $f))); [ $n -lt {whole} ] || continue; echo $f $n; break; done"
        );
        let said = self.run_checked(&sh_command(&look), b"").await?;
        let found = said.trim().split_once(' ');
        let found = found.and_then(|(path, size)| Some((path.to_owned(), size.parse().ok()?)));
        // Hosts may say anything.
        Ok(found.filter(|(path, size)| path.starts_with(stem) && *size < whole))
    }
}

/// The same command for whatever shell the user has: it contains no single quote.
fn sh_command(command: &str) -> String {
    format!("exec /bin/sh -c '{command}'")
}

fn append_bounded(kept: &mut Vec<u8>, data: &[u8]) {
    let room = OUTPUT_MAX.saturating_sub(kept.len());
    kept.extend_from_slice(&data[..data.len().min(room)]);
}
