//! Image of the machines that tests create with LXD: a small Debian with systemd, cloud-init and an SSH server. Built
//! once below `target`, and again when its recipe changes.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result};

use crate::{output, process, setup, workspace::Workspace};

/// Environment variable with the directory of the image.
const VARIABLE: &str = "WINDLASS_TEST_LXD_IMAGE";
const NAME: &str = "lxd-image";
const SUITE: &str = "bookworm";
const PACKAGES: &str = "systemd,systemd-sysv,dbus,cloud-init,openssh-server,sudo,iproute2,isc-dhcp-client,ifupdown,\
                        netbase,ca-certificates";
/// Files with the archives of this Debian, of which one exists.
const SOURCES: [&str; 2] = ["/etc/apt/sources.list.d/debian.sources", "/etc/apt/sources.list"];
const INTERFACES: &str = "auto lo\niface lo inet loopback\nauto eth0\niface eth0 inet dhcp\n";
/// The minimal system has no locales to configure.
const CLOUD_CONFIG: &str = "locale: false\n";

/// Builds the image unless it is there, and returns the variable with its directory. `None` without root, which the
/// tests need as well.
pub(crate) fn ensure_for_tests(workspace: &Workspace) -> Result<Option<(&'static str, PathBuf)>> {
    if !setup::is_root()? {
        return Ok(None);
    }
    let home = workspace.target()?.join("tools").join(NAME);
    if !is_complete(&home) {
        output::print_message("missing: the image of LXD machines; building it, which takes a few minutes");
        build(&home).context("failed to build the image of LXD machines")?;
    }
    Ok(Some((VARIABLE, home)))
}

fn recipe() -> String {
    [SUITE, PACKAGES, INTERFACES, CLOUD_CONFIG].join("\n")
}

/// The recipe is written last: an image without it is incomplete.
fn is_complete(home: &Path) -> bool {
    fs::read_to_string(home.join("recipe")).is_ok_and(|text| text == recipe())
        && home.join("rootfs.squashfs").is_file()
}

fn build(home: &Path) -> Result<()> {
    let _ = fs::remove_dir_all(home);
    fs::create_dir_all(home)?;
    let root = home.join("rootfs");
    let sources = SOURCES.into_iter().find(|path| Path::new(path).exists());
    let sources =
        sources.context("this system names no Debian archive: there is no `/etc/apt/sources.list`")?;
    process::run(
        Command::new("mmdebstrap")
            .args(["--quiet", "--variant=apt", &format!("--include={PACKAGES}"), SUITE])
            .arg(&root)
            .arg(sources),
    )?;
    // Each machine makes its own.
    for entry in fs::read_dir(root.join("etc/ssh"))? {
        let path = entry?.path();
        if path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("ssh_host_")) {
            fs::remove_file(path)?;
        }
    }
    fs::write(root.join("etc/machine-id"), "")?;
    fs::write(root.join("etc/network/interfaces"), INTERFACES)?;
    fs::write(root.join("etc/cloud/cloud.cfg.d/90-windlass.cfg"), CLOUD_CONFIG)?;
    process::run(Command::new("mksquashfs").arg(&root).arg(home.join("rootfs.squashfs")).args([
        "-comp",
        "zstd",
        "-Xcompression-level",
        "3",
        "-noappend",
        "-quiet",
        "-no-progress",
    ]))?;
    fs::remove_dir_all(&root)?;
    fs::write(
        home.join("metadata.yaml"),
        format!("architecture: {}\ncreation_date: 1700000000\n", std::env::consts::ARCH),
    )?;
    process::run(
        Command::new("tar")
            .arg("-C")
            .arg(home)
            .arg("-czf")
            .arg(home.join("metadata.tar.gz"))
            .arg("metadata.yaml"),
    )?;
    fs::write(home.join("recipe"), recipe())?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_unfinished_or_outdated_image_is_not_complete() {
        let home = process::ScratchDir::new("lxd-image").unwrap();
        fs::write(home.path().join("recipe"), recipe()).unwrap();
        assert!(!is_complete(home.path()), "no root file system");
        fs::write(home.path().join("rootfs.squashfs"), "").unwrap();
        assert!(is_complete(home.path()));
        fs::write(home.path().join("recipe"), "another").unwrap();
        assert!(!is_complete(home.path()));
    }
}
