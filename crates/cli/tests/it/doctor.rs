//! `windlass doctor`, `windlass init` and the server of this machine.

use std::os::unix::fs::PermissionsExt as _;

use serde_json::Value;

use crate::{CommandOutput, TestHome, cli_env::CliEnv, run_command, snapshot::CliSnapshot};

fn check<'a>(checks: &'a Value, name: &str) -> &'a Value {
    checks["checks"].as_array().unwrap().iter().find(|check| check["name"] == name).unwrap()
}

/// Sets everything that the command depends on, so that the result is the same everywhere.
fn run_without_tools(mut command: std::process::Command) -> CommandOutput {
    let absent = "/nowhere/at-all";
    run_command(
        command
            .env("PATH", absent)
            .env("WINDLASS_AGENT", absent)
            .env("WINDLASS_SERVER_DOCKER_SOCKET", absent),
    )
}

#[test]
fn doctor_lists_missing_tools_and_starts_no_server() {
    let home = TestHome::new();
    let done = run_without_tools(home.command(&["doctor", "-o", "json"])).ok();
    let checks = done.json();
    for (name, part) in
        [("ssh", "openssh-client"), ("git", "apt install git"), ("docker", "apt install docker.io")]
    {
        let found = check(&checks, name);
        assert_eq!(found["status"], "note", "{found}");
        assert!(found["fix"].as_str().unwrap().contains(part), "{found}");
    }
    assert!(check(&checks, "agent")["fix"].as_str().unwrap().contains("WINDLASS_AGENT"));
    assert!(check(&checks, "server")["found"].as_str().unwrap().contains("not configured"));
    // The amount of free space depends on the machine.
    let room = check(&checks, "home")["found"].as_str().unwrap();
    assert!(room.contains(" GB free") || room.contains(" GB left"), "{room}");
    assert!(!home.path().join("home").exists(), "it only looks");
    let table = run_without_tools(home.command(&["doctor"])).ok();
    assert!(table.stdout.starts_with("CHECK"), "{}", table.stdout);
    table.says("ssh: ");
}

#[test]
fn doctor_checks_url_token_and_project() {
    let env = CliEnv::new();
    let well = env.windlass(&["doctor", "-o", "json"]);
    let found = well.json();
    assert_eq!(check(&found, "server")["status"], "ok", "{found}");
    assert_eq!(check(&found, "version")["status"], "ok", "{found}");
    for (flag, value, part) in [
        ("--token", "wrong", "windlass login"),
        ("--project", "other", "windlass project"),
        ("--url", "http://127.0.0.1:9", "windlass server"),
    ] {
        let bad = env.windlass(&["doctor", "-o", "json", flag, value]);
        assert_eq!(bad.code, Some(1), "{}", bad.stdout);
        let found = bad.json();
        assert_eq!(check(&found, "server")["status"], "bad", "{found}");
        assert!(check(&found, "server")["fix"].as_str().unwrap().contains(part), "{found}");
    }
}

#[test]
fn doctor_reports_a_home_that_others_can_read() {
    let home = TestHome::new();
    let path = home.path().join("home");
    std::fs::create_dir(&path).unwrap();
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
    let found = run_without_tools(home.command(&["doctor", "-o", "json"])).ok().json();
    assert!(
        check(&found, "home")["fix"].as_str().unwrap().starts_with("it contains tokens: run `chmod 700 ")
    );
}

#[test]
fn init_writes_a_valid_configuration_for_a_folder() {
    let home = TestHome::new();
    home.0.file("code/requirements.txt", "torch\n");
    home.0.file("code/train.py", "print(1)\n");
    let mut transcript = CliSnapshot::new("init", &home);
    transcript.run(&["init", "code", "--stdout"]);
    transcript.run(&["init", "code"]);
    transcript.run(&["check", "code/windlass.yml"]);
    transcript.run(&["init", "code"]);
    transcript.run(&["init", "code", "--force", "--type", "dev-environment", "-n", "desk", "-o", "json"]);
    transcript.run(&["check", "code/windlass.yml", "-o", "json"]);
    transcript.run(&["init", "code", "--force", "-n", "Not A Name"]);
    transcript.run(&["init", "nowhere"]);
    transcript.end();
    let written = std::fs::read_to_string(home.path().join("code/windlass.yml")).unwrap();
    let header = written.lines().next().unwrap();
    let schema = header.strip_prefix("# yaml-language-server: $schema=").unwrap();
    let schema = std::fs::read_to_string(home.path().join("code").join(schema)).unwrap();
    let schema: Value = serde_json::from_str(&schema).unwrap();
    assert_eq!(schema["title"], "windlass configuration");
}

#[test]
fn server_start_status_and_stop_control_the_local_server() {
    let home = TestHome::new();
    let mut transcript = CliSnapshot::new("server", &home);
    transcript.run(&["server", "status"]);
    let started = transcript.run(&["server", "start", "-o", "json"]).ok();
    transcript.mask_patterns(&started.json()["pid"].to_string(), "[PID]");
    transcript.run(&["server", "start"]);
    transcript.run(&["server", "status"]);
    transcript.run(&["server", "status", "-o", "name"]);
    transcript.run(&["server", "start", "--data-dir", "elsewhere"]);
    transcript.run(&["server", "stop"]);
    transcript.run(&["server", "stop"]);
    transcript.run(&["server", "status", "-o", "json"]);
    transcript.end();
}
