//! A user of the dstack client, with a separate home directory.

use std::{
    fs,
    io::Read,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::Arc,
    thread::JoinHandle,
    time::{Duration, Instant},
};

use parking_lot::Mutex;
use windlass_testenv::server::TOKEN;
use windlass_testkit::cli_snapshot::{CommandOutput, Pattern, SnapshotEnv};

use super::warm_client::WarmClient;
use crate::test_env::TestEnv;

const VARIABLE: &str = "WINDLASS_TEST_DSTACK";
/// Loading Python alone takes seconds on a machine that is busy with other tests.
const TIMEOUT: Duration = Duration::from_secs(240);
const SNAPSHOTS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/snapshots");
/// Minimal requirements, which any machine satisfies.
pub(crate) const SMALL: &str = "user: root\nresources: {cpu: 1.., memory: 0.., disk: null}\n";

pub(crate) struct DstackUser {
    /// Home and working directory of the user.
    home: PathBuf,
    venv: PathBuf,
    url: String,
    /// Directory of the server, whose name differs each time.
    env: PathBuf,
    /// Started by the first command that runs to its end.
    warm: Mutex<Option<WarmClient>>,
}

impl DstackUser {
    /// A user with the client and nothing else.
    pub(crate) fn new(env: &TestEnv) -> Self {
        let venv = std::env::var_os(VARIABLE).map(PathBuf::from);
        let venv = venv.unwrap_or_else(|| {
            panic!("{VARIABLE} names no Python environment with dstack; `cargo xtask test` makes one")
        });
        let home = env.home().join("ann");
        // The client checks for updates once a day: pretend that it has just done so.
        let path = home.join(".cache/.dstack/cli");
        fs::create_dir_all(&path).unwrap();
        fs::write(path.join("last_check"), "").unwrap();
        Self { home, venv, url: env.url(), env: env.home().to_owned(), warm: Mutex::default() }
    }

    /// A user whose client knows the server, with the file that `project add` writes.
    pub(crate) fn with_project(env: &TestEnv) -> Self {
        let person = Self::new(env);
        let known =
            format!("projects:\n- {{name: main, url: '{}', token: {TOKEN}, default: true}}\n", person.url);
        person.file(".dstack/config.yml", &known);
        person
    }

    pub(crate) fn url(&self) -> &str {
        &self.url
    }

    pub(crate) fn file(&self, name: &str, text: &str) {
        let path = self.home.join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }

    /// Returns a command of the client's environment, or any other, as the user would start it.
    pub(crate) fn program(&self, name: &str) -> Command {
        // Tests in the background ignore interrupts, and Python would inherit that.
        let mut command = Command::new("/usr/bin/env");
        command.args(["--default-signal=INT", name]);
        command.env_clear().current_dir(&self.home).stdin(Stdio::null());
        // Without other programs of this machine: the client searches for editors.
        command.env("PATH", format!("{}:/usr/sbin:/usr/bin:/sbin:/bin", self.venv.join("bin").display()));
        // Output is neither truncated at the width of a terminal nor coloured.
        command.envs([("COLUMNS", "240"), ("TERM", "dumb"), ("TZ", "UTC"), ("LANG", "C.UTF-8")]);
        command.env("HOME", &self.home).env("PYTHONUNBUFFERED", "1");
        command
    }

    pub(crate) fn run(&self, args: &[&str]) -> CommandOutput {
        self.run_with_input("", args)
    }

    /// Runs a command with input for its prompts.
    pub(crate) fn run_with_input(&self, typed: &str, args: &[&str]) -> CommandOutput {
        let start = || WarmClient::start(self.program("python"), self.env.join("warm"));
        self.warm.lock().get_or_insert_with(start).run(typed, args)
    }

    /// Starts a command that keeps running.
    pub(crate) fn start(&self, args: &[&str]) -> RunningCommand {
        RunningCommand::new(&mut self.command(args))
    }

    /// Runs a command in an attached job, by the host name that the client assigned.
    pub(crate) fn shell(&self, name: &str, line: &str) -> CommandOutput {
        let mut ssh = self.program("ssh");
        ssh.arg("-F").arg(self.home.join(".ssh/config")).args(["-o", "BatchMode=yes", name, line]);
        windlass_testkit::cli_snapshot::run_command(&mut ssh)
    }

    /// Waits until this machine is an instance: a plan that is made earlier has no offer.
    pub(crate) fn wait_for_host(&self) {
        self.until(&["fleet"], |ran| ran.stdout.contains("instance=0") && ran.stdout.contains(" busy"));
    }

    /// Repeats a read-only command until its output is as expected.
    pub(crate) fn until(&self, args: &[&str], wanted: impl Fn(&CommandOutput) -> bool) -> CommandOutput {
        let start = Instant::now();
        loop {
            let ran = self.run(args);
            if wanted(&ran) {
                return ran;
            }
            assert!(start.elapsed() < TIMEOUT, "dstack {args:?}: {ran:#?}");
            std::thread::sleep(Duration::from_millis(200));
        }
    }
}

impl SnapshotEnv for DstackUser {
    const PROGRAM: &'static str = "dstack";
    const PATTERNS: &'static [Pattern] = &[
        (r"\b\d+ (?:sec|min|hour)s? ago", "[AGE]"),
        // `16:52`, and `[16:52:01]` before log lines. They have a fixed width, so that adjacent text does not move.
        (r"\b\d\d:\d\d(?::\d\d)?\b", "[AGE]"),
        // Resources of this machine.
        (r"\bcpu=(?:x86|arm):\d+ mem=[^ ]*?GB(?: disk=[^ ]*?GB)?", "[MACHINE]"),
        // Number of blocks of an instance, and of busy ones.
        (r"\b\d+/\d+(\)| busy| idle)", "n/m$1"),
    ];

    fn home(&self) -> &Path {
        &self.home
    }

    fn snapshots(&self) -> &Path {
        Path::new(SNAPSHOTS)
    }

    fn masks(&self) -> Vec<(String, &'static str)> {
        vec![
            (self.home.display().to_string(), "[HOME]"),
            (self.env.display().to_string(), "[DIR]"),
            (TOKEN.to_owned(), "[TOKEN]"),
        ]
    }

    /// A process of its own, with a client that loads its modules.
    fn command(&self, args: &[&str]) -> Command {
        let mut command = self.program("dstack");
        command.args(args);
        command
    }

    fn run(&self, args: &[&str]) -> CommandOutput {
        self.run_with_input("", args)
    }
}

/// A running command, which ends on drop.
pub(crate) struct RunningCommand {
    child: Child,
    received: [Option<JoinHandle<()>>; 2],
    message: [Arc<Mutex<Vec<u8>>>; 2],
}

impl RunningCommand {
    pub(crate) fn new(command: &mut Command) -> Self {
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let message: [Arc<Mutex<Vec<u8>>>; 2] = Default::default();
        let (mut out, mut err) = (child.stdout.take().unwrap(), child.stderr.take().unwrap());
        let (to_out, to_err) = (Arc::clone(&message[0]), Arc::clone(&message[1]));
        let received = [
            Some(std::thread::spawn(move || read_to_buffer(&mut out, &to_out))),
            Some(std::thread::spawn(move || read_to_buffer(&mut err, &to_err))),
        ];
        Self { child, received, message }
    }

    fn text(&self, stream: usize) -> String {
        String::from_utf8_lossy(&self.message[stream].lock()).into_owned()
    }

    /// Waits until its output contains a text.
    pub(crate) fn says(&self, words: &str) {
        let start = Instant::now();
        loop {
            // Checked first: then the output before its end is complete.
            let ended = self.received.iter().flatten().all(JoinHandle::is_finished);
            let (out, err) = (self.text(0), self.text(1));
            if out.contains(words) {
                return;
            }
            assert!(!ended && start.elapsed() < TIMEOUT, "it does not say {words:?}:\n{out}\n{err}");
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Interrupts it as Ctrl-C does.
    pub(crate) fn interrupt(&self) {
        let status = Command::new("kill").args(["-INT", &self.child.id().to_string()]).status().unwrap();
        assert!(status.success());
    }

    /// Waits for its end.
    pub(crate) fn end(mut self) -> CommandOutput {
        let start = Instant::now();
        let code = loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                break status.code();
            }
            assert!(start.elapsed() < TIMEOUT, "it does not end:\n{}\n{}", self.text(0), self.text(1));
            std::thread::sleep(Duration::from_millis(20));
        };
        for received in self.received.iter_mut().filter_map(Option::take) {
            received.join().unwrap();
        }
        CommandOutput { code, stdout: strip_tunnel_warnings(&self.text(0)), stderr: self.text(1) }
    }
}

/// A job's SSH server ends with the job, and the client's tunnel with it. The client checks whether its tunnel still
/// exists and then closes it; if the tunnel ended in between, the client reports and ignores the error. Whether that
/// line occurs is random.
fn strip_tunnel_warnings(message: &str) -> String {
    let mut inside = false;
    let keep = |line: &&str| {
        inside = line.contains("Failed to close SSH tunnel") || inside && line.starts_with("          ");
        !inside
    };
    message.split_inclusive('\n').filter(keep).collect()
}

impl Drop for RunningCommand {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn read_to_buffer(stream: &mut impl Read, to: &Mutex<Vec<u8>>) {
    let mut piece = [0; 4096];
    while let Ok(size @ 1..) = stream.read(&mut piece) {
        to.lock().extend(&piece[..size]);
    }
}
