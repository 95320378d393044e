//! Credentials of a request: a token, or the cookie of a browser's session.
//!
//! A browser attaches its cookie to every request to this host, whichever page causes it. So a cookie counts only if
//! the request verifiably comes from the web UI: its `Origin` is this server, and it has a header that no other page can
//! add without permission, which this server never gives.

use std::net::IpAddr;

use axum::http::{HeaderMap, header};
use windlass_api::{Body, Method, Operation};

use super::incoming::IncomingRequest;
use crate::{
    app::App,
    auth::{self, Caller},
    error::{Error, Result},
    peer::EncryptedConnection,
    services::{
        oidc::{INSECURE_LOGIN_COOKIE, LOGIN_COOKIE},
        sessions::{Browser, BrowserOrigin, INSECURE_COOKIE},
    },
};

pub(crate) use windlass_gateway::SESSION_COOKIE;

/// Header of every request of the web UI.
const UI_HEADER: &str = "x-windlass-ui";

/// Credentials that the caller presented.
#[derive(Clone)]
pub(super) enum Credentials {
    None,
    /// `Authorization`.
    Header(String),
    /// Cookie of a session, of a request that comes from the web UI.
    Session {
        cookie: String,
        peer: Option<IpAddr>,
    },
}

impl Credentials {
    pub(super) fn of<O: Operation>(app: &App, arrived: &IncomingRequest) -> Result<Self> {
        if let Some(authorization) = arrived.authorization() {
            return Ok(Self::Header(authorization.to_owned()));
        }
        let headers = arrived.request.headers();
        let Some(cookie) = session_cookie(app, headers) else { return Ok(Self::None) };
        require_web_ui::<O>(arrived)?;
        Ok(Self::Session { cookie: cookie.to_owned(), peer: arrived.peer() })
    }

    /// Finds the user.
    pub(super) async fn authenticate(&self, app: &App) -> Result<Caller> {
        match self {
            Self::None => Err(Error::Unauthenticated),
            Self::Header(authorization) => auth::authenticate(app, Some(authorization)).await,
            Self::Session { cookie, peer } => auth::authenticate_session(app, cookie, *peer).await,
        }
    }

    pub(super) fn header(&self) -> Option<&str> {
        match self {
            Self::Header(authorization) => Some(authorization),
            Self::None | Self::Session { .. } => None,
        }
    }
}

/// Value of the cookie of a session.
pub(crate) fn session_cookie<'a>(app: &App, headers: &'a HeaderMap) -> Option<&'a str> {
    find_cookie(app, headers, SESSION_COOKIE, INSECURE_COOKIE)
}

/// Value of a cookie, or of the one that replaces it without TLS if that is permitted.
fn find_cookie<'a>(app: &App, headers: &'a HeaderMap, secure: &str, insecure: &str) -> Option<&'a str> {
    let allows_insecure = app.settings().insecure_web_login;
    headers
        .get_all(header::COOKIE)
        .iter()
        .filter_map(|value| value.to_str().ok())
        .flat_map(|value| value.split(';'))
        .filter_map(|cookie| cookie.trim().split_once('='))
        .find(|(name, _)| *name == secure || (allows_insecure && *name == insecure))
        .map(|(_, value)| value)
}

/// Rejects a request with a cookie that another page may have caused.
fn require_web_ui<O: Operation>(arrived: &IncomingRequest) -> Result<()> {
    let headers = arrived.request.headers();
    let foreign = |msg: &'static str| Err(Error::Denied { msg: msg.into() });
    match arrived.browser_origin() {
        Some(origin) if origin.is_own => {}
        Some(_) => return foreign("The request comes from a page of another origin"),
        None if O::METHOD == Method::Get && !is_foreign_fetch(headers) => {}
        None => return foreign("A request with the cookie of a session must have the header `Origin`"),
    }
    // A WebSocket cannot have the header, but browsers send `Origin` with each.
    let is_socket = O::BODY == Body::Stream && arrived.browser_origin().is_some();
    // A link cannot have the header; it only reads, and the cookie is not sent with links of other sites.
    let is_download = O::METHOD == Method::Get && is_download(arrived.request.uri().query());
    if !is_download && !is_socket && headers.get(UI_HEADER).is_none_or(|value| value != "1") {
        return foreign("A request with the cookie of a session must have the header `X-Windlass-UI: 1`");
    }
    if O::BODY == Body::Json && !is_json(headers) {
        return foreign("A request with the cookie of a session must have the type `application/json`");
    }
    Ok(())
}

/// Returns whether the browser states that another page caused the request.
pub(crate) fn is_foreign_fetch(headers: &HeaderMap) -> bool {
    headers.get("sec-fetch-site").is_some_and(|site| site != "same-origin" && site != "none")
}

fn is_download(query: Option<&str>) -> bool {
    query.is_some_and(|query| query.split('&').any(|pair| pair == "download=1"))
}

fn is_json(headers: &HeaderMap) -> bool {
    let kind = headers.get(header::CONTENT_TYPE).and_then(|kind| kind.to_str().ok()).unwrap_or_default();
    kind.split(';').next().is_some_and(|kind| kind.trim().eq_ignore_ascii_case("application/json"))
}

impl IncomingRequest {
    /// Origin of the page that caused the request.
    pub(super) fn browser_origin(&self) -> Option<BrowserOrigin> {
        let headers = self.request.headers();
        let origin = headers.get(header::ORIGIN)?;
        let host = self.request.uri().authority().map(|authority| authority.as_str());
        let host = host.or_else(|| headers.get(header::HOST)?.to_str().ok());
        let is_encrypted = self.request.extensions().get::<EncryptedConnection>().is_some();
        Some(BrowserOrigin::parse(
            origin.to_str().unwrap_or_default(),
            host.unwrap_or_default(),
            is_encrypted,
        ))
    }

    /// Browser that sent the request.
    pub(super) fn browser(&self, app: &App) -> Browser {
        let headers = self.request.headers();
        let agent = headers.get(header::USER_AGENT).and_then(|agent| agent.to_str().ok());
        Browser {
            origin: self.browser_origin(),
            origin_text: headers
                .get(header::ORIGIN)
                .and_then(|origin| origin.to_str().ok())
                .map(str::to_owned),
            login_cookie: find_cookie(app, headers, LOGIN_COOKIE, INSECURE_LOGIN_COOKIE).map(str::to_owned),
            is_web_ui: headers.get(UI_HEADER).is_some_and(|value| value == "1"),
            user_agent: agent.unwrap_or_default().to_owned(),
            address: self.peer(),
        }
    }
}
