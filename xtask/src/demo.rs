//! `cargo xtask demo`: builds both binaries and runs one task on a local server with SQLite.
//!
//! It runs the commands of a new user. All files are in a separate directory, which is deleted at the end, after the
//! server has stopped; the binaries stay.

use std::{
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::Instant,
};

use anyhow::{Context as _, Result, ensure};

use crate::{
    output,
    process::{self, ScratchDir},
    workspace::Workspace,
};

const EXAMPLE: &str = "examples/hello.yml";

pub(crate) fn run(workspace: &Workspace) -> Result<()> {
    output::print_heading("build `windlass` and `windlass-agent` (minutes the first time, seconds later)");
    process::run(workspace.cargo().args(["build", "-p", "windlass-cli", "-p", "windlass-agent"]))?;
    let windlass = workspace.built("debug", "windlass")?;
    let demo =
        Demo { windlass: windlass.clone(), root: workspace.root.clone(), home: ScratchDir::new("demo")? };

    output::print_heading(&format!("windlass check {EXAMPLE}"));
    demo.windlass(&["check", EXAMPLE])?;
    output::print_heading(&format!("windlass apply -f {EXAMPLE} -y"));
    let began = Instant::now();
    demo.windlass(&["apply", "-f", EXAMPLE, "-y"]).context("failed to run the example on this machine")?;
    output::print_message(&format!(
        "server start, plan, run and log took {} ms",
        began.elapsed().as_millis()
    ));
    output::print_heading("windlass logs hello");
    let log = process::run_for_stdout(&mut demo.command(&["logs", "hello"]))?;
    ensure!(!log.trim().is_empty(), "the log of the example is empty");
    output::print_result(log.trim_end());
    output::print_heading("windlass ps -a");
    demo.windlass(&["ps", "-a"])?;
    drop(demo);

    output::print_heading("next steps");
    output::print_result(&next_steps(&windlass));
    Ok(())
}

/// Commands that work when pasted.
fn next_steps(windlass: &Path) -> String {
    let windlass = windlass.display();
    format!(
        "The demo's server and its data have been deleted. Run these commands to try your own server. The first `apply`\n\
         starts it in the background, with its data in ~/.windlass:\n\
         \n\
         alias windlass={windlass}\n\
         windlass apply -f examples/hello.yml              show the plan, then run it\n\
         windlass apply -f examples/count.yml -y -d        run it in the background\n\
         windlass logs -f count                            follow its log\n\
         windlass stop -y count                            stop it\n\
         windlass ps -a                                    list all runs\n\
         windlass fleet                                    list the fleets\n\
         windlass server stop                              stop the server\n\
         \n\
         See README.md for more, and docs/cli.md for every command."
    )
}

struct Demo {
    windlass: PathBuf,
    root: PathBuf,
    home: ScratchDir,
}

impl Demo {
    fn command(&self, args: &[&str]) -> Command {
        let mut command = Command::new(&self.windlass);
        command
            .args(args)
            .current_dir(&self.root)
            .env("WINDLASS_HOME", self.home.path())
            .stdin(Stdio::null());
        // The demo ignores the user's login.
        for name in ["WINDLASS_URL", "WINDLASS_TOKEN", "WINDLASS_PROJECT", "WINDLASS_PROFILE"] {
            command.env_remove(name);
        }
        command
    }

    fn windlass(&self, args: &[&str]) -> Result<()> {
        process::run(&mut self.command(args))
    }
}

/// Stops everything that the demo started, also on failure.
impl Drop for Demo {
    fn drop(&mut self) {
        let quiet = |args: &[&str]| {
            let mut command = self.command(args);
            let _ = command.stdout(Stdio::null()).stderr(Stdio::null()).status();
        };
        // A server that stops also ends an idle agent.
        if self.home.path().join("server/running.json").exists() {
            quiet(&["stop", "-x", "-y", "--wait", "hello"]);
            quiet(&["server", "stop"]);
        }
    }
}
