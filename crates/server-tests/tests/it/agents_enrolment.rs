//! Enrolment of agents and login to SSH hosts: once for all replicas, on both databases.

use futures_util::future::join_all;
use serde_json::json;
use windlass_backend::AgentEndpoint;
use windlass_model::id::InstanceId;
use windlass_server::{
    agents::{
        enrolment::{self, EnrolmentError},
        ssh_target::{self, SshTargetError},
    },
    db::{Unit, encrypted_columns, instances},
    encryption::AssociatedData,
    params, services,
};
use windlass_tunnel::{HostKey, HostKeyEntry, HostKeyPin};

use crate::agents_host::{AgentTestEnv, new_instance, on_both_kits};

on_both_kits! {
    concurrent_enrolments_return_the_same_credentials
    an_enrolment_survives_key_rotation
    an_instance_that_was_never_enrolled_has_no_credential
    host_settings_override_fleet_settings
    x10_a_host_key_is_pinned_once_and_recorded_as_an_event
    x10_a_different_host_key_is_refused_and_the_pin_stays
}

fn dummy_socket() -> AgentEndpoint {
    AgentEndpoint::Socket { path: "/nowhere".into() }
}

async fn concurrent_enrolments_return_the_same_credentials(kit: &AgentTestEnv) {
    let instance = kit.instance(0, dummy_socket()).await;
    let all = join_all((0..16).map(|_| enrolment::enrolment(kit.db(), kit.app.keys(), instance))).await;
    let reported: Vec<_> = all.into_iter().map(Result::unwrap).collect();
    assert!(reported.iter().all(|one| *one == reported[0]), "{reported:?}");
    assert_eq!(reported[0].credential_sha256.len(), 64);
    let other = kit.instance(1, dummy_socket()).await;
    let other = enrolment::enrolment(kit.db(), kit.app.keys(), other).await.unwrap();
    assert_ne!(other.credential_sha256, reported[0].credential_sha256, "each instance has its own");
    assert_eq!(other.server_key, reported[0].server_key, "the server has one");
    let credential = enrolment::credential(kit.db(), kit.app.keys(), instance).await.unwrap();
    for (table, column) in [("instances", "agent_credential_sealed"), ("signing_keys", "seed_sealed")] {
        for (_, stored) in encrypted_columns::column_values(kit.db(), table, column).await.unwrap() {
            assert!(!stored.windows(8).any(|part| credential.as_bytes().windows(8).any(|c| c == part)));
        }
    }
}

async fn an_enrolment_survives_key_rotation(kit: &AgentTestEnv) {
    let instance = kit.instance(0, dummy_socket()).await;
    let before = enrolment::enrolment(kit.db(), kit.app.keys(), instance).await.unwrap();
    services::secrets::rotate_keys(&kit.app).await.unwrap();
    assert_eq!(enrolment::enrolment(kit.db(), kit.app.keys(), instance).await.unwrap(), before);
}

async fn an_instance_that_was_never_enrolled_has_no_credential(kit: &AgentTestEnv) {
    let instance = kit.instance(0, dummy_socket()).await;
    let none = enrolment::credential(kit.db(), kit.app.keys(), instance).await;
    assert!(matches!(none, Err(EnrolmentError::NotEnrolled { .. })), "{none:?}");
    let nobody = InstanceId(uuid::Uuid::max());
    let none = enrolment::enrolment(kit.db(), kit.app.keys(), nobody).await;
    assert!(matches!(none, Err(EnrolmentError::NoInstance { .. })), "{none:?}");
}

/// A new key: the private key as OpenSSH text, and the public line.
fn key_pair() -> (String, String) {
    let mut seed = [0_u8; 32];
    getrandom::fill(&mut seed).unwrap();
    let pair = ssh_key::private::Ed25519Keypair::from_seed(&seed);
    let key = ssh_key::PrivateKey::from(pair);
    let private = key.to_openssh(ssh_key::LineEnding::LF).unwrap().to_string();
    (private, key.public_key().to_openssh().unwrap())
}

async fn insert_ssh_instance(kit: &AgentTestEnv, ssh_config: serde_json::Value) -> InstanceId {
    let id = InstanceId(kit.db().new_id().unwrap());
    let belongs = AssociatedData::row("instances", "ssh_sealed", id.0);
    let sealed = kit.app.keys().seal(&belongs, ssh_config.to_string().as_bytes()).unwrap();
    kit.write(Unit::new().and([instances::insert(new_instance(kit, id, 7, None, Some(sealed)))])).await;
    id
}

async fn host_settings_override_fleet_settings(kit: &AgentTestEnv) {
    let ((shared, shared_public), (own, own_public)) = (key_pair(), key_pair());
    let jump = json!({"hostname": "gate", "user": "guard", "identity_file": "k",
        "ssh_key": {"public": shared_public, "private": shared}});
    let fleet = |host: serde_json::Value| {
        json!({"user": "ubuntu", "port": 2022, "network": "10.0.0.0/16", "proxy_jump": jump,
            "ssh_key": {"public": shared_public, "private": shared}, "hosts": [host]})
    };
    let plain = insert_ssh_instance(kit, fleet(json!({"hostname": "a"}))).await;
    let site = ssh_target::load_target(kit.db(), kit.app.keys(), plain).await.unwrap();
    assert_eq!(
        (site.target.host.as_str(), site.target.port, site.target.user.as_str()),
        ("a", 2022, "ubuntu")
    );
    assert_eq!(site.network.as_deref(), Some("10.0.0.0/16"));
    let via = site.target.via.unwrap();
    assert_eq!((via.host.as_str(), via.port, via.user.as_str()), ("gate", 22, "guard"));
    assert_eq!(via.pin, HostKeyPin::FirstUse);
    let fleets_key = format!("{:?}", site.target.keys);

    kit.write(Unit::new().exec("UPDATE instances SET finished = TRUE WHERE id = $1", params![plain])).await;
    let own_jump = json!({"hostname": "other-gate", "port": 222, "user": "me", "identity_file": "k",
        "ssh_key": {"public": own_public, "private": own}});
    let lines = json!({"hostname": "b", "port": 22, "user": "root", "internal_ip": "10.0.0.9", "proxy_jump": own_jump,
        "ssh_key": {"public": own_public, "private": own}});
    let mut settings = fleet(lines);
    settings.as_object_mut().unwrap().remove("network");
    let special = insert_ssh_instance(kit, settings).await;
    let site = ssh_target::load_target(kit.db(), kit.app.keys(), special).await.unwrap();
    assert_eq!((site.target.host.as_str(), site.target.port, site.target.user.as_str()), ("b", 22, "root"));
    assert_eq!(site.internal_ip.unwrap().to_string(), "10.0.0.9");
    let via = site.target.via.unwrap();
    assert_eq!((via.host.as_str(), via.port, via.user.as_str()), ("other-gate", 222, "me"));
    assert_ne!(format!("{:?}", site.target.keys), fleets_key);
}

fn learned_key(host: &str, public: &str) -> HostKeyEntry {
    HostKeyEntry { host: host.into(), key: HostKey::parse(public).unwrap() }
}

async fn x10_a_host_key_is_pinned_once_and_recorded_as_an_event(kit: &AgentTestEnv) {
    let ((private, public), (_, gates)) = (key_pair(), key_pair());
    let jump = json!({"hostname": "gate", "user": "guard", "identity_file": "k",
        "ssh_key": {"public": public, "private": private}});
    let settings = json!({"user": "root", "proxy_jump": jump,
        "ssh_key": {"public": public, "private": private}, "hosts": [{"hostname": "a", "port": 2200}]});
    let id = insert_ssh_instance(kit, settings).await;
    let seen = [learned_key("gate", &gates), learned_key("[a]:2200", &public)];
    // Two replicas at once, then one again.
    let (one, two) = tokio::join!(ssh_target::pin(kit.db(), id, &seen), ssh_target::pin(kit.db(), id, &seen));
    one.and(two).unwrap();
    ssh_target::pin(kit.db(), id, &seen[..1]).await.unwrap();
    let site = ssh_target::load_target(kit.db(), kit.app.keys(), id).await.unwrap();
    assert_eq!(site.target.pin, HostKeyPin::Known(HostKey::parse(&public).unwrap()));
    assert_eq!(site.target.via.unwrap().pin, HostKeyPin::Known(HostKey::parse(&gates).unwrap()));
    let sql = "SELECT message FROM events WHERE reason = 'host_key_learned' ORDER BY message";
    let reported = kit.db().query(sql, vec![]).await.unwrap();
    let reported: Vec<_> = reported.iter().map(|row| row.text(0).unwrap()).collect();
    assert_eq!(reported.len(), 2, "each is told once: {reported:?}");
    assert!(
        reported[1].starts_with("first connection to gate: ") && reported[1].contains("SHA256:"),
        "{reported:?}"
    );
}

async fn x10_a_different_host_key_is_refused_and_the_pin_stays(kit: &AgentTestEnv) {
    let ((private, public), (_, another)) = (key_pair(), key_pair());
    let settings = json!({"user": "root", "ssh_key": {"public": public, "private": private},
        "hosts": [{"hostname": "a"}]});
    let id = insert_ssh_instance(kit, settings).await;
    ssh_target::pin(kit.db(), id, &[learned_key("a", &public)]).await.unwrap();
    let refused = ssh_target::pin(kit.db(), id, &[learned_key("a", &another)]).await;
    assert!(matches!(refused, Err(SshTargetError::Changed { .. })), "{refused:?}");
    let site = ssh_target::load_target(kit.db(), kit.app.keys(), id).await.unwrap();
    assert_eq!(site.target.pin, HostKeyPin::Known(HostKey::parse(&public).unwrap()), "the first one stays");
}
