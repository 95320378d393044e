//! User ids of tasks, from a range that the host reserves, each for one task at a time.
//!
//! All agents of a host share the range, so assignments are recorded in a directory that all of them read. An id whose
//! task no longer has a directory is free.

use std::{
    collections::BTreeSet,
    fs, io,
    os::unix::fs::DirBuilderExt as _,
    path::{Path, PathBuf},
};

use rustix::fs::{FlockOperation, flock};

/// Does not overlap with ids used by systemd or by subordinate users of accounts.
pub const DEFAULT_RANGE: UserIdRange = UserIdRange { first: 1_900_000_000, last: 1_900_065_535 };
const LEDGER_DIR: &str = "/run/windlass/user-ids";

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UserIdRange {
    pub first: u32,
    pub last: u32,
}

impl UserIdRange {
    /// Parses `FIRST-LAST`. Ids below 1000 belong to the system, and the two highest are not valid users.
    pub fn parse(text: &str) -> Option<Self> {
        let (first, last) = text.split_once('-')?;
        let range = Self { first: first.trim().parse().ok()?, last: last.trim().parse().ok()? };
        (range.first >= 1000 && range.first <= range.last && range.last < u32::MAX - 1).then_some(range)
    }

    fn count(self) -> u32 {
        self.last - self.first + 1
    }
}

/// Assignment of user ids to tasks.
#[derive(Clone, Debug)]
pub struct UserIdAllocator {
    dir: PathBuf,
    range: UserIdRange,
}

impl UserIdAllocator {
    pub fn new(range: UserIdRange) -> Self {
        Self { dir: PathBuf::from(LEDGER_DIR), range }
    }

    /// Assigns an id to the task with this directory; the same one if it already has one.
    pub fn take(&self, task: &Path, but: &BTreeSet<u32>) -> io::Result<u32> {
        let _alone = self.lock()?;
        let owner = task.as_os_str().as_encoded_bytes();
        // The start of the search depends on the task, so that an id is not reused at once.
        let begin = owner
            .iter()
            .fold(2_166_136_261_u32, |hash, byte| (hash ^ u32::from(*byte)).wrapping_mul(16_777_619));
        for step in 0..self.range.count() {
            let id = self.range.first + begin.wrapping_add(step) % self.range.count();
            let file = self.dir.join(id.to_string());
            let is_free = match fs::read(&file) {
                Ok(other) => other == owner || (!but.contains(&id) && !task_exists(&other)),
                Err(error) if error.kind() == io::ErrorKind::NotFound => !but.contains(&id),
                Err(error) => return Err(error),
            };
            if is_free {
                fs::write(&file, owner)?;
                return Ok(id);
            }
        }
        Err(io::Error::other(format!("all {} user ids for tasks are in use", self.range.count())))
    }

    /// Returns whether the id is recorded for this task.
    pub fn is_of(&self, id: u32, task: &Path) -> bool {
        fs::read(self.dir.join(id.to_string()))
            .is_ok_and(|owner| owner == task.as_os_str().as_encoded_bytes())
    }

    /// Releases an id, unless it belongs to another task by now.
    pub fn give_back(&self, id: u32, task: &Path) -> io::Result<()> {
        let _alone = self.lock()?;
        let file = self.dir.join(id.to_string());
        match fs::read(&file) {
            Ok(owner) if owner == task.as_os_str().as_encoded_bytes() => fs::remove_file(file),
            Ok(_) => Ok(()),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            Err(error) => Err(error),
        }
    }

    fn lock(&self) -> io::Result<fs::File> {
        fs::DirBuilder::new().recursive(true).mode(0o700).create(&self.dir)?;
        let lock =
            fs::OpenOptions::new().create(true).truncate(false).write(true).open(self.dir.join("lock"))?;
        flock(&lock, FlockOperation::LockExclusive)?;
        Ok(lock)
    }
}

fn task_exists(task: &[u8]) -> bool {
    use std::os::unix::ffi::OsStrExt as _;
    Path::new(std::ffi::OsStr::from_bytes(task)).exists()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_task_has_a_unique_user_id_and_keeps_it() {
        let dir = windlass_testkit::temp_dir("user-ids").unwrap();
        let ids = UserIdAllocator {
            dir: dir.path().join("ledger"),
            range: UserIdRange { first: 5000, last: 5002 },
        };
        let task = |name: &str| {
            let path = dir.path().join(name);
            fs::create_dir_all(&path).unwrap();
            path
        };
        let none = BTreeSet::new();
        let taken: BTreeSet<u32> =
            ["a", "b", "c"].map(|name| ids.take(&task(name), &none).unwrap()).into_iter().collect();
        assert_eq!(taken, BTreeSet::from([5000, 5001, 5002]));
        let own = ids.take(&task("a"), &none).unwrap();
        assert_eq!(ids.take(&task("a"), &none).unwrap(), own);
        let full = ids.take(&task("d"), &none).unwrap_err();
        assert_eq!(full.to_string(), "all 3 user ids for tasks are in use");
        ids.give_back(own, &task("b")).unwrap();
        assert!(ids.take(&task("d"), &none).is_err(), "it was not b's to give back");
        ids.give_back(own, &task("a")).unwrap();
        assert!(ids.take(&task("d"), &BTreeSet::from([own])).is_err(), "a record says that it is in use");
        assert_eq!(ids.take(&task("d"), &none).unwrap(), own);
        fs::remove_dir(dir.path().join("d")).unwrap();
        assert_eq!(ids.take(&task("e"), &none).unwrap(), own, "whose task is gone is free");
    }

    #[test]
    fn user_id_ranges_exclude_system_users() {
        assert_eq!(UserIdRange::parse("2000-2999"), Some(UserIdRange { first: 2000, last: 2999 }));
        assert_eq!(UserIdRange::parse("1900000000 - 1900065535"), Some(DEFAULT_RANGE));
        for bad in ["", "5", "0-5000", "999-2000", "3000-2000", "2000-4294967295", "a-b"] {
            assert_eq!(UserIdRange::parse(bad), None, "{bad}");
        }
    }
}
