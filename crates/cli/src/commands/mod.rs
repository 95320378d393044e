//! One verb per file.

mod check;
mod dev;
mod fleet;
mod gateway;
mod login;
mod logs;
mod ps;
mod server;
mod stop;
mod volume;
mod why;

use std::process::ExitCode;

pub(crate) use self::fleet::{show as show_fleets, status as instance_status};
pub(crate) use self::stop::{confirm, is_finished, wait_for_end};

use crate::{
    apply,
    cli::{Cli, Command},
    output,
};

pub(crate) fn run(cli: Cli) -> ExitCode {
    let done = match cli.command {
        Command::Apply(args) => apply::run(&args),
        Command::Ps(args) => ps::run(&args),
        Command::Logs(args) => logs::run(&args),
        Command::Stop(args) => stop::run(&args),
        Command::Why(args) => why::run(&args),
        Command::Fleet(args) => fleet::run(&args),
        Command::Volume(args) => volume::run(&args),
        Command::Gateway(args) => gateway::run(&args),
        Command::Check(args) => check::run(&args),
        Command::Login(args) => login::run(&args),
        Command::Server(args) => server::run(args),
        Command::Dev(args) => dev::run(&args),
    };
    let exit = done.unwrap_or_else(|problem| {
        let text = problem.text();
        if !text.is_empty() {
            output::say(&text);
        }
        problem.exit()
    });
    exit.into()
}
