//! Secrets of projects, and the rotation of the keys with which everything is sealed.

use std::collections::BTreeSet;

use windlass_api::secrets::{self as wire, SecretGroup, SecretUsers};
use windlass_model::{
    event::Entity,
    id::{ProjectId, SecretId, UserId},
};

use super::names;
use crate::{
    app::App,
    auth::ProjectScope,
    db::{
        Unit, WriteOutcome,
        documents::SECRET_USERS,
        encrypted_columns, projects,
        secrets::{self, Secret},
        users,
    },
    encryption::{AssociatedData, KeyError},
    error::{Error, Result},
    events::{EventSubject, note},
    limits::{self, limit_hint},
    secret_rights::{EVERYONE, MANAGERS, withheld},
};

/// Attempts if two users set one secret at the same time.
const ATTEMPTS_MAX: usize = 5;

fn secret_aad(project: ProjectId, name: &str, version: i64) -> AssociatedData<'_> {
    AssociatedData { table: "secrets", owner: project.0, name, version }
}

fn require_access(scope: &ProjectScope) -> Result<()> {
    if scope.can_manage_secrets() { Ok(()) } else { Err(Error::denied()) }
}

pub async fn list(app: &App, scope: &ProjectScope) -> Result<Vec<wire::Secret>> {
    require_access(scope)?;
    let mut all = Vec::new();
    for secret in secrets::list(app.db(), scope.project.id).await? {
        let users = users_to_wire(app, secret.id, &secret.users).await?;
        all.push(wire::Secret { id: secret.id.0, name: secret.name, value: None, users });
    }
    Ok(all)
}

pub async fn read(app: &App, scope: &ProjectScope, name: &str) -> Result<wire::Secret> {
    require_access(scope)?;
    let found = secrets::find(app.db(), scope.project.id, name).await?;
    let secret = found.ok_or_else(|| Error::absent("Secret"))?;
    let value = open(app, &secret)?;
    let users = users_to_wire(app, secret.id, &secret.users).await?;
    Ok(wire::Secret { id: secret.id.0, name: secret.name, value: Some(value), users })
}

/// Stored form of the users: a word, or ids of members.
async fn stored_users(app: &App, scope: &ProjectScope, users: &SecretUsers) -> Result<String> {
    let names = match users {
        SecretUsers::Group(SecretGroup::Everyone) => return Ok(EVERYONE.to_owned()),
        SecretUsers::Group(SecretGroup::Managers) => return Ok(MANAGERS.to_owned()),
        SecretUsers::Named(names) if names.is_empty() => {
            return Err(Error::field("users", "must be `everyone`, `managers` or names of members"));
        }
        SecretUsers::Named(names) => names,
    };
    let members = projects::members(app.db(), &[scope.project.id]).await?;
    let mut ids = BTreeSet::new();
    for name in names {
        let member = members.iter().find(|member| member.user.name == *name);
        let absent =
            || Error::refused(format!("`{name}` is not a member of project `{}`", scope.project.name));
        ids.insert(member.ok_or_else(absent)?.user.id);
    }
    Ok(serde_json::to_string(&ids)?)
}

async fn users_to_wire(app: &App, secret: SecretId, stored: &str) -> Result<SecretUsers> {
    Ok(match stored {
        EVERYONE => SecretUsers::Group(SecretGroup::Everyone),
        MANAGERS => SecretUsers::Group(SecretGroup::Managers),
        list => {
            let ids: Vec<UserId> = SECRET_USERS.decode(secret, list)?;
            let mut names: Vec<String> =
                users::by_ids(app.db(), &ids).await?.into_iter().map(|user| user.name).collect();
            names.sort();
            SecretUsers::Named(names)
        }
    })
}

/// Rejects a run of this user that names secrets which it may not use.
pub(crate) async fn check_use(
    app: &App,
    project: ProjectId,
    user: UserId,
    names: &BTreeSet<String>,
) -> Result<()> {
    let withheld = withheld(app.db(), project, user, names).await?;
    if withheld.is_empty() {
        return Ok(());
    }
    Err(Error::refused(format!(
        "runs of this user may not use secret `{0}`; hint: a manager of the project can change this with \
         `windlass secret set {1} --for …`",
        withheld.join("`, `"),
        withheld[0]
    )))
}

/// Opens the value of a stored secret, for authorized callers and for jobs.
pub fn open(app: &App, secret: &Secret) -> Result<String> {
    let belongs = secret_aad(secret.project_id, &secret.name, secret.version);
    let bytes = app.keys().open_sealed(&belongs, &secret.sealed)?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

pub async fn set(app: &App, scope: &ProjectScope, requested: wire::SetRequest) -> Result<wire::Secret> {
    require_access(scope)?;
    names::check_secret(&requested.name)?;
    let most = app.settings().limits.secret_chars;
    if requested.value.chars().count() > most {
        let more = limit_hint(limits::SECRET_MAX);
        return Err(Error::refused(format!(
            "the value of the secret is longer than {most} characters; {more}"
        )));
    }
    let wanted = match &requested.users {
        Some(users) => Some(stored_users(app, scope, users).await?),
        None => None,
    };
    for _ in 0..ATTEMPTS_MAX {
        if let Some((id, users)) = try_set(app, scope, &requested, wanted.as_deref()).await? {
            let users = users_to_wire(app, id, &users).await?;
            return Ok(wire::Secret { id: id.0, name: requested.name, value: None, users });
        }
    }
    Err(Error::Conflict { msg: "the secret is being changed by other requests; try again" })
}

/// Returns `None` if another write was faster. Without `users` they are left unchanged.
async fn try_set(
    app: &App,
    scope: &ProjectScope,
    requested: &wire::SetRequest,
    users: Option<&str>,
) -> Result<Option<(SecretId, String)>> {
    let project = scope.project.id;
    let seal =
        |version| app.keys().seal(&secret_aad(project, &requested.name, version), requested.value.as_bytes());
    let key = app.keys().sealing_key_id();
    let found = secrets::find(app.db(), project, &requested.name).await?;
    let before = found.as_ref().map_or(EVERYONE, |old| old.users.as_str());
    let users = users.unwrap_or(before).to_owned();
    let (id, change, reason, message) = match found {
        Some(old) => {
            let change = secrets::replace(old.id, old.version, seal(old.version + 1)?, &key, &users);
            (old.id, change, "updated", "Secret updated")
        }
        None => {
            let id = SecretId(app.db().new_id()?);
            let change = secrets::create(id, project, &requested.name, seal(1)?, &key, &users);
            (id, change, "created", "Secret created")
        }
    };
    let about =
        EventSubject { entity: Entity::Secret, id: id.0, name: &requested.name, project: Some(project) };
    let reported = note(app.db(), Some(scope.caller.user.id), &about, reason, message.into())?;
    match app.db().write(Unit::new().and([change]).and(reported)).await {
        Ok(WriteOutcome::Done { .. }) => Ok(Some((id, users))),
        Ok(WriteOutcome::Stale { .. }) => Ok(None),
        Err(error) if error.is_conflict_on("secrets_name_key") => Ok(None),
        Err(error) => Err(error.into()),
    }
}

/// Deletes all of them or none.
pub async fn delete(app: &App, scope: &ProjectScope, names: &[String]) -> Result<()> {
    require_access(scope)?;
    let project = scope.project.id;
    let mut unit = Unit::new();
    for name in names.iter().collect::<BTreeSet<_>>() {
        let found = secrets::find(app.db(), project, name).await?;
        let secret = found.ok_or_else(|| Error::absent("Secret"))?;
        let about = EventSubject { entity: Entity::Secret, id: secret.id.0, name, project: Some(project) };
        let reported =
            note(app.db(), Some(scope.caller.user.id), &about, "deleted", "Secret deleted".into())?;
        unit = unit.and([secrets::delete(project, name)]).and(reported);
    }
    match app.db().write(unit).await? {
        WriteOutcome::Done { .. } => Ok(()),
        WriteOutcome::Stale { .. } => Err(Error::absent("Secret")),
    }
}

/// Rotates the keys: creates a new master key, seals everything again, deletes the old keys.
///
/// May be stopped and run again at any point: until the last step all keys still work.
pub async fn rotate_keys(app: &App) -> Result<()> {
    app.keys().rotate()?;
    claim_key(app).await?;
    reseal(app).await?;
    // A second time, for values that were written with the old key in the meantime.
    reseal(app).await?;
    let change = encrypted_columns::retire_other_keys(&app.keys().sealing_key_id());
    app.db().write(Unit::new().and([change])).await?.done()?;
    app.keys().retire_old_keys()?;
    Ok(())
}

/// Records the id of the key with which this server seals. A server that lacks one of the keys in use must not start:
/// it could not open the values of other servers, and they could not open its values.
pub async fn claim_key(app: &App) -> Result<()> {
    if let Some(id) = encrypted_columns::key_ids(app.db()).await?.into_iter().find(|id| !app.keys().holds(id))
    {
        return Err(KeyError::UnknownKey { id }.into());
    }
    let change = encrypted_columns::add_key(&app.keys().sealing_key_id());
    app.db().write(Unit::new().and([change])).await?.done()?;
    Ok(())
}

/// Seals everything with the newest key.
pub async fn reseal(app: &App) -> Result<()> {
    let (db, keys) = (app.db(), app.keys());
    for (table, column) in encrypted_columns::ROW_COLUMNS {
        for (id, old) in encrypted_columns::column_values(db, table, column).await? {
            if let Some(new) = keys.rewrap(&AssociatedData::row(table, column, id), &old)? {
                db.write(Unit::new().and([encrypted_columns::replace(table, column, id, old, new)]))
                    .await?
                    .done()?;
            }
        }
    }
    for secret in encrypted_columns::secrets(db).await? {
        let belongs = secret_aad(secret.project, &secret.name, secret.version);
        if let Some(new) = keys.rewrap(&belongs, &secret.sealed)? {
            let change =
                encrypted_columns::replace_secret(secret.id, secret.version, &keys.sealing_key_id(), new);
            db.write(Unit::new().and([change])).await?.done()?;
        }
    }
    for (repo, user, old) in encrypted_columns::repo_creds(db).await? {
        if let Some(new) = keys.rewrap(&super::repos::creds_aad(repo, &user.to_string()), &old)? {
            let change = encrypted_columns::replace_repo_creds(repo, user, old, new);
            db.write(Unit::new().and([change])).await?.done()?;
        }
    }
    Ok(())
}
