//! Runs on this machine that a person stays with.

use std::{
    io::{BufRead as _, BufReader},
    path::Path,
    process::{Command, Stdio},
};

use crate::Home;

/// The server looks for its agent beside itself, or where `WINDLASS_AGENT` says.
#[track_caller]
fn needs_agent() {
    let beside = Path::new(env!("CARGO_BIN_EXE_windlass")).with_file_name("windlass-agent");
    let given = std::env::var_os("WINDLASS_AGENT").is_some();
    assert!(given || beside.exists(), "build it first: `cargo build -p windlass-agent`");
}

fn task(home: &Home, command: &str) {
    let text = format!(
        "type: task\nname: job\ncommands:\n  - |\n    {command}\nresources: {{cpu: 1.., memory: 0.., disk: null}}\n"
    );
    home.0.file("job.yml", &text);
}

#[test]
fn the_output_of_a_job_is_ours_to_the_byte_and_so_is_its_exit_code() {
    needs_agent();
    let home = Home::new();
    task(&home, "printf 'a\\nb'");
    let ran = home.windlass(&["apply", "-f", "job.yml", "-y"]).ok();
    assert_eq!(ran.stdout.replace("\r\n", "\n"), "a\nb", "{}", ran.stderr);
    ran.says("job: ");
    assert_eq!(home.windlass(&["logs", "job"]).ok().stdout, ran.stdout);
    assert_eq!(home.windlass(&["logs", "-f", "job"]).ok().stdout, ran.stdout);

    task(&home, "exit 7");
    let failed = home.windlass(&["apply", "-f", "job.yml", "-y"]);
    assert_eq!(failed.code, Some(7), "{}", failed.stderr);
    failed.says("exit code 7");

    task(&home, "exit 250");
    assert_eq!(home.windlass(&["apply", "-f", "job.yml", "-y"]).code, Some(202));
}

#[test]
fn an_interrupt_stops_the_run_where_nobody_can_be_asked() {
    needs_agent();
    let home = Home::new();
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
