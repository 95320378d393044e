//! Sessions of browsers: opened with a token or a single-use code, listed and ended.

use std::net::IpAddr;

use uuid::Uuid;
use windlass_api::{
    session as wire,
    users::{GlobalRole, TokenScope},
};
use windlass_model::{event::Entity, time::Timestamp};

use crate::{
    app::App,
    auth::{self, Caller, Credential, Token},
    db::{
        Unit, WriteOutcome, projects,
        sessions::{self, CODE_LIFETIME_US, Session},
        tokens,
    },
    error::{Error, Result},
    events::{EventSubject, note},
};

/// Cookie without TLS on another machine, which `--insecure-web-login` permits: browsers accept no `__Host-` cookie
/// there.
pub(crate) const INSECURE_COOKIE: &str = "windlass-insecure-session";
/// Maximum number of open sessions per user. The least recently used ones are closed.
const SESSIONS_MAX: usize = 100;
const BROWSER_LEN_MAX: usize = 80;

/// Origin of the page that caused a request, relative to this server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct BrowserOrigin {
    /// True if it is this server.
    pub(crate) is_own: bool,
    /// True if browsers accept `Secure` cookies there: TLS, or this machine.
    pub(crate) is_secure: bool,
}

impl BrowserOrigin {
    /// Parses `Origin`. A proxy may end TLS in front of the server, so on a plain connection both schemes are its own;
    /// a page can choose neither `Origin` nor `Host`.
    pub(crate) fn parse(origin: &str, host: &str, is_encrypted: bool) -> Self {
        let (scheme, authority) = origin.split_once("://").unwrap_or_default();
        let is_https = scheme == "https";
        let is_own = !authority.is_empty()
            && authority.eq_ignore_ascii_case(host)
            && (is_https || (scheme == "http" && !is_encrypted));
        Self { is_own, is_secure: is_https || is_loopback(authority) }
    }
}

fn is_loopback(authority: &str) -> bool {
    let host = match authority.strip_prefix('[').and_then(|rest| rest.split_once(']')) {
        Some((host, _)) => host,
        None => authority.split(':').next().unwrap_or_default(),
    };
    host == "localhost"
        || host.ends_with(".localhost")
        || host.parse::<IpAddr>().is_ok_and(|address| address.is_loopback())
}

/// The browser that opens a session.
#[derive(Debug)]
pub(crate) struct Browser {
    pub(crate) origin: Option<BrowserOrigin>,
    /// `Origin` as sent.
    pub(crate) origin_text: Option<String>,
    /// Cookie of a login that has begun.
    pub(crate) login_cookie: Option<String>,
    /// True if the request has the header of the web UI.
    pub(crate) is_web_ui: bool,
    pub(crate) user_agent: String,
    pub(crate) address: Option<IpAddr>,
}

/// A session that was just opened, with its cookie.
pub(crate) struct OpenedSession {
    pub(crate) session: wire::Session,
    pub(crate) cookie: String,
}

/// Opens a session.
pub(crate) async fn open(
    app: &App,
    browser: &Browser,
    requested: wire::OpenRequest,
) -> Result<OpenedSession> {
    let (token, used_code) = match (requested.token, requested.code) {
        (Some(token), None) => {
            check_browser(app, browser)?;
            (find_token(app, browser, &token).await?, None)
        }
        (None, Some(code)) => {
            check_browser(app, browser)?;
            let hash = Token::chosen(&code).hash();
            (find_code(app, browser, &hash).await?, Some(hash))
        }
        _ => return Err(Error::refused("expected either `token` or `code`")),
    };
    open_with(app, browser, &token, used_code.as_deref()).await
}

/// Opens a session with the rights of a token, and makes the code invalid.
pub(crate) async fn open_with(
    app: &App,
    browser: &Browser,
    token: &tokens::ValidToken,
    used_code: Option<&str>,
) -> Result<OpenedSession> {
    let cookie = Token::draw_session()?;
    let id = app.db().new_id()?;
    let address = browser.address.map(|address| address.to_string()).unwrap_or_default();
    let described = describe_browser(&browser.user_agent);
    let life = app.settings().limits.web_sessions.life;
    let user = &token.user;
    let subject = EventSubject { entity: Entity::User, id: user.id.0, name: &user.name, project: None };
    let unit = Unit::new()
        .and(used_code.map(sessions::use_code))
        .and([sessions::open(id, &cookie.hash(), token.id, user.id, &address, &described, life)])
        .and(note(
            app.db(),
            Some(user.id),
            &subject,
            "session_opened",
            format!("Session opened from {address}"),
        )?);
    let opened_at = match app.db().write(unit).await? {
        WriteOutcome::Done { now, .. } => Timestamp(now),
        WriteOutcome::Stale { .. } => return Err(refused_code()),
    };
    close_unused(app, token).await?;
    let session = Session {
        id,
        address,
        browser: described,
        opened_at,
        last_seen_at: opened_at,
        expires_at: opened_at + life,
    };
    let is_insecure = is_insecure(browser);
    let session = to_wire(app, &token.user, &session, is_insecure).await?;
    let cookie = set_cookie(cookie.text(), is_insecure, life.as_secs());
    Ok(OpenedSession { session, cookie })
}

pub(crate) fn is_insecure(browser: &Browser) -> bool {
    !browser.origin.is_some_and(|origin| origin.is_secure)
}

/// Rejects requests that another page may have caused, and browsers that would send the cookie in plain text.
pub(crate) fn check_browser(app: &App, browser: &Browser) -> Result<()> {
    if !app.settings().web_ui {
        return Err(Error::denied_with("this server has no web UI (`no_ui`)".into()));
    }
    if !browser.origin.is_some_and(|origin| origin.is_own) || !browser.is_web_ui {
        return Err(Error::denied_with("sessions can only be opened by the web UI of this server".into()));
    }
    if is_insecure(browser) && !app.settings().insecure_web_login {
        return Err(Error::denied_with(
            "log in through HTTPS or from the machine of the server: on this connection others could read \
             the token. Start the server with `--tls-port`, or open an SSH tunnel to it; \
             `--insecure-web-login` permits the login without encryption"
                .into(),
        ));
    }
    Ok(())
}

/// Finds a token, at the pace at which tokens may be guessed.
async fn find_token(app: &App, browser: &Browser, token: &str) -> Result<tokens::ValidToken> {
    let authorization = format!("Bearer {token}");
    let is_guess = !auth::is_unguessable(app, Some(&authorization));
    if let Some(address) = browser.address.filter(|_| is_guess) {
        app.paces().check_login(address)?;
    }
    let found = tokens::find(app.db(), &Token::chosen(token).hash()).await?;
    let Some(found) = found else {
        if let Some(address) = browser.address {
            app.paces().tried(address)?;
        }
        return Err(Error::LoginRefused { msg: "This token is not valid".into() });
    };
    require_scope(&found)?;
    Ok(found)
}

async fn find_code(app: &App, browser: &Browser, hash: &str) -> Result<tokens::ValidToken> {
    if let Some(address) = browser.address {
        app.paces().check_login(address)?;
    }
    let token = sessions::find_code(app.db(), hash).await?;
    let found = match token {
        Some(token) => tokens::find_by_id(app.db(), token).await?,
        None => None,
    };
    let Some(found) = found else {
        if let Some(address) = browser.address {
            app.paces().tried(address)?;
        }
        return Err(refused_code());
    };
    require_scope(&found)?;
    Ok(found)
}

fn refused_code() -> Error {
    Error::LoginRefused { msg: "This code was used already or has expired; run `windlass ui` again".into() }
}

/// A token that permits no operation opens no session.
fn require_scope(token: &tokens::ValidToken) -> Result<()> {
    if auth::parse_scope(&token.scope) == TokenScope::Services {
        return Err(Error::LoginRefused {
            msg: "The scope of this token permits only requests to services".into(),
        });
    }
    Ok(())
}

/// Closes the least recently used sessions of a user who has too many.
async fn close_unused(app: &App, token: &tokens::ValidToken) -> Result<()> {
    let open =
        sessions::list_by_user(app.db(), token.user.id, app.settings().limits.web_sessions.idle).await?;
    let unused: Vec<Uuid> = open.iter().skip(SESSIONS_MAX).map(|session| session.id).collect();
    if !unused.is_empty() {
        app.db().write(Unit::new().and([sessions::delete(token.user.id, &unused)])).await?.done()?;
        app.access().forget();
    }
    Ok(())
}

/// Session of the caller.
pub(crate) async fn read(app: &App, caller: &Caller, browser: &Browser) -> Result<wire::Session> {
    let session = caller.session().ok_or_else(|| Error::refused("the request has no session but a token"))?;
    to_wire(app, &caller.user, session, is_insecure(browser)).await
}

/// Ends the session of the caller. Returns the header that removes its cookie.
pub(crate) async fn close(app: &App, caller: &Caller, browser: &Browser) -> Result<String> {
    if let Some(session) = caller.session() {
        delete(app, caller, &[session.id]).await?;
    }
    Ok(set_cookie("", is_insecure(browser), 0))
}

pub(crate) async fn list(app: &App, caller: &Caller) -> Result<wire::SessionList> {
    let current = caller.session().map(|session| session.id);
    let found =
        sessions::list_by_user(app.db(), caller.user.id, app.settings().limits.web_sessions.idle).await?;
    let sessions = found
        .into_iter()
        .map(|session| wire::SessionInfo {
            current: Some(session.id) == current,
            id: session.id,
            address: session.address,
            browser: session.browser,
            opened_at: session.opened_at,
            last_seen_at: session.last_seen_at,
            expires_at: session.expires_at,
        })
        .collect();
    Ok(wire::SessionList { sessions })
}

/// Ends sessions of the caller. Ids of others have no effect.
pub(crate) async fn revoke(app: &App, caller: &Caller, ids: &[Uuid]) -> Result<()> {
    delete(app, caller, ids).await
}

async fn delete(app: &App, caller: &Caller, ids: &[Uuid]) -> Result<()> {
    app.db().write(Unit::new().and([sessions::delete(caller.user.id, ids)])).await?.done()?;
    app.access().forget();
    Ok(())
}

/// Creates a code that opens one session with the rights of the presented token.
pub(crate) async fn create_code(app: &App, caller: &Caller) -> Result<wire::LoginCode> {
    if !app.settings().web_ui {
        return Err(Error::refused("this server has no web UI (`no_ui`)"));
    }
    let Credential::Token(token) = caller.credential else {
        return Err(Error::denied_with("a session cannot open another one; use a token".into()));
    };
    let code = Token::draw()?;
    let (_, text) = code.text().split_once('_').unwrap_or_default();
    let created = sessions::create_code(&Token::chosen(text).hash(), token);
    let (now, _) = app.db().write(Unit::new().and([created])).await?.done()?;
    let expires_at = Timestamp(now.saturating_add(CODE_LIFETIME_US));
    Ok(wire::LoginCode { code: text.to_owned(), expires_at })
}

async fn to_wire(
    app: &App,
    user: &crate::db::users::User,
    session: &Session,
    insecure: bool,
) -> Result<wire::Session> {
    let mut projects: Vec<wire::SessionProject> = projects::visible(app.db(), user.id, user.admin)
        .await?
        .into_iter()
        .map(|(id, name, role)| wire::SessionProject {
            id: id.0,
            name,
            role: super::projects::parse_role(&role),
        })
        .collect();
    projects.sort_by(|one, other| one.name.cmp(&other.name));
    Ok(wire::Session {
        user: wire::SessionUser {
            id: user.id.0,
            username: user.name.clone(),
            email: user.email.clone(),
            global_role: if user.admin { GlobalRole::Admin } else { GlobalRole::User },
        },
        projects,
        opened_at: session.opened_at,
        expires_at: session.expires_at,
        insecure,
        server_version: env!("CARGO_PKG_VERSION").to_owned(),
        now: app.db().now().await?,
    })
}

/// Value of `Set-Cookie`; a lifetime of zero removes the cookie.
fn set_cookie(value: &str, insecure: bool, seconds: i64) -> String {
    let (name, secure) =
        if insecure { (INSECURE_COOKIE, "") } else { (windlass_gateway::SESSION_COOKIE, " Secure;") };
    format!("{name}={value}; Path=/;{secure} HttpOnly; SameSite=Strict; Max-Age={seconds}")
}

/// Browser and operating system of a `User-Agent`, in a few words.
fn describe_browser(agent: &str) -> String {
    // Each browser also names those that it is compatible with, so the order matters.
    let browsers = [
        ("Edg/", "Edge"),
        ("OPR/", "Opera"),
        ("Firefox/", "Firefox"),
        ("Chrome/", "Chrome"),
        ("Version/", "Safari"),
    ];
    let systems = [
        ("Android", "Android"),
        ("iPhone", "iPhone"),
        ("iPad", "iPad"),
        ("Windows", "Windows"),
        ("Mac OS X", "macOS"),
        ("Linux", "Linux"),
    ];
    let browser = browsers.iter().find_map(|(mark, name)| {
        let version = agent.split_once(mark)?.1;
        Some(format!("{name} {}", version.split(['.', ' ']).next().unwrap_or_default()))
    });
    let system = systems.iter().find(|(mark, _)| agent.contains(mark)).map(|(_, name)| *name);
    match (browser, system) {
        (Some(browser), Some(system)) => format!("{browser}, {system}"),
        (Some(browser), None) => browser,
        (None, _) => agent.chars().filter(|char| !char.is_control()).take(BROWSER_LEN_MAX).collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::{BrowserOrigin, describe_browser, set_cookie};

    #[test]
    fn an_origin_is_own_if_scheme_host_and_port_are_those_of_the_server() {
        let parse = |origin, host, encrypted| {
            let origin = BrowserOrigin::parse(origin, host, encrypted);
            (origin.is_own, origin.is_secure)
        };
        assert_eq!(parse("http://localhost:3000", "localhost:3000", false), (true, true));
        assert_eq!(parse("http://127.0.0.1:3000", "127.0.0.1:3000", false), (true, true));
        assert_eq!(parse("http://[::1]:3000", "[::1]:3000", false), (true, true));
        assert_eq!(parse("https://windlass.example", "windlass.example", true), (true, true));
        assert_eq!(
            parse("https://windlass.example", "windlass.example", false),
            (true, true),
            "behind a proxy"
        );
        assert_eq!(parse("http://windlass.example", "windlass.example", false), (true, false));
        assert_eq!(parse("http://windlass.example", "windlass.example", true), (false, false), "downgraded");
        assert_eq!(parse("http://localhost:3001", "localhost:3000", false), (false, true), "another port");
        assert_eq!(parse("http://evil.example", "localhost:3000", false), (false, false));
        assert_eq!(parse("null", "localhost:3000", false), (false, false), "a sandboxed page");
        assert_eq!(parse("", "", false), (false, false));
    }

    #[test]
    fn cookies_are_kept_from_scripts_and_other_sites() {
        let secure = set_cookie("x", false, 60);
        assert_eq!(
            secure,
            "__Host-windlass-session=x; Path=/; Secure; HttpOnly; SameSite=Strict; Max-Age=60"
        );
        let insecure = set_cookie("x", true, 0);
        assert_eq!(insecure, "windlass-insecure-session=x; Path=/; HttpOnly; SameSite=Strict; Max-Age=0");
    }

    #[test]
    fn browsers_are_described_in_a_few_words() {
        let chrome = "Mozilla/5.0 (X11; Linux x86_64) AppleWebKit/537.36 (KHTML, like Gecko) Chrome/156.0.0.0 Safari/537.36";
        assert_eq!(describe_browser(chrome), "Chrome 156, Linux");
        let firefox = "Mozilla/5.0 (Windows NT 10.0; Win64; x64; rv:140.0) Gecko/20100101 Firefox/140.0";
        assert_eq!(describe_browser(firefox), "Firefox 140, Windows");
        let safari = "Mozilla/5.0 (Macintosh; Intel Mac OS X 10_15_7) AppleWebKit/605.1.15 Version/26.1 Safari/605.1.15";
        assert_eq!(describe_browser(safari), "Safari 26, macOS");
        assert_eq!(describe_browser("curl/8.5"), "curl/8.5");
    }
}
