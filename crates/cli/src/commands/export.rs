//! `windlass export` and `windlass import`: fleets, gateways and volumes that projects share.

use windlass_api::{
    exports::{
        CreateRequest, DeleteImportRequest, Export, ExportedResource, Import, NameRequest, UpdateRequest,
    },
    operations::{CreateExport, DeleteExport, DeleteImport, ListExports, ListImports, UpdateExport},
    server::EmptyRequest,
};

use crate::{
    cli::{Format, OutputArgs, ServerArgs},
    context::{self, Context},
    error::CliError,
    exit::Exit,
    output::{self, ListView, table::Table},
};

const EXAMPLES: &str = "\
Examples:
  windlass export                                              list exports of the project
  windlass export create gpus --fleet a100 --importer vision   let project vision use fleet a100
  windlass export create site --fleet cpu --global             let every project use fleet cpu
  windlass export create data --volume disk --importer vision  let project vision mount volume disk
  windlass export update gpus --add-importer speech            share it with another project
  windlass export delete -y gpus                               end it; jobs of other projects there end

In the other project: `fleets: [PROJECT/a100]`, or no `fleets` at all. You must be an admin of both projects.";

#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    #[command(subcommand)]
    pub(crate) action: Option<Action>,
    #[command(flatten)]
    pub(crate) at: ServerArgs,
    #[command(flatten)]
    pub(crate) output: OutputArgs,
}

#[derive(Debug, clap::Subcommand)]
pub(crate) enum Action {
    /// List exports
    #[command(after_help = "Examples:\n  windlass export list -o json")]
    List,
    /// Share fleets, gateways and volumes with other projects
    #[command(
        after_help = "Examples:\n  windlass export create gpus --fleet a100 --fleet h100 --importer vision"
    )]
    Create(CreateArgs),
    /// Change what an export shares, and with which projects
    #[command(
        after_help = "Examples:\n  windlass export update gpus --add-fleet l4 --remove-importer vision"
    )]
    Update(UpdateArgs),
    /// Delete an export; jobs of other projects on its fleets end
    #[command(after_help = "Examples:\n  windlass export delete -y gpus")]
    Delete {
        /// Name of the export
        #[arg(value_name = "EXPORT")]
        name: String,
        /// Skip the confirmation prompt
        #[arg(short, long)]
        yes: bool,
    },
}

#[derive(Debug, clap::Args)]
pub(crate) struct CreateArgs {
    /// Name of the export
    #[arg(value_name = "EXPORT")]
    name: String,
    /// Project that may use it; repeat for several
    #[arg(long = "importer", value_name = "PROJECT")]
    importers: Vec<String>,
    /// Fleet to share; repeat for several
    #[arg(long = "fleet", value_name = "FLEET")]
    fleets: Vec<String>,
    /// Gateway to share; repeat for several
    #[arg(long = "gateway", value_name = "GATEWAY")]
    gateways: Vec<String>,
    /// Volume to share; repeat for several
    #[arg(long = "volume", value_name = "VOLUME")]
    volumes: Vec<String>,
    /// Share with every project of the server; only for global admins
    #[arg(long)]
    global: bool,
}

#[derive(Debug, clap::Args)]
pub(crate) struct UpdateArgs {
    /// Name of the export
    #[arg(value_name = "EXPORT")]
    name: String,
    /// Project that may use it from now on; repeat for several
    #[arg(long = "add-importer", value_name = "PROJECT")]
    add_importers: Vec<String>,
    /// Project that may no longer use it; repeat for several
    #[arg(long = "remove-importer", value_name = "PROJECT")]
    remove_importers: Vec<String>,
    /// Fleet to add; repeat for several
    #[arg(long = "add-fleet", value_name = "FLEET")]
    add_fleets: Vec<String>,
    /// Fleet to remove; repeat for several
    #[arg(long = "remove-fleet", value_name = "FLEET")]
    remove_fleets: Vec<String>,
    /// Gateway to add; repeat for several
    #[arg(long = "add-gateway", value_name = "GATEWAY")]
    add_gateways: Vec<String>,
    /// Gateway to remove; repeat for several
    #[arg(long = "remove-gateway", value_name = "GATEWAY")]
    remove_gateways: Vec<String>,
    /// Volume to add; repeat for several
    #[arg(long = "add-volume", value_name = "VOLUME")]
    add_volumes: Vec<String>,
    /// Volume to remove; repeat for several
    #[arg(long = "remove-volume", value_name = "VOLUME")]
    remove_volumes: Vec<String>,
    /// Share with every project of the server; only for global admins
    #[arg(long, conflicts_with = "unset_global")]
    set_global: bool,
    /// Share only with the projects that it names; only for global admins
    #[arg(long)]
    unset_global: bool,
}

const IMPORT_EXAMPLES: &str = "\
Examples:
  windlass import                       list what other projects share with this one
  windlass import delete -y main/gpus   do not use export gpus of project main any more; jobs there end";

#[derive(Debug, clap::Args)]
#[command(after_help = IMPORT_EXAMPLES)]
pub(crate) struct ImportArgs {
    #[command(subcommand)]
    pub(crate) action: Option<ImportAction>,
    #[command(flatten)]
    pub(crate) at: ServerArgs,
    #[command(flatten)]
    pub(crate) output: OutputArgs,
}

#[derive(Debug, clap::Subcommand)]
pub(crate) enum ImportAction {
    /// List imports
    #[command(after_help = "Examples:\n  windlass import list -o json")]
    List,
    /// End the use of an export of another project; jobs on its fleets end
    #[command(after_help = "Examples:\n  windlass import delete -y main/gpus")]
    Delete {
        /// Project and name of the export
        #[arg(value_name = "PROJECT/EXPORT")]
        name: String,
        /// Skip the confirmation prompt
        #[arg(short, long)]
        yes: bool,
    },
}

pub(crate) fn run(args: &Args) -> Result<Exit, CliError> {
    let format = args.output.format;
    context::with_context(&args.at, async |cx| match &args.action {
        None | Some(Action::List) => {
            let all = list(cx).await?;
            let none = "No exports. Run `windlass export create NAME --fleet FLEET --importer PROJECT`.";
            let name = |export: &Export| export.name.clone();
            ListView { project: Some(&cx.project), kind: "exports", name, none }.print(
                &all,
                format,
                |_| table(&all),
            )?;
            Ok(Exit::Done)
        }
        Some(Action::Create(made)) => {
            let request = CreateRequest {
                name: made.name.clone(),
                is_global: made.global,
                importer_projects: made.importers.clone(),
                exported_fleets: made.fleets.clone(),
                exported_gateways: made.gateways.clone(),
                exported_volumes: made.volumes.clone(),
            };
            let export = cx.call::<CreateExport>(&request).await?;
            print(format, &export, "Created")
        }
        Some(Action::Update(changed)) => {
            let export = cx.call::<UpdateExport>(&changed.to_request()).await?;
            print(format, &export, "Updated")
        }
        Some(Action::Delete { name, yes }) => {
            let all = list(cx).await?;
            if !all.iter().any(|export| export.name == *name) {
                return Err(cx.unknown("export", name, all.iter().map(|export| export.name.as_str())));
            }
            if !output::confirm_delete(*yes, name)? {
                return Ok(Exit::Failed);
            }
            cx.call::<DeleteExport>(&NameRequest { name: name.clone() }).await?;
            output::print_message(&format!("Deleted {name}."));
            Ok(Exit::Done)
        }
    })
}

impl UpdateArgs {
    fn to_request(&self) -> UpdateRequest {
        UpdateRequest {
            name: self.name.clone(),
            set_global: self.set_global,
            unset_global: self.unset_global,
            add_importer_projects: self.add_importers.clone(),
            remove_importer_projects: self.remove_importers.clone(),
            add_exported_fleets: self.add_fleets.clone(),
            remove_exported_fleets: self.remove_fleets.clone(),
            add_exported_gateways: self.add_gateways.clone(),
            remove_exported_gateways: self.remove_gateways.clone(),
            add_exported_volumes: self.add_volumes.clone(),
            remove_exported_volumes: self.remove_volumes.clone(),
        }
    }
}

pub(crate) fn run_import(args: &ImportArgs) -> Result<Exit, CliError> {
    let format = args.output.format;
    context::with_context(&args.at, async |cx| match &args.action {
        None | Some(ImportAction::List) => {
            let all = cx.call::<ListImports>(&EmptyRequest {}).await?.imports;
            let none = "No imports. An admin of another project can share with `windlass export create`.";
            ListView { project: Some(&cx.project), kind: "imports", name: import_name, none }.print(
                &all,
                format,
                |_| import_table(&all),
            )?;
            Ok(Exit::Done)
        }
        Some(ImportAction::Delete { name, yes }) => {
            let all = cx.call::<ListImports>(&EmptyRequest {}).await?.imports;
            let names: Vec<String> = all.iter().map(import_name).collect();
            let Some((project, export)) = name.split_once('/').filter(|_| names.contains(name)) else {
                return Err(cx.unknown("import", name, names.iter().map(String::as_str)));
            };
            if !output::confirm_delete(*yes, name)? {
                return Ok(Exit::Failed);
            }
            let request = DeleteImportRequest {
                export_name: export.to_owned(),
                export_project_name: project.to_owned(),
            };
            cx.call::<DeleteImport>(&request).await?;
            output::print_message(&format!("Deleted {name}."));
            Ok(Exit::Done)
        }
    })
}

async fn list(cx: &Context) -> Result<Vec<Export>, CliError> {
    Ok(cx.call::<ListExports>(&EmptyRequest {}).await?.exports)
}

fn print(format: Format, export: &Export, done: &str) -> Result<Exit, CliError> {
    output::print_one(format, export, &export.name, |_| {
        output::print_message(&format!("{done} `{}`.", export.name));
    })?;
    Ok(Exit::Done)
}

fn import_name(import: &Import) -> String {
    format!("{}/{}", import.export.project_name, import.export.name)
}

fn names(resources: &[ExportedResource]) -> String {
    join(resources.iter().map(|resource| resource.name.as_str()))
}

fn join<'a>(names: impl Iterator<Item = &'a str>) -> String {
    let names: Vec<&str> = names.collect();
    if names.is_empty() { "-".to_owned() } else { names.join(", ") }
}

fn table(exports: &[Export]) -> Table {
    let mut table = Table::new(vec!["NAME", "FLEETS", "GATEWAYS", "VOLUMES", "IMPORTERS"]);
    for export in exports {
        let importers = match export.is_global {
            true => "*".to_owned(),
            false => join(export.imports.iter().map(|import| import.project_name.as_str())),
        };
        table.row(vec![
            export.name.as_str().into(),
            names(&export.exported_fleets).into(),
            names(&export.exported_gateways).into(),
            names(&export.exported_volumes).into(),
            importers.into(),
        ]);
    }
    table
}

fn import_table(imports: &[Import]) -> Table {
    let mut table = Table::new(vec!["NAME", "FLEETS", "GATEWAYS", "VOLUMES"]);
    for import in imports {
        table.row(vec![
            import_name(import).into(),
            names(&import.export.exported_fleets).into(),
            names(&import.export.exported_gateways).into(),
            names(&import.export.exported_volumes).into(),
        ]);
    }
    table
}
