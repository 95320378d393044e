//! Network volumes: storage that a backend provides and attaches to its instances.

use serde::{Deserialize, Serialize};
use windlass_model::id::VolumeId;

use crate::{BackendFuture, BackendInstance};

/// Request to create or find a volume.
#[derive(Clone, Debug, PartialEq)]
pub struct VolumeRequest {
    /// Key: a repeated request returns the existing volume.
    pub volume: VolumeId,
    pub name: String,
    pub region: String,
    pub zone: Option<String>,
    pub size_gb: Option<f64>,
    /// Id in the backend of a volume that existed before.
    pub external: Option<String>,
}

/// Volume as its backend knows it; stored by the server.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct BackendVolume {
    /// Id assigned by the backend.
    pub id: String,
    pub size_gb: Option<f64>,
    pub zone: Option<String>,
    /// Dollars per month.
    pub price: Option<f64>,
    pub ready: bool,
}

/// Attachment of a volume, as seen on its instance.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Attachment {
    pub device_name: Option<String>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AttachmentState {
    Yes(Attachment),
    /// Attachment has started; check again.
    Coming,
    No,
}

pub trait VolumeBackend: Send + Sync {
    /// Returns whether one volume may be attached to several instances at once.
    fn many(&self) -> bool {
        false
    }

    /// Creates the volume, or finds it if the request names an existing one.
    fn make<'a>(&'a self, order: &'a VolumeRequest) -> BackendFuture<'a, BackendVolume>;

    /// Returns the present state. `None`: the backend does not have it.
    fn get<'a>(&'a self, order: &'a VolumeRequest, id: &'a str) -> BackendFuture<'a, Option<BackendVolume>>;

    /// Deletes a volume that it created; succeeds if it is gone already. A volume that existed before is left alone.
    fn remove<'a>(&'a self, order: &'a VolumeRequest, id: &'a str) -> BackendFuture<'a, ()>;

    fn attach<'a>(&'a self, id: &'a str, machine: &'a BackendInstance) -> BackendFuture<'a, AttachmentState>;

    /// Requests the end of an attachment; `force` ends it at once.
    fn detach<'a>(&'a self, id: &'a str, machine: &'a BackendInstance, force: bool) -> BackendFuture<'a, ()>;

    fn attached<'a>(
        &'a self,
        id: &'a str,
        machine: &'a BackendInstance,
    ) -> BackendFuture<'a, AttachmentState>;
}
