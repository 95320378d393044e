//! `windlass secret`: secrets of the project. Values are read from standard input or from a prompt without echo.

use std::io::{IsTerminal as _, Read as _};

use serde::Serialize;
use windlass_api::{
    operations::{DeleteSecrets, ListSecrets, ReadSecret, SetSecret},
    secrets::{DeleteRequest, NameRequest, Secret, SecretGroup, SecretUsers, SetRequest},
    server::EmptyRequest,
};

use crate::{
    cli::{OutputArgs, ServerArgs},
    context::{self, Context},
    error::CliError,
    exit::Exit,
    output::{self, ListView, table::Table},
};

/// Upper limit for reading a value, larger than any server accepts.
const VALUE_BYTES_MAX: u64 = 1 << 20;

const EXAMPLES: &str = "\
Examples:
  windlass secret                             list the names of secrets, never their values
  windlass secret set TOKEN                   prompt for the value, without echo
  windlass secret set TOKEN --for managers    only runs of managers and admins may use it
  pass show hub | windlass secret set TOKEN   read the value from standard input
  windlass secret get TOKEN                   print the value
  windlass secret delete -y TOKEN

In a configuration: `env: [\"TOKEN=${{ secrets.TOKEN }}\"]`.";

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
    /// List the names of secrets
    #[command(after_help = "Examples:\n  windlass secret list -o name")]
    List,
    /// Print the value of a secret
    #[command(after_help = "Examples:\n  windlass secret get TOKEN > token.txt")]
    Get {
        /// Name of the secret
        #[arg(value_name = "SECRET")]
        name: String,
    },
    /// Store a secret
    #[command(
        after_help = "Examples:\n  windlass secret set TOKEN < token.txt\n  windlass secret set TOKEN --for ada,bob < token.txt"
    )]
    Set {
        /// Name of the secret
        #[arg(value_name = "SECRET")]
        name: String,
        /// Value. Other users of this machine can see it here: omit it to be prompted, or to pass it on standard input
        #[arg(value_name = "VALUE")]
        value: Option<String>,
        /// Users whose runs may use it: `everyone` in the project, `managers`, or members by name. Defaults to the
        /// current setting, and to `everyone` for a new secret
        #[arg(long = "for", value_name = "USER,…|managers|everyone", value_parser = parse_users)]
        users: Option<SecretUsers>,
    },
    /// Delete secrets
    #[command(after_help = "Examples:\n  windlass secret delete -y TOKEN")]
    Delete {
        /// Names of the secrets
        #[arg(required = true, value_name = "SECRET")]
        names: Vec<String>,
        /// Skip the confirmation prompt
        #[arg(short, long)]
        yes: bool,
    },
}

/// A row of the list.
#[derive(Serialize)]
struct SecretRow {
    id: uuid::Uuid,
    name: String,
    users: SecretUsers,
}

fn parse_users(text: &str) -> Result<SecretUsers, String> {
    match text {
        "everyone" => Ok(SecretUsers::Group(SecretGroup::Everyone)),
        "managers" => Ok(SecretUsers::Group(SecretGroup::Managers)),
        names => {
            let names: Vec<String> = names.split(',').map(|name| name.trim().to_owned()).collect();
            if names.iter().any(String::is_empty) {
                return Err(
                    "expected `everyone`, `managers`, or names of members, separated by commas".to_owned()
                );
            }
            Ok(SecretUsers::Named(names))
        }
    }
}

pub(crate) fn run(args: &Args) -> Result<Exit, CliError> {
    let format = args.output.format;
    // Read the value before connecting, so that the prompt is not shown for a value that cannot be sent.
    let given = match &args.action {
        Some(Action::Set { name, value, .. }) => Some(read_value(name, value.as_deref())?),
        _ => None,
    };
    context::with_context(&args.at, async |cx| match &args.action {
        None | Some(Action::List) => {
            let listed = list(cx).await?.into_iter();
            let secrets: Vec<SecretRow> =
                listed.map(|Secret { id, name, users, .. }| SecretRow { id, name, users }).collect();
            let none = "No secrets. Run `windlass secret set NAME` to store one.";
            let name = |secret: &SecretRow| secret.name.clone();
            ListView { project: Some(&cx.project), kind: "secrets", name, none }.print(
                &secrets,
                format,
                |wide| table(&secrets, wide),
            )?;
            Ok(Exit::Done)
        }
        Some(Action::Get { name }) => {
            let secret = find(cx, name).await?;
            let value = secret.value.clone().unwrap_or_default();
            // The stored value is printed unmodified, with a line break.
            output::print_one(format, &secret, name, |_| output::print_data(&value))?;
            Ok(Exit::Done)
        }
        Some(Action::Set { name, users, .. }) => {
            let value = given.clone().unwrap_or_default();
            let request = SetRequest { name: name.clone(), value, users: users.clone() };
            let secret = cx.call::<SetSecret>(&request).await?;
            let named = SecretRow { id: secret.id, name: secret.name, users: secret.users };
            output::print_one(format, &named, name, |_| {
                output::print_message(&format!("Stored `{name}`; runs of {} may use it.", named.users))
            })?;
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
            output::print_message(&format!("Deleted {what}."));
            Ok(Exit::Done)
        }
    })
}

pub(crate) async fn list(cx: &Context) -> Result<Vec<Secret>, CliError> {
    cx.call::<ListSecrets>(&EmptyRequest {}).await
}

pub(crate) async fn find(cx: &Context, name: &str) -> Result<Secret, CliError> {
    match cx.try_call::<ReadSecret>(&NameRequest { name: name.to_owned() }).await {
        Ok(secret) => Ok(secret),
        Err(error) if error.is_not_found() => {
            let all = list(cx).await?;
            Err(cx.unknown("secret", name, all.iter().map(|secret| secret.name.as_str())))
        }
        Err(error) => Err(cx.explain(&error).await),
    }
}

fn read_value(name: &str, given: Option<&str>) -> Result<String, CliError> {
    let value = match given.filter(|value| *value != "-") {
        Some(value) => value.to_owned(),
        None if std::io::stdin().is_terminal() => {
            output::prompt_secret(&format!("Value of {name}"), &format!("windlass secret set {name} < FILE"))?
        }
        None => {
            let mut text = String::new();
            let read = std::io::stdin().lock().take(VALUE_BYTES_MAX).read_to_string(&mut text);
            read.map_err(|error| {
                CliError::from_error("failed to read the value from standard input", &error)
            })?;
            // `echo` and text editors append a line break that is not part of the value.
            text.strip_suffix('\n')
                .map(|line| line.strip_suffix('\r').unwrap_or(line).to_owned())
                .unwrap_or(text)
        }
    };
    if value.is_empty() {
        return Err(CliError::usage(format!("the value of `{name}` is empty"))
            .hint(format!("run `windlass secret set {name} < FILE` to read it from a file")));
    }
    Ok(value)
}

fn table(secrets: &[SecretRow], wide: bool) -> Table {
    let mut head = vec!["NAME", "VALUE", "ALLOWED"];
    if wide {
        head.push("ID");
    }
    let mut table = Table::new(head);
    for secret in secrets {
        let mut row = vec![secret.name.as_str().into(), "******".into(), secret.users.to_string().into()];
        if wide {
            row.push(secret.id.to_string().into());
        }
        table.row(row);
    }
    table
}

#[cfg(test)]
mod tests {
    use super::{SecretGroup, SecretUsers, parse_users};

    #[test]
    fn secret_users_are_a_group_or_a_list_of_names() {
        assert_eq!(parse_users("everyone"), Ok(SecretUsers::Group(SecretGroup::Everyone)));
        assert_eq!(parse_users("managers"), Ok(SecretUsers::Group(SecretGroup::Managers)));
        assert_eq!(parse_users("ada, bob"), Ok(SecretUsers::Named(vec!["ada".into(), "bob".into()])));
        for wrong in ["", "ada,", ",bob"] {
            assert!(parse_users(wrong).is_err(), "{wrong}");
        }
    }
}
