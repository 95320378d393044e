//! Child processes: run, capture and stop.

use std::{
    ffi::OsStr,
    fs::File,
    io::Write as _,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail};

/// Time between the stop signal and SIGKILL.
const STOP_GRACE: Duration = Duration::from_secs(10);
const POLL: Duration = Duration::from_millis(20);

/// The command line for messages.
fn command_line(command: &Command) -> String {
    let program = Path::new(command.get_program()).file_name().unwrap_or(command.get_program());
    let words = std::iter::once(program).chain(command.get_args());
    words.map(|word| word.to_string_lossy().into_owned()).collect::<Vec<_>>().join(" ")
}

/// Runs a command to its end with inherited stdin, stdout and stderr.
pub(crate) fn run(command: &mut Command) -> Result<()> {
    let status = command.status().with_context(|| format!("failed to start `{}`", command_line(command)))?;
    if !status.success() {
        bail!("`{}` failed with {status}", command_line(command));
    }
    Ok(())
}

/// How the commands of a test level run.
pub(crate) enum Runner {
    /// With the terminal, one after the other.
    Foreground,
    /// Beside other levels: only while a core is idle, and with output to a file, which is printed in one piece.
    Background(File),
}

impl Runner {
    /// Runs a command to its end.
    pub(crate) fn run(&self, command: &mut Command) -> Result<()> {
        match self {
            Self::Foreground => run(command),
            Self::Background(output) => {
                let mut idle = with_idle_priority(command);
                idle.stdin(Stdio::null()).stdout(output.try_clone()?).stderr(output.try_clone()?);
                run(&mut idle)
            }
        }
    }

    pub(crate) fn print_message(&self, text: &str) -> Result<()> {
        match self {
            Self::Foreground => crate::output::print_message(text),
            Self::Background(output) => writeln!(&mut &*output, "{text}")?,
        }
        Ok(())
    }
}

/// The same command in the scheduling class that the kernel serves only when a core is idle.
fn with_idle_priority(command: &Command) -> Command {
    let mut idle = Command::new("chrt");
    idle.args(["--idle", "0"]).arg(command.get_program()).args(command.get_args());
    if let Some(dir) = command.get_current_dir() {
        idle.current_dir(dir);
    }
    for (name, value) in command.get_envs() {
        match value {
            Some(value) => idle.env(name, value),
            None => idle.env_remove(name),
        };
    }
    idle
}

/// Runs a command to its end and returns its stdout.
pub(crate) fn run_for_stdout(command: &mut Command) -> Result<String> {
    let output = command
        .stdin(Stdio::null())
        .output()
        .with_context(|| format!("failed to start `{}`", command_line(command)))?;
    if !output.status.success() {
        let message = String::from_utf8_lossy(&output.stderr);
        bail!("`{}` failed with {}: {}", command_line(command), output.status, message.trim());
    }
    String::from_utf8(output.stdout)
        .with_context(|| format!("failed to read the output of `{}`", command_line(command)))
}

/// Returns whether a program exists and succeeds.
pub(crate) fn succeeds(program: impl AsRef<OsStr>, args: &[&str]) -> bool {
    let mut command = Command::new(program);
    command.args(args).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    command.status().is_ok_and(|status| status.success())
}

/// A child that is stopped on drop, also after an error.
pub(crate) struct ChildGuard {
    child: Child,
    signal: &'static str,
}

impl ChildGuard {
    /// `signal` stops the child, such as `TERM`.
    pub(crate) fn spawn(command: &mut Command, signal: &'static str) -> Result<Self> {
        let child =
            command.spawn().with_context(|| format!("failed to start `{}`", command_line(command)))?;
        Ok(Self { child, signal })
    }

    /// Fails if the child has ended.
    pub(crate) fn check_alive(&mut self) -> Result<()> {
        match self.child.try_wait()? {
            None => Ok(()),
            Some(status) => bail!("the process exited early with {status}"),
        }
    }

    #[cfg(test)]
    pub(crate) fn id(&self) -> u32 {
        self.child.id()
    }

    fn stop(&mut self) {
        if !matches!(self.child.try_wait(), Ok(None)) {
            return;
        }
        succeeds("kill", &["-s", self.signal, &self.child.id().to_string()]);
        let until = Instant::now() + STOP_GRACE;
        while Instant::now() < until {
            if !matches!(self.child.try_wait(), Ok(None)) {
                return;
            }
            thread::sleep(POLL);
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Drop for ChildGuard {
    fn drop(&mut self) {
        self.stop();
    }
}

/// Polls a condition until it holds, the child has ended, or the time limit has passed.
pub(crate) fn wait_until(
    child: &mut ChildGuard,
    limit: Duration,
    what: &str,
    mut ready: impl FnMut() -> bool,
) -> Result<Duration> {
    let start = Instant::now();
    while !ready() {
        child.check_alive().with_context(|| format!("gave up waiting until {what}"))?;
        if start.elapsed() > limit {
            bail!("timed out after {limit:?} waiting until {what}");
        }
        thread::sleep(POLL);
    }
    Ok(start.elapsed())
}

/// A directory that is deleted on drop.
pub(crate) struct ScratchDir(PathBuf);

impl ScratchDir {
    /// Creates `/tmp/windlass-NAME-PID`. Directories of ended processes with the same name are removed first.
    pub(crate) fn new(name: &str) -> Result<Self> {
        let parent = std::env::temp_dir();
        let prefix = format!("windlass-{name}-");
        for entry in std::fs::read_dir(&parent)?.flatten() {
            let file_name = entry.file_name();
            let pid = file_name.to_str().and_then(|text| text.strip_prefix(&prefix));
            if pid.and_then(|text| text.parse::<u32>().ok()).is_some_and(|pid| !is_alive(pid)) {
                remove_with_mounts(&entry.path());
            }
        }
        let path = parent.join(format!("{prefix}{}", std::process::id()));
        // The directory must be new: in a shared `/tmp` another user may have created it.
        std::fs::create_dir(&path).with_context(|| format!("failed to create `{}`", path.display()))?;
        Ok(Self(path))
    }

    pub(crate) fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for ScratchDir {
    fn drop(&mut self) {
        remove_with_mounts(&self.0);
    }
}

/// Removes a directory, after unmounting what programs left mounted below it: an engine leaves the network namespaces
/// of containers without a network.
fn remove_with_mounts(dir: &Path) {
    let mounts = std::fs::read_to_string("/proc/mounts").unwrap_or_default();
    let points = mounts.lines().filter_map(|line| line.split(' ').nth(1));
    for point in points.filter(|point| Path::new(point).starts_with(dir)) {
        let _ = run_for_stdout(Command::new("umount").args(["--lazy", point]));
    }
    let _ = std::fs::remove_dir_all(dir);
}

fn is_alive(pid: u32) -> bool {
    Path::new("/proc").join(pid.to_string()).exists()
}

#[cfg(test)]
mod tests {
    use std::io::{Read as _, Seek as _};

    use super::*;

    #[test]
    fn dropping_the_guard_ends_its_child_process() {
        let child = ChildGuard::spawn(Command::new("sleep").arg("600"), "TERM").unwrap();
        let pid = child.id();
        assert!(is_alive(pid));
        drop(child);
        assert!(!is_alive(pid));
    }

    #[test]
    fn waiting_fails_when_the_child_exits_early() {
        let mut child = ChildGuard::spawn(&mut Command::new("false"), "TERM").unwrap();
        let error = wait_until(&mut child, Duration::from_secs(60), "it is ready", || false).unwrap_err();
        assert!(format!("{error:#}").contains("exited early"), "{error:#}");
    }

    #[test]
    fn a_command_in_the_background_is_idle_and_writes_to_its_file() {
        let mut file = tempfile::tempfile().unwrap();
        let runner = Runner::Background(file.try_clone().unwrap());
        let script = "grep ^policy /proc/self/sched; echo $KEPT $DROPPED; pwd; exit 3";
        let mut command = Command::new("sh");
        command.args(["-c", script]).current_dir("/").env("KEPT", "kept").env_remove("HOME");
        runner.print_message("first").unwrap();
        let error = runner.run(&mut command).unwrap_err();
        assert!(format!("{error:#}").contains("exit status: 3"), "{error:#}");
        let mut text = String::new();
        file.rewind().unwrap();
        file.read_to_string(&mut text).unwrap();
        let lines: Vec<&str> = text.lines().collect();
        assert!(lines[0] == "first" && lines.ends_with(&["kept", "/"]), "{text}");
        // SCHED_IDLE; a kernel without that file prints nothing.
        assert!(!text.contains("policy") || lines[1].trim_end().ends_with(" 5"), "{text}");
    }

    #[test]
    fn a_failing_command_is_named_in_its_error() {
        let error = run_for_stdout(Command::new("sh").args(["-c", "echo no luck >&2; exit 3"])).unwrap_err();
        let text = format!("{error:#}");
        assert!(text.contains("no luck") && text.contains("sh -c"), "{text}");
    }
}
