//! A backend, an instance, and the server's data about it.

use std::{collections::BTreeMap, path::Path, sync::Arc, time::Duration};

use base64::{Engine as _, engine::general_purpose::STANDARD};
use ring::signature::{Ed25519KeyPair, KeyPair};
use serde_json::json;
use windlass_api::agent::{
    SIGNED_PREFIX,
    client::{ShimClient, SignedSpec},
    shim::TaskStatus,
};
use windlass_backend::{
    Backend, BackendError, BackendInstance, Enrolment, InstanceRequest, InstanceSource,
    remote::{AgentBinaries, RemoteBackend, RemoteHost, SOCKET},
};
use windlass_model::id::{InstanceId, SubmissionId};
pub(crate) use windlass_testenv::test_env::stripped_agent as agent;
use windlass_testkit::lab::LabHost;
use windlass_tunnel::{Backoff, Connection, SshDestination, SshPool};

const CREDENTIAL: &str = "credential-of-the-test";
const DEADLINE: Duration = Duration::from_secs(60);
pub(crate) const NO_WAIT: Backoff = Backoff { initial: Duration::ZERO, max: Duration::ZERO };

pub(crate) fn remote(agent: &Path) -> RemoteBackend {
    RemoteBackend::new(Arc::new(SshPool::new(NO_WAIT)), AgentBinaries::next_to(agent))
}

pub(crate) fn random_uuid() -> uuid::Uuid {
    let mut bytes = [0u8; 16];
    getrandom::fill(&mut bytes).unwrap();
    uuid::Builder::from_random_bytes(bytes).into_uuid()
}

fn key() -> Ed25519KeyPair {
    Ed25519KeyPair::from_seed_unchecked(&[7; 32]).unwrap()
}

/// An order for an instance on this host.
pub(crate) fn instance_order(target: SshDestination) -> InstanceRequest {
    let instance = InstanceId(random_uuid());
    let enrolment = Enrolment {
        instance,
        credential_sha256: sha256(CREDENTIAL),
        server_key: STANDARD.encode(key().public_key().as_ref()),
        gateway_key: None,
    };
    let want = InstanceSource::Host(Box::new(RemoteHost { target, internal_ip: None, network: None }));
    InstanceRequest {
        instance,
        name: "lab-0".into(),
        want,
        enrolment,
        tags: BTreeMap::new(),
        env: BTreeMap::new(),
        alternatives: Vec::new(),
        container: None,
        login: None,
    }
}

pub(crate) fn ssh_site(order: &mut InstanceRequest) -> &mut RemoteHost {
    match &mut order.want {
        InstanceSource::Host(site) => site,
        InstanceSource::Offer(_) => panic!("an offer"),
    }
}

fn sha256(text: &str) -> String {
    let hash = ring::digest::digest(&ring::digest::SHA256, text.as_bytes());
    hash.as_ref().iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Client of a host's agent, connected like the server.
pub(crate) async fn shim(target: &SshDestination) -> ShimClient {
    let (connection, _) = Connection::open(target, 1 << 20).await.unwrap();
    let stream = connection.open_unix(SOCKET).await.unwrap();
    // The connection must live as long as its streams; both end with the test.
    std::mem::forget(connection);
    ShimClient::connect(stream, CREDENTIAL).await.unwrap()
}

/// Submits a task and waits until its runner exists.
pub(crate) async fn start_task(order: &InstanceRequest, target: &SshDestination) -> SubmissionId {
    let id = SubmissionId(random_uuid());
    let claims = json!({"instance_id": order.instance, "epoch": 1, "expires_at": 4_000_000_000_i64});
    let spec = json!({"id": id, "name": "task", "image_name": "none", "claims": claims});
    let body = serde_json::to_vec(&spec).unwrap();
    let signature = STANDARD.encode(key().sign(&[SIGNED_PREFIX, &body].concat()).as_ref());
    let shim = shim(target).await;
    shim.submit(&SignedSpec { body, signature }, 1).await.unwrap();
    tokio::time::timeout(DEADLINE, async {
        while shim.task(id).await.unwrap().status != TaskStatus::Running {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    })
    .await
    .unwrap();
    id
}

/// Process IDs on a host whose command line contains a text.
pub(crate) fn pids(host: &LabHost, word: &str) -> Vec<u32> {
    let ours = host.processes().unwrap().into_iter().filter(|process| process.command.contains(word));
    ours.map(|process| process.pid).collect()
}

pub(crate) async fn create_instance(remote: &RemoteBackend, order: &InstanceRequest) -> BackendInstance {
    remote.create(order).await.unwrap_or_else(|error| panic!("{error}"))
}

pub(crate) async fn create_refused(remote: &RemoteBackend, order: &InstanceRequest) -> BackendError {
    remote.create(order).await.unwrap_err()
}
