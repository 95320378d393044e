//! One verb per file.

mod check;
mod server;

use std::process::ExitCode;

use crate::{
    cli::{Cli, Command},
    exit::Exit,
    output,
};

pub(crate) fn run(cli: Cli) -> ExitCode {
    let done = match cli.command {
        Command::Server(args) => server::run(args),
        Command::Check(args) => check::run(&args),
    };
    done.unwrap_or_else(|problem| {
        output::error(&problem);
        Exit::Failed
    })
    .into()
}
