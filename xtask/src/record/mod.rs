//! Records the first five minutes of a new user: real commands in a real terminal.
//!
//! tmux is the terminal. Its final screen becomes `docs/first-minutes.svg` (with colours) and `docs/first-minutes.txt`
//! (to copy from). Run it again when the output of the command line has changed.

mod svg;

use std::{
    path::PathBuf,
    process::{Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, bail};

use crate::{
    output,
    process::{self, ScratchDir},
    workspace::Workspace,
};

/// Commands in order; each starts when the prompt has returned.
const TYPED_COMMANDS: &[&str] = &[
    "cat hello.yml",
    "windlass apply -f hello.yml -y",
    "windlass ps -a",
    "windlass logs hello",
    "windlass apply -f train.yml -y",
    "windlass why train",
    "windlass check typo.yml",
    "windlass server stop",
];
const HELLO: &str = "\
type: task
name: hello
commands:
  - echo \"hello from $(uname -s)\"
resources:
  cpu: 1..
  memory: 0..
  disk: null
";
/// Needs more than this machine has, so that `why` has something to explain.
const TRAIN: &str = "type: task\nname: train\ncommands:\n  - python train.py\nresources:\n  gpu: H100:8\n";
const TYPO: &str = "type: task\ncommands:\n  - echo hello\nresources:\n  memroy: 8GB\n";
const COLUMNS: usize = 110;
/// Enough lines for everything: the screen is read once, at the end.
const LINES: &str = "160";
const PROMPT: &str = "$";
const PROMPT_TIMEOUT: Duration = Duration::from_secs(60);
const POLL_INTERVAL: Duration = Duration::from_millis(50);

pub(crate) fn run(workspace: &Workspace) -> Result<()> {
    // Built separately, as the tests do: one build for both would unify the features of their dependencies.
    for package in ["windlass-agent", "windlass-cli"] {
        process::run(workspace.cargo().args(["build", "-p", package]))?;
    }
    let windlass = workspace.built("debug", "windlass")?;
    let home = ScratchDir::new("record")?;
    for (name, text) in [("hello.yml", HELLO), ("train.yml", TRAIN), ("typo.yml", TYPO)] {
        std::fs::write(home.path().join(name), text)?;
    }
    let folder = windlass.parent().unwrap_or(&workspace.root);
    let path = format!("{}:{}", folder.display(), std::env::var("PATH").unwrap_or_default());
    let tape = TmuxSession { windlass: windlass.clone(), home };
    let columns = COLUMNS.to_string();
    let mut start = tape.tmux(&["-f", "/dev/null", "new-session", "-d", "-x", &columns, "-y", LINES]);
    start.arg("exec env PS1='$ ' bash --norc --noprofile").current_dir(tape.home.path()).env("PATH", path);
    start
        .env("PS1", "$ ")
        .env("HOME", tape.home.path())
        .env("WINDLASS_HOME", tape.home.path().join(".windlass"));
    // A job in a container would wait for an image from the network.
    start.env("WINDLASS_SERVER_LOCAL_RUNTIME", "process");
    for name in ["WINDLASS_URL", "WINDLASS_TOKEN", "WINDLASS_PROJECT", "WINDLASS_PROFILE", "NO_COLOR"] {
        start.env_remove(name);
    }
    process::run(&mut start)?;
    for step in TYPED_COMMANDS {
        tape.wait()?;
        process::run(&mut tape.tmux(&["send-keys", "-l", step]))?;
        process::run(&mut tape.tmux(&["send-keys", "Enter"]))?;
    }
    tape.wait()?;
    let place = tape.home.path().display().to_string();
    let tidied =
        |text: String| text.replace(&place, "/home/you").trim_end().trim_end_matches(PROMPT).to_owned();
    let plain = tidied(process::run_for_stdout(&mut tape.tmux(&["capture-pane", "-p"]))?);
    let coloured = tidied(process::run_for_stdout(&mut tape.tmux(&["capture-pane", "-p", "-e"]))?);
    let put = |path: &str, text: String| {
        std::fs::write(workspace.root.join(path), text).with_context(|| format!("failed to write `{path}`"))
    };
    let lines: Vec<&str> = plain.trim_end().lines().map(str::trim_end).collect();
    put("docs/first-minutes.txt", lines.join("\n") + "\n")?;
    put("docs/first-minutes.svg", svg::render_svg(coloured.trim_end(), COLUMNS))?;
    output::print_result("wrote docs/first-minutes.svg and docs/first-minutes.txt");
    Ok(())
}

struct TmuxSession {
    windlass: PathBuf,
    home: ScratchDir,
}

impl TmuxSession {
    fn tmux(&self, args: &[&str]) -> Command {
        let mut tmux = Command::new("tmux");
        tmux.arg("-S").arg(self.home.path().join("tmux")).args(args);
        tmux.env_remove("TMUX").env("TERM", "xterm-256color");
        tmux
    }

    /// Waits for the shell prompt.
    fn wait(&self) -> Result<()> {
        let until = Instant::now() + PROMPT_TIMEOUT;
        loop {
            let screen = process::run_for_stdout(&mut self.tmux(&["capture-pane", "-p"])).unwrap_or_default();
            if screen.trim_end().lines().last() == Some(PROMPT) {
                return Ok(());
            }
            if Instant::now() > until {
                bail!("the shell prompt did not appear in time:\n{}", screen.trim_end());
            }
            thread::sleep(POLL_INTERVAL);
        }
    }
}

/// Stops the terminal and the server, also on failure.
impl Drop for TmuxSession {
    fn drop(&mut self) {
        let mut stop = Command::new(&self.windlass);
        stop.args(["server", "stop"]).env("WINDLASS_HOME", self.home.path().join(".windlass"));
        let _ = stop.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).status();
        let _ = self.tmux(&["kill-server"]).stderr(Stdio::null()).status();
    }
}
