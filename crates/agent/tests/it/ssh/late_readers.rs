//! Output of an ended task, read over SSH as dstack's CLI does after a short run.

use std::{
    net::{SocketAddr, TcpStream},
    process::Stdio,
};

use serde_json::json;
use windlass_api::agent::{
    RUNNER_PORT,
    runner::JobRecord,
    shim::{TaskInfo, TaskStatus},
};
use windlass_model::id::SubmissionId;
use windlass_testkit::wait::eventually_ok_async;

use super::{KillOnDrop, client, log_access::tail, make_key, run, spawn, wait_until};
use crate::support::shim::{Setup, Shim};

/// Runs a short job to its end and removes the task, as the server does. Returns the port of its SSH server.
async fn run_and_remove(shim: &Shim, script: &str, reason: &str) -> u16 {
    make_key(&shim.scratch().join("id"), "ed25519");
    let mut spec = shim.spec("short");
    spec["container_ssh_keys"] = json!([std::fs::read_to_string(shim.scratch().join("id.pub")).unwrap()]);
    let id = shim.submit(&spec, 1).await;
    let info: TaskInfo = shim.wait_for(id, TaskStatus::Running).await;
    let job = json!({
        "run": {"id": "0", "run_spec": {"run_name": "short"}},
        "job_spec": {"commands": ["/bin/sh", "-c", script]},
    });
    shim.play(id, &job).await;
    wait_ended(shim, id).await;
    let body = json!({"termination_reason": reason, "termination_message": "", "timeout": 0});
    shim.client().epoch(1).post(&format!("/api/tasks/{id}/terminate"), &body).await.expect(200);
    shim.remove(id, 1).await;
    assert!(!shim.home().join("tasks").join(id.to_string()).exists());
    info.ports.unwrap()[0].host
}

async fn wait_ended(shim: &Shim, id: SubmissionId) {
    eventually_ok_async("the job ends", async || {
        let record: JobRecord = shim.client().get(&format!("/api/tasks/{id}/job")).await.json();
        let is_over = record.states.last().is_some_and(|last| last.state != "running");
        if is_over { Ok(()) } else { Err(format!("{record:?}")) }
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_output_of_a_completed_task_can_be_read_over_ssh_after_its_removal() {
    let shim = Shim::start(Setup::process());
    let port = run_and_remove(
        &shim,
        "i=0; while [ $i -lt 9000 ]; do echo line $i; i=$((i+1)); done",
        "done_by_runner",
    )
    .await;
    wait_until("the port answers again", || TcpStream::connect(("127.0.0.1", port)).ok());
    let login = |options: &[&str], line: &str| {
        let mut ssh = client(shim.scratch(), "ssh", "-p", port);
        ssh.args(options).args(["root@127.0.0.1", line]);
        ssh
    };
    // No session can be opened for an ended task.
    let refused = run(&mut login(&["-o", "BatchMode=yes"], "echo inside"), b"");
    assert!(!refused.status.success() && refused.stdout.is_empty(), "{refused:?}");

    let local = SocketAddr::from(([127, 0, 0, 1], windlass_testkit::ports::reserve_free_port()));
    let mut forward = client(shim.scratch(), "ssh", "-p", port);
    forward.args(["-N", "-L", &format!("{}:localhost:{RUNNER_PORT}", local.port()), "root@127.0.0.1"]);
    let _client = KillOnDrop(spawn(forward.stdin(Stdio::null())));
    wait_until("the client forwards", || TcpStream::connect(local).ok());
    let all = tail(local, "?start_time=2000-01-01T00:00:00Z").await;
    assert!(all.starts_with("line 0\n") && all.ends_with("line 8999\n"), "{} bytes", all.len());
    wait_until("the port is closed once the output was read", || {
        TcpStream::connect(("127.0.0.1", port)).err()
    });
}

#[tokio::test(flavor = "multi_thread")]
async fn no_port_stays_open_for_late_readers_after_a_failed_task() {
    let shim = Shim::start(Setup::process());
    let port = run_and_remove(&shim, "exit 3", "container_exited_with_error").await;
    assert!(TcpStream::connect(("127.0.0.1", port)).is_err());
}
