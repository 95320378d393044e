//! Plain processes with the default isolation: each without access to other tasks, the agent and the server.

use std::{
    fs,
    path::Path,
    process::{Command, Stdio},
};

use base64::{Engine as _, engine::general_purpose::STANDARD};
use serde_json::{Value, json};
use windlass_testenv::{
    images::busybox_layer,
    queue_env::QueueEnv,
    server::{call_api_as, submission},
    services::{ServiceCaller, TIMEOUT, free_port, probe_config, service_config},
};
use windlass_testkit::{
    lab::registry::{ImageOptions, Registry},
    temp_dir,
    wait::eventually_ok_async,
};

use crate::{
    containers::{IMAGE, image},
    runtimes::{ImageArchives, PodmanService},
    test_env::{
        HostMode, TestEnv, engine_socket, load_busybox_image, newest_submission, small_task_config,
        task_config,
    },
};

/// A task without a `user`.
fn plain(name: &str, commands: &[&str]) -> Value {
    let mut job = task_config(name, commands);
    job.as_object_mut().unwrap().remove("user");
    job
}

/// Adds a member of project `main` with role `user`, and returns their token.
async fn create_member(env: &mut TestEnv, name: &str) -> String {
    let made = env.post("/api/users/create", &json!({"username": name, "global_role": "user"})).await;
    let member = json!({"members": [{"username": name, "project_role": "user"}]});
    env.post("/api/projects/main/add_members", &member).await;
    made["creds"]["token"].as_str().unwrap().to_owned()
}

async fn submit(env: &TestEnv, token: &str, job: &Value) {
    let requested = call_api_as(env.address(), token, "/api/project/main/runs/apply", &submission(job)).await;
    requested.unwrap().ok().unwrap();
}

/// Attacks of a member's job on the machine of the server. Each line reports what it obtained.
fn attacks(data: &Path, server: u32) -> Vec<String> {
    let data = data.display();
    let read = |what: &str, path: &str| format!("if cat {path} >/dev/null 2>&1; then echo GOT {what}; fi");
    // In brackets, so that the attack does not match its own command line.
    let search = |what: &str, files: &str, word: &str| {
        format!("if cat {files} 2>/dev/null | tr '\\0' '\\n' | grep -q '{word}'; then echo GOT {what}; fi")
    };
    vec![
        "echo uid $(id -u)".to_owned(),
        read("keys", &format!("{data}/keys/master")),
        read("database", &format!("{data}/windlass.db")),
        read("tokens", &format!("{data}/local/tasks/*/token")),
        read("specifications", &format!("{data}/local/tasks/*/spec*")),
        format!("if ls {data}/local/tasks/* >/dev/null 2>&1; then echo GOT tasks; fi"),
        format!("if [ -w {data}/windlass.db ] || [ -w {data}/local ]; then echo GOT write; fi"),
        format!("if [ -S {data}/local/shim.sock ]; then echo GOT socket; fi"),
        search("environment", "/proc/[0-9]*/environ", "BOB_PASSWOR[D]=canary"),
        search("arguments", "/proc/[0-9]*/cmdline", "bench-toke[n]"),
        format!("if kill -0 {server} 2>/dev/null; then echo GOT signals; fi"),
        "if grep -q '^NoNewPrivs:[[:space:]]*0' /proc/self/status; then echo GOT privileges; fi".to_owned(),
        "if grep -q '^Seccomp:[[:space:]]*0' /proc/self/status; then echo GOT system calls; fi".to_owned(),
        "if grep -q '^Cap\\(Eff\\|Bnd\\):.*[1-9a-f]' /proc/self/status; then echo GOT capabilities; fi"
            .to_owned(),
        // Shows that the programs which search are there and find something.
        search("its own environment", "/proc/[0-9]*/environ", "OWN_PASSWOR[D]=control"),
        "echo end".to_owned(),
    ]
}

/// Adds the variable that the attacks must find.
fn with_control(mut job: Value) -> Value {
    job["env"] = json!({"OWN_PASSWORD": "control"});
    job
}

/// Checks that the attacks obtained nothing but what belongs to their own job.
#[track_caller]
fn assert_nothing_obtained(log: &str, more: &Value) {
    assert!(log.ends_with("end\n"), "{log}\n{more:#}");
    let got: Vec<&str> = log.lines().filter(|line| line.contains("GOT")).collect();
    assert_eq!(got, ["GOT its own environment"], "{log}");
}

#[tokio::test]
async fn x5_a_job_cannot_read_data_of_the_server_or_of_another_members_job() {
    let mut env = TestEnv::confined(HostMode::Processes).await;
    let (alice, bob) = (create_member(&mut env, "alice").await, create_member(&mut env, "bob").await);
    let mut victim = plain("victim", &["echo up; sleep 600"]);
    victim["env"] = json!({"BOB_PASSWORD": "canary-7781"});
    submit(&env, &bob, &victim).await;
    env.says("victim", "up").await;

    let commands = attacks(&env.home().join("server"), env.pid());
    let commands: Vec<&str> = commands.iter().map(String::as_str).collect();
    submit(&env, &alice, &with_control(plain("attack", &commands))).await;
    let run = env.reaches("attack", &["done", "failed"]).await;
    let log = env.log(&run).await;
    assert_nothing_obtained(&log, &run);
    let server = fs::metadata(env.home().join("server/windlass.db")).unwrap();
    let uid: u32 = log.lines().next().unwrap().trim_start_matches("uid ").parse().unwrap();
    assert_ne!(uid, std::os::unix::fs::MetadataExt::uid(&server), "{log}");

    let role = env.post("/api/users/get_user", &json!({"username": "alice"})).await;
    assert_eq!(role["global_role"], "user", "{role:#}");
    let message = newest_submission(&run)["job_runtime_data"]["runs_in"].clone();
    assert_eq!(message, "a plain process, confined (own user)", "{run:#}");
    env.stop("victim", true).await;
    env.reaches("victim", &["terminated"]).await;
}

/// The same attacks for a container, where root has capabilities in its container alone.
fn attacks_from_container(data: &Path, server: u32) -> Vec<String> {
    attacks(data, server).into_iter().filter(|line| !line.contains("GOT capabilities")).collect()
}

/// A task with the user of its image.
fn contained(name: &str, image: &str, commands: &[&str]) -> Value {
    let mut job = small_task_config(name, commands);
    job.as_object_mut().unwrap().remove("user");
    job["image"] = json!(image);
    job
}

/// Lets a member attack the server and another member's job from a container of this image.
async fn attack_from_container(mut env: TestEnv, image: &str) {
    let (alice, bob) = (create_member(&mut env, "alice").await, create_member(&mut env, "bob").await);
    let mut victim = contained("victim", image, &["echo up; sleep 600"]);
    victim["env"] = json!({"BOB_PASSWORD": "canary-7781"});
    submit(&env, &bob, &victim).await;
    env.says("victim", "up").await;
    let commands = attacks_from_container(&env.home().join("server"), env.pid());
    let commands: Vec<&str> = commands.iter().map(String::as_str).collect();
    submit(&env, &alice, &with_control(contained("attack", image, &commands))).await;
    let run = env.reaches("attack", &["done", "failed"]).await;
    let log = env.log(&run).await;
    assert_nothing_obtained(&log, &run);
    let role = env.post("/api/users/get_user", &json!({"username": "alice"})).await;
    assert_eq!(role["global_role"], "user", "{role:#}");
    env.stop("victim", true).await;
    env.reaches("victim", &["terminated"]).await;
}

#[tokio::test]
async fn x5_a_docker_job_cannot_take_over_the_server_or_another_members_job() {
    image();
    attack_from_container(TestEnv::new(HostMode::Containers).await, IMAGE).await;
}

#[tokio::test]
async fn x5_a_podman_job_cannot_take_over_the_server_or_another_members_job() {
    let podman = PodmanService::start().await;
    load_busybox_image(&podman.socket());
    let mut env = TestEnv::new_unstarted(HostMode::Containers).with_engine(podman.socket());
    env.start().await;
    attack_from_container(env, IMAGE).await;
}

#[tokio::test]
async fn x5_an_oci_job_cannot_take_over_the_server_or_another_members_job() {
    image();
    let images = ImageArchives::new();
    let name = images.save(IMAGE);
    attack_from_container(images.start_server().await, &name).await;
}

/// Lets a user of the queue attack the server and another user's container from a container of this image. The
/// dispatcher has these arguments and variables.
async fn attack_from_queue_container(
    image: &str,
    arguments: &[&str],
    variables: Vec<(&'static str, String)>,
) {
    let mut queue = QueueEnv::start("take-over").await;
    queue.env.extend(variables);
    let token = queue.token("dispatch.token").await;
    queue.start_local_dispatcher_with(&token, "work", arguments);
    let (alice, bob) = (queue.user("alice").await, queue.user("bob").await);
    let in_image = || json!({ "container_image": image, "environment": { "OWN_PASSWORD": "control" } });
    let victim = ["sh", "-c", "BOB_PASSWORD=canary-7781 exec sleep 600"];
    let victim = queue.request_as(&bob, &victim, in_image()).await;
    queue.until(&victim.container, "the victim runs", |record| record["state"] == "Running").await;
    let mut commands = attacks_from_container(&queue.dir.join("data"), queue.server_pid());
    let token = token.display();
    commands.insert(1, format!("if cat {token} >/dev/null 2>&1; then echo GOT dispatcher; fi"));
    let script = commands.join("\n");
    let attack = queue.request_as(&alice, &["sh", "-c", &script], in_image()).await;
    let ended = queue.ended(&attack.container).await;
    let output = String::from_utf8(queue.output(&attack.container, "stdout").await).unwrap();
    let errors = queue.output(&attack.container, "stderr").await;
    assert_nothing_obtained(&output, &json!([ended, String::from_utf8_lossy(&errors)]));
    let role = queue.api().await.post("/api/users/get_user", &json!({"username": "alice"})).await.unwrap();
    assert_eq!(role["global_role"], "user", "{role:#}");
    queue.delete_request(&victim).await;
    queue.ended(&victim.container).await;
}

#[tokio::test]
async fn x5_a_docker_container_of_the_queue_cannot_take_over_the_server_or_another_users_container() {
    image();
    let engine = format!("unix://{}", engine_socket().display());
    attack_from_queue_container(IMAGE, &[], vec![("DOCKER_HOST", engine)]).await;
}

#[tokio::test]
async fn x5_a_podman_container_of_the_queue_cannot_take_over_the_server_or_another_users_container() {
    let podman = PodmanService::start().await;
    load_busybox_image(&podman.socket());
    let path = format!("{}:{}", podman.program_dir().display(), std::env::var("PATH").unwrap());
    attack_from_queue_container(IMAGE, &["--runtime", "podman"], vec![("PATH", path)]).await;
}

#[tokio::test]
async fn x5_an_oci_container_of_the_queue_cannot_take_over_the_server_or_another_users_container() {
    let registry = Registry::start().await;
    let options = ImageOptions { config: r#"{"Env": ["PATH=/bin"]}"#, ..ImageOptions::default() };
    let (image, _) = registry.put_with("team/busybox", "1", busybox_layer(None), options);
    let store = temp_dir("take-over-images").unwrap();
    let store = store.path().display().to_string();
    attack_from_queue_container(&image, &["--runtime", "oci", "--images", &store], Vec::new()).await;
}

/// An image of Apptainer with a static busybox.
fn build_apptainer_image(dir: &Path) -> String {
    let root = dir.join("root");
    for name in ["bin", "proc", "dev", "sys", "tmp", "var/tmp", "etc"] {
        fs::create_dir_all(root.join(name)).unwrap();
    }
    fs::copy("/usr/bin/busybox", root.join("bin/busybox")).unwrap();
    let install = ["--install", "-s"];
    let chroot = Command::new("chroot").arg(&root).arg("/bin/busybox").args(install).arg("/bin").status();
    assert!(chroot.unwrap().success());
    fs::write(root.join("etc/passwd"), "root:x:0:0::/:/bin/sh\n").unwrap();
    fs::write(root.join("etc/group"), "root:x:0:\n").unwrap();
    let file = dir.join("busybox.sif");
    let built = Command::new("apptainer").arg("build").arg(&file).arg(&root).output().unwrap();
    assert!(built.status.success(), "{built:?}");
    file.display().to_string()
}

#[tokio::test]
async fn x5_an_apptainer_container_of_the_queue_cannot_take_over_the_server_or_another_users_container() {
    let scratch = temp_dir("apptainer").unwrap();
    let image = build_apptainer_image(scratch.path());
    let arguments = ["--runtime", "apptainer", "--network", "host"];
    attack_from_queue_container(&image, &arguments, Vec::new()).await;
}

/// Calls the API as this user.
async fn call(env: &TestEnv, token: &str, path: &str, body: &Value) -> Value {
    call_api_as(env.address(), token, path, body).await.unwrap().ok().unwrap()
}

/// The machine of the server is exported to all projects from the start.
#[tokio::test]
async fn x5_a_job_of_another_project_on_the_servers_machine_is_confined_and_ends_with_the_export() {
    let mut env = TestEnv::confined(HostMode::Processes).await;
    let made = env.post("/api/users/create", &json!({"username": "eve", "global_role": "user"})).await;
    let eve = made["creds"]["token"].as_str().unwrap().to_owned();
    call(&env, &eve, "/api/projects/create", &json!({"project_name": "lab"})).await;
    let mut victim = plain("victim", &["echo up; sleep 600"]);
    victim["env"] = json!({"BOB_PASSWORD": "canary-7781"});
    env.apply(&victim).await;
    env.says("victim", "up").await;

    let apply = "/api/project/lab/runs/apply";
    let status = async |env: &TestEnv, name: &str| {
        call(env, &eve, "/api/project/lab/runs/get", &json!({"run_name": name})).await
    };
    let reaches = async |env: &TestEnv, name: &str, statuses: &[&str]| {
        eventually_ok_async(&format!("{name} reaches {statuses:?}"), async || {
            let run = status(env, name).await;
            if statuses.iter().any(|wanted| run["status"] == *wanted) { Ok(run) } else { Err(run) }
        })
        .await
    };
    let mut commands = attacks(&env.home().join("server"), env.pid());
    commands.push("sleep 600".to_owned());
    let commands: Vec<&str> = commands.iter().map(String::as_str).collect();
    call(&env, &eve, apply, &submission(&with_control(plain("attack", &commands)))).await;
    let run = reaches(&env, "attack", &["running"]).await;
    let poll =
        json!({"run_name": "attack", "job_submission_id": newest_submission(&run)["id"], "limit": 1000});
    let log = eventually_ok_async("the attacks are over", async || {
        let page = call(&env, &eve, "/api/project/lab/logs/poll", &poll).await;
        let lines = page["logs"].as_array().unwrap().iter();
        let lines = lines.map(|line| STANDARD.decode(line["message"].as_str().unwrap()).unwrap());
        let text = String::from_utf8(lines.flatten().collect()).unwrap();
        if text.ends_with("end\n") { Ok(text) } else { Err(text) }
    })
    .await;
    assert_nothing_obtained(&log, &run);
    assert_eq!(
        newest_submission(&run)["job_runtime_data"]["runs_in"],
        "a plain process, confined (own user)",
        "{run:#}"
    );

    env.project("exports/delete", &json!({"name": "local"})).await;
    let run = reaches(&env, "attack", &["failed", "terminated"]).await;
    assert_eq!(newest_submission(&run)["termination_reason"], "instance_access_revoked", "{run:#}");
    let request = json!({"run_spec": submission(&plain("again", &["true"]))["plan"]["run_spec"]});
    let plan = call(&env, &eve, "/api/project/lab/runs/get_plan", &request).await;
    assert_eq!(plan["job_plans"][0]["total_offers"], 0, "{plan:#}");
    // The project that owns the machine goes on.
    let victim = env.run("victim").await;
    assert_eq!(victim["status"], "running", "{victim:#}");
    env.stop("victim", true).await;
    env.reaches("victim", &["terminated"]).await;
}

#[tokio::test]
async fn local_jobs_run_as_the_server_user_until_a_second_user_exists() {
    // The stage starts its servers with `own`.
    let mut env = TestEnv::new(HostMode::Processes).await;
    env.wait_for_hosts("local", 1).await;
    let key = env.home().join("server/keys/master");
    let read = format!("if cat {} >/dev/null 2>&1; then echo reads; else echo refused; fi", key.display());
    let runs_in = |run: &Value| newest_submission(run)["job_runtime_data"]["runs_in"].clone();

    let go = env.home().join("go");
    let wait = format!("until [ -e {} ]; do sleep 0.02; done", go.display());
    env.apply(&plain("alone", &[&read, &wait])).await;
    env.says("alone", "reads").await;
    let run = env.run("alone").await;
    let own = "a plain process, not confined: it has all rights of the server (`--local-processes own`)";
    assert_eq!(runs_in(&run), own, "{run:#}");
    let why = env.windlass(env.home(), &["why", "alone"]);
    assert!(String::from_utf8_lossy(&why.stdout).contains(own), "{why:?}");
    fs::write(&go, "").unwrap();
    env.reaches("alone", &["done"]).await;

    create_member(&mut env, "alice").await;
    let request = json!({"run_spec": submission(&plain("together", &[&read]))["plan"]["run_spec"]});
    let plan = env.project("runs/get_plan", &request).await["job_plans"][0].clone();
    let confined = "a plain process, confined (own user)";
    assert_eq!(plan["runs_in"], json!([confined]), "{plan:#}");
    let run = env.ends(&plain("together", &[&read])).await;
    assert_eq!(env.log(&run).await, "refused\n", "{run:#}");
    assert_eq!(runs_in(&run), confined, "{run:#}");

    // A disabled user can submit nothing.
    let body = json!({"username": "alice", "global_role": "user", "active": false});
    env.post("/api/users/update", &body).await;
    let run = env.ends(&plain("again", &[&read])).await;
    assert_eq!(env.log(&run).await, "reads\n", "{run:#}");
}

#[tokio::test]
async fn a_changed_process_mode_applies_to_new_jobs_and_keeps_running_ones() {
    let mut env = TestEnv::new(HostMode::Processes).await;
    let go = env.home().join("go");
    let wait = format!("echo up; until [ -e {} ]; do sleep 0.02; done; echo down", go.display());
    env.apply(&plain("before", &[&wait])).await;
    env.says("before", "up").await;
    env.stop_server();
    let mut env = env.with_env("WINDLASS_SERVER_LOCAL_PROCESSES", "refused");
    env.start().await;
    let why = "is a plain process, but the instance refuses plain processes";
    env.eventually_run("before", TIMEOUT, |run| run["status"] == "running").await;
    env.eventually_fleet("local", |fleet| fleet.to_string().contains("\"refused\"")).await;
    let run = env.ends(&plain("after", &["echo no"])).await;
    assert_eq!(run["status"], "failed", "{run:#}");
    assert!(run.to_string().contains(why), "{run:#}");
    fs::write(&go, "").unwrap();
    let run = env.reaches("before", &["done"]).await;
    assert_eq!(env.log(&run).await, "up\ndown\n");
}

#[tokio::test]
async fn a_confined_job_of_a_non_root_server_cannot_read_its_files_or_is_refused() {
    let mut env = TestEnv::unprivileged_with("confined").await;
    env.wait_for_hosts("local", 1).await;
    let reported = env.fleet("local").await["instances"][0]["instance_type"]["processes"].clone();
    let key = env.home().join("server/keys/master");
    let read = format!("if cat {} >/dev/null 2>&1; then echo reads; else echo refused; fi", key.display());
    let run = env.ends(&plain("who", &[&read])).await;
    if reported["confined_by"].is_null() {
        assert_eq!(run["status"], "failed", "{run:#}");
        assert!(run.to_string().contains("cannot be confined there"), "{run:#}");
    } else {
        assert_eq!(env.log(&run).await, "refused\n", "{run:#}\n{reported}");
    }
}

#[tokio::test]
async fn a_confined_job_has_a_home_a_temporary_directory_python_and_the_network() {
    let mut env = TestEnv::confined(HostMode::Processes).await;
    let version = Command::new("/usr/bin/python3")
        .args(["-c", "import sys; print('%d.%d' % sys.version_info[:2])"])
        .output()
        .unwrap();
    let version = String::from_utf8(version.stdout).unwrap().trim().to_owned();
    let address = env.address().to_owned();
    let temporary = format!("/tmp/windlass-busy-{}", std::process::id());
    let mut job = plain(
        "busy",
        &[
            "echo a > $HOME/a && cat $HOME/a",
            &format!("echo b > {temporary} && cat {temporary}"),
            "echo c > c && cat c",
            "python -c 'import sys; print(sys.prefix == sys.base_prefix)'",
            &format!(
                "python -c 'import urllib.request as u; print(u.urlopen(\"http://{address}/healthcheck\").status)'"
            ),
        ],
    );
    job["python"] = json!(version);
    let run = env.ends(&job).await;
    assert_eq!(env.log(&run).await, "a\nb\nc\nFalse\n200\n", "{run:#}");
    assert!(!Path::new(&temporary).exists(), "its temporary files are its own");
}

#[tokio::test]
async fn a_confined_service_is_reached_once_its_probe_succeeds_and_by_exec() {
    let mut env = TestEnv::confined(HostMode::Processes).await;
    let mut page = service_config("page", free_port());
    page.as_object_mut().unwrap().remove("user");
    page["probes"] = probe_config();
    env.apply(&page).await;
    let ready =
        |run: &Value| run["jobs"][0]["job_submissions"][0]["probes"][0]["success_streak"].as_i64() >= Some(2);
    env.eventually_run("page", TIMEOUT, ready).await;
    let caller = ServiceCaller::new(env.address());
    let got = caller.get("/proxy/services/main/page/").unwrap();
    assert!(got.status == 200 && got.body.contains("version=1"), "{got:?}\n{}", env.server_log());

    let inside = env.windlass(env.home(), &["exec", "page", "--", "sh", "-c", "echo in $(id -u)"]);
    let message = String::from_utf8_lossy(&inside.stdout).into_owned();
    assert!(inside.status.success(), "{inside:?}");
    assert!(message.starts_with("in ") && message.trim() != "in 0", "{message}");
}

#[tokio::test]
async fn ssh_connects_to_a_confined_dev_environment() {
    let env = TestEnv::confined(HostMode::Processes).await;
    let dir = env.home().to_owned();
    let dev = "type: dev-environment\nname: desk\nide: vscode\ninit: [echo kept > note]\n\
               resources: {cpu: 1.., memory: 0.., disk: null}\n";
    fs::write(dir.join("desk.yml"), dev).unwrap();
    let applied = env.windlass(&dir, &["apply", "-f", "desk.yml", "-y", "-d"]);
    assert!(applied.status.success(), "{applied:?}");
    let mut attach = env.command(&dir, &["attach", "desk"]);
    let mut attached = attach.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    env.eventually("the way in is written down", || {
        fs::read_to_string(dir.join(".ssh/config")).is_ok() && run_in_dev_environment(&env, "true").is_some()
    });
    let uid = run_in_dev_environment(&env, "id -u").unwrap();
    assert_ne!(uid.trim(), "0");
    let key = dir.join("server/keys/master");
    let read = format!("cat {} >/dev/null 2>&1 && echo reads || echo refused", key.display());
    assert_eq!(run_in_dev_environment(&env, &read).unwrap(), "refused\n");
    let _ = attached.kill();
    let _ = attached.wait();
}

/// Runs a command in the dev environment; `None` if the login is refused.
fn run_in_dev_environment(env: &TestEnv, command: &str) -> Option<String> {
    let mut ssh = Command::new("ssh");
    ssh.arg("-F").arg(env.home().join(".ssh/config")).args(["-o", "BatchMode=yes", "desk", command]);
    let done = ssh.stdin(Stdio::null()).output().unwrap();
    done.status.success().then(|| String::from_utf8_lossy(&done.stdout).into_owned())
}

#[tokio::test]
async fn a_confined_job_gets_its_stop_duration_and_its_volume_keeps_data() {
    let mut env = TestEnv::confined(HostMode::Processes).await;
    let volume = json!({"configuration": {"type": "volume", "name": "data", "backend": "local"}});
    env.project("volumes/create", &volume).await;
    env.eventually_volume("data", "active").await;
    let saves =
        "trap 'echo saved > /data/note; echo saved; exit 3' TERM; echo up; while :; do sleep 0.05; done";
    let mut job = plain("saver", &[saves]);
    job["volumes"] = json!(["data:/data"]);
    job["stop_duration"] = json!(600);
    env.apply(&job).await;
    env.says("saver", "up").await;
    env.stop("saver", false).await;
    let run = env.reaches("saver", &["terminated"]).await;
    assert_eq!(newest_submission(&run)["exit_status"], 3, "{run:#}");
    assert!(env.log(&run).await.contains("saved"), "{run:#}");

    // Another task, with a different user.
    let mut reader = plain("reader", &["cat /data/note"]);
    reader["volumes"] = job["volumes"].clone();
    let run = env.ends(&reader).await;
    assert_eq!(env.log(&run).await, "saved\n", "{run:#}");
}
