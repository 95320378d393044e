//! The monitor of a container: a small process that starts it, waits for its end and records it.
//!
//! It is independent of the shim, so the exit status of a container is known whatever happens to the shim. It has a
//! mount namespace in which it mounts the root file system of the container: the mount disappears with the monitor and
//! the container, and is never left behind on the host.
//!
//! It starts nothing before it is recorded: its standard input is a socket, on which it receives a [`StartRequest`] and
//! then, when the monitor is recorded, [`GO`]. Without that it ends, and so does all that it has prepared.

use std::{
    fs,
    io::{self, BufRead as _, BufReader, PipeReader, Read, Write as _},
    net::Shutdown,
    os::{
        fd::{AsFd, AsRawFd as _, BorrowedFd},
        unix::{net::UnixStream, process::CommandExt as _},
    },
    path::{Path, PathBuf},
    process::{Command, ExitCode, Stdio},
    time::Duration,
};

use nix::sys::signal::{SigSet, SigmaskHow, sigprocmask};
use rustix::{
    mount::{MountFlags, MountPropagationFlags, UnmountFlags, mount, mount_change, unmount},
    process::{Pid, WaitOptions, getpid, set_child_subreaper, wait},
    thread::{LinkNameSpaceType, UnshareFlags, move_into_link_name_space, unshare_unsafe},
};
use serde::{Deserialize, Serialize};

use super::{
    config::Bundle,
    network::{ContainerNetwork, NetworkRequest, UserNetworkRequest, serve_ports},
    program::rootless_option,
    record::{
        ContainerEnd, END_FILE, NEVER_STARTED_FILE, PORTS_FILE, PROCESS_FILE, write_durably, write_file,
    },
    rootless,
};
use crate::{
    cgroup::{Hierarchies, task::TaskGroups},
    isolation::user_map::{OutsideProcess, UserMap},
    proc::{self, ProcessId},
};

const OUTPUT_FILE: &str = "output.log";
const OLDER_OUTPUT_FILE: &str = "output.older.log";
/// Maximum size of each of the two files with the container's own output, which only receives messages of a runner
/// that cannot write its log.
const OUTPUT_BYTES_MAX: u64 = 256 << 10;
const PID_FILE: &str = "pid";
const RUNTIME_LOG: &str = "runtime.log";
const STATE_DIR: &str = "state";
const REQUEST_BYTES_MAX: u64 = 1 << 20;
const OOM_SCORE: &str = "/proc/self/oom_score_adj";
const OOM_SCORE_LAST: &str = "-900";
/// Maximum length of an error message of the OCI runtime.
const ERROR_CHARS_MAX: usize = 1000;
/// Time for the last output after the end of the container.
const OUTPUT_TIMEOUT: Duration = Duration::from_secs(2);

/// Permission to start the container.
pub(super) const GO: &[u8] = b"go\n";

#[derive(Debug, clap::Args)]
pub struct Args {
    /// Directory of the container
    #[arg(long)]
    bundle: PathBuf,
}

/// Request of the shim.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct StartRequest {
    /// Path of `crun` or `runc`.
    pub(super) program: PathBuf,
    pub(super) id: String,
    /// Number of layers.
    pub(super) layers: usize,
    /// Directories of control groups that the monitor enters.
    pub(super) enter: Vec<PathBuf>,
    /// Identifies the shim's home in names of control groups, and the group of the container below it.
    pub(super) home_id: String,
    pub(super) group: String,
    /// Mount of the control groups of version 2, if the program refuses hosts that have both versions.
    pub(super) hidden_mount: Option<PathBuf>,
    pub(super) hostname: String,
    /// `None`: the network of the host.
    pub(super) network: Option<NetworkRequest>,
    /// User namespace of the container, if the agent is not root.
    pub(super) map: Option<UserMap>,
    /// Network of a container in a user namespace; `None`: that of the host.
    pub(super) user_network: Option<UserNetworkRequest>,
}

/// Reply to the shim.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum StartReply {
    Started(ProcessId),
    Failed(String),
}

#[derive(Debug, thiserror::Error)]
#[error("{what}: {source}")]
pub(super) struct StartError {
    what: String,
    source: io::Error,
}

pub(super) fn failed<E: Into<io::Error>>(what: impl Into<String>) -> impl FnOnce(E) -> StartError {
    let what = what.into();
    |source| StartError { what, source: source.into() }
}

/// Entry point of the monitor.
pub fn main(args: &Args) -> ExitCode {
    let bundle = Bundle::at(args.bundle.clone());
    // A signal for the session of the shim must not end the monitor. Programs that it starts do not inherit the mask.
    let _ = sigprocmask(SigmaskHow::SIG_BLOCK, Some(&SigSet::all()), None);
    let never_started = || {
        let _ = fs::write(bundle.root().join(NEVER_STARTED_FILE), "");
        ExitCode::FAILURE
    };
    let Some((request, reply, mut messages)) = receive_request() else { return never_started() };
    let groups = TaskGroups::new(&request.home_id, Hierarchies::mounted().unwrap_or_default());
    let prepared = prepare(&bundle, &request);
    if !receive_go(&mut messages) {
        return never_started();
    }
    // The process outside of a user namespace lives as long as this one.
    let (prepared, _outside) = match prepared {
        Ok(Prepared { network, outside }) => (Ok(network), outside),
        Err(error) => (Err(error), None),
    };
    let started = prepared.and_then(|network| start(&bundle, &request, network));
    let (end, code) = match started {
        Ok((process, output)) => {
            send(reply, &StartReply::Started(process));
            let code = wait_for(process.pid);
            wait_for_output(&output);
            let group = groups.find(&request.group).group;
            (ContainerEnd { code, oom_killed: group.oom_kills() > 0, start_error: None }, ExitCode::SUCCESS)
        }
        Err(error) => {
            let message = error.to_string();
            let end = ContainerEnd { start_error: Some(message.clone()), ..ContainerEnd::default() };
            let _ = write_file(&bundle.root().join(END_FILE), &end);
            send(reply, &StartReply::Failed(message));
            return ExitCode::FAILURE;
        }
    };
    match write_durably(&bundle.root().join(END_FILE), &end) {
        Ok(()) => code,
        Err(_) => ExitCode::FAILURE,
    }
}

type Messages = BufReader<io::Take<UnixStream>>;

/// Waits for the request; `None` if the shim has ended.
fn receive_request() -> Option<(StartRequest, UnixStream, Messages)> {
    let socket = UnixStream::from(io::stdin().as_fd().try_clone_to_owned().ok()?);
    let mut messages = BufReader::new(socket.try_clone().ok()?.take(REQUEST_BYTES_MAX));
    let mut line = String::new();
    messages.read_line(&mut line).ok()?;
    Some((serde_json::from_str(&line).ok()?, socket, messages))
}

fn receive_go(messages: &mut Messages) -> bool {
    let mut line = Vec::new();
    messages.read_until(b'\n', &mut line).is_ok() && line == GO
}

fn send(mut to: UnixStream, reply: &StartReply) {
    // A shim that was killed meanwhile finds the files.
    let _ = to.write_all(&serde_json::to_vec(reply).unwrap_or_default());
    // The standard input is the same socket and stays open.
    let _ = to.shutdown(Shutdown::Both);
}

/// Signals the end of the output.
type OutputEnd = std::sync::mpsc::Receiver<()>;

/// Prepares everything that ends with this process: mounts, and the network of the container.
pub(super) fn prepare(bundle: &Bundle, request: &StartRequest) -> Result<Prepared, StartError> {
    for directory in &request.enter {
        let path = directory.join("cgroup.procs");
        fs::write(&path, "0").map_err(failed(format!("failed to enter {}", directory.display())))?;
    }
    let _ = fs::write(OOM_SCORE, OOM_SCORE_LAST);
    // The first process of the container becomes a child of this process when the OCI runtime exits.
    set_child_subreaper(Some(getpid())).map_err(failed("failed to adopt the container"))?;
    let mut outside = match &request.map {
        None => None,
        Some(map) => Some(map.enter().map_err(failed("failed to create a user namespace"))?),
    };
    mount_root(bundle, request)?;
    let network = match (&request.network, &request.user_network, &mut outside) {
        (Some(network), _, _) => {
            Some(ContainerNetwork::create(network).map_err(failed("failed to connect the container"))?)
        }
        (None, Some(network), Some(outside)) => Some(
            ContainerNetwork::enter(network, outside).map_err(failed("failed to connect the container"))?,
        ),
        (None, _, _) => None,
    };
    if let Some(network) = &network {
        write_own_name(bundle, request, network).map_err(failed("failed to write the hosts file"))?;
    }
    // Nothing that it started has to end with the container.
    let outside = outside.filter(|_| request.user_network.is_some());
    Ok(Prepared { network, outside })
}

/// Parts of a container that end with this process.
pub(super) struct Prepared {
    pub(super) network: Option<ContainerNetwork>,
    /// Process outside of a user namespace that must live as long as this one.
    pub(super) outside: Option<OutsideProcess>,
}

fn start(
    bundle: &Bundle,
    request: &StartRequest,
    network: Option<ContainerNetwork>,
) -> Result<(ProcessId, OutputEnd), StartError> {
    let (read, write) = io::pipe().map_err(failed("failed to create a pipe"))?;
    let output = copy_output(bundle, read)?;
    let stdout = write.try_clone().map_err(failed("failed to create a pipe"))?;
    let started = run_program(bundle, request, [stdout.into(), write.into()], network.as_ref());
    if let Err(error) = started {
        wait_for_output(&output);
        return Err(start_error(bundle, error));
    }
    let process = first_process(bundle)?;
    write_file(&bundle.root().join(PROCESS_FILE), &process)
        .map_err(failed("failed to record the process"))?;
    if let Some(network) = network {
        let ports = network.ports().map_err(failed("failed to publish ports"))?;
        write_file(&bundle.root().join(PORTS_FILE), &ports).map_err(failed("failed to record the ports"))?;
        // The namespace is closed here: it ends with the container.
        serve_ports(network.listeners).map_err(failed("failed to publish ports"))?;
    }
    Ok((process, output))
}

/// Describes why the OCI runtime failed.
pub(super) fn start_error(bundle: &Bundle, source: io::Error) -> StartError {
    StartError { what: format!("failed to start the container: {}", runtime_message(bundle)), source }
}

/// Returns the first process of a container that was started.
pub(super) fn first_process(bundle: &Bundle) -> Result<ProcessId, StartError> {
    let pid = fs::read_to_string(bundle.root().join(PID_FILE))
        .map_err(failed("the OCI runtime wrote no process id"))?;
    let stat = pid.trim().parse().map_err(io::Error::other).and_then(proc::stat);
    let missing = || io::Error::from(io::ErrorKind::NotFound);
    Ok(stat.and_then(|stat| stat.ok_or_else(missing)).map_err(failed("no such process"))?.name)
}

/// Writes the address of a container with a separate network to its `/etc/hosts`.
fn write_own_name(bundle: &Bundle, request: &StartRequest, network: &ContainerNetwork) -> io::Result<()> {
    let path = bundle.files().join("hosts");
    // A monitor that was never recorded may have added another address.
    let own = format!("\t{}", request.hostname);
    let write = |text: String| {
        let others = text.lines().filter(|line| !line.ends_with(&own)).map(|line| format!("{line}\n"));
        fs::write(&path, others.collect::<String>() + &format!("{}{own}\n", network.address))
    };
    fs::read_to_string(&path).and_then(write)
}

/// Mounts the root file system in a mount namespace of this process.
fn mount_root(bundle: &Bundle, request: &StartRequest) -> Result<(), StartError> {
    #[expect(unsafe_code, reason = "a mount namespace affects all threads of the process")]
    // SAFETY: there is one thread, and it uses no paths of the former namespace afterwards but those that stay the same.
    unsafe { unshare_unsafe(UnshareFlags::NEWNS) }.map_err(failed("failed to create a mount namespace"))?;
    // Mounts of the host appear here; mounts made here do not appear on the host.
    let slave = MountPropagationFlags::DOWNSTREAM | MountPropagationFlags::REC;
    mount_change(c"/", slave).map_err(failed("failed to separate mounts"))?;
    if let Some(hidden) = &request.hidden_mount {
        // An empty file system instead: `crun` creates the directories of its group there, which have no effect.
        // In a user namespace it can only be covered.
        let removed = if request.map.is_some() { Ok(()) } else { unmount(hidden, UnmountFlags::DETACH) };
        removed
            .and_then(|()| mount("tmpfs", hidden, "tmpfs", MountFlags::empty(), None))
            .map_err(failed(format!("failed to hide {}", hidden.display())))?;
    }
    std::env::set_current_dir(bundle.lower()).map_err(failed("failed to find the layers"))?;
    // The topmost layer comes first.
    let lower: Vec<String> = (0..request.layers).rev().map(|at| at.to_string()).collect();
    let own = if request.map.is_some() { rootless::OVERLAY_OPTION } else { "" };
    let options = format!("lowerdir={},upperdir=../upper,workdir=../work{own}", lower.join(":"));
    let options = std::ffi::CString::new(options).map_err(|error| StartError {
        what: "invalid mount options".to_owned(),
        source: io::Error::other(error),
    })?;
    mount("overlay", bundle.rootfs(), "overlay", MountFlags::empty(), options.as_c_str())
        .map_err(failed("failed to mount the layers of the image"))?;
    std::env::set_current_dir("/").map_err(failed("failed to leave the layers"))
}

/// Runs the OCI runtime until the container has started, which inherits the two outputs.
pub(super) fn run_program(
    bundle: &Bundle,
    request: &StartRequest,
    [stdout, stderr]: [Stdio; 2],
    network: Option<&ContainerNetwork>,
) -> io::Result<()> {
    let root = bundle.root();
    let mut command = Command::new(&request.program);
    command.env_clear().env("PATH", "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin");
    // The mark of the task, by which its processes are found where there are no control groups.
    command.env("WINDLASS_TASK_ID", &request.id);
    if request.map.is_some() {
        command.arg(rootless_option(&request.program));
    }
    command.arg("--root").arg(root.join(STATE_DIR)).arg("--log").arg(root.join(RUNTIME_LOG));
    command.args(["run", "--detach", "--bundle"]).arg(root).arg("--pid-file").arg(root.join(PID_FILE));
    command.arg(&request.id).process_group(0);
    command.stdin(Stdio::null()).stdout(stdout).stderr(stderr);
    if let Some(network) = network.and_then(|network| network.namespace.as_ref()) {
        let network = network.as_raw_fd();
        let enter = move || {
            #[expect(unsafe_code, reason = "the network of a child is set between fork and exec")]
            // SAFETY: the descriptor stays open until the child has been started.
            let network = unsafe { BorrowedFd::borrow_raw(network) };
            move_into_link_name_space(network, Some(LinkNameSpaceType::Network)).map_err(io::Error::from)
        };
        #[expect(unsafe_code, reason = "the network of a child is set between fork and exec")]
        // SAFETY: the closure makes one system call; it neither allocates nor acquires a lock.
        unsafe {
            command.pre_exec(enter);
        }
    }
    let status = command.spawn()?.wait()?;
    drop(command);
    if status.success() { Ok(()) } else { Err(io::Error::other(status.to_string())) }
}

/// Returns the last message of the OCI runtime.
fn runtime_message(bundle: &Bundle) -> String {
    let log = fs::read_to_string(bundle.root().join(RUNTIME_LOG)).unwrap_or_default();
    let output = fs::read_to_string(bundle.root().join(OUTPUT_FILE)).unwrap_or_default();
    let last = |text: &str| text.lines().rev().find(|line| !line.trim().is_empty()).map(str::to_owned);
    let line = last(&log).or_else(|| last(&output)).unwrap_or_else(|| "no message".to_owned());
    // `runc` writes `time="…" level=error msg="…"`.
    let message = line.split_once("msg=").map_or(line.as_str(), |(_, message)| message);
    message.trim_matches('"').chars().take(ERROR_CHARS_MAX).collect()
}

/// Copies the output of the container to a file of limited size, in a thread.
fn copy_output(bundle: &Bundle, from: PipeReader) -> Result<OutputEnd, StartError> {
    let root = bundle.root().to_owned();
    let (end, ended) = std::sync::mpsc::channel();
    let copy = move || {
        let _ = copy_bounded(from, &root);
        let _ = end.send(());
    };
    let thread = std::thread::Builder::new().name("output".to_owned()).spawn(copy);
    thread.map_err(failed("failed to start a thread"))?;
    Ok(ended)
}

fn copy_bounded(mut from: PipeReader, root: &Path) -> io::Result<()> {
    let path = root.join(OUTPUT_FILE);
    let mut file = fs::OpenOptions::new().create(true).append(true).open(&path)?;
    let mut size = file.metadata()?.len();
    let mut buffer = vec![0; 16 << 10];
    loop {
        let count = from.read(&mut buffer)?;
        if count == 0 {
            return Ok(());
        }
        if size + count as u64 > OUTPUT_BYTES_MAX {
            fs::rename(&path, root.join(OLDER_OUTPUT_FILE))?;
            file = fs::OpenOptions::new().create(true).append(true).open(&path)?;
            size = 0;
        }
        // On a full disk the output is lost, and the container must not block.
        if file.write_all(&buffer[..count]).is_ok() {
            size += count as u64;
        }
    }
}

fn wait_for_output(output: &OutputEnd) {
    let _ = output.recv_timeout(OUTPUT_TIMEOUT);
}

/// Waits for the end of the process, and reaps everything else meanwhile.
fn wait_for(pid: i32) -> Option<i32> {
    let expected = Pid::from_raw(pid);
    loop {
        match wait(WaitOptions::empty()) {
            Ok(Some((found, status))) if Some(found) == expected => {
                return status
                    .exit_status()
                    .or_else(|| status.terminating_signal().map(|signal| 128 + signal));
            }
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(_) => return None,
        }
    }
}

/// Returns the output of the container that is kept, oldest first.
pub(super) fn read_output(bundle: &Bundle) -> Vec<u8> {
    let mut bytes = fs::read(bundle.root().join(OLDER_OUTPUT_FILE)).unwrap_or_default();
    bytes.extend(fs::read(bundle.root().join(OUTPUT_FILE)).unwrap_or_default());
    bytes
}
