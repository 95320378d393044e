//! `windlass check FILE…`: reports every problem of every file, without a server.
//!
//! Configurations of `windlass apply`, profiles and task files of `windlass jobs launch` are distinguished by their
//! content, and get the same result as from those commands.

mod images;

use std::{
    collections::BTreeMap,
    io::Read as _,
    path::{Path, PathBuf},
};

use serde_json::{Value, json};
use windlass_model::{
    config::{
        self,
        env::EnvValue,
        error::{Code, Diagnosis},
        profile::{Profile, Profiles},
        references, unsupported,
    },
    skypilot::{self, CommandLineValues, SecretValue, TaskFileKind},
};

use self::images::{ImageChecker, ImageReport};
use crate::{
    cli::{Format, OutputArgs},
    error::{self, CliError},
    exit::Exit,
    output::{self, format},
};

const EXAMPLES: &str = "\
Examples:
  windlass check windlass.yml                  report every problem with its line
  windlass check examples/*.yml -o name        print only the names of invalid files
  windlass check -e TOKEN=x train.yml -o json  print JSON, for an editor or a CI job
  windlass check pipeline.yaml                 check a task file of `windlass jobs launch`, or of `serve up`
  windlass check --images windlass.yml         also query the registry for the image

Configurations, profiles and SkyPilot task files (single tasks, pipelines, groups, services) are distinguished by their
content. The exit code is 0 if `apply`, `jobs launch` or `serve up` accepts every file, else 1.";

#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// Files to validate; `-` is standard input
    #[arg(required = true, value_name = "FILE")]
    pub(crate) files: Vec<PathBuf>,
    /// Variable to set, as in `apply` and `jobs launch`
    #[arg(short, long = "env", value_name = "K=V", value_parser = parse_assignment)]
    pub(crate) env: Vec<(String, String)>,
    /// Secret of a task file to set, as in `jobs launch`
    #[arg(long = "secret", value_name = "K=V", value_parser = parse_assignment)]
    pub(crate) secret: Vec<(String, String)>,
    /// Query registries for the images of configurations and their platforms
    #[arg(long)]
    pub(crate) images: bool,
    #[command(flatten)]
    pub(crate) output: OutputArgs,
}

fn parse_assignment(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((name, value)) if !name.is_empty() => Ok((name.to_owned(), value.to_owned())),
        _ => Err("expected NAME=VALUE".to_owned()),
    }
}

/// File format.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Dialect {
    /// Configurations for `windlass apply`.
    Windlass,
    Profiles,
    /// Task files for `windlass jobs launch`.
    Skypilot,
}

impl Dialect {
    const fn as_str(self) -> &'static str {
        match self {
            Self::Windlass => "windlass",
            Self::Profiles => "profiles",
            Self::Skypilot => "skypilot",
        }
    }

    /// Detects profiles by their file name and task files by their fields.
    fn detect(file: &Path, source: &str) -> Self {
        if file.file_stem().is_some_and(|stem| stem == "profiles") {
            Self::Profiles
        } else if skypilot::is_task_file(source) {
            Self::Skypilot
        } else {
            Self::Windlass
        }
    }
}

/// A valid file.
struct ValidFile {
    kind: &'static str,
    /// Description for people.
    described: String,
    /// Variables that `apply` would read from the environment and that are not set here.
    unset: Vec<String>,
    /// Settings without an effect.
    warnings: Vec<Diagnosis>,
    /// Reasons why windlass cannot launch the file although it is valid.
    refusals: Vec<Diagnosis>,
    /// The registry's response, with `--images`.
    image: Option<ImageReport>,
}

/// The result for one file.
enum CheckResult {
    Valid { dialect: Dialect, source: String, valid: Box<ValidFile> },
    Invalid { dialect: Dialect, source: String, problems: Vec<Diagnosis> },
    Unreadable { problem: String },
}

impl CheckResult {
    fn is_ok(&self) -> bool {
        match self {
            Self::Valid { valid, .. } => {
                valid.refusals.is_empty() && !matches!(valid.image, Some(ImageReport::Missing { .. }))
            }
            Self::Invalid { .. } | Self::Unreadable { .. } => false,
        }
    }
}

pub(crate) fn run(args: &Args) -> Result<Exit, CliError> {
    let images = args.images.then(ImageChecker::new).transpose()?;
    let files = args.files.iter();
    let checked: Vec<(String, CheckResult)> =
        files.map(|file| (file.display().to_string(), check(file, args, images.as_ref()))).collect();
    let documents =
        || checked.iter().map(|(file, checked)| result_document(file, checked)).collect::<Vec<_>>();
    match args.output.format {
        Format::Table | Format::Wide => {
            checked.iter().for_each(|(file, checked)| print_result(file, checked))
        }
        Format::Json => output::print_json_array(&documents())?,
        Format::Yaml => output::print_yaml_stream(&documents())?,
        Format::Jsonl => output::print_jsonl(&documents())?,
        // Names of invalid files, for `xargs`.
        Format::Name => checked
            .iter()
            .filter(|(_, checked)| !checked.is_ok())
            .for_each(|(file, _)| output::print_data(file)),
    }
    let fine = checked.iter().all(|(_, checked)| checked.is_ok());
    Ok(if fine { Exit::Done } else { Exit::Failed })
}

fn check(file: &Path, args: &Args, images: Option<&ImageChecker>) -> CheckResult {
    let source = match read_file(file) {
        Ok(source) => source,
        Err(error) => return CheckResult::Unreadable { problem: error.to_string() },
    };
    let dialect = Dialect::detect(file, &source);
    let read = match dialect {
        Dialect::Profiles => config::parse_profiles(&source).map(|profiles| check_profiles(&profiles)),
        Dialect::Windlass => {
            config::parse(&source).and_then(|parsed| check_references(parsed, &args.env, images))
        }
        Dialect::Skypilot => check_task_file(&source, args),
    };
    match read {
        Ok(valid) => CheckResult::Valid { dialect, source, valid: Box::new(valid) },
        Err(problems) => CheckResult::Invalid { dialect, source, problems },
    }
}

fn valid_file(kind: &'static str, unset: Vec<String>) -> ValidFile {
    ValidFile {
        kind,
        described: kind.to_owned(),
        unset,
        warnings: Vec::new(),
        refusals: Vec::new(),
        image: None,
    }
}

/// Collects what has no effect in the profiles.
fn check_profiles(profiles: &Profiles) -> ValidFile {
    let of_profile = |(number, profile): (usize, &Profile)| -> Vec<Diagnosis> {
        let warnings = unsupported::review_profile(&profile.properties).warnings.into_iter();
        let described = warnings.map(|warning| Diagnosis {
            message: format!("profile `{}`: {}", profile.name, warning.message),
            path: format!("profiles[{number}].{}", warning.path),
            ..warning
        });
        described.collect()
    };
    let warnings = profiles.profiles.iter().enumerate().flat_map(of_profile).collect();
    ValidFile { warnings, ..valid_file("profiles", Vec::new()) }
}

/// Runs the checks of `jobs launch`.
fn check_task_file(source: &str, args: &Args) -> Result<ValidFile, Vec<Diagnosis>> {
    let envs: BTreeMap<String, String> = args.env.iter().cloned().collect();
    let secrets =
        args.secret.iter().map(|(name, value)| (name.clone(), SecretValue(value.clone()))).collect();
    let parsed = skypilot::parse_task_file(source, &CommandLineValues { envs, secrets })?;
    let tasks = format::count(parsed.plan.tasks.len(), "task");
    let described = match parsed.kind {
        TaskFileKind::Single => "SkyPilot task".to_owned(),
        TaskFileKind::Pipeline => format!("SkyPilot pipeline of {tasks}"),
        TaskFileKind::Dag => format!("SkyPilot graph of {tasks}"),
        TaskFileKind::JobGroup => format!("SkyPilot job group of {tasks}"),
        TaskFileKind::Service => "SkyPilot service".to_owned(),
        TaskFileKind::Pool => "SkyPilot pool".to_owned(),
    };
    let check_service = |parsed: skypilot::ParsedTaskFile| -> Result<(), Vec<Diagnosis>> {
        let is_service = parsed.kind == TaskFileKind::Service && parsed.refusals.is_empty();
        if is_service { parsed.into_service()?.check() } else { Ok(()) }
    };
    check_service(parsed.clone())?;
    Ok(ValidFile {
        kind: parsed.kind.as_str(),
        described,
        unset: Vec::new(),
        warnings: parsed.warnings,
        refusals: parsed.refusals,
        image: None,
    })
}

/// Resolves references and variables as `apply` does. A variable that comes from the environment may be unset while a
/// file is only checked.
fn check_references(
    mut parsed: config::ParsedConfiguration,
    env: &[(String, String)],
    images: Option<&ImageChecker>,
) -> Result<ValidFile, Vec<Diagnosis>> {
    let context =
        unsupported::ReviewContext { node: Some(&parsed.node), ..unsupported::ReviewContext::default() };
    let review = unsupported::review(&parsed.configuration, context);
    if !review.refusals.is_empty() {
        return Err(review.refusals);
    }
    let configuration = &mut parsed.configuration;
    let kind = configuration.kind();
    let mut unset = Vec::new();
    if let Some(run) = configuration.run_mut() {
        for (name, value) in env {
            run.env.0.insert(name.clone(), EnvValue::Value(value.clone()));
        }
    }
    let environment = |name: &str| {
        Some(std::env::var(name).unwrap_or_else(|_| {
            unset.push(name.to_owned());
            String::new()
        }))
    };
    match references::resolve_for_client(configuration, &[], environment) {
        Ok(()) => {
            let run = parsed.configuration.run();
            let image = images.zip(run).and_then(|(images, run)| images.check(run));
            Ok(ValidFile { image, warnings: review.warnings, ..valid_file(kind, unset) })
        }
        Err(error) => Err(vec![Diagnosis::new(Code::Interpolation, parsed.node.span, error.to_string())]),
    }
}

fn read_file(file: &Path) -> std::io::Result<String> {
    if file.as_os_str() == "-" {
        let mut text = String::new();
        std::io::stdin().lock().read_to_string(&mut text)?;
        return Ok(text);
    }
    std::fs::read_to_string(file)
}

fn print_result(file: &str, checked: &CheckResult) {
    let rendered = |problems: &[Diagnosis], source: &str| {
        output::print_message(output::printable(&config::render(problems, file, source)).trim_end());
    };
    match checked {
        CheckResult::Valid { source, valid, .. } => {
            let ValidFile { described, unset, warnings, refusals, image, .. } = &**valid;
            let verdict = if refusals.is_empty() { "" } else { ", but windlass cannot launch it" };
            output::print_message(&output::printable(&format!("{file}: valid {described}{verdict}")));
            if !unset.is_empty() {
                let names = unset.join(", ");
                let note = format!(
                    "  note: `apply` reads these variables from the environment, where they are not set: {names}"
                );
                output::print_message(&output::printable(&note));
            }
            if let Some(image) = image {
                let label = match image {
                    ImageReport::Exists { .. } => "note",
                    ImageReport::Missing { .. } => "error",
                    ImageReport::Unknown { .. } => "warning",
                };
                output::print_message(&output::printable(&format!("  {label}: {}", image.text())));
            }
            for warning in warnings {
                let line = warning.span.start.line;
                let at = if warning.span.is_known() { format!("line {line}: ") } else { String::new() };
                output::print_message(&output::printable(&format!("  warning: {at}{}", warning.message)));
            }
            if !refusals.is_empty() {
                rendered(refusals, source);
            }
        }
        CheckResult::Invalid { source, problems, .. } => rendered(problems, source),
        CheckResult::Unreadable { problem } => {
            output::print_message(&CliError::new(format!("failed to read `{file}`")).why(problem).text());
        }
    }
}

fn result_document(file: &str, checked: &CheckResult) -> Value {
    match checked {
        CheckResult::Valid { dialect, valid, .. } => {
            let ValidFile { kind, unset, warnings, refusals, image, .. } = &**valid;
            let mut document = json!({
                "file": file, "valid": true, "dialect": dialect.as_str(), "type": kind, "problems": refusals,
                "unset": unset, "warnings": warnings,
            });
            if *dialect == Dialect::Skypilot {
                document["launchable"] = json!(refusals.is_empty());
            }
            if let Some(image) = image {
                document["image"] = image.document();
            }
            document
        }
        CheckResult::Invalid { dialect, problems, .. } => {
            json!({ "file": file, "valid": false, "dialect": dialect.as_str(), "problems": problems })
        }
        CheckResult::Unreadable { problem } => {
            json!({ "file": file, "valid": false, "problems": [{ "code": error::ErrorCode::Failed.id(), "message": format!("failed to read the file: {problem}") }] })
        }
    }
}
