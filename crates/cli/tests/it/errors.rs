//! Errors: problem, reason, a hint that can be run, a code that can be explained, and an exit code.

use crate::{TestHome, cli_env::CliEnv, snapshot::CliSnapshot};

#[test]
fn explain_describes_an_error_code_without_a_server() {
    let home = TestHome::new();
    let mut transcript = CliSnapshot::new("explain", &home);
    transcript.run(&["explain"]);
    transcript.run(&["explain", "w010"]);
    transcript.run(&["explain", "C011", "-o", "json"]);
    transcript.run(&["explain", "-o", "name"]);
    transcript.run(&["explain", "W999"]);
    transcript.end();
    assert!(!home.path().join("home/server").exists(), "no server was started for that");
}

#[test]
fn help_knows_commands_and_topics() {
    let home = TestHome::new();
    let mut transcript = CliSnapshot::new("help", &home);
    for topic in ["exit-codes", "environment", "output"] {
        transcript.run(&["help", topic]);
    }
    transcript.run(&["help", "explain"]);
    transcript.run(&["help", "server", "stop"]);
    transcript.run(&["help", "appyl"]);
    transcript.run(&["explain", "--no-such-flag"]);
    transcript.end();
}

#[test]
fn an_unreachable_or_refusing_server_is_reported_with_a_hint() {
    let env = CliEnv::new();
    let mut transcript = CliSnapshot::new("errors", &env);
    transcript.run(&["ps", "--url", "http://127.0.0.1:9"]);
    transcript.run(&["ps", "--url", "https://127.0.0.1:9"]);
    transcript.run(&["ps", "--url", "https://127.0.0.1:9", "--server-cert", "absent.pem"]);
    transcript.run(&["ps", "--url", "gopher://x"]);
    transcript.run(&["ps", "--token", "wrong"]);
    transcript.run(&["ps", "--project", "mian"]);
    transcript.run(&["logs", "nobody"]);
    transcript.run(&["fleet", "get", "nobody"]);
    transcript.run(&["stop", "nobody"]);
    env.file("bad.yml", "type: task\nname: bad\ncomands:\n  - echo\n");
    transcript.run(&["apply", "-y", "-f", "bad.yml"]);
    transcript.run(&["apply", "-y", "-f", "absent.yml"]);
    transcript.run(&["apply", "-f", "bad.yml"]);
    transcript.end();
}
