//! What the server is told: flags, then environment, then `config.yml` in the data directory.

use std::{
    net::{IpAddr, Ipv4Addr, SocketAddr},
    path::{Path, PathBuf},
};

use crate::db::{DatabaseUrl, DbError};

/// Largest JSON body, unless told otherwise.
const BODY_BYTES_MAX: usize = 2 * 1024 * 1024;
/// Largest uploaded file, unless told otherwise.
const UPLOAD_BYTES_MAX: usize = 2 * 1024 * 1024;
/// Projects one user may own, unless told otherwise.
const OWNED_PROJECTS_MAX: i64 = 10;

#[derive(Debug, thiserror::Error)]
pub enum SettingsError {
    #[error("understand the host `{host}`: want an IP address or `localhost`")]
    Host { host: String },
    #[error("understand the database url")]
    Database(#[from] DbError),
    #[error("find a home: set `WINDLASS_HOME`, `HOME` or `--data-dir`")]
    NoHome,
}

/// One source of settings; a later source fills only what an earlier one left open.
#[derive(Clone, Debug, Default)]
pub struct Given {
    pub host: Option<String>,
    pub port: Option<u16>,
    pub data_dir: Option<PathBuf>,
    pub database_url: Option<String>,
    pub admin_token: Option<String>,
    pub key_file: Option<PathBuf>,
    pub no_local: Option<bool>,
}

impl Given {
    /// These, and where they say nothing, `other`.
    #[must_use]
    pub fn or(self, other: Self) -> Self {
        Self {
            host: self.host.or(other.host),
            port: self.port.or(other.port),
            data_dir: self.data_dir.or(other.data_dir),
            database_url: self.database_url.or(other.database_url),
            admin_token: self.admin_token.or(other.admin_token),
            key_file: self.key_file.or(other.key_file),
            no_local: self.no_local.or(other.no_local),
        }
    }
}

#[derive(Clone)]
pub struct Settings {
    pub address: SocketAddr,
    pub data_dir: PathBuf,
    pub database_url: DatabaseUrl,
    pub admin_token: Option<String>,
    pub key_file: PathBuf,
    /// Whether project `main` gets a fleet `local` holding this machine.
    pub local: bool,
    pub body_bytes_max: usize,
    pub upload_bytes_max: usize,
    pub owned_projects_max: i64,
}

/// Without the token and without the password in the url.
impl std::fmt::Debug for Settings {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Settings")
            .field("address", &self.address)
            .field("data_dir", &self.data_dir)
            .field("local", &self.local)
            .finish_non_exhaustive()
    }
}

impl Settings {
    /// `home` is where everything of ours lives unless a data directory is named.
    pub fn new(given: Given, home: Option<&Path>) -> Result<Self, SettingsError> {
        let data_dir = match (given.data_dir, home) {
            (Some(dir), _) => dir,
            (None, Some(home)) => home.join("server"),
            (None, None) => return Err(SettingsError::NoHome),
        };
        let host = match given.host.as_deref() {
            None | Some("localhost") => IpAddr::V4(Ipv4Addr::LOCALHOST),
            Some(host) => host
                .trim_start_matches('[')
                .trim_end_matches(']')
                .parse()
                .map_err(|_| SettingsError::Host { host: host.to_owned() })?,
        };
        let database_url = match given.database_url {
            Some(url) => url.parse()?,
            None => DatabaseUrl::Sqlite(data_dir.join("windlass.db")),
        };
        Ok(Self {
            address: SocketAddr::new(host, given.port.unwrap_or(3000)),
            key_file: given.key_file.unwrap_or_else(|| data_dir.join("keys").join("master")),
            data_dir,
            database_url,
            admin_token: given.admin_token.filter(|token| !token.is_empty()),
            local: !given.no_local.unwrap_or(false),
            body_bytes_max: BODY_BYTES_MAX,
            upload_bytes_max: UPLOAD_BYTES_MAX,
            owned_projects_max: OWNED_PROJECTS_MAX,
        })
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::{Given, Settings};
    use crate::db::DatabaseUrl;

    #[test]
    fn an_earlier_source_wins_over_a_later_one() {
        let flags = Given { port: Some(1), ..Given::default() };
        let file = Given { port: Some(2), host: Some("::1".into()), ..Given::default() };
        let settings = Settings::new(flags.or(file), Some(Path::new("/h"))).unwrap();
        assert_eq!(settings.address.to_string(), "[::1]:1");
        assert_eq!(settings.database_url, DatabaseUrl::Sqlite("/h/server/windlass.db".into()));
    }

    #[test]
    fn the_token_is_not_shown_by_debug() {
        let given = Given { admin_token: Some("canary".into()), ..Given::default() };
        let settings = Settings::new(given, Some(Path::new("/h"))).unwrap();
        assert!(!format!("{settings:?}").contains("canary"));
    }
}
