//! Creation of the entries of a layer.
//!
//! Every path is resolved by the kernel with the target directory as its root (`RESOLVE_IN_ROOT`): links of the image
//! may lead anywhere inside, and never outside. The last component is never followed.

use std::{
    ffi::{OsStr, OsString},
    fs::File,
    io::{self, Read, Write as _},
    os::{
        fd::{AsFd as _, BorrowedFd, OwnedFd},
        unix::ffi::{OsStrExt as _, OsStringExt as _},
    },
    path::{Path, PathBuf},
};

use rustix::{
    fs::{
        AtFlags, FileType, Gid, Mode, OFlags, ResolveFlags, Timespec, Timestamps, Uid, XattrFlags, chownat,
        fchmod, fchown, fsetxattr, futimens, linkat, mkdirat, mknodat, openat, openat2, statat, symlinkat,
        unlinkat, utimensat,
    },
    io::Errno,
};

use super::{DEPTH_MAX, LayerError, OPAQUE_MAX, PATH_BYTES_MAX, escape_name, refused};

const WHITEOUT: &[u8] = b".wh.";
/// Names of a storage driver of the past, except for the mark of opaque directories.
const WHITEOUT_META: &[u8] = b".wh..wh.";
const OPAQUE: &[u8] = b".wh..wh..opq";
const BUFFER_BYTES: usize = 128 << 10;
/// Mode of directories that the layer does not list.
const DIRECTORY_MODE: Mode = Mode::from_raw_mode(0o755);
const OPEN_DIRECTORY: OFlags =
    OFlags::RDONLY.union(OFlags::DIRECTORY).union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);

/// Attributes of an entry other than its name.
pub(super) struct EntryMeta<'a> {
    pub(super) shown: &'a str,
    pub(super) mode: u32,
    pub(super) uid: u32,
    pub(super) gid: u32,
    pub(super) mtime: i64,
    pub(super) xattrs: &'a [(Vec<u8>, Vec<u8>)],
}

impl EntryMeta<'_> {
    fn mode(&self) -> Mode {
        Mode::from_raw_mode(self.mode & 0o7777)
    }

    fn owner(&self) -> (Option<Uid>, Option<Gid>) {
        (Some(Uid::from_raw(self.uid)), Some(Gid::from_raw(self.gid)))
    }

    fn times(&self) -> Timestamps {
        let time = Timespec { tv_sec: self.mtime, tv_nsec: 0 };
        Timestamps { last_access: time, last_modification: time }
    }

    fn write_error(&self, source: impl Into<io::Error>) -> LayerError {
        LayerError::Write { entry: self.shown.to_owned(), source: source.into() }
    }

    /// Converts an error of a path: one that the layer itself caused is a refusal.
    fn path_error(&self, errno: Errno) -> LayerError {
        match errno {
            Errno::NOTDIR | Errno::LOOP | Errno::XDEV | Errno::NAMETOOLONG | Errno::NOENT => {
                refused(format!("`{}`: a parent is not a directory ({errno})", self.shown))
            }
            errno => self.write_error(errno),
        }
    }
}

/// Path below the root of the layer, without empty components, `.` and `..`.
struct EntryPath {
    parent: PathBuf,
    /// `None` for the root itself.
    name: Option<OsString>,
}

impl EntryPath {
    fn parse(text: &[u8]) -> Result<Self, LayerError> {
        let shown = || escape_name(text);
        if text.contains(&0) {
            return Err(refused(format!("`{}`: the name contains a NUL byte", shown())));
        }
        if text.len() > PATH_BYTES_MAX {
            return Err(refused(format!("`{}`: the path is longer than {PATH_BYTES_MAX} bytes", shown())));
        }
        let parts = text.split(|byte| *byte == b'/').filter(|part| !part.is_empty() && *part != b".");
        let mut parts: Vec<&OsStr> = parts.map(OsStr::from_bytes).collect();
        if parts.iter().any(|part| *part == "..") {
            return Err(refused(format!("`{}`: paths with `..` are not allowed", shown())));
        }
        if parts.len() > DEPTH_MAX {
            return Err(refused(format!("`{}`: nested deeper than {DEPTH_MAX} directories", shown())));
        }
        let name = parts.pop().map(OsStr::to_owned);
        Ok(Self { parent: parts.iter().collect(), name })
    }
}

/// File tree of one layer.
pub(super) struct LayerTree<'a> {
    root: BorrowedFd<'a>,
    /// Parent directory of the last entry, because the next entry is often in the same one.
    last: Option<(PathBuf, OwnedFd)>,
    /// Modification times of directories, which are set at the end: creating entries changes them.
    times: Vec<(PathBuf, i64)>,
    opaque: Vec<Vec<u8>>,
    implied: u64,
    buffer: Vec<u8>,
}

impl<'a> LayerTree<'a> {
    pub(super) fn new(root: BorrowedFd<'a>) -> Result<Self, LayerError> {
        fchmod(root, DIRECTORY_MODE)
            .map_err(|errno| LayerError::Write { entry: ".".to_owned(), source: errno.into() })?;
        Ok(Self {
            root,
            last: None,
            times: Vec::new(),
            opaque: Vec::new(),
            implied: 0,
            buffer: vec![0; BUFFER_BYTES],
        })
    }

    /// Number of directories created only because an entry is below them.
    pub(super) fn implied(&self) -> u64 {
        self.implied
    }

    pub(super) fn add_directory(&mut self, name: &[u8], meta: &EntryMeta<'_>) -> Result<(), LayerError> {
        let path = EntryPath::parse(name)?;
        let Some(name) = &path.name else { return self.set_directory(self.root, PathBuf::new(), meta) };
        self.with_parent(&path, meta, |tree, parent| {
            tree.create_directory(parent, name, &path.parent, meta)?;
            let handle = openat(parent, name, OPEN_DIRECTORY, Mode::empty())
                .map_err(|errno| meta.write_error(errno))?;
            tree.set_directory(handle.as_fd(), path.parent.join(name), meta)
        })
    }

    /// Creates a directory unless there is one. One that replaces a removed one hides the contents of lower layers.
    fn create_directory(
        &mut self,
        parent: BorrowedFd<'_>,
        name: &OsStr,
        above: &Path,
        meta: &EntryMeta<'_>,
    ) -> Result<(), LayerError> {
        match mkdirat(parent, name, Mode::RWXU) {
            Ok(()) => return Ok(()),
            Err(Errno::EXIST) => {}
            Err(errno) => return Err(meta.write_error(errno)),
        }
        let found = file_type(parent, name);
        if found == Some(FileType::Directory) {
            return Ok(());
        }
        if found == Some(FileType::CharacterDevice) {
            self.add_opaque(above.join(name).as_os_str())?;
        }
        remove_entry(parent, name)
            .and_then(|()| mkdirat(parent, name, Mode::RWXU))
            .map_err(|errno| meta.write_error(errno))
    }

    fn add_opaque(&mut self, path: &OsStr) -> Result<(), LayerError> {
        if self.opaque.len() >= OPAQUE_MAX {
            return Err(refused(format!("more than {OPAQUE_MAX} opaque directories")));
        }
        self.opaque.push(path.as_bytes().to_vec());
        Ok(())
    }

    fn set_directory(
        &mut self,
        handle: BorrowedFd<'_>,
        path: PathBuf,
        meta: &EntryMeta<'_>,
    ) -> Result<(), LayerError> {
        set_owner_and_mode(handle, meta)?;
        set_xattrs(handle, meta)?;
        self.times.push((path, meta.mtime));
        Ok(())
    }

    pub(super) fn add_file(
        &mut self,
        name: &[u8],
        meta: &EntryMeta<'_>,
        content: &mut impl Read,
        size: u64,
    ) -> Result<(), LayerError> {
        let path = EntryPath::parse(name)?;
        let name = required_name(&path, meta)?;
        if name.as_bytes().starts_with(WHITEOUT) {
            io::copy(content, &mut io::sink()).map_err(LayerError::Read)?;
            return self.add_whiteout(&path, name, meta);
        }
        self.with_parent(&path, meta, |tree, parent| {
            let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
            let made =
                create_replacing(parent, name, || openat(parent, name, flags, Mode::RUSR | Mode::WUSR));
            let mut file = File::from(made.map_err(|errno| meta.write_error(errno))?);
            tree.copy(content, &mut file, size, meta)?;
            set_owner_and_mode(file.as_fd(), meta)?;
            set_xattrs(file.as_fd(), meta)?;
            futimens(&file, &meta.times()).map_err(|errno| meta.write_error(errno))
        })
    }

    /// Adds the mark of a removed file, or of a directory whose earlier contents were removed.
    fn add_whiteout(
        &mut self,
        path: &EntryPath,
        name: &OsStr,
        meta: &EntryMeta<'_>,
    ) -> Result<(), LayerError> {
        let name = name.as_bytes();
        if name == OPAQUE {
            self.with_parent(path, meta, |_, _| Ok(()))?;
            return self.add_opaque(path.parent.as_os_str());
        }
        if name.starts_with(WHITEOUT_META) {
            return Ok(());
        }
        let removed = OsStr::from_bytes(name.strip_prefix(WHITEOUT).unwrap_or_default());
        if removed.is_empty() || removed == "." || removed == ".." {
            return Err(refused(format!("`{}`: a removal without a name", meta.shown)));
        }
        self.with_parent(path, meta, |tree, parent| {
            match mknodat(parent, removed, FileType::CharacterDevice, Mode::empty(), 0) {
                // A removal concerns lower layers only, also where the same layer has such an entry.
                Err(Errno::EXIST) if file_type(parent, removed) == Some(FileType::Directory) => {
                    tree.add_opaque(path.parent.join(removed).as_os_str())
                }
                Err(Errno::EXIST) => Ok(()),
                done => done.map_err(|errno| meta.write_error(errno)),
            }
        })
    }

    pub(super) fn add_symlink(
        &mut self,
        name: &[u8],
        meta: &EntryMeta<'_>,
        target: &[u8],
    ) -> Result<(), LayerError> {
        let path = EntryPath::parse(name)?;
        let name = required_name(&path, meta)?;
        if target.is_empty() || target.len() > PATH_BYTES_MAX || target.contains(&0) {
            return Err(refused(format!("`{}`: invalid link target", meta.shown)));
        }
        self.with_parent(&path, meta, |_, parent| {
            let (uid, gid) = meta.owner();
            create_replacing(parent, name, || symlinkat(OsStr::from_bytes(target), parent, name))
                .and_then(|()| chownat(parent, name, uid, gid, AtFlags::SYMLINK_NOFOLLOW))
                .and_then(|()| utimensat(parent, name, &meta.times(), AtFlags::SYMLINK_NOFOLLOW))
                .map_err(|errno| meta.write_error(errno))
        })?;
        // A link that replaced a directory changes the meaning of paths.
        self.last = None;
        Ok(())
    }

    pub(super) fn add_hard_link(
        &mut self,
        name: &[u8],
        meta: &EntryMeta<'_>,
        target: &[u8],
    ) -> Result<(), LayerError> {
        let bad = || {
            let target = escape_name(target);
            refused(format!("`{}`: the hard link target `{target}` is not a file of the layer", meta.shown))
        };
        let path = EntryPath::parse(name)?;
        let name = required_name(&path, meta)?;
        let target = EntryPath::parse(target).map_err(|_| bad())?;
        let target_name = target.name.as_deref().ok_or_else(bad)?;
        if path.parent == target.parent && name == target_name {
            return Err(bad());
        }
        let from = self.resolve(&target.parent).map_err(|_| bad())?;
        let stat = statat(&from, target_name, AtFlags::SYMLINK_NOFOLLOW).map_err(|_| bad())?;
        let kind = FileType::from_raw_mode(stat.st_mode);
        if !matches!(kind, FileType::RegularFile | FileType::Symlink) {
            return Err(bad());
        }
        self.with_parent(&path, meta, |_, parent| {
            create_replacing(parent, name, || linkat(&from, target_name, parent, name, AtFlags::empty()))
                .map_err(|errno| if errno == Errno::NOENT { bad() } else { meta.write_error(errno) })
        })?;
        self.last = None;
        Ok(())
    }

    pub(super) fn add_fifo(&mut self, name: &[u8], meta: &EntryMeta<'_>) -> Result<(), LayerError> {
        let path = EntryPath::parse(name)?;
        let name = required_name(&path, meta)?;
        self.with_parent(&path, meta, |_, parent| {
            let (uid, gid) = meta.owner();
            let mode = Mode::from_raw_mode(meta.mode & 0o777);
            create_replacing(parent, name, || mknodat(parent, name, FileType::Fifo, mode, 0))
                .and_then(|()| chownat(parent, name, uid, gid, AtFlags::SYMLINK_NOFOLLOW))
                .and_then(|()| utimensat(parent, name, &meta.times(), AtFlags::SYMLINK_NOFOLLOW))
                .map_err(|errno| meta.write_error(errno))
        })
    }

    /// Sets the times of the directories, and returns those that are opaque.
    pub(super) fn finish(self) -> Result<Vec<Vec<u8>>, LayerError> {
        for (path, seconds) in &self.times {
            // A later entry may have replaced the directory.
            let Ok(handle) = self.resolve(path) else { continue };
            let time = Timespec { tv_sec: *seconds, tv_nsec: 0 };
            let times = Timestamps { last_access: time, last_modification: time };
            futimens(&handle, &times).map_err(|errno| LayerError::Write {
                entry: escape_name(path.as_os_str().as_bytes()),
                source: errno.into(),
            })?;
        }
        Ok(self.opaque)
    }

    /// Opens a directory below the root. Links are resolved as in a container with this root.
    fn resolve(&self, path: &Path) -> rustix::io::Result<OwnedFd> {
        let path = if path.as_os_str().is_empty() { Path::new(".") } else { path };
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let resolve = ResolveFlags::IN_ROOT | ResolveFlags::NO_MAGICLINKS | ResolveFlags::NO_XDEV;
        openat2(self.root, path, flags, Mode::empty(), resolve)
    }

    /// Calls `create` with the parent directory of an entry, which is created if it is missing.
    fn with_parent<T>(
        &mut self,
        path: &EntryPath,
        meta: &EntryMeta<'_>,
        create: impl FnOnce(&mut Self, BorrowedFd<'_>) -> Result<T, LayerError>,
    ) -> Result<T, LayerError> {
        let parent = match self.last.take() {
            Some((last, handle)) if last == path.parent => handle,
            _ => self.open_or_create(&path.parent, meta)?,
        };
        let done = create(self, parent.as_fd())?;
        self.last = Some((path.parent.clone(), parent));
        Ok(done)
    }

    fn open_or_create(&mut self, path: &Path, meta: &EntryMeta<'_>) -> Result<OwnedFd, LayerError> {
        match self.resolve(path) {
            Err(Errno::NOENT | Errno::NOTDIR) => {}
            done => return done.map_err(|errno| meta.path_error(errno)),
        }
        let mut at = self.resolve(Path::new("")).map_err(|errno| meta.path_error(errno))?;
        let mut prefix = PathBuf::new();
        for part in path {
            prefix.push(part);
            at = match self.resolve(&prefix) {
                Err(Errno::NOENT | Errno::NOTDIR) => {
                    self.create_implied(&at, part, &prefix, meta)?;
                    self.resolve(&prefix)
                }
                done => done,
            }
            .map_err(|errno| meta.path_error(errno))?;
        }
        Ok(at)
    }

    /// Creates a directory that the layer does not list. Only the mark of a removed one is replaced.
    fn create_implied(
        &mut self,
        at: &OwnedFd,
        part: &OsStr,
        prefix: &Path,
        meta: &EntryMeta<'_>,
    ) -> Result<(), LayerError> {
        self.implied += 1;
        match file_type(at.as_fd(), part) {
            None => {}
            Some(FileType::CharacterDevice) => {
                self.add_opaque(prefix.as_os_str())?;
                remove_entry(at.as_fd(), part).map_err(|errno| meta.write_error(errno))?;
            }
            Some(_) => {
                return Err(refused(format!("`{}`: a parent is a file or a dangling link", meta.shown)));
            }
        }
        mkdirat(at, part, DIRECTORY_MODE).map_err(|errno| meta.write_error(errno))
    }

    fn copy(
        &mut self,
        from: &mut impl Read,
        to: &mut File,
        size: u64,
        meta: &EntryMeta<'_>,
    ) -> Result<(), LayerError> {
        let mut written = 0;
        loop {
            let count = match from.read(&mut self.buffer) {
                Ok(0) => break,
                Ok(count) => count,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => return Err(LayerError::Read(error)),
            };
            to.write_all(&self.buffer[..count]).map_err(|error| meta.write_error(error))?;
            written += count as u64;
        }
        if written == size { Ok(()) } else { Err(refused("the layer is truncated")) }
    }
}

fn required_name<'p>(path: &'p EntryPath, meta: &EntryMeta<'_>) -> Result<&'p OsStr, LayerError> {
    path.name.as_deref().ok_or_else(|| refused(format!("`{}`: not a directory", meta.shown)))
}

/// Sets the owner first: that clears the set-user-id bit.
fn set_owner_and_mode(handle: BorrowedFd<'_>, meta: &EntryMeta<'_>) -> Result<(), LayerError> {
    let (uid, gid) = meta.owner();
    fchown(handle, uid, gid)
        .and_then(|()| fchmod(handle, meta.mode()))
        .map_err(|errno| meta.write_error(errno))
}

/// Sets capabilities of files and attributes of users. Others describe the host on which the image was built.
fn set_xattrs(handle: BorrowedFd<'_>, meta: &EntryMeta<'_>) -> Result<(), LayerError> {
    for (name, value) in meta.xattrs {
        let is_capability = name == b"security.capability";
        let is_user = name.starts_with(b"user.") && !name.starts_with(b"user.overlay.");
        if !is_capability && !is_user {
            continue;
        }
        let name = OsString::from_vec(name.clone());
        match fsetxattr(handle, &name, value, XattrFlags::empty()) {
            // A file system without such attributes; only capabilities change what a program can do.
            Err(Errno::OPNOTSUPP) if is_user => {}
            done => done.map_err(|errno| meta.write_error(errno))?,
        }
    }
    Ok(())
}

fn file_type(parent: BorrowedFd<'_>, name: &OsStr) -> Option<FileType> {
    let stat = statat(parent, name, AtFlags::SYMLINK_NOFOLLOW).ok()?;
    Some(FileType::from_raw_mode(stat.st_mode))
}

/// Replaces an earlier entry of the same name.
fn create_replacing<T>(
    parent: BorrowedFd<'_>,
    name: &OsStr,
    make: impl Fn() -> rustix::io::Result<T>,
) -> rustix::io::Result<T> {
    match make() {
        Err(Errno::EXIST) => {
            remove_entry(parent, name)?;
            make()
        }
        other => other,
    }
}

/// Removes a file, or a directory with its contents. No link is followed.
fn remove_entry(parent: BorrowedFd<'_>, name: &OsStr) -> rustix::io::Result<()> {
    match unlinkat(parent, name, AtFlags::empty()) {
        Err(Errno::ISDIR | Errno::PERM) if file_type(parent, name) == Some(FileType::Directory) => {}
        done => return done,
    }
    let handle = openat(parent, name, OPEN_DIRECTORY, Mode::empty())?;
    let entries = rustix::fs::Dir::read_from(&handle)?;
    for entry in entries {
        let entry = entry?;
        let name = OsStr::from_bytes(entry.file_name().to_bytes());
        if name != "." && name != ".." {
            remove_entry(handle.as_fd(), name)?;
        }
    }
    unlinkat(parent, name, AtFlags::REMOVEDIR)
}
