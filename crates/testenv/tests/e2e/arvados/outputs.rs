//! Outputs of containers in an object store: the server of `moto`.

use std::{
    net::TcpStream,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::Duration,
};

use serde_json::json;
use windlass_testenv::{queue_env::QueueEnv, server::binary_path};
use windlass_testkit::{ports, wait::eventually};

const SERVE_SCRIPT: &str = r#"
import sys
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import run_simple
run_simple("127.0.0.1", int(sys.argv[1]), DomainDispatcherApplication(create_backend_app), threaded=True)
"#;
/// Creates the bucket, or prints the name and the content of every object.
const CLIENT_SCRIPT: &str = r#"
import boto3, hashlib, sys
url, action = sys.argv[1:]
s3 = boto3.client("s3", endpoint_url=url, region_name="us-east-1", aws_access_key_id="id", aws_secret_access_key="key")
if action == "create":
    s3.create_bucket(Bucket="results")
else:
    for one in s3.list_objects_v2(Bucket="results").get("Contents", []):
        body = s3.get_object(Bucket="results", Key=one["Key"])["Body"].read()
        print(one["Key"], len(body), hashlib.md5(body).hexdigest())
"#;

struct ObjectStore {
    child: Child,
    url: String,
}

impl ObjectStore {
    fn start() -> Self {
        let port = ports::reserve_free_port();
        let mut command = Command::new(python());
        command.args(["-c", SERVE_SCRIPT, &port.to_string()]).stdin(Stdio::null());
        let child = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
        let store = Self { child, url: format!("http://127.0.0.1:{port}") };
        eventually("the object store listens", || TcpStream::connect(("127.0.0.1", port)).is_ok());
        store.run("create");
        store
    }

    fn run(&self, action: &str) -> String {
        let run = Command::new(python()).args(["-c", CLIENT_SCRIPT, &self.url, action]).output().unwrap();
        assert!(run.status.success(), "{}", String::from_utf8_lossy(&run.stderr));
        String::from_utf8(run.stdout).unwrap()
    }
}

impl Drop for ObjectStore {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn python() -> PathBuf {
    let dir = std::env::var_os("WINDLASS_TEST_MOTO");
    Path::new(&dir.expect("WINDLASS_TEST_MOTO: `cargo xtask test` makes it")).join("bin/python")
}

/// Program whose output has a nested file, a file of several parts and a link.
const PROGRAM: &str = "mkdir 'out/a b'; echo result > 'out/a b/file+1'; head -c 40000000 /dev/zero > out/large; \
                       ln -s /etc/passwd out/link";

#[tokio::test(flavor = "multi_thread")]
async fn container_output_is_kept_in_an_object_store() {
    let store = tokio::task::spawn_blocking(ObjectStore::start).await.unwrap();
    let mut ground = QueueEnv::start("bucket").await;
    let token = ground.token("token").await;
    let keys = ground.dir.join("keys");
    std::fs::write(&keys, "[default]\naws_access_key_id = id\naws_secret_access_key = key\n").unwrap();
    let url = format!("s3://results/of/queue?endpoint={}&credentials={}", store.url, keys.display());
    ground.start_local_dispatcher_with(&token, "attempts", &["--outputs", &url]);
    let uuid = ground.submit(&["sh", "-c", PROGRAM], json!({})).await;
    let record = ground.ended(&uuid).await;
    assert_eq!((&record["state"], &record["exit_code"]), (&json!("Complete"), &json!(0)), "{record}");
    assert_eq!(record["output"], format!("s3://results/of/queue/{uuid}.1"), "{record}");
    let warning = record["runtime_status"]["warning"].as_str().unwrap_or_default();
    assert!(warning.contains("1 entries of `output_path` were not stored"), "{record}");
    let listed = tokio::task::spawn_blocking(move || store.run("list")).await.unwrap();
    let expected = format!(
        "of/queue/{uuid}.1/a b/file+1 7 {}\nof/queue/{uuid}.1/large 40000000 {}\n",
        "a5b1e83cd0273aefdf9cca2994b97c77", "48e9a108a3ec623652e7988af2f88867"
    );
    assert_eq!(listed, expected);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_dispatcher_refuses_outputs_that_it_cannot_store() {
    let ground = QueueEnv::start("refused").await;
    let token = ground.token("token").await;
    let dir = ground.dir.clone();
    let server = format!("http://{}", ground.address());
    let start = move |kind: &'static str, url: String| {
        let mut command = Command::new(binary_path("windlass").unwrap());
        command.args(["dispatch", kind, "--once", "--server", &server, "--token-file"]).arg(&token);
        command.arg("--agent").arg(binary_path("windlass-agent").unwrap()).args(["--outputs", &url]);
        if kind == "local" {
            command.arg("--dir").arg(dir.join("attempts"));
        }
        command.env_remove("AWS_ACCESS_KEY_ID").env("NO_COLOR", "1");
        let refused = command.output().unwrap();
        assert!(!refused.status.success(), "{refused:?}");
        String::from_utf8_lossy(&refused.stderr).into_owned()
    };
    let closed = ports::reserve_free_port();
    let messages = tokio::task::spawn_blocking(move || {
        [
            start("local", "gs://results".to_owned()),
            start("local", "s3://results".to_owned()),
            start("slurm", format!("s3://results?endpoint=http://127.0.0.1:{closed}")),
        ]
    });
    let messages = tokio::time::timeout(Duration::from_secs(60), messages).await.unwrap().unwrap();
    let expected = [
        "expected a directory or `s3://BUCKET/PREFIX?endpoint=URL`",
        "environment variable `AWS_ACCESS_KEY_ID` is not set",
        "requires `credentials=FILE` in the URL",
    ];
    for (message, expected) in messages.iter().zip(expected) {
        assert!(message.contains(expected), "{message}");
    }
}
