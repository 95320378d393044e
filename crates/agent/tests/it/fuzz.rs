//! Corrupted messages between servers and agents: they are parsed or refused, and a modified specification is not valid
//! any more. A few hundred inputs each; `FUZZ=100000` for more.

use base64::{Engine as _, prelude::BASE64_STANDARD};
use proptest::{prelude::*, test_runner::TestRunner};
use ring::signature::{Ed25519KeyPair, KeyPair as _};
use serde::de::DeserializeOwned;
use serde_json::Value;
use windlass_agent::{
    digest::sha256_hex,
    shim::enrolment::{self, Enrolment, PresentedSpec, SpecError},
};
use windlass_api::agent::{
    SIGNED_PREFIX,
    events::ShimEvent,
    runner::{JobRecord, JobState, LogEvent, Metrics, PullResponse, SubmitBody},
    shim::{Claims, HostInfo, InstanceHealth, TaskInfo, TaskList, TaskSpec, TerminateRequest},
};
use windlass_model::id::InstanceId;

fn runner() -> TestRunner {
    let cases = std::env::var("FUZZ").ok().and_then(|text| text.parse().ok()).unwrap_or(300);
    TestRunner::new(ProptestConfig { cases, failure_persistence: None, ..ProptestConfig::default() })
}

const KEYS: &[&str] = &[
    "id",
    "name",
    "status",
    "image_name",
    "container_user",
    "network_mode",
    "claims",
    "epoch",
    "expires_at",
    "instance_id",
    "cpu",
    "memory",
    "gpu",
    "ports",
    "container",
    "host",
    "volumes",
    "mounts",
    "seq",
    "at",
    "event",
    "info",
    "state",
    "stream",
    "end",
    "problems",
    "boot",
    "run",
    "run_spec",
    "job_spec",
    "commands",
    "env",
    "secrets",
    "states",
    "log_complete",
    "job_logs",
    "timestamp",
    "message",
    "exit_status",
    "termination_reason",
    "tasks",
    "timeout",
];
const WORDS: &[&str] = &[
    "",
    "x",
    "running",
    "terminated",
    "task",
    "gone",
    "job",
    "log",
    "health",
    "alive",
    "reset",
    "host",
    "bridge",
    "5d3a0a3e-1a52-4c39-8f0c-8a3f6f1f7f10",
    "2026-01-01T00:00:00Z",
    "done",
    "-1",
    "../x",
    "\0",
    "AAAA",
];

fn document() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        any::<f64>().prop_map(Value::from),
        prop::sample::select(WORDS).prop_map(Value::from),
    ];
    leaf.prop_recursive(5, 48, 8, |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
            prop::collection::vec((prop::sample::select(KEYS), inner), 0..10)
                .prop_map(|pairs| pairs.into_iter().map(|(key, value)| (key.to_owned(), value)).collect()),
        ]
    })
}

/// A serialized document, then truncated or corrupted.
fn bytes() -> impl Strategy<Value = Vec<u8>> {
    let bent = (document(), any::<prop::sample::Index>(), any::<u8>(), any::<bool>()).prop_map(
        |(value, at, byte, cut)| {
            let mut bytes = value.to_string().into_bytes();
            let at = at.index(bytes.len());
            if cut {
                bytes.truncate(at)
            } else {
                bytes[at] = byte
            }
            bytes
        },
    );
    let deep = (1usize..20_000).prop_map(|depth| "[".repeat(depth).into_bytes());
    prop_oneof![4 => document().prop_map(|value| value.to_string().into_bytes()), 3 => bent, 1 => deep]
}

/// Parses the bytes or refuses them; a parsed value is serialized and parsed again.
fn check_round_trip<T: DeserializeOwned + serde::Serialize>(bytes: &[u8]) {
    if let Ok(read) = serde_json::from_slice::<T>(bytes) {
        let written = serde_json::to_vec(&read).unwrap();
        let again: T = serde_json::from_slice(&written).unwrap();
        assert_eq!(serde_json::to_vec(&again).unwrap(), written);
    }
}

#[test]
fn arbitrary_agent_responses_are_parsed_or_rejected() {
    let ran = runner().run(&bytes(), |bytes| {
        check_round_trip::<TaskInfo>(&bytes);
        check_round_trip::<TaskList>(&bytes);
        check_round_trip::<HostInfo>(&bytes);
        check_round_trip::<InstanceHealth>(&bytes);
        check_round_trip::<JobRecord>(&bytes);
        check_round_trip::<JobState>(&bytes);
        check_round_trip::<LogEvent>(&bytes);
        check_round_trip::<PullResponse>(&bytes);
        check_round_trip::<Metrics>(&bytes);
        check_round_trip::<ShimEvent>(&bytes);
        Ok(())
    });
    ran.unwrap_or_else(|problem| panic!("{problem}"));
}

#[test]
fn arbitrary_requests_to_an_agent_are_parsed_or_rejected() {
    let ran = runner().run(&bytes(), |bytes| {
        check_round_trip::<TaskSpec>(&bytes);
        check_round_trip::<SubmitBody>(&bytes);
        check_round_trip::<TerminateRequest>(&bytes);
        check_round_trip::<Claims>(&bytes);
        Ok(())
    });
    ran.unwrap_or_else(|problem| panic!("{problem}"));
}

#[test]
fn x8_a_specification_modified_at_any_byte_is_refused() {
    let key = Ed25519KeyPair::from_seed_unchecked(&[7; 32]).unwrap();
    let enrolment = Enrolment {
        instance_id: InstanceId(uuid::Uuid::from_u128(7)),
        credential_sha256: vec![sha256_hex(b"credential")],
        server_keys: vec![BASE64_STANDARD.encode(key.public_key().as_ref())],
        gateway: None,
    };
    let claims = Claims { instance_id: enrolment.instance_id, epoch: 1, expires_at: 100 };
    let holds = |body: &[u8], signature: &str| {
        let presented =
            PresentedSpec { body, signature: Some(signature), claims: Some(claims), epoch: Some(1) };
        enrolment::check(&enrolment, presented, 0).map(drop)
    };
    let inputs = (bytes(), any::<prop::sample::Index>(), 1u8.., any::<bool>());
    let ran = runner().run(&inputs, |(body, at, bit, in_body)| {
        let signed = key.sign(&[SIGNED_PREFIX, &body].concat());
        let signature = BASE64_STANDARD.encode(signed.as_ref());
        prop_assert_eq!(holds(&body, &signature), Ok(()));
        let (mut touched, mut bent) = (body.clone(), signed.as_ref().to_vec());
        if in_body && !body.is_empty() {
            touched[at.index(body.len())] ^= bit;
        } else {
            bent[at.index(64)] ^= bit;
        }
        let refused = holds(&touched, &BASE64_STANDARD.encode(&bent));
        prop_assert_eq!(refused, Err(SpecError::WrongSignature));
        Ok(())
    });
    ran.unwrap_or_else(|problem| panic!("{problem}"));
}
