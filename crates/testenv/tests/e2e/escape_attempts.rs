//! A job that tries to escape from its sandbox: the same attempts in every runtime, and a table of the results.

use std::{
    collections::BTreeMap,
    fs,
    os::unix::fs::{FileTypeExt as _, PermissionsExt as _},
    path::{Path, PathBuf},
    process::Command,
};

use serde_json::{Value, json};
use windlass_testenv::{
    images::busybox_layer,
    queue_env::QueueEnv,
    server::binary_path,
    test_env::{load_busybox_image, load_image},
};
use windlass_testkit::{
    TempDir,
    lab::registry::{ImageOptions, Registry},
    wait::eventually_async,
};

use crate::{
    containers::IMAGE,
    runtimes::{ImageArchives, PodmanService},
    test_env::{HostMode, TestEnv, engine_socket, newest_submission, small_task_config},
};

const PROGRAM: &str = "windlass-ways-out";
/// A text in the environment of another job.
const CANARY: &str = "canary-of-another-job-2f60c1";
/// The test image with the program in it.
const WITH_PROGRAM: &str = "windlass-e2e/ways-out:1";
/// Actions that root may perform inside a container, with the capabilities that a container keeps. None leads out of
/// it.
const INSIDE_A_CONTAINER: [&str; 5] = [
    "a program that becomes root",
    "join root's group beside its own",
    "become root's group",
    "become root",
    "another root directory",
];
/// A job on the machine's network reaches the port of the server, which requires a token.
const ON_THE_MACHINES_NETWORK: [&str; 1] = ["connect to the server"];
/// Attempts that succeed without a sandbox: a positive control, which shows that the targets are there and the attempts work.
const REACHED_WITHOUT_A_SANDBOX: [&str; 11] = [
    "read the master key",
    "read the database",
    "read the token of the other job",
    "the environment of another job",
    "the environment of the other job",
    "the environment of the server",
    "signal the server",
    "trace the server",
    "read the memory of the server",
    "connect to the agent",
    "connect to the runner of the other job",
];
/// Attempts that the control group of the job refuses, whether or not there is such a service.
const METADATA: &str = "the cloud's metadata";
const NOT_PERMITTED: &str = "Operation not permitted";
/// An agent that is not root has no such control groups: the separate network of a container has no route instead.
const NO_ROUTE: &str = "No route to host";
/// User of executors that are not root.
const USER: u32 = 61_237;
const TABLE: &str = "../../docs/reference/ways-out.md";

/// Results of the attempts by name.
type Outcomes = BTreeMap<String, String>;

/// A column of the table.
struct Column {
    runtime: &'static str,
    outcomes: Outcomes,
    /// The job is on the network of the machine.
    on_host_network: bool,
    /// Root may do some things inside, without leaving.
    is_container: bool,
    /// The agent or the executor is not root.
    is_rootless: bool,
}

fn parse_outcomes(output: &str) -> Outcomes {
    let lines = output.lines().filter_map(|line| {
        let mut parts = line.trim_end().splitn(3, '\t');
        Some((parts.next()?.to_owned(), (parts.next()?.to_owned(), parts.next()?.to_owned())))
    });
    lines.map(|(name, (outcome, detail))| (name, format!("{outcome}: {detail}"))).collect()
}

impl Column {
    fn of_process(runtime: &'static str, outcomes: Outcomes) -> Self {
        Self { runtime, outcomes, on_host_network: true, is_container: false, is_rootless: false }
    }

    fn of_container(runtime: &'static str, outcomes: Outcomes) -> Self {
        Self { runtime, outcomes, on_host_network: false, is_container: true, is_rootless: false }
    }

    /// Checks that no attempt succeeds except for those that stay inside.
    #[track_caller]
    fn assert_no_escape(&self) {
        let Self { runtime, outcomes, .. } = self;
        assert!(outcomes.len() >= 30, "{runtime}: {} ways were tried: {outcomes:#?}", outcomes.len());
        let open: Vec<_> = outcomes
            .iter()
            .filter(|(name, outcome)| outcome.starts_with("reached") && self.word(name) == "reached")
            .collect();
        assert!(open.is_empty(), "{runtime}: {open:#?}\nof {outcomes:#?}");
        let metadata: Vec<_> = outcomes.iter().filter(|(name, _)| name.starts_with(METADATA)).collect();
        let why = if self.is_rootless { NO_ROUTE } else { NOT_PERMITTED };
        let is_refused =
            |outcome: &String| outcome.contains(why) || (self.is_rootless && self.on_host_network);
        assert!(
            metadata.len() == 5 && metadata.iter().all(|(_, outcome)| is_refused(outcome)),
            "{runtime}: {metadata:#?}"
        );
        assert!(
            outcomes["use the server without a token"].starts_with("refused"),
            "{runtime}: {outcomes:#?}"
        );
    }

    /// Checks that a job without a sandbox reaches what the others must not reach.
    #[track_caller]
    fn assert_reaches_everything(&self) {
        for name in REACHED_WITHOUT_A_SANDBOX {
            let outcome = self.outcomes.get(name).unwrap_or_else(|| panic!("{name} was not tried"));
            assert!(outcome.starts_with("reached"), "{name}: {outcome}");
        }
        assert!(
            self.outcomes["use the server without a token"].starts_with("refused"),
            "{:#?}",
            self.outcomes
        );
    }

    /// Word of the table for an attempt.
    fn word(&self, name: &str) -> &'static str {
        let Some(outcome) = self.outcomes.get(name) else { return "–" };
        if name.starts_with(METADATA) && self.is_rootless && self.on_host_network {
            // Whether there is such a service depends on the machine.
            "open"
        } else if outcome.starts_with("refused") {
            "refused"
        } else if self.is_container && INSIDE_A_CONTAINER.contains(&name) {
            "inside"
        } else if self.on_host_network && ON_THE_MACHINES_NETWORK.contains(&name) {
            "open"
        } else {
            "reached"
        }
    }
}

/// The first process below `/proc` with the other job's secret in its environment.
fn other_job() -> u32 {
    find_other_job().expect("no process holds the other job's secret")
}

fn find_other_job() -> Option<u32> {
    let processes = fs::read_dir("/proc").unwrap().flatten();
    let holds = |pid: &u32| {
        let environment = fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
        environment.windows(CANARY.len()).any(|part| part == CANARY.as_bytes())
    };
    let mut pids = processes.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    pids.find(holds)
}

/// Sockets below a directory.
fn sockets(dir: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(dir).into_iter().flatten().flatten() {
        match entry.file_type() {
            Ok(kind) if kind.is_dir() => sockets(&entry.path(), found),
            Ok(kind) if kind.is_socket() => found.push(entry.path()),
            Ok(_) | Err(_) => {}
        }
    }
}

/// Quotes an argument for a shell.
fn quoted(name: &str, target: impl std::fmt::Display) -> String {
    format!("'{}={target}'", name.replace('\'', "'\\''"))
}

/// Private files and sockets of the server and its agent, as arguments of the program.
fn targets(env: &TestEnv, engine: &Path, with_other_job: bool) -> String {
    let data = env.home().join("server");
    let local = data.join("local");
    let mut args = Vec::new();
    let mut found = Vec::new();
    sockets(&local, &mut found);
    let mut read = |name: &str, path: &Path| {
        assert!(path.exists(), "{} is not there to be read", path.display());
        args.push(format!("--read {}", quoted(name, path.display())));
    };
    read("the master key", &data.join("keys/master"));
    read("the server's directory", &data);
    read("the database", &data.join("windlass.db"));
    read("the server's log", &env.home().join("server.log"));
    read("the agent's directory", &local);
    if with_other_job {
        read("the other job's directories", &local.join("tasks"));
        let tokens =
            fs::read_dir(local.join("tasks")).unwrap().flatten().map(|task| task.path().join("token"));
        read("the token of the other job", &tokens.into_iter().find(|path| path.exists()).unwrap());
        args.push(format!("--pid {}", quoted("the other job", other_job())));
        let runner = found.iter().find(|path| !path.ends_with("shim.sock"));
        let runner = runner.expect("the runner of the other job has a socket");
        args.push(format!("--socket {}", quoted("the runner of the other job", runner.display())));
    }
    let shim = found.iter().find(|path| path.ends_with("shim.sock")).expect("the agent has a socket");
    args.push(format!("--socket {}", quoted("the agent", shim.display())));
    args.push(format!("--socket {}", quoted("the container engine", engine.display())));
    args.push(format!("--pid {}", quoted("the server", env.pid())));
    args.push(format!("--server {}", quoted("the server", env.address())));
    args.push(format!("--canary {CANARY}"));
    args.join(" ")
}

/// The program, at a path that any user of this machine can execute.
fn program() -> (TempDir, PathBuf) {
    let dir = windlass_testkit::temp_dir_in(Path::new("/opt"), "ways-out").unwrap();
    fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o755)).unwrap();
    let path = dir.path().join(PROGRAM);
    let copied =
        Command::new("strip").arg("-o").arg(&path).arg(binary_path(PROGRAM).unwrap()).status().unwrap();
    assert!(copied.success());
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
    (dir, path)
}

/// Loads the test image and that with the program into an engine.
fn load_images(engine: &Path) {
    load_busybox_image(engine);
    let (_dir, path) = program();
    load_image(engine, WITH_PROGRAM, Some(&path));
}

/// A task with the default user, for which a part of the machine is enough.
fn task(name: &str, image: Option<&str>, command: &str) -> Value {
    let mut job = small_task_config(name, &[command]);
    job.as_object_mut().unwrap().remove("user");
    if let Some(image) = image {
        job["image"] = json!(image);
    }
    job
}

async fn outcomes_of(env: &mut TestEnv, job: &Value) -> (Outcomes, Value) {
    let run = env.ends(job).await;
    let log = env.log(&run).await;
    assert_eq!(run["status"], "done", "{log}\n{run:#}");
    (parse_outcomes(&log), run)
}

/// Starts a job whose environment has a secret.
async fn start_other_job(env: &mut TestEnv, image: Option<&str>) {
    let mut other = task("other", image, "echo up; sleep 600");
    other["env"] = json!({"CANARY": CANARY});
    env.apply(&other).await;
    env.says("other", "up\n").await;
}

async fn stop_other_job(env: &mut TestEnv) {
    env.stop("other", true).await;
    env.reaches("other", &["terminated"]).await;
}

async fn as_a_process() -> Column {
    let (_dir, program) = program();
    let mut env = TestEnv::confined(HostMode::Processes).await;
    start_other_job(&mut env, None).await;
    let command = format!("{} {}", program.display(), targets(&env, &engine_socket(), true));
    let (outcomes, _) = outcomes_of(&mut env, &task("way-out", None, &command)).await;
    stop_other_job(&mut env).await;
    Column::of_process("plain process, confined", outcomes)
}

/// The positive control: a job with all rights of the server.
async fn without_a_sandbox() -> Column {
    let (_dir, program) = program();
    // These servers run plain processes with their own rights.
    let mut env = TestEnv::new(HostMode::Processes).await;
    start_other_job(&mut env, None).await;
    let targets = targets(&env, &engine_socket(), true);
    let command = format!("{} --without-changes yes {targets}", program.display());
    let (outcomes, _) = outcomes_of(&mut env, &task("way-out", None, &command)).await;
    stop_other_job(&mut env).await;
    Column::of_process("plain process, `own`", outcomes)
}

/// Two columns: a job beside another one, which has a separate network, and one that has the whole machine.
async fn in_containers(
    mut env: TestEnv,
    engine: &Path,
    other_image: &str,
    image: &str,
    runtimes: [&'static str; 2],
) -> [Column; 2] {
    start_other_job(&mut env, Some(other_image)).await;
    let command = format!("{PROGRAM} {}", targets(&env, engine, true));
    let (shared, run) = outcomes_of(&mut env, &task("way-out", Some(image), &command)).await;
    assert_eq!(newest_submission(&run)["job_runtime_data"]["network_mode"], "bridge", "{run:#}");
    stop_other_job(&mut env).await;
    let command = format!("{PROGRAM} {}", targets(&env, engine, false));
    let mut job = task("whole", Some(image), &command);
    // Nearly all memory of the machine, which is all of its blocks. The number of cores may be that of the defaults,
    // which do not count on the machine of the server.
    let machine = env.fleet("local").await["instances"][0]["instance_type"]["resources"].clone();
    let memory_gb = machine["memory_mib"].as_f64().unwrap() / 1024.0 * 0.95;
    job["resources"] = json!({"cpu": {"count": {"min": 1}}, "memory": {"min": memory_gb}, "disk": null});
    let (whole, run) = outcomes_of(&mut env, &job).await;
    assert_eq!(newest_submission(&run)["job_runtime_data"]["network_mode"], "host", "{run:#}");
    let [first, second] = runtimes;
    let whole = Column { on_host_network: true, ..Column::of_container(second, whole) };
    [Column::of_container(first, shared), whole]
}

async fn in_podman() -> [Column; 2] {
    let podman = PodmanService::start().await;
    load_images(&podman.socket());
    let mut env = TestEnv::new_unstarted(HostMode::Containers).with_engine(podman.socket());
    env.start().await;
    in_containers(env, &podman.socket(), IMAGE, WITH_PROGRAM, ["Podman", "Podman, machine's network"]).await
}

async fn without_an_engine() -> [Column; 2] {
    let images = ImageArchives::new();
    let (other, image) = (images.save(IMAGE), images.save(WITH_PROGRAM));
    let env = images.start_server().await;
    in_containers(
        env,
        &engine_socket(),
        &other,
        &image,
        ["without an engine (`oci`)", "`oci`, machine's network"],
    )
    .await
}

/// The same with a server and an agent that are not root.
async fn without_an_engine_and_root() -> [Column; 2] {
    let images = ImageArchives::new();
    let (other, image) = (images.save(IMAGE), images.save(WITH_PROGRAM));
    let env = images.start_unprivileged_server().await;
    let runtimes = ["`oci` without root", "`oci` without root, machine's network"];
    let columns = in_containers(env, &engine_socket(), &other, &image, runtimes).await;
    columns.map(|column| Column { is_rootless: true, ..column })
}

/// Dispatcher of the queue, and what it runs.
struct QueueColumn<'a> {
    runtime: &'static str,
    arguments: &'a [&'a str],
    on_host_network: bool,
    /// Image with a shell and the program; `none` for a plain process.
    image: &'a str,
    program: &'a str,
    /// Directory with the program of the engine, before the others.
    engine_dir: Option<&'a Path>,
    /// User of the dispatcher and its executors, instead of root.
    user: Option<u32>,
}

impl QueueColumn<'_> {
    async fn outcomes(&self) -> Column {
        let mut ground = QueueEnv::start("ways-out").await;
        ground.user = self.user;
        ground.env.push(("DOCKER_HOST", format!("unix://{}", engine_socket().display())));
        if let Some(dir) = self.engine_dir {
            let path = std::env::var("PATH").unwrap();
            ground.env.push(("PATH", format!("{}:{path}", dir.display())));
        }
        let token = ground.token("dispatch.token").await;
        ground.start_local_dispatcher_with(&token, "work", self.arguments);
        let contained = || json!({ "container_image": self.image });
        let other = ["sh", "-c", &format!("CANARY={CANARY} exec sleep 600")];
        let other = ground.request(&other, contained()).await;
        ground.until(&other.container, "the other one runs", |record| record["state"] == "Running").await;
        eventually_async("the other one is a process", async || find_other_job().map(drop)).await;
        let data = ground.dir.join("data");
        // As `windlass server start` creates it.
        let private = fs::Permissions::from_mode(0o600);
        fs::set_permissions(ground.dir.join("server.log"), private).unwrap();
        let mut command = vec![self.program.to_owned(), "--canary".to_owned(), CANARY.to_owned()];
        for (name, path) in [
            ("the master key", data.join("keys/master")),
            ("the server's directory", data.clone()),
            ("the database", data.join("windlass.db")),
            ("the dispatcher's token", token.clone()),
            ("the dispatcher's directory", ground.dir.join("work")),
            ("the server's log", ground.dir.join("server.log")),
        ] {
            assert!(path.exists(), "{} is not there to be read", path.display());
            command.extend(["--read".to_owned(), format!("{name}={}", path.display())]);
        }
        command
            .extend(["--socket".to_owned(), format!("the container engine={}", engine_socket().display())]);
        command.extend(["--pid".to_owned(), format!("the server={}", ground.server_pid())]);
        command.extend(["--pid".to_owned(), format!("the other job={}", other_job())]);
        command.extend(["--server".to_owned(), format!("the server={}", ground.address())]);
        let words: Vec<&str> = command.iter().map(String::as_str).collect();
        let requested = ground.submit(&words, contained()).await;
        let ended = ground.ended(&requested).await;
        let output = String::from_utf8(ground.output(&requested, "stdout").await).unwrap();
        assert_eq!(ended["exit_code"], 0, "{ended:#}\n{output}\n{}", ground.dispatcher_log());
        ground.delete_request(&other).await;
        ground.ended(&other.container).await;
        Column {
            runtime: self.runtime,
            outcomes: parse_outcomes(&output),
            on_host_network: self.on_host_network,
            is_container: self.image != "none",
            is_rootless: self.user.is_some(),
        }
    }
}

/// The columns of the queue.
async fn in_the_queue() -> Vec<Column> {
    let in_docker = QueueColumn {
        runtime: "queue, Docker",
        arguments: &[],
        on_host_network: false,
        image: WITH_PROGRAM,
        program: PROGRAM,
        engine_dir: None,
        user: None,
    };
    let on_host_network = QueueColumn {
        runtime: "queue, Docker, machine's network",
        arguments: &["--network", "host"],
        on_host_network: true,
        ..in_docker
    };
    let (_dir, path) = program();
    let plain = QueueColumn {
        runtime: "queue, plain process",
        arguments: &["--runtime", "process"],
        on_host_network: true,
        image: "none",
        program: path.to_str().unwrap(),
        engine_dir: None,
        user: None,
    };
    let registry = Registry::start().await;
    let options = ImageOptions { config: r#"{"Env": ["PATH=/bin"]}"#, ..ImageOptions::default() };
    let (image, _) = registry.put_with("team/ways-out", "1", busybox_layer(Some(&path)), options);
    let store = windlass_testkit::temp_dir("ways-out-images").unwrap();
    let store = store.path().display().to_string();
    let in_oci = QueueColumn {
        runtime: "queue, `oci`",
        arguments: &["--runtime", "oci", "--images", &store],
        on_host_network: false,
        image: &image,
        program: PROGRAM,
        engine_dir: None,
        user: None,
    };
    let own_store = windlass_testkit::temp_dir("ways-out-images").unwrap();
    std::os::unix::fs::chown(own_store.path(), Some(USER), Some(USER)).unwrap();
    fs::set_permissions(own_store.path(), fs::Permissions::from_mode(0o700)).unwrap();
    let own_store = own_store.path().display().to_string();
    let without_root = QueueColumn {
        runtime: "queue, `oci` without root",
        arguments: &["--runtime", "oci", "--images", &own_store],
        user: Some(USER),
        ..in_oci
    };
    let mut columns = Vec::new();
    for column in [in_docker, on_host_network, plain, in_oci, without_root] {
        columns.push(column.outcomes().await);
    }
    let podman = PodmanService::start().await;
    load_images(&podman.socket());
    let dir = podman.program_dir();
    let in_podman = QueueColumn {
        runtime: "queue, Podman",
        arguments: &["--runtime", "podman"],
        on_host_network: false,
        image: WITH_PROGRAM,
        program: PROGRAM,
        engine_dir: Some(&dir),
        user: None,
    };
    columns.push(in_podman.outcomes().await);
    columns
}

#[tokio::test]
async fn jobs_cannot_escape_from_confined_processes_docker_podman_oci_or_the_queue() {
    load_images(&engine_socket());
    let mut columns = vec![as_a_process().await];
    let docker = TestEnv::new(HostMode::Containers).await;
    let runtimes = ["Docker", "Docker, machine's network"];
    columns.extend(in_containers(docker, &engine_socket(), IMAGE, WITH_PROGRAM, runtimes).await);
    columns.extend(in_podman().await);
    columns.extend(without_an_engine().await);
    columns.extend(without_an_engine_and_root().await);
    columns.extend(in_the_queue().await);
    for column in &columns {
        column.assert_no_escape();
    }
    let control = without_a_sandbox().await;
    control.assert_reaches_everything();
    columns.insert(0, control);
    check_table(&columns);
}

/// Compares the table of the reference with the results; `UPDATE=1` writes it.
fn check_table(columns: &[Column]) {
    let mut names: Vec<&String> = columns.iter().flat_map(|column| column.outcomes.keys()).collect();
    names.sort();
    names.dedup();
    let mut text = String::from(
        "# Ways out\n\nA job tries each of these in every runtime, in the test \
         `jobs_cannot_escape_from_confined_processes_docker_podman_oci_or_the_queue`, which also compares this table. \
         The agent and the dispatcher run as root, except in the columns `without root`. `machine's network`: the \
         container has the whole machine, or the dispatcher was started with `--network host`.\n\n\
         `refused`: the system said no, or what was looked for is not there. The cloud's metadata is refused by the \
         control group of the job, whether there is such a service or not; without root, by the routes of the \
         container's network. `inside`: root of a container may do it, in \
         its container alone. `open`: a job on the machine's network reaches the port of the server, which accepts \
         nothing without a token, and without root also the cloud's metadata, if there is such a service. `–`: there is nothing of the kind. The column `own` is a positive control: a job with \
         the server's own rights, which makes only the attempts that change nothing.\n\n| way |",
    );
    for column in columns {
        text += &format!(" {} |", column.runtime);
    }
    text += "\n| --- |";
    text += &" --- |".repeat(columns.len());
    text.push('\n');
    for name in names {
        text += &format!("| {name} |");
        for column in columns {
            text += &format!(" {} |", column.word(name));
        }
        text.push('\n');
    }
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(TABLE);
    if std::env::var_os("UPDATE").is_some() {
        fs::write(&path, &text).unwrap();
    }
    let written = fs::read_to_string(&path).unwrap_or_default();
    assert_eq!(written, text, "docs/reference/ways-out.md is not what was seen; UPDATE=1 writes it");
}
