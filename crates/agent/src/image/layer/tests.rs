use std::{
    fs,
    os::{
        fd::AsFd as _,
        unix::fs::{FileTypeExt as _, MetadataExt as _, PermissionsExt as _},
    },
    path::Path,
};

use proptest::prelude::*;

use super::*;

/// Builds layers, also wrong ones that the builder of the crate refuses to build.
struct TestLayer(Vec<u8>);

struct TestEntry<'a> {
    kind: u8,
    name: &'a str,
    link: &'a str,
    mode: u32,
    data: &'a [u8],
    /// Size in the header, if it is not that of the data.
    size: Option<u64>,
}

const FILE: TestEntry<'static> =
    TestEntry { kind: b'0', name: "", link: "", mode: 0o644, data: b"", size: None };

impl TestLayer {
    fn new() -> Self {
        Self(Vec::new())
    }

    fn add(mut self, entry: &TestEntry<'_>) -> Self {
        let mut header = tar::Header::new_ustar();
        header.as_old_mut().name[..entry.name.len()].copy_from_slice(entry.name.as_bytes());
        header.as_old_mut().linkname[..entry.link.len()].copy_from_slice(entry.link.as_bytes());
        header.as_old_mut().linkflag = [entry.kind];
        header.set_mode(entry.mode);
        header.set_uid(1234);
        header.set_gid(2345);
        header.set_mtime(1_000_000_000);
        header.set_size(entry.size.unwrap_or(entry.data.len() as u64));
        header.set_cksum();
        self.0.extend_from_slice(header.as_bytes());
        self.0.extend_from_slice(entry.data);
        self.0.resize(self.0.len().next_multiple_of(512), 0);
        self
    }

    fn file(self, name: &str, data: &str) -> Self {
        self.add(&TestEntry { name, data: data.as_bytes(), ..FILE })
    }

    fn dir(self, name: &str) -> Self {
        self.add(&TestEntry { kind: b'5', name, mode: 0o755, ..FILE })
    }

    fn symlink(self, name: &str, link: &str) -> Self {
        self.add(&TestEntry { kind: b'2', name, link, ..FILE })
    }

    fn hard_link(self, name: &str, link: &str) -> Self {
        self.add(&TestEntry { kind: b'1', name, link, ..FILE })
    }

    fn pax(self, records: &[(&str, &[u8])]) -> Self {
        let mut text = Vec::new();
        for (key, value) in records {
            let body = key.len() + value.len() + 3;
            let length = (body..).find(|length| length.to_string().len() + body == *length).unwrap();
            text.extend_from_slice(format!("{length} {key}=").as_bytes());
            text.extend_from_slice(value);
            text.push(b'\n');
        }
        self.add(&TestEntry { kind: b'x', name: "pax", data: &text, ..FILE })
    }

    fn done(mut self) -> Vec<u8> {
        self.0.resize(self.0.len() + 1024, 0);
        self.0
    }
}

fn unpack_to(dir: &Path, layer: &[u8], limits: LayerLimits) -> Result<LayerSummary, LayerError> {
    unpack(layer, fs::File::open(dir).unwrap().as_fd(), &limits, OwnerIds::Any)
}

#[track_caller]
fn check_refused(layer: TestLayer, expected: &str) {
    let outer = windlass_testkit::temp_dir("layer").unwrap();
    let (inside, outside) = (outer.path().join("in"), outer.path().join("out"));
    fs::create_dir(&inside).unwrap();
    fs::create_dir(&outside).unwrap();
    let message = match unpack_to(&inside, &layer.done(), LayerLimits::default()) {
        Err(LayerError::Refused(message)) => message,
        other => panic!("{other:?}"),
    };
    assert!(message.contains(expected), "{message}");
    assert_eq!(fs::read_dir(&outside).unwrap().count(), 0);
    assert_eq!(fs::read_dir(outer.path()).unwrap().count(), 2, "nothing beside the two directories");
}

#[test]
fn a_layer_keeps_owners_modes_links_and_attributes() {
    let dir = windlass_testkit::temp_dir("layer").unwrap();
    let at = |name: &str| dir.path().join(name);
    let layer = TestLayer::new()
        .dir("./")
        .dir("bin")
        .add(&TestEntry { name: "bin/su", mode: 0o4755, data: b"program", ..FILE })
        .hard_link("bin/sudo", "bin/su")
        .symlink("sh", "/bin/su")
        .add(&TestEntry { kind: b'6', name: "pipe", ..FILE })
        .pax(&[("path", "long/".repeat(30).as_bytes()), ("SCHILY.xattr.user.note", b"\0\x01 text")])
        .add(&TestEntry { kind: b'5', name: "short", mode: 0o2750, ..FILE })
        .pax(&[
            ("SCHILY.xattr.user.overlay.opaque", b"y"),
            ("SCHILY.xattr.trusted.x", b"y"),
            ("uid", b"70000"),
        ])
        .file("plain", "text");
    let bytes = layer.done();
    let summary = unpack_to(dir.path(), &bytes, LayerLimits::default()).unwrap();
    assert_eq!(summary.bytes, 11);
    assert_eq!(summary.diff_id, format!("sha256:{}", crate::digest::sha256_hex(&bytes)));
    let su = fs::metadata(at("bin/su")).unwrap();
    assert_eq!((su.mode() & 0o7777, su.uid(), su.gid(), su.nlink()), (0o4755, 1234, 2345, 2));
    assert_eq!((su.mtime(), fs::metadata(at("bin")).unwrap().mtime()), (1_000_000_000, 1_000_000_000));
    assert_eq!(su.ino(), fs::metadata(at("bin/sudo")).unwrap().ino());
    assert_eq!(fs::read_link(at("sh")).unwrap(), Path::new("/bin/su"));
    assert_eq!(fs::symlink_metadata(at("sh")).unwrap().uid(), 1234);
    assert!(fs::metadata(at("pipe")).unwrap().file_type().is_fifo());
    let long = fs::metadata(at(&"long/".repeat(30))).unwrap();
    assert_eq!(long.permissions().mode() & 0o7777, 0o2750);
    let mut value = [0; 64];
    let long = at(&"long/".repeat(30));
    let length = rustix::fs::getxattr(&long, "user.note", &mut value[..]).unwrap();
    assert_eq!(&value[..length], b"\0\x01 text");
    assert_eq!(fs::metadata(at("plain")).unwrap().uid(), 70_000);
    let listed = rustix::fs::listxattr(at("plain"), &mut [0_u8; 256][..]).unwrap();
    assert_eq!(listed, 0, "attributes of overlay mounts are not taken from images");
}

#[test]
fn removed_files_and_directories_become_marks_of_overlay_mounts() {
    let dir = windlass_testkit::temp_dir("layer").unwrap();
    let layer = TestLayer::new()
        .file("a/.wh.old", "")
        .file("b/.wh..wh..opq", "")
        .file("b/new", "")
        .file(".wh..wh.plnk", "")
        .file(".wh.again", "")
        .dir("again")
        .file(".wh.below", "")
        .file("below/x", "")
        .dir("both")
        .file(".wh.both", "")
        .file("file", "kept")
        .file(".wh.file", "");
    let summary = unpack_to(dir.path(), &layer.done(), LayerLimits::default()).unwrap();
    let mark = fs::symlink_metadata(dir.path().join("a/old")).unwrap();
    assert!(mark.file_type().is_char_device() && mark.rdev() == 0);
    assert_eq!(fs::read_to_string(dir.path().join("file")).unwrap(), "kept");
    assert!(dir.path().join("again").is_dir() && dir.path().join("below/x").is_file());
    let opaque: Vec<_> = summary.opaque.iter().map(|path| String::from_utf8_lossy(path)).collect();
    assert_eq!(opaque, ["b", "again", "below", "both"]);
    assert!(!dir.path().join(".wh..wh.plnk").exists());
}

#[test]
fn links_of_a_layer_are_resolved_inside_it() {
    let outer = windlass_testkit::temp_dir("layer").unwrap();
    let inside = outer.path().join("in");
    fs::create_dir_all(outer.path().join("etc")).unwrap();
    fs::create_dir(&inside).unwrap();
    let layer = TestLayer::new()
        .dir("etc")
        .symlink("up", "../../../../..")
        .symlink("absolute", "/etc")
        .file("up/etc/one", "1")
        .file("absolute/two", "2");
    unpack_to(&inside, &layer.done(), LayerLimits::default()).unwrap();
    assert_eq!(fs::read_to_string(inside.join("etc/one")).unwrap(), "1");
    assert_eq!(fs::read_to_string(inside.join("etc/two")).unwrap(), "2");
    assert_eq!(fs::read_dir(outer.path().join("etc")).unwrap().count(), 0);
    assert!(!Path::new("/etc/two").exists());
}

#[test]
fn a_later_entry_replaces_an_earlier_one_without_following_it() {
    let outer = windlass_testkit::temp_dir("layer").unwrap();
    let inside = outer.path().join("in");
    fs::create_dir(&inside).unwrap();
    fs::write(outer.path().join("victim"), "untouched").unwrap();
    let layer = TestLayer::new()
        .symlink("link", "../victim")
        .file("link", "new")
        .dir("tree")
        .file("tree/x", "x")
        .file("tree", "file")
        .hard_link("hard", "tree")
        .file("hard", "other");
    unpack_to(&inside, &layer.done(), LayerLimits::default()).unwrap();
    assert_eq!(fs::read_to_string(outer.path().join("victim")).unwrap(), "untouched");
    assert_eq!(fs::read_to_string(inside.join("link")).unwrap(), "new");
    assert_eq!(fs::read_to_string(inside.join("tree")).unwrap(), "file");
}

#[test]
fn hostile_layers_are_refused_and_write_nothing_outside() {
    check_refused(TestLayer::new().file("../out/x", ""), "`..`");
    check_refused(TestLayer::new().file("a/../../out/x", ""), "`..`");
    check_refused(TestLayer::new().file("/../out/x", ""), "`..`");
    check_refused(TestLayer::new().symlink("l", "../out").file("l/x", ""), "dangling link");
    check_refused(TestLayer::new().symlink("l", "/proc/self/cwd/../out").file("l/x", ""), "dangling link");
    check_refused(TestLayer::new().symlink("l", "l").file("l/x", ""), "parent");
    check_refused(TestLayer::new().file("f", "").file("f/x", ""), "parent");
    check_refused(TestLayer::new().hard_link("h", "../out/secret"), "hard link target");
    check_refused(TestLayer::new().hard_link("h", "/etc/shadow"), "hard link target");
    check_refused(TestLayer::new().symlink("l", "/etc").hard_link("h", "l/shadow"), "hard link target");
    check_refused(TestLayer::new().dir("d").hard_link("h", "d"), "hard link target");
    check_refused(TestLayer::new().file(".wh.x", "").hard_link("h", "x"), "hard link target");
    check_refused(TestLayer::new().add(&TestEntry { kind: b'4', name: "sda", ..FILE }), "device files");
    check_refused(TestLayer::new().add(&TestEntry { kind: b'3', name: "null", ..FILE }), "device files");
    check_refused(TestLayer::new().file(".wh...", ""), "removal without a name");
    check_refused(TestLayer::new().file(".wh.", ""), "removal without a name");
    check_refused(TestLayer::new().add(&TestEntry { kind: b'Z', name: "x", ..FILE }), "unknown entry type");
    check_refused(TestLayer::new().pax(&[("path", b"a\0b")]).file("x", ""), "NUL");
    check_refused(TestLayer::new().pax(&[("path", "d/".repeat(300).as_bytes())]).file("x", ""), "deeper");
    check_refused(TestLayer::new().pax(&[("path", &[b'n'; 5000])]).file("x", ""), "longer than");
    check_refused(TestLayer::new().pax(&[("size", b"-1")]).file("x", ""), "extended header");
    check_refused(TestLayer::new().pax(&[("uid", b"99999999999")]).file("x", ""), "user id");
    check_refused(TestLayer::new().add(&TestEntry { name: "x", size: Some(1 << 20), ..FILE }), "truncated");
    check_refused(TestLayer::new().add(&TestEntry { kind: b'x', size: Some(1 << 30), ..FILE }), "exceeds");
    check_refused(TestLayer::new().add(&TestEntry { kind: b'5', name: "d", data: b"data", ..FILE }), "data");
    check_refused(TestLayer::new().pax(&[("GNU.sparse.map", b"0,1")]).file("x", ""), "sparse");
}

#[test]
fn owners_are_those_that_exist_in_the_user_namespace() {
    assert_eq!(OwnerIds::Any.map(70_000, 7, "x").unwrap(), (70_000, 7));
    assert_eq!(OwnerIds::Below(65_537).map(65_536, 7, "x").unwrap(), (65_536, 7));
    assert_eq!(OwnerIds::RootOnly.map(1000, 7, "x").unwrap(), (0, 0));
    for (uid, gid) in [(65_537, 0), (0, 65_537)] {
        let error = OwnerIds::Below(65_537).map(uid, gid, "x").unwrap_err().to_string();
        assert!(error.contains("/etc/subuid"), "{error}");
    }
}

#[test]
fn a_layer_beyond_its_limits_is_refused_before_it_is_written() {
    let limits = LayerLimits { entries: 10, bytes: 1 << 20 };
    let dir = windlass_testkit::temp_dir("layer").unwrap();
    let many = (0..20).fold(TestLayer::new(), |layer, at| layer.file(&format!("f{at}"), ""));
    let refused = unpack_to(dir.path(), &many.done(), limits).unwrap_err();
    assert_eq!(refused.to_string(), "more than 10 entries");
    // Directories that no entry lists count as well.
    let deep = TestLayer::new().file(&"d/".repeat(20), "").file("a/b/c/d/e/f/g/h/i/j/k/l", "");
    assert!(unpack_to(dir.path(), &deep.done(), limits).unwrap_err().to_string().contains("entries"));
    let claimed = TestLayer::new().add(&TestEntry { name: "big", size: Some(1 << 40), ..FILE });
    assert!(unpack_to(dir.path(), &claimed.done(), limits).unwrap_err().to_string().contains("exceed"));
    // 64 MiB of zeros are 64 KiB of gzip.
    let bomb = TestLayer::new().file("a", "").done();
    let mut gzip = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::best());
    std::io::Write::write_all(&mut gzip, &bomb).unwrap();
    std::io::Write::write_all(&mut gzip, &vec![0; 64 << 20]).unwrap();
    let bomb = gzip.finish().unwrap();
    let refused = unpack_to(dir.path(), &bomb, limits).unwrap_err().to_string();
    assert_eq!(refused, "more than 1048576 uncompressed bytes");
}

#[test]
fn gzip_and_zstd_layers_are_unpacked_with_all_their_parts() {
    let layer = TestLayer::new().file("a", &"text".repeat(10_000)).file("b", "end").done();
    let (one, two) = layer.split_at(20_000);
    // A frame without contents, as `zstd:chunked` appends them.
    let skippable = [&0x184d_2a50_u32.to_le_bytes()[..], &3_u32.to_le_bytes()[..], b"toc"].concat();
    let table = [
        layer.clone(),
        gzip(&layer),
        [gzip(one), gzip(two)].concat(),
        zstd(&layer),
        [zstd(one), skippable.clone(), zstd(two), skippable].concat(),
    ];
    for compressed in table {
        let dir = windlass_testkit::temp_dir("layer").unwrap();
        let summary = unpack_to(dir.path(), &compressed, LayerLimits::default()).unwrap();
        assert_eq!(summary.diff_id, format!("sha256:{}", crate::digest::sha256_hex(&layer)));
        assert_eq!(fs::read_to_string(dir.path().join("b")).unwrap(), "end");
    }
    for broken in [gzip(&layer), zstd(&layer)] {
        let dir = windlass_testkit::temp_dir("layer").unwrap();
        assert!(unpack_to(dir.path(), &broken[..broken.len() / 2], LayerLimits::default()).is_err());
    }
}

/// Layers of entries that lead out of the directory, some of them damaged or compressed.
fn hostile_layers() -> impl Strategy<Value = Vec<u8>> {
    let part = prop::sample::select(vec!["a", "b", "..", ".", "", "/", ".wh.a", ".wh..wh..opq", "out", "é"]);
    let path = || {
        let part = part.clone();
        prop::collection::vec(part, 0..5).prop_map(|parts| parts.join("/"))
    };
    let kind = prop::sample::select(b"0123456xgLKS\0".to_vec());
    let record = prop::sample::select(vec![
        "path",
        "linkpath",
        "size",
        "uid",
        "mtime",
        "SCHILY.xattr.user.x",
        "comment",
    ]);
    let entry = (kind, path(), path(), record, prop::collection::vec(any::<u8>(), 0..40));
    let flips = prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..4);
    (prop::collection::vec(entry, 0..12), flips, 0..3_u8).prop_map(|(entries, flips, compression)| {
        let mut layer = TestLayer::new();
        for (kind, name, link, record, data) in &entries {
            layer = match kind {
                b'x' | b'g' => layer.pax(&[(*record, name.as_bytes())]),
                b'0' | 0 => layer.add(&TestEntry { kind: *kind, name, data, ..FILE }),
                _ => layer.add(&TestEntry { kind: *kind, name, link, ..FILE }),
            };
        }
        let mut bytes = layer.done();
        let damage = |bytes: &mut Vec<u8>| {
            for (at, value) in &flips {
                let at = at.index(bytes.len());
                bytes[at] = *value;
            }
        };
        match compression {
            0 => {}
            1 => bytes = zstd(&bytes),
            _ => bytes = gzip(&bytes),
        }
        damage(&mut bytes);
        bytes
    })
}

fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut gzip = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    std::io::Write::write_all(&mut gzip, bytes).unwrap();
    gzip.finish().unwrap()
}

fn zstd(bytes: &[u8]) -> Vec<u8> {
    ruzstd::encoding::compress_to_vec(bytes, ruzstd::encoding::CompressionLevel::Fastest)
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: windlass_testkit::fuzz_cases(),
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    /// Every layer is either unpacked or refused, and nothing outside of its directory changes.
    #[test]
    fn fuzz_of_image_layers(layer in hostile_layers(), bytes in prop::collection::vec(any::<u8>(), 0..1500)) {
        for layer in [&layer, &bytes] {
            let outer = windlass_testkit::temp_dir("layer").unwrap();
            let (inside, outside) = (outer.path().join("in"), outer.path().join("out"));
            fs::create_dir(&inside).unwrap();
            fs::create_dir(&outside).unwrap();
            fs::write(outside.join("a"), "kept").unwrap();
            let _ = unpack_to(&inside, layer, LayerLimits { entries: 100, bytes: 1 << 20 });
            let names: Vec<_> = fs::read_dir(&outside).unwrap().map(|entry| entry.unwrap().file_name()).collect();
            prop_assert_eq!(names, ["a"]);
            prop_assert_eq!(fs::read_to_string(outside.join("a")).unwrap(), "kept");
            prop_assert_eq!(fs::metadata(outside.join("a")).unwrap().nlink(), 1);
            prop_assert_eq!(fs::read_dir(outer.path()).unwrap().count(), 2);
        }
    }
}
