//! `windlass-agent host`: prints what the shim would report about this host, without a shim.

use std::{
    io::Write as _,
    path::{Path, PathBuf},
    process::ExitCode,
};

use serde::Serialize;
use windlass_api::agent::shim::{HostInfo, ProcessMode};
use windlass_model::error_chain::format_chain;

use super::{
    gpu::{self, Inventory},
    health, info,
};
use crate::{
    isolation::probe,
    shim::{
        cli::ProcessModeName,
        oci,
        policy::{self, Policy},
    },
};

#[derive(Debug, clap::Args)]
pub struct Args {
    /// Directory whose disk tasks would use
    #[arg(long, value_name = "DIR", default_value = "/")]
    data: PathBuf,
    /// Mode of tasks without an image; the policy's setting takes precedence
    #[arg(long, value_name = "MODE", env = "WINDLASS_AGENT_PROCESSES", default_value = "confined")]
    processes: ProcessModeName,
    /// Policy file of this host
    #[arg(long, value_name = "PATH", env = "WINDLASS_AGENT_POLICY", default_value = policy::DEFAULT_FILE)]
    policy: PathBuf,
}

/// Output of the command, as JSON.
#[derive(Debug, Serialize)]
struct HostReport {
    host: HostInfo,
    #[serde(flatten)]
    gpus: Inventory,
    health: Vec<String>,
    oci: OciSupport,
}

/// Support for containers without an engine, as an agent that is started without `--runtime` would use it.
#[derive(Debug, Serialize)]
struct OciSupport {
    available: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    problem: Option<String>,
}

pub fn main(args: &Args) -> ExitCode {
    let policy = match Policy::load(&args.policy) {
        Ok(policy) => policy,
        Err(error) => {
            let _ = writeln!(std::io::stderr(), "windlass-agent host: {}", format_chain(&error));
            return ExitCode::FAILURE;
        }
    };
    let mode = policy.processes(args.processes.into(), Vec::new()).mode;
    match run(&args.data, mode) {
        Ok(text) if std::io::stdout().write_all(text.as_bytes()).is_ok() => ExitCode::SUCCESS,
        Ok(_) => ExitCode::FAILURE,
        Err(error) => {
            let _ = writeln!(
                std::io::stderr(),
                "windlass-agent host: failed to read {}: {error}",
                args.data.display()
            );
            ExitCode::FAILURE
        }
    }
}

fn run(data: &Path, mode: ProcessMode) -> std::io::Result<String> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let gpus = gpu::discover().await;
        let watched = health::HealthInputs { home: data, data: None, engine: None, gpus: &[] };
        let health = health::find_problems(&watched).await;
        let problem = oci::check_host(data, None).err();
        let oci = OciSupport { available: problem.is_none(), problem };
        let host = info::gather(data, &gpus, probe::probe(Path::new("/proc/self/exe"), mode))?;
        Ok(serde_json::to_string_pretty(&HostReport { host, gpus, health, oci })? + "\n")
    })
}
