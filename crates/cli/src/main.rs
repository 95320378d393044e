//! The `windlass` command line.

mod cli;
mod commands;
mod complete;
mod context;
mod error;
mod exit;
mod fd_limit;
#[cfg(test)]
mod flag_table;
mod follow;
mod home;
mod local_server;
mod login;
mod output;
#[cfg(test)]
mod reference;

use std::process::ExitCode;

use clap::Parser as _;

/// The server allocates many small strings on few threads, where the C library's allocator spends a fifth of the time
/// on its own lists.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> ExitCode {
    if let Some(exit) = complete::complete_if_requested() {
        return exit;
    }
    match cli::Cli::try_parse_from(cli::move_server_flags(std::env::args_os())) {
        Ok(cli) => commands::run(cli),
        Err(error) => error::report_usage_error(&error).into(),
    }
}
