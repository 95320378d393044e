//! Commands of the first hour: flags instead of files, deletion, contexts, a shell in a job.

use windlass_testkit::wait::eventually;

use crate::{
    TestHome,
    attach::require_agent,
    cli_env::{CliEnv, TOKEN},
    run_command, server,
};

/// A schedule that keeps a run pending for the duration of a test.
const WAITING: &str = "type: task\nname: later\ncommands: [echo hi]\nschedule:\n  cron: \"0 0 1 1 *\"\n";

#[test]
fn flags_of_apply_change_the_run_and_the_plan_shows_it() {
    let env = CliEnv::new();
    env.file("later.yml", WAITING);
    env.file("rack.yml", "type: fleet\nname: rack\nnodes: 0..1\n");
    env.windlass(&["apply", "-f", "rack.yml", "-y"]).ok();
    let flags = [
        "apply",
        "-f",
        "later.yml",
        "-y",
        "-d",
        "-o",
        "json",
        "--gpu",
        "H100:2",
        "--memory",
        "100MB..200MB",
        "--max-price",
        "3.5",
        "--spot-auto",
        "--retry-duration",
        "30m",
        "--max-duration",
        "2h",
        "-R",
        "--fleet",
        "rack",
        "--region",
        "eu-west-1",
    ];
    let applied = env.windlass(&flags).ok();
    for row in [
        "mem=100MB..200MB",
        "gpu=H100:2",
        "$3.5 per hour",
        "either",
        "eu-west-1",
        "rack",
        "existing instances only",
        "2 h",
    ] {
        applied.says(row);
    }
    let configuration = &applied.json()["run_spec"]["configuration"];
    assert_eq!(configuration["resources"]["gpu"]["count"], serde_json::json!({ "min": 2, "max": 2 }));
    assert_eq!(
        (&configuration["max_duration"], &configuration["retry"]["duration"]),
        (&7200.into(), &1800.into())
    );
    assert_eq!(
        (&configuration["spot_policy"], &configuration["creation_policy"]),
        (&"auto".into(), &"reuse".into())
    );

    let wrong = env.windlass(&["apply", "-f", "later.yml", "-y", "--gpu", "8xH100"]);
    assert_eq!(wrong.code, Some(2));
    wrong.says("`--gpu`: ");
    wrong.says("did you mean `H100:8`?");
    env.file("rack.yml", "type: fleet\nname: rack\nnodes: 1\n");
    let fleet = env.windlass(&["apply", "-f", "rack.yml", "-y", "--gpu", "1", "--retry"]);
    assert_eq!(fleet.code, Some(2));
    fleet.says("`--gpu`, `--retry` cannot be used with a fleet");
    let orphan = env.windlass(&["apply", "later.yml"]);
    assert_eq!(orphan.code, Some(2));
    orphan.says("`windlass apply -f later.yml`");
}

#[test]
fn apply_reports_unknown_secrets_and_unreachable_remotes_before_submitting() {
    let env = CliEnv::new();
    env.windlass(&["secret", "set", "TOKEN", "x"]).ok();
    env.file("later.yml", &(WAITING.to_owned() + "env: {A: '${{ secrets.TOKNE }}'}\n"));
    let unknown = env.windlass(&["apply", "-f", "later.yml", "-y", "-d"]);
    assert_eq!(unknown.code, Some(200));
    unknown.says("no secret named `TOKNE` in project `main`");
    unknown.says("did you mean `TOKEN`?");
    env.file("repo.yml", &(WAITING.to_owned() + "repos: ['file:///srv/app.git']\n"));
    let remote = env.windlass(&["apply", "-f", "repo.yml", "-y", "-d"]);
    assert_eq!(remote.code, Some(200));
    remote.says("instances clone only over https, ssh or git");
    assert_eq!(env.windlass(&["ps", "-a", "-o", "name"]).ok().stdout, "");
}

#[test]
fn delete_by_name_requires_a_finished_run_and_delete_by_file_stops_it_first() {
    let env = CliEnv::new();
    env.file("later.yml", WAITING);
    env.windlass(&["apply", "-f", "later.yml", "-y", "-d"]).ok();
    let active = env.windlass(&["delete", "-y", "later"]);
    assert_eq!(active.code, Some(1));
    active.says("cannot delete runs that are not finished: `later` is pending");
    active.says("`windlass stop --wait later` first");
    assert_eq!(env.windlass(&["delete", "-f", "later.yml"]).code, Some(2), "no terminal to ask on");

    env.windlass(&["stop", "-y", "--wait", "later"]).ok();
    let typo = env.windlass(&["delete", "-y", "later", "latr"]);
    assert_eq!(typo.code, Some(1));
    assert_eq!(env.windlass(&["ps", "-a", "-o", "name"]).ok().stdout, "later\n", "all or none");
    env.windlass(&["delete", "-y", "later"]).ok().says("Deleted later.");
    assert_eq!(env.windlass(&["ps", "-a", "-o", "name"]).ok().stdout, "");

    env.windlass(&["apply", "-f", "later.yml", "-y", "-d"]).ok();
    env.windlass(&["delete", "-y", "-f", "later.yml"]).ok().says("Stopping `later`");
    assert_eq!(env.windlass(&["ps", "-a", "-o", "name"]).ok().stdout, "");
    env.file("unnamed.yml", "type: task\ncommands: [a]\n");
    assert_eq!(env.windlass(&["delete", "-y", "-f", "unnamed.yml"]).code, Some(2));
    let absent = env.windlass(&["delete", "-y", "-f", "later.yml"]);
    absent.says("no run named `later` in project `main`");
}

#[test]
fn delete_with_a_fleet_file_deletes_the_fleet() {
    let env = CliEnv::new();
    env.file("rack.yml", "type: fleet\nname: rack\nnodes: 0..1\n");
    env.windlass(&["apply", "-f", "rack.yml", "-y", "-d"]).ok();
    assert_eq!(env.windlass(&["fleet", "-o", "name"]).ok().stdout, "rack\n");
    env.windlass(&["delete", "-y", "--wait", "-f", "rack.yml"]).ok().says("Deleting rack.");
    assert_eq!(env.windlass(&["fleet", "-o", "name"]).ok().stdout, "");
}

#[test]
fn ps_filters_by_name_status_and_user() {
    let env = CliEnv::new();
    env.file("later.yml", WAITING);
    for name in ["train-1", "train-2", "eval"] {
        env.windlass(&["apply", "-f", "later.yml", "-y", "-d", "-n", name]).ok();
    }
    env.windlass(&["stop", "-y", "--wait", "train-2"]).ok();
    let names = |args: &[&str]| {
        let all = [&["ps", "-o", "name"], args].concat();
        let mut names: Vec<String> = env.windlass(&all).ok().stdout.lines().map(str::to_owned).collect();
        names.sort();
        names
    };
    assert_eq!(names(&["train-*"]), ["train-1", "train-2"]);
    assert_eq!(names(&["--status", "terminated"]), ["train-2"]);
    assert_eq!(names(&["--status", "pending", "eval", "train-?"]), ["eval", "train-1"]);
    assert_eq!(names(&["--user", "admin", "-n", "1", "train-*"]).len(), 1);
    env.windlass(&["ps", "nothing-like-it"]).ok().says("No matching runs");
    let table = env.windlass(&["ps"]).ok().stdout;
    assert!(table.lines().next().unwrap().contains("NEXT START"), "{table}");
    let nothing = env.windlass(&["stop", "-y", "eval", "nosuch"]);
    assert_eq!(nothing.code, Some(1));
    nothing.says("no run named `nosuch` in project `main`: nothing was stopped");

    let shown = env.windlass(&["show", "eval"]).ok().stdout;
    for part in ["Name", "eval", "Next start", "echo hi", "later.yml"] {
        assert!(shown.contains(part), "no {part} in\n{shown}");
    }
    assert_eq!(env.windlass(&["show", "eval", "-o", "json"]).ok().json()["run_spec"]["run_name"], "eval");
}

#[test]
fn contexts_switch_between_servers_until_logout() {
    let home = TestHome::new();
    let first = server::start_quiet(&home.path().join("one"), &["--admin-token", TOKEN]);
    let second = server::start_quiet(&home.path().join("two"), &["--admin-token", TOKEN]);
    home.windlass(&["login", "--name", "one", "--url", &first.url(), "--token", TOKEN]).ok();
    home.windlass(&["login", "--name", "two", "--url", &second.url(), "--token", TOKEN]).ok();
    let current = || {
        let all = home.windlass(&["context", "-o", "json"]).ok().json();
        let all = all["contexts"].as_array().unwrap().clone();
        let current: Vec<_> = all.iter().filter(|one| one["current"] == true).collect();
        (current[0]["name"].as_str().unwrap().to_owned(), all.len())
    };
    assert_eq!(current(), ("two".to_owned(), 3));
    home.windlass(&["context", "use", "one"]).ok().says(&first.url());
    assert_eq!(current().0, "one");
    // Another server can be given before the command: its token is stored.
    assert!(home.windlass(&["--url", &second.url(), "ps", "-o", "name"]).ok().stdout.is_empty());
    let near = home.windlass(&["context", "use", "twoo"]);
    assert_eq!(near.code, Some(1));
    near.says("did you mean `two`?");
    home.windlass(&["logout"]).ok().says("Logged out of");
    assert_eq!(current(), ("local".to_owned(), 2));
    assert!(!home.path().join("home/login.json").exists());
    assert!(!home.path().join("home/contexts/one.json").exists(), "its token is forgotten");
    home.windlass(&["logout"]).ok().says("Not logged in");
    assert_eq!(
        home.windlass(&["login", "--name", "local", "--url", &first.url(), "--token", TOKEN]).code,
        Some(2)
    );
}

#[test]
fn a_command_runs_without_a_file_and_can_be_inspected_while_running() {
    require_agent();
    let home = TestHome::new();
    let local = |args: &[&str]| {
        let mut command = home.command(args);
        command.env("WINDLASS_SERVER_LOCAL_RUNTIME", "process");
        run_command(&mut command)
    };
    let requirements = ["--cpu", "1..", "--memory", "0..", "--disk", "0.."];
    let done = local(
        &[&["run", "-y"], &requirements[..], &["-e", "A=1 2", "--", "sh", "-c", "echo $A; exit 3"]].concat(),
    );
    assert_eq!((done.code, done.stdout.replace('\r', "").as_str()), (Some(3), "1 2\n"), "{}", done.stderr);

    let name = local(
        &[&["run", "-y", "-d", "-n", "stays"], &requirements[..], &["--", "echo started; sleep 600"]]
            .concat(),
    )
    .ok();
    assert_eq!(name.stdout, "stays\n");
    eventually("it runs", || local(&["logs", "stays"]).stdout.contains("started"));
    let exec = local(&["exec", "stays", "--", "printf", "%s|", "a b", "$HOME"]);
    assert_eq!((exec.code, exec.stdout.as_str()), (Some(0), "a b|$HOME|"), "{}", exec.stderr);
    assert_eq!(local(&["exec", "stays", "--", "sh", "-c", "exit 7"]).code, Some(7));
    let ssh = local(&["ssh", "stays-0-0", "echo", "$((6 * 7))"]);
    assert_eq!((ssh.code, ssh.stdout.as_str()), (Some(0), "42\n"), "{}", ssh.stderr);
    assert!(local(&["logs", "stays-0-0"]).ok().stdout.starts_with("started"));
    let stamped = local(&["logs", "-t", "stays"]).ok().stdout;
    let stamp = stamped.split(' ').next().unwrap();
    assert!(stamp.ends_with('Z') && stamp.len() == 20 && stamped.contains("Z started"), "{stamped}");
    let shown = local(&["show", "stays"]).ok().stdout;
    assert!(shown.contains("stays-0-0") && shown.contains("local-0"), "{shown}");
    local(&["stop", "-x", "-y", "--wait", "stays"]).ok();
    let over = local(&["ssh", "stays"]);
    assert_eq!(over.code, Some(1));
    over.says("is not running");
}

#[test]
fn the_local_fleet_can_be_deleted_and_added_again() {
    require_agent();
    let home = TestHome::new();
    let local = |args: &[&str]| {
        let mut command = home.command(args);
        command.env("WINDLASS_SERVER_LOCAL_RUNTIME", "process");
        run_command(&mut command)
    };
    assert_eq!(local(&["fleet", "-o", "name"]).ok().stdout, "local\n");
    local(&["fleet", "delete", "-y", "--wait", "local"]).ok().says("`windlass fleet add local`");
    assert_eq!(local(&["fleet", "-o", "name"]).ok().stdout, "");
    local(&["project", "add", "lab"]).ok();
    local(&["fleet", "add", "-y", "local"]).ok().says("Other projects can use it again");
    assert_eq!(local(&["fleet", "-o", "name"]).ok().stdout, "local\n");
    assert_eq!(local(&["fleet", "-o", "name", "--project", "lab"]).ok().stdout, "main/local\n");
    let requirements = ["--cpu", "1..", "--memory", "0..", "--disk", "0.."];
    let done = local(&[&["run", "-y"], &requirements[..], &["--", "echo back"]].concat()).ok();
    assert_eq!(done.stdout.replace('\r', ""), "back\n");
}

#[test]
fn logs_of_a_scheduled_run_name_its_next_start() {
    let env = CliEnv::new();
    env.file("later.yml", WAITING);
    env.windlass(&["apply", "-f", "later.yml", "-y", "-d"]).ok();
    let logs = env.windlass(&["logs", "later"]).ok();
    assert_eq!(logs.stdout, "");
    logs.says("`later` has not started yet: it starts at ");
    logs.says("-01-01T00:00:00Z");
}
