//! Unusable hosts: each reports the reason and the fix.

use windlass_backend::{Backend, BackendError, remote::ROOT};
use windlass_testenv::ssh::SshTarget as _;
use windlass_testkit::lab::{GUEST, Lab};
use windlass_tunnel::{LoginKey, SshDestination};

use super::fixtures::{agent, create_instance, create_refused, instance_order, remote, ssh_site};

/// A key that is not authorised.
fn unauthorized_key(lab: &Lab) -> LoginKey {
    let file = lab.key_file().with_file_name("stranger");
    let mut keygen = std::process::Command::new("ssh-keygen");
    assert!(keygen.args(["-q", "-t", "ed25519", "-N", "", "-f"]).arg(&file).status().unwrap().success());
    LoginKey::parse(&std::fs::read_to_string(file).unwrap()).unwrap()
}

async fn check(target: SshDestination, is_final: bool, words: &[&str]) {
    let error = create_refused(&remote(&agent()), &instance_order(target)).await;
    assert_eq!(matches!(error, BackendError::Refused { .. }), is_final, "{error}");
    for word in words {
        assert!(error.to_string().contains(word), "{error}");
    }
}

#[tokio::test]
async fn f18_a_failed_connection_to_a_host_is_reported_with_a_hint() {
    let lab = Lab::start(2).unwrap();
    let (host, gate) = (lab.host(1), lab.host(2));
    let good = host.target();
    check(
        SshDestination { keys: vec![unauthorized_key(&lab)], ..good.clone() },
        true,
        &["none of the 1 keys", "authorized_keys"],
    )
    .await;
    check(host.target_as("nobody-known"), true, &["for user `nobody-known`"]).await;
    check(host.target_as(GUEST), true, &["user `guest`", "NOPASSWD"]).await;
    check(SshDestination { port: 2222, ..good.clone() }, false, &["no SSH server listens"]).await;
    check(
        SshDestination { host: "no-such-host.invalid".into(), ..good.clone() },
        false,
        &["Check its spelling"],
    )
    .await;
    let mut through = host.target_via(gate);
    through.via.as_mut().unwrap().port = 2222;
    check(through, false, &["jump host root@", "no SSH server listens"]).await;
    let mut through = host.target_via(gate);
    through.port = 2222;
    check(through, false, &["the jump host cannot reach"]).await;
    assert!(!host.path(ROOT).exists(), "nothing was left there");
}

#[tokio::test]
async fn f18_a_changed_host_key_blocks_creation_and_deletion() {
    let lab = Lab::start(1).unwrap();
    let host = lab.host(1);
    let (remote, order) = (remote(&agent()), instance_order(host.target()));
    host.change_host_key().unwrap();
    for error in [create_refused(&remote, &order).await, remote.delete(&order, None).await.unwrap_err()] {
        assert!(matches!(error, BackendError::HostKeyChanged { .. }), "{error}");
    }
    assert!(!host.path(ROOT).exists(), "nothing was sent there");
}

#[tokio::test]
async fn a_network_without_the_host_and_a_host_of_another_instance_are_refused() {
    let lab = Lab::start(2).unwrap();
    let (host, gate) = (lab.host(1), lab.host(2));
    let remote = remote(&agent());
    let mut ours = instance_order(host.target());
    for (network, words) in
        [("10.0.0.0/33", "expected a network"), ("192.168.7.0/24", "the host has no address in")]
    {
        ssh_site(&mut ours).network = Some(network.into());
        let error = create_refused(&remote, &ours).await;
        assert!(
            matches!(error, BackendError::Refused { .. }) && error.to_string().contains(words),
            "{error}"
        );
    }
    ssh_site(&mut ours).network = None;
    host.hide().unwrap();
    ssh_site(&mut ours).target = host.target_via(gate);
    create_instance(&remote, &ours).await;
    let theirs = instance_order(host.target_via(gate));
    let error = create_refused(&remote, &theirs).await;
    assert!(matches!(error, BackendError::Refused { .. }), "{error}");
    assert!(error.to_string().contains(&ours.instance.to_string()), "{error}");
    remote.delete(&theirs, None).await.unwrap();
    assert!(host.path(ROOT).exists(), "who does not own a host cannot leave it");
}
