//! The server on this machine, which a command starts if no other server is configured.
//!
//! A server writes `running.json` into its data directory when it is ready, and removes it when it stops. The process
//! ID in it is valid only together with the start time of the process, because IDs are reused. A command that starts a
//! server holds `start.lock`, so that two concurrent commands start one server.

use std::{
    ffi::OsString,
    fs::{File, OpenOptions},
    io::{Read as _, Seek as _, SeekFrom},
    os::unix::fs::OpenOptionsExt as _,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use rustix::{
    fs::{FlockOperation, flock},
    process::{Pid, Signal, kill_process},
};
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};
use windlass_server::config::DEFAULT_PORT;

use crate::{
    error::{CliError, ErrorCode},
    home::{Home, make_private_dir, read_if_exists, write_private},
    login::Login,
    output,
};

const READY_TIMEOUT: Duration = Duration::from_secs(30);
const STOP_TIMEOUT: Duration = Duration::from_secs(30);
const POLL_INTERVAL: Duration = Duration::from_millis(10);
/// Amount of the log that a failed start prints.
const TAIL_BYTES: u64 = 2000;
const TAIL_LINES: usize = 8;
/// File with the last port of a background server.
const PORT_FILE: &str = "port";

/// A server that is ready.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
pub(crate) struct ServerProcess {
    pub(crate) pid: i32,
    /// Start time of the process, in clock ticks of the kernel.
    pub(crate) began: u64,
    pub(crate) url: String,
}

impl ServerProcess {
    pub(crate) fn this(url: &str) -> Option<Self> {
        let pid = i32::try_from(std::process::id()).ok()?;
        Some(Self { pid, began: process_start_time(pid)?, url: url.to_owned() })
    }

    fn path(data_dir: &Path) -> PathBuf {
        data_dir.join("running.json")
    }

    pub(crate) fn write(&self, data_dir: &Path) -> std::io::Result<()> {
        let text = serde_json::to_string(self).map_err(std::io::Error::other)?;
        write_private(&Self::path(data_dir), &text)
    }

    /// Removes the file unless another server has replaced it.
    pub(crate) fn remove(&self, data_dir: &Path) {
        if Self::read(data_dir).as_ref() == Some(self) {
            let _ = std::fs::remove_file(Self::path(data_dir));
        }
    }

    fn read(data_dir: &Path) -> Option<Self> {
        serde_json::from_str(&std::fs::read_to_string(Self::path(data_dir)).ok()?).ok()
    }

    /// Returns the running server.
    pub(crate) fn find(data_dir: &Path) -> Option<Self> {
        Self::read(data_dir).filter(Self::is_alive)
    }

    fn is_alive(&self) -> bool {
        process_start_time(self.pid) == Some(self.began)
    }
}

/// Start time of a process; `None` if it does not exist or is a zombie.
fn process_start_time(pid: i32) -> Option<u64> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The program name is in parentheses and may contain anything, including parentheses.
    let rest = stat.rsplit_once(") ")?.1;
    let mut fields = rest.split(' ');
    if fields.next()? == "Z" {
        return None;
    }
    fields.nth(18)?.parse().ok()
}

fn token_file(data_dir: &Path) -> PathBuf {
    data_dir.join("admin-token")
}

pub(crate) fn log_file(data_dir: &Path) -> PathBuf {
    data_dir.join("server.log")
}

/// Returns the local server, if it is running and its token is known.
pub(crate) fn find(home: &Home) -> Result<Option<Login>, CliError> {
    let dir = home.server_dir();
    let Some(running) = ServerProcess::find(&dir) else { return Ok(None) };
    let token = read_if_exists(&token_file(&dir))?;
    Ok(token.map(|token| Login {
        url: running.url,
        token: token.trim().to_owned(),
        project: None,
        certificate: None,
        name: None,
    }))
}

/// Returns the local server for a command, and prints a message if it had to be started.
pub(crate) fn find_or_start(home: &Home) -> Result<Login, CliError> {
    let (login, started) = start_once(home, StartRequest::None)?;
    if started {
        output::print_message(&format!(
            "No server is configured: started one at {} (data and log in {}; stop it with `windlass server stop`).",
            login.url,
            home.server_dir().display()
        ));
    }
    Ok(login)
}

/// Options for starting a server.
pub(crate) enum StartRequest {
    /// Started implicitly by another command.
    None,
    Flags {
        flags: Vec<OsString>,
        admin_token: Option<String>,
    },
}

/// Returns the server of this home directory, and whether it was started by this call.
pub(crate) fn start_once(home: &Home, requests: StartRequest) -> Result<(Login, bool), CliError> {
    if let Some(found) = find(home)? {
        return Ok((found, false));
    }
    let dir = home.server_dir();
    make_private_dir(&dir)
        .map_err(|error| CliError::from_error(&format!("failed to create `{}`", dir.display()), &error))?;
    let _lock = lock(&dir)?;
    // The previous holder of the lock may have started it.
    if let Some(found) = find(home)? {
        return Ok((found, false));
    }
    if let Some(running) = ServerProcess::find(&dir) {
        return Err(CliError::new(format!("cannot use the server at {}", running.url))
            .code(ErrorCode::NoToken)
            .why("it was started manually, so its token is not known here")
            .hint(format!(
                "run `windlass login --url {} --token TOKEN` with the token in `first-admin-token` of its data directory",
                running.url
            )));
    }
    Ok((start(&dir, requests)?, true))
}

/// Acquires the lock, held until drop. Blocks while another command starts the server.
fn lock(dir: &Path) -> Result<File, CliError> {
    let path = dir.join("start.lock");
    let failed =
        |error: std::io::Error| CliError::from_error(&format!("failed to lock `{}`", path.display()), &error);
    let file = OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(false)
        .mode(0o600)
        .open(&path)
        .map_err(failed)?;
    let until = Instant::now() + READY_TIMEOUT;
    loop {
        match flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => return Ok(file),
            Err(rustix::io::Errno::WOULDBLOCK) if Instant::now() < until => thread::sleep(POLL_INTERVAL),
            Err(error) => return Err(failed(error.into())),
        }
    }
}

/// Last port of the server, so that known URLs stay valid.
fn last_port(dir: &Path) -> u16 {
    let kept = std::fs::read_to_string(dir.join(PORT_FILE)).ok();
    kept.and_then(|text| text.trim().parse().ok()).unwrap_or(DEFAULT_PORT)
}

fn save_port(dir: &Path, url: &str) {
    let Some((_, port)) = url.rsplit_once(':') else { return };
    if port != last_port(dir).to_string()
        && let Err(error) = write_private(&dir.join(PORT_FILE), &format!("{port}\n"))
    {
        tracing::warn!(%error, "failed to store the port of the server");
    }
}

fn start(dir: &Path, requests: StartRequest) -> Result<Login, CliError> {
    let log = log_file(dir);
    let problem = |error: &dyn std::error::Error| {
        CliError::from_error("failed to start a local server", error).code(ErrorCode::LocalServer)
    };
    let (flags, given) = match requests {
        StartRequest::None => (None, None),
        StartRequest::Flags { flags, admin_token } => (Some(flags), admin_token),
    };
    let token = load_or_create_token(dir, given)?;
    let open = || OpenOptions::new().append(true).create(true).mode(0o600).open(&log);
    let (out, err) = (open().map_err(|e| problem(&e))?, open().map_err(|e| problem(&e))?);
    let from = out.metadata().map_or(0, |data| data.len());
    let program = std::env::current_exe().map_err(|e| problem(&e))?;
    let mut command = Command::new(program);
    command
        .args(["server", "--background", "--usual-port", &last_port(dir).to_string(), "--data-dir"])
        .arg(dir)
        // Not on the command line, which all users of the machine can read.
        .env("WINDLASS_SERVER_ADMIN_TOKEN", &token)
        .env_remove("WINDLASS_SERVER_ADMIN_TOKEN_FILE")
        .env_remove("WINDLASS_SERVER_DATA_DIR");
    match flags {
        Some(flags) => command.args(flags),
        // Settings for another server do not apply to this one.
        None => command
            .env_remove("WINDLASS_SERVER_DATABASE_URL")
            .env_remove("WINDLASS_SERVER_HOST")
            .env_remove("WINDLASS_SERVER_PORT"),
    };
    let mut child = command
        .stdin(Stdio::null())
        .stdout(out)
        .stderr(err)
        .current_dir("/")
        .spawn()
        .map_err(|e| problem(&e))?;
    let running = wait_until_ready(dir, &mut child, &log, from)?;
    save_port(dir, &running.url);
    Ok(Login { url: running.url, token, project: None, certificate: None, name: None })
}

/// Returns the given token, or that of an earlier start, or a new one.
fn load_or_create_token(dir: &Path, given: Option<String>) -> Result<String, CliError> {
    let path = token_file(dir);
    let kept = read_if_exists(&path)?.map(|text| text.trim().to_owned()).filter(|text| !text.is_empty());
    let token = match (given, kept) {
        (Some(given), Some(kept)) if given != kept => given,
        (None, Some(kept)) | (Some(_), Some(kept)) => return Ok(kept),
        (Some(given), None) => given,
        (None, None) => generate_token()?,
    };
    write_private(&path, &format!("{token}\n"))
        .map_err(|error| CliError::from_error(&format!("failed to write `{}`", path.display()), &error))?;
    Ok(token)
}

/// Generates a token of 256 random bits.
pub(crate) fn generate_token() -> Result<String, CliError> {
    let mut bytes = [0_u8; 32];
    getrandom::fill(&mut bytes)
        .map_err(|error| CliError::from_error("failed to generate a token", &error))?;
    Ok(hex::encode(bytes))
}

pub(crate) fn sha256(bytes: &[u8]) -> String {
    hex::encode(Sha256::digest(bytes))
}

fn wait_until_ready(dir: &Path, child: &mut Child, log: &Path, from: u64) -> Result<ServerProcess, CliError> {
    let until = Instant::now() + READY_TIMEOUT;
    let failed = |why: String| {
        CliError::new("failed to start a local server")
            .code(ErrorCode::LocalServer)
            .why(why)
            .hint(format!("see its log, {}", log.display()))
    };
    loop {
        if let Some(running) =
            ServerProcess::find(dir).filter(|running| u32::try_from(running.pid) == Ok(child.id()))
        {
            return Ok(running);
        }
        if let Ok(Some(status)) = child.try_wait() {
            return Err(failed(format!("it ended with {status}\n{}", read_log_tail(log, from))));
        }
        if Instant::now() > until {
            return Err(failed(format!("it was not ready after {} s", READY_TIMEOUT.as_secs())));
        }
        thread::sleep(POLL_INTERVAL);
    }
}

/// Returns the last log lines since `from`.
fn read_log_tail(log: &Path, from: u64) -> String {
    let read = || -> std::io::Result<String> {
        let mut file = File::open(log)?;
        let from = from.max(file.metadata()?.len().saturating_sub(TAIL_BYTES));
        file.seek(SeekFrom::Start(from))?;
        let mut bytes = Vec::new();
        file.take(TAIL_BYTES).read_to_end(&mut bytes)?;
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    };
    let text = read().unwrap_or_default();
    let lines: Vec<&str> = text.lines().collect();
    lines[lines.len().saturating_sub(TAIL_LINES)..].join("\n")
}

/// Stops the server of a data directory and waits for its end. `None` if none is running.
pub(crate) fn stop(data_dir: &Path) -> Result<Option<ServerProcess>, CliError> {
    let Some(running) = ServerProcess::find(data_dir) else { return Ok(None) };
    let what = || format!("failed to stop the server at {} (process {})", running.url, running.pid);
    if let Some(pid) = Pid::from_raw(running.pid) {
        kill_process(pid, Signal::TERM)
            .map_err(|error| CliError::from_error(&what(), &error).code(ErrorCode::LocalServer))?;
    }
    let until = Instant::now() + STOP_TIMEOUT;
    while running.is_alive() {
        if Instant::now() > until {
            let why = format!("it is still running after {} s", STOP_TIMEOUT.as_secs());
            return Err(CliError::new(what()).code(ErrorCode::LocalServer).why(why));
        }
        thread::sleep(POLL_INTERVAL);
    }
    Ok(Some(running))
}

#[cfg(test)]
mod tests {
    use super::{ServerProcess, process_start_time};

    #[test]
    fn a_process_with_a_reused_pid_is_not_the_server() {
        let this = ServerProcess::this("http://127.0.0.1:1").unwrap();
        assert!(this.is_alive());
        assert!(!ServerProcess { began: this.began + 1, ..this.clone() }.is_alive());
        assert_eq!(process_start_time(0), None);
    }
}
