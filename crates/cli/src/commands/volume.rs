//! `windlass volume`: commands on volumes of the project.

use windlass_api::{
    operations::{DeleteVolumes, ListProjectVolumes, ReadVolume},
    server::EmptyRequest,
    volumes::{DeleteRequest, NameRequest, Volume},
};

use crate::{
    cli::{OutputArgs, ServerArgs, WatchArgs},
    context::{self, Context},
    error::CliError,
    exit::Exit,
    output::{
        self, ListView,
        detail_view::DetailView,
        format,
        table::{Cell, Table},
    },
};

const EXAMPLES: &str = "\
Examples:
  windlass volume                         list volumes, with their backends and instances
  windlass volume get checkpoints         show one volume
  windlass volume delete -y checkpoints   delete a volume and its data
  windlass apply -f volume.yml            create a volume";

#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    #[command(subcommand)]
    pub(crate) action: Option<Action>,
    #[command(flatten)]
    pub(crate) listing: WatchArgs,
    #[command(flatten)]
    pub(crate) at: ServerArgs,
    #[command(flatten)]
    pub(crate) output: OutputArgs,
}

#[derive(Debug, clap::Subcommand)]
pub(crate) enum Action {
    /// List volumes
    #[command(after_help = "Examples:\n  windlass volume list -o wide")]
    List(WatchArgs),
    /// Show a volume
    #[command(after_help = "Examples:\n  windlass volume get checkpoints")]
    Get {
        /// Name of the volume
        #[arg(value_name = "VOLUME")]
        name: String,
    },
    /// Delete volumes
    #[command(after_help = "Examples:\n  windlass volume delete -y checkpoints")]
    Delete {
        /// Names of the volumes
        #[arg(required = true, value_name = "VOLUME")]
        names: Vec<String>,
        /// Skip the confirmation prompt
        #[arg(short, long)]
        yes: bool,
    },
}

pub(crate) fn run(args: &Args) -> Result<Exit, CliError> {
    let format = args.output.format;
    let listing = match &args.action {
        Some(Action::List(listing)) => listing,
        _ => &args.listing,
    };
    context::with_context(&args.at, async |cx| match &args.action {
        None | Some(Action::List(_)) => {
            let none = "No volumes. Run `windlass apply -f FILE` to create one.";
            let name = |volume: &Volume| volume.name.clone();
            let list = ListView { project: Some(&cx.project), kind: "volumes", name, none };
            list.show(format, listing.watch, async || self::list(cx).await, table).await
        }
        Some(Action::Get { name }) => {
            let volume = find(cx, name).await?;
            output::print_one(format, &volume, name, |_| facts(&volume).print())?;
            Ok(Exit::Done)
        }
        Some(Action::Delete { names, yes }) => {
            let request = DeleteRequest { names: names.clone() };
            let call = async || cx.call::<DeleteVolumes>(&request).await.map(drop);
            output::delete(names, *yes, "Deleting", async |name| find(cx, name).await, call).await
        }
    })
}

async fn list(cx: &Context) -> Result<Vec<Volume>, CliError> {
    cx.call::<ListProjectVolumes>(&EmptyRequest {}).await
}

pub(crate) async fn find(cx: &Context, name: &str) -> Result<Volume, CliError> {
    match cx.try_call::<ReadVolume>(&NameRequest { name: name.to_owned() }).await {
        Ok(volume) => Ok(volume),
        Err(error) if error.is_not_found() => {
            let all = list(cx).await?;
            Err(cx.unknown("volume", name, all.iter().map(|volume| volume.name.as_str())))
        }
        Err(error) => Err(cx.explain(&error).await),
    }
}

/// Names of the instances to which it is attached.
fn attached_instances(volume: &Volume) -> String {
    let names: Vec<&str> =
        volume.attachments.iter().flatten().map(|one| one.instance.name.as_str()).collect();
    names.join(", ")
}

fn facts(volume: &Volume) -> DetailView {
    let configuration = volume.configuration.value().unwrap_or_default();
    let text = |key: &str| configuration[key].as_str().unwrap_or_default().to_owned();
    let size = configuration["size"].as_f64().map(|size| format!("{size}GB")).unwrap_or_default();
    let mut facts = DetailView::new();
    facts.add("Name", &volume.name);
    facts.status("Status", &volume.status);
    facts.add("Why", volume.status_message.as_deref().unwrap_or_default());
    facts.add("Backend", text("backend"));
    facts.add("Region", text("region"));
    facts.add("Size", size);
    facts.add("Attached to", attached_instances(volume));
    facts.add("Volume id", volume.volume_id.as_deref().unwrap_or_default());
    facts.add("User", &volume.user);
    facts.add("Created", volume.created_at.to_string());
    facts
}

fn table(volumes: &[Volume], wide: bool) -> Table {
    let now = format::now();
    let mut head = vec!["NAME", "BACKEND", "STATUS", "ATTACHED", "CREATED"];
    if wide {
        head.extend(["REGION", "SIZE", "USER", "ERROR"]);
    }
    let mut table = Table::new(head);
    for volume in volumes {
        let configuration = volume.configuration.value().unwrap_or_default();
        let text = |key: &str| configuration[key].as_str().unwrap_or_default().to_owned();
        let mut row = vec![
            volume.name.as_str().into(),
            text("backend").into(),
            Cell::status(&volume.status),
            attached_instances(volume).into(),
            format::ago(volume.created_at, now).into(),
        ];
        if wide {
            let size = configuration["size"].as_f64().map(|size| format!("{size}GB")).unwrap_or_default();
            let error = volume.status_message.clone().unwrap_or_default();
            row.extend([text("region").into(), size.into(), volume.user.as_str().into(), error.into()]);
        }
        table.row(row);
    }
    table
}
