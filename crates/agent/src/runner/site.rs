//! As whom and where the files of a job are made.

use std::path::{Component, Path, PathBuf};

use super::user::Account;

/// The job's user and the directory its relative paths start from.
#[derive(Clone, Debug)]
pub struct Site {
    pub account: Account,
    /// Absolute.
    pub working_dir: PathBuf,
}

impl Site {
    /// `~` is the user's home, a relative path starts at the working directory. `.` and `..` are taken out by
    /// name alone.
    pub fn resolve(&self, path: &str) -> PathBuf {
        let joined = match path.strip_prefix('~') {
            Some("") => self.account.home.clone(),
            Some(rest) if rest.starts_with('/') => self.account.home.join(rest.trim_start_matches('/')),
            Some(_) | None => self.working_dir.join(path),
        };
        normal(&joined)
    }
}

/// The path without `.`, `..` and doubled slashes.
fn normal(path: &Path) -> PathBuf {
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
