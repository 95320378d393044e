//! Login with an identity provider: begun and finished by the same browser, and mapped to users and projects.
//!
//! The state of a login between its halves is in a cookie that only the server can open, so a request without credentials
//! writes nothing. The cookie also ties the login to the browser: a page that another user sends cannot log this
//! browser in as that user.

use std::collections::BTreeMap;

use base64::{Engine as _, engine::general_purpose::URL_SAFE_NO_PAD};
use serde::{Deserialize, Serialize};
use subtle::ConstantTimeEq as _;
use uuid::Uuid;
use windlass_api::{projects::ProjectRole, session as wire};
use windlass_model::{error_chain::format_chain, event::Entity, time::Timestamp};

use super::{
    names,
    projects::membership,
    sessions::{self, Browser, OpenedSession, check_browser, is_insecure},
    users,
};
use crate::{
    app::App,
    auth::Token,
    config::GroupRole,
    db::{
        Unit,
        identities::{self, JoinedProject},
        tokens,
        users::{self as rows, User},
    },
    encryption::AssociatedData,
    error::{Error, Result},
    events::{EventSubject, note},
    oidc::{OidcClient, OidcError, PendingLogin, VerifiedIdentity},
};

/// Cookie of a login that has begun.
pub(crate) const LOGIN_COOKIE: &str = "__Host-windlass-login";
/// The same without TLS on another machine, which `--insecure-web-login` permits.
pub(crate) const INSECURE_LOGIN_COOKIE: &str = "windlass-insecure-login";
/// Time for a login: 10 minutes.
const LOGIN_US: i64 = 600_000_000;
/// Page to which the provider sends the browser.
const RETURN_PATH: &str = "/ui/login";
/// Name of the token to which sessions are bound; no name that a user can choose.
const TOKEN_NAME: &str = "identity provider";
const NAME_LEN_MAX: usize = 40;
/// Numbers that are tried after a name that is taken.
const NAME_NUMBERS: std::ops::Range<u32> = 2..100;

/// Content of the cookie of a login.
#[derive(Serialize, Deserialize)]
struct LoginCookie {
    login: PendingLogin,
    expires_at: i64,
}

/// A login that has begun, with its cookie.
pub(crate) struct StartedLogin {
    pub(crate) url: String,
    pub(crate) cookie: String,
}

pub(crate) fn methods(app: &App) -> wire::LoginMethods {
    let client = app.oidc().filter(|_| app.settings().web_ui);
    wire::LoginMethods {
        oidc: client.map(|client| wire::OidcProvider { name: client.settings().name.clone() }),
    }
}

/// Begins a login.
pub(crate) async fn start(app: &App, browser: &Browser) -> Result<StartedLogin> {
    let client = require_client(app)?;
    check_browser(app, browser)?;
    check_pace(app, browser)?;
    let origin = browser.origin_text.as_deref().unwrap_or_default();
    let started = client.start(format!("{origin}{RETURN_PATH}")).await;
    let (url, login) = started.map_err(|error| unavailable(&error))?;
    let expires_at = app.db().now().await?.0.saturating_add(LOGIN_US);
    let sealed =
        app.keys().seal(&cookie_location(), &serde_json::to_vec(&LoginCookie { login, expires_at })?)?;
    let cookie = set_cookie(&URL_SAFE_NO_PAD.encode(sealed), is_insecure(browser), LOGIN_US / 1_000_000);
    Ok(StartedLogin { url, cookie })
}

/// Opens a session for a browser that the provider sent back. Also returns the header that removes the cookie of the
/// login.
pub(crate) async fn finish(
    app: &App,
    browser: &Browser,
    requested: wire::FinishOidcRequest,
) -> Result<(OpenedSession, String)> {
    let client = require_client(app)?;
    check_browser(app, browser)?;
    check_pace(app, browser)?;
    let outcome = log_in(app, client, browser, requested).await;
    if let (Err(Error::LoginRefused { .. }), Some(address)) = (&outcome, browser.address) {
        app.paces().tried(address)?;
    }
    Ok((outcome?, set_cookie("", is_insecure(browser), 0)))
}

async fn log_in(
    app: &App,
    client: &OidcClient,
    browser: &Browser,
    requested: wire::FinishOidcRequest,
) -> Result<OpenedSession> {
    let login = open_cookie(app, browser, &requested.state).await?;
    let now = app.db().now().await?;
    let identity = client.finish(login, &requested.code, now).await.map_err(|error| {
        if matches!(error, OidcError::Exchange(_) | OidcError::Token(_)) {
            tracing::warn!(error = %format_chain(&error), "failed to log a user in with the identity provider");
            refuse("The identity provider did not confirm this login; try again")
        } else {
            unavailable(&error)
        }
    })?;
    let (user, token) = find_user(app, client, &identity).await?;
    update_projects(app, &user, &client.settings().groups, &identity.groups).await?;
    let token = tokens::find_by_id(app.db(), token).await?;
    let token = token.ok_or_else(|| refuse("This user is not active; ask an admin"))?;
    sessions::open_with(app, browser, &token, None).await
}

/// Secrets of the login that this browser began.
async fn open_cookie(app: &App, browser: &Browser, state: &str) -> Result<PendingLogin> {
    let other = || refuse("This login was not begun in this browser, or more than 10 minutes ago; try again");
    let sealed = browser.login_cookie.as_deref().ok_or_else(other)?;
    let sealed = URL_SAFE_NO_PAD.decode(sealed).map_err(|_| other())?;
    let opened = app.keys().open_sealed(&cookie_location(), &sealed).map_err(|_| other())?;
    let LoginCookie { login, expires_at } = serde_json::from_slice(&opened).map_err(|_| other())?;
    let is_same = bool::from(login.state.as_bytes().ct_eq(state.as_bytes()));
    if is_same && app.db().now().await? < Timestamp(expires_at) { Ok(login) } else { Err(other()) }
}

/// User of an identity, and the token for its sessions.
async fn find_user(app: &App, client: &OidcClient, identity: &VerifiedIdentity) -> Result<(User, Uuid)> {
    let settings = client.settings();
    let known = identities::find(app.db(), &settings.issuer, &identity.subject).await?;
    if let Some(known) = known.as_ref().filter(|known| !known.user.deleted) {
        if !known.user.active {
            return Err(refuse("This user is not active; ask an admin"));
        }
        let token = record(app, client, identity, &known.user, Some(known.token)).await?;
        return Ok((known.user.clone(), token));
    }
    let user = match find_by_email(app, identity).await? {
        Some(user) => user,
        // An admin who deletes a user means this person.
        None if known.is_some() => return Err(refuse("The user of this identity was deleted; ask an admin")),
        None if settings.create_users => create_user(app, identity).await?,
        None => return Err(refuse_unknown(identity)),
    };
    let token = record(app, client, identity, &user, None).await?;
    Ok((user, token))
}

/// The only active user with the verified address of an identity.
async fn find_by_email(app: &App, identity: &VerifiedIdentity) -> Result<Option<User>> {
    let Some(email) = &identity.email else { return Ok(None) };
    let mut found = rows::by_email(app.db(), email).await?;
    Ok(if found.len() == 1 { found.pop() } else { None })
}

fn refuse_unknown(identity: &VerifiedIdentity) -> Error {
    let msg = match &identity.email {
        Some(email) => format!(
            "No user has the address {email}; an admin adds one with `windlass user create NAME --email {email}`"
        ),
        None => {
            "The identity provider confirms no e-mail address of this user, and users are not created at \
                 their first login (`oidc_create_users`)"
                .to_owned()
        }
    };
    Error::LoginRefused { msg: msg.into() }
}

async fn create_user(app: &App, identity: &VerifiedIdentity) -> Result<User> {
    let local = identity.email.as_deref().and_then(|email| email.split('@').next());
    let base = to_name(identity.username.as_deref().or(local).unwrap_or_default());
    let base = if names::check_user(&base).is_ok() { base } else { "user".to_owned() };
    let numbered = NAME_NUMBERS.map(|number| format!("{base}-{number}"));
    for name in std::iter::once(base.clone()).chain(numbered) {
        if rows::is_name_taken(app.db(), &name).await? {
            continue;
        }
        let (id, _) = users::add(app, None, &name, false, identity.email.as_deref(), true, None).await?;
        let user = rows::by_ids(app.db(), &[id]).await?.pop();
        return user.ok_or_else(|| Error::absent("User"));
    }
    Err(Error::refused(format!("the user name `{base}` is taken, and so are those with numbers")))
}

/// A name of a provider as the name of a user: letters, digits, `-` and `_`.
fn to_name(text: &str) -> String {
    let text = text.split('@').next().unwrap_or_default().to_lowercase();
    let mut name = String::new();
    for letter in text.chars().take(NAME_LEN_MAX) {
        let is_allowed = letter.is_ascii_alphanumeric() || matches!(letter, '-' | '_');
        name.push(if is_allowed { letter } else { '-' });
    }
    name.trim_matches('-').to_owned()
}

/// Records a login. Returns the token for its sessions, a new one unless the previous one is still valid.
async fn record(
    app: &App,
    client: &OidcClient,
    identity: &VerifiedIdentity,
    user: &User,
    previous: Option<Uuid>,
) -> Result<Uuid> {
    let issuer = &client.settings().issuer;
    if let Some(token) = previous
        && tokens::find_by_id(app.db(), token).await?.is_some()
    {
        let unit = Unit::new().and([identities::record_login(issuer, &identity.subject, user.id, token)]);
        app.db().write(unit).await?.done()?;
        return Ok(token);
    }
    let (id, token) = (app.db().new_id()?, Token::draw()?);
    let subject = EventSubject { entity: Entity::User, id: user.id.0, name: &user.name, project: None };
    let created =
        tokens::create_named(id, user.id, (&token.hash(), ""), tokens::FULL_SCOPE, TOKEN_NAME, None);
    let message = format!("Identity of {issuer} linked");
    let unit = Unit::new()
        .and([tokens::revoke_named_if_any(user.id, TOKEN_NAME), created])
        .and([identities::record_login(issuer, &identity.subject, user.id, id)])
        .and(note(app.db(), None, &subject, "identity_linked", message)?);
    app.db().write(unit).await?.done()?;
    app.access().forget();
    Ok(id)
}

/// Gives and takes memberships by groups. Members who were added by hand keep their roles.
async fn update_projects(app: &App, user: &User, roles: &[GroupRole], groups: &[String]) -> Result<()> {
    let wanted = wanted_roles(roles, groups);
    let names: Vec<String> = wanted.keys().map(|name| (*name).to_owned()).collect();
    let joined = identities::joined(app.db(), user.id, &names).await?;
    for name in names.iter().filter(|name| joined.iter().all(|joined| joined.name != **name)) {
        tracing::warn!(project = %name, "a group of the identity provider is mapped to a project that does not exist");
    }
    let mut unit = Unit::new();
    let mut is_changed = false;
    for project in &joined {
        let role = wanted.get(project.name.as_str()).copied();
        let Some((message, changes)) = change(project, role, user) else { continue };
        let subject = EventSubject {
            entity: Entity::Project,
            id: project.project.0,
            name: &project.name,
            project: Some(project.project),
        };
        unit = unit.and(changes).and(note(app.db(), Some(user.id), &subject, "members_changed", message)?);
        is_changed = true;
    }
    if is_changed {
        app.db().write(unit).await?.done()?;
        app.access().forget();
    }
    Ok(())
}

/// The highest role in each project.
fn wanted_roles<'a>(roles: &'a [GroupRole], groups: &[String]) -> BTreeMap<&'a str, ProjectRole> {
    let rank = |role| match role {
        ProjectRole::User => 0,
        ProjectRole::Manager => 1,
        ProjectRole::Admin => 2,
    };
    let mut wanted = BTreeMap::new();
    for given in roles.iter().filter(|given| groups.contains(&given.group)) {
        let role = wanted.entry(given.project.as_str()).or_insert(given.role);
        if rank(given.role) > rank(*role) {
            *role = given.role;
        }
    }
    wanted
}

/// Changes that give a user this role in a project, with the text of their event. `None` if there are none.
fn change(
    project: &JoinedProject,
    role: Option<ProjectRole>,
    user: &User,
) -> Option<(String, Vec<crate::db::Change>)> {
    let id = project.project;
    let wanted = role.map(membership);
    match (&project.role, wanted) {
        (None, Some(wanted)) => Some((
            format!("User `{}` joined by a group as {}", user.name, wanted.role),
            identities::join(id, user.id, &wanted.role, wanted.can_manage_secrets),
        )),
        (Some(role), Some(wanted)) if project.by_group && *role != wanted.role => Some((
            format!("User `{}` is {} by a group", user.name, wanted.role),
            vec![identities::change_role(id, user.id, &wanted.role, wanted.can_manage_secrets)],
        )),
        (_, None) if project.by_group => {
            Some((format!("User `{}` left with the group", user.name), identities::leave(id, user.id)))
        }
        _ => None,
    }
}

fn require_client(app: &App) -> Result<&OidcClient> {
    app.oidc().ok_or_else(|| Error::refused("this server has no identity provider (`oidc_issuer`)"))
}

fn check_pace(app: &App, browser: &Browser) -> Result<()> {
    browser.address.map_or(Ok(()), |address| app.paces().check_login(address))
}

fn refuse(msg: &'static str) -> Error {
    Error::LoginRefused { msg: msg.into() }
}

/// Failures that the operator has to look at. Browsers receive no addresses.
fn unavailable(error: &OidcError) -> Error {
    tracing::warn!(error = %format_chain(error), "the identity provider cannot be used");
    Error::refused("the identity provider cannot be used; the log of the server has the reason")
}

fn cookie_location() -> AssociatedData<'static> {
    AssociatedData { table: "oidc_login", owner: Uuid::nil(), name: "cookie", version: 1 }
}

/// Value of `Set-Cookie`; a lifetime of zero removes the cookie.
fn set_cookie(value: &str, insecure: bool, seconds: i64) -> String {
    let (name, secure) = if insecure { (INSECURE_LOGIN_COOKIE, "") } else { (LOGIN_COOKIE, " Secure;") };
    format!("{name}={value}; Path=/;{secure} HttpOnly; SameSite=Strict; Max-Age={seconds}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_highest_role_of_all_groups_counts() {
        let role = |group: &str, project: &str, role| GroupRole {
            group: group.into(),
            project: project.into(),
            role,
        };
        let roles = [
            role("ml", "research", ProjectRole::User),
            role("leads", "research", ProjectRole::Manager),
            role("ops", "main", ProjectRole::Admin),
        ];
        let of = |groups: &[&str]| {
            let groups: Vec<String> = groups.iter().map(|group| (*group).to_owned()).collect();
            wanted_roles(&roles, &groups)
                .into_iter()
                .map(|(name, role)| (name.to_owned(), role))
                .collect::<Vec<_>>()
        };
        assert_eq!(of(&["leads", "ml"]), [("research".to_owned(), ProjectRole::Manager)]);
        assert_eq!(of(&["ml", "ops", "x"]).len(), 2);
        assert!(of(&[]).is_empty());
    }

    #[test]
    fn names_of_the_provider_become_names_of_users() {
        for (text, name) in [
            ("Ada.Lovelace", "ada-lovelace"),
            ("ada@example.org", "ada"),
            ("Grüße", "gr--e"),
            ("--x--", "x"),
            ("", ""),
        ] {
            assert_eq!(to_name(text), name, "{text}");
        }
    }
}
