//! Network volumes: custom storage volumes with a file system, which LXD mounts into a machine while it runs.
//!
//! A volume is attached to one machine at a time. It appears there as a directory, so nothing has to be formatted; the
//! agent mounts that directory into the tasks.

use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::{LxdProvider, client::percent_encode, parse};
use crate::{
    BackendError, BackendFuture, BackendInstance,
    volumes::{Attachment, AttachmentState, BackendVolume, VolumeBackend, VolumeRequest},
};

/// Directory in a machine below which its volumes are mounted.
const MOUNT_ROOT: &str = "/var/lib/windlass-volumes";
/// Key of a volume's configuration with its id.
const VOLUME_KEY: &str = "user.windlass-volume";
const MIB_PER_GB: f64 = 1024.0;

#[derive(Debug, Deserialize)]
struct ShownVolume {
    name: String,
    #[serde(default)]
    content_type: String,
    #[serde(default)]
    config: std::collections::BTreeMap<String, String>,
    #[serde(default)]
    used_by: Vec<String>,
}

impl LxdProvider {
    fn volumes_path(&self) -> String {
        let pool = percent_encode(&self.settings.storage_pool).replace('/', "%2F");
        format!("/1.0/storage-pools/{pool}/volumes/custom")
    }

    async fn volume(&self, id: &str) -> Result<Option<ShownVolume>, BackendError> {
        let path = format!("{}/{}", self.volumes_path(), percent_encode(id).replace('/', "%2F"));
        match self.client.get(&path).await {
            Ok(shown) => parse("find the volume", shown).map(Some),
            Err(error) if error.is_not_found() => Ok(None),
            Err(error) => Err(error.to_backend("find the volume")),
        }
    }

    async fn made_volume(&self, order: &VolumeRequest) -> Result<BackendVolume, BackendError> {
        let refused = |message: String| BackendError::Refused { what: "create the volume", message };
        if order.region != self.settings.region {
            return Err(refused(format!(
                "region `{}` does not exist; this backend has `{}`",
                order.region, self.settings.region
            )));
        }
        if let Some(zone) = &order.zone {
            return Err(refused(format!("LXD has no availability zones, and `{zone}` is requested")));
        }
        if let Some(external) = &order.external {
            let missing = || {
                let pool = &self.settings.storage_pool;
                refused(format!("storage pool `{pool}` has no custom volume `{external}`"))
            };
            let found = self.volume(external).await?.ok_or_else(missing)?;
            if found.content_type == "block" {
                return Err(refused(format!(
                    "`{external}` is a block volume; expected one with a file system"
                )));
            }
            return Ok(found.describe());
        }
        let id = format!("windlass-{}", order.volume.0.simple());
        let mut config = Map::new();
        config.insert(VOLUME_KEY.into(), order.volume.to_string().into());
        config.insert("user.windlass-name".into(), order.name.clone().into());
        if let Some(size) = order.size_gb {
            config.insert("size".into(), format!("{}MiB", (size * MIB_PER_GB).ceil() as u64).into());
        }
        let body = json!({ "name": id, "type": "custom", "content_type": "filesystem", "config": config });
        match self.client.change("POST", &self.volumes_path(), &body).await {
            Ok(()) => {}
            Err(error) if error.is_conflict() => {}
            Err(error) => return Err(error.to_backend("create the volume")),
        }
        let missing = || BackendError::Unavailable {
            what: "create the volume",
            message: "LXD does not list it yet".to_owned(),
        };
        Ok(self.volume(&id).await?.ok_or_else(missing)?.describe())
    }

    async fn removed(&self, order: &VolumeRequest, id: &str) -> Result<(), BackendError> {
        let Some(shown) = self.volume(id).await? else { return Ok(()) };
        if order.external.is_some() || shown.config.get(VOLUME_KEY) != Some(&order.volume.to_string()) {
            return Ok(());
        }
        let path = format!("{}/{id}", self.volumes_path());
        match self.client.change("DELETE", &path, &Value::Null).await {
            Ok(()) => Ok(()),
            Err(error) if error.is_not_found() => Ok(()),
            Err(_) if !shown.used_by.is_empty() => Err(BackendError::Unavailable {
                what: "delete the volume",
                message: format!("{id} is still attached to {}", shown.used_by.join(", ")),
            }),
            Err(error) => Err(error.to_backend("delete the volume")),
        }
    }

    /// Devices of a machine; `None` if it does not exist.
    async fn devices(&self, machine: &BackendInstance) -> Result<Option<Map<String, Value>>, BackendError> {
        Ok(self.instance(&machine.id).await?.map(|shown| shown.devices))
    }

    async fn attached_volume(
        &self,
        id: &str,
        machine: &BackendInstance,
    ) -> Result<AttachmentState, BackendError> {
        let refused = |message: String| BackendError::Refused { what: "attach the volume", message };
        let shown = self.volume(id).await?.ok_or_else(|| refused(format!("{id} does not exist")))?;
        let devices = self.devices(machine).await?;
        let devices = devices.ok_or_else(|| refused(format!("{} does not exist", machine.id)))?;
        let device = device_name(id);
        if devices.contains_key(&device) {
            return Ok(AttachmentState::Yes(attachment(id)));
        }
        let users = shown.used_by.iter().filter(|user| !user.contains("/profiles/"));
        if let Some(other) = users.filter(|user| !is_machine(user, &machine.id)).min() {
            return Err(BackendError::Unavailable {
                what: "attach the volume",
                message: format!("{id} is attached to {other}"),
            });
        }
        let mut all = devices;
        let disk = json!({
            "type": "disk", "pool": self.settings.storage_pool, "source": id, "path": mount_path(id),
        });
        all.insert(device, disk);
        self.set_devices(machine, all, "attach the volume").await?;
        Ok(AttachmentState::Yes(attachment(id)))
    }

    /// `PATCH` replaces the devices as a whole.
    async fn set_devices(
        &self,
        machine: &BackendInstance,
        devices: Map<String, Value>,
        what: &'static str,
    ) -> Result<(), BackendError> {
        let path = format!("/1.0/instances/{}", machine.id);
        let changed = self.client.change("PATCH", &path, &json!({ "devices": devices })).await;
        changed.map_err(|error| error.to_backend(what))
    }

    async fn detached(&self, id: &str, machine: &BackendInstance) -> Result<(), BackendError> {
        // The volumes of a deleted machine are free.
        let Some(mut devices) = self.devices(machine).await? else { return Ok(()) };
        if devices.remove(&device_name(id)).is_none() {
            return Ok(());
        }
        // An update of the devices cannot remove one of them, so the instance is replaced as a whole.
        let path = format!("/1.0/instances/{}", machine.id);
        let shown = self.client.get(&path).await.map_err(|error| error.to_backend("detach the volume"))?;
        let mut body = Map::new();
        for key in ["architecture", "config", "description", "ephemeral", "profiles", "stateful"] {
            body.insert(key.to_owned(), shown[key].clone());
        }
        body.insert("devices".to_owned(), Value::Object(devices));
        let changed = self.client.change("PUT", &path, &Value::Object(body)).await;
        changed.map_err(|error| error.to_backend("detach the volume"))
    }
}

impl ShownVolume {
    fn describe(self) -> BackendVolume {
        let size = self.config.get("size").and_then(|size| size.strip_suffix("MiB")?.parse::<f64>().ok());
        BackendVolume {
            id: self.name,
            size_gb: size.map(|mib| mib / MIB_PER_GB),
            zone: None,
            price: None,
            ready: true,
        }
    }
}

/// Returns whether an entry of `used_by`, such as `/1.0/instances/NAME?project=p`, is this machine.
fn is_machine(user: &str, name: &str) -> bool {
    let path = user.split('?').next().unwrap_or_default();
    path.rsplit('/').next() == Some(name)
}

fn device_name(id: &str) -> String {
    format!("volume-{id}")
}

fn mount_path(id: &str) -> String {
    format!("{MOUNT_ROOT}/{id}")
}

fn attachment(id: &str) -> Attachment {
    Attachment { device_name: Some(mount_path(id)) }
}

impl VolumeBackend for LxdProvider {
    fn make<'a>(&'a self, order: &'a VolumeRequest) -> BackendFuture<'a, BackendVolume> {
        Box::pin(self.made_volume(order))
    }

    fn get<'a>(&'a self, _order: &'a VolumeRequest, id: &'a str) -> BackendFuture<'a, Option<BackendVolume>> {
        Box::pin(async move { Ok(self.volume(id).await?.map(ShownVolume::describe)) })
    }

    fn remove<'a>(&'a self, order: &'a VolumeRequest, id: &'a str) -> BackendFuture<'a, ()> {
        Box::pin(self.removed(order, id))
    }

    fn attach<'a>(&'a self, id: &'a str, machine: &'a BackendInstance) -> BackendFuture<'a, AttachmentState> {
        Box::pin(self.attached_volume(id, machine))
    }

    fn detach<'a>(
        &'a self,
        id: &'a str,
        machine: &'a BackendInstance,
        _force: bool,
    ) -> BackendFuture<'a, ()> {
        Box::pin(self.detached(id, machine))
    }

    fn attached<'a>(
        &'a self,
        id: &'a str,
        machine: &'a BackendInstance,
    ) -> BackendFuture<'a, AttachmentState> {
        Box::pin(async move {
            let devices = self.devices(machine).await?.unwrap_or_default();
            Ok(match devices.contains_key(&device_name(id)) {
                true => AttachmentState::Yes(attachment(id)),
                false => AttachmentState::No,
            })
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_user_of_a_volume_is_compared_by_its_name() {
        assert!(is_machine("/1.0/instances/windlass-ab?project=lab", "windlass-ab"));
        assert!(!is_machine("/1.0/instances/windlass-abc", "windlass-ab"));
    }
}
