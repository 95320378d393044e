//! `windlass backend`: the backends of the server.

use windlass_api::{
    backends::{CheckRequest, Finding, ServerBackend},
    operations::{CheckBackend, ListBackends},
    server::EmptyRequest,
};

use crate::{
    cli::{OutputArgs, ServerArgs},
    context,
    error::CliError,
    exit::Exit,
    output::{ListView, table::Table},
};

const EXAMPLES: &str = "\
Examples:
  windlass backend                 list the backends of the server, and the projects that may use them
  windlass backend check lxd       check what machines of `lxd` need

For global admins only. Backends are set up in `config.yml` of the server.";

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
    /// List the backends of the server
    #[command(after_help = "Examples:\n  windlass backend list -o name")]
    List,
    /// Check what instances of a backend need, at its provider; exits with 1 if something is missing
    #[command(after_help = "Examples:\n  windlass backend check lxd")]
    Check {
        /// Name of the backend
        #[arg(value_name = "BACKEND")]
        name: String,
    },
}

pub(crate) fn run(args: &Args) -> Result<Exit, CliError> {
    let format = args.output.format;
    context::with_context(&args.at, async |cx| match &args.action {
        None | Some(Action::List) => {
            let backends = cx.call::<ListBackends>(&EmptyRequest {}).await?;
            let name = |backend: &ServerBackend| backend.name.clone();
            let view = ListView { project: None, kind: "backends", name, none: "No backends." };
            view.print(&backends, format, |_| table(&backends))?;
            Ok(Exit::Done)
        }
        Some(Action::Check { name }) => {
            let found = cx.call::<CheckBackend>(&CheckRequest { backend: name.clone() }).await?;
            let what = |finding: &Finding| finding.what.clone();
            let none = format!("Backend `{name}` needs nothing that can be checked.");
            ListView { project: None, kind: "findings", name: what, none: &none }.print(
                &found,
                format,
                |_| {
                    let mut table = Table::new(vec!["WHAT", "RESULT"]);
                    for finding in &found {
                        let result = finding.problem.as_deref().unwrap_or("ok");
                        table.row(vec![finding.what.as_str().into(), result.into()]);
                    }
                    table
                },
            )?;
            let is_fine = found.iter().all(|finding| finding.problem.is_none());
            Ok(if is_fine { Exit::Done } else { Exit::Failed })
        }
    })
}

fn table(backends: &[ServerBackend]) -> Table {
    let mut table = Table::new(vec!["NAME", "PROJECTS"]);
    for backend in backends {
        table.row(vec![backend.name.as_str().into(), backend.projects.join(", ").into()]);
    }
    table
}
