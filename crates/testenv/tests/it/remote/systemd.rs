//! Hosts with systemd, which supervises the agent.

use std::{fs, time::Duration};

use windlass_backend::{
    Backend, DeleteProgress, InstanceState,
    remote::{ROOT, RemoteState, UNIT},
};
use windlass_testenv::ssh::SshTarget as _;
use windlass_testkit::lab::{Lab, LabHost};
use windlass_testkit::wait::eventually_async;

use super::fixtures::{agent, create_instance, instance_order, pids, remote, shim, start_task};

const SHIM: &str = "agent shim";

/// Waits until a different agent process runs.
async fn wait_for_new_agent(host: &LabHost, than: &[u32]) -> Vec<u32> {
    let started = async {
        loop {
            let now = pids(host, SHIM);
            if !now.is_empty() && now != than {
                return now;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(30), started).await.expect("systemd starts it")
}

#[tokio::test]
async fn f15_systemd_keeps_the_agent_through_a_crash_a_reboot_and_an_upgrade() {
    let lab = Lab::with_systemd(1).unwrap();
    let host = lab.host(1);
    let dir = lab.key_file().with_file_name("agents");
    fs::create_dir(&dir).unwrap();
    let binary = dir.join("windlass-agent");
    fs::copy(agent(), &binary).unwrap();
    let (remote, order) = (remote(&binary), instance_order(host.target()));
    let machine = create_instance(&remote, &order).await;
    assert!(RemoteState::of(&machine).keeper.contains("systemd"));
    assert!(host.path(UNIT).exists());
    let first = pids(host, SHIM);
    assert_eq!(first.len(), 1);
    let is_active = || host.run("systemctl is-active windlass-agent").unwrap().stdout;
    assert_eq!(is_active(), b"active\n");
    assert_eq!(create_instance(&remote, &order).await, machine);
    assert_eq!(pids(host, SHIM), first, "a second creation changes nothing");

    host.run("kill -9 $(cat /var/lib/windlass/home/lock)").unwrap();
    let second = wait_for_new_agent(host, &first).await;
    host.reboot().unwrap();
    let third = wait_for_new_agent(host, &second).await;

    wait_until_shim_answers(host).await;
    start_task(&order, &host.target()).await;
    let runners = pids(host, "runner");
    let mut bytes = fs::read(&binary).unwrap();
    bytes.extend(b"the next version");
    fs::write(dir.join("fresh"), &bytes).unwrap();
    fs::rename(dir.join("fresh"), &binary).unwrap();
    let found = super::lifecycle::wait_until_found(&remote, &order, &machine).await;
    assert!(matches!(found, InstanceState::Running(_)), "{found:?}");
    assert_ne!(pids(host, SHIM), third);
    assert!(!runners.is_empty());
    assert_eq!(pids(host, "runner"), runners, "the task's processes were left alone");

    assert_eq!(remote.delete(&order, Some(&machine)).await.unwrap(), DeleteProgress::Gone);
    assert!(!host.path(ROOT).exists() && !host.path(UNIT).exists());
    assert!(!host.path("/etc/systemd/system/multi-user.target.wants/windlass-agent.service").exists());
    assert_eq!((pids(host, SHIM).len(), pids(host, "runner").len()), (0, 0));
}

/// Waits until the socket is open: a starting agent runs before it responds.
async fn wait_until_shim_answers(host: &LabHost) {
    let is_open = async || {
        let test = host.run("test -S /var/lib/windlass/door/shim.sock").unwrap();
        test.status.success().then_some(())
    };
    eventually_async("the agent's socket is there", is_open).await;
    shim(&host.target()).await.tasks().await.unwrap();
}
