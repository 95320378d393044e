//! User, directory and variables of the job.

use std::{collections::BTreeMap, os::unix::fs::MetadataExt};

use serde_json::json;

use crate::support::{
    runner::{Runner, RunnerSetup, job, script},
    temp_dir,
};

const NOBODY: u32 = 65534;

fn environ(runner: &Runner) -> BTreeMap<String, String> {
    let text = runner.log_text();
    let pairs = text.split('\0').filter(|pair| !pair.is_empty());
    pairs.map(|pair| pair.split_once('=').unwrap()).map(|(name, value)| (name.into(), value.into())).collect()
}

#[test]
fn a_job_of_any_user_has_the_groups_that_own_its_devices() {
    let mut setting = RunnerSetup::new();
    setting.env = vec![("WINDLASS_DEVICE_GROUPS", "61777,0,x".into())];
    let runner = setting.start();
    let mut submit = script("id -G; env | grep -c DEVICE_GROUPS; true");
    submit["job_spec"]["user"] = json!({ "uid": NOBODY, "gid": NOBODY });
    assert_eq!(runner.run_to_end(&submit).state, "done");
    let text = runner.log_text();
    let groups: Vec<&str> = text.lines().next().unwrap().split(' ').collect();
    assert!(groups.contains(&"61777") && !groups.contains(&"0"), "{text}");
    assert_eq!(text.lines().nth(1), Some("0"), "{text}");
}

#[test]
fn the_job_gets_exactly_its_variables() {
    let mut setting = RunnerSetup::new();
    setting.env = vec![
        ("LANG", "C.UTF-8".into()),
        ("LD_PRELOAD", String::new()),
        ("RUST_LOG", "trace".into()),
        ("WINDLASS_SECRET_OF_THE_AGENT", "x".into()),
        ("DSTACK_RUNNER_HTTP_PORT", "1".into()),
    ];
    let task = setting.config.task.to_string();
    let runner = setting.start();
    let hostile = "line one\nline two $(touch pwned) `x` 'y' \"z\" \\ \u{1b}[31m é";
    let mut submit = job(json!({
        "commands": ["/bin/cat", "/proc/self/environ"],
        "env": { "PLAIN": "1", "EMPTY": "", "HOSTILE": hostile, "A\nB": "odd name", "a b;c": "odder" },
        "replica_num": 1, "job_num": 0, "jobs_per_replica": 1, "repo_dir": "code",
    }));
    submit["secrets"] = json!({ "TOKEN": "s3cret" });
    submit["run"]["run_spec"] = json!({ "run_name": "train", "repo_id": "none" });
    assert_eq!(runner.run_to_end(&submit).state, "done");
    let work = runner.work().display().to_string();
    let mut expected: BTreeMap<String, String> = [
        ("A\nB", "odd name"),
        ("a b;c", "odder"),
        ("EMPTY", ""),
        ("HOME", "/root"),
        ("HOSTILE", hostile),
        ("LANG", "C.UTF-8"),
        ("LOGNAME", "root"),
        ("PATH", "/usr/local/bin:/usr/bin:/bin"),
        ("PLAIN", "1"),
        ("SHELL", "/bin/bash"),
        ("TOKEN", "s3cret"),
        ("USER", "root"),
        ("WINDLASS_TASK_ID", &task),
        ("WINDLASS_PREEMPTION_FILE", &format!("{work}/.windlass-preemption")),
    ]
    .map(|(name, value)| (name.to_owned(), value.to_owned()))
    .into();
    let of_run = [
        ("GPUS_NUM", "0"),
        ("GPUS_PER_NODE", "0"),
        ("JOB_ID", "job-1"),
        ("JOB_NUM", "0"),
        ("MASTER_NODE_IP", ""),
        ("NODES_IPS", ""),
        ("NODES_NUM", "1"),
        ("NODE_RANK", "0"),
        ("REPLICA_NUM", "1"),
        ("REPO_DIR", &format!("{work}/code")),
        ("REPO_ID", "none"),
        ("RUN_ID", "run-1"),
        ("RUN_NAME", "train"),
        ("WORKING_DIR", &work),
    ];
    for (name, value) in of_run {
        expected.insert(format!("DSTACK_{name}"), value.to_owned());
        expected.insert(format!("WINDLASS_{name}"), value.to_owned());
    }
    assert_eq!(environ(&runner), expected);
    assert!(!runner.work().join("pwned").exists());
}

#[test]
fn secrets_are_not_in_the_runners_log() {
    let runner = Runner::start();
    let mut submit = job(json!({ "commands": ["/does/not/exist"], "env": { "A": "canary-one" } }));
    submit["secrets"] = json!({ "B": "canary-two" });
    runner.run_to_end(&submit);
    for file in ["runner.log", "states.jsonl", "job.log"] {
        let text = std::fs::read_to_string(runner.run_dir().join(file)).unwrap();
        assert!(!text.contains("canary"), "{file}: {text}");
    }
}

#[test]
fn the_job_runs_as_the_user_it_names_and_in_a_directory_of_that_user() {
    let scratch = temp_dir("place").unwrap();
    std::os::unix::fs::chown(scratch.path(), Some(NOBODY), None).unwrap();
    let dir = scratch.path().join("deep/er");
    let runner = Runner::start();
    let answer = runner.go(&job(json!({
        "commands": ["/bin/sh", "-c", "id -u; id -g; id -G; pwd; umask; touch mine; cat /root/.profile /etc/shadow 2>/dev/null; true"],
        "user": { "uid": NOBODY, "gid": NOBODY },
        "working_dir": dir,
    })));
    assert_eq!(answer.json(), json!({ "working_dir": dir, "username": "nobody" }));
    assert_eq!(runner.ended().state, "done");
    assert_eq!(runner.log_text(), format!("65534\n65534\n65534\n{}\n0022\n", dir.display()));
    for made in [&dir, &dir.join("mine")] {
        assert_eq!(std::fs::metadata(made).unwrap().uid(), NOBODY, "{}", made.display());
    }
}

#[test]
fn outside_containers_a_job_gets_no_directory_that_its_user_could_not_create() {
    let scratch = temp_dir("place").unwrap();
    let runner = Runner::start();
    let end = runner.run_to_end(&job(json!({
        "commands": ["/bin/true"], "user": { "uid": NOBODY, "gid": NOBODY }, "working_dir": scratch.path().join("x"),
    })));
    assert_eq!((end.state.as_str(), end.termination_reason.as_str()), ("failed", "executor_error"));
    assert!(!scratch.path().join("x").exists());
}

#[test]
fn relative_working_directories_start_at_the_default_directory() {
    let table = [(json!(null), ""), (json!("."), ""), (json!("a/../b"), "/b"), (json!("c/d"), "/c/d")];
    for (dir, below) in table {
        let runner = Runner::start();
        runner.run_to_end(&job(json!({ "commands": ["/bin/pwd"], "working_dir": dir })));
        assert_eq!(runner.log_text(), format!("{}{below}\n", runner.work().display()), "{dir}");
    }
}

#[test]
fn a_non_root_runner_runs_jobs_only_as_its_own_user() {
    let start = || {
        let mut setting = RunnerSetup::new();
        setting.uid = Some(NOBODY);
        setting.start()
    };
    let runner = start();
    assert_eq!(runner.run_to_end(&script("id -u; id -g")).state, "done");
    assert_eq!(runner.log_text(), "65534\n65534\n");
    let runner = start();
    let end = runner.run_to_end(&job(json!({ "commands": ["/usr/bin/id"], "user": { "username": "root" } })));
    assert_eq!(end.termination_reason, "executor_error");
    assert_eq!(runner.log_text(), "");
}
