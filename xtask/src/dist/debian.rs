//! The Debian package.

use std::{path::Path, process::Command};

use anyhow::{Context, Result};

use super::{Release, tree::FileTree};
use crate::{process, release};

pub(super) const SCRIPTS: &[&str] = &["postinst", "prerm", "postrm"];
const SETTINGS_DIR: &str = "etc/windlass";
const DOC_DIR: &str = "usr/share/doc/windlass";

/// Returns the files that the package installs.
pub(super) fn files(release: &Release) -> Result<FileTree> {
    let mut files = FileTree::default();
    for name in release::binaries() {
        files.add_file(&format!("usr/bin/{name}"), 0o755, &release.programs.join(name));
    }
    for (name, text) in &release.packaging.units {
        files.add_bytes(&format!("usr/lib/systemd/system/{name}"), 0o644, text.as_str());
    }
    for (name, text) in &release.packaging.settings {
        // They may contain passwords. systemd reads them as root.
        files.add_bytes(&format!("{SETTINGS_DIR}/{name}"), 0o600, text.as_str());
    }
    release.add_documentation(&mut files, "usr/share")?;
    files.add_bytes(&format!("{DOC_DIR}/copyright"), 0o644, release.packaging.copyright.as_str());
    files.add_bytes(
        &format!("{DOC_DIR}/changelog.gz"),
        0o644,
        super::tree::gzip_bytes(release.packaging.changelog.as_bytes())?,
    );
    files.add_bytes(&format!("{DOC_DIR}/sbom.cdx.json"), 0o644, release.sbom.as_str());
    Ok(files)
}

/// Returns the files of the package that dpkg itself reads.
fn control_files(release: &Release, files: &FileTree) -> Result<FileTree> {
    let mut control = FileTree::default();
    control.add_bytes("DEBIAN/control", 0o644, control_file(release, files.size()?));
    let conffiles: String =
        files.files().filter(|path| path.starts_with("etc/")).map(|path| format!("/{path}\n")).collect();
    control.add_bytes("DEBIAN/conffiles", 0o644, conffiles);
    for name in SCRIPTS {
        let script = release.packaging.scripts.get(*name).with_context(|| format!("no script `{name}`"))?;
        control.add_bytes(&format!("DEBIAN/{name}"), 0o755, script.as_str());
    }
    Ok(control)
}

fn control_file(release: &Release, size: u64) -> String {
    format!(
        "Package: windlass\n\
         Version: {}\n\
         Architecture: {}\n\
         Maintainer: The windlass developers <windlass@localhost>\n\
         Section: admin\n\
         Priority: optional\n\
         Installed-Size: {}\n\
         Depends: passwd, init-system-helpers (>= 1.54)\n\
         Recommends: ca-certificates, openssh-client\n\
         Suggests: docker.io | podman, bash-completion\n\
         Description: control plane for container workloads\n \
         Runs tasks, development environments, services and managed jobs on\n \
         machines that you own: this computer, SSH hosts, a Slurm cluster.\n \
         .\n \
         The package contains the command line with the server, the agent, and\n \
         units for the server, gateways, dispatchers and the agent. Only the\n \
         server is started by default.\n",
        release.version,
        release.debian_architecture(),
        size.div_ceil(1024),
    )
}

/// Builds the package with `dpkg-deb`; `scratch` is an empty directory.
pub(super) fn write(release: &Release, scratch: &Path, to: &Path) -> Result<()> {
    let files = files(release)?;
    files.write_files(scratch, release.epoch)?;
    control_files(release, &files)?.write_files(scratch, release.epoch)?;
    let mut command = Command::new("dpkg-deb");
    command
        .args(["--root-owner-group", "-Zxz", "-z6", "--threads-max=1", "--build"])
        .arg(scratch)
        .arg(to)
        .env("SOURCE_DATE_EPOCH", release.epoch.to_string());
    process::run_for_stdout(&mut command).map(|_| ())
}
