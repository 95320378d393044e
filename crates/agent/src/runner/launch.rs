//! Start of the job's main process: its user, session, terminal, signals and files.

use std::{
    fs::File,
    io::{self, Write},
    os::{
        fd::{AsFd, BorrowedFd, OwnedFd},
        unix::process::CommandExt,
    },
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use nix::sys::signal::{SaFlags, SigAction, SigHandler, SigSet, SigmaskHow, Signal, sigaction, sigprocmask};
use rustix::{
    process::{Gid, Uid, ioctl_tiocsctty, setsid, umask},
    pty::{OpenptFlags, grantpt, ioctl_tiocgptpeer, openpt, unlockpt},
    termios::{
        InputModes, LocalModes, OptionalActions, OutputModes, Winsize, tcgetattr, tcsetattr, tcsetwinsize,
    },
    thread::{set_thread_groups, set_thread_res_gid, set_thread_res_uid},
};

use super::{env::Env, hosts_file::HostsFile, user::Account};
use crate::isolation::{restrict::Restrictions, user_map::can_set_groups};

/// Terminal size that programs of the job see.
const TERMINAL_SIZE: Winsize = Winsize { ws_row: 40, ws_col: 120, ws_xpixel: 0, ws_ypixel: 0 };
const UMASK: u32 = 0o022;
const SHELLS: [&str; 7] = ["sh", "bash", "dash", "ash", "zsh", "ksh", "fish"];

/// Kind of standard input and output of the commands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TerminalMode {
    /// A pipe for output, and no input.
    None,
    /// A terminal; the start fails without one.
    Required,
    /// A terminal if the host provides one, otherwise a pipe.
    Preferred,
}

/// Chooses the terminal. The job's setting takes precedence. Otherwise an interactive shell gets a terminal, because it
/// prints errors without one.
pub fn terminal_mode(tty: Option<bool>, argv: &[String]) -> TerminalMode {
    match tty {
        Some(true) => TerminalMode::Required,
        Some(false) => TerminalMode::None,
        None if is_interactive(argv) => TerminalMode::Preferred,
        None => TerminalMode::None,
    }
}

/// Returns whether this is a shell with `-i` among the options before its script.
fn is_interactive(argv: &[String]) -> bool {
    let Some((program, rest)) = argv.split_first() else { return false };
    let name = Path::new(program).file_name().and_then(|name| name.to_str()).unwrap_or_default();
    let options = rest.iter().take_while(|word| word.starts_with('-') && word.len() > 1 && *word != "--");
    let mut short = options.filter(|word| !word.starts_with("--"));
    SHELLS.contains(&name) && short.any(|word| word.contains('i'))
}

#[derive(Clone, Copy, Debug)]
pub struct LaunchSpec<'a> {
    pub argv: &'a [String],
    pub env: &'a Env,
    pub dir: &'a Path,
    pub account: &'a Account,
    pub terminal: TerminalMode,
    /// Host names of other tasks, if the job requested them.
    pub names: Option<&'a HostsFile>,
}

#[derive(Debug)]
pub struct JobProcess {
    pub child: tokio::process::Child,
    /// Leader of the job's session.
    pub pid: i32,
    /// Everything that the job prints.
    pub output: File,
    /// Input side of the job's terminal, if it has one.
    pub keyboard: Option<File>,
}

#[derive(Debug, thiserror::Error)]
pub enum ExecError {
    #[error("cannot start the commands: the job has none, and the image has no default command")]
    NoCommands,
    #[error("cannot start the commands: an argument contains a NUL byte")]
    NulInArgument,
    #[error("failed to open a terminal")]
    Terminal(#[source] io::Error),
    #[error("failed to open a pipe")]
    Pipe(#[source] io::Error),
    #[error("failed to provide the host names of other tasks")]
    Names(#[source] io::Error),
    #[error("failed to start `{program}` in {}", .dir.display())]
    Start {
        program: String,
        dir: PathBuf,
        #[source]
        source: io::Error,
    },
}

/// Descriptors of the child, and the one that the runner reads from.
struct JobStdio {
    input: Stdio,
    output: Stdio,
    error: Stdio,
    ours: File,
    is_terminal: bool,
}

/// Starts the commands. They are the leader of a new session and inherit no descriptors of the runner.
pub fn start(launch: &LaunchSpec<'_>) -> Result<JobProcess, ExecError> {
    let (program, arguments) = launch.argv.split_first().ok_or(ExecError::NoCommands)?;
    if launch.argv.iter().any(|word| word.contains('\0')) {
        return Err(ExecError::NulInArgument);
    }
    let ends = match launch.terminal {
        TerminalMode::None => open_pipe()?,
        TerminalMode::Required => open_terminal(launch.account).map_err(ExecError::Terminal)?,
        TerminalMode::Preferred => match open_terminal(launch.account) {
            Ok(ends) => ends,
            Err(_) => open_pipe()?,
        },
    };
    let keyboard =
        ends.is_terminal.then(|| ends.ours.try_clone()).transpose().map_err(ExecError::Terminal)?;
    let mut command = Command::new(program);
    command.args(arguments).current_dir(launch.dir);
    command.env_clear().envs(launch.env);
    if ends.is_terminal && !launch.env.contains_key(std::ffi::OsStr::new("TERM")) {
        command.env("TERM", "xterm-256color");
    }
    command.stdin(ends.input).stdout(ends.output).stderr(ends.error);
    if let Some(names) = launch.names {
        names.mount_for(&mut command).map_err(ExecError::Names)?;
    }
    drop_to_account(&mut command, launch.account, ends.is_terminal);
    let mut command = tokio::process::Command::from(command);
    let child = command.spawn().map_err(|source| ExecError::Start {
        program: program.clone(),
        dir: launch.dir.to_owned(),
        source,
    })?;
    let pid = child.id().and_then(|pid| i32::try_from(pid).ok()).unwrap_or_default();
    Ok(JobProcess { child, pid, output: ends.ours, keyboard })
}

fn open_pipe() -> Result<JobStdio, ExecError> {
    let make = || {
        let (ours, theirs) = io::pipe()?;
        let again = theirs.try_clone()?;
        Ok(JobStdio {
            input: Stdio::null(),
            output: theirs.into(),
            error: again.into(),
            ours: File::from(OwnedFd::from(ours)),
            is_terminal: false,
        })
    };
    make().map_err(ExecError::Pipe)
}

/// Opens a terminal that does not change the output: line ends stay as they are, and nothing is echoed.
fn open_terminal(account: &Account) -> io::Result<JobStdio> {
    let ours = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC)?;
    grantpt(&ours)?;
    unlockpt(&ours)?;
    let theirs = ioctl_tiocgptpeer(&ours, OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC)?;
    let mut modes = tcgetattr(&theirs)?;
    modes.output_modes.remove(OutputModes::OPOST | OutputModes::ONLCR);
    modes.local_modes.remove(LocalModes::ECHO);
    modes.input_modes.insert(InputModes::IUTF8);
    tcsetattr(&theirs, OptionalActions::Now, &modes)?;
    tcsetwinsize(&theirs, TERMINAL_SIZE)?;
    // Programs that reopen their terminal must own it. A runner that is not root owns it already.
    let _ = rustix::fs::fchown(&theirs, Some(Uid::from_raw(account.uid)), Some(Gid::from_raw(account.gid)));
    let (input, output) = (theirs.try_clone()?, theirs.try_clone()?);
    Ok(JobStdio {
        input: input.into(),
        output: output.into(),
        error: theirs.into(),
        ours: File::from(ours),
        is_terminal: true,
    })
}

/// Makes the command leave the runner's session and drop its privileges. For the job itself; programs of SSH sessions
/// use `ssh::rights`.
#[expect(unsafe_code, reason = "sessions, signals and users are set between fork and exec")]
pub fn drop_to_account(command: &mut Command, account: &Account, with_terminal: bool) {
    let is_root = rustix::process::geteuid().is_root();
    let groups: Vec<Gid> = account.groups.iter().copied().map(Gid::from_raw).collect();
    let (uid, gid) = (Uid::from_raw(account.uid), Gid::from_raw(account.gid));
    let restrictions = Restrictions::for_children();
    let can_set_groups = can_set_groups();
    let prepare = move || {
        setsid()?;
        if with_terminal {
            // SAFETY: the standard input was put in place before this runs, and nothing closes it.
            ioctl_tiocsctty(unsafe { BorrowedFd::borrow_raw(0) })?;
        }
        reset_signals()?;
        umask(rustix::fs::Mode::from_raw_mode(UMASK));
        // Without root the user cannot be changed.
        if is_root {
            restrictions.drop_capabilities()?;
            if can_set_groups {
                set_thread_groups(&groups)?;
            }
            set_thread_res_gid(gid, gid, gid)?;
            set_thread_res_uid(uid, uid, uid)?;
        }
        restrictions.seal()
    };
    // SAFETY: between fork and exec only system calls are made: nothing is allocated, locked or freed. The
    // thread calls change the only thread the child has.
    unsafe {
        command.pre_exec(prepare);
    }
}

/// Resets signals to their default. A runner that was started in the background may ignore some, and children inherit
/// that.
fn reset_signals() -> io::Result<()> {
    let default = SigAction::new(SigHandler::SigDfl, SaFlags::empty(), SigSet::empty());
    for signal in Signal::iterator() {
        if matches!(signal, Signal::SIGKILL | Signal::SIGSTOP) {
            continue;
        }
        set_action(signal, &default)?;
    }
    sigprocmask(SigmaskHow::SIG_SETMASK, Some(&SigSet::empty()), None)?;
    Ok(())
}

#[expect(unsafe_code, reason = "signal actions are process-wide state")]
fn set_action(signal: Signal, action: &SigAction) -> io::Result<()> {
    // SAFETY: the action is the default one, so no handler of ours can ever run.
    unsafe { sigaction(signal, action) }?;
    Ok(())
}

/// Prevents files that the runner inherited from reaching its children. All other files are opened close-on-exec.
pub fn mark_inherited_files() -> io::Result<()> {
    for entry in std::fs::read_dir("/proc/self/fd")? {
        let Some(number) = entry?.file_name().to_str().and_then(|name| name.parse::<i32>().ok()) else {
            continue;
        };
        if number > 2 {
            set_close_on_exec(number);
        }
    }
    Ok(())
}

#[expect(unsafe_code, reason = "a descriptor is named by its number")]
fn set_close_on_exec(number: i32) {
    // SAFETY: the number was listed a moment ago by this thread, before any other thread was started. Were it
    // closed since, the call would fail and nothing would change.
    let fd = unsafe { BorrowedFd::borrow_raw(number) };
    let _ = rustix::io::fcntl_setfd(fd.as_fd(), rustix::io::FdFlags::CLOEXEC);
}

/// Writes a file with this mode and replaces its contents.
pub fn write_with_mode(path: &Path, bytes: &[u8], mode: u32) -> io::Result<()> {
    use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
    let mut file =
        std::fs::OpenOptions::new().write(true).create(true).truncate(true).mode(mode).open(path)?;
    // The file may have existed with another mode.
    file.set_permissions(std::fs::Permissions::from_mode(mode))?;
    file.write_all(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_terminal_is_allocated_on_request_or_for_interactive_shells() {
        let argv = |words: &[&str]| words.iter().map(|&word| word.to_owned()).collect::<Vec<_>>();
        let table: [(Option<bool>, &[&str], TerminalMode); 12] = [
            (Some(true), &["python", "x.py"], TerminalMode::Required),
            (Some(false), &["/bin/sh", "-i", "-c", "ls"], TerminalMode::None),
            (None, &["/bin/sh", "-i", "-c", "ls"], TerminalMode::Preferred),
            (None, &["/bin/bash", "-ic", "ls"], TerminalMode::Preferred),
            (None, &["bash", "-l", "-i", "-c", "ls"], TerminalMode::Preferred),
            (None, &["/bin/sh", "-c", "ls -i"], TerminalMode::None),
            (None, &["/bin/sh", "-c", "-i"], TerminalMode::Preferred),
            (None, &["/bin/sh", "script", "-i"], TerminalMode::None),
            (None, &["bash", "--init-file", "x"], TerminalMode::None),
            (None, &["grep", "-i", "x"], TerminalMode::None),
            (None, &["sh", "--", "-i"], TerminalMode::None),
            (None, &[], TerminalMode::None),
        ];
        for (tty, words, expected) in table {
            assert_eq!(terminal_mode(tty, &argv(words)), expected, "{tty:?} {words:?}");
        }
    }
}
