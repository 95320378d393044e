//! Services: requests through the server to replicas, with failures of both.

mod change;
mod containers;
mod corpus;
mod deployment;
mod gateway;
mod gateway_access;
mod request_path;
mod restart;
mod shared;
mod skypilot;

use std::time::{Duration, Instant};

use serde_json::json;
use windlass_testenv::services::{HttpResponse, ServiceCaller, TIMEOUT};

use crate::test_env::TestEnv;

/// Waits until a service responds with this status and text.
pub(crate) async fn wait_for_answer(
    env: &mut TestEnv,
    caller: &ServiceCaller,
    path: &str,
    status: u16,
    words: &str,
) -> HttpResponse {
    let start = Instant::now();
    loop {
        let got = caller.get(path);
        if let Ok(got) = &got
            && got.status == status
            && got.body.contains(words)
        {
            return got.clone();
        }
        if start.elapsed() > TIMEOUT {
            let runs = env.project("runs/list", &json!({})).await;
            panic!("{path} does not answer {status} {words:?}: {got:?}\n{runs:#}\n{}", env.server_log());
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}
