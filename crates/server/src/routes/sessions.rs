//! Sessions of browsers.

use axum::http::{HeaderName, header};
use windlass_api::{operations::*, server::EmptyRequest, session::*};

use crate::{
    app::App,
    auth::Caller,
    error::Result,
    http::{ApiRoutes, ResponseHeaders},
    services::sessions::{self, Browser},
};

/// Data that a browser removes when a session is closed.
const CLEARED: &str = "\"cache\", \"storage\"";

pub(super) fn mount(routes: ApiRoutes) -> ApiRoutes {
    routes
        .open_browser::<OpenSession, _, _>(open)
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
