//! `windlass gateway`: gateways of the project.

use windlass_api::{
    gateways::{DeleteRequest, Gateway, ListRequest},
    operations::{DeleteGateways, ListGateways},
};

use crate::{
    cli::{At, Output},
    context,
    exit::Exit,
    output::{
        self, List,
        table::{Cell, Table},
        words,
    },
    problem::Problem,
};

#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    #[command(subcommand)]
    pub(crate) action: Option<Action>,
    #[command(flatten)]
    pub(crate) at: At,
    #[command(flatten)]
    pub(crate) output: Output,
}

#[derive(Debug, clap::Subcommand)]
pub(crate) enum Action {
    /// List gateways
    List,
    /// Delete gateways
    Delete {
        #[arg(required = true, value_name = "GATEWAY")]
        names: Vec<String>,
        /// Do not ask
        #[arg(short, long)]
        yes: bool,
    },
}

pub(crate) fn run(args: &Args) -> Result<Exit, Problem> {
    context::with(&args.at, async |cx| {
        if let Some(Action::Delete { names, yes }) = &args.action {
            let what = names.join(", ");
            if !output::confirm_delete(*yes, &what)? {
                return Ok(Exit::Failed);
            }
            cx.call::<DeleteGateways>(&DeleteRequest { names: names.clone() }).await?;
            output::say(&format!("Deleting {what}."));
            return Ok(Exit::Done);
        }
        let gateways = cx.call::<ListGateways>(&ListRequest { include_imported: true }).await?;
        List {
            project: Some(&cx.project),
            kind: "gateways",
            rows: &gateways,
            name: |gateway| gateway.name.clone(),
            none: "No gateways. `windlass apply -f FILE` makes one.",
        }
        .print(args.output.format, |_| table(&gateways))?;
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
