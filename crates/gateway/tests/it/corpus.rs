//! Ambiguous requests: the behaviour of this proxy and of nginx.
//!
//! Each case ends with a valid request, which shows whether the connection is still in sync. A replica must never
//! receive `/smuggled`. Each case that differs from nginx states why.

use std::{process::Stdio, sync::Arc, time::Duration};

use http_body_util::BodyExt as _;
use parking_lot::Mutex;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
};

use windlass_gateway::corpus::{LAST, corpus};
use windlass_testkit::{TempDir, temp_dir};

use crate::support::{TestProxy, Upstream, service, text_response, wait_until};

/// Replica that records its requests.
struct RecordingReplica {
    upstream: Upstream,
    seen: Arc<Mutex<Vec<String>>>,
}

impl RecordingReplica {
    async fn new() -> Self {
        let seen = Arc::new(Mutex::new(Vec::new()));
        let list = Arc::clone(&seen);
        let upstream = Upstream::http(move |request| {
            let list = Arc::clone(&list);
            async move {
                let mut line = format!("{} {}", request.method(), request.uri());
                if let Some(host) = request.headers().get("host").filter(|host| *host != "llm.test") {
                    line.push_str(&format!(" @{}", host.to_str().unwrap()));
                }
                for name in ["upgrade", "http2-settings"] {
                    if let Some(value) = request.headers().get(name) {
                        line.push_str(&format!(" {name}={}", value.to_str().unwrap()));
                    }
                }
                // A truncated request does not count as forwarded.
                let Ok(body) = request.into_body().collect().await else { return text_response("broken") };
                if !body.to_bytes().is_empty() {
                    line.push_str(" +body");
                }
                list.lock().push(line);
                text_response("ok")
            }
        })
        .await;
        Self { upstream, seen }
    }

    /// Sends these bytes; returns the statuses that the caller receives, and the requests that the replica receives.
    async fn send_bytes(&self, address: std::net::SocketAddr, bytes: &str) -> String {
        self.seen.lock().clear();
        let mut stream = TcpStream::connect(address).await.unwrap();
        let _ = stream.write_all(format!("{bytes}{LAST}").as_bytes()).await;
        let mut answer = Vec::new();
        let read = tokio::time::timeout(Duration::from_secs(3), stream.read_to_end(&mut answer)).await;
        let answer = String::from_utf8_lossy(&answer).into_owned();
        let mut statuses: Vec<String> = answer
            .match_indices("HTTP/1.1 ")
            .filter_map(|(at, _)| answer.get(at + 9..at + 12))
            .map(ToOwned::to_owned)
            .collect();
        if read.is_err() {
            statuses.push("waits".to_owned());
        }
        format!("{} | {}", statuses.join(" "), self.seen.lock().join(", "))
    }
}

#[tokio::test]
async fn an_ambiguous_request_is_never_forwarded() {
    let witness = RecordingReplica::new().await;
    let bed = TestProxy::new(vec![service(vec![witness.upstream.replica("a")])]).await;
    let mut wrong = Vec::new();
    for case in corpus() {
        let got = witness.send_bytes(bed.address, &case.bytes).await;
        if got != case.ours || got.contains("smuggled") {
            wrong.push(format!("{}\n  expected {}\n  got      {got}", case.name, case.ours));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// Debian's nginx as a plain proxy with keep-alive connections to the replica.
struct Nginx {
    _folder: TempDir,
    child: std::process::Child,
    address: std::net::SocketAddr,
}

impl Nginx {
    async fn new(upstream: &Upstream) -> Self {
        let folder = temp_dir("nginx").unwrap();
        let address = crate::support::unused_address().await;
        let conf = format!(
            "daemon off; master_process off; pid {0}/pid; error_log {0}/error.log;\n\
             events {{ worker_connections 256; }}\n\
             http {{ access_log off; client_body_temp_path {0}/b; proxy_temp_path {0}/p; fastcgi_temp_path {0}/f;\n\
             uwsgi_temp_path {0}/u; scgi_temp_path {0}/s;\n\
             upstream up {{ server {1}; keepalive 16; }}\n\
             server {{ listen {2}; server_name llm.test; location / {{ proxy_pass http://up; proxy_http_version 1.1;\n\
             proxy_set_header Host $host; proxy_set_header Connection \"\"; }} }} }}\n",
            folder.path().display(),
            upstream.address,
            address
        );
        std::fs::write(folder.path().join("conf"), conf).unwrap();
        let child = std::process::Command::new("nginx")
            .arg("-p")
            .arg(folder.path())
            .arg("-c")
            .arg(folder.path().join("conf"))
            .stderr(Stdio::null())
            .spawn()
            .expect("nginx is needed: apt-get install nginx");
        wait_until("nginx listens", || std::net::TcpStream::connect(address).is_ok()).await;
        Self { _folder: folder, child, address }
    }
}

impl Drop for Nginx {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[tokio::test]
async fn nginx_differs_only_in_documented_cases() {
    let witness = RecordingReplica::new().await;
    let nginx = Nginx::new(&witness.upstream).await;
    let mut wrong = Vec::new();
    for case in corpus() {
        let got = witness.send_bytes(nginx.address, &case.bytes).await;
        assert_eq!(case.ours == case.nginx, case.reason.is_empty(), "{}", case.name);
        if got != case.nginx {
            wrong.push(format!("{}\n  expected {}\n  got      {got}", case.name, case.nginx));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}
