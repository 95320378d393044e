//! Managed jobs from a task file to their end, with losses and restarts.

mod corpus;
mod names;
mod nodes;
mod places;
mod reasons;
mod takeover;

use std::{
    path::Path,
    time::{Duration, Instant},
};

use serde_json::{Value, json};
use windlass_testenv::{
    server::binary_path,
    test_hosts::{HostOptions, HostRuntime, RunningHosts},
};
use windlass_testkit::{lab::Lab, wait::eventually_async};

use crate::test_env::{HostMode, TestEnv};

/// Longer than any step takes.
const TIMEOUT: Duration = Duration::from_secs(150);
const POLL_INTERVAL: Duration = Duration::from_millis(10);
const FINAL_STATUSES: [&str; 7] = [
    "SUCCEEDED",
    "CANCELLED",
    "FAILED",
    "FAILED_SETUP",
    "FAILED_PRECHECKS",
    "FAILED_NO_RESOURCE",
    "FAILED_CONTROLLER",
];

/// A stage with hosts, each with a separate agent whose jobs are processes of this machine.
async fn with_hosts(count: usize, blocks: i64) -> (TestEnv, RunningHosts) {
    let mut env = TestEnv::new(HostMode::None).await;
    env.stop_server();
    let (data, home) = (env.home().join("server"), env.home().join("hosts"));
    let agent = binary_path("windlass-agent").unwrap();
    let hosts = HostOptions { agent: &agent, home: &home, count, blocks, runtime: HostRuntime::Process };
    let url = format!("sqlite:{}/windlass.db", data.display());
    let hosts = hosts.start(&url, &data.join("keys/master")).await.unwrap();
    env = env.with_env("WINDLASS_SERVER_LOST_AFTER", "5s");
    env.start().await;
    env.wait_for_hosts("simulated", count).await;
    (env, hosts)
}

pub(crate) async fn launch(env: &mut TestEnv, text: &str, more: Value) -> i64 {
    let mut request = json!({"text": text});
    request.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    let launched = env.project("jobs/launch", &request).await;
    launched["jobs"][0]["job_id"].as_i64().unwrap()
}

async fn job(env: &mut TestEnv, id: i64) -> Value {
    env.project("jobs/get", &json!({"job_id": id})).await
}

/// Waits until a condition holds for a job.
pub(crate) async fn wait_until(
    env: &mut TestEnv,
    id: i64,
    what: &str,
    holds: impl Fn(&Value) -> bool,
) -> Value {
    let start = Instant::now();
    loop {
        let seen = job(env, id).await;
        if holds(&seen) {
            return seen;
        }
        assert!(start.elapsed() < TIMEOUT, "not so: {what}\n{seen:#}\n{}", env.server_log());
        tokio::time::sleep(POLL_INTERVAL).await;
    }
}

/// Waits until the job has ended and its nodes are released.
pub(crate) async fn wait_until_done(env: &mut TestEnv, id: i64) -> Value {
    wait_until(env, id, "it ends", |job| job["schedule_state"] == "DONE").await
}

pub(crate) async fn runs(env: &mut TestEnv, id: i64) -> Value {
    wait_until(env, id, "it runs", |job| {
        let status = job["status"].as_str().unwrap_or_default();
        assert!(!FINAL_STATUSES.contains(&status), "it ended: {job:#}");
        status == "RUNNING"
    })
    .await
}

/// Output of the newest attempt of a task.
async fn log(env: &mut TestEnv, job: &Value, task: usize) -> String {
    let runs = job["tasks"][task]["runs"].as_array().unwrap();
    let run = env.run(runs.last().unwrap().as_str().unwrap()).await;
    env.log(&run).await
}

/// Number of starts, from a file with one line for each.
fn count_starts(path: &Path) -> usize {
    std::fs::read_to_string(path).unwrap_or_default().lines().count()
}

fn statuses(job: &Value) -> Vec<&str> {
    job["tasks"].as_array().unwrap().iter().map(|task| task["status"].as_str().unwrap()).collect()
}

#[tokio::test]
async fn a_task_file_runs_unchanged_and_launch_follows_it_to_the_end() {
    let env = TestEnv::new(HostMode::Processes).await;
    let dir = env.home().join("work");
    std::fs::create_dir_all(dir.join("code")).unwrap();
    std::fs::write(dir.join("code/hello.txt"), "from the workdir\n").unwrap();
    std::fs::write(dir.join("data.txt"), "from a mount\n").unwrap();
    let file = "name: first\nworkdir: code\nfile_mounts:\n  ~/mounted/data.txt: data.txt\n  beside/data.txt: data.txt\nenvs:\n  GREETING: hi\n\
                secrets:\n  TOKEN: null\nsetup: |\n  echo 'export FROM_SETUP=kept' >> ~/.bashrc\n  false\n  true\n\
                run: |\n  echo $GREETING ${#TOKEN} $FROM_SETUP\n  cat hello.txt ~/mounted/data.txt beside/data.txt\n  \
                echo $SKYPILOT_NODE_RANK of $SKYPILOT_NUM_NODES, job $SKYPILOT_MANAGED_JOB_ID\n";
    std::fs::write(dir.join("first.yaml"), file).unwrap();
    let args = ["jobs", "launch", "-y", "--secret", "TOKEN=canary-4711", "first.yaml"];
    let output = env.windlass(&dir, &args);
    let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    let want = "hi 11 kept\nfrom the workdir\nfrom a mount\nfrom a mount\n0 of 1, job 1\n";
    assert_eq!(out, want, "{err}\n{}", env.server_log());
    assert!(err.contains("Job 1 ended with status SUCCEEDED"), "{err}");
    assert_eq!(output.status.code(), Some(0), "{err}");
    let queue = env.windlass(&dir, &["jobs", "queue", "-o", "json"]);
    let queue: Value = serde_json::from_slice(&queue.stdout).unwrap();
    let job = &queue["jobs"][0];
    assert_eq!((&job["status"], &job["schedule_state"]), (&json!("SUCCEEDED"), &json!("DONE")), "{job:#}");
    assert_eq!((&job["recovery_count"], &job["tasks"][0]["attempt"]), (&json!(0), &json!(1)), "{job:#}");
    let run = job["tasks"][0]["runs"][0].as_str().unwrap();
    let shown = env.windlass(&dir, &["ps", "-a", "-o", "json"]);
    let shown = String::from_utf8_lossy(&shown.stdout).into_owned();
    assert!(shown.contains(run), "{shown}");
    for seen in [shown, queue.to_string(), env.server_log()] {
        assert!(!seen.contains("canary-4711"), "{seen}");
    }
    // The home directory of the user is unchanged: the job had a separate one.
    assert!(!Path::new("/root/mounted").exists());
}

#[tokio::test]
async fn setup_failure_and_run_failure_have_different_statuses() {
    let mut env = TestEnv::new(HostMode::Processes).await;
    let program = launch(&mut env, "run: |\n  echo up\n  exit 3\n", json!({})).await;
    let setup = launch(&mut env, "setup: exit 4\nrun: echo never\n", json!({})).await;
    let empty = launch(&mut env, "setup: exit 4\n", json!({})).await;
    let seen = wait_until_done(&mut env, program).await;
    assert_eq!(seen["status"], "FAILED", "{seen:#}");
    let reason = seen["tasks"][0]["reason"].as_str().unwrap();
    assert!(reason.contains("the commands exited with status 3"), "{reason}");
    assert_eq!(wait_until_done(&mut env, setup).await["status"], "FAILED_SETUP");
    let nothing = wait_until_done(&mut env, empty).await;
    assert_eq!((&nothing["status"], &nothing["tasks"][0]["attempt"]), (&json!("SUCCEEDED"), &json!(0)));
}

/// Normalises a time to a text that sorts: trailing zeros of the fraction are omitted by the API.
fn sortable_time(time: &str) -> String {
    let time = time.trim_end_matches('Z');
    let (seconds, fraction) = time.split_once('.').unwrap_or((time, ""));
    format!("{seconds}.{fraction:0<6}")
}

#[tokio::test]
async fn m7_a_pipeline_starts_the_next_task_only_after_success() {
    let mut env = TestEnv::new(HostMode::Processes).await;
    let good = "name: two\n---\nname: a\nrun: echo one\n---\nname: b\nrun: echo two $SKYPILOT_TASK_ID\n";
    let bad = "name: two\n---\nname: a\nrun: exit 1\n---\nname: b\nrun: echo never\n";
    let (good, bad) = (launch(&mut env, good, json!({})).await, launch(&mut env, bad, json!({})).await);
    let seen = wait_until_done(&mut env, good).await;
    assert_eq!((&seen["status"], statuses(&seen)), (&json!("SUCCEEDED"), vec!["SUCCEEDED"; 2]), "{seen:#}");
    assert!(log(&mut env, &seen, 1).await.contains(&format!("_{good}-1\n")), "{seen:#}");
    // The submission of a task and the end of the previous one may be written at the same time.
    let time = |task: usize, field: &str| sortable_time(seen["tasks"][task][field].as_str().unwrap());
    assert!(time(1, "start_at") > time(0, "end_at"), "{seen:#}");
    let seen = wait_until_done(&mut env, bad).await;
    assert_eq!(
        (&seen["status"], statuses(&seen)),
        (&json!("FAILED"), vec!["FAILED", "CANCELLED"]),
        "{seen:#}"
    );
    assert_eq!(seen["tasks"][1]["attempt"], 0, "{seen:#}");
}

#[tokio::test]
async fn a_group_runs_in_parallel_until_its_primaries_end_and_a_dag_waits_for_dependencies() {
    let mut env = TestEnv::new(HostMode::Processes).await;
    let meet = env.home().join("meet");
    std::fs::create_dir(&meet).unwrap();
    let dir = meet.display();
    let group = format!(
        "name: pair\nexecution: parallel\nprimary_tasks: [main]\n---\nname: main\nrun: |\n  touch {dir}/main\n  \
         until [ -e {dir}/side ]; do sleep 0.05; done\n---\nname: side\nrun: |\n  touch {dir}/side\n  sleep 600\n"
    );
    let id = launch(&mut env, &group, json!({})).await;
    let seen = wait_until_done(&mut env, id).await;
    assert_eq!(statuses(&seen), ["SUCCEEDED", "CANCELLED"], "{seen:#}");
    assert_eq!(seen["status"], "SUCCEEDED");
    let dag = format!(
        "name: x\nrun: echo x >> {dir}/order\n---\nname: last\ndepends_on: [x, y]\nrun: echo last >> {dir}/order\n---\n\
         name: y\nrun: echo y >> {dir}/order\n"
    );
    let id = launch(&mut env, &dag, json!({"name": "diamond"})).await;
    let seen = wait_until_done(&mut env, id).await;
    assert_eq!(seen["status"], "SUCCEEDED", "{seen:#}");
    let order = std::fs::read_to_string(meet.join("order")).unwrap();
    assert_eq!((order.lines().count(), order.lines().last()), (3, Some("last")), "{order}");
}

#[tokio::test]
async fn m2_cancel_ends_running_jobs_and_jobs_that_were_never_launched() {
    let mut env = TestEnv::new(HostMode::Processes).await.with_env("WINDLASS_SERVER_JOBS_LAUNCHING_MAX", "1");
    env.stop_server();
    env = env.with_env("WINDLASS_SERVER_JOBS_ALIVE_MAX", "1");
    env.start().await;
    let text = "name: long\nrun: |\n  echo up\n  sleep 600\n";
    let first = launch(&mut env, text, json!({})).await;
    runs(&mut env, first).await;
    let second = launch(&mut env, text, json!({"num_jobs": 2})).await;
    assert_eq!(second, first + 1);
    let waits = wait_until(&mut env, first + 1, "it waits", |job| job["schedule_state"] == "WAITING").await;
    assert_eq!(
        (&waits["status"], &waits["schedule_state"]),
        (&json!("PENDING"), &json!("WAITING")),
        "{waits:#}"
    );
    assert_eq!(waits["tasks"][0]["pending_kind"], "queued");
    // A waiting job is cancelled without ever being launched.
    let done = env.project("jobs/cancel", &json!({"job_ids": [first + 1]})).await;
    assert_eq!(done["job_ids"], json!([first + 1]));
    let seen = wait_until_done(&mut env, first + 1).await;
    assert_eq!((&seen["status"], &seen["tasks"][0]["attempt"]), (&json!("CANCELLED"), &json!(0)), "{seen:#}");
    assert!(seen["end_at"].is_string(), "{seen:#}");
    // The next job starts when one ends.
    env.project("jobs/cancel", &json!({"job_ids": [first]})).await;
    assert_eq!(wait_until_done(&mut env, first).await["status"], "CANCELLED");
    runs(&mut env, first + 2).await;
    let done = env.project("jobs/cancel", &json!({"all": true})).await;
    assert_eq!(done["job_ids"], json!([first + 2]));
    assert_eq!(wait_until_done(&mut env, first + 2).await["status"], "CANCELLED");
    let again = env.project("jobs/cancel", &json!({"name": "long"})).await;
    assert_eq!(again["job_ids"], json!([]));
}

#[tokio::test]
async fn a_graceful_cancel_waits_for_the_job_up_to_its_timeout() {
    let mut env = TestEnv::new(HostMode::Processes).await;
    let [saved, ready] = ["saved", "ready"].map(|name| env.home().join(name));
    let saves = format!(
        "name: saves\nrun: |\n  trap 'sleep 2; echo yes > {}; exit 0' TERM\n  touch {}\n  \
         while :; do sleep 0.1; done\n",
        saved.display(),
        ready.display()
    );
    let id = launch(&mut env, &saves, json!({})).await;
    runs(&mut env, id).await;
    // Before that, the signal ends the shell.
    eventually_async("the trap is set", async || ready.exists().then_some(())).await;
    let cancel = |env: &TestEnv, id: i64, timeout: &str| {
        let args = ["jobs", "cancel", "-y", "--graceful", "--graceful-timeout", timeout, &id.to_string()];
        let done = env.windlass(env.home(), &args);
        assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    };
    cancel(&env, id, "120");
    assert_eq!(wait_until_done(&mut env, id).await["status"], "CANCELLED");
    assert_eq!(std::fs::read_to_string(&saved).unwrap_or_default(), "yes\n", "it had time to save");
    // A job that does not end by itself is killed when the time is over, not after the default of an hour.
    std::fs::remove_file(&ready).unwrap();
    let deaf = format!(
        "name: deaf\nrun: |\n  trap '' TERM\n  touch {}\n  while :; do sleep 0.1; done\n",
        ready.display()
    );
    let id = launch(&mut env, &deaf, json!({})).await;
    runs(&mut env, id).await;
    eventually_async("the trap is set", async || ready.exists().then_some(())).await;
    cancel(&env, id, "1");
    let seen = wait_until_done(&mut env, id).await;
    assert_eq!(seen["status"], "CANCELLED");
    let killed = "a user cancelled the job; its program was still running after 1 s and was killed";
    assert_eq!(seen["reason"], killed, "{seen:#}");
}

#[tokio::test]
async fn a_task_with_a_deadline_reports_its_progress_and_cost() {
    let mut env = TestEnv::new(HostMode::Processes).await;
    let text = "name: urgent\ndeadline: {within: 1h, work: 10m}\nrun: echo done\n";
    let id = launch(&mut env, text, json!({})).await;
    let seen = wait_until_done(&mut env, id).await;
    assert_eq!((&seen["status"], &seen["cost"]), (&json!("SUCCEEDED"), &json!(0.0)), "{seen:#}");
    let task = &seen["tasks"][0];
    let report = &task["deadline"];
    assert_eq!((&report["on_time"], &report["changeovers"]), (&json!(true), &json!(1)), "{task:#}");
    assert!(report["spare"].as_i64().is_some_and(|left| (3000..=3600).contains(&left)), "{task:#}");
    assert!(report["due_at"].is_string() && task["cost"].is_number(), "{task:#}");
    let why = env.windlass(env.home(), &["why", &id.to_string()]);
    let why = String::from_utf8_lossy(&why.stdout).into_owned();
    assert!(
        why.contains("  deadline: ") && why.contains(" left; ") && why.contains(", 1 changeover"),
        "{why}"
    );
    // Lists do not sum up costs.
    let listed = env.project("jobs/list", &json!({})).await;
    assert_eq!(listed[0]["cost"], Value::Null, "{listed:#}");
}

#[tokio::test]
async fn program_errors_are_restarted_up_to_the_limit_and_all_logs_are_kept() {
    let mut env = TestEnv::new(HostMode::Processes).await;
    let count = env.home().join("count");
    let text = format!(
        "name: stubborn\nresources:\n  job_recovery: {{max_restarts_on_errors: 1, recover_on_exit_codes: 29}}\n\
         run: |\n  echo start >> {count}\n  echo attempt $(wc -l < {count})\n  case $(wc -l < {count}) in\n    \
         1) exit 29;;\n    2) exit 1;;\n    3) exit 29;;\n  esac\n",
        count = count.display()
    );
    let id = launch(&mut env, &text, json!({})).await;
    let seen = wait_until_done(&mut env, id).await;
    let task = &seen["tasks"][0];
    assert_eq!((&seen["status"], &task["attempt"]), (&json!("SUCCEEDED"), &json!(4)), "{seen:#}");
    assert_eq!((&task["recovery_count"], &task["restarts_on_errors"]), (&json!(3), &json!(1)), "{seen:#}");
    for (index, name) in task["runs"].as_array().unwrap().iter().enumerate() {
        let run = env.run(name.as_str().unwrap()).await;
        // An interactive shell prints a line when it exits.
        let log = env.log(&run).await;
        assert!(log.starts_with(&format!("attempt {}\n", index + 1)), "{log}");
    }
}

#[tokio::test]
async fn m4_a_killed_server_resumes_its_running_job_and_starts_nothing_twice() {
    let mut env = TestEnv::new(HostMode::Processes).await;
    let (count, go) = (env.home().join("count"), env.home().join("go"));
    let text = format!(
        "name: survivor\nrun: |\n  echo start >> {}\n  until [ -e {} ]; do sleep 0.05; done\n  echo after\n",
        count.display(),
        go.display()
    );
    let id = launch(&mut env, &text, json!({})).await;
    runs(&mut env, id).await;
    env.kill();
    env.start().await;
    let seen = job(&mut env, id).await;
    assert_eq!(seen["status"], "RUNNING", "{seen:#}");
    std::fs::write(&go, "").unwrap();
    let seen = wait_until_done(&mut env, id).await;
    assert_eq!((&seen["status"], &seen["recovery_count"]), (&json!("SUCCEEDED"), &json!(0)), "{seen:#}");
    assert_eq!((&seen["tasks"][0]["attempt"], count_starts(&count)), (&json!(1), 1), "{seen:#}");
    assert_eq!(log(&mut env, &seen, 0).await, "after\n");
}

#[tokio::test]
async fn m4_a_job_is_launched_once_if_the_server_is_killed_during_the_launch() {
    let mut env = TestEnv::new(HostMode::Processes).await;
    for pause in [0, 15, 40, 80] {
        let count = env.home().join(format!("count-{pause}"));
        let text = format!("name: once\nrun: echo start >> {}\n", count.display());
        let id = launch(&mut env, &text, json!({})).await;
        tokio::time::sleep(Duration::from_millis(pause)).await;
        env.kill();
        env.start().await;
        let seen = wait_until_done(&mut env, id).await;
        assert_eq!((&seen["status"], count_starts(&count)), (&json!("SUCCEEDED"), 1), "{pause}: {seen:#}");
        assert_eq!(seen["recovery_count"], 0, "{pause}: {seen:#}");
    }
}

#[tokio::test]
async fn m6_a_job_recovers_from_a_lost_host_and_stopping_its_run_cancels_it() {
    let lab = Lab::start(2).unwrap();
    let mut env = TestEnv::new(HostMode::None).await;
    env.stop_server();
    env = env.with_env("WINDLASS_SERVER_LOST_AFTER", "5s");
    env.start().await;
    env.create_lab_fleet(&lab, lab.hosts(), 1).await;
    let text = "name: nomad\nrun: |\n  echo up\n  [ -e /tmp/go ] || sleep 600\n";
    let id = launch(&mut env, text, json!({})).await;
    let first = runs(&mut env, id).await;
    let lost = first["tasks"][0]["placement"].as_str().unwrap().to_owned();
    let host = lab.hosts().iter().find(|host| lost.ends_with(&host.name())).or_else(|| {
        let number = if lost.ends_with("-0") { 1 } else { 2 };
        Some(lab.host(number))
    });
    host.unwrap().power_off().unwrap();
    let seen = wait_until(&mut env, id, "it runs again", |job| job["recovery_count"] == 1).await;
    let task = &seen["tasks"][0];
    assert_eq!((&task["status"], &task["attempt"]), (&json!("RUNNING"), &json!(2)), "{seen:#}");
    assert_ne!(task["placement"], lost, "{seen:#}");
    let run = task["runs"][1].as_str().unwrap().to_owned();
    env.stop(&run, false).await;
    let seen = wait_until_done(&mut env, id).await;
    assert_eq!(seen["status"], "CANCELLED", "{seen:#}");
}
