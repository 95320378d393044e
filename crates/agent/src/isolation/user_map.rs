//! User namespaces of an agent that is not root: which ids of the host a container's ids are.
//!
//! The agent's user is root of the namespace. If the administrator has assigned subordinate ids to it (`/etc/subuid`,
//! `/etc/subgid`), the other ids of an image are those, and `newuidmap` and `newgidmap` map them. Otherwise root is the
//! only user of the namespace, and all files of an image belong to it.

use std::{
    ffi::CStr,
    fs, io,
    io::{Read as _, Write as _},
    os::unix::net::UnixStream,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use nix::unistd::{ForkResult, fork};
use rustix::{
    process::{Pid, Signal, WaitOptions, getegid, geteuid, getpid, set_child_subreaper, wait},
    thread::{UnshareFlags, unshare_unsafe},
};
use serde::{Deserialize, Serialize};

use crate::proc::{self, ProcessHandle};

const PROGRAM_DIRS: [&str; 6] =
    ["/usr/local/bin", "/usr/bin", "/bin", "/usr/local/sbin", "/usr/sbin", "/sbin"];
const SUBORDINATE_USERS: &str = "/etc/subuid";
const SUBORDINATE_GROUPS: &str = "/etc/subgid";
/// Ids that images use: those of system accounts, and of ordinary ones.
const IDS_MIN: u32 = 1000;
const MESSAGE_BYTES_MAX: u64 = 16 << 10;
const DONE: &str = "done";
/// Name of the process outside of a user namespace.
const OUTSIDE_NAME: &CStr = c"wl-outside";
const OUTPUT_CHARS_MAX: usize = 1000;

/// Consecutive ids of the host.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct IdRange {
    pub first: u32,
    pub count: u32,
}

/// Ids of the host for those of a container other than root, and the programs that map them.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SubordinateIds {
    pub users: IdRange,
    pub groups: IdRange,
    map_users: PathBuf,
    map_groups: PathBuf,
}

/// Ids of a user namespace.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct UserMap {
    /// User and group of the host that are root of the namespace.
    pub user: u32,
    pub group: u32,
    /// `None`: there is no id but root.
    pub subordinate: Option<SubordinateIds>,
}

/// Finds a program in the usual directories.
pub fn find_program(name: &str) -> Option<PathBuf> {
    use std::os::unix::fs::PermissionsExt as _;
    let is_program = |path: &PathBuf| {
        path.metadata().is_ok_and(|meta| meta.is_file() && meta.permissions().mode() & 0o111 != 0)
    };
    PROGRAM_DIRS.iter().map(|dir| Path::new(dir).join(name)).find(is_program)
}

/// Returns the largest range of an account in the text of `/etc/subuid`; lines are `NAME:FIRST:COUNT`, where the name may
/// also be the number of the user.
fn parse_ranges(text: &str, name: &str, uid: u32) -> Option<IdRange> {
    let parse = |line: &str| {
        let mut parts = line.trim().split(':');
        let owner = parts.next()?;
        let range = IdRange { first: parts.next()?.parse().ok()?, count: parts.next()?.parse().ok()? };
        let is_own = (!name.is_empty() && owner == name) || owner.parse() == Ok(uid);
        let is_valid = range.first > 0 && range.first.checked_add(range.count).is_some();
        (is_own && is_valid && range.count >= IDS_MIN).then_some(range)
    };
    text.lines().filter_map(parse).max_by_key(|range| range.count)
}

/// Returns the name of a user in the text of `/etc/passwd`.
fn account_name(accounts: &str, uid: u32) -> Option<&str> {
    accounts.lines().find_map(|line| {
        let mut parts = line.split(':');
        let name = parts.next()?;
        (parts.nth(1)?.parse() == Ok(uid)).then_some(name)
    })
}

/// Finds the name of a user, also of one that only the host's name services know.
fn find_account_name(uid: u32) -> Option<String> {
    let accounts = fs::read_to_string("/etc/passwd").unwrap_or_default();
    if let Some(name) = account_name(&accounts, uid) {
        return Some(name.to_owned());
    }
    let output = Command::new(find_program("getent")?).args(["passwd", &uid.to_string()]).output().ok()?;
    account_name(&String::from_utf8_lossy(&output.stdout), uid).map(str::to_owned)
}

impl UserMap {
    /// Returns the map for this process; `None` if it is root and needs none.
    pub fn for_own_user() -> Option<Self> {
        if geteuid().is_root() {
            return None;
        }
        let (user, group) = (geteuid().as_raw(), getegid().as_raw());
        Some(Self { user, group, subordinate: SubordinateIds::find(user) })
    }

    /// Largest number of ids, root included, that both users and groups have.
    pub fn id_count(&self) -> u32 {
        self.subordinate.as_ref().map_or(1, |ids| ids.users.count.min(ids.groups.count) + 1)
    }

    /// Enters a new user namespace, as its root. The calling process must have one thread. The returned process is
    /// outside of the namespace; it ends with this one, or when it is dropped.
    pub fn enter(&self) -> io::Result<OutsideProcess> {
        let mut outside = OutsideProcess::fork()?;
        #[expect(unsafe_code, reason = "a user namespace affects all threads of the process")]
        // SAFETY: there is one thread.
        unsafe { unshare_unsafe(UnshareFlags::NEWUSER) }?;
        match &self.subordinate {
            Some(_) => outside.run(&OutsideRequest::Map { pid: own_pid(), map: self.clone() })?,
            None => {
                fs::write("/proc/self/setgroups", "deny")?;
                fs::write("/proc/self/uid_map", format!("0 {} 1", self.user))?;
                fs::write("/proc/self/gid_map", format!("0 {} 1", self.group))?;
            }
        }
        Ok(outside)
    }

    /// Commands that map the ids of a process in a new user namespace.
    fn commands(&self, pid: i32) -> Vec<Command> {
        let Some(ids) = &self.subordinate else { return Vec::new() };
        let command = |program: &Path, own: u32, range: IdRange| {
            let mut command = Command::new(program);
            let words = [0, own, 1, 1, range.first, range.count].map(|number| number.to_string());
            command.arg(pid.to_string()).args(words);
            command
        };
        vec![command(&ids.map_users, self.user, ids.users), command(&ids.map_groups, self.group, ids.groups)]
    }
}

impl SubordinateIds {
    fn find(uid: u32) -> Option<Self> {
        // The programs refuse a user without an account.
        let name = find_account_name(uid)?;
        let range = |file| parse_ranges(&fs::read_to_string(file).ok()?, &name, uid);
        Some(Self {
            users: range(SUBORDINATE_USERS)?,
            groups: range(SUBORDINATE_GROUPS)?,
            map_users: find_program("newuidmap")?,
            map_groups: find_program("newgidmap")?,
        })
    }
}

fn own_pid() -> i32 {
    getpid().as_raw_nonzero().get()
}

/// Request to a process outside of the user namespace.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum OutsideRequest {
    /// Map the ids of a process.
    Map { pid: i32, map: UserMap },
    /// Start a program that stays.
    Start { words: Vec<String> },
}

/// A process with the rights that the calling process had before it entered a user namespace. It starts programs that
/// need them, and ends them when the calling process ends.
#[derive(Debug)]
pub struct OutsideProcess {
    socket: UnixStream,
}

impl OutsideProcess {
    fn fork() -> io::Result<Self> {
        let (ours, theirs) = UnixStream::pair()?;
        #[expect(unsafe_code, reason = "forking copies the whole process")]
        // SAFETY: there is one thread, so no lock is held by another one.
        match unsafe { fork() }? {
            ForkResult::Parent { .. } => Ok(Self { socket: ours }),
            ForkResult::Child => {
                drop(ours);
                serve_outside(&theirs);
                // The copy must not continue with the work of its parent.
                std::process::exit(0);
            }
        }
    }

    fn run(&mut self, request: &OutsideRequest) -> io::Result<()> {
        let mut bytes = serde_json::to_vec(request)?;
        bytes.push(b'\n');
        self.socket.write_all(&bytes)?;
        let reply = read_line(&self.socket)?;
        if reply == DONE { Ok(()) } else { Err(io::Error::other(reply)) }
    }

    /// Starts a program, and waits until it is ready: it exits successfully and continues in the background, or it writes
    /// to the descriptor of [`ready_words`]. What continues to run is ended with this process.
    pub fn start_program(&mut self, words: Vec<String>) -> io::Result<()> {
        self.run(&OutsideRequest::Start { words })
    }
}

/// Reads byte by byte: lines are short, and nothing after them may be taken.
fn read_line(mut from: &UnixStream) -> io::Result<String> {
    let mut line = Vec::new();
    let mut byte = [0];
    while line.len() as u64 <= MESSAGE_BYTES_MAX {
        match from.read(&mut byte) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(_) if byte[0] == b'\n' => return String::from_utf8(line).map_err(io::Error::other),
            Ok(_) => line.push(byte[0]),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Err(io::ErrorKind::InvalidData.into())
}

/// Returns whether this is a process outside of a user namespace, by its name.
pub fn is_outside_process(pid: i32) -> bool {
    fs::read(format!("/proc/{pid}/comm")).is_ok_and(|name| name.trim_ascii_end() == OUTSIDE_NAME.to_bytes())
}

/// Carries out requests until the other process ends, and ends everything that was started.
fn serve_outside(mut socket: &UnixStream) {
    let _ = rustix::thread::set_name(OUTSIDE_NAME);
    // Programs that continue in the background become children of this process.
    let _ = set_child_subreaper(Some(getpid()));
    while let Ok(line) = read_line(socket) {
        let done = serde_json::from_str(&line).map_err(io::Error::from).and_then(|request| match request {
            OutsideRequest::Map { pid, map } => map.commands(pid).into_iter().try_for_each(run_command),
            OutsideRequest::Start { words } => start_program(&words),
        });
        let reply = done.map_or_else(|error| error.to_string().replace('\n', " "), |()| DONE.to_owned());
        if socket.write_all(format!("{reply}\n").as_bytes()).is_err() {
            break;
        }
    }
    while let Ok(below) = proc::descendants(own_pid()) {
        if below.is_empty() {
            return;
        }
        for process in below {
            if let Ok(Some(handle)) = ProcessHandle::open(process.name) {
                let _ = handle.signal(Signal::KILL);
            }
        }
        let reaped: Result<Option<(Pid, _)>, _> = wait(WaitOptions::empty());
        if reaped.is_err() {
            return;
        }
    }
}

/// Words of a command that tell a program to write to a descriptor when it is ready.
pub fn ready_words() -> [&'static str; 1] {
    ["--ready-fd=3"]
}

/// Descriptor of [`ready_words`].
const READY_DESCRIPTOR: i32 = 3;

fn start_program(words: &[String]) -> io::Result<()> {
    let (program, rest) = words.split_first().ok_or(io::ErrorKind::InvalidInput)?;
    let mut command = Command::new(program);
    command.args(rest);
    if !rest.iter().any(|word| ready_words().contains(&word.as_str())) {
        return run_command(command);
    }
    let mut output = capture_output(&mut command)?;
    let (mut ready, theirs) = io::pipe()?;
    let theirs = std::os::fd::OwnedFd::from(theirs);
    let place = move || {
        let number = std::os::fd::AsRawFd::as_raw_fd(&theirs);
        // The copy stays open in the program.
        let done = if number == READY_DESCRIPTOR {
            set_inheritable(number)
        } else {
            #[expect(unsafe_code, reason = "a descriptor is chosen by its number")]
            // SAFETY: this is the child, between fork and exec; its descriptors are used by nothing else.
            unsafe {
                nix::libc::dup2(number, READY_DESCRIPTOR)
            }
        };
        if done < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
    };
    #[expect(unsafe_code, reason = "a descriptor is placed between fork and exec")]
    // SAFETY: the closure makes one system call; it neither allocates nor acquires a lock.
    unsafe {
        std::os::unix::process::CommandExt::pre_exec(&mut command, place);
    }
    let mut child = command.spawn()?;
    // The pipe ends with the program, so it must not be open here.
    drop(command);
    let mut byte = [0];
    match ready.read(&mut byte) {
        Ok(1) => Ok(()),
        Ok(_) | Err(_) => {
            let _ = child.kill();
            let status = child.wait()?;
            Err(failure(program, status, &mut output))
        }
    }
}

fn set_inheritable(number: i32) -> i32 {
    #[expect(unsafe_code, reason = "a descriptor is named by its number")]
    // SAFETY: the descriptor is open, and only its flag changes.
    unsafe {
        nix::libc::fcntl(number, nix::libc::F_SETFD, 0)
    }
}

/// Sends the output of a command to a file: it may continue in the background, and a pipe would stay open.
fn capture_output(command: &mut Command) -> io::Result<fs::File> {
    let output = fs::File::from(rustix::fs::memfd_create("output", rustix::fs::MemfdFlags::CLOEXEC)?);
    command.stdin(Stdio::null()).stdout(output.try_clone()?).stderr(output.try_clone()?);
    command.env("PATH", PROGRAM_DIRS.join(":"));
    Ok(output)
}

fn failure(program: &str, status: std::process::ExitStatus, output: &mut fs::File) -> io::Error {
    let mut text = String::new();
    let _ = io::Seek::rewind(output).and_then(|()| output.read_to_string(&mut text));
    let text: String = text.trim().chars().take(OUTPUT_CHARS_MAX).collect();
    io::Error::other(format!("{program} failed ({status}): {text}"))
}

/// Runs a command until it exits. The error contains what it printed.
fn run_command(mut command: Command) -> io::Result<()> {
    let program = command.get_program().to_string_lossy().into_owned();
    let mut output = capture_output(&mut command)?;
    let status = command.status()?;
    if status.success() { Ok(()) } else { Err(failure(&program, status, &mut output)) }
}

/// Removes a tree that may contain files of subordinate ids, and directories that their owner cannot write.
pub fn remove_tree(path: &Path) -> io::Result<()> {
    match fs::remove_dir_all(path) {
        Err(error)
            if error.kind() == io::ErrorKind::PermissionDenied && UserMap::for_own_user().is_some() => {}
        done => return done,
    }
    let mut command = Command::new("/proc/self/exe");
    command.args(["child", "remove-tree"]).arg(path).env_clear();
    run_command(command)
}

/// Directory to remove.
#[derive(Debug, clap::Args)]
pub struct RemoveTreeArgs {
    path: PathBuf,
}

/// Entry point of the process that removes a tree, as root of a user namespace.
pub fn remove_tree_main(args: &RemoveTreeArgs) -> std::process::ExitCode {
    let removed = match UserMap::for_own_user() {
        Some(map) => map.enter().and_then(|_outside| fs::remove_dir_all(&args.path)),
        None => fs::remove_dir_all(&args.path),
    };
    report(removed.map_err(|error| format!("failed to remove {}: {error}", args.path.display())))
}

/// Prints an error for the parent process.
pub fn report(done: Result<(), String>) -> std::process::ExitCode {
    match done {
        Ok(()) => std::process::ExitCode::SUCCESS,
        Err(message) => {
            let _ = writeln!(io::stderr(), "{message}");
            std::process::ExitCode::FAILURE
        }
    }
}

/// Returns whether this process may set its supplementary groups: not in a namespace in which root is the only user.
pub fn can_set_groups() -> bool {
    fs::read_to_string("/proc/self/setgroups").map_or(true, |text| text.trim() != "deny")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn subordinate_ids_are_found_by_name_and_by_number() {
        let text = "ann:100000:65536\n1001:200000:65536\nbob:5:10\nbob:300000:2000\nbob:400000:70000\n\
                    eve:0:65536\nmax:4294967295:65536\nbad\n";
        let range = |first, count| Some(IdRange { first, count });
        assert_eq!(parse_ranges(text, "ann", 1000), range(100_000, 65536));
        assert_eq!(parse_ranges(text, "", 1001), range(200_000, 65536));
        assert_eq!(parse_ranges(text, "bob", 1002), range(400_000, 70000), "the largest one");
        assert_eq!(parse_ranges(text, "eve", 1003), None, "root of the host");
        assert_eq!(parse_ranges(text, "max", 1004), None, "beyond the last id");
        assert_eq!(parse_ranges(text, "", 1005), None);
    }

    #[test]
    fn root_of_the_namespace_is_the_own_user_and_the_others_are_subordinate() {
        let range = |first| IdRange { first, count: 65536 };
        let ids = SubordinateIds {
            users: range(100_000),
            groups: range(200_000),
            map_users: "/usr/bin/newuidmap".into(),
            map_groups: "/usr/bin/newgidmap".into(),
        };
        let map = UserMap { user: 1000, group: 1001, subordinate: Some(ids) };
        let words: Vec<String> = map
            .commands(7)
            .iter()
            .map(|command| {
                let words = std::iter::once(command.get_program()).chain(command.get_args());
                words.map(|word| word.to_string_lossy()).collect::<Vec<_>>().join(" ")
            })
            .collect();
        assert_eq!(
            words,
            ["/usr/bin/newuidmap 7 0 1000 1 1 100000 65536", "/usr/bin/newgidmap 7 0 1001 1 1 200000 65536"]
        );
        assert_eq!(map.id_count(), 65537);
    }
}
