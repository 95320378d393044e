//! `windlass delete RUN…` and `windlass delete -f FILE`: deletes finished runs, or the resource that a file describes.
//!
//! A deleted run is no longer listed and its name is free. Its events remain; its output is retained as long as the
//! server is configured to retain the output of deleted runs.

use std::{
    path::{Path, PathBuf},
    time::Duration,
};

use windlass_api::{
    Operation, gateways,
    operations::{DeleteGateways, DeleteRuns, DeleteVolumes, ReadGateway, ReadVolume, StopRuns},
    runs, volumes,
};
use windlass_model::config::Configuration;

use super::{apply::parse_file, fleet, gateway, is_finished, volume, wait_for_end};
use crate::{
    cli::ServerArgs,
    context::{self, Context},
    error::{CliError, ErrorCode},
    exit::Exit,
    output,
};

const EXAMPLES: &str = "\
Examples:
  windlass delete train eval               delete finished runs
  windlass delete -y -f train.yml          stop and delete the run that the file describes
  windlass delete -y --wait -f fleet.yml   delete a fleet, volume or gateway and wait until it is gone

A deleted run is no longer listed, and its name is free. Its events remain; its output is removed within about an hour.";

const POLL_INTERVAL: Duration = Duration::from_millis(200);

#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// Runs to delete; they must be finished
    #[arg(value_name = "RUN", required_unless_present = "file", conflicts_with = "file")]
    pub(crate) names: Vec<String>,
    /// Configuration file that describes the resource to delete; `-` is standard input
    #[arg(short, long, value_name = "FILE")]
    pub(crate) file: Option<PathBuf>,
    /// Skip the confirmation prompt
    #[arg(short, long)]
    pub(crate) yes: bool,
    /// Wait until the deletion is complete
    #[arg(short, long)]
    pub(crate) wait: bool,
    #[command(flatten)]
    pub(crate) at: ServerArgs,
}

pub(crate) fn run(args: &Args) -> Result<Exit, CliError> {
    match &args.file {
        Some(file) => delete_from_file(args, file),
        None => context::with_context(&args.at, async |cx| delete_finished(cx, &args.names, args.yes).await),
    }
}

/// Deletes finished runs. Deletes nothing if one of them is missing or active.
async fn delete_finished(cx: &Context, names: &[String], yes: bool) -> Result<Exit, CliError> {
    let mut active = Vec::new();
    for name in names {
        let run = cx.run(name).await?;
        if !is_finished(&run.status) {
            active.push((name.as_str(), run.status));
        }
    }
    if let Some((first, _)) = active.first() {
        let listed: Vec<String> =
            active.iter().map(|(name, status)| format!("`{name}` is {status}")).collect();
        return Err(CliError::new(format!(
            "cannot delete runs that are not finished: {}",
            listed.join(", ")
        ))
        .code(ErrorCode::Refused)
        .hint(format!("run `windlass stop --wait {first}` first")));
    }
    if !output::confirm_delete(yes, &names.join(", "))? {
        return Ok(Exit::Failed);
    }
    call_delete(cx, names).await?;
    Ok(Exit::Done)
}

async fn call_delete(cx: &Context, names: &[String]) -> Result<(), CliError> {
    cx.call::<DeleteRuns>(&runs::DeleteRequest { runs_names: names.to_vec() }).await?;
    output::print_message(&format!("Deleted {}.", names.join(", ")));
    Ok(())
}

fn delete_from_file(args: &Args, file: &Path) -> Result<Exit, CliError> {
    if file.as_os_str() == "-" && !args.yes {
        return Err(CliError::usage(
            "cannot ask for confirmation: standard input contains the configuration",
        )
        .hint("pass `-y`"));
    }
    let configuration = parse_file(file)?;
    let Some(name) = configuration.name().map(str::to_owned) else {
        return Err(CliError::usage(format!(
            "`{}` describes a {} without a name",
            file.display(),
            configuration.kind()
        ))
        .hint("find its generated name with `windlass ps`, `windlass fleet`, `windlass volume` or `windlass gateway`"));
    };
    context::with_context(&args.at, async |cx| match &configuration {
        Configuration::Task(_) | Configuration::Service(_) | Configuration::DevEnvironment(_) => {
            stop_and_delete(cx, args, &name).await
        }
        Configuration::Fleet(_) => {
            fleet::delete_and_wait(
                cx,
                std::slice::from_ref(&name),
                &[],
                fleet::DeleteOptions { yes: args.yes, force: false },
                args.wait,
            )
            .await
        }
        Configuration::Volume(_) => delete_volume(cx, args, &name).await,
        Configuration::Gateway(_) => delete_gateway(cx, args, &name).await,
    })
}

/// Deletes the run of a file. Stops it first if it is active.
async fn stop_and_delete(cx: &Context, args: &Args, name: &str) -> Result<Exit, CliError> {
    let run = cx.run(name).await?;
    let is_over = is_finished(&run.status);
    let question = if is_over {
        format!("Delete {name}?")
    } else {
        format!("Stop and delete {name}? It is {}.", run.status)
    };
    if !output::confirm(args.yes, &question)? {
        output::print_message("Nothing was deleted.");
        return Ok(Exit::Failed);
    }
    if !is_over {
        output::print_message(&format!("Stopping `{name}`…"));
        cx.call::<StopRuns>(&runs::StopRequest { runs_names: vec![name.to_owned()], abort: false }).await?;
        wait_for_end(cx, run.id).await?;
    }
    call_delete(cx, &[name.to_owned()]).await?;
    Ok(Exit::Done)
}

async fn delete_volume(cx: &Context, args: &Args, name: &str) -> Result<Exit, CliError> {
    let names = [name.to_owned()];
    let request = volumes::DeleteRequest { names: names.to_vec() };
    let call = async || cx.call::<DeleteVolumes>(&request).await.map(drop);
    let exit =
        output::delete(&names, args.yes, "Deleting", async |name| volume::find(cx, name).await, call).await?;
    if args.wait && exit == Exit::Done {
        wait_until_deleted::<ReadVolume>(cx, &volumes::NameRequest { name: name.to_owned() }).await?;
    }
    Ok(exit)
}

async fn delete_gateway(cx: &Context, args: &Args, name: &str) -> Result<Exit, CliError> {
    let names = [name.to_owned()];
    let request = gateways::DeleteRequest { names: names.to_vec() };
    let call = async || cx.call::<DeleteGateways>(&request).await.map(drop);
    let exit = output::delete(&names, args.yes, "Deleting", async |name| gateway::find(cx, name).await, call)
        .await?;
    if args.wait && exit == Exit::Done {
        wait_until_deleted::<ReadGateway>(cx, &gateways::NameRequest { name: name.to_owned() }).await?;
    }
    Ok(exit)
}

/// Waits until the server no longer has the resource.
async fn wait_until_deleted<O: Operation>(cx: &Context, request: &O::Request) -> Result<(), CliError> {
    loop {
        match cx.try_call::<O>(request).await {
            Ok(_) => tokio::time::sleep(POLL_INTERVAL).await,
            Err(error) if error.is_not_found() => return Ok(()),
            Err(error) => return Err(cx.explain(&error).await),
        }
    }
}
