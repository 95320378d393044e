//! Files below a directory that somebody else may write: opened by handle, never by a path that could lead out.
//!
//! The code of a job is root in its container and owns what is below the task's `run` directory. The shim is
//! root on the host and reads there. So no name is followed through a link, and only plain files are read.

use std::{fs::File, io, path::Path};

use rustix::fs::{FileType, Mode, OFlags, ResolveFlags, fstat, open, openat2};

/// A directory handle under which names are looked up without leaving it.
#[derive(Debug)]
pub struct Beneath {
    dir: rustix::fd::OwnedFd,
}

impl Beneath {
    pub fn open(path: &Path) -> io::Result<Self> {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        Ok(Self { dir: open(path, flags, Mode::empty())? })
    }

    /// A plain file below, for reading.
    pub fn file(&self, name: &str) -> io::Result<File> {
        let fd = self.lookup(name, OFlags::RDONLY | OFlags::NONBLOCK)?;
        expect_type(&fd, FileType::RegularFile, "not a plain file")?;
        Ok(File::from(fd))
    }

    /// A handle on a socket below: connect to its `/proc/self/fd` path.
    pub fn socket(&self, name: &str) -> io::Result<rustix::fd::OwnedFd> {
        let fd = self.lookup(name, OFlags::PATH)?;
        expect_type(&fd, FileType::Socket, "not a socket")?;
        Ok(fd)
    }

    fn lookup(&self, name: &str, flags: OFlags) -> io::Result<rustix::fd::OwnedFd> {
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
