//! `windlass top` on a terminal, with a real server and real jobs.

use std::process::Command;

use crate::{TestHome, attach::require_agent, run_command, terminal::Terminal};

/// Jobs run as processes, on any machine.
fn local_command(home: &TestHome, args: &[&str]) -> Command {
    let mut command = home.command(args);
    command.env("WINDLASS_SERVER_LOCAL_RUNTIME", "process");
    command
}

#[test]
fn top_filters_opens_describes_and_stops_a_run() {
    require_agent();
    let home = TestHome::new();
    let task = |name: &str, cpus: &str| {
        format!(
            "type: task\nname: {name}\ncommands: ['echo line of {name}; sleep 600']\n\
             resources: {{cpu: {cpus}, memory: 0.., disk: null}}\n\
             retry: {{on_events: [no-capacity], duration: 1h}}\n"
        )
    };
    for (name, cpus) in [("alpha", "1.."), ("omega", "9999..")] {
        home.0.file("run.yml", &task(name, cpus));
        run_command(&mut local_command(&home, &["apply", "-f", "run.yml", "-y", "-d"])).ok();
    }
    let top = Terminal::command(&home, &local_command(&home, &["top"]));
    top.wait_for_text("[1 runs (2)]");
    let screen = top.wait_for_text("1 running, 1 waiting");
    for part in ["alpha", "omega", "main at http://127.0.0.1:"] {
        assert!(screen.contains(part), "no `{part}` in\n{screen}");
    }

    // Filter, open, read, return.
    top.keys(&["/", "alp"]);
    top.wait_for_text("/alp_");
    top.keys(&["Enter"]);
    let filtered = top.wait_for_text("? help");
    assert!(!filtered.contains("omega"), "{filtered}");
    top.keys(&["Enter"]);
    top.wait_for_text("logs of alpha");
    top.wait_for_text("line of alpha");
    top.keys(&["q"]);
    top.wait_for_text("? help");
    top.keys(&["q"]);
    top.wait_for_text("omega");

    // The queue shows why a run waits.
    top.keys(&[":", "queue", "Enter"]);
    top.wait_for_text("[2 queue (1)]");
    top.keys(&["d"]);
    top.wait_for_text("run omega");
    top.wait_for_text("needs at least 9999 CPUs");
    top.keys(&["q", "3"]);
    top.wait_for_text("[3 instances (1)]");
    top.wait_for_text("busy");
    top.keys(&["4"]);
    top.wait_for_text("[4 events");
    top.wait_for_text("run alpha");

    // Nothing is stopped without confirmation.
    top.keys(&["1", "/", "alpha", "Enter", "s"]);
    top.wait_for_text("Stop `alpha`? [y/n]");
    top.keys(&["n"]);
    top.wait_for_text("nothing was stopped");
    top.keys(&["s", "y"]);
    top.wait_for_text("0 running");
    top.keys(&["?"]);
    top.wait_for_text("filter by any column");
    top.keys(&["q"]);
    top.wait_for_text("/alpha");
    top.keys(&["q"]);
    top.wait_for_text("omega");
    top.keys(&["q"]);
    top.wait_for_text("exit: 0");
    // The run was asked to stop; it may not have ended yet.
    run_command(&mut local_command(&home, &["stop", "-y", "--wait", "alpha"])).ok();
    assert_eq!(run_command(&mut local_command(&home, &["ps", "-o", "name"])).ok().stdout, "omega\n");
}

#[test]
fn top_restores_the_terminal_when_interrupted() {
    require_agent();
    let home = TestHome::new();
    run_command(&mut local_command(&home, &["ps"])).ok();
    let command = local_command(&home, &["top"]);
    let mut shell = Command::new("sh");
    let script =
        "\"$0\" top; echo \"code $?\"; stty -a | tr ' ;' '\\n\\n' | grep -x -e icanon -e echo | tr '\\n' ' '";
    shell.args(["-c", script, env!("CARGO_BIN_EXE_windlass")]);
    for (name, value) in command.get_envs() {
        match value {
            Some(value) => shell.env(name, value),
            None => shell.env_remove(name),
        };
    }
    let top = Terminal::command(&home, &shell);
    top.wait_for_text("[1 runs (0)]");
    top.keys(&["C-c"]);
    top.wait_for_text("code 0");
    let screen = top.wait_for_text("icanon echo");
    assert!(!screen.contains("[1 runs"), "{screen}");
}

#[test]
fn top_without_a_terminal_suggests_ps_with_json() {
    let home = TestHome::new();
    let refused = home.windlass(&["top"]);
    assert_eq!(refused.code, Some(2));
    refused.says("`windlass ps -o json`");
    assert!(!home.path().join("home/server").exists(), "no server was started for that");
}
