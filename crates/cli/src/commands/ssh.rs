//! `windlass ssh RUN [CMD…]` and `windlass exec RUN -- CMD…`: a shell or a program inside a running job.
//!
//! Both replace the process with OpenSSH, using the host entry that `attach` writes: the exit code is that of the
//! program.

use std::{io::IsTerminal as _, os::unix::process::CommandExt as _, path::PathBuf, process::Command};

use windlass_api::runs::Run;
use windlass_model::config::shell;

use super::attach;
use crate::{
    cli::ServerArgs,
    context::{self, Context},
    error::CliError,
    exit::Exit,
    follow::{
        job_progress,
        ssh::{self, LoginTarget, parse_job_name},
    },
    home::Home,
};

const EXAMPLES: &str = "\
Examples:
  windlass ssh train                     open a shell in the first job
  windlass ssh train nvidia-smi          run one command
  windlass ssh train-1-0                 the second node: RUN-RANK-REPLICA
  windlass ssh --replica 2 web           a replica of a service

The exit code is that of the shell or the command; 255 is OpenSSH's own. This machine needs the OpenSSH client; the
image needs nothing.";

const EXEC_EXAMPLES: &str = "\
Examples:
  windlass exec train -- ls -l /tmp
  windlass exec train -- python -c 'print(1)'    each argument is passed unchanged
  windlass exec -t train -- top                  with a terminal
  tar c data | windlass exec train -- tar x -C /tmp

The exit code is that of the program; 255 is OpenSSH's own.";

/// Flags that select a job of a run.
#[derive(Debug, clap::Args)]
pub(crate) struct JobArgs {
    /// Run, or one of its jobs: RUN-RANK-REPLICA
    #[arg(value_name = "RUN")]
    pub(crate) name: String,
    /// Replica of a service; defaults to any running replica
    #[arg(long, value_name = "N")]
    pub(crate) replica: Option<i64>,
    /// Job of the replica: the rank of the node
    #[arg(long, value_name = "N")]
    pub(crate) job: Option<i64>,
    /// Private key, instead of the one that the server stores for you
    #[arg(long, value_name = "FILE")]
    pub(crate) ssh_identity: Option<PathBuf>,
}

#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    #[command(flatten)]
    pub(crate) which: JobArgs,
    /// Command for the remote shell, instead of an interactive session
    #[arg(value_name = "CMD", trailing_var_arg = true, allow_hyphen_values = true)]
    pub(crate) command: Vec<String>,
    #[command(flatten)]
    pub(crate) at: ServerArgs,
}

#[derive(Debug, clap::Args)]
#[command(after_help = EXEC_EXAMPLES)]
pub(crate) struct ExecArgs {
    #[command(flatten)]
    pub(crate) which: JobArgs,
    /// Allocate a terminal
    #[arg(short, long)]
    pub(crate) tty: bool,
    /// Program and its arguments
    #[arg(last = true, required = true, value_name = "CMD")]
    pub(crate) command: Vec<String>,
    #[command(flatten)]
    pub(crate) at: ServerArgs,
}

/// Joins the arguments into one line for the remote shell, as `ssh` does.
pub(crate) fn run(args: &Args) -> Result<Exit, CliError> {
    // A shell needs a terminal; a command gets one if there is one.
    let tty = args.command.is_empty() || (std::io::stdin().is_terminal() && std::io::stdout().is_terminal());
    let line = (!args.command.is_empty()).then(|| args.command.join(" "));
    exec_ssh(&args.which, &args.at, tty && std::io::stdin().is_terminal(), line)
}

pub(crate) fn exec(args: &ExecArgs) -> Result<Exit, CliError> {
    let line = args.command.iter().map(|word| shell::quote(word)).collect::<Vec<_>>().join(" ");
    exec_ssh(&args.which, &args.at, args.tty, Some(line))
}

/// Replaces this process with OpenSSH.
fn exec_ssh(which: &JobArgs, at: &ServerArgs, tty: bool, line: Option<String>) -> Result<Exit, CliError> {
    let host = context::with_context(at, async |cx| write_ssh_entry(cx, at, which).await)?;
    let config = Home::find()?.ssh_dir().join("config");
    let mut command = Command::new("ssh");
    command.arg("-F").arg(config).arg(if tty { "-t" } else { "-T" });
    command.arg("--").arg(host).args(line);
    let error = command.exec();
    let problem = CliError::from_error("failed to start `ssh`", &error);
    Err(if error.kind() == std::io::ErrorKind::NotFound {
        problem.hint("install the OpenSSH client")
    } else {
        problem
    })
}

/// Returns the host name of the job in the OpenSSH configuration.
async fn write_ssh_entry(cx: &Context, at: &ServerArgs, which: &JobArgs) -> Result<String, CliError> {
    let (run, name, place) = find_job(cx, which).await?;
    if !job_progress(&run).iter().any(|job| place.matches(job) && job.status == "running") {
        return Err(CliError::new(format!("cannot log in to `{}`", which.name))
            .why(format!(
                "job {} of replica {} is not running: the run is {}",
                place.job, place.replica, run.status
            ))
            .hint(format!("run `windlass why {name}` for details")));
    }
    ssh::write_entry(cx, at, &run, &name, place, &which.ssh_identity).await
}

/// Finds a run by its name, or a job by its job name.
async fn find_job(cx: &Context, which: &JobArgs) -> Result<(Run, String, LoginTarget), CliError> {
    let unknown = match cx.run(&which.name).await {
        Ok(run) => {
            let place = attach::select_job(&run, which.replica, which.job.unwrap_or(0));
            return Ok((run, which.name.clone(), place));
        }
        Err(problem) => problem,
    };
    let Some((name, place)) = parse_job_name(&which.name) else { return Err(unknown) };
    let Ok(run) = cx.run(name).await else { return Err(unknown) };
    let place =
        LoginTarget { replica: which.replica.unwrap_or(place.replica), job: which.job.unwrap_or(place.job) };
    Ok((run, name.to_owned(), place))
}
