//! Slurm's commands, each with a time limit.

use std::{path::PathBuf, process::Stdio, time::Duration};

use tokio::{io::AsyncWriteExt as _, process::Command, time::timeout};

use crate::scheduler::SchedulerError;

/// Variables of the dispatcher's environment that are passed on: the user, and the search path.
const USER_VARIABLES: [&str; 4] = ["PATH", "HOME", "USER", "LOGNAME"];
/// Maximum length of a command's error output that is kept.
const ERROR_TEXT_MAX: usize = 500;

pub(super) struct SlurmCommands {
    config: Option<PathBuf>,
    within: Duration,
}

impl SlurmCommands {
    pub(super) fn new(config: Option<PathBuf>, within: Duration) -> Self {
        Self { config, within }
    }

    /// Runs a command and returns its output if it succeeds.
    pub(super) async fn read(&self, program: &'static str, args: &[&str]) -> Result<String, SchedulerError> {
        let mut command = self.command(program);
        command.args(args);
        self.run(program, command, "").await
    }

    /// Runs `sbatch` with only those variables that the job may have: it would pass on the rest.
    pub(super) async fn submit(
        &self,
        args: &[String],
        environment: &[(String, String)],
        script: &str,
    ) -> Result<String, SchedulerError> {
        let mut command = self.command("sbatch");
        command.env_clear().envs(self.config.iter().map(|config| ("SLURM_CONF", config)));
        // Jobs run as the same user, and engines need the home directory.
        command.envs(USER_VARIABLES.iter().filter_map(|name| Some((name, std::env::var_os(name)?))));
        command.envs(environment.iter().map(|(name, value)| (name, value))).args(args);
        self.run("sbatch", command, script).await
    }

    fn command(&self, program: &'static str) -> Command {
        let mut command = Command::new(program);
        command.envs(self.config.iter().map(|config| ("SLURM_CONF", config)));
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).kill_on_drop(true);
        command
    }

    async fn run(
        &self,
        program: &'static str,
        mut command: Command,
        input: &str,
    ) -> Result<String, SchedulerError> {
        let start = |source| SchedulerError::Start { program, source };
        let ran = async {
            let mut child = command.spawn().map_err(start)?;
            if let Some(mut stdin) = child.stdin.take() {
                // A command that does not read its input reports the reason itself.
                let _ = stdin.write_all(input.as_bytes()).await;
            }
            child.wait_with_output().await.map_err(start)
        };
        let late = || SchedulerError::Late { program, within: self.within };
        let output = timeout(self.within, ran).await.map_err(|_| late())??;
        if output.status.success() {
            return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
        }
        let message = String::from_utf8_lossy(&output.stderr);
        let message: String = message.trim().chars().take(ERROR_TEXT_MAX).collect();
        let message = if message.is_empty() { output.status.to_string() } else { message };
        Err(SchedulerError::Failed { program, message, code: output.status.code() })
    }
}
