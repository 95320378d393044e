//! Services: requests through the server to replicas, with everything that may happen to both.

mod caller;
mod change;
mod gateway;
mod reach;
mod shared;
mod traffic;

use std::{
    net::TcpListener,
    time::{Duration, Instant},
};

use serde_json::{Value, json};

use self::caller::{Caller, Got};
use crate::stage::Stage;

const PATIENCE: Duration = Duration::from_secs(90);
const PAGE: &str = include_str!("page.py");

/// A port that nobody listens at: replicas on this machine share its network.
fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

/// A service of [`PAGE`].
fn service(name: &str, port: u16) -> Value {
    json!({"type": "service", "name": name, "image": "none", "user": "root", "port": port,
        "env": {"PAGE": PAGE, "VERSION": "1"},
        "commands": [format!("exec /usr/bin/python3 -c \"$PAGE\" {port}")],
        "resources": {"cpu": {"count": {"min": 1}}, "memory": {"min": 0.1}, "disk": null}})
}

/// It takes requests when it has been well twice.
fn probe() -> Value {
    json!([{"type": "http", "url": "/health", "interval": 1, "timeout": 5, "ready_after": 2}])
}

/// Waits until a service answers with this status and these words.
async fn answers(stage: &mut Stage, caller: &Caller, path: &str, status: u16, words: &str) -> Got {
    let asked = Instant::now();
    loop {
        let got = caller.get(path);
        if let Ok(got) = &got
            && got.status == status
            && got.body.contains(words)
        {
            return got.clone();
        }
        if asked.elapsed() > PATIENCE {
            let runs = stage.project("runs/list", &json!({})).await;
            panic!("{path} does not answer {status} {words:?}: {got:?}\n{runs:#}\n{}", stage.server_log());
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}
