//! Shell completion.
//!
//! The value name in a command's usage determines the candidates: an argument `RUN` completes to runs. New commands
//! therefore need no code here. Completion starts no server and prints nothing but candidates; a slow or unreachable
//! server yields no names.

use std::{process::ExitCode, time::Duration};

use clap::{Arg, Command, CommandFactory as _};
use clap_complete::{
    CompleteEnv,
    engine::{ArgValueCandidates, CompletionCandidate},
};
use windlass_api::{
    fleets, gateways, instances,
    operations::{
        ListGateways, ListInstances, ListProjectFleets, ListProjectVolumes, ListProjects, ListRuns,
        ListSecrets, ListUsers,
    },
    projects, runs,
    server::EmptyRequest,
    users,
};

use crate::{
    cli::{Cli, ServerArgs},
    commands::{explain, help},
    context::{self, Context, run_name},
    error::CliError,
    login,
};

/// Variable that the scripts of `windlass completion` set.
pub(crate) const COMPLETE_VARIABLE: &str = "WINDLASS_COMPLETE";
/// Time limit for an answer, so that Tab stays responsive.
const ANSWER_TIMEOUT: Duration = Duration::from_millis(700);
/// Maximum number of candidates.
const NAMES_MAX: i64 = 100;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum NameKind {
    Run,
    Fleet,
    Instance,
    Volume,
    Gateway,
    Secret,
    Project,
    User,
    /// Known locally: no request is needed.
    Code,
    Command,
}

impl NameKind {
    fn for_arg(arg: &Arg) -> Option<Self> {
        Some(match arg.get_value_names()?.first()?.as_str() {
            "RUN" | "RUN|JOB" => Self::Run,
            "FLEET" => Self::Fleet,
            "INSTANCE" => Self::Instance,
            "VOLUME" => Self::Volume,
            "GATEWAY" => Self::Gateway,
            "SECRET" => Self::Secret,
            "PROJECT" => Self::Project,
            "USER" => Self::User,
            "CODE" => Self::Code,
            "COMMAND" => Self::Command,
            _ => return None,
        })
    }
}

/// Answers a completion request; `None` if the caller is not a completion script.
pub(crate) fn complete_if_requested() -> Option<ExitCode> {
    let done = CompleteEnv::with_factory(command)
        .var(COMPLETE_VARIABLE)
        .try_complete(std::env::args_os(), std::env::current_dir().ok().as_deref());
    match done {
        Ok(false) => None,
        Ok(true) => Some(ExitCode::SUCCESS),
        // Errors are not reported, because output would corrupt the prompt.
        Err(_) => Some(ExitCode::FAILURE),
    }
}

fn command() -> Command {
    with_names(Cli::command())
}

fn with_names(command: Command) -> Command {
    let named = command.mut_args(|arg| match NameKind::for_arg(&arg) {
        Some(noun) => arg.add(ArgValueCandidates::new(move || candidates(noun))),
        None => arg,
    });
    named.mut_subcommands(with_names)
}

fn candidates(noun: NameKind) -> Vec<CompletionCandidate> {
    match noun {
        NameKind::Code => return explain::list_codes().map(CompletionCandidate::new).collect(),
        NameKind::Command => return commands().map(CompletionCandidate::new).collect(),
        NameKind::Run
        | NameKind::Fleet
        | NameKind::Instance
        | NameKind::Volume
        | NameKind::Gateway
        | NameKind::Secret
        | NameKind::Project
        | NameKind::User => {}
    }
    let at = parse_server_args(std::env::args().skip_while(|word| word != "--").skip(1));
    let names = fetch_names(&at, noun).unwrap_or_default();
    // The shell may interpret candidates: only plain names are offered.
    let plain = |name: &String| {
        !name.is_empty() && name.chars().all(|one| one.is_alphanumeric() || "-_.@/".contains(one))
    };
    names.into_iter().filter(plain).map(CompletionCandidate::new).collect()
}

/// Commands and topics of `windlass help`.
fn commands() -> impl Iterator<Item = String> {
    let command = Cli::command();
    let names: Vec<String> = command.get_subcommands().map(|one| one.get_name().to_owned()).collect();
    names.into_iter().chain(help::list_topics().map(str::to_owned))
}

/// Server flags that are already on the command line, else the environment.
fn parse_server_args(words: impl Iterator<Item = String>) -> ServerArgs {
    let words: Vec<String> = words.collect();
    let message = |flag: &str| {
        let follows = words.windows(2).find(|pair| pair[0] == flag).map(|pair| pair[1].clone());
        let joined =
            words.iter().find_map(|word| Some(word.strip_prefix(flag)?.strip_prefix('=')?.to_owned()));
        follows.or(joined)
    };
    let either = |flag: &str, variable: &str| message(flag).or_else(|| std::env::var(variable).ok());
    ServerArgs {
        project: either("--project", "WINDLASS_PROJECT"),
        url: either("--url", "WINDLASS_URL"),
        token: either("--token", "WINDLASS_TOKEN"),
        server_cert: either("--server-cert", "WINDLASS_CERT"),
    }
}

fn fetch_names(at: &ServerArgs, noun: NameKind) -> Result<Vec<String>, CliError> {
    let Some(chosen) = login::choose_running(at)? else { return Ok(Vec::new()) };
    context::block_on(async {
        let requested = async {
            let cx = Context::new(chosen)?;
            list_names(&cx, noun).await
        };
        tokio::time::timeout(ANSWER_TIMEOUT, requested).await.unwrap_or_else(|_| Ok(Vec::new()))
    })
}

async fn list_names(cx: &Context, noun: NameKind) -> Result<Vec<String>, CliError> {
    Ok(match noun {
        NameKind::Run => {
            let request = runs::ListRequest {
                project_name: Some(cx.project.clone()),
                include_jobs: false,
                limit: NAMES_MAX,
                ..runs::ListRequest::default()
            };
            let mut names: Vec<String> = cx.call::<ListRuns>(&request).await?.iter().map(run_name).collect();
            // Several runs may have had the same name.
            let mut seen = std::collections::BTreeSet::new();
            names.retain(|name| seen.insert(name.clone()));
            names
        }
        NameKind::Fleet => {
            let request = fleets::ProjectListRequest { include_imported: true };
            cx.call::<ListProjectFleets>(&request).await?.into_iter().map(|fleet| fleet.name).collect()
        }
        NameKind::Instance => {
            let request = instances::ListRequest {
                project_names: Some(vec![cx.project.clone()]),
                only_active: true,
                limit: NAMES_MAX,
                ..instances::ListRequest::default()
            };
            cx.call::<ListInstances>(&request).await?.into_iter().map(|one| one.name).collect()
        }
        NameKind::Volume => {
            cx.call::<ListProjectVolumes>(&EmptyRequest {}).await?.into_iter().map(|one| one.name).collect()
        }
        NameKind::Gateway => {
            let request = gateways::ListRequest { include_imported: false };
            cx.call::<ListGateways>(&request).await?.into_iter().map(|one| one.name).collect()
        }
        NameKind::Secret => {
            cx.call::<ListSecrets>(&EmptyRequest {}).await?.into_iter().map(|secret| secret.name).collect()
        }
        NameKind::Project => match cx.call::<ListProjects>(&projects::ListRequest::default()).await? {
            projects::ProjectList::Plain(all) | projects::ProjectList::Counted { projects: all, .. } => {
                all.into_iter().map(|project| project.project_name).collect()
            }
        },
        NameKind::Code | NameKind::Command => Vec::new(),
        NameKind::User => match cx.call::<ListUsers>(&users::ListRequest::default()).await? {
            users::UserList::Plain(all) | users::UserList::Counted { users: all, .. } => {
                all.into_iter().map(|user| user.username).collect()
            }
        },
    })
}

#[cfg(test)]
mod tests {
    use super::parse_server_args;

    #[test]
    fn completion_uses_the_project_given_on_the_command_line() {
        let typed = |line: &str| parse_server_args(line.split(' ').map(str::to_owned)).project;
        assert_eq!(typed("windlass logs --project other ").as_deref(), Some("other"));
        assert_eq!(typed("windlass logs --project=other ").as_deref(), Some("other"));
    }
}
