//! `windlass explain CODE`: the meaning of an error, without a server or a network.

use windlass_model::error_pages::{ERROR_PAGES, ErrorPage};

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

pub(crate) fn run(args: &Args) -> Result<Exit, CliError> {
    let format = args.output.format;
    let Some(wanted) = &args.code else {
        let name = |page: &ErrorPage| page.code.to_owned();
        ListView { project: None, kind: "errors", name, none: "" }
            .print(&ERROR_PAGES, format, |_| table())?;
        return Ok(Exit::Done);
    };
    let code = wanted.trim().to_ascii_uppercase();
    let page = ErrorPage::find(&code).ok_or_else(|| unknown_code(wanted, &code))?;
    output::print_one(format, page, page.code, |_| output::print_data(page.text.trim_end()))?;
    Ok(Exit::Done)
}

pub(crate) fn list_codes() -> impl Iterator<Item = &'static str> {
    ERROR_PAGES.iter().map(|page| page.code)
}

fn table() -> Table {
    let mut table = Table::new(["CODE", "NAME", "WHAT HAPPENED"]);
    for page in &ERROR_PAGES {
        table.row(vec![page.code.into(), page.name().into(), page.summary().into()]);
    }
    table
}

fn unknown_code(wanted: &str, code: &str) -> CliError {
    let problem = CliError::usage(format!("unknown error code `{wanted}`")).code(ErrorCode::UnknownName);
    match closest_name(code, ERROR_PAGES.iter().map(|page| page.code)) {
        Some(near) => problem.hint(format!("did you mean `{near}`?")),
        None => problem.hint("run `windlass explain` to list all codes"),
    }
}

#[cfg(test)]
mod tests {
    use std::{collections::BTreeSet, path::Path};

    use super::{ERROR_PAGES, ErrorCode};

    #[test]
    fn every_error_code_has_a_page_and_a_row_in_the_list() {
        let configurations = windlass_model::config::error::Code::ALL.map(|code| (code.id(), code.name()));
        let ours = ErrorCode::ALL.map(|code| (code.id(), code.name()));
        let codes: BTreeSet<_> = configurations.into_iter().chain(ours).collect();
        let pages: BTreeSet<_> = ERROR_PAGES.iter().map(|page| (page.code, page.name())).collect();
        assert_eq!(pages, codes);
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/errors");
        let list = std::fs::read_to_string(folder.join("README.md")).unwrap();
        for page in &ERROR_PAGES {
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
        assert_eq!(files, ERROR_PAGES.len() + 1, "a page of `docs/errors` is not in the program");
    }
}
