//! Access of gateways to hosts, and of users to services through gateways.

use std::{
    fs,
    io::Read as _,
    process::Command,
    time::{Duration, Instant},
};

use serde_json::{Value, json};
use windlass_backend::remote::SOCKET;
use windlass_testenv::{
    services::{
        GatewayProcess, free_port,
        gateway_process::{create_gateway, wait_until_running},
        probe_config, read_until, service_config,
    },
    ssh::SshTarget as _,
};
use windlass_testkit::lab::Lab;
use windlass_tunnel::{Connection, LoginKey, SshDestination};

use super::TIMEOUT;
use crate::{
    hosts::fleet,
    test_env::{HostMode, TestEnv},
};

/// Streams end within this time after their token was revoked.
const STREAM_END_TIMEOUT: Duration = Duration::from_secs(5);

/// Starts a gateway and a service that it publishes, and waits until it answers.
async fn publish(env: &mut TestEnv) -> GatewayProcess {
    let token = create_gateway(env, "entry", 1).await;
    let node = GatewayProcess::start(env, &env.url(), &token, "one", free_port());
    wait_until_running(env, 1).await;
    let mut page = service_config("page", free_port());
    page["probes"] = probe_config();
    env.apply(&page).await;
    let (caller, start) = (node.caller("page.services.test"), Instant::now());
    while !caller.get("/").is_ok_and(|got| got.status == 200) {
        assert!(start.elapsed() < TIMEOUT, "{}\n{}", node.log_tail(), env.server_log());
        std::thread::sleep(Duration::from_millis(50));
    }
    node
}

/// Everything that the gateway has stored about its routes.
fn stored_routes(env: &TestEnv) -> (String, Value) {
    let found = Command::new("find").arg(env.home().join("one")).args(["-name", "routes"]).output().unwrap();
    let text = fs::read_to_string(String::from_utf8(found.stdout).unwrap().trim()).unwrap();
    let (_, document) = text.split_once('\n').unwrap();
    (text.clone(), serde_json::from_str(document).unwrap())
}

fn find_login(document: &Value) -> &Value {
    let sites = document["told"]["sites"].as_object().unwrap_or_else(|| panic!("{document:#}"));
    &sites.values().next().unwrap()["way"]["login"]
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_gateway_reaches_ssh_hosts_with_a_key_for_their_agents_alone() {
    let lab = Lab::start(1).unwrap();
    let mut env = TestEnv::new(HostMode::None).await;
    fleet(&mut env, &lab, lab.hosts(), 1).await;
    let node = publish(&mut env).await;

    let (text, document) = stored_routes(&env);
    let login = find_login(&document);
    let server_key = fs::read_to_string(lab.key_file()).unwrap();
    let server_key: String = server_key.lines().filter(|line| !line.contains("-----")).collect();
    assert!(
        !text.contains(&server_key) && !text.replace("\\n", "").contains(&server_key),
        "the server's key"
    );
    let key = LoginKey::parse(login["key"].as_str().unwrap()).unwrap();
    let target = SshDestination { keys: vec![key], ..lab.host(1).target() };
    assert_eq!(login["user"], target.user.as_str());
    let (connection, _) = Connection::open(&target, 1 << 20).await.unwrap();
    for command in ["id", "cat /etc/shadow"] {
        let output = connection.run(command, b"").await.unwrap();
        assert!(output.stdout.is_empty() && output.stderr.is_empty(), "{command}: {output:?}");
    }
    assert!(connection.open_unix(SOCKET).await.is_err());
    assert!(connection.open_tcp("127.0.0.1", 22).await.is_err());

    // Many requests at once share a few sessions of the SSH server.
    let caller = node.caller("page.services.test");
    let sleepers: Vec<_> = (0..120)
        .map(|_| {
            let caller = caller.clone();
            std::thread::spawn(move || caller.get("/nap").unwrap().status)
        })
        .collect();
    let statuses: Vec<u16> = sleepers.into_iter().map(|one| one.join().unwrap()).collect();
    assert!(statuses.iter().all(|status| *status == 200), "{statuses:?}\n{}", node.log_tail());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stream_through_a_gateway_ends_within_five_seconds_of_its_token() {
    let mut env = TestEnv::new(HostMode::Processes).await;
    let node = publish(&mut env).await;
    let made = env.post("/api/users/create", &json!({"username": "mira", "global_role": "user"})).await;
    let member = json!({"members": [{"username": "mira", "project_role": "user"}]});
    env.post("/api/projects/main/add_members", &member).await;
    let caller = node.caller("page.services.test").with_token(made["creds"]["token"].as_str());
    let mut events = caller.send("GET", "/sse", "", b"").unwrap();
    read_until(&mut events, "data: one");
    let upgrade = "Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\n\
                   Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n";
    let mut socket = caller.send("GET", "/ws", upgrade, b"").unwrap();
    read_until(&mut socket, "\r\n\r\n");

    env.post("/api/users/refresh_token", &json!({"username": "mira"})).await;
    let revoked = Instant::now();
    for stream in [&mut events, &mut socket] {
        let mut rest = Vec::new();
        // A connection that is reset has ended, too.
        let _ = stream.read_to_end(&mut rest);
        assert!(!String::from_utf8_lossy(&rest).contains("data: two"));
        assert!(revoked.elapsed() < STREAM_END_TIMEOUT, "after {:?}\n{}", revoked.elapsed(), node.log_tail());
    }
    assert!([401, 403].contains(&caller.get("/").unwrap().status), "new requests are refused as well");
}
