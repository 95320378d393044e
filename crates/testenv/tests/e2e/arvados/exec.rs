//! Executors: leftovers, buffering while the server is unreachable, and container runtimes.

use std::{
    path::Path,
    process::Command,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use serde_json::{Value, json};
use tokio::{
    io::copy_bidirectional,
    net::{TcpListener, TcpStream},
    task::JoinSet,
};
use windlass_testenv::{
    queue_env::{QueueEnv, processes_matching},
    test_env::{IMAGE, engine_socket, load_busybox_image},
};
use windlass_testkit::wait::eventually_ok_async;

const TIMEOUT: Duration = Duration::from_secs(150);
const POLL_INTERVAL: Duration = Duration::from_millis(30);

async fn wait_until(what: &str, mut is: impl FnMut() -> bool) {
    let since = Instant::now();
    while !is() {
        assert!(since.elapsed() < TIMEOUT, "{what}");
        tokio::time::sleep(POLL_INTERVAL).await;
    }
}

/// Process ID of the executor of a container's first attempt.
fn executor_pid(ground: &QueueEnv, uuid: &str) -> String {
    let kept = ground.dir.join("attempts").join(format!("{uuid}.1")).join("executor.json");
    let kept: Value = serde_json::from_slice(&std::fs::read(kept).unwrap()).unwrap();
    kept["pid"].to_string()
}

fn kill(pid: &str) {
    assert!(Command::new("kill").args(["-KILL", pid]).status().unwrap().success());
}

/// Control groups named after a container, in any hierarchy.
fn cgroups_of(uuid: &str) -> Vec<String> {
    let mut find = Command::new("find");
    find.args(["/sys/fs/cgroup", "-maxdepth", "5", "-name"]).arg(format!("{uuid}.*"));
    let message = find.output().unwrap();
    String::from_utf8_lossy(&message.stdout).lines().map(str::to_owned).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_killed_executor_leaves_no_processes_cgroups_or_secrets_behind() {
    let mut ground = QueueEnv::start("killed").await;
    let token = ground.token("token").await;
    ground.dispatch(&token, "attempts");
    // Children, grandchildren, and some that leave their group, session and parent.
    let mark = format!("7{}", std::process::id());
    let script = format!(
        "sleep {mark} & (sleep {mark} & sleep {mark}) & setsid sh -c 'setsid sleep {mark} & sleep {mark}' & \
         (setsid sleep {mark} &) ; cat etc/key; sleep {mark}"
    );
    let secret = json!({ "secret_mounts": { "/etc/key": { "kind": "text", "content": "c4nary" } } });
    let uuid = ground.submit(&["sh", "-c", &script], secret).await;
    let sleepers = || processes_matching(&[b"sleep\0", mark.as_bytes()]);
    wait_until("its processes do not start", || sleepers().len() >= 7).await;
    let root = ground.dir.join("attempts").join(format!("{uuid}.1")).join("root");
    assert!(root.join("etc/key").exists());
    kill(&executor_pid(&ground, &uuid));
    wait_until("processes of a dead executor go on", || sleepers().is_empty()).await;
    wait_until("its control group is left", || cgroups_of(&uuid).is_empty()).await;
    wait_until("its secrets are left", || !root.exists()).await;
    let record = ground.ended(&uuid).await;
    assert_eq!(
        (&record["state"], &record["runtime_status"]["reason"]),
        (&json!("Cancelled"), &json!("crashed"))
    );
}

/// A proxy to the server that can be closed: open connections are cut, and new ones are rejected.
struct SwitchableProxy {
    address: String,
    is_open: Arc<AtomicBool>,
    // Aborted on drop.
    _serving: JoinSet<()>,
}

impl SwitchableProxy {
    async fn in_front_of(server: &str) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let is_open = Arc::new(AtomicBool::new(true));
        let (open, server) = (is_open.clone(), server.to_owned());
        let mut serving = JoinSet::new();
        serving.spawn(async move {
            let mut passing = JoinSet::new();
            loop {
                let Ok((mut caller, _)) = listener.accept().await else { return };
                let (open, server) = (open.clone(), server.clone());
                passing.spawn(async move {
                    let closed = async {
                        while open.load(Ordering::Relaxed) {
                            tokio::time::sleep(Duration::from_millis(5)).await;
                        }
                    };
                    let pass = async {
                        if let Ok(mut there) = TcpStream::connect(server).await {
                            let _ = copy_bidirectional(&mut caller, &mut there).await;
                        }
                    };
                    tokio::select! {
                        () = closed => {}
                        () = pass => {}
                    }
                });
            }
        });
        Self { address, is_open, _serving: serving }
    }

    fn open(&self, open: bool) {
        self.is_open.store(open, Ordering::Relaxed);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn output_written_during_a_server_outage_is_delivered_completely() {
    let mut ground = QueueEnv::start("away").await;
    let gate = SwitchableProxy::in_front_of(ground.address()).await;
    ground.via = Some(gate.address.clone());
    let token = ground.token("token").await;
    ground.dispatch(&token, "attempts");
    let file = |name: &str| ground.dir.join(name);
    let (begin, written, same) = (file("begin"), file("written"), file("same"));
    let show = |path: &Path| path.display().to_string();
    let script = format!(
        "echo ready; until [ -e {} ]; do sleep 0.05; done; head -c 5000000 /dev/urandom | tee {}; echo x > {}; exit 3",
        show(&begin),
        show(&same),
        show(&written)
    );
    let uuid = ground.submit(&["sh", "-c", &script], json!({})).await;
    ground.until(&uuid, "it does not run", |record| record["state"] == "Running").await;
    gate.open(false);
    std::fs::write(&begin, "").unwrap();
    wait_until("a server that is away holds the program up", || written.exists()).await;
    assert_eq!(ground.until(&uuid, "", |_| true).await["state"], "Running");
    gate.open(true);
    let record = ground.ended(&uuid).await;
    assert_eq!((&record["state"], &record["exit_code"]), (&json!("Complete"), &json!(3)), "{record}");
    assert_eq!(record["runtime_status"]["warning"], Value::Null);
    let want = [b"ready\n".as_slice(), &std::fs::read(&same).unwrap()].concat();
    assert!(ground.output(&uuid, "stdout").await == want, "the bytes are not the same");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_gpu_is_assigned_to_one_container_at_a_time() {
    let mut ground = QueueEnv::start("gpus").await;
    let token = ground.token("token").await;
    ground.start_local_dispatcher_with(&token, "attempts", &["--gpus", "2"]);
    let gate = ground.dir.join("gate");
    let script = format!("echo $CUDA_VISIBLE_DEVICES; until [ -e {} ]; do sleep 0.05; done", gate.display());
    let requirements = |count: u64| json!({ "runtime_constraints": { "vcpus": 1, "ram": 1 << 20, "gpu": { "device_count": count } } });
    let (one, two) = (
        ground.submit(&["sh", "-c", &script], requirements(1)).await,
        ground.submit(&["sh", "-c", &script], requirements(1)).await,
    );
    for uuid in [&one, &two] {
        ground.until(uuid, "it does not run", |record| record["state"] == "Running").await;
    }
    let three = ground.submit(&["sh", "-c", &script], requirements(3)).await;
    let left = |record: &Value| {
        record["scheduling_status"].as_str().is_some_and(|why| why.contains("3 GPUs requested, 2 available"))
    };
    ground.until(&three, "nobody says why it waits", left).await;
    std::fs::write(&gate, "").unwrap();
    let mut seen = Vec::new();
    for uuid in [&one, &two] {
        ground.ended(uuid).await;
        seen.push(String::from_utf8(ground.output(uuid, "stdout").await).unwrap());
    }
    seen.sort();
    assert_eq!(seen, ["0\n", "1\n"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stopped_container_has_exactly_its_stop_duration() {
    let mut ground = QueueEnv::start("stop-duration").await;
    let token = ground.token("token").await;
    ground.dispatch(&token, "attempts");
    // Saves for longer than the default, in a shell that ends at once.
    let saves = "sh -c 'n=0; trap \"n=1; echo asked\" TERM; echo ready; while [ $n = 0 ]; do sleep 0.1; done; \
        for i in 1 2 3 4 5 6 7 8 9 10 11 12; do sleep 1; done; echo saved' && echo never";
    let ignores = "sh -c 'trap \"\" TERM; echo ready; while :; do sleep 0.1; done' && echo never";
    let with = |secs: u64| json!({ "scheduling_parameters": { "stop_duration": secs } });
    let saving = ground.request(&["sh", "-c", saves], with(120)).await;
    let short = ground.request(&["sh", "-c", ignores], with(2)).await;
    let default = ground.request(&["sh", "-c", ignores], json!({})).await;
    for one in [&saving, &short, &default] {
        let ready = eventually_ok_async("it is ready", async || {
            let output = ground.output(&one.container, "stdout").await;
            if output == b"ready\n" { Ok(()) } else { Err(String::from_utf8_lossy(&output).into_owned()) }
        });
        ready.await;
        ground.weigh(one, 0).await;
    }
    for (one, secs) in [(&short, 2), (&default, 10)] {
        let record = ground.ended(&one.container).await;
        let message =
            format!("it was still running {secs} s after the stop request (`stop_duration`) and was killed");
        assert_eq!(record["runtime_status"]["error"], message.as_str(), "{record}");
        assert_eq!((&record["state"], &record["exit_code"]), (&json!("Cancelled"), &json!(137)), "{record}");
    }
    let record = ground.ended(&saving.container).await;
    assert_eq!(record["runtime_status"]["error"], "it was stopped", "{record}");
    assert_eq!(ground.output(&saving.container, "stdout").await, b"ready\nasked\nsaved\n");
    // The same time counts from the end of the maximum run time.
    let limits = json!({ "scheduling_parameters": { "max_run_time": 1, "stop_duration": 60 } });
    let late = "trap 'echo asked; exit 3' TERM; while :; do sleep 0.1; done";
    let late = ground.submit(&["sh", "-c", late], limits).await;
    let record = ground.ended(&late).await;
    assert_eq!(
        (&record["runtime_status"]["reason"], &record["exit_code"]),
        (&json!("max_run_time"), &json!(3))
    );
    assert_eq!(ground.output(&late, "stdout").await, b"asked\n");
}

/// Containers of the test engine that belong to a container of the queue.
fn engine_containers(uuid: &str) -> String {
    let host = format!("unix://{}", engine_socket().display());
    let named = format!("name={uuid}");
    let args = ["--host", &host, "ps", "--all", "--quiet", "--filter", &named];
    let listed = Command::new("docker").args(args).output().unwrap();
    assert!(listed.status.success(), "{}", String::from_utf8_lossy(&listed.stderr));
    String::from_utf8_lossy(&listed.stdout).trim().to_owned()
}

#[tokio::test(flavor = "multi_thread")]
async fn an_image_runs_in_docker_and_its_container_is_removed_with_its_executor() {
    load_busybox_image(&engine_socket());
    let mut ground = QueueEnv::start("docker").await;
    ground.env.push(("DOCKER_HOST", format!("unix://{}", engine_socket().display())));
    let token = ground.token("token").await;
    ground.dispatch(&token, "attempts");
    let more = json!({
        "container_image": IMAGE, "environment": { "WORD": "a b" },
        "secret_mounts": { "/etc/key": { "kind": "text", "content": "c4nary" } },
    });
    let script =
        "cat /etc/key; echo \" $WORD\"; echo broken >&2; echo > /out/made; echo /bin/busybox*; exit 5";
    let uuid = ground.submit(&["sh", "-c", script], more).await;
    let record = ground.ended(&uuid).await;
    assert_eq!((&record["state"], &record["exit_code"]), (&json!("Complete"), &json!(5)), "{record}");
    assert_eq!(ground.output(&uuid, "stdout").await, b"c4nary a b\n/bin/busybox\n");
    assert_eq!(ground.output(&uuid, "stderr").await, b"broken\n");
    assert_eq!(engine_containers(&uuid), "", "it is left in the engine");

    // It has the privileges of the host's policy, and a separate network.
    let script = "cat /proc/self/status; /bin/busybox readlink /proc/self/ns/net; env";
    let more = json!({ "container_image": IMAGE, "runtime_constraints": { "vcpus": 1, "ram": 64 << 20, "API": true } });
    let confined = ground.submit(&["sh", "-c", script], more.clone()).await;
    let record = ground.ended(&confined).await;
    let message = String::from_utf8(ground.output(&confined, "stdout").await).unwrap();
    assert_eq!(record["exit_code"], 0, "{record} {message}");
    let value = |name: &str| {
        message.lines().find_map(|line| line.strip_prefix(name)).unwrap_or_default().trim().to_owned()
    };
    assert_eq!(value("NoNewPrivs:"), "1", "{message}");
    let bounding = u64::from_str_radix(&value("CapBnd:"), 16).unwrap();
    let (net_raw, sys_admin, chown) = (1 << 13, 1 << 21, 1);
    assert_eq!((bounding & net_raw, bounding & sys_admin, bounding & chown), (0, 0, 1), "{message}");
    let own = std::fs::read_link("/proc/self/ns/net").unwrap().display().to_string();
    assert!(
        message.contains("net:[") && !message.contains(&own),
        "it is on this machine's network: {message}"
    );
    // The address leads to this machine, not to the container's loopback.
    assert!(!value("ARVADOS_API_HOST=").starts_with("127."), "{message}");
    // A policy that forbids the host network, and a dispatcher that requests it for all containers.
    let policy = ground.dir.join("policy.yml");
    std::fs::write(&policy, "host_network: false\n").unwrap();
    let mut strict = QueueEnv::start("strict").await;
    strict.env.push(("DOCKER_HOST", format!("unix://{}", engine_socket().display())));
    strict.env.push(("WINDLASS_AGENT_POLICY", policy.display().to_string()));
    let second = strict.token("token").await;
    strict.start_local_dispatcher_with(&second, "attempts", &["--network", "host"]);
    let refused = strict.submit(&["true"], more).await;
    let record = strict.ended(&refused).await;
    assert_eq!(record["runtime_status"]["reason"], "refused", "{record}");
    let why = record["runtime_status"]["error"].as_str().unwrap_or_default();
    assert!(why.contains("network_mode host") && why.contains("policy.yml"), "{why}");
    drop(strict);

    // The first process of the container starts, and reports the same as a shell.
    let odd = ground.submit(&["no-such-program"], json!({ "container_image": IMAGE })).await;
    let record = ground.ended(&odd).await;
    assert_eq!((&record["state"], &record["exit_code"]), (&json!("Complete"), &json!(127)), "{record}");

    let held = ground.submit(&["sleep", "600"], json!({ "container_image": IMAGE })).await;
    ground.until(&held, "it does not run", |record| record["state"] == "Running").await;
    wait_until("it is not in the engine", || !engine_containers(&held).is_empty()).await;
    kill(&executor_pid(&ground, &held));
    wait_until("the container of a dead executor goes on", || engine_containers(&held).is_empty()).await;
    assert_eq!(ground.ended(&held).await["runtime_status"]["reason"], "crashed");
}
