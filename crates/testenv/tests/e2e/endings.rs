//! All ends of a job that a user can cause on this machine.

use std::time::Duration;

use serde_json::json;

use crate::test_env::{HostMode, TestEnv, newest_submission, task_config};

/// Shortens the delay before the first retry, which is 15 s by default.
const SHORT_RETRY_SETTINGS: [(&str, &str); 1] = [("WINDLASS_SERVER_RETRY_DELAY", "1s")];

#[tokio::test]
async fn a_job_that_takes_longer_than_its_max_duration_is_ended() {
    let mut env = TestEnv::new(HostMode::Processes).await;
    let mut job = task_config("long", &["echo up", "sleep 600"]);
    job["max_duration"] = json!(1);
    let run = env.ends(&job).await;
    assert_eq!(newest_submission(&run)["termination_reason"], "max_duration_exceeded", "{run:#}");
    assert_eq!(
        (&run["status"], &newest_submission(&run)["status"]),
        (&json!("failed"), &json!("terminated"))
    );
}

#[tokio::test]
async fn a_missing_secret_ends_the_job_and_is_named() {
    let mut env = TestEnv::new(HostMode::Processes).await;
    let mut job = task_config("secretless", &["true"]);
    job["env"] = json!({"HIDDEN": "${{ secrets.nowhere }}"});
    let run = env.ends(&job).await;
    assert!(run.to_string().contains("nowhere"), "{run:#}");
    assert_eq!(newest_submission(&run)["termination_reason"], "terminated_by_server", "{run:#}");
}

#[tokio::test]
async fn a_job_without_capacity_is_retried_until_the_retry_duration_ends() {
    let mut env = TestEnv::with_settings(HostMode::Processes, &SHORT_RETRY_SETTINGS).await;
    let mut job = task_config("stubborn", &["true"]);
    job["resources"] = json!({"cpu": {"count": {"min": 4096}}});
    job["retry"] = json!({"on_events": ["no-capacity"], "duration": 5});
    env.apply(&job).await;
    let run = env.wait_for_status_within("stubborn", &["failed"], Duration::from_secs(120)).await;
    let tries = run["jobs"][0]["job_submissions"].as_array().unwrap().len();
    assert!(tries >= 2, "{run:#}");
    assert_eq!(run["termination_reason"], "retry_limit_exceeded", "{run:#}");
    let limit = format!("retry limit exceeded: retry duration of 5 s exceeded after {tries} attempts (");
    let reasons = run["reasons"].as_array().unwrap();
    assert!(reasons.iter().any(|reason| reason.as_str().unwrap().starts_with(&limit)), "{run:#}");
}

#[tokio::test]
async fn a_job_that_fails_once_is_retried_and_succeeds() {
    let mut env = TestEnv::with_settings(HostMode::Processes, &SHORT_RETRY_SETTINGS).await;
    let flag = env.home().join("tried");
    let once = format!("[ -e {flag} ] || {{ touch {flag}; exit 1; }}", flag = flag.display());
    let mut job = task_config("second", &[&once]);
    job["retry"] = json!({"on_events": ["error"], "duration": 600});
    env.apply(&job).await;
    let run = env.reaches("second", &["done"]).await;
    assert_eq!(run["jobs"][0]["job_submissions"].as_array().unwrap().len(), 2, "{run:#}");
}

#[tokio::test]
async fn a_run_between_two_attempts_gives_the_message_of_the_job_and_the_next_time() {
    let mut env = TestEnv::new(HostMode::Processes).await;
    let mut job = task_config("again", &["exit 4"]);
    job["retry"] = json!({"on_events": ["error"], "duration": 600});
    env.apply(&job).await;
    let run = env.reaches("again", &["pending"]).await;
    let reason = run["reason"].as_str().unwrap_or_default();
    let begins = "attempt 1 failed: the commands exited with status 4; attempt 2 begins at ";
    assert!(reason.starts_with(begins), "{run:#}");
}

#[tokio::test]
async fn an_inactive_dev_environment_is_terminated() {
    let mut env = TestEnv::new(HostMode::Processes).await;
    let dev = json!({"type": "dev-environment", "name": "idle", "image": "none", "user": "root", "ide": "vscode",
        "init": ["echo prepared"], "inactivity_duration": 1});
    let run = env.ends(&dev).await;
    assert_eq!(newest_submission(&run)["termination_reason"], "inactivity_duration_exceeded", "{run:#}");
    assert!(env.log(&run).await.contains("prepared"), "{}", env.log(&run).await);
}

#[tokio::test]
async fn a_job_is_terminated_when_it_exceeds_its_log_quota() {
    let settings = [("WINDLASS_SERVER_LOG_RATE_MAX", "1MB")];
    let mut env = TestEnv::with_settings(HostMode::Processes, &settings).await;
    let run = env.ends(&task_config("flood", &["yes windlass"])).await;
    let job = newest_submission(&run);
    assert_eq!(job["termination_reason"], "log_quota_exceeded", "{run:#}");
    let reported = job["termination_reason_message"].as_str().unwrap_or_default();
    assert!(reported.contains("1048576 bytes") && reported.contains("`log_rate_max`"), "{job:#}");
}

#[tokio::test]
async fn a_stopped_job_keeps_its_stop_duration_across_a_server_crash() {
    let mut env = TestEnv::new(HostMode::Processes).await;
    let (requested, go) = (env.home().join("asked"), env.home().join("go"));
    let saves = format!(
        "trap 'touch {}; until [ -e {} ]; do sleep 0.05; done; echo saved; exit 3' TERM; echo up; while :; do sleep 0.1; done",
        requested.display(),
        go.display()
    );
    let mut job = task_config("saver", &[&saves]);
    job["stop_duration"] = json!(600);
    env.apply(&job).await;
    env.says("saver", "up").await;
    env.stop("saver", false).await;
    env.eventually("its program is asked to end", || requested.exists());
    env.kill();
    env.start().await;
    assert_eq!(env.run("saver").await["status"], "terminating");
    std::fs::write(&go, "").unwrap();
    let run = env.reaches("saver", &["terminated"]).await;
    assert!(env.log(&run).await.contains("saved"), "{run:#}");
    assert_eq!(newest_submission(&run)["exit_status"], 3, "{run:#}");
    assert_eq!(newest_submission(&run)["termination_reason"], "terminated_by_user", "{run:#}");
}

#[tokio::test]
async fn a_job_is_killed_after_its_stop_duration_and_the_message_explains_it() {
    let mut env = TestEnv::new(HostMode::Processes).await;
    let mut job = task_config("deaf", &["trap '' TERM; echo up; while :; do sleep 0.1; done"]);
    job["stop_duration"] = json!(1);
    job["shell"] = json!("sh");
    env.apply(&job).await;
    env.says("deaf", "up").await;
    env.stop("deaf", false).await;
    let run = env.reaches("deaf", &["terminated"]).await;
    let submission = newest_submission(&run);
    let reported =
        "stopped by a user; it was still running 1 s after the stop request (`stop_duration`) and was killed";
    assert_eq!(
        (&submission["termination_reason_message"], &submission["exit_status"]),
        (&json!(reported), &json!(137)),
        "{run:#}"
    );
    let why = env.windlass(env.home(), &["why", "deaf"]);
    let why = String::from_utf8_lossy(&why.stdout).into_owned();
    assert!(why.contains("was killed"), "{why}");
}
