//! All ends of a job that a user can cause on this machine.

use std::time::Duration;

use serde_json::json;

use crate::test_env::{HostMode, TestEnv, newest_submission, task_config};

/// Shortens the delay before the first retry, which is 15 s by default.
const SHORT_RETRY_SETTINGS: [(&str, &str); 1] = [("WINDLASS_SERVER_RETRY_DELAY", "1s")];

#[tokio::test]
async fn a_job_that_takes_longer_than_its_max_duration_is_ended() {
    let mut stage = TestEnv::new(HostMode::Processes).await;
    let mut job = task_config("long", &["echo up", "sleep 600"]);
    job["max_duration"] = json!(1);
    let run = stage.ends(&job).await;
    assert_eq!(newest_submission(&run)["termination_reason"], "max_duration_exceeded", "{run:#}");
    assert_eq!(
        (&run["status"], &newest_submission(&run)["status"]),
        (&json!("failed"), &json!("terminated"))
    );
}

#[tokio::test]
async fn a_missing_secret_ends_the_job_and_is_named() {
    let mut stage = TestEnv::new(HostMode::Processes).await;
    let mut job = task_config("secretless", &["true"]);
    job["env"] = json!({"HIDDEN": "${{ secrets.nowhere }}"});
    let run = stage.ends(&job).await;
    assert!(run.to_string().contains("nowhere"), "{run:#}");
    assert_eq!(newest_submission(&run)["termination_reason"], "terminated_by_server", "{run:#}");
}

#[tokio::test]
async fn a_job_without_capacity_is_retried_until_the_retry_duration_ends() {
    let mut stage = TestEnv::with_settings(HostMode::Processes, &SHORT_RETRY_SETTINGS).await;
    let mut job = task_config("stubborn", &["true"]);
    job["resources"] = json!({"cpu": {"count": {"min": 4096}}});
    job["retry"] = json!({"on_events": ["no-capacity"], "duration": 5});
    stage.apply(&job).await;
    let run = stage.wait_for_status_within("stubborn", &["failed"], Duration::from_secs(120)).await;
    let tries = run["jobs"][0]["job_submissions"].as_array().unwrap().len();
    assert!(tries >= 2, "{run:#}");
    assert_eq!(run["termination_reason"], "retry_limit_exceeded", "{run:#}");
}

#[tokio::test]
async fn a_job_that_fails_once_is_retried_and_succeeds() {
    let mut stage = TestEnv::with_settings(HostMode::Processes, &SHORT_RETRY_SETTINGS).await;
    let flag = stage.home().join("tried");
    let once = format!("[ -e {flag} ] || {{ touch {flag}; exit 1; }}", flag = flag.display());
    let mut job = task_config("second", &[&once]);
    job["retry"] = json!({"on_events": ["error"], "duration": 600});
    stage.apply(&job).await;
    let run = stage.reaches("second", &["done"]).await;
    assert_eq!(run["jobs"][0]["job_submissions"].as_array().unwrap().len(), 2, "{run:#}");
}

#[tokio::test]
async fn an_inactive_dev_environment_is_terminated() {
    let mut stage = TestEnv::new(HostMode::Processes).await;
    let dev = json!({"type": "dev-environment", "name": "idle", "image": "none", "user": "root", "ide": "vscode",
        "init": ["echo prepared"], "inactivity_duration": 1});
    let run = stage.ends(&dev).await;
    assert_eq!(newest_submission(&run)["termination_reason"], "inactivity_duration_exceeded", "{run:#}");
    assert!(stage.log(&run).await.contains("prepared"), "{}", stage.log(&run).await);
}

#[tokio::test]
async fn a_job_is_terminated_when_it_exceeds_its_log_quota() {
    let settings = [("WINDLASS_SERVER_LOG_RATE_MAX", "1MB")];
    let mut stage = TestEnv::with_settings(HostMode::Processes, &settings).await;
    let run = stage.ends(&task_config("flood", &["yes windlass"])).await;
    let job = newest_submission(&run);
    assert_eq!(job["termination_reason"], "log_quota_exceeded", "{run:#}");
    let told = job["termination_reason_message"].as_str().unwrap_or_default();
    assert!(told.contains("1048576 bytes") && told.contains("`log_rate_max`"), "{job:#}");
}

#[tokio::test]
async fn a_stopped_job_keeps_its_stop_duration_across_a_server_crash() {
    let mut stage = TestEnv::new(HostMode::Processes).await;
    let (asked, go) = (stage.home().join("asked"), stage.home().join("go"));
    let saves = format!(
        "trap 'touch {}; until [ -e {} ]; do sleep 0.05; done; echo saved; exit 3' TERM; echo up; while :; do sleep 0.1; done",
        asked.display(),
        go.display()
    );
    let mut job = task_config("saver", &[&saves]);
    job["stop_duration"] = json!(600);
    stage.apply(&job).await;
    stage.says("saver", "up").await;
    stage.stop("saver", false).await;
    stage.eventually("its program is asked to end", || asked.exists());
    stage.kill();
    stage.start().await;
    assert_eq!(stage.run("saver").await["status"], "terminating");
    std::fs::write(&go, "").unwrap();
    let run = stage.reaches("saver", &["terminated"]).await;
    assert!(stage.log(&run).await.contains("saved"), "{run:#}");
    assert_eq!(newest_submission(&run)["exit_status"], 3, "{run:#}");
    assert_eq!(newest_submission(&run)["termination_reason"], "terminated_by_user", "{run:#}");
}

#[tokio::test]
async fn a_job_is_killed_after_its_stop_duration_and_the_message_explains_it() {
    let mut stage = TestEnv::new(HostMode::Processes).await;
    let mut job = task_config("deaf", &["trap '' TERM; echo up; while :; do sleep 0.1; done"]);
    job["stop_duration"] = json!(1);
    job["shell"] = json!("sh");
    stage.apply(&job).await;
    stage.says("deaf", "up").await;
    stage.stop("deaf", false).await;
    let run = stage.reaches("deaf", &["terminated"]).await;
    let submission = newest_submission(&run);
    let told =
        "stopped by a user; it was still running 1 s after the stop request (`stop_duration`) and was killed";
    assert_eq!(
        (&submission["termination_reason_message"], &submission["exit_status"]),
        (&json!(told), &json!(137)),
        "{run:#}"
    );
    let why = stage.windlass(stage.home(), &["why", "deaf"]);
    let why = String::from_utf8_lossy(&why.stdout).into_owned();
    assert!(why.contains("was killed"), "{why}");
}
