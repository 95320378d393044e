//! `windlass login`: stores the login only after the server has accepted the token.

use std::io::Read as _;

use serde_json::json;
use windlass_api::{
    client::{ApiClient, CallError},
    operations::{ListProjects, ReadMyUser, ReadProject},
    projects,
    server::EmptyRequest,
};

use crate::{
    cli::{OutputArgs, ServerArgs},
    context::{self, Context},
    error::CliError,
    exit::Exit,
    home::Home,
    login::{self, DEFAULT_PROJECT, Login, ServerTarget},
    output,
};

const EXAMPLES: &str = "\
Examples:
  windlass login --url http://localhost:3000                   prompt for the token
  windlass login --url http://host:3000 --token - < token.txt
  windlass login --url http://host:3000 --token - --project ml
  windlass login --url https://host:3443 --server-cert cert.pem
  windlass login --name lab --url http://host:3000             one of several servers: `windlass context` lists them
  curl -H \"Authorization: Bearer $(windlass login --show-token)\" http://host:3000/proxy/services/main/web/

Nothing is written until the server has accepted the token. `windlass logout` removes the login.";

#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// URL of the server
    #[arg(long, value_name = "URL", required_unless_present = "show_token")]
    pub(crate) url: Option<String>,
    /// Print the current token, for `curl` and other programs, and exit
    #[arg(long, conflicts_with_all = ["url", "project"])]
    pub(crate) show_token: bool,
    /// Your token; `-` reads it from standard input. Prompts for it by default
    #[arg(long, value_name = "TOKEN", env = "WINDLASS_TOKEN", hide_env_values = true)]
    pub(crate) token: Option<String>,
    /// Project to use; defaults to `main`, or to the only project
    #[arg(long, value_name = "PROJECT")]
    pub(crate) project: Option<String>,
    /// Certificate of an `https` server, in PEM format; defaults to the trust store of this machine
    #[arg(long, env = "WINDLASS_CERT", value_name = "FILE", hide_env_values = true)]
    pub(crate) server_cert: Option<String>,
    /// Name of the server in `windlass context`; derived from its URL by default
    #[arg(long, value_name = "NAME", conflicts_with = "show_token")]
    pub(crate) name: Option<String>,
    #[command(flatten)]
    pub(crate) output: OutputArgs,
}

pub(crate) fn run(args: &Args) -> Result<Exit, CliError> {
    if args.show_token {
        let at = ServerArgs {
            project: None,
            url: std::env::var("WINDLASS_URL").ok(),
            token: args.token.clone(),
            server_cert: args.server_cert.clone(),
        };
        return context::with_context(&at, async |cx| {
            output::print_data(&cx.token);
            Ok(Exit::Done)
        });
    }
    if let Some(name) = args.name.as_deref().filter(|name| !login::is_context_name(name)) {
        return Err(CliError::usage(format!("invalid context name `{name}`"))
            .hint("use 1 to 60 letters, digits, `.`, `-` and `_`, starting with a letter or digit; `local` is reserved"));
    }
    let home = Home::find()?;
    let token = match &args.token {
        Some(given) => read_token(given)?,
        None => output::prompt_secret("Token", "--token -")?,
    };
    let url = args.url.as_deref().unwrap_or_default().trim_end_matches('/').to_owned();
    let login = context::block_on(check_token(args, url, token))?;
    login.0.write(&home)?;
    output::print_message(&format!(
        "Logged in to {} as `{}`, project `{}` (written to {}).",
        login.0.url,
        login.1,
        login.0.project.as_deref().unwrap_or(DEFAULT_PROJECT),
        home.login_file().display()
    ));
    // The token is not printed.
    let document = json!({ "url": login.0.url, "user": login.1, "project": login.0.project });
    let project = login.0.project.as_deref().unwrap_or(DEFAULT_PROJECT);
    output::print_one(args.output.format, &document, project, |_| {})?;
    Ok(Exit::Done)
}

/// Reads the token from standard input if it is `-`, because other users can see command lines.
fn read_token(given: &str) -> Result<String, CliError> {
    let mut token = given.to_owned();
    if given == "-" {
        token.clear();
        std::io::stdin()
            .lock()
            .read_to_string(&mut token)
            .map_err(|error| CliError::from_error("failed to read the token", &error))?;
    }
    let token = token.trim().to_owned();
    if token.is_empty() || token.contains(|letter: char| letter.is_control()) {
        return Err(CliError::usage("the token is empty or contains a control character"));
    }
    Ok(token)
}

async fn check_token(args: &Args, url: String, token: String) -> Result<(Login, String), CliError> {
    let project = args.project.clone().unwrap_or_default();
    let certificate = login::read_certificate(args.server_cert.as_deref())?;
    let chosen =
        ServerTarget { url: url.clone(), token: token.clone(), certificate: certificate.clone(), project };
    let context = Context::new(chosen)?;
    let user = context.call::<ReadMyUser>(&EmptyRequest {}).await?;
    let project = match &args.project {
        Some(name) => {
            // The error lists the existing projects.
            context.call::<ReadProject>(&EmptyRequest {}).await?;
            Some(name.clone())
        }
        None => default_project(&context.client).await.map_err(|error| CliError::call(&url, &error))?,
    };
    Ok((Login { url, token, project, certificate, name: args.name.clone() }, user.username))
}

/// Returns `main` if it exists, else the only project, else none: commands then require `--project`.
async fn default_project(client: &ApiClient) -> Result<Option<String>, CallError> {
    let request = projects::ListRequest { include_not_joined: false, ..projects::ListRequest::default() };
    let all = match client.call::<ListProjects>(&[], &request).await? {
        projects::ProjectList::Plain(all) | projects::ProjectList::Counted { projects: all, .. } => all,
    };
    let mut names: Vec<String> = all.into_iter().map(|project| project.project_name).collect();
    if names.iter().any(|name| name == DEFAULT_PROJECT) {
        return Ok(Some(DEFAULT_PROJECT.to_owned()));
    }
    Ok(if names.len() == 1 { names.pop() } else { None })
}
