//! Development tasks. `cargo xtask help` lists them.
//!
//! `test` is what continuous integration runs and what a developer runs before a push. It installs its requirements,
//! runs every level in order and never skips one silently.

mod args;
mod bench;
mod codegen;
mod core_usage;
mod demo;
mod dist;
mod docs;
mod elf;
mod engine;
mod faults;
mod fuzz;
mod junit;
mod lxd_image;
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
mod web;
mod workspace;

use std::process::ExitCode;

use anyhow::Result;

use crate::{args::Args, workspace::Workspace};

const HELP: &str = "\
usage: cargo xtask COMMAND

  demo                       build both binaries, run a task on this machine and show the next steps
  test [--fast | --nightly] [--changed | --since REV] [--only NAME]… [--web] [--timings] [-j N]
                             install the requirements, then run every level of continuous integration
                             --fast: unit and SQLite tests of every crate, without daemons and without root
                             --changed: only crates that changed since `main`, and those that depend on them
                             --nightly: also the slow tests, every fault row five times, and 5,000 new seeds
                             --only: only tests whose name contains NAME, with the services that they need
                             --web: only the files of the web UI, and its pages in a browser
                             --timings: show where the time was spent; -j: number of parallel tests
  tidy                       check the rules of the repository
  sim [--seeds N] [--from K] [--jobs J] [--keep DIR] [--queue | --shared]
                             run the simulation; SEED=n replays one seed
                             --keep: keep the databases of seeds with violations in DIR
                             --queue: simulate the container queue and its dispatchers
                             --shared: simulate several projects that share hosts
  faults [--row F7]… [--times N] [--jobs J] [--seed S] [--long] [--list] [--json | --markdown]
                             run the fault matrix, with real processes, hosts and engines
  bench NAME [--profile P] [ARG…]
                             run a benchmark with the services that it needs: engine, api, cli, agent, containers, runs, cost,
                             isolation, dispatch, load, jobs, spot, sharing, reclaim, growth, proxy, ui, report or all
  fuzz api [--cases N] [--seed K] [--as admin|user|both]
                             send requests generated from the OpenAPI document to a private server
  codegen [--check]          regenerate schema, transition tables and OpenAPI; --check: only compare
  web [--check]              build the files of the web UI; --check: only compare them with `web/dist`
  docs [--check]             build the documentation site in target/docs; --check: only check links, anchors and metrics
  record                     record the first five minutes in a terminal, for the documentation
  release                    build both binaries in target/dist, optimised and stripped, with separate symbols
  dist [--profile NAME | --binaries DIR] [--sign KEY] [--try]
                             make archive, Debian package, container image, bill of materials and checksums in target/dist
                             --binaries: package the binaries in DIR; --sign: sign the checksums with an SSH key
                             --try: also install, upgrade and remove the package in a Debian made with debootstrap
  deny                       check dependencies for known vulnerabilities, with cargo-deny if it is installed
  texts [WORD]               list every text that users or operators can see; only those with WORD
  sbom                       list the crates of both binaries, as CycloneDX JSON";

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
        Some("dist") => dist::run(&workspace, args),
        Some("docs") => docs::run(&workspace, args),
        Some("record") => args.finish().and_then(|()| record::run(&workspace)),
        Some("deny") => args.finish().and_then(|()| tidy::advisories::run_cargo_deny(&workspace)),
        Some("texts") => texts::run(&workspace, args),
        Some("web") => web::run(&workspace, args),
        Some("sbom") => args.finish().and_then(|()| sbom::run(&workspace)),
        Some("help") => {
            output::print_result(HELP);
            return Ok(ExitCode::SUCCESS);
        }
        Some(other) => {
            output::print_message(&format!("error: unknown command `{other}`\n\n{HELP}"));
            return Ok(ExitCode::from(2));
        }
        None => {
            output::print_message(HELP);
            return Ok(ExitCode::from(2));
        }
    }?;
    Ok(ExitCode::SUCCESS)
}
