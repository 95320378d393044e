//! The container queue with the Arvados Python client from PyPI, and with the windlass dispatchers.

mod exec;
mod fleet;
mod oci;
mod outputs;
mod process;
mod slurm;

use std::{
    path::PathBuf,
    process::Command,
    time::{Duration, Instant},
};

use serde_json::{Value, json};
use windlass_testenv::{
    queue_env::QueueEnv,
    server::{TOKEN, binary_path},
};
use windlass_testkit::wait::eventually;

const TIMEOUT: Duration = Duration::from_secs(150);

#[tokio::test(flavor = "multi_thread")]
async fn arvados_python_client_makes_every_call_and_receives_every_event() {
    let home = std::env::var_os("WINDLASS_TEST_ARVADOS");
    let python =
        PathBuf::from(home.expect("WINDLASS_TEST_ARVADOS: `cargo xtask test` makes it")).join("bin/python");
    let ground = QueueEnv::start("python").await;
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
async fn local_containers_end_with_distinct_states_and_reasons() {
    let mut ground = QueueEnv::start("local").await;
    let token = ground.token("token").await;
    ground.dispatch(&token, "attempts");
    let script = r"printf 'a\377\000b'; echo broken >&2; cat etc/key; exit 7";
    let secret = json!({ "secret_mounts": { "/etc/key": { "kind": "text", "content": "c4nary" } } });
    let done = ground.submit(&["sh", "-c", script], secret).await;
    let slow =
        ground.submit(&["sleep", "600"], json!({ "scheduling_parameters": { "max_run_time": 1 } })).await;
    let absent = ground.submit(&["no-such-program"], json!({})).await;
    let huge = ground.submit(&["true"], json!({ "runtime_constraints": { "vcpus": 4096, "ram": 1 } })).await;

    let record = ground.ended(&done).await;
    assert_eq!(
        (record["state"].as_str(), record["exit_code"].as_i64()),
        (Some("Complete"), Some(7)),
        "{record}"
    );
    assert_eq!(ground.output(&done, "stdout").await, b"a\xff\0bc4nary");
    assert_eq!(ground.output(&done, "stderr").await, b"broken\n");
    assert_eq!(ground.messages(&done).await, ["dispatched"]);
    let record = ground.ended(&slow).await;
    assert_eq!(
        (record["state"].as_str(), &record["runtime_status"]["reason"]),
        (Some("Cancelled"), &json!("max_run_time"))
    );
    let record = ground.ended(&absent).await;
    assert_eq!(record["runtime_status"]["reason"], "start_failed", "{record}");
    let left =
        |record: &Value| record["scheduling_status"].as_str().is_some_and(|why| why.contains("4096 CPUs"));
    let record = ground.until(&huge, "nobody says why it waits", left).await;
    assert_eq!(record["state"], "Queued", "what cannot run here is left for others");
}

#[tokio::test(flavor = "multi_thread")]
async fn container_output_and_resource_usage_are_kept() {
    let mut ground = QueueEnv::start("outputs").await;
    let token = ground.token("token").await;
    let outputs = ground.dir.join("outputs");
    ground.start_local_dispatcher_with(&token, "attempts", &["--outputs", outputs.to_str().unwrap()]);
    let program = "mkdir out/below; echo result > out/below/file; touch out/temporary";
    let patterns = json!({"output_glob": ["below/**"]});
    let uuid = ground.submit(&["sh", "-c", program], patterns).await;
    let record = ground.ended(&uuid).await;
    assert_eq!((&record["state"], &record["exit_code"]), (&json!("Complete"), &json!(0)), "{record}");
    let kept = PathBuf::from(record["output"].as_str().unwrap());
    assert_eq!(kept, outputs.join(format!("{uuid}.1")));
    assert_eq!(std::fs::read_to_string(kept.join("below/file")).unwrap(), "result\n");
    assert!(!kept.join("temporary").exists(), "no pattern selects it");
    assert_eq!(record["log"], format!("containers/{uuid}/output"));
    assert!(record["runtime_status"]["usage"]["wall_us"].as_u64().is_some_and(|us| us > 0), "{record}");
}

#[tokio::test(flavor = "multi_thread")]
async fn finished_containers_are_listed_on_request() {
    let mut ground = QueueEnv::start("listed").await;
    let token = ground.token("token").await;
    ground.dispatch(&token, "attempts");
    let uuid = ground.submit(&["true"], json!({})).await;
    ground.ended(&uuid).await;
    let list = async |args: &[&str]| {
        let mut command = Command::new(binary_path("windlass").unwrap());
        command.args(["container", "list", "-o", "name"]).args(args).env("HOME", &ground.dir);
        command.env("WINDLASS_URL", format!("http://{}", ground.address())).env("WINDLASS_TOKEN", TOKEN);
        let listed = tokio::task::spawn_blocking(move || command.output()).await.unwrap().unwrap();
        assert!(listed.status.success(), "{listed:?}");
        String::from_utf8(listed.stdout).unwrap()
    };
    assert_eq!(list(&[]).await, "");
    assert_eq!(list(&["--all"]).await, format!("{uuid}\n"));
}

/// A dispatcher that a timer starts again and again.
#[tokio::test(flavor = "multi_thread")]
async fn single_polls_run_a_container_to_its_end() {
    let ground = QueueEnv::start("once").await;
    let token = ground.token("token").await;
    let uuid = ground.submit(&["sh", "-c", "sleep 1; echo done"], json!({})).await;
    let (server, dir) = (format!("http://{}", ground.address()), ground.dir.join("attempts"));
    let poll = move || {
        let mut command = Command::new(binary_path("windlass").unwrap());
        command
            .args(["dispatch", "local", "--once", "--allow-process", "--server", &server, "--token-file"])
            .arg(&token);
        command.arg("--dir").arg(&dir).arg("--agent").arg(binary_path("windlass-agent").unwrap());
        let polled = command.output().unwrap();
        assert!(polled.status.success(), "{}", String::from_utf8_lossy(&polled.stderr));
    };
    let start = Instant::now();
    loop {
        let poll = poll.clone();
        tokio::task::spawn_blocking(poll).await.unwrap();
        let record = ground.containers().await.remove(&uuid).unwrap();
        if record["state"] == "Complete" {
            break;
        }
        assert!(start.elapsed() < TIMEOUT, "{record}");
    }
    assert_eq!(ground.output(&uuid, "stdout").await, b"done\n");
}

#[tokio::test(flavor = "multi_thread")]
async fn arvados_python_client_works_inside_a_container_without_server_tls() {
    let home = std::env::var_os("WINDLASS_TEST_ARVADOS");
    let home = PathBuf::from(home.expect("WINDLASS_TEST_ARVADOS: `cargo xtask test` makes it"));
    let mut ground = QueueEnv::start("inside").await;
    // The program runs as a separate user, who may not have access to the directory of the client.
    let library = std::fs::read_dir(home.join("lib")).unwrap().flatten().next().unwrap().path();
    let copied = ground.dir.join("packages");
    let copy = Command::new("cp").arg("-r").arg(library.join("site-packages")).arg(&copied).status().unwrap();
    assert!(copy.success());
    let script = format!("import sys; sys.path.insert(0, '{}')\n", copied.display());
    let token = ground.token("token").await;
    ground.dispatch(&token, "attempts");
    let script = script + "import arvados; print(arvados.api('v1').containers().current().execute()['uuid'])";
    let large = json!({ "runtime_constraints": { "vcpus": 1, "ram": 512 << 20, "API": true } });
    let uuid = ground.submit(&["/usr/bin/python3", "-c", &script], large).await;
    let record = ground.ended(&uuid).await;
    let reported = String::from_utf8_lossy(&ground.output(&uuid, "stderr").await).into_owned();
    assert_eq!(
        (&record["state"], &record["exit_code"]),
        (&json!("Complete"), &json!(0)),
        "{record} {reported}"
    );
    assert_eq!(ground.output(&uuid, "stdout").await, format!("{uuid}\n").into_bytes(), "{reported}");
}

#[tokio::test(flavor = "multi_thread")]
async fn dispatchers_and_executors_trust_only_the_given_server_certificate() {
    let mut ground = QueueEnv::start("tls").await;
    let token = ground.token("token").await;
    let constraints = json!({ "runtime_constraints": { "vcpus": 1, "ram": 64 << 20, "API": true } });
    let uuid = ground.submit(&["sh", "-c", "echo $ARVADOS_API_HOST"], constraints).await;
    let mut other = Command::new(binary_path("windlass").unwrap());
    other.args([
        "dispatch",
        "local",
        "--once",
        "--server",
        &format!("https://{}", ground.https),
        "--token-file",
    ]);
    other.arg(&token).arg("--dir").arg(ground.dir.join("none"));
    other.arg("--agent").arg(binary_path("windlass-agent").unwrap());
    let refused = tokio::task::spawn_blocking(move || other.output()).await.unwrap().unwrap();
    let message = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(!refused.status.success() && message.contains("TLS handshake with"), "{message}");

    ground.encrypted = true;
    ground.dispatch(&token, "attempts");
    let record = ground.ended(&uuid).await;
    assert_eq!((&record["state"], &record["exit_code"]), (&json!("Complete"), &json!(0)), "{record}");
    assert_eq!(ground.output(&uuid, "stdout").await, format!("{}\n", ground.https).into_bytes());
}

#[tokio::test(flavor = "multi_thread")]
async fn c4_running_containers_outlive_their_dispatcher_and_are_adopted_by_the_next() {
    let mut ground = QueueEnv::start("adopt").await;
    let token = ground.token("token").await;
    ground.dispatch(&token, "attempts");
    let (starts, go) = (ground.shared("starts"), ground.dir.join("go"));
    let script = format!(
        "echo one >> {}; until [ -e {} ]; do sleep 0.05; done; echo done",
        starts.display(),
        go.display()
    );
    let uuid = ground.submit(&["sh", "-c", &script], json!({})).await;
    let crashes = ground.submit(&["sleep", "600"], json!({})).await;
    for one in [&uuid, &crashes] {
        ground.until(one, "it does not run", |record| record["state"] == "Running").await;
    }
    ground.kill_dispatchers();
    // The executor of the other one dies while no dispatcher runs.
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
    while !ground.messages(&crashes).await.contains(&"cleaned_up_crashed".to_owned()) {
        assert!(since.elapsed() < TIMEOUT, "nobody says that it crashed");
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
async fn a_second_dispatcher_with_the_same_token_waits_until_the_first_ends() {
    let mut ground = QueueEnv::start("lease").await;
    let token = ground.token("token").await;
    let first = ground.start_local_dispatcher_with(&token, "first", &["--lease", "600"]);
    let go = ground.dir.join("go");
    let script = format!("until [ -e {} ]; do sleep 0.05; done", go.display());
    let uuid = ground.submit(&["sh", "-c", &script], json!({})).await;
    ground.until(&uuid, "it does not run", |record| record["state"] == "Running").await;
    // It does not know the attempts of the first one, and would immediately consider them lost.
    ground.start_local_dispatcher_with(&token, "second", &["--lease", "600", "--lost-after", "0"]);
    let text = format!("another dispatcher uses this token (process {first} on ");
    let since = Instant::now();
    while !ground.dispatcher_log().contains(&text) {
        assert!(since.elapsed() < TIMEOUT, "{}", ground.dispatcher_log());
        tokio::time::sleep(Duration::from_millis(30)).await;
    }
    std::fs::write(&go, "").unwrap();
    let record = ground.ended(&uuid).await;
    assert_eq!((&record["state"], &record["exit_code"]), (&json!("Complete"), &json!(0)), "{record}");
    let ended = Command::new("kill").args(["-TERM", &first.to_string()]).status().unwrap();
    assert!(ended.success());
    // Until it has ended it may lock another one. It is a child of this process, and stays a zombie.
    eventually("the first one has ended", || {
        let stat = std::fs::read_to_string(format!("/proc/{first}/stat")).unwrap_or_default();
        stat.rsplit(')')
            .next()
            .is_none_or(|rest| rest.trim_start().starts_with(['Z', 'X']) || rest.is_empty())
    });
    let next = ground.submit(&["true"], json!({})).await;
    let record = ground.ended(&next).await;
    assert_eq!(record["state"], "Complete", "{record}");
    assert!(ground.dir.join("second").join(format!("{next}.1")).exists(), "the second one ran it");
}

#[tokio::test(flavor = "multi_thread")]
async fn r13_priority_0_stops_and_cancels_a_running_container() {
    let mut ground = QueueEnv::start("stop").await;
    let token = ground.token("token").await;
    ground.dispatch(&token, "attempts");
    let uuid = ground.submit(&["sleep", "600"], json!({})).await;
    ground.until(&uuid, "it does not run", |record| record["state"] == "Running").await;
    let done = Command::new(binary_path("windlass").unwrap())
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
    let mut ground = QueueEnv::start("two").await;
    let ran = ground.shared("ran");
    let mut all = Vec::new();
    for at in 0..40 {
        let script = format!("echo {at} >> {}", ran.display());
        all.push(
            ground
                .submit(
                    &["sh", "-c", &script],
                    json!({ "runtime_constraints": { "vcpus": 1, "ram": 1 << 20 } }),
                )
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
