//! An independent object store: the server of `moto`, which checks signatures with Amazon's library.

use std::{
    net::TcpStream,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use windlass_server::logs::objects::s3::{S3Bucket, S3Credentials, S3Location};
use windlass_testkit::{TempDir, temp_dir};

const BUCKET: &str = "logs-of-jobs";
const REGION: &str = "us-east-1";
/// It is a large program on a busy machine.
const START_TIMEOUT: Duration = Duration::from_secs(60);
/// Number of unchecked calls, with which [`SET_UP_SCRIPT`] creates the user whose calls are checked.
const UNCHECKED_CALLS: &str = "4";

/// Serves one call at a time: `moto` checks whether a name exists and writes in two steps, between which another call
/// may come; S3 guarantees that none does.
const SERVE_SCRIPT: &str = r#"
import sys, threading
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import run_simple
port, certificate = int(sys.argv[1]), tuple(sys.argv[2:]) or None
app, turn = DomainDispatcherApplication(create_backend_app), threading.Lock()
def serve(environ, start_response):
    with turn:
        return list(app(environ, start_response))
run_simple("127.0.0.1", port, serve, threaded=True, ssl_context=certificate)
"#;

/// Creates a user who may use the store, and the bucket; prints the user's key.
const SET_UP_SCRIPT: &str = r#"
import boto3, json, sys
url, region, bucket, roots = sys.argv[1:]
at = dict(endpoint_url=url, region_name=region, aws_access_key_id="any", aws_secret_access_key="any", verify=roots)
iam = boto3.client("iam", **at)
iam.create_user(UserName="logs")
allowed = {"Version": "2012-10-17", "Statement": [{"Effect": "Allow", "Action": "s3:*", "Resource": "*"}]}
iam.put_user_policy(UserName="logs", PolicyName="logs", PolicyDocument=json.dumps(allowed))
key = iam.create_access_key(UserName="logs")["AccessKey"]
boto3.client("s3", **at).create_bucket(Bucket=bucket)
print(key["AccessKeyId"], key["SecretAccessKey"])
"#;

/// Prints the name, length and content after the header of every object.
const LIST_SCRIPT: &str = r#"
import boto3, sys
url, region, bucket, roots, key, secret = sys.argv[1:]
s3 = boto3.client("s3", endpoint_url=url, region_name=region, aws_access_key_id=key, aws_secret_access_key=secret, verify=roots)
for one in s3.list_objects_v2(Bucket=bucket).get("Contents", []):
    body = s3.get_object(Bucket=bucket, Key=one["Key"])["Body"].read()
    print(one["Key"], one["Size"], body[12:].decode())
"#;

#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum S3Transport {
    Tcp,
    Tls,
}

/// The server ends when this is dropped.
pub(crate) struct RealS3 {
    child: Child,
    port: u16,
    over: S3Transport,
    key: (String, String),
    home: TempDir,
}

/// Path of a program in the Python environment of the tests.
fn moto_program(name: &str) -> PathBuf {
    let dir = std::env::var_os("WINDLASS_TEST_MOTO");
    let dir =
        dir.expect("WINDLASS_TEST_MOTO names no Python environment with moto; `cargo xtask test` makes one");
    Path::new(&dir).join("bin").join(name)
}

fn run_command(command: &mut Command) -> String {
    let output = command.stdin(Stdio::null()).output().unwrap();
    assert!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

/// Creates an authority, and a certificate for this machine.
fn create_certificates(dir: &Path) {
    let script = "set -e
openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=voucher -keyout ca.key -out ca.pem
openssl req -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -subj /CN=store -keyout key.pem -out request
printf 'subjectAltName=IP:127.0.0.1\\nbasicConstraints=CA:FALSE\\n' > extensions
openssl x509 -req -in request -CA ca.pem -CAkey ca.key -CAcreateserial -days 2 -extfile extensions -out cert.pem";
    run_command(Command::new("sh").args(["-c", script]).current_dir(dir));
}

impl RealS3 {
    pub(crate) async fn start(over: S3Transport) -> Self {
        // The wait blocks a thread: nothing else happens in the test.
        tokio::task::spawn_blocking(move || Self::start_blocking(over)).await.unwrap()
    }

    fn start_blocking(over: S3Transport) -> Self {
        let home = temp_dir("logs").unwrap();
        create_certificates(home.path());
        let port = windlass_testkit::ports::reserve_free_port();
        let mut command = Command::new(moto_program("python"));
        command
            .args(["-c", SERVE_SCRIPT, &port.to_string()])
            .env("INITIAL_NO_AUTH_ACTION_COUNT", UNCHECKED_CALLS);
        if over == S3Transport::Tls {
            command.args(["cert.pem", "key.pem"]);
        }
        command.current_dir(home.path()).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        let child = command.spawn().unwrap();
        let mut real = Self { child, port, over, key: (String::new(), String::new()), home };
        let begun = Instant::now();
        while TcpStream::connect(("127.0.0.1", port)).is_err() {
            assert!(real.child.try_wait().unwrap().is_none(), "the object store ended early");
            assert!(begun.elapsed() < START_TIMEOUT, "the object store does not answer");
            std::thread::sleep(Duration::from_millis(20));
        }
        let message = real.run_python(SET_UP_SCRIPT, &[]);
        let (key, secret) = message.trim().split_once(' ').unwrap();
        real.key = (key.to_owned(), secret.to_owned());
        real
    }

    fn run_python(&self, script: &str, more: &[&str]) -> String {
        let scheme = if self.over == S3Transport::Tls { "https" } else { "http" };
        let url = format!("{scheme}://127.0.0.1:{}", self.port);
        let mut command = Command::new(moto_program("python"));
        command.args(["-c", script, &url, REGION, BUCKET]).arg(self.home.path().join("ca.pem")).args(more);
        run_command(&mut command)
    }

    /// The listing of another client, in the order of names.
    pub(crate) fn listed(&self) -> Vec<String> {
        self.run_python(LIST_SCRIPT, &[&self.key.0, &self.key.1]).lines().map(str::to_owned).collect()
    }

    pub(crate) fn bucket(&self) -> S3Bucket {
        self.bucket_with(&self.key.1)
    }

    pub(crate) fn bucket_with(&self, secret: &str) -> S3Bucket {
        self.open(secret, &self.home.path().join("ca.pem"))
    }

    pub(crate) fn bucket_trusting(&self, roots: &str) -> S3Bucket {
        self.open(&self.key.1, Path::new(roots))
    }

    fn open(&self, secret: &str, roots: &Path) -> S3Bucket {
        let place = S3Location {
            bucket: BUCKET.into(),
            prefix: "a/b/".into(),
            region: REGION.into(),
            host: "127.0.0.1".into(),
            port: self.port,
            tls: self.over == S3Transport::Tls,
            roots: Some(roots.display().to_string()),
            credentials: None,
        };
        S3Bucket::new(place, S3Credentials { key: self.key.0.clone(), secret: secret.into(), session: None })
            .unwrap()
    }
}

impl Drop for RealS3 {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
