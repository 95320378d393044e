//! Account and directory with which the files of a job are created.

use std::{
    ffi::OsString,
    fs, io,
    os::unix::fs::{DirBuilderExt as _, PermissionsExt as _, lchown},
    path::{Component, Path, PathBuf},
    time::Duration,
};

use super::user::Account;

const DEFAULT_PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";
/// Prefix of directories in which files are prepared before they are moved to their target.
const STAGE: &str = ".windlass-stage-";
const REMOVE_ATTEMPTS: u32 = 50;
const REMOVE_PAUSE: Duration = Duration::from_millis(10);
/// Age after which a staging directory must belong to a runner that was killed.
const STALE_AFTER: Duration = Duration::from_secs(6 * 3600);

/// The job's user and the directory from which its relative paths start.
#[derive(Clone, Debug)]
pub struct UserContext {
    pub account: Account,
    /// Absolute path.
    pub working_dir: PathBuf,
    /// Path of the agent's binary, which is started again as a child.
    pub agent: PathBuf,
    /// Directories that are searched for programs, as in `PATH`.
    pub path: OsString,
}

impl UserContext {
    pub fn new(account: Account, working_dir: PathBuf) -> Self {
        let agent = std::env::current_exe().unwrap_or_else(|_| PathBuf::from("/proc/self/exe"));
        let path = std::env::var_os("PATH").unwrap_or_else(|| DEFAULT_PATH.into());
        Self { account, working_dir, agent, path }
    }

    /// Resolves a path: `~` is the user's home, a relative path starts at the working directory. `.` and `..` are
    /// removed lexically.
    pub fn resolve(&self, path: &str) -> PathBuf {
        let joined = match path.strip_prefix('~') {
            Some("") => self.account.home.clone(),
            Some(rest) if rest.starts_with('/') => self.account.home.join(rest.trim_start_matches('/')),
            Some(_) | None => self.working_dir.join(path),
        };
        normalize(&joined)
    }

    /// Returns the first executable of that name, as a shell would find it.
    pub(super) fn program(&self, name: &str) -> Option<PathBuf> {
        let executable = |file: &PathBuf| {
            file.metadata().is_ok_and(|meta| meta.is_file() && meta.permissions().mode() & 0o111 != 0)
        };
        std::env::split_paths(&self.path)
            .filter(|dir| dir.is_absolute())
            .map(|dir| dir.join(name))
            .find(executable)
    }

    /// Creates the directory and its missing parents, each owned by the user. Returns whether the last one was created.
    pub(super) fn create_dirs(&self, dir: &Path) -> io::Result<bool> {
        if dir.is_dir() {
            return Ok(false);
        }
        if let Some(above) = dir.parent() {
            self.create_dirs(above)?;
        }
        match fs::create_dir(dir) {
            Ok(()) => {}
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists && dir.is_dir() => return Ok(false),
            Err(error) => return Err(error),
        }
        self.chown(dir)?;
        Ok(true)
    }

    fn chown(&self, path: &Path) -> io::Result<()> {
        if rustix::process::geteuid().is_root() {
            lchown(path, Some(self.account.uid), Some(self.account.gid))?;
        }
        Ok(())
    }
}

/// Directory in which files are prepared before they are moved to their target next to it. Its remaining contents are
/// removed when it is dropped.
#[derive(Debug)]
pub(super) struct StagingDir {
    path: PathBuf,
}

impl StagingDir {
    pub(super) fn new(site: &UserContext, within: &Path) -> io::Result<Self> {
        remove_stale(within);
        let mut random = [0; 8];
        getrandom::fill(&mut random).map_err(io::Error::other)?;
        let stage = Self { path: within.join(format!("{STAGE}{:016x}", u64::from_ne_bytes(random))) };
        fs::DirBuilder::new().mode(0o700).create(&stage.path)?;
        site.chown(&stage.path)?;
        Ok(stage)
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for StagingDir {
    fn drop(&mut self) {
        // A process that was killed may still create a file there in its last moment.
        for _ in 0..REMOVE_ATTEMPTS {
            match remove_any(&self.path) {
                Ok(()) => return,
                Err(error) if error.kind() == io::ErrorKind::DirectoryNotEmpty => {
                    std::thread::sleep(REMOVE_PAUSE)
                }
                Err(error) => {
                    tracing::warn!(path = %self.path.display(), %error, "failed to remove staging directory");
                    return;
                }
            }
        }
    }
}

/// Removes staging directories of killed runners. Another runner may be working in a shared directory, so only old ones
/// are removed.
fn remove_stale(within: &Path) {
    let old = |entry: &fs::DirEntry| {
        let now = Duration::from_micros(crate::clock::now_us().unsigned_abs());
        let made = entry
            .metadata()
            .and_then(|meta| meta.modified())
            .ok()?
            .duration_since(std::time::UNIX_EPOCH)
            .ok()?;
        Some(is_staging_dir(entry) && now.saturating_sub(made) > STALE_AFTER)
    };
    for entry in fs::read_dir(within).into_iter().flatten().flatten() {
        if old(&entry) == Some(true) {
            let _ = remove_any(&entry.path());
        }
    }
}

pub(super) fn is_staging_dir(entry: &fs::DirEntry) -> bool {
    entry.file_name().as_encoded_bytes().starts_with(STAGE.as_bytes())
}

/// Removes a path of any type; succeeds if it does not exist. Links are removed, not followed.
pub(super) fn remove_any(path: &Path) -> io::Result<()> {
    let gone = match fs::symlink_metadata(path) {
        Ok(meta) if meta.is_dir() => fs::remove_dir_all(path).or_else(|error| {
            if error.kind() != io::ErrorKind::PermissionDenied {
                return Err(error);
            }
            make_writable(path)?;
            fs::remove_dir_all(path)
        }),
        Ok(_) => fs::remove_file(path),
        Err(error) => Err(error),
    };
    match gone {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        other => other,
    }
}

/// Makes all directories of a tree writable for the owner: a runner that is not root could not empty them otherwise.
fn make_writable(dir: &Path) -> io::Result<()> {
    fs::set_permissions(dir, fs::Permissions::from_mode(0o700))?;
    for entry in fs::read_dir(dir)? {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            make_writable(&entry.path())?;
        }
    }
    Ok(())
}

/// Returns the path without `.`, `..` and doubled slashes.
fn normalize(path: &Path) -> PathBuf {
    let mut clean = PathBuf::from("/");
    for part in path.components() {
        match part {
            Component::Normal(name) => clean.push(name),
            Component::ParentDir => {
                clean.pop();
            }
            Component::RootDir | Component::CurDir | Component::Prefix(_) => {}
        }
    }
    clean
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_resolve_against_the_home_or_the_working_directory() {
        let account = Account { home: PathBuf::from("/home/jo"), ..Account::root() };
        let site = UserContext::new(account, PathBuf::from("/opt/app"));
        for (path, expected) in [
            ("~", "/home/jo"),
            ("~/x", "/home/jo/x"),
            ("~//x/", "/home/jo/x"),
            ("~other/x", "/opt/app/~other/x"),
            ("x/y", "/opt/app/x/y"),
            (".", "/opt/app"),
            ("", "/opt/app"),
            ("../x", "/opt/x"),
            ("../../../x", "/x"),
            ("/a/./b//c/..", "/a/b"),
        ] {
            assert_eq!(site.resolve(path), Path::new(expected), "{path}");
        }
    }
}
