//! Passwords of registries that somebody wrote into a configuration.
//!
//! No specification is stored or shown with one: it is sealed in a row of its own, and `sealed:ID` stands in its place.
//! The same password of the same user gets the same id again, so that applying a configuration twice changes nothing.
//! A client may send `sealed:ID` back, as those do that apply the plan they were shown; it is good only for the user
//! whose password it is, for whoever names the image decides which registry is told it. A reference to a secret
//! (`${{ secrets.NAME }}`) is no password and stays as it is.

use serde_json::Value;
use uuid::Uuid;
use windlass_model::id::{ProjectId, UserId};

use crate::{
    app::App,
    db::{
        Db, DbError, Unit,
        registry_passwords::{self as rows, SealedPassword},
    },
    error::{Error, Result},
    secrets::{AssociatedData, KeyError, Keyring},
};

const PREFIX: &str = "sealed:";
/// What is put in by others is no password.
const REFERENCE: &str = "${{";

/// The id that stands in the place of a password.
pub(crate) fn parse_reference(text: &str) -> Option<Uuid> {
    text.strip_prefix(PREFIX)?.parse().ok()
}

fn password_aad(id: Uuid) -> AssociatedData<'static> {
    AssociatedData::row("registry_passwords", "password_sealed", id)
}

/// The password of a job's registry in the place of its reference; `None` when it is not stored any more.
pub(crate) async fn open_password(
    db: &Db,
    keys: &Keyring,
    project: ProjectId,
    id: Uuid,
) -> std::result::Result<Option<String>, OpenPasswordError> {
    let Some(found) = rows::find(db, id).await?.filter(|found| found.project == project) else {
        return Ok(None);
    };
    let plain = keys.open_sealed(&password_aad(id), &found.sealed)?;
    Ok(Some(String::from_utf8_lossy(&plain).into_owned()))
}

#[derive(Debug, thiserror::Error)]
pub(crate) enum OpenPasswordError {
    #[error(transparent)]
    Db(#[from] DbError),
    #[error(transparent)]
    Keys(#[from] KeyError),
}

/// Takes the password out of a document that has `registry_auth`, for the user who sent it. False when there was none.
pub(crate) async fn seal_document(
    app: &App,
    project: ProjectId,
    user: UserId,
    document: &mut Value,
) -> Result<bool> {
    let Some(Value::String(password)) = document.pointer_mut("/registry_auth/password") else {
        return Ok(false);
    };
    if password.is_empty() || password.contains(REFERENCE) {
        return Ok(false);
    }
    if let Some(id) = parse_reference(password) {
        let found = rows::find(app.db(), id).await?;
        return match found.filter(|found| found.project == project && found.user == user) {
            Some(_) => Ok(false),
            None => Err(Error::refused(
                "`registry_auth.password` is the sealed password of another user or project; \
                 write the password, or a secret as `${{ secrets.NAME }}`",
            )),
        };
    }
    *password = format!("{PREFIX}{}", sealed(app, project, user, password).await?);
    Ok(true)
}

/// The id of a password: that of an earlier time where it is the same.
async fn sealed(app: &App, project: ProjectId, user: UserId, password: &str) -> Result<Uuid> {
    for held in rows::list_by_user(app.db(), project, user).await? {
        if app.keys().open_sealed(&password_aad(held.id), &held.sealed)? == password.as_bytes() {
            return Ok(held.id);
        }
    }
    let id = app.db().new_id()?;
    let sealed = app.keys().seal(&password_aad(id), password.as_bytes())?;
    let row = rows::create(SealedPassword { id, project, user, sealed });
    app.db().write(Unit::new().and([row])).await?.done()?;
    Ok(id)
}

/// Takes passwords out of what earlier versions stored. Done once for a database.
pub(crate) async fn seal_stored_documents(app: &App) -> Result<()> {
    if rows::is_migration_done(app.db()).await? {
        return Ok(());
    }
    for stored in rows::documents(app.db()).await? {
        let mut document: Value = serde_json::from_str(&stored.text)?;
        let part = match stored.table {
            "runs" => &mut document["configuration"],
            _ => &mut document,
        };
        // What the run's owner wrote counts as theirs, whoever it was.
        let literal = part.pointer("/registry_auth/password").and_then(Value::as_str).map(parse_reference);
        if literal != Some(None) {
            continue;
        }
        if seal_document(app, stored.project, stored.user, part).await? {
            let change = rows::replace(&stored, &document.to_string());
            app.db().write(Unit::new().and([change])).await?.done()?;
        }
    }
    app.db().write(Unit::new().and([rows::mark_migration_done()])).await?.done()?;
    Ok(())
}
