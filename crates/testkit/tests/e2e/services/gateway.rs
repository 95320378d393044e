//! Services through a gateway: domains, tokens, the loss of the server, the change of the process.

use std::{
    fs::File,
    path::PathBuf,
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use serde_json::{Value, json};
use windlass_testkit::{
    lab::Lab,
    server::{binary, submission},
};

use super::{PATIENCE, caller::Caller, free_port, probe, service, traffic::Traffic};
use crate::{
    hosts::fleet,
    stage::{Machines, Stage},
};

/// A process of a gateway. It ends with the test.
struct Node {
    child: Child,
    port: u16,
    log: PathBuf,
}

impl Node {
    /// The state of two processes with the same `name` is the same.
    fn start(stage: &Stage, url: &str, token: &str, name: &str, port: u16) -> Self {
        let file = stage.home().join("gateway.token");
        std::fs::write(&file, token).unwrap();
        let log = stage.home().join(format!("{name}.log"));
        let said = File::options().create(true).append(true).open(&log).unwrap();
        let child = Command::new(binary("windlass").unwrap())
            .args(["gateway", "serve", "entry", "--server", url, "--address", "127.0.0.1"])
            .args(["--listen", &format!("127.0.0.1:{port}")])
            .arg("--token-file")
            .arg(&file)
            .arg("--state-dir")
            .arg(stage.home().join(name))
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(said)
            .spawn()
            .unwrap();
        Self { child, port, log }
    }

    fn caller(&self, host: &str) -> Caller {
        Caller::new(&format!("127.0.0.1:{}", self.port)).with_host(host)
    }

    fn said(&self) -> String {
        std::fs::read_to_string(&self.log).unwrap_or_default()
    }

    /// Waits until it has ended by itself.
    fn ends(&mut self) {
        let asked = Instant::now();
        while self.child.try_wait().unwrap().is_none() {
            assert!(asked.elapsed() < PATIENCE, "it does not end:\n{}", self.said());
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    fn kill(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        self.kill();
    }
}

/// Waits until the gateway answers so.
fn answers(node: &Node, caller: &Caller, path: &str, status: u16, words: &str) {
    let asked = Instant::now();
    loop {
        let got = caller.get(path);
        if got.as_ref().is_ok_and(|got| got.status == status && got.body.contains(words)) {
            return;
        }
        assert!(asked.elapsed() < PATIENCE, "{path} not {status} {words:?}: {got:?}\n{}", node.said());
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// A gateway of so many processes, and the token that they show.
async fn gateway(stage: &mut Stage, name: &str, replicas: u32) -> String {
    let configuration = json!({"type": "gateway", "name": name, "backend": "remote", "region": "here",
        "domain": "Services.test", "certificate": null, "replicas": replicas});
    let spec = json!({"configuration": configuration});
    stage.project("gateways/apply", &json!({"plan": {"spec": spec}, "force": false})).await;
    let made = stage.project("gateways/create_token", &json!({"name": name})).await;
    made["token"].as_str().unwrap().to_owned()
}

async fn is_running(stage: &mut Stage, nodes: usize) {
    let asked = Instant::now();
    loop {
        let found = stage.project("gateways/get", &json!({"name": "entry"})).await;
        if found["status"] == "running" && found["replicas"].as_array().unwrap().len() == nodes {
            return;
        }
        assert!(asked.elapsed() < PATIENCE, "{found:#}\n{}", stage.server_log());
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

/// Why a submission is refused.
fn refused(stage: &Stage, configuration: &Value) -> String {
    let body = submission(configuration).to_string();
    let got = Caller::new(stage.address()).ask("POST", "/api/project/main/runs/apply", body.as_bytes());
    let got = got.unwrap();
    assert_eq!(got.status, 400, "{got:?}");
    got.body
}

#[tokio::test]
async fn a_gateway_serves_by_domain_and_goes_on_when_the_server_is_killed_and_when_its_process_changes() {
    let mut stage = Stage::new(Machines::Processes).await;
    let token = gateway(&mut stage, "entry", 1).await;
    let mut page = service("page", free_port());
    page["probes"] = probe();
    // Nobody would answer there.
    let said = refused(&stage, &page);
    assert!(said.contains("gateway_error") && said.contains("gateway `entry` cannot be reached"), "{said}");

    let (port, url) = (free_port(), stage.url());
    let mut first = Node::start(&stage, &url, &token, "one", port);
    is_running(&mut stage, 1).await;
    let run = stage.apply(&page).await;
    assert_eq!(run["service"]["url"], "http://page.services.test/", "{run:#}");
    let caller = first.caller("page.services.test");
    answers(&first, &caller, "/a?b=c", 200, " path=/a?b=c token=none");
    for (token, status) in [(None, 401), (Some("wrong"), 403)] {
        assert_eq!(caller.with_token(token).get("/").unwrap().status, status);
    }
    assert_eq!(caller.with_host("other.services.test").get("/").unwrap().status, 404);
    let mut open = service("open", free_port());
    open["auth"] = json!(false);
    stage.apply(&open).await;
    let nobody = first.caller("open.services.test").with_token(None);
    answers(&first, &nobody, "/", 200, "pid=");

    // The server dies. Who was let in is let in, who was not is not, and nobody need be for the open one.
    let traffic = Traffic::start(&nobody, "/");
    assert_eq!(caller.get("/").unwrap().status, 200);
    stage.kill();
    assert_eq!(caller.get("/").unwrap().status, 200, "{}", first.said());
    let got = caller.with_token(Some("unknown")).get("/").unwrap();
    assert!(got.status == 503 && got.body.contains("cannot be checked"), "{got:?}");

    // Another process takes over, with no server to ask: it knows the routes.
    let mut second = Node::start(&stage, &url, &token, "one", port);
    first.ends();
    traffic.goes_on();
    // A token is believed by the process that checked it alone.
    assert_eq!(caller.get("/").unwrap().status, 503);

    // The server is back, elsewhere. The process that is told so learns what is new.
    stage.start().await;
    let third = Node::start(&stage, &stage.url(), &token, "one", port);
    second.ends();
    stage.stop("page", false).await;
    answers(&third, &caller, "/", 404, "no service answers to this host");
    stage.reaches("page", &["terminated"]).await;
    traffic.goes_on();
    let (_, failed) = traffic.end();
    assert!(failed.is_empty(), "{failed:#?}\n{}", third.said());
}

#[tokio::test]
async fn each_process_of_a_gateway_wakes_a_service_on_a_host_and_its_end_waits_for_their_requests() {
    let lab = Lab::start(1).unwrap();
    let mut stage = Stage::new(Machines::None).await;
    fleet(&mut stage, &lab, lab.hosts(), 1).await;
    let token = gateway(&mut stage, "entry", 2).await;
    let url = stage.url();
    let one = Node::start(&stage, &url, &token, "one", free_port());
    let two = Node::start(&stage, &url, &token, "two", free_port());
    is_running(&mut stage, 2).await;
    let mut sleepy = service("sleepy", 8000);
    sleepy["replicas"] = json!("0..1");
    sleepy["scaling"] = json!({"metric": "rps", "target": 10, "window": 30, "scale_down_delay": 300});
    stage.apply(&sleepy).await;
    answers(&one, &one.caller("sleepy.services.test"), "/", 200, "pid=");
    answers(&two, &two.caller("sleepy.services.test"), "/", 200, "pid=");

    let nobody = two.caller("sleepy.services.test");
    let slow = nobody.send("GET", "/slow", "Connection: close\r\n", b"").unwrap();
    // It has arrived once the replica says so.
    let asked = Instant::now();
    while !one.caller("sleepy.services.test").get("/waiting").unwrap().body.contains("slow=1") {
        assert!(asked.elapsed() < PATIENCE, "{}", two.said());
    }
    stage.stop("sleepy", false).await;
    answers(&one, &one.caller("sleepy.services.test"), "/", 404, "");
    let itself = lab.host(1).run("busybox wget -qO- http://127.0.0.1:8000/open").unwrap();
    assert!(itself.status.success(), "{itself:?}");
    let got = super::caller::read(slow).unwrap();
    assert_eq!((got.status, got.body.as_str()), (200, "slow"), "{}", two.said());
    stage.reaches("sleepy", &["terminated"]).await;
}
