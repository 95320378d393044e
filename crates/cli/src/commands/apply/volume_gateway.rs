//! Applies volumes and gateways.

use std::time::Duration;

use windlass_api::{
    Document, gateways,
    operations::{ApplyGateway, CreateVolume, PlanGateway, ReadGateway, ReadVolume},
    runs::ApplyAction,
    volumes,
};

use super::{Args, config_source::ConfigSource, confirm_apply};
use crate::{
    context::Context,
    error::{CliError, ErrorCode},
    exit::Exit,
    output,
};

const POLL_INTERVAL: Duration = Duration::from_millis(250);

fn to_document(source: &ConfigSource) -> Result<Document, CliError> {
    Document::new(&source.configuration)
        .map_err(|error| CliError::from_error("failed to encode the configuration", &error))
}

pub(super) async fn apply_volume(cx: &Context, args: &Args, source: &ConfigSource) -> Result<Exit, CliError> {
    if let Some(name) = source.configuration.name() {
        match cx.try_call::<ReadVolume>(&volumes::NameRequest { name: name.to_owned() }).await {
            Ok(volume) => return check_existing_volume(args, source, &volume),
            Err(error) if error.is_not_found() => {}
            Err(error) => return Err(cx.explain(&error).await),
        }
    }
    let name = source.configuration.name().unwrap_or("(generated name)");
    if !confirm_apply(args, &format!("Create volume `{name}` in project `{}`?", cx.project))? {
        return Ok(Exit::RunFailed);
    }
    let mut volume =
        cx.call::<CreateVolume>(&volumes::CreateRequest { configuration: to_document(source)? }).await?;
    let request = volumes::NameRequest { name: volume.name.clone() };
    let mut message = String::new();
    while !args.detach && !matches!(volume.status.as_str(), "active" | "failed") {
        print_status_change(&mut message, &volume.name, &volume.status, volume.status_message.as_deref());
        tokio::time::sleep(POLL_INTERVAL).await;
        volume = cx.call::<ReadVolume>(&request).await?;
    }
    print_status_change(&mut message, &volume.name, &volume.status, volume.status_message.as_deref());
    print_result(args, &volume, &volume.name, volume.status == "failed")
}

/// Refuses to change an existing volume, because it holds data.
fn check_existing_volume(
    args: &Args,
    source: &ConfigSource,
    volume: &volumes::Volume,
) -> Result<Exit, CliError> {
    let read = |error: serde_json::Error| {
        CliError::from_error("failed to compare the volume with the configuration", &error)
    };
    let (before, wanted) =
        (volume.configuration.value().map_err(read)?, to_document(source)?.value().map_err(read)?);
    let changed: Vec<String> = wanted
        .as_object()
        .into_iter()
        .flatten()
        .filter(|(key, value)| before.get(key.as_str()).unwrap_or(&serde_json::Value::Null) != *value)
        .map(|(key, _)| format!("`{key}`"))
        .collect();
    if changed.is_empty() {
        output::print_message(&format!("Volume `{}` already exists and is unchanged.", volume.name));
        return print_result(args, volume, &volume.name, volume.status == "failed");
    }
    Err(CliError::new(format!("cannot change volume `{}`", volume.name))
        .code(ErrorCode::ImmutableField)
        .why(format!("{} cannot be changed because the volume may hold data", changed.join(", ")))
        .hint(format!(
            "choose another name, or delete the volume and its data with `windlass volume delete {}`",
            volume.name
        )))
}

pub(super) async fn apply_gateway(
    cx: &Context,
    args: &Args,
    source: &ConfigSource,
) -> Result<Exit, CliError> {
    let spec = gateways::GatewaySpec {
        configuration: to_document(source)?,
        configuration_path: Some(source.file.clone()),
    };
    let plan = cx.call::<PlanGateway>(&gateways::PlanRequest { spec: spec.clone() }).await?;
    let name = source.configuration.name().unwrap_or("(generated name)").to_owned();
    let verb = match (&plan.current_resource, plan.action) {
        (None, _) => "Create",
        (Some(_), ApplyAction::Update) => "Update",
        (Some(gateway), ApplyAction::Create) => {
            return Err(CliError::new(format!("cannot change gateway `{}`", gateway.name))
                .code(ErrorCode::ImmutableField)
                .why("the changed fields cannot be updated in place")
                .hint(format!("run `windlass gateway delete {}` first", gateway.name)));
        }
    };
    if !confirm_apply(args, &format!("{verb} gateway `{name}` in project `{}`?", cx.project))? {
        return Ok(Exit::RunFailed);
    }
    let seen = plan
        .current_resource
        .map(|gateway| gateways::ExpectedGateway { id: gateway.id, configuration: gateway.configuration });
    let request = gateways::ApplyRequest {
        plan: gateways::ApplyInput { spec, current_resource: seen },
        force: args.force,
    };
    let mut gateway = cx.call::<ApplyGateway>(&request).await?;
    let request = gateways::NameRequest { name: gateway.name.clone() };
    let mut message = String::new();
    while !args.detach && !matches!(gateway.status.as_str(), "running" | "failed") {
        print_status_change(&mut message, &gateway.name, &gateway.status, gateway.status_message.as_deref());
        tokio::time::sleep(POLL_INTERVAL).await;
        gateway = cx.call::<ReadGateway>(&request).await?;
    }
    print_status_change(&mut message, &gateway.name, &gateway.status, gateway.status_message.as_deref());
    print_result(args, &gateway, &gateway.name, gateway.status == "failed")
}

/// Prints each status change once.
fn print_status_change(reason_text: &mut String, name: &str, status: &str, message: Option<&str>) {
    let text = message
        .filter(|text| !text.is_empty())
        .map_or_else(|| format!("{name}: {status}"), |message| format!("{name}: {status} ({message})"));
    if text != *reason_text {
        output::print_message(&output::printable(&text));
        *reason_text = text;
    }
}

fn print_result<T: serde::Serialize>(
    args: &Args,
    thing: &T,
    name: &str,
    failed: bool,
) -> Result<Exit, CliError> {
    output::print_one(args.output.format, thing, name, |_| output::print_data(name))?;
    Ok(if failed { Exit::RunFailed } else { Exit::Done })
}
