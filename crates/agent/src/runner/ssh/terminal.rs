//! Terminals of sessions: a pair of devices, one end for the program, the other for the channel.

use std::{
    ffi::OsString,
    io,
    os::fd::{AsFd as _, OwnedFd},
    os::unix::ffi::OsStringExt as _,
};

use russh::Pty;
use rustix::{
    fs::{Gid, Mode, OFlags, Uid},
    io::Errno,
    pty::{OpenptFlags, grantpt, ioctl_tiocgptpeer, openpt, ptsname, unlockpt},
    termios::{
        InputModes, LocalModes, OptionalActions, OutputModes, SpecialCodeIndex, Termios, Winsize, tcgetattr,
        tcsetattr, tcsetwinsize,
    },
};
use tokio::io::unix::AsyncFd;

use crate::runner::user::Account;

const CHUNK: usize = 32 * 1024;

pub(super) struct Terminal {
    master: AsyncFd<OwnedFd>,
    /// Name of the device, for `SSH_TTY`.
    pub(super) name: OsString,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct TerminalSize {
    pub(super) columns: u32,
    pub(super) rows: u32,
    pub(super) width: u32,
    pub(super) height: u32,
}

impl From<TerminalSize> for Winsize {
    fn from(size: TerminalSize) -> Self {
        let short = |value: u32| u16::try_from(value).unwrap_or(u16::MAX);
        Self {
            ws_row: short(size.rows),
            ws_col: short(size.columns),
            ws_xpixel: short(size.width),
            ws_ypixel: short(size.height),
        }
    }
}

impl Terminal {
    /// Opens both ends. The second is for the program only: while another process holds it, its end is not detected.
    pub(super) fn open(
        size: TerminalSize,
        modes: &[(Pty, u32)],
        account: &Account,
    ) -> io::Result<(Self, OwnedFd)> {
        let master = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC)?;
        grantpt(&master)?;
        unlockpt(&master)?;
        // By descriptor, not by name: `/dev/pts` may be another file system here.
        let slave =
            ioctl_tiocgptpeer(&master, OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC)?;
        let name = ptsname(&master, Vec::new()).map(|name| OsString::from_vec(name.into_bytes()));
        tcsetwinsize(&master, size.into())?;
        let mut settings = tcgetattr(&slave)?;
        apply_modes(&mut settings, modes);
        tcsetattr(&slave, OptionalActions::Now, &settings)?;
        if rustix::process::geteuid().is_root() {
            // Not fatal: without it `mesg` and re-opening by name fail, but the session works.
            let _ = rustix::fs::fchown(
                &slave,
                Some(Uid::from_raw(account.uid)),
                Some(Gid::from_raw(account.gid)),
            );
            let _ = rustix::fs::fchmod(&slave, Mode::from_raw_mode(0o620));
        }
        let flags = rustix::fs::fcntl_getfl(&master)?;
        rustix::fs::fcntl_setfl(&master, flags | OFlags::NONBLOCK)?;
        #[expect(unsafe_code, reason = "the descriptor is handed to the event loop")]
        // SAFETY: an `OwnedFd` is the same open descriptor for as long as it lives.
        let master = unsafe { AsyncFd::register(master)? };
        Ok((Self { master, name: name.unwrap_or_default() }, slave))
    }

    pub(super) fn resize(&self, size: TerminalSize) -> io::Result<()> {
        Ok(tcsetwinsize(self.master.as_fd(), size.into())?)
    }

    /// Reads bytes that the program wrote; empty once the last process has closed its end.
    pub(super) async fn read(&self) -> io::Result<Vec<u8>> {
        loop {
            let mut ready = self.master.readable().await?;
            let mut buffer = [0u8; CHUNK];
            match ready.try_io(|master| Ok(rustix::io::read(master, &mut buffer)?)) {
                Ok(Ok(count)) => return Ok(buffer[..count].to_vec()),
                // The kernel returns this error when the other end is closed.
                Ok(Err(error)) if error.raw_os_error() == Some(Errno::IO.raw_os_error()) => {
                    return Ok(Vec::new());
                }
                Ok(Err(error)) if error.kind() == io::ErrorKind::Interrupted => {}
                Ok(Err(error)) => return Err(error),
                Err(_would_block) => {}
            }
        }
    }

    pub(super) async fn write(&self, mut bytes: &[u8]) -> io::Result<()> {
        while !bytes.is_empty() {
            let mut ready = self.master.writable().await?;
            match ready.try_io(|master| Ok(rustix::io::write(master, bytes)?)) {
                Ok(Ok(count)) => bytes = &bytes[count..],
                Ok(Err(error)) if error.kind() == io::ErrorKind::Interrupted => {}
                Ok(Err(error)) => return Err(error),
                Err(_would_block) => {}
            }
        }
        Ok(())
    }
}

/// Applies the client's terminal settings, as far as Linux supports them.
fn apply_modes(settings: &mut Termios, modes: &[(Pty, u32)]) {
    for (mode, value) in modes {
        if let Some(index) = special(*mode) {
            // 255 means "no such key" on the wire, 0 on Linux.
            settings.special_codes[index] =
                u8::try_from(*value).ok().filter(|code| *code != 255).unwrap_or(0);
        } else if let Some(flag) = input(*mode) {
            settings.input_modes.set(flag, *value != 0);
        } else if let Some(flag) = local(*mode) {
            settings.local_modes.set(flag, *value != 0);
        } else if let Some(flag) = output(*mode) {
            settings.output_modes.set(flag, *value != 0);
        }
    }
}

#[expect(clippy::wildcard_enum_match_arm, reason = "most modes are of another kind")]
fn special(mode: Pty) -> Option<SpecialCodeIndex> {
    Some(match mode {
        Pty::VINTR => SpecialCodeIndex::VINTR,
        Pty::VQUIT => SpecialCodeIndex::VQUIT,
        Pty::VERASE => SpecialCodeIndex::VERASE,
        Pty::VKILL => SpecialCodeIndex::VKILL,
        Pty::VEOF => SpecialCodeIndex::VEOF,
        Pty::VEOL => SpecialCodeIndex::VEOL,
        Pty::VEOL2 => SpecialCodeIndex::VEOL2,
        Pty::VSTART => SpecialCodeIndex::VSTART,
        Pty::VSTOP => SpecialCodeIndex::VSTOP,
        Pty::VSUSP => SpecialCodeIndex::VSUSP,
        Pty::VREPRINT => SpecialCodeIndex::VREPRINT,
        Pty::VWERASE => SpecialCodeIndex::VWERASE,
        Pty::VLNEXT => SpecialCodeIndex::VLNEXT,
        Pty::VDISCARD => SpecialCodeIndex::VDISCARD,
        _ => return None,
    })
}

#[expect(clippy::wildcard_enum_match_arm, reason = "most modes are of another kind")]
fn input(mode: Pty) -> Option<InputModes> {
    Some(match mode {
        Pty::IGNPAR => InputModes::IGNPAR,
        Pty::PARMRK => InputModes::PARMRK,
        Pty::INPCK => InputModes::INPCK,
        Pty::ISTRIP => InputModes::ISTRIP,
        Pty::INLCR => InputModes::INLCR,
        Pty::IGNCR => InputModes::IGNCR,
        Pty::ICRNL => InputModes::ICRNL,
        Pty::IXON => InputModes::IXON,
        Pty::IXANY => InputModes::IXANY,
        Pty::IXOFF => InputModes::IXOFF,
        Pty::IMAXBEL => InputModes::IMAXBEL,
        Pty::IUTF8 => InputModes::IUTF8,
        _ => return None,
    })
}

#[expect(clippy::wildcard_enum_match_arm, reason = "most modes are of another kind")]
fn local(mode: Pty) -> Option<LocalModes> {
    Some(match mode {
        Pty::ISIG => LocalModes::ISIG,
        Pty::ICANON => LocalModes::ICANON,
        Pty::ECHO => LocalModes::ECHO,
        Pty::ECHOE => LocalModes::ECHOE,
        Pty::ECHOK => LocalModes::ECHOK,
        Pty::ECHONL => LocalModes::ECHONL,
        Pty::NOFLSH => LocalModes::NOFLSH,
        Pty::TOSTOP => LocalModes::TOSTOP,
        Pty::IEXTEN => LocalModes::IEXTEN,
        Pty::ECHOCTL => LocalModes::ECHOCTL,
        Pty::ECHOKE => LocalModes::ECHOKE,
        Pty::PENDIN => LocalModes::PENDIN,
        _ => return None,
    })
}

#[expect(clippy::wildcard_enum_match_arm, reason = "most modes are of another kind")]
fn output(mode: Pty) -> Option<OutputModes> {
    Some(match mode {
        Pty::OPOST => OutputModes::OPOST,
        Pty::ONLCR => OutputModes::ONLCR,
        Pty::OCRNL => OutputModes::OCRNL,
        Pty::ONOCR => OutputModes::ONOCR,
        Pty::ONLRET => OutputModes::ONLRET,
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const SIZE: TerminalSize = TerminalSize { columns: 123, rows: 45, width: 0, height: 0 };

    #[tokio::test]
    async fn a_terminal_has_the_requested_size_and_modes() {
        let modes = [(Pty::ECHO, 0), (Pty::VINTR, 7), (Pty::VSUSP, 255), (Pty::ONLCR, 1)];
        let (_terminal, slave) = Terminal::open(SIZE, &modes, &Account::root()).unwrap();
        let size = rustix::termios::tcgetwinsize(&slave).unwrap();
        assert_eq!((size.ws_col, size.ws_row), (123, 45));
        let settings = tcgetattr(&slave).unwrap();
        assert!(!settings.local_modes.contains(LocalModes::ECHO));
        assert!(settings.output_modes.contains(OutputModes::ONLCR));
        assert_eq!(settings.special_codes[SpecialCodeIndex::VINTR], 7);
        assert_eq!(settings.special_codes[SpecialCodeIndex::VSUSP], 0);
    }

    #[tokio::test]
    async fn terminal_output_is_read_before_the_end_is_reported() {
        let (terminal, slave) = Terminal::open(SIZE, &[(Pty::OPOST, 0)], &Account::root()).unwrap();
        rustix::io::write(&slave, b"last words").unwrap();
        drop(slave);
        let mut read = Vec::new();
        loop {
            let piece = terminal.read().await.unwrap();
            if piece.is_empty() {
                break;
            }
            read.extend(piece);
        }
        assert_eq!(read, b"last words");
    }
}
