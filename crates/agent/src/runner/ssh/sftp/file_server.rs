//! SFTP requests, performed on the file system.

use std::{
    collections::HashMap,
    ffi::OsStr,
    fs::{self, File, Metadata, ReadDir},
    io::{self, ErrorKind},
    os::unix::{
        ffi::OsStrExt as _,
        fs::{DirBuilderExt as _, FileExt as _, MetadataExt as _, OpenOptionsExt as _},
    },
    path::{Path, PathBuf},
};

use rustix::{
    fs::{AtFlags, CWD, Gid, Mode, RenameFlags, StatVfs, Timespec, Timestamps, Uid},
    io::Errno,
};

use super::packet::{Attrs, PACKET_MAX, PacketReader, PacketWriter, READ_MAX, Status, TruncatedPacket, kind};
use crate::clock;

const VERSION: u32 = 3;
/// Maximum number of open files and directories.
const HANDLES_MAX: usize = 512;
/// Maximum number of names in one response; so many of the longest names fit a packet.
const NAMES_MAX: usize = 100;
/// Age in seconds from which a listing shows the year instead of the time.
const RECENT_SECS: i64 = 180 * 86_400;

const EXTENSIONS: &[(&str, &str)] = &[
    ("posix-rename@openssh.com", "1"),
    ("statvfs@openssh.com", "2"),
    ("fstatvfs@openssh.com", "2"),
    ("hardlink@openssh.com", "1"),
    ("fsync@openssh.com", "1"),
    ("lsetstat@openssh.com", "1"),
    ("limits@openssh.com", "1"),
    ("expand-path@openssh.com", "1"),
];

#[derive(Debug, thiserror::Error)]
enum SftpError {
    #[error("the request is truncated")]
    Truncated,
    #[error("no such handle")]
    NoHandle,
    #[error("too many open files")]
    TooMany,
    #[error("unsupported request")]
    Unsupported,
    #[error("end of file")]
    EndOfList,
    #[error(transparent)]
    Io(#[from] io::Error),
}

impl From<TruncatedPacket> for SftpError {
    fn from(TruncatedPacket: TruncatedPacket) -> Self {
        Self::Truncated
    }
}

impl From<Errno> for SftpError {
    fn from(error: Errno) -> Self {
        Self::Io(error.into())
    }
}

impl SftpError {
    fn error_response(&self) -> Status {
        match self {
            Self::Truncated => Status::BadMessage,
            Self::NoHandle | Self::TooMany => Status::Failure,
            Self::Unsupported => Status::Unsupported,
            Self::EndOfList => Status::Eof,
            Self::Io(error) => match error.raw_os_error().map(Errno::from_raw_os_error) {
                Some(Errno::NOENT | Errno::NOTDIR | Errno::LOOP) => Status::NoSuchFile,
                Some(Errno::ACCESS | Errno::PERM) => Status::PermissionDenied,
                Some(Errno::NOSYS | Errno::OPNOTSUPP) => Status::Unsupported,
                Some(_) | None => Status::Failure,
            },
        }
    }
}

enum OpenHandle {
    File(File),
    Dir { path: PathBuf, entries: ReadDir, dots: bool },
}

/// Open files of a client.
#[derive(Default)]
pub(super) struct FileServer {
    open: HashMap<u32, OpenHandle>,
    next: u32,
}

type ResponseResult = Result<Vec<u8>, SftpError>;

impl FileServer {
    /// Returns the response to one packet; every packet has one.
    pub(super) fn answer(&mut self, packet: &[u8]) -> Vec<u8> {
        let mut reader = PacketReader(packet);
        let (Ok(kind), Ok(id)) = (reader.u8(), reader.u32()) else { return status(0, &SftpError::Truncated) };
        if kind == kind::INIT {
            // Here the number is the client's version.
            let hello = PacketWriter::new(kind::VERSION, VERSION);
            return EXTENSIONS
                .iter()
                .fold(hello, |hello, (name, version)| {
                    hello.string(name.as_bytes()).string(version.as_bytes())
                })
                .done();
        }
        self.handle_request(kind, id, &mut reader).unwrap_or_else(|refusal| status(id, &refusal))
    }

    fn handle_request(&mut self, kind: u8, id: u32, reader: &mut PacketReader<'_>) -> ResponseResult {
        match kind {
            kind::OPEN => self.open(id, read_path(reader)?, reader.u32()?, reader.attrs()?),
            kind::CLOSE => {
                self.open.remove(&read_handle(reader)?).ok_or(SftpError::NoHandle)?;
                Ok(ok_response(id))
            }
            kind::READ => self.read(id, read_handle(reader)?, reader.u64()?, reader.u32()?),
            kind::WRITE => {
                let (handle, offset, data) = (read_handle(reader)?, reader.u64()?, reader.string()?);
                self.file(handle)?.write_all_at(data, offset)?;
                Ok(ok_response(id))
            }
            kind::LSTAT => Ok(attrs_response(id, &fs::symlink_metadata(read_path(reader)?)?)),
            kind::STAT => Ok(attrs_response(id, &fs::metadata(read_path(reader)?)?)),
            kind::FSTAT => Ok(attrs_response(id, &self.file(read_handle(reader)?)?.metadata()?)),
            kind::SETSTAT => {
                result_response(id, set_attrs(read_path(reader)?, reader.attrs()?, AtFlags::empty()))
            }
            kind::FSETSTAT => {
                let handle = read_handle(reader)?;
                result_response(id, set_handle_attrs(self.file(handle)?, reader.attrs()?))
            }
            kind::OPENDIR => {
                let path = read_path(reader)?.to_owned();
                let entries = fs::read_dir(&path)?;
                self.keep(id, OpenHandle::Dir { path, entries, dots: false })
            }
            kind::READDIR => self.list_dir(id, read_handle(reader)?),
            kind::REMOVE => result_response(id, fs::remove_file(read_path(reader)?).map_err(SftpError::Io)),
            kind::MKDIR => {
                let (path, attrs) = (read_path(reader)?, reader.attrs()?);
                let mode = attrs.mode.unwrap_or(0o777) & 0o777;
                result_response(id, fs::DirBuilder::new().mode(mode).create(path).map_err(SftpError::Io))
            }
            kind::RMDIR => result_response(id, fs::remove_dir(read_path(reader)?).map_err(SftpError::Io)),
            kind::REALPATH => Ok(name_response(id, &real_path(read_path(reader)?)?)),
            kind::RENAME => result_response(id, rename_no_replace(read_path(reader)?, read_path(reader)?)),
            kind::READLINK => Ok(name_response(id, &fs::read_link(read_path(reader)?)?)),
            kind::SYMLINK => {
                // The target comes first: all implementations follow OpenSSH here and not the draft.
                let (target, link) = (read_path(reader)?, read_path(reader)?);
                result_response(id, std::os::unix::fs::symlink(target, link).map_err(SftpError::Io))
            }
            kind::EXTENDED => self.handle_extended(id, reader),
            _ => Err(SftpError::Unsupported),
        }
    }

    fn handle_extended(&mut self, id: u32, reader: &mut PacketReader<'_>) -> ResponseResult {
        match reader.string()? {
            b"posix-rename@openssh.com" => {
                result_response(id, fs::rename(read_path(reader)?, read_path(reader)?).map_err(SftpError::Io))
            }
            b"hardlink@openssh.com" => result_response(
                id,
                fs::hard_link(read_path(reader)?, read_path(reader)?).map_err(SftpError::Io),
            ),
            b"fsync@openssh.com" => {
                result_response(id, self.file(read_handle(reader)?)?.sync_all().map_err(SftpError::Io))
            }
            b"lsetstat@openssh.com" => {
                result_response(id, set_attrs(read_path(reader)?, reader.attrs()?, AtFlags::SYMLINK_NOFOLLOW))
            }
            b"statvfs@openssh.com" => Ok(statvfs_response(id, &rustix::fs::statvfs(read_path(reader)?)?)),
            b"fstatvfs@openssh.com" => {
                Ok(statvfs_response(id, &rustix::fs::fstatvfs(self.file(read_handle(reader)?)?)?))
            }
            b"expand-path@openssh.com" => Ok(name_response(id, &expand(read_path(reader)?)?)),
            b"limits@openssh.com" => Ok(PacketWriter::new(kind::EXTENDED_REPLY, id)
                .u64(PACKET_MAX as u64)
                .u64(READ_MAX as u64)
                .u64(READ_MAX as u64)
                .u64(HANDLES_MAX as u64)
                .done()),
            _ => Err(SftpError::Unsupported),
        }
    }

    fn open(&mut self, id: u32, path: &Path, flags: u32, attrs: Attrs) -> ResponseResult {
        let has = |flag: u32| flags & flag != 0;
        let (read, write, append, create, truncate, new) =
            (has(1), has(2), has(4), has(8), has(0x10), has(0x20));
        let mut options = fs::OpenOptions::new();
        options.read(read).write(write).append(append && write).mode(attrs.mode.unwrap_or(0o666) & 0o7777);
        if write {
            options.truncate(truncate && !append).create(create).create_new(create && new);
        }
        let file = options.open(path)?;
        self.keep(id, OpenHandle::File(file))
    }

    fn keep(&mut self, id: u32, open: OpenHandle) -> ResponseResult {
        if self.open.len() >= HANDLES_MAX {
            return Err(SftpError::TooMany);
        }
        while self.open.contains_key(&self.next) {
            self.next = self.next.wrapping_add(1);
        }
        let handle = self.next;
        self.open.insert(handle, open);
        self.next = handle.wrapping_add(1);
        Ok(PacketWriter::new(kind::HANDLE, id).string(&handle.to_be_bytes()).done())
    }

    fn file(&self, handle: u32) -> Result<&File, SftpError> {
        match self.open.get(&handle) {
            Some(OpenHandle::File(file)) => Ok(file),
            Some(OpenHandle::Dir { .. }) | None => Err(SftpError::NoHandle),
        }
    }

    fn read(&self, id: u32, handle: u32, offset: u64, count: u32) -> ResponseResult {
        let file = self.file(handle)?;
        let count = usize::try_from(count).unwrap_or(READ_MAX).min(READ_MAX);
        let (answer, got) =
            PacketWriter::new(kind::DATA, id).filled(count, |space| file.read_at(space, offset))?;
        if got == 0 && count > 0 {
            return Err(SftpError::EndOfList);
        }
        Ok(answer.done())
    }

    fn list_dir(&mut self, id: u32, handle: u32) -> ResponseResult {
        let Some(OpenHandle::Dir { path, entries, dots }) = self.open.get_mut(&handle) else {
            return Err(SftpError::NoHandle);
        };
        let mut names = Vec::new();
        if !std::mem::replace(dots, true) {
            names.extend([".", ".."].map(|name| (name.into(), fs::symlink_metadata(path.join(name)))));
        }
        for entry in entries.take(NAMES_MAX) {
            let entry = entry?;
            names.push((entry.file_name(), entry.metadata()));
        }
        if names.is_empty() {
            return Err(SftpError::EndOfList);
        }
        // A file may have been removed since it was listed; its name is returned without attributes.
        let count = u32::try_from(names.len()).unwrap_or(u32::MAX);
        let now = clock::now_ms() / 1000;
        let answer =
            names.iter().fold(PacketWriter::new(kind::NAME, id).u32(count), |answer, (name, meta)| {
                let name = name.as_bytes();
                match meta {
                    Ok(meta) => {
                        answer.string(name).string(&long_name(name, meta, now)).attrs(&to_attrs(meta))
                    }
                    Err(_) => answer.string(name).string(name).attrs(&Attrs::default()),
                }
            });
        Ok(answer.done())
    }
}

fn read_path<'a>(reader: &mut PacketReader<'a>) -> Result<&'a Path, SftpError> {
    let bytes = reader.string()?;
    // An empty path means the working directory of the session.
    Ok(Path::new(if bytes.is_empty() { OsStr::new(".") } else { OsStr::from_bytes(bytes) }))
}

fn read_handle(reader: &mut PacketReader<'_>) -> Result<u32, SftpError> {
    let bytes = reader.string()?.try_into().map_err(|_| SftpError::NoHandle)?;
    Ok(u32::from_be_bytes(bytes))
}

fn ok_response(id: u32) -> Vec<u8> {
    PacketWriter::new(kind::STATUS, id).u32(Status::Ok as u32).string(b"Success").string(b"").done()
}

fn result_response(id: u32, result: Result<(), SftpError>) -> ResponseResult {
    result.map(|()| ok_response(id))
}

fn status(id: u32, refusal: &SftpError) -> Vec<u8> {
    // Without the number that Rust appends to system errors: users read this.
    let message = refusal.to_string();
    let message = message.split(" (os error").next().unwrap_or_default();
    PacketWriter::new(kind::STATUS, id)
        .u32(refusal.error_response() as u32)
        .string(message.as_bytes())
        .string(b"")
        .done()
}

fn name_response(id: u32, path: &Path) -> Vec<u8> {
    let name = path.as_os_str().as_bytes();
    PacketWriter::new(kind::NAME, id).u32(1).string(name).string(name).attrs(&Attrs::default()).done()
}

fn to_attrs(meta: &Metadata) -> Attrs {
    let short = |time: i64| u32::try_from(time.max(0)).unwrap_or(u32::MAX);
    Attrs {
        size: Some(meta.size()),
        owner: Some((meta.uid(), meta.gid())),
        mode: Some(meta.mode()),
        times: Some((short(meta.atime()), short(meta.mtime()))),
    }
}

fn attrs_response(id: u32, meta: &Metadata) -> Vec<u8> {
    PacketWriter::new(kind::ATTRS, id).attrs(&to_attrs(meta)).done()
}

fn statvfs_response(id: u32, vfs: &StatVfs) -> Vec<u8> {
    [
        vfs.f_bsize,
        vfs.f_frsize,
        vfs.f_blocks,
        vfs.f_bfree,
        vfs.f_bavail,
        vfs.f_files,
        vfs.f_ffree,
        vfs.f_favail,
        vfs.f_fsid,
        // Read-only and no-setuid have the same bits on the wire.
        vfs.f_flag.bits() & 3,
        vfs.f_namemax,
    ]
    .into_iter()
    .fold(PacketWriter::new(kind::EXTENDED_REPLY, id), PacketWriter::u64)
    .done()
}

fn to_timestamps(attrs: &Attrs) -> Option<Timestamps> {
    let at = |seconds: u32| Timespec { tv_sec: i64::from(seconds), tv_nsec: 0 };
    attrs.times.map(|(access, change)| Timestamps { last_access: at(access), last_modification: at(change) })
}

/// Sets attributes in this order: a change of owner clears setuid bits, and every change but the last updates the
/// times.
fn set_attrs(path: &Path, attrs: Attrs, flags: AtFlags) -> Result<(), SftpError> {
    let follow = !flags.contains(AtFlags::SYMLINK_NOFOLLOW);
    if let (Some(size), true) = (attrs.size, follow) {
        fs::OpenOptions::new().write(true).open(path)?.set_len(size)?;
    }
    if let Some((uid, gid)) = attrs.owner {
        rustix::fs::chownat(CWD, path, Some(Uid::from_raw(uid)), Some(Gid::from_raw(gid)), flags)?;
    }
    if let Some(mode) = attrs.mode {
        rustix::fs::chmodat(CWD, path, Mode::from_raw_mode(mode & 0o7777), flags)?;
    }
    if let Some(times) = to_timestamps(&attrs) {
        rustix::fs::utimensat(CWD, path, &times, flags)?;
    }
    Ok(())
}

fn set_handle_attrs(file: &File, attrs: Attrs) -> Result<(), SftpError> {
    if let Some(size) = attrs.size {
        file.set_len(size)?;
    }
    if let Some((uid, gid)) = attrs.owner {
        rustix::fs::fchown(file, Some(Uid::from_raw(uid)), Some(Gid::from_raw(gid)))?;
    }
    if let Some(mode) = attrs.mode {
        rustix::fs::fchmod(file, Mode::from_raw_mode(mode & 0o7777))?;
    }
    if let Some(times) = to_timestamps(&attrs) {
        rustix::fs::futimens(file, &times)?;
    }
    Ok(())
}

/// Renames a file. In version 3 a rename never replaces a file.
fn rename_no_replace(from: &Path, to: &Path) -> Result<(), SftpError> {
    match rustix::fs::renameat_with(CWD, from, CWD, to, RenameFlags::NOREPLACE) {
        Err(Errno::INVAL | Errno::NOSYS) => {}
        other => return Ok(other?),
    }
    // The file system does not support `NOREPLACE`: check first.
    if fs::symlink_metadata(to).is_ok() {
        return Err(Errno::EXIST.into());
    }
    Ok(fs::rename(from, to)?)
}

/// Returns the canonical path. The last component need not exist: clients ask for the path of a new file.
fn real_path(path: &Path) -> io::Result<PathBuf> {
    match (path.canonicalize(), path.file_name()) {
        (Err(error), Some(name)) if error.kind() == ErrorKind::NotFound => {
            let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty());
            Ok(parent.unwrap_or(Path::new(".")).canonicalize()?.join(name))
        }
        (result, _) => result,
    }
}

fn expand(path: &Path) -> io::Result<PathBuf> {
    let home = || std::env::var_os("HOME").map_or_else(|| PathBuf::from("/"), PathBuf::from);
    match path.strip_prefix("~") {
        Ok(rest) => real_path(&home().join(rest)),
        Err(_) => real_path(path),
    }
}

/// Returns the line that `ls -l` would print.
fn long_name(name: &[u8], meta: &Metadata, now: i64) -> Vec<u8> {
    let mode = meta.mode();
    let mut letters = *b"?rwxrwxrwx";
    letters[0] = match mode & 0o170_000 {
        0o040_000 => b'd',
        0o100_000 => b'-',
        0o120_000 => b'l',
        0o140_000 => b's',
        0o060_000 => b'b',
        0o020_000 => b'c',
        0o010_000 => b'p',
        _ => b'?',
    };
    for (place, letter) in letters[1..].iter_mut().enumerate() {
        if mode & (0o400 >> place) == 0 {
            *letter = b'-';
        }
    }
    for (bit, place, letter) in [(0o4000, 3, b's'), (0o2000, 6, b's'), (0o1000, 9, b't')] {
        if mode & bit != 0 {
            letters[place] = if letters[place] == b'-' { letter.to_ascii_uppercase() } else { letter };
        }
    }
    let form = if (now - meta.mtime()).abs() < RECENT_SECS { "%b %e %H:%M" } else { "%b %e  %Y" };
    let date = jiff::Timestamp::from_second(meta.mtime())
        .map(|time| time.strftime(form).to_string())
        .unwrap_or_default();
    let letters = String::from_utf8_lossy(&letters);
    let mut line = format!(
        "{letters} {:4} {:<8} {:<8} {:>8} {date:12} ",
        meta.nlink(),
        meta.uid(),
        meta.gid(),
        meta.size()
    )
    .into_bytes();
    line.extend(name);
    line
}

#[cfg(test)]
mod tests;
