//! Credential of git that no other process can read.
//!
//! It is written to an anonymous file in memory whose handle git inherits; no variable, argument or file on disk
//! contains it. When git needs it, git starts the agent's binary, which reads the handle and replies. It replies only
//! for the host that the credential is for, so a submodule elsewhere, or a redirect, gets nothing. When the last of
//! these processes exits, the credential is gone.

use std::{
    fs::File,
    io::{self, Read as _, Write as _},
    os::{
        fd::{FromRawFd as _, OwnedFd, RawFd},
        unix::fs::FileExt as _,
    },
    process::ExitCode,
};

use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, memfd_create};
use serde::{Deserialize, Serialize};

/// Variable with the number of the handle for the child.
pub(super) const FD_VARIABLE: &str = "WINDLASS_CREDENTIAL_FD";
const MAX_BYTES: u64 = 1 << 20;
/// Maximum size in bytes of a request from git.
const REQUEST_BYTES_MAX: u64 = 64 << 10;

#[derive(Serialize, Deserialize)]
pub(super) struct Credential {
    /// Host as written in the URL.
    pub(super) host: String,
    pub(super) secret: Secret,
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Secret {
    Login { scheme: String, username: String, password: String },
    PrivateKey(String),
}

impl Credential {
    /// Writes it to a file that only processes which inherit the handle can read.
    pub(super) fn to_memfd(&self) -> io::Result<OwnedFd> {
        let fd = memfd_create("credential", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
        let file = File::from(fd);
        file.write_all_at(&serde_json::to_vec(self)?, 0)?;
        fcntl_add_seals(&file, SealFlags::WRITE | SealFlags::GROW | SealFlags::SHRINK | SealFlags::SEAL)?;
        Ok(file.into())
    }

    /// Reads the inherited handle, in the child.
    pub(super) fn from_inherited_fd() -> io::Result<Self> {
        let number: RawFd = std::env::var(FD_VARIABLE)
            .ok()
            .and_then(|text| text.parse().ok())
            .filter(|number| *number > 2)
            .ok_or_else(|| io::Error::new(io::ErrorKind::NotFound, "no credential was passed"))?;
        #[expect(unsafe_code, reason = "a handle that was inherited is known by its number only")]
        // SAFETY: the number was passed by the runner for this use; nothing else in this process owns it, and a number
        // that is not open makes the reads below fail.
        let file = unsafe { File::from_raw_fd(number) };
        let mut text = Vec::new();
        let mut at = 0;
        let mut buffer = [0; 4096];
        // Not `read`: other processes share the position.
        while let count @ 1.. = file.read_at(&mut buffer, at)? {
            text.extend_from_slice(&buffer[..count]);
            at += count as u64;
            if at > MAX_BYTES {
                return Err(io::ErrorKind::FileTooLarge.into());
            }
        }
        Ok(serde_json::from_slice(&text)?)
    }
}

/// Keeps the handle open for the next program. For use between fork and exec.
pub(super) fn keep_across_exec(fd: RawFd) -> io::Result<()> {
    #[expect(unsafe_code, reason = "the handle is borrowed across fork by its number")]
    // SAFETY: the runner keeps the handle open until the child was started.
    let fd = unsafe { std::os::fd::BorrowedFd::borrow_raw(fd) };
    rustix::io::fcntl_setfd(fd, rustix::io::FdFlags::empty()).map_err(Into::into)
}

#[derive(Debug, clap::Args)]
pub struct Args {
    /// `get`, `store` or `erase`
    operation: String,
}

/// Replies to git's request on standard input; prints nothing if the request is for another host.
pub fn main(args: &Args) -> ExitCode {
    if args.operation != "get" {
        return ExitCode::SUCCESS;
    }
    let mut question = String::new();
    let requested = io::stdin().lock().take(REQUEST_BYTES_MAX).read_to_string(&mut question);
    let answered = requested.and_then(|_| Credential::from_inherited_fd()).and_then(|credential| {
        let message = credential_reply(&credential, &question).unwrap_or_default();
        io::stdout().lock().write_all(message.as_bytes())
    });
    if answered.is_ok() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn credential_reply(credential: &Credential, question: &str) -> Option<String> {
    let requested = |key: &str| question.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix('='));
    let Secret::Login { scheme, username, password } = &credential.secret else { return None };
    let fits = requested("protocol") == Some(scheme) && requested("host") == Some(&credential.host);
    fits.then(|| format!("username={username}\npassword={password}\n"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_git_credential_is_given_only_to_its_host_and_scheme() {
        let login = |name: &str| name.to_owned();
        let secret =
            Secret::Login { scheme: login("https"), username: login("oauth2"), password: login("t0ken") };
        let credential = Credential { host: login("h:8443"), secret };
        let request = |protocol: &str, host: &str| {
            credential_reply(
                &credential,
                &format!("capability[]=authtype\nprotocol={protocol}\nhost={host}\n\n"),
            )
        };
        assert_eq!(request("https", "h:8443").unwrap(), "username=oauth2\npassword=t0ken\n");
        assert_eq!(request("https", "h"), None);
        assert_eq!(request("https", "evil.example"), None);
        assert_eq!(request("http", "h:8443"), None);
        assert_eq!(credential_reply(&credential, ""), None);
        let key = Credential { host: login("h"), secret: Secret::PrivateKey(login("k")) };
        assert_eq!(credential_reply(&key, "protocol=ssh\nhost=h\n"), None);
    }
}
