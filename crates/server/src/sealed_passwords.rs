//! Passwords of registries, which are stored sealed, and the references that replace them in specifications. See
//! `registry_passwords`.

use uuid::Uuid;
use windlass_model::id::ProjectId;

use crate::{
    db::{Db, DbError, registry_passwords as rows},
    encryption::{AssociatedData, KeyError, Keyring},
};

pub(crate) const PREFIX: &str = "sealed:";

/// Parses the reference that replaces a password.
pub(crate) fn parse_reference(text: &str) -> Option<Uuid> {
    text.strip_prefix(PREFIX)?.parse().ok()
}

pub(crate) fn password_aad(id: Uuid) -> AssociatedData<'static> {
    AssociatedData::row("registry_passwords", "password_sealed", id)
}

/// Opens the password behind a reference; `None` if it is no longer stored.
pub(crate) async fn open_password(
    db: &Db,
    keys: &Keyring,
    project: ProjectId,
    id: Uuid,
) -> Result<Option<String>, OpenPasswordError> {
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
