//! A real systemd as a host's first process, with separate units instead of this machine's.

use std::{fs, os::unix::fs::symlink, path::Path};

use anyhow::Result;

pub(super) const PROGRAM: &str = "/lib/systemd/systemd";
/// Directory of this machine's units, hidden from hosts.
const UNIT_DIR: &str = "/lib/systemd/system";
/// Empty targets that ordinary services depend on.
const TARGETS: [&str; 6] = ["sysinit", "basic", "multi-user", "shutdown", "network-online", "umount"];
const SSH: &str = "\
[Unit]
DefaultDependencies=no

[Service]
ExecStartPre=/bin/mkdir -p /run/sshd
ExecStart=/usr/sbin/sshd -D -e
KillMode=process
";

/// Writes the units below the host's `/etc`.
pub(super) fn install(dir: &Path) -> Result<()> {
    let units = dir.join("etc/systemd/system");
    let wanted = units.join("multi-user.target.wants");
    fs::create_dir_all(&wanted)?;
    fs::create_dir_all(dir.join("units"))?;
    for target in TARGETS {
        let text = format!("[Unit]\nDescription={target}\nDefaultDependencies=no\n");
        fs::write(units.join(format!("{target}.target")), text)?;
    }
    fs::write(units.join("ssh.service"), SSH)?;
    symlink("../ssh.service", wanted.join("ssh.service"))?;
    Ok(fs::write(dir.join("etc/machine-id"), "0123456789abcdef0123456789abcdef\n")?)
}

/// Returns the script lines that hide this machine's units, and the last line. In a container, systemd does not change
/// kernel settings.
pub(super) fn boot_script(dir: &Path) -> (String, String) {
    let hide = format!("mount --bind {}/units {UNIT_DIR}\n", dir.display());
    let exec = format!(
        "exec env container=lab {PROGRAM} --system --unit=multi-user.target --log-target=console --show-status=false\n"
    );
    (hide, exec)
}
