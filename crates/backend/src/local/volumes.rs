//! Volumes of this machine: directories below the home of its agent, which outlive runs, agents and fleets.
//!
//! The agent creates the directory when a task first needs it, and mounts it into the task. Nothing has to be attached
//! or detached. Deleting the volume deletes the directory.

use std::{
    io,
    path::{Path, PathBuf},
};

use sha2::{Digest as _, Sha256};

use super::{LocalBackend, NAME};
use crate::{
    BackendError, BackendFuture, BackendInstance,
    shim_process::VOLUMES_DIR,
    volumes::{Attachment, AttachmentState, BackendVolume, VolumeBackend, VolumeRequest},
};

/// Returns the directory of a volume in the agent's home. The name includes a hash of the id, because two projects may
/// use the same volume name.
fn volume_dir(home: &Path, name: &str, id: &str) -> PathBuf {
    let tag = hex::encode(Sha256::digest(format!("{NAME}\0{id}")));
    home.join(VOLUMES_DIR).join(format!("{name}-{}", tag.chars().take(8).collect::<String>()))
}

fn local_volume(order: &VolumeRequest) -> BackendVolume {
    BackendVolume { id: order.volume.to_string(), size_gb: None, zone: None, price: None, ready: true }
}

impl VolumeBackend for LocalBackend {
    fn make<'a>(&'a self, order: &'a VolumeRequest) -> BackendFuture<'a, BackendVolume> {
        Box::pin(async move { Ok(local_volume(order)) })
    }

    fn get<'a>(&'a self, order: &'a VolumeRequest, _id: &'a str) -> BackendFuture<'a, Option<BackendVolume>> {
        Box::pin(async move { Ok(Some(local_volume(order))) })
    }

    fn remove<'a>(&'a self, order: &'a VolumeRequest, id: &'a str) -> BackendFuture<'a, ()> {
        Box::pin(async move {
            let directory = volume_dir(self.home().dir(), &order.name, id);
            match tokio::fs::remove_dir_all(&directory).await {
                Err(error) if error.kind() != io::ErrorKind::NotFound => Err(BackendError::Unavailable {
                    what: "delete the volume",
                    message: format!("{}: {error}", directory.display()),
                }),
                Ok(()) | Err(_) => Ok(()),
            }
        })
    }

    fn attach<'a>(
        &'a self,
        _id: &'a str,
        _machine: &'a BackendInstance,
    ) -> BackendFuture<'a, AttachmentState> {
        Box::pin(async { Ok(AttachmentState::Yes(Attachment::default())) })
    }

    fn detach<'a>(
        &'a self,
        _id: &'a str,
        _machine: &'a BackendInstance,
        _force: bool,
    ) -> BackendFuture<'a, ()> {
        Box::pin(async { Ok(()) })
    }

    /// Always `No`: the agent releases a volume with the task, and the backend does not hold it.
    fn attached<'a>(
        &'a self,
        _id: &'a str,
        _machine: &'a BackendInstance,
    ) -> BackendFuture<'a, AttachmentState> {
        Box::pin(async { Ok(AttachmentState::No) })
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use windlass_model::id::VolumeId;

    use super::*;
    use crate::local::Settings;

    #[tokio::test]
    async fn deleting_a_local_volume_removes_only_its_directory() {
        let home = windlass_testkit::temp_dir("local-volumes").unwrap();
        let local = LocalBackend::new(Settings { home: home.path().to_owned(), ..Settings::default() });
        let order = |number| VolumeRequest {
            volume: VolumeId(uuid::Uuid::from_u128(number)),
            name: "data".to_owned(),
            region: NAME.to_owned(),
            zone: None,
            size_gb: None,
            external: None,
        };
        let (one, two) = (local.make(&order(1)).await.unwrap(), local.make(&order(2)).await.unwrap());
        assert!(one.ready && one.id != two.id);
        let place = |id: &str| volume_dir(home.path(), "data", id);
        for id in [&one.id, &two.id] {
            fs::create_dir_all(place(id)).unwrap();
            fs::write(place(id).join("kept"), id).unwrap();
        }
        local.remove(&order(1), &one.id).await.unwrap();
        local.remove(&order(1), &one.id).await.unwrap();
        assert!(!place(&one.id).exists());
        assert!(place(&two.id).join("kept").exists(), "one of the same name in another project stays");
    }

    #[test]
    fn removing_a_local_agent_keeps_its_volumes() {
        let dir = windlass_testkit::temp_dir("local-volumes").unwrap();
        let home = crate::shim_process::ShimHome::new(&dir.path().join("agent"));
        fs::create_dir_all(home.dir().join("tasks/one")).unwrap();
        fs::create_dir_all(home.dir().join(VOLUMES_DIR).join("data-1")).unwrap();
        fs::write(home.dir().join("enrolment.json"), "{}").unwrap();
        home.remove().unwrap();
        let left: Vec<_> =
            fs::read_dir(home.dir()).unwrap().flatten().map(|entry| entry.file_name()).collect();
        assert_eq!(left, [VOLUMES_DIR]);
        fs::remove_dir(home.dir().join(VOLUMES_DIR).join("data-1")).unwrap();
        home.remove().unwrap();
        assert!(!home.dir().exists(), "nothing is left where there is no volume");
        home.remove().unwrap();
    }
}
