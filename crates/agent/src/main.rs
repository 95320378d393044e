//! `windlass-agent`: shim, runner and executor in one binary.

use std::process::ExitCode;

use clap::{Parser, Subcommand};
use windlass_agent::{exec, host, pod, relay, runner, shim};

#[derive(Debug, Parser)]
#[command(
    name = "windlass-agent",
    version,
    about = "The agent of windlass on instances: shim, runner and executor"
)]
struct Args {
    #[command(subcommand)]
    part: AgentCommand,
}

#[derive(Debug, Subcommand)]
enum AgentCommand {
    /// Manage the tasks of this host
    Shim(shim::cli::Args),
    /// Run the job of one task (started by the shim)
    Runner(runner::cli::Args),
    /// Run one attempt of a container of the queue (started by a dispatcher)
    Exec(exec::Args),
    /// Supervise the program of an attempt (started by the executor)
    #[command(hide = true)]
    ExecGuard(exec::GuardArgs),
    /// Connect a gateway to the shim (started by the host's SSH server)
    #[command(hide = true)]
    Relay(relay::Args),
    /// Be the first process of a pod: enrol it, run its shim, reap orphans (started by the pod)
    #[command(hide = true)]
    Pod(pod::Args),
    /// Copy this program into a directory (started by the init container of a pod)
    #[command(hide = true)]
    Install(pod::InstallArgs),
    /// Print the hardware and the health of this host as JSON
    Host(host::cli::Args),
    /// Run a helper process (started by the runner)
    #[command(hide = true)]
    Child(runner::helper_process::Args),
}

fn main() -> ExitCode {
    if let Some(program) = runner::repo::host_git::requested_program(std::env::args_os()) {
        return runner::repo::host_git::main(&program);
    }
    if shim::dstack_compat::is_requested(std::env::args_os()) {
        return shim::dstack_compat::main();
    }
    match Args::parse().part {
        AgentCommand::Shim(args) => shim::cli::main(&args),
        AgentCommand::Runner(args) => runner::cli::main(&args),
        AgentCommand::Exec(args) => exec::main(&args),
        AgentCommand::ExecGuard(args) => exec::guard(&args),
        AgentCommand::Relay(args) => relay::main(&args),
        AgentCommand::Pod(args) => pod::main(&args),
        AgentCommand::Install(args) => pod::install(&args),
        AgentCommand::Host(args) => host::cli::main(&args),
        AgentCommand::Child(args) => runner::helper_process::main(&args),
    }
}
