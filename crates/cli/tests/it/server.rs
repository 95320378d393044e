//! `windlass server`: start, requests and stop.

use std::{
    io::{BufRead as _, BufReader, Read as _, Write as _},
    net::TcpStream,
    os::unix::fs::PermissionsExt,
    path::Path,
    process::{Child, ChildStderr, Command, Stdio},
};

use crate::TestDir;

pub(crate) struct TestServer {
    child: Child,
    stderr: Option<BufReader<ChildStderr>>,
    address: String,
    /// Output before it was ready.
    message: String,
}

/// Starts a server with minimal logging: its log is not read, and a full pipe would block it.
pub(crate) fn start_quiet(data_dir: &Path, args: &[&str]) -> TestServer {
    start_at("error", data_dir, args, None)
}

pub(crate) fn start(data_dir: &Path, args: &[&str]) -> TestServer {
    start_at("debug", data_dir, args, None)
}

/// Starts a server with a mock cloud that follows this script.
pub(crate) fn with_mock_cloud(data_dir: &Path, args: &[&str], script: &Path) -> TestServer {
    start_at("error", data_dir, args, Some(script))
}

fn start_at(level: &str, data_dir: &Path, args: &[&str], mock_cloud: Option<&Path>) -> TestServer {
    let child = Command::new(env!("CARGO_BIN_EXE_windlass"))
        .args(["server", "--port", "0", "--no-local", "--log-level", level, "--data-dir"])
        .arg(data_dir)
        .args(args)
        .env_remove("WINDLASS_SERVER_ADMIN_TOKEN")
        .envs(mock_cloud.map(|script| ("WINDLASS_MOCK_CLOUD", script)))
        .stdin(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut running = TestServer { child, stderr: None, address: String::new(), message: String::new() };
    let mut stderr = BufReader::new(running.child.stderr.take().unwrap());
    while running.address.is_empty() {
        let mut line = String::new();
        assert!(
            stderr.read_line(&mut line).unwrap() > 0,
            "it ended before it was ready: {}",
            running.message
        );
        running.message.push_str(&line);
        if let Some((_, rest)) = line.split_once("ready at http://") {
            running.address = rest.split(' ').next().unwrap().trim().to_owned();
        }
    }
    running.stderr = Some(stderr);
    running
}

/// A failed test leaves no server behind.
impl Drop for TestServer {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl TestServer {
    pub(crate) fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    /// URL of its HTTPS port.
    pub(crate) fn https(&self) -> String {
        let found = self.message.split_whitespace().find(|word| word.starts_with("https://"));
        found.unwrap().to_owned()
    }

    fn get(&self, head: &str) -> String {
        let mut stream = TcpStream::connect(&self.address).unwrap();
        write!(stream, "{head}\r\nHost: windlass\r\nConnection: close\r\n\r\n").unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        answer
    }

    /// Sends a request with a body and returns the whole response.
    pub(crate) fn post(&self, path: &str, token: &str, body: &str) -> String {
        let mut stream = TcpStream::connect(&self.address).unwrap();
        let length = body.len();
        write!(
            stream,
            "POST {path} HTTP/1.1\r\nHost: windlass\r\nConnection: close\r\nAuthorization: Bearer {token}\r\n\
             Content-Type: application/json\r\nContent-Length: {length}\r\n\r\n{body}"
        )
        .unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        answer
    }

    /// Returns the exit code and the remaining output.
    pub(crate) fn stop(mut self, signal: &str) -> (Option<i32>, String) {
        Command::new("kill").args([signal, &self.child.id().to_string()]).status().unwrap();
        let mut rest = String::new();
        self.stderr.take().unwrap().read_to_string(&mut rest).unwrap();
        (self.child.wait().unwrap().code(), rest)
    }
}

#[test]
fn the_first_token_is_in_a_private_file_and_in_no_log() {
    let dir = TestDir::new();
    let first = start(dir.path(), &[]);
    assert!(!first.message.contains("wl_"), "nobody sits at a terminal: {}", first.message);
    let file = dir.path().join("first-admin-token");
    assert!(first.message.contains(file.to_str().unwrap()), "{}", first.message);
    assert_eq!(std::fs::metadata(&file).unwrap().permissions().mode() & 0o777, 0o600);
    let token = std::fs::read_to_string(&file).unwrap().trim().to_owned();
    let head =
        format!("POST /api/users/get_my_user HTTP/1.1\r\nContent-Length: 0\r\nAuthorization: Bearer {token}");
    assert!(first.get(&head).contains(r#""username":"admin""#));
    let (code, rest) = first.stop("-TERM");
    assert_eq!(code, Some(0), "{rest}");
    assert!(!rest.contains(&token), "a token is in the log: {rest}");
    let second = start(dir.path(), &[]);
    assert!(!second.message.contains("wl_"), "{}", second.message);
    assert!(second.get(&head).contains("200 OK"));
    assert_eq!(second.stop("-INT").0, Some(0));
}

/// Command line of a process, which all users of the machine can read.
fn command_line(pid: u32) -> String {
    String::from_utf8(std::fs::read(format!("/proc/{pid}/cmdline")).unwrap()).unwrap().replace('\0', " ")
}

#[test]
fn an_admin_token_flag_is_hidden_from_the_process_list() {
    const TOKEN: &str = "a-token-that-is-not-to-be-seen";
    let dir = TestDir::new();
    let file = dir.path().join("token");
    std::fs::write(&file, format!("{TOKEN}\n")).unwrap();
    let joined = format!("--admin-token={TOKEN}");
    for args in
        [&["--admin-token", TOKEN][..], &[joined.as_str()], &["--admin-token-file", file.to_str().unwrap()]]
    {
        let server = start(dir.path(), args);
        let seen = command_line(server.child.id());
        assert!(seen.contains("server") && !seen.contains(TOKEN), "{seen}");
        assert!(server.post("/api/users/get_my_user", TOKEN, "{}").contains(r#""username":"admin""#));
        assert_eq!(server.stop("-TERM").0, Some(0));
    }
}

#[test]
fn server_files_are_not_accessible_to_other_users() {
    let dir = TestDir::new();
    let data = dir.path().join("data");
    std::fs::create_dir(&data).unwrap();
    std::fs::set_permissions(&data, PermissionsExt::from_mode(0o755)).unwrap();
    let server = start(&data, &["--tls-port", "0"]);
    let mode = |path: &Path| std::fs::metadata(path).unwrap().permissions().mode() & 0o777;
    assert_eq!(mode(&data), 0o755, "it was there before");
    for entry in std::fs::read_dir(&data).unwrap() {
        let path = entry.unwrap().path();
        assert_eq!(mode(&path) & 0o077, 0, "{} is {:o}", path.display(), mode(&path));
    }
    assert!(data.join("windlass.db").exists());
    assert_eq!(server.stop("-TERM").0, Some(0));
    // Files of an earlier version get private modes at the next start.
    std::fs::set_permissions(data.join("windlass.db"), PermissionsExt::from_mode(0o644)).unwrap();
    let server = start(&data, &[]);
    assert_eq!(mode(&data.join("windlass.db")), 0o600);
    assert_eq!(server.stop("-TERM").0, Some(0));
    std::fs::set_permissions(&data, PermissionsExt::from_mode(0o777)).unwrap();
    let refused = Command::new(env!("CARGO_BIN_EXE_windlass"))
        .args(["server", "--port", "0", "--no-local", "--data-dir"])
        .arg(&data)
        .output()
        .unwrap();
    let message = String::from_utf8(refused.stderr).unwrap();
    assert!(!refused.status.success() && message.contains("is writable by all users"), "{message}");
}

#[test]
fn l8_a_second_server_on_the_same_files_refuses_to_start() {
    let dir = TestDir::new();
    let first = start(dir.path(), &[]);
    let second = Command::new(env!("CARGO_BIN_EXE_windlass"))
        .args(["server", "--port", "0", "--data-dir"])
        .arg(dir.path())
        .output()
        .unwrap();
    let message = String::from_utf8(second.stderr).unwrap();
    assert_eq!(second.status.code(), Some(1), "{message}");
    assert!(message.contains("another server"), "{message}");
    assert!(first.get("GET /healthcheck HTTP/1.1").contains("running"));
    assert_eq!(first.stop("-TERM").0, Some(0));
}

/// Newlines and control characters that a client sends stay inside one record.
#[test]
fn client_input_cannot_forge_log_records() {
    let dir = TestDir::new();
    let server = start(dir.path(), &["--admin-token", "a-token-for-this-test"]);
    let path = "/api/project/x%0a%7B%22level%22:%22ERROR%22%7D/runs/get";
    let head = format!(
        "POST {path} HTTP/1.1\r\nContent-Length: 0\r\nX-Request-Id: a\\nb\r\nAuthorization: Bearer a-token-for-this-test"
    );
    assert!(server.get(&head).contains("404"));
    let (_, log) = server.stop("-TERM");
    let records: Vec<serde_json::Value> = log
        .lines()
        .map(|line| serde_json::from_str(line).unwrap_or_else(|_| panic!("not JSON: {line}")))
        .collect();
    assert!(records.iter().any(|record| record["operation"] == "read_run"), "{log}");
    assert!(records.iter().all(|record| record["level"] != "ERROR"), "{log}");
    assert!(!log.contains("a-token-for-this-test"));
}

#[test]
fn settings_come_from_flags_then_environment_then_the_file() {
    let dir = TestDir::new();
    dir.file("config.yml", "admin_token: from-the-file-0123456789\nport: 1\n");
    let server = start(dir.path(), &[]);
    let head = |token: &str| {
        format!("POST /api/users/get_my_user HTTP/1.1\r\nContent-Length: 0\r\nAuthorization: Bearer {token}")
    };
    assert!(server.get(&head("from-the-file-0123456789")).contains("200 OK"), "the file is read");
    assert!(!server.address.ends_with(":1"), "a flag wins over the file");
    assert_eq!(server.stop("-TERM").0, Some(0));
}

#[test]
fn rotate_keys_replaces_the_master_key_and_keeps_data_readable() {
    let dir = TestDir::new();
    let server = start(dir.path(), &["--admin-token", "a-token-for-this-test"]);
    assert_eq!(server.stop("-TERM").0, Some(0));
    let before = std::fs::read_to_string(dir.path().join("keys/master")).unwrap();
    let ran = Command::new(env!("CARGO_BIN_EXE_windlass"))
        .args(["server", "rotate-keys", "--data-dir"])
        .arg(dir.path())
        .output()
        .unwrap();
    assert!(ran.status.success(), "{}", String::from_utf8_lossy(&ran.stderr));
    assert_ne!(std::fs::read_to_string(dir.path().join("keys/master")).unwrap(), before);
    let again = start(dir.path(), &[]);
    let head = "POST /api/users/get_my_user HTTP/1.1\r\nContent-Length: 0\r\nAuthorization: Bearer a-token-for-this-test";
    assert!(again.get(head).contains("BEGIN OPENSSH PRIVATE KEY"));
    assert_eq!(again.stop("-TERM").0, Some(0));
}

#[test]
fn the_server_raises_its_open_file_limit_to_the_hard_limit() {
    let dir = TestDir::new();
    let limits = |pid: u32| {
        let text = std::fs::read_to_string(format!("/proc/{pid}/limits")).unwrap();
        let line = text.lines().find(|line| line.starts_with("Max open files")).unwrap().to_owned();
        let mut words = line.split_whitespace().skip(3).map(str::to_owned);
        (words.next().unwrap(), words.next().unwrap())
    };
    // A shell that lowers only the soft limit, then executes the server.
    let script = "ulimit -Sn 300 && exec \"$0\" \"$@\"";
    let mut child = Command::new("sh")
        .args([
            "-c",
            script,
            env!("CARGO_BIN_EXE_windlass"),
            "server",
            "--port",
            "0",
            "--no-local",
            "--data-dir",
        ])
        .arg(dir.path())
        .stdin(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let stderr = BufReader::new(child.stderr.take().unwrap());
    let mut running =
        TestServer { child, stderr: Some(stderr), address: String::new(), message: String::new() };
    let mut line = String::new();
    while !line.contains("windlass is ready") {
        line.clear();
        assert!(
            running.stderr.as_mut().unwrap().read_line(&mut line).unwrap() > 0,
            "it ended before it was ready"
        );
    }
    let (soft, hard) = limits(running.child.id());
    assert_eq!(soft, hard);
    assert_ne!(soft, "300", "the test needs a higher hard limit");
    assert_eq!(running.stop("-TERM").0, Some(0));
}
