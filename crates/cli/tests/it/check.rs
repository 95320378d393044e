//! `windlass check`: data to stdout, talk to stderr, meaning in the exit code.

use std::{
    io::Write as _,
    path::Path,
    process::{Command, Stdio},
};

use crate::Dir;

struct Ran {
    code: Option<i32>,
    stdout: String,
    stderr: String,
}

fn check(dir: &Path, args: &[&str]) -> Ran {
    let ran = Command::new(env!("CARGO_BIN_EXE_windlass"))
        .arg("check")
        .args(args)
        .current_dir(dir)
        .output()
        .unwrap();
    Ran {
        code: ran.status.code(),
        stdout: String::from_utf8(ran.stdout).unwrap(),
        stderr: String::from_utf8(ran.stderr).unwrap(),
    }
}

const GOOD: &str = "type: task\ncommands: [echo hi]\n";
const BAD: &str = "type: task\ncomands: [echo hi]\nresources:\n  cpu: many\n";

#[test]
fn a_valid_file_exits_0_and_says_nothing_on_stdout() {
    let dir = Dir::new();
    dir.file("good.yml", GOOD);
    let ran = check(dir.path(), &["good.yml"]);
    assert_eq!((ran.code, ran.stdout.as_str(), ran.stderr.as_str()), (Some(0), "", "good.yml: valid task\n"));
}

#[test]
fn every_problem_is_shown_with_its_line_and_the_exit_code_is_1() {
    let dir = Dir::new();
    dir.file("good.yml", GOOD);
    dir.file("bad.yml", BAD);
    let ran = check(dir.path(), &["good.yml", "bad.yml", "absent.yml"]);
    assert_eq!((ran.code, ran.stdout.as_str()), (Some(1), ""));
    for part in [
        "error[C011]: unknown field `comands`",
        " --> bad.yml:2:1",
        "2 | comands: [echo hi]\n  | ^^^^^^^",
        "hint: did you mean `commands`?",
        " --> bad.yml:4:8",
        "error[W001]: read `absent.yml`",
    ] {
        assert!(ran.stderr.contains(part), "{part}\n---\n{}", ran.stderr);
    }
}

#[test]
fn json_goes_to_stdout_whole() {
    let dir = Dir::new();
    dir.file("good.yml", GOOD);
    dir.file("bad.yml", BAD);
    let ran = check(dir.path(), &["-o", "json", "good.yml", "bad.yml"]);
    assert_eq!((ran.code, ran.stderr.as_str()), (Some(1), ""));
    let all: serde_json::Value = serde_json::from_str(&ran.stdout).unwrap();
    assert_eq!((&all[0]["valid"], &all[0]["type"]), (&true.into(), &"task".into()));
    assert_eq!(all[1]["problems"].as_array().unwrap().len(), 2);
    assert_eq!((&all[1]["problems"][0]["code"], &all[1]["problems"][0]["line"]), (&"C011".into(), &2.into()));
}

#[test]
fn standard_input_is_a_file_too() {
    let mut child = Command::new(env!("CARGO_BIN_EXE_windlass"))
        .args(["check", "-"])
        .stdin(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    child.stdin.take().unwrap().write_all(GOOD.as_bytes()).unwrap();
    assert!(child.wait_with_output().unwrap().status.success());
}

#[test]
fn control_characters_of_a_file_do_not_reach_the_terminal() {
    let dir = Dir::new();
    dir.file("evil.yml", "type: task\n\"\\e]0;owned\\a\": 1\n");
    let ran = check(dir.path(), &["evil.yml"]);
    assert_eq!(ran.code, Some(1));
    assert!(!ran.stderr.contains('\u{1b}') && !ran.stderr.contains('\u{7}'), "{:?}", ran.stderr);
}

#[test]
fn variables_are_used_and_those_that_are_not_set_are_named_but_no_error() {
    let dir = Dir::new();
    dir.file("env.yml", "type: task\nimage: a\nenv: [SURELY_NOT_SET]\nregistry_auth:\n  username: a\n  password: ${{ env.PASSWORD }}\n");
    let ran = check(dir.path(), &["env.yml"]);
    assert_eq!(ran.code, Some(1));
    assert!(ran.stderr.contains("env.PASSWORD"), "{}", ran.stderr);
    let ran = check(dir.path(), &["-e", "PASSWORD=x", "env.yml"]);
    assert_eq!(ran.code, Some(0), "{}", ran.stderr);
    assert!(ran.stderr.contains("is not set: SURELY_NOT_SET"), "{}", ran.stderr);
}

#[test]
fn what_is_valid_elsewhere_and_not_done_here_is_told_with_its_line() {
    let dir = Dir::new();
    dir.file("elsewhere.yml", "type: task\ncommands: [echo hi]\ndstack: true\n");
    let ran = check(dir.path(), &["elsewhere.yml"]);
    assert_eq!(ran.code, Some(1));
    for part in ["error[C017]: `dstack: true` is not supported", " --> elsewhere.yml:3:1", "hint: "] {
        assert!(ran.stderr.contains(part), "{part}\n---\n{}", ran.stderr);
    }
}

#[test]
fn misuse_exits_2() {
    let dir = Dir::new();
    assert_eq!(check(dir.path(), &[]).code, Some(2));
    assert_eq!(check(dir.path(), &["-e", "novalue", "x.yml"]).code, Some(2));
}
