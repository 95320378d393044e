//! External programs that report on the host: found, run with a time limit, and read up to a maximum size.

use std::{io, os::unix::fs::PermissionsExt as _, path::PathBuf, process::Stdio, time::Duration};

use tokio::{
    io::{AsyncRead, AsyncReadExt as _},
    process::Command,
};

/// Time limit: a tool that queries a broken device may never finish.
const TIMEOUT: Duration = Duration::from_secs(20);
const MAX_OUTPUT: u64 = 4 << 20;
/// Directories in which vendors install their tools, and the usual ones.
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
    #[error("{tool} did not respond within {secs} s")]
    Deadline { tool: &'static str, secs: u64 },
    #[error("{tool} ended with {status}: {message}")]
    Failed { tool: &'static str, status: String, message: String },
    #[error("failed to start {tool}")]
    Start {
        tool: &'static str,
        #[source]
        source: io::Error,
    },
    #[error("cannot parse the output of {tool}: {what}")]
    Unreadable { tool: &'static str, what: &'static str },
}

/// Returns the path of the tool, if it is installed.
pub fn find_tool(tool: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let listed = std::env::split_paths(&path).filter(|dir| dir.is_absolute());
    let executable = |file: &PathBuf| {
        file.metadata().is_ok_and(|meta| meta.is_file() && meta.permissions().mode() & 0o111 != 0)
    };
    listed.chain(DIRECTORIES.iter().map(PathBuf::from)).map(|dir| dir.join(tool)).find(executable)
}

/// Runs the tool and returns its standard output.
pub async fn run(tool: &'static str, arguments: &[&str]) -> Result<String, ToolError> {
    run_with_timeout(tool, arguments, TIMEOUT).await
}

async fn run_with_timeout(
    tool: &'static str,
    arguments: &[&str],
    within: Duration,
) -> Result<String, ToolError> {
    let program = find_tool(tool).ok_or(ToolError::Absent { tool })?;
    let mut command = Command::new(program);
    command.args(arguments).env("LC_ALL", "C").kill_on_drop(true);
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let started = |source| ToolError::Start { tool, source };
    let mut child = command.spawn().map_err(started)?;
    let (stdout, stderr) = (child.stdout.take(), child.stderr.take());
    let whole = async { tokio::join!(read_all(stdout), read_all(stderr), child.wait()) };
    // After the time limit the child is killed but not waited for: blocked in the driver, it may not even die.
    let Ok((message, complaint, status)) = tokio::time::timeout(within, whole).await else {
        return Err(ToolError::Deadline { tool, secs: within.as_secs() });
    };
    let status = status.map_err(started)?;
    if status.success() {
        return Ok(message);
    }
    let message = [message, complaint].concat().split_whitespace().collect::<Vec<_>>().join(" ");
    Err(ToolError::Failed { tool, status: status.to_string(), message: message.chars().take(300).collect() })
}

async fn read_all(from: Option<impl AsyncRead + Unpin>) -> String {
    let mut text = Vec::new();
    if let Some(from) = from {
        let _ = from.take(MAX_OUTPUT).read_to_end(&mut text).await;
    }
    String::from_utf8_lossy(&text).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_vendor_tool_that_hangs_times_out() {
        let error = run_with_timeout("sleep", &["600"], Duration::from_millis(50)).await.unwrap_err();
        assert!(matches!(error, ToolError::Deadline { .. }), "{error}");
    }

    #[tokio::test]
    async fn a_failing_or_missing_vendor_tool_is_reported() {
        let error = run("ls", &["/nonexistent"]).await.unwrap_err();
        let ToolError::Failed { message, .. } = &error else { panic!("{error}") };
        assert!(message.contains("/nonexistent"), "{message}");
        let error = run("windlass-no-such-tool", &[]).await.unwrap_err();
        assert_eq!(error.to_string(), "windlass-no-such-tool is not installed");
        assert_eq!(run("echo", &["well"]).await.unwrap(), "well\n");
    }
}
