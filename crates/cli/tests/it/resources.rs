//! Secrets, projects, users, events and other resources on the command line.

use std::{
    io::Write as _,
    process::{Command, Stdio},
};

use serde_json::Value;
use windlass_testkit::wait::eventually;

use crate::{
    CommandOutput,
    attach::require_agent,
    cli_env::{CliEnv, TOKEN},
    run_command, server,
    snapshot::{CliSnapshot, SnapshotEnv},
    terminal::Terminal,
};

/// Runs a command with standard input.
fn run_with_input(command: &mut Command, input: &str) -> CommandOutput {
    let command = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    child.stdin.take().unwrap().write_all(input.as_bytes()).unwrap();
    let done = child.wait_with_output().unwrap();
    CommandOutput {
        code: done.status.code(),
        stdout: String::from_utf8(done.stdout).unwrap(),
        stderr: String::from_utf8(done.stderr).unwrap(),
    }
}

const FORMATS: [&str; 5] = ["table", "wide", "json", "jsonl", "name"];

fn run_in_all_formats<G: SnapshotEnv>(transcript: &mut CliSnapshot<'_, G>, args: &[&str]) {
    for format in FORMATS {
        transcript.run(&[args, &["-o", format]].concat());
    }
}

#[test]
fn a_secret_is_stored_read_and_deleted() {
    let env = CliEnv::new();
    let mut transcript = CliSnapshot::new("secret", &env);
    transcript.run(&["secret"]);
    let set = ["secret", "set", "TOKEN"];
    let stored = run_with_input(&mut env.command(&set), "from standard input\n");
    transcript.add(&set, &stored);
    transcript.run(&["secret", "set", "OTHER", "on the line", "-o", "json"]);
    transcript.run(&["secret", "set", "OTHER", "on the line", "--for", "managers"]);
    transcript.run(&["secret", "set", "OTHER", "on the line", "--for", "admin,nobody"]);
    transcript.run(&["secret", "set", "OTHER", "on the line", "--for", "admin"]);
    run_in_all_formats(&mut transcript, &["secret"]);
    transcript.run(&["secret", "get", "TOKEN"]);
    transcript.run(&["secret", "get", "OTHER", "-o", "json"]);
    transcript.run(&["secret", "get", "TOKNE"]);
    transcript.run(&["secret", "set", "EMPTY"]);
    transcript.run(&["secret", "set", "bad name", "x"]);
    transcript.run(&["secret", "delete", "TOKEN"]);
    transcript.run(&["secret", "delete", "-y", "TOKEN", "NONE"]);
    transcript.run(&["secret", "delete", "-y", "TOKEN", "OTHER"]);
    transcript.run(&["secret", "-o", "name"]);
    transcript.end();
    // A multi-line value keeps its lines; only the last line break is removed.
    run_with_input(&mut env.command(&["secret", "set", "KEY"]), "one\ntwo\n").ok();
    assert_eq!(env.windlass(&["secret", "get", "KEY"]).ok().stdout, "one\ntwo\n");
}

#[test]
fn projects_share_fleets_by_exports() {
    let env = CliEnv::new();
    for project in ["vision", "speech"] {
        env.windlass(&["project", "add", project]).ok();
    }
    env.file("entry.yml", "type: gateway\nname: entry\nbackend: remote\nregion: here\ndomain: example.org\n");
    env.file("racks.yml", "type: fleet\nname: racks\nnodes: 0..1\n");
    for file in ["entry.yml", "racks.yml"] {
        env.windlass(&["apply", "-y", "-d", "-f", file]).ok();
    }
    let ok = |args: &[&str]| env.windlass(args).ok().stdout;
    let shared = ["--fleet", "racks", "--gateway", "entry", "--importer", "vision"];
    ok(&[&["export", "create", "site"], &shared[..]].concat());
    let listed = ok(&["export"]);
    assert!(listed.contains("site") && listed.contains("racks") && listed.contains("vision"), "{listed}");
    assert_eq!(ok(&["import", "--project", "vision", "-o", "name"]), "main/site\n");
    assert!(ok(&["fleet", "--project", "vision", "-o", "name"]).contains("main/racks\n"));
    let update = |flags: &[&str]| ok(&[&["export", "update", "site"], flags].concat());
    update(&["--add-importer", "speech", "--remove-importer", "vision"]);
    update(&["--remove-fleet", "racks", "--remove-gateway", "entry"]);
    let listed = ok(&["export", "list"]);
    assert!(!listed.contains("racks") && listed.contains("speech"), "{listed}");
    update(&["--add-fleet", "racks", "--add-gateway", "entry"]);
    update(&["--set-global"]);
    assert!(ok(&["import", "list", "--project", "vision", "-o", "name"]).contains("main/site\n"));
    update(&["--unset-global"]);
    ok(&["import", "delete", "-y", "main/site", "--project", "speech"]);
    let unknown = env.windlass(&["import", "delete", "-y", "main/site", "--project", "speech"]);
    assert_ne!(unknown.code, Some(0));
    ok(&["export", "delete", "-y", "site"]);
    ok(&["export", "create", "all", "--global", "--fleet", "racks"]);
}

#[test]
fn quotas_are_set_listed_and_deleted() {
    let env = CliEnv::new();
    let mut transcript = CliSnapshot::new("quota", &env);
    transcript.run(&["quota"]);
    transcript.run(&["quota", "set", "gpu=8", "memory=512GB", "price=20"]);
    transcript.run(&["quota", "set", "gpu:H100=2", "--user", "admin", "-o", "json"]);
    run_in_all_formats(&mut transcript, &["quota"]);
    transcript.run(&["quota", "set", "gpu=0"]);
    transcript.run(&["quota", "set", "disk=1"]);
    transcript.run(&["quota", "set", "gpu=many"]);
    transcript.run(&["quota", "set", "cpu=1", "--user", "stranger"]);
    env.file("gpu.yml", "type: task\nname: gpu\ncommands: [\"true\"]\nresources: {gpu: 1}\n");
    transcript.run(&["apply", "-y", "-f", "gpu.yml"]);
    transcript.run(&["quota", "delete", "gpu:h100", "--user", "admin"]);
    transcript.run(&["quota", "delete", "cpu"]);
    transcript.run(&["quota", "delete", "gpu", "memory", "price"]);
    transcript.end();
}

#[test]
fn budgets_are_set_listed_and_deleted() {
    let env = CliEnv::new();
    env.windlass(&["budget"]).ok().says("No budgets. Run `windlass budget set cost=AMOUNT` to set one.");
    env.windlass(&["budget", "set", "cost=500", "--warn", "cost=$400"]).ok();
    let set = ["budget", "set", "gpu-hours=10", "--period", "week", "--user", "admin"];
    let listed = env.windlass(&set).ok().stdout;
    assert!(listed.contains("$400.00  $500.00  within"), "{listed}");
    let names = env.windlass(&["budget", "list", "-o", "name"]).ok().stdout;
    assert_eq!(names, "cost/month\nadmin/gpu-hours/week\n");
    let document = env.windlass(&["budget", "-o", "json"]).ok().json();
    let member = &document["budgets"][1];
    assert_eq!(
        (&member["unit"], &member["cap"], &member["warn"]),
        (&"gpu-hours".into(), &10.0.into(), &Value::Null)
    );
    for wrong in
        [&["gpu=1"][..], &["cost=much"], &["cost=1", "--warn", "cost=2"], &["cost=1", "--user", "stranger"]]
    {
        assert_ne!(env.windlass(&[&["budget", "set"], wrong].concat()).code, Some(0), "{wrong:?}");
    }
    // A run that cannot end within the budget is refused.
    env.file(
        "gpu.yml",
        "type: task\nname: gpu\ncommands: [\"true\"]\nresources: {gpu: 1}\nmax_duration: 11h\n",
    );
    let refused = env.windlass(&["apply", "-y", "-f", "gpu.yml"]);
    assert!(refused.code != Some(0) && refused.stderr.contains("11.0 GPU hours"), "{}", refused.stderr);
    env.windlass(&["budget", "delete", "gpu-hours", "--period", "week", "--user", "admin"]).ok();
    env.windlass(&["budget", "delete", "cost"]).ok();
    assert_eq!(env.windlass(&["budget", "-o", "name"]).ok().stdout, "");
}

#[test]
fn usage_is_listed_by_group_and_as_csv() {
    let cloud = CloudServer::new();
    let env = &cloud.0;
    let requirements = ["--cpu", "1..", "--memory", "0..", "--disk", "0.."];
    env.windlass(&[&["run", "-y", "-n", "one"], &requirements[..], &["--", "true"]].concat()).ok();
    eventually("the usage of the run is counted", || {
        env.windlass(&["usage", "-o", "json"]).ok().json()["total"]["jobs"] == 1
    });
    let table = env.windlass(&["usage", "--by", "project,user,class"]).ok().stdout;
    let words = table.split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(
        words.starts_with("PROJECT USER CLASS JOBS GPU HOURS CPU HOURS COST main admin normal 1 "),
        "{table}"
    );
    assert!(words.contains("total - - 1 "), "{table}");
    let csv = env.windlass(&["usage", "--all-projects", "--by", "project,day", "--csv"]).ok().stdout;
    let lines: Vec<&str> = csv.lines().collect();
    assert_eq!(lines[0], "from,project,user,class,jobs,gpu_hours,cpu_hours,cost");
    assert!(lines.len() == 2 && lines[1].contains(",main,,,1,"), "{csv}");
    let old = ["usage", "--since", "2020-01-01T00:00:00Z", "--until", "2020-02-01T00:00:00Z"];
    env.windlass(&old).ok().says("No usage in this period.");
    assert_eq!(env.windlass(&["usage", "-o", "name"]).ok().stdout, "admin\n");
    assert_ne!(env.windlass(&["usage", "--by", "day,week"]).code, Some(0));
}

#[test]
fn the_queue_lists_waiting_runs_and_updates() {
    let cloud = CloudServer::new();
    let env = &cloud.0;
    let task =
        "type: task\nname: busy\ncommands: ['sleep 600']\nresources: {cpu: 1.., memory: 0.., disk: null}\n";
    env.file("busy.yml", task);
    let apply = |name: &str| env.windlass(&["apply", "-f", "busy.yml", "-y", "-d", "-n", name]).ok();
    // The fleet has at most two instances, so that further runs wait for one of them.
    for (name, count) in [("one", 1), ("two", 2)] {
        apply(name);
        eventually(&format!("{name} runs"), || {
            env.windlass(&["ps"]).ok().stdout.matches("running").count() == count
        });
    }
    env.windlass(&["queue"]).ok().says("No run waits for an instance.");
    apply("job");
    let terminal = Terminal::run(env, &["queue", "-w"]);
    terminal.wait_for_text("main/job  ");
    apply("other");
    let screen = terminal.wait_for_text("main/other  ");
    assert_eq!(screen.matches("AHEAD").count(), 1, "{screen}");
    terminal.keys(&["C-c"]);
    let listed = env.windlass(&["queue", "-o", "json"]).ok().json();
    let ahead: Vec<_> = listed["queue"].as_array().unwrap().iter().map(|entry| &entry["position"]).collect();
    assert_eq!(ahead, [0, 1], "{listed}");
    assert_eq!(env.windlass(&["queue", "-o", "name"]).ok().stdout, "main/job\nmain/other\n");
    let why = env.windlass(&["why", "other"]).ok().stdout;
    assert!(why.contains("  queue:\n    The other run in the queue comes before it.\n"), "{why}");
    assert!(why.contains("  before it:\n    main/job ("), "{why}");
    let ps = env.windlass(&["ps"]).ok().stdout;
    assert!(ps.contains("1 run before it"), "{ps}");
}

#[test]
fn project_commands_manage_projects_and_members() {
    let env = CliEnv::new();
    let mut transcript = CliSnapshot::new("project", &env);
    run_in_all_formats(&mut transcript, &["project"]);
    transcript.run(&["project", "add", "lab"]);
    transcript.run(&["project", "add", "lab"]);
    transcript.run(&["project"]);
    transcript.run(&["project", "get", "lab"]);
    transcript.run(&["project", "get", "labb"]);
    transcript.run(&["project", "members", "lab"]);
    transcript.run(&["user", "create", "ada", "-o", "name"]);
    transcript.run(&["project", "members", "lab", "--set", "ada=user"]);
    transcript.run(&["project", "members", "lab", "--set", "ada=manager", "-o", "wide"]);
    transcript.run(&["project", "members", "lab", "--allow-ssh-fleets", "ada", "-o", "wide"]);
    transcript.run(&["project", "members", "lab", "--deny-ssh-fleets", "ada", "-o", "name"]);
    transcript.run(&["project", "members", "lab", "--allow-ssh-fleets", "nobody"]);
    transcript.run(&["project", "grant-backend", "lab", "slurm"]);
    transcript.run(&["project", "get", "lab"]);
    transcript.run(&["project", "revoke-backend", "lab", "slurm"]);
    transcript.run(&["project", "revoke-backend", "lab", "slurm"]);
    transcript.run(&["project", "grant-backend", "lab", "clouds"]);
    transcript.run(&["project", "members", "lab", "--set", "nobody=user"]);
    transcript.run(&["project", "members", "lab", "--set", "ada=king"]);
    transcript.run(&["project", "members", "lab", "--remove", "ada", "-o", "name"]);
    transcript.run(&["project", "delete", "lab"]);
    transcript.run(&["project", "delete", "-y", "lab"]);
    transcript.run(&["project", "-o", "name"]);
    transcript.end();
}

#[test]
fn commands_use_the_default_project() {
    let env = CliEnv::new();
    env.windlass(&["project", "add", "lab"]).ok();
    let url = env.server.url();
    let logged_in = |args: &[&str]| run_command(&mut env.home.command(args));
    logged_in(&["login", "--url", &url, "--token", TOKEN]).ok().says("project `main`");
    logged_in(&["project", "set-default", "lab"]).ok().says("Your default project is now `lab`");
    logged_in(&["secret", "set", "A", "1"]).ok();
    assert_eq!(logged_in(&["secret", "-o", "json"]).ok().json()["project"], "lab");
    assert_eq!(logged_in(&["secret", "-o", "name", "--project", "main"]).ok().stdout, "");
    let typo = logged_in(&["project", "set-default", "lap"]);
    assert_eq!(typo.code, Some(1));
    typo.says("did you mean");
}

#[test]
fn the_default_project_is_kept_for_the_local_server() {
    let home = crate::TestHome::new();
    // Projects need no agent.
    let local =
        |args: &[&str]| run_command(home.command(args).env("WINDLASS_SERVER_LOCAL_RUNTIME", "process"));
    local(&["project", "add", "lab"]).ok();
    local(&["project", "set-default", "lab"]).ok();
    assert_eq!(local(&["secret", "-o", "json"]).ok().json()["project"], "lab");
    assert_eq!(local(&["secret", "-o", "json", "--project", "main"]).ok().json()["project"], "main");
}

#[test]
fn users_are_added_and_their_token_is_shown_once() {
    let env = CliEnv::new();
    let mut transcript = CliSnapshot::new("user", &env);
    run_in_all_formats(&mut transcript, &["user"]);
    let made = transcript.run(&["user", "create", "ada", "--email", "ada@example.org"]);
    transcript.run(&["user", "create", "ada"]);
    transcript.run(&["user", "create", "eve", "--admin", "-o", "json"]);
    transcript.run(&["user", "-o", "wide"]);
    transcript.run(&["user", "get", "aad"]);
    transcript.run(&["user", "grant", "ada", "queue"]);
    transcript.run(&["user", "get", "ada"]);
    transcript.run(&["user", "revoke", "ada", "queue"]);
    transcript.run(&["user", "revoke", "eve", "queue"]);
    transcript.run(&["user", "grant", "ada", "everything"]);
    transcript.run(&["user", "refresh-token", "ada"]);
    let again = transcript.run(&["user", "refresh-token", "-y", "ada"]);
    transcript.run(&["user", "delete", "ada"]);
    // A user who is not an admin sees only themselves, and cannot create users.
    let as_ada = |args: &[&str]| run_command(env.command(args).env("WINDLASS_TOKEN", again.stdout.trim()));
    for args in [&["user", "-o", "name"][..], &["user", "create", "mallory"], &["secret"]] {
        transcript.add(args, &as_ada(args));
    }
    transcript.run(&["user", "delete", "-y", "ada", "eve"]);
    transcript.run(&["user", "-o", "name"]);
    transcript.end();
    assert_ne!(made.stdout, again.stdout);
    assert!(
        made.stdout.starts_with("wl_") && made.stdout.lines().count() == 1,
        "the token alone: {}",
        made.stdout
    );
    let old = run_command(env.command(&["user"]).env("WINDLASS_TOKEN", made.stdout.trim()));
    assert_eq!(old.code, Some(1), "the old token is dead");
}

#[test]
fn events_are_listed_oldest_first_and_filtered() {
    let env = CliEnv::new();
    env.windlass(&["secret", "set", "ONE", "1"]).ok();
    env.windlass(&["secret", "set", "TWO", "2"]).ok();
    env.windlass(&["secret", "set", "ONE", "3"]).ok();
    env.file("later.yml", "type: task\nname: later\ncommands: [echo]\nschedule: {cron: \"0 0 1 1 *\"}\n");
    env.windlass(&["apply", "-f", "later.yml", "-y", "-d"]).ok();
    let mut transcript = CliSnapshot::new("event", &env);
    run_in_all_formats(&mut transcript, &["event", "--target-secret", "ONE"]);
    transcript.run(&["event", "-n", "1", "--include-target-type", "secret"]);
    transcript.run(&["event", "--within-run", "later"]);
    transcript.run(&["event", "--target-run", "latter"]);
    transcript.run(&["event", "--target-run", "later", "--within-fleet", "x"]);
    transcript.run(&["event", "--since", "yesterday"]);
    transcript.run(&["event", "--since", "1h", "--include-target-type", "volume"]);
    transcript.run(&["event", "-f", "-o", "json"]);
    transcript.end();
    // More than a page, from a time on: no event is repeated or missing.
    for number in 0..60 {
        env.windlass(&["secret", "set", &format!("S{number}"), "x"]).ok();
        env.windlass(&["secret", "delete", "-y", &format!("S{number}")]).ok();
    }
    let all = env
        .windlass(&["event", "--since", "1h", "--include-target-type", "secret", "-o", "name"])
        .ok()
        .stdout;
    let ids: std::collections::BTreeSet<&str> = all.lines().collect();
    assert_eq!((ids.len(), all.lines().count()), (123, 123));
}

#[test]
fn event_follow_prints_new_events() {
    let env = CliEnv::new();
    env.windlass(&["secret", "set", "BEFORE", "1"]).ok();
    let mut follow =
        env.command(&["event", "-f", "-n", "1", "--include-target-type", "secret", "-o", "jsonl"]);
    let mut child = follow.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
    let mut lines = std::io::BufRead::lines(std::io::BufReader::new(child.stdout.take().unwrap()));
    let mut next = || {
        let event: serde_json::Value = serde_json::from_str(&lines.next().unwrap().unwrap()).unwrap();
        event["targets"][0]["name"].as_str().unwrap().to_owned()
    };
    assert_eq!(next(), "BEFORE");
    for name in ["FIRST", "SECOND"] {
        env.windlass(&["secret", "set", name, "1"]).ok();
        assert_eq!(next(), name);
    }
    child.kill().unwrap();
    child.wait().unwrap();
}

/// A server with a scripted cloud: two instance types, one with GPUs. Everything it created is deleted at the end.
pub(crate) struct CloudServer(pub(crate) CliEnv);

const CLOUD: &str = "\
runtime: process
offers:
  - {instance_type: small, region: east, price: 0.5, cpus: 4, memory_gb: 16, disk_gb: 100}
  - {instance_type: big, region: west, price: 8, cpus: 64, memory_gb: 512, disk_gb: 1000,
     gpus: {name: H100, count: 2, memory_gb: 80}}
  - {instance_type: big, region: west, price: 3, spot: true, cpus: 64, memory_gb: 512, disk_gb: 1000,
     gpus: {name: H100, count: 2, memory_gb: 80}}
";

impl CloudServer {
    pub(crate) fn new() -> Self {
        require_agent();
        let home = crate::TestHome::new();
        let script = home.0.file("cloud.yml", CLOUD);
        let args = ["--admin-token", TOKEN];
        let server = server::with_mock_cloud(&home.path().join("data"), &args, &script);
        let env = CliEnv { server, home };
        env.file("burst.yml", "type: fleet\nname: burst\nnodes: 0..2\nbackends: [mock]\nspot_policy: auto\nresources: {cpu: 1.., memory: 0.., disk: null, gpu: 0..}\n");
        env.windlass(&["apply", "-f", "burst.yml", "-y"]).ok();
        Self(env)
    }
}

impl Drop for CloudServer {
    fn drop(&mut self) {
        let active = self.0.windlass(&["ps", "-o", "name"]).stdout;
        for name in active.lines() {
            self.0.windlass(&["stop", "-x", "-y", "--wait", name]);
        }
        self.0.windlass(&["fleet", "delete", "-y", "--wait", "burst"]);
    }
}

#[test]
fn offer_lists_prices_of_fitting_offers_and_shortfalls_of_others() {
    let cloud = CloudServer::new();
    let mut transcript = CliSnapshot::new("offer", &cloud.0);
    run_in_all_formats(&mut transcript, &["offer"]);
    transcript.run(&["offer", "--gpu", "H100:1..", "--max-price", "4", "--spot"]);
    transcript.run(&["offer", "--gpu", "80GB", "--on-demand", "--max-offers", "1"]);
    transcript.run(&["offer", "-r", "east", "--cpu", "2..", "--memory", "8GB.."]);
    transcript.run(&["offer", "--gpu", "H200"]);
    transcript.run(&["offer", "-R"]);
    transcript.run(&["offer", "--memory", "lots"]);
    run_in_all_formats(&mut transcript, &["offer", "--group-by", "gpu"]);
    transcript.run(&["offer", "--group-by", "gpu,backend,region,count"]);
    transcript.run(&["offer", "--group-by", "backend"]);
    transcript.run(&["offer", "--group-by", "gpu,region"]);
    transcript.end();
}

#[test]
fn a_plan_never_lists_a_fitting_offer_as_unsuitable() {
    let cloud = CloudServer::new();
    let resources = "{cpu: 1.., memory: 0.., disk: null, gpu: 'H100:2'}";
    let task = format!("type: task\nname: gpu\ncommands: [echo hi]\nresources: {resources}\n");
    cloud.0.file("gpu.yml", &task);
    let plan = cloud.0.windlass(&["apply", "-f", "gpu.yml", "-y", "-d"]).ok().stderr;
    let (fits, misses) = plan.split_once("Does not fit:").unwrap();
    // The fleet allows spot and on-demand, and an offer without this information matches either.
    assert_eq!(fits.matches(" big ").count(), 2, "{plan}");
    assert!(misses.contains("small") && !misses.contains(" big"), "{plan}");
}

#[test]
fn instances_with_their_jobs_and_costs_are_shown() {
    let cloud = CloudServer::new();
    let task =
        "type: task\nname: busy\ncommands: ['sleep 600']\nresources: {cpu: 1.., memory: 0.., disk: null}\n";
    cloud.0.file("busy.yml", task);
    cloud.0.windlass(&["apply", "-f", "busy.yml", "-y", "-d"]).ok();
    let until = |args: &[&str], part: &str| {
        eventually(&format!("`{part}` in {args:?}"), || cloud.0.windlass(args).ok().stdout.contains(part));
    };
    until(&["ps"], "running");
    until(&["instance"], "busy");
    let mut transcript = CliSnapshot::new("machines", &cloud.0);
    transcript.run(&["instance"]);
    transcript.run(&["instance", "-o", "name", "--fleet", "burst"]);
    transcript.run(&["instance", "get", "burst-0", "-o", "name"]);
    transcript.run(&["instance", "get", "burst-7"]);
    transcript.run(&["instance", "--fleet", "bursd"]);
    transcript.run(&["fleet"]);
    transcript.run(&["fleet", "get", "burst", "-o", "name"]);
    transcript.run(&["metrics", "bussy"]);
    transcript.run(&["metrics", "busy", "--job", "3"]);
    transcript.run(&["metrics", "busy", "--replica", "3"]);
    transcript.run(&["cost", "-o", "name"]);
    transcript.run(&["cost", "--by", "user", "-o", "name"]);
    transcript.run(&["cost", "--by", "fleet", "-o", "name"]);
    transcript.run(&["cost", "--since", "2020-01-01T00:00:00Z", "--until", "2020-02-01T00:00:00Z"]);
    transcript.run(&["cost", "--since", "1h", "--until", "2h"]);
    transcript.end();
    let facts = cloud.0.windlass(&["instance", "get", "burst-0"]).ok().stdout;
    let words = facts.split_whitespace().collect::<Vec<_>>().join(" ");
    for part in ["Status busy", "Job busy-0-0", "Type small", "Price $0.5", "Last seen"] {
        assert!(words.contains(part), "no `{part}` in\n{facts}");
    }
    let one = cloud.0.windlass(&["instance", "get", "burst-0", "-o", "json"]).ok().json();
    assert_eq!(
        (&one["version"], &one["busy_blocks"], &one["total_blocks"]),
        (&1.into(), &1.into(), &1.into())
    );
    // Two samples, ten seconds apart, make a point.
    until(&["metrics", "busy", "-o", "name"], "busy-0-0");
    let charts = cloud.0.windlass(&["metrics", "busy"]).ok().stdout;
    assert!(charts.contains("busy-0-0  cpu ") && charts.contains('▁'), "{charts}");
    let watched = Terminal::run(&cloud.0, &["metrics", "busy", "--watch"]);
    watched.wait_for_text("busy-0-0  cpu ");
    watched.keys(&["C-c"]);
    // Half a dollar an hour, for its duration.
    let bill = cloud.0.windlass(&["cost", "-o", "json"]).ok().json();
    let (hours, cost) = (bill["total"]["hours"].as_f64().unwrap(), bill["total"]["cost"].as_f64().unwrap());
    assert!(hours > 0.0 && (cost - hours * 0.5).abs() < 1e-9, "{bill}");
    let table = cloud.0.windlass(&["cost", "-o", "wide"]).ok().stdout;
    let last = table.lines().last().unwrap();
    assert!(table.starts_with("RUN") && last.starts_with("total"), "{table}");
}

#[test]
fn volumes_are_created_shown_and_deleted() {
    let cloud = CloudServer::new();
    cloud.0.file("disk.yml", "type: volume\nname: disk\nbackend: mock\nregion: east\nsize: 100GB\n");
    cloud.0.windlass(&["apply", "-f", "disk.yml", "-y"]).ok();
    let mut transcript = CliSnapshot::new("volume", &cloud.0);
    transcript.run(&["volume"]);
    transcript.run(&["volume", "-o", "wide"]);
    transcript.run(&["volume", "-o", "name"]);
    transcript.run(&["volume", "get", "disc"]);
    transcript.run(&["volume", "delete", "disk"]);
    transcript.run(&["volume", "delete", "-y", "disk"]);
    transcript.end();
    eventually("the volume is gone", || cloud.0.windlass(&["volume", "-o", "name"]).ok().stdout.is_empty());
}

#[test]
fn projects_share_volumes_by_exports() {
    let cloud = CloudServer::new();
    cloud.0.windlass(&["project", "add", "vision"]).ok();
    cloud.0.file("disk.yml", "type: volume\nname: disk\nbackend: mock\nregion: east\nsize: 100GB\n");
    cloud.0.windlass(&["apply", "-f", "disk.yml", "-y"]).ok();
    let ok = |args: &[&str]| cloud.0.windlass(args).ok().stdout;
    ok(&["export", "create", "data", "--volume", "disk", "--importer", "vision"]);
    assert!(ok(&["import", "--project", "vision"]).contains("disk"));
    ok(&["export", "update", "data", "--remove-volume", "disk"]);
    assert!(!ok(&["export"]).contains("disk"));
    ok(&["export", "update", "data", "--add-volume", "disk"]);
    assert!(ok(&["export"]).contains("disk"));
}

#[test]
fn backends_that_the_server_does_not_have_are_refused() {
    let env = CliEnv::new();
    env.file("far.yml", "type: fleet\nname: far\nnodes: 1\nbackends: [aws]\n");
    env.file("door.yml", "type: gateway\nname: door\nbackend: aws\nregion: eu-west-1\ndomain: example.org\n");
    env.file("disk.yml", "type: volume\nname: disk\nbackend: aws\nregion: eu-west-1\nsize: 10GB\n");
    for file in ["far.yml", "door.yml", "disk.yml"] {
        let refused = env.windlass(&["apply", "-f", file, "-y"]);
        assert_ne!(refused.code, Some(0));
        refused.says("this server has no backend `aws`; it has `");
    }
    assert_eq!(env.windlass(&["fleet", "get", "far"]).code, Some(1));
}

#[test]
fn apply_warns_about_fields_without_effect_and_refuses_fleets_of_other_projects() {
    let env = CliEnv::new();
    env.file("home.yml", "type: task\nname: home\ncommands: [echo hi]\nhome_dir: /home/me\n");
    let applied = env.windlass(&["apply", "-f", "home.yml", "-y", "-d"]);
    applied.says("warning: home.yml:4: `home_dir` has no effect");
    assert_eq!(env.windlass(&["ps", "-a", "-o", "name"]).ok().stdout.trim(), "home");
    env.file("far.yml", "type: task\nname: far\ncommands: [echo hi]\nfleets: [other/local]\n");
    let refused = env.windlass(&["apply", "-f", "far.yml", "-y", "-d"]);
    assert_ne!(refused.code, Some(0));
    refused.says("`other/local` is a fleet of another project that is not exported to `main`");
}

#[test]
fn gateways_are_shown_changed_and_deleted() {
    let env = CliEnv::new();
    let text = "type: gateway\nname: entry\nbackend: remote\nregion: eu-west-1\ndomain: example.org\n";
    env.file("entry.yml", text);
    env.windlass(&["apply", "-f", "entry.yml", "-y", "-d"]).ok();
    let mut transcript = CliSnapshot::new("gateway", &env);
    transcript.run(&["gateway"]);
    transcript.run(&["gateway", "get", "entry", "-o", "name"]);
    transcript.run(&["gateway", "get", "entri"]);
    transcript.run(&["gateway", "update", "entry"]);
    transcript.run(&["gateway", "update", "entry", "--domain", "example.net", "--set-default"]);
    transcript.run(&["gateway", "-o", "wide"]);
    transcript.run(&["gateway", "delete", "-y", "entry"]);
    transcript.end();
}

#[test]
fn resource_commands_have_examples_in_their_help() {
    let home = crate::TestHome::new();
    let commands = [
        "offer", "fleet", "instance", "volume", "gateway", "secret", "event", "metrics", "project", "user",
        "cost", "top",
    ];
    for command in commands {
        let help = home.windlass(&[command, "--help"]).ok().stdout;
        assert!(help.contains("Examples:\n  windlass "), "{command}: {help}");
    }
}

#[test]
fn lists_are_updated_while_they_are_watched() {
    let cloud = CloudServer::new();
    let apply = |file: &str, text: &str| {
        cloud.0.file(file, text);
        cloud.0.windlass(&["apply", "-f", file, "-y", "-d"]).ok();
    };
    let create = |name: &str| {
        apply("fleet.yml", &format!("type: fleet\nname: fleet-{name}\nnodes: 0..1\nbackends: [mock]\n"));
        apply(
            "disk.yml",
            &format!("type: volume\nname: disk-{name}\nbackend: mock\nregion: east\nsize: 100GB\n"),
        );
        let domain = format!("backend: remote\nregion: here\ndomain: {name}.example\n");
        apply("entry.yml", &format!("type: gateway\nname: entry-{name}\n{domain}"));
        let commands = "commands: ['sleep 600']\nresources: {cpu: 1.., memory: 0.., disk: null}\n";
        apply("task.yml", &format!("type: task\nname: task-{name}\n{commands}"));
    };
    create("one");
    let lists = [("fleet", "fleet"), ("volume", "disk"), ("gateway", "entry"), ("instance", "task")];
    for (list, prefix) in lists {
        let shown = || cloud.0.windlass(&[list]).ok().stdout.contains(&format!("{prefix}-one"));
        eventually(&format!("the first entry is in `{list}`"), shown);
    }
    let watched = lists.map(|(list, prefix)| (Terminal::run(&cloud.0, &[list, "-w"]), prefix));
    for (terminal, prefix) in &watched {
        terminal.wait_for_text(&format!("{prefix}-one"));
    }
    create("two");
    for (terminal, prefix) in &watched {
        terminal.wait_for_text(&format!("{prefix}-two"));
        let heads = terminal.screen().lines().filter(|line| line.starts_with("NAME")).count();
        assert_eq!(heads, 1, "{}", terminal.screen());
        terminal.keys(&["C-c"]);
    }
}

#[test]
fn watch_mode_refuses_json_output() {
    let home = crate::TestHome::new();
    for thing in ["fleet", "instance", "volume", "gateway"] {
        let refused =
            home.windlass(&[thing, "-w", "-o", "json", "--url", "http://127.0.0.1:1", "--token", "x"]);
        assert_eq!(refused.code, Some(2), "{}", refused.stderr);
    }
}
