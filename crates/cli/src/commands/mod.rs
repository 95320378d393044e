//! One module per command.

pub(crate) mod apply;
pub(crate) mod attach;
pub(crate) mod backend;
pub(crate) mod budget;
pub(crate) mod check;
pub(crate) mod completion;
pub(crate) mod container;
pub(crate) mod contexts;
pub(crate) mod cost;
pub(crate) mod delete;
pub(crate) mod dev;
pub(crate) mod dispatch;
pub(crate) mod doctor;
pub(crate) mod event;
pub(crate) mod explain;
pub(crate) mod export;
pub(crate) mod fleet;
pub(crate) mod gateway;
pub(crate) mod help;
pub(crate) mod init;
pub(crate) mod instance;
pub(crate) mod jobs;
pub(crate) mod login;
pub(crate) mod logs;
pub(crate) mod metrics;
pub(crate) mod offer;
pub(crate) mod project;
pub(crate) mod ps;
pub(crate) mod queue;
pub(crate) mod quota;
mod resource_flags;
pub(crate) mod run;
pub(crate) mod secret;
pub(crate) mod serve;
pub(crate) mod server;
pub(crate) mod show;
pub(crate) mod ssh;
pub(crate) mod stop;
pub(crate) mod top;
pub(crate) mod ui;
pub(crate) mod usage;
pub(crate) mod user;
pub(crate) mod volume;
pub(crate) mod why;

use std::process::ExitCode;

pub(crate) use self::fleet::{format_status as instance_status, show as show_fleets};
pub(crate) use self::instance::status_reason as instance_failure;
pub(crate) use self::stop::{is_finished, wait_for_end};

use crate::{
    cli::{Cli, Command},
    output,
};

pub(crate) fn run(cli: Cli) -> ExitCode {
    let done = match cli.command {
        Command::Apply(args) => apply::run(&args),
        Command::Run(args) => run::run(&args),
        Command::Attach(args) => attach::run(&args),
        Command::Ps(args) => ps::run(&args),
        Command::Show(args) => show::run(&args),
        Command::Ssh(args) => ssh::run(&args),
        Command::Exec(args) => ssh::exec(&args),
        Command::Logs(args) => logs::run(&args),
        Command::Stop(args) => stop::run(&args),
        Command::Delete(args) => delete::run(&args),
        Command::Why(args) => why::run(&args),
        Command::Top(args) => top::run(&args),
        Command::Ui(args) => ui::run(&args),
        Command::Metrics(args) => metrics::run(&args),
        Command::Offer(args) => offer::run(&args),
        Command::Fleet(args) => fleet::run(&args),
        Command::Instance(args) => instance::run(&args),
        Command::Volume(args) => volume::run(&args),
        Command::Backend(args) => backend::run(&args),
        Command::Gateway(args) => gateway::run(&args),
        Command::Secret(args) => secret::run(&args),
        Command::Queue(args) => queue::run(&args),
        Command::Quota(args) => quota::run(&args),
        Command::Export(args) => export::run(&args),
        Command::Import(args) => export::run_import(&args),
        Command::Event(args) => event::run(&args),
        Command::Container(args) => container::run(&args),
        Command::Dispatch(args) => dispatch::run(args),
        Command::Cost(args) => cost::run(&args),
        Command::Usage(args) => usage::run(&args),
        Command::Budget(args) => budget::run(&args),
        Command::Project(args) => project::run(&args),
        Command::User(args) => user::run(&args),
        Command::Check(args) => check::run(&args),
        Command::Completion(args) => completion::run(&args),
        Command::Doctor(args) => doctor::run(&args),
        Command::Explain(args) => explain::run(&args),
        Command::Help(args) => help::run(&args),
        Command::Init(args) => init::run(&args),
        Command::Jobs(args) => jobs::run(&args),
        Command::Serve(args) => serve::run(&args),
        Command::Login(args) => login::run(&args),
        Command::Logout(args) => contexts::logout(&args),
        Command::Context(args) => contexts::run(&args),
        Command::Server(args) => server::run(*args),
        Command::Dev(args) => dev::run(&args),
    };
    let exit = done.unwrap_or_else(|problem| {
        let text = problem.text();
        if !text.is_empty() {
            output::print_message(&text);
        }
        problem.exit()
    });
    exit.into()
}
