//! Location and version of the agent's program.

use std::{
    ffi::OsStr,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    process::Stdio,
    time::Duration,
};

use serde::{Deserialize, Serialize};
use tokio::process::Command;

/// File name of the program.
pub const NAME: &str = "windlass-agent";
/// Environment variable with the path of another program.
pub const VARIABLE: &str = "WINDLASS_AGENT";
/// Timeout of calls that report the version or the hardware.
const RESPONSE_TIMEOUT: Duration = Duration::from_secs(20);
/// Maximum length of the error output that is reported.
const ERROR_TEXT_MAX: usize = 2000;

#[derive(Debug, thiserror::Error)]
pub enum ProgramError {
    #[error(
        "cannot find the agent program `{NAME}` at {}: put it next to `windlass`, or set `{VARIABLE}` to its path",
        inspected.iter().map(|path| path.display().to_string()).collect::<Vec<_>>().join(" or at ")
    )]
    Missing { inspected: Vec<PathBuf> },
    #[error("failed to run `{} {what}`", path.display())]
    Run {
        path: PathBuf,
        what: String,
        #[source]
        source: std::io::Error,
    },
    #[error("`{} {what}` failed: {message}", path.display())]
    Failed { path: PathBuf, what: String, message: String },
}

/// Agent's program on this machine's disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AgentProgram(PathBuf);

/// Identifies one build of a file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProgramStamp {
    pub path: PathBuf,
    inode: u64,
    size: u64,
    modified: (i64, i64),
}

impl AgentProgram {
    /// Finds the configured program; otherwise the one next to the running program.
    pub fn find(named: Option<&Path>) -> Result<Self, ProgramError> {
        Self::find_from(named, std::env::current_exe().ok().as_deref())
    }

    fn find_from(named: Option<&Path>, own: Option<&Path>) -> Result<Self, ProgramError> {
        let next_to = |own: &Path| {
            let dir = own.parent()?;
            // Test programs are one directory deeper.
            let dir = if dir.file_name() == Some(OsStr::new("deps")) { dir.parent()? } else { dir };
            Some(dir.join(NAME))
        };
        let places = match named {
            Some(named) => vec![named.to_owned()],
            None => own.and_then(next_to).into_iter().collect(),
        };
        match places.iter().find(|place| place.is_file()) {
            // Absolute, because its working directory may differ.
            Some(place) => Ok(Self(std::path::absolute(place).unwrap_or_else(|_| place.clone()))),
            None => Err(ProgramError::Missing { inspected: places }),
        }
    }

    pub fn path(&self) -> &Path {
        &self.0
    }

    pub fn stamp(&self) -> Result<ProgramStamp, ProgramError> {
        let meta = std::fs::metadata(&self.0).map_err(|source| self.run_error("", source))?;
        Ok(ProgramStamp {
            path: self.0.clone(),
            inode: meta.ino(),
            size: meta.size(),
            modified: (meta.mtime(), meta.mtime_nsec()),
        })
    }

    /// Returns the version, such as `0.1.0`.
    pub async fn version(&self) -> Result<String, ProgramError> {
        let message = self.output(&["--version".as_ref()]).await?;
        Ok(message.split_whitespace().last().unwrap_or_default().to_owned())
    }

    /// Runs the program and returns its standard output, if it succeeds.
    pub async fn output(&self, args: &[&OsStr]) -> Result<String, ProgramError> {
        let what = args.join(OsStr::new(" ")).to_string_lossy().into_owned();
        let mut command = Command::new(&self.0);
        command.args(args).stdin(Stdio::null()).kill_on_drop(true);
        let ran = match tokio::time::timeout(RESPONSE_TIMEOUT, command.output()).await {
            Ok(ran) => ran.map_err(|source| self.run_error(&what, source))?,
            Err(_) => {
                let message = format!("no response within {} s", RESPONSE_TIMEOUT.as_secs());
                return Err(ProgramError::Failed { path: self.0.clone(), what, message });
            }
        };
        if !ran.status.success() {
            let message = String::from_utf8_lossy(&ran.stderr);
            let message = format!("{}: {}", ran.status, tail(message.trim(), ERROR_TEXT_MAX));
            return Err(ProgramError::Failed { path: self.0.clone(), what, message });
        }
        Ok(String::from_utf8_lossy(&ran.stdout).into_owned())
    }

    fn run_error(&self, what: &str, source: std::io::Error) -> ProgramError {
        ProgramError::Run { path: self.0.clone(), what: what.to_owned(), source }
    }
}

/// Returns the end of a text, at most this many bytes.
pub(crate) fn tail(text: &str, bytes: usize) -> &str {
    let from = text.len().saturating_sub(bytes);
    let from = (from..=text.len()).find(|at| text.is_char_boundary(*at)).unwrap_or(text.len());
    &text[from..]
}

/// Returns whether `running` is a lower version than `ours`, compared number by number. An unparsable version is not
/// lower, so that an unknown agent is not replaced.
pub(crate) fn is_older(running: &str, ours: &str) -> bool {
    let numbers = |text: &str| -> Option<Vec<u64>> {
        text.split(['-', '+']).next()?.split('.').map(|part| part.parse().ok()).collect()
    };
    match (numbers(running), numbers(ours)) {
        (Some(running), Some(ours)) => running < ours,
        (None, _) | (_, None) => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn error_for_a_missing_agent_program_names_the_searched_path() {
        let missing = AgentProgram::find_from(None, Some(Path::new("/opt/app/windlass"))).unwrap_err();
        let message = missing.to_string();
        assert!(message.contains("/opt/app/windlass-agent") && message.contains(VARIABLE), "{message}");
        let named =
            AgentProgram::find_from(Some(Path::new("/opt/agent")), Some(Path::new("/opt/app/windlass")));
        let message = named.unwrap_err().to_string();
        assert!(message.contains("/opt/agent") && !message.contains("/opt/app"), "{message}");
    }

    #[test]
    fn versions_compare_numerically_and_an_unparsable_one_is_never_older() {
        assert!(is_older("0.1.0", "0.1.1"));
        assert!(is_older("0.9.0", "0.10.0"));
        assert!(is_older("0.1.0-dev", "0.2.0"));
        assert!(!is_older("0.1.0", "0.1.0"));
        assert!(!is_older("1.0.0", "0.9.9"));
        assert!(!is_older("nightly", "0.1.0"));
    }

    #[test]
    fn a_tail_is_cut_at_a_character_boundary() {
        assert_eq!(tail("grün", 2), "n");
        assert_eq!(tail("grün", 3), "ün");
        assert_eq!(tail("ab", 9), "ab");
    }
}
