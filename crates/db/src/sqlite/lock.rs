//! One server per file: an advisory lock on `PATH.lock`, which the operating system releases when its holder dies, for
//! whatever reason.

use std::{
    fs::{File, OpenOptions, TryLockError},
    io::{Read, Seek, Write},
    os::unix::fs::OpenOptionsExt as _,
    path::Path,
    time::{Duration, Instant},
};

use crate::error::DbError;

/// Maximum time that a killed holder takes to exit.
const EXIT_WAIT_MAX: Duration = Duration::from_secs(5);
const EXIT_POLL_INTERVAL: Duration = Duration::from_millis(5);

pub(crate) struct FileLock {
    _file: File,
}

impl FileLock {
    pub(crate) fn take(database: &Path) -> Result<Self, DbError> {
        let path = super::suffixed(database, ".lock");
        let failed = |error| DbError::open(path.display().to_string(), error);
        let mut file = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o600)
            .open(&path)
            .map_err(failed)?;
        match wait_locked(&file, &path) {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                let mut pid = String::new();
                // The holder writes its pid just after acquiring the lock; an empty file means that it was acquired
                // just now.
                file.read_to_string(&mut pid).map_err(failed)?;
                let pid = if pid.trim().is_empty() { "unknown".to_owned() } else { pid.trim().to_owned() };
                return Err(DbError::InUse { path: database.to_owned(), pid });
            }
            Err(TryLockError::Error(error)) => return Err(failed(error)),
        }
        file.set_len(0).map_err(failed)?;
        file.rewind().map_err(failed)?;
        writeln!(file, "{}", std::process::id()).map_err(failed)?;
        Ok(Self { _file: file })
    }
}

/// Waits for an exiting holder: the kernel releases a lock with the last of the holder's threads.
fn wait_locked(file: &File, path: &Path) -> Result<(), TryLockError> {
    let started = Instant::now();
    loop {
        let taken = file.try_lock();
        if !matches!(taken, Err(TryLockError::WouldBlock)) || started.elapsed() > EXIT_WAIT_MAX {
            return taken;
        }
        let holder = std::fs::read_to_string(path).unwrap_or_default();
        let alive = std::fs::read_to_string(format!("/proc/{}/stat", holder.trim()))
            .is_ok_and(|stat| stat.rsplit_once(") ").is_some_and(|(_, rest)| !rest.starts_with(['Z', 'X'])));
        if alive {
            return taken;
        }
        std::thread::sleep(EXIT_POLL_INTERVAL);
    }
}
