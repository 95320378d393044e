//! The git program: its path, environment, settings and output.

use std::{
    ffi::OsString,
    io,
    os::fd::{AsRawFd as _, OwnedFd},
    path::{Path, PathBuf},
    process::Stdio,
    time::Duration,
};

use tokio::{
    io::{AsyncRead, AsyncReadExt as _},
    time::Instant,
};

use super::{LogFn, RepoError, credential, host_git};
use crate::runner::{helper_process, user_context::UserContext};

/// Time limit for all git commands of one job. A stalled transfer ends much earlier.
const TIMEOUT: Duration = Duration::from_secs(2 * 3600);
/// A transfer that is slower than this for so long counts as stalled.
const STALL_SETTINGS: [&str; 2] = ["http.lowSpeedLimit=1000", "http.lowSpeedTime=120"];
/// Interval of progress messages.
const PROGRESS_INTERVAL: Duration = Duration::from_secs(5);
/// Time to wait for the end of the output after git has exited.
const OUTPUT_DRAIN_TIMEOUT: Duration = Duration::from_secs(3);
/// Number of git's output lines kept for an error, and passed on to the log.
const ERROR_LINES_MAX: usize = 12;
const LOGGED_LINES_MAX: usize = 200;
const MAX_LINE: usize = 500;
/// Variables of the image that affect network access and certificate checks.
const INHERITED_VARIABLES: &[&str] = &[
    "LANG",
    "TMPDIR",
    "http_proxy",
    "https_proxy",
    "HTTPS_PROXY",
    "all_proxy",
    "ALL_PROXY",
    "no_proxy",
    "NO_PROXY",
    "SSL_CERT_FILE",
    "SSL_CERT_DIR",
    "CURL_CA_BUNDLE",
    "GIT_SSL_CAINFO",
    "GIT_SSL_CAPATH",
];

/// Git with its settings for one job.
pub(super) struct Git<'a> {
    program: PathBuf,
    /// The image has no git: the program is that of the host.
    is_of_host: bool,
    site: &'a UserContext,
    say: LogFn<'a>,
    /// Handle of the credential.
    secret: Option<OwnedFd>,
    /// True if our own client is used for SSH, with the key of the credential.
    own_ssh: bool,
    any_url: bool,
    until: Instant,
}

impl<'a> Git<'a> {
    pub(super) fn find(
        site: &'a UserContext,
        say: LogFn<'a>,
        secret: Option<OwnedFd>,
        own_ssh: bool,
        any_url: bool,
    ) -> Result<Self, RepoError> {
        let (program, is_of_host) = match site.program("git") {
            Some(program) => (program, false),
            None => (host_git::command().ok_or(RepoError::NoGit)?, true),
        };
        if is_of_host {
            say("the image has no git; using that of the instance");
        }
        let until = Instant::now() + TIMEOUT;
        Ok(Self { program, is_of_host, site, say, secret, own_ssh, any_url, until })
    }

    /// Runs git in `dir` to completion. `step` names it in an error; `input` is its standard input.
    pub(super) async fn run(
        &self,
        step: &'static str,
        dir: &Path,
        arguments: &[&str],
        input: Option<std::fs::File>,
    ) -> Result<(), RepoError> {
        let mut command = helper_process::user_command(&self.program, &self.site.account);
        command.args(self.settings()).args(arguments).current_dir(dir);
        command.envs(self.environment()).stdout(Stdio::null()).stderr(Stdio::piped());
        if let Some(input) = input {
            command.stdin(input);
        }
        if let Some(secret) = &self.secret {
            let number = secret.as_raw_fd();
            command.env(credential::FD_VARIABLE, number.to_string());
            #[expect(unsafe_code, reason = "git is to inherit the handle of the credential")]
            // SAFETY: one system call; no allocation, no lock.
            unsafe {
                command.pre_exec(move || credential::keep_across_exec(number));
            }
        }
        let mut group = helper_process::ProcessGroup::spawn(&mut command)
            .map_err(|source| RepoError::Start { step, source })?;
        let stderr = group.child().stderr.take();
        let left = self.until.saturating_duration_since(Instant::now());
        let mut lines = LineLogger { say: self.say, kept: Vec::new(), message: 0, progress_at: None };
        let (over, is_over) = tokio::sync::oneshot::channel::<()>();
        let wait = async {
            let ended = group.wait(left).await;
            let _ = over.send(());
            ended
        };
        // A process that left git's process group may hold the pipe open without limit.
        let late = async {
            let _ = is_over.await;
            tokio::time::sleep(OUTPUT_DRAIN_TIMEOUT).await;
        };
        let listen = async {
            tokio::select! {
                () = forward_lines(stderr, &mut lines) => {}
                () = late => {}
            }
        };
        let (ended, ()) = tokio::join!(wait, listen);
        match ended.map_err(|source| RepoError::Start { step, source })? {
            Some(status) if status.success() => Ok(()),
            Some(status) => {
                Err(RepoError::Git { step, status: status.to_string(), message: lines.kept.join("\n") })
            }
            None => Err(RepoError::Deadline { step, secs: TIMEOUT.as_secs() }),
        }
    }

    /// Disables hooks, transports that run programs, other credential stores and prompts.
    fn settings(&self) -> Vec<OsString> {
        let mut settings = vec![
            "core.hooksPath=/dev/null",
            "core.askPass=",
            "protocol.allow=never",
            "protocol.https.allow=always",
            "protocol.ssh.allow=always",
            "protocol.git.allow=always",
            "protocol.ext.allow=never",
            "credential.helper=",
            "advice.detachedHead=false",
            // No background maintenance while the clone is moved.
            "gc.auto=0",
            "maintenance.auto=false",
        ];
        settings.extend(STALL_SETTINGS);
        if self.any_url {
            settings.extend(["protocol.http.allow=always", "protocol.file.allow=always"]);
        }
        let mut arguments: Vec<OsString> =
            settings.iter().flat_map(|setting| ["-c".into(), setting.into()]).collect();
        if self.secret.is_some() && !self.own_ssh {
            let mut helper = OsString::from("credential.helper=!");
            helper.push(self.agent_command("git-credential"));
            arguments.extend(["-c".into(), helper]);
        }
        arguments
    }

    fn environment(&self) -> Vec<(OsString, OsString)> {
        let mut env: Vec<(OsString, OsString)> = INHERITED_VARIABLES
            .iter()
            .filter_map(|name| std::env::var_os(name).map(|value| (OsString::from(name), value)))
            .collect();
        let account = &self.site.account;
        env.push(("PATH".into(), self.site.path.clone()));
        env.push(("HOME".into(), account.home.clone().into()));
        env.push(("USER".into(), account.name.clone().into()));
        env.push(("LC_ALL".into(), "C".into()));
        env.push(("GIT_TERMINAL_PROMPT".into(), "0".into()));
        let ssh = if self.own_ssh {
            self.agent_command("git-ssh")
        } else {
            "ssh -o BatchMode=yes -o ConnectTimeout=30 -o ServerAliveInterval=30".into()
        };
        env.push(("GIT_SSH_COMMAND".into(), ssh));
        env.push(("GIT_SSH_VARIANT".into(), "ssh".into()));
        if self.is_of_host {
            env.extend(host_git::environment());
        }
        env
    }

    /// Returns the command with which git's shell starts the agent's binary. Quotes protect unusual characters of the
    /// path.
    fn agent_command(&self, part: &str) -> OsString {
        let path = self.site.agent.to_string_lossy().replace('\'', r"'\''");
        format!("'{path}' child {part}").into()
    }
}

/// Logs git's output, with progress now and then, and keeps the last lines.
async fn forward_lines(from: Option<impl AsyncRead + Unpin>, lines: &mut LineLogger<'_>) {
    let Some(mut from) = from else { return };
    let mut buffer = vec![0; 4096];
    let mut line = Vec::new();
    while let Ok(count @ 1..) = from.read(&mut buffer).await {
        for byte in &buffer[..count] {
            match byte {
                b'\n' => lines.log_line(&std::mem::take(&mut line)),
                b'\r' => lines.log_progress(&std::mem::take(&mut line)),
                byte if line.len() < MAX_LINE => line.push(*byte),
                _ => {}
            }
        }
    }
    lines.log_line(&line);
}

struct LineLogger<'a> {
    say: LogFn<'a>,
    kept: Vec<String>,
    message: usize,
    progress_at: Option<Instant>,
}

impl LineLogger<'_> {
    fn log_line(&mut self, line: &[u8]) {
        let text = strip_control(line);
        if text.is_empty() {
            return;
        }
        if self.message < LOGGED_LINES_MAX {
            (self.say)(&format!("git: {text}"));
        }
        self.message += 1;
        if self.kept.len() == ERROR_LINES_MAX {
            self.kept.remove(0);
        }
        self.kept.push(text);
    }

    fn log_progress(&mut self, line: &[u8]) {
        let now = Instant::now();
        if self.progress_at.is_none_or(|last| now - last >= PROGRESS_INTERVAL) {
            self.progress_at = Some(now);
            (self.say)(&format!("git: {}", strip_control(line)));
        }
    }
}

/// Removes control characters: a remote may send any.
fn strip_control(line: &[u8]) -> String {
    let text: String = String::from_utf8_lossy(line).chars().filter(|c| !c.is_control()).collect();
    text.trim().to_owned()
}

/// Opens an upload; the runner may read it, the job's user need not.
pub(super) fn open_upload(path: &Path) -> io::Result<std::fs::File> {
    std::fs::File::open(path)
}
