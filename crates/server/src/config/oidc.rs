//! Settings of the identity provider with which users log in to the web UI.

use std::path::PathBuf;

use windlass_api::projects::ProjectRole;

use super::SettingsError;

/// Names of the settings in `config.yml`.
pub(super) const SETTING_NAMES: [&str; 7] =
    [ISSUER, CLIENT_ID, CLIENT_SECRET_FILE, NAME, CREATE_USERS, GROUPS, GROUPS_CLAIM];
const ISSUER: &str = "oidc_issuer";
const CLIENT_ID: &str = "oidc_client_id";
const CLIENT_SECRET_FILE: &str = "oidc_client_secret_file";
const NAME: &str = "oidc_name";
const CREATE_USERS: &str = "oidc_create_users";
const GROUPS: &str = "oidc_groups";
const GROUPS_CLAIM: &str = "oidc_groups_claim";
/// Claim in which most providers list the groups of a user.
const GROUPS_CLAIM_DEFAULT: &str = "groups";

/// Settings as given.
#[derive(Clone, Debug, Default)]
pub struct OidcSource {
    pub issuer: Option<String>,
    pub client_id: Option<String>,
    pub client_secret_file: Option<PathBuf>,
    pub name: Option<String>,
    pub create_users: Option<bool>,
    /// `GROUP=PROJECT:ROLE,…`
    pub groups: Option<String>,
    pub groups_claim: Option<String>,
}

impl OidcSource {
    /// Sets a setting of `config.yml`. Returns what was expected if the value is invalid, and false if there is no
    /// setting of this name.
    pub(super) fn set(&mut self, name: &str, text: &str) -> Result<bool, &'static str> {
        match name {
            ISSUER => self.issuer = Some(text.to_owned()),
            CLIENT_ID => self.client_id = Some(text.to_owned()),
            CLIENT_SECRET_FILE => self.client_secret_file = Some(text.into()),
            NAME => self.name = Some(text.to_owned()),
            CREATE_USERS => {
                self.create_users = Some(text.parse().map_err(|_| "expected `true` or `false`")?);
            }
            GROUPS => self.groups = Some(text.to_owned()),
            GROUPS_CLAIM => self.groups_claim = Some(text.to_owned()),
            _ => return Ok(false),
        }
        Ok(true)
    }

    /// Fills unset values from `other`.
    #[must_use]
    pub(super) fn or(self, other: Self) -> Self {
        Self {
            issuer: self.issuer.or(other.issuer),
            client_id: self.client_id.or(other.client_id),
            client_secret_file: self.client_secret_file.or(other.client_secret_file),
            name: self.name.or(other.name),
            create_users: self.create_users.or(other.create_users),
            groups: self.groups.or(other.groups),
            groups_claim: self.groups_claim.or(other.groups_claim),
        }
    }

    fn is_empty(&self) -> bool {
        self.issuer.is_none()
            && self.client_id.is_none()
            && self.client_secret_file.is_none()
            && self.name.is_none()
            && self.create_users.is_none()
            && self.groups.is_none()
            && self.groups_claim.is_none()
    }
}

/// Role that a group gives in a project.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GroupRole {
    pub group: String,
    pub project: String,
    pub role: ProjectRole,
}

/// Identity provider of the server.
#[derive(Clone)]
pub struct OidcSettings {
    /// URL below which the provider describes itself.
    pub issuer: String,
    pub client_id: String,
    pub client_secret: Option<String>,
    /// Name for people.
    pub name: String,
    /// True to create users at their first login.
    pub create_users: bool,
    /// Claim that lists the groups of a user.
    pub groups_claim: String,
    pub groups: Vec<GroupRole>,
}

/// Omits the secret.
impl std::fmt::Debug for OidcSettings {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("OidcSettings")
            .field("issuer", &self.issuer)
            .field("client_id", &self.client_id)
            .finish_non_exhaustive()
    }
}

impl OidcSettings {
    /// Returns `None` if no identity provider is set.
    pub(super) fn new(given: OidcSource) -> Result<Option<Self>, SettingsError> {
        if given.is_empty() {
            return Ok(None);
        }
        let (Some(issuer), Some(client_id)) = (given.issuer, given.client_id) else {
            return Err(SettingsError::OidcIncomplete);
        };
        let host = parse_issuer(&issuer).ok_or_else(|| SettingsError::OidcIssuer { text: issuer.clone() })?;
        let client_secret = given
            .client_secret_file
            .map(|path| match std::fs::read_to_string(&path) {
                Ok(text) => Ok(text.trim().to_owned()),
                Err(source) => Err(SettingsError::File { path, source }),
            })
            .transpose()?
            .filter(|secret| !secret.is_empty());
        Ok(Some(Self {
            name: given.name.unwrap_or(host),
            issuer,
            client_id,
            client_secret,
            create_users: given.create_users.unwrap_or(false),
            groups_claim: given.groups_claim.unwrap_or_else(|| GROUPS_CLAIM_DEFAULT.to_owned()),
            groups: parse_groups(given.groups.as_deref().unwrap_or_default())?,
        }))
    }
}

/// Host of an issuer. Tokens of a provider are only as good as the connection to it, so it needs TLS beyond this
/// machine.
fn parse_issuer(issuer: &str) -> Option<String> {
    let (scheme, rest) = issuer.split_once("://")?;
    if rest.contains(['?', '#', '@']) || rest.contains(char::is_whitespace) {
        return None;
    }
    let authority = rest.split('/').next().unwrap_or_default();
    let host = authority.rsplit_once(':').map_or(authority, |(host, _)| host);
    let is_local = matches!(host, "localhost" | "127.0.0.1" | "[::1]");
    (!host.is_empty() && (scheme == "https" || (scheme == "http" && is_local))).then(|| authority.to_owned())
}

fn parse_groups(text: &str) -> Result<Vec<GroupRole>, SettingsError> {
    let entries = text.split(',').map(str::trim).filter(|entry| !entry.is_empty());
    entries
        .map(|entry| {
            let wrong = || SettingsError::OidcGroups { text: entry.to_owned() };
            // A group may be a path or a name with `=`; names of projects and roles have neither `=` nor `:`.
            let (group, given) = entry.rsplit_once('=').ok_or_else(wrong)?;
            let (project, role) = given.split_once(':').ok_or_else(wrong)?;
            let role = match role.trim() {
                "user" => ProjectRole::User,
                "manager" => ProjectRole::Manager,
                "admin" => ProjectRole::Admin,
                _ => return Err(wrong()),
            };
            let (group, project) = (group.trim().to_owned(), project.trim().to_owned());
            if group.is_empty() || project.is_empty() {
                Err(wrong())
            } else {
                Ok(GroupRole { group, project, role })
            }
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn source() -> OidcSource {
        OidcSource {
            issuer: Some("https://id.example/realms/ml".into()),
            client_id: Some("windlass".into()),
            ..OidcSource::default()
        }
    }

    #[test]
    fn a_provider_needs_an_issuer_and_a_client() {
        assert!(OidcSettings::new(OidcSource::default()).unwrap().is_none());
        let settings = OidcSettings::new(source()).unwrap().unwrap();
        assert_eq!((settings.name.as_str(), settings.groups_claim.as_str()), ("id.example", "groups"));
        assert!(!settings.create_users && settings.client_secret.is_none());
        for part in [
            OidcSource { client_id: None, ..source() },
            OidcSource { issuer: None, ..source() },
            OidcSource { create_users: Some(true), ..OidcSource::default() },
        ] {
            assert!(matches!(OidcSettings::new(part), Err(SettingsError::OidcIncomplete)));
        }
    }

    #[test]
    fn an_issuer_needs_tls_beyond_this_machine() {
        for good in ["https://id.example", "http://localhost:9400", "http://127.0.0.1:1/x", "http://[::1]:1"]
        {
            assert!(parse_issuer(good).is_some(), "{good}");
        }
        for wrong in [
            "id.example",
            "http://id.example",
            "https://",
            "ftp://localhost",
            "https://a@b",
            "https://a?b",
            "http://localhost.evil.example",
        ] {
            assert!(parse_issuer(wrong).is_none(), "{wrong}");
        }
    }

    #[test]
    fn groups_give_roles_in_projects() {
        let role = |group: &str, project: &str, role| GroupRole {
            group: group.into(),
            project: project.into(),
            role,
        };
        assert_eq!(
            parse_groups("/team/ml=research:user, cn=leads=research:manager,ops=main:admin,").unwrap(),
            [
                role("/team/ml", "research", ProjectRole::User),
                role("cn=leads", "research", ProjectRole::Manager),
                role("ops", "main", ProjectRole::Admin)
            ]
        );
        for wrong in ["ml", "ml=research", "ml=research:owner", "=research:user", "ml=:user"] {
            assert!(matches!(parse_groups(wrong), Err(SettingsError::OidcGroups { .. })), "{wrong}");
        }
    }
}
