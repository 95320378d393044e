//! `windlass context` and `windlass logout`: the servers that the user has logged in to.

use serde::Serialize;

use crate::{
    cli::OutputArgs,
    context::closest_name,
    error::{CliError, ErrorCode},
    exit::Exit,
    home::Home,
    login::{self, DEFAULT_PROJECT, Login},
    output::{self, ListView, table::Table},
};

const EXAMPLES: &str = "\
Examples:
  windlass context                 list servers and show which one is in use
  windlass context use lab         use another server from now on
  windlass context use local       use the server on this machine
  windlass context delete old      remove a server and its token from the list
  windlass login --name lab --url https://host:3443

`--url` and `--token`, or WINDLASS_URL and WINDLASS_TOKEN, take precedence.";

const LOGOUT_EXAMPLES: &str = "\
Examples:
  windlass logout                  remove the server in use and its token
  windlass logout lab              remove another server

Commands then use the server on this machine, or the one that you select with `windlass context use NAME`. The token
stays valid: `windlass user refresh-token` replaces it.";

#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    #[command(subcommand)]
    pub(crate) action: Option<Action>,
    #[command(flatten)]
    pub(crate) output: OutputArgs,
}

#[derive(Debug, clap::Subcommand)]
pub(crate) enum Action {
    /// List servers
    #[command(after_help = "Examples:\n  windlass context list -o json")]
    List,
    /// Select the server that commands use
    #[command(after_help = "Examples:\n  windlass context use lab\n  windlass context use local")]
    Use {
        /// Context name from `windlass login`; `local` is the server on this machine
        #[arg(value_name = "NAME")]
        name: String,
    },
    /// Delete a server and its token from the list
    #[command(after_help = "Examples:\n  windlass context delete old")]
    Delete {
        /// Context name from `windlass login`
        #[arg(value_name = "NAME")]
        name: String,
    },
}

#[derive(Debug, clap::Args)]
#[command(after_help = LOGOUT_EXAMPLES)]
pub(crate) struct LogoutArgs {
    /// Context name from `windlass login`; defaults to the current server
    #[arg(value_name = "NAME")]
    pub(crate) name: Option<String>,
}

/// A row of the list, without the token.
#[derive(Serialize)]
struct ContextRow {
    name: String,
    url: String,
    project: String,
    current: bool,
}

pub(crate) fn run(args: &Args) -> Result<Exit, CliError> {
    let home = Home::find()?;
    match &args.action {
        None | Some(Action::List) => {
            let all = list_contexts(&home)?;
            let name = |one: &ContextRow| one.name.clone();
            let list = ListView { project: None, kind: "contexts", name, none: "" };
            list.print(&all, args.output.format, |_| table(&all))?;
        }
        Some(Action::Use { name }) => use_context(&home, name)?,
        Some(Action::Delete { name }) => delete_context(&home, name)?,
    }
    Ok(Exit::Done)
}

pub(crate) fn logout(args: &LogoutArgs) -> Result<Exit, CliError> {
    let home = Home::find()?;
    let name = match (&args.name, Login::read(&home)?) {
        (Some(name), _) => name.clone(),
        (None, Some(login)) => login.context_name(),
        (None, None) => {
            output::print_message("Not logged in: commands use the server on this machine.");
            return Ok(Exit::Done);
        }
    };
    delete_context(&home, &name)?;
    Ok(Exit::Done)
}

/// Returns the stored contexts, and the server on this machine.
fn list_contexts(home: &Home) -> Result<Vec<ContextRow>, CliError> {
    let current = Login::read(home)?.map(|login| login.context_name());
    let local = ContextRow {
        name: login::LOCAL_CONTEXT.to_owned(),
        url: "(the server on this machine)".to_owned(),
        project: login::local_project(home)?,
        current: current.is_none(),
    };
    let mut all = vec![local];
    for one in Login::all(home)? {
        let name = one.context_name();
        let project = one.project.unwrap_or_else(|| DEFAULT_PROJECT.to_owned());
        all.push(ContextRow { current: current.as_ref() == Some(&name), name, url: one.url, project });
    }
    Ok(all)
}

fn table(all: &[ContextRow]) -> Table {
    let mut table = Table::new(["NAME", "URL", "PROJECT", "IN USE"]);
    for one in all {
        table.row(vec![
            one.name.as_str().into(),
            one.url.as_str().into(),
            one.project.as_str().into(),
            (if one.current { "yes" } else { "" }).into(),
        ]);
    }
    table
}

fn use_context(home: &Home, name: &str) -> Result<(), CliError> {
    if name == login::LOCAL_CONTEXT {
        login::clear(home)?;
        output::print_message("Commands now use the server on this machine.");
        return Ok(());
    }
    let found = find_context(home, name)?;
    found.write(home)?;
    let project = found.project.as_deref().unwrap_or(DEFAULT_PROJECT);
    output::print_message(&format!("Commands now use {}, project `{project}`.", found.url));
    Ok(())
}

fn find_context(home: &Home, name: &str) -> Result<Login, CliError> {
    let mut all = Login::all(home)?;
    if let Some(at) = all.iter().position(|one| one.context_name() == name) {
        return Ok(all.swap_remove(at));
    }
    let names: Vec<String> = all.iter().map(Login::context_name).collect();
    let problem = CliError::new(format!("no context named `{name}`")).code(ErrorCode::UnknownName);
    Err(match closest_name(name, names.iter().map(String::as_str)) {
        Some(near) => problem.hint(format!("did you mean `{near}`?")),
        None => problem.hint(
            "run `windlass context` to list contexts, or `windlass login --name NAME --url URL` to add one",
        ),
    })
}

fn delete_context(home: &Home, name: &str) -> Result<(), CliError> {
    if name == login::LOCAL_CONTEXT {
        return Err(CliError::usage("the server on this machine cannot be removed from the list")
            .hint("run `windlass server stop` to stop it"));
    }
    let found = find_context(home, name)?;
    let is_current = Login::read(home)?.is_some_and(|login| login.context_name() == name);
    found.remove(home)?;
    if is_current {
        login::clear(home)?;
        output::print_message(&format!(
            "Logged out of {}. Commands now use the server on this machine.",
            found.url
        ));
    } else {
        output::print_message(&format!("Removed {}.", found.url));
    }
    Ok(())
}
