//! The same calls through a real SSH server.

use serde_json::json;
use windlass_api::agent::shim::TaskStatus;
use windlass_backend::AgentEndpoint;
use windlass_model::id::{InstanceId, SubmissionId};
use windlass_server::{
    agents::{AgentApi, AgentError},
    db::{Unit, instances},
    encryption::AssociatedData,
};
use windlass_testkit::wait::eventually_async;

use crate::{
    agents_host::{AgentTestEnv, TestShim, call_context, job, minimal_task, new_instance, new_machine},
    sshd::Sshd,
};

/// Sealed login to an instance, as its row stores it.
pub(crate) fn sealed_login(kit: &AgentTestEnv, sshd: &Sshd, id: InstanceId) -> Vec<u8> {
    let private = std::fs::read_to_string(sshd.home().join("user")).unwrap();
    let public = std::fs::read_to_string(sshd.home().join("user.pub")).unwrap();
    let settings = json!({"user": "root", "port": sshd.port, "ssh_key": {"public": public, "private": private},
        "hosts": [{"hostname": "127.0.0.1"}]});
    let belongs = AssociatedData::row("instances", "ssh_sealed", id.0);
    kit.app.keys().seal(&belongs, settings.to_string().as_bytes()).unwrap()
}

/// A host of an SSH fleet with an agent.
async fn start_ssh_host(kit: &AgentTestEnv, sshd: &Sshd) -> TestShim {
    let id = InstanceId(kit.db().new_id().unwrap());
    let home = kit.dir.path().join("agent");
    let sealed = sealed_login(kit, sshd, id);
    let reach = AgentEndpoint::Ssh { socket: home.join("shim.sock").display().to_string() };
    let row = new_instance(kit, id, 0, Some(&new_machine(reach)), Some(sealed));
    kit.write(Unit::new().and([instances::insert(row)])).await;
    TestShim::of(kit, id, home, &["--runtime", "process"]).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_task_is_driven_through_ssh() {
    let kit = AgentTestEnv::sqlite().await;
    let sshd = Sshd::start();
    let mut shim = start_ssh_host(&kit, &sshd).await;
    let run = kit.run("train").await;
    let id = kit.job_start(run, 0, shim.instance, "running").await;
    let at = call_context(shim.instance, id, 1);
    kit.wire.submit_task(at, &minimal_task(id)).await.unwrap();
    kit.wait_for_task(at, TaskStatus::Running).await;
    kit.start_job(at, &job(&["/bin/sh", "-c", "echo $GREETING; sleep 0.3"])).await;
    kit.wait_until_due("jobs", id.0).await;
    assert_eq!(kit.wait_until_ended(at).await, ("done".into(), Some(0)));
    let log = kit.wire.log(at, "job", 0, 100).await.unwrap();
    assert_eq!(&log.bytes[..], b"hello\n");

    // Only the shim dies: the SSH connection stays and carries the next connection.
    shim.kill();
    shim.start_again();
    assert_eq!(kit.wait_until_reachable(shim.instance).await, [id]);
    kit.discard(at).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_host_is_reconnected_after_losing_all_connections() {
    let kit = AgentTestEnv::sqlite().await;
    let mut sshd = Sshd::start();
    let shim = start_ssh_host(&kit, &sshd).await;
    kit.wire.tasks(shim.instance).await.unwrap();
    sshd.restart();
    kit.wait_until_reachable(shim.instance).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn x10_a_host_with_a_changed_key_receives_no_calls() {
    let kit = AgentTestEnv::sqlite().await;
    let mut sshd = Sshd::start();
    let shim = start_ssh_host(&kit, &sshd).await;
    kit.wire.tasks(shim.instance).await.unwrap();
    let known = sshd.host_key();
    let pinned = instances::find(kit.db(), shim.instance).await.unwrap().unwrap().host_key.unwrap();
    assert!(pinned.contains(&known.to_openssh()), "{pinned}");

    sshd.change_host_key();
    let at = call_context(shim.instance, SubmissionId(uuid::Uuid::from_u128(1)), 1);
    let why = eventually_async("the host is barred", async || {
        match kit.wire.submit_task(at, &minimal_task(at.submission)).await {
            Err(AgentError::Barred { why, .. }) => Some(why),
            // The old connection may fail first.
            Err(AgentError::Unreachable { .. }) => None,
            other => panic!("{other:?}"),
        }
    })
    .await;
    assert!(why.contains(&known.to_string()) && why.contains(&sshd.host_key().to_string()), "{why}");
    for _ in 0..5 {
        let again = kit.wire.tasks(shim.instance).await;
        assert!(matches!(again, Err(AgentError::Barred { .. })), "it stays so: {again:?}");
    }
    // Another replica, which never connected, refuses the host because of the same pin.
    let another = kit.second_agents();
    let refused = another.tasks(shim.instance).await;
    assert!(matches!(refused, Err(AgentError::Barred { .. })), "{refused:?}");
}
