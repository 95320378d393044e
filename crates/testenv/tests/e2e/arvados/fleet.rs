//! Runs on a cluster: a fleet whose jobs go through the queue, with the same lifecycle as all jobs.

use std::time::{Duration, Instant};

use base64::{Engine as _, prelude::BASE64_STANDARD};
use serde_json::{Value, json};
use windlass_testenv::{
    images::busybox_layer,
    queue_env::QueueEnv,
    server::Client,
    test_env::{IMAGE, engine_socket, load_busybox_image, load_image_of_user},
};
use windlass_testkit::{
    lab::registry::{ImageOptions, Registry},
    slurm::{NodeSize, SlurmCluster},
    temp_dir,
};

const TIMEOUT: Duration = Duration::from_secs(90);
const POLL_INTERVAL: Duration = Duration::from_millis(100);
const SIZE: NodeSize = NodeSize { cpus: 2, memory_mib: 2000, gpus: 0, gpu_type: None };

struct SlurmFleetEnv {
    cluster: SlurmCluster,
    ground: QueueEnv,
    api: Client,
}

impl Drop for SlurmFleetEnv {
    fn drop(&mut self) {
        self.ground.kill_dispatchers();
    }
}

fn task(name: &str, commands: &str, more: Value) -> Value {
    let mut task = json!({"type": "task", "name": name, "image": "none", "commands": [commands],
        "env": {"GREETING": "it's me"},
        "resources": {"cpu": {"count": {"min": 1}}, "memory": {"min": 0.1}, "disk": null}});
    task.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    task
}

fn spec(configuration: &Value) -> Value {
    json!({"run_name": configuration["name"], "configuration": configuration, "profile": {"name": "default"}})
}

impl SlurmFleetEnv {
    async fn start() -> Self {
        Self::with_nodes(&[SIZE; 2]).await
    }

    async fn with_nodes(nodes: &[NodeSize]) -> Self {
        Self::with_runtime(nodes, "process", Vec::new()).await
    }

    /// A cluster whose nodes run images in the engine of the tests.
    async fn with_images() -> Self {
        load_busybox_image(&engine_socket());
        let engine = ("DOCKER_HOST", format!("unix://{}", engine_socket().display()));
        Self::with_runtime(&[SIZE; 2], "docker", vec![engine]).await
    }

    async fn with_runtime(nodes: &[NodeSize], runtime: &str, env: Vec<(&'static str, String)>) -> Self {
        Self::on_cluster(SlurmCluster::start(nodes), &["--runtime", runtime], env).await
    }

    async fn on_cluster(cluster: SlurmCluster, arguments: &[&str], env: Vec<(&'static str, String)>) -> Self {
        let mut ground = QueueEnv::start("fleet").await;
        // A certificate has many lines, and Slurm passes them to the nodes.
        ground.encrypted = true;
        ground.env.extend(env);
        let token = ground.token("token").await;
        let arguments = [&["--name", "hpc"], arguments].concat();
        ground.start_slurm_dispatcher(&token, &cluster.config(), &arguments);
        let api = ground.api().await;
        let mut field = Self { cluster, ground, api };
        let fleet = json!({"type": "fleet", "name": "cluster", "backend": "slurm", "dispatcher": "hpc",
            "partition": "main", "nodes": {"min": 0, "max": 8}});
        let spec = json!({"configuration": fleet, "configuration_path": "fleet.yml", "profile": {"name": "default"}});
        let body = json!({"plan": {"spec": spec, "current_resource": null}, "force": false});
        field.post("fleets/apply", &body).await;
        field.offers().await;
        field
    }

    /// Waits for the offers that the dispatcher reports.
    async fn offers(&mut self) -> Vec<Value> {
        let body = json!({"run_spec": spec(&task("plan", "true", json!({})))});
        let since = Instant::now();
        loop {
            let plan = self.post("runs/get_plan", &body).await;
            let offers = plan["job_plans"][0]["offers"].as_array().cloned().unwrap_or_default();
            if !offers.is_empty() {
                return offers;
            }
            assert!(since.elapsed() < TIMEOUT, "no offer comes: {plan:#}\n{}", self.ground.dispatcher_log());
            tokio::time::sleep(POLL_INTERVAL).await;
        }
    }

    async fn post(&mut self, path: &str, body: &Value) -> Value {
        self.api.post(&format!("/api/project/main/{path}"), body).await.unwrap()
    }

    async fn apply(&mut self, configuration: &Value) -> Value {
        let body = json!({"plan": {"run_spec": spec(configuration)}, "force": false});
        self.post("runs/apply", &body).await
    }

    async fn wait_until(&mut self, run: &str, is: impl Fn(&Value) -> bool) -> Value {
        let since = Instant::now();
        loop {
            let seen = self.post("runs/get", &json!({"run_name": run})).await;
            if is(&seen) {
                return seen;
            }
            let log = self.ground.dispatcher_log();
            assert!(
                since.elapsed() < TIMEOUT,
                "{run} stays {seen:#}\n{log}\n{}",
                self.cluster.say("squeue", &[])
            );
            tokio::time::sleep(POLL_INTERVAL).await;
        }
    }

    async fn wait_until_final(&mut self, run: &str) -> Value {
        self.wait_until(run, |run| matches!(run["status"].as_str(), Some("done" | "failed" | "terminated")))
            .await
    }

    async fn output(&mut self, run: &Value) -> String {
        let id = &run["jobs"][0]["job_submissions"][0]["id"];
        let body = json!({"run_name": run["run_spec"]["run_name"], "job_submission_id": id, "limit": 100});
        let page = self.post("logs/poll", &body).await;
        let events = page["logs"].as_array().unwrap().iter();
        let bytes =
            events.flat_map(|event| BASE64_STANDARD.decode(event["message"].as_str().unwrap()).unwrap());
        String::from_utf8(bytes.collect()).unwrap()
    }
}

fn first_submission(run: &Value) -> &Value {
    &run["jobs"][0]["job_submissions"][0]
}

#[tokio::test(flavor = "multi_thread")]
async fn runs_on_a_cluster_queue_run_and_end_like_other_runs() {
    let mut field = SlurmFleetEnv::start().await;

    let offers = field.offers().await;
    assert_eq!(
        (&offers[0]["backend"], &offers[0]["region"]),
        (&json!("slurm"), &json!("hpc")),
        "{offers:#?}"
    );

    // Variables, stdout and stderr in order, and the end.
    field.apply(&task("hello", "echo \"$GREETING on $DSTACK_RUN_NAME\"; echo aside >&2", json!({}))).await;
    let run = field.wait_until_final("hello").await;
    assert_eq!(run["status"], "done", "{run:#}");
    assert_eq!(field.output(&run).await, "it's me on hello\naside\n");
    field.apply(&task("broken", "exit 7", json!({}))).await;
    let run = field.wait_until_final("broken").await;
    assert_eq!(
        (&run["status"], &first_submission(&run)["exit_status"]),
        (&json!("failed"), &json!(7)),
        "{run:#}"
    );

    // Four fill both nodes; the fifth waits in the cluster's queue and reports that.
    for number in 0..5 {
        field.apply(&task(&format!("long-{number}"), "sleep 600", json!({}))).await;
    }
    let names: Vec<String> = (0..5).map(|number| format!("long-{number}")).collect();
    let waits = |run: &Value| {
        first_submission(run)["status"] == "pulling"
            && first_submission(run)["status_message"]
                .as_str()
                .is_some_and(|message| message.contains("waits in the scheduler: "))
    };
    let since = Instant::now();
    loop {
        let mut seen = [0, 0];
        for name in &names {
            let run = field.wait_until(name, |_| true).await;
            seen[0] += usize::from(run["status"] == "running");
            seen[1] += usize::from(waits(&run));
        }
        if seen == [4, 1] {
            break;
        }
        assert!(since.elapsed() < TIMEOUT, "{seen:?} run and wait\n{}", field.cluster.say("squeue", &[]));
        tokio::time::sleep(POLL_INTERVAL).await;
    }

    // A stopped run leaves nothing in the cluster, in any state.
    field.post("runs/stop", &json!({"runs_names": names, "abort": false})).await;
    for name in &names {
        assert_eq!(field.wait_until_final(name).await["status"], "terminated");
    }
    let since = Instant::now();
    while !field.cluster.say("squeue", &["-h"]).is_empty() {
        assert!(since.elapsed() < TIMEOUT, "{}", field.cluster.say("squeue", &[]));
        tokio::time::sleep(POLL_INTERVAL).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_run_that_loses_its_cluster_job_is_retried_if_configured() {
    let mut field = SlurmFleetEnv::start().await;
    let gate = field.ground.dir.join("gate");
    let script = format!("echo once; until [ -e {} ]; do sleep 0.1; done", gate.display());
    let retry = json!({"retry": {"on_events": ["interruption"], "duration": 3600}});
    field.apply(&task("again", &script, retry)).await;
    field.wait_until("again", |run| run["status"] == "running").await;
    // As when an administrator of the cluster cancels it.
    let job = field.cluster.say("squeue", &["-h", "-o", "%i"]);
    assert_eq!(field.cluster.say("scancel", &[job.trim()]), "");
    // The signal may reach the node after the response: if the gate were opened now, the first attempt could still
    // finish.
    let tries = |run: &Value| run["jobs"][0]["job_submissions"].as_array().map_or(0, Vec::len);
    field.wait_until("again", |run| tries(run) == 2).await;
    std::fs::write(&gate, "").unwrap();
    let run = field.wait_until("again", |run| run["status"] == "done").await;
    assert_eq!(tries(&run), 2, "{run:#}");
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_cluster_cannot_run_is_refused_in_the_plan_with_its_reason() {
    let mut field = SlurmFleetEnv::start().await;
    let service = json!({"type": "service", "port": 80, "auth": false, "replicas": 1});
    let dev = json!({"type": "dev-environment", "commands": null, "ide": "vscode"});
    let remote = json!({"repo_type": "remote", "repo_name": "app", "repo_branch": "main", "repo_hash": null});
    let limited = json!({"resources": {"cpu": {"count": {"min": 1}}, "memory": {"min": 0.1},
        "disk": {"size": {"min": 0.1, "max": 1.0}}}});
    let refused = [
        (json!({"nodes": 2}), Value::Null, "several nodes", "use a fleet of hosts"),
        (service, Value::Null, "a service", "use a fleet of hosts"),
        (dev, Value::Null, "a dev environment", "use a fleet of hosts"),
        (
            json!({"volumes": ["/data:/data"]}),
            Value::Null,
            "a job with volumes",
            "that the nodes of the cluster share",
        ),
        (json!({}), remote, "a job with a repository", "clone it in `commands`"),
        (limited, Value::Null, "a job with a disk limit", "remove the upper end of `disk`"),
        (json!({"user": "root"}), Value::Null, "a job with a `user`", "the node determines it"),
        (json!({"python": "3.12"}), Value::Null, "a job with `python`", "one with Python"),
        (json!({"privileged": true}), Value::Null, "a privileged job", "use a fleet of hosts"),
        (json!({"ports": ["8080"]}), Value::Null, "a job with `ports`", "remove `ports`"),
    ];
    for (more, repo, what, cure) in refused {
        let mut run_spec = spec(&task("plan", "true", more));
        if run_spec["configuration"]["commands"].is_null() {
            run_spec["configuration"].as_object_mut().unwrap().remove("commands");
        }
        if !repo.is_null() {
            let init = json!({"repo_id": "app", "repo_info": {"repo_type": "remote", "repo_name": "app"},
                "repo_creds": {"clone_url": "https://git.example/app.git"}});
            field.post("repos/init", &init).await;
            (run_spec["repo_id"], run_spec["repo_data"]) = (json!("app"), repo);
        }
        let plan = field.post("runs/get_plan", &json!({"run_spec": run_spec})).await;
        let job = &plan["job_plans"][0];
        assert_eq!(job["offers"], json!([]), "{what}: {job:#}");
        let why = format!("{}{}", job["why"], job["misfits"]);
        assert!(why.contains(&format!("is a Slurm cluster, which cannot run {what}")), "{what}: {why}");
        assert!(why.contains(cure), "{what}: {why}");
    }
}

/// Commands that save for longer than the default time of a container after SIGTERM, in a shell that ends at once. A shell
/// reports the end of a `sleep` that the signal ended, too.
const SAVES_ON_STOP: &str = "sh -c 'n=0; trap \"n=1; echo asked\" TERM; echo ready; while [ $n = 0 ]; do sleep 0.1; done 2>/dev/null; \
    for i in 1 2 3 4 5 6 7 8 9 10 11 12; do sleep 1; done; echo saved' && echo never";
/// Commands that ignore SIGTERM.
const IGNORES_STOP: &str = "sh -c 'trap \"\" TERM; echo ready; while :; do sleep 0.1; done' && echo never";

impl SlurmFleetEnv {
    async fn wait_for_output(&mut self, run: &str, text: &str) -> Value {
        let since = Instant::now();
        loop {
            let seen = self.wait_until(run, |run| run["status"] != "submitted").await;
            let output = self.output(&seen).await;
            if output.contains(text) {
                return seen;
            }
            let log = self.ground.dispatcher_log();
            assert!(since.elapsed() < TIMEOUT, "{run} writes {output:?}: {seen:#}\n{log}");
            tokio::time::sleep(POLL_INTERVAL).await;
        }
    }

    /// Runs jobs that are stopped: one that needs most of its time, and ones whose time ends.
    async fn check_stop_durations(&mut self, more: Value) {
        let with = |name: &str, commands: &str, stop_duration: u64| {
            let mut task = task(name, commands, more.clone());
            task["stop_duration"] = stop_duration.into();
            task
        };
        let jobs =
            [("saves", SAVES_ON_STOP, 120), ("ignores", IGNORES_STOP, 2), ("aborted", IGNORES_STOP, 3600)];
        for (name, commands, secs) in jobs {
            self.apply(&with(name, commands, secs)).await;
        }
        for (name, ..) in jobs {
            self.wait_for_output(name, "ready").await;
        }
        let names: Vec<&str> = jobs.iter().map(|(name, ..)| *name).collect();
        self.post("runs/stop", &json!({"runs_names": names, "abort": false})).await;

        let run = self.wait_until_final("ignores").await;
        let last = first_submission(&run);
        let killed = "it was still running 2 s after the stop request (`stop_duration`) and was killed";
        let message = last["termination_reason_message"].as_str().unwrap_or_default();
        assert!(message.contains(killed), "{run:#}");
        assert_eq!((&last["status"], &last["exit_status"]), (&json!("terminated"), &json!(137)), "{run:#}");

        // The signal came once, and to the program itself.
        let run = self.wait_until_final("saves").await;
        // A shell reports that the signal ended its `sleep`, if it was in one.
        let output = self.output(&run).await.replace("Terminated\n", "");
        assert_eq!(output, "ready\nasked\nsaved\n");
        assert_eq!(run["status"], "terminated", "{run:#}");

        // An abort ends the time of the stop before it.
        let run = self.wait_until("aborted", |_| true).await;
        assert_eq!(run["status"], "terminating", "{run:#}");
        self.post("runs/stop", &json!({"runs_names": ["aborted"], "abort": true})).await;
        self.wait_until_final("aborted").await;
        let since = Instant::now();
        while !self.cluster.say("squeue", &["-h"]).is_empty() {
            assert!(since.elapsed() < TIMEOUT, "{}", self.cluster.say("squeue", &[]));
            tokio::time::sleep(POLL_INTERVAL).await;
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_job_of_a_cluster_has_exactly_its_stop_duration() {
    let mut field = SlurmFleetEnv::start().await;
    field.check_stop_durations(json!({})).await;
}

/// Its three containers are the first ones of their engine, and start at the same time.
#[tokio::test(flavor = "multi_thread")]
async fn a_container_job_of_a_cluster_has_exactly_its_stop_duration() {
    let mut field = SlurmFleetEnv::with_images().await;
    field.check_stop_durations(json!({"image": IMAGE, "shell": "sh"})).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_job_of_a_cluster_runs_in_an_image_whose_user_is_not_root() {
    const IMAGE_OF_USER: &str = "windlass-e2e/busybox-user:1";
    let mut field = SlurmFleetEnv::with_images().await;
    load_image_of_user(&engine_socket(), IMAGE_OF_USER, "1000:1000");
    let commands = "echo \"$GREETING\"; echo made > made && cat made; echo kept > /out/kept && cat /out/kept";
    field.apply(&task("user", commands, json!({"image": IMAGE_OF_USER, "shell": "sh"}))).await;
    let run = field.wait_until_final("user").await;
    let output = field.output(&run).await;
    assert_eq!((run["status"].as_str(), output.as_str()), (Some("done"), "it's me\nmade\nkept\n"), "{run:#}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_job_of_a_cluster_runs_in_an_image_on_nodes_without_an_engine() {
    let registry = Registry::start().await;
    let options = ImageOptions { config: r#"{"Env": ["FROM_IMAGE=yes"]}"#, ..ImageOptions::default() };
    let (image, _) = registry.put_with("team/busybox", "1", busybox_layer(None), options);
    let store = temp_dir("cluster-images").unwrap();
    let images = store.path().display().to_string();
    let cluster = SlurmCluster::start_without_engine(&[SIZE; 2]);
    let arguments = ["--runtime", "oci", "--images", &images];
    let mut field = SlurmFleetEnv::on_cluster(cluster, &arguments, Vec::new()).await;
    let commands = "echo \"$GREETING $FROM_IMAGE\"; echo kept > /out/kept && cat /out/kept; id -u";
    field.apply(&task("contained", commands, json!({"image": image, "shell": "sh"}))).await;
    let run = field.wait_until_final("contained").await;
    let output = field.output(&run).await;
    let expected = (Some("done"), "it's me yes\nkept\n0\n");
    assert_eq!((run["status"].as_str(), output.as_str()), expected, "{run:#}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_run_requests_gpus_of_a_cluster_by_their_type() {
    let with_gpus = NodeSize { gpus: 2, gpu_type: Some("h100"), ..SIZE };
    let mut field = SlurmFleetEnv::with_nodes(&[SIZE, with_gpus]).await;
    let gpu = |name: &str| {
        let resources = json!({"cpu": {"count": {"min": 1}}, "memory": {"min": 0.1}, "disk": null,
            "gpu": {"name": [name], "count": {"min": 1, "max": 1}}});
        json!({"resources": resources})
    };
    let plan =
        field.post("runs/get_plan", &json!({"run_spec": spec(&task("plan", "true", gpu("A100")))})).await;
    let why = plan["job_plans"][0].to_string();
    assert!(why.contains("needs GPU A100, has H100"), "{plan:#}");

    field.apply(&task("typed", "echo \"gpus $SLURM_JOB_GPUS\"; sleep 600", gpu("H100"))).await;
    field.wait_until("typed", |run| run["status"] == "running").await;
    let requested = field.cluster.say("squeue", &["-h", "-o", "%b %N"]);
    assert_eq!(requested.trim(), "gres:gpu:h100:1 n2");
    field.post("runs/stop", &json!({"runs_names": ["typed"], "abort": false})).await;
    field.wait_until_final("typed").await;
}
