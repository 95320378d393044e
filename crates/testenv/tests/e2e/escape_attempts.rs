//! A job that tries to escape from its sandbox: the same attempts in every runtime, and a table of the results.

use std::{
    collections::BTreeMap,
    fs,
    os::unix::fs::{FileTypeExt as _, PermissionsExt as _},
    path::{Path, PathBuf},
    process::Command,
};

use serde_json::json;
use windlass_testenv::{queue_env::QueueEnv, server::binary_path};
use windlass_testkit::TempDir;

use crate::{
    containers::{IMAGE, image},
    test_env::{HostMode, TestEnv, engine_socket, task_config},
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
const TABLE: &str = "../../docs/reference/ways-out.md";

/// Results of the attempts by name.
type Outcomes = BTreeMap<String, String>;

fn parse_outcomes(output: &str) -> Outcomes {
    let lines = output.lines().filter_map(|line| {
        let mut parts = line.trim_end().splitn(3, '\t');
        Some((parts.next()?.to_owned(), (parts.next()?.to_owned(), parts.next()?.to_owned())))
    });
    lines.map(|(name, (outcome, detail))| (name, format!("{outcome}: {detail}"))).collect()
}

/// Checks that no attempt succeeds except for those that stay inside.
#[track_caller]
fn assert_no_escape(found: &Outcomes, inside: &[&str]) {
    assert!(found.len() >= 30, "{} ways were tried: {found:#?}", found.len());
    let open: Vec<_> = found
        .iter()
        .filter(|(name, outcome)| outcome.starts_with("reached") && !inside.contains(&name.as_str()))
        .collect();
    assert!(open.is_empty(), "{open:#?}\nof {found:#?}");
}

/// The first process below `/proc` with the other job's secret in its environment.
fn other_job() -> u32 {
    let processes = fs::read_dir("/proc").unwrap().flatten();
    let holds = |pid: &u32| {
        let environment = fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
        environment.windows(CANARY.len()).any(|part| part == CANARY.as_bytes())
    };
    let mut pids = processes.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    pids.find(holds).expect("no process holds the other job's secret")
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
fn targets(env: &TestEnv) -> String {
    let data = env.home().join("server");
    let mut args = Vec::new();
    let mut read = |name: &str, path: &Path| {
        assert!(path.exists(), "{} is not there to be read", path.display());
        args.push(format!("--read {}", quoted(name, path.display())));
    };
    read("the master key", &data.join("keys/master"));
    read("the server's directory", &data);
    read("the database", &data.join("windlass.db"));
    let local = data.join("local");
    read("the agent's directory", &local);
    read("the other job's directories", &local.join("tasks"));
    let tokens = fs::read_dir(local.join("tasks")).unwrap().flatten().map(|task| task.path().join("token"));
    read("the token of the other job", &tokens.into_iter().find(|path| path.exists()).unwrap());
    read("the server's log", &env.home().join("server.log"));
    let mut found = Vec::new();
    sockets(&local, &mut found);
    assert!(!found.is_empty(), "no socket is below {}", local.display());
    for (n, path) in found.iter().enumerate() {
        args.push(format!("--socket {}", quoted(&format!("socket {n} of the agent"), path.display())));
    }
    args.push(format!("--socket {}", quoted("the container engine", engine_socket().display())));
    args.push(format!("--pid {}", quoted("the server", env.pid())));
    args.push(format!("--pid {}", quoted("the other job", other_job())));
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

fn docker(args: &[&str]) -> String {
    let host = format!("unix://{}", engine_socket().display());
    let output = Command::new("docker").args(["--host", &host]).args(args).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap().trim().to_owned()
}

fn image_with_program() {
    image();
    let (_dir, path) = program();
    let made = docker(&["create", IMAGE, "sh"]);
    docker(&["cp", path.to_str().unwrap(), &format!("{made}:/bin/{PROGRAM}")]);
    docker(&["commit", &made, WITH_PROGRAM]);
    docker(&["rm", &made]);
}

async fn as_a_process() -> Outcomes {
    let (_dir, program) = program();
    let mut env =
        TestEnv::with_settings(HostMode::Processes, &[("WINDLASS_SERVER_LOCAL_PROCESSES", "confined")]).await;
    let mut other = task_config("other", &["echo up", "sleep 600"]);
    other.as_object_mut().unwrap().remove("user");
    other["env"] = json!({"CANARY": CANARY});
    env.apply(&other).await;
    env.says("other", "up\n").await;
    let mut job = task_config("way-out", &[&format!("{} {}", program.display(), targets(&env))]);
    job.as_object_mut().unwrap().remove("user");
    let run = env.ends(&job).await;
    let log = env.log(&run).await;
    assert_eq!(run["status"], "done", "{log}\n{run:#}");
    parse_outcomes(&log)
}

async fn in_a_container() -> Outcomes {
    let mut env = TestEnv::new(HostMode::Containers).await;
    let mut other = task_config("other", &["echo up", "sleep 600"]);
    other["image"] = json!(IMAGE);
    other["env"] = json!({"CANARY": CANARY});
    env.apply(&other).await;
    env.says("other", "up\n").await;
    let mut job = task_config("way-out", &[&format!("{PROGRAM} {}", targets(&env))]);
    job["image"] = json!(WITH_PROGRAM);
    let run = env.ends(&job).await;
    let log = env.log(&run).await;
    assert_eq!(run["status"], "done", "{log}\n{run:#}");
    parse_outcomes(&log)
}

async fn in_a_queue_container() -> Outcomes {
    let mut ground = QueueEnv::start("ways-out").await;
    ground.env.push(("DOCKER_HOST", format!("unix://{}", engine_socket().display())));
    let token = ground.token("dispatch.token").await;
    ground.dispatch(&token, "work");
    let contained = |image: &str| json!({ "container_image": image });
    let other = ["sh", "-c", &format!("CANARY={CANARY} exec sleep 600")];
    let other = ground.submit(&other, contained(IMAGE)).await;
    ground.until(&other, "the other one runs", |record| record["state"] == "Running").await;
    let data = ground.dir.join("data");
    let mut command = vec![PROGRAM.to_owned(), "--canary".to_owned(), CANARY.to_owned()];
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
    command.extend(["--socket".to_owned(), format!("the container engine={}", engine_socket().display())]);
    command.extend(["--pid".to_owned(), format!("the other job={}", other_job())]);
    let words: Vec<&str> = command.iter().map(String::as_str).collect();
    let requested = ground.submit(&words, contained(WITH_PROGRAM)).await;
    let ended = ground.ended(&requested).await;
    let output = String::from_utf8(ground.output(&requested, "stdout").await).unwrap();
    assert_eq!(ended["exit_code"], 0, "{ended:#}\n{output}\n{}", ground.dispatcher_log());
    parse_outcomes(&output)
}

#[tokio::test]
async fn a_docker_job_and_a_confined_process_cannot_escape() {
    image_with_program();
    let process = as_a_process().await;
    assert_no_escape(&process, &[]);
    let container = in_a_container().await;
    assert_no_escape(&container, &INSIDE_A_CONTAINER);
    let queue = in_a_queue_container().await;
    assert_no_escape(&queue, &INSIDE_A_CONTAINER);
    check_table(&[
        ("plain process, confined", &process),
        ("Docker", &container),
        ("container of the queue", &queue),
    ]);
}

/// Compares the table of the reference with the results; `UPDATE=1` writes it.
fn check_table(columns: &[(&str, &Outcomes)]) {
    let mut names: Vec<&String> = columns.iter().flat_map(|(_, found)| found.keys()).collect();
    names.sort();
    names.dedup();
    let mut text = String::from(
        "# Ways out\n\nA job tries each of these in every runtime, in the test \
         `a_docker_job_and_a_confined_process_cannot_escape`, which also compares this table. `refused`: the system said no, or \
         what was looked for is not there. `inside`: root of a container may do it, in its container alone. `–`: there is \
         nothing of the kind.\n\n| way |",
    );
    for (runtime, _) in columns {
        text += &format!(" {runtime} |");
    }
    text += "\n| --- |";
    text += &" --- |".repeat(columns.len());
    text.push('\n');
    for name in names {
        text += &format!("| {name} |");
        for (_, found) in columns {
            let outcome = found
                .get(name)
                .map_or("–", |outcome| if outcome.starts_with("refused") { "refused" } else { "inside" });
            text += &format!(" {outcome} |");
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
