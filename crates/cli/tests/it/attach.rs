//! Local runs that the command line follows.

use std::{
    io::{BufRead as _, BufReader, Read as _},
    path::Path,
    process::{Command, Stdio},
};

use crate::{TestDir, TestHome, relay::Relay};

/// The server looks for its agent next to its own binary, or at `WINDLASS_AGENT`.
#[track_caller]
pub(crate) fn require_agent() {
    let next_to = Path::new(env!("CARGO_BIN_EXE_windlass")).with_file_name("windlass-agent");
    let given = std::env::var_os("WINDLASS_AGENT").is_some();
    assert!(given || next_to.exists(), "build it first: `cargo build -p windlass-agent`");
}

fn task(home: &TestHome, command: &str) {
    let text = format!(
        "type: task\nname: job\ncommands:\n  - |\n    {command}\nresources: {{cpu: 1.., memory: 0.., disk: null}}\n"
    );
    home.0.file("job.yml", &text);
}

#[test]
fn apply_prints_job_output_byte_for_byte_and_exits_with_its_code() {
    require_agent();
    let home = TestHome::new();
    task(&home, "printf 'a\\nb'");
    let ran = home.windlass(&["apply", "-f", "job.yml", "-y"]).ok();
    assert_eq!(ran.stdout.replace("\r\n", "\n"), "a\nb", "{}", ran.stderr);
    ran.says("job: ");
    assert_eq!(home.windlass(&["logs", "job"]).ok().stdout, ran.stdout);
    assert_eq!(home.windlass(&["logs", "-f", "job"]).ok().stdout, ran.stdout);

    task(&home, "exit 7");
    let failed = home.windlass(&["apply", "-f", "job.yml", "-y"]);
    assert_eq!(failed.code, Some(7), "{}", failed.stderr);
    failed.says("exited with status 7");
    let message = failed.stderr.to_lowercase();
    assert!(!message.contains("exit code"), "said twice: {message}");
    let why = home.windlass(&["why", "job"]).ok().stdout;
    assert!(why.contains("reason: container exited with error"), "{why}");

    // The local machine is not reached over SSH.
    for args in [&["ps", "-a"][..], &["fleet"]] {
        let table = home.windlass(args).ok().stdout;
        assert!(table.contains(" local ") && !table.contains(" ssh "), "{table}");
    }

    task(&home, "exit 250");
    assert_eq!(home.windlass(&["apply", "-f", "job.yml", "-y"]).code, Some(202));

    home.windlass(&["fleet", "delete", "-y", "--wait", "local"]).ok().says("Deleted.");
    assert_eq!(home.windlass(&["fleet", "-o", "name"]).ok().stdout, "");
}

#[test]
fn interrupting_apply_stops_the_run_if_no_prompt_is_possible() {
    require_agent();
    let home = TestHome::new();
    task(&home, "echo started; sleep 600");
    let mut command = home.command(&["apply", "-f", "job.yml", "-y"]);
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
    let mut line = String::new();
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
    assert_eq!(line.trim_end(), "started");
    assert!(Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap().success());
    assert_eq!(child.wait().unwrap().code(), Some(201));
    assert_eq!(home.windlass(&["ps", "-o", "name"]).ok().stdout, "");
}

#[test]
fn a_job_runs_with_a_long_home_path() {
    require_agent();
    let home = TestHome(TestDir::named(&"h".repeat(90)));
    task(&home, "echo $((6 * 7))");
    let ran = home.windlass(&["apply", "-f", "job.yml", "-y"]).ok();
    assert_eq!(ran.stdout.trim_end(), "42", "{}", ran.stderr);
}

/// Follows a run through a relay. The run writes a line, waits for the file `go`, and writes another.
fn follow_through(relay: impl FnOnce(&str) -> Relay, meanwhile: impl FnOnce(&Relay)) -> Relay {
    require_agent();
    let home = TestHome::new();
    let go = home.path().join("go");
    task(&home, &format!("echo one; until [ -e {} ]; do sleep 0.02; done; echo two; exit 3", go.display()));
    // The job must see the files of the test.
    let local = |args: &[&str]| {
        let mut command = home.command(args);
        command.env("WINDLASS_SERVER_LOCAL_RUNTIME", "process");
        command
    };
    crate::run_command(&mut local(&["ps"])).ok();
    let server = home.path().join("home/server");
    let running = std::fs::read_to_string(server.join("running.json")).unwrap();
    let running: serde_json::Value = serde_json::from_str(&running).unwrap();
    let token = std::fs::read_to_string(server.join("admin-token")).unwrap();
    let relay = relay(running["url"].as_str().unwrap());

    let mut command = local(&["apply", "-f", "job.yml", "-y"]);
    command.env("WINDLASS_URL", relay.url()).env("WINDLASS_TOKEN", token.trim());
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut stdout = BufReader::new(child.stdout.take().unwrap());
    let mut line = String::new();
    stdout.read_line(&mut line).unwrap();
    assert_eq!(line.trim_end(), "one");
    meanwhile(&relay);
    std::fs::write(&go, "").unwrap();
    let mut rest = String::new();
    stdout.read_to_string(&mut rest).unwrap();
    let done = child.wait_with_output().unwrap();
    let message = String::from_utf8_lossy(&done.stderr).into_owned();
    assert_eq!((rest.trim_end(), done.status.code()), ("two", Some(3)), "{message}");
    let logs = crate::run_command(
        local(&["logs", "-f", "job"]).env("WINDLASS_URL", relay.url()).env("WINDLASS_TOKEN", token.trim()),
    );
    assert_eq!(logs.ok().stdout.replace("\r\n", "\n"), "one\ntwo\n");
    relay
}

#[test]
fn a_broken_log_stream_resumes_where_it_stopped() {
    let relay = follow_through(|server| Relay::new(server, true), Relay::cut);
    assert!(relay.streams() >= 3, "two for the run, one for `logs -f`: {}", relay.streams());
}

#[test]
fn logs_are_read_in_pages_if_the_server_has_no_streams() {
    let relay = follow_through(|server| Relay::new(server, false), |_| {});
    assert_eq!(relay.streams(), 2, "it is asked once each time");
}
