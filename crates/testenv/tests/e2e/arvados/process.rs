//! Containers without an image: who may run them, and what their programs can read.

use std::{path::Path, process::Command};

use serde_json::{Value, json};
use windlass_testenv::{queue_env::QueueEnv, server::binary_path};
use windlass_testkit::wait::eventually;

/// A user who has only the `queue` right requests a plain process.
#[tokio::test(flavor = "multi_thread")]
async fn a_plain_process_is_refused_with_the_reason_unless_the_operator_allows_it() {
    let mut ground = QueueEnv::start("refused").await;
    ground.allow_process = false;
    let carol = ground.user("carol").await;
    let token = ground.token("token").await;
    ground.dispatch(&token, "attempts");
    let requested = ground.request_as(&carol, &["id"], json!({ "container_count_max": 3 })).await;
    let record = ground.ended(&requested.container).await;
    assert_eq!(
        (&record["state"], &record["runtime_status"]["reason"]),
        (&json!("Cancelled"), &json!("refused")),
        "{record}"
    );
    let why = record["runtime_status"]["error"].as_str().unwrap_or_default();
    assert!(why.contains("`container_image` `none`") && why.contains("`--allow-process`"), "{why}");
    assert_eq!(ground.output(&requested.container, "stdout").await, b"", "it ran");
    let request = carol.get(&format!("container_requests/{}", requested.request)).await.unwrap();
    assert_eq!((&request["state"], &request["container_count"]), (&json!("Final"), &json!(1)), "{request}");

    // Images are not silently ignored either.
    let mut command = Command::new(binary_path("windlass").unwrap());
    command.args(["dispatch", "local", "--runtime", "process", "--once", "--token-file"]).arg(&token);
    let refused = tokio::task::spawn_blocking(move || command.output()).await.unwrap().unwrap();
    let message = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(!refused.status.success() && message.contains("--allow-process"), "{message}");
}

/// A script that tries to read each path and prints a word and the result.
fn attempts_script(paths: &[(&str, &Path)]) -> String {
    let tries = paths.iter().map(|(word, path)| {
        let path = path.display();
        format!(
            "if [ -n \"$(cat {path} 2>/dev/null)\" ] || [ -d {path} -a -n \"$(ls -A {path} 2>/dev/null)\" ]; \
             then echo {word}=read; else echo {word}=no; fi\n"
        )
    });
    let shown = "echo uid=$(id -u) gid=$(id -g) groups=$(id -G)\ngrep -E 'NoNewPrivs|CapBnd|CapPrm' /proc/self/status\n\
        echo env=$(cat /proc/[0-9]*/environ 2>/dev/null | tr '\\0' '\\n' | grep -c -E 'QUEUE_SECRET|v2/wlass')\n\
        echo temporary=$(ls -A /tmp /dev/shm | grep -v : | wc -w)\n\
        echo files=$(ls -A .. | tr '\\n' ' ')\necho mine > $WINDLASS_ROOT/out/mine && cat $WINDLASS_ROOT/out/mine\n";
    format!("{}{shown}", tries.collect::<String>())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_plain_process_runs_as_a_separate_user_and_cannot_read_data_of_others() {
    let mut ground = QueueEnv::start("apart").await;
    let (bob, carol) = (ground.user("bob").await, ground.user("carol").await);
    let token = ground.token("token").await;
    let outputs = ground.dir.join("outputs");
    std::fs::create_dir(&outputs).unwrap();
    std::fs::write(outputs.join("earlier"), "of somebody else").unwrap();
    ground.start_local_dispatcher_with(&token, "attempts", &["--outputs", outputs.to_str().unwrap()]);
    let bobs = json!({
        "environment": { "BOB_ENV": "BOBS_QUEUE_SECRET" },
        "secret_mounts": { "/secret.txt": { "kind": "text", "content": "SECRET_MOUNT_OF_BOB" } },
        "runtime_constraints": { "vcpus": 1, "ram": 64 << 20, "API": true },
    });
    let go = ground.dir.join("go");
    let wait = format!("echo mine > /tmp/of-bob; until [ -e {} ]; do sleep 0.05; done; id -u", go.display());
    let bobs = ground.request_as(&bob, &["sh", "-c", &wait], bobs).await.container;
    ground.until(&bobs, "bob's runs", |record| record["state"] == "Running").await;
    let attempt = ground.dir.join("attempts").join(format!("{bobs}.1"));
    assert!(attempt.join("root/secret.txt").exists());
    eventually("bob's has a temporary file", || attempt.join("tmp/of-bob").exists());
    assert!(!Path::new("/tmp/of-bob").exists(), "its directory for temporary files is its own");
    // The executor has no token in its environment.
    let kept: Value = serde_json::from_slice(&std::fs::read(attempt.join("executor.json")).unwrap()).unwrap();
    let environ = std::fs::read(format!("/proc/{}/environ", kept["pid"])).unwrap();
    let environ = String::from_utf8_lossy(&environ);
    assert!(environ.contains("WINDLASS_QUEUE_URL=") && !environ.contains("v2/wlass"), "{environ}");

    let script = attempts_script(&[
        ("token", &token),
        ("secret", &attempt.join("root/secret.txt")),
        ("attempt", &attempt),
        ("log", &attempt.join("log")),
        ("outputs", &outputs.join("earlier")),
        ("data", &ground.dir.join("data")),
    ]);
    let requested = ground.request_as(&carol, &["sh", "-c", &script], json!({})).await;
    let record = ground.ended(&requested.container).await;
    let message = String::from_utf8(ground.output(&requested.container, "stdout").await).unwrap();
    let reported = String::from_utf8(ground.output(&requested.container, "stderr").await).unwrap();
    assert_eq!(
        (&record["state"], &record["exit_code"]),
        (&json!("Complete"), &json!(0)),
        "{record} {message} {reported}"
    );
    for word in ["token", "secret", "attempt", "log", "outputs", "data"] {
        assert!(message.contains(&format!("{word}=no\n")), "{word}: {message}");
    }
    let field = |name: &str| {
        message.lines().find_map(|line| line.strip_prefix(name)).unwrap_or_default().trim().to_owned()
    };
    let ids: Vec<String> =
        field("uid=").split(' ').map(|word| word.rsplit('=').next().unwrap().to_owned()).collect();
    let uid: u32 = ids[0].parse().unwrap();
    assert!((1_900_100_000..=1_900_165_535).contains(&uid), "{message}");
    assert!(ids.iter().all(|id| *id == uid.to_string()), "it has groups of others: {message}");
    assert_eq!(field("NoNewPrivs:"), "1", "{message}");
    for set in ["CapBnd:", "CapPrm:"] {
        assert_eq!(u64::from_str_radix(&field(set), 16).unwrap(), 0, "{message}");
    }
    assert_eq!(field("env="), "0", "it reads environments of others: {message}");
    assert_eq!(field("temporary="), "0", "it sees temporary files of others: {message}");
    assert_eq!(field("files="), "", "it lists what is around its own directory: {message}");
    assert!(message.ends_with("mine\n"), "{message}");
    // Its files belong only to the dispatcher afterwards.
    let kept = record["output"].as_str().unwrap();
    assert_eq!(std::fs::read_to_string(format!("{kept}/mine")).unwrap(), "mine\n");
    let owner = std::os::unix::fs::MetadataExt::uid(&std::fs::metadata(format!("{kept}/mine")).unwrap());
    assert_eq!(owner, 0);

    // A program that does not request the API has no token.
    let bare = ground.submit(&["env"], json!({})).await;
    ground.ended(&bare).await;
    let message = String::from_utf8(ground.output(&bare, "stdout").await).unwrap();
    assert!(!message.contains("ARVADOS_API_TOKEN") && !message.contains("v2/wlass"), "{message}");

    std::fs::write(&go, "").unwrap();
    ground.ended(&bobs).await;
    let bobs = String::from_utf8(ground.output(&bobs, "stdout").await).unwrap();
    assert_ne!(bobs.trim(), uid.to_string(), "two that ran at once had one user");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_symlinked_output_path_is_not_collected() {
    let mut ground = QueueEnv::start("links").await;
    let token = ground.token("token").await;
    let outputs = ground.dir.join("outputs");
    ground.start_local_dispatcher_with(&token, "attempts", &["--outputs", outputs.to_str().unwrap()]);
    let prey = ground.dir.join("prey");
    std::fs::create_dir(&prey).unwrap();
    std::fs::create_dir(prey.join("out")).unwrap();
    std::fs::write(prey.join("out/file"), "of somebody else").unwrap();
    let more = json!({ "output_path": "/a/out", "mounts": { "/a/out": { "kind": "tmp" } } });
    let script = format!("rm -rf a; ln -s {} a", prey.display());
    let uuid = ground.submit(&["sh", "-c", &script], more).await;
    let record = ground.ended(&uuid).await;
    assert_eq!((&record["state"], &record["output"]), (&json!("Complete"), &Value::Null), "{record}");
    let warning = record["runtime_status"]["warning"].as_str().unwrap_or_default();
    assert!(warning.contains("is a symbolic link"), "{record}");
    assert!(prey.join("out/file").exists(), "it was moved away");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_world_readable_token_file_is_refused() {
    let ground = QueueEnv::start("open").await;
    let token = ground.token("token").await;
    std::fs::set_permissions(&token, std::os::unix::fs::PermissionsExt::from_mode(0o644)).unwrap();
    let mut command = Command::new(binary_path("windlass").unwrap());
    command.args(["dispatch", "local", "--once", "--server", &format!("http://{}", ground.address())]);
    command.arg("--token-file").arg(&token).arg("--dir").arg(ground.dir.join("attempts"));
    command.arg("--agent").arg(binary_path("windlass-agent").unwrap());
    let refused = tokio::task::spawn_blocking(move || command.output()).await.unwrap().unwrap();
    let message = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(!refused.status.success() && message.contains("chmod 600"), "{message}");
}
