//! SSH key of each project: its containers accept it, and only the server has its private half.

use windlass_model::id::ProjectId;

use crate::{
    app::App,
    db::{Change, Unit, projects},
    encryption::AssociatedData,
    error::Result,
    ssh_keys::generate_key_pair,
};

/// Maximum number of projects that get a key in one write.
const BATCH_MAX: i64 = 100;

fn key_aad(project: ProjectId) -> AssociatedData<'static> {
    AssociatedData::row("projects", "ssh_private_key_sealed", project.0)
}

/// Generates a key for a project that has none; an existing key is kept.
pub(super) fn generate(app: &App, id: ProjectId, name: &str) -> Result<Change> {
    let (public, private) = generate_key_pair(name)?;
    let sealed = app.keys().seal(&key_aad(id), private.as_bytes())?;
    Ok(projects::set_first_key(id, &public, sealed))
}

/// Generates keys for projects that were created before projects had keys.
pub async fn ensure(app: &App) -> Result<()> {
    loop {
        let bare = projects::list_without_key(app.db(), BATCH_MAX).await?;
        if bare.is_empty() {
            return Ok(());
        }
        let keys = bare.iter().map(|(id, name)| generate(app, *id, name)).collect::<Result<Vec<_>>>()?;
        app.db().write(Unit::new().and(keys)).await?.done()?;
    }
}

/// Private half, in OpenSSH's format. `None`: there is no such project.
pub async fn open(app: &App, id: ProjectId) -> Result<Option<String>> {
    let Some(sealed) = projects::sealed_key(app.db(), id).await? else { return Ok(None) };
    let plain = app.keys().open_sealed(&key_aad(id), &sealed)?;
    Ok(Some(String::from_utf8_lossy(&plain).into_owned()))
}
