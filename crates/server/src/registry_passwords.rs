//! Registry passwords that users wrote into configurations.
//!
//! No specification is stored or shown with one: the password is sealed in a separate row, and `sealed:ID` replaces it.
//! The same password of the same user gets the same id again, so that applying a configuration twice changes nothing. A
//! client may send `sealed:ID` back, as it does when it applies the plan that it received. The reference is valid only
//! for the user whose password it is, because the user who names the image chooses the registry that receives the
//! password. A reference to a secret (`${{ secrets.NAME }}`) is not a password and is left unchanged.

use serde_json::Value;
use uuid::Uuid;
use windlass_model::id::{ProjectId, UserId};

use crate::{
    app::App,
    db::{
        Unit,
        registry_passwords::{self as rows, SealedPassword},
    },
    error::{Error, Result},
    sealed_passwords::{PREFIX, parse_reference, password_aad},
};

/// Text with a reference to a secret is not a password.
const REFERENCE: &str = "${{";

/// Seals the password of a document with `registry_auth`, for the user who sent it. Returns false if there was none.
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
                "`registry_auth.password` is the sealed password of another user or project; set the \
                 password, or reference a secret with `${{ secrets.NAME }}`",
            )),
        };
    }
    *password = format!("{PREFIX}{}", seal_password(app, project, user, password).await?);
    Ok(true)
}

/// Returns the id of a sealed password, reusing the row if the user stored the same password before.
async fn seal_password(app: &App, project: ProjectId, user: UserId, password: &str) -> Result<Uuid> {
    for held in rows::list_by_user(app.db(), project, user).await? {
        if app.keys().open_sealed(&password_aad(held.id), &held.sealed)? == password.as_bytes() {
            // If retention deletes it at this moment, a new row is created.
            if app.db().write(Unit::new().and([rows::touch(held.id)])).await?.is_done() {
                return Ok(held.id);
            }
        }
    }
    let id = app.db().new_id()?;
    let sealed = app.keys().seal(&password_aad(id), password.as_bytes())?;
    let row = rows::create(SealedPassword { id, project, user, sealed });
    app.db().write(Unit::new().and([row])).await?.done()?;
    Ok(id)
}

/// Seals the passwords that earlier versions stored in documents. Runs once per database.
pub(crate) async fn seal_stored_documents(app: &App) -> Result<()> {
    if rows::is_migration_done(app.db()).await? {
        return Ok(());
    }
    for stored in rows::documents(app.db()).await? {
        let mut document: Value = stored.column.decode(stored.id, &stored.text)?;
        let part = match stored.column.table() {
            "runs" => &mut document["configuration"],
            _ => &mut document,
        };
        // A stored password is attributed to the owner of the run, regardless of its author.
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
