//! Users whose runs may use a secret: asked when a run is submitted, and again when its jobs start.

use std::collections::BTreeSet;

use windlass_model::id::{ProjectId, UserId};

use crate::db::{
    Db, DbError,
    documents::SECRET_USERS,
    projects,
    secrets::{self, Secret},
};

/// Stored values for the users whose runs may use a secret.
pub(crate) const EVERYONE: &str = "everyone";
pub(crate) const MANAGERS: &str = "managers";

/// Secrets of the project that the runs of this user may not use. Managers may use all of them: they can read them,
/// too.
pub(crate) async fn withheld(
    db: &Db,
    project: ProjectId,
    user: UserId,
    names: &BTreeSet<String>,
) -> Result<Vec<String>, DbError> {
    if names.is_empty() {
        return Ok(Vec::new());
    }
    let found = secrets::find_named(db, project, names.iter().map(String::as_str)).await?;
    let limited: Vec<Secret> = found.into_iter().filter(|secret| secret.users != EVERYONE).collect();
    if limited.is_empty() {
        return Ok(Vec::new());
    }
    let (role, is_global_admin) = projects::role(db, project, user).await?;
    if is_global_admin || matches!(role.as_deref(), Some("manager" | "admin")) {
        return Ok(Vec::new());
    }
    let mut withheld = Vec::new();
    for secret in limited {
        let is_named = role.is_some()
            && match secret.users.as_str() {
                MANAGERS => false,
                users => SECRET_USERS.decode::<Vec<UserId>>(secret.id, users)?.contains(&user),
            };
        if !is_named {
            withheld.push(secret.name);
        }
    }
    Ok(withheld)
}
