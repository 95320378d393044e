//! Following a run: its ports, `ssh`, JSON events, parts of its log.

use std::{
    io::{BufRead as _, BufReader, Read as _, Write as _},
    net::{TcpListener, TcpStream},
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use base64::{Engine as _, engine::general_purpose::STANDARD};
use serde_json::Value;
use windlass_testkit::{ports, wait::eventually};

use crate::{TestHome, attach::require_agent, run_command};

const DEADLINE: Duration = Duration::from_secs(60);

fn task(home: &TestHome, more: &str, command: &str) {
    let text = format!(
        "type: task\nname: job\n{more}commands:\n  - |\n    {command}\nresources: {{cpu: 1.., memory: 0.., disk: null}}\n"
    );
    home.0.file("job.yml", &text);
}

/// A command on a server whose jobs see the files of the test.
fn windlass(home: &TestHome, args: &[&str]) -> Command {
    let mut command = home.command(args);
    command.env("WINDLASS_SERVER_LOCAL_RUNTIME", "process");
    command
}

/// Waits for a line of a child's stderr that contains `part`.
#[track_caller]
pub(crate) fn wait_for_line(lines: &mut impl Iterator<Item = std::io::Result<String>>, part: &str) -> String {
    let mut seen = Vec::new();
    for line in lines {
        let line = line.unwrap();
        if line.contains(part) {
            return line;
        }
        seen.push(line);
    }
    panic!("no `{part}` in {seen:#?}");
}

#[test]
fn job_ports_are_forwarded_while_apply_is_attached() {
    require_agent();
    let home = TestHome::new();
    let port = ports::reserve_free_port();
    let pong = "import socket as s, sys; l = s.create_server(('127.0.0.1', int(sys.argv[1]))); print('started', flush=True)\n\
                while True: c = l.accept()[0]; c.sendall(c.recv(4) + b' pong'); c.close()";
    let env = format!("ports: ['*:{port}']\nenv:\n  PONG: {}\n", serde_json::json!(pong));
    task(&home, &env, &format!("exec /usr/bin/python3 -c \"$PONG\" {port}"));
    let mut command = windlass(&home, &["apply", "-f", "job.yml", "-y", "--host", "127.0.0.2"]);
    let mut child = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(child.stderr.take().unwrap()).lines();
    let reported = wait_for_line(&mut lines, &format!("Port {port} of the job: http://127.0.0.2:"));
    let address = reported.rsplit("http://").next().unwrap().to_owned();
    let output = || -> std::io::Result<String> {
        let mut stream = TcpStream::connect(&address)?;
        stream.write_all(b"ping")?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer)?;
        Ok(answer)
    };
    // The program may need a moment before it listens.
    eventually("the job answers", || output().is_ok_and(|answer| answer == "ping pong"));
    for _ in 0..2 {
        assert_eq!(output().unwrap(), "ping pong");
    }
    assert!(Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap().success());
    assert_eq!(child.wait().unwrap().code(), Some(201));
    assert!(TcpStream::connect(&address).is_err(), "nobody listens when nobody follows");
}

#[test]
fn interrupting_apply_of_an_unchanged_service_leaves_it_running() {
    require_agent();
    let home = TestHome::new();
    let text = format!(
        "type: service\nname: job\nport: {}\nauth: false\ncommands: [echo started; sleep 600]\n\
         resources: {{cpu: 1.., memory: 0.., disk: null}}\n",
        ports::reserve_free_port()
    );
    home.0.file("job.yml", &text);
    run_command(&mut windlass(&home, &["apply", "-f", "job.yml", "-y", "-d"])).ok();
    for signal in ["-TERM", "-INT"] {
        let mut command = windlass(&home, &["apply", "-f", "job.yml", "-y"]);
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        wait_for_line(
            &mut BufReader::new(child.stderr.take().unwrap()).lines(),
            "is already active and unchanged",
        );
        wait_for_line(&mut BufReader::new(child.stdout.take().unwrap()).lines(), "started");
        assert!(Command::new("kill").args([signal, &child.id().to_string()]).status().unwrap().success());
        assert_eq!(child.wait().unwrap().code(), Some(0), "{signal}");
        let shown = home.windlass(&["ps", "-o", "json"]).ok();
        assert!(shown.stdout.contains("\"running\""), "{signal}: {}", shown.stdout);
    }
    home.windlass(&["stop", "-y", "--wait", "job"]).ok();
}

#[test]
fn apply_refuses_a_taken_local_port_before_submitting() {
    let home = TestHome::new();
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port();
    task(&home, &format!("ports: ['{port}:80']\n"), "true");
    let refused = run_command(&mut windlass(&home, &["apply", "-f", "job.yml", "-y"]));
    assert_eq!(refused.code, Some(200), "{}", refused.stderr);
    refused.says(&format!("listen on port {port} of this machine"));
    refused.says("use `-p LOCAL:80` for another port");
    assert_eq!(home.windlass(&["ps", "-a", "-o", "name"]).ok().stdout, "");
}

#[test]
fn ssh_to_a_run_works_in_another_terminal_while_it_runs() {
    require_agent();
    let home = TestHome::new();
    let own = "Host other\n  Port 2222\n";
    home.0.file(".ssh/config", own);
    task(&home, "", "echo started; sleep 600");
    run_command(&mut windlass(&home, &["apply", "-f", "job.yml", "-y", "-d"])).ok();
    let mut command = windlass(&home, &["attach", "job"]);
    let mut child = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(child.stderr.take().unwrap()).lines();
    wait_for_line(&mut lines, "`ssh job`");

    let config = home.path().join(".ssh/config");
    let text = std::fs::read_to_string(&config).unwrap();
    assert!(text.starts_with("Include \"") && text.ends_with(own), "{text}");
    // OpenSSH reads the home directory from the system, not from the environment: pass the file explicitly.
    let ssh = |command: &str| {
        let mut ssh = Command::new("ssh");
        ssh.arg("-F").arg(&config).args(["-o", "BatchMode=yes", "job", command]).stdin(Stdio::null());
        run_command(&mut ssh)
    };
    assert_eq!(ssh("echo $((6 * 7))").ok().stdout, "42\n");
    assert_eq!(ssh("exit 7").code, Some(7));

    assert!(Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap().success());
    assert_eq!(child.wait().unwrap().code(), Some(0), "to leave stops nothing");
    assert_eq!(ssh("echo still").ok().stdout, "still\n", "whether or not anybody is attached");
    home.windlass(&["stop", "-x", "-y", "--wait", "job"]).ok();
    let late = ssh("true");
    assert_ne!(late.code, Some(0));
    late.says("is not running");
    let ended = home.windlass(&["attach", "job"]);
    assert_eq!(ended.code, Some(200));
    ended.says("it has ended");
}

#[test]
fn apply_with_jsonl_prints_run_events() {
    require_agent();
    let home = TestHome::new();
    task(&home, "", "printf 'a\\nb'; exit 3");
    let done = run_command(&mut windlass(&home, &["apply", "-f", "job.yml", "-y", "-o", "jsonl"]));
    assert_eq!(done.code, Some(3), "{}", done.stderr);
    let events: Vec<Value> = done.stdout.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert!(events.iter().all(|event| event["version"] == 1 && event["time"].is_string()), "{}", done.stdout);
    let kinds: Vec<&str> = events.iter().map(|event| event["type"].as_str().unwrap()).collect();
    assert_eq!((kinds[0], kinds[1], *kinds.last().unwrap()), ("plan", "submitted", "end"), "{kinds:?}");
    assert_eq!(events[0]["action"], "create");
    let bytes: Vec<u8> = events
        .iter()
        .filter(|event| event["type"] == "log")
        .flat_map(|event| STANDARD.decode(event["message"].as_str().unwrap()).unwrap())
        .collect();
    assert_eq!(String::from_utf8(bytes).unwrap().replace("\r\n", "\n"), "a\nb");
    assert!(events.iter().any(|event| event["type"] == "job" && event["status"] == "failed"), "{kinds:?}");
    let end = events.last().unwrap();
    assert_eq!((&end["status"], &end["exit_code"]), (&"failed".into(), &3.into()));
}

#[test]
fn piped_output_has_timestamped_lines_without_animation() {
    require_agent();
    let home = TestHome::new();
    task(&home, "", "true");
    let done = run_command(&mut windlass(&home, &["apply", "-f", "job.yml", "-y"])).ok();
    assert!(!done.stderr.contains('\u{1b}'), "{:?}", done.stderr);
    let dated = |line: &str| line.as_bytes().get(10) == Some(&b'T') && line.contains("Z job: ");
    assert!(done.stderr.lines().any(dated), "{}", done.stderr);
}

#[test]
fn logs_are_selected_by_tail_time_and_pattern() {
    require_agent();
    let home = TestHome::new();
    task(&home, "", "for i in 1 2 3 4 5 6 7 8 9 10; do echo \"line $i\"; done; printf half");
    run_command(&mut windlass(&home, &["apply", "-f", "job.yml", "-y"])).ok();
    let logs = |args: &[&str]| {
        let all: Vec<&str> = ["logs"].iter().chain(args).chain(&["job"]).copied().collect();
        home.windlass(&all).ok().stdout.replace("\r\n", "\n")
    };
    assert_eq!(logs(&["--tail", "3"]), "line 9\nline 10\nhalf");
    assert_eq!(logs(&["--tail", "3", "-f"]), "line 9\nline 10\nhalf");
    assert_eq!(logs(&["--tail", "0"]), "");
    assert_eq!(logs(&["--tail", "100"]), logs(&[]));
    assert_eq!(logs(&["--grep", "e (3|10)$"]).replace('\r', ""), "line 3\nline 10\n");
    assert_eq!(logs(&["--since", "1h"]), logs(&["--until", "2100-01-01T00:00:00Z"]));
    assert_eq!(logs(&["--until", "2020-01-01T00:00:00Z"]), "");
    assert_eq!(logs(&["--since", "2100-01-01T00:00:00Z"]), "");

    let misuse = home.windlass(&["logs", "--grep", "(", "job"]);
    assert_eq!(misuse.code, Some(2));
    misuse.says("invalid `--grep` pattern");
    assert_eq!(home.windlass(&["logs", "--until", "1h", "-f", "job"]).code, Some(2));
    let previous = home.windlass(&["logs", "--previous", "job"]);
    assert_eq!(previous.code, Some(1));
    previous.says("there is only one attempt");
    let none = home.windlass(&["logs", "--job", "4", "job"]);
    assert_eq!(none.code, Some(1));
    none.says("find job 4 of `job`");
}

#[test]
fn following_a_run_loses_no_output_when_the_server_restarts() {
    require_agent();
    let home = TestHome::new();
    let server = |home: &TestHome, port: &str| {
        let data = home.path().join("data");
        let mut command =
            home.command(&["server", "--port", port, "--admin-token", "a-token-for-this-test-only"]);
        command.arg("--data-dir").arg(data).env("WINDLASS_SERVER_LOCAL_RUNTIME", "process");
        let log = std::fs::File::create(home.path().join("server.log")).unwrap();
        ServerGuard(command.stdout(Stdio::null()).stderr(log).spawn().unwrap())
    };
    let free = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = free.local_addr().unwrap().port().to_string();
    drop(free);
    let first = server(&home, &port);
    let go = home.path().join("go");
    let counting = "i=0; while [ $i -lt 200 ]; do i=$((i + 1)); echo \"line $i\"; sleep 0.02; done";
    task(&home, "", &format!("{counting}; until [ -e {} ]; do sleep 0.02; done; echo last", go.display()));
    let mut command = home.command(&["apply", "-f", "job.yml", "-y"]);
    command
        .env("WINDLASS_URL", format!("http://127.0.0.1:{port}"))
        .env("WINDLASS_TOKEN", "a-token-for-this-test-only");
    wait_until_up(&port);
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut stdout = BufReader::new(child.stdout.take().unwrap());
    let mut text = String::new();
    while !text.contains("line 5\r\n") && !text.contains("line 5\n") {
        assert!(stdout.read_line(&mut text).unwrap() > 0, "{text}");
    }
    first.crash();
    let _second = server(&home, &port);
    std::fs::write(&go, "").unwrap();
    stdout.read_to_string(&mut text).unwrap();
    let done = child.wait_with_output().unwrap();
    assert_eq!(done.status.code(), Some(0), "{}", String::from_utf8_lossy(&done.stderr));
    let want: String = (1..=200).map(|i| format!("line {i}\n")).chain(["last\n".to_owned()]).collect();
    assert_eq!(text.replace("\r\n", "\n"), want);
}

/// Stopped cleanly at the end of its test, together with its agent.
struct ServerGuard(std::process::Child);

impl ServerGuard {
    fn crash(mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}

impl Drop for ServerGuard {
    fn drop(&mut self) {
        let _ = Command::new("kill").args(["-TERM", &self.0.id().to_string()]).stderr(Stdio::null()).status();
        let began = Instant::now();
        while began.elapsed() < DEADLINE {
            if self.0.try_wait().is_ok_and(|ended| ended.is_some()) {
                return;
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[track_caller]
fn wait_until_up(port: &str) {
    eventually("the server comes up", || TcpStream::connect(format!("127.0.0.1:{port}")).is_ok());
}
