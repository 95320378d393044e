//! `windlass login`: nothing is written before the server has accepted the token.

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
    exit::Exit,
    home::Home,
    login::{self, DEFAULT_PROJECT, Login, ServerTarget},
    output,
    problem::CliError,
};

const EXAMPLES: &str = "\
Examples:
  windlass login --url http://localhost:3000                   asks for the token
  windlass login --url http://host:3000 --token - < token.txt
  windlass login --url http://host:3000 --token - --project ml
  windlass login --url https://host:3443 --server-cert cert.pem
  windlass login --name lab --url http://host:3000             one of several: `windlass context` lists them
  curl -H \"Authorization: Bearer $(windlass login --show-token)\" http://host:3000/proxy/services/main/web/

Nothing is written before the server has accepted the token. `windlass logout` is the way back.";

#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// Address of the server
    #[arg(long, value_name = "URL", required_unless_present = "show_token")]
    pub(crate) url: Option<String>,
    /// Print the token that commands use now, for `curl` and other programs; nothing is written
    #[arg(long, conflicts_with_all = ["url", "project"])]
    pub(crate) show_token: bool,
    /// Your token; `-` reads it from standard input, and without it a terminal is asked
    #[arg(long, value_name = "TOKEN", env = "WINDLASS_TOKEN", hide_env_values = true)]
    pub(crate) token: Option<String>,
    /// Project to work in; the only one, or `main`, if not given
    #[arg(long, value_name = "PROJECT")]
    pub(crate) project: Option<String>,
    /// Certificate that an `https` server is known by, as PEM; what this machine trusts, if not given
    #[arg(long, env = "WINDLASS_CERT", value_name = "FILE", hide_env_values = true)]
    pub(crate) server_cert: Option<String>,
    /// What `windlass context` calls the server; made of its address, if not given
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
            output::data(&cx.token);
            Ok(Exit::Done)
        });
    }
    if let Some(name) = args.name.as_deref().filter(|name| !login::is_context_name(name)) {
        return Err(CliError::usage(format!("`{name}` cannot be the name of a context"))
            .hint("1 to 60 letters, digits, `.`, `-` and `_`, a letter or digit first; `local` is taken"));
    }
    let home = Home::find()?;
    let token = match &args.token {
        Some(given) => token(given)?,
        None => output::prompt_secret("Token", "--token -")?,
    };
    let url = args.url.as_deref().unwrap_or_default().trim_end_matches('/').to_owned();
    let login = context::block_on(check_token(args, url, token))?;
    login.0.write(&home)?;
    output::print_message(&format!(
        "Logged in at {} as `{}`, project `{}` (written to {}).",
        login.0.url,
        login.1,
        login.0.project.as_deref().unwrap_or(DEFAULT_PROJECT),
        home.login_file().display()
    ));
    // The token stays where it was written.
    let document = json!({ "url": login.0.url, "user": login.1, "project": login.0.project });
    let project = login.0.project.as_deref().unwrap_or(DEFAULT_PROJECT);
    output::print_one(args.output.format, &document, project, |_| {})?;
    Ok(Exit::Done)
}

/// On the command line others can see it: `-` reads it from standard input.
fn token(given: &str) -> Result<String, CliError> {
    let mut token = given.to_owned();
    if given == "-" {
        token.clear();
        std::io::stdin()
            .lock()
            .read_to_string(&mut token)
            .map_err(|error| CliError::from_error("read the token", &error))?;
    }
    let token = token.trim().to_owned();
    if token.is_empty() || token.contains(|letter: char| letter.is_control()) {
        return Err(CliError::usage("the token is empty or has a line break in it"));
    }
    Ok(token)
}

async fn check_token(args: &Args, url: String, token: String) -> Result<(Login, String), CliError> {
    let project = args.project.clone().unwrap_or_default();
    let certificate = login::certificate(args.server_cert.as_deref())?;
    let chosen =
        ServerTarget { url: url.clone(), token: token.clone(), certificate: certificate.clone(), project };
    let context = Context::new(chosen)?;
    let user = context.call::<ReadMyUser>(&EmptyRequest {}).await?;
    let project = match &args.project {
        Some(name) => {
            // Refused with the names that there are.
            context.call::<ReadProject>(&EmptyRequest {}).await?;
            Some(name.clone())
        }
        None => default_project(&context.client).await.map_err(|error| CliError::call(&url, &error))?,
    };
    Ok((Login { url, token, project, certificate, name: args.name.clone() }, user.username))
}

/// `main` if there is one, else the only project, else none: commands then want `--project`.
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
