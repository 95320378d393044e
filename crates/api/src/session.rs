//! Sessions of browsers.
//!
//! A session is a cookie that the server sets in exchange for a token or a single-use code. It has the rights of the
//! token that opened it and ends with that token.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use uuid::Uuid;
use windlass_model::time::Timestamp;

use crate::{projects::ProjectRole, users::GlobalRole};

/// Exactly one of the two.
#[derive(Clone, Default, Serialize, Deserialize, JsonSchema)]
pub struct OpenRequest {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub token: Option<String>,
    /// Single-use code of `session/code`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub code: Option<String>,
}

/// Omits the credentials.
impl std::fmt::Debug for OpenRequest {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("OpenRequest").finish_non_exhaustive()
    }
}

/// Ways to log in, besides a token and a code of `windlass ui`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct LoginMethods {
    /// Identity provider with which users log in.
    pub oidc: Option<OidcProvider>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct OidcProvider {
    /// Name for people.
    pub name: String,
}

/// A login that has begun. It belongs to the browser that got the cookie with this response.
#[derive(Clone, Serialize, Deserialize, JsonSchema)]
pub struct OidcLogin {
    /// Page of the identity provider.
    pub url: String,
}

/// Omits the URL, which contains the state of the login.
impl std::fmt::Debug for OidcLogin {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("OidcLogin").finish_non_exhaustive()
    }
}

/// Parameters with which the identity provider sent the browser back.
#[derive(Clone, Serialize, Deserialize, JsonSchema)]
pub struct FinishOidcRequest {
    pub code: String,
    pub state: String,
}

/// Omits the credentials.
impl std::fmt::Debug for FinishOidcRequest {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("FinishOidcRequest").finish_non_exhaustive()
    }
}

#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct SessionUser {
    pub id: Uuid,
    pub username: String,
    pub email: Option<String>,
    pub global_role: GlobalRole,
}

#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct SessionProject {
    pub id: Uuid,
    pub name: String,
    /// Role of the caller; global admins are admins of every project.
    pub role: ProjectRole,
}

/// The caller's session, with what the caller may see.
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct Session {
    pub user: SessionUser,
    /// Sorted by name.
    pub projects: Vec<SessionProject>,
    #[schemars(with = "crate::document::DateTime")]
    pub opened_at: Timestamp,
    /// Latest end of the session.
    #[schemars(with = "crate::document::DateTime")]
    pub expires_at: Timestamp,
    /// True if the browser's connection is neither encrypted nor local.
    pub insecure: bool,
    /// Version of windlass.
    pub server_version: String,
    #[schemars(with = "crate::document::DateTime")]
    pub now: Timestamp,
}

#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct SessionInfo {
    pub id: Uuid,
    /// Address of the last request.
    pub address: String,
    /// Browser and operating system, from `User-Agent`.
    pub browser: String,
    #[schemars(with = "crate::document::DateTime")]
    pub opened_at: Timestamp,
    #[schemars(with = "crate::document::DateTime")]
    pub last_seen_at: Timestamp,
    #[schemars(with = "crate::document::DateTime")]
    pub expires_at: Timestamp,
    /// True for the session of this request.
    pub current: bool,
}

/// Open sessions of the caller, most recently used first.
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct SessionList {
    pub sessions: Vec<SessionInfo>,
}

#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct RevokeRequest {
    pub ids: Vec<Uuid>,
}

/// A code that opens one session.
#[derive(Clone, Serialize, Deserialize, JsonSchema)]
pub struct LoginCode {
    /// Letters, digits, `-` and `_`.
    pub code: String,
    #[schemars(with = "crate::document::DateTime")]
    pub expires_at: Timestamp,
}

/// Omits the code.
impl std::fmt::Debug for LoginCode {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("LoginCode").field("expires_at", &self.expires_at).finish_non_exhaustive()
    }
}
