//! Runs followed on a terminal: the tree, and Ctrl-C.

use crate::{TestHome, attach::require_agent, cli_env::CliEnv, terminal::Terminal};

/// The task waits: there is no instance.
fn env_with_waiting_task() -> CliEnv {
    let env = CliEnv::new();
    let text =
        "type: task\nname: job\ncommands: [echo hi]\nretry: {on_events: [no-capacity], duration: 1h}\n";
    env.file("job.yml", text);
    env
}

#[test]
fn a_waiting_run_is_an_animated_tree_and_a_second_ctrl_c_detaches() {
    let env = env_with_waiting_task();
    let terminal = Terminal::run(&env, &["apply", "-f", "job.yml"]);
    terminal.wait_for_text("Submit the run? [y/n]");
    terminal.keys(&["y", "Enter"]);
    let first = terminal.wait_for_text("└─ 0-0  no fleets: fleets: no fleet exists");
    terminal.until("moved", |screen| screen.contains("└─ 0-0") && screen != first);
    assert_eq!(
        terminal.screen().matches("└─ 0-0").count(),
        1,
        "it is drawn in place:\n{}",
        terminal.screen()
    );
    terminal.keys(&["C-c"]);
    let requested = terminal.wait_for_text("[s]top it, or [d]etach");
    assert!(!requested.contains("└─"), "the tree makes room for the question:\n{requested}");
    terminal.keys(&["C-c"]);
    terminal.wait_for_text("Detached from `job`");
    terminal.wait_for_text("exit: 0");
    assert_eq!(env.windlass(&["ps", "-o", "name"]).ok().stdout, "job\n");
    env.windlass(&["stop", "-x", "-y", "--wait", "job"]).ok();
}

#[test]
fn ctrl_c_prompts_and_stops_the_run_on_confirmation() {
    let env = env_with_waiting_task();
    let terminal = Terminal::run(&env, &["apply", "-f", "job.yml", "-y"]);
    terminal.wait_for_text("└─ 0-0  ");
    terminal.keys(&["C-c"]);
    terminal.wait_for_text("[s]top it, or [d]etach");
    terminal.keys(&["what", "Enter"]);
    terminal.until("asked again", |screen| screen.matches("[s]top it").count() == 2);
    terminal.keys(&["s", "Enter"]);
    terminal.wait_for_text("Stopping `job`…");
    terminal.wait_for_text("exit: 201");
    assert_eq!(env.windlass(&["ps", "-o", "name"]).ok().stdout, "");
}

#[test]
fn job_output_cannot_control_the_terminal_unless_raw_output_is_requested() {
    require_agent();
    let home = TestHome::new();
    let text = "type: task\nname: job\ncommands:\n  - |\n    printf 'one\\033]0;owned\\007 \\033[32mgreen\\033[0m\\n'\n\
                resources: {cpu: 1.., memory: 0.., disk: null}\n";
    home.0.file("job.yml", text);
    let terminal = Terminal::run(&home, &["apply", "-f", "job.yml", "-y"]);
    let screen = terminal.wait_for_text("exit: 0");
    assert!(screen.contains("]0;owned") && screen.contains("green"), "shown, not obeyed:\n{screen}");
    assert!(!screen.contains("├─") && !screen.contains("└─"), "the tree is gone:\n{screen}");
    assert!(screen.contains("job: done"), "{screen}");
    let raw = Terminal::run(&home, &["logs", "--raw", "job"]);
    let screen = raw.wait_for_text("exit: 0");
    assert!(screen.contains("one green"), "{screen}");
}

#[test]
fn ps_watch_redraws_in_place() {
    let env = env_with_waiting_task();
    env.windlass(&["apply", "-f", "job.yml", "-y", "-d"]).ok();
    let terminal = Terminal::run(&env, &["ps", "-w"]);
    terminal.wait_for_text("job  ");
    env.windlass(&["apply", "-f", "job.yml", "-y", "-d", "-n", "other"]).ok();
    terminal.wait_for_text("other  ");
    assert_eq!(terminal.screen().matches("NAME").count(), 1, "{}", terminal.screen());
    env.windlass(&["stop", "-x", "-y", "--wait", "job", "other"]).ok();
    terminal.wait_for_text("No runs.");
    terminal.keys(&["C-c"]);
}
