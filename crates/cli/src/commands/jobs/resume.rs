//! `windlass jobs resume`: runs a job that ended without success again, under its number.

use windlass_api::{managed_jobs::ResumeRequest, operations::ResumeManagedJob};

use super::{NOT_FOUND, find, launch::resolve_values, parse_job_number};
use crate::{
    cli::Format, commands::apply::parse_variable, context::Context, error::CliError, exit::Exit, output,
};

const EXAMPLES: &str = "\
Examples:
  windlass jobs resume 12                     run job 12 again; tasks that succeeded are not repeated
  windlass jobs resume --secret HF_TOKEN 12   with the value of a secret from your environment

Secrets of a job are deleted when it ends, so their values are needed again. The job keeps its number and the logs of its
earlier attempts; `windlass jobs logs 12` follows it.";

#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// Job number
    #[arg(value_name = "JOB", value_parser = parse_job_number)]
    job: i64,
    /// Secret of the job; `K` alone passes the value from your environment
    #[arg(long = "secret", value_name = "K[=V]", value_parser = parse_variable)]
    secret: Vec<(String, Option<String>)>,
}

pub(super) async fn resume(cx: &Context, args: &Args, format: Format) -> Result<Exit, CliError> {
    if find(cx, args.job).await?.is_none() {
        return Ok(NOT_FOUND);
    }
    let request = ResumeRequest { job_id: args.job, secrets: resolve_values(&args.secret, "secret")? };
    let job = cx.call::<ResumeManagedJob>(&request).await?;
    output::print_message(&format!(
        "Job {0} is queued again. Run `windlass jobs logs {0}` to follow it.",
        job.job_id
    ));
    match format {
        Format::Json | Format::Jsonl | Format::Yaml => output::print_one(format, &job, "", |_| ())?,
        Format::Name => output::print_data(&job.job_id.to_string()),
        Format::Table | Format::Wide => {}
    }
    Ok(Exit::Done)
}
