//! Services through a gateway: domains, tokens, loss of the server, replacement of the process.

use std::{
    io::{Read as _, Write as _},
    path::Path,
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use serde_json::{Value, json};
use windlass_testenv::{
    server::submission,
    services::{
        ConstantTraffic, GatewayProcess, ServiceCaller, free_port,
        gateway_process::{create_gateway, create_gateway_with, wait_until_running},
        probe_config, read, service_config, update_run,
    },
};
use windlass_testkit::{
    fault_proxy,
    lab::{Lab, LabHost},
};

use super::TIMEOUT;
use crate::{
    hosts::fleet,
    test_env::{HostMode, TestEnv},
};

/// Waits until the gateway returns this response.
fn wait_for_answer(node: &GatewayProcess, caller: &ServiceCaller, path: &str, status: u16, words: &str) {
    let start = Instant::now();
    loop {
        let got = caller.get(path);
        if got.as_ref().is_ok_and(|got| got.status == status && got.body.contains(words)) {
            return;
        }
        assert!(start.elapsed() < TIMEOUT, "{path} not {status} {words:?}: {got:?}\n{}", node.log_tail());
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// Submits a configuration that is refused, and returns the reason.
fn submit_refused(env: &TestEnv, configuration: &Value) -> String {
    let body = submission(configuration).to_string();
    let got =
        ServiceCaller::new(env.address()).request("POST", "/api/project/main/runs/apply", body.as_bytes());
    let got = got.unwrap();
    assert_eq!(got.status, 400, "{got:?}");
    got.body
}

#[tokio::test]
async fn a_gateway_serves_by_domain_through_a_server_crash_and_its_own_replacement() {
    let mut env = TestEnv::new(HostMode::Processes).await;
    let token = create_gateway(&mut env, "entry", 1).await;
    let mut page = service_config("page", free_port());
    page["probes"] = probe_config();
    // No gateway process is connected yet.
    let message = submit_refused(&env, &page);
    assert!(message.contains("gateway_error") && message.contains("gateway `entry` is offline"), "{message}");

    let (port, url) = (free_port(), env.url());
    let mut first = GatewayProcess::start(&env, &url, &token, "one", port);
    wait_until_running(&mut env, 1).await;
    let run = env.apply(&page).await;
    assert_eq!(run["service"]["url"], "http://page.services.test/", "{run:#}");
    let caller = first.caller("page.services.test");
    wait_for_answer(&first, &caller, "/a?b=c", 200, " path=/a?b=c token=none");
    for (token, status) in [(None, 401), (Some("wrong"), 403)] {
        assert_eq!(caller.with_token(token).get("/").unwrap().status, status);
    }
    assert_eq!(caller.with_host("other.services.test").get("/").unwrap().status, 404);
    let mut open = service_config("open", free_port());
    open["auth"] = json!(false);
    env.apply(&open).await;
    let nobody = first.caller("open.services.test").with_token(None);
    wait_for_answer(&first, &nobody, "/", 200, "replica=");

    // The server dies. Accepted tokens stay accepted, others are rejected, and the open service needs none.
    let traffic = ConstantTraffic::start(&nobody, "/");
    assert_eq!(caller.get("/").unwrap().status, 200);
    env.kill();
    assert_eq!(caller.get("/").unwrap().status, 200, "{}", first.log_tail());
    let got = caller.with_token(Some("unknown")).get("/").unwrap();
    assert!(got.status == 503 && got.body.contains("cannot be checked"), "{got:?}");

    // Another process takes over without a server: it has the routes.
    let mut second = GatewayProcess::start(&env, &url, &token, "one", port);
    first.ends();
    traffic.goes_on();
    // A token is cached only by the process that checked it.
    assert_eq!(caller.get("/").unwrap().status, 503);

    // The server is back at another address. The process with that address receives the changes.
    env.start().await;
    let third = GatewayProcess::start(&env, &env.url(), &token, "one", port);
    second.ends();
    env.stop("page", false).await;
    wait_for_answer(&third, &caller, "/", 404, "no service has this host name");
    env.reaches("page", &["terminated"]).await;
    traffic.goes_on();
    let (_, failed) = traffic.end();
    assert!(failed.is_empty(), "{failed:#?}\n{}", third.log_tail());
}

#[tokio::test]
async fn a_service_moves_to_a_gateway_and_away_from_it_while_it_runs() {
    let mut env = TestEnv::new(HostMode::Processes).await;
    let token = create_gateway(&mut env, "entry", 1).await;
    let url = env.url();
    let node = GatewayProcess::start(&env, &url, &token, "one", free_port());
    wait_until_running(&mut env, 1).await;
    let mut page = service_config("page", free_port());
    page["gateway"] = json!(false);
    let run = env.apply(&page).await;
    assert_eq!(run["service"]["url"], "/proxy/services/main/page/", "{run:#}");
    env.reaches("page", &["running"]).await;
    let (near, far) = (ServiceCaller::new(env.address()), node.caller("page.services.test"));
    assert_eq!(far.get("/").unwrap().status, 404);

    page["gateway"] = json!("entry");
    let run = update_run(&mut env, &page).await;
    assert_eq!(run["service"]["url"], "http://page.services.test/", "{run:#}");
    wait_for_answer(&node, &far, "/a", 200, " path=/a ");
    page["gateway"] = json!(false);
    let run = update_run(&mut env, &page).await;
    assert_eq!(run["service"]["url"], "/proxy/services/main/page/", "{run:#}");
    wait_for_answer(&node, &far, "/", 404, "no service has this host name");
    assert_eq!(near.get("/proxy/services/main/page/").unwrap().status, 200);
    // The name becomes available again, and it was the same replica all the time.
    page["gateway"] = json!("entry");
    update_run(&mut env, &page).await;
    wait_for_answer(&node, &far, "/", 200, "replica=");
    let run = env.run("page").await;
    assert_eq!(run["jobs"].as_array().unwrap().len(), 1, "{run:#}");
    assert_eq!(run["jobs"][0]["job_submissions"].as_array().unwrap().len(), 1, "{run:#}");
}

#[tokio::test]
async fn each_gateway_process_wakes_a_service_and_stopping_it_waits_for_requests() {
    let lab = Lab::start(1).unwrap();
    let mut env = TestEnv::new(HostMode::None).await;
    fleet(&mut env, &lab, lab.hosts(), 1).await;
    let token = create_gateway(&mut env, "entry", 2).await;
    let url = env.url();
    let one = GatewayProcess::start(&env, &url, &token, "one", free_port());
    let two = GatewayProcess::start(&env, &url, &token, "two", free_port());
    wait_until_running(&mut env, 2).await;
    let mut sleepy = service_config("sleepy", 8000);
    sleepy["replicas"] = json!("0..1");
    sleepy["scaling"] = json!({"metric": "rps", "target": 10, "window": 30, "scale_down_delay": 300});
    env.apply(&sleepy).await;
    wait_for_answer(&one, &one.caller("sleepy.services.test"), "/", 200, "replica=");
    wait_for_answer(&two, &two.caller("sleepy.services.test"), "/", 200, "replica=");

    let nobody = two.caller("sleepy.services.test");
    let slow = nobody.send("GET", "/slow", "Connection: close\r\n", b"").unwrap();
    // The request has arrived when the replica reports it.
    let start = Instant::now();
    while !one.caller("sleepy.services.test").get("/waiting").unwrap().body.contains("slow=1") {
        assert!(start.elapsed() < TIMEOUT, "{}", two.log_tail());
    }
    env.stop("sleepy", false).await;
    wait_for_answer(&one, &one.caller("sleepy.services.test"), "/", 404, "");
    let itself = lab.host(1).run("busybox wget -qO- http://127.0.0.1:8000/open").unwrap();
    assert!(itself.status.success(), "{itself:?}");
    let got = read(slow).unwrap();
    assert_eq!((got.status, got.body.as_str()), (200, "slow"), "{}", two.log_tail());
    env.reaches("sleepy", &["terminated"]).await;
}

/// Sends a request over HTTPS, trusting only the certificate in this file.
fn get_https(port: u16, host: &str, trust: &Path, request: &str) -> String {
    let address = format!("127.0.0.1:{port}");
    let mut child = Command::new("openssl")
        .args(["s_client", "-quiet", "-connect", &address, "-servername", host])
        .args(["-verify_return_error", "-verify_hostname", host, "-CAfile"])
        .arg(trust)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let requested = child.stdin.as_mut().unwrap().write_all(request.as_bytes());
    // Its input stays open until the response is complete.
    let mut message = String::new();
    if requested.is_ok() {
        child.stdout.take().unwrap().read_to_string(&mut message).unwrap();
    }
    let _ = child.kill();
    child.wait().unwrap();
    message
}

#[tokio::test]
async fn a_gateway_with_a_certificate_in_files_serves_https_its_models_and_its_metrics() {
    let mut env = TestEnv::new(HostMode::Processes).await;
    let (chain, key) = (env.home().join("cert.pem"), env.home().join("key.pem"));
    let made = Command::new("openssl")
        .args([
            "req",
            "-x509",
            "-newkey",
            "ec",
            "-pkeyopt",
            "ec_paramgen_curve:prime256v1",
            "-nodes",
            "-days",
            "2",
        ])
        .args(["-subj", "/CN=services.test", "-addext", "subjectAltName=DNS:*.services.test", "-out"])
        .arg(&chain)
        .arg("-keyout")
        .arg(&key)
        .output()
        .unwrap();
    assert!(made.status.success(), "{made:?}");
    let files = json!({"type": "files", "chain": chain, "key": key});
    let token = create_gateway_with(&mut env, "entry", 1, &files).await;
    let (port, tls, metrics) = (free_port(), free_port(), free_port());
    let more =
        ["--tls-listen", &format!("127.0.0.1:{tls}"), "--metrics-listen", &format!("127.0.0.1:{metrics}")];
    let more = more.map(str::to_owned);
    let node = GatewayProcess::start_with(&env, &env.url(), &token, "one", port, &more);
    wait_until_running(&mut env, 1).await;
    let message = submit_refused(&env, &service_config("gateway", free_port()));
    assert!(message.contains("is the name of gateway `entry` itself"), "{message}");

    let mut chat = service_config("chat", free_port());
    chat["model"] = json!("tiny");
    chat["probes"] = probe_config();
    let run = env.apply(&chat).await;
    assert_eq!(run["service"]["url"], "https://chat.services.test/", "{run:#}");
    let models = "https://gateway.services.test/proxy/models/main";
    assert_eq!(run["service"]["model"]["base_url"], models, "{run:#}");
    // Plain requests are redirected to HTTPS, for the service and for the gateway's own name.
    let plain = node.caller("chat.services.test");
    wait_for_answer(&node, &plain, "/", 308, "");
    wait_for_answer(&node, &plain.with_host("gateway.services.test"), "/proxy/models/main/models", 308, "");
    let request = |host: &str, path: &str| {
        let token = windlass_testenv::server::TOKEN;
        format!(
            "GET {path} HTTP/1.1\r\nHost: {host}\r\nAuthorization: Bearer {token}\r\nConnection: close\r\n\r\n"
        )
    };
    let start = Instant::now();
    for (host, path, words) in [
        ("chat.services.test", "/a?b=c", " path=/a?b=c token=none"),
        ("gateway.services.test", "/proxy/models/main/models", "\"id\":\"tiny\""),
    ] {
        loop {
            let got = get_https(tls, host, &chain, &request(host, path));
            if got.starts_with("HTTP/1.1 200") && got.contains(words) {
                break;
            }
            assert!(start.elapsed() < TIMEOUT, "{host}: {got}\n{}", node.log_tail());
            std::thread::sleep(Duration::from_millis(50));
        }
    }
    // A client with other trust roots fails.
    let other = "/etc/ssl/certs/ca-certificates.crt";
    assert_eq!(
        get_https(tls, "chat.services.test", Path::new(other), &request("chat.services.test", "/")),
        ""
    );
    let counted = ServiceCaller::new(&format!("127.0.0.1:{metrics}")).get("/metrics").unwrap().body;
    assert!(counted.contains("windlass_gateway_server_reached 1"), "{counted}");
    assert!(counted.contains("windlass_service_replicas{project=\"main\",run=\"chat\"} 1"), "{counted}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_gateway_is_installed_on_ssh_hosts_updated_without_a_gap_and_removed() {
    check_installed_gateway(&Lab::start(2).unwrap(), |_, _| {}).await;
}

/// With systemd the gateway is also restarted after a crash.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_gateway_on_systemd_hosts_is_a_unit_and_is_restarted() {
    let comes_back = |edge: &LabHost, caller: &ServiceCaller| {
        edge.run("kill -9 $(cat /var/lib/windlass/gateway-entry/pid)").unwrap();
        wait_until_answered(caller, || "nobody started it again".to_owned());
        edge.reboot().unwrap();
        wait_until_answered(caller, || "it was not started at boot".to_owned());
    };
    check_installed_gateway(&Lab::with_systemd(2).unwrap(), comes_back).await;
}

fn wait_until_answered(caller: &ServiceCaller, message: impl Fn() -> String) {
    let start = Instant::now();
    while !caller.get("/").is_ok_and(|got| got.status == 200) {
        assert!(start.elapsed() < TIMEOUT, "{}", message());
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// Installs a gateway on the first host for a service on the second, updates it, runs `also`, and uninstalls it.
async fn check_installed_gateway(lab: &Lab, also: impl FnOnce(&LabHost, &ServiceCaller)) {
    let mut env = TestEnv::new(HostMode::None).await;
    fleet(&mut env, lab, &lab.hosts()[1..], 1).await;
    create_gateway(&mut env, "entry", 1).await;
    // The hosts reach this machine at a different address than the server listens on.
    let front =
        fault_proxy::FaultProxy::tcp_at(&format!("{}:0", lab.gateway()), env.address(), 1).await.unwrap();
    let (url, edge) = (format!("http://{}", front.address()), lab.host(1));
    let (key, at) = (format!("IdentityFile={}", lab.key_file().display()), format!("root@{}", edge.addr()));
    let options = ["IdentitiesOnly=yes", "StrictHostKeyChecking=no", "UserKnownHostsFile=/dev/null", &key];
    let options: Vec<&str> = options.iter().flat_map(|option| ["--ssh-option", option]).collect();
    let windlass = |env: &TestEnv, words: &[&str]| {
        let message = env.windlass(Path::new("/"), &[words, options.as_slice()].concat());
        (message.status.success(), String::from_utf8_lossy(&message.stderr).into_owned())
    };
    let (is_done, message) = windlass(&env, &["gateway", "install", "entry", &at]);
    assert!(
        !is_done && message.contains("pass `--server URL` with an address that they can reach"),
        "{message}"
    );
    let install = ["gateway", "install", "entry", &at, "--server", &url];
    let (is_done, message) = windlass(&env, &install);
    assert!(is_done && message.contains("is ready; number of hosts: 1."), "{message}");

    let mut page = service_config("page", free_port());
    page["probes"] = probe_config();
    env.apply(&page).await;
    let caller = ServiceCaller::new(&format!("{}:80", edge.addr())).with_host("page.services.test");
    wait_until_answered(&caller, || env.server_log());
    let serving = || {
        let all = edge.processes().unwrap();
        all.into_iter().filter(|one| one.command.contains("gateway serve entry")).count()
    };
    assert_eq!(serving(), 1);
    let traffic = ConstantTraffic::start(&caller, "/");
    let (is_done, message) = windlass(&env, &install);
    assert!(is_done, "{message}");
    traffic.goes_on();
    let (_, failed) = traffic.end();
    assert!(failed.is_empty(), "{failed:#?}");
    let start = Instant::now();
    while serving() != 1 {
        assert!(start.elapsed() < TIMEOUT, "the old process does not end");
        std::thread::sleep(Duration::from_millis(50));
    }
    also(edge, &caller);
    let (is_done, message) = windlass(&env, &["gateway", "uninstall", "entry", &at]);
    assert!(is_done && message.contains("removed `entry`"), "{message}");
    assert_eq!(serving(), 0);
    assert!(!edge.path("/var/lib/windlass/gateway-entry").exists());
}
