//! Shared test code: orders, direct calls to agents, and cleanup of started processes.

use std::{collections::BTreeMap, path::Path};

use base64::{Engine as _, prelude::BASE64_STANDARD};
use ring::signature::{Ed25519KeyPair, KeyPair as _};
use serde_json::json;
use sha2::{Digest as _, Sha256};
use windlass_api::{
    agent::{
        SIGNED_PREFIX,
        client::{ShimClient, SignedSpec},
        shim::TaskStatus,
    },
    unix,
};
use windlass_backend::{
    AgentEndpoint, Backend, BackendInstance, Enrolment, InstanceRequest, InstanceSource,
    agent_program::AgentProgram,
};
use windlass_model::id::{InstanceId, SubmissionId};
use windlass_testkit::wait::eventually_ok_async;

pub(crate) const CREDENTIAL: &str = "credential-of-the-test";
pub(crate) fn uuid() -> uuid::Uuid {
    let mut bytes = [0; 16];
    getrandom::fill(&mut bytes).unwrap();
    uuid::Builder::from_random_bytes(bytes).into_uuid()
}

fn key(seed: u8) -> Ed25519KeyPair {
    Ed25519KeyPair::from_seed_unchecked(&[seed; 32]).unwrap()
}

/// Returns the agent that the tests start, built next to them.
pub(crate) fn agent() -> AgentProgram {
    AgentProgram::find(None).expect("build the agent first: cargo build -p windlass-agent")
}

/// Creates an order by the server with this signing key.
pub(crate) async fn order(backend: &dyn Backend, seed: u8) -> InstanceRequest {
    let offer = backend.offers().await.unwrap().remove(0);
    let instance = InstanceId(uuid());
    InstanceRequest {
        instance,
        name: "test-0".into(),
        want: InstanceSource::Offer(Box::new(offer)),
        enrolment: Enrolment {
            instance,
            credential_sha256: hex::encode(Sha256::digest(CREDENTIAL.as_bytes())),
            server_key: BASE64_STANDARD.encode(key(seed).public_key().as_ref()),
            gateway_key: None,
        },
        tags: BTreeMap::new(),
        env: BTreeMap::new(),
        alternatives: Vec::new(),
        container: None,
        login: None,
    }
}

pub(crate) async fn connect(machine: &BackendInstance) -> ShimClient {
    let Some(AgentEndpoint::Socket { path }) = &machine.reach else { panic!("no socket: {machine:?}") };
    ShimClient::connect(unix::connect(path).await.unwrap(), CREDENTIAL).await.unwrap()
}

/// Starts a task of plain processes that does nothing until it is ended.
pub(crate) async fn submit(
    shim: &ShimClient,
    order: &InstanceRequest,
    seed: u8,
    image: &str,
) -> SubmissionId {
    let id = SubmissionId(uuid());
    let claims = json!({ "instance_id": order.instance, "epoch": 1, "expires_at": i64::MAX / 2 });
    let spec = json!({ "id": id, "name": "test", "image_name": image, "claims": claims });
    let body = spec.to_string().into_bytes();
    let signature = key(seed).sign(&[SIGNED_PREFIX, &body].concat());
    let signature = BASE64_STANDARD.encode(signature.as_ref());
    shim.submit(&SignedSpec { body, signature }, 1).await.unwrap();
    id
}

/// Waits until a task is in a state.
pub(crate) async fn wait_until(shim: &ShimClient, id: SubmissionId, status: TaskStatus) {
    eventually_ok_async(&format!("the task is {status:?}"), async || {
        let info = shim.task(id).await.unwrap();
        if info.status == status {
            return Ok(());
        }
        assert_ne!(info.status, TaskStatus::Terminated, "it ended: {info:?}");
        Err(format!("{info:?}"))
    })
    .await;
}

/// Kills all processes of a home when the test ends, also on failure.
pub(crate) struct StopOnDrop<'a>(pub(crate) &'a Path);

impl Drop for StopOnDrop<'_> {
    fn drop(&mut self) {
        let Ok(processes) = std::fs::read_dir("/proc") else { return };
        for process in processes.flatten() {
            let args = std::fs::read(process.path().join("cmdline")).unwrap_or_default();
            let environ = std::fs::read(process.path().join("environ")).unwrap_or_default();
            let path = self.0.as_os_str().as_encoded_bytes();
            let names = |text: &[u8]| text.windows(path.len()).any(|part| part == path);
            let is_agent = args.windows(14).any(|part| part == b"windlass-agent") || names(&environ);
            let pid = process.file_name().to_string_lossy().parse::<i32>().ok();
            if let (true, Some(pid)) =
                (is_agent && names(&args), pid.and_then(rustix::process::Pid::from_raw))
            {
                let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
            }
        }
    }
}
