//! Every way a job ends that a user can bring about on this machine.

use std::time::Duration;

use serde_json::json;

use crate::stage::{Machines, Stage, submission_of, task};

/// A run waits for its first retry for so long; 15 s unless told otherwise.
const HURRIED: [(&str, &str); 1] = [("WINDLASS_SERVER_RETRY_DELAY", "1s")];

#[tokio::test]
async fn a_job_that_takes_longer_than_its_max_duration_is_ended() {
    let mut stage = Stage::new(Machines::Processes).await;
    let mut job = task("long", &["echo up", "sleep 600"]);
    job["max_duration"] = json!(1);
    let run = stage.ends(&job).await;
    assert_eq!(submission_of(&run)["termination_reason"], "max_duration_exceeded", "{run:#}");
    assert_eq!((&run["status"], &submission_of(&run)["status"]), (&json!("failed"), &json!("terminated")));
}

#[tokio::test]
async fn a_missing_secret_ends_the_job_and_is_named() {
    let mut stage = Stage::new(Machines::Processes).await;
    let mut job = task("secretless", &["true"]);
    job["env"] = json!({"HIDDEN": "${{ secrets.nowhere }}"});
    let run = stage.ends(&job).await;
    assert!(run.to_string().contains("nowhere"), "{run:#}");
    assert_eq!(submission_of(&run)["termination_reason"], "terminated_by_server", "{run:#}");
}

#[tokio::test]
async fn a_job_without_a_place_is_tried_again_until_the_duration_is_over() {
    let mut stage = Stage::with_settings(Machines::Processes, &HURRIED).await;
    let mut job = task("stubborn", &["true"]);
    job["resources"] = json!({"cpu": {"count": {"min": 4096}}});
    job["retry"] = json!({"on_events": ["no-capacity"], "duration": 5});
    stage.apply(&job).await;
    let run = stage.reaches_within("stubborn", &["failed"], Duration::from_secs(120)).await;
    let tries = run["jobs"][0]["job_submissions"].as_array().unwrap().len();
    assert!(tries >= 2, "{run:#}");
    assert_eq!(run["termination_reason"], "retry_limit_exceeded", "{run:#}");
}

#[tokio::test]
async fn a_job_that_fails_once_is_tried_again_and_done() {
    let mut stage = Stage::with_settings(Machines::Processes, &HURRIED).await;
    let flag = stage.home().join("tried");
    let once = format!("[ -e {flag} ] || {{ touch {flag}; exit 1; }}", flag = flag.display());
    let mut job = task("second", &[&once]);
    job["retry"] = json!({"on_events": ["error"], "duration": 600});
    stage.apply(&job).await;
    let run = stage.reaches("second", &["done"]).await;
    assert_eq!(run["jobs"][0]["job_submissions"].as_array().unwrap().len(), 2, "{run:#}");
}

#[tokio::test]
async fn a_dev_environment_that_nobody_uses_is_ended() {
    let mut stage = Stage::new(Machines::Processes).await;
    let dev = json!({"type": "dev-environment", "name": "idle", "image": "none", "user": "root", "ide": "vscode",
        "init": ["echo prepared"], "inactivity_duration": 1});
    let run = stage.ends(&dev).await;
    assert_eq!(submission_of(&run)["termination_reason"], "inactivity_duration_exceeded", "{run:#}");
    assert!(stage.log(&run).await.contains("prepared"), "{}", stage.log(&run).await);
}

#[tokio::test]
async fn a_job_that_writes_without_end_is_ended_by_its_quota() {
    let mut stage = Stage::new(Machines::Processes).await;
    let run = stage.ends(&task("flood", &["yes windlass"])).await;
    assert_eq!(submission_of(&run)["termination_reason"], "log_quota_exceeded", "{run:#}");
}
