//! `windlass volume`: volumes of the project.

use serde_json::json;
use windlass_api::{
    operations::{DeleteVolumes, ListProjectVolumes},
    server::Nothing,
    volumes::{DeleteRequest, Volume},
};

use super::stop::confirm;
use crate::{
    cli::{Format, ThingAction, ThingArgs},
    context,
    exit::Exit,
    output::{
        self,
        table::{Cell, Table},
        words,
    },
    problem::Problem,
};

pub(crate) fn run(args: &ThingArgs) -> Result<Exit, Problem> {
    context::with(&args.at, async |cx| {
        if let Some(ThingAction::Delete { names, yes }) = &args.action {
            let what = names.join(", ");
            if !yes && !confirm(&format!("Delete {what}?"))? {
                output::say("Nothing was deleted.");
                return Ok(Exit::Failed);
            }
            cx.call::<DeleteVolumes>(&DeleteRequest { names: names.clone() }).await?;
            output::say(&format!("Deleting {what}."));
            return Ok(Exit::Done);
        }
        let volumes = cx.call::<ListProjectVolumes>(&Nothing {}).await?;
        match args.output.format {
            Format::Json => output::json(&json!({ "project": cx.project, "volumes": volumes }))?,
            Format::Jsonl => output::jsonl(&volumes)?,
            Format::Name => volumes.iter().for_each(|volume| output::data(&volume.name)),
            Format::Table | Format::Wide => table(&volumes).print(),
        }
        Ok(Exit::Done)
    })
}

fn table(volumes: &[Volume]) -> Table {
    let now = words::now();
    let mut table = Table::new(["NAME", "BACKEND", "REGION", "STATUS", "ATTACHED", "CREATED", "ERROR"]);
    for volume in volumes {
        let configuration = volume.configuration.value().unwrap_or_default();
        let attached: Vec<String> =
            volume.attachments.iter().flatten().map(|a| a.instance.name.clone()).collect();
        table.row(vec![
            volume.name.as_str().into(),
            configuration["backend"].as_str().unwrap_or_default().into(),
            configuration["region"].as_str().unwrap_or_default().into(),
            Cell::status(&volume.status),
            attached.join(", ").into(),
            words::ago(volume.created_at, now).into(),
            volume.status_message.clone().unwrap_or_default().into(),
        ]);
    }
    table
}
