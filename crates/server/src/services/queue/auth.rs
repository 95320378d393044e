//! Tokens of the queue's API. Tokens of users are good here too; those made here are good nowhere else.

use std::{collections::HashMap, sync::LazyLock};

use parking_lot::RwLock;
use subtle::ConstantTimeEq as _;
use windlass_model::{
    id::UserId,
    queue::{Container, Who},
    time::Timestamp,
};

use super::{Asker, Error, Result, hash, name, secret};
use crate::{
    app::App,
    auth,
    db::{
        Change, Unit, Written, containers,
        queue_tokens::{self, Token},
        users,
    },
    secrets::Belongs,
};

/// Finds who shows this token: `SECRET`, `v2/UUID/SECRET` or `v2/UUID/SECRET/CONTAINER`.
pub async fn asker(app: &App, text: &str, request: &str) -> Result<Asker> {
    let mut parts = text.split('/');
    let (uuid, secret, bound) = match (parts.next(), parts.next(), parts.next(), parts.next(), parts.next()) {
        (Some("v2"), Some(uuid), Some(secret), bound, None) => (Some(uuid), secret, bound),
        (Some(secret), None, ..) => (None, secret, None),
        _ => return Err(Error::Unauthenticated),
    };
    let found = match uuid {
        Some(uuid) => queue_tokens::by_uuid(app.db(), uuid).await?,
        None => queue_tokens::by_hash(app.db(), &hash(secret)).await?,
    };
    if let Some(token) = found {
        if !bool::from(token.hash.as_bytes().ct_eq(hash(secret).as_bytes())) {
            return Err(Error::Unauthenticated);
        }
        if bound.is_some() && bound != token.container_uuid.as_deref() {
            return Err(Error::Unauthenticated);
        }
        return of_token(app, token, secret, request).await;
    }
    let caller = match auth::caller(app, Some(&format!("Bearer {secret}"))).await {
        Ok(caller) => caller,
        Err(crate::error::Error::Denied { .. }) => return Err(Error::Unauthenticated),
        Err(error) => return Err(error.into()),
    };
    Ok(Asker {
        who: if caller.user.admin { Who::Admin } else { Who::User },
        user: caller.user.id,
        user_uuid: user_name(caller.user.id),
        is_admin: caller.user.admin,
        token_uuid: name("gj3su", hash(secret).as_bytes()),
        secret: secret.to_owned(),
        request: request.to_owned(),
    })
}

async fn of_token(app: &App, token: Token, secret: &str, request: &str) -> Result<Asker> {
    let users = users::by_ids(app.db(), &[token.user_id]).await?;
    let user = users.first().ok_or(Error::Unauthenticated)?;
    let attempt = u64::try_from(token.attempt).unwrap_or_default();
    let who = match (token.kind.as_str(), token.container_uuid) {
        ("dispatcher", _) => Who::Dispatcher { token: token.uuid.clone() },
        ("executor", Some(container)) => Who::Executor { container, attempt },
        ("container", Some(container)) => Who::Inside { container, attempt },
        ("user", _) if user.admin => Who::Admin,
        ("user", _) => Who::User,
        _ => return Err(Error::Unauthenticated),
    };
    crate::newcomers::mark_known();
    Ok(Asker {
        is_admin: who == Who::Admin,
        who,
        user: user.id,
        user_uuid: user_name(user.id),
        token_uuid: token.uuid,
        secret: secret.to_owned(),
        request: request.to_owned(),
    })
}

pub fn user_name(user: UserId) -> String {
    name("tpzed", user.0.as_bytes())
}

/// Names of users never change, so whoever was found once need not be looked for again.
static NAMED: LazyLock<RwLock<HashMap<String, UserId>>> = LazyLock::new(RwLock::default);

/// The user of this name.
pub async fn user_named(app: &App, uuid: &str) -> Result<UserId> {
    let known = NAMED.read().get(uuid).copied();
    if let Some(known) = known {
        return Ok(known);
    }
    let all = users::ids(app.db()).await?;
    let mut named = NAMED.write();
    named.extend(all.into_iter().map(|user| (user_name(user), user)));
    named.get(uuid).copied().ok_or_else(|| Error::Missing(format!("user {uuid}")))
}

/// A token with its secret.
#[derive(Clone, Debug)]
pub struct Made {
    pub uuid: String,
    pub secret: String,
}

impl Made {
    pub fn text(&self) -> String {
        format!("v2/{}/{}", self.uuid, self.secret)
    }
}

/// A new token. Its secret is kept only where it must be shown again.
pub fn draw(
    app: &App,
    kind: &str,
    user: UserId,
    container: Option<&Container>,
    now: Timestamp,
) -> Result<(Made, Change)> {
    let id = app.db().new_id()?;
    let made = Made { uuid: name("gj3su", id.as_bytes()), secret: secret()? };
    let sealed = match container {
        Some(_) => Some(app.keys().seal(&belongs(id), made.secret.as_bytes())?),
        None => None,
    };
    let attempt = container.map_or(0, |container| container.attempt);
    let token = Token {
        id,
        uuid: made.uuid.clone(),
        kind: kind.to_owned(),
        hash: hash(&made.secret),
        secret_sealed: sealed,
        user_id: user,
        container_uuid: container.map(|container| container.uuid.clone()),
        attempt: i64::try_from(attempt).unwrap_or(i64::MAX),
        created_at: now,
    };
    Ok((made, queue_tokens::create(token)))
}

fn belongs(id: uuid::Uuid) -> Belongs<'static> {
    Belongs::row("queue_tokens", "secret_sealed", id)
}

fn open(app: &App, token: &Token) -> Result<Made> {
    let sealed = token.secret_sealed.as_ref().ok_or_else(|| Error::Missing(token.uuid.clone()))?;
    let secret = app.keys().open_sealed(&belongs(token.id), sealed)?;
    Ok(Made { uuid: token.uuid.clone(), secret: String::from_utf8_lossy(&secret).into_owned() })
}

/// The token of the program in a container, for who runs it.
pub async fn inside(app: &App, asker: &Asker, uuid: &str) -> Result<Made> {
    let found = containers::containers(app.db(), &[uuid.to_owned()]).await?;
    let container = found.into_iter().next().ok_or_else(|| Error::Missing(uuid.to_owned()))?.doc;
    let holds = match &asker.as_dispatcher() {
        Who::Dispatcher { token } => container.is_held() && container.locked_by_uuid.as_ref() == Some(token),
        Who::Executor { container: own, attempt } => *own == uuid && *attempt == container.attempt,
        Who::Admin | Who::User | Who::Inside { .. } => false,
    };
    let Some(auth) = container.auth_uuid.filter(|_| holds) else {
        return Err(Error::denied("the container is not locked by this token"));
    };
    let token = queue_tokens::by_uuid(app.db(), &auth).await?.ok_or(Error::Missing(auth))?;
    open(app, &token)
}

/// Any token by its name: the caller's own, or that of a container they hold.
pub async fn by_uuid(app: &App, asker: &Asker, uuid: &str) -> Result<Made> {
    if uuid == asker.token_uuid {
        return Ok(Made { uuid: uuid.to_owned(), secret: asker.secret.clone() });
    }
    let found = queue_tokens::by_uuid(app.db(), uuid).await?;
    let denied = || Error::denied("only who holds the container may read its token");
    let token = found.ok_or_else(denied)?;
    let container = token.container_uuid.clone().filter(|_| token.kind == "container").ok_or_else(denied)?;
    if asker.is_admin {
        return open(app, &token);
    }
    inside(app, asker, &container).await
}

/// The token that the lock of this attempt made for its executor.
pub(super) async fn executor(app: &App, uuid: &str) -> Result<Option<Made>> {
    let found = queue_tokens::by_uuid(app.db(), uuid).await?;
    found.map(|token| open(app, &token)).transpose()
}

/// A token for a program of one's own; `dispatch` makes one that takes containers.
pub async fn create(app: &App, asker: &Asker, scopes: &[String]) -> Result<(Made, &'static str)> {
    let kind = match scopes {
        [] => "user",
        [one] if one == "all" => "user",
        [one] if one == "dispatch" => "dispatcher",
        _ => return Err(Error::invalid("scopes must be [\"all\"] or [\"dispatch\"]")),
    };
    match &asker.who {
        Who::Admin => {}
        Who::User if kind == "user" => {}
        Who::User | Who::Dispatcher { .. } | Who::Executor { .. } | Who::Inside { .. } => {
            return Err(Error::denied("only an admin makes tokens for dispatchers"));
        }
    }
    let now = app.db().now().await?;
    let (made, change) = draw(app, kind, asker.user, None, now)?;
    app.db().write(Unit::new().and([change])).await?;
    Ok((made, kind))
}

pub async fn revoke(app: &App, asker: &Asker, uuid: &str) -> Result<()> {
    match app.db().write(Unit::new().and([queue_tokens::revoke(uuid, asker.user)])).await? {
        Written::Done { .. } => Ok(()),
        Written::Stale { .. } => Err(Error::Missing(uuid.to_owned())),
    }
}
