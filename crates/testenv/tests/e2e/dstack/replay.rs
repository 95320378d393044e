//! Sends the same requests to the dstack server and to windlass, and compares statuses and codes.

use std::{
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use serde_json::{Value, json};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
};
use windlass_testenv::server::{Server, ServerOptions, TOKEN, binary_path};
use windlass_testkit::temp_dir;

/// Variable with the environment that contains the dstack server.
const VARIABLE: &str = "WINDLASS_BENCH_DSTACK";
/// It searches for catalogues on the network while it starts.
const READY_TIMEOUT: Duration = Duration::from_secs(300);
const PROJECT: &str = "/api/project/main";
const NOBODY: &str = "00000000-0000-4000-8000-000000000000";

/// A request that both servers receive.
struct RequestCase {
    name: &'static str,
    path: String,
    body: Value,
    token: Option<&'static str>,
}

/// The relevant part of a response: its status and, for a refusal, the code.
type ObservedAnswer = (u16, Option<String>);

/// Known differences: the response of windlass, and the reason.
const KNOWN_DIFFERENCES: [(&str, u16, Option<&str>, &str); 11] = [
    ("delete a user that is not", 400, Some("resource_not_exists"), "the code says more"),
    ("delete a project that is not", 403, None, "whether it exists is for its members to know"),
    ("add a member who is not", 400, Some("resource_not_exists"), "the code says more"),
    ("remove a member who is not", 400, Some("resource_not_exists"), "the code says more"),
    ("plan an unknown type", 400, Some("error"), "clients print the message of a 400, and a 422 raw"),
    ("plan a wrong field", 400, Some("error"), "the same"),
    ("plan a wrong duration", 400, Some("error"), "the same"),
    ("plan without commands", 400, Some("error"), "the same"),
    ("delete a volume that is not", 400, Some("resource_not_exists"), "a typing error is told"),
    ("delete a gateway that is not", 400, Some("resource_not_exists"), "a typing error is told"),
    ("read logs of nothing", 400, Some("resource_not_exists"), "a log that is empty is another thing"),
];

fn case(name: &'static str, path: impl Into<String>, body: Value) -> RequestCase {
    RequestCase { name, path: path.into(), body, token: Some(TOKEN) }
}

fn in_project(name: &'static str, path: &str, body: Value) -> RequestCase {
    case(name, format!("{PROJECT}/{path}"), body)
}

fn spec(configuration: Value, name: Option<&str>) -> Value {
    json!({"run_spec": {"run_name": name, "configuration": configuration, "profile": {"name": "default"},
        "repo_id": "none", "repo_data": {"repo_type": "virtual"}, "configuration_path": "a.yml"}})
}

fn user_cases() -> Vec<RequestCase> {
    let member = |name: &str| json!({"members": [{"username": name, "project_role": "user"}]});
    vec![
        RequestCase { token: None, ..case("no token", "/api/users/get_my_user", json!({})) },
        RequestCase { token: Some("wrong"), ..case("a wrong token", "/api/users/get_my_user", json!({})) },
        case("create a user", "/api/users/create", json!({"username": "mira", "global_role": "user"})),
        case(
            "create them in capitals",
            "/api/users/create",
            json!({"username": "MIRA", "global_role": "user"}),
        ),
        case("create them again", "/api/users/create", json!({"username": "mira", "global_role": "user"})),
        case("a bad user name", "/api/users/create", json!({"username": "a b", "global_role": "user"})),
        case("a user without a role", "/api/users/create", json!({"username": "noor"})),
        case("an unknown role", "/api/users/create", json!({"username": "noor", "global_role": "king"})),
        case("get a user that is not", "/api/users/get_user", json!({"username": "nobody"})),
        case("delete a user that is not", "/api/users/delete", json!({"users": ["nobody"]})),
        case("refresh a token of nobody", "/api/users/refresh_token", json!({"username": "nobody"})),
        case("create a project", "/api/projects/create", json!({"project_name": "lab"})),
        case("create it in capitals", "/api/projects/create", json!({"project_name": "LAB"})),
        case("a bad project name", "/api/projects/create", json!({"project_name": "a b"})),
        case("get a project that is not", "/api/projects/none/get", json!({})),
        case("delete a project that is not", "/api/projects/delete", json!({"projects_names": ["none"]})),
        case("add a member who is not", "/api/projects/lab/add_members", member("nobody")),
        case(
            "remove a member who is not",
            "/api/projects/lab/remove_members",
            json!({"usernames": ["nobody"]}),
        ),
        case("a key that is none", "/api/users/public_keys/add", json!({"key": "nonsense", "name": "k"})),
        case("delete a key that is not", "/api/users/public_keys/delete", json!({"ids": [NOBODY]})),
    ]
}

fn run_cases() -> Vec<RequestCase> {
    let task =
        json!({"type": "task", "commands": ["true"], "ports": [8000, "80:8080"], "max_duration": "2h"});
    let with = |key: &str, value: Value| {
        let mut task = task.clone();
        task[key] = value;
        spec(task, None)
    };
    let mut by_region = spec(task.clone(), None);
    by_region["group_by"] = json!(["region"]);
    vec![
        case("list runs of nobody", "/api/runs/list", json!({"username": "nobody"})),
        case("list runs of no repo", "/api/runs/list", json!({"project_name": "main", "repo_id": "ghost"})),
        case("list runs of no project", "/api/runs/list", json!({"project_name": "nothing"})),
        case("list too many", "/api/runs/list", json!({"limit": 101})),
        in_project("get a run that is not", "runs/get", json!({"run_name": "none"})),
        in_project("get a run without a name", "runs/get", json!({})),
        in_project("stop a run that is not", "runs/stop", json!({"runs_names": ["none"], "abort": false})),
        in_project("stop without names", "runs/stop", json!({"abort": false})),
        in_project("delete a run that is not", "runs/delete", json!({"runs_names": ["none"]})),
        in_project(
            "know of no repo",
            "repos/init",
            json!({"repo_id": "none", "repo_info": {"repo_type": "virtual"}, "repo_creds": null}),
        ),
        in_project("plan", "runs/get_plan", spec(task.clone(), Some("one"))),
        in_project("plan without a configuration", "runs/get_plan", json!({"run_spec": {}})),
        in_project("plan an unknown type", "runs/get_plan", spec(json!({"type": "nonsense"}), None)),
        in_project("plan a wrong field", "runs/get_plan", with("commands", json!(3))),
        in_project("plan a wrong duration", "runs/get_plan", with("max_duration", json!("soon"))),
        in_project("plan a bad name", "runs/get_plan", spec(task.clone(), Some("Bad Name"))),
        in_project("plan without commands", "runs/get_plan", spec(json!({"type": "task"}), None)),
        in_project("group GPUs by region alone", "gpus/list", by_region),
        in_project(
            "get a repo that is not",
            "repos/get",
            json!({"repo_id": "ghost", "include_creds": false}),
        ),
        case("an archive that is not", "/api/files/get_archive_by_hash", json!({"hash": "0".repeat(64)})),
        in_project(
            "read logs of nothing",
            "logs/poll",
            json!({"run_name": "none", "job_submission_id": NOBODY}),
        ),
        in_project("read logs of no id", "logs/poll", json!({"run_name": "none", "job_submission_id": "x"})),
        case("too many events", "/api/events/list", json!({"limit": 101})),
        case("no such project", "/api/project/ghost/runs/get", json!({"run_name": "x"})),
        in_project("a body that is a list", "runs/get", json!([1])),
    ]
}

fn resource_cases() -> Vec<RequestCase> {
    let fleet =
        |configuration: Value| json!({"configuration": configuration, "profile": {"name": "default"}});
    let key = json!({"public": "p", "private": "no key"});
    let rack = fleet(json!({"type": "fleet", "name": "rack",
        "ssh_config": {"user": "u", "ssh_key": key, "hosts": ["10.0.0.1"]}}));
    vec![
        in_project("get a fleet that is not", "fleets/get", json!({"name": "none"})),
        in_project("get a fleet without a name", "fleets/get", json!({})),
        in_project("delete a fleet that is not", "fleets/delete", json!({"names": ["none"]})),
        in_project(
            "delete an instance of no fleet",
            "fleets/delete_instances",
            json!({"name": "none", "instance_nums": [0]}),
        ),
        in_project(
            "an SSH key that is none",
            "fleets/apply",
            json!({"plan": {"spec": rack}, "force": false}),
        ),
        in_project(
            "a bad fleet name",
            "fleets/get_plan",
            json!({"spec": fleet(json!({"type": "fleet", "name": "Bad Name", "nodes": 1}))}),
        ),
        in_project("get a volume that is not", "volumes/get", json!({"name": "none"})),
        in_project("delete a volume that is not", "volumes/delete", json!({"names": ["none"]})),
        in_project("get a gateway that is not", "gateways/get", json!({"name": "none"})),
        in_project("delete a gateway that is not", "gateways/delete", json!({"names": ["none"]})),
        in_project("make no gateway the default", "gateways/set_default", json!({"name": "none"})),
        in_project("get a secret that is not", "secrets/get", json!({"name": "none"})),
        in_project("delete a secret that is not", "secrets/delete", json!({"secrets_names": ["none"]})),
        in_project("a bad secret name", "secrets/create_or_update", json!({"name": "a b", "value": "v"})),
        in_project("a secret", "secrets/create_or_update", json!({"name": "key", "value": "v"})),
        in_project(
            "a long secret",
            "secrets/create_or_update",
            json!({"name": "long", "value": "x".repeat(5001)}),
        ),
        in_project("get an instance that is not", "instances/get", json!({"id": NOBODY})),
    ]
}

async fn send_case(address: &str, case: &RequestCase) -> (ObservedAnswer, Value) {
    let body = case.body.to_string();
    let token = case.token.map_or(String::new(), |token| format!("authorization: Bearer {token}\r\n"));
    let request = format!(
        "POST {} HTTP/1.1\r\nhost: test\r\nconnection: close\r\n{token}content-type: application/json\r\n\
         content-length: {}\r\n\r\n{body}",
        case.path,
        body.len()
    );
    let mut stream = TcpStream::connect(address).await.unwrap();
    stream.write_all(request.as_bytes()).await.unwrap();
    let mut bytes = Vec::new();
    stream.read_to_end(&mut bytes).await.unwrap();
    let text = String::from_utf8_lossy(&bytes);
    let (head, body) = text.split_once("\r\n\r\n").unwrap_or_else(|| panic!("{}: {text:?}", case.name));
    let status = head.split(' ').nth(1).unwrap().parse().unwrap();
    let body: Value = serde_json::from_str(body).unwrap_or_default();
    let code = body["detail"][0]["code"].as_str().filter(|_| status == 400).map(str::to_owned);
    ((status, code), body)
}

/// The dstack server with a separate home directory; it ends on drop.
struct DstackServer {
    child: Child,
    address: String,
}

impl DstackServer {
    async fn start(home: &Path) -> Self {
        let venv = std::env::var_os(VARIABLE).map(PathBuf::from);
        let venv = venv.unwrap_or_else(|| {
            panic!(
                "{VARIABLE} names no Python environment with dstack's server; `cargo xtask test` makes one"
            )
        });
        std::fs::create_dir_all(home).unwrap();
        let port = windlass_testkit::ports::reserve_free_port();
        let log = std::fs::File::create(home.join("log")).unwrap();
        let mut command = Command::new(venv.join("bin/dstack"));
        command.args(["server", "--host", "127.0.0.1", "--port", &port.to_string(), "--token", TOKEN, "-n"]);
        command.env_clear().env("PATH", "/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin").env("HOME", home);
        command.env("DSTACK_SERVER_DIR", home.join("server"));
        // No settings of the user, and no prompt at the end of the start.
        command.env("DSTACK_SERVER_CONFIG_DISABLED", "1").env("DSTACK_DO_NOT_UPDATE_DEFAULT_PROJECT", "1");
        command.env("DSTACK_SERVER_LOG_LEVEL", "ERROR");
        command.stdin(Stdio::null()).stdout(log.try_clone().unwrap()).stderr(log);
        let mut server = Self { child: command.spawn().unwrap(), address: format!("127.0.0.1:{port}") };
        let started = Instant::now();
        while TcpStream::connect(&server.address).await.is_err() {
            let message = || std::fs::read_to_string(home.join("log")).unwrap_or_default();
            assert_eq!(server.child.try_wait().unwrap(), None, "dstack's server ended early: {}", message());
            assert!(started.elapsed() < READY_TIMEOUT, "dstack's server does not get ready: {}", message());
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        server
    }
}

impl Drop for DstackServer {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn dstack_and_windlass_answer_the_same_requests_alike() {
    let scratch = temp_dir("replay").unwrap();
    let theirs = DstackServer::start(&scratch.path().join("dstack")).await;
    let (data, windlass) = (scratch.path().join("windlass"), binary_path("windlass").unwrap());
    let options = ServerOptions {
        binary: &windlass,
        data: &data,
        database: None,
        core: None,
        local: false,
        env: Vec::new(),
        log: None,
    };
    std::fs::create_dir_all(&data).unwrap();
    let ours = Server::start(&options).await.unwrap();
    let mut wrong = Vec::new();
    let mut answers = Vec::new();
    for case in user_cases().into_iter().chain(run_cases()).chain(resource_cases()) {
        let (there, there_body) = send_case(&theirs.address, &case).await;
        let (here, here_body) = send_case(ours.address(), &case).await;
        let different = KNOWN_DIFFERENCES.iter().find(|(name, ..)| *name == case.name);
        let expected =
            different.map_or(there.clone(), |(_, status, code, _)| (*status, code.map(str::to_owned)));
        if here != expected || different.is_some() && here == there {
            let name = case.name;
            wrong.push(format!("{name}: there {there:?} {there_body}, here {here:?} {here_body}"));
        }
        if case.name == "plan" {
            answers.extend([there_body, here_body]);
        }
    }
    assert_eq!(wrong, Vec::<String>::new());
    // Short forms are returned in their long form.
    let configurations: Vec<&Value> =
        answers.iter().map(|plan| &plan["effective_run_spec"]["configuration"]).collect();
    for field in ["ports", "max_duration"] {
        assert_eq!(configurations[0][field], configurations[1][field], "{field}");
    }
    ours.stop().unwrap();
}
