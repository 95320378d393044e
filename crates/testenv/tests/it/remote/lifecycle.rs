//! From a bare host to an instance and back.

use std::{fs, os::unix::fs::MetadataExt, path::PathBuf};

use windlass_backend::{
    Backend, BackendError, BackendInstance, DeleteProgress, InstanceRequest, InstanceState,
    remote::{AGENT, CRON, OciPrograms, ROOT, RemoteBackend, RemoteState, SOCKET, UNIT},
};
use windlass_testenv::ssh::SshTarget as _;
use windlass_testkit::lab::{GUEST, Lab, LabHost, WORKER};
use windlass_testkit::wait::eventually_ok_async;
use windlass_tunnel::{Connection, HostKeyPin};

use super::fixtures::{agent, create_instance, instance_order, pids, remote, shim, ssh_site, start_task};

const SHIM: &str = "agent shim";

fn running(found: InstanceState) -> BackendInstance {
    match found {
        InstanceState::Running(machine) => machine,
        InstanceState::Starting(_) | InstanceState::Gone { .. } | InstanceState::Unknown => {
            panic!("{found:?}")
        }
    }
}

/// A dead connection is detected when it is read; until then the host does not respond.
pub(crate) async fn wait_until_found(
    remote: &RemoteBackend,
    order: &InstanceRequest,
    machine: &BackendInstance,
) -> InstanceState {
    eventually_ok_async("the host is found", async || match remote.find(order, machine).await {
        Err(error @ BackendError::Unavailable { .. }) => Err(error),
        found => Ok(found.unwrap()),
    })
    .await
}

/// Changes with every write to a file of the host.
fn file_stamp(host: &LabHost, path: &str) -> (u64, i64, i64) {
    let meta = fs::metadata(host.path(path)).unwrap();
    (meta.ino(), meta.mtime(), meta.mtime_nsec())
}

#[tokio::test]
async fn a_bare_host_becomes_an_instance_and_creating_it_again_changes_nothing() {
    let lab = Lab::start(1).unwrap();
    let host = lab.host(1);
    let mut order = instance_order(host.target());
    order.env.insert("HTTPS_PROXY".into(), "http://it's a proxy".into());
    let site = ssh_site(&mut order);
    (site.target.pin, site.network) = (HostKeyPin::FirstUse, Some(lab.network()));
    let remote = remote(&agent());
    let machine = create_instance(&remote, &order).await;
    assert_eq!(machine.internal_ip.as_deref(), Some(host.addr().to_string().as_str()));
    assert_eq!(machine.hostname, machine.internal_ip);
    assert_eq!(machine.agent_version.as_deref(), Some(env!("CARGO_PKG_VERSION")));
    let has = machine.has.clone().unwrap();
    assert!(has.cpus > 0 && has.memory_mib > 0 && has.disk_mib > 0, "{has:?}");
    assert_eq!((has.runtime.as_str(), has.gpus.len()), ("process", 0));
    let keys = RemoteState::of(&machine).host_keys;
    assert_eq!(keys[&host.addr().to_string()], host.host_key().unwrap().to_openssh());
    assert_eq!(remote.progress(order.instance), None);
    shim(&host.target()).await.tasks().await.unwrap();
    let env = fs::read(format!("/proc/{}/environ", pids(host, SHIM)[0])).unwrap();
    let env = String::from_utf8(env).unwrap();
    assert!(env.contains("HTTPS_PROXY=http://it's a proxy\0") && !env.contains("SSH_CONNECTION"), "{env}");

    let check = || {
        let files = [AGENT, "/var/lib/windlass/start", "/var/lib/windlass/home/enrolment.json"];
        (files.map(|path| file_stamp(host, path)), pids(host, SHIM))
    };
    let before = check();
    assert_eq!(before.1.len(), 1);
    assert_eq!(create_instance(&remote, &order).await, machine);
    assert_eq!(running(remote.find(&order, &machine).await.unwrap()), machine);
    assert_eq!(check(), before);
}

#[tokio::test]
async fn an_oci_runtime_is_brought_along_and_replaced_if_a_byte_of_it_changes() {
    let lab = Lab::start(1).unwrap();
    let (host, order) = (lab.host(1), instance_order(lab.host(1).target()));
    // A static program stands in for one: it is executed once, with `--version`.
    let program = lab.key_file().with_file_name("runc-static");
    fs::copy(agent(), &program).unwrap();
    let sum = ring::digest::digest(&ring::digest::SHA256, &fs::read(&program).unwrap());
    let sum: String = sum.as_ref().iter().map(|byte| format!("{byte:02x}")).collect();
    let setting = format!("{}@sha256:{sum}", program.display());
    let remote = remote(&agent()).with_oci_programs(OciPrograms::parse(&setting).unwrap());
    create_instance(&remote, &order).await;
    let there = format!("{ROOT}/oci-program/{}/runc", &sum[..16]);
    let env = fs::read_to_string(format!("/proc/{}/environ", pids(host, SHIM)[0])).unwrap();
    for expected in [
        format!("WINDLASS_AGENT_OCI_PROGRAM={there}\0"),
        format!("WINDLASS_AGENT_OCI_PROGRAM_SHA256={sum}\0"),
    ] {
        assert!(env.contains(&expected), "{env}");
    }
    let (before, inode) = (fs::read(host.path(&there)).unwrap(), file_stamp(host, &there).0);
    assert_eq!(before, fs::read(&program).unwrap());
    create_instance(&remote, &order).await;
    assert_eq!(file_stamp(host, &there).0, inode, "it is not uploaded again");
    let mut changed = before.clone();
    *changed.last_mut().unwrap() ^= 1;
    fs::write(host.path(&there), &changed).unwrap();
    create_instance(&remote, &order).await;
    assert!(fs::read(host.path(&there)).unwrap() == before, "it is replaced");
    // A byte that changed on the server is refused.
    fs::remove_file(host.path(&there)).unwrap();
    fs::write(&program, &changed).unwrap();
    let refused = remote.create(&order).await.unwrap_err();
    assert!(refused.to_string().contains("expected"), "{refused}");
    assert!(!host.path(&there).exists());
}

#[tokio::test]
async fn an_interrupted_agent_upload_resumes_where_it_stopped() {
    let lab = Lab::start(1).unwrap();
    let (host, agent) = (lab.host(1), agent());
    let bytes = fs::read(&agent).unwrap();
    let sum = ring::digest::digest(&ring::digest::SHA256, &bytes);
    let sum: String = sum.as_ref().iter().take(8).map(|byte| format!("{byte:02x}")).collect();
    let incoming = host.path("/var/lib/windlass/incoming");
    fs::create_dir_all(&incoming).unwrap();
    let part = incoming.join(format!("agent.{sum}.0.part"));
    fs::write(&part, &bytes[..bytes.len() / 2]).unwrap();
    fs::write(incoming.join("agent.0123456789abcdef.0.part"), b"of another version").unwrap();
    let inode = fs::metadata(&part).unwrap().ino();
    let (remote, order) = (remote(&agent), instance_order(host.target()));
    create_instance(&remote, &order).await;
    assert_eq!(file_stamp(host, AGENT).0, inode, "the rest was added to what was there");
    assert!(!incoming.exists());
}

#[tokio::test]
async fn a_sudo_user_is_sufficient_and_other_users_cannot_reach_the_agent_socket() {
    let lab = Lab::start(1).unwrap();
    let host = lab.host(1);
    let (remote, order) = (remote(&agent()), instance_order(host.target_as(WORKER)));
    let machine = create_instance(&remote, &order).await;
    running(remote.find(&order, &machine).await.unwrap());
    shim(&host.target_as(WORKER)).await.tasks().await.unwrap();
    assert_eq!(fs::metadata(host.path(AGENT)).unwrap().uid(), 0);
    let (guest, _) = Connection::open(&host.target_as(GUEST), 1 << 20).await.unwrap();
    assert!(guest.open_unix(SOCKET).await.is_err());
    assert!(guest.run_checked("ls /var/lib/windlass/home", b"").await.is_err());
    assert_eq!(remote.delete(&order, Some(&machine)).await.unwrap(), DeleteProgress::Gone);
    assert!(!host.path(ROOT).exists());
}

#[tokio::test]
async fn f15_a_rebooted_host_and_a_killed_agent_are_repaired_by_the_next_check() {
    let lab = Lab::start(1).unwrap();
    let host = lab.host(1);
    let (remote, order) = (remote(&agent()), instance_order(host.target()));
    let machine = create_instance(&remote, &order).await;
    assert!(RemoteState::of(&machine).keeper.contains("the server starts the agent after a reboot"));
    let uploaded = file_stamp(host, AGENT);
    host.reboot().unwrap();
    assert!(pids(host, SHIM).is_empty());
    let machine = running(wait_until_found(&remote, &order, &machine).await);
    shim(&host.target()).await.tasks().await.unwrap();
    host.run(&format!("kill -9 {}", "$(cat /var/lib/windlass/home/lock)")).unwrap();
    running(remote.find(&order, &machine).await.unwrap());
    assert_eq!(pids(host, SHIM).len(), 1);
    assert_eq!(file_stamp(host, AGENT), uploaded, "nothing was uploaded again");
}

#[tokio::test]
async fn f30_a_new_agent_version_takes_over_without_interrupting_a_task() {
    let lab = Lab::start(1).unwrap();
    let host = lab.host(1);
    let dir = lab.key_file().with_file_name("agents");
    fs::create_dir(&dir).unwrap();
    let binary: PathBuf = dir.join("windlass-agent");
    fs::copy(agent(), &binary).unwrap();
    let (remote, order) = (remote(&binary), instance_order(host.target()));
    let machine = create_instance(&remote, &order).await;
    let task = start_task(&order, &host.target()).await;
    let (old, runners) = (pids(host, SHIM), pids(host, "runner"));
    assert!(!runners.is_empty());

    // Bytes after the end of the program make the file a different version.
    let mut bytes = fs::read(&binary).unwrap();
    bytes.extend(b"the next version");
    fs::write(dir.join("fresh"), &bytes).unwrap();
    fs::rename(dir.join("fresh"), &binary).unwrap();
    let after = running(remote.find(&order, &machine).await.unwrap());
    assert_ne!(RemoteState::of(&after).agent_sha256, RemoteState::of(&machine).agent_sha256);
    assert_eq!(fs::metadata(host.path(AGENT)).unwrap().len(), bytes.len() as u64);
    let new = pids(host, SHIM);
    assert!(new.len() == 1 && new != old, "{old:?} {new:?}");
    assert_eq!(fs::metadata(format!("/proc/{}/exe", new[0])).unwrap().len(), bytes.len() as u64);
    assert_eq!(pids(host, "runner"), runners, "the task's processes were left alone");
    let status = shim(&host.target()).await.task(task).await.unwrap().status;
    assert_eq!(status, windlass_api::agent::shim::TaskStatus::Running);
    assert_eq!(running(remote.find(&order, &after).await.unwrap()), after);
    assert_eq!(pids(host, SHIM), new);
}

#[tokio::test]
async fn g6_deleting_a_host_leaves_nothing_behind() {
    let lab = Lab::start(1).unwrap();
    let host = lab.host(1);
    let (remote, order) = (remote(&agent()), instance_order(host.target()));
    assert_eq!(remote.delete(&order, None).await.unwrap(), DeleteProgress::Gone, "there was nothing");
    let machine = create_instance(&remote, &order).await;
    start_task(&order, &host.target()).await;
    host.partition().unwrap();
    let silent = remote.delete(&order, Some(&machine)).await.unwrap_err();
    assert!(matches!(silent, BackendError::Unavailable { .. }), "{silent}");
    host.heal().unwrap();
    wait_until_found(&remote, &order, &machine).await;
    assert_eq!(remote.delete(&order, Some(&machine)).await.unwrap(), DeleteProgress::Gone);
    for path in [ROOT, CRON, UNIT] {
        assert!(!host.path(path).exists(), "{path}");
    }
    let left = host.processes().unwrap();
    assert!(
        left.iter().all(|process| process.command.contains("sshd") || process.command.is_empty()),
        "{left:?}"
    );
    let groups = host.run("find /sys/fs/cgroup -path '*windlass*' -name cgroup.procs").unwrap();
    assert_eq!(String::from_utf8_lossy(&groups.stdout), "");
    assert_eq!(remote.delete(&order, Some(&machine)).await.unwrap(), DeleteProgress::Gone);
}
