//! Tokens of the queue's API. Tokens of users are valid here too; those created here are valid nowhere else.

use std::{collections::HashMap, sync::LazyLock};

use parking_lot::RwLock;
use subtle::ConstantTimeEq as _;
use windlass_api::users::TokenScope;
use windlass_model::{
    id::UserId,
    queue::{Container, QueueCaller},
    time::Timestamp,
};

use super::{Error, LETTERS, Requester, Result, SECRET_LETTERS, generate_secret, hash_secret, object_uuid};
use crate::{
    app::App,
    auth,
    connection_shares::mark_authenticated,
    db::{
        Change, Unit, WriteOutcome, containers,
        queue_tokens::{self, QueueToken},
        users,
    },
    encryption::AssociatedData,
};

/// Finds the owner of this token: `SECRET`, `v2/UUID/SECRET` or `v2/UUID/SECRET/CONTAINER`.
pub async fn authenticate(app: &App, text: &str, request: &str) -> Result<Requester> {
    let mut parts = text.split('/');
    let (uuid, secret, bound) = match (parts.next(), parts.next(), parts.next(), parts.next(), parts.next()) {
        (Some("v2"), Some(uuid), Some(secret), bound, None) => (Some(uuid), secret, bound),
        (Some(secret), None, ..) => (None, secret, None),
        _ => return Err(Error::Unauthenticated),
    };
    let found = match uuid {
        Some(uuid) => queue_tokens::by_uuid(app.db(), uuid).await?,
        None => queue_tokens::by_hash(app.db(), &hash_secret(secret)).await?,
    };
    if let Some(token) = found {
        if !bool::from(token.hash.as_bytes().ct_eq(hash_secret(secret).as_bytes())) {
            return Err(Error::Unauthenticated);
        }
        if bound.is_some() && bound != token.container_uuid.as_deref() {
            return Err(Error::Unauthenticated);
        }
        return from_token(app, token, secret, request).await;
    }
    let own = object_uuid("gj3su", hash_secret(secret).as_bytes());
    // A token that is named must match, and a user's token has only one name.
    if bound.is_some() || uuid.is_some_and(|uuid| uuid != own) {
        return Err(Error::Unauthenticated);
    }
    let caller = match auth::authenticate(app, Some(&format!("Bearer {secret}"))).await {
        // Scopes permit operations of the API, and the queue has none of them.
        Ok(caller) if caller.scope != TokenScope::All => return Err(Error::Unauthenticated),
        Ok(caller) => caller,
        Err(crate::error::Error::Denied { .. }) => return Err(Error::Unauthenticated),
        Err(error) => return Err(error.into()),
    };
    Ok(Requester {
        who: if caller.user.admin { QueueCaller::Admin } else { QueueCaller::User },
        user: caller.user.id,
        user_uuid: user_uuid(caller.user.id),
        is_admin: caller.user.admin,
        token_uuid: own,
        may_submit: can_submit(app, &caller.user),
        made_with: Some(hash_secret(secret)),
        expires_at: None,
        secret: secret.to_owned(),
        request: request.to_owned(),
    })
}

async fn from_token(app: &App, token: QueueToken, secret: &str, request: &str) -> Result<Requester> {
    let users = users::by_ids(app.db(), &[token.user_id]).await?;
    let user = users.first().ok_or(Error::Unauthenticated)?;
    let attempt = u64::try_from(token.attempt).unwrap_or_default();
    let who = match (token.kind.as_str(), token.container_uuid) {
        ("dispatcher", _) => QueueCaller::Dispatcher { token: token.uuid.clone() },
        ("executor", Some(container)) => QueueCaller::Executor { container, attempt },
        ("container", Some(container)) => QueueCaller::Inside { container, attempt },
        ("user", _) if user.admin => QueueCaller::Admin,
        ("user", _) => QueueCaller::User,
        _ => return Err(Error::Unauthenticated),
    };
    let is_of_user = matches!(who, QueueCaller::Admin | QueueCaller::User | QueueCaller::Inside { .. });
    mark_authenticated(is_of_user.then_some(user.id));
    Ok(Requester {
        is_admin: who == QueueCaller::Admin,
        who,
        user: user.id,
        user_uuid: user_uuid(user.id),
        token_uuid: token.uuid,
        may_submit: can_submit(app, user),
        made_with: token.made_with,
        expires_at: token.expires_at,
        secret: secret.to_owned(),
        request: request.to_owned(),
    })
}

/// Returns whether the secret of a token was generated: those cannot be guessed.
pub fn is_generated(app: &App, text: &str) -> bool {
    let secret = match text.strip_prefix("v2/") {
        Some(rest) => rest.split('/').nth(1).unwrap_or_default(),
        None => text,
    };
    let is_ours = secret.len() == SECRET_LETTERS && secret.bytes().all(|byte| LETTERS.contains(&byte));
    is_ours || auth::is_unguessable(app, Some(&format!("Bearer {secret}")))
}

/// Returns whether a user may use the queue.
pub fn can_submit(app: &App, user: &users::User) -> bool {
    user.admin || user.can_use_queue || app.settings().queue_for_everyone
}

pub fn user_uuid(user: UserId) -> String {
    object_uuid("tpzed", user.0.as_bytes())
}

/// Maximum number of cached users, unless there are more.
const USER_IDS_MAX: usize = 100_000;
/// Names of users never change, so a user that was found once is cached.
static USER_IDS: LazyLock<RwLock<HashMap<String, UserId>>> = LazyLock::new(RwLock::default);

/// Finds the user of this name.
pub async fn user_by_uuid(app: &App, uuid: &str) -> Result<UserId> {
    let known = USER_IDS.read().get(uuid).copied();
    if let Some(known) = known {
        return Ok(known);
    }
    let all = users::all_ids(app.db()).await?;
    let mut named = USER_IDS.write();
    if named.len() >= USER_IDS_MAX {
        named.clear();
    }
    named.extend(all.into_iter().map(|user| (user_uuid(user), user)));
    named.get(uuid).copied().ok_or_else(|| Error::Missing(format!("user {uuid}")))
}

/// A token with its secret.
#[derive(Clone, Debug)]
pub struct TokenSecret {
    pub uuid: String,
    pub secret: String,
}

impl TokenSecret {
    pub fn text(&self) -> String {
        format!("v2/{}/{}", self.uuid, self.secret)
    }
}

/// Creates a token of an attempt, which ends with the attempt. Its secret is stored, because it must be shown again.
pub fn issue_attempt_token(
    app: &App,
    kind: &str,
    user: UserId,
    container: &Container,
    now: Timestamp,
) -> Result<(TokenSecret, Change)> {
    let (id, made) = new_token(app)?;
    let token = QueueToken {
        id,
        uuid: made.uuid.clone(),
        kind: kind.to_owned(),
        hash: hash_secret(&made.secret),
        secret_sealed: Some(app.keys().seal(&token_aad(id), made.secret.as_bytes())?),
        user_id: user,
        container_uuid: Some(container.uuid.clone()),
        attempt: i64::try_from(container.attempt).unwrap_or(i64::MAX),
        created_at: now,
        made_with: None,
        expires_at: None,
    };
    Ok((made, queue_tokens::create(token)))
}

fn new_token(app: &App) -> Result<(uuid::Uuid, TokenSecret)> {
    let id = app.db().new_id()?;
    Ok((id, TokenSecret { uuid: object_uuid("gj3su", id.as_bytes()), secret: generate_secret()? }))
}

fn token_aad(id: uuid::Uuid) -> AssociatedData<'static> {
    AssociatedData::row("queue_tokens", "secret_sealed", id)
}

fn open_token(app: &App, token: &QueueToken) -> Result<TokenSecret> {
    let sealed = token.secret_sealed.as_ref().ok_or_else(|| Error::Missing(token.uuid.clone()))?;
    let secret = app.keys().open_sealed(&token_aad(token.id), sealed)?;
    Ok(TokenSecret { uuid: token.uuid.clone(), secret: String::from_utf8_lossy(&secret).into_owned() })
}

/// Token of the program in a container, for the process that runs it.
pub async fn container_token(app: &App, asker: &Requester, uuid: &str) -> Result<TokenSecret> {
    let found = containers::containers(app.db(), &[uuid.to_owned()]).await?;
    let container = found.into_iter().next().ok_or_else(|| Error::Missing(uuid.to_owned()))?.doc;
    let holds = match &asker.as_dispatcher() {
        QueueCaller::Dispatcher { token } => {
            container.is_held() && container.locked_by_uuid.as_ref() == Some(token)
        }
        QueueCaller::Executor { container: own, attempt } => *own == uuid && *attempt == container.attempt,
        QueueCaller::Admin | QueueCaller::User | QueueCaller::Inside { .. } => false,
    };
    let Some(auth) = container.auth_uuid.filter(|_| holds) else {
        return Err(Error::denied("the container is not locked by this token"));
    };
    let token = queue_tokens::by_uuid(app.db(), &auth).await?.ok_or(Error::Missing(auth))?;
    open_token(app, &token)
}

/// Any token by its name: the caller's own, or that of a container that the caller holds.
pub async fn token_by_uuid(app: &App, asker: &Requester, uuid: &str) -> Result<TokenSecret> {
    if uuid == asker.token_uuid {
        return Ok(TokenSecret { uuid: uuid.to_owned(), secret: asker.secret.clone() });
    }
    let found = queue_tokens::by_uuid(app.db(), uuid).await?;
    let denied = || Error::denied("only the holder of the container may read its token");
    let token = found.ok_or_else(denied)?;
    let container = token.container_uuid.clone().filter(|_| token.kind == "container").ok_or_else(denied)?;
    if asker.is_admin {
        return open_token(app, &token);
    }
    container_token(app, asker, &container).await
}

/// Token that the lock of this attempt created for its executor.
pub(super) async fn executor_token(app: &App, uuid: &str) -> Result<Option<TokenSecret>> {
    let found = queue_tokens::by_uuid(app.db(), uuid).await?;
    found.map(|token| open_token(app, &token)).transpose()
}

/// Scopes and expiry of a requested token.
#[derive(Clone, Debug)]
pub struct TokenRequest {
    pub scopes: Vec<String>,
    pub expires_at: Option<Timestamp>,
}

/// A new token of a user.
#[derive(Clone, Debug)]
pub struct CreatedToken {
    pub made: TokenSecret,
    /// `user` or `dispatcher`.
    pub kind: &'static str,
    pub created_at: Timestamp,
    pub expires_at: Option<Timestamp>,
}

/// Creates a token for a user's program; scope `dispatch` creates one for a dispatcher. It ends with the token with
/// which it was created, and expires no later than that one.
pub async fn create(app: &App, asker: &Requester, request: &TokenRequest) -> Result<CreatedToken> {
    let kind = match request.scopes.as_slice() {
        [one] if one == "all" => "user",
        [one] if one == "dispatch" => "dispatcher",
        [] => {
            return Err(Error::invalid(
                "`scopes` must be [\"all\"] or [\"dispatch\"]: an empty list permits nothing",
            ));
        }
        _ => return Err(Error::invalid("`scopes` must be [\"all\"] or [\"dispatch\"]")),
    };
    asker.require_token_management()?;
    asker.require_submit()?;
    if kind == "dispatcher" && asker.who != QueueCaller::Admin {
        return Err(Error::denied("only an admin may create tokens for dispatchers"));
    }
    let now = app.db().now().await?;
    if request.expires_at.is_some_and(|at| at <= now) {
        return Err(Error::invalid("`expires_at` must be in the future"));
    }
    // A dispatcher is a service and keeps running; a token for a person expires.
    let usual = app.settings().queue_token_life.filter(|_| kind == "user").map(|life| now + life);
    let ends = [request.expires_at.or(usual), asker.expires_at];
    let expires_at = ends.into_iter().flatten().min();
    let (id, made) = new_token(app)?;
    let token = QueueToken {
        id,
        uuid: made.uuid.clone(),
        kind: kind.to_owned(),
        hash: hash_secret(&made.secret),
        secret_sealed: None,
        user_id: asker.user,
        container_uuid: None,
        attempt: 0,
        created_at: now,
        made_with: asker.made_with.clone(),
        expires_at,
    };
    app.db().write(Unit::new().and([queue_tokens::create(token)])).await?;
    Ok(CreatedToken { made, kind, created_at: now, expires_at })
}

pub async fn revoke(app: &App, asker: &Requester, uuid: &str) -> Result<()> {
    asker.require_token_management()?;
    match app.db().write(Unit::new().and([queue_tokens::revoke(uuid, asker.user)])).await? {
        WriteOutcome::Done { .. } => Ok(()),
        WriteOutcome::Stale { .. } => Err(Error::Missing(uuid.to_owned())),
    }
}
