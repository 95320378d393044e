//! Terminals of the web UI: a shell in a job, over a WebSocket.

use serde_json::{Value, json};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
    time::timeout,
};
use windlass_testkit::wait::{TIMEOUT, eventually_ok_async};

use crate::test_env::{HostMode, TestEnv, newest_submission, small_task_config};

const BINARY: u8 = 2;
const CLOSE: u8 = 8;
/// Code with which the server closes the terminal of a user who lost the rights to it.
const RIGHTS_LOST: u16 = 4403;

/// A WebSocket, as far as this test needs one.
struct Terminal(TcpStream);

impl Terminal {
    /// Returns the first line of the response if the server does not open a terminal.
    async fn open(env: &TestEnv, token: &str, run: &str, job: &Value) -> Result<Self, String> {
        let mut stream = TcpStream::connect(env.address()).await.unwrap();
        let head = format!(
            "GET /api/project/main/runs/terminal?run_name={run}&job_submission_id={} HTTP/1.1\r\nHost: a\r\n\
             Authorization: Bearer {token}\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n\
             Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Protocol: windlass.terminal.v1\r\n\r\n",
            job.as_str().unwrap()
        );
        stream.write_all(head.as_bytes()).await.unwrap();
        let mut seen = Vec::new();
        while !seen.ends_with(b"\r\n\r\n") {
            seen.push(timeout(TIMEOUT, stream.read_u8()).await.unwrap().unwrap());
        }
        let head = String::from_utf8(seen).unwrap();
        if head.starts_with("HTTP/1.1 101 ") { Ok(Self(stream)) } else { Err(head) }
    }

    /// Types a short text.
    async fn send(&mut self, text: &str) {
        let len = u8::try_from(text.len()).unwrap();
        assert!(len < 126);
        // With a mask of zeros.
        let frame = [&[0x80 | BINARY, 0x80 | len, 0, 0, 0, 0], text.as_bytes()].concat();
        self.0.write_all(&frame).await.unwrap();
    }

    /// Kind and content of the next message.
    async fn next(&mut self) -> (u8, Vec<u8>) {
        let reading = async {
            let kind = self.0.read_u8().await? & 0x0f;
            let len = match self.0.read_u8().await? {
                126 => u64::from(self.0.read_u16().await?),
                127 => self.0.read_u64().await?,
                short => u64::from(short),
            };
            let mut content = vec![0; usize::try_from(len).unwrap()];
            self.0.read_exact(&mut content).await?;
            Ok::<_, std::io::Error>((kind, content))
        };
        timeout(TIMEOUT, reading).await.expect("the terminal is silent").unwrap()
    }
}

#[tokio::test]
async fn a_terminal_is_closed_when_its_user_loses_the_rights_to_the_job() {
    let mut env = TestEnv::confined(HostMode::Processes).await;
    let made = env.post("/api/users/create", &json!({"username": "mel", "global_role": "user"})).await;
    let token = made["creds"]["token"].as_str().unwrap().to_owned();
    let role = |role: &str| json!({"members": [{"username": "mel", "project_role": role}]});
    env.post("/api/projects/main/add_members", &role("manager")).await;
    let mut job = small_task_config("open", &["echo up; sleep 600"]);
    job.as_object_mut().unwrap().remove("user");
    env.apply(&job).await;
    env.says("open", "up").await;
    let run = env.run("open").await;
    let id = newest_submission(&run)["id"].clone();
    let mut terminal =
        eventually_ok_async("a terminal opens", async || Terminal::open(&env, &token, "open", &id).await)
            .await;
    terminal.send("echo sum-$((20 + 3))\n").await;
    let mut shown = String::new();
    while !shown.contains("sum-23") {
        let (kind, content) = terminal.next().await;
        if kind == BINARY {
            shown += &String::from_utf8_lossy(&content);
        }
    }

    // The interval at which the server checks is two seconds.
    env.post("/api/projects/main/add_members", &role("user")).await;
    let code = loop {
        let (kind, content) = terminal.next().await;
        if kind == CLOSE {
            break u16::from_be_bytes([content[0], content[1]]);
        }
    };
    assert_eq!(code, RIGHTS_LOST);
    let refused = Terminal::open(&env, &token, "open", &id).await.err().unwrap();
    assert!(refused.starts_with("HTTP/1.1 403 "), "{refused}");
    env.stop("open", true).await;
    env.reaches("open", &["terminated"]).await;
}
