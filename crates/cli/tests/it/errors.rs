//! Errors: problem, reason, a hint that can be run, a code that can be explained, and an exit code.

use crate::{TestHome, cli_env::CliEnv, snapshot::CliSnapshot};

#[test]
fn explain_describes_an_error_code_without_a_server() {
    let home = TestHome::new();
    let mut story = CliSnapshot::new("explain", &home);
    story.run(&["explain"]);
    story.run(&["explain", "w010"]);
    story.run(&["explain", "C011", "-o", "json"]);
    story.run(&["explain", "-o", "name"]);
    story.run(&["explain", "W999"]);
    story.end();
    assert!(!home.path().join("home/server").exists(), "no server was started for that");
}

#[test]
fn help_knows_commands_and_topics() {
    let home = TestHome::new();
    let mut story = CliSnapshot::new("help", &home);
    for topic in ["exit-codes", "environment", "output"] {
        story.run(&["help", topic]);
    }
    story.run(&["help", "explain"]);
    story.run(&["help", "server", "stop"]);
    story.run(&["help", "appyl"]);
    story.run(&["explain", "--no-such-flag"]);
    story.end();
}

#[test]
fn an_unreachable_or_refusing_server_is_reported_with_a_hint() {
    let stage = CliEnv::new();
    let mut story = CliSnapshot::new("errors", &stage);
    story.run(&["ps", "--url", "http://127.0.0.1:9"]);
    story.run(&["ps", "--url", "https://127.0.0.1:9"]);
    story.run(&["ps", "--url", "https://127.0.0.1:9", "--server-cert", "absent.pem"]);
    story.run(&["ps", "--url", "gopher://x"]);
    story.run(&["ps", "--token", "wrong"]);
    story.run(&["ps", "--project", "mian"]);
    story.run(&["logs", "nobody"]);
    story.run(&["fleet", "get", "nobody"]);
    story.run(&["stop", "nobody"]);
    stage.file("bad.yml", "type: task\nname: bad\ncomands:\n  - echo\n");
    story.run(&["apply", "-y", "-f", "bad.yml"]);
    story.run(&["apply", "-y", "-f", "absent.yml"]);
    story.run(&["apply", "-f", "bad.yml"]);
    story.end();
}
