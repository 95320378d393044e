//! The key that gateways receive: it connects to the agent of a host and to nothing else.

use std::{fs, process::Command};

use windlass_api::agent::client::{ShimClient, ShimError};
use windlass_backend::{Backend, DeleteProgress, remote::SOCKET};
use windlass_testenv::ssh::SshTarget as _;
use windlass_testkit::{
    lab::{Lab, LabHost, WORKER},
    temp_dir,
};
use windlass_tunnel::{Connection, LoginKey, SshDestination};

use super::fixtures::{agent, create_instance, instance_order, remote, shim};

fn generate_key() -> LoginKey {
    let dir = temp_dir("gateway-key").unwrap();
    let file = dir.path().join("key");
    let done = Command::new("ssh-keygen").args(["-q", "-t", "ed25519", "-N", "", "-f"]).arg(&file).status();
    assert!(done.unwrap().success());
    LoginKey::parse(&fs::read_to_string(file).unwrap()).unwrap()
}

/// Logs in with the key, and tries what an SSH session offers.
async fn check_key_connects_to_the_agent_alone(target: &SshDestination) {
    let (connection, _) = Connection::open(target, 1 << 20).await.unwrap();
    let stream = connection.open_command("cat /etc/shadow").await.unwrap();
    let client = ShimClient::connect(stream, "").await.unwrap();
    assert_eq!(client.health().await.unwrap().service, "dstack-shim");
    // The agent itself requires a credential or a pass.
    assert!(matches!(client.tasks().await, Err(ShimError::Unauthorized { .. })));

    for command in ["id", "sh -c id", "/var/lib/windlass/agent --version", ""] {
        let output = connection.run(command, b"").await.unwrap();
        assert!(output.stdout.is_empty() && output.stderr.is_empty(), "{command}: {output:?}");
    }
    // The server's own key opens both.
    assert!(connection.open_unix(SOCKET).await.is_err());
    assert!(connection.open_tcp("127.0.0.1", 22).await.is_err());
}

fn lines(host: &LabHost, home: &str) -> Vec<String> {
    let text = fs::read_to_string(host.path(&format!("{home}/.ssh/authorized_keys"))).unwrap();
    text.lines().map(str::to_owned).collect()
}

#[tokio::test]
async fn a_gateway_key_connects_to_the_agent_of_a_host_and_to_nothing_else() {
    let lab = Lab::start(2).unwrap();
    for (host, user, home) in [(lab.host(1), "root", "/root"), (lab.host(2), WORKER, "/home/worker")] {
        let before = lines(host, home);
        let (remote, mut order) = (remote(&agent()), instance_order(host.target_as(user)));
        let key = generate_key();
        order.enrolment.gateway_key = Some(key.public_line());
        let machine = create_instance(&remote, &order).await;
        let target = SshDestination { keys: vec![key], ..host.target_as(user) };
        assert!(Connection::open(&target, 1 << 20).await.is_err(), "no call has reached the agent yet");
        shim(&host.target_as(user)).await.tasks().await.unwrap();
        check_key_connects_to_the_agent_alone(&target).await;

        // A repeated setup changes nothing; a new key replaces the old one.
        let enrolled = fs::read(host.path("/var/lib/windlass/home/enrolment.json")).unwrap();
        create_instance(&remote, &order).await;
        assert_eq!(fs::read(host.path("/var/lib/windlass/home/enrolment.json")).unwrap(), enrolled);
        assert_eq!(lines(host, home).len(), before.len() + 1);
        let next = generate_key();
        order.enrolment.gateway_key = Some(next.public_line());
        create_instance(&remote, &order).await;
        shim(&host.target_as(user)).await.tasks().await.unwrap();
        assert!(Connection::open(&target, 1 << 20).await.is_err(), "replaced");
        let target = SshDestination { keys: vec![next], ..target };
        check_key_connects_to_the_agent_alone(&target).await;

        assert_eq!(remote.delete(&order, Some(&machine)).await.unwrap(), DeleteProgress::Gone);
        assert_eq!(lines(host, home), before);
        assert!(Connection::open(&target, 1 << 20).await.is_err());
    }
}
