//! Programs of others that tell of the host: found, given a deadline, and read within bounds.

use std::{io, os::unix::fs::PermissionsExt as _, path::PathBuf, process::Stdio, time::Duration};

use tokio::{
    io::{AsyncRead, AsyncReadExt as _},
    process::Command,
};

/// A tool that asks a broken device may never answer.
const WITHIN: Duration = Duration::from_secs(20);
const MAX_OUTPUT: u64 = 4 << 20;
/// Where vendors put their tools beside the usual directories.
const DIRECTORIES: [&str; 8] = [
    "/usr/local/sbin",
    "/usr/local/bin",
    "/usr/sbin",
    "/usr/bin",
    "/sbin",
    "/bin",
    "/opt/rocm/bin",
    "/usr/lib/wsl/lib",
];

#[derive(Debug, thiserror::Error)]
pub enum ToolError {
    #[error("{tool} is not installed")]
    Absent { tool: &'static str },
    #[error("{tool} does not answer within {} s", WITHIN.as_secs())]
    Deadline { tool: &'static str },
    #[error("{tool} ended with {status}: {said}")]
    Failed { tool: &'static str, status: String, said: String },
    #[error("start {tool}")]
    Start {
        tool: &'static str,
        #[source]
        source: io::Error,
    },
    #[error("{tool} says what cannot be read: {what}")]
    Unreadable { tool: &'static str, what: &'static str },
}

/// Where the tool is, if it is installed.
pub fn find(tool: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let listed = std::env::split_paths(&path).filter(|dir| dir.is_absolute());
    let executable = |file: &PathBuf| {
        file.metadata().is_ok_and(|meta| meta.is_file() && meta.permissions().mode() & 0o111 != 0)
    };
    listed.chain(DIRECTORIES.iter().map(PathBuf::from)).map(|dir| dir.join(tool)).find(executable)
}

/// What the tool writes to its standard output.
pub async fn output(tool: &'static str, arguments: &[&str]) -> Result<String, ToolError> {
    let program = find(tool).ok_or(ToolError::Absent { tool })?;
    let mut command = Command::new(program);
    command.args(arguments).env("LC_ALL", "C").kill_on_drop(true);
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let started = |source| ToolError::Start { tool, source };
    let mut child = command.spawn().map_err(started)?;
    let (stdout, stderr) = (child.stdout.take(), child.stderr.take());
    let whole = async { tokio::join!(all(stdout), all(stderr), child.wait()) };
    // Past the deadline the child is killed but not waited for: in the driver's hands it may not even die.
    let Ok((said, complaint, status)) = tokio::time::timeout(WITHIN, whole).await else {
        return Err(ToolError::Deadline { tool });
    };
    let status = status.map_err(started)?;
    if status.success() {
        return Ok(said);
    }
    let said = [said, complaint].concat().split_whitespace().collect::<Vec<_>>().join(" ");
    Err(ToolError::Failed { tool, status: status.to_string(), said: said.chars().take(300).collect() })
}

async fn all(from: Option<impl AsyncRead + Unpin>) -> String {
    let mut text = Vec::new();
    if let Some(from) = from {
        let _ = from.take(MAX_OUTPUT).read_to_end(&mut text).await;
    }
    String::from_utf8_lossy(&text).into_owned()
}
