//! Files with which the nodes of one replica reach each other: a hostfile for MPI, and a key with a configuration for
//! `ssh`.

use std::{
    fmt::Write as _,
    io,
    path::{Path, PathBuf},
};

use windlass_api::agent::{
    SSH_PORT,
    runner::{ClusterInfo, SshKey},
};
use windlass_model::id::SubmissionId;

use super::{
    env::gpus_per_node,
    launch::write_with_mode,
    user::{Account, create_dir_as, run_as_account},
};

/// Maximum size in bytes of an `ssh` configuration that is read.
const CONFIG_MAX: u64 = 1 << 20;
const KEY_IN_CONTAINER: &str = "dstack_job";

/// Location and owner of the files.
#[derive(Clone, Copy, Debug)]
pub struct SshConfigTarget<'a> {
    pub account: &'a Account,
    pub task: SubmissionId,
    pub in_container: bool,
}

/// Returns one line per node: `IP slots=GPUS`, without slots if there are no GPUs. Empty if an address is unknown,
/// because a list that lacks a node is worse than none.
pub fn render_hostfile(cluster: &ClusterInfo) -> String {
    if cluster.job_ips.iter().any(|ip| !is_address(ip)) {
        return String::new();
    }
    let mut lines = String::new();
    for (ip, gpus) in cluster.job_ips.iter().zip(gpus_per_node(cluster)) {
        let written = if gpus > 0 { writeln!(lines, "{ip} slots={gpus}") } else { writeln!(lines, "{ip}") };
        // Writing to a string cannot fail.
        let _ = written;
    }
    lines
}

/// Returns whether the text is an address or a plain host name, without anything that has a meaning in a file of ssh or
/// MPI.
pub(super) fn is_address(text: &str) -> bool {
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b':' | b'-' | b'_');
    !text.is_empty() && !text.starts_with('-') && text.len() <= 253 && text.bytes().all(is_plain)
}

/// Returns our section of `~/.ssh/config`. `Host *` at its end keeps the meaning of what follows.
fn ssh_config_section(place: SshConfigTarget<'_>, cluster: &ClusterInfo, key: &Path) -> String {
    let (begin, end) = section_markers(place.task);
    let mut part = format!("{begin}\n");
    for ip in cluster.job_ips.iter().filter(|ip| is_address(ip)) {
        let _ = write!(
            part,
            "Host {ip}\n    Port {SSH_PORT}\n    User {}\n    IdentityFile \"{}\"\n    IdentitiesOnly yes\n    \
             StrictHostKeyChecking no\n    UserKnownHostsFile /dev/null\n    LogLevel ERROR\n",
            place.account.name,
            key.display(),
        );
    }
    part.push_str("Host *\n");
    part.push_str(&end);
    part.push('\n');
    part
}

pub(super) fn section_markers(task: SubmissionId) -> (String, String) {
    (format!("# windlass {task}: begin"), format!("# windlass {task}: end"))
}

/// Returns the configuration without our section.
pub(super) fn remove_section(config: &str, task: SubmissionId) -> String {
    let (begin, end) = section_markers(task);
    let mut inside = false;
    let mut rest = String::with_capacity(config.len());
    for line in config.split_inclusive('\n') {
        let bare = line.trim_end_matches(['\n', '\r']);
        if bare == begin {
            inside = true;
        }
        if !inside {
            rest.push_str(line);
        }
        if bare == end {
            inside = false;
        }
    }
    rest
}

/// Key and configuration in a user's `~/.ssh`; removed by [`Access::remove`].
#[derive(Debug)]
pub struct NodeAccess {
    account: Account,
    task: SubmissionId,
    dir: PathBuf,
    key: PathBuf,
}

impl NodeAccess {
    /// Writes the files with which the job reaches the other nodes.
    pub fn give(place: SshConfigTarget<'_>, cluster: &ClusterInfo, key: &SshKey) -> io::Result<Self> {
        let dir = place.account.home.join(".ssh");
        let is_new = !dir.exists();
        create_dir_as(&dir, place.account, place.in_container)?;
        // Two tasks on a bare host may share a home directory.
        let name = if place.in_container {
            KEY_IN_CONTAINER.to_owned()
        } else {
            format!("windlass_job_{}", place.task)
        };
        let file = dir.join(name);
        let part = ssh_config_section(place, cluster, &file);
        let access =
            Self { account: place.account.clone(), task: place.task, dir: dir.clone(), key: file.clone() };
        run_as_account(place.account, || {
            if is_new {
                use std::os::unix::fs::PermissionsExt;
                std::fs::set_permissions(&dir, std::fs::Permissions::from_mode(0o700))?;
            }
            let private = key.private.trim_end();
            write_with_mode(&file, format!("{private}\n").as_bytes(), 0o600)?;
            write_with_mode(
                &file.with_extension("pub"),
                format!("{}\n", key.public.trim_end()).as_bytes(),
                0o644,
            )?;
            let config = dir.join("config");
            let old = remove_section(&read_config(&config)?, place.task);
            write_with_mode(&config, format!("{part}{old}").as_bytes(), 0o600)
        })?;
        Ok(access)
    }

    /// Removes the files. Files that no longer exist are ignored.
    pub fn remove(&self) -> io::Result<()> {
        run_as_account(&self.account, || {
            for file in [self.key.clone(), self.key.with_extension("pub")] {
                ignore_not_found(std::fs::remove_file(file))?;
            }
            let config = self.dir.join("config");
            let rest = remove_section(&read_config(&config)?, self.task);
            if rest.trim().is_empty() {
                ignore_not_found(std::fs::remove_file(config))
            } else {
                write_with_mode(&config, rest.as_bytes(), 0o600)
            }
        })
    }
}

fn ignore_not_found(removed: io::Result<()>) -> io::Result<()> {
    match removed {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        other => other,
    }
}

fn read_config(file: &Path) -> io::Result<String> {
    use std::io::Read as _;
    let opened = match std::fs::File::open(file) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(String::new()),
        opened => opened?,
    };
    let mut text = String::new();
    opened.take(CONFIG_MAX).read_to_string(&mut text)?;
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cluster(ips: &[&str], gpus: Option<Vec<i64>>) -> ClusterInfo {
        ClusterInfo {
            job_ips: ips.iter().map(|&ip| ip.to_owned()).collect(),
            master_job_ip: ips.first().map(|&ip| ip.to_owned()).unwrap_or_default(),
            gpus_per_job: 2,
            gpus_per_node: gpus,
        }
    }

    #[test]
    fn the_hostfile_has_a_line_for_each_node() {
        let check = |cluster: ClusterInfo, expected: &str| {
            assert_eq!(render_hostfile(&cluster), expected, "{cluster:?}")
        };
        check(cluster(&["10.0.0.1", "fd00::2"], None), "10.0.0.1 slots=2\nfd00::2 slots=2\n");
        check(cluster(&["10.0.0.1", "10.0.0.2"], Some(vec![8, 0])), "10.0.0.1 slots=8\n10.0.0.2\n");
        check(cluster(&["10.0.0.1", "10.0.0.2"], Some(vec![8])), "10.0.0.1 slots=2\n10.0.0.2 slots=2\n");
        check(cluster(&["10.0.0.1", ""], None), "");
        check(cluster(&["10.0.0.1", "x\nHost *"], None), "");
        check(cluster(&[], None), "");
    }

    #[test]
    fn our_client_config_section_comes_first_and_is_removed_completely() {
        let account = Account::root();
        let task = "3f2b1c80-0000-4000-8000-000000000001".parse().unwrap();
        let place = SshConfigTarget { account: &account, task, in_container: true };
        let part = ssh_config_section(
            place,
            &cluster(&["10.0.0.1", "-oProxyCommand=x", "a b"], None),
            Path::new("/root/.ssh/k"),
        );
        assert!(part.contains("Host 10.0.0.1\n    Port 10022\n    User root\n"), "{part}");
        assert!(!part.contains("ProxyCommand") && !part.contains("a b"), "{part}");
        for old in ["", "ServerAliveInterval 5\nHost x\n  Port 1\n", "Host y"] {
            assert_eq!(remove_section(&format!("{part}{old}"), task), old);
        }
        let another = "3f2b1c80-0000-4000-8000-000000000002".parse().unwrap();
        assert_eq!(remove_section(&part, another), part);
    }
}
