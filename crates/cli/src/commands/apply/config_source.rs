//! The configuration to apply: a file, completed with the name, the variables and the profile of the command line.

use std::{
    io::Read as _,
    path::{Path, PathBuf},
};

use serde_json::{Value, json};
use windlass_api::secrets::SetRequest;
use windlass_model::{
    config::{
        self, Configuration,
        env::{Env, EnvValue, is_env_name},
        error::Diagnosis,
        name::{Name, is_resource_name},
        references, unsupported,
    },
    skypilot,
};

use super::{
    Args,
    service::{ServiceSource, ServiceValues},
};
use crate::{
    commands::jobs::resolve_values,
    error::{CliError, ErrorCode},
    output,
};

/// Default configuration files, in order of precedence.
pub(crate) const DEFAULT_FILES: [&str; 4] = ["windlass.yml", "windlass.yaml", ".dstack.yml", ".dstack.yaml"];
const PROFILE_FILES: [&str; 4] =
    [".windlass/profiles.yml", ".windlass/profiles.yaml", ".dstack/profiles.yml", ".dstack/profiles.yaml"];
/// Maximum size of a configuration file; the parser has its own, lower limit.
const FILE_BYTES_MAX: u64 = 16 << 20;

#[derive(Debug)]
pub(crate) struct ConfigSource {
    /// Path as the user gave it, for messages and for the server.
    pub(crate) file: String,
    /// Base directory of relative paths in the file.
    pub(crate) dir: PathBuf,
    pub(crate) configuration: Configuration,
    /// The profile in its wire format.
    pub(crate) profile: Value,
    /// Secrets that are stored before the run is submitted.
    pub(crate) secrets: Vec<SetRequest>,
    /// Fail if the active run would have to be stopped first.
    pub(crate) is_update_only: bool,
}

/// Content of a configuration file.
#[derive(Debug)]
pub(crate) enum ApplyInput {
    Configuration(Box<ConfigSource>),
    /// A SkyPilot file with a service, which depends on the server.
    Service(Box<ServiceSource>),
}

pub(crate) fn read(args: &Args) -> Result<ApplyInput, CliError> {
    let path = match &args.file {
        Some(path) => path.clone(),
        None => default_file()?,
    };
    let file = path.display().to_string();
    let stdin = path.as_os_str() == "-";
    if stdin && !args.yes {
        return Err(CliError::usage(
            "cannot ask for confirmation: standard input contains the configuration",
        )
        .hint("pass `-y`"));
    }
    let text = read_text(&path, stdin)?;
    if skypilot::is_service_file(&text) {
        let envs = resolve_values(&args.env, "env")?;
        let values = ServiceValues { name: args.name.clone(), envs, ..ServiceValues::default() };
        return Ok(ApplyInput::Service(Box::new(ServiceSource::parse(&file, &text, values)?)));
    }
    let configuration = parse(&file, &text)?;
    let parent = if stdin { None } else { path.parent().filter(|parent| !parent.as_os_str().is_empty()) };
    let dir = parent.unwrap_or(Path::new(".")).to_owned();
    Ok(ApplyInput::Configuration(Box::new(with_overrides(args, file, dir, configuration)?)))
}

/// Completes a configuration with the command line. `file` is its name in messages.
pub(crate) fn with_overrides(
    args: &Args,
    file: String,
    dir: PathBuf,
    mut configuration: Configuration,
) -> Result<ConfigSource, CliError> {
    if let Some(name) = &args.name {
        rename(&mut configuration, name)?;
    }
    args.overrides.apply(&mut configuration)?;
    variables(&mut configuration, args)?;
    Ok(ConfigSource {
        file,
        dir,
        configuration,
        profile: profile(args)?,
        secrets: Vec::new(),
        is_update_only: false,
    })
}

/// Reads and parses a file without applying the command line.
pub(crate) fn parse_file(path: &Path) -> Result<Configuration, CliError> {
    let stdin = path.as_os_str() == "-";
    parse(&path.display().to_string(), &read_text(path, stdin)?)
}

fn default_file() -> Result<PathBuf, CliError> {
    DEFAULT_FILES.iter().map(PathBuf::from).find(|path| path.is_file()).ok_or_else(|| {
        CliError::usage("no configuration file given")
            .why(format!("none of {} exists in the current directory", DEFAULT_FILES.join(", ")))
            .hint("run `windlass apply -f FILE`")
    })
}

pub(crate) fn read_text(path: &Path, stdin: bool) -> Result<String, CliError> {
    let failed =
        |error: std::io::Error| CliError::from_error(&format!("failed to read `{}`", path.display()), &error);
    let mut text = String::new();
    if stdin {
        std::io::stdin().lock().take(FILE_BYTES_MAX).read_to_string(&mut text).map_err(failed)?;
    } else {
        let file = std::fs::File::open(path).map_err(failed)?;
        file.take(FILE_BYTES_MAX).read_to_string(&mut text).map_err(failed)?;
    }
    Ok(text)
}

fn parse(file: &str, text: &str) -> Result<Configuration, CliError> {
    let reported = |problems: &[Diagnosis]| {
        output::print_message(output::printable(&config::render(problems, file, text)).trim_end());
        CliError::reported()
    };
    let parsed = config::parse(text).map_err(|problems| reported(&problems))?;
    let context =
        unsupported::ReviewContext { node: Some(&parsed.node), ..unsupported::ReviewContext::default() };
    let review = unsupported::review(&parsed.configuration, context);
    if !review.refusals.is_empty() {
        return Err(reported(&review.refusals));
    }
    for warning in &review.warnings {
        let line = warning.span.start.line;
        output::print_message(&output::printable(&format!("warning: {file}:{line}: {}", warning.message)));
    }
    Ok(parsed.configuration)
}

fn rename(configuration: &mut Configuration, name: &str) -> Result<(), CliError> {
    if !is_resource_name(name) {
        return Err(CliError::usage(format!("invalid name `{name}`"))
            .hint("use 2 to 41 lower-case letters, digits and dashes, starting with a letter"));
    }
    let name = Some(Name(name.to_owned()));
    match configuration {
        Configuration::Task(task) => task.run.name = name,
        Configuration::Service(service) => service.0.run.name = name,
        Configuration::DevEnvironment(dev) => dev.run.name = name,
        Configuration::Fleet(fleet) => fleet.name = name,
        Configuration::Gateway(gateway) => gateway.name = name,
        Configuration::Volume(_) => return rename_volume(configuration, name),
    }
    Ok(())
}

/// Each backend has a separate volume type; in JSON form all of them have a `name`.
fn rename_volume(configuration: &mut Configuration, name: Option<Name>) -> Result<(), CliError> {
    let mut document = serde_json::to_value(&*configuration)
        .map_err(|error| CliError::from_error("failed to rename the volume", &error))?;
    document["name"] = json!(name);
    *configuration = Configuration::from_json(&document).map_err(|problems| {
        CliError::new("failed to rename the volume").why(config::error::summary(&problems))
    })?;
    Ok(())
}

/// Applies `-e` first, then resolves the variables that the file leaves to the environment.
fn variables(configuration: &mut Configuration, args: &Args) -> Result<(), CliError> {
    let kind = configuration.kind();
    let Some(env) = env_mut(configuration) else {
        if args.env.is_empty() {
            return Ok(());
        }
        return Err(CliError::usage(format!("a {kind} has no environment variables")).hint("remove `-e`"));
    };
    for (name, value) in &args.env {
        if !is_env_name(name) {
            return Err(CliError::usage(format!("invalid environment variable name `{name}`")));
        }
        let value = value.clone().map_or(EnvValue::FromClient, EnvValue::Value);
        env.0.insert(name.clone(), value);
    }
    env.resolve(|name| std::env::var(name).ok());
    let unset = env.unresolved();
    if !unset.is_empty() {
        return Err(CliError::new(format!("variables without a value: {}", unset.join(", ")))
            .code(ErrorCode::UnsetVariable)
            .why("the configuration reads them from your environment, where they are not set")
            .hint(format!("pass `-e {}=VALUE`, or set them in your environment", unset[0])));
    }
    references::resolve_for_client(configuration, &args.args, |_| None)
        .map_err(|error| CliError::from_error("failed to resolve the configuration", &error))
}

fn env_mut(configuration: &mut Configuration) -> Option<&mut Env> {
    match configuration {
        Configuration::Fleet(fleet) => Some(&mut fleet.env),
        Configuration::Task(_) | Configuration::Service(_) | Configuration::DevEnvironment(_) => {
            configuration.run_mut().map(|run| &mut run.env)
        }
        Configuration::Gateway(_) | Configuration::Volume(_) => None,
    }
}

/// Returns the requested profile, or the one marked as default.
fn profile(args: &Args) -> Result<Value, CliError> {
    let wanted = args.profile.as_deref().filter(|name| !name.is_empty());
    let home = std::env::var_os("HOME").map(PathBuf::from);
    let near = PROFILE_FILES.iter().map(PathBuf::from);
    let far = home.iter().flat_map(|home| PROFILE_FILES.iter().map(|file| home.join(file)));
    for path in near.chain(far).filter(|path| path.is_file()) {
        let text = read_text(&path, false)?;
        let file = path.display().to_string();
        let profiles = config::parse_profiles(&text).map_err(|problems| {
            output::print_message(output::printable(&config::render(&problems, &file, &text)).trim_end());
            CliError::reported()
        })?;
        let found = profiles.profiles.into_iter().find(|profile| match wanted {
            Some(name) => profile.name == name,
            None => profile.default,
        });
        if let Some(profile) = found {
            for warning in unsupported::review_profile(&profile.properties).warnings {
                output::print_message(&output::printable(&format!("warning: {file}: {}", warning.message)));
            }
            return serde_json::to_value(profile)
                .map_err(|error| CliError::from_error("failed to encode the profile", &error));
        }
    }
    match wanted {
        Some(name) => Err(CliError::new(format!("no profile named `{name}`"))
            .code(ErrorCode::UnknownName)
            .why("it is not defined in the current directory or in your home directory")
            .hint(format!("define it in {}", PROFILE_FILES[0]))),
        None => Ok(json!({ "name": "default", "default": false })),
    }
}
