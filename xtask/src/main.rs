//! Development tasks. `cargo xtask help` lists them.
//!
//! `test` is what continuous integration runs and what a developer runs before a push. It installs its requirements,
//! runs every level in order and never skips one silently.

mod args;
mod bench;
mod codegen;
mod core_usage;
mod demo;
mod elf;
mod engine;
mod faults;
mod fuzz;
mod junit;
mod output;
mod postgres;
mod process;
mod record;
mod release;
mod sbom;
mod setup;
mod sim;
mod test;
mod texts;
mod tidy;
mod venv;
mod workspace;

use std::process::ExitCode;

use anyhow::Result;

use crate::{args::Args, workspace::Workspace};

const HELP: &str = "\
usage: cargo xtask COMMAND

  demo                       build both binaries, run a task on this machine, say what to try next
  test [--fast | --nightly] [--changed | --since REV] [--only NAME]… [--timings] [-j N]
                             set up this machine, then run every level that continuous integration runs
                             --fast: unit and SQLite tests of every crate, without daemons and without root
                             --changed: only crates that changed since `main`, and those that depend on them
                             --nightly: with long waits, every fault row five times, and 5,000 new seeds
                             --only: only tests whose name contains NAME, with what they need beside them
                             --timings: where the time went; -j: tests at once
  tidy                       the rules a machine can check, alone
  sim [--seeds N] [--from K] [--jobs J] [--keep DIR] [--queue]
                             the simulation; SEED=n replays one seed; the
                             databases of violating seeds are kept in DIR;
                             --queue: the container queue and its dispatchers
  faults [--row F7]… [--times N] [--jobs J] [--seed S] [--long] [--list] [--json | --markdown]
                             the fault matrix: real processes, hosts and engines, and what goes wrong
  bench NAME [--profile P] [ARG…]
                             engine, api, cli, agent, runs, dispatch, proxy, load, jobs, spot, growth, report or all,
                             with what it needs beside it
  fuzz api [--cases N] [--seed K] [--as admin|user|both]
                             requests made from the OpenAPI document, as admin and as user, to a server of its own
  codegen [--check]          regenerate schema, transition tables and OpenAPI; --check: only compare
  record                     draw the first five minutes anew, from a run in a terminal
  release                    both binaries, optimised and stripped, with their symbols beside them, in target/dist
  deny                       known weaknesses of what is linked in, and cargo-deny where it is installed
  texts [WORD]               every text that users or operators can see, with its place; only those with WORD
  sbom                       the crates both binaries are made of, as CycloneDX JSON";

fn main() -> ExitCode {
    match run() {
        Ok(code) => code,
        Err(error) => {
            output::print_message(&format!("error: {error:#}"));
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<ExitCode> {
    let mut args = Args::new(std::env::args().skip(1));
    if args.take_flag("--help") || args.take_flag("-h") {
        output::print_result(HELP);
        return Ok(ExitCode::SUCCESS);
    }
    let command = args.word();
    let workspace = Workspace::find()?;
    match command.as_deref() {
        Some("demo") => args.finish().and_then(|()| demo::run(&workspace)),
        Some("test") => test::run(&workspace, args),
        Some("tidy") => args.finish().and_then(|()| tidy::run(&workspace)),
        Some("sim") => sim::run(&workspace, args),
        Some("faults") => faults::run(&workspace, args),
        Some("bench") => bench::run(&workspace, args),
        Some("fuzz") => fuzz::run(&workspace, args),
        Some("codegen") => {
            let check = args.take_flag("--check");
            args.finish().and_then(|()| codegen::run(&workspace, check))
        }
        Some("release") => args.finish().and_then(|()| release::run(&workspace)),
        Some("record") => args.finish().and_then(|()| record::run(&workspace)),
        Some("deny") => args.finish().and_then(|()| tidy::advisories::deny(&workspace)),
        Some("texts") => texts::run(&workspace, args),
        Some("sbom") => args.finish().and_then(|()| sbom::run(&workspace)),
        Some("help") => {
            output::print_result(HELP);
            return Ok(ExitCode::SUCCESS);
        }
        Some(other) => {
            output::print_message(&format!("error: no command `{other}`\n\n{HELP}"));
            return Ok(ExitCode::from(2));
        }
        None => {
            output::print_message(HELP);
            return Ok(ExitCode::from(2));
        }
    }?;
    Ok(ExitCode::SUCCESS)
}
