//! Tasks on the bridge: reachable on published ports, isolated from each other.

use std::{
    collections::BTreeSet,
    io::{Read, Write},
    net::TcpStream,
    time::Duration,
};

use windlass_agent::shim::runtime::Runtime;
use windlass_testkit::wait::eventually_async;

use super::{CONNECT_TO_METADATA, DockerHost, read, wait_written};

/// Responds to every connection to port 8000 with the name of the container.
const SERVE_SCRIPT: &str = "cd /windlass/run; mkdir /www; hostname > /www/name; hostname -i > address
    httpd -p 8000 -h /www; touch up; sleep 600";

fn fetch(port: u16) -> Option<String> {
    let mut stream = TcpStream::connect(("127.0.0.1", port)).ok()?;
    stream.set_read_timeout(Some(Duration::from_secs(5))).ok()?;
    stream.write_all(b"GET /name HTTP/1.0\r\n\r\n").ok()?;
    let mut text = String::new();
    stream.read_to_string(&mut text).ok()?;
    text.split("\r\n\r\n").nth(1).map(|body| body.trim().to_owned()).filter(|body| !body.is_empty())
}

#[tokio::test]
async fn g9_docker_reports_the_mapped_ports_and_no_two_tasks_share_one() {
    let host = DockerHost::new().await;
    let mut ports = BTreeSet::new();
    let mut running = Vec::new();
    for _ in 0..3 {
        let task = host.bridged_task(SERVE_SCRIPT).await;
        let handle = host.docker.create(&task).await.unwrap();
        let mapped = host.docker.start(&task, &handle).await.unwrap();
        assert_eq!(mapped.len(), 1);
        assert_eq!(mapped[0].container, 8000);
        assert!(ports.insert(mapped[0].host));
        assert_eq!(host.docker.start(&task, &handle).await.unwrap(), mapped, "a repeat says the same");
        running.push((task, handle, mapped[0].host));
    }
    for (task, handle, port) in &running {
        wait_written(task, "up").await;
        let name = eventually_async("the port answers", async || fetch(*port)).await;
        assert!(handle.id.starts_with(&name), "the port leads to the task that reported it");
    }
}

#[tokio::test]
async fn docker_tasks_on_the_bridge_cannot_reach_each_other() {
    let host = DockerHost::new().await;
    let served = host.bridged_task(SERVE_SCRIPT).await;
    host.start(&served).await;
    wait_written(&served, "up").await;
    let address = read(&served, "address");
    // The loopback proves that the request itself works; the neighbour must not respond to it.
    let script = format!(
        "cd /windlass/run; mkdir /www; echo me > /www/name; httpd -p 8000 -h /www
        ask() {{ timeout 3 wget -q -O - http://$1:8000/name || echo none; }}
        ask 127.0.0.1 > out; ask {address} >> out; exit 0"
    );
    let request = host.bridged_task(&script).await;
    assert_eq!(host.message(&request).await, "me\nnone");
}

#[tokio::test]
async fn docker_reports_the_exit_status_of_a_task_that_ended_before_its_ports_were_read() {
    let host = DockerHost::new().await;
    let task = host.bridged_task("exit 5").await;
    let handle = host.start(&task).await;
    assert_eq!(host.wait(&task, &handle).await.code, Some(5));
    assert_eq!(host.docker.start(&task, &handle).await.unwrap(), []);
}

#[tokio::test]
async fn docker_tasks_on_the_bridge_cannot_reach_cloud_metadata() {
    let host = DockerHost::new().await;
    let task = host.bridged_task("sleep 600").await;
    host.start(&task).await;
    let network = host.engine.inspect_network("windlass", None).await.unwrap();
    let id = network.id.unwrap();
    let rules = std::process::Command::new("iptables").args(["-S", "DOCKER-USER"]).output();
    let rules = String::from_utf8(rules.unwrap().stdout).unwrap();
    if !rules.contains("DOCKER-USER") {
        // An engine without a firewall has no chain for a rule.
        println!("skipped: no firewall here");
        return;
    }
    let rule = format!("-d 169.254.169.254/32 -i br-{} -j DROP", &id[..12]);
    assert_eq!(rules.matches(&rule).count(), 1, "{rules}");
    assert_eq!(network.options.unwrap()["com.docker.network.bridge.enable_icc"], "false");
}

#[tokio::test]
async fn docker_tasks_are_not_permitted_to_connect_to_cloud_metadata_on_any_network() {
    let host = DockerHost::new().await;
    for task in [host.task(CONNECT_TO_METADATA).await, host.bridged_task(CONNECT_TO_METADATA).await] {
        let message = host.connect_to_metadata(&task).await;
        assert!(message.contains("Operation not permitted"), "{:?}: {message}", task.spec.network_mode);
    }
}
