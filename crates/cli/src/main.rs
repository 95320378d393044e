//! `windlass`: what people type.

mod cli;
mod commands;
mod exit;
mod output;

use std::process::ExitCode;

use clap::Parser as _;

fn main() -> ExitCode {
    commands::run(cli::Cli::parse())
}
