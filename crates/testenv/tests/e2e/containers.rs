//! This machine, jobs as containers.

use serde_json::json;

pub(crate) use crate::stage::IMAGE;
use crate::stage::{Machines, Stage, busybox, engine, submission_of, task};

pub(crate) fn image() {
    busybox(&engine());
}

#[tokio::test]
async fn a_docker_job_runs_in_its_image_and_nothing_is_left_of_it() {
    image();
    let mut stage = Stage::new(Machines::Containers).await;
    let mut job = task("contained", &["echo from $(cat /proc/1/comm)", "echo /*"]);
    job["image"] = json!(IMAGE);
    let run = stage.ends(&job).await;
    assert_eq!(run["status"], "done", "{run:#}");
    assert!(stage.log(&run).await.contains("/bin /dev"), "{}", stage.log(&run).await);
    let host = format!("unix://{}", engine().display());
    let id = submission_of(&run)["id"].as_str().unwrap().to_owned();
    let left = std::process::Command::new("docker")
        .args(["--host", &host, "ps", "-a", "--no-trunc"])
        .output()
        .unwrap();
    assert!(!String::from_utf8_lossy(&left.stdout).contains(&id));
}

#[tokio::test]
async fn a_docker_image_that_does_not_exist_ends_the_job_with_the_engines_words() {
    let mut stage = Stage::new(Machines::Containers).await;
    let mut job = task("imageless", &["true"]);
    job["image"] = json!("localhost:1/windlass/none:1");
    let run = stage.ends(&job).await;
    assert_eq!(run["status"], "failed");
    let job = submission_of(&run);
    assert_eq!(job["termination_reason"], "creating_container_error", "{job:#}");
    assert!(!job["termination_reason_message"].as_str().unwrap_or_default().is_empty(), "{job:#}");
}
