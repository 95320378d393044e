//! Creation of the entries: always relative to a handle of the parent directory, never through a link.

use std::{
    ffi::{OsStr, OsString},
    fs::File,
    io::{self, Read, Write as _},
    os::{
        fd::{BorrowedFd, OwnedFd},
        unix::ffi::OsStrExt as _,
    },
};

use rustix::{
    fs::{
        AtFlags, FileType, Mode, OFlags, Timespec, Timestamps, fchmod, futimens, linkat, mkdirat, openat,
        statat, symlinkat, unlinkat,
    },
    io::Errno,
};

use super::{ArchiveError, CONTENT, TopLevel, UnpackError, entry_name::PathParts};

/// Maximum number of directories that are read-only for their owner; their mode is set at the end.
const PENDING_MODES_MAX: usize = 10_000;
const BUFFER: usize = 128 << 10;
const DIRECTORY_FLAGS: OFlags =
    OFlags::RDONLY.union(OFlags::DIRECTORY).union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);
/// Mode of directories that the archive does not list.
const DIRECTORY_MODE: Mode = Mode::from_raw_mode(0o755);

/// Attributes of an entry other than its name.
pub(super) struct EntryMeta<'a> {
    pub(super) shown: &'a str,
    pub(super) mode: u32,
    pub(super) mtime: u64,
}

impl EntryMeta<'_> {
    /// Returns the mode without set-user-id, set-group-id and sticky bits.
    fn mode(&self) -> Mode {
        Mode::from_raw_mode(self.mode & 0o777)
    }

    fn write_error(&self, source: impl Into<io::Error>) -> UnpackError {
        UnpackError::Write { entry: self.shown.to_owned(), source: source.into() }
    }

    fn conflict_error(&self) -> UnpackError {
        ArchiveError::Conflict { entry: self.shown.to_owned() }.into()
    }
}

/// File tree below the target directory.
pub(super) struct TargetTree<'a> {
    dir: BorrowedFd<'a>,
    has_content: bool,
    /// Number of directories created only because an entry is below them.
    pub(super) implied: u64,
    /// Parent directory of the last entry, because the next entry is often in the same one.
    last: Option<(Vec<OsString>, OwnedFd)>,
    locked: Vec<(Vec<OsString>, Mode)>,
    buffer: Vec<u8>,
}

impl<'a> TargetTree<'a> {
    pub(super) fn new(dir: BorrowedFd<'a>, top: TopLevel) -> Result<Self, UnpackError> {
        let keep = top == TopLevel::Keep;
        if keep {
            mkdirat(dir, CONTENT, DIRECTORY_MODE)
                .map_err(|errno| UnpackError::Write { entry: CONTENT.to_owned(), source: errno.into() })?;
        }
        Ok(Self { dir, has_content: keep, implied: 0, last: None, locked: Vec::new(), buffer: Vec::new() })
    }

    pub(super) fn has_content(&self) -> bool {
        self.has_content
    }

    pub(super) fn add_directory(
        &mut self,
        parts: &PathParts<'_>,
        meta: &EntryMeta<'_>,
    ) -> Result<(), UnpackError> {
        self.has_content = true;
        let path = content_path(parts);
        let made = self.implied;
        let handle = self.open(&path, meta, true)?;
        self.implied = made.max(self.implied.saturating_sub(1));
        let mode = meta.mode();
        if mode.contains(Mode::RWXU) {
            return fchmod(&handle, mode).map_err(|errno| meta.write_error(errno));
        }
        if self.locked.len() == PENDING_MODES_MAX {
            return Err(ArchiveError::TooManyEntries { limit: PENDING_MODES_MAX as u64 }.into());
        }
        self.locked.push((path.iter().map(|part| (*part).to_owned()).collect(), mode));
        Ok(())
    }

    pub(super) fn file(
        &mut self,
        parts: &PathParts<'_>,
        meta: &EntryMeta<'_>,
        content: &mut impl Read,
        size: u64,
    ) -> Result<(), UnpackError> {
        let (dir, name) = self.open_parent(parts, meta)?;
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let made = create_replacing(&dir, name, || openat(&dir, name, flags, Mode::RUSR | Mode::WUSR));
        let mut file = File::from(made.map_err(|errno| to_unpack_error(errno, meta))?);
        self.last = Some((parent_path(parts), dir));
        self.copy(content, &mut file, size, meta)?;
        fchmod(&file, meta.mode()).map_err(|errno| meta.write_error(errno))?;
        let time = Timespec { tv_sec: i64::try_from(meta.mtime).unwrap_or(0), tv_nsec: 0 };
        futimens(&file, &Timestamps { last_access: time, last_modification: time })
            .map_err(|errno| meta.write_error(errno))
    }

    pub(super) fn add_symlink(
        &mut self,
        parts: &PathParts<'_>,
        meta: &EntryMeta<'_>,
        target: &[u8],
    ) -> Result<(), UnpackError> {
        let (dir, name) = self.open_parent(parts, meta)?;
        let target = OsStr::from_bytes(target);
        create_replacing(&dir, name, || symlinkat(target, &dir, name))
            .map_err(|errno| to_unpack_error(errno, meta))
    }

    pub(super) fn add_hard_link(
        &mut self,
        parts: &PathParts<'_>,
        meta: &EntryMeta<'_>,
        target: &PathParts<'_>,
        bad: impl Fn() -> ArchiveError,
    ) -> Result<(), UnpackError> {
        let target = content_path(target);
        let (file, above) = target.split_last().ok_or_else(&bad)?;
        let from = self.open(above, meta, false).map_err(|_| bad())?;
        let stat = statat(&from, *file, AtFlags::SYMLINK_NOFOLLOW).map_err(|_| bad())?;
        if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile || target == content_path(parts) {
            return Err(bad().into());
        }
        let (dir, name) = self.open_parent(parts, meta)?;
        create_replacing(&dir, name, || linkat(&from, *file, &dir, name, AtFlags::empty()))
            .map_err(|errno| if errno == Errno::NOENT { bad().into() } else { to_unpack_error(errno, meta) })
    }

    /// Sets the final modes of directories that were kept writable, the deepest first.
    pub(super) fn finish(mut self) -> Result<(), UnpackError> {
        let mut locked = std::mem::take(&mut self.locked);
        locked.sort_by_key(|(path, _)| std::cmp::Reverse(path.len()));
        for (path, mode) in locked {
            let parts: Vec<&OsStr> = path.iter().map(OsString::as_os_str).collect();
            let shown = path.join(OsStr::new("/"));
            let meta = EntryMeta { shown: &shown.to_string_lossy(), mode: 0, mtime: 0 };
            let handle = self.open(&parts, &meta, false)?;
            fchmod(&handle, mode).map_err(|errno| meta.write_error(errno))?;
        }
        Ok(())
    }

    /// Returns the parent directory of an entry, creating it if it is missing, and the entry's name in it.
    fn open_parent<'p>(
        &mut self,
        parts: &PathParts<'p>,
        meta: &EntryMeta<'_>,
    ) -> Result<(OwnedFd, &'p OsStr), UnpackError> {
        self.has_content = true;
        let (name, above) = match parts.split_last() {
            Some((name, above)) => (*name, content_path(above)),
            None => (OsStr::new(CONTENT), Vec::new()),
        };
        if let Some((path, handle)) = self.last.take_if(|(path, _)| path.iter().eq(above.iter())) {
            drop(path);
            return Ok((handle, name));
        }
        Ok((self.open(&above, meta, true)?, name))
    }

    /// Opens a directory component by component, so that none of them is a link.
    fn open(&mut self, path: &[&OsStr], meta: &EntryMeta<'_>, make: bool) -> Result<OwnedFd, UnpackError> {
        let mut at =
            openat(self.dir, ".", DIRECTORY_FLAGS, Mode::empty()).map_err(|errno| meta.write_error(errno))?;
        for part in path {
            if make {
                match mkdirat(&at, *part, DIRECTORY_MODE) {
                    Ok(()) => self.implied += 1,
                    Err(Errno::EXIST) => {}
                    Err(errno) => return Err(meta.write_error(errno)),
                }
            }
            at = openat(&at, *part, DIRECTORY_FLAGS, Mode::empty())
                .map_err(|errno| to_unpack_error(errno, meta))?;
        }
        Ok(at)
    }

    fn copy(
        &mut self,
        from: &mut impl Read,
        to: &mut File,
        size: u64,
        meta: &EntryMeta<'_>,
    ) -> Result<(), UnpackError> {
        self.buffer.resize(BUFFER, 0);
        let mut written = 0;
        loop {
            let count = match from.read(&mut self.buffer) {
                Ok(0) => break,
                Ok(count) => count,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => return Err(UnpackError::Read(error)),
            };
            to.write_all(&self.buffer[..count]).map_err(|error| meta.write_error(error))?;
            written += count as u64;
        }
        if written == size { Ok(()) } else { Err(ArchiveError::Truncated.into()) }
    }
}

fn content_path<'p>(parts: &[&'p OsStr]) -> Vec<&'p OsStr> {
    std::iter::once(OsStr::new(CONTENT)).chain(parts.iter().copied()).collect()
}

fn parent_path(parts: &PathParts<'_>) -> Vec<OsString> {
    match parts.split_last() {
        Some((_, above)) => content_path(above).into_iter().map(OsStr::to_owned).collect(),
        None => Vec::new(),
    }
}

/// Replaces an earlier entry of the same name, unless that is a directory.
fn create_replacing<T>(
    dir: &OwnedFd,
    name: &OsStr,
    make: impl Fn() -> rustix::io::Result<T>,
) -> rustix::io::Result<T> {
    match make() {
        Err(Errno::EXIST) => {
            unlinkat(dir, name, AtFlags::empty()).map_err(|_| Errno::EXIST)?;
            make()
        }
        other => other,
    }
}

fn to_unpack_error(errno: Errno, meta: &EntryMeta<'_>) -> UnpackError {
    match errno {
        Errno::EXIST | Errno::NOTDIR | Errno::LOOP | Errno::ISDIR => meta.conflict_error(),
        errno => meta.write_error(errno),
    }
}
