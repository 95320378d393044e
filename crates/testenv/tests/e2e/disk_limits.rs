//! Jobs that write more than their `disk`, on real runtimes.

use serde_json::{Value, json};

use crate::{
    containers::{IMAGE, image},
    runtimes::ImageArchives,
    test_env::{HostMode, TestEnv, newest_submission, small_task_config},
};

/// A job that writes 30 MB, of which it may use 10 MB, and goes on.
fn large(image: Option<&str>) -> Value {
    let mut job = small_task_config("large", &["dd if=/dev/zero of=large bs=1000000 count=30", "sleep 600"]);
    job.as_object_mut().unwrap().remove("user");
    job["resources"]["disk"] = json!("..10MB");
    if let Some(image) = image {
        job["image"] = json!(image);
    }
    job
}

async fn assert_ended(env: &mut TestEnv, job: &Value) {
    let run = env.ends(job).await;
    let submission = newest_submission(&run);
    assert_eq!(run["status"], "failed", "{run:#}");
    assert_eq!(submission["status_message"], "disk limit exceeded", "{run:#}");
    let message = submission["termination_reason_message"].as_str().unwrap();
    assert!(message.starts_with("disk limit exceeded: the job uses "), "{message}");
}

#[tokio::test]
async fn a_process_that_writes_more_than_its_disk_is_ended() {
    let mut env = TestEnv::confined(HostMode::Processes).await;
    assert_ended(&mut env, &large(None)).await;
}

#[tokio::test]
async fn a_docker_container_that_writes_more_than_its_disk_is_ended() {
    image();
    let mut env = TestEnv::new(HostMode::Containers).await;
    assert_ended(&mut env, &large(Some(IMAGE))).await;
}

#[tokio::test]
async fn a_container_without_an_engine_that_writes_more_than_its_disk_is_ended() {
    image();
    let images = ImageArchives::new();
    let name = images.save(IMAGE);
    let mut env = images.start_server().await;
    assert_ended(&mut env, &large(Some(&name))).await;
}
