//! The container queue with the Python client of Arvados as it comes from PyPI, and with dispatchers of our own.

use std::{
    net::TcpListener,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use serde_json::{Value, json};
use windlass_api::queue::Client;
use windlass_testkit::server::{Options, Server, TOKEN, binary};

const PATIENCE: Duration = Duration::from_secs(60);

/// A server with both doors, in a directory of its own.
struct Ground {
    dir: PathBuf,
    server: Option<Server>,
    https: String,
    dispatchers: Vec<Child>,
}

impl Ground {
    async fn start(name: &str) -> Self {
        let dir = std::env::temp_dir().join(format!("windlass-queue-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let (data, log) = (dir.join("data"), dir.join("server.log"));
        let options = Options {
            binary: &binary("windlass").unwrap(),
            data: &data,
            database: None,
            core: None,
            local: false,
            env: vec![("WINDLASS_SERVER_TLS_PORT", port.to_string().into())],
            log: Some(&log),
        };
        let server = Server::start(&options).await.unwrap();
        Self { dir, server: Some(server), https: format!("127.0.0.1:{port}"), dispatchers: Vec::new() }
    }

    fn address(&self) -> &str {
        self.server.as_ref().unwrap().address()
    }

    fn client(&self) -> Client {
        Client::new(&format!("http://{}", self.address()), TOKEN).unwrap()
    }

    async fn token(&self, name: &str) -> PathBuf {
        let body = json!({ "api_client_authorization": { "scopes": ["dispatch"] } });
        let made = self.client().post("api_client_authorizations", &body).await.unwrap();
        let part = |name: &str| made[name].as_str().unwrap().to_owned();
        let file = self.dir.join(name);
        std::fs::write(&file, format!("v2/{}/{}\n", part("uuid"), part("api_token"))).unwrap();
        file
    }

    /// A dispatcher for this machine, in a process of its own.
    fn dispatch(&mut self, token: &Path, dir: &str) -> u32 {
        let mut command = Command::new(binary("windlass").unwrap());
        command.args([
            "dispatch",
            "local",
            "--poll",
            "0.1",
            "--server",
            &format!("http://{}", self.address()),
        ]);
        command.arg("--token-file").arg(token).arg("--dir").arg(self.dir.join(dir));
        command.arg("--agent").arg(binary("windlass-agent").unwrap());
        command.stdin(Stdio::null()).stdout(Stdio::null());
        let log =
            std::fs::File::options().create(true).append(true).open(self.dir.join("dispatch.log")).unwrap();
        let child = command.stderr(log).spawn().unwrap();
        let id = child.id();
        self.dispatchers.push(child);
        id
    }

    fn kill_dispatchers(&mut self) {
        for mut child in self.dispatchers.drain(..) {
            let _ = child.kill();
            let _ = child.wait();
        }
    }

    async fn ask(&self, command: &[&str], more: Value) -> String {
        let mut request = json!({
            "state": "Committed", "priority": 500, "container_image": "none", "command": command,
            "output_path": "/out", "mounts": { "/out": { "kind": "tmp" } }, "use_existing": false,
            "runtime_constraints": { "vcpus": 1, "ram": 64 << 20 }, "container_count_max": 1,
        });
        for (name, value) in more.as_object().unwrap() {
            request[name] = value.clone();
        }
        let body = json!({ "container_request": request });
        let made = self.client().post("container_requests", &body).await.unwrap();
        made["container_uuid"].as_str().unwrap().to_owned()
    }

    async fn until(&self, uuid: &str, what: &str, is: impl Fn(&Value) -> bool) -> Value {
        let since = Instant::now();
        loop {
            let record = self.client().get(&format!("containers/{uuid}")).await.unwrap();
            if is(&record) {
                return record;
            }
            let said = || std::fs::read_to_string(self.dir.join("dispatch.log")).unwrap_or_default();
            assert!(since.elapsed() < PATIENCE, "{what}: {record}\n{}", said());
            tokio::time::sleep(Duration::from_millis(30)).await;
        }
    }

    async fn ended(&self, uuid: &str) -> Value {
        let over = |record: &Value| record["state"] == "Complete" || record["state"] == "Cancelled";
        self.until(uuid, "it does not end", over).await
    }

    async fn output(&self, uuid: &str, stream: &str) -> Vec<u8> {
        let path = format!("containers/{uuid}/output?stream={stream}");
        self.client().get_bytes(&path).await.unwrap().to_vec()
    }

    /// What dispatchers said, as `event` words.
    async fn said(&self, uuid: &str) -> Vec<String> {
        let filters = json!([["object_uuid", "=", uuid], ["event_type", "=", "dispatch"]]).to_string();
        let path = format!("logs?order=id&limit=1000&filters={}", windlass_api::queue::encoded(&filters));
        let page = self.client().get(&path).await.unwrap();
        let rows = page["items"].as_array().unwrap();
        rows.iter().map(|row| row["properties"]["event"].as_str().unwrap().to_owned()).collect()
    }
}

impl Drop for Ground {
    fn drop(&mut self) {
        self.kill_dispatchers();
        drop(self.server.take());
        // Executors that still run were started by us, and are in directories of this test.
        for entry in std::fs::read_dir("/proc").into_iter().flatten().flatten() {
            let Ok(line) = std::fs::read(entry.path().join("cmdline")) else { continue };
            let here = self.dir.as_os_str().as_encoded_bytes();
            let is_ours = line.windows(here.len()).any(|part| part == here);
            if is_ours && let Some(pid) = entry.file_name().to_str() {
                let _ = Command::new("kill").args(["-TERM", pid]).status();
            }
        }
        if !std::thread::panicking() {
            let _ = std::fs::remove_dir_all(&self.dir);
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_python_client_of_arvados_makes_every_call_and_hears_every_event() {
    let home = std::env::var_os("WINDLASS_TEST_ARVADOS");
    let python =
        PathBuf::from(home.expect("WINDLASS_TEST_ARVADOS: `cargo xtask test` makes it")).join("bin/python");
    let ground = Ground::start("python").await;
    let mut command = Command::new(python);
    command.arg(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/e2e/arvados/walk.py"));
    command
        .args([&ground.https, ground.address(), TOKEN])
        .env("HOME", &ground.dir)
        .env("PYTHONDONTWRITEBYTECODE", "1");
    let ran = tokio::task::spawn_blocking(move || command.output()).await.unwrap().unwrap();
    let (out, err) = (String::from_utf8_lossy(&ran.stdout), String::from_utf8_lossy(&ran.stderr));
    assert!(ran.status.success(), "{out}\n{err}");
    assert_eq!(out.lines().count(), 7, "{out}\n{err}");
}

#[tokio::test(flavor = "multi_thread")]
async fn containers_run_on_this_machine_and_their_ends_are_told_apart() {
    let mut ground = Ground::start("local").await;
    let token = ground.token("token").await;
    ground.dispatch(&token, "attempts");
    let script = r"printf 'a\377\000b'; echo broken >&2; cat etc/key; exit 7";
    let secret = json!({ "secret_mounts": { "/etc/key": { "kind": "text", "content": "c4nary" } } });
    let done = ground.ask(&["sh", "-c", script], secret).await;
    let slow = ground.ask(&["sleep", "600"], json!({ "scheduling_parameters": { "max_run_time": 1 } })).await;
    let absent = ground.ask(&["no-such-program"], json!({})).await;
    let huge = ground.ask(&["true"], json!({ "runtime_constraints": { "vcpus": 4096, "ram": 1 } })).await;

    let record = ground.ended(&done).await;
    assert_eq!(
        (record["state"].as_str(), record["exit_code"].as_i64()),
        (Some("Complete"), Some(7)),
        "{record}"
    );
    assert_eq!(ground.output(&done, "stdout").await, b"a\xff\0bc4nary");
    assert_eq!(ground.output(&done, "stderr").await, b"broken\n");
    assert_eq!(ground.said(&done).await, ["dispatched"]);
    let record = ground.ended(&slow).await;
    assert_eq!(
        (record["state"].as_str(), &record["runtime_status"]["reason"]),
        (Some("Cancelled"), &json!("max_run_time"))
    );
    let record = ground.ended(&absent).await;
    assert_eq!(record["runtime_status"]["reason"], "start_failed", "{record}");
    let left =
        |record: &Value| record["scheduling_status"].as_str().is_some_and(|why| why.contains("4096 cpus"));
    let record = ground.until(&huge, "nobody says why it waits", left).await;
    assert_eq!(record["state"], "Queued", "what cannot run here is left for others");
}

#[tokio::test(flavor = "multi_thread")]
async fn c4_what_runs_outlives_its_dispatcher_and_is_adopted_by_the_next() {
    let mut ground = Ground::start("adopt").await;
    let token = ground.token("token").await;
    ground.dispatch(&token, "attempts");
    let (starts, go) = (ground.dir.join("starts"), ground.dir.join("go"));
    let script = format!(
        "echo one >> {}; until [ -e {} ]; do sleep 0.05; done; echo done",
        starts.display(),
        go.display()
    );
    let uuid = ground.ask(&["sh", "-c", &script], json!({})).await;
    let crashes = ground.ask(&["sleep", "600"], json!({})).await;
    for one in [&uuid, &crashes] {
        ground.until(one, "it does not run", |record| record["state"] == "Running").await;
    }
    ground.kill_dispatchers();
    // The executor of the other one dies while nobody looks.
    let kept = ground.dir.join("attempts").join(format!("{crashes}.1")).join("executor.json");
    let kept: Value = serde_json::from_slice(&std::fs::read(kept).unwrap()).unwrap();
    let killed = Command::new("kill").args(["-KILL", &kept["pid"].to_string()]).status().unwrap();
    assert!(killed.success());
    ground.dispatch(&token, "attempts");
    let record = ground.ended(&crashes).await;
    assert_eq!(
        (record["state"].as_str(), &record["runtime_status"]["reason"]),
        (Some("Cancelled"), &json!("crashed"))
    );
    let since = Instant::now();
    while !ground.said(&crashes).await.contains(&"cleaned_up_crashed".to_owned()) {
        assert!(since.elapsed() < PATIENCE, "nobody says that it crashed");
        tokio::time::sleep(Duration::from_millis(30)).await;
    }
    assert_eq!(ground.until(&uuid, "it was not left alone", |_| true).await["state"], "Running");
    std::fs::write(&go, "").unwrap();
    let record = ground.ended(&uuid).await;
    assert_eq!(
        (record["state"].as_str(), record["exit_code"].as_i64()),
        (Some("Complete"), Some(0)),
        "{record}"
    );
    assert_eq!(ground.output(&uuid, "stdout").await, b"done\n");
    assert_eq!(std::fs::read_to_string(starts).unwrap(), "one\n", "it ran once");
}

#[tokio::test(flavor = "multi_thread")]
async fn r13_priority_0_stops_what_runs_and_then_it_is_cancelled() {
    let mut ground = Ground::start("stop").await;
    let token = ground.token("token").await;
    ground.dispatch(&token, "attempts");
    let uuid = ground.ask(&["sleep", "600"], json!({})).await;
    ground.until(&uuid, "it does not run", |record| record["state"] == "Running").await;
    let done = Command::new(binary("windlass").unwrap())
        .args(["container", "cancel", &uuid])
        .env("WINDLASS_URL", format!("http://{}", ground.address()))
        .env("WINDLASS_TOKEN", TOKEN)
        .env("HOME", &ground.dir)
        .output()
        .unwrap();
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    let record = ground.ended(&uuid).await;
    assert_eq!(
        (record["state"].as_str(), &record["runtime_status"]["reason"]),
        (Some("Cancelled"), &json!("priority_zero"))
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn two_dispatchers_on_one_queue_run_every_container_once() {
    let mut ground = Ground::start("two").await;
    let ran = ground.dir.join("ran");
    let mut all = Vec::new();
    for at in 0..40 {
        let script = format!("echo {at} >> {}", ran.display());
        all.push(
            ground
                .ask(&["sh", "-c", &script], json!({ "runtime_constraints": { "vcpus": 1, "ram": 1 << 20 } }))
                .await,
        );
    }
    for name in ["one", "two"] {
        let token = ground.token(name).await;
        ground.dispatch(&token, &format!("attempts-{name}"));
    }
    for uuid in &all {
        let record = ground.ended(uuid).await;
        assert_eq!(
            (record["state"].as_str(), record["attempt"].as_u64()),
            (Some("Complete"), Some(1)),
            "{record}"
        );
    }
    let mut lines: Vec<u32> =
        std::fs::read_to_string(ran).unwrap().lines().map(|line| line.parse().unwrap()).collect();
    lines.sort_unstable();
    assert_eq!(lines, (0..40).collect::<Vec<_>>());
}
