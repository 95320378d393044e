//! The whole chain: moto creates machines, which are hosts of a lab that execute the user data of what it created.
//! Needs root.

use std::{
    process::Command,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::Duration,
};

use serde_json::json;
use windlass_backend::{
    AgentEndpoint, Backend, DeleteProgress, InstanceRequest, InstanceState,
    agent_program::AgentProgram,
    conformance::check_backend,
    machines::{MachineBackend, address_of, region_of},
    remote::{AgentBinaries, RemoteBackend},
};
use windlass_testkit::{lab::Lab, moto::MotoServer, temp_dir};
use windlass_tunnel::{Backoff, LoginKey, SshPool};

use crate::support::{offer_in, order, provider};

/// A cloud of lab hosts.
struct LabCloud {
    moto: Arc<MotoServer>,
    lab: Arc<Lab>,
    ended: Arc<AtomicBool>,
    boots: Option<thread::JoinHandle<()>>,
}

impl LabCloud {
    fn start(hosts: usize) -> Self {
        let (moto, lab) = (Arc::new(MotoServer::start()), Arc::new(Lab::start(hosts).unwrap()));
        let addresses: Vec<String> = lab.hosts().iter().map(|host| host.addr().to_string()).collect();
        moto.control(&json!({ "addresses": addresses }));
        let ended = Arc::new(AtomicBool::new(false));
        let boots = {
            let (moto, lab, ended) = (Arc::clone(&moto), Arc::clone(&lab), Arc::clone(&ended));
            thread::spawn(move || boot_machines(&moto, &lab, &ended))
        };
        Self { moto, lab, ended, boots: Some(boots) }
    }

    /// Opens the backend as a new server would.
    fn open(&self) -> Arc<dyn Backend> {
        let agent = AgentProgram::find(None).expect("build the agent first: cargo build -p windlass-agent");
        let hosts = Arc::new(SshPool::new(Backoff::STANDARD));
        let remote = RemoteBackend::new(hosts, AgentBinaries::next_to(agent.path()));
        Arc::new(MachineBackend::new(provider(&self.moto, json!({})), Arc::new(remote)))
    }

    async fn order(&self) -> InstanceRequest {
        let offers = self.open().offers().await.unwrap();
        let order = order(&offer_in(&offers, "t3.micro", "us-east-1a", false));
        InstanceRequest { login: Some(login_key()), ..order }
    }
}

impl Drop for LabCloud {
    fn drop(&mut self) {
        self.ended.store(true, Ordering::Relaxed);
        let _ = self.boots.take().map(thread::JoinHandle::join);
    }
}

/// Executes the script of each new machine on the host with its address, as cloud-init does.
fn boot_machines(moto: &MotoServer, lab: &Lab, ended: &AtomicBool) {
    let mut booted = std::collections::BTreeSet::new();
    while !ended.load(Ordering::Relaxed) {
        for machine in moto.started() {
            let host = lab.hosts().iter().find(|host| host.addr().to_string() == machine.address);
            if let Some(host) = host
                && booted.insert(machine.id)
            {
                let output = host.run(&machine.user_data).unwrap();
                assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
            }
        }
        thread::sleep(Duration::from_millis(10));
    }
}

fn login_key() -> LoginKey {
    let dir = temp_dir("key").unwrap();
    let path = dir.path().join("key");
    let made = Command::new("ssh-keygen").args(["-q", "-t", "ed25519", "-N", "", "-f"]).arg(&path).status();
    assert!(made.unwrap().success());
    LoginKey::parse(&std::fs::read_to_string(path).unwrap()).unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn aws_machines_that_run_their_user_data_pass_the_conformance_checks() {
    let cloud = LabCloud::start(1);
    let order = cloud.order().await;
    check_backend(&|| cloud.open(), &order).await;
    assert_eq!(provider(&cloud.moto, json!({})).list().await.unwrap(), []);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_aws_machine_is_enrolled_over_ssh_and_keeps_its_host_key() {
    let cloud = LabCloud::start(1);
    let backend = cloud.open();
    let order = cloud.order().await;
    let mut machine = backend.create(&order).await.unwrap();
    let found = loop {
        match backend.find(&order, &machine).await.unwrap() {
            InstanceState::Running(found) => break found,
            InstanceState::Starting(found) => machine = found,
            other @ (InstanceState::Gone { .. } | InstanceState::Unknown) => panic!("{other:?}"),
        }
    };
    assert!(found.id.starts_with("i-"), "{found:?}");
    assert!(matches!(found.reach, Some(AgentEndpoint::Ssh { .. })), "{found:?}");
    assert_eq!(region_of(&found).as_deref(), Some("us-east-1"));
    assert!(found.internal_ip.as_ref().unwrap().starts_with("172.31."), "not the public address: {found:?}");
    let has = found.has.clone().unwrap();
    assert!(has.cpus <= 2 && has.memory_mib <= 1024, "at most what the type has: {has:?}");
    let host = cloud.lab.host(1);
    let address = address_of(&found).unwrap();
    assert_eq!(address.host, host.addr().to_string());
    assert!(host.host_key_line().unwrap().starts_with(address.host_key.as_deref().unwrap()));
    // Another machine at this address is not accepted, also not by a server that has just started.
    host.change_host_key().unwrap();
    let changed = cloud.open().find(&order, &found).await;
    assert!(format!("{changed:?}").contains("HostKeyChanged"), "{changed:?}");
    while backend.delete(&order, Some(&found)).await.unwrap() == DeleteProgress::InProgress {}
    assert!(matches!(backend.find(&order, &found).await.unwrap(), InstanceState::Gone { .. }));
}
