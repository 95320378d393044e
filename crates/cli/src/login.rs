//! Selection of server, credentials and project: flags and environment first, then the stored login, then the server on
//! this machine.

use std::{
    io::ErrorKind,
    path::{Path, PathBuf},
};

use serde::{Deserialize, Serialize};

use crate::{
    cli::ServerArgs,
    error::{CliError, ErrorCode},
    home::{Home, read_if_exists, write_private},
    local_server,
};

/// Project of a new server.
pub(crate) const DEFAULT_PROJECT: &str = "main";

/// A stored login, written by `windlass login`.
#[derive(Clone, Deserialize, Serialize)]
pub(crate) struct Login {
    pub(crate) url: String,
    pub(crate) token: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) project: Option<String>,
    /// Certificate of the server, in PEM format.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) certificate: Option<String>,
    /// Name in `windlass context`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) name: Option<String>,
}

/// Name of the server on this machine in `windlass context`.
pub(crate) const LOCAL_CONTEXT: &str = "local";

/// Returns whether a name consists of letters, digits and `.`, `-`, `_`, starting with a letter or digit: it is used as
/// a file name.
pub(crate) fn is_context_name(name: &str) -> bool {
    let is_plain = |letter: char| letter.is_ascii_alphanumeric() || ".-_".contains(letter);
    (1..=60).contains(&name.len())
        && name.starts_with(|letter: char| letter.is_ascii_alphanumeric())
        && name.chars().all(is_plain)
        && name != LOCAL_CONTEXT
}

impl Login {
    /// Stored name, else one derived from the URL.
    pub(crate) fn context_name(&self) -> String {
        let named = self.name.clone().filter(|name| is_context_name(name));
        named.unwrap_or_else(|| {
            let host = self.url.split_once("://").map_or(self.url.as_str(), |(_, host)| host);
            let plain =
                |letter: char| if letter.is_ascii_alphanumeric() || letter == '.' { letter } else { '-' };
            let name: String = host.trim_matches('/').chars().map(plain).take(60).collect();
            let name = name.trim_matches(['-', '.']).to_owned();
            if is_context_name(&name) { name } else { "server".to_owned() }
        })
    }

    /// Returns all stored logins, by name.
    pub(crate) fn all(home: &Home) -> Result<Vec<Self>, CliError> {
        let dir = home.contexts_dir();
        let failed = |error: &std::io::Error| {
            CliError::from_error(&format!("failed to read `{}`", dir.display()), error)
        };
        let mut all = Vec::new();
        match std::fs::read_dir(&dir) {
            Ok(entries) => {
                for entry in entries {
                    let path = entry.map_err(|error| failed(&error))?.path();
                    if path.extension().is_some_and(|kind| kind == "json") {
                        all.extend(Self::stored(&path)?);
                    }
                }
            }
            Err(error) if error.kind() == ErrorKind::NotFound => {}
            Err(error) => return Err(failed(&error)),
        }
        // A login written before several were supported.
        if let Some(current) = Self::read(home)?
            && !all.iter().any(|one| one.context_name() == current.context_name())
        {
            all.push(current);
        }
        all.sort_by_key(Self::context_name);
        Ok(all)
    }

    fn file(&self, home: &Home) -> PathBuf {
        home.contexts_dir().join(format!("{}.json", self.context_name()))
    }

    /// Deletes the stored login, whether or not it is current.
    pub(crate) fn remove(&self, home: &Home) -> Result<(), CliError> {
        remove_file(&self.file(home))
    }

    pub(crate) fn read(home: &Home) -> Result<Option<Self>, CliError> {
        Self::stored(&home.login_file())
    }

    fn stored(path: &Path) -> Result<Option<Self>, CliError> {
        let Some(text) = read_if_exists(path)? else { return Ok(None) };
        let login = serde_json::from_str(&text).map_err(|error| {
            CliError::from_error(&format!("failed to parse `{}`", path.display()), &error)
                .hint("run `windlass login --url URL --token TOKEN` to write it again")
        })?;
        Ok(Some(login))
    }

    /// Stores the login and makes it current.
    pub(crate) fn write(&self, home: &Home) -> Result<(), CliError> {
        for path in [self.file(home), home.login_file()] {
            let failed = |error: &dyn std::error::Error| {
                CliError::from_error(&format!("failed to write `{}`", path.display()), error)
            };
            let text = serde_json::to_string_pretty(self).map_err(|error| failed(&error))?;
            write_private(&path, &format!("{text}\n")).map_err(|error| failed(&error))?;
        }
        Ok(())
    }
}

/// Makes the server on this machine current.
pub(crate) fn clear(home: &Home) -> Result<(), CliError> {
    remove_file(&home.login_file())
}

fn remove_file(path: &Path) -> Result<(), CliError> {
    match std::fs::remove_file(path) {
        Ok(()) => Ok(()),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
        Err(error) => Err(CliError::from_error(&format!("failed to remove `{}`", path.display()), &error)),
    }
}

/// Current project on the server of this machine.
pub(crate) fn local_project(home: &Home) -> Result<String, CliError> {
    let chosen = read_if_exists(&home.project_file())?.map(|name| name.trim().to_owned());
    Ok(chosen.filter(|name| !name.is_empty()).unwrap_or_else(|| DEFAULT_PROJECT.to_owned()))
}

/// Server, credentials and project of a command.
pub(crate) struct ServerTarget {
    pub(crate) url: String,
    pub(crate) token: String,
    /// Certificate of the server, in PEM format; `None` uses the trust store of the machine.
    pub(crate) certificate: Option<String>,
    pub(crate) project: String,
}

/// Selects the server; starts one on this machine if none is configured.
pub(crate) fn choose_server(at: &ServerArgs) -> Result<ServerTarget, CliError> {
    let home = Home::find()?;
    let found = choose_with(&home, at, |home| local_server::find_or_start(home).map(Some))?;
    found.ok_or_else(|| CliError::new("no server found"))
}

/// Selects the server without starting one.
pub(crate) fn choose_running(at: &ServerArgs) -> Result<Option<ServerTarget>, CliError> {
    choose_with(&Home::find()?, at, local_server::find)
}

fn choose_with(
    home: &Home,
    at: &ServerArgs,
    local: impl Fn(&Home) -> Result<Option<Login>, CliError>,
) -> Result<Option<ServerTarget>, CliError> {
    let set = |value: &Option<String>| value.clone().filter(|value| !value.is_empty());
    let (url, token, project) = (set(&at.url), set(&at.token), set(&at.project));
    let given = read_certificate(at.server_cert.as_deref())?;
    let stored = Login::read(home)?;
    let (found, default) = match (url, token) {
        (Some(url), Some(token)) => {
            (Some(Login { url, token, project: None, certificate: None, name: None }), None)
        }
        (Some(url), None) => (Some(find_known_login(home, stored, url)?), None),
        (None, token) => {
            let base = match stored {
                Some(login) => Some(login),
                None => local(home)?.map(|found| with_local_project(home, found)).transpose()?,
            };
            let default = base.as_ref().and_then(|base| base.project.clone());
            let found = base.map(|base| Login { token: token.unwrap_or_else(|| base.token.clone()), ..base });
            (found, default)
        }
    };
    Ok(found.map(|found| ServerTarget {
        url: found.url.trim_end_matches('/').to_owned(),
        token: found.token,
        certificate: given.or(found.certificate),
        project: project.or(default).or(found.project).unwrap_or_else(|| DEFAULT_PROJECT.to_owned()),
    }))
}

/// Returns the text of a certificate that is given as a file name or as PEM.
pub(crate) fn read_certificate(given: Option<&str>) -> Result<Option<String>, CliError> {
    let Some(given) = given.filter(|given| !given.is_empty()) else { return Ok(None) };
    if given.trim_start().starts_with("-----BEGIN") {
        return Ok(Some(given.to_owned()));
    }
    let text = std::fs::read_to_string(given).map_err(|error| {
        CliError::from_error(&format!("failed to read the server's certificate `{given}`"), &error).hint(
            "a server with `--tls-port` creates it at its first start: `tls/cert.pem` in its data directory",
        )
    })?;
    if !text.contains("-----BEGIN CERTIFICATE") {
        return Err(CliError::usage(format!("`{given}` contains no certificate")).hint(
            "use a PEM file with the lines `-----BEGIN CERTIFICATE-----` and `-----END CERTIFICATE-----`",
        ));
    }
    Ok(Some(text))
}

/// The server on this machine, with its current project.
fn with_local_project(home: &Home, found: Login) -> Result<Login, CliError> {
    let chosen = read_if_exists(&home.project_file())?;
    let project = chosen.map(|name| name.trim().to_owned()).filter(|name| !name.is_empty());
    Ok(Login { project: project.or(found.project), ..found })
}

/// Sets the current project and returns the file that stores it.
pub(crate) fn set_default_project(home: &Home, name: &str) -> Result<PathBuf, CliError> {
    if let Some(login) = Login::read(home)? {
        Login { project: Some(name.to_owned()), ..login }.write(home)?;
        return Ok(home.login_file());
    }
    let path = home.project_file();
    write_private(&path, &format!("{name}\n"))
        .map_err(|error| CliError::from_error(&format!("failed to write `{}`", path.display()), &error))?;
    Ok(path)
}

/// Finds the stored login of a server that was given without a token.
fn find_known_login(home: &Home, stored: Option<Login>, url: String) -> Result<Login, CliError> {
    let same = |login: &Login| login.url.trim_end_matches('/') == url.trim_end_matches('/');
    if let Some(login) = stored.filter(same) {
        return Ok(login);
    }
    if let Some(login) = Login::all(home)?.into_iter().find(|login| same(login)) {
        return Ok(login);
    }
    if let Some(login) = local_server::find(home)?.filter(same) {
        return Ok(login);
    }
    Err(CliError::usage(format!("no token is known for {url}"))
        .code(ErrorCode::NoToken)
        .hint("set `WINDLASS_TOKEN`, or run `windlass login --url URL --token TOKEN`"))
}

#[cfg(test)]
mod tests {
    use super::{Login, is_context_name};

    #[test]
    fn context_name_is_the_given_name_or_the_server_address() {
        let login = |url: &str, name: Option<&str>| Login {
            url: url.to_owned(),
            token: "t".to_owned(),
            project: None,
            certificate: None,
            name: name.map(str::to_owned),
        };
        assert_eq!(login("https://gpu.lab.org:3443/", None).context_name(), "gpu.lab.org-3443");
        assert_eq!(login("http://127.0.0.1:3000", Some("lab")).context_name(), "lab");
        assert_eq!(login("http://[::1]", Some("../x")).context_name(), "1");
        assert!(!is_context_name("local") && !is_context_name(".x") && !is_context_name("a/b"));
    }
}
