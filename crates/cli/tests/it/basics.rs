//! Properties of the program as a whole.

use std::{
    io::{BufRead as _, BufReader},
    process::Stdio,
};

use crate::{
    TestHome,
    cli_env::{CliEnv, TOKEN},
    run_command,
    snapshot::CliSnapshot,
};

#[test]
fn version_help_and_usage_errors_are_printed() {
    let home = TestHome::new();
    let mut transcript = CliSnapshot::new("windlass", &home);
    transcript.run(&["--version"]);
    transcript.run(&["--no-such-flag"]);
    transcript.run(&["no-such-command"]);
    transcript.end();
    let help = home.windlass(&["--help"]).ok().stdout;
    assert!(help.contains("Usage: windlass <COMMAND>") && help.contains("Examples:"), "{help}");
    let nothing = home.windlass(&[]);
    assert_eq!((nothing.code, nothing.stdout.as_str()), (Some(2), ""), "the help of a mistake is talk");
}

#[test]
fn a_closed_output_pipe_is_not_an_error() {
    let home = TestHome::new();
    for args in [&["explain"][..], &["--help"], &["completion", "bash"], &["explain", "-o", "jsonl"]] {
        let mut command = home.command(args);
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        drop(child.stdout.take());
        let done = child.wait_with_output().unwrap();
        assert_eq!((done.status.code(), done.stderr.len()), (Some(0), 0), "{args:?}");
    }
}

#[test]
fn colours_can_be_forced_and_no_color_overrides() {
    let home = TestHome::new();
    let plain = home.windlass(&["explain"]).ok().stdout;
    let forced = run_command(home.command(&["explain"]).env("CLICOLOR_FORCE", "1")).ok().stdout;
    let neither =
        run_command(home.command(&["explain"]).env("CLICOLOR_FORCE", "1").env("NO_COLOR", "1")).ok().stdout;
    assert!(forced.starts_with("\u{1b}[1mCODE\u{1b}[0m"), "{forced}");
    assert_eq!(plain, neither);
}

#[test]
fn login_prints_the_server_user_and_project() {
    let env = CliEnv::new();
    let url = env.server.url();
    let mut transcript = CliSnapshot::new("login", &env.home);
    transcript.run(&["login", "--url", &url, "--token", TOKEN]);
    transcript.run(&["login", "--url", &url, "--token", TOKEN, "-o", "json"]);
    transcript.run(&["login", "--url", &url, "--token", TOKEN, "--project", "main", "-o", "name"]);
    transcript.run(&["login", "--url", &url, "--token", "wrong"]);
    transcript.run(&["login", "--url", &url, "--token", TOKEN, "--project", "other"]);
    transcript.run(&["login", "--url", &url, "--token", "-"]);
    transcript.run(&["login"]);
    transcript.end();
}

#[test]
fn check_reports_each_file_separately() {
    let home = TestHome::new();
    home.0.file("good.yml", "type: task\nname: good\ncommands: [echo]\nenv: [SURELY_NOT_SET]\n");
    home.0
        .file("bad.yml", "type: task\nname: bad\ncommands: [echo]\nresources:\n  gpu: lots\n  memroy: 8GB\n");
    let files = ["good.yml", "bad.yml", "absent.yml"];
    let mut transcript = CliSnapshot::new("check", &home);
    for format in ["table", "json", "jsonl", "name"] {
        transcript.run(&[&["check", "-o", format], &files[..]].concat());
    }
    transcript.run(&["check", "good.yml"]);
    transcript.end();
}

#[test]
fn dev_server_prints_how_to_use_it() {
    let home = TestHome::new();
    let args = ["dev", "--log-level", "error"];
    let mut child = home.command(&args).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut message = String::new();
    let mut stderr = BufReader::new(child.stderr.take().unwrap());
    while !message.contains("ready at") {
        assert!(stderr.read_line(&mut message).unwrap() > 0, "it ended: {message}");
    }
    let ended = std::process::Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap();
    assert!(ended.success());
    std::io::Read::read_to_string(&mut stderr, &mut message).unwrap();
    let done = child.wait_with_output().unwrap();
    let token =
        message.split("WINDLASS_TOKEN=").nth(1).unwrap().split_whitespace().next().unwrap().to_owned();
    let place = message.split("its data in ").nth(1).unwrap().split_whitespace().next().unwrap().to_owned();
    assert!(!std::path::Path::new(&place).exists(), "{place} is left");
    let mut transcript = CliSnapshot::new("dev", &home);
    transcript.mask_patterns(&token, "[TOKEN]");
    transcript.mask_patterns(&place, "[DATA]");
    let stdout = String::from_utf8(done.stdout).unwrap();
    transcript.add(&args, &crate::CommandOutput { code: done.status.code(), stdout, stderr: message });
    transcript.end();
}
