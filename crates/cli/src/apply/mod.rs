//! `windlass apply`: reads a configuration, shows what it would do, asks, does it, and stays until the end.

mod archive;
mod attach;
mod fleet;
mod git;
mod keys;
mod others;
mod outcome;
mod plan;
mod run;
mod source;
mod tail;

use windlass_model::config::Configuration;

pub(crate) use self::{
    outcome::{hint, indented, reasons},
    plan::{refusals, resources},
    tail::{Copied, Pace, Pages, Tail},
};
use crate::{
    cli::{ApplyArgs, Format},
    commands::confirm,
    context,
    exit::Exit,
    output,
    problem::Problem,
};

/// Whatever fails here is ours: codes below 200 belong to the job.
pub(crate) fn run(args: &ApplyArgs) -> Result<Exit, Problem> {
    apply(args).map_err(Problem::ours)
}

fn apply(args: &ApplyArgs) -> Result<Exit, Problem> {
    if !args.yes && !output::can_ask() {
        return Err(Problem::misuse("nobody is there to answer whether to go on").hint("`-y` says yes"));
    }
    // All that can be found wrong without a server is found before one is started.
    let source = source::read(args)?;
    if source.configuration.run().is_some() && !args.detach && args.output.format != Format::Table {
        return Err(Problem::misuse("standard output belongs to the job while it is followed")
            .hint("`-o` goes together with `-d`"));
    }
    context::with(&args.at, async |cx| match &source.configuration {
        Configuration::Task(_) | Configuration::Service(_) | Configuration::DevEnvironment(_) => {
            run::apply(cx, args, &source).await
        }
        Configuration::Fleet(config) => fleet::apply(cx, args, &source, config).await,
        Configuration::Volume(_) => others::volume(cx, args, &source).await,
        Configuration::Gateway(_) => others::gateway(cx, args, &source).await,
    })
}

/// Asks unless `-y` answered already.
fn agreed(args: &ApplyArgs, question: &str) -> Result<bool, Problem> {
    if args.yes || confirm(question)? {
        return Ok(true);
    }
    output::say("Nothing was changed.");
    Ok(false)
}
