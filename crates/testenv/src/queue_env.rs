//! A server with its container queue, dispatchers, and a client that requests containers.
//!
//! Failures panic with the last log lines of the dispatchers.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on should stop")]

use std::{
    collections::BTreeMap,
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
};

use serde_json::{Value, json};
use windlass_api::queue_client::{QueueHttpClient, percent_encode};
use windlass_sim::invariants::containers::is_final;
use windlass_testkit::{TempDir, temp_dir_in, wait::eventually_ok_async};

use crate::server::{Server, ServerOptions, TOKEN, binary_path};

/// A server with HTTP and HTTPS, in a separate directory.
pub struct QueueEnv {
    pub dir: PathBuf,
    /// Kept if the test fails.
    temp: TempDir,
    server: Option<Server>,
    pub https: String,
    /// URL for dispatchers and executors, instead of that of the server.
    pub via: Option<String>,
    /// Dispatchers and executors use TLS.
    pub encrypted: bool,
    /// Environment of dispatchers.
    pub env: Vec<(&'static str, String)>,
    /// Dispatchers run containers without an image as plain processes.
    pub allow_process: bool,
    /// Dispatchers and executors run as this user instead of root.
    pub user: Option<u32>,
    dispatchers: Vec<Child>,
}

/// A request and its container.
#[derive(Clone, Debug)]
pub struct RequestedContainer {
    pub request: String,
    pub container: String,
}

impl QueueEnv {
    pub async fn start(name: &str) -> Self {
        // Plain processes have a private `/tmp`.
        let temp = temp_dir_in(Path::new("/opt"), &format!("queue-{name}")).unwrap();
        let dir = temp.path().to_owned();
        // Programs run as separate users and write files that tests read. Secret files are readable only by root.
        std::fs::set_permissions(&dir, std::fs::Permissions::from_mode(0o777)).unwrap();
        let (data, log) = (dir.join("data"), dir.join("server.log"));
        let options = ServerOptions {
            binary: &binary_path("windlass").unwrap(),
            data: &data,
            database: None,
            core: None,
            local: false,
            env: vec![("WINDLASS_SERVER_TLS_PORT", "0".into())],
            log: Some(&log),
        };
        let server = Server::start(&options).await.unwrap();
        let https = eventually_ok_async("the server is reached over HTTPS", async || {
            let log_tail = std::fs::read_to_string(&log).unwrap();
            let found = log_tail.lines().find_map(|line| line.split_once("HTTPS is at https://"));
            found.map(|(_, at)| at.split_whitespace().next().unwrap_or_default().to_owned()).ok_or(log_tail)
        })
        .await;
        Self {
            dir,
            temp,
            server: Some(server),
            https,
            via: None,
            encrypted: false,
            env: Vec::new(),
            allow_process: true,
            user: None,
            dispatchers: Vec::new(),
        }
    }

    pub fn address(&self) -> &str {
        self.server.as_ref().unwrap().address()
    }

    pub fn client(&self) -> QueueHttpClient {
        QueueHttpClient::new(&format!("http://{}", self.address()), TOKEN).unwrap()
    }

    /// Certificate of the server's HTTPS port.
    pub fn certificate(&self) -> PathBuf {
        self.dir.join("data/tls/cert.pem")
    }

    pub fn server_pid(&self) -> u32 {
        self.server.as_ref().unwrap().pid()
    }

    /// Client of the server's own API.
    pub async fn api(&self) -> crate::server::Client {
        self.server.as_ref().unwrap().client().await.unwrap()
    }

    /// Creates a file with a new dispatcher's token.
    pub async fn token(&self, name: &str) -> PathBuf {
        let body = json!({ "api_client_authorization": { "scopes": ["dispatch"] } });
        let made = self.client().post("api_client_authorizations", &body).await.unwrap();
        let part = |name: &str| made[name].as_str().unwrap().to_owned();
        let file = self.dir.join(name);
        std::fs::write(&file, format!("v2/{}/{}\n", part("uuid"), part("api_token"))).unwrap();
        std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o600)).unwrap();
        file
    }

    /// Creates a user who may use the queue, and returns a client with their token.
    pub async fn user(&self, name: &str) -> QueueHttpClient {
        let body = json!({ "username": name, "global_role": "user", "can_use_queue": true });
        let made = self.api().await.post("/api/users/create", &body).await.unwrap();
        QueueHttpClient::new(&format!("http://{}", self.address()), made["creds"]["token"].as_str().unwrap())
            .unwrap()
    }

    /// Creates a file that programs of all users may append to.
    pub fn shared(&self, name: &str) -> PathBuf {
        let file = self.dir.join(name);
        std::fs::write(&file, "").unwrap();
        std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o666)).unwrap();
        file
    }

    /// Starts a dispatcher for this machine, in a separate process.
    pub fn dispatch(&mut self, token: &Path, dir: &str) -> u32 {
        self.start_local_dispatcher_with(token, dir, &[])
    }

    pub fn start_local_dispatcher_with(&mut self, token: &Path, dir: &str, more: &[&str]) -> u32 {
        let dir = self.dir.join(dir).display().to_string();
        let args = [&["--poll", "0.1", "--dir", &dir], more].concat();
        self.start_dispatcher("local", token, &args)
    }

    /// Starts a dispatcher for a cluster, in a separate process.
    pub fn start_slurm_dispatcher(&mut self, token: &Path, config: &Path, more: &[&str]) -> u32 {
        let config = config.display().to_string();
        let args = [&["--poll", "0.2", "--slurm-conf", &config], more].concat();
        self.start_dispatcher("slurm", token, &args)
    }

    fn start_dispatcher(&mut self, kind: &str, token: &Path, args: &[&str]) -> u32 {
        let mut command = Command::new(self.program("windlass"));
        let server = if self.encrypted {
            command.env("WINDLASS_CERT", self.certificate());
            format!("https://{}", self.https)
        } else {
            format!("http://{}", self.via.as_deref().unwrap_or_else(|| self.address()))
        };
        command.args(["dispatch", kind, "--server", &server]);
        if !args.contains(&"--lease") {
            // A short lease, so that the successor of a killed dispatcher starts soon.
            command.args(["--lease", "1"]);
        }
        if self.allow_process {
            command.arg("--allow-process");
        }
        command.envs(self.env.iter().map(|(name, value)| (name, value)));
        command.arg("--token-file").arg(token).arg("--agent").arg(self.program("windlass-agent"));
        if let Some(user) = self.user {
            use std::os::unix::process::CommandExt as _;
            std::os::unix::fs::chown(token, Some(user), Some(user)).unwrap();
            command.uid(user).gid(user);
        }
        command.args(args).stdin(Stdio::null()).stdout(Stdio::null());
        let log =
            std::fs::File::options().create(true).append(true).open(self.dir.join("dispatch.log")).unwrap();
        let child = command.stderr(log).spawn().unwrap();
        let id = child.id();
        self.dispatchers.push(child);
        id
    }

    /// Returns the path of a program that the user of the dispatchers may execute.
    fn program(&self, name: &str) -> PathBuf {
        let built = binary_path(name).unwrap();
        if self.user.is_none() {
            return built;
        }
        // The build directory may be inaccessible to other users.
        let copy = self.dir.join(name);
        if !copy.exists() {
            std::fs::copy(built, &copy).unwrap();
        }
        copy
    }

    /// Kills the dispatchers without notice, as a power cut would.
    pub fn kill_dispatchers(&mut self) {
        for mut child in self.dispatchers.drain(..) {
            let _ = child.kill();
            let _ = child.wait();
        }
    }

    /// Text of the dispatchers' log.
    pub fn dispatcher_log(&self) -> String {
        std::fs::read_to_string(self.dir.join("dispatch.log")).unwrap_or_default()
    }

    pub async fn request(&self, command: &[&str], more: Value) -> RequestedContainer {
        self.request_as(&self.client(), command, more).await
    }

    pub async fn request_as(
        &self,
        who: &QueueHttpClient,
        command: &[&str],
        more: Value,
    ) -> RequestedContainer {
        let mut request = json!({
            "state": "Committed", "priority": 500, "container_image": "none", "command": command,
            "output_path": "/out", "mounts": { "/out": { "kind": "tmp" } }, "use_existing": false,
            "runtime_constraints": { "vcpus": 1, "ram": 64 << 20 }, "container_count_max": 1,
        });
        for (name, value) in more.as_object().unwrap() {
            request[name] = value.clone();
        }
        let body = json!({ "container_request": request });
        let made = who.post("container_requests", &body).await.unwrap();
        let part = |name: &str| made[name].as_str().unwrap().to_owned();
        RequestedContainer { request: part("uuid"), container: part("container_uuid") }
    }

    pub async fn submit(&self, command: &[&str], more: Value) -> String {
        self.request(command, more).await.container
    }

    pub async fn weigh(&self, requested: &RequestedContainer, priority: u64) {
        let change = json!({ "container_request": { "priority": priority } });
        self.client().put(&format!("container_requests/{}", requested.request), &change).await.unwrap();
    }

    pub async fn delete_request(&self, requested: &RequestedContainer) {
        let path = format!("container_requests/{}?_method=DELETE", requested.request);
        self.client().post(&path, &Value::Null).await.unwrap();
    }

    pub async fn until(&self, uuid: &str, what: &str, is: impl Fn(&Value) -> bool) -> Value {
        eventually_ok_async(what, async || {
            let record = self.client().get(&format!("containers/{uuid}")).await.unwrap();
            if is(&record) { Ok(record) } else { Err(format!("{record}\n{}", self.dispatcher_log())) }
        })
        .await
    }

    pub async fn ended(&self, uuid: &str) -> Value {
        self.until(uuid, "it ends", is_final).await
    }

    /// All containers by UUID. At most one page is expected.
    pub async fn containers(&self) -> BTreeMap<String, Value> {
        let page = self.client().get("containers?limit=1000&count=none").await.unwrap();
        let items = page["items"].as_array().unwrap();
        items.iter().map(|one| (one["uuid"].as_str().unwrap().to_owned(), one.clone())).collect()
    }

    /// The whole log of the queue, in order.
    pub async fn history(&self) -> Vec<Value> {
        let mut rows: Vec<Value> = Vec::new();
        loop {
            let last = rows.last().and_then(|row| row["id"].as_i64()).unwrap_or(0);
            let filters = percent_encode(&json!([["id", ">", last]]).to_string());
            let path = format!("logs?order=id&limit=1000&count=none&filters={filters}");
            let page = self.client().get(&path).await.unwrap();
            let more = page["items"].as_array().unwrap();
            if more.is_empty() {
                return rows;
            }
            rows.extend(more.iter().cloned());
        }
    }

    /// The complete output of a container on a stream.
    pub async fn output(&self, uuid: &str, stream: &str) -> Vec<u8> {
        let mut bytes = Vec::new();
        loop {
            let path = format!("containers/{uuid}/output?stream={stream}&offset={}", bytes.len());
            let more = self.client().get_bytes(&path).await.unwrap();
            if more.is_empty() {
                return bytes;
            }
            bytes.extend_from_slice(&more);
        }
    }

    /// Messages of dispatchers, by their `event`.
    pub async fn messages(&self, uuid: &str) -> Vec<String> {
        let filters = json!([["object_uuid", "=", uuid], ["event_type", "=", "dispatch"]]).to_string();
        let path = format!("logs?order=id&limit=1000&filters={}", percent_encode(&filters));
        let page = self.client().get(&path).await.unwrap();
        let rows = page["items"].as_array().unwrap();
        rows.iter().map(|row| row["properties"]["event"].as_str().unwrap().to_owned()).collect()
    }
}

/// Processes whose command line contains all of these strings.
pub fn processes_matching(words: &[&[u8]]) -> Vec<i32> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir("/proc").into_iter().flatten().flatten() {
        let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse().ok()) else { continue };
        let Ok(line) = std::fs::read(entry.path().join("cmdline")) else { continue };
        let has = |word: &&[u8]| line.windows(word.len()).any(|part| part == *word);
        if words.iter().all(has) {
            found.push(pid);
        }
    }
    found
}

impl Drop for QueueEnv {
    fn drop(&mut self) {
        self.kill_dispatchers();
        drop(self.server.take());
        // Executors that still run belong to this test, because they are in its directories.
        for pid in processes_matching(&[self.dir.as_os_str().as_encoded_bytes()]) {
            // Some have ended by now; their errors are not printed.
            let _ = Command::new("kill").args(["-TERM", &pid.to_string()]).stderr(Stdio::null()).status();
        }
        self.temp.disable_cleanup(std::thread::panicking());
    }
}
