//! Host names of the other tasks of a job's group, for everything that the job starts.
//!
//! Only a job whose variables request the file has one. In a container it is `/etc/hosts` itself. Elsewhere that file
//! is shared by the whole host: the job gets its own copy, and sees it in place of the original.

use std::{
    ffi::{CString, OsStr},
    fmt::Write as _,
    io,
    os::unix::{ffi::OsStrExt as _, process::CommandExt as _},
    path::{Path, PathBuf},
    process::Command,
};

use rustix::{
    mount::{MountPropagationFlags, mount_bind, mount_change},
    thread::{UnshareFlags, unshare_unsafe},
};
use windlass_api::agent::runner::HostName;
use windlass_model::{id::SubmissionId, skypilot::HOSTS_FILE};

use super::{
    env::Env,
    launch::write_with_mode,
    node_access::{is_address, remove_section, section_markers},
};

const ETC_HOSTS: &str = "/etc/hosts";
/// Maximum size in bytes of a hosts file that is read.
const BYTES_MAX: u64 = 1 << 20;
const MODE: u32 = 0o644;

/// File with the host names of a job.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostsFile {
    pub file: PathBuf,
    /// True if the file is a copy, which the job sees as `/etc/hosts`.
    is_copy: bool,
    /// True if the job must not start without it.
    is_required: bool,
}

impl HostsFile {
    /// Returns the file of a job that requests names. `scratch` is the task's directory, outside of containers.
    pub(super) fn from_env(env: &mut Env, scratch: Option<&Path>) -> Option<Self> {
        let requested = env.get_mut(OsStr::new(HOSTS_FILE))?;
        let is_required = requested == OsStr::new("required");
        let file =
            scratch.map_or_else(|| PathBuf::from(ETC_HOSTS), |scratch| scratch.join(".windlass-hosts"));
        *requested = file.clone().into();
        Some(Self { file, is_copy: scratch.is_some(), is_required })
    }

    /// Creates the file with which the job starts.
    pub(super) fn make(&self) -> io::Result<()> {
        if !self.is_copy {
            return Ok(());
        }
        let copied = read_file(Path::new(ETC_HOSTS))
            .and_then(|text| write_with_mode(&self.file, text.as_bytes(), MODE));
        if self.is_required { copied } else { Ok(()) }
    }

    /// Writes all names that are known now, and keeps the rest of the file.
    pub(super) fn write(&self, task: SubmissionId, hosts: &[HostName]) -> io::Result<()> {
        let text = render(&read_file(&self.file)?, task, hosts);
        // In place: a file that is mounted over another must stay the same file.
        write_with_mode(&self.file, text.as_bytes(), MODE)
    }

    /// Mounts the copy at `/etc/hosts` in a separate mount namespace of the command. Needs root: call it before
    /// privileges are dropped.
    #[expect(unsafe_code, reason = "what a child sees is set between fork and exec")]
    pub(super) fn mount_for(&self, command: &mut Command) -> io::Result<()> {
        if !self.is_copy {
            return Ok(());
        }
        if !rustix::process::geteuid().is_root() {
            let why = "host names of other tasks require root";
            return if self.is_required { Err(io::Error::other(why)) } else { Ok(()) };
        }
        let (source, required) = (CString::new(self.file.as_os_str().as_bytes())?, self.is_required);
        let bind = move || {
            // SAFETY: only the mount namespace is separated from other threads, and no file is opened by it.
            let bound = unsafe { unshare_unsafe(UnshareFlags::NEWNS) }
                .and_then(|()| {
                    let private = MountPropagationFlags::DOWNSTREAM | MountPropagationFlags::REC;
                    mount_change(c"/", private)
                })
                .and_then(|()| mount_bind(source.as_c_str(), c"/etc/hosts"));
            match bound {
                Err(error) if required => Err(io::Error::from(error)),
                Ok(()) | Err(_) => Ok(()),
            }
        };
        // SAFETY: between fork and exec only system calls are made; the path was prepared before.
        unsafe {
            command.pre_exec(bind);
        }
        Ok(())
    }
}

fn read_file(path: &Path) -> io::Result<String> {
    use std::io::Read as _;
    let mut bytes = Vec::new();
    std::fs::File::open(path)?.take(BYTES_MAX).read_to_end(&mut bytes)?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

/// Returns the file with our section rewritten at its end.
fn render(text: &str, task: SubmissionId, hosts: &[HostName]) -> String {
    let (begin, end) = section_markers(task);
    let mut text = remove_section(text, task);
    if !text.is_empty() && !text.ends_with('\n') {
        text.push('\n');
    }
    let _ = writeln!(text, "{begin}");
    for host in hosts.iter().filter(|host| is_numeric(&host.address) && is_address(&host.name)) {
        let _ = writeln!(text, "{} {}", host.address, host.name);
    }
    let _ = writeln!(text, "{end}");
    text
}

fn is_numeric(address: &str) -> bool {
    address.parse::<std::net::IpAddr>().is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn host(address: &str, name: &str) -> HostName {
        HostName { address: address.to_owned(), name: name.to_owned() }
    }

    #[test]
    fn a_hosts_file_is_set_only_on_request_and_is_a_copy_outside_containers() {
        let mut env = Env::new();
        assert_eq!(HostsFile::from_env(&mut env, None), None);
        env.insert(HOSTS_FILE.into(), "".into());
        let (mut inside, mut outside) = (env.clone(), env);
        let names = HostsFile::from_env(&mut inside, None).unwrap();
        assert_eq!((names.file.as_path(), names.is_copy), (Path::new("/etc/hosts"), false));
        let names = HostsFile::from_env(&mut outside, Some(Path::new("/s"))).unwrap();
        assert_eq!(
            (names.file.as_path(), names.is_copy, names.is_required),
            (Path::new("/s/.windlass-hosts"), true, false)
        );
        assert_eq!(outside[OsStr::new(HOSTS_FILE)], "/s/.windlass-hosts");
    }

    #[test]
    fn rewriting_the_hosts_file_replaces_our_section_and_keeps_the_rest() {
        let task = SubmissionId(Default::default());
        let first = render("127.0.0.1 localhost", task, &[host("10.0.0.1", "a-0.g")]);
        let second = render(&first, task, &[host("10.0.0.2", "a-0.g"), host("::1", "b-0.g")]);
        let lines: Vec<&str> = second.lines().filter(|line| !line.starts_with('#')).collect();
        assert_eq!(lines, ["127.0.0.1 localhost", "10.0.0.2 a-0.g", "::1 b-0.g"]);
        assert_eq!(render(&second, task, &[]).lines().count(), 3);
    }

    #[test]
    fn invalid_addresses_and_names_are_left_out_of_the_hosts_file() {
        let hosts = [
            host("h1", "a-0.g"),
            host("10.0.0.1", "a b"),
            host("10.0.0.1\n1.2.3.4", "c"),
            host("10.0.0.1", ""),
        ];
        assert_eq!(render("", SubmissionId(Default::default()), &hosts).lines().count(), 2);
    }
}
