//! Candidates for shell completion.

use std::process::Command;

use crate::{CommandOutput, TestHome, cli_env::CliEnv, run_command, snapshot::CliSnapshot};

const SHELLS: [&str; 5] = ["bash", "zsh", "fish", "elvish", "powershell"];
const WAITING: &str = "type: task\nname: NAME\ncommands: [echo hi]\nschedule:\n  cron: \"0 0 1 1 *\"\n";

/// Requests completions as the script of that shell does.
fn complete(mut command: Command, shell: &str, words: &[&str]) -> Vec<String> {
    command.env("WINDLASS_COMPLETE", shell).env("_CLAP_COMPLETE_INDEX", (words.len() - 1).to_string());
    let CommandOutput { code, stdout, stderr } =
        run_command(command.env("_CLAP_IFS", "\n").args(["--"]).args(words));
    assert_eq!((code, stderr.as_str()), (Some(0), ""), "{shell}");
    // Some shells also receive descriptions.
    stdout.lines().map(|line| line.split(['\t', ':']).next().unwrap().to_owned()).collect()
}

#[test]
fn names_are_completed_in_five_shells() {
    let env = CliEnv::new();
    for name in ["train-a", "train-b"] {
        env.file("run.yml", &WAITING.replace("NAME", name));
        env.windlass(&["apply", "-f", "run.yml", "-y", "-d"]).ok();
    }
    for shell in SHELLS {
        let mut found = complete(env.command(&[]), shell, &["windlass", "logs", "train-"]);
        found.sort();
        assert_eq!(found, ["train-a", "train-b"], "{shell}");
        assert_eq!(
            complete(env.command(&[]), shell, &["windlass", "why", "train-b"]),
            ["train-b"],
            "{shell}"
        );
        assert_eq!(
            complete(env.command(&[]), shell, &["windlass", "ps", "--project", "m"]),
            ["main"],
            "{shell}"
        );
        assert_eq!(complete(env.command(&[]), shell, &["windlass", "expl"]), ["explain"], "{shell}");
        let elsewhere = ["windlass", "logs", "--project", "other", "train-"];
        assert_eq!(complete(env.command(&[]), shell, &elsewhere), [""; 0], "{shell}");
    }
}

#[test]
fn completion_without_a_server_returns_no_names_and_starts_no_server() {
    let home = TestHome::new();
    for shell in SHELLS {
        assert_eq!(complete(home.command(&[]), shell, &["windlass", "logs", "train-"]), [""; 0], "{shell}");
        assert!(
            complete(home.command(&[]), shell, &["windlass", "log"]).contains(&"logs".to_owned()),
            "{shell}"
        );
        assert_eq!(complete(home.command(&[]), shell, &["windlass", "explain", "W03"]).len(), 5, "{shell}");
        assert_eq!(
            complete(home.command(&[]), shell, &["windlass", "help", "exit"]),
            ["exit-codes"],
            "{shell}"
        );
        let mut away = home.command(&[]);
        away.env("WINDLASS_URL", "http://127.0.0.1:9").env("WINDLASS_TOKEN", "x");
        assert_eq!(complete(away, shell, &["windlass", "logs", "train-"]), [""; 0], "{shell}");
    }
    assert!(!home.path().join("home/server").exists());
}

#[test]
fn generated_script_completes_in_real_bash() {
    let env = CliEnv::new();
    env.file("run.yml", &WAITING.replace("NAME", "train-a"));
    env.windlass(&["apply", "-f", "run.yml", "-y", "-d"]).ok();
    let script = "source <(windlass completion bash) && COMP_WORDS=(windlass stop tr) COMP_CWORD=2 && \
                  _clap_complete_windlass windlass tr stop && echo \"${COMPREPLY[*]}\"";
    let folder = std::path::Path::new(env!("CARGO_BIN_EXE_windlass")).parent().unwrap();
    let path = format!("{}:{}", folder.display(), std::env::var("PATH").unwrap());
    let like = env.command(&[]);
    let mut bash = Command::new("bash");
    bash.args(["--norc", "-c", script]).env("PATH", path);
    for (name, value) in like.get_envs() {
        match value {
            Some(value) => bash.env(name, value),
            None => bash.env_remove(name),
        };
    }
    assert_eq!(run_command(&mut bash).ok().stdout, "train-a\n");
}

#[test]
fn completion_prints_a_script_for_every_shell() {
    let home = TestHome::new();
    for shell in SHELLS {
        let script = home.windlass(&["completion", shell]).ok().stdout;
        assert!(script.contains("WINDLASS_COMPLETE") && script.contains(shell), "{script}");
    }
    let mut transcript = CliSnapshot::new("completion", &home);
    transcript.run(&["completion", "csh"]);
    transcript.run(&["completion", "--help"]);
    transcript.end();
}
