//! Ambiguous requests on the server's port.

use std::{
    io::{Read as _, Write as _},
    net::TcpStream,
    time::Duration,
};

use serde_json::json;
use windlass_gateway::corpus::{LAST, corpus};
use windlass_testenv::services::{ServiceCaller, free_port, probe_config, service_config};

use super::wait_for_answer;
use crate::test_env::{HostMode, TestEnv};

const BASE: &str = "/proxy/services/main/page";

/// Statuses of all responses on one connection.
fn statuses(address: &str, bytes: &str) -> Vec<u16> {
    let mut stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(3))).unwrap();
    // A server that refuses early may close before it has read everything.
    let _ = stream.write_all(bytes.as_bytes());
    let mut answer = Vec::new();
    let _ = stream.read_to_end(&mut answer);
    let answer = String::from_utf8_lossy(&answer).into_owned();
    let starts = answer.match_indices("HTTP/1.1 ");
    starts.filter_map(|(at, _)| answer.get(at + 9..at + 12)?.parse().ok()).collect()
}

#[tokio::test]
async fn ambiguous_requests_reach_no_service_through_the_server() {
    let mut env = TestEnv::new(HostMode::Processes).await;
    let mut page = service_config("page", free_port());
    page["auth"] = json!(false);
    page["probes"] = probe_config();
    env.apply(&page).await;
    let caller = ServiceCaller::new(env.address()).with_token(None);
    wait_for_answer(&mut env, &caller, &format!("{BASE}/"), 200, "version=1").await;
    let mut wrong = Vec::new();
    let mut passed = 0;
    for case in corpus() {
        assert_eq!(caller.get(&format!("{BASE}/forget")).unwrap().status, 200);
        let mut bytes = format!("{}{LAST}", case.bytes);
        for path in ["/first", "/second", "/last", "/smuggled"] {
            bytes = bytes.replace(path, &format!("{BASE}{path}"));
        }
        let got = statuses(env.address(), &bytes);
        let seen = caller.get(&format!("{BASE}/seen")).unwrap().body;
        // Requests that the proxy refuses are refused here, and subsequent ones are ignored. Bodies are forwarded as
        // they arrive: the head of a request with an invalid one may arrive before it is refused.
        let is_refused = case.ours.starts_with('4');
        let has_begun = seen.contains("/first") && !case.name.starts_with("chunk");
        let is_good = match is_refused {
            true => got.first().is_some_and(|status| (400..500).contains(status)) && !has_begun,
            false => got.first() == Some(&200) && seen.contains("/first"),
        };
        if !is_good || seen.contains("smuggled") {
            wrong.push(format!("{}: {got:?}, seen {seen:?}, the proxy alone: {}", case.name, case.ours));
        }
        passed += usize::from(!is_refused);
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert!(passed > 5, "nothing was passed on");
}
