//! Requests that mean two things: what we do with them, and what nginx does.
//!
//! Each case ends with an honest request, which shows whether the connection is still in step. A replica must never
//! see `/smuggled`. Where nginx differs the case says why.

use std::{path::PathBuf, process::Stdio, sync::Arc, time::Duration};

use http_body_util::BodyExt as _;
use parking_lot::Mutex;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
};

use crate::kit::{Bed, Upstream, service, text, until};

const LAST: &str = "GET /last HTTP/1.1\r\nHost: llm.test\r\nConnection: close\r\n\r\n";
const SMUGGLED: &str = "GET /smuggled HTTP/1.1\r\nHost: llm.test\r\nContent-Length: 0\r\n\r\n";

struct Case {
    name: &'static str,
    bytes: String,
    /// Statuses that the caller gets, then what the replica sees.
    ours: &'static str,
    nginx: &'static str,
    /// Why the two differ.
    why: &'static str,
}

/// Both do the same.
fn same(name: &'static str, bytes: impl Into<String>, ours: &'static str) -> Case {
    Case { name, bytes: bytes.into(), ours, nginx: ours, why: "" }
}

fn other(
    name: &'static str,
    bytes: impl Into<String>,
    ours: &'static str,
    nginx: &'static str,
    why: &'static str,
) -> Case {
    Case { name, bytes: bytes.into(), ours, nginx, why }
}

fn post(fields: &str, body: &str) -> String {
    format!("POST /first HTTP/1.1\r\nHost: llm.test\r\n{fields}\r\n\r\n{body}")
}

fn get(fields: &str) -> String {
    format!("GET /first HTTP/1.1\r\nHost: llm.test\r\n{fields}\r\n\r\n")
}

fn corpus() -> Vec<Case> {
    let chunked_smuggle = format!("0\r\n\r\n{SMUGGLED}");
    vec![
        same("honest", get("X: y"), "200 200 | GET /first, GET /last"),
        other(
            "CL.TE",
            post("Content-Length: 6\r\nTransfer-Encoding: chunked", &chunked_smuggle),
            "200 | POST /first",
            "400 | ",
            "we do as the standard allows: the length is dropped, the coding counts, and the connection ends",
        ),
        other(
            "TE.CL",
            post("Transfer-Encoding: chunked\r\nContent-Length: 6", &chunked_smuggle),
            "200 | POST /first",
            "400 | ",
            "as above",
        ),
        same(
            "TE.TE twice",
            post("Transfer-Encoding: chunked\r\nTransfer-Encoding: identity", &chunked_smuggle),
            "400 | ",
        ),
        other(
            "TE.TE list",
            post("Transfer-Encoding: identity, chunked", &chunked_smuggle),
            "400 | ",
            "501 | ",
            "another word for no",
        ),
        other(
            "TE unknown",
            post("Transfer-Encoding: xchunked", &chunked_smuggle),
            "400 | ",
            "501 | ",
            "another word for no",
        ),
        other(
            "TE with a tab",
            post("Transfer-Encoding:\tchunked", "0\r\n\r\n"),
            "200 200 | POST /first, GET /last",
            "501 | ",
            "a tab is white space; nginx 1.22 knows only the blank",
        ),
        other(
            "TE vertical tab",
            post("Transfer-Encoding: \u{b}chunked", &chunked_smuggle),
            "400 | ",
            "501 | ",
            "another word for no",
        ),
        same("TE space before colon", post("Transfer-Encoding : chunked", &chunked_smuggle), "400 | "),
        other(
            "TE quoted",
            post("Transfer-Encoding: \"chunked\"", &chunked_smuggle),
            "400 | ",
            "501 | ",
            "another word for no",
        ),
        same(
            "TE in HTTP/1.0",
            format!(
                "POST /first HTTP/1.0\r\nHost: llm.test\r\nTransfer-Encoding: chunked\r\n\r\n{chunked_smuggle}"
            ),
            "400 | ",
        ),
        same("CL twice, different", post("Content-Length: 0\r\nContent-Length: 84", SMUGGLED), "400 | "),
        other(
            "CL twice, same",
            post("Content-Length: 2\r\nContent-Length: 2", "hi"),
            "200 200 | POST /first +body, GET /last",
            "400 | ",
            "equal lengths mean one thing, and are sent on as one",
        ),
        same("CL list", post("Content-Length: 2, 2", "hi"), "400 | "),
        same("CL signed", post("Content-Length: +2", "hi"), "400 | "),
        same("CL negative", post("Content-Length: -1", "hi"), "400 | "),
        same("CL hexadecimal", post("Content-Length: 0x2", "hi"), "400 | "),
        same("CL too large", post("Content-Length: 18446744073709551616", "hi"), "400 | "),
        same("chunk size signed", post("Transfer-Encoding: chunked", "+2\r\nhi\r\n0\r\n\r\n"), "400 | "),
        same(
            "chunk size wraps",
            post("Transfer-Encoding: chunked", "10000000000000002\r\nhi\r\n0\r\n\r\n"),
            "400 | ",
        ),
        other(
            "chunk ends with LF",
            post("Transfer-Encoding: chunked", "2\nhi\n0\n\n"),
            "400 | ",
            "200 200 | POST /first +body, GET /last",
            "nginx reads a bare LF as the end of a line",
        ),
        same("chunk longer than said", post("Transfer-Encoding: chunked", "2\r\nhiX\r\n0\r\n\r\n"), "400 | "),
        same(
            "chunk extension",
            post("Transfer-Encoding: chunked", "2;a=b\r\nhi\r\n0\r\n\r\n"),
            "200 200 | POST /first +body, GET /last",
        ),
        same("two Hosts", get("Host: evil.test"), "400 | "),
        same("no Host", "GET /first HTTP/1.1\r\nX: y\r\n\r\n", "400 | "),
        other(
            "Host with a user",
            "GET /first HTTP/1.1\r\nHost: a@llm.test\r\n\r\n",
            "400 | ",
            "200 200 | GET /first @a@llm.test, GET /last",
            "nginx takes any letter in a host",
        ),
        same("Host with a path", "GET /first HTTP/1.1\r\nHost: llm.test/x\r\n\r\n", "400 | "),
        same("folded field", get("X: a\r\n b"), "400 | "),
        same(
            "folded first field",
            "GET /first HTTP/1.1\r\n Host: llm.test\r\nHost: llm.test\r\n\r\n",
            "400 | ",
        ),
        same(
            "absolute form",
            "GET http://llm.test/first HTTP/1.1\r\nHost: llm.test\r\n\r\n",
            "200 200 | GET /first, GET /last",
        ),
        other(
            "absolute form, other Host",
            "GET http://llm.test/first HTTP/1.1\r\nHost: evil.test\r\n\r\n",
            "400 | ",
            "200 200 | GET /first, GET /last",
            "nginx believes the target; we believe nobody who says two things",
        ),
        other(
            "authority form",
            "CONNECT llm.test:80 HTTP/1.1\r\nHost: llm.test\r\n\r\n",
            "405 | ",
            "400 | ",
            "another word for no",
        ),
        same("asterisk form", "OPTIONS * HTTP/1.1\r\nHost: llm.test\r\n\r\n", "400 | "),
        same("TRACE", "TRACE /first HTTP/1.1\r\nHost: llm.test\r\n\r\n", "405 | "),
        same(
            "CR LF in the path, encoded",
            "GET /first%0d%0aX:%20y HTTP/1.1\r\nHost: llm.test\r\n\r\n",
            "200 200 | GET /first%0d%0aX:%20y, GET /last",
        ),
        same("bare CR in the path", "GET /first\rX HTTP/1.1\r\nHost: llm.test\r\n\r\n", "400 | "),
        same("space in the path", "GET /fir st HTTP/1.1\r\nHost: llm.test\r\n\r\n", "400 | "),
        same("NUL in a field", get("X: a\0b"), "400 | "),
        same("bare CR in a field", get("X: a\rY: b"), "400 | "),
        same(
            "bare LF as line end",
            "GET /first HTTP/1.1\nHost: llm.test\n\n",
            "200 200 | GET /first, GET /last",
        ),
        other(
            "no colon",
            get("Nonsense"),
            "400 | ",
            "200 200 | GET /first, GET /last",
            "nginx drops lines that are no field",
        ),
        same("empty name", get(": x"), "400 | "),
        other(
            "two spaces in the request line",
            "GET  /first HTTP/1.1\r\nHost: llm.test\r\n\r\n",
            "400 | ",
            "200 200 | GET /first, GET /last",
            "nginx is lenient",
        ),
        other("HTTP/0.9", "GET /first\r\n\r\n", "400 | ", " | GET /first", "nginx still speaks it"),
        other(
            "HTTP/3.0",
            "GET /first HTTP/3.0\r\nHost: llm.test\r\n\r\n",
            "400 | ",
            "505 | ",
            "another word for no",
        ),
        same(
            "body on GET",
            format!(
                "GET /first HTTP/1.1\r\nHost: llm.test\r\nContent-Length: {}\r\n\r\n{SMUGGLED}",
                SMUGGLED.len()
            ),
            "200 200 | GET /first +body, GET /last",
        ),
        same(
            "GET with a chunked body",
            "GET /first HTTP/1.1\r\nHost: llm.test\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nhi\r\n0\r\n\r\n",
            "200 200 | GET /first +body, GET /last",
        ),
        other(
            "h2c upgrade",
            get("Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAAP__"),
            "200 200 | GET /first, GET /last",
            "200 200 | GET /first http2-settings=AAMAAABkAAQAAP__, GET /last",
            "nginx passes the settings on",
        ),
        other(
            "upgrade that is not answered",
            get(&format!(
                "Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 777\r\n\r\n{}",
                LAST.replace("/last", "/second").replace("Connection: close\r\n", "").trim_end()
            )),
            "200 200 200 | GET /first upgrade=websocket, GET /second, GET /last",
            "200 200 200 | GET /first, GET /second, GET /last",
            "nginx passes upgrades on only when told to",
        ),
        other(
            "upgrade with a body",
            post(
                &format!("Connection: Upgrade\r\nUpgrade: websocket\r\nContent-Length: {}", SMUGGLED.len()),
                SMUGGLED,
            ),
            "400 | ",
            "200 200 | POST /first +body, GET /last",
            "nginx drops the wish and passes the body on",
        ),
        same(
            "Connection names Content-Length",
            post("Connection: Content-Length\r\nContent-Length: 2", "hi"),
            "200 200 | POST /first +body, GET /last",
        ),
        same(
            "Connection names Host",
            get("Connection: Host, X-Forwarded-For"),
            "200 200 | GET /first, GET /last",
        ),
    ]
}

/// A replica that remembers what it was asked.
struct Witness {
    upstream: Upstream,
    seen: Arc<Mutex<Vec<String>>>,
}

impl Witness {
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
                // A request that broke off is not one that was passed on.
                let Ok(body) = request.into_body().collect().await else { return text("broken") };
                if !body.to_bytes().is_empty() {
                    line.push_str(" +body");
                }
                list.lock().push(line);
                text("ok")
            }
        })
        .await;
        Self { upstream, seen }
    }

    /// What a caller gets for these bytes, and what is seen of them here.
    async fn try_on(&self, address: std::net::SocketAddr, bytes: &str) -> String {
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
async fn a_request_that_means_two_things_is_never_passed_on() {
    let witness = Witness::new().await;
    let bed = Bed::new(vec![service(vec![witness.upstream.replica("a")])]).await;
    let mut wrong = Vec::new();
    for case in corpus() {
        let got = witness.try_on(bed.address, &case.bytes).await;
        if got != case.ours || got.contains("smuggled") {
            wrong.push(format!("{}\n  expected {}\n  got      {got}", case.name, case.ours));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// Debian's nginx as a plain proxy with connections kept to the replica.
struct Nginx {
    folder: PathBuf,
    child: std::process::Child,
    address: std::net::SocketAddr,
}

impl Nginx {
    async fn new(upstream: &Upstream) -> Self {
        let folder = std::env::temp_dir().join(format!("windlass-nginx-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let address = crate::kit::nobody().await;
        let conf = format!(
            "daemon off; master_process off; pid {0}/pid; error_log {0}/error.log;\n\
             events {{ worker_connections 256; }}\n\
             http {{ access_log off; client_body_temp_path {0}/b; proxy_temp_path {0}/p; fastcgi_temp_path {0}/f;\n\
             uwsgi_temp_path {0}/u; scgi_temp_path {0}/s;\n\
             upstream up {{ server {1}; keepalive 16; }}\n\
             server {{ listen {2}; server_name llm.test; location / {{ proxy_pass http://up; proxy_http_version 1.1;\n\
             proxy_set_header Host $host; proxy_set_header Connection \"\"; }} }} }}\n",
            folder.display(),
            upstream.address,
            address
        );
        std::fs::write(folder.join("conf"), conf).unwrap();
        let child = std::process::Command::new("nginx")
            .arg("-p")
            .arg(&folder)
            .arg("-c")
            .arg(folder.join("conf"))
            .stderr(Stdio::null())
            .spawn()
            .expect("nginx is needed: apt-get install nginx");
        until("nginx listens", || std::net::TcpStream::connect(address).is_ok()).await;
        Self { folder, child, address }
    }
}

impl Drop for Nginx {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}

#[tokio::test]
async fn nginx_differs_only_where_we_say_so() {
    let witness = Witness::new().await;
    let nginx = Nginx::new(&witness.upstream).await;
    let mut wrong = Vec::new();
    for case in corpus() {
        let got = witness.try_on(nginx.address, &case.bytes).await;
        assert_eq!(case.ours == case.nginx, case.why.is_empty(), "{}", case.name);
        if got != case.nginx {
            wrong.push(format!("{}\n  expected {}\n  got      {got}", case.name, case.nginx));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}
