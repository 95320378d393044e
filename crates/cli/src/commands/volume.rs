//! `windlass volume`: volumes of the project.

use windlass_api::{
    operations::{DeleteVolumes, ListProjectVolumes},
    server::Nothing,
    volumes::{DeleteRequest, Volume},
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
    /// List volumes
    List,
    /// Delete volumes
    Delete {
        #[arg(required = true, value_name = "VOLUME")]
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
            cx.call::<DeleteVolumes>(&DeleteRequest { names: names.clone() }).await?;
            output::say(&format!("Deleting {what}."));
            return Ok(Exit::Done);
        }
        let volumes = cx.call::<ListProjectVolumes>(&Nothing {}).await?;
        List {
            project: Some(&cx.project),
            kind: "volumes",
            rows: &volumes,
            name: |volume| volume.name.clone(),
            none: "No volumes. `windlass apply -f FILE` makes one.",
        }
        .print(args.output.format, |_| table(&volumes))?;
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
