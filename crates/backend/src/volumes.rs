//! Network volumes: storage that a backend keeps and attaches to its machines.

use serde::{Deserialize, Serialize};
use windlass_model::id::VolumeId;

use crate::{BackendFuture, BackendInstance};

/// One volume to make or to find.
#[derive(Clone, Debug, PartialEq)]
pub struct VolumeRequest {
    /// The key: a repeat answers with what the first made.
    pub volume: VolumeId,
    pub name: String,
    pub region: String,
    pub zone: Option<String>,
    pub size_gb: Option<f64>,
    /// The backend's own id of one that was there before us.
    pub external: Option<String>,
}

/// A volume as its backend knows it; stored by the server.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct BackendVolume {
    /// The backend's own id.
    pub id: String,
    pub size_gb: Option<f64>,
    pub zone: Option<String>,
    /// Dollars a month.
    pub price: Option<f64>,
    pub ready: bool,
}

/// How an attached volume appears on its machine.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Attachment {
    pub device_name: Option<String>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AttachmentState {
    Yes(Attachment),
    /// Asked for; look again.
    Coming,
    No,
}

pub trait VolumeBackend: Send + Sync {
    /// One volume may be attached to several machines at once.
    fn many(&self) -> bool {
        false
    }

    /// Makes it, or finds it where the order names one that exists.
    fn make<'a>(&'a self, order: &'a VolumeRequest) -> BackendFuture<'a, BackendVolume>;

    /// `None`: the backend does not have it.
    fn look<'a>(&'a self, order: &'a VolumeRequest, id: &'a str) -> BackendFuture<'a, Option<BackendVolume>>;

    /// Deletes what it made. Gone already is fine. One that was there before us is left alone.
    fn remove<'a>(&'a self, order: &'a VolumeRequest, id: &'a str) -> BackendFuture<'a, ()>;

    fn attach<'a>(&'a self, id: &'a str, machine: &'a BackendInstance) -> BackendFuture<'a, AttachmentState>;

    /// Asks for the end of an attachment; `force` cuts it.
    fn detach<'a>(&'a self, id: &'a str, machine: &'a BackendInstance, force: bool) -> BackendFuture<'a, ()>;

    fn attached<'a>(
        &'a self,
        id: &'a str,
        machine: &'a BackendInstance,
    ) -> BackendFuture<'a, AttachmentState>;
}
