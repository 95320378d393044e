//! `windlass`: what people type.

mod cli;
mod commands;
mod context;
mod exit;
mod home;
mod local;
mod login;
mod open_files;
mod output;
mod problem;

use std::process::ExitCode;

use clap::Parser as _;

fn main() -> ExitCode {
    commands::run(cli::Cli::parse())
}
