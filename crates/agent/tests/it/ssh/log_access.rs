//! Access of a user who is logged in to a task to its runner: the job's output, as dstack's CLI follows it.

use std::{
    io::{Read, Write},
    net::{SocketAddr, TcpListener, TcpStream},
    process::Stdio,
};

use futures_util::StreamExt;
use tokio_tungstenite::{client_async, tungstenite::Message};
use windlass_api::agent::RUNNER_PORT;
use windlass_testkit::wait::TIMEOUT;

use super::{KillOnDrop, client, make_key, spawn, wait_until};
use crate::support::{
    TempDir,
    runner::{Runner, RunnerSetup, script},
    temp_dir,
};

/// A task's runner, and a client that forwards a local port into the task.
struct ForwardedRunner {
    runner: Runner,
    local: SocketAddr,
    _client: KillOnDrop,
    _keys: TempDir,
}

impl ForwardedRunner {
    fn new(target: &str, change: impl FnOnce(&mut RunnerSetup)) -> Self {
        let keys = temp_dir("people").unwrap();
        make_key(&keys.path().join("id"), "ed25519");
        let mut setting = RunnerSetup::new();
        setting.config.ssh_listen = Some("127.0.0.1:0".to_owned());
        setting.config.ssh_authorized_keys =
            vec![std::fs::read_to_string(keys.path().join("id.pub")).unwrap()];
        change(&mut setting);
        let runner = setting.start();
        let port = wait_until("the SSH server has a port", || {
            std::fs::read_to_string(runner.run_dir().join("ssh.port")).ok()?.trim().parse().ok()
        });
        let local = SocketAddr::from(([127, 0, 0, 1], windlass_testkit::ports::reserve_free_port()));
        let mut ssh = client(keys.path(), "ssh", "-p", port);
        ssh.args(["-N", "-o", "ExitOnForwardFailure=yes", "-L", &format!("{}:{target}", local.port())]);
        let client = KillOnDrop(spawn(ssh.arg("root@127.0.0.1").stdin(Stdio::null())));
        wait_until("the client forwards", || TcpStream::connect(local).ok());
        Self { runner, local, _client: client, _keys: keys }
    }

    /// Makes one call without a token; returns its status and body.
    fn call(&self, method: &str, path: &str) -> (u16, String) {
        let mut stream = TcpStream::connect(self.local).unwrap();
        stream.set_read_timeout(Some(TIMEOUT)).unwrap();
        write!(stream, "{method} {path} HTTP/1.0\r\nHost: localhost\r\nContent-Length: 0\r\n\r\n").unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        let (head, body) = answer.split_once("\r\n\r\n").unwrap_or_else(|| panic!("{path}: {answer:?}"));
        (head.split(' ').nth(1).unwrap().parse().unwrap(), body.to_owned())
    }

    /// Returns everything that a tailer receives, to its end.
    async fn tail(&self, query: &str) -> String {
        tail(self.local, query).await
    }
}

/// Returns everything that a tailer on a forwarded port receives.
pub(super) async fn tail(local: SocketAddr, query: &str) -> String {
    let stream = tokio::net::TcpStream::connect(local).await.unwrap();
    let url = format!("ws://localhost:{}/logs_ws{query}", local.port());
    let (mut socket, _) = client_async(url, stream).await.unwrap();
    let mut all = Vec::new();
    while let Some(message) = tokio::time::timeout(TIMEOUT, socket.next()).await.unwrap() {
        match message.unwrap() {
            Message::Binary(bytes) => all.extend(bytes),
            Message::Close(frame) => {
                assert_eq!(u16::from(frame.unwrap().code), 1000);
                return String::from_utf8(all).unwrap();
            }
            other @ (Message::Text(_) | Message::Frame(_)) => panic!("{other:?}"),
            Message::Ping(_) | Message::Pong(_) => {}
        }
    }
    panic!("the tail broke off after {} bytes", all.len())
}

#[tokio::test]
async fn o7_output_can_be_followed_over_ssh_to_its_last_byte() {
    let mut runner = ForwardedRunner::new(&format!("localhost:{RUNNER_PORT}"), |_| {});
    runner.runner.go(&script(
        "echo begun; while ! [ -e go ]; do sleep 0.02; done; i=0
        while [ $i -lt 20000 ]; do echo line $i; i=$((i+1)); done; exit 3",
    ));
    runner.runner.wait_printed("begun");
    let go = runner.runner.work().join("go");
    let all = tokio::join!(runner.tail("?start_time=2000-01-01T00:00:00Z"), runner.tail(""), async {
        std::fs::write(go, "").unwrap();
    });
    // The server has all output as well: from here on the runner only waits for tailers.
    let kept = runner.runner.log_text();
    assert!(kept.ends_with("line 19999\n"), "{}", kept.len());
    assert!(all.0 == kept && all.1 == kept, "{} and {} of {} bytes", all.0.len(), all.1.len(), kept.len());
    runner.runner.read_all();
    assert_eq!(runner.runner.exited(), 3);
}

#[test]
fn logged_in_users_can_read_the_log_and_nothing_else() {
    for host in ["localhost", "127.0.0.1", "[::1]"] {
        let runner = ForwardedRunner::new(&format!("{host}:{RUNNER_PORT}"), |_| {});
        runner.runner.go(&script("echo on; sleep 600"));
        runner.runner.wait_printed("on");
        let (status, body) = runner.call("GET", "/api/healthcheck");
        assert_eq!(status, 200);
        assert!(body.contains("\"service\":\"dstack-runner\""), "{body}");
        let closed = [
            ("GET", "/api/pull"),
            ("GET", "/api/logs"),
            ("GET", "/api/metrics"),
            ("POST", "/api/logs/read?offset=3"),
            ("POST", "/api/submit"),
            ("POST", "/api/run"),
            ("POST", "/api/stop"),
            ("POST", "/api/upload_code"),
        ];
        for (method, path) in closed {
            assert_eq!(runner.call(method, path).0, 404, "{method} {path}");
        }
        assert_eq!(runner.runner.states().len(), 1, "the job goes on");
    }
}

#[test]
fn the_runner_port_is_forwarded_if_the_runner_listens_on_it() {
    // A loopback address that is not used otherwise.
    let listener = TcpListener::bind(("127.9.9.9", RUNNER_PORT)).unwrap();
    std::thread::spawn(move || {
        for mut stream in listener.incoming().flatten() {
            let _ = stream.write_all(b"HTTP/1.0 418 a real port\r\n\r\nreal");
        }
    });
    let target = format!("127.9.9.9:{RUNNER_PORT}");
    let compatible = ForwardedRunner::new(&target, |setting| {
        setting.config.compat_http = Some(format!("127.8.8.8:{RUNNER_PORT}"))
    });
    let message = wait_until("the port answers", || {
        let mut text = String::new();
        TcpStream::connect(compatible.local).unwrap().read_to_string(&mut text).ok()?;
        Some(text).filter(|text| !text.is_empty())
    });
    assert!(message.ends_with("real"), "{message}");
    let own = ForwardedRunner::new(&target, |_| {});
    assert_eq!(own.call("GET", "/api/healthcheck").0, 200);
}
