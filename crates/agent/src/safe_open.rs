//! Safe access to files below a directory that another user may write: by handle, never by a path that could escape.
//!
//! The code of a job is root in its container and owns everything below the task's `run` directory. The shim is root on
//! the host and reads there. Therefore no symbolic link is followed, and only regular files are read.

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

/// Directory handle below which names are resolved without leaving it.
#[derive(Debug)]
pub struct DirHandle {
    dir: rustix::fd::OwnedFd,
}

impl DirHandle {
    pub fn open(path: &Path) -> io::Result<Self> {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        Ok(Self { dir: open(path, flags, Mode::empty())? })
    }

    /// Opens a regular file below the directory for reading.
    ///
    /// The type is checked before the file is opened: opening a device that a job created may already have an effect.
    pub fn file(&self, name: &str) -> io::Result<File> {
        let fd = self.lookup(name, OFlags::PATH)?;
        expect_type(&fd, FileType::RegularFile, "not a regular file")?;
        let path = format!("/proc/self/fd/{}", fd.as_raw_fd());
        Ok(File::from(open(path, OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC, Mode::empty())?))
    }

    /// Returns a handle of a socket below the directory. Connect to its `/proc/self/fd` path.
    pub fn socket(&self, name: &str) -> io::Result<rustix::fd::OwnedFd> {
        let fd = self.lookup(name, OFlags::PATH)?;
        expect_type(&fd, FileType::Socket, "not a socket")?;
        Ok(fd)
    }

    fn lookup(&self, name: &str, flags: OFlags) -> io::Result<rustix::fd::OwnedFd> {
        // A name of one component cannot escape, and the filters of older container engines do not allow `openat2`.
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

/// Degree to which the kernel enforces the Landlock rules of this process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LandlockStatus {
    /// Only the directory can be opened.
    Whole,
    /// As `Whole`, except for operations that this kernel cannot deny yet (truncation or device calls, for instance).
    Partial,
    /// This kernel has no Landlock.
    Absent,
}

/// Permanently restricts this process to opening and creating files below `dir`. Handles that are open keep working.
///
/// This is a second line of defence. Do not rely on it alone: a kernel without Landlock is not an error.
pub fn restrict_to_dir(dir: BorrowedFd<'_>) -> LandlockStatus {
    match apply_ruleset(dir) {
        Ok(RulesetStatus::FullyEnforced) => LandlockStatus::Whole,
        Ok(RulesetStatus::PartiallyEnforced) => LandlockStatus::Partial,
        Ok(RulesetStatus::NotEnforced) | Err(_) => LandlockStatus::Absent,
    }
}

/// Returns whether the kernel has Landlock, and it is enabled.
pub fn has_landlock() -> bool {
    let required = Ruleset::default().set_compatibility(CompatLevel::HardRequirement);
    required.handle_access(AccessFs::from_all(ABI::V1)).and_then(|rules| rules.create()).is_ok()
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

    /// Landlock restricts the calling thread, so a thread can stand in for the child process.
    #[test]
    fn a_restricted_thread_can_open_only_its_directory() {
        let dir = windlass_testkit::temp_dir("fence").unwrap();
        let inside = dir.path().to_owned();
        let (fence, outside, below) = std::thread::spawn(move || {
            let fence = restrict_to_dir(File::open(&inside).unwrap().as_fd());
            (fence, File::open("/proc/self/stat").map(drop), std::fs::write(inside.join("x"), "x"))
        })
        .join()
        .unwrap();
        below.unwrap();
        assert_eq!(fence == LandlockStatus::Absent, !has_landlock());
        match fence {
            LandlockStatus::Whole | LandlockStatus::Partial => {
                assert_eq!(outside.unwrap_err().kind(), io::ErrorKind::PermissionDenied);
            }
            // On a kernel without Landlock only the reported status can be checked.
            LandlockStatus::Absent => outside.unwrap(),
        }
    }
}
