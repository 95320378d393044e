//! Unique secrets are used in a whole run; then everything that remains is searched for them.

use std::path::{Path, PathBuf};

use serde_json::json;

use crate::{
    containers::{IMAGE, image},
    test_env::{HostMode, TestEnv, engine_socket, task_config},
};

const SECRET: &str = "canary-of-a-secret-7c1d9b";
const DERIVED: &str = "canary-of-a-variable-55e0aa";
const REPO: &str = "canary-of-a-repository-90f3bd";
const CANARIES: [&str; 3] = [SECRET, DERIVED, REPO];

fn contains_text(bytes: &[u8], needle: &str) -> bool {
    bytes.windows(needle.len()).any(|window| window == needle.as_bytes())
}

#[track_caller]
fn assert_clean(what: &str, bytes: &[u8]) {
    for canary in CANARIES {
        assert!(!contains_text(bytes, canary), "{what} holds {canary}");
    }
}

fn files(dir: &Path, found: &mut Vec<PathBuf>) {
    let Ok(entries) = std::fs::read_dir(dir) else { return };
    for entry in entries.flatten() {
        match entry.file_type() {
            Ok(kind) if kind.is_dir() => files(&entry.path(), found),
            Ok(kind) if kind.is_file() => found.push(entry.path()),
            Ok(_) | Err(_) => {}
        }
    }
}

/// Command lines of all processes, which all users of the machine can read.
fn arguments() -> Vec<u8> {
    let mut all = Vec::new();
    for entry in std::fs::read_dir("/proc").unwrap().flatten() {
        all.extend(std::fs::read(entry.path().join("cmdline")).unwrap_or_default());
        all.push(b'\n');
    }
    all
}

fn inspect_containers() -> Vec<u8> {
    let host = format!("unix://{}", engine_socket().display());
    let docker = |args: &[&str]| {
        std::process::Command::new("docker").args(["--host", &host]).args(args).output().unwrap().stdout
    };
    let ids = String::from_utf8(docker(&["ps", "-aq", "--no-trunc"])).unwrap();
    let ids: Vec<&str> = ids.split_whitespace().collect();
    docker(&[&["inspect"], ids.as_slice()].concat())
}

#[tokio::test]
async fn x3_secrets_of_a_docker_job_appear_only_inside_the_job() {
    image();
    let mut env = TestEnv::new(HostMode::Containers).await;
    env.project("secrets/create_or_update", &json!({ "name": "key", "value": SECRET })).await;
    env.project("secrets/create_or_update", &json!({ "name": "other", "value": DERIVED })).await;
    let creds = json!({ "repo_id": "private", "repo_info": { "repo_type": "remote", "repo_name": "private" },
        "repo_creds": { "clone_url": "https://host.invalid/r.git", "oauth_token": REPO } });
    env.project("repos/init", &creds).await;
    // It has its secrets, proves that without printing them, and then waits to be stopped.
    let mut job = task_config("songless", &["echo ${#HIDDEN} ${#PARTLY} up", "sleep 600"]);
    job["image"] = json!(IMAGE);
    job["env"] = json!({ "HIDDEN": "${{ secrets.key }}", "PARTLY": "before ${{ secrets.other }} after" });
    let name = "songless";
    env.apply(&job).await;
    env.reaches(name, &["running"]).await;
    let expected = format!("{} {} up\n", SECRET.len(), DERIVED.len() + "before  after".len());
    env.says(name, &expected).await;

    assert_clean("the arguments of a process", &arguments());
    let seen = inspect_containers();
    assert!(contains_text(&seen, "windlass"), "no container was looked at");
    assert_clean("the inspection of a container", &seen);

    env.stop(name, false).await;
    let run = env.reaches(name, &["terminated"]).await;
    assert_clean("the run", run.to_string().as_bytes());
    assert_clean("the log of the job", env.log(&run).await.as_bytes());
    let events = env.post("/api/events/list", &json!({ "limit": 100 })).await;
    assert_clean("the events", events.to_string().as_bytes());
    for path in ["runs/get_plan", "repos/list", "secrets/list"] {
        let request = json!({ "run_spec": { "configuration": job, "run_name": name } });
        assert_clean(path, env.project(path, &request).await.to_string().as_bytes());
    }
    env.stop_server();
    let mut kept = Vec::new();
    files(env.home(), &mut kept);
    let mut bytes = 0;
    for path in &kept {
        let content = std::fs::read(path).unwrap_or_default();
        bytes += content.len();
        assert_clean(&path.display().to_string(), &content);
    }
    assert!(kept.iter().any(|path| path.ends_with("windlass.db")) && bytes > 100_000, "{kept:?}");
}
