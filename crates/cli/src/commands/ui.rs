//! `windlass ui`: opens the web UI in a browser, logged in with a single-use code.

use std::process::{Command, Stdio};

use serde_json::json;
use windlass_api::{operations::CreateLoginCode, server::EmptyRequest};

use crate::{
    cli::{OutputArgs, ServerArgs},
    context,
    error::CliError,
    exit::Exit,
    output,
};

const EXAMPLES: &str = "\
Examples:
  windlass ui                      open the web UI in a browser
  windlass ui --no-browser         only print its URL
  windlass ui --url https://host:3443

The URL contains a code instead of your token. The code opens one session and expires after a minute.";

#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// Print the URL without opening a browser
    #[arg(long)]
    pub(crate) no_browser: bool,
    #[command(flatten)]
    pub(crate) at: ServerArgs,
    #[command(flatten)]
    pub(crate) output: OutputArgs,
}

pub(crate) fn run(args: &Args) -> Result<Exit, CliError> {
    context::with_context(&args.at, async |cx| {
        let code = cx.call::<CreateLoginCode>(&EmptyRequest {}).await?;
        let url = login_url(&cx.url, &code.code);
        let document = json!({ "url": url, "expires_at": code.expires_at });
        output::print_one(args.output.format, &document, &url, |_| output::print_data(&url))?;
        if !args.no_browser && !open_browser(&url) {
            output::print_message("No browser could be started; open the URL within a minute.");
        }
        Ok(Exit::Done)
    })
}

/// The code is in the fragment, which browsers do not send: no log contains it.
fn login_url(server: &str, code: &str) -> String {
    format!("{}/ui/#code={code}", server.trim_end_matches('/'))
}

/// Starts the user's browser. Returns false if there is none.
fn open_browser(url: &str) -> bool {
    let chosen = std::env::var("BROWSER").ok().filter(|browser| !browser.is_empty());
    let usual = if cfg!(target_os = "macos") { "open" } else { "xdg-open" };
    let has_display = ["DISPLAY", "WAYLAND_DISPLAY"].iter().any(|name| std::env::var_os(name).is_some());
    if chosen.is_none() && !has_display && !cfg!(target_os = "macos") {
        return false;
    }
    let program = chosen.as_deref().unwrap_or(usual);
    let started = Command::new(program)
        .arg(url)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn();
    started.is_ok()
}

#[cfg(test)]
mod tests {
    use super::login_url;

    #[test]
    fn the_code_is_in_the_fragment_of_the_url() {
        assert_eq!(login_url("http://localhost:3000", "a-b_c"), "http://localhost:3000/ui/#code=a-b_c");
        assert_eq!(login_url("https://h:3443/", "x"), "https://h:3443/ui/#code=x");
    }
}
