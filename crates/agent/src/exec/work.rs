//! The program of a container as a process of this machine: its directory, its group, its output and its end.

use std::{
    fs::{self, File},
    io,
    os::unix::{fs::PermissionsExt as _, process::ExitStatusExt as _},
    path::{Path, PathBuf},
    process::{ExitStatus, Stdio},
};

use rustix::process::{Pid, Signal, kill_process_group, set_parent_process_death_signal};
use serde_json::{Value, json};
use tokio::{
    io::{AsyncRead, AsyncReadExt as _},
    process::{Child, Command},
    sync::mpsc,
};

use super::Stopped;
use crate::cgroup::{
    Hierarchies,
    task::{Groups, Limits, TaskGroup},
};

/// Pieces of output that wait to be taken. A program that writes faster waits.
const PIECES_MAX: usize = 64;
const PIECE: usize = 64 * 1024;

pub(super) struct Work {
    command: Vec<String>,
    environment: Vec<(String, String)>,
    root: PathBuf,
    cwd: PathBuf,
    group: TaskGroup,
    oom_before: u64,
}

pub(super) struct Running {
    pub(super) child: Child,
    pub(super) output: mpsc::Receiver<(&'static str, Vec<u8>)>,
    leader: Option<Pid>,
}

impl Running {
    pub(super) fn ask_to_end(&self) {
        if let Some(leader) = self.leader {
            // One that is gone already needs no signal.
            let _ = kill_process_group(leader, Signal::TERM);
        }
    }
}

fn texts(value: &Value) -> Vec<String> {
    value.as_array().into_iter().flatten().filter_map(Value::as_str).map(str::to_owned).collect()
}

/// Inside the root, whatever the path says.
fn inside(root: &Path, target: &str) -> PathBuf {
    let parts = Path::new(target).components().filter_map(|part| match part {
        std::path::Component::Normal(part) => Some(part),
        std::path::Component::Prefix(_)
        | std::path::Component::RootDir
        | std::path::Component::CurDir
        | std::path::Component::ParentDir => None,
    });
    parts.fold(root.to_owned(), |path, part| path.join(part))
}

impl Work {
    /// Everything that can fail without the program having run.
    pub(super) fn prepare(
        name: &str,
        record: &Value,
        secrets: &Value,
        dir: &Path,
        token: &str,
        url: &str,
    ) -> Result<Self, Stopped> {
        let command = texts(&record["command"]);
        let root = dir.join("root");
        fs::create_dir_all(&root).map_err(Stopped::Machine)?;
        fs::set_permissions(&root, fs::Permissions::from_mode(0o700)).map_err(Stopped::Machine)?;
        mount(&root, &record["mounts"])?;
        mount(&root, secrets)?;
        let cwd = match record["cwd"].as_str() {
            None | Some("" | ".") => root.clone(),
            Some(cwd) => inside(&root, cwd),
        };
        fs::create_dir_all(&cwd).map_err(Stopped::Machine)?;
        let path = record["environment"]["PATH"].as_str().map(str::to_owned);
        let path = path.or_else(|| std::env::var("PATH").ok()).unwrap_or_else(|| "/usr/bin:/bin".to_owned());
        let program = command.first().cloned().unwrap_or_default();
        if !is_there(&program, &path, &cwd) {
            let why = format!("the program `{program}` is not on this machine");
            return Err(Stopped::Impossible { reason: "start_failed", why });
        }
        let mut environment = vec![
            ("PATH".to_owned(), path),
            ("HOME".to_owned(), root.display().to_string()),
            ("WINDLASS_ROOT".to_owned(), root.display().to_string()),
            ("ARVADOS_API_HOST".to_owned(), url.trim_start_matches("http://").to_owned()),
            ("ARVADOS_API_TOKEN".to_owned(), token.to_owned()),
        ];
        let own = record["environment"].as_object().into_iter().flatten();
        environment.extend(own.filter_map(|(name, value)| Some((name.clone(), value.as_str()?.to_owned()))));
        let wants = &record["runtime_constraints"];
        let limits = Limits { cpu: None, memory: wants["ram"].as_u64(), pids: None };
        let groups = Groups::new("exec", Hierarchies::mounted().map_err(Stopped::Machine)?);
        let (group, unenforced) = groups.make(name, &limits);
        for limit in unenforced {
            super::tell(&limit.to_string());
        }
        let oom_before = group.group.oom_kills();
        Ok(Self { command, environment, root, cwd, group, oom_before })
    }

    pub(super) fn start(&self) -> io::Result<Running> {
        // Opened here: what is written there between fork and exec is one call.
        let door = |group: &PathBuf| File::options().write(true).open(group.join("cgroup.procs")).ok();
        let doors: Vec<File> = self.group.directories().iter().filter_map(door).collect();
        let mut words = self.command.iter();
        let mut command = Command::new(words.next().ok_or(io::ErrorKind::InvalidInput)?);
        command
            .args(words)
            .env_clear()
            .envs(self.environment.iter().map(|(name, value)| (name, value)))
            .current_dir(&self.cwd)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .process_group(0);
        // An executor that is killed takes the program along: nobody would hear of its end.
        #[expect(unsafe_code, reason = "what happens between fork and exec cannot be said otherwise")]
        // SAFETY: a few system calls, which allocate nothing and take no lock.
        unsafe {
            command.pre_exec(move || {
                for door in &doors {
                    let _ = rustix::io::write(door, b"0");
                }
                Ok(set_parent_process_death_signal(Some(Signal::KILL))?)
            });
        }
        let mut child = command.spawn()?;
        let (pieces, output) = mpsc::channel(PIECES_MAX);
        if let Some(stdout) = child.stdout.take() {
            tokio::spawn(read("stdout", stdout, pieces.clone()));
        }
        if let Some(stderr) = child.stderr.take() {
            tokio::spawn(read("stderr", stderr, pieces));
        }
        let leader = child.id().and_then(|id| Pid::from_raw(i32::try_from(id).ok()?));
        Ok(Running { child, output, leader })
    }

    pub(super) fn kill(&self) {
        self.group.kill();
    }

    /// The last write: how it ended, and what it used.
    pub(super) fn ending(&self, status: ExitStatus, told: Option<&'static str>) -> Value {
        let usage = self.group.group.usage();
        let mut said = json!({ "usage": { "cpu_us": usage.cpu_us } });
        if self.group.group.oom_kills() > self.oom_before {
            said["reason"] = "oom_killed".into();
            said["error"] = "it used more memory than it asked for".into();
            return json!({ "state": "Complete", "exit_code": 137, "runtime_status": said });
        }
        match told {
            Some("max_run_time") => {
                said["reason"] = "max_run_time".into();
                said["error"] = "it ran longer than it may".into();
                json!({ "state": "Cancelled", "runtime_status": said })
            }
            Some(_) => {
                said["error"] = "it was told to stop".into();
                json!({ "state": "Cancelled", "runtime_status": said })
            }
            None => {
                // As a shell says it.
                let code = status.code().unwrap_or_else(|| 128 + status.signal().unwrap_or(0));
                json!({ "state": "Complete", "exit_code": code, "runtime_status": said })
            }
        }
    }

    pub(super) fn clean(&self) {
        if let Err(error) = self.group.remove() {
            super::tell(&format!("remove the control group: {error}"));
        }
        // Secrets do not stay behind.
        let _ = fs::remove_dir_all(&self.root);
    }
}

/// Directories and small files; what needs a store of files cannot be had here.
fn mount(root: &Path, mounts: &Value) -> Result<(), Stopped> {
    for (target, mount) in mounts.as_object().into_iter().flatten() {
        let path = inside(root, target);
        let kind = mount["kind"].as_str().unwrap_or_default();
        let content = match kind {
            "tmp" => {
                fs::create_dir_all(&path).map_err(Stopped::Machine)?;
                continue;
            }
            "text" => mount["content"].as_str().unwrap_or_default().to_owned(),
            "json" => mount["content"].to_string(),
            other => {
                let why = format!("mount `{target}` of kind `{other}` cannot be had here");
                return Err(Stopped::Impossible { reason: "start_failed", why });
            }
        };
        if let Some(above) = path.parent() {
            fs::create_dir_all(above).map_err(Stopped::Machine)?;
        }
        fs::write(&path, content).map_err(Stopped::Machine)?;
        fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).map_err(Stopped::Machine)?;
    }
    Ok(())
}

fn is_there(program: &str, path: &str, cwd: &Path) -> bool {
    if program.contains('/') {
        return cwd.join(program).is_file();
    }
    !program.is_empty() && path.split(':').any(|dir| Path::new(dir).join(program).is_file())
}

async fn read(
    name: &'static str,
    mut from: impl AsyncRead + Unpin,
    to: mpsc::Sender<(&'static str, Vec<u8>)>,
) {
    let mut buffer = vec![0; PIECE];
    while let Ok(length @ 1..) = from.read(&mut buffer).await {
        if to.send((name, buffer[..length].to_vec())).await.is_err() {
            break;
        }
    }
}
