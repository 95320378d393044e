use std::os::unix::fs::PermissionsExt as _;

use proptest::prelude::*;

use super::*;

struct Scratch(PathBuf);

impl Scratch {
    fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("windlass-sftp-{name}-{}", std::process::id()));
        fs::create_dir_all(&path).unwrap();
        Self(path)
    }

    fn path(&self, name: &[u8]) -> Vec<u8> {
        let mut path = self.0.as_os_str().as_bytes().to_vec();
        path.push(b'/');
        path.extend(name);
        path
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// Sends a request without the length in front, as `answer` expects it.
fn request_packet(
    files: &mut FileServer,
    kind: u8,
    build: impl FnOnce(PacketWriter) -> PacketWriter,
) -> (u8, Vec<u8>) {
    let packet = build(PacketWriter::new(kind, 42)).done();
    let answer = files.answer(&packet[4..]);
    let mut reader = PacketReader(&answer);
    assert_eq!(reader.u32().unwrap() as usize, answer.len() - 4);
    let kind = reader.u8().unwrap();
    assert_eq!(reader.u32(), Ok(42), "answers carry the request's number");
    (kind, reader.0.to_vec())
}

fn status_of((kind, body): &(u8, Vec<u8>)) -> u32 {
    assert_eq!(*kind, kind::STATUS);
    PacketReader(body).u32().unwrap()
}

fn handle_of((kind, body): &(u8, Vec<u8>)) -> Vec<u8> {
    assert_eq!(*kind, kind::HANDLE, "{}", String::from_utf8_lossy(body));
    PacketReader(body).string().unwrap().to_vec()
}

fn open(files: &mut FileServer, path: &[u8], flags: u32) -> (u8, Vec<u8>) {
    request_packet(files, kind::OPEN, |to| {
        to.string(path).u32(flags).attrs(&Attrs { mode: Some(0o640), ..Attrs::default() })
    })
}

#[test]
fn files_with_any_bytes_in_their_name_are_written_read_and_listed() {
    let scratch = Scratch::new("bytes");
    let name = scratch.path(b"caf\xe9 \xff");
    let mut files = FileServer::default();
    let handle = handle_of(&open(&mut files, &name, 2 | 8));
    let written = request_packet(&mut files, kind::WRITE, |to| to.string(&handle).u64(3).string(b"hello"));
    assert_eq!(status_of(&written), Status::Ok as u32);
    assert_eq!(
        status_of(&request_packet(&mut files, kind::CLOSE, |to| to.string(&handle))),
        Status::Ok as u32
    );
    assert_eq!(
        status_of(&request_packet(&mut files, kind::CLOSE, |to| to.string(&handle))),
        Status::Failure as u32
    );

    let handle = handle_of(&open(&mut files, &name, 1));
    let (kind, body) = request_packet(&mut files, kind::READ, |to| to.string(&handle).u64(2).u32(4));
    assert_eq!((kind, PacketReader(&body).string().unwrap()), (kind::DATA, b"\0hel".as_slice()));
    let end = request_packet(&mut files, kind::READ, |to| to.string(&handle).u64(8).u32(4));
    assert_eq!(status_of(&end), Status::Eof as u32);

    let dir = handle_of(&request_packet(&mut files, kind::OPENDIR, |to| to.string(&scratch.path(b""))));
    let (_, body) = request_packet(&mut files, kind::READDIR, |to| to.string(&dir));
    let mut reader = PacketReader(&body);
    let names: Vec<_> = (0..reader.u32().unwrap())
        .map(|_| {
            let name = reader.string().unwrap().to_vec();
            reader.string().unwrap();
            (name, reader.attrs().unwrap().size)
        })
        .collect();
    assert!(names.contains(&(b"caf\xe9 \xff".to_vec(), Some(8))), "{names:?}");
    assert_eq!(
        status_of(&request_packet(&mut files, kind::READDIR, |to| to.string(&dir))),
        Status::Eof as u32
    );
}

#[test]
fn opening_a_file_follows_the_open_flags() {
    let scratch = Scratch::new("flags");
    let name = scratch.path(b"file");
    let mut files = FileServer::default();
    assert_eq!(status_of(&open(&mut files, &name, 1)), Status::NoSuchFile as u32);
    let (read, write, append, create, truncate, new) = (1, 2, 4, 8, 0x10, 0x20);
    handle_of(&open(&mut files, &name, write | create | new));
    assert_eq!(fs::metadata(OsStr::from_bytes(&name)).unwrap().permissions().mode() & 0o777, 0o640);
    assert_eq!(status_of(&open(&mut files, &name, write | create | new)), Status::Failure as u32);
    fs::write(OsStr::from_bytes(&name), "long ago").unwrap();
    handle_of(&open(&mut files, &name, read | write));
    assert_eq!(fs::read(OsStr::from_bytes(&name)).unwrap(), b"long ago");
    let handle = handle_of(&open(&mut files, &name, write | append));
    request_packet(&mut files, kind::WRITE, |to| to.string(&handle).u64(0).string(b" and now"));
    assert_eq!(fs::read(OsStr::from_bytes(&name)).unwrap(), b"long ago and now");
    handle_of(&open(&mut files, &name, write | create | truncate));
    assert_eq!(fs::read(OsStr::from_bytes(&name)).unwrap(), b"");
}

#[test]
fn a_rename_overwrites_a_file_only_with_the_posix_extension() {
    let scratch = Scratch::new("rename");
    let (one, two) = (scratch.path(b"one"), scratch.path(b"two"));
    fs::write(OsStr::from_bytes(&one), "1").unwrap();
    fs::write(OsStr::from_bytes(&two), "2").unwrap();
    let mut files = FileServer::default();
    let refused = request_packet(&mut files, kind::RENAME, |to| to.string(&one).string(&two));
    assert_eq!(status_of(&refused), Status::Failure as u32);
    let replaced = request_packet(&mut files, kind::EXTENDED, |to| {
        to.string(b"posix-rename@openssh.com").string(&one).string(&two)
    });
    assert_eq!(status_of(&replaced), Status::Ok as u32);
    assert_eq!(fs::read(OsStr::from_bytes(&two)).unwrap(), b"1");
}

#[test]
fn file_attributes_are_set_and_returned() {
    let scratch = Scratch::new("attrs");
    let name = scratch.path(b"file");
    fs::write(OsStr::from_bytes(&name), "0123456789").unwrap();
    let mut files = FileServer::default();
    let wanted = Attrs { size: Some(4), mode: Some(0o604), times: Some((1_000, 2_000)), owner: None };
    let set = request_packet(&mut files, kind::SETSTAT, |to| to.string(&name).attrs(&wanted));
    assert_eq!(status_of(&set), Status::Ok as u32);
    let (kind, body) = request_packet(&mut files, kind::STAT, |to| to.string(&name));
    assert_eq!(kind, kind::ATTRS);
    let reported = PacketReader(&body).attrs().unwrap();
    assert_eq!(
        (reported.size, reported.mode, reported.times),
        (Some(4), Some(0o100_604), Some((1_000, 2_000)))
    );
    let handle = handle_of(&open(&mut files, &name, 2));
    request_packet(&mut files, kind::FSETSTAT, |to| {
        to.string(&handle).attrs(&Attrs { size: Some(1), ..Attrs::default() })
    });
    let (_, body) = request_packet(&mut files, kind::FSTAT, |to| to.string(&handle));
    assert_eq!(PacketReader(&body).attrs().unwrap().size, Some(1));
}

#[test]
fn symlinks_directories_and_real_paths_are_supported() {
    let scratch = Scratch::new("links");
    let mut files = FileServer::default();
    let (link, dir) = (scratch.path(b"link"), scratch.path(b"dir"));
    assert_eq!(
        status_of(&request_packet(&mut files, kind::SYMLINK, |to| to.string(b"to\xffwhere").string(&link))),
        0
    );
    let (_, body) = request_packet(&mut files, kind::READLINK, |to| to.string(&link));
    assert_eq!(PacketReader(&body[4..]).string(), Ok(b"to\xffwhere".as_slice()));
    assert_eq!(
        status_of(&request_packet(&mut files, kind::STAT, |to| to.string(&link))),
        Status::NoSuchFile as u32
    );
    assert_eq!(request_packet(&mut files, kind::LSTAT, |to| to.string(&link)).0, kind::ATTRS);
    assert_eq!(
        status_of(&request_packet(&mut files, kind::MKDIR, |to| to.string(&dir).attrs(&Attrs::default()))),
        0
    );
    let (_, body) = request_packet(&mut files, kind::REALPATH, |to| to.string(&scratch.path(b"dir/../new")));
    assert_eq!(PacketReader(&body[4..]).string(), Ok(scratch.path(b"new").as_slice()));
    let gone = request_packet(&mut files, kind::REALPATH, |to| to.string(&scratch.path(b"no/new")));
    assert_eq!(status_of(&gone), Status::NoSuchFile as u32);
    assert_eq!(status_of(&request_packet(&mut files, kind::RMDIR, |to| to.string(&dir))), 0);
    assert_eq!(status_of(&request_packet(&mut files, kind::REMOVE, |to| to.string(&link))), 0);
    let (kind, body) = request_packet(&mut files, kind::EXTENDED, |to| {
        to.string(b"statvfs@openssh.com").string(&scratch.path(b""))
    });
    assert_eq!((kind, body.len()), (kind::EXTENDED_REPLY, 88));
}

#[test]
fn the_number_of_open_files_is_limited() {
    let mut files = FileServer::default();
    let opened = (0..HANDLES_MAX + 5).filter(|_| open(&mut files, b"/dev/null", 1).0 == kind::HANDLE).count();
    assert_eq!(opened, HANDLES_MAX);
}

#[test]
fn a_directory_listing_has_the_format_of_ls() {
    let scratch = Scratch::new("long");
    let file = scratch.0.join("f");
    fs::write(&file, "12345").unwrap();
    fs::set_permissions(&file, fs::Permissions::from_mode(0o4751)).unwrap();
    let meta = fs::metadata(&file).unwrap();
    let line = String::from_utf8(long_name(b"f", &meta, meta.mtime())).unwrap();
    assert!(line.starts_with("-rwsr-x--x    1 "), "{line}");
    assert!(line.ends_with(" f") && line.contains(" 5 "), "{line}");
}

proptest! {
    #[test]
    fn arbitrary_packets_get_a_well_formed_response(packet in proptest::collection::vec(any::<u8>(), 0..64), kind in 1u8..=20) {
        // Random paths may name something in the working directory by chance: only kinds that do not modify files.
        let harmless = [kind::READ, kind::LSTAT, kind::STAT, kind::CLOSE, kind::READDIR, kind::FSTAT, kind::REALPATH];
        let mut packet = packet;
        if let Some(first) = packet.first_mut() {
            *first = harmless[usize::from(kind) % harmless.len()];
        }
        let answer = FileServer::default().answer(&packet);
        prop_assert_eq!(PacketReader(&answer).u32().unwrap() as usize, answer.len() - 4);
    }
}
