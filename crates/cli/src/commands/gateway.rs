//! `windlass gateway`: gateways of the project.

use serde_json::json;
use windlass_api::{
    gateways::{DeleteRequest, Gateway, ListRequest},
    operations::{DeleteGateways, ListGateways},
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
            cx.call::<DeleteGateways>(&DeleteRequest { names: names.clone() }).await?;
            output::say(&format!("Deleting {what}."));
            return Ok(Exit::Done);
        }
        let gateways = cx.call::<ListGateways>(&ListRequest { include_imported: true }).await?;
        match args.output.format {
            Format::Json => output::json(&json!({ "project": cx.project, "gateways": gateways }))?,
            Format::Jsonl => output::jsonl(&gateways)?,
            Format::Name => gateways.iter().for_each(|gateway| output::data(&gateway.name)),
            Format::Table | Format::Wide => table(&gateways).print(),
        }
        Ok(Exit::Done)
    })
}

fn table(gateways: &[Gateway]) -> Table {
    let now = words::now();
    let mut table =
        Table::new(["NAME", "BACKEND", "HOSTNAME", "DOMAIN", "DEFAULT", "STATUS", "CREATED", "ERROR"]);
    for gateway in gateways {
        table.row(vec![
            gateway.name.as_str().into(),
            gateway.backend.clone().unwrap_or_default().into(),
            gateway.hostname.clone().unwrap_or_default().into(),
            gateway.wildcard_domain.clone().unwrap_or_default().into(),
            (if gateway.default { "yes" } else { "" }).into(),
            Cell::status(&gateway.status),
            words::ago(gateway.created_at, now).into(),
            gateway.status_message.clone().unwrap_or_default().into(),
        ]);
    }
    table
}
