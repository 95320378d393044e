//! Working directory of an attempt on this host, and removal of directories whose executor died.

use std::{
    fs::{self, File},
    io,
    os::unix::fs::{OpenOptionsExt as _, PermissionsExt as _},
    path::{Path, PathBuf},
};

use rustix::fs::{FlockOperation, flock};
use serde_json::{Value, json};

use super::{
    container_group,
    guard::{ROOT_DIR, attempt_groups},
    process_isolation::TEMPORARY_DIRS,
};
use crate::{isolation::user_map::remove_tree, proc, shim::oci::attempt::CONTAINER_DIR};

/// Prefix of the attempt's directory if no directory is given.
const PREFIX: &str = "windlass-exec-";
/// Identifies the executor process, so that a dispatcher that restarts finds it.
const OWNER_FILE: &str = "executor.json";
const LOCK_FILE: &str = "lock";

/// Directory of an attempt, locked while this value lives.
pub(super) struct WorkDir {
    pub(super) dir: PathBuf,
    /// True if the whole directory is removed at the end, and not only the program's root.
    pub(super) is_own: bool,
    _lock: File,
}

impl WorkDir {
    /// Locks the directory. Returns `None` if another executor runs the same attempt here.
    pub(super) fn take(name: &str, given: Option<&Path>) -> io::Result<Option<Self>> {
        let dir = match given {
            Some(dir) => dir.to_owned(),
            None => std::env::temp_dir().join(format!("{PREFIX}{name}")),
        };
        fs::create_dir_all(&dir)?;
        // No other user of the host may read what a program writes.
        fs::set_permissions(&dir, fs::Permissions::from_mode(0o700))?;
        let mut options = File::options();
        let lock = options.create(true).truncate(false).write(true).mode(0o600).open(dir.join(LOCK_FILE))?;
        match flock(&lock, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => {}
            Err(rustix::io::Errno::WOULDBLOCK) => return Ok(None),
            Err(error) => return Err(error.into()),
        }
        let pid = std::process::id();
        let own = i32::try_from(pid).ok().map(proc::stat).transpose()?.flatten();
        let own = json!({ "pid": pid, "started": own.map(|stat| stat.name.start) });
        fs::write(dir.join("executor.own"), own.to_string())?;
        fs::rename(dir.join("executor.own"), dir.join(OWNER_FILE))?;
        let home = Self { dir, is_own: given.is_none(), _lock: lock };
        home.remove_abandoned();
        Ok(Some(home))
    }

    /// Removes other attempts whose executor is dead, and whose guard was killed with it.
    fn remove_abandoned(&self) {
        let Some(above) = self.dir.parent() else { return };
        for entry in fs::read_dir(above).into_iter().flatten().flatten() {
            let name = entry.file_name().to_string_lossy().into_owned();
            let name = if self.is_own { name.strip_prefix(PREFIX) } else { Some(name.as_str()) };
            let dir = entry.path();
            let Some(name) = name.filter(|_| dir != self.dir) else { continue };
            if is_abandoned(&dir) {
                remove_attempt(&dir, name, self.is_own);
            }
        }
    }
}

fn is_abandoned(dir: &Path) -> bool {
    let Ok(text) = fs::read(dir.join(OWNER_FILE)) else { return false };
    let Ok(owner) = serde_json::from_slice::<Value>(&text) else { return false };
    let (pid, start) = (owner["pid"].as_i64(), owner["started"].as_u64());
    let (Some(Ok(pid)), Some(start)) = (pid.map(i32::try_from), start) else { return false };
    // A held lock is stronger evidence than a pid, which may have been reused.
    let held = || {
        let lock = File::options().write(true).open(dir.join(LOCK_FILE));
        lock.is_ok_and(|lock| flock(&lock, FlockOperation::NonBlockingLockExclusive).is_err())
    };
    match proc::stat(pid) {
        Ok(found) => {
            let lifetimes =
                |stat: proc::Stat| stat.name.start == start && stat.state == proc::ProcessState::Alive;
            !found.is_some_and(lifetimes) && !held()
        }
        Err(_) => false,
    }
}

fn remove_attempt(dir: &Path, name: &str, is_own: bool) {
    // A guard that is still cleaning up does the same; both may run.
    if let Ok(groups) = attempt_groups() {
        let group = groups.find(name);
        group.kill();
        let _ = group.remove();
    }
    container_group::remove(name);
    remove_files(dir, is_own);
}

/// Removes the files of the program, or the whole directory of the attempt. A container without an engine may have files
/// of other users than the executor's.
pub(super) fn remove_files(dir: &Path, whole: bool) {
    for part in [CONTAINER_DIR, ROOT_DIR].into_iter().chain(TEMPORARY_DIRS.map(|(_, name)| name)) {
        let _ = remove_tree(&dir.join(part));
    }
    if whole {
        let _ = fs::remove_dir_all(dir);
    }
}

impl Drop for WorkDir {
    /// Removes the files, since secrets must not stay behind. A directory that a dispatcher created is removed by it
    /// after it has seen the end.
    fn drop(&mut self) {
        remove_files(&self.dir, self.is_own);
    }
}

#[cfg(test)]
mod tests {
    use windlass_testkit::temp_dir;

    use super::*;

    #[test]
    fn a_running_attempt_cannot_start_a_second_time() {
        let dir = temp_dir("home").unwrap();
        let dir = dir.path();
        let first = WorkDir::take("a.1", Some(&dir.join("a.1"))).unwrap();
        assert!(first.is_some());
        assert!(WorkDir::take("a.1", Some(&dir.join("a.1"))).unwrap().is_none());
        drop(first);
        assert!(WorkDir::take("a.1", Some(&dir.join("a.1"))).unwrap().is_some());
    }

    #[test]
    fn files_of_a_dead_executor_are_removed_and_those_of_a_live_one_are_kept() {
        let dir = temp_dir("home").unwrap();
        let dir = dir.path();
        for (name, owner) in
            [("dead.1", json!({ "pid": std::process::id(), "started": 1 })), ("odd.1", json!({ "pid": "x" }))]
        {
            fs::create_dir_all(dir.join(name).join(ROOT_DIR)).unwrap();
            fs::write(dir.join(name).join(OWNER_FILE), owner.to_string()).unwrap();
        }
        let lifetimes = WorkDir::take("lives.1", Some(&dir.join("lives.1"))).unwrap().unwrap();
        fs::create_dir_all(lifetimes.dir.join(ROOT_DIR)).unwrap();
        let next = WorkDir::take("next.1", Some(&dir.join("next.1"))).unwrap().unwrap();
        let has_root = |name: &str| dir.join(name).join(ROOT_DIR).exists();
        assert_eq!(["dead.1", "odd.1", "lives.1"].map(has_root), [false, true, true]);
        drop((lifetimes, next));
    }
}
