//! Files below a directory that somebody else may write: opened by handle, never by a path that could lead out.
//!
//! The code of a job is root in its container and owns what is below the task's `run` directory. The shim is
//! root on the host and reads there. So no name is followed through a link, and only plain files are read.

use std::{
    fs::File,
    io,
    os::fd::{AsRawFd as _, BorrowedFd},
    path::Path,
};

use landlock::{
    ABI, Access as _, AccessFs, CompatLevel, Compatible as _, PathBeneath, Ruleset, RulesetAttr as _,
    RulesetCreatedAttr as _, RulesetError, RulesetStatus,
};
use rustix::fs::{FileType, Mode, OFlags, ResolveFlags, fstat, open, openat, openat2};
use serde::{Deserialize, Serialize};

/// A directory handle under which names are looked up without leaving it.
#[derive(Debug)]
pub struct DirHandle {
    dir: rustix::fd::OwnedFd,
}

impl DirHandle {
    pub fn open(path: &Path) -> io::Result<Self> {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        Ok(Self { dir: open(path, flags, Mode::empty())? })
    }

    /// A plain file below, for reading.
    ///
    /// Looked at before it is opened: to open a device that somebody put there may already do something.
    pub fn file(&self, name: &str) -> io::Result<File> {
        let fd = self.lookup(name, OFlags::PATH)?;
        expect_type(&fd, FileType::RegularFile, "not a plain file")?;
        let path = format!("/proc/self/fd/{}", fd.as_raw_fd());
        Ok(File::from(open(path, OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC, Mode::empty())?))
    }

    /// A handle on a socket below: connect to its `/proc/self/fd` path.
    pub fn socket(&self, name: &str) -> io::Result<rustix::fd::OwnedFd> {
        let fd = self.lookup(name, OFlags::PATH)?;
        expect_type(&fd, FileType::Socket, "not a socket")?;
        Ok(fd)
    }

    fn lookup(&self, name: &str, flags: OFlags) -> io::Result<rustix::fd::OwnedFd> {
        // A name of one component cannot lead out, and the filters of older container engines know no `openat2`.
        if !matches!(name, "." | "..") && !name.contains('/') {
            return Ok(openat(&self.dir, name, flags | OFlags::CLOEXEC | OFlags::NOFOLLOW, Mode::empty())?);
        }
        let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS;
        Ok(openat2(&self.dir, name, flags | OFlags::CLOEXEC | OFlags::NOFOLLOW, Mode::empty(), resolve)?)
    }
}

fn expect_type(fd: &rustix::fd::OwnedFd, expected: FileType, otherwise: &'static str) -> io::Result<()> {
    if FileType::from_raw_mode(fstat(fd)?.st_mode) == expected {
        return Ok(());
    }
    Err(io::Error::new(io::ErrorKind::InvalidInput, otherwise))
}

/// How far the kernel holds this process in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LandlockStatus {
    /// Nothing but the given directory can be opened.
    Whole,
    /// The same, but for what this kernel cannot refuse yet (truncation or device calls, for instance).
    Partial,
    /// This kernel has no Landlock.
    Absent,
}

/// From now on, and for good, this process opens and makes files below `dir` only. Handles it has keep working.
///
/// This is a second fence. Whoever relies on it alone is wrong: a kernel without Landlock is not an error.
pub fn restrict_to_dir(dir: BorrowedFd<'_>) -> LandlockStatus {
    match apply_ruleset(dir) {
        Ok(RulesetStatus::FullyEnforced) => LandlockStatus::Whole,
        Ok(RulesetStatus::PartiallyEnforced) => LandlockStatus::Partial,
        Ok(RulesetStatus::NotEnforced) | Err(_) => LandlockStatus::Absent,
    }
}

fn apply_ruleset(dir: BorrowedFd<'_>) -> Result<RulesetStatus, RulesetError> {
    let all = AccessFs::from_all(ABI::V5);
    let rules = Ruleset::default().set_compatibility(CompatLevel::BestEffort).handle_access(all)?.create()?;
    Ok(rules.add_rule(PathBeneath::new(dir, all))?.restrict_self()?.ruleset)
}

impl rustix::fd::AsFd for DirHandle {
    fn as_fd(&self) -> rustix::fd::BorrowedFd<'_> {
        self.dir.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd as _;

    use super::*;

    /// Landlock holds the thread that asked for it, so a thread can stand for the child process.
    #[test]
    fn nothing_but_the_directory_can_be_opened_once_fenced_in() {
        let dir = windlass_testkit::temp_dir("fence").unwrap();
        let inside = dir.path().to_owned();
        let (fence, outside, below) = std::thread::spawn(move || {
            let fence = restrict_to_dir(File::open(&inside).unwrap().as_fd());
            (fence, File::open("/proc/self/stat").map(drop), std::fs::write(inside.join("x"), "x"))
        })
        .join()
        .unwrap();
        below.unwrap();
        match fence {
            LandlockStatus::Whole | LandlockStatus::Partial => {
                assert_eq!(outside.unwrap_err().kind(), io::ErrorKind::PermissionDenied);
            }
            // An honest answer is all that can be asked of a kernel without it.
            LandlockStatus::Absent => outside.unwrap(),
        }
    }
}
