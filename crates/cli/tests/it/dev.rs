//! `windlass dev`: a server that leaves no files or processes behind.

use std::{
    io::{BufRead as _, BufReader},
    process::{Command, Stdio},
};

use crate::{TestHome, run_command};

#[test]
fn dev_server_prints_how_to_reach_it_and_deletes_its_data_on_exit() {
    let home = TestHome::new();
    let mut command = home.command(&["dev", "--log-level", "error"]);
    command.env("TMPDIR", home.path());
    let mut child = command.stderr(Stdio::piped()).spawn().unwrap();
    let mut message = String::new();
    let mut stderr = BufReader::new(child.stderr.take().unwrap());
    while !message.contains("windlass is ready") {
        assert!(stderr.read_line(&mut message).unwrap() > 0, "{message}");
    }
    let word = |name: &str| {
        let (_, rest) = message.split_once(&format!("{name}=")).unwrap();
        rest.split_whitespace().next().unwrap().to_owned()
    };
    let mut ps = home.command(&["ps", "-o", "json"]);
    let listed = run_command(
        ps.env("WINDLASS_URL", word("WINDLASS_URL")).env("WINDLASS_TOKEN", word("WINDLASS_TOKEN")),
    );
    assert_eq!(listed.ok().json()["project"], "main");
    let left = || {
        let all = std::fs::read_dir(home.path()).unwrap().flatten();
        all.filter(|entry| entry.file_name().to_string_lossy().starts_with("windlass-dev-")).count()
    };
    assert_eq!(left(), 1);
    assert!(Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap().success());
    assert_eq!(child.wait().unwrap().code(), Some(0));
    assert_eq!(left(), 0);
}
