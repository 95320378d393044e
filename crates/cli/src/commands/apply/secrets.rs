//! Secrets that a run references: missing ones are reported before the run is submitted.

use std::collections::BTreeSet;

use windlass_api::{operations::ListSecrets, server::EmptyRequest};
use windlass_model::config::{
    Configuration,
    env::EnvValue,
    interpolate::{self, Reference},
};

use super::config_source::ConfigSource;
use crate::{
    context::{Context, closest_name},
    error::{CliError, ErrorCode},
};

/// Fails if a referenced secret does not exist. Only project managers may list secrets; for other users the server
/// reports a missing secret when a job starts.
pub(super) async fn check_secrets_exist(cx: &Context, source: &ConfigSource) -> Result<(), CliError> {
    let mut named = referenced_secrets(&source.configuration);
    for secret in &source.secrets {
        named.remove(&secret.name);
    }
    if named.is_empty() {
        return Ok(());
    }
    let Ok(stored) = cx.try_call::<ListSecrets>(&EmptyRequest {}).await else { return Ok(()) };
    let stored: BTreeSet<String> = stored.into_iter().map(|secret| secret.name).collect();
    let missing: Vec<&String> = named.difference(&stored).collect();
    let Some(first) = missing.first() else { return Ok(()) };
    let listed: Vec<String> = missing.iter().map(|name| format!("`{name}`")).collect();
    let problem = CliError::new(format!("no secret named {} in project `{}`", listed.join(", "), cx.project))
        .code(ErrorCode::UnknownName);
    Err(match closest_name(first, stored.iter().map(String::as_str)) {
        Some(near) => problem.hint(format!("did you mean `{near}`?")),
        None => problem.hint(format!("run `windlass secret set {first}` to store it")),
    })
}

/// Secrets referenced in variables and credentials, where the server substitutes them.
fn referenced_secrets(configuration: &Configuration) -> BTreeSet<String> {
    let Some(run) = configuration.run() else { return BTreeSet::new() };
    let variables = run.env.0.values().filter_map(|value| match value {
        EnvValue::Value(value) => Some(value),
        EnvValue::FromClient => None,
    });
    let credentials = run.registry_auth.iter().flat_map(|auth| [&auth.username, &auth.password]);
    let references =
        variables.chain(credentials).flat_map(|text| interpolate::references(text).unwrap_or_default());
    references
        .filter_map(|reference| match reference {
            Reference::Named { namespace, name } if namespace == "secrets" => Some(name),
            Reference::Named { .. } | Reference::Address { .. } => None,
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use windlass_model::config;

    #[test]
    fn secret_references_are_found_in_env_and_registry_credentials() {
        let text = "type: task\nimage: a\ncommands: [a]\nenv: {A: '${{ secrets.ONE }}', B: plain}\n\
                    registry_auth: {username: a, password: '${{ secrets.TWO }}'}\n";
        let found = super::referenced_secrets(&config::parse(text).unwrap().configuration);
        assert_eq!(found.into_iter().collect::<Vec<_>>(), ["ONE", "TWO"]);
    }
}
