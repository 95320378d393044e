//! Users, their tokens and keys.

use ssh_key::{HashAlg, PublicKey};
use windlass_api::{
    error::ApiErrorCode,
    users::{self as wire, TokenScope},
};
use windlass_model::{event::Entity, id::UserId};

use super::names;
use crate::{
    app::App,
    auth::{Caller, Token},
    db::{
        Page, Unit, WriteOutcome, tokens,
        users::{self, NewUser, User},
    },
    encryption::AssociatedData,
    error::{Error, Result},
    events::{EventSubject, note},
    ssh_keys::generate_key_pair,
};

const LIST_MAX: i64 = 2000;
const PUBLIC_KEYS_MAX: usize = 100;
/// Maximum number of tokens per user, besides the first.
const TOKENS_MAX: usize = 100;
/// Ten years.
const EXPIRES_IN_MAX: i64 = 10 * 365 * 24 * 3600;

pub fn to_wire(user: &User) -> wire::User {
    wire::User {
        id: user.id.0,
        username: user.name.clone(),
        created_at: Some(user.created_at),
        global_role: if user.admin { wire::GlobalRole::Admin } else { wire::GlobalRole::User },
        email: user.email.clone(),
        active: user.active,
        permissions: wire::Permissions {
            can_create_projects: true,
            can_use_queue: user.admin || user.can_use_queue,
        },
        ssh_public_key: user.ssh_public_key.clone(),
    }
}

/// Lifetime of the tokens that the server generates; `None`: no expiry.
fn token_ttl(app: &App) -> Option<i64> {
    app.settings().token_expiry.map(|life| life.0)
}

/// Adds the private key if users request themselves, and the token if it is known.
async fn with_creds(
    app: &App,
    caller: &Caller,
    user: &User,
    token: Option<&Token>,
) -> Result<wire::UserWithCreds> {
    let private = if user.id == caller.user.id {
        let sealed = users::ssh_private_key(app.db(), user.id).await?;
        sealed.map(|sealed| open_key(app, user.id, &sealed)).transpose()?
    } else {
        None
    };
    let wire::User { id, username, created_at, global_role, email, active, permissions, ssh_public_key } =
        to_wire(user);
    Ok(wire::UserWithCreds {
        id,
        username,
        created_at,
        global_role,
        email,
        active,
        permissions,
        ssh_public_key,
        creds: wire::Creds { token: token.map(|token| token.text().to_owned()).unwrap_or_default() },
        ssh_private_key: private,
    })
}

pub async fn list(app: &App, caller: &Caller, requested: wire::ListRequest) -> Result<wire::UserList> {
    let page = Page {
        time: requested.prev_created_at,
        id: requested.prev_id,
        limit: requested.limit.clamp(0, LIST_MAX),
        ascending: requested.ascending,
        ..Page::default()
    };
    let (users, count) = if caller.user.admin {
        users::list(app.db(), requested.name_pattern.as_deref(), &page).await?
    } else {
        (vec![User::clone(&caller.user)], 1)
    };
    let users = users.iter().map(to_wire).collect();
    if requested.return_total_count {
        return Ok(wire::UserList::Counted { total_count: Some(count), users });
    }
    Ok(wire::UserList::Plain(users))
}

pub async fn read_self(app: &App, caller: &Caller) -> Result<wire::UserWithCreds> {
    // The cached caller may be slightly old; the response must not be.
    let user = find(app, &caller.user.name).await?;
    let mut shown = with_creds(app, caller, &user, caller.shown_token()).await?;
    // The key gives access to jobs: it is only for tokens with full scope.
    if caller.scope != TokenScope::All {
        shown.ssh_private_key = None;
    }
    Ok(shown)
}

pub async fn read(app: &App, caller: &Caller, name: &str) -> Result<wire::UserWithCreds> {
    caller.require_user(name)?;
    let user = find(app, name).await?;
    let own = caller.shown_token().filter(|_| user.id == caller.user.id);
    with_creds(app, caller, &user, own).await
}

async fn find(app: &App, name: &str) -> Result<User> {
    users::by_name(app.db(), name).await?.ok_or_else(|| Error::absent("User"))
}

/// Creates a user. The response contains the new user's token, which is never shown again.
pub async fn create(
    app: &App,
    caller: &Caller,
    requested: wire::CreateRequest,
) -> Result<wire::UserWithCreds> {
    let admin = requested.global_role == wire::GlobalRole::Admin;
    let (id, token) = add(
        app,
        Some(caller.user.id),
        &requested.username,
        admin,
        requested.email.as_deref(),
        requested.active,
        None,
    )
    .await?;
    if requested.can_use_queue == Some(true) {
        app.db().write(Unit::new().and([users::set_can_use_queue(id, true)])).await?.done()?;
    }
    let mut users = users::by_ids(app.db(), &[id]).await?;
    let user = users.pop().ok_or_else(|| Error::absent("User"))?;
    with_creds(app, caller, &user, Some(&token)).await
}

/// Adds a user with a key pair and a token, all in one unit.
pub async fn add(
    app: &App,
    by: Option<UserId>,
    name: &str,
    admin: bool,
    email: Option<&str>,
    active: bool,
    token: Option<Token>,
) -> Result<(UserId, Token)> {
    names::check_user(name)?;
    if users::is_name_taken(app.db(), name).await? {
        return Err(Error::exists("User"));
    }
    let id = UserId(app.db().new_id()?);
    // A token that an operator chose, or that the first start generated, must not expire and lock out all users.
    let life = by.and_then(|_| token_ttl(app));
    let token = token.map_or_else(Token::draw, Ok)?;
    let (public, private) = generate_key_pair(name)?;
    let sealed = seal_key(app, id, &private)?;
    let row =
        NewUser { id, name, admin, email, active, ssh_public_key: &public, ssh_private_key_sealed: sealed };
    let about = EventSubject { entity: Entity::User, id: id.0, name, project: None };
    let unit = Unit::new()
        .and([users::create(row), tokens::create(app.db().new_id()?, id, &token.hash(), token.shown(), life)])
        .and(note(app.db(), by, &about, "created", "User created".into())?);
    match app.db().write(unit).await {
        Ok(written) => written.done()?,
        Err(error) if error.is_conflict_on("users_name_key") => return Err(Error::exists("User")),
        Err(error) => return Err(error.into()),
    };
    Ok((id, token))
}

pub async fn update(app: &App, caller: &Caller, requested: wire::CreateRequest) -> Result<wire::User> {
    let user = find(app, &requested.username).await?;
    let admin = requested.global_role == wire::GlobalRole::Admin;
    if user.id == caller.user.id && (!admin || !requested.active) {
        return Err(Error::refused("you cannot disable yourself or remove your own admin role"));
    }
    let about = EventSubject { entity: Entity::User, id: user.id.0, name: &user.name, project: None };
    let unit = Unit::new()
        .and([users::update(user.id, admin, requested.email.as_deref(), requested.active)])
        .and(requested.can_use_queue.map(|can| users::set_can_use_queue(user.id, can)))
        .and(note(app.db(), Some(caller.user.id), &about, "updated", "User updated".into())?);
    app.db().write(unit).await?.done()?;
    app.access().forget();
    Ok(to_wire(&find(app, &requested.username).await?))
}

pub async fn refresh_token(app: &App, caller: &Caller, name: &str) -> Result<wire::UserWithCreds> {
    caller.require_user(name)?;
    let user = find(app, name).await?;
    let token = Token::draw()?;
    let about = EventSubject { entity: Entity::User, id: user.id.0, name: &user.name, project: None };
    let unit = Unit::new()
        .and([
            tokens::revoke_all(user.id),
            tokens::create(app.db().new_id()?, user.id, &token.hash(), token.shown(), token_ttl(app)),
        ])
        .and(note(app.db(), Some(caller.user.id), &about, "token_refreshed", "User token refreshed".into())?);
    app.db().write(unit).await?.done()?;
    app.access().forget();
    with_creds(app, caller, &user, Some(&token)).await
}

pub async fn named_tokens(app: &App, caller: &Caller) -> Result<Vec<wire::NamedToken>> {
    Ok(tokens::list_named(app.db(), caller.user.id).await?.iter().map(token_to_wire).collect())
}

/// Creates a token. The response contains the token, which is never shown again.
pub async fn create_token(
    app: &App,
    caller: &Caller,
    requested: wire::CreateTokenRequest,
) -> Result<wire::NewToken> {
    names::check_token(&requested.name)?;
    let life = match requested.expires_in {
        None => token_ttl(app),
        Some(seconds @ 1..=EXPIRES_IN_MAX) => Some(seconds * 1_000_000),
        Some(_) => {
            let years = EXPIRES_IN_MAX / 365 / 24 / 3600;
            return Err(Error::refused(format!("a token must expire after one second to {years} years")));
        }
    };
    let held = tokens::list_named(app.db(), caller.user.id).await?;
    if held.len() >= TOKENS_MAX {
        return Err(Error::refused(format!("a user may have at most {TOKENS_MAX} tokens; revoke some")));
    }
    let token = Token::draw()?;
    let scope = if requested.scope == TokenScope::All { tokens::FULL_SCOPE } else { requested.scope.name() };
    let made = tokens::create_named(
        app.db().new_id()?,
        caller.user.id,
        (&token.hash(), token.shown()),
        scope,
        &requested.name,
        life,
    );
    let about =
        EventSubject { entity: Entity::User, id: caller.user.id.0, name: &caller.user.name, project: None };
    let text = format!("Token `{}` created with scope `{}`", requested.name, requested.scope.name());
    let unit =
        Unit::new().and([made]).and(note(app.db(), Some(caller.user.id), &about, "token_created", text)?);
    match app.db().write(unit).await {
        Ok(written) => written.done()?,
        Err(error) if error.is_conflict_on("tokens_name_key") => return Err(Error::exists("Token")),
        Err(error) => return Err(error.into()),
    };
    let held = tokens::list_named(app.db(), caller.user.id).await?;
    let about = held.iter().find(|held| held.name == requested.name).ok_or_else(|| Error::absent("Token"))?;
    Ok(wire::NewToken { about: token_to_wire(about), token: token.text().to_owned() })
}

pub async fn revoke_tokens(app: &App, caller: &Caller, names: &[String]) -> Result<()> {
    let about =
        EventSubject { entity: Entity::User, id: caller.user.id.0, name: &caller.user.name, project: None };
    let mut unit = Unit::new();
    for name in names {
        let reported = format!("Token `{name}` revoked");
        unit = unit.and([tokens::revoke_named(caller.user.id, name)]).and(note(
            app.db(),
            Some(caller.user.id),
            &about,
            "token_revoked",
            reported,
        )?);
    }
    let written = app.db().write(unit).await?;
    app.access().forget();
    match written {
        WriteOutcome::Done { .. } => Ok(()),
        WriteOutcome::Stale { .. } => Err(Error::absent("Token")),
    }
}

fn token_to_wire(token: &tokens::NamedToken) -> wire::NamedToken {
    let scope = TokenScope::ALL.into_iter().find(|scope| scope.name() == token.scope);
    wire::NamedToken {
        name: token.name.clone(),
        scope: scope.unwrap_or_default(),
        prefix: token.prefix.clone(),
        created_at: token.created_at,
        expires_at: token.expires_at,
        last_used_at: token.last_used_at,
    }
}

pub async fn refresh_ssh_key(app: &App, caller: &Caller, name: &str) -> Result<wire::UserWithCreds> {
    caller.require_user(name)?;
    let user = find(app, name).await?;
    let (public, private) = generate_key_pair(&user.name)?;
    let about = EventSubject { entity: Entity::User, id: user.id.0, name: &user.name, project: None };
    let unit =
        Unit::new().and([users::set_ssh_key(user.id, &public, seal_key(app, user.id, &private)?)]).and(note(
            app.db(),
            Some(caller.user.id),
            &about,
            "ssh_key_refreshed",
            "User SSH key refreshed".into(),
        )?);
    app.db().write(unit).await?.done()?;
    app.access().forget();
    let own = caller.shown_token().filter(|_| user.id == caller.user.id);
    with_creds(app, caller, &find(app, name).await?, own).await
}

pub async fn delete(app: &App, caller: &Caller, names: &[String]) -> Result<()> {
    if names.contains(&caller.user.name) {
        return Err(Error::refused("you cannot delete yourself"));
    }
    let found = users::by_names(app.db(), names).await?;
    if found.len() < names.len() {
        return Err(Error::absent("User"));
    }
    let mut unit = Unit::new();
    for user in &found {
        let about = EventSubject { entity: Entity::User, id: user.id.0, name: &user.name, project: None };
        unit = unit.and([tokens::revoke_all(user.id)]).and(users::delete(user.id)).and(note(
            app.db(),
            Some(caller.user.id),
            &about,
            "deleted",
            "User deleted".into(),
        )?);
    }
    app.db().write(unit).await?.done()?;
    app.access().forget();
    Ok(())
}

fn ssh_key_aad(user: UserId) -> AssociatedData<'static> {
    AssociatedData::row("users", "ssh_private_key_sealed", user.0)
}

fn seal_key(app: &App, user: UserId, private: &str) -> Result<Vec<u8>> {
    Ok(app.keys().seal(&ssh_key_aad(user), private.as_bytes())?)
}

fn open_key(app: &App, user: UserId, sealed: &[u8]) -> Result<String> {
    let bytes = app.keys().open_sealed(&ssh_key_aad(user), sealed)?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

pub async fn public_keys(app: &App, caller: &Caller) -> Result<Vec<wire::PublicKey>> {
    Ok(users::public_keys(app.db(), caller.user.id).await?.iter().map(key_to_wire).collect())
}

pub async fn add_public_key(
    app: &App,
    caller: &Caller,
    requested: wire::AddPublicKeyRequest,
) -> Result<wire::PublicKey> {
    let invalid = |_| Error::refused("invalid SSH public key");
    let key = PublicKey::from_openssh(requested.key.trim()).map_err(invalid)?;
    let fingerprint = key.fingerprint(HashAlg::Sha256).to_string();
    let name = requested.name.as_deref().unwrap_or_else(|| key.comment().as_str_lossy());
    let name = if name.is_empty() { "key" } else { name };
    if name.chars().count() > 100 || name.chars().any(char::is_control) {
        return Err(Error::refused(
            "invalid name: expected at most 100 characters, without control characters",
        ));
    }
    if users::public_keys(app.db(), caller.user.id).await?.len() >= PUBLIC_KEYS_MAX {
        return Err(Error::refused("too many public keys"));
    }
    let text = key.to_openssh().map_err(invalid)?;
    match users::add_public_key(app.db(), caller.user.id, name, &text, &fingerprint).await {
        Ok(key) => Ok(key_to_wire(&key)),
        Err(error) if error.is_conflict_on("public_keys_fingerprint_key") => Err(Error::Refused {
            code: ApiErrorCode::ResourceExists,
            msg: "Public key already exists".into(),
        }),
        Err(error) => Err(error.into()),
    }
}

pub async fn delete_public_keys(
    app: &App,
    caller: &Caller,
    requested: wire::DeletePublicKeysRequest,
) -> Result<()> {
    users::delete_public_keys(app.db(), caller.user.id, &requested.ids).await?.done()?;
    Ok(())
}

fn key_to_wire(key: &users::PublicKey) -> wire::PublicKey {
    wire::PublicKey {
        id: key.id,
        added_at: key.created_at,
        name: key.name.clone(),
        r#type: key.key.split(' ').next().unwrap_or_default().to_owned(),
        fingerprint: key.fingerprint.clone(),
    }
}
