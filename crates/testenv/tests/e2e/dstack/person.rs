//! Somebody with dstack's client in a home of their own.

use std::{
    fs,
    io::{Read, Write as _},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::Arc,
    thread::JoinHandle,
    time::{Duration, Instant},
};

use parking_lot::Mutex;
use windlass_testenv::server::TOKEN;
use windlass_testkit::story::{CommandOutput, Pattern, SnapshotEnv};

use crate::stage::TestEnv;

const VARIABLE: &str = "WINDLASS_TEST_DSTACK";
/// Loading Python alone takes seconds on a machine that is busy with other tests.
const TIMEOUT: Duration = Duration::from_secs(240);
const SNAPSHOTS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/snapshots");
/// What the tests ask of any machine: little.
pub(crate) const SMALL: &str = "user: root\nresources: {cpu: 1.., memory: 0.., disk: null}\n";

pub(crate) struct DstackUser {
    /// Theirs, and where they type.
    home: PathBuf,
    venv: PathBuf,
    url: String,
    /// The server's directory, whose name differs each time.
    stage: PathBuf,
}

impl DstackUser {
    /// Has the client and nothing else.
    pub(crate) fn new(stage: &TestEnv) -> Self {
        let venv = std::env::var_os(VARIABLE).map(PathBuf::from);
        let venv = venv.unwrap_or_else(|| {
            panic!("{VARIABLE} names no Python environment with dstack; `cargo xtask test` makes one")
        });
        let home = stage.home().join("ann");
        // The client asks a server of its makers for news once a day: it has just done so.
        let asked = home.join(".cache/.dstack/cli");
        fs::create_dir_all(&asked).unwrap();
        fs::write(asked.join("last_check"), "").unwrap();
        Self { home, venv, url: stage.url(), stage: stage.home().to_owned() }
    }

    /// Has told the client of the server, with what `project add` writes.
    pub(crate) fn with_project(stage: &TestEnv) -> Self {
        let person = Self::new(stage);
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

    /// A program of the client's environment, or any other, as they would start it.
    pub(crate) fn program(&self, name: &str) -> Command {
        // Whoever runs the tests in the background has them ignore interrupts, and Python would go on ignoring them.
        let mut command = Command::new("/usr/bin/env");
        command.args(["--default-signal=INT", name]);
        command.env_clear().current_dir(&self.home).stdin(Stdio::null());
        // Without what else may be on this machine: the client looks for editors.
        command.env("PATH", format!("{}:/usr/sbin:/usr/bin:/sbin:/bin", self.venv.join("bin").display()));
        // Nothing is cut off at the edge of a terminal, and nothing is coloured.
        command.envs([("COLUMNS", "240"), ("TERM", "dumb"), ("TZ", "UTC"), ("LANG", "C.UTF-8")]);
        command.env("HOME", &self.home).env("PYTHONUNBUFFERED", "1");
        command
    }

    pub(crate) fn run(&self, args: &[&str]) -> CommandOutput {
        self.run_with_input("", args)
    }

    /// With what they type when they are asked.
    pub(crate) fn run_with_input(&self, typed: &str, args: &[&str]) -> CommandOutput {
        let mut child = self.command(args);
        child.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = child.spawn().unwrap();
        child.stdin.take().unwrap().write_all(typed.as_bytes()).unwrap();
        child.wait_with_output().unwrap().into()
    }

    /// Starts a command that goes on.
    pub(crate) fn start(&self, args: &[&str]) -> RunningCommand {
        RunningCommand::new(&mut self.command(args))
    }

    /// A command in a job they are attached to, by the name that the client gave it.
    pub(crate) fn shell(&self, name: &str, line: &str) -> CommandOutput {
        let mut ssh = self.program("ssh");
        ssh.arg("-F").arg(self.home.join(".ssh/config")).args(["-o", "BatchMode=yes", name, line]);
        windlass_testkit::story::ran(&mut ssh)
    }

    /// Repeats a command that only looks, until what it shows is as wanted.
    pub(crate) fn until(&self, args: &[&str], wanted: impl Fn(&CommandOutput) -> bool) -> CommandOutput {
        let asked = Instant::now();
        loop {
            let ran = self.run(args);
            if wanted(&ran) {
                return ran;
            }
            assert!(asked.elapsed() < TIMEOUT, "dstack {args:?}: {ran:#?}");
            std::thread::sleep(Duration::from_millis(200));
        }
    }
}

impl SnapshotEnv for DstackUser {
    const PROGRAM: &'static str = "dstack";
    const PATTERNS: &'static [Pattern] = &[
        (r"\b\d+ (?:sec|min|hour)s? ago", "[AGE]"),
        // `16:52`, and `[16:52:01]` before what is logged. They have one width, so that nothing beside them moves.
        (r"\b\d\d:\d\d(?::\d\d)?\b", "[AGE]"),
        // What this machine has.
        (r"\bcpu=(?:x86|arm):\d+ mem=[^ ]*?GB(?: disk=[^ ]*?GB)?", "[MACHINE]"),
        // How many parts of a machine, and how many are busy.
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
            (self.stage.display().to_string(), "[DIR]"),
            (TOKEN.to_owned(), "[TOKEN]"),
        ]
    }

    fn command(&self, args: &[&str]) -> Command {
        let mut command = self.program("dstack");
        command.args(args);
        command
    }
}

/// A command that has not ended; it ends with its guard.
pub(crate) struct RunningCommand {
    child: Child,
    heard: [Option<JoinHandle<()>>; 2],
    said: [Arc<Mutex<Vec<u8>>>; 2],
}

impl RunningCommand {
    pub(crate) fn new(command: &mut Command) -> Self {
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let said: [Arc<Mutex<Vec<u8>>>; 2] = Default::default();
        let (mut out, mut err) = (child.stdout.take().unwrap(), child.stderr.take().unwrap());
        let (to_out, to_err) = (Arc::clone(&said[0]), Arc::clone(&said[1]));
        let heard = [
            Some(std::thread::spawn(move || listen(&mut out, &to_out))),
            Some(std::thread::spawn(move || listen(&mut err, &to_err))),
        ];
        Self { child, heard, said }
    }

    fn text(&self, stream: usize) -> String {
        String::from_utf8_lossy(&self.said[stream].lock()).into_owned()
    }

    /// Waits until it has said something.
    pub(crate) fn says(&self, words: &str) {
        let asked = Instant::now();
        loop {
            // Looked at first: what it said before its end is all there then.
            let ended = self.heard.iter().flatten().all(JoinHandle::is_finished);
            let (out, err) = (self.text(0), self.text(1));
            if out.contains(words) {
                return;
            }
            assert!(!ended && asked.elapsed() < TIMEOUT, "it does not say {words:?}:\n{out}\n{err}");
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// As Ctrl-C does.
    pub(crate) fn interrupt(&self) {
        let told = Command::new("kill").args(["-INT", &self.child.id().to_string()]).status().unwrap();
        assert!(told.success());
    }

    /// Waits for its end.
    pub(crate) fn end(mut self) -> CommandOutput {
        let asked = Instant::now();
        let code = loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                break status.code();
            }
            assert!(asked.elapsed() < TIMEOUT, "it does not end:\n{}\n{}", self.text(0), self.text(1));
            std::thread::sleep(Duration::from_millis(20));
        };
        for heard in self.heard.iter_mut().filter_map(Option::take) {
            heard.join().unwrap();
        }
        CommandOutput { code, stdout: strip_tunnel_warnings(&self.text(0)), stderr: self.text(1) }
    }
}

/// A job's SSH server ends with the job, and the client's tunnel with it. The client looks whether its tunnel is still
/// there and then asks it to close; one that went in between is an error that it reports and ignores. Whether that line
/// comes is chance.
fn strip_tunnel_warnings(said: &str) -> String {
    let mut inside = false;
    let keep = |line: &&str| {
        inside = line.contains("Failed to close SSH tunnel") || inside && line.starts_with("          ");
        !inside
    };
    said.split_inclusive('\n').filter(keep).collect()
}

impl Drop for RunningCommand {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn listen(stream: &mut impl Read, to: &Mutex<Vec<u8>>) {
    let mut piece = [0; 4096];
    while let Ok(size @ 1..) = stream.read(&mut piece) {
        to.lock().extend(&piece[..size]);
    }
}
