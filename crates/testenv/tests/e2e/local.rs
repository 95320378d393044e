//! This machine, with jobs as plain processes: the environment of a new user.

use std::path::Path;

use serde_json::json;

use windlass_testenv::server::submission;
use windlass_testkit::ports;

use crate::{
    containers::two_nodes_script,
    test_env::{HostMode, TestEnv, newest_submission, small_task_config, task_config},
};

#[tokio::test]
async fn a_local_job_runs_and_its_log_is_kept_byte_for_byte() {
    let mut env = TestEnv::new(HostMode::Processes).await;
    let run = env.ends(&task_config("hello", &["echo hello", "printf 'no newline at the end'"])).await;
    assert_eq!(run["status"], "done", "{run:#}");
    assert_eq!(run["termination_reason"], "all_jobs_done");
    let job = newest_submission(&run);
    assert_eq!((&job["status"], &job["exit_status"]), (&json!("done"), &json!(0)), "{job:#}");
    assert_eq!(env.log(&run).await, "hello\nno newline at the end");
}

#[tokio::test]
async fn two_nodes_share_this_machine_as_confined_processes_and_reach_each_other() {
    let mut env = TestEnv::confined(HostMode::Processes).await;
    let mut job = small_task_config("pair", &[&two_nodes_script(ports::reserve_free_port())]);
    job.as_object_mut().unwrap().remove("user");
    job["nodes"] = json!(2);
    let run = env.ends(&job).await;
    assert_eq!(run["status"], "done", "{run:#}");
    assert_eq!(env.log_of_job(&run, 1, usize::MAX).await, "SSH-2.0\nSSH-2.0\nhello from rank 0\n");
}

#[tokio::test]
async fn a_failed_job_reports_its_exit_status() {
    let mut env = TestEnv::new(HostMode::Processes).await;
    let run = env.ends(&task_config("fails", &["echo before", "exit 3"])).await;
    assert_eq!((&run["status"], &run["termination_reason"]), (&json!("failed"), &json!("job_failed")));
    let job = newest_submission(&run);
    assert_eq!(job["termination_reason"], "container_exited_with_error");
    assert_eq!((&job["exit_status"], &job["status_message"]), (&json!(3), &json!("exited (3)")), "{job:#}");
    assert_eq!(env.log(&run).await, "before\n");
}

#[tokio::test]
async fn a_stop_lets_the_job_handle_sigterm_and_an_abort_need_not() {
    let mut env = TestEnv::new(HostMode::Processes).await;
    for (name, abort) in [("polite", false), ("hurried", true)] {
        let command = "trap 'echo good bye; exit 0' INT TERM; echo up; while :; do sleep 0.05; done";
        env.apply(&task_config(name, &[command])).await;
        env.says(name, "up").await;
        env.stop(name, abort).await;
        let run = env.reaches(name, &["terminated"]).await;
        let reason = if abort { "aborted_by_user" } else { "stopped_by_user" };
        assert_eq!(run["termination_reason"], reason);
        let log = env.log(&run).await;
        // The shell also reports its killed child.
        assert!(abort || log.ends_with("good bye\n"), "{name}: {log}");
    }
}

#[tokio::test]
async fn f1_a_killed_server_resumes_its_job_without_losing_log_lines() {
    let mut env = TestEnv::new(HostMode::Processes).await;
    let go = env.home().join("go");
    let wait = format!("until [ -e {} ]; do sleep 0.02; done", go.display());
    env.apply(&task_config("survivor", &["echo before", &wait, "echo after"])).await;
    env.says("survivor", "before").await;
    env.kill();
    std::fs::write(&go, "").unwrap();
    env.start().await;
    let run = env.reaches("survivor", &["done"]).await;
    assert_eq!(env.log(&run).await, "before\nafter\n");
    assert_eq!(run["jobs"][0]["job_submissions"].as_array().unwrap().len(), 1, "{run:#}");
}

#[tokio::test]
async fn a_stopped_server_leaves_its_job_running_and_resumes_it() {
    let mut env = TestEnv::new(HostMode::Processes).await;
    let go = env.home().join("go");
    let wait = format!("until [ -e {} ]; do sleep 0.02; done", go.display());
    env.apply(&task_config("patient", &["echo up", &wait, "echo down"])).await;
    env.says("patient", "up").await;
    env.stop_server();
    std::fs::write(&go, "").unwrap();
    env.start().await;
    let run = env.reaches("patient", &["done"]).await;
    assert_eq!(env.log(&run).await, "up\ndown\n");
}

#[tokio::test]
async fn environment_and_secrets_reach_the_job_and_no_secret_leaks() {
    let mut env = TestEnv::new(HostMode::Processes).await;
    env.project("secrets/create_or_update", &json!({"name": "key", "value": "canary-4711"})).await;
    let mut job =
        task_config("secretive", &["echo $PLAIN-${#HIDDEN}", "echo $DSTACK_RUN_NAME $DSTACK_NODE_RANK"]);
    job["env"] = json!({"PLAIN": "seen", "HIDDEN": "${{ secrets.key }}"});
    let run = env.ends(&job).await;
    assert_eq!(run["status"], "done", "{run:#}");
    assert_eq!(env.log(&run).await, "seen-11\nsecretive 0\n");
    let events = env.post("/api/events/list", &json!({"limit": 100})).await;
    for seen in [run.to_string(), events.to_string(), env.server_log()] {
        assert!(!seen.contains("canary-4711"), "{seen}");
    }
}

#[tokio::test]
async fn several_jobs_share_this_machine() {
    let mut env = TestEnv::new(HostMode::Processes).await;
    let go = env.home().join("go");
    // Each ends only after the other has started.
    let dir = go.display();
    let both = |own: &str, other: &str| {
        format!("touch {dir}/{own}; until [ -e {dir}/{other} ]; do sleep 0.02; done")
    };
    std::fs::create_dir(&go).unwrap();
    let (left, right) = (both("left", "right"), both("right", "left"));
    env.apply(&task_config("left", &[&left])).await;
    env.apply(&task_config("right", &[&right])).await;
    env.reaches("left", &["done"]).await;
    env.reaches("right", &["done"]).await;
}

#[tokio::test]
async fn an_oversized_job_fails_with_every_shortfall() {
    let mut env = TestEnv::new(HostMode::Processes).await;
    let mut job = task_config("giant", &["true"]);
    job["resources"] =
        json!({"cpu": {"count": {"min": 4096}}, "gpu": {"count": {"min": 64}, "name": ["H100"]}});
    let run = env.ends(&job).await;
    assert_eq!(run["status"], "failed");
    let job = newest_submission(&run);
    assert_eq!(job["termination_reason"], "failed_to_start_due_to_no_capacity", "{job:#}");
    let message = job["termination_reason_message"].as_str().unwrap_or_default();
    assert!(message.contains("4096") && message.contains("64"), "{message}");
}

#[tokio::test]
async fn a_long_log_is_kept_whole() {
    let mut env = TestEnv::new(HostMode::Processes).await;
    let run = env
        .ends(&task_config("wordy", &["i=0; while [ $i -lt 20000 ]; do echo line $i; i=$((i+1)); done"]))
        .await;
    assert_eq!(run["status"], "done", "{run:#}");
    let want: String = (0..20_000).map(|n| format!("line {n}\n")).collect();
    assert!(env.log(&run).await == want, "the log differs");
}

#[tokio::test]
async fn the_local_fleet_is_ready_and_keeps_its_instance_after_a_restart() {
    let mut env = TestEnv::new(HostMode::Processes).await;
    let fleet = env.wait_for_hosts("local", 1).await;
    let instance = &fleet["instances"][0];
    assert_eq!((&instance["backend"], &instance["price"]), (&json!("remote"), &json!(0.0)), "{instance:#}");
    assert!(instance["instance_type"]["resources"]["cpus"].as_u64().unwrap() > 0);
    // It is the same instance after a restart, not a second one.
    env.stop_server();
    env.start().await;
    let again = env.wait_for_hosts("local", 1).await;
    assert_eq!(again["instances"].as_array().unwrap().len(), 1);
    assert_eq!(again["instances"][0]["id"], instance["id"]);
    // Its agent ended with the server, and is started again before the instance is considered unreachable.
    assert_eq!(env.ends(&task_config("again", &["true"])).await["status"], "done");
    let home = env.home().to_owned();
    let events = env.windlass(&home, &["event", "--last", "100"]);
    let events = String::from_utf8_lossy(&events.stdout).into_owned();
    assert!(!events.contains("unreachable"), "{events}");
}

#[tokio::test]
async fn a_non_root_server_runs_the_first_example() {
    let mut env = TestEnv::unprivileged().await;
    let examples = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples");
    let output = env.windlass(&examples, &["apply", "-y", "-f", "hello.yml"]);
    let message = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{message}\n{}", env.server_log());
    assert_eq!(String::from_utf8_lossy(&output.stdout), "hello from windlass\n", "{message}");
    // The job has no more privileges than the server.
    let mut job = task_config("who", &["id -u"]);
    job.as_object_mut().unwrap().remove("user");
    let run = env.ends(&job).await;
    assert_eq!(env.log(&run).await, "47111\n", "{run:#}");
}

/// Takes real minutes. The simulation tests the schedule on virtual time (`a_schedule_starts_its_run_…` of
/// `windlass-sim`); `docker_job_can_use_the_last_second_of_its_grace_period` stops a job with a shorter setting.
mod nightly {
    use std::time::Duration;

    use super::*;

    #[tokio::test]
    async fn a_program_that_saves_for_ninety_seconds_on_stop_finishes_within_two_minutes() {
        let mut env = TestEnv::new(HostMode::Processes).await;
        let saves = "trap 'asked=1' TERM; echo trains; while [ -z \"$asked\" ]; do sleep 0.1; done; echo asked; \
                     end=$(($(date +%s) + 90)); while [ \"$(date +%s)\" -lt \"$end\" ]; do sleep 1; done; echo saved";
        let mut job = task_config("training", &[saves]);
        (job["stop_duration"], job["shell"]) = (json!("2m"), json!("sh"));
        env.apply(&job).await;
        env.says("training", "trains").await;
        env.stop("training", false).await;
        let ended = |run: &serde_json::Value| run["status"] == "terminated";
        let run = env.eventually_run("training", Duration::from_secs(240), ended).await;
        let log = env.log(&run).await;
        assert!(log.ends_with("asked\nsaved\n"), "{log}\n{run:#}");
        assert!(!run.to_string().contains("was killed"), "{run:#}");
    }

    #[tokio::test]
    async fn a_minutely_schedule_starts_one_execution_per_minute() {
        let mut env = TestEnv::new(HostMode::Processes).await;
        let mut job = task_config("minutely", &["date -u +%s"]);
        job["schedule"] = json!({"cron": ["* * * * *"]});
        env.apply(&job).await;
        assert_eq!(env.run("minutely").await["status"], "pending");
        let twice = env.eventually_run("minutely", Duration::from_secs(240), |run| {
            let submissions = run["jobs"][0]["job_submissions"].as_array();
            let done = submissions.into_iter().flatten().filter(|one| one["status"] == "done").count();
            done >= 2
        });
        let run = twice.await;
        let first: i64 = env.log_of_job(&run, 0, 0).await.trim().parse().unwrap();
        let second: i64 = env.log_of_job(&run, 0, 1).await.trim().parse().unwrap();
        assert_eq!(first / 60 + 1, second / 60, "{first} {second}");
        env.stop("minutely", false).await;
        env.reaches("minutely", &["terminated"]).await;
    }
}

#[tokio::test]
async fn a_job_with_an_image_never_runs_as_a_plain_process() {
    let mut env = TestEnv::new(HostMode::Processes).await;
    let mut job = task_config("imaged", &["echo outside"]);
    job["image"] = json!("nosuch-image:9");
    let request = json!({"run_spec": submission(&job)["plan"]["run_spec"]});
    let plan = env.project("runs/get_plan", &request).await["job_plans"][0].clone();
    assert_eq!(plan["offers"], json!([]), "{plan:#}");
    let why = "needs image nosuch-image:9, and only plain processes run there";
    assert!(plan["misfits"].to_string().contains(why), "{plan:#}");
    let run = env.ends(&job).await;
    assert_eq!(run["status"], "failed", "{run:#}");
    assert!(run.to_string().contains(why), "{run:#}");
    assert_eq!(env.log(&run).await, "");
}

#[tokio::test]
async fn a_job_gets_the_python_version_it_requests() {
    let mut env = TestEnv::new(HostMode::Processes).await;
    let version = std::process::Command::new("/usr/bin/python3")
        .args(["-c", "import sys; print('%d.%d' % sys.version_info[:2])"])
        .output()
        .unwrap();
    let version = String::from_utf8(version.stdout).unwrap().trim().to_owned();
    let mut job =
        task_config("snake", &["python -c 'import sys; print(sys.prefix == sys.base_prefix, sys.version)'"]);
    job["python"] = json!(version);
    let run = env.ends(&job).await;
    assert_eq!(run["status"], "done", "{run:#}\n{}", env.log(&run).await);
    assert!(env.log(&run).await.starts_with(&format!("False {version}")), "{}", env.log(&run).await);
}

#[tokio::test]
async fn a_local_volume_keeps_data_between_runs_and_is_removed_on_deletion() {
    let mut env = TestEnv::new(HostMode::Processes).await;
    let volume = json!({"configuration": {"type": "volume", "name": "data", "backend": "local"}});
    env.project("volumes/create", &volume).await;
    while env.project("volumes/get", &json!({"name": "data"})).await["status"] != "active" {
        tokio::time::sleep(std::time::Duration::from_millis(20)).await;
    }
    let directories = |env: &TestEnv| {
        let volumes = env.home().join("server/local/volumes");
        std::fs::read_dir(volumes).map(|entries| entries.count()).unwrap_or_default()
    };
    let path = env.home().join("mounted");
    let (write, read) =
        (format!("echo kept > {}/note", path.display()), format!("cat {}/note", path.display()));
    let mut writer = task_config("writer", &[write.as_str()]);
    writer["volumes"] = json!([format!("data:{}", path.display())]);
    let run = env.ends(&writer).await;
    assert_eq!(run["status"], "done", "{run:#}");
    assert!(!path.join("note").exists(), "the volume is mounted for the job alone");
    let mut reader = task_config("reader", &[read.as_str()]);
    reader["volumes"] = writer["volumes"].clone();
    let run = env.ends(&reader).await;
    assert_eq!(env.log(&run).await, "kept\n", "{run:#}");
    assert_eq!(directories(&env), 1);
    env.project("volumes/delete", &json!({"names": ["data"]})).await;
    env.eventually("the directory is deleted", || directories(&env) == 0);
}
