//! Sessions of browsers.

use axum::http::{HeaderName, header};
use windlass_api::{operations::*, server::EmptyRequest, session::*};

use crate::{
    app::App,
    auth::Caller,
    error::Result,
    http::{ApiRoutes, ResponseHeaders},
    services::{
        oidc,
        sessions::{self, Browser},
    },
};

/// Data that a browser removes when a session is closed.
const CLEARED: &str = "\"cache\", \"storage\"";

pub(super) fn mount(routes: ApiRoutes) -> ApiRoutes {
    routes
        .open_browser::<OpenSession, _, _>(open)
        .open::<ReadLoginMethods, _, _>(read_methods)
        .open_browser::<StartOidcLogin, _, _>(start_oidc)
        .open_browser::<FinishOidcLogin, _, _>(finish_oidc)
        .token_browser::<ReadSession, _, _>(read)
        .token_browser::<CloseSession, _, _>(close)
        .token::<ListSessions, _, _, _>(list)
        .token::<RevokeSessions, _, _, _>(revoke)
        .token::<CreateLoginCode, _, _, _>(create_code)
}

async fn open(app: App, browser: Browser, requested: OpenRequest) -> Result<(Session, ResponseHeaders)> {
    let opened = sessions::open(&app, &browser, requested).await?;
    Ok((opened.session, vec![(header::SET_COOKIE, opened.cookie)]))
}

async fn read_methods(app: App, _: EmptyRequest) -> Result<LoginMethods> {
    Ok(oidc::methods(&app))
}

async fn start_oidc(app: App, browser: Browser, _: EmptyRequest) -> Result<(OidcLogin, ResponseHeaders)> {
    let started = oidc::start(&app, &browser).await?;
    Ok((OidcLogin { url: started.url }, vec![(header::SET_COOKIE, started.cookie)]))
}

async fn finish_oidc(
    app: App,
    browser: Browser,
    requested: FinishOidcRequest,
) -> Result<(Session, ResponseHeaders)> {
    let (opened, ended) = oidc::finish(&app, &browser, requested).await?;
    Ok((opened.session, vec![(header::SET_COOKIE, opened.cookie), (header::SET_COOKIE, ended)]))
}

async fn read(
    app: App,
    caller: Caller,
    browser: Browser,
    _: EmptyRequest,
) -> Result<(Session, ResponseHeaders)> {
    Ok((sessions::read(&app, &caller, &browser).await?, Vec::new()))
}

async fn close(app: App, caller: Caller, browser: Browser, _: EmptyRequest) -> Result<((), ResponseHeaders)> {
    let cookie = sessions::close(&app, &caller, &browser).await?;
    let clear = HeaderName::from_static("clear-site-data");
    Ok(((), vec![(header::SET_COOKIE, cookie), (clear, CLEARED.to_owned())]))
}

async fn list(app: App, caller: Caller, _: EmptyRequest) -> Result<SessionList> {
    sessions::list(&app, &caller).await
}

async fn revoke(app: App, caller: Caller, requested: RevokeRequest) -> Result<()> {
    sessions::revoke(&app, &caller, &requested.ids).await
}

async fn create_code(app: App, caller: Caller, _: EmptyRequest) -> Result<LoginCode> {
    sessions::create_code(&app, &caller).await
}
