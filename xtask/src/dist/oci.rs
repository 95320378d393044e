//! A container image from scratch, as an OCI layout in a tar file. No container engine is needed to make it.
//!
//! The file also has the `manifest.json` of Docker's own format, for engines that cannot load layouts.

use std::path::{Path, PathBuf};

use anyhow::Result;
use serde_json::{Value, json};

use super::{Release, tree, tree::FileTree};
use crate::release;

/// User of the image: no host has it, and it is not root.
const USER: u64 = 65532;
const DATA_DIR: &str = "var/lib/windlass-server";
const LAYER: &str = "application/vnd.oci.image.layer.v1.tar+gzip";
const CONFIG: &str = "application/vnd.oci.image.config.v1+json";
const MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";
const INDEX: &str = "application/vnd.oci.image.index.v1+json";

/// A compressed layer.
struct Layer {
    file: PathBuf,
    digest: String,
    /// Digest of the uncompressed archive.
    diff_id: String,
}

/// Writes the image to `to`; `scratch` is an empty directory.
pub(super) fn write(release: &Release, scratch: &Path, to: &Path) -> Result<()> {
    let layers = [write_layer(release, &base_files(), scratch, "base")?, {
        let mut programs = FileTree::default();
        for name in release::binaries() {
            programs.add_file(&format!("usr/bin/{name}"), 0o755, &release.programs.join(name));
        }
        write_layer(release, &programs, scratch, "programs")?
    }];
    let mut layout = FileTree::default();
    for layer in &layers {
        layout.add_file(&blob_path(&layer.digest), 0o644, &layer.file);
    }
    let mut add_blob = |document: &Value| -> Result<(String, u64)> {
        let file = scratch.join("blob.json");
        std::fs::write(&file, document.to_string())?;
        let digest = tree::sha256(&file)?;
        layout.add_bytes(&blob_path(&digest), 0o644, document.to_string());
        Ok((digest, document.to_string().len() as u64))
    };
    let (config, config_size) = add_blob(&config(release, &layers)?)?;
    let described: Result<Vec<Value>> = layers
        .iter()
        .map(|layer| Ok(descriptor(LAYER, &layer.digest, tree::file_size(&layer.file)?)))
        .collect();
    let (manifest, manifest_size) = add_blob(&json!({
        "schemaVersion": 2,
        "mediaType": MANIFEST,
        "config": descriptor(CONFIG, &config, config_size),
        "layers": described?,
    }))?;
    let mut entry = descriptor(MANIFEST, &manifest, manifest_size);
    entry["platform"] = json!({ "architecture": release.debian_architecture(), "os": "linux" });
    entry["annotations"] = json!({
        "org.opencontainers.image.ref.name": release.version,
        "io.containerd.image.name": format!("docker.io/library/windlass:{}", release.version),
    });
    let index = json!({ "schemaVersion": 2, "mediaType": INDEX, "manifests": [entry] });
    let docker = json!([{
        "Config": blob_path(&config),
        "RepoTags": [format!("windlass:{}", release.version)],
        "Layers": layers.iter().map(|layer| blob_path(&layer.digest)).collect::<Vec<_>>(),
    }]);
    layout.add_bytes("oci-layout", 0o644, json!({ "imageLayoutVersion": "1.0.0" }).to_string());
    layout.add_bytes("index.json", 0o644, index.to_string());
    layout.add_bytes("manifest.json", 0o644, docker.to_string());
    layout.write_tar(to, "", release.epoch)
}

fn base_files() -> FileTree {
    let mut files = FileTree::default();
    files.add_bytes("etc/passwd", 0o644, format!("windlass:x:{USER}:{USER}::/{DATA_DIR}:/nonexistent\n"));
    files.add_bytes("etc/group", 0o644, format!("windlass:x:{USER}:\n"));
    files.add_directory("tmp", 0o1777, 0);
    files.add_directory(DATA_DIR, 0o700, USER);
    files
}

fn write_layer(release: &Release, files: &FileTree, scratch: &Path, name: &str) -> Result<Layer> {
    let archive = scratch.join(format!("{name}.tar"));
    let file = scratch.join(format!("{name}.tar.gz"));
    files.write_tar(&archive, "", release.epoch)?;
    tree::gzip(&archive, &file)?;
    Ok(Layer { digest: tree::sha256(&file)?, diff_id: tree::sha256(&archive)?, file })
}

fn config(release: &Release, layers: &[Layer]) -> Result<Value> {
    let created = release.time()?;
    let diff_ids: Vec<String> = layers.iter().map(|layer| format!("sha256:{}", layer.diff_id)).collect();
    let history: Vec<Value> =
        layers.iter().map(|_| json!({ "created": created, "created_by": "cargo xtask dist" })).collect();
    Ok(json!({
        "created": created,
        "architecture": release.debian_architecture(),
        "os": "linux",
        "config": {
            "User": format!("{USER}:{USER}"),
            "ExposedPorts": { "3000/tcp": {} },
            "Env": [
                "PATH=/usr/bin",
                format!("HOME=/{DATA_DIR}"),
                "WINDLASS_SERVER_HOST=0.0.0.0",
                format!("WINDLASS_SERVER_DATA_DIR=/{DATA_DIR}"),
            ],
            "Entrypoint": ["/usr/bin/windlass"],
            // A container is no machine to run jobs on.
            "Cmd": ["server", "--no-local"],
            "Volumes": { format!("/{DATA_DIR}"): {} },
            "WorkingDir": format!("/{DATA_DIR}"),
            "Labels": {
                "org.opencontainers.image.title": "windlass",
                "org.opencontainers.image.version": release.version,
                "org.opencontainers.image.licenses": "Apache-2.0",
            },
        },
        "rootfs": { "type": "layers", "diff_ids": diff_ids },
        "history": history,
    }))
}

fn descriptor(media_type: &str, digest: &str, size: u64) -> Value {
    json!({ "mediaType": media_type, "digest": format!("sha256:{digest}"), "size": size })
}

fn blob_path(digest: &str) -> String {
    format!("blobs/sha256/{digest}")
}
