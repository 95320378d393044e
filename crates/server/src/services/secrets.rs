//! Secrets of projects, and turning the keys under everything that is sealed.

use windlass_api::secrets as wire;
use windlass_model::{
    event::Entity,
    id::{ProjectId, SecretId},
};

use super::names;
use crate::{
    app::App,
    auth::Scope,
    db::{
        Unit, Written, sealed,
        secrets::{self, Secret},
    },
    error::{Error, Result},
    events::{About, note},
    limits::{self, setting},
    secrets::{Belongs, KeyError},
};

/// Two people set one secret at the same time: one of them tries again.
const TRIES_MAX: usize = 5;

fn belongs(project: ProjectId, name: &str, version: i64) -> Belongs<'_> {
    Belongs { table: "secrets", owner: project.0, name, version }
}

fn may(scope: &Scope) -> Result<()> {
    if scope.may_manage_secrets() { Ok(()) } else { Err(Error::denied()) }
}

pub async fn list(app: &App, scope: &Scope) -> Result<Vec<wire::Secret>> {
    may(scope)?;
    let secrets = secrets::list(app.db(), scope.project.id).await?;
    Ok(secrets
        .into_iter()
        .map(|secret| wire::Secret { id: secret.id.0, name: secret.name, value: None })
        .collect())
}

pub async fn read(app: &App, scope: &Scope, name: &str) -> Result<wire::Secret> {
    may(scope)?;
    let found = secrets::find(app.db(), scope.project.id, name).await?;
    let secret = found.ok_or_else(|| Error::absent("Secret"))?;
    let value = open(app, &secret)?;
    Ok(wire::Secret { id: secret.id.0, name: secret.name, value: Some(value) })
}

/// The value of a stored secret. For answers to those who may, and for jobs.
pub fn open(app: &App, secret: &Secret) -> Result<String> {
    let belongs = belongs(secret.project_id, &secret.name, secret.version);
    let bytes = app.keys().open_sealed(&belongs, &secret.sealed)?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

pub async fn set(app: &App, scope: &Scope, asked: wire::SetRequest) -> Result<wire::Secret> {
    may(scope)?;
    names::secret(&asked.name)?;
    let most = app.settings().limits.secret_chars;
    if asked.value.chars().count() > most {
        let more = setting(limits::SECRET_MAX);
        return Err(Error::refused(format!("secret value is longer than {most} characters; {more}")));
    }
    for _ in 0..TRIES_MAX {
        if let Some(id) = try_set(app, scope, &asked).await? {
            return Ok(wire::Secret { id: id.0, name: asked.name, value: None });
        }
    }
    Err(Error::Conflict { msg: "the secret is being changed by others" })
}

/// `None` when somebody else was faster.
async fn try_set(app: &App, scope: &Scope, asked: &wire::SetRequest) -> Result<Option<SecretId>> {
    let project = scope.project.id;
    let seal = |version| app.keys().seal(&belongs(project, &asked.name, version), asked.value.as_bytes());
    let key = app.keys().sealing_id();
    let found = secrets::find(app.db(), project, &asked.name).await?;
    let (id, change, reason, message) = match found {
        Some(old) => {
            let change = secrets::replace(old.id, old.version, seal(old.version + 1)?, &key);
            (old.id, change, "updated", "Secret updated")
        }
        None => {
            let id = SecretId(app.db().new_id()?);
            let change = secrets::create(id, project, &asked.name, seal(1)?, &key);
            (id, change, "created", "Secret created")
        }
    };
    let about = About { entity: Entity::Secret, id: id.0, name: &asked.name, project: Some(project) };
    let told = note(app.db(), Some(scope.caller.user.id), &about, reason, message.into())?;
    match app.db().write(Unit::new().and([change]).and(told)).await {
        Ok(Written::Done { .. }) => Ok(Some(id)),
        Ok(Written::Stale { .. }) => Ok(None),
        Err(error) if error.is_conflict_on("secrets_name_key") => Ok(None),
        Err(error) => Err(error.into()),
    }
}

/// All of them or none.
pub async fn delete(app: &App, scope: &Scope, names: &[String]) -> Result<()> {
    may(scope)?;
    let project = scope.project.id;
    let mut unit = Unit::new();
    for name in names.iter().collect::<std::collections::BTreeSet<_>>() {
        let found = secrets::find(app.db(), project, name).await?;
        let secret = found.ok_or_else(|| Error::absent("Secret"))?;
        let about = About { entity: Entity::Secret, id: secret.id.0, name, project: Some(project) };
        let told = note(app.db(), Some(scope.caller.user.id), &about, "deleted", "Secret deleted".into())?;
        unit = unit.and([secrets::delete(project, name)]).and(told);
    }
    match app.db().write(unit).await? {
        Written::Done { .. } => Ok(()),
        Written::Stale { .. } => Err(Error::absent("Secret")),
    }
}

/// Turns the ring: a new master key, everything sealed again, the old keys forgotten.
///
/// May be stopped and run again at any point: until the last step every key still opens.
pub async fn turn_keys(app: &App) -> Result<()> {
    app.keys().turn()?;
    claim_key(app).await?;
    reseal(app).await?;
    // Once more: what was written with the old key while we walked.
    reseal(app).await?;
    let change = sealed::retire_keys_but(&app.keys().sealing_id());
    app.db().write(Unit::new().and([change])).await?.done()?;
    app.keys().retire()?;
    Ok(())
}

/// Writes down, by its id, with which key this server seals. A server that lacks one of the keys in
/// use must not start: it could not open what others sealed, and they not what it seals.
pub async fn claim_key(app: &App) -> Result<()> {
    if let Some(id) = sealed::key_ids(app.db()).await?.into_iter().find(|id| !app.keys().holds(id)) {
        return Err(KeyError::UnknownKey { id }.into());
    }
    let change = sealed::use_key(&app.keys().sealing_id());
    app.db().write(Unit::new().and([change])).await?.done()?;
    Ok(())
}

/// Puts everything that is sealed under the newest key.
pub async fn reseal(app: &App) -> Result<()> {
    let (db, keys) = (app.db(), app.keys());
    for (table, column) in sealed::OF_ROWS {
        for (id, old) in sealed::of_rows(db, table, column).await? {
            if let Some(new) = keys.rewrap(&Belongs::row(table, column, id), &old)? {
                db.write(Unit::new().and([sealed::replace(table, column, id, old, new)])).await?.done()?;
            }
        }
    }
    for secret in sealed::secrets(db).await? {
        let belongs = belongs(secret.project, &secret.name, secret.version);
        if let Some(new) = keys.rewrap(&belongs, &secret.sealed)? {
            let change = sealed::replace_secret(secret.id, secret.version, &keys.sealing_id(), new);
            db.write(Unit::new().and([change])).await?.done()?;
        }
    }
    for (repo, user, old) in sealed::repo_creds(db).await? {
        if let Some(new) = keys.rewrap(&super::repos::belongs(repo, &user.to_string()), &old)? {
            let change = sealed::replace_repo_creds(repo, user, old, new);
            db.write(Unit::new().and([change])).await?.done()?;
        }
    }
    Ok(())
}
