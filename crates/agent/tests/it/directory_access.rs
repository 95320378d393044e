//! Plain-process jobs of other users: they reach their own directory by its path, and nothing else of the task.

use std::{
    os::unix::{fs::MetadataExt, process::CommandExt},
    process::{Command, Stdio},
};

use serde_json::json;
use windlass_api::agent::{runner::JobRecord, shim::TaskStatus};
use windlass_testkit::wait::eventually_ok_async;

use crate::support::shim::{Setup, Shim};

const NOBODY: u32 = 65534;
const OTHER_USER: u32 = 65533;

const TRY_ALL: &str = r#"
here=$PWD; cd /
echo written > "$here/file" && cat "$here/file"
mkdir "$here/below" && cd "$here/below" && pwd
for secret in token task.json output.log run/runner.json run/job.log run/states.jsonl; do
    if cat "$here/../$secret" > /dev/null 2>&1; then echo "saw $secret"; fi
done
for dir in "$here/.." "$here/../run" "$here/../.." "$here/../../.."; do
    if ls "$dir" > /dev/null 2>&1; then echo "listed $dir"; fi
done
echo over
"#;

#[tokio::test]
async fn a_job_of_another_user_can_access_only_its_own_directory_of_the_task() {
    let mut shim = Shim::start(Setup::process());
    let id = shim.submit(&shim.spec("passage"), 1).await;
    shim.wait_for(id, TaskStatus::Running).await;
    // A restarted shim must not revoke the permission to traverse.
    shim.kill();
    shim.restart();
    shim.wait_for(id, TaskStatus::Running).await;
    let job = json!({
        "run": {"id": "0", "run_spec": {"run_name": "passage"}},
        "job_spec": {"commands": ["/bin/sh", "-c", TRY_ALL], "user": {"uid": NOBODY, "gid": NOBODY}},
    });
    let calls = shim.client().epoch(1);
    calls.post(&format!("/api/tasks/{id}/runner/api/submit"), &job).await.expect(200);
    calls.post(&format!("/api/tasks/{id}/runner/api/run"), &json!({})).await.expect(200);
    let record = eventually_ok_async("the job ends", async || {
        let record: JobRecord = shim.client().get(&format!("/api/tasks/{id}/job")).await.json();
        let is_over = record.states.last().is_some_and(|last| last.state != "running");
        if is_over { Ok(record) } else { Err(format!("{record:?}")) }
    })
    .await;
    assert_eq!(record.states.last().unwrap().exit_status, Some(0), "{record:?}");
    let task = shim.home().join("tasks").join(id.to_string());
    let message = std::fs::read_to_string(task.join("run/job.log")).unwrap();
    assert_eq!(message, format!("written\n{}\nover\n", task.join("scratch/below").display()));

    let file = task.join("scratch/file");
    assert_eq!(std::fs::metadata(&file).unwrap().uid(), NOBODY);
    let reads = |uid: u32| {
        let mut cat = Command::new("cat");
        cat.arg(&file).uid(uid).gid(uid).stdout(Stdio::null()).stderr(Stdio::null());
        cat.status().unwrap().success()
    };
    assert!(reads(NOBODY));
    assert!(!reads(OTHER_USER), "other users of the host have no business there");
}
