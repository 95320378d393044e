//! `windlass explain CODE`: the meaning of an error, without a server or a network.

use serde::Serialize;

use crate::{
    cli::OutputArgs,
    context::closest_name,
    error::{CliError, ErrorCode},
    exit::Exit,
    output::{self, ListView, table::Table},
};

const EXAMPLES: &str = "\
Examples:
  windlass explain W010    show what `error[W010]` means, and what to do about it
  windlass explain         list all codes";

#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// Error code, such as `W010` or `C011`; defaults to all codes
    #[arg(value_name = "CODE")]
    code: Option<String>,
    #[command(flatten)]
    output: OutputArgs,
}

/// The pages of `docs/errors`, compiled into the program.
macro_rules! pages {
    ($($code:literal)*) => {
        [$(Page { code: $code, text: include_str!(concat!("../../../../docs/errors/", $code, ".md")) }),*]
    };
}

static PAGES: [Page; 32] = pages!(
    "C001" "C002" "C003" "C004" "C010" "C011" "C012" "C013" "C014" "C015" "C016" "C017" "C018"
    "W001" "W002" "W003" "W010" "W011" "W012" "W013" "W014" "W015" "W016" "W017" "W018"
    "W020" "W021" "W030" "W031" "W032" "W033" "W034"
);

#[derive(Serialize)]
struct Page {
    code: &'static str,
    text: &'static str,
}

impl Page {
    /// `unreachable`, from the heading `# W010: unreachable`.
    fn name(&self) -> &'static str {
        let heading = self.text.lines().next().unwrap_or_default();
        heading.split_once(": ").map_or("", |(_, name)| name)
    }

    /// First sentence under the first heading.
    fn summary(&self) -> String {
        let body = self.text.split_once("## What happened\n\n").map_or("", |(_, body)| body);
        let paragraph = body.split("\n\n").next().unwrap_or_default().replace('\n', " ");
        let end = paragraph.find(". ").map_or(paragraph.len(), |at| at + 1);
        paragraph[..end].to_owned()
    }
}

pub(crate) fn run(args: &Args) -> Result<Exit, CliError> {
    let format = args.output.format;
    let Some(wanted) = &args.code else {
        let name = |page: &Page| page.code.to_owned();
        ListView { project: None, kind: "errors", name, none: "" }.print(&PAGES, format, |_| table())?;
        return Ok(Exit::Done);
    };
    let code = wanted.trim().to_ascii_uppercase();
    let page = PAGES.iter().find(|page| page.code == code).ok_or_else(|| unknown_code(wanted, &code))?;
    output::print_one(format, page, page.code, |_| output::print_data(page.text.trim_end()))?;
    Ok(Exit::Done)
}

pub(crate) fn list_codes() -> impl Iterator<Item = &'static str> {
    PAGES.iter().map(|page| page.code)
}

fn table() -> Table {
    let mut table = Table::new(["CODE", "NAME", "WHAT HAPPENED"]);
    for page in &PAGES {
        table.row(vec![page.code.into(), page.name().into(), page.summary().into()]);
    }
    table
}

fn unknown_code(wanted: &str, code: &str) -> CliError {
    let problem = CliError::usage(format!("unknown error code `{wanted}`")).code(ErrorCode::UnknownName);
    match closest_name(code, PAGES.iter().map(|page| page.code)) {
        Some(near) => problem.hint(format!("did you mean `{near}`?")),
        None => problem.hint("run `windlass explain` to list all codes"),
    }
}

#[cfg(test)]
mod tests {
    use std::{collections::BTreeSet, path::Path};

    use super::{ErrorCode, PAGES};

    #[test]
    fn every_error_code_has_a_page_and_a_row_in_the_list() {
        let configurations = windlass_model::config::error::Code::ALL.map(|code| (code.id(), code.name()));
        let ours = ErrorCode::ALL.map(|code| (code.id(), code.name()));
        let codes: BTreeSet<_> = configurations.into_iter().chain(ours).collect();
        let pages: BTreeSet<_> = PAGES.iter().map(|page| (page.code, page.name())).collect();
        assert_eq!(pages, codes);
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/errors");
        let list = std::fs::read_to_string(folder.join("README.md")).unwrap();
        for page in &PAGES {
            let (code, name) = (page.code, page.name());
            let row = format!("| [{code}]({code}.md) | {name} | ");
            assert!(list.contains(&row), "`docs/errors/README.md` has no row `{row}`");
            for heading in ["## What happened", "## Why", "## What to do"] {
                assert!(page.text.contains(heading), "{code} has no `{heading}`");
            }
            assert!(page.text.contains("```sh\n"), "{code} names no command to run");
            assert!(page.summary().ends_with('.'), "{code}: {}", page.summary());
        }
        let files = std::fs::read_dir(folder).unwrap().count();
        assert_eq!(files, PAGES.len() + 1, "a page of `docs/errors` is not in the program");
    }
}
