//! Flags whose effect no other test shows.

use std::{
    io::{BufRead as _, BufReader, Read as _, Write as _},
    net::TcpStream,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use serde_json::{Value, json};
use windlass_testkit::{ports, wait::eventually};

use crate::{
    CommandOutput, TestHome,
    attach::require_agent,
    cli_env::{CliEnv, TOKEN},
    follow::wait_for_line,
    resources::CloudServer,
    run_command,
    terminal::Terminal,
};

const WAITING: &str = "type: task\nname: later\ncommands: [echo hi]\nschedule:\n  cron: \"0 0 1 1 *\"\n";
const REQUIREMENTS: [&str; 6] = ["--cpu", "1..", "--memory", "0..", "--disk", "0.."];

/// A command on a server whose jobs see the files of the test.
fn local(home: &TestHome, args: &[&str]) -> Command {
    let mut command = home.command(args);
    command.env("WINDLASS_SERVER_LOCAL_RUNTIME", "process");
    command
}

fn interrupt(child: &std::process::Child) {
    assert!(Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap().success());
}

/// Returns the current time with microseconds, as a flag accepts it.
fn now() -> String {
    let date = run_command(Command::new("date").args(["-u", "+%Y-%m-%dT%H:%M:%S.%6NZ"])).ok();
    date.stdout.trim().to_owned()
}

/// A run on this machine that prints an escape sequence, waits for the file `go`, and then answers on a port.
struct RunningJob {
    home: TestHome,
    port: u16,
}

impl RunningJob {
    fn start() -> Self {
        require_agent();
        let home = TestHome::new();
        let port = ports::reserve_free_port();
        let pong = "import socket as s, sys; l = s.create_server(('127.0.0.1', int(sys.argv[1])))\n\
                    while True: c = l.accept()[0]; c.sendall(c.recv(4) + b' pong'); c.close()";
        let go = home.path().join("go");
        let text = format!(
            "type: task\nname: job\nenv:\n  PONG: {}\ncommands:\n  - |\n    printf 'one\\033]0;owned\\007 green\\n'\n    \
             until [ -e {} ]; do sleep 0.02; done; echo two\n    exec /usr/bin/python3 -c \"$PONG\" {port}\n\
             resources: {{cpu: 1.., memory: 0.., disk: null}}\n",
            json!(pong),
            go.display()
        );
        home.0.file("job.yml", &text);
        run_command(&mut local(&home, &["apply", "-f", "job.yml", "-y", "-d"])).ok();
        let job = Self { home, port };
        job.wait_for_output("one");
        job
    }

    #[track_caller]
    fn wait_for_output(&self, part: &str) {
        eventually(part, || self.windlass(&["logs", "job"]).stdout.contains(part));
    }

    fn windlass(&self, args: &[&str]) -> CommandOutput {
        run_command(&mut local(&self.home, args))
    }

    /// Writes a copy of the key that the server stores for the user.
    fn own_key(&self) -> PathBuf {
        self.windlass(&["exec", "job", "--", "true"]).ok();
        let copy = self.home.path().join("own.key");
        std::fs::copy(self.home.path().join("home/ssh/admin.key"), &copy).unwrap();
        std::fs::set_permissions(&copy, PermissionsExt::from_mode(0o600)).unwrap();
        copy
    }
}

#[test]
fn attach_selects_output_forwards_ports_and_uses_the_given_key() {
    let job = RunningJob::start();
    let key = job.own_key();
    let between = now();
    job.home.0.file("go", "");
    job.wait_for_output("two");
    let (port, identity) = (format!("*:{}", job.port), key.display().to_string());
    let args = [
        "attach",
        "job",
        "--logs",
        "--since",
        &between,
        "--host",
        "127.0.0.2",
        "--port",
        &port,
        "--ssh-identity",
        &identity,
    ];
    let mut child = local(&job.home, &args).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut messages = BufReader::new(child.stderr.take().unwrap()).lines();
    let reported = wait_for_line(&mut messages, &format!("Port {} of the job: http://", job.port));
    let address = reported.rsplit("http://").next().unwrap();
    assert!(address.starts_with("127.0.0.2:"), "{reported}");
    let mut first = String::new();
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut first).unwrap();
    assert_eq!(first.trim_end(), "two", "the output before `--since` is not shown");
    let answer = || -> std::io::Result<String> {
        let mut stream = TcpStream::connect(address)?;
        stream.write_all(b"ping")?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer)?;
        Ok(answer)
    };
    eventually("the job answers", || answer().is_ok_and(|answer| answer == "ping pong"));
    let entry = std::fs::read_to_string(job.home.path().join("home/ssh/runs/job.conf")).unwrap();
    assert!(entry.contains(&format!("IdentityFile \"{identity}\"")), "{entry}");
    interrupt(&child);
    assert_eq!(child.wait().unwrap().code(), Some(0));
}

#[test]
fn attached_output_controls_the_terminal_only_with_raw() {
    let job = RunningJob::start();
    let shown = Terminal::command(&job.home, &local(&job.home, &["attach", "--logs", "job"]));
    shown.wait_for_text("]0;owned");
    shown.keys(&["C-c"]);
    let raw = Terminal::command(&job.home, &local(&job.home, &["attach", "--logs", "--raw", "job"]));
    let screen = raw.wait_for_text("one green");
    assert!(!screen.contains("owned"), "{screen}");
    raw.keys(&["C-c"]);
}

#[test]
fn ssh_and_exec_use_the_given_key_and_exec_allocates_a_terminal_on_request() {
    let job = RunningJob::start();
    let key = job.own_key();
    let wrong = job.home.path().join("wrong.key");
    let mut keygen = Command::new("ssh-keygen");
    run_command(keygen.args(["-q", "-t", "ed25519", "-N", "", "-f"]).arg(&wrong)).ok();
    let with = |command: &str, key: &Path, words: &[&str]| {
        let key = key.display().to_string();
        job.windlass(&[&[command, "--ssh-identity", &key, "job"], words].concat())
    };
    for (command, words) in [("exec", &["--", "echo", "in"][..]), ("ssh", &["echo", "in"])] {
        assert_eq!(with(command, &key, words).ok().stdout, "in\n");
        let refused = with(command, &wrong, words);
        assert_eq!(refused.code, Some(255), "{}", refused.stderr);
        refused.says("Permission denied");
    }
    let terminal = |args: &[&str]| Terminal::command(&job.home, &local(&job.home, args));
    terminal(&["exec", "-t", "job", "--", "tty"]).wait_for_text("/dev/pts/");
    terminal(&["exec", "job", "--", "tty"]).wait_for_text("not a tty");
}

#[test]
fn logs_select_a_replica_and_show_the_agents_log() {
    let job = RunningJob::start();
    assert!(job.windlass(&["logs", "--replica", "0", "job"]).ok().stdout.starts_with("one"));
    let none = job.windlass(&["logs", "--replica", "3", "job"]);
    assert_eq!(none.code, Some(1));
    none.says("find replica 3 of `job`");
    // An abort would not wait for the rest of the logs.
    job.windlass(&["stop", "-y", "--wait", "job"]).ok();
    let diagnosis = job.windlass(&["logs", "--diagnose", "job"]).ok().stdout;
    assert!(diagnosis.contains("INFO") && !diagnosis.contains("owned"), "{diagnosis}");
}

#[test]
fn apply_uses_a_profile_replaces_an_unchanged_run_and_stores_the_git_token() {
    let env = CliEnv::new();
    env.file("later.yml", WAITING);
    env.file(".windlass/profiles.yml", "profiles:\n  - name: short\n    max_duration: 1h\n");
    let apply = |args: &[&str]| {
        env.windlass(&[&["apply", "-f", "later.yml", "-y", "-d", "-o", "json"], args].concat())
    };
    let first = apply(&[]).ok().json();
    assert_eq!(first["run_spec"]["profile"]["max_duration"], Value::Null);
    let same = apply(&[]).ok();
    same.says("is already active and unchanged");
    assert_eq!(same.json()["id"], first["id"]);
    let replaced = apply(&["--force"]).ok().json();
    assert_ne!(replaced["id"], first["id"]);
    let short = apply(&["--profile", "short", "-n", "short"]).ok().json();
    assert_eq!(short["run_spec"]["profile"]["max_duration"], 3600, "{short}");
    let unknown = apply(&["--profile", "shrt"]);
    assert_eq!(unknown.code, Some(200));
    unknown.says("shrt");

    env.file("later.yml", &(WAITING.to_owned() + "repos: ['https://git.example/app.git']\n"));
    let run = apply(&["-n", "code", "--git-token", "a-git-token"]).ok().json();
    let request = json!({ "repo_id": run["run_spec"]["repo_id"], "include_creds": true });
    let repo = env.server.post("/api/project/main/repos/get", TOKEN, &request.to_string());
    assert!(repo.contains("\"oauth_token\":\"a-git-token\""), "{repo}");
}

#[test]
fn run_uses_a_profile_and_several_nodes() {
    let env = CliEnv::new();
    env.file(".windlass/profiles.yml", "profiles:\n  - name: short\n    max_duration: 1h\n");
    let args =
        ["run", "-y", "-d", "-o", "json", "--retry", "--nodes", "2", "--profile", "short", "--", "echo hi"];
    let run = env.windlass(&args).ok().json();
    assert_eq!(run["run_spec"]["profile"]["max_duration"], 3600, "{run}");
    assert_eq!(run["run_spec"]["configuration"]["nodes"], 2, "{run}");
    assert_eq!(run["jobs"].as_array().unwrap().len(), 2, "{run}");
}

#[test]
fn a_plan_shows_as_many_offers_as_requested() {
    let cloud = CloudServer::new();
    let resources = "{cpu: 1.., memory: 0.., disk: null, gpu: 'H100:2'}";
    let task = format!("type: task\nname: gpu\ncommands: [echo hi]\nresources: {resources}\n");
    cloud.0.file("gpu.yml", &task);
    let plan = cloud.0.windlass(&["apply", "-f", "gpu.yml", "-y", "-d", "--max-offers", "1"]).ok();
    plan.says("Showing 1 of 2 offers.");
}

#[test]
fn an_instance_is_deleted_by_its_number_and_costs_of_the_last_runs_are_shown() {
    let cloud = CloudServer::new();
    let env = &cloud.0;
    for name in ["one", "two"] {
        env.windlass(&[&["run", "-y", "-n", name], &REQUIREMENTS[..], &["--", "true"]].concat()).ok();
    }
    let cost = |args: &[&str]| env.windlass(&[&["cost", "-o", "json"], args].concat()).ok().json();
    let (all, last) = (cost(&[]), cost(&["--last", "1"]));
    let items = |cost: &Value| cost["items"].as_array().unwrap().len();
    assert_eq!((items(&all), items(&last)), (2, 1), "{all}");
    assert!(last["total"]["cost"].as_f64().unwrap() > last["items"][0]["cost"].as_f64().unwrap(), "{last}");

    let instances = |args: &[&str]| env.windlass(&[args, &["-o", "name"]].concat()).ok().stdout;
    assert_eq!(instances(&["instance"]), "burst-0\n");
    env.windlass(&["fleet", "delete", "-y", "--wait", "--instance", "0", "burst"]).ok();
    assert_eq!(instances(&["instance"]), "");
    for list in [&["instance", "--all"][..], &["instance", "list", "--all"]] {
        assert_eq!(instances(list), "burst-0\n");
    }
    let ended = env.windlass(&["instance", "--all", "-o", "json"]).ok().json();
    assert_eq!(ended["instances"][0]["status"], "terminated", "{ended}");
    assert_eq!(env.windlass(&["fleet", "-o", "name"]).ok().stdout, "burst\n");
}

#[test]
fn managed_jobs_read_an_environment_file_and_show_details_on_request() {
    require_agent();
    let home = TestHome::new();
    home.0.file("vars", "# a comment\nA=from the file\n");
    home.0.file("job.yaml", "name: sweep\nrun: |\n  echo one $A\n  echo two\n");
    let windlass = |args: &[&str]| run_command(&mut local(&home, args));
    let launched = windlass(&["jobs", "launch", "-y", "--env-file", "vars", "job.yaml"]).ok();
    assert!(launched.stdout.replace('\r', "").contains("one from the file\ntwo\n"), "{}", launched.stdout);
    let tail = windlass(&["jobs", "logs", "--no-follow", "--tail", "1", "1"]).ok().stdout;
    assert_eq!(tail.replace('\r', ""), "two\n");
    let events = windlass(&["jobs", "logs", "--controller", "1"]).ok().stdout;
    assert!(events.contains("the program exited successfully") && !events.contains("two"), "{events}");
    let queue = |args: &[&str]| windlass(&[&["jobs", "queue"], args].concat()).ok().stdout;
    assert!(queue(&["--verbose"]).contains("SCHEDULE") && !queue(&[]).contains("SCHEDULE"));
    let watched = Terminal::command(&home, &local(&home, &["jobs", "queue", "--watch"]));
    watched.wait_for_text("sweep");
    windlass(&["jobs", "launch", "-y", "-n", "other", "job.yaml"]).ok();
    watched.wait_for_text("other");
    watched.keys(&["C-c"]);
}

#[test]
fn a_failed_managed_job_is_resumed_with_its_secret_and_keeps_its_number() {
    require_agent();
    let home = TestHome::new();
    let marker = home.path().join("repaired");
    let text = format!(
        "name: sweep\nsecrets:\n  KEY: null\nrun: |\n  echo with $KEY\n  test -e {}\n",
        marker.display()
    );
    home.0.file("job.yaml", &text);
    let windlass = |args: &[&str]| run_command(&mut local(&home, args));
    let failed = windlass(&["jobs", "launch", "-y", "--secret", "KEY=first", "job.yaml"]);
    assert_eq!(failed.code, Some(100), "{}", failed.stderr);
    let without = windlass(&["jobs", "resume", "1"]);
    assert_eq!(without.code, Some(1), "{}", without.stderr);
    without.says("secret `KEY` has no value");
    home.0.file("repaired", "");
    let resumed = windlass(&["jobs", "resume", "1", "--secret", "KEY=second", "-o", "name"]).ok();
    assert_eq!(resumed.stdout, "1\n");
    resumed.says("Job 1 is queued again.");
    assert_eq!(windlass(&["jobs", "logs", "1"]).code, Some(0));
    let logs = windlass(&["jobs", "logs", "--no-follow", "1"]).ok().stdout;
    assert_eq!(logs.matches("with ").count(), 2, "the logs of both attempts: {logs}");
    assert_eq!(windlass(&["jobs", "resume", "77"]).code, Some(102));
    assert_eq!(windlass(&["jobs", "resume", "1", "--secret", "KEY=x"]).code, Some(1), "it succeeded");
}

#[test]
fn login_prints_the_token_on_request() {
    let env = CliEnv::new();
    let home = &env.home;
    home.windlass(&["login", "--url", &env.server.url(), "--token", TOKEN]).ok();
    assert_eq!(home.windlass(&["login", "--show-token"]).ok().stdout, format!("{TOKEN}\n"));
}

#[test]
fn a_dispatcher_writes_its_metrics_to_a_file() {
    require_agent();
    let env = CliEnv::new();
    let token = env.windlass(&["dispatch", "token"]).ok().stdout;
    env.file("dispatch.token", &token);
    let token = env.home.path().join("dispatch.token");
    std::fs::set_permissions(&token, PermissionsExt::from_mode(0o600)).unwrap();
    let (metrics, dir) = (env.home.path().join("metrics"), env.home.path().join("attempts"));
    let args = [
        "dispatch",
        "local",
        "--server",
        &env.server.url(),
        "--token-file",
        "dispatch.token",
        "--once",
        "--allow-process",
        "--metrics-file",
        &metrics.display().to_string(),
        "--dir",
        &dir.display().to_string(),
    ];
    env.windlass(&args).ok();
    let text = std::fs::read_to_string(&metrics).unwrap();
    assert!(text.contains("# TYPE windlass_dispatch_"), "{text}");
}

/// Starts a server in the foreground and returns it with its messages until it is ready.
fn start_until_ready(home: &TestHome, args: &[&str]) -> (std::process::Child, String) {
    let mut child = home.command(args).stderr(Stdio::piped()).spawn().unwrap();
    let mut stderr = BufReader::new(child.stderr.take().unwrap());
    let mut message = String::new();
    while !message.contains("ready at") {
        assert!(stderr.read_line(&mut message).unwrap() > 0, "{message}");
    }
    (child, message)
}

#[test]
fn server_log_flags_select_the_level_and_the_format() {
    let home = TestHome::new();
    let data = home.path().join("data").display().to_string();
    let start = |level: &str, format: &str| {
        let args = [
            "server",
            "--port",
            "0",
            "--no-local",
            "--data-dir",
            &data,
            "--agent",
            "/no/such/agent",
            "--log-level",
            level,
            "--log-format",
            format,
        ];
        let (mut child, message) = start_until_ready(&home, &args);
        interrupt(&child);
        child.wait().unwrap();
        message.lines().find(|line| line.contains("failed to find the agent binary")).map(str::to_owned)
    };
    let record: Value = serde_json::from_str(&start("warn", "json").unwrap()).unwrap();
    assert_eq!(record["level"], "WARN");
    assert!(record["error"].as_str().unwrap().contains("/no/such/agent"), "{record}");
    let text = start("warn", "text").unwrap();
    assert!(text.contains("WARN") && !text.starts_with('{'), "{text}");
    assert_eq!(start("error", "json"), None);
}

#[test]
fn a_server_flag_sets_whether_secrets_are_masked() {
    require_agent();
    let home = TestHome::new();
    let start = |flags: &[&str]| {
        home.windlass(&[&["server", "start"], flags].concat()).ok();
    };
    start(&["--mask-secrets", "false", "--local-runtime", "process"]);
    home.windlass(&["secret", "set", "TOKEN", "open-sesame"]).ok();
    home.0.file(
        "job.yml",
        "type: task\nname: job\nenv: {T: '${{ secrets.TOKEN }}'}\ncommands: ['echo $T']\n\
         resources: {cpu: 1.., memory: 0.., disk: null}\n",
    );
    let shown = home.windlass(&["apply", "-f", "job.yml", "-y"]).ok().stdout;
    assert_eq!(shown.trim_end(), "open-sesame");
    home.windlass(&["server", "stop"]).ok();
    start(&["--local-runtime", "process"]);
    let masked = home.windlass(&["logs", "job"]).ok().stdout;
    assert_eq!(masked.trim_end(), "*".repeat("open-sesame".len()), "the default is to mask them");
}

#[test]
fn dev_server_uses_the_given_port_directory_agent_and_runtime() {
    require_agent();
    let home = TestHome::new();
    let port = ports::reserve_free_port().to_string();
    let data = home.path().join("kept");
    let dir = data.display().to_string();
    let args =
        ["dev", "--port", &port, "--data-dir", &dir, "--agent", "/no/such/agent", "--log-level", "warn"];
    let (mut child, message) = start_until_ready(&home, &args);
    assert!(message.contains(&format!(":{port}")) && message.contains("/no/such/agent"), "{message}");
    interrupt(&child);
    child.wait().unwrap();
    assert!(std::fs::read_dir(&data).unwrap().count() > 0, "a named directory is kept");

    let args = ["dev", "--log-level", "error", "--local-runtime", "process", "--local-processes", "refused"];
    let (mut child, message) = start_until_ready(&home, &args);
    let word = |name: &str| {
        let (_, rest) = message.split_once(&format!("{name}=")).unwrap();
        rest.split_whitespace().next().unwrap().to_owned()
    };
    let windlass = |args: &[&str]| {
        let mut command = home.command(args);
        command.env("WINDLASS_URL", word("WINDLASS_URL")).env("WINDLASS_TOKEN", word("WINDLASS_TOKEN"));
        run_command(&mut command)
    };
    let refused = windlass(&[&["run", "-y"], &REQUIREMENTS[..], &["--", "true"]].concat());
    assert_eq!(refused.code, Some(200));
    refused.says("the instance refuses plain processes");
    interrupt(&child);
    child.wait().unwrap();
}

#[test]
fn a_missing_engine_socket_is_reported_by_every_command_that_it_concerns() {
    require_agent();
    let home = TestHome::new();
    let socket = home.path().join("engine.sock").display().to_string();
    home.windlass(&["server", "start", "--docker-socket", &socket]).ok();
    let missing = format!("no Docker engine at {socket}");
    eventually("the instance shows what is missing", || {
        home.windlass(&["instance", "-o", "json"]).ok().stdout.contains(&missing)
    });
    for command in [&["instance", "get", "local-0"][..], &["doctor"], &["fleet"]] {
        let shown = home.windlass(command).ok();
        assert!(
            (shown.stdout.clone() + &shown.stderr).contains(&missing),
            "{command:?}: {}{}",
            shown.stdout,
            shown.stderr
        );
    }
    let listed = home.windlass(&["instance"]).ok().stdout;
    assert!(listed.contains("its container engine is not available"), "{listed}");
    home.0.file("job.yml", "type: task\nname: job\nimage: busybox\ncommands: [echo hi]\nresources: {cpu: 1.., memory: 0.., disk: null}\n");
    home.windlass(&["apply", "-f", "job.yml", "-y", "-d"]).ok();
    eventually("the run says what it waits for", || {
        home.windlass(&["why", "job"]).ok().stdout.contains(&missing)
    });
    let listed = home.windlass(&["ps", "-o", "json"]).ok().json();
    assert!(listed["runs"][0]["reason"].as_str().unwrap().contains(&missing), "{listed}");
    // Plain processes need no engine.
    home.windlass(&["stop", "-xy", "--wait", "job"]).ok();
    let ran = home.windlass(&[&["run", "-y"], &REQUIREMENTS[..], &["--", "echo", "hi"]].concat()).ok();
    assert!(ran.stdout.contains("hi"), "{}", ran.stdout);
    home.windlass(&["server", "stop"]).ok();
}
