//! `windlass-agent host`: what the shim would tell of this machine, without a shim.

use std::{
    io::Write as _,
    path::{Path, PathBuf},
    process::ExitCode,
};

use serde::Serialize;
use windlass_api::agent::shim::HostInfo;

use super::{
    gpu::{self, Inventory},
    health, info,
};

#[derive(Debug, clap::Args)]
pub struct Args {
    /// The directory whose disk tasks would use
    #[arg(long, value_name = "DIR", default_value = "/")]
    data: PathBuf,
}

/// What is printed, as JSON.
#[derive(Debug, Serialize)]
struct Host {
    host: HostInfo,
    #[serde(flatten)]
    gpus: Inventory,
    health: Vec<String>,
}

pub fn main(args: &Args) -> ExitCode {
    match run(&args.data) {
        Ok(text) if std::io::stdout().write_all(text.as_bytes()).is_ok() => ExitCode::SUCCESS,
        Ok(_) => ExitCode::FAILURE,
        Err(error) => {
            let _ = writeln!(std::io::stderr(), "windlass-agent host: read {}: {error}", args.data.display());
            ExitCode::FAILURE
        }
    }
}

fn run(data: &Path) -> std::io::Result<String> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let gpus = gpu::discover().await;
        let watched = health::Watched { home: data, data: None, engine: None, gpus: &[] };
        let health = health::problems(&watched).await;
        let host = info::gather(data, &gpus)?;
        Ok(serde_json::to_string_pretty(&Host { host, gpus, health })? + "\n")
    })
}
