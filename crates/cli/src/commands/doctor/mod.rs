//! `windlass doctor`: diagnoses this machine and its connection to the server, and suggests fixes.
//!
//! Changes nothing and starts nothing. `look` collects facts, `judge` interprets them.

mod evaluate;
mod probe;

use self::evaluate::{Check, Severity};
use crate::{
    cli::{OutputArgs, ServerArgs},
    context,
    error::CliError,
    exit::Exit,
    output::{
        self, ListView, format,
        style::{Colour, Style},
        table::{Cell, Table},
    },
};

const EXAMPLES: &str = "\
Examples:
  windlass doctor            run all checks and suggest fixes
  windlass doctor -o json    print the results as JSON

The exit code is 1 if a problem prevents windlass from working, else 0.";

#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    #[command(flatten)]
    at: ServerArgs,
    #[command(flatten)]
    output: OutputArgs,
}

pub(crate) fn run(args: &Args) -> Result<Exit, CliError> {
    let seen = context::block_on(async { Ok(probe::probe_all(&args.at).await) })?;
    let checks = evaluate::evaluate_all(&seen);
    let name = |check: &Check| check.name.to_owned();
    ListView { project: None, kind: "checks", name, none: "" }
        .print(&checks, args.output.format, |_| table(&checks))?;
    if matches!(args.output.format, crate::cli::Format::Table | crate::cli::Format::Wide) {
        print_fixes(&checks);
    }
    let bad = checks.iter().any(|check| check.grade == Severity::Bad);
    Ok(if bad { Exit::Failed } else { Exit::Done })
}

fn table(checks: &[Check]) -> Table {
    let mut table = Table::new(["CHECK", "STATUS", "FOUND"]);
    for check in checks {
        let (word, colour) = match check.grade {
            Severity::Passed => ("ok", Colour::Green),
            Severity::Note => ("note", Colour::Yellow),
            Severity::Bad => ("bad", Colour::Red),
        };
        table.row(vec![check.name.into(), Cell::coloured(word, colour), check.found.as_str().into()]);
    }
    table
}

fn print_fixes(checks: &[Check]) {
    let style = Style::stderr();
    let fixes: Vec<&Check> = checks.iter().filter(|check| check.fix.is_some()).collect();
    for check in &fixes {
        let fix = output::printable(check.fix.as_deref().unwrap_or_default());
        output::print_message(&format!("\n{}: {fix}", style.paint(Colour::Bold, check.name)));
    }
    let bad = checks.iter().filter(|check| check.grade == Severity::Bad).count();
    if bad > 0 {
        output::print_message(&format!("\nFound {}.", format::count(bad, "problem")));
    } else if fixes.is_empty() {
        output::print_message("\nNo problems found.");
    }
}
