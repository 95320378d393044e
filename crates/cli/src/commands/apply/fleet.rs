//! Applies a fleet, and waits until its instances are ready.

use std::time::Duration;

use serde_json::json;
use windlass_api::{
    Document,
    fleets::{self, Fleet, FleetPlan},
    operations::{ApplyFleet, DeleteFleets, PlanFleet, ReadFleet},
    runs::ApplyAction,
};
use windlass_model::{config::fleet::Fleet as Config, plan::diff};

use super::{Args, config_source::ConfigSource, confirm_apply, keys, plan};
use crate::{
    commands::{instance_failure, instance_status, show_fleets},
    context::Context,
    error::CliError,
    exit::Exit,
    output,
};

const POLL_INTERVAL: Duration = Duration::from_millis(250);

pub(super) async fn apply(
    cx: &Context,
    args: &Args,
    source: &ConfigSource,
    config: &Config,
) -> Result<Exit, CliError> {
    let mut config = config.clone();
    keys::load_private_keys(&mut config, &source.dir)?;
    let spec = json!({
        "configuration": config,
        "configuration_path": source.file,
        "profile": source.profile,
    });
    let spec = Document::new(&spec)
        .map_err(|error| CliError::from_error("failed to encode the configuration", &error))?;
    let planned = cx.call::<PlanFleet>(&fleets::PlanRequest { spec: spec.clone() }).await?;
    print_plan(&planned, &config);
    let question = match (&planned.current_resource, planned.action) {
        (None, _) => "Create the fleet?".to_owned(),
        (Some(fleet), Some(ApplyAction::Update)) => {
            if !args.force && is_unchanged(fleet, &planned)? {
                output::print_message(&format!("Fleet `{}` already exists and is unchanged.", fleet.name));
                return finish(cx, args, fleet.clone()).await;
            }
            format!("Update fleet `{}`?", fleet.name)
        }
        (Some(fleet), Some(ApplyAction::Create) | None) if fleet.status == "terminating" => {
            format!("Fleet `{}` is being deleted. Create it again afterwards?", fleet.name)
        }
        (Some(fleet), Some(ApplyAction::Create) | None) => {
            print_forbidden_change(fleet, &planned);
            format!("Delete fleet `{}` and create it again?", fleet.name)
        }
    };
    if !confirm_apply(args, &question)? {
        return Ok(Exit::RunFailed);
    }
    let mut seen = planned.current_resource.clone();
    if let Some(fleet) = &planned.current_resource
        && planned.action != Some(ApplyAction::Update)
    {
        delete(cx, fleet).await?;
        seen = None;
    }
    let seen = seen.map(|fleet| fleets::ExpectedFleet { id: fleet.id, spec: fleet.spec });
    let request =
        fleets::ApplyRequest { plan: fleets::ApplyInput { spec, current_resource: seen }, force: args.force };
    let fleet = cx.call::<ApplyFleet>(&request).await?;
    finish(cx, args, fleet).await
}

fn print_plan(planned: &FleetPlan, config: &Config) {
    let name = config.name.as_ref().map_or("(generated name)", |name| name.as_str());
    let kind = match &config.ssh_config {
        Some(ssh) => crate::output::format::count(ssh.hosts.len(), "SSH host"),
        None => "backends".to_owned(),
    };
    output::print_message(&format!("Project  {}\nUser     {}", planned.project_name, planned.user));
    output::print_message(&output::printable(&format!("Fleet    {name} ({kind})\n")));
    plan::print_offers(&planned.offers, planned.total_offers);
}

fn changes(
    fleet: &Fleet,
    planned: &FleetPlan,
) -> Result<Result<Vec<diff::FieldChange>, diff::ForbiddenChange>, CliError> {
    let read = |document: &Document| {
        document.value().map_err(|error| CliError::from_error("failed to read the plan", &error))
    };
    let stored = read(&fleet.spec)?;
    let wanted = read(planned.effective_spec.as_ref().unwrap_or(&planned.spec))?;
    Ok(diff::diff_fleet(&stored["configuration"], &wanted["configuration"]))
}

fn is_unchanged(fleet: &Fleet, planned: &FleetPlan) -> Result<bool, CliError> {
    Ok(changes(fleet, planned)?.is_ok_and(|changes| changes.is_empty()))
}

fn print_forbidden_change(fleet: &Fleet, planned: &FleetPlan) {
    if let Ok(Err(forbidden)) = changes(fleet, planned) {
        output::print_message(&format!(
            "Fleet `{}` exists, and its `{}` cannot be changed in place.",
            fleet.name, forbidden.path
        ));
    }
}

async fn delete(cx: &Context, fleet: &Fleet) -> Result<(), CliError> {
    output::print_message(&format!("Deleting fleet `{}`…", fleet.name));
    cx.call::<DeleteFleets>(&fleets::DeleteRequest { names: vec![fleet.name.clone()], force: false }).await?;
    loop {
        let request = fleets::ReadRequest { name: Some(fleet.name.clone()), id: None };
        match cx.try_call::<ReadFleet>(&request).await {
            Ok(_) => tokio::time::sleep(POLL_INTERVAL).await,
            Err(error) if error.is_not_found() => return Ok(()),
            Err(error) => return Err(cx.explain(&error).await),
        }
    }
}

async fn finish(cx: &Context, args: &Args, fleet: Fleet) -> Result<Exit, CliError> {
    let fleet = if args.detach { fleet } else { wait_until_ready(cx, fleet).await? };
    output::print_one(args.output.format, &fleet, &fleet.name, |_| {
        show_fleets(std::slice::from_ref(&fleet), args.output.format);
    })?;
    let ended = fleet.instances.iter().any(|instance| instance.status == "terminated");
    Ok(if fleet.status == "failed" || (ended && !args.detach) { Exit::RunFailed } else { Exit::Done })
}

/// Waits until no instance is being created. Prints each change once.
async fn wait_until_ready(cx: &Context, mut fleet: Fleet) -> Result<Fleet, CliError> {
    let mut reported = std::collections::BTreeMap::new();
    loop {
        for instance in &fleet.instances {
            let mut status = instance_status(instance);
            let why = instance_failure(instance);
            if !why.is_empty() {
                status = format!("{status}: {why}");
            }
            if reported.insert(instance.id, status.clone()).as_ref() != Some(&status) {
                let host = instance.hostname.as_deref().map(|host| format!(" ({host})")).unwrap_or_default();
                output::print_message(&output::printable(&format!("{}{host}: {status}", instance.name)));
            }
        }
        let is_arriving = |status: &str| matches!(status, "pending" | "provisioning" | "terminating");
        if fleet.status != "submitted"
            && !fleet.instances.iter().any(|instance| is_arriving(&instance.status))
        {
            return Ok(fleet);
        }
        tokio::time::sleep(POLL_INTERVAL).await;
        fleet = cx.call::<ReadFleet>(&fleets::ReadRequest { name: None, id: Some(fleet.id) }).await?;
    }
}
