//! `windlass doctor`: looks at this machine and at the way to the server, and says how to mend what is wrong.
//!
//! It changes nothing and starts nothing. `look` reads the world, `judge` decides what it means.

mod judge;
mod look;

use self::judge::{Check, Grade};
use crate::{
    cli::{At, Output},
    context,
    exit::Exit,
    output::{
        self, List,
        style::{Colour, Style},
        table::{Cell, Table},
        words,
    },
    problem::Problem,
};

const EXAMPLES: &str = "\
Examples:
  windlass doctor            every check, and a fix for each that is not well
  windlass doctor -o json    the same, for a report

The exit code is 1 when something keeps windlass from working, else 0.";

#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    #[command(flatten)]
    at: At,
    #[command(flatten)]
    output: Output,
}

pub(crate) fn run(args: &Args) -> Result<Exit, Problem> {
    let seen = context::block_on(async { Ok(look::around(&args.at).await) })?;
    let checks = judge::all(&seen);
    let name = |check: &Check| check.name.to_owned();
    List { project: None, kind: "checks", name, none: "" }
        .print(&checks, args.output.format, |_| table(&checks))?;
    if matches!(args.output.format, crate::cli::Format::Table | crate::cli::Format::Wide) {
        tell_fixes(&checks);
    }
    let bad = checks.iter().any(|check| check.grade == Grade::Bad);
    Ok(if bad { Exit::Failed } else { Exit::Done })
}

fn table(checks: &[Check]) -> Table {
    let mut table = Table::new(["CHECK", "STATUS", "FOUND"]);
    for check in checks {
        let (word, colour) = match check.grade {
            Grade::Well => ("ok", Colour::Green),
            Grade::Note => ("note", Colour::Yellow),
            Grade::Bad => ("bad", Colour::Red),
        };
        table.row(vec![check.name.into(), Cell::coloured(word, colour), check.found.as_str().into()]);
    }
    table
}

fn tell_fixes(checks: &[Check]) {
    let style = Style::stderr();
    let fixes: Vec<&Check> = checks.iter().filter(|check| check.fix.is_some()).collect();
    for check in &fixes {
        let fix = output::printable(check.fix.as_deref().unwrap_or_default());
        output::say(&format!("\n{}: {fix}", style.paint(Colour::Bold, check.name)));
    }
    let bad = checks.iter().filter(|check| check.grade == Grade::Bad).count();
    if bad > 0 {
        output::say(&format!("\n{} in the way.", words::count(bad, "problem")));
    } else if fixes.is_empty() {
        output::say("\nAll is well.");
    }
}
