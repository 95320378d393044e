//! `windlass check`: data on stdout, messages on stderr, the result in the exit code.

use std::{
    io::Write as _,
    path::Path,
    process::{Command, Stdio},
};

use crate::TestDir;

struct CheckOutput {
    code: Option<i32>,
    stdout: String,
    stderr: String,
}

fn check(dir: &Path, args: &[&str]) -> CheckOutput {
    let ran = Command::new(env!("CARGO_BIN_EXE_windlass"))
        .arg("check")
        .args(args)
        .current_dir(dir)
        .output()
        .unwrap();
    CheckOutput {
        code: ran.status.code(),
        stdout: String::from_utf8(ran.stdout).unwrap(),
        stderr: String::from_utf8(ran.stderr).unwrap(),
    }
}

const GOOD: &str = "type: task\ncommands: [echo hi]\n";
const BAD: &str = "type: task\ncomands: [echo hi]\nresources:\n  cpu: many\n";

#[test]
fn check_of_a_valid_file_exits_0_and_prints_nothing_to_stdout() {
    let dir = TestDir::new();
    dir.file("good.yml", GOOD);
    let ran = check(dir.path(), &["good.yml"]);
    assert_eq!((ran.code, ran.stdout.as_str(), ran.stderr.as_str()), (Some(0), "", "good.yml: valid task\n"));
}

#[test]
fn every_problem_is_shown_with_its_line_and_the_exit_code_is_1() {
    let dir = TestDir::new();
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
        "error[W001]: failed to read `absent.yml`",
    ] {
        assert!(ran.stderr.contains(part), "{part}\n---\n{}", ran.stderr);
    }
}

#[test]
fn check_prints_all_json_to_stdout() {
    let dir = TestDir::new();
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
fn check_reads_standard_input() {
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
    let dir = TestDir::new();
    dir.file("evil.yml", "type: task\n\"\\e]0;owned\\a\": 1\n");
    let ran = check(dir.path(), &["evil.yml"]);
    assert_eq!(ran.code, Some(1));
    assert!(!ran.stderr.contains('\u{1b}') && !ran.stderr.contains('\u{7}'), "{:?}", ran.stderr);
}

#[test]
fn check_substitutes_variables_and_lists_unset_env_entries_without_error() {
    let dir = TestDir::new();
    dir.file("env.yml", "type: task\nimage: a\nenv: [SURELY_NOT_SET]\nregistry_auth:\n  username: a\n  password: ${{ env.PASSWORD }}\n");
    let ran = check(dir.path(), &["env.yml"]);
    assert_eq!(ran.code, Some(1));
    assert!(ran.stderr.contains("env.PASSWORD"), "{}", ran.stderr);
    let ran = check(dir.path(), &["-e", "PASSWORD=x", "env.yml"]);
    assert_eq!(ran.code, Some(0), "{}", ran.stderr);
    assert!(ran.stderr.contains("are not set: SURELY_NOT_SET"), "{}", ran.stderr);
}

#[test]
fn unsupported_dstack_fields_are_reported_with_their_line() {
    let dir = TestDir::new();
    dir.file("elsewhere.yml", "type: task\ncommands: [echo hi]\ndstack: true\n");
    let ran = check(dir.path(), &["elsewhere.yml"]);
    assert_eq!(ran.code, Some(1));
    for part in ["error[C017]: `dstack: true` is not supported", " --> elsewhere.yml:3:1", "hint: "] {
        assert!(ran.stderr.contains(part), "{part}\n---\n{}", ran.stderr);
    }
}

#[test]
fn check_usage_errors_exit_2() {
    let dir = TestDir::new();
    assert_eq!(check(dir.path(), &[]).code, Some(2));
    assert_eq!(check(dir.path(), &["-e", "novalue", "x.yml"]).code, Some(2));
}

#[test]
fn managed_job_files_are_detected_and_checked_as_launch_would() {
    let dir = TestDir::new();
    dir.file("single.yaml", "resources: {cpus: 1+}\nenvs:\n  MODEL:\nrun: echo $MODEL\n");
    dir.file("pipeline.yaml", "name: two\n---\nrun: a\n---\nrun: b\n");
    dir.file("group.yaml", "name: g\nexecution: parallel\n---\nname: a\nrun: a\n---\nname: b\nrun: b\n");
    dir.file("service.yaml", "service: {readiness_probe: /}\nrun: serve\n");
    dir.file("typo.yaml", "run: a\nnum_node: 2\n");
    dir.file("ours.yaml", "type: task\ncommands: [a]\ndeadline: {within: 2h, work: 1h}\n");

    let unset = check(dir.path(), &["single.yaml"]);
    assert_eq!(unset.code, Some(1));
    assert!(unset.stderr.contains("--> single.yaml:3:3"), "{}", unset.stderr);
    assert!(unset.stderr.contains("hint: set it with `--env MODEL=…`"), "{}", unset.stderr);
    let fine =
        check(dir.path(), &["-e", "MODEL=x", "single.yaml", "pipeline.yaml", "group.yaml", "ours.yaml"]);
    assert_eq!(fine.code, Some(0), "{}", fine.stderr);
    let open =
        "service: {readiness_probe: /health, replicas: 2}\nresources: {ports: 80}\nrun: python serve.py\n";
    std::fs::write(dir.path().join("open.yaml"), open).unwrap();
    let open = check(dir.path(), &["open.yaml"]);
    assert_eq!((open.code, open.stderr.as_str()), (Some(0), "open.yaml: valid SkyPilot service\n"));
    assert!(fine.stderr.contains("single.yaml: valid SkyPilot task\n"), "{}", fine.stderr);
    assert!(fine.stderr.contains("pipeline.yaml: valid SkyPilot pipeline of 2 tasks\n"), "{}", fine.stderr);
    assert!(fine.stderr.contains("group.yaml: valid SkyPilot job group of 2 tasks\n"), "{}", fine.stderr);

    let service = check(dir.path(), &["service.yaml"]);
    assert_eq!(service.code, Some(1));
    assert!(
        service.stderr.contains("valid SkyPilot service, but windlass cannot launch it"),
        "{}",
        service.stderr
    );
    assert!(service.stderr.contains("--> service.yaml:1:1"), "{}", service.stderr);

    let typo = check(dir.path(), &["-o", "json", "typo.yaml", "service.yaml"]);
    assert_eq!(typo.code, Some(1));
    let all: serde_json::Value = serde_json::from_str(&typo.stdout).unwrap();
    assert_eq!((&all[0]["valid"], &all[0]["dialect"]), (&false.into(), &"skypilot".into()));
    assert_eq!((&all[0]["problems"][0]["line"], &all[0]["problems"][0]["code"]), (&2.into(), &"C011".into()));
    let service = (&all[1]["valid"], &all[1]["launchable"], &all[1]["type"]);
    assert_eq!(service, (&true.into(), &false.into(), &"service".into()));
}

#[test]
fn check_prints_the_warnings_of_every_dialect() {
    let dir = TestDir::new();
    dir.file("dev.yml", "type: dev-environment\nide: vscode\nversion: '1.2'\n");
    dir.file("profiles.yml", "profiles:\n- name: a\n  backend_options: [{type: vastai, min_score: 1}]\n");
    dir.file("task.yaml", "run: a\nresources:\n  disk_tier: best\n");
    let files = ["dev.yml", "profiles.yml", "task.yaml"];
    let shown = check(dir.path(), &files);
    assert_eq!(shown.code, Some(0), "{}", shown.stderr);
    for warning in [
        "  warning: line 3: `version` has no effect: the IDE installs what it needs when it connects\n",
        "  warning: profile `a`: `backend_options` has no effect",
        "  warning: line 3: `disk_tier` has no effect: the disk of a node is fixed\n",
    ] {
        assert!(shown.stderr.contains(warning), "{warning}: {}", shown.stderr);
    }
    let json = check(dir.path(), &[&["-o", "json"], &files[..]].concat());
    let all: Vec<serde_json::Value> = serde_json::from_str(&json.stdout).unwrap();
    let paths: Vec<&str> = all.iter().filter_map(|one| one["warnings"][0]["path"].as_str()).collect();
    assert_eq!(paths, ["version", "profiles[0].backend_options", "resources.disk_tier"]);
}

/// Task files of other projects, if available.
#[test]
fn check_accepts_the_same_real_task_files_as_launch() {
    let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../shared/corpus/skypilot");
    let Ok(index) = std::fs::read_to_string(corpus.join("index.json")) else { return };
    let index: Vec<serde_json::Value> = serde_json::from_str(&index).unwrap();
    let mut wrong = Vec::new();
    for entry in &index {
        let file = entry["file"].as_str().unwrap();
        let mut args = vec!["-o".to_owned(), "jsonl".to_owned(), file.to_owned()];
        for name in entry["env_required"].as_array().into_iter().flatten() {
            args.extend(["-e".to_owned(), format!("{}=some-value", name.as_str().unwrap())]);
        }
        let args: Vec<&str> = args.iter().map(String::as_str).collect();
        let answer: serde_json::Value = serde_json::from_str(&check(&corpus, &args).stdout).unwrap();
        let (valid, accepted) = (answer["valid"] == true, entry["verdict"] == "accept");
        if valid != accepted || (accepted && answer["type"] != entry["kind"]) {
            wrong.push(format!("{file}: {answer}"));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn check_images_looks_images_up_in_their_registry() {
    let registry = windlass_testkit::lab::registry::Registry::start().await;
    let (there, by_digest) = registry.put("team/app", "1", b"a layer".to_vec());
    let missing = registry.name("team/app:2");
    let dir = TestDir::new();
    for (file, image) in [
        ("there.yml", there.as_str()),
        ("digest.yml", &by_digest),
        ("missing.yml", &missing),
        ("none.yml", "none"),
    ] {
        dir.file(file, &format!("type: task\nimage: {image}\ncommands: [echo hi]\n"));
    }
    dir.file("away.yml", "type: task\nimage: 127.0.0.1:1/app:1\ncommands: [echo hi]\n");
    let path = dir.path().to_owned();
    let check = async |args: &'static [&'static str]| {
        let path = path.clone();
        tokio::task::spawn_blocking(move || check(&path, args)).await.unwrap()
    };
    let ran = check(&["--images", "there.yml", "digest.yml", "none.yml"]).await;
    assert_eq!(ran.code, Some(0), "{}", ran.stderr);
    assert_eq!(ran.stderr.matches(" exists for linux/").count(), 2, "{}", ran.stderr);
    let ran = check(&["--images", "missing.yml"]).await;
    assert_eq!(ran.code, Some(1), "{}", ran.stderr);
    assert!(ran.stderr.contains("team/app:2 does not exist in the registry 127.0.0.1:"), "{}", ran.stderr);
    // A registry that does not respond proves nothing about the image.
    let ran = check(&["--images", "away.yml", "-o", "json"]).await;
    assert_eq!((ran.code, ran.stdout.contains(r#""state": "unknown""#)), (Some(0), true), "{}", ran.stdout);
    // Without the flag no registry is queried.
    assert_eq!(check(&["missing.yml"]).await.code, Some(0));
}
