//! `WINDLASS_HOME`: the directory of all local files, and how private files are written.

use std::{
    fs::{DirBuilder, OpenOptions},
    io::{self, Write as _},
    os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _},
    path::{Path, PathBuf},
};

use crate::error::CliError;

#[derive(Clone, Debug)]
pub(crate) struct Home(PathBuf);

impl Home {
    /// `WINDLASS_HOME`, else `~/.windlass`.
    pub(crate) fn find() -> Result<Self, CliError> {
        Self::path().map(Self).ok_or_else(|| {
            CliError::new("cannot determine the directory of windlass")
                .hint("set `WINDLASS_HOME` or `HOME` to a directory")
        })
    }

    pub(crate) fn path() -> Option<PathBuf> {
        let set = |name| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
        set("WINDLASS_HOME").or_else(|| set("HOME").map(|home| home.join(".windlass")))
    }

    /// Current server and credentials.
    pub(crate) fn login_file(&self) -> PathBuf {
        self.0.join("login.json")
    }

    /// All servers that the user has logged in to.
    pub(crate) fn contexts_dir(&self) -> PathBuf {
        self.0.join("contexts")
    }

    /// Current project on the server of this machine.
    pub(crate) fn project_file(&self) -> PathBuf {
        self.0.join("project")
    }

    /// OpenSSH host entries of runs.
    pub(crate) fn ssh_dir(&self) -> PathBuf {
        self.0.join("ssh")
    }

    /// Data of the server that runs on this machine by default.
    pub(crate) fn server_dir(&self) -> PathBuf {
        self.0.join("server")
    }
}

/// Creates a directory that other users cannot list. An existing one is not changed.
pub(crate) fn make_private_dir(path: &Path) -> io::Result<()> {
    DirBuilder::new().recursive(true).mode(0o700).create(path)
}

/// Replaces a file atomically; only its owner can read it at any time.
pub(crate) fn write_private(path: &Path, text: &str) -> io::Result<()> {
    if let Some(parent) = path.parent() {
        make_private_dir(parent)?;
    }
    let fresh = path.with_extension(format!("new-{}", std::process::id()));
    let written = OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(true)
        .mode(0o600)
        .open(&fresh)
        .and_then(|mut file| file.write_all(text.as_bytes()).and_then(|()| file.sync_all()))
        .and_then(|()| std::fs::rename(&fresh, path));
    if written.is_err() {
        let _ = std::fs::remove_file(&fresh);
    }
    written
}

/// Returns the text of a file, or `None` if it does not exist.
pub(crate) fn read_if_exists(path: &Path) -> Result<Option<String>, CliError> {
    match std::fs::read_to_string(path) {
        Ok(text) => Ok(Some(text)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(CliError::from_error(&format!("failed to read `{}`", path.display()), &error)),
    }
}
