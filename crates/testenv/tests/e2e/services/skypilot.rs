//! Services from SkyPilot files, with the commands of `windlass serve`.

use std::{
    path::PathBuf,
    process::Output,
    time::{Duration, Instant},
};

use serde_json::{Value, json};
use windlass_testenv::services::{ConstantTraffic, ServiceCaller};
use windlass_testkit::lab::Lab;

use super::wait_for_answer;
use crate::test_env::{HostMode, TestEnv};

const TIMEOUT: Duration = Duration::from_secs(120);
const URL_PATH: &str = "/proxy/services/main/web-1/";
const SECRET: &str = "canary-4712";

/// Answers with its replica, the length of its secret and what its setup prepared.
const SERVER: &str = r#"
import http.server, os, sys
class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def answer(self):
        length = int(self.headers.get("content-length") or 0)
        body = self.rfile.read(length).decode()
        if self.path == "/health" and body != '{"model":"small"}':
            self.send_response(500)
            self.send_header("content-length", "0")
            self.end_headers()
            return
        env = os.environ
        text = "version=%s replica=%s service=%s token=%d shown=%s prepared=%s\n" % (
            sys.argv[1], env["SKYPILOT_SERVE_REPLICA_ID"], env["SKYPILOT_SERVICE_NAME"], len(env["TOKEN"]),
            env["SHOWN"], open("prepared.txt").read().strip())
        self.send_response(200)
        self.send_header("content-length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())
    do_GET = answer
    do_POST = answer
    def log_message(self, *args): pass
http.server.ThreadingHTTPServer(("", 8000), Handler).serve_forever()
"#;

fn file(version: u32) -> String {
    format!(
        "name: web_1\nworkdir: code\nenvs: {{MODEL: small}}\nsecrets: {{TOKEN: null, SHOWN: in-the-file}}\nservice:\n  \
         readiness_probe:\n    path: /health\n    post_data: {{model: $MODEL}}\n    initial_delay_seconds: 60\n  \
         replicas: 2\nresources: {{ports: 8000}}\nsetup: echo ready > prepared.txt\nrun: |\n  echo \"replica \
         $SKYPILOT_SERVE_REPLICA_ID of $SKYPILOT_SERVICE_NAME\"\n  exec python3 server.py {version}\n"
    )
}

struct Serve {
    env: TestEnv,
    dir: PathBuf,
}

impl Serve {
    fn run(&self, args: &[&str]) -> Output {
        self.env.windlass(&self.dir, args)
    }

    #[track_caller]
    fn succeed(&self, args: &[&str]) -> (String, String) {
        let output = self.run(args);
        let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        assert!(output.status.success(), "{args:?}: {out}{err}\n{}", self.env.server_log());
        (out.into_owned(), err.into_owned())
    }

    fn status(&self) -> Value {
        let (out, _) = self.succeed(&["serve", "status", "-o", "json"]);
        serde_json::from_str::<Value>(&out).unwrap()["services"].clone()
    }

    #[track_caller]
    fn wait_until(&self, what: &str, holds: impl Fn(&Value) -> bool) -> Value {
        let start = Instant::now();
        loop {
            let seen = self.status();
            if holds(&seen) {
                return seen;
            }
            assert!(start.elapsed() < TIMEOUT, "not so: {what}\n{seen:#}\n{}", self.env.server_log());
            std::thread::sleep(Duration::from_millis(200));
        }
    }

    /// Waits until all replicas of a version are ready and no others exist.
    #[track_caller]
    fn wait_for_version(&self, version: i64) -> Value {
        let is_new = |replica: &Value| replica["version"] == version && replica["status"] == "READY";
        self.wait_until("both replicas are ready", |services| {
            let replicas = services[0]["replicas"].as_array();
            replicas.is_some_and(|all| {
                all.iter().filter(|one| is_new(one)).count() == 2
                    && all.iter().all(|one| is_new(one) || one["status"] == "SHUTDOWN")
            })
        })
    }
}

#[tokio::test]
async fn a_skypilot_service_is_started_updated_under_traffic_and_stopped() {
    let lab = Lab::start(4).unwrap();
    let mut env = TestEnv::new(HostMode::None).await;
    env.create_lab_fleet(&lab, lab.hosts(), 1).await;
    let dir = env.home().join("work");
    std::fs::create_dir_all(dir.join("code")).unwrap();
    std::fs::write(dir.join("code/server.py"), SERVER).unwrap();
    std::fs::write(dir.join("web.yaml"), file(1)).unwrap();
    let caller = ServiceCaller::new(env.address());
    let mut serve = Serve { env, dir };
    let token = format!("TOKEN={SECRET}");

    let (out, err) = serve.succeed(&["serve", "up", "-y", "--secret", &token, "web.yaml"]);
    assert_eq!(out, "web-1\n", "{err}");
    assert!(err.contains("The name of the service is `web-1`."), "{err}");
    let answer = wait_for_answer(&mut serve.env, &caller, URL_PATH, 200, "version=1").await.body;
    assert!(answer.contains("service=web-1 token=11 shown=in-the-file prepared=ready"), "{answer}");
    let seen = serve.wait_for_version(1);
    assert_eq!((&seen[0]["name"], &seen[0]["status"]), (&json!("web-1"), &json!("READY")), "{seen:#}");
    assert_eq!((&seen[0]["ready_replicas"], &seen[0]["desired_replicas"]), (&json!(2), &json!(2)));
    let ids: Vec<i64> =
        seen[0]["replicas"].as_array().unwrap().iter().map(|one| one["id"].as_i64().unwrap()).collect();
    assert_eq!(ids, [1, 2]);
    let (logs, _) = serve.succeed(&["serve", "logs", "--no-follow", "--tail", "1", "web-1", "2"]);
    assert_eq!(logs, "replica 2 of web-1\n");
    let (table, _) = serve.succeed(&["serve", "status", "web-1"]);
    assert!(table.contains("READY") && table.contains("2/2") && table.contains(URL_PATH), "{table}");
    let (endpoint, _) = serve.succeed(&["serve", "status", "--endpoint", "web-1"]);
    assert_eq!(endpoint, format!("http://{}{URL_PATH}\n", serve.env.address()));

    // The values of secrets are nowhere but in the secrets of the project, which only managers may use.
    let (runs, _) = serve.succeed(&["ps", "-o", "json"]);
    for text in [runs, serve.env.server_log()] {
        assert!(!text.contains(SECRET) && !text.contains("in-the-file"), "{text}");
    }
    let (secrets, _) = serve.succeed(&["secret", "list", "-o", "json"]);
    let secrets: Value = serde_json::from_str(&secrets).unwrap();
    let named: Vec<(&str, &str)> = secrets["secrets"]
        .as_array()
        .unwrap()
        .iter()
        .map(|one| (one["name"].as_str().unwrap(), one["users"].as_str().unwrap()))
        .collect();
    assert_eq!(named, [("serve_web_1__SHOWN", "managers"), ("serve_web_1__TOKEN", "managers")]);

    let again = serve.run(&["serve", "up", "-y", "--secret", &token, "web.yaml"]);
    assert!(String::from_utf8_lossy(&again.stderr).contains("serve update web-1 FILE"), "{again:?}");
    let (_, err) = serve.succeed(&["serve", "update", "-y", "--secret", &token, "web-1", "web.yaml"]);
    assert!(err.contains("is already active and unchanged"), "{err}");

    // What cannot change under traffic is refused, and not interrupted.
    let labelled = file(1).replace("{ports: 8000}", "{ports: 8000, labels: {team: a}}");
    std::fs::write(serve.dir.join("labelled.yaml"), labelled).unwrap();
    let refused = serve.run(&["serve", "update", "-y", "--secret", &token, "web-1", "labelled.yaml"]);
    assert!(!refused.status.success(), "{refused:?}");
    let err = String::from_utf8_lossy(&refused.stderr);
    assert!(err.contains("`configuration.tags` cannot be changed in place"), "{err}");

    // Another version, and another value of a secret.
    let traffic = ConstantTraffic::start(&caller, URL_PATH);
    std::fs::write(serve.dir.join("web.yaml"), file(2)).unwrap();
    let args = [
        "serve",
        "update",
        "-y",
        "--mode",
        "blue_green",
        "--secret",
        "TOKEN=12",
        "--env",
        "MODEL=small",
        "web-1",
        "web.yaml",
    ];
    let (_, err) = serve.succeed(&args);
    assert!(err.contains("can be updated in place"), "{err}");
    let seen = serve.wait_for_version(2);
    assert_eq!(seen[0]["version"], 2, "{seen:#}");
    let body = caller.get(URL_PATH).unwrap().body;
    assert!(body.contains("version=2") && body.contains("token=2 "), "{body}");
    traffic.goes_on();
    let (_, failed) = traffic.end();
    assert!(failed.is_empty(), "{failed:#?}\n{}", serve.env.server_log());

    // Without authentication, by `apply`, which keeps the name of the file.
    let open = file(2)
        .replace("name: web_1", "name: open")
        .replace("TOKEN: null", "TOKEN: x")
        .replace("replicas: 2", "replicas: 1");
    std::fs::write(serve.dir.join("open.yaml"), open).unwrap();
    serve.succeed(&["serve", "up", "-y", "--no-auth", "-n", "bare", "open.yaml"]);
    let anyone = ServiceCaller::new(serve.env.address()).with_token(None);
    wait_for_answer(&mut serve.env, &anyone, "/proxy/services/main/bare/", 200, "service=bare").await;
    // An update keeps it.
    let (_, err) = serve.succeed(&["serve", "update", "-y", "bare", "open.yaml"]);
    assert!(err.contains("is already active and unchanged"), "{err}");
    let (_, err) = serve.succeed(&["serve", "down", "-y", "bare"]);
    assert!(err.contains("`bare` has ended."), "{err}");
    serve.succeed(&["apply", "-y", "-d", "-f", "open.yaml"]);
    wait_for_answer(&mut serve.env, &caller, "/proxy/services/main/open/", 200, "service=open").await;

    serve.succeed(&["serve", "down", "-y", "--all"]);
    assert_eq!(serve.status(), json!([]));
    let (secrets, _) = serve.succeed(&["secret", "list", "-o", "name"]);
    assert_eq!(secrets, "");
    let gone = serve.run(&["serve", "update", "-y", "--secret", &token, "web-1", "web.yaml"]);
    assert!(String::from_utf8_lossy(&gone.stderr).contains("no active service named `web-1`"), "{gone:?}");
}
