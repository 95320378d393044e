//! `windlass jobs launch FILE…`: launches one job for each file, and follows it to its end unless detached.

use std::{
    collections::BTreeMap,
    io::Read as _,
    path::{Path, PathBuf},
};

use windlass_api::{
    managed_jobs::{LaunchRequest, LaunchResponse, TaskFile},
    operations::{CheckManagedJobs, LaunchManagedJobs, ReadProject},
    server::EmptyRequest,
};
use windlass_model::{
    config,
    managed_job::plan::{ManagedJobPlan, TaskBody},
    skypilot::{self, CommandLineValues, SecretValue},
};

use super::{exit_for, find, follow::JobFollower, logs::LogSelection, resources};
use crate::{
    cli::{Format, ServerArgs},
    commands::apply::{archive, parse_variable},
    context::{self, Context},
    error::{CliError, ErrorCode},
    exit::Exit,
    output::{self, format},
};

const EXAMPLES: &str = "\
Examples:
  windlass jobs launch train.yaml                      launch after a confirmation, and follow the output
  windlass jobs launch -y -d train.yaml                return when the server has accepted the job
  windlass jobs launch -y -n try --env LR=0.1 --secret TOKEN train.yaml
  windlass jobs launch -y -d --num-jobs 100 sweep.yaml
  windlass jobs launch -y --gpus H100:8 --use-spot --deadline 48h train.yaml
  windlass jobs launch -y hostname                     run a command without a task file
  windlass jobs launch -y 'python -c \"print(1)\"'      a single argument is a shell command line
  windlass jobs launch -y -- python train.py --lr 1    several arguments are a program and its arguments";

/// Maximum size of a task file.
const FILE_BYTES_MAX: u64 = 1 << 20;

#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// Task files, one job for each; or a command, if none of the arguments is a file
    #[arg(required = true, value_name = "FILE")]
    files: Vec<String>,
    /// Name of the job, overriding the one in the file
    #[arg(short, long)]
    name: Option<String>,
    /// Environment variable; `K` alone passes the value from your environment
    #[arg(short, long = "env", value_name = "K[=V]", value_parser = parse_variable)]
    env: Vec<(String, Option<String>)>,
    /// File with environment variables, one `K=V` per line
    #[arg(long, value_name = "FILE")]
    env_file: Option<PathBuf>,
    /// Secret; `K` alone passes the value from your environment
    #[arg(long = "secret", value_name = "K[=V]", value_parser = parse_variable)]
    secret: Vec<(String, Option<String>)>,
    /// Priority from -1000 to 1000; higher priorities are launched first
    #[arg(long, value_name = "N", allow_hyphen_values = true, value_parser = clap::value_parser!(i32).range(-1000..=1000))]
    priority: Option<i32>,
    /// Number of jobs for each file; either all or none are created
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=10_000))]
    num_jobs: Option<u32>,
    #[command(flatten)]
    resources: resources::JobResourceArgs,
    /// Return as soon as the server has accepted the job
    #[arg(short, long)]
    detach: bool,
    /// Skip the confirmation prompt
    #[arg(short, long)]
    yes: bool,
}

/// A valid task file.
struct LaunchFile {
    text: String,
    plan: ManagedJobPlan,
    /// Base directory of relative paths in tasks of the windlass format.
    dir: PathBuf,
}

pub(super) fn run(args: &Args, at: &ServerArgs, format: Format) -> Result<Exit, CliError> {
    let envs = resolve_envs(args)?;
    let secrets = resolve_values(&args.secret, "secret")?;
    let mut sources = Vec::new();
    match parse_command(&args.files) {
        Some(line) => sources.push(parse_task_file(
            command_file(&line)?,
            "the command",
            Path::new("."),
            &envs,
            &secrets,
        )?),
        None => {
            for file in &args.files {
                sources.push(read_task_file(file, &envs, &secrets)?);
            }
        }
    }
    context::with_context(at, async |cx| {
        // Report a missing project before anything is sent.
        cx.call::<ReadProject>(&EmptyRequest {}).await?;
        for source in &sources {
            print_plan(source, args);
            // Report problems, and settings without an effect, before anything is sent.
            let checked = cx.call::<CheckManagedJobs>(&build_request(source, args, &envs, &secrets)).await?;
            for warning in &checked.warnings {
                output::print_message(&output::printable(&format!("warning: {warning}")));
            }
        }
        let copies = usize::try_from(args.num_jobs.unwrap_or(1)).unwrap_or(usize::MAX);
        let count = format::count(sources.len().saturating_mul(copies), "job");
        if !output::confirm(args.yes, &format!("Launch {count}?"))? {
            output::print_message("Nothing was launched.");
            return Ok(Exit::Failed);
        }
        let mut all = LaunchResponse { jobs: Vec::new(), warnings: Vec::new() };
        for source in &sources {
            let launched = launch(cx, source, args, &envs, &secrets).await?;
            all.jobs.extend(launched.jobs);
            all.warnings.extend(launched.warnings);
        }
        print_launched(&all, format)?;
        let [only] = all.jobs.as_slice() else { return Ok(Exit::Done) };
        if args.detach {
            output::print_message(&format!("Run `windlass jobs logs {}` to follow it.", only.job_id));
            return Ok(Exit::Done);
        }
        let Some(job) = find(cx, only.job_id).await? else { return Ok(super::NOT_FOUND) };
        let job = JobFollower::new(cx, &job, LogSelection::default()).run(job).await?;
        let reason = job.reason.as_ref().map(|why| format!(": {}", output::printable(why)));
        let reason = reason.unwrap_or_default();
        output::print_message(&format!("Job {} ended with status {}{reason}.", job.job_id, job.status));
        Ok(exit_for(&job))
    })
}

fn print_launched(all: &LaunchResponse, format: Format) -> Result<(), CliError> {
    match format {
        Format::Json | Format::Jsonl | Format::Yaml => output::print_one(format, all, "", |_| ())?,
        Format::Name => all.jobs.iter().for_each(|job| output::print_data(&job.job_id.to_string())),
        Format::Table | Format::Wide => match all.jobs.as_slice() {
            [one] => output::print_message(&output::printable(&format!(
                "Launched job {} ({}).",
                one.job_id, one.name
            ))),
            [first, .., last] => {
                output::print_message(&format!("Launched jobs {} to {}.", first.job_id, last.job_id));
            }
            [] => {}
        },
    }
    Ok(())
}

async fn launch(
    cx: &Context,
    source: &LaunchFile,
    args: &Args,
    envs: &BTreeMap<String, String>,
    secrets: &BTreeMap<String, String>,
) -> Result<LaunchResponse, CliError> {
    let mut files = Vec::new();
    for (task, of) in (0..).zip(&source.plan.tasks) {
        let base = match &of.body {
            // Relative to the working directory, as in SkyPilot.
            TaskBody::Script(_) => Path::new("."),
            TaskBody::Configuration(_) => source.dir.as_path(),
        };
        for (from, path) in of.body.local_files() {
            let archive_id = archive::upload_path(cx, &archive::local_path(base, &from)?).await?;
            files.push(TaskFile { task, archive_id, path });
        }
    }
    let request = LaunchRequest { files, ..build_request(source, args, envs, secrets) };
    cx.call::<LaunchManagedJobs>(&request).await
}

/// Builds the request without the files, which are uploaded first.
fn build_request(
    source: &LaunchFile,
    args: &Args,
    envs: &BTreeMap<String, String>,
    secrets: &BTreeMap<String, String>,
) -> LaunchRequest {
    LaunchRequest {
        text: source.text.clone(),
        name: args.name.clone(),
        envs: envs.clone(),
        secrets: secrets.clone(),
        priority: args.priority,
        num_jobs: args.num_jobs,
        files: Vec::new(),
        overrides: args.resources.overrides(),
    }
}

fn print_plan(source: &LaunchFile, args: &Args) {
    let plan = &source.plan;
    let name = args.name.as_ref().or(plan.name.as_ref()).map_or("(generated name)", String::as_str);
    let tasks = if plan.tasks.len() > 1 { format::count(plan.tasks.len(), "task") } else { String::new() };
    let copies = args.num_jobs.filter(|copies| *copies > 1).map(|copies| format!("{copies} copies"));
    let more: Vec<String> =
        [Some(tasks).filter(|tasks| !tasks.is_empty()), copies].into_iter().flatten().collect();
    let more = if more.is_empty() { String::new() } else { format!(" ({})", more.join(", ")) };
    output::print_message(&output::printable(&format!("Job  {name}{more}")));
}

fn resolve_envs(args: &Args) -> Result<BTreeMap<String, String>, CliError> {
    let mut all = BTreeMap::new();
    if let Some(path) = &args.env_file {
        let failed = |error: std::io::Error| {
            CliError::from_error(&format!("failed to read `{}`", path.display()), &error)
        };
        let text = std::fs::read_to_string(path).map_err(failed)?;
        for line in text.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#')) {
            let line = line.strip_prefix("export ").unwrap_or(line);
            let (name, value) = line.split_once('=').ok_or_else(|| {
                CliError::usage(format!("invalid line `{line}` in `{}`", path.display()))
                    .hint("write variables as `NAME=VALUE`")
            })?;
            let value = value.trim();
            let quoted = |quote: char| value.strip_prefix(quote).and_then(|rest| rest.strip_suffix(quote));
            let value = quoted('"').or_else(|| quoted('\'')).unwrap_or(value);
            all.insert(name.trim().to_owned(), value.to_owned());
        }
    }
    all.extend(resolve_values(&args.env, "env")?);
    Ok(all)
}

/// Resolves variables without a value from the environment of this command.
pub(crate) fn resolve_values(
    given: &[(String, Option<String>)],
    flag: &str,
) -> Result<BTreeMap<String, String>, CliError> {
    let mut all = BTreeMap::new();
    for (name, value) in given {
        let value = value.clone().or_else(|| std::env::var(name).ok()).ok_or_else(|| {
            CliError::new(format!("`--{flag} {name}` has no value"))
                .code(ErrorCode::UnsetVariable)
                .why("the variable is not set in your environment")
                .hint(format!("pass `--{flag} {name}=VALUE`, or set the variable"))
        })?;
        all.insert(name.clone(), value);
    }
    Ok(all)
}

/// Joins the arguments to a command if none of them exists as a file or looks like the name of a task file.
fn parse_command(words: &[String]) -> Option<String> {
    let is_file = |word: &String| {
        let path = Path::new(word);
        let kind = path.extension().and_then(|kind| kind.to_str());
        matches!(kind, Some("yaml" | "yml")) || path.is_file()
    };
    match words {
        [only] => (!is_file(only)).then(|| only.clone()),
        words => (!words.iter().any(is_file))
            .then(|| words.iter().map(|word| config::shell::quote(word)).collect::<Vec<_>>().join(" ")),
    }
}

/// Renders a task file that runs a command.
fn command_file(line: &str) -> Result<String, CliError> {
    let quoted = serde_json::to_string(line)
        .map_err(|error| CliError::from_error("failed to encode the command", &error))?;
    Ok(format!("run: {quoted}\n"))
}

fn read_task_file(
    file: &str,
    envs: &BTreeMap<String, String>,
    secrets: &BTreeMap<String, String>,
) -> Result<LaunchFile, CliError> {
    let path = Path::new(file);
    let dir = path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    parse_task_file(read_text(path)?, file, dir, envs, secrets)
}

/// `shown` is the name of the text in messages.
fn parse_task_file(
    text: String,
    shown: &str,
    dir: &Path,
    envs: &BTreeMap<String, String>,
    secrets: &BTreeMap<String, String>,
) -> Result<LaunchFile, CliError> {
    let secrets = secrets.iter().map(|(name, value)| (name.clone(), SecretValue(value.clone())));
    let given = CommandLineValues { envs: envs.clone(), secrets: secrets.collect() };
    let wrong = |problems: Vec<config::error::Diagnosis>| {
        output::print_message(output::printable(&config::render(&problems, shown, &text)).trim_end());
        CliError::reported()
    };
    let job = skypilot::parse_task_file(&text, &given)
        .and_then(skypilot::ParsedTaskFile::into_launchable)
        .map_err(wrong)?;
    Ok(LaunchFile { plan: job.plan, dir: dir.to_owned(), text })
}

fn read_text(path: &Path) -> Result<String, CliError> {
    let failed = |error: std::io::Error| {
        let problem = CliError::from_error(&format!("failed to read `{}`", path.display()), &error);
        if error.kind() == std::io::ErrorKind::NotFound {
            return problem
                .hint("to run a command, pass no argument that is a file or ends in `.yaml` or `.yml`");
        }
        problem
    };
    let mut text = String::new();
    let file = std::fs::File::open(path).map_err(failed)?;
    file.take(FILE_BYTES_MAX).read_to_string(&mut text).map_err(failed)?;
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::{command_file, parse_command};

    #[test]
    fn arguments_that_are_not_files_form_a_shell_command() {
        let line =
            |words: &[&str]| parse_command(&words.iter().map(|word| (*word).to_owned()).collect::<Vec<_>>());
        assert_eq!(line(&["hostname"]).as_deref(), Some("hostname"));
        assert_eq!(line(&["echo hi && true"]).as_deref(), Some("echo hi && true"));
        assert_eq!(line(&["python", "-c", "print(1)"]).as_deref(), Some("python -c 'print(1)'"));
        assert_eq!(line(&["absent.yaml"]), None);
        assert_eq!(line(&["hostname", "absent.yml"]), None);
        assert_eq!(command_file("echo \"a\"").unwrap(), "run: \"echo \\\"a\\\"\"\n");
    }
}
