//! `windlass apply`, `ps`, `stop`, `logs` and `fleet` against a server without instances.

use crate::{TestHome, cli_env::CliEnv};

/// A schedule that keeps a run pending for the duration of a test.
const WAITING: &str = "type: task\nname: later\ncommands: [echo hi]\nschedule:\n  cron: \"0 0 1 1 *\"\n";
const TASK: &str = "type: task\nname: hello\ncommands: [echo hi]\n";

#[test]
fn a_run_is_submitted_listed_and_stopped() {
    let env = CliEnv::new();
    env.file("later.yml", WAITING);
    let applied = env.windlass(&["apply", "-f", "later.yml", "-y", "-d"]).ok();
    assert_eq!(applied.stdout, "later\n");
    applied.says("Run           later (task)");
    let listed = env.windlass(&["ps", "-o", "json"]).ok().json();
    assert_eq!(listed["runs"][0]["run_spec"]["run_name"], "later");
    assert_eq!(env.windlass(&["ps", "-o", "name"]).ok().stdout, "later\n");
    let line = env.windlass(&["ps", "-o", "jsonl"]).ok();
    assert_eq!(line.stdout.lines().count(), 1);
    let table = env.windlass(&["ps"]).ok().stdout;
    assert!(table.starts_with("NAME") && table.contains("later"), "{table}");
    assert!(!table.contains('\u{1b}'), "colours go to terminals only");

    // Applying an unchanged configuration returns the existing run.
    env.windlass(&["apply", "-f", "later.yml", "-y", "-d"]).ok().says("is already active and unchanged");
    // A different name creates a different run.
    let other = env.windlass(&["apply", "-f", "later.yml", "-y", "-d", "-n", "other", "-o", "name"]).ok();
    assert_eq!(other.stdout, "other\n");

    assert_eq!(env.windlass(&["stop", "later"]).code, Some(2), "nobody can answer");
    let typo = env.windlass(&["stop", "-y", "laterr", "other"]);
    assert_eq!(typo.code, Some(1));
    typo.says("did you mean `later`?");
    let stopped = env.windlass(&["stop", "-y", "--wait", "later", "other", "-o", "jsonl"]).ok().stdout;
    let stopped: Vec<serde_json::Value> =
        stopped.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(stopped.iter().map(|run| &run["status"]).collect::<Vec<_>>(), ["terminated", "terminated"]);
    assert_eq!(env.windlass(&["ps", "-o", "name"]).ok().stdout, "");
    let all = env.windlass(&["ps", "-a", "-o", "name"]).ok().stdout;
    assert_eq!(all.lines().count(), 2, "{all}");
    let again = env.windlass(&["stop", "-y", "later", "-o", "name"]).ok();
    again.says("has already ended");
    assert_eq!(again.stdout, "later\n");
    env.windlass(&["why", "later"]).ok();
}

#[test]
fn an_incompatible_change_names_the_field_and_replaces_the_active_run() {
    let env = CliEnv::new();
    env.file("later.yml", WAITING);
    let before = env.windlass(&["apply", "-f", "later.yml", "-y", "-d", "-o", "json"]).ok().json();
    env.file("later.yml", &WAITING.replace("echo hi", "echo ho"));
    let after = env.windlass(&["apply", "-f", "later.yml", "-y", "-d", "-o", "json"]).ok();
    after.says("`configuration.commands` cannot be changed in place");
    assert_ne!(before["id"], after.json()["id"]);
    env.file(
        "later.yml",
        &WAITING.replace("echo hi", "echo ho").replace("name: later", "name: later\npriority: 5"),
    );
    let updated = env.windlass(&["apply", "-f", "later.yml", "-y", "-d", "-o", "json"]).ok();
    updated.says("can be updated in place.\n  ");
    updated.says("priority: ");
    assert_eq!(updated.json()["id"], after.json()["id"]);
}

#[test]
fn apply_exits_200_and_explains_why_nothing_fits() {
    let env = CliEnv::new();
    env.file("hello.yml", TASK);
    let applied = env.windlass(&["apply", "-f", "hello.yml", "-y"]);
    assert_eq!(applied.code, Some(200), "{}", applied.stderr);
    assert_eq!(applied.stdout, "");
    applied.says("why:");
    applied.says("Nothing fits now:\n  ");
    applied.says("hint: run `windlass why hello`");
    let why = env.windlass(&["why", "hello", "-o", "json"]).ok().json();
    assert!(!why["reasons"].as_array().unwrap().is_empty(), "{why}");
    let why = env.windlass(&["why", "hello"]).ok().stdout;
    assert!(
        why.contains("reason: failed to start due to no capacity") && why.contains("does not fit"),
        "{why}"
    );
    // No output is not an error.
    assert_eq!(env.windlass(&["logs", "hello"]).ok().stdout, "");
}

#[test]
fn apply_and_why_show_what_a_waiting_run_lacks() {
    let env = CliEnv::new();
    env.file("hello.yml", &(TASK.to_owned() + "retry: {on_events: [no-capacity], duration: 1h}\n"));
    let applied = env.windlass(&["apply", "-f", "hello.yml", "-y", "-d"]).ok();
    applied.says("Nothing fits now:\n  ");
    let place = applied.stderr.split("Nothing fits now:\n  ").nth(1).unwrap().lines().next().unwrap();
    let why = env.windlass(&["why", "hello"]).ok().stdout;
    assert!(why.contains("does not fit") && why.contains(place), "no `{place}` in\n{why}");
    env.windlass(&["stop", "-xy", "--wait", "hello"]).ok();
}

#[test]
fn configuration_errors_show_their_line_and_need_no_server() {
    let home = TestHome::new();
    home.0.file("bad.yml", "type: task\ncomands: [echo]\n");
    let bad = home.windlass(&["apply", "-f", "bad.yml", "-y"]);
    assert_eq!(bad.code, Some(200));
    bad.says("2 | comands: [echo]");
    bad.says("did you mean `commands`?");
    home.0.file("env.yml", "type: task\ncommands: [echo]\nenv: [SURELY_NOT_SET]\n");
    let unset = home.windlass(&["apply", "-f", "env.yml", "-y"]);
    assert_eq!(unset.code, Some(200));
    unset.says("hint: pass `-e SURELY_NOT_SET=VALUE`");
    let absent = home.windlass(&["apply", "-f", "absent.yml", "-y"]);
    assert_eq!(absent.code, Some(200));
    absent.says("read `absent.yml`");
    assert!(!home.path().join("home/server").exists(), "no server was started for that");
}

#[test]
fn apply_usage_errors_exit_2_and_name_the_flag() {
    let home = TestHome::new();
    home.0.file("hello.yml", TASK);
    let first_output = home.windlass(&["apply", "-f", "hello.yml"]);
    assert_eq!(first_output.code, Some(2));
    first_output.says("pass `-y`");
    let output = home.windlass(&["apply", "-f", "hello.yml", "-y", "-o", "json"]);
    assert_eq!(output.code, Some(2));
    output.says("`-o` cannot be used while the run is followed");
    assert_eq!(home.windlass(&["apply", "-y"]).code, Some(2), "no file");
    assert_eq!(home.windlass(&["apply", "-f", "hello.yml", "-y", "-n", "Not A Name"]).code, Some(2));
    assert_eq!(home.windlass(&["apply", "-f", "hello.yml", "-y", "-e", "=x"]).code, Some(2));
}

#[test]
fn variables_and_arguments_of_the_command_line_reach_the_run() {
    let env = CliEnv::new();
    let text = WAITING.replace("echo hi", "\"echo ${{ run.args }}\"") + "env: [A=1, B]\n";
    env.file("later.yml", &text);
    let args =
        ["apply", "-f", "later.yml", "-y", "-d", "-o", "json", "-e", "B=2", "-e", "C=3", "--", "--lr", "a b"];
    let run = env.windlass(&args).ok().json();
    let configuration = &run["run_spec"]["configuration"];
    assert_eq!(configuration["env"], serde_json::json!({ "A": "1", "B": "2", "C": "3" }));
    assert_eq!(configuration["commands"][0], "echo --lr 'a b'");
}

#[test]
fn identical_files_reuse_the_uploaded_archive() {
    let env = CliEnv::new();
    env.file("conf/data/a.txt", "1");
    env.file("conf/later.yml", &(WAITING.to_owned() + "files: [data, data/a.txt:/etc/a]\n"));
    let apply = |name: &str| {
        let args = ["apply", "-f", "conf/later.yml", "-y", "-d", "-o", "json", "-n", name];
        env.windlass(&args).ok().json()["run_spec"]["file_archives"].clone()
    };
    let (first, second) = (apply("one"), apply("two"));
    assert_eq!(first.as_array().unwrap().len(), 2);
    assert_eq!((&first[0]["path"], &first[1]["path"]), (&"data".into(), &"/etc/a".into()));
    assert_eq!(first, second, "the same content is the same archive");
}

#[test]
fn a_directory_without_git_is_uploaded_whole() {
    let env = CliEnv::new();
    env.file("code/main.py", "print(1)");
    env.file("code/later.yml", &(WAITING.to_owned() + "repos: [.]\n"));
    let run = env.windlass(&["apply", "-f", "code/later.yml", "-y", "-d", "-o", "json"]).ok();
    run.says("it is not a git repository");
    let spec = &run.json()["run_spec"];
    assert_eq!(spec["repo_data"]["repo_type"], "virtual");
    assert_eq!(spec["repo_code_hash"].as_str().unwrap().len(), 64);
}

#[test]
fn ssh_fleet_keys_are_read_by_the_client_and_private_keys_are_never_returned() {
    let env = CliEnv::new();
    let key = env.home.path().join("id");
    let made = std::process::Command::new("ssh-keygen")
        .args(["-q", "-t", "ed25519", "-N", "", "-C", "", "-f"])
        .arg(&key)
        .status()
        .unwrap();
    assert!(made.success());
    let text =
        "type: fleet\nname: rack\nssh_config:\n  user: root\n  identity_file: id\n  hosts: [127.0.0.1]\n";
    env.file("rack.yml", text);
    let fleet = env.windlass(&["apply", "-f", "rack.yml", "-y", "-d", "-o", "json"]).ok();
    let ssh = fleet.json()["spec"]["configuration"]["ssh_config"]["ssh_key"].clone();
    let public = std::fs::read_to_string(key.with_extension("pub")).unwrap();
    assert_eq!(ssh["public"].as_str().unwrap().trim(), public.trim());
    assert_eq!(ssh["private"], serde_json::Value::Null);
    let private = std::fs::read_to_string(&key).unwrap();
    assert!(!fleet.stdout.contains(private.lines().nth(1).unwrap()));
    assert_eq!(env.windlass(&["fleet", "-o", "name"]).ok().stdout, "rack\n");
    let near = env.windlass(&["fleet", "get", "rac"]);
    assert_eq!(near.code, Some(1));
    near.says("did you mean `rack`?");
    env.windlass(&["fleet", "delete", "-y", "rack"]).ok();
}

#[test]
fn an_unusable_key_is_refused_by_the_client() {
    let env = CliEnv::new();
    env.file("id", "not a key");
    env.file(
        "rack.yml",
        "type: fleet\nname: rack\nssh_config:\n  user: root\n  identity_file: id\n  hosts: [127.0.0.1]\n",
    );
    let refused = env.windlass(&["apply", "-f", "rack.yml", "-y", "-d"]);
    assert_eq!(refused.code, Some(200));
    refused.says("read the private key");
    refused.says("without a passphrase");
}
