//! This machine, jobs as containers.

use serde_json::json;

use crate::stage::{Machines, Stage, engine, submission_of, task};

pub(crate) const IMAGE: &str = "windlass-e2e/busybox:1";

/// An image of nothing but a static busybox, in the tests' engine.
pub(crate) fn image() {
    let dir = std::env::temp_dir().join(format!("windlass-e2e-image-{}", std::process::id()));
    std::fs::create_dir_all(dir.join("bin")).unwrap();
    std::fs::copy("/usr/bin/busybox", dir.join("bin/busybox")).unwrap();
    for name in ["sh", "echo", "sleep", "cat", "env", "hostname"] {
        let _ = std::os::unix::fs::symlink("busybox", dir.join("bin").join(name));
    }
    let host = format!("unix://{}", engine().display());
    let script = format!("tar -C {} -c . | docker --host {host} import - {IMAGE}", dir.display());
    assert!(std::process::Command::new("sh").args(["-c", &script]).output().unwrap().status.success());
    std::fs::remove_dir_all(dir).unwrap();
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
