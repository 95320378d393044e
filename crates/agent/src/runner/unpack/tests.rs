//! Malicious archives: nothing outside the target changes, whatever an archive contains.

use std::{
    fs,
    os::unix::fs::{MetadataExt as _, PermissionsExt as _},
    path::{Path, PathBuf},
};

use proptest::prelude::*;
use tar::{EntryType, Header};

use super::*;

/// Directory with a canary file next to the one that is unpacked into.
struct UnpackTestDir(PathBuf);

impl UnpackTestDir {
    fn new() -> Self {
        let mut random = [0u8; 8];
        getrandom::fill(&mut random).unwrap();
        let path = std::env::temp_dir().join(format!("windlass-unpack-{:016x}", u64::from_ne_bytes(random)));
        fs::create_dir_all(path.join("in")).unwrap();
        fs::write(path.join("canary"), "sings").unwrap();
        Self(path)
    }

    fn content(&self) -> PathBuf {
        self.0.join("in").join(CONTENT)
    }

    fn unpack(&self, archive: &[u8], top: TopLevel, limits: &ArchiveLimits) -> Result<Summary, UnpackError> {
        let dir = fs::File::open(self.0.join("in")).unwrap();
        let result = unpack(archive, archive.len() as u64, &dir, top, limits);
        let names: Vec<_> = fs::read_dir(&self.0).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        assert_eq!(names.len(), 2, "something was made outside: {names:?}");
        assert_eq!(fs::read_to_string(self.0.join("canary")).unwrap(), "sings");
        assert!(fs::read_dir(self.0.join("in")).unwrap().all(|entry| entry.unwrap().file_name() == CONTENT));
        result
    }
}

impl Drop for UnpackTestDir {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// Returns one entry exactly as specified: the tar crate's builder would refuse most of these.
fn entry(kind: u8, name: &str, link: &str, data: &[u8]) -> Vec<u8> {
    sized(kind, name, link, data, data.len() as u64)
}

fn sized(kind: u8, name: &str, link: &str, data: &[u8], size: u64) -> Vec<u8> {
    let mut header = Header::new_ustar();
    let old = header.as_old_mut();
    old.name[..name.len()].copy_from_slice(name.as_bytes());
    old.linkname[..link.len()].copy_from_slice(link.as_bytes());
    header.set_entry_type(EntryType::new(kind));
    header.set_mode(if kind == b'5' { 0o755 } else { 0o644 });
    header.set_size(size);
    header.set_mtime(1_700_000_000);
    header.set_cksum();
    let mut bytes = header.as_bytes().to_vec();
    bytes.extend_from_slice(data);
    bytes.resize(bytes.len().next_multiple_of(512), 0);
    bytes
}

fn record(key: &str, value: &str) -> Vec<u8> {
    let body = format!(" {key}={value}\n");
    let mut length = body.len();
    while length != body.len() + length.to_string().len() {
        length = body.len() + length.to_string().len();
    }
    format!("{length}{body}").into_bytes()
}

fn archive(entries: &[Vec<u8>]) -> Vec<u8> {
    let mut bytes = entries.concat();
    bytes.resize(bytes.len() + 1024, 0);
    bytes
}

#[track_caller]
fn assert_refused(entries: &[Vec<u8>], why: &str) {
    for top in [TopLevel::Keep, TopLevel::Rename] {
        match UnpackTestDir::new().unpack(&archive(entries), top, &ArchiveLimits::default()) {
            Err(UnpackError::Refused(refusal)) => {
                let message = refusal.to_string();
                assert!(message.contains(why), "{top:?}: refused with `{message}`, not with `{why}`");
            }
            other => panic!("{top:?}: not refused with `{why}`: {other:?}"),
        }
    }
}

#[test]
fn entry_names_that_escape_the_directory_are_refused() {
    assert_refused(&[entry(b'0', "/etc/x", "", b"x")], "absolute path");
    assert_refused(&[entry(b'0', "../x", "", b"x")], "`..`");
    assert_refused(&[entry(b'0', "a/../../x", "", b"x")], "`..`");
    assert_refused(&[entry(b'5', "a/..", "", b"")], "`..`");
    assert_refused(&[entry(b'0', "", "", b"x")], "has no name");
    assert_refused(&[entry(b'x', "p", "", &record("path", "../x")), entry(b'0', "fine", "", b"x")], "`..`");
    assert_refused(&[entry(b'x', "p", "", &record("path", "a\0b")), entry(b'0', "fine", "", b"x")], "NUL");
    assert_refused(&[entry(b'L', "l", "", b"/etc/x\0"), entry(b'0', "fine", "", b"x")], "absolute path");
    let long = "d/".repeat(3000);
    assert_refused(
        &[entry(b'x', "p", "", &record("path", &long)), entry(b'0', "fine", "", b"x")],
        "longer than 4095 bytes",
    );
    assert_refused(
        &[entry(b'x', "p", "", &record("path", &long[..600])), entry(b'0', "f", "", b"x")],
        "deeper than 128",
    );
    assert_refused(
        &[entry(b'x', "p", "", &record("path", &"x".repeat(300))), entry(b'0', "f", "", b"x")],
        "255 bytes",
    );
}

#[test]
fn links_that_escape_the_directory_are_refused() {
    assert_refused(&[entry(b'2', "t/a", "/etc", b"")], "is outside");
    assert_refused(&[entry(b'2', "t/a", "../../x", b"")], "is outside");
    assert_refused(&[entry(b'2', "t/a", "b/../../../x", b"")], "is outside");
    assert_refused(
        &[entry(b'x', "p", "", &record("linkpath", "/etc")), entry(b'2', "t/a", "fine", b"")],
        "is outside",
    );
    assert_refused(&[entry(b'K', "k", "", b"/etc\0"), entry(b'2', "t/a", "fine", b"")], "is outside");
    assert_refused(&[entry(b'1', "t/a", "/etc/passwd", b"")], "not a file");
    assert_refused(&[entry(b'1', "t/a", "../../canary", b"")], "not a file");
    assert_refused(&[entry(b'1', "t/a", "t/missing", b"")], "not a file");
    assert_refused(&[entry(b'5', "t/d", "", b""), entry(b'1', "t/a", "t/d", b"")], "not a file");
    assert_refused(&[entry(b'2', "t/s", "f", b""), entry(b'1', "t/a", "t/s", b"")], "not a file");
    assert_refused(&[entry(b'0', "t/a", "", b""), entry(b'1', "t/a", "t/a", b"")], "not a file");
}

#[test]
fn no_entry_is_created_below_a_link() {
    let link = entry(b'2', "t/d/l", "..", b"");
    assert_refused(&[link.clone(), entry(b'0', "t/d/l/x", "", b"x")], "below a link");
    assert_refused(&[link.clone(), entry(b'5', "t/d/l", "", b"")], "below a link");
    assert_refused(&[link, entry(b'5', "t/d/l/x/y", "", b"")], "below a link");
    assert_refused(&[entry(b'0', "t/f", "", b"x"), entry(b'0', "t/f/x", "", b"x")], "below a link or file");
    assert_refused(&[entry(b'5', "t/d", "", b""), entry(b'0', "t/d", "", b"x")], "another type");
}

#[test]
fn entries_other_than_files_directories_and_links_are_refused() {
    assert_refused(&[entry(b'3', "t/a", "", b"")], "device");
    assert_refused(&[entry(b'4', "t/a", "", b"")], "device");
    assert_refused(&[entry(b'6', "t/a", "", b"")], "FIFO");
    assert_refused(&[entry(b'7', "t/a", "", b"")], "unknown entry type `7`");
    assert_refused(&[entry(b'V', "t/a", "", b"")], "unknown entry type `V`");
    assert_refused(&[entry(b'S', "t/a", "", b"data")], "sparse");
    assert_refused(
        &[entry(b'x', "p", "", &record("GNU.sparse.major", "1")), entry(b'0', "t/a", "", b"x")],
        "sparse",
    );
}

#[test]
fn archives_that_two_parsers_could_read_differently_are_refused() {
    let size = |reported: &str| entry(b'x', "p", "", &record("size", reported));
    assert_refused(&[size("512"), entry(b'0', "t/a", "", b"x")], "the headers disagree about the size");
    assert_refused(&[size("0"), entry(b'0', "t/a", "", b"x")], "the headers disagree about the size");
    assert_refused(&[sized(b'2', "t/a", "b", &[0; 512], 512)], "the headers disagree about the size");
    assert_refused(&[sized(b'5', "t/a", "", &[0; 512], 512)], "the headers disagree about the size");
    assert_refused(&[entry(b'0', "t/a/", "", b"x")], "whether it is a directory");
    let twice = [record("path", "t/a"), record("path", "t/b")].concat();
    assert_refused(&[entry(b'x', "p", "", &twice), entry(b'0', "t/a", "", b"x")], "extended header");
    let both = [entry(b'L', "l", "", b"t/a\0"), entry(b'x', "p", "", &record("path", "t/b"))].concat();
    assert_refused(&[both, entry(b'0', "t/c", "", b"x")], "extended header");
    assert_refused(
        &[entry(b'g', "g", "", &record("path", "t/a")), entry(b'0', "t/b", "", b"x")],
        "extended header",
    );
    assert_refused(&[entry(b'x', "p", "", b"999 path=a\n"), entry(b'0', "t/b", "", b"x")], "extended header");
    assert_refused(&[entry(b'x', "p", "", b"-5 a=b\n"), entry(b'0', "t/b", "", b"x")], "extended header");
    assert_refused(
        &[entry(b'0', "t/a", "", b"x"), entry(b'x', "p", "", &record("path", "t/a"))],
        "truncated",
    );
}

#[test]
fn a_global_comment_header_is_ignored() {
    let ground = UnpackTestDir::new();
    let entries = [entry(b'g', "g", "", &record("comment", "0123abcd")), entry(b'0', "t/a", "", b"x")];
    ground.unpack(&archive(&entries), TopLevel::Keep, &ArchiveLimits::default()).unwrap();
    assert_eq!(fs::read(ground.content().join("t/a")).unwrap(), b"x");
}

#[test]
fn archives_over_a_limit_are_refused_and_the_limit_is_named() {
    let small = ArchiveLimits { entries: 3, bytes: 1000, ..ArchiveLimits::default() };
    let message = |entries: &[Vec<u8>]| {
        UnpackTestDir::new().unpack(&archive(entries), TopLevel::Keep, &small).unwrap_err().to_string()
    };
    let file = |name: &str| entry(b'0', name, "", &[7; 400]);
    assert_eq!(
        message(&[file("a"), file("b"), file("c")]),
        "failed to unpack the archive: more than 1000 bytes of files"
    );
    let empty = |name: &str| entry(b'0', name, "", b"");
    assert_eq!(
        message(&[empty("a"), empty("b"), empty("c"), empty("d")]),
        "failed to unpack the archive: more than 3 entries"
    );
    assert_eq!(
        message(&[empty("a/b/c/d")]),
        "failed to unpack the archive: more than 3 entries",
        "directories nobody listed count"
    );
    let bomb = sized(b'0', "bomb", "", b"", 8 << 30);
    assert!(message(&[bomb]).contains("the declared size of 8589934592 bytes exceeds the 1024 bytes"));
    let header = sized(b'x', "p", "", b"", 2 << 20);
    assert!(message(&[header]).contains("an extended header of 2097152 bytes exceeds the limit of"));
}

/// The same bytes repeated: a huge archive that needs no memory.
struct RepeatedBytes<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl io::Read for RepeatedBytes<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let count = buffer.len().min(self.bytes.len() - self.at);
        buffer[..count].copy_from_slice(&self.bytes[self.at..self.at + count]);
        self.at = (self.at + count) % self.bytes.len();
        Ok(count)
    }
}

#[test]
fn an_archive_with_a_million_entries_is_refused() {
    let ground = UnpackTestDir::new();
    let bytes = entry(b'5', "t", "", b"");
    let dir = fs::File::open(ground.0.join("in")).unwrap();
    let result = unpack(
        RepeatedBytes { bytes: &bytes, at: 0 },
        512 * 1_000_000,
        &dir,
        TopLevel::Keep,
        &ArchiveLimits::default(),
    );
    assert_eq!(result.unwrap_err().to_string(), "failed to unpack the archive: more than 250000 entries");
}

#[test]
fn a_truncated_or_corrupt_archive_is_refused() {
    let whole = archive(&[entry(b'0', "t/a", "", &[1; 600]), entry(b'0', "t/b", "", b"x")]);
    for length in [0, 100, 512, 1000, 1536, 2048, whole.len() - 1024] {
        let message = UnpackTestDir::new()
            .unpack(&whole[..length], TopLevel::Keep, &ArchiveLimits::default())
            .unwrap_err()
            .to_string();
        assert!(
            message.contains("truncated") || message.contains("the declared size"),
            "cut at {length}: {message}"
        );
    }
    let mut bent = whole;
    bent[5] ^= 1;
    let message = UnpackTestDir::new()
        .unpack(&bent, TopLevel::Keep, &ArchiveLimits::default())
        .unwrap_err()
        .to_string();
    assert!(message.contains("invalid tar header"), "{message}");
}

#[test]
fn modes_are_kept_without_setuid_setgid_and_sticky_bits() {
    let ground = UnpackTestDir::new();
    let mut builder = tar::Builder::new(Vec::new());
    for (name, mode) in [("t/plain", 0o640), ("t/suid", 0o6755), ("t/sticky", 0o1700)] {
        let mut header = Header::new_gnu();
        header.set_mode(mode);
        header.set_size(1);
        header.set_mtime(1_700_000_000);
        builder.append_data(&mut header, name, &b"x"[..]).unwrap();
    }
    let mut header = Header::new_gnu();
    header.set_entry_type(EntryType::Directory);
    header.set_mode(0o2555);
    header.set_size(0);
    builder.append_data(&mut header, "t/locked", &b""[..]).unwrap();
    let mut header = Header::new_gnu();
    header.set_mode(0o600);
    header.set_size(1);
    builder.append_data(&mut header, "t/locked/file", &b"x"[..]).unwrap();
    ground.unpack(&builder.into_inner().unwrap(), TopLevel::Rename, &ArchiveLimits::default()).unwrap();
    let mode = |name: &str| fs::metadata(ground.content().join(name)).unwrap().permissions().mode() & 0o7777;
    assert_eq!(mode("plain"), 0o640);
    assert_eq!(mode("suid"), 0o755);
    assert_eq!(mode("sticky"), 0o700);
    assert_eq!(mode("locked"), 0o555);
    assert_eq!(fs::metadata(ground.content().join("plain")).unwrap().mtime(), 1_700_000_000);
    fs::set_permissions(ground.content().join("locked"), fs::Permissions::from_mode(0o755)).unwrap();
}

#[test]
fn internal_links_and_repeated_files_are_accepted() {
    let ground = UnpackTestDir::new();
    let entries = [
        entry(b'0', "t/f", "", b"old"),
        entry(b'0', "t/f", "", b"new"),
        entry(b'2', "t/d/l", "../f", b""),
        entry(b'1', "t/h", "t/f", b""),
        entry(b'2', "t/f2", "nowhere", b""),
        entry(b'0', "t/f2", "", b"file after link"),
    ];
    ground.unpack(&archive(&entries), TopLevel::Rename, &ArchiveLimits::default()).unwrap();
    let read = |name: &str| fs::read_to_string(ground.content().join(name)).unwrap();
    assert_eq!([read("f"), read("d/l"), read("h"), read("f2")], ["new", "new", "new", "file after link"]);
}

#[test]
fn an_archive_of_one_file_becomes_that_file() {
    let ground = UnpackTestDir::new();
    ground
        .unpack(&archive(&[entry(b'0', "name", "", b"x")]), TopLevel::Rename, &ArchiveLimits::default())
        .unwrap();
    assert_eq!(fs::read(ground.content()).unwrap(), b"x");
    assert_empty_refused(TopLevel::Rename);
}

fn assert_empty_refused(top: TopLevel) {
    let message =
        UnpackTestDir::new().unpack(&archive(&[]), top, &ArchiveLimits::default()).unwrap_err().to_string();
    assert_eq!(message, "failed to unpack the archive: the archive is empty");
}

/// Returns every file below, with its content.
fn files(dir: &Path) -> Vec<(PathBuf, Vec<u8>)> {
    let mut found = Vec::new();
    let mut todo = vec![dir.to_owned()];
    while let Some(dir) = todo.pop() {
        for entry in fs::read_dir(dir).unwrap() {
            let entry = entry.unwrap();
            match entry.file_type().unwrap() {
                kind if kind.is_dir() => todo.push(entry.path()),
                kind if kind.is_file() => found.push((entry.path(), fs::read(entry.path()).unwrap())),
                _ => {}
            }
        }
    }
    found.sort();
    found
}

fn part() -> impl Strategy<Value = &'static str> {
    prop::sample::select(vec!["a", "b", "c", "..", ".", "", "/", "canary", "é", "-x"])
}

fn hostile() -> impl Strategy<Value = Vec<u8>> {
    let path = || prop::collection::vec(part(), 0..5).prop_map(|parts| parts.join("/"));
    let kind = prop::sample::select(b"0125xgLK3467S\0".to_vec());
    let one = (kind, path(), path(), prop::collection::vec(any::<u8>(), 0..40)).prop_map(
        |(kind, name, link, data)| match kind {
            b'x' | b'g' => entry(kind, "p", "", &[record("path", &name), record("linkpath", &link)].concat()),
            b'L' | b'K' => entry(kind, "l", "", format!("{name}\0").as_bytes()),
            b'0' | 0 => entry(kind, &name, "", &data),
            other => entry(other, &name, &link, b""),
        },
    );
    prop::collection::vec(one, 0..12).prop_map(|entries| archive(&entries))
}

fn bent() -> impl Strategy<Value = Vec<u8>> {
    (hostile(), prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..4)).prop_map(
        |(mut bytes, flips)| {
            for (at, value) in flips {
                let at = at.index(bytes.len());
                bytes[at] = value;
            }
            bytes
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(400) })]

    /// Every archive is either accepted or refused, and nothing outside changes, directly or through its links.
    #[test]
    fn no_archive_changes_anything_outside_its_directory(bytes in prop_oneof![hostile(), bent()], rename in any::<bool>()) {
        let ground = UnpackTestDir::new();
        let top = if rename { TopLevel::Rename } else { TopLevel::Keep };
        if ground.unpack(&bytes, top, &ArchiveLimits::default()).is_ok() {
            let content = ground.content().canonicalize().unwrap();
            let mut todo = vec![ground.content()];
            while let Some(path) = todo.pop() {
                if let Ok(real) = path.canonicalize() {
                    prop_assert!(real.starts_with(&content), "{path:?} leads to {real:?}");
                }
                if fs::symlink_metadata(&path).unwrap().is_dir() {
                    todo.extend(fs::read_dir(&path).unwrap().map(|entry| entry.unwrap().path()));
                }
            }
        }
    }

}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(60) })]

    /// A valid archive is unpacked as another tar reader does it.
    #[test]
    fn valid_archives_are_unpacked_as_the_tar_crate_unpacks_them(
        names in prop::collection::btree_map("[a-z]{1,8}(/[a-z]{1,120}){0,3}", prop::collection::vec(any::<u8>(), 0..2000), 1..8),
    ) {
        let mut builder = tar::Builder::new(Vec::new());
        for (name, data) in &names {
            let mut header = Header::new_gnu();
            header.set_mode(0o644);
            header.set_size(data.len() as u64);
            builder.append_data(&mut header, name, data.as_slice()).unwrap();
        }
        let bytes = builder.into_inner().unwrap();
        let (ours, theirs) = (UnpackTestDir::new(), UnpackTestDir::new());
        let them = tar::Archive::new(bytes.as_slice()).unpack(theirs.0.join("in"));
        let us = ours.unpack(&bytes, TopLevel::Keep, &ArchiveLimits::default());
        prop_assert_eq!(us.is_ok(), them.is_ok(), "{:?} {:?}", us, them);
        if us.is_ok() {
            let strip = |root: PathBuf, files: Vec<(PathBuf, Vec<u8>)>| -> Vec<_> {
                files.into_iter().map(|(path, data)| (path.strip_prefix(&root).unwrap().to_owned(), data)).collect()
            };
            let theirs = theirs.0.join("in");
            prop_assert_eq!(strip(ours.content(), files(&ours.content())), strip(theirs.clone(), files(&theirs)));
        }
    }
}
