//! The two ways in which a review took a server over, step by step, and what each step prints now.
//!
//! The page that this test compares has the output of each step; `UPDATE=1` writes it. What must never be printed is
//! checked separately.

use std::{fmt::Write as _, fs, path::Path};

use serde_json::{Value, json};
use windlass_api::queue_client::QueueHttpClient;
use windlass_testenv::{
    queue_env::QueueEnv,
    server::{ApiResponse, call_api_as, submission},
};

use crate::test_env::{HostMode, TestEnv, task_config};

const PAGE: &str = "../../docs/reference/demonstrations.md";
const BOBS_VARIABLE: &str = "canary-of-bob-5b1e";
const BOBS_SECRET: &str = "secret-of-bob-90aa";
const SECRET_OF_PROJECT: &str = "secret-of-project-77c3";

/// One step of an attack.
struct Step {
    what: String,
    before: &'static str,
    now: String,
}

/// Command of a job with the output that the review saw.
struct Attack {
    what: &'static str,
    command: String,
    before: &'static str,
}

fn attack(what: &'static str, before: &'static str, command: impl Into<String>) -> Attack {
    Attack { what, command: command.into(), before }
}

const SHOW_RIGHTS: &str = "grep -E '^(CapBnd|NoNewPrivs|Seccomp):' /proc/self/status | tr '\\t\\n' '  '";
/// In brackets, so that the search does not find itself.
const SHOW_ENVIRONMENTS: &str = "cat /proc/[0-9]*/environ 2> /dev/null | tr '\\0' '\\n' | grep -E 'BOB_EN[V]|v2/wlas[s]|WINDLASS_EXECUTO[R]'";

/// A script that prints the output of each attack after a line that separates them.
fn script(attacks: &[Attack]) -> String {
    attacks.iter().fold("export LC_ALL=C\n".to_owned(), |mut text, attack| {
        let _ = writeln!(text, "echo '=== next'; {{ {}; }} 2>&1 || true", attack.command);
        text
    })
}

/// Pairs the attacks with their output, in which `names` replace paths that differ in each run.
fn steps(attacks: &[Attack], output: &str, names: &[(&Path, &str)]) -> Vec<Step> {
    let outputs: Vec<&str> = output.split("=== next\n").skip(1).collect();
    assert_eq!(outputs.len(), attacks.len(), "{output}");
    let pairs = attacks.iter().zip(outputs);
    pairs
        .map(|(attack, output)| {
            let mut now = output.trim().to_owned();
            for (path, name) in names {
                now = now.replace(&path.display().to_string(), name);
            }
            let now = if now.is_empty() { "nothing".to_owned() } else { code(&shorten_users(&now)) };
            Step { what: attack.what.to_owned(), before: attack.before, now }
        })
        .collect()
}

/// Last line, as code of a table: a Python traceback has several.
fn code(text: &str) -> String {
    format!("`{}`", text.lines().last().unwrap_or_default().trim().replace('|', "\\|"))
}

/// Shortens the numbers of separate users, which differ in each run.
fn shorten_users(text: &str) -> String {
    let mut all = String::new();
    for part in text.split_inclusive(|c: char| !c.is_ascii_digit()) {
        let end = part.trim_end_matches(|c: char| !c.is_ascii_digit()).len();
        let (number, rest) = part.split_at(end);
        let is_user = number.len() == 10 && number.starts_with("1900");
        all += if is_user { "1900…" } else { number };
        all += rest;
    }
    all
}

fn table(steps: &[Step]) -> String {
    let mut text = String::from("| step | printed then | prints now |\n| --- | --- | --- |\n");
    for Step { what, before, now } in steps {
        let _ = writeln!(text, "| {what} | {before} | {now} |");
    }
    text
}

/// Adds a member of project `main` with role `user`, and returns their token.
async fn create_member(env: &mut TestEnv, name: &str) -> String {
    let made = env.post("/api/users/create", &json!({"username": name, "global_role": "user"})).await;
    let member = json!({"members": [{"username": name, "project_role": "user"}]});
    env.post("/api/projects/main/add_members", &member).await;
    made["creds"]["token"].as_str().unwrap().to_owned()
}

async fn submit(env: &TestEnv, token: &str, name: &str, command: &str, variables: &Value) {
    let mut job = task_config(name, &[command]);
    job.as_object_mut().unwrap().remove("user");
    job["env"] = variables.clone();
    let response = call_api_as(env.address(), token, "/api/project/main/runs/apply", &submission(&job)).await;
    response.unwrap().ok().unwrap();
}

/// A member's job on the machine of a server that runs as root, while a job of another member runs there.
async fn member_against_server() -> Vec<Step> {
    let mut env = TestEnv::confined(HostMode::Processes).await;
    let (alice, bob) = (create_member(&mut env, "alice").await, create_member(&mut env, "bob").await);
    env.project("secrets/create_or_update", &json!({"name": "dbpw", "value": SECRET_OF_PROJECT})).await;
    let address = env.address().to_owned();
    let create = json!({"project_name": "pbob", "is_public": false});
    call_api_as(&address, &bob, "/api/projects/create", &create).await.unwrap().ok().unwrap();
    submit(&env, &bob, "victim", "echo up; sleep 600", &json!({"BOB_ENV": BOBS_VARIABLE})).await;
    env.says("victim", "up").await;

    let data = env.home().join("server");
    let at = data.display();
    let update = "UPDATE users SET global_role = ''admin'' WHERE name = ''alice''".replace("''", "'\\''");
    let update = format!(
        "python3 -c 'import sqlite3; db = sqlite3.connect(\"{at}/windlass.db\"); \
         print(db.execute(\"{update}\").rowcount, \"row\"); db.commit()'"
    );
    let attacks = [
        attack("`id`", "`uid=0(root)`", "id"),
        attack("its rights", "`CapBnd: 000001fffeffffff NoNewPrivs: 0 Seccomp: 0`", SHOW_RIGHTS),
        attack("`head -c 16 DATA/keys/master`", "the master key", format!("head -c 16 {at}/keys/master")),
        attack("Bob's variables, in `/proc/*/environ`", "`BOB_ENV=…`", SHOW_ENVIRONMENTS),
        attack(
            "`cat DATA/local/tasks/*/token`",
            "the tokens of all tasks",
            format!("cat {at}/local/tasks/*/token"),
        ),
        attack("`UPDATE users SET global_role = 'admin'` in `DATA/windlass.db`", "`1 row`", update),
    ];
    submit(&env, &alice, "attack", &script(&attacks), &json!({})).await;
    let run = env.reaches("attack", &["done", "failed"]).await;
    let log = env.log(&run).await;
    let key = fs::read_to_string(data.join("keys/master")).unwrap();
    for private in [BOBS_VARIABLE, &key[..16], "1 row", "uid=0"] {
        assert!(!log.contains(private), "{private}: {log}");
    }
    let mut steps = steps(&attacks, &log, &[(&data, "DATA")]);

    let call = async |path: &str, body: Value| call_api_as(&address, &alice, path, &body).await.unwrap();
    let user = call("/api/users/get_my_user", json!({})).await.ok().unwrap();
    assert_eq!(user["global_role"], "user");
    let role = format!("`{}`", user["global_role"].as_str().unwrap());
    steps.push(Step { what: "Alice's role in `users/get_my_user`".into(), before: "`admin`", now: role });
    let secret = call("/api/project/main/secrets/get", json!({"name": "dbpw"})).await;
    steps.push(refusal("`secrets/get` as Alice", "the value of the secret", &secret));
    let project = call("/api/projects/pbob/get", json!({})).await;
    steps.push(refusal("Bob's own project as Alice", "the project", &project));
    env.stop("victim", true).await;
    env.reaches("victim", &["terminated"]).await;
    steps
}

fn refusal(what: &str, before: &'static str, response: &ApiResponse) -> Step {
    assert_eq!(response.status, 403, "{what}: {}", response.body);
    Step { what: what.to_owned(), before, now: "status 403".to_owned() }
}

/// A user of no shared project against the container queue, whose dispatcher runs as root.
async fn user_against_queue() -> Vec<Step> {
    let mut queue = QueueEnv::start("demonstration").await;
    queue.allow_process = false;
    let body = json!({"username": "mallory", "global_role": "user"});
    let made = queue.api().await.post("/api/users/create", &body).await.unwrap();
    let mallory = QueueHttpClient::new(
        &format!("http://{}", queue.address()),
        made["creds"]["token"].as_str().unwrap(),
    )
    .unwrap();
    let request = json!({"container_request": {"state": "Committed", "priority": 500, "container_image": "none",
        "command": ["id"], "output_path": "/out", "mounts": {"/out": {"kind": "tmp"}},
        "runtime_constraints": {"vcpus": 1, "ram": 64 << 20}}});
    let refused = mallory.post("container_requests", &request).await.unwrap_err().to_string();
    assert!(refused.contains("you may not use the container queue"), "{refused}");
    let mut all = vec![Step {
        what: "a request of a user without the right".into(),
        before: "a container",
        now: "refused: `you may not use the container queue`".into(),
    }];

    let body = json!({"username": "mallory", "global_role": "user", "can_use_queue": true});
    queue.api().await.post("/api/users/update", &body).await.unwrap();
    let token = queue.token("dispatch.token").await;
    queue.dispatch(&token, "work");
    let requested = queue.request_as(&mallory, &["id"], json!({})).await;
    let ended = queue.ended(&requested.container).await;
    let reason =
        format!("`{}`, reason `{}`", plain(&ended["state"]), plain(&ended["runtime_status"]["reason"]));
    assert_eq!(reason, "`Cancelled`, reason `refused`", "{ended:#}");
    assert_eq!(queue.output(&requested.container, "stdout").await, b"");
    all.push(Step {
        what: "`container_image: none`, with the right".into(),
        before: "`uid=0(root)`",
        now: reason,
    });

    queue.kill_dispatchers();
    queue.allow_process = true;
    queue.dispatch(&token, "work");
    let bob = queue.user("bob").await;
    let bobs = json!({"environment": {"BOB_ENV": BOBS_VARIABLE},
        "secret_mounts": {"/secret.txt": {"kind": "text", "content": BOBS_SECRET}}});
    let victim = queue.request_as(&bob, &["sleep", "600"], bobs).await;
    queue.until(&victim.container, "Bob's runs", |record| record["state"] == "Running").await;
    let work = queue.dir.join("work");
    let attempt = work.join(format!("{}.1", victim.container));
    assert!(attempt.join("root/secret.txt").exists());
    let (at, of_bob) = (work.display(), attempt.display());
    let attacks = [
        attack("the same where the operator allows it: `id`", "`uid=0(root)`", "id"),
        attack("its rights", "all capabilities", SHOW_RIGHTS),
        attack(
            "Bob's variables and tokens, in `/proc/*/environ`",
            "`BOB_ENV=…`, `WINDLASS_EXECUTOR_TOKEN=…`",
            SHOW_ENVIRONMENTS,
        ),
        attack("`cat dispatch.token`", "the dispatcher's token", format!("cat {}", token.display())),
        attack("`ls WORK`", "the attempts of all users", format!("ls {at}")),
        attack(
            "`cat WORK/ATTEMPT/root/secret.txt`, Bob's",
            "Bob's secret",
            format!("cat {of_bob}/root/secret.txt"),
        ),
    ];
    let requested = queue.request_as(&mallory, &["sh", "-c", &script(&attacks)], json!({})).await;
    let ended = queue.ended(&requested.container).await;
    let output = String::from_utf8(queue.output(&requested.container, "stdout").await).unwrap();
    assert_eq!(ended["exit_code"], 0, "{ended:#}\n{output}\n{}", queue.dispatcher_log());
    let secret = fs::read_to_string(&token).unwrap();
    for private in [BOBS_VARIABLE, BOBS_SECRET, secret.trim(), "uid=0"] {
        assert!(!output.contains(private), "{private}: {output}");
    }
    let names =
        [(attempt.as_path(), "WORK/ATTEMPT"), (work.as_path(), "WORK"), (token.as_path(), "dispatch.token")];
    all.extend(steps(&attacks, &output, &names));
    queue.delete_request(&victim).await;
    queue.ended(&victim.container).await;
    all
}

fn plain(value: &Value) -> &str {
    value.as_str().unwrap_or_default()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn x5_the_demonstrated_take_overs_fail_at_every_step() {
    let (first, second) = (member_against_server().await, user_against_queue().await);
    let text = format!(
        "# Demonstrated take-overs\n\nA review took an early version over in two ways. The test \
         `x5_the_demonstrated_take_overs_fail_at_every_step` repeats them with the real programs and compares this page. \
         To repeat them on a fresh machine, as root: `cargo xtask test --only demonstrated_take_overs`.\n\n\
         ## A member's job against the server\n\nAlice, a member of project `main`, submits a task to a server that \
         runs as root, while a job of Bob runs there. `DATA` is the data directory of the server.\n\n{}\n\
         ## A user against the container queue\n\nMallory, a member of no shared project, requests containers of \
         `windlass dispatch local`, which runs as root. From the third step on, the dispatcher has `--allow-process` and \
         a plain process of Bob runs there. `WORK` is the directory of the dispatcher.\n\n{}",
        table(&first),
        table(&second)
    );
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(PAGE);
    if std::env::var_os("UPDATE").is_some() {
        fs::write(&path, &text).unwrap();
    }
    let written = fs::read_to_string(&path).unwrap_or_default();
    assert_eq!(written, text, "docs/reference/demonstrations.md is not what was printed; UPDATE=1 writes it");
}
