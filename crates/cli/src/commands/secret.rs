//! `windlass secret`: secrets of the project. Values come from standard input or a prompt that does not echo.

use std::io::{IsTerminal as _, Read as _};

use serde::Serialize;
use windlass_api::{
    operations::{DeleteSecrets, ListSecrets, ReadSecret, SetSecret},
    secrets::{DeleteRequest, NameRequest, Secret, SetRequest},
    server::Nothing,
};

use crate::{
    cli::{At, Output},
    context::{self, Context},
    exit::Exit,
    output::{self, List, table::Table},
    problem::Problem,
};

/// More than any server takes.
const VALUE_BYTES_MAX: u64 = 1 << 20;

const EXAMPLES: &str = "\
Examples:
  windlass secret                             names, never values
  windlass secret set TOKEN                   asks for the value, without echo
  pass show hub | windlass secret set TOKEN   reads it from standard input
  windlass secret get TOKEN                   the value, to standard output
  windlass secret delete -y TOKEN

In a configuration: `env: [\"TOKEN=${{ secrets.TOKEN }}\"]`.";

#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
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
    /// List names of secrets
    #[command(after_help = "Examples:\n  windlass secret list -o name")]
    List,
    /// Print the value of a secret
    #[command(after_help = "Examples:\n  windlass secret get TOKEN > token.txt")]
    Get {
        /// The secret
        #[arg(value_name = "SECRET")]
        name: String,
    },
    /// Store a secret
    #[command(after_help = "Examples:\n  windlass secret set TOKEN < token.txt")]
    Set {
        /// The secret
        #[arg(value_name = "SECRET")]
        name: String,
        /// The value. Others on this machine can see it here: leave it out to be asked, or to give it on
        /// standard input
        #[arg(value_name = "VALUE")]
        value: Option<String>,
    },
    /// Delete secrets
    #[command(after_help = "Examples:\n  windlass secret delete -y TOKEN")]
    Delete {
        /// The secrets
        #[arg(required = true, value_name = "SECRET")]
        names: Vec<String>,
        /// Do not ask
        #[arg(short, long)]
        yes: bool,
    },
}

/// A secret as it is listed.
#[derive(Serialize)]
struct Named {
    id: uuid::Uuid,
    name: String,
}

pub(crate) fn run(args: &Args) -> Result<Exit, Problem> {
    let format = args.output.format;
    // Nobody is asked for a value that cannot be sent.
    let given = match &args.action {
        Some(Action::Set { name, value }) => Some(value_of(name, value.as_deref())?),
        _ => None,
    };
    context::with(&args.at, async |cx| match &args.action {
        None | Some(Action::List) => {
            let listed = list(cx).await?.into_iter();
            let secrets: Vec<Named> = listed.map(|Secret { id, name, .. }| Named { id, name }).collect();
            let none = "No secrets. `windlass secret set NAME` stores one.";
            let name = |secret: &Named| secret.name.clone();
            List { project: Some(&cx.project), kind: "secrets", name, none }.print(
                &secrets,
                format,
                |wide| table(&secrets, wide),
            )?;
            Ok(Exit::Done)
        }
        Some(Action::Get { name }) => {
            let secret = find(cx, name).await?;
            let value = secret.value.clone().unwrap_or_default();
            // What people stored is theirs: it comes back as it is, and a line for a terminal.
            output::one(format, &secret, name, |_| output::data(&value))?;
            Ok(Exit::Done)
        }
        Some(Action::Set { name, .. }) => {
            let request = SetRequest { name: name.clone(), value: given.clone().unwrap_or_default() };
            let secret = cx.call::<SetSecret>(&request).await?;
            let named = Named { id: secret.id, name: secret.name };
            output::one(format, &named, name, |_| output::say(&format!("Stored `{name}`.")))?;
            Ok(Exit::Done)
        }
        Some(Action::Delete { names, yes }) => {
            let all = list(cx).await?;
            if let Some(name) = names.iter().find(|name| !all.iter().any(|secret| secret.name == **name)) {
                return Err(cx.unknown("secret", name, all.iter().map(|secret| secret.name.as_str())));
            }
            let what = names.join(", ");
            if !output::confirm_delete(*yes, &what)? {
                return Ok(Exit::Failed);
            }
            cx.call::<DeleteSecrets>(&DeleteRequest { secrets_names: names.clone() }).await?;
            output::say(&format!("Deleted {what}."));
            Ok(Exit::Done)
        }
    })
}

pub(crate) async fn list(cx: &Context) -> Result<Vec<Secret>, Problem> {
    cx.call::<ListSecrets>(&Nothing {}).await
}

pub(crate) async fn find(cx: &Context, name: &str) -> Result<Secret, Problem> {
    match cx.try_call::<ReadSecret>(&NameRequest { name: name.to_owned() }).await {
        Ok(secret) => Ok(secret),
        Err(error) if error.is_absent() => {
            let all = list(cx).await?;
            Err(cx.unknown("secret", name, all.iter().map(|secret| secret.name.as_str())))
        }
        Err(error) => Err(cx.explain(&error).await),
    }
}

fn value_of(name: &str, given: Option<&str>) -> Result<String, Problem> {
    let value = match given.filter(|value| *value != "-") {
        Some(value) => value.to_owned(),
        None if std::io::stdin().is_terminal() => {
            output::ask_secret(&format!("Value of {name}"), &format!("windlass secret set {name} < FILE"))?
        }
        None => {
            let mut text = String::new();
            let read = std::io::stdin().lock().take(VALUE_BYTES_MAX).read_to_string(&mut text);
            read.map_err(|error| Problem::caused("read the value from standard input", &error))?;
            // `echo` and files end with a line break that nobody means.
            text.strip_suffix('\n')
                .map(|line| line.strip_suffix('\r').unwrap_or(line).to_owned())
                .unwrap_or(text)
        }
    };
    if value.is_empty() {
        return Err(Problem::misuse(format!("the value of `{name}` is empty"))
            .hint(format!("`windlass secret set {name} < FILE` reads it from a file")));
    }
    Ok(value)
}

fn table(secrets: &[Named], wide: bool) -> Table {
    let mut table = Table::new(if wide { vec!["NAME", "VALUE", "ID"] } else { vec!["NAME", "VALUE"] });
    for secret in secrets {
        let mut row = vec![secret.name.as_str().into(), "******".into()];
        if wide {
            row.push(secret.id.to_string().into());
        }
        table.row(row);
    }
    table
}
