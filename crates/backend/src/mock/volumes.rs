//! Network volumes of the mock cloud, which exist in its records only.

use super::{
    MockCloud,
    ledger::{VolumeRecord, now_ms},
};
use crate::{
    BackendError, BackendFuture, BackendInstance,
    volumes::{Attachment, AttachmentState, BackendVolume, VolumeBackend, VolumeRequest},
};

impl MockCloud {
    fn shown(&self, volume: &VolumeRecord) -> BackendVolume {
        let script = &self.script.volumes;
        BackendVolume {
            id: volume.id.clone(),
            size_gb: volume.size_gb,
            zone: volume.zone.clone(),
            price: volume.size_gb.map(|size| size * script.price_gb),
            ready: now_ms() >= volume.made_ms + script.ready_ms,
        }
    }

    fn known(&self, id: &str) -> Result<VolumeRecord, BackendError> {
        let absent =
            || BackendError::Refused { what: "find the volume", message: format!("{id} does not exist") };
        self.ledger.volume(id)?.ok_or_else(absent)
    }

    fn how(&self, volume: &VolumeRecord, machine: &BackendInstance) -> AttachmentState {
        match volume.attached.get(&machine.id) {
            None => AttachmentState::No,
            Some(since) if now_ms() < since + self.script.volumes.attach_ms => AttachmentState::Coming,
            Some(_) => AttachmentState::Yes(Attachment { device_name: Some(format!("/dev/{}", volume.id)) }),
        }
    }
}

impl VolumeBackend for MockCloud {
    fn make<'a>(&'a self, order: &'a VolumeRequest) -> BackendFuture<'a, BackendVolume> {
        Box::pin(async move {
            let _alone = self.lock_ledger().await?;
            if let Some(external) = &order.external {
                return Ok(self.shown(&self.known(external)?));
            }
            let id = format!("vol-{}", order.volume);
            if let Some(made) = self.ledger.volume(&id)? {
                return Ok(self.shown(&made));
            }
            let volume = VolumeRecord {
                id,
                region: order.region.clone(),
                zone: order.zone.clone(),
                size_gb: order.size_gb,
                made_ms: now_ms(),
                attached: Default::default(),
            };
            self.ledger.put_volume(&volume)?;
            Ok(self.shown(&volume))
        })
    }

    fn get<'a>(&'a self, _order: &'a VolumeRequest, id: &'a str) -> BackendFuture<'a, Option<BackendVolume>> {
        Box::pin(async move { Ok(self.ledger.volume(id)?.map(|volume| self.shown(&volume))) })
    }

    fn remove<'a>(&'a self, order: &'a VolumeRequest, id: &'a str) -> BackendFuture<'a, ()> {
        Box::pin(async move {
            let _alone = self.lock_ledger().await?;
            if order.external.is_some() {
                return Ok(());
            }
            match self.ledger.volume(id)? {
                Some(volume) if !volume.attached.is_empty() => Err(BackendError::Unavailable {
                    what: "delete the volume",
                    message: format!("{id} is still attached"),
                }),
                Some(_) => self.ledger.remove_volume(id),
                None => Ok(()),
            }
        })
    }

    fn attach<'a>(&'a self, id: &'a str, machine: &'a BackendInstance) -> BackendFuture<'a, AttachmentState> {
        Box::pin(async move {
            let _alone = self.lock_ledger().await?;
            let mut volume = self.known(id)?;
            let failed = |message| Err(BackendError::Unavailable { what: "attach the volume", message });
            if let Some(other) = volume.attached.keys().find(|other| **other != machine.id) {
                return failed(format!("{id} is attached to {other}"));
            }
            if !volume.attached.contains_key(&machine.id) {
                if self.ledger.is_among_first(&format!("attach {id}"), self.script.volumes.attach_fails)? {
                    return failed("scripted fault".to_owned());
                }
                volume.attached.insert(machine.id.clone(), now_ms());
                self.ledger.put_volume(&volume)?;
            }
            Ok(self.how(&volume, machine))
        })
    }

    fn detach<'a>(&'a self, id: &'a str, machine: &'a BackendInstance, force: bool) -> BackendFuture<'a, ()> {
        Box::pin(async move {
            let _alone = self.lock_ledger().await?;
            let Some(mut volume) = self.ledger.volume(id)? else { return Ok(()) };
            if force || !self.script.volumes.detach_hangs {
                volume.attached.remove(&machine.id);
                self.ledger.put_volume(&volume)?;
            }
            Ok(())
        })
    }

    fn attached<'a>(
        &'a self,
        id: &'a str,
        machine: &'a BackendInstance,
    ) -> BackendFuture<'a, AttachmentState> {
        Box::pin(async move {
            let volume = self.ledger.volume(id)?;
            Ok(volume.map_or(AttachmentState::No, |volume| self.how(&volume, machine)))
        })
    }
}
