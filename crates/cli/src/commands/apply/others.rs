//! Applying volumes and gateways.

use std::time::Duration;

use windlass_api::{
    Document, gateways,
    operations::{ApplyGateway, CreateVolume, PlanGateway, ReadGateway, ReadVolume},
    runs::ApplyAction,
    volumes,
};

use super::{Args, agreed, source::Source};
use crate::{
    context::Context,
    exit::Exit,
    output,
    problem::{Code, Problem},
};

const LOOK_EVERY: Duration = Duration::from_millis(250);

fn document(source: &Source) -> Result<Document, Problem> {
    Document::new(&source.configuration).map_err(|error| Problem::caused("write the configuration", &error))
}

pub(super) async fn volume(cx: &Context, args: &Args, source: &Source) -> Result<Exit, Problem> {
    if let Some(name) = source.configuration.name() {
        match cx.try_call::<ReadVolume>(&volumes::NameRequest { name: name.to_owned() }).await {
            Ok(volume) => return existing(args, source, &volume),
            Err(error) if error.is_absent() => {}
            Err(error) => return Err(cx.explain(&error).await),
        }
    }
    let name = source.configuration.name().unwrap_or("(a generated name)");
    if !agreed(args, &format!("Create volume `{name}` in project `{}`?", cx.project))? {
        return Ok(Exit::RunFailed);
    }
    let mut volume =
        cx.call::<CreateVolume>(&volumes::CreateRequest { configuration: document(source)? }).await?;
    let request = volumes::NameRequest { name: volume.name.clone() };
    let mut said = String::new();
    while !args.detach && !matches!(volume.status.as_str(), "active" | "failed") {
        tell(&mut said, &volume.name, &volume.status, volume.status_message.as_deref());
        tokio::time::sleep(LOOK_EVERY).await;
        volume = cx.call::<ReadVolume>(&request).await?;
    }
    tell(&mut said, &volume.name, &volume.status, volume.status_message.as_deref());
    answer(args, &volume, &volume.name, volume.status == "failed")
}

/// A volume cannot change: it holds data.
fn existing(args: &Args, source: &Source, volume: &volumes::Volume) -> Result<Exit, Problem> {
    let read = |error: serde_json::Error| Problem::caused("compare the volume", &error);
    let (before, wanted) =
        (volume.configuration.value().map_err(read)?, document(source)?.value().map_err(read)?);
    let changed: Vec<String> = wanted
        .as_object()
        .into_iter()
        .flatten()
        .filter(|(key, value)| before.get(key.as_str()).unwrap_or(&serde_json::Value::Null) != *value)
        .map(|(key, _)| format!("`{key}`"))
        .collect();
    if changed.is_empty() {
        output::say(&format!("Volume `{}` exists already and nothing changed.", volume.name));
        return answer(args, volume, &volume.name, volume.status == "failed");
    }
    Err(Problem::new(format!("change volume `{}`", volume.name))
        .code(Code::Unchangeable)
        .why(format!("{} cannot change: it may hold data", changed.join(", ")))
        .hint(format!(
            "choose another name, or `windlass volume delete {}` and lose what is on it",
            volume.name
        )))
}

pub(super) async fn gateway(cx: &Context, args: &Args, source: &Source) -> Result<Exit, Problem> {
    let spec =
        gateways::Spec { configuration: document(source)?, configuration_path: Some(source.file.clone()) };
    let plan = cx.call::<PlanGateway>(&gateways::PlanRequest { spec: spec.clone() }).await?;
    let name = source.configuration.name().unwrap_or("(a generated name)").to_owned();
    let verb = match (&plan.current_resource, plan.action) {
        (None, _) => "Create",
        (Some(_), ApplyAction::Update) => "Update",
        (Some(gateway), ApplyAction::Create) => {
            return Err(Problem::new(format!("change gateway `{}`", gateway.name))
                .code(Code::Unchangeable)
                .why("what changed cannot change while it exists")
                .hint(format!("`windlass gateway delete {}` first", gateway.name)));
        }
    };
    if !agreed(args, &format!("{verb} gateway `{name}` in project `{}`?", cx.project))? {
        return Ok(Exit::RunFailed);
    }
    let seen = plan
        .current_resource
        .map(|gateway| gateways::SeenGateway { id: gateway.id, configuration: gateway.configuration });
    let request = gateways::ApplyRequest {
        plan: gateways::ApplyInput { spec, current_resource: seen },
        force: args.force,
    };
    let mut gateway = cx.call::<ApplyGateway>(&request).await?;
    let request = gateways::NameRequest { name: gateway.name.clone() };
    let mut said = String::new();
    while !args.detach && !matches!(gateway.status.as_str(), "running" | "failed") {
        tell(&mut said, &gateway.name, &gateway.status, gateway.status_message.as_deref());
        tokio::time::sleep(LOOK_EVERY).await;
        gateway = cx.call::<ReadGateway>(&request).await?;
    }
    tell(&mut said, &gateway.name, &gateway.status, gateway.status_message.as_deref());
    answer(args, &gateway, &gateway.name, gateway.status == "failed")
}

/// Each change of status once.
fn tell(said: &mut String, name: &str, status: &str, message: Option<&str>) {
    let text = message
        .filter(|text| !text.is_empty())
        .map_or_else(|| format!("{name}: {status}"), |message| format!("{name}: {status} ({message})"));
    if text != *said {
        output::say(&output::printable(&text));
        *said = text;
    }
}

fn answer<T: serde::Serialize>(args: &Args, thing: &T, name: &str, failed: bool) -> Result<Exit, Problem> {
    output::one(args.output.format, thing, name, |_| output::data(name))?;
    Ok(if failed { Exit::RunFailed } else { Exit::Done })
}
