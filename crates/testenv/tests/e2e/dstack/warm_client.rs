//! The client with its modules loaded. Each command is a fork of one Python process.

use std::{
    fs::{self, File},
    io::{BufRead as _, BufReader, Write as _},
    os::unix::net::{UnixListener, UnixStream},
    path::PathBuf,
    process::{Child, Command, Stdio},
};

use serde_json::json;
use windlass_testkit::cli_snapshot::CommandOutput;

const SCRIPT: &str = include_str!("warm_client.py");

/// The process ends when this is dropped.
pub(crate) struct WarmClient {
    process: Child,
    answers: BufReader<UnixStream>,
    /// For its socket, and for the streams of a command.
    dir: PathBuf,
}

impl WarmClient {
    /// `python` is the interpreter with the environment of the user's commands; `dir` does not exist yet.
    pub(crate) fn start(mut python: Command, dir: PathBuf) -> Self {
        fs::create_dir_all(&dir).unwrap();
        let (script, socket) = (dir.join("warm_client.py"), dir.join("socket"));
        fs::write(&script, SCRIPT).unwrap();
        let listener = UnixListener::bind(&socket).unwrap();
        let log = File::create(dir.join("log")).unwrap();
        python.arg(&script).arg(&socket).stdin(Stdio::null()).stdout(log.try_clone().unwrap()).stderr(log);
        let mut process = python.spawn().unwrap();
        // A process that ends without a connection would leave `accept` waiting.
        listener.set_nonblocking(true).unwrap();
        let (connection, _) = windlass_testkit::wait::eventually_ok("the client loads its modules", || {
            let ended = process.try_wait().unwrap();
            assert!(ended.is_none(), "{}", fs::read_to_string(dir.join("log")).unwrap_or_default());
            listener.accept()
        });
        connection.set_nonblocking(false).unwrap();
        Self { process, answers: BufReader::new(connection), dir }
    }

    pub(crate) fn run(&mut self, typed: &str, args: &[&str]) -> CommandOutput {
        let file = |name: &str| self.dir.join(name);
        fs::write(file("in"), typed).unwrap();
        // New files: a process that the command before left behind may still write to its own.
        for name in ["out", "err"] {
            let _ = fs::remove_file(file(name));
            File::create(file(name)).unwrap();
        }
        let request = json!([self.dir, args]);
        writeln!(self.answers.get_mut(), "{request}").unwrap();
        let mut answer = String::new();
        self.answers.read_line(&mut answer).unwrap();
        let code = answer.trim().parse().unwrap_or_else(|_| panic!("the client ended: `{answer}`"));
        let read = |name: &str| String::from_utf8_lossy(&fs::read(file(name)).unwrap()).into_owned();
        CommandOutput { code: Some(code), stdout: read("out"), stderr: read("err") }
    }
}

impl Drop for WarmClient {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}
