//! Replacement of references: by the client before it sends a run, by the server before a job starts.

use std::collections::BTreeSet;

use super::{
    Configuration,
    env::EnvValue,
    interpolate::{self, DollarEscape, GroupMembers, Reference, Substitution},
    job_spec::JobSpec,
    run::RegistryAuth,
    shell,
    traffic::{Probe, Text},
};

/// A reference that cannot be replaced.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    #[error("invalid reference in `{place}`: {reason}")]
    Reference { place: &'static str, reason: String },
    #[error("variables without a value: {}", names.join(", "))]
    Unset { names: Vec<String> },
    #[error("secrets that do not exist: {}", names.join(", "))]
    MissingSecrets { names: Vec<String> },
}

/// Resolves a run on the client, before it is sent: reads unresolved variables from the client's environment, inserts
/// arguments into commands and variables into credentials and probes. `$$` becomes `$` here, and only here.
pub fn resolve_for_client(
    configuration: &mut Configuration,
    args: &[String],
    environment: impl FnMut(&str) -> Option<String>,
) -> Result<(), Error> {
    let Some(run) = configuration.run_mut() else { return Ok(()) };
    run.env.resolve(environment);
    let names: Vec<String> = run.env.unresolved().into_iter().map(str::to_owned).collect();
    if !names.is_empty() {
        return Err(Error::Unset { names });
    }
    let env = run.env.clone();
    let variable = |reference: &Reference| match reference {
        Reference::Named { namespace, name } if namespace == "env" => match env.0.get(name) {
            Some(EnvValue::Value(value)) => Ok(Substitution::Value(value.clone())),
            Some(EnvValue::FromClient) | None => Err(format!("`{reference}` does not exist in `env`")),
        },
        Reference::Named { namespace, .. } if namespace == "secrets" => Ok(Substitution::Keep),
        Reference::Named { .. } | Reference::Address { .. } => {
            Err(format!("`{reference}` is not available here"))
        }
    };
    if let Some(RegistryAuth { username, password }) = &mut run.registry_auth {
        replace(username, "registry_auth", variable)?;
        replace(password, "registry_auth", variable)?;
    }
    let args = args.iter().map(|arg| shell::quote(arg)).collect::<Vec<_>>().join(" ");
    let argument = |reference: &Reference| match reference {
        Reference::Named { namespace, name } if namespace == "run" && name == "args" => {
            Ok(Substitution::Value(args.clone()))
        }
        Reference::Named { namespace, .. } if namespace == "secrets" => Ok(Substitution::Keep),
        Reference::Address { .. } => Ok(Substitution::Keep),
        Reference::Named { .. } => Err(format!("`{reference}` is not available here")),
    };
    for command in commands_mut(configuration) {
        replace(command, "commands", argument)?;
    }
    if let Configuration::Service(service) = configuration {
        for probe in service.0.probes.iter_mut().flatten() {
            resolve_probe(probe, variable)?;
        }
    }
    Ok(())
}

fn resolve_probe(
    probe: &mut Probe,
    variable: impl Fn(&Reference) -> Result<Substitution, String> + Copy,
) -> Result<(), Error> {
    for Text(url) in probe.url.iter_mut() {
        replace(url, "probes", variable)?;
    }
    for Text(body) in probe.body.iter_mut() {
        replace(body, "probes", variable)?;
    }
    for header in &mut probe.headers {
        replace(&mut header.value.0, "probes", variable)?;
    }
    Ok(())
}

fn commands_mut(configuration: &mut Configuration) -> Vec<&mut String> {
    match configuration {
        Configuration::Task(task) => {
            let groups = task.groups.iter_mut().flatten().flat_map(|group| &mut group.commands);
            task.commands.iter_mut().chain(groups).collect()
        }
        Configuration::Service(service) => {
            let groups = service.0.groups.iter_mut().flatten().flat_map(|group| &mut group.commands);
            service.0.commands.iter_mut().chain(groups).collect()
        }
        Configuration::DevEnvironment(_)
        | Configuration::Fleet(_)
        | Configuration::Gateway(_)
        | Configuration::Volume(_) => vec![],
    }
}

fn replace(
    text: &mut String,
    place: &'static str,
    resolve: impl Fn(&Reference) -> Result<Substitution, String>,
) -> Result<(), Error> {
    let replaced = interpolate::substitute(text, DollarEscape::Unescape, resolve);
    *text = replaced.map_err(|error| Error::Reference { place, reason: error.reason })?;
    Ok(())
}

/// Returns the secrets that the variables and credentials of a job refer to, each once.
pub fn secret_names(spec: &JobSpec) -> BTreeSet<String> {
    let credentials = spec.registry_auth.iter().flat_map(|auth| [&auth.username, &auth.password]);
    let texts = spec.env.values().chain(credentials);
    // A value that is not a valid template is literal text.
    let named = texts.flat_map(|text| interpolate::references(text).unwrap_or_default());
    named
        .filter_map(|reference| match reference {
            Reference::Named { namespace, name } if namespace == "secrets" => Some(name),
            Reference::Named { .. } | Reference::Address { .. } => None,
        })
        .collect()
}

/// Inserts secrets into the variables and credentials of a job that is about to start. The error names all missing
/// secrets; inserted values are never parsed again.
pub fn insert_secrets(spec: &mut JobSpec, mut find: impl FnMut(&str) -> Option<String>) -> Result<(), Error> {
    let mut names = Vec::new();
    let credentials = spec.registry_auth.iter_mut().flat_map(|auth| [&mut auth.username, &mut auth.password]);
    for text in spec.env.values_mut().chain(credentials) {
        let resolve = |reference: &Reference| match reference {
            Reference::Named { namespace, name } if namespace == "secrets" => Ok(find(name).map_or_else(
                || {
                    names.push(name.clone());
                    Substitution::Keep
                },
                Substitution::Value,
            )),
            Reference::Named { .. } | Reference::Address { .. } => Ok(Substitution::Keep),
        };
        // A value that is not a valid template is literal text.
        if let Ok(replaced) = interpolate::substitute(text, DollarEscape::Keep, resolve) {
            *text = replaced;
        }
    }
    names.sort();
    names.dedup();
    if names.is_empty() { Ok(()) } else { Err(Error::MissingSecrets { names }) }
}

/// Returns the domain of a gateway for one project.
pub fn gateway_domain(domain: &str, project: &str) -> Result<String, Error> {
    let mut text = domain.to_owned();
    replace(&mut text, "domain", |reference| match reference {
        Reference::Named { namespace, name } if namespace == "run" && name == "project_name" => {
            Ok(Substitution::Value(project.to_owned()))
        }
        Reference::Named { .. } | Reference::Address { .. } => {
            Err(format!("`{reference}` is not available here"))
        }
    })?;
    Ok(text)
}

/// Returns the nodes or replicas whose addresses the commands of a job wait for.
pub fn awaited_addresses(spec: &JobSpec) -> Vec<(u32, u32, GroupMembers)> {
    let mut awaited = Vec::new();
    for word in &spec.commands {
        for reference in interpolate::references(word).unwrap_or_default() {
            if let Reference::Address { group, member, of } = reference {
                awaited.push((group, member, of));
            }
        }
    }
    awaited
}

/// Returns the commands of a job with addresses inserted. If `look_up` returns `None`, the reference stays unchanged.
pub fn insert_addresses(
    commands: &[String],
    mut find: impl FnMut(u32, u32) -> Option<String>,
) -> Vec<String> {
    let mut resolve = |reference: &Reference| match reference {
        Reference::Address { group, member, .. } => {
            Ok(find(*group, *member).map_or(Substitution::Keep, Substitution::Value))
        }
        Reference::Named { .. } => Ok(Substitution::Keep),
    };
    // Text that is not a reference of ours is left to the shell.
    let put_in = |text: &String| {
        interpolate::substitute(text, DollarEscape::Keep, &mut resolve).unwrap_or_else(|_| text.clone())
    };
    commands.iter().map(put_in).collect()
}
