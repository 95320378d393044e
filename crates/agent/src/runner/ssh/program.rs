//! Programs of sessions: start, input, output and exit.

use std::{
    ffi::{CString, OsStr},
    io,
    os::{
        fd::{BorrowedFd, OwnedFd},
        unix::{
            ffi::{OsStrExt as _, OsStringExt as _},
            process::ExitStatusExt as _,
        },
    },
    path::Path,
    process::{ExitStatus, Stdio},
    time::Duration,
};

use nix::sys::signal::{SigHandler, SigSet, SigmaskHow, Signal, killpg, signal, sigprocmask};
use russh::{ChannelId, ChannelWriteHalf, Sig, server};
use tokio::{
    io::{AsyncRead, AsyncWriteExt as _},
    process::{Child, Command},
    sync::mpsc,
    time::timeout,
};
use tokio_util::sync::CancellationToken;

use super::{
    channel_io::{ChannelInput, read_chunk},
    command, run_as_user,
    terminal::{Terminal, TerminalSize},
};
use crate::{isolation::restrict::Restrictions, runner::login_session::Session};

/// Exit status that a shell returns for a command that cannot be run.
const EXIT_NOT_FOUND: u32 = 127;
/// After a program on a terminal has exited, other processes that hold the terminal are read until there is no output
/// for this long.
const TERMINAL_QUIET_TIME: Duration = Duration::from_millis(50);
/// Type code of standard error on the wire.
const STDERR: u32 = 1;

#[derive(Debug)]
pub(super) enum ProgramKind {
    Shell,
    Command(Vec<u8>),
    Sftp,
}

pub(super) enum ProgramControl {
    Signal(Signal),
    Resize(TerminalSize),
}

/// Everything that a program is started with.
pub(super) struct ProgramStart {
    pub(super) what: ProgramKind,
    pub(super) session: Session,
    pub(super) env: Vec<(std::ffi::OsString, std::ffi::OsString)>,
    pub(super) terminal: Option<(Terminal, OwnedFd)>,
    /// Reason for which a requested terminal is missing; printed before anything else, on standard error.
    pub(super) notice: Option<String>,
}

/// The program's side of its channel.
pub(super) struct ProgramChannel {
    pub(super) id: ChannelId,
    pub(super) inlet: ChannelInput,
    pub(super) write: ChannelWriteHalf<server::Msg>,
    pub(super) handle: server::Handle,
    pub(super) control: mpsc::Receiver<ProgramControl>,
}

#[derive(Debug, thiserror::Error)]
enum StartError {
    #[error("this image has no shell ({0} cannot be run); run a program instead: ssh HOST /path/to/program")]
    NoShell(String),
    #[error("this image has no shell ({0} cannot be run), and this command needs one")]
    NeedsShell(String),
    #[error("a shell needs a terminal; run a command without one: ssh -T HOST COMMAND")]
    NoTerminal,
    #[error("failed to run {0}: {1}")]
    Run(String, #[source] io::Error),
}

/// Runs a program from its start to the last message on the channel.
pub(super) async fn run(start: ProgramStart, mut link: ProgramChannel) {
    let closed = link.inlet.closed.clone();
    tokio::select! {
        () = write_message(&link.write, start.notice.as_deref()) => {}
        () = closed.cancelled() => return,
    }
    match start_program(&start) {
        Ok(child) => {
            let terminal = start.terminal.map(|(terminal, _program_end)| terminal);
            if let Some(status) = supervise(child, terminal, &mut link).await {
                finish(&link, status).await;
            }
        }
        Err(error) => {
            link.inlet.inflow.refuse();
            let message = error.to_string();
            tokio::select! {
                () = write_message(&link.write, Some(&message)) => {}
                () = closed.cancelled() => return,
            }
            let _ = link.write.eof().await;
            let _ = link.write.exit_status(EXIT_NOT_FOUND).await;
            let _ = link.write.close().await;
        }
    }
}

async fn write_message(write: &ChannelWriteHalf<server::Msg>, message: Option<&str>) {
    if let Some(message) = message {
        let _ = write.extended_data_bytes(STDERR, format!("windlass: {message}\r\n").into_bytes()).await;
    }
}

/// Reports the exit as a shell would, and closes the channel.
async fn finish(link: &ProgramChannel, status: ExitStatus) {
    let _ = link.write.eof().await;
    match (status.code(), status.signal()) {
        (Some(code), _) => {
            let _ = link.write.exit_status(u32::try_from(code).unwrap_or(EXIT_NOT_FOUND)).await;
        }
        (None, number) => {
            let named = number.and_then(|number| Signal::try_from(number).ok());
            let name = named.map_or("KILL", |named| named.as_str().trim_start_matches("SIG"));
            let signal = Sig::Custom(name.to_owned());
            let _ = link
                .handle
                .exit_signal_request(link.id, signal, status.core_dumped(), String::new(), String::new())
                .await;
        }
    }
    let _ = link.write.close().await;
}

/// Supervises a running program. Returns `None` if its channel was closed first.
async fn supervise(
    mut child: Child,
    terminal: Option<Terminal>,
    link: &mut ProgramChannel,
) -> Option<ExitStatus> {
    let closed = link.inlet.closed.clone();
    let input = child.stdin.take();
    let output = child.stdout.take();
    let errors = child.stderr.take();
    let inflow = std::sync::Arc::clone(&link.inlet.inflow);
    let write = &link.write;
    let control = &mut link.control;
    let terminal = &terminal;
    let ended = CancellationToken::new();

    let feed = async {
        match (terminal, input) {
            (Some(terminal), _) => {
                while let Some(piece) = inflow.take().await {
                    if terminal.write(&piece).await.is_err() {
                        break;
                    }
                }
            }
            (None, Some(mut input)) => {
                while let Some(piece) = inflow.take().await {
                    if input.write_all(&piece).await.is_err() {
                        break;
                    }
                }
                // Dropped here: the program sees the end of its input.
            }
            (None, None) => {}
        }
        // The reader has stopped; further input must not block the client.
        inflow.refuse();
    };
    let listen = async {
        match terminal {
            Some(terminal) => forward_terminal(terminal, write, &ended).await,
            None => {
                tokio::join!(
                    forward_output(output, write, None),
                    forward_output(errors, write, Some(STDERR))
                );
            }
        }
    };
    tokio::pin!(feed, listen);
    let (mut fed, mut received, mut status) = (false, false, None);
    loop {
        tokio::select! {
            biased;
            () = closed.cancelled() => {
                hang_up(child, status.is_some());
                return None;
            }
            () = &mut feed, if !fed => fed = true,
            () = &mut listen, if !received => received = true,
            exit = child.wait(), if status.is_none() => {
                status = Some(exit.unwrap_or_else(|_| ExitStatus::from_raw(9)));
                inflow.refuse();
                ended.cancel();
            }
            Some(control) = control.recv() => match control {
                ProgramControl::Signal(signal) => signal_group(&child, signal),
                ProgramControl::Resize(size) => {
                    let _ = terminal.as_ref().map(|terminal| terminal.resize(size));
                }
            },
        }
        // Processes that inherited a pipe may still write to it: as with sshd, the session lasts until they close it.
        if let (true, Some(status)) = (received, status) {
            return Some(status);
        }
    }
}

/// Forwards the terminal's output. After the program's exit other processes may hold the terminal without limit: then
/// it is read until there is no more output.
async fn forward_terminal(
    terminal: &Terminal,
    write: &ChannelWriteHalf<server::Msg>,
    ended: &CancellationToken,
) {
    loop {
        let read = tokio::select! {
            biased;
            read = terminal.read() => read,
            () = ended.cancelled() => match timeout(TERMINAL_QUIET_TIME, terminal.read()).await {
                Ok(read) => read,
                Err(_silence) => return,
            },
        };
        let Ok(piece) = read else { return };
        if piece.is_empty() || write.data_bytes(piece).await.is_err() {
            return;
        }
    }
}

async fn forward_output(
    from: Option<impl AsyncRead + Unpin>,
    write: &ChannelWriteHalf<server::Msg>,
    kind: Option<u32>,
) {
    let Some(mut from) = from else { return };
    while let Ok(piece) = read_chunk(&mut from).await {
        if piece.is_empty() {
            return;
        }
        let sent = match kind {
            None => write.data_bytes(piece).await,
            Some(kind) => write.extended_data_bytes(kind, piece).await,
        };
        if sent.is_err() {
            return;
        }
    }
}

fn signal_group(child: &Child, signal: Signal) {
    // The id is present only while the child was not reaped, so it cannot belong to another process.
    if let Some(id) = child.id().and_then(|id| i32::try_from(id).ok()) {
        let _ = killpg(nix::unistd::Pid::from_raw(id), signal);
    }
}

/// Hangs up the program after the client has disconnected. A program that ignores SIGHUP (`nohup`) keeps running.
fn hang_up(mut child: Child, ended: bool) {
    if ended {
        return;
    }
    signal_group(&child, Signal::SIGHUP);
    signal_group(&child, Signal::SIGCONT);
    tokio::spawn(async move {
        let _ = child.wait().await;
    });
}

fn start_program(start: &ProgramStart) -> Result<Child, StartError> {
    let shell = start.session.account.shell.as_path();
    let shown = || shell.display().to_string();
    match &start.what {
        ProgramKind::Shell if start.notice.is_some() => Err(StartError::NoTerminal),
        ProgramKind::Shell => {
            let mut login = std::ffi::OsString::from("-");
            login.push(shell.file_name().unwrap_or_else(|| OsStr::new("sh")));
            let mut command = Command::new(shell);
            command.arg0(login);
            spawn(command, start).map_err(|error| {
                if is_missing(&error) {
                    StartError::NoShell(shown())
                } else {
                    StartError::Run(shown(), error)
                }
            })
        }
        ProgramKind::Command(line) => {
            let mut command = Command::new(shell);
            command.arg("-c").arg(OsStr::from_bytes(line));
            match spawn(command, start) {
                Err(error) if is_missing(&error) => start_without_shell(line, start),
                other => other.map_err(|error| StartError::Run(shown(), error)),
            }
        }
        ProgramKind::Sftp => {
            let mut command = Command::new("/proc/self/exe");
            command.arg0("windlass-agent").args(["runner", "sftp"]);
            spawn(command, start).map_err(|error| StartError::Run("the file server".to_owned(), error))
        }
    }
}

fn start_without_shell(line: &[u8], start: &ProgramStart) -> Result<Child, StartError> {
    let shell = || start.session.account.shell.display().to_string();
    let words = command::split_words(line).ok_or_else(|| StartError::NeedsShell(shell()))?;
    let mut words = words.into_iter().map(std::ffi::OsString::from_vec);
    let program = words.next().ok_or_else(|| StartError::NoShell(shell()))?;
    let mut command = Command::new(&program);
    command.args(words);
    spawn(command, start).map_err(|error| StartError::Run(program.to_string_lossy().into_owned(), error))
}

fn is_missing(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::PermissionDenied)
}

/// Starts the program as the session's user, in a separate session, with default signals.
fn spawn(mut command: Command, start: &ProgramStart) -> io::Result<Child> {
    command.env_clear().envs(start.env.iter().map(|(name, value)| (name, value)));
    match &start.terminal {
        Some((_, program_end)) => {
            command
                .stdin(program_end.try_clone()?)
                .stdout(program_end.try_clone()?)
                .stderr(program_end.try_clone()?);
        }
        None => {
            command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        }
    }
    let account = run_as_user::needs_switch(&start.session.account).then(|| start.session.account.clone());
    let places: Vec<CString> =
        [start.session.dir.as_path(), start.session.account.home.as_path(), Path::new("/")]
            .into_iter()
            .filter_map(|place| CString::new(place.as_os_str().as_bytes()).ok())
            .collect();
    let has_terminal = start.terminal.is_some();
    let restrictions = Restrictions::for_children();
    if restrictions.are_active() && account.is_none() {
        return Err(io::Error::new(io::ErrorKind::PermissionDenied, "a confined task has no root user"));
    }
    let prepare = move || {
        rustix::process::setsid()?;
        if has_terminal {
            #[expect(unsafe_code, reason = "standard input by its number")]
            // SAFETY: standard input was just put in place and is not closed before the program runs.
            let input = unsafe { BorrowedFd::borrow_raw(0) };
            rustix::process::ioctl_tiocsctty(input)?;
        }
        // A parent that ignores INT, QUIT or HUP (started by nohup) would make every session ignore Ctrl-C.
        reset_signals()?;
        if let Some(account) = &account {
            restrictions.drop_capabilities()?;
            run_as_user::switch_to_account(account)?;
        }
        // The first directory that this user can enter.
        let _ = places.iter().any(|place| rustix::process::chdir(place).is_ok());
        restrictions.seal()
    };
    #[expect(unsafe_code, reason = "the child is prepared between fork and exec")]
    // SAFETY: `prepare` makes only system calls that are safe in a signal handler; it neither allocates nor locks.
    unsafe {
        command.pre_exec(prepare);
    }
    command.spawn()
}

fn reset_signals() -> io::Result<()> {
    for each in Signal::iterator() {
        if !matches!(each, Signal::SIGKILL | Signal::SIGSTOP) {
            #[expect(unsafe_code, reason = "nix marks every change of a handler")]
            // SAFETY: the default handler runs no code of ours.
            unsafe {
                signal(each, SigHandler::SigDfl)?;
            }
        }
    }
    sigprocmask(SigmaskHow::SIG_SETMASK, Some(&SigSet::empty()), None)?;
    Ok(())
}
