//! Executors on hosts without an engine: images of a registry, run by `crun` or `runc`.

use std::{
    path::{Path, PathBuf},
    process::Command,
};

use serde_json::{Value, json};
use windlass_testenv::{
    images::busybox_layer,
    queue_env::{QueueEnv, processes_matching},
};
use windlass_testkit::{
    lab::registry::{ImageOptions, Registry},
    slurm::{NodeSize, SlurmCluster},
    wait::eventually,
};

/// A user without an account, and so without subordinate ids.
const USER: u32 = 61_235;

/// A queue whose executors run images of `registry` without an engine.
struct OciQueue {
    ground: QueueEnv,
    registry: Registry,
    image: String,
    store: PathBuf,
}

impl OciQueue {
    async fn start(name: &str, user: Option<u32>, config: &str) -> Self {
        Self::start_with(name, user, config, None).await
    }

    async fn start_with(name: &str, user: Option<u32>, config: &str, policy: Option<&Path>) -> Self {
        let mut ground = QueueEnv::start(name).await;
        ground.user = user;
        ground.env.extend(policy.map(|file| ("WINDLASS_AGENT_POLICY", file.display().to_string())));
        let registry = Registry::start().await;
        let options = ImageOptions { config, ..ImageOptions::default() };
        let (image, _) = registry.put_with("team/busybox", "1", busybox_layer(None), options);
        let token = ground.token("token").await;
        let store = ground.dir.join("images");
        ground.start_local_dispatcher_with(
            &token,
            "attempts",
            &["--runtime", "oci", "--images", &store.display().to_string()],
        );
        Self { ground, registry, image, store }
    }

    /// A queue of the nodes of a cluster. The dispatcher has no setting that selects a runtime.
    async fn on_cluster(cluster: &SlurmCluster) -> Self {
        let mut ground = QueueEnv::start("oci-slurm").await;
        let registry = Registry::start().await;
        let options = ImageOptions { config: r#"{"User": "job"}"#, ..ImageOptions::default() };
        let (image, _) = registry.put_with("team/busybox", "1", busybox_layer(None), options);
        let token = ground.token("token").await;
        let store = ground.dir.join("images");
        let images = store.display().to_string();
        ground.start_slurm_dispatcher(&token, &cluster.config(), &["--images", &images]);
        Self { ground, registry, image, store }
    }

    async fn submit(&self, script: &str, more: Value) -> String {
        let mut request = json!({ "container_image": self.image });
        request.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        self.ground.submit(&["sh", "-c", script], request).await
    }

    /// Runs a container to its end, and returns its record and its output.
    async fn run(&self, script: &str, more: Value) -> (Value, String) {
        let uuid = self.submit(script, more).await;
        let record = self.ground.ended(&uuid).await;
        (record, String::from_utf8(self.ground.output(&uuid, "stdout").await).unwrap())
    }

    fn attempt(&self, uuid: &str) -> PathBuf {
        self.ground.dir.join("attempts").join(format!("{uuid}.1"))
    }

    /// The file of an executor that was killed stays until another one claims an image, without its lock.
    fn has_released_image(&self, uuid: &str) -> bool {
        let file = std::fs::File::open(self.store.join("uses").join(format!("{uuid}.1")));
        file.map_or(true, |file| file.try_lock().is_ok())
    }

    /// Waits until nothing of an attempt is left on this host.
    fn wait_clean(&self, uuid: &str) {
        let attempt = self.attempt(uuid);
        eventually("nothing is left over", || {
            let groups = Command::new("find")
                .args(["/sys/fs/cgroup", "-name", &format!("*{uuid}*")])
                .output()
                .unwrap();
            let mounts = std::fs::read_to_string("/proc/self/mountinfo").unwrap();
            groups.stdout.is_empty()
                && !mounts.contains(uuid)
                && processes_matching(&[uuid.as_bytes()]).is_empty()
                && ["root", "container"].iter().all(|part| !attempt.join(part).exists())
                && self.has_released_image(uuid)
        });
    }
}

fn kill(attempt: &Path) {
    let kept: Value = serde_json::from_slice(&std::fs::read(attempt.join("executor.json")).unwrap()).unwrap();
    assert!(Command::new("kill").args(["-KILL", &kept["pid"].to_string()]).status().unwrap().success());
}

#[tokio::test(flavor = "multi_thread")]
async fn an_image_runs_on_a_host_without_an_engine_with_the_confinement_of_tasks() {
    let queue =
        OciQueue::start("oci", None, r#"{"Env": ["FROM_IMAGE=yes"], "WorkingDir": "/work", "User": "job"}"#)
            .await;
    let more = json!({
        "environment": { "WORD": "a b", "LINES": "c\nd" },
        "mounts": { "/out": { "kind": "tmp" }, "/etc/text": { "kind": "text", "content": "given" } },
        "secret_mounts": { "/etc/key": { "kind": "text", "content": "c4nary" } },
    });
    let script = "cat /etc/key /etc/text; echo \" $WORD $LINES $FROM_IMAGE\"; readlink /proc/self/cwd; id -u; \
                  echo broken >&2; touch /out/made && echo written; exit 5";
    let uuid = queue.submit(script, more).await;
    let record = queue.ground.ended(&uuid).await;
    assert_eq!((&record["state"], &record["exit_code"]), (&json!("Complete"), &json!(5)), "{record}");
    let text = String::from_utf8(queue.ground.output(&uuid, "stdout").await).unwrap();
    assert_eq!(text, "c4narygiven a b c\nd yes\n/work\n1000\nwritten\n");
    assert_eq!(queue.ground.output(&uuid, "stderr").await, b"broken\n");
    queue.wait_clean(&uuid);

    let more = json!({ "runtime_constraints": { "vcpus": 1, "ram": 64 << 20, "API": true } });
    let (record, text) =
        queue.run("cat /proc/self/status; readlink /proc/self/ns/net; env", more.clone()).await;
    assert_eq!(record["exit_code"], 0, "{record} {text}");
    let value = |name: &str| {
        text.lines().find_map(|line| line.strip_prefix(name)).unwrap_or_default().trim().to_owned()
    };
    assert_eq!((value("NoNewPrivs:"), value("Seccomp:")), ("1".to_owned(), "2".to_owned()), "{text}");
    let bounding = u64::from_str_radix(&value("CapBnd:"), 16).unwrap();
    let (net_raw, sys_admin, chown) = (1 << 13, 1 << 21, 1);
    assert_eq!((bounding & net_raw, bounding & sys_admin, bounding & chown), (0, 0, 1), "{text}");
    let own = std::fs::read_link("/proc/self/ns/net").unwrap().display().to_string();
    assert!(text.contains("net:[") && !text.contains(&own), "it is on this machine's network: {text}");
    assert!(!value("ARVADOS_API_HOST=").starts_with("127."), "{text}");
    assert!(!text.contains("WINDLASS_TASK_ID"), "{text}");

    // Twice the memory that it requested.
    let (record, _) =
        queue.run("head -c 134217728 /dev/zero | tail -c 134217728 > /dev/null; true", more).await;
    assert_eq!(record["runtime_status"]["reason"], "oom_killed", "{record}");
    // All of these were one pull.
    assert_eq!(queue.registry.layers_requested().len(), 1, "{:?}", queue.registry.layers_requested());

    let (record, _) =
        queue.run("true", json!({ "container_image": queue.registry.name("team/missing:1") })).await;
    assert_eq!(
        (&record["state"], &record["runtime_status"]["reason"]),
        (&json!("Cancelled"), &json!("image")),
        "{record}"
    );
    let odd = queue.ground.submit(&["no-such-program"], json!({ "container_image": queue.image })).await;
    let record = queue.ground.ended(&odd).await;
    assert_eq!((&record["state"], &record["exit_code"]), (&json!("Complete"), &json!(127)), "{record}");
    queue.wait_clean(&odd);
}

/// Checks how containers end that are stopped, or whose executor is killed.
async fn check_endings(queue: &OciQueue, mark: &str) {
    let script = format!("trap 'echo asked; exit 3' TERM; echo up; while :; do sleep {mark} & wait; done");
    let requested =
        queue.ground.request(&["sh", "-c", &script], json!({ "container_image": queue.image })).await;
    let uuid = &requested.container;
    eventually_output(queue, uuid, "up\n").await;
    queue.ground.weigh(&requested, 0).await;
    let record = queue.ground.ended(uuid).await;
    assert_eq!(record["runtime_status"]["error"], "it was stopped", "{record}");
    assert_eq!(record["exit_code"], 3, "{record}");
    assert_eq!(queue.ground.output(uuid, "stdout").await, b"up\nasked\n");
    queue.wait_clean(uuid);

    let script = format!("(sleep {mark} &); echo up; sleep {mark}");
    let held = queue.submit(&script, json!({})).await;
    eventually_output(queue, &held, "up\n").await;
    kill(&queue.attempt(&held));
    eventually("processes of a dead executor end", || {
        processes_matching(&[b"sleep\0", mark.as_bytes()]).is_empty()
    });
    assert_eq!(queue.ground.ended(&held).await["runtime_status"]["reason"], "crashed");
    queue.wait_clean(&held);
}

async fn eventually_output(queue: &OciQueue, uuid: &str, expected: &str) {
    windlass_testkit::wait::eventually_ok_async("the program writes", async || {
        let text = queue.ground.output(uuid, "stdout").await;
        if text == expected.as_bytes() { Ok(()) } else { Err(queue.ground.dispatcher_log()) }
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_container_without_an_engine_ends_with_its_request_or_its_executor() {
    let queue = OciQueue::start("oci-end", None, "{}").await;
    check_endings(&queue, &format!("8{}", std::process::id())).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn executors_of_an_ordinary_user_run_images_without_an_engine() {
    let queue = OciQueue::start("oci-user", Some(USER), "{}").await;
    let (record, text) =
        queue.run("id -u; stat -c %u /bin/busybox; touch /out/made && echo written", json!({})).await;
    assert_eq!((&record["state"], &record["exit_code"]), (&json!("Complete"), &json!(0)), "{record}");
    assert_eq!(text, "0\n0\nwritten\n");
    check_endings(&queue, &format!("9{}", std::process::id())).await;
}

/// Lets all images look as if they had not been used for minutes.
fn age_images(store: &Path) {
    let status = Command::new("find")
        .arg(store.join("images"))
        .args(["-type", "f", "-exec", "touch", "-d", "-5 minutes", "{}", "+"])
        .status();
    assert!(status.unwrap().success());
}

#[tokio::test(flavor = "multi_thread")]
async fn executors_remove_unused_images_if_there_is_no_space_for_another_one() {
    let policy = windlass_testkit::temp_dir("policy").unwrap();
    let file = policy.path().join("policy.yml");
    // One image fits, and two do not.
    std::fs::write(&file, "images: {max_size: 3MB}\n").unwrap();
    let queue = OciQueue::start_with("oci-full", None, "{}", Some(&file)).await;
    let layers = || std::fs::read_dir(queue.store.join("layers")).unwrap().count();
    let (record, text) = queue.run("echo first", json!({})).await;
    assert_eq!((&record["state"], text.as_str()), (&json!("Complete"), "first\n"), "{record}");
    age_images(&queue.store);
    // With another file, so that it is another layer.
    let options = ImageOptions { config: "{}", ..ImageOptions::default() };
    let (other, _) = queue.registry.put_with("team/other", "1", busybox_layer(Some(&file)), options);
    let (record, text) = queue.run("echo second", json!({ "container_image": other })).await;
    assert_eq!((&record["state"], text.as_str()), (&json!("Complete"), "second\n"), "{record}");
    assert_eq!(layers(), 1, "the unused one made room");
}

/// Waits until nothing of a container's attempt is left on the nodes.
fn wait_clean_on_nodes(queue: &OciQueue, uuid: &str) {
    eventually("nothing is left over on the nodes", || {
        let groups = Command::new("find").args(["/sys/fs/cgroup", "-name", &format!("*{uuid}*")]).output();
        groups.unwrap().stdout.is_empty()
            && processes_matching(&[uuid.as_bytes()]).is_empty()
            && queue.has_released_image(uuid)
    });
}

#[tokio::test(flavor = "multi_thread")]
async fn cluster_nodes_without_docker_podman_and_apptainer_run_images() {
    const SIZE: NodeSize = NodeSize { cpus: 2, memory_mib: 2000, gpus: 0, gpu_type: None };
    // Dropped after the dispatcher and the server.
    let cluster = SlurmCluster::start_without_engine(&[SIZE; 2]);
    let queue = OciQueue::on_cluster(&cluster).await;
    let script = "cat /etc/passwd; id -u; readlink /proc/self/ns/net; echo broken >&2; exit 5";
    let uuid = queue.submit(script, json!({})).await;
    let record = queue.ground.ended(&uuid).await;
    let text = String::from_utf8(queue.ground.output(&uuid, "stdout").await).unwrap();
    assert_eq!((&record["state"], &record["exit_code"]), (&json!("Complete"), &json!(5)), "{record} {text}");
    assert!(text.contains("job:x:1000:1000::/home:/bin/sh\n1000\n"), "the image and its user: {text}");
    let own = std::fs::read_link("/proc/self/ns/net").unwrap().display().to_string();
    assert!(text.contains("net:[") && !text.contains(&own), "a network of its own: {text}");
    assert_eq!(queue.ground.output(&uuid, "stderr").await, b"broken\n");
    wait_clean_on_nodes(&queue, &uuid);

    // Both nodes have one disk here, and pulled once.
    let others: Vec<String> = {
        let mut others = Vec::new();
        for _ in 0..4 {
            others.push(queue.submit("echo done", json!({})).await);
        }
        others
    };
    for uuid in &others {
        let record = queue.ground.ended(uuid).await;
        assert_eq!((&record["state"], &record["exit_code"]), (&json!("Complete"), &json!(0)), "{record}");
        assert_eq!(queue.ground.output(uuid, "stdout").await, b"done\n");
        wait_clean_on_nodes(&queue, uuid);
    }
    assert_eq!(queue.registry.layers_requested().len(), 1, "{:?}", queue.registry.layers_requested());

    let (record, _) =
        queue.run("true", json!({ "container_image": queue.registry.name("team/missing:1") })).await;
    assert_eq!(record["runtime_status"]["reason"], "image", "{record}");

    // A container that is stopped, on the node.
    let mark = format!("6{}", std::process::id());
    let script = format!("trap 'echo asked; exit 3' TERM; echo up; while :; do sleep {mark} & wait; done");
    let requested =
        queue.ground.request(&["sh", "-c", &script], json!({ "container_image": queue.image })).await;
    eventually_output(&queue, &requested.container, "up\n").await;
    queue.ground.weigh(&requested, 0).await;
    let record = queue.ground.ended(&requested.container).await;
    assert_eq!(
        (&record["state"], &record["runtime_status"]["reason"]),
        (&json!("Cancelled"), &json!("priority_zero")),
        "{record}"
    );
    eventually("its processes end", || processes_matching(&[b"sleep\0", mark.as_bytes()]).is_empty());
    wait_clean_on_nodes(&queue, &requested.container);
    drop(queue);
}
