//! Requirements of the test levels, and their installation on Debian.

use std::{os::unix::fs::PermissionsExt as _, process::Command};

use anyhow::{Context, Result, bail};

use crate::{output, postgres, process, workspace::Workspace};

/// One requirement: how to detect it, and the Debian packages that provide it.
struct Requirement {
    what: &'static str,
    here: fn() -> bool,
    packages: &'static [&'static str],
}

/// To add a requirement, add a line: `cargo xtask test` installs it everywhere.
const TEST_REQUIREMENTS: &[Requirement] = &[
    Requirement { what: "git", here: || process::succeeds("git", &["--version"]), packages: &["git"] },
    Requirement {
        what: "a C compiler with a static libc",
        here: || process::succeeds("cc", &["--version"]),
        packages: &["gcc", "libc6-dev"],
    },
    Requirement {
        what: "setpriv and kill",
        here: || process::succeeds("setpriv", &["--version"]) && process::succeeds("kill", &["-l"]),
        packages: &["util-linux", "procps"],
    },
    Requirement {
        what: "PostgreSQL server programs",
        here: || postgres::find_programs().is_ok(),
        packages: &["postgresql"],
    },
    Requirement {
        what: "a container engine",
        here: || {
            process::succeeds("dockerd", &["--version"]) && process::succeeds("containerd", &["--version"])
        },
        packages: &["docker.io", "containerd", "runc", "iptables"],
    },
    Requirement {
        what: "OCI runtimes (for containers without an engine)",
        here: || process::succeeds("runc", &["--version"]) && process::succeeds("crun", &["--version"]),
        packages: &["runc", "crun"],
    },
    Requirement {
        what: "newuidmap, slirp4netns and pasta (for containers of users that are not root)",
        here: || {
            process::succeeds("slirp4netns", &["--version"])
                && process::succeeds("pasta", &["--version"])
                && std::path::Path::new("/usr/bin/newuidmap").exists()
        },
        packages: &["uidmap", "slirp4netns", "passt"],
    },
    Requirement {
        what: "Podman (the agent's second container engine)",
        here: || {
            process::succeeds("podman", &["--version"]) && process::succeeds("catatonit", &["--version"])
        },
        packages: &["podman", "catatonit"],
    },
    Requirement {
        what: "a static busybox (for test images)",
        here: || process::succeeds("busybox", &["true"]),
        packages: &["busybox-static"],
    },
    Requirement {
        what: "OpenSSH client and server",
        here: || std::path::Path::new("/usr/sbin/sshd").exists() && process::succeeds("ssh", &["-V"]),
        packages: &["openssh-client", "openssh-server"],
    },
    Requirement {
        what: "ip, unshare and sudo (for the hosts of the lab)",
        here: || {
            process::succeeds("ip", &["-V"])
                && process::succeeds("unshare", &["--version"])
                && process::succeeds("sudo", &["-V"])
        },
        packages: &["iproute2", "util-linux", "sudo"],
    },
    Requirement { what: "tmux", here: || process::succeeds("tmux", &["-V"]), packages: &["tmux"] },
    Requirement {
        what: "Python with venv (for third-party programs)",
        here: || process::succeeds("python3", &["-c", "import ensurepip, venv"]),
        packages: &["python3", "python3-venv"],
    },
    Requirement {
        what: "Slurm",
        // Its commands fail without a cluster, even for their version.
        here: || {
            ["slurmctld", "slurmd", "slurmrestd", "munged"]
                .iter()
                .all(|name| process::succeeds(name, &["-V"]))
                && std::path::Path::new("/usr/bin/sbatch").exists()
        },
        packages: &["slurmctld", "slurmd", "slurmrestd", "slurm-client", "munge"],
    },
    Requirement {
        what: "openssl",
        here: || process::succeeds("openssl", &["version"]),
        packages: &["openssl"],
    },
    Requirement {
        what: "nginx (for comparison with the proxy)",
        here: || process::succeeds("nginx", &["-v"]),
        packages: &["nginx"],
    },
    Requirement { what: "rsync", here: || process::succeeds("rsync", &["--version"]), packages: &["rsync"] },
];

/// Additional requirements of the tests with rented machines and clusters.
const RENTED_REQUIREMENTS: &[Requirement] = &[
    Requirement {
        what: "containerd, runc, network plugins, zstd and curl (for a Kubernetes cluster)",
        here: || {
            let paths = ["/usr/bin/containerd", "/usr/sbin/runc", "/usr/lib/cni/bridge", "/usr/bin/zstd"];
            paths.iter().all(|path| std::path::Path::new(path).exists())
                && process::succeeds("curl", &["--version"])
        },
        packages: &["containerd", "runc", "containernetworking-plugins", "zstd", "curl"],
    },
    Requirement {
        what: "LXD with its network and image tools",
        here: || {
            // Its client needs no running server for its version.
            process::succeeds("lxd", &["--version"])
                && process::succeeds("dnsmasq", &["--version"])
                && std::path::Path::new("/usr/bin/mksquashfs").exists()
                && process::succeeds("mmdebstrap", &["--version"])
        },
        packages: &["lxd", "lxd-client", "dnsmasq-base", "squashfs-tools", "mmdebstrap"],
    },
];

/// Additional requirements of the proxy benchmark; no test needs them.
const PROXY_REQUIREMENTS: &[Requirement] = &[
    Requirement {
        what: "nginx (for comparison with the proxy)",
        here: || process::succeeds("nginx", &["-v"]),
        packages: &["nginx"],
    },
    Requirement {
        what: "wrk (load generator)",
        // It prints its version and usage with an error status.
        here: || std::path::Path::new("/usr/bin/wrk").exists(),
        packages: &["wrk"],
    },
];

const NODE: Requirement =
    Requirement { what: "Node 20 or newer with npm", here: has_node, packages: &["nodejs", "npm"] };

/// Additional requirements of the web UI.
const WEB_REQUIREMENTS: &[Requirement] = &[
    NODE,
    Requirement {
        what: "Chromium (to try the pages of the web UI)",
        here: || std::path::Path::new("/usr/bin/chromium").exists(),
        packages: &["chromium"],
    },
];

/// Returns whether Node is there, in a version with which the packages of the lock file work.
fn has_node() -> bool {
    let version = process::run_for_stdout(Command::new("node").arg("--version"));
    let major = version.ok().and_then(|text| text.trim().strip_prefix('v')?.split('.').next()?.parse().ok());
    major.is_some_and(|major: u32| major >= 20) && process::succeeds("npm", &["--version"])
}

pub(crate) fn ensure_for_web() -> Result<()> {
    ensure_all(WEB_REQUIREMENTS)
}

/// Installs Node for the checks of the web UI that need no browser. Debian 12 has an older one: the error says so.
pub(crate) fn ensure_for_web_files() -> Result<()> {
    ensure_all(&[NODE])
}

pub(crate) fn ensure_for_tests(workspace: &Workspace) -> Result<()> {
    ensure_all(TEST_REQUIREMENTS)?;
    open_tunnel_device()?;
    ensure_nextest(workspace)
}

/// Lets every user open the device with which containers of users that are not root get a network, as udev does. There
/// is no udev in a container or on a minimal machine.
fn open_tunnel_device() -> Result<()> {
    const DEVICE: &str = "/dev/net/tun";
    const ALL_USERS: u32 = 0o666;
    let failed = || format!("failed to let every user open `{DEVICE}`; run `chmod 0666 {DEVICE}` as root");
    let mode = std::fs::metadata(DEVICE).with_context(failed)?.permissions().mode();
    if mode & ALL_USERS == ALL_USERS {
        return Ok(());
    }
    output::print_message(&format!("letting every user open {DEVICE}, as udev does"));
    std::fs::set_permissions(DEVICE, std::fs::Permissions::from_mode(ALL_USERS)).with_context(failed)
}

pub(crate) fn ensure_for_rented() -> Result<()> {
    ensure_all(RENTED_REQUIREMENTS)
}

pub(crate) fn ensure_for_proxy() -> Result<()> {
    ensure_all(PROXY_REQUIREMENTS)
}

fn ensure_all(needs: &[Requirement]) -> Result<()> {
    let missing: Vec<&Requirement> = needs.iter().filter(|need| !(need.here)()).collect();
    if !missing.is_empty() {
        install(&missing)?;
    }
    match missing.iter().find(|need| !(need.here)()) {
        Some(need) => bail!("{} is still missing after installing {}", need.what, need.packages.join(", ")),
        None => Ok(()),
    }
}

fn install(missing: &[&Requirement]) -> Result<()> {
    let packages = packages_to_install(missing, is_root()?, process::succeeds("apt-get", &["--version"]))?;
    process::run(run_apt().args(["-qq", "update"]))?;
    process::run(run_apt().args(["-qq", "-y", "--no-install-recommends", "install"]).args(&packages))
}

/// Returns the packages to install, or the reason why this program cannot install them.
fn packages_to_install(missing: &[&Requirement], is_root: bool, has_apt: bool) -> Result<Vec<&'static str>> {
    let packages: Vec<&str> = missing.iter().flat_map(|need| need.packages).copied().collect();
    let whats = missing.iter().map(|need| need.what).collect::<Vec<_>>().join("; ");
    let list = packages.join(" ");
    if !has_apt {
        bail!("missing: {whats}. This is not a Debian system: install the equivalent of `{list}`");
    }
    if !is_root {
        bail!("missing: {whats}. Run `sudo apt-get install {list}`, or run this command as root");
    }
    output::print_message(&format!("missing: {whats}; installing {list}"));
    Ok(packages)
}

fn run_apt() -> Command {
    let mut command = Command::new("apt-get");
    command.env("DEBIAN_FRONTEND", "noninteractive");
    command
}

fn ensure_nextest(workspace: &Workspace) -> Result<()> {
    let here = || process::run_for_stdout(workspace.cargo().args(["nextest", "--version"])).is_ok();
    if here() {
        return Ok(());
    }
    output::print_message("missing: cargo-nextest; building it, which takes a few minutes");
    process::run(workspace.cargo().args(["install", "cargo-nextest", "--locked"]))?;
    if !here() {
        bail!(
            "cargo-nextest was installed, but `cargo nextest` does not run: check that ~/.cargo/bin is in PATH"
        );
    }
    Ok(())
}

pub(crate) fn is_root() -> Result<bool> {
    let message = process::run_for_stdout(Command::new("id").arg("-u"))
        .context("failed to determine the current user")?;
    Ok(message.trim() == "0")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn missing() -> Vec<&'static Requirement> {
        TEST_REQUIREMENTS.iter().filter(|need| need.what.contains("PostgreSQL")).collect()
    }

    #[test]
    fn root_on_debian_installs_exactly_what_is_missing() {
        assert_eq!(packages_to_install(&missing(), true, true).unwrap(), ["postgresql"]);
    }

    #[test]
    fn setup_without_root_or_debian_fails_with_an_explanation() {
        let error = packages_to_install(&missing(), false, true).unwrap_err().to_string();
        assert!(error.contains("sudo apt-get install postgresql"), "{error}");
        let error = packages_to_install(&missing(), true, false).unwrap_err().to_string();
        assert!(error.contains("not a Debian system"), "{error}");
    }
}
