//! Backups of an SQLite database: created while a server uses it, and restored while none does.
//!
//! A backup is one file that is either complete or absent. All secrets in it are sealed: the keys are in a separate
//! file. Logs of jobs are not part of the database.

use std::{
    fs::{self, File, OpenOptions},
    io,
    os::unix::fs::{DirBuilderExt, OpenOptionsExt},
    path::{Path, PathBuf},
};

use super::{
    Dialect,
    clock::Clock,
    error::DbError,
    ids::Ids,
    migrate,
    sqlite::{Conn, FileLock, suffixed, void_leases},
    value::Val,
};

/// Agents reject a call whose epoch is lower than one they have seen, and they have seen epochs that are not in a
/// backup. This number is added, which is more than any row reaches in operation.
const EPOCH_SKIP: i64 = 1_000_000;

#[derive(Debug, thiserror::Error)]
pub enum BackupError {
    #[error("`{}` already exists", path.display())]
    Exists { path: PathBuf },
    #[error("database `{}` does not exist", path.display())]
    Absent { path: PathBuf },
    #[error("failed to access `{}`", path.display())]
    File {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("`{}` is damaged: {problem}", path.display())]
    Damaged { path: PathBuf, problem: String },
    #[error("cannot use `{}` as a database of this server", path.display())]
    Foreign {
        path: PathBuf,
        #[source]
        source: DbError,
    },
    #[error(transparent)]
    Db(#[from] DbError),
}

/// Content of a backup, for people.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BackupSummary {
    pub bytes: u64,
    pub runs: i64,
    /// New path of the database that was replaced.
    pub aside: Option<PathBuf>,
}

/// Copies a database to a new file, without disturbing servers and readers; the copy is a consistent snapshot.
pub fn backup(database: &Path, to: &Path) -> Result<BackupSummary, BackupError> {
    if !exists(database)? {
        return Err(BackupError::Absent { path: database.to_owned() });
    }
    if exists(to)? {
        return Err(BackupError::Exists { path: to.to_owned() });
    }
    let fresh = TempFile::new(to)?;
    let source = Conn::reader(database, Clock::wall(), Ids::system())?;
    // The database file is open read-only; only the copy is written.
    source.query("PRAGMA query_only = OFF", &[])?;
    let target = fresh.0.to_string_lossy().into_owned();
    source.query(super::invariant_queries::VACUUM_INTO, &[Val::Text(target)])?;
    let copied = check(&fresh.0, to)?;
    fresh.publish(to)?;
    Ok(copied)
}

/// Replaces a database that no server uses with a backup. The old database is kept next to it.
pub fn restore(database: &Path, from: &Path) -> Result<BackupSummary, BackupError> {
    if !exists(from)? {
        return Err(BackupError::Absent { path: from.to_owned() });
    }
    if let Some(folder) = database.parent() {
        let made = fs::DirBuilder::new().recursive(true).mode(0o700).create(folder);
        made.map_err(|source| BackupError::File { path: folder.to_owned(), source })?;
    }
    // Held to the end, so that no server starts in the meantime.
    let _lock = FileLock::take(database)?;
    let fresh = TempFile::new(database)?;
    fs::copy(from, &fresh.0).map_err(|source| BackupError::File { path: from.to_owned(), source })?;
    let copied = check(&fresh.0, from)?;
    {
        let conn = Conn::writer(&fresh.0, Clock::wall(), Ids::system())?;
        void_leases(&conn, EPOCH_SKIP)?;
        // Back to a single file, without a write-ahead log next to it.
        conn.query("PRAGMA journal_mode = DELETE", &[])?;
    }
    let aside = put_aside(database)?;
    fresh.replace(database)?;
    Ok(BackupSummary { aside, ..copied })
}

/// Checks that the file is intact and of a supported version.
fn check(path: &Path, shown: &Path) -> Result<BackupSummary, BackupError> {
    let foreign = |source| BackupError::Foreign { path: shown.to_owned(), source };
    let conn = Conn::reader(path, Clock::wall(), Ids::system()).map_err(foreign)?;
    let message = conn.query("PRAGMA integrity_check", &[]).map_err(foreign)?;
    let message: Vec<String> = message.iter().filter_map(|row| row.text(0).ok()).collect();
    if message != ["ok"] {
        let problem =
            message.into_iter().next().unwrap_or_else(|| "the integrity check returned no result".to_owned());
        return Err(BackupError::Damaged { path: shown.to_owned(), problem });
    }
    let journal = conn.query(migrate::READ, &[]).map_err(foreign)?;
    migrate::pending_steps(Dialect::Sqlite, &journal).map_err(foreign)?;
    let runs = conn.query("SELECT count(*) FROM runs", &[]).map_err(foreign)?;
    let runs = runs.first().map_or(Ok(0), |row| row.int(0)).map_err(foreign)?;
    let bytes = fs::metadata(path).map_err(|source| BackupError::File { path: shown.to_owned(), source })?;
    Ok(BackupSummary { bytes: bytes.len(), runs, aside: None })
}

/// Links the old database under a second name; the next step removes the first one.
fn put_aside(database: &Path) -> Result<Option<PathBuf>, BackupError> {
    if !exists(database)? {
        return Ok(None);
    }
    let aside = (1..).map(|n| suffixed(database, &format!(".before-restore-{n}")));
    let failed = |path: &Path, source| BackupError::File { path: path.to_owned(), source };
    for aside in aside {
        if exists(&aside)? {
            continue;
        }
        // Moves committed pages from the write-ahead log to the file. A damaged database is kept as it is, including
        // its log.
        let applied = Conn::writer(database, Clock::wall(), Ids::system())
            .and_then(|conn| conn.query("PRAGMA wal_checkpoint(TRUNCATE)", &[]));
        for log in ["-wal", "-shm"] {
            let (from, to) = (suffixed(database, log), suffixed(&aside, log));
            if !exists(&from)? {
                continue;
            }
            let moved = if applied.is_ok() { fs::remove_file(&from) } else { fs::rename(&from, to) };
            moved.map_err(|source| failed(&from, source))?;
        }
        fs::hard_link(database, &aside).map_err(|source| failed(&aside, source))?;
        return Ok(Some(aside));
    }
    Ok(None)
}

fn exists(path: &Path) -> Result<bool, BackupError> {
    path.try_exists().map_err(|source| BackupError::File { path: path.to_owned(), source })
}

/// A private temporary file next to its destination, deleted unless it is moved there.
struct TempFile(PathBuf);

impl TempFile {
    fn new(goal: &Path) -> Result<Self, BackupError> {
        let path = suffixed(goal, &format!(".new-{}", std::process::id()));
        let made = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&path);
        made.map_err(|source| BackupError::File { path: path.clone(), source })?;
        Ok(Self(path))
    }

    /// Moves the file to its destination, unless that exists by now.
    fn publish(self, goal: &Path) -> Result<(), BackupError> {
        let linked = File::open(&self.0).and_then(|file| file.sync_all());
        let linked = linked.and_then(|()| fs::hard_link(&self.0, goal)).and_then(|()| sync_folder(goal));
        linked.map_err(|source| {
            if source.kind() == io::ErrorKind::AlreadyExists {
                return BackupError::Exists { path: goal.to_owned() };
            }
            BackupError::File { path: goal.to_owned(), source }
        })
    }

    /// Moves the file to its destination, replacing what was there.
    fn replace(self, goal: &Path) -> Result<(), BackupError> {
        let moved = File::open(&self.0).and_then(|file| file.sync_all());
        let moved = moved.and_then(|()| fs::rename(&self.0, goal)).and_then(|()| sync_folder(goal));
        moved.map_err(|source| BackupError::File { path: goal.to_owned(), source })
    }
}

impl Drop for TempFile {
    fn drop(&mut self) {
        for left in ["", "-wal", "-shm", "-journal"] {
            let _ = fs::remove_file(suffixed(&self.0, left));
        }
    }
}

/// Syncs the folder of a file, so that the file's name is durable.
fn sync_folder(path: &Path) -> io::Result<()> {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
    File::open(folder.unwrap_or(Path::new("."))).and_then(|folder| folder.sync_all())
}
