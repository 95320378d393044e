//! Host facts that do not come from the engine: mounts, devices and start times.

use std::{
    fs, io,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
};

use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

use crate::clock;

/// Kernel ticks per second as `/proc` shows them: a constant of the interface on all supported architectures.
const TICKS_PER_SECOND: i64 = 100;
/// Maximum number of processes examined in the search for the engine.
const PROCESSES_MAX: usize = 100_000;

/// Mount points whose later mounts may propagate (`shared:` or `master:` in mountinfo).
#[derive(Debug, Default)]
pub(in crate::shim) struct MountTable {
    points: Vec<(PathBuf, bool)>,
}

impl MountTable {
    pub(in crate::shim) fn read() -> Self {
        Self::parse(&fs::read_to_string("/proc/self/mountinfo").unwrap_or_default())
    }

    fn parse(text: &str) -> Self {
        let point = |line: &str| {
            let mut words = line.split(' ').skip(4);
            let path = unescape_mount_path(words.next()?);
            let shared = words.skip(1).take_while(|word| *word != "-");
            let shared =
                shared.into_iter().any(|word| word.starts_with("shared:") || word.starts_with("master:"));
            Some((path, shared))
        };
        Self { points: text.lines().filter_map(point).collect() }
    }

    /// Returns whether the mount that holds `path` propagates mounts.
    pub(in crate::shim) fn is_shared(&self, path: &Path) -> bool {
        // Of several mounts on one mount point the last is on top.
        let holder = self.points.iter().enumerate().filter(|(_, (point, _))| path.starts_with(point));
        holder
            .max_by_key(|(at, (point, _))| (point.components().count(), *at))
            .is_some_and(|(_, (_, shared))| *shared)
    }
}

/// Decodes a path of mountinfo, which escapes blanks and similar characters as `\040`.
fn unescape_mount_path(word: &str) -> PathBuf {
    let mut text = String::with_capacity(word.len());
    let mut rest = word;
    while let Some((before, after)) = rest.split_once('\\') {
        text.push_str(before);
        let code = after.get(..3).and_then(|digits| u8::from_str_radix(digits, 8).ok());
        match code {
            Some(code) => {
                text.push(char::from(code));
                rest = after.get(3..).unwrap_or_default();
            }
            None => {
                text.push('\\');
                rest = after;
            }
        }
    }
    text.push_str(rest);
    PathBuf::from(text)
}

/// Returns the group of a device file.
pub(in crate::shim) fn device_group(path: &Path) -> Option<u32> {
    fs::metadata(path).ok().map(|meta| meta.gid())
}

/// Boot time of the machine, in milliseconds since 1970, by the present setting of the clock: times that the engine
/// wrote before the clock was corrected may be off by as much.
pub(in crate::shim) fn booted_at_ms() -> Option<i64> {
    let uptime = fs::read_to_string("/proc/uptime").ok()?;
    let (whole, parts) = uptime.split_whitespace().next()?.split_once('.')?;
    let hundredths = whole.parse::<i64>().ok()? * TICKS_PER_SECOND + parts.parse::<i64>().ok()?;
    Some(clock::now_ms() - hundredths * (1000 / TICKS_PER_SECOND))
}

/// Start time of the engine behind a socket, in milliseconds since 1970.
pub(in crate::shim) fn engine_started_at_ms(socket: &Path) -> Option<i64> {
    docker_pid(listener_pid(socket).ok()?).and_then(process_started_at_ms)
}

/// Process that has the mount namespace of the engine behind a socket: Docker's, or the listener, which is Podman's
/// service or systemd.
pub(in crate::shim) fn engine_pid(socket: &Path, is_podman: bool) -> io::Result<i32> {
    let listener = listener_pid(socket)?;
    let docker = if is_podman { None } else { docker_pid(listener) };
    Ok(docker.unwrap_or(listener))
}

/// The kernel knows the listening process. Under systemd that is systemd, which passes the socket on: then the process
/// with the engine's name counts, if there is only one.
fn docker_pid(listener: i32) -> Option<i32> {
    const NAME: &str = "dockerd";
    let is_engine =
        |pid: i32| fs::read_to_string(format!("/proc/{pid}/comm")).is_ok_and(|name| name.trim() == NAME);
    if is_engine(listener) {
        return Some(listener);
    }
    let entries = fs::read_dir("/proc").ok()?.take(PROCESSES_MAX).filter_map(Result::ok);
    let pids = entries.filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok());
    let mut engines = pids.filter(|pid| is_engine(*pid));
    match (engines.next(), engines.next()) {
        (Some(only), None) => Some(only),
        (_, Some(_)) | (None, None) => None,
    }
}

fn listener_pid(socket: &Path) -> io::Result<i32> {
    let kind = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let connection = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, kind, None)?;
    rustix::net::connect(&connection, &SocketAddrUnix::new(socket)?)?;
    Ok(rustix::net::sockopt::socket_peercred(&connection)?.pid.as_raw_nonzero().get())
}

fn process_started_at_ms(pid: i32) -> Option<i64> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name in parentheses may contain blanks and parentheses; the start time is the twentieth field after it.
    let ticks: i64 = stat.rsplit_once(") ")?.1.split(' ').nth(19)?.parse().ok()?;
    Some(booted_at_ms()? + ticks * (1000 / TICKS_PER_SECOND))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_innermost_and_latest_mount_decides_whether_a_path_is_shared() {
        let mounts = MountTable::parse(
            "22 1 8:1 / / rw shared:1 - ext4 /dev/a rw\n\
             23 22 8:2 / /data rw,relatime - ext4 /dev/b rw\n\
             24 23 8:3 / /data/a\\040b rw master:7 - nfs x rw\n\
             25 23 8:4 / /over rw shared:4 - ext4 /dev/c rw\n\
             26 25 8:5 / /over rw - tmpfs t rw\n",
        );
        let shared = |path: &str| mounts.is_shared(Path::new(path));
        assert!(shared("/home"));
        assert!(!shared("/data/x"));
        assert!(shared("/data/a b/c"));
        assert!(!shared("/over/x"));
        assert!(shared("/database"), "a name that merely begins alike");
    }

    #[test]
    fn the_boot_time_is_before_the_start_of_this_process() {
        let (boot, own) = (
            booted_at_ms().unwrap(),
            process_started_at_ms(i32::try_from(std::process::id()).unwrap()).unwrap(),
        );
        let now = clock::now_ms();
        assert!(boot <= own && own <= now && now - own < 60_000, "{boot} {own} {now}");
    }
}
