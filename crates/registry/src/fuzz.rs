//! Answers of hostile registries, and hostile directories and archives of images.

use std::{fs, path::Path};

use proptest::prelude::*;

use crate::{
    ImageConfig, ImageName, Platform,
    challenge::Challenge,
    client::{sha256, verify_digest},
    http::Url,
    image::Document,
    local::{self, LocalName},
};

const INDEX: &str = r#"{"mediaType": "application/vnd.oci.image.index.v1+json", "manifests": [
    {"mediaType": "application/vnd.oci.image.manifest.v1+json", "digest": "DIGEST", "size": 7,
     "annotations": {"org.opencontainers.image.ref.name": "1"}, "platform": {"os": "linux", "architecture": "amd64"}}]}"#;
const MANIFEST: &str = r#"{"schemaVersion": 2, "config": {"mediaType": "x", "size": 2, "digest": "CONFIG"},
    "layers": [{"mediaType": "application/vnd.oci.image.layer.v1.tar", "size": 4, "digest": "LAYER"}]}"#;
const CONFIG: &str = r#"{"os": "linux", "architecture": "amd64", "rootfs": {"diff_ids": ["LAYER"]},
    "config": {"User": "0", "Env": ["A=1"], "Cmd": ["x"], "WorkingDir": "/", "Labels": {"a": "b"}}}"#;
const ARCHIVE_MANIFEST: &str =
    r#"[{"Config": "c.json", "RepoTags": ["a/b:1"], "Layers": ["l.tar", "l.tar"]}]"#;

/// Changes of a text: positions, and what is written over it there.
type Changes = Vec<(prop::sample::Index, String)>;

fn changes() -> impl Strategy<Value = Changes> {
    let pieces = prop::sample::select(vec![
        "",
        "\"",
        "}",
        "[[[[[[",
        "null",
        "-1",
        "18446744073709551616",
        "\"sha256:\"",
        "../../etc/passwd",
        "/",
        "\\u0000",
        "{\"manifests\":[]}",
        "é",
        "\n",
    ]);
    let piece = prop_oneof![pieces.prop_map(str::to_owned), "[ -~]{0,6}"];
    prop::collection::vec((any::<prop::sample::Index>(), piece), 0..4)
}

fn changed(text: &str, changes: &Changes) -> String {
    let mut letters: Vec<char> = text.chars().collect();
    for (at, piece) in changes {
        let at = at.index(letters.len() + 1);
        let end = (at + piece.chars().count() / 2).min(letters.len());
        letters.splice(at..end, piece.chars());
    }
    letters.into_iter().collect()
}

fn amd64() -> Platform {
    Platform::linux("amd64")
}

/// Writes a directory in the layout of the OCI. Digests are right, so that changed documents are read.
fn write_layout(dir: &Path, [index, manifest, config]: [&Changes; 3], layer: &[u8]) {
    let blobs = dir.join("blobs/sha256");
    fs::create_dir_all(&blobs).unwrap();
    let add = |bytes: &[u8]| {
        let digest = sha256(bytes);
        fs::write(blobs.join(digest.trim_start_matches("sha256:")), bytes).unwrap();
        digest
    };
    let size = format!("\"size\": {}", layer.len());
    let layer = add(layer);
    let config = add(changed(&CONFIG.replace("LAYER", &layer), config).as_bytes());
    let named = MANIFEST.replace("CONFIG", &config).replace("LAYER", &layer).replace("\"size\": 4", &size);
    let manifest = add(changed(&named, manifest).as_bytes());
    fs::write(dir.join("index.json"), changed(&INDEX.replace("DIGEST", &manifest), index)).unwrap();
}

/// Returns an archive of a directory.
fn packed(dir: &Path, flips: &[(prop::sample::Index, u8)]) -> Vec<u8> {
    let mut builder = tar::Builder::new(Vec::new());
    builder.append_dir_all(".", dir).unwrap();
    flipped(builder.into_inner().unwrap(), flips)
}

fn flipped(mut bytes: Vec<u8>, flips: &[(prop::sample::Index, u8)]) -> Vec<u8> {
    for (at, value) in flips {
        let at = at.index(bytes.len());
        bytes[at] = *value;
    }
    bytes
}

fn archive(
    manifest: &Changes,
    config: &Changes,
    layer: &[u8],
    flips: &[(prop::sample::Index, u8)],
) -> Vec<u8> {
    let mut builder = tar::Builder::new(Vec::new());
    let config =
        changed(&CONFIG.replace("[\"LAYER\"]", &format!("[\"{0}\", \"{0}\"]", sha256(layer))), config);
    let files = [
        ("manifest.json", changed(ARCHIVE_MANIFEST, manifest).into_bytes()),
        ("c.json", config.into_bytes()),
        ("l.tar", layer.to_vec()),
    ];
    for (name, bytes) in files {
        let mut header = tar::Header::new_gnu();
        header.set_mode(0o644);
        header.set_size(u64::try_from(bytes.len()).unwrap());
        builder.append_data(&mut header, name, bytes.as_slice()).unwrap();
    }
    flipped(builder.into_inner().unwrap(), flips)
}

/// Reads an image. Whatever it contains, only its own files are named as layers.
fn read_and_check(text: &str, own: &Path) -> bool {
    let name = LocalName::parse(text).unwrap().unwrap();
    let Ok(found) = local::read(&name, &amd64()) else { return false };
    for layer in &found.layers {
        assert!(layer.path.starts_with(own), "{layer:?}");
        if let Ok(mut opened) = layer.open() {
            let _ = std::io::copy(&mut opened, &mut std::io::sink());
        }
    }
    true
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: windlass_testkit::fuzz_cases(),
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    #[test]
    fn fuzz_of_registry_responses(
        base in prop::sample::select(vec![INDEX, MANIFEST, CONFIG, ARCHIVE_MANIFEST]),
        changes in changes(),
        bytes in prop::collection::vec(any::<u8>(), 0..200),
        text in "(?s).{0,80}",
        header in "(?i)(bearer|basic|digest)? ?[a-z=\",\\\\ .:/]{0,60}",
        content_type in "[a-z./+;=]{0,60}",
    ) {
        for document in [changed(base, &changes).as_bytes(), &bytes] {
            if let Ok(found) = serde_json::from_slice::<Document>(document) {
                let _ = (found.is_index(&content_type), found.platforms().count());
            }
            let _ = ImageConfig::parse(document);
            let _ = verify_digest(document, &text);
        }
        for header in [&header, &text] {
            let _ = Challenge::parse(header);
        }
        for name in [&text, &header] {
            if let Ok(parsed) = name.parse::<ImageName>() {
                prop_assert_eq!(parsed.to_string().parse::<ImageName>().unwrap(), parsed);
            }
        }
        // A relative redirect stays at its registry.
        let url = Url::parse("https://registry.example/v2/a/blobs/b?c=d").unwrap();
        for location in [&text, &header] {
            let is_relative = !location.contains("://") && !location.starts_with("//");
            if let Ok(joined) = url.join(location) {
                prop_assert!(!is_relative || joined.authority == url.authority, "{}", location);
            }
        }
    }

    #[test]
    fn fuzz_of_image_directories_and_archives(
        index in changes(),
        manifest in changes(),
        config in changes(),
        layer in prop::collection::vec(any::<u8>(), 0..600),
        flips in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..4),
    ) {
        let dir = windlass_testkit::temp_dir("image").unwrap();
        let layout = dir.path().join("layout");
        write_layout(&layout, [&index, &manifest, &config], &layer);
        read_and_check(&format!("oci:{}", layout.display()), &layout);
        let file = dir.path().join("layout.tar");
        fs::write(&file, packed(&layout, &flips)).unwrap();
        read_and_check(&format!("oci-archive:{}", file.display()), &file);
        let file = dir.path().join("archive.tar");
        fs::write(&file, archive(&manifest, &config, &layer, &flips)).unwrap();
        read_and_check(&format!("docker-archive:{}", file.display()), &file);
    }
}

#[test]
fn images_that_the_fuzz_tests_change_are_valid() {
    let dir = windlass_testkit::temp_dir("image").unwrap();
    let (layout, none) = (dir.path().join("layout"), Vec::new());
    write_layout(&layout, [&none, &none, &none], b"layer");
    assert!(read_and_check(&format!("oci:{}", layout.display()), &layout));
    let file = dir.path().join("layout.tar");
    fs::write(&file, packed(&layout, &[])).unwrap();
    assert!(read_and_check(&format!("oci-archive:{}", file.display()), &file));
    let file = dir.path().join("archive.tar");
    fs::write(&file, archive(&none, &none, b"layer", &[])).unwrap();
    assert!(read_and_check(&format!("docker-archive:{}", file.display()), &file));
}

#[test]
fn a_pipe_in_place_of_an_image_file_is_refused_at_once() {
    let dir = windlass_testkit::temp_dir("image").unwrap();
    let layout = dir.path().join("layout");
    write_layout(&layout, [&Vec::new(), &Vec::new(), &Vec::new()], b"layer");
    let pipe = |path: &Path| {
        let _ = fs::remove_file(path);
        assert!(std::process::Command::new("mkfifo").arg(path).status().unwrap().success());
    };
    let layer = layout.join("blobs/sha256").join(sha256(b"layer").trim_start_matches("sha256:"));
    pipe(&layer);
    let name = LocalName::parse(&format!("oci:{}", layout.display())).unwrap().unwrap();
    assert!(local::read(&name, &amd64()).unwrap().layers[0].open().is_err());
    pipe(&layout.join("index.json"));
    assert!(local::read(&name, &amd64()).is_err());
    let archive = dir.path().join("archive.tar");
    pipe(&archive);
    let name = LocalName::parse(&format!("docker-archive:{}", archive.display())).unwrap().unwrap();
    assert!(local::read(&name, &amd64()).is_err());
}
