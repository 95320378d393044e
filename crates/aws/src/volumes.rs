//! Network volumes: disks of EBS, which the agent formats and mounts.
//!
//! A volume is in one zone and on one machine at a time.

use windlass_backend::{
    BackendError, BackendFuture, BackendInstance,
    machines::region_of,
    volumes::{Attachment, AttachmentState, BackendVolume, VolumeBackend, VolumeRequest},
};

use crate::{
    AwsProvider,
    api::Params,
    errors::{ApiError, ErrorClass},
    instances::NAME_TAG,
    xml::Element,
};

/// Tag of a volume with its id in windlass.
const VOLUME_TAG: &str = "windlass-volume";
/// Names under which disks are attached. Machines with NVMe show others; the agent finds the disk by its id.
const DEVICE_LETTERS: std::ops::RangeInclusive<char> = 'f'..='p';
const CREATE: &str = "create the volume";
const FIND: &str = "find the volume";
const DELETE: &str = "delete the volume";
const ATTACH: &str = "attach the volume";
const DETACH: &str = "detach the volume";
const SMALLEST_GB: f64 = 1.0;

/// Disk as EC2 shows it.
#[derive(Clone, Debug, PartialEq)]
struct EbsVolume {
    id: String,
    state: String,
    size_gb: Option<f64>,
    zone: Option<String>,
    volume: Option<String>,
    attachments: Vec<EbsAttachment>,
}

#[derive(Clone, Debug, PartialEq)]
struct EbsAttachment {
    machine: String,
    device: Option<String>,
    state: String,
}

impl EbsVolume {
    fn read(item: &Element) -> Option<Self> {
        let attachments = item.items("attachmentSet").filter_map(|one| {
            Some(EbsAttachment {
                machine: one.text("instanceId")?.to_owned(),
                device: one.text("device").map(str::to_owned),
                state: one.text("status").unwrap_or_default().to_owned(),
            })
        });
        Some(Self {
            id: item.text("volumeId")?.to_owned(),
            state: item.text("status")?.to_owned(),
            size_gb: item.number("size"),
            zone: item.text("availabilityZone").map(str::to_owned),
            volume: item.tag(VOLUME_TAG).map(str::to_owned),
            attachments: attachments.filter(|one| one.state != "detached").collect(),
        })
    }

    fn exists(&self) -> bool {
        !["deleting", "deleted"].contains(&self.state.as_str())
    }

    fn describe(&self) -> BackendVolume {
        BackendVolume {
            id: self.id.clone(),
            size_gb: self.size_gb,
            zone: self.zone.clone(),
            price: None,
            ready: ["available", "in-use"].contains(&self.state.as_str()),
        }
    }

    fn attachment_to(&self, machine: &str) -> AttachmentState {
        let Some(found) = self.attachments.iter().find(|one| one.machine == machine) else {
            return AttachmentState::No;
        };
        match found.state.as_str() {
            "attached" => AttachmentState::Yes(Attachment { device_name: found.device.clone() }),
            // One that is being detached is still there.
            _ => AttachmentState::Coming,
        }
    }
}

fn refused(what: &'static str, message: String) -> BackendError {
    BackendError::Refused { what, message }
}

/// Region of a machine, in which its volumes are.
fn region(what: &'static str, machine: &BackendInstance) -> Result<String, BackendError> {
    region_of(machine)
        .ok_or_else(|| refused(what, format!("the region of machine {} is not known", machine.id)))
}

impl AwsProvider {
    async fn volumes_where(&self, region: &str, query: Params) -> Result<Vec<EbsVolume>, ApiError> {
        let found = self.api.list(region, "DescribeVolumes", query, "volumeSet").await?;
        Ok(found.iter().filter_map(EbsVolume::read).filter(EbsVolume::exists).collect())
    }

    async fn volume(&self, region: &str, id: &str) -> Result<Option<EbsVolume>, ApiError> {
        match self.volumes_where(region, Params::new().with_list("VolumeId", [id])).await {
            Ok(found) => Ok(found.into_iter().next()),
            // `InvalidParameterValue`: the id is none of a volume.
            Err(error) if error.is_not_found() || error.code() == "InvalidParameterValue" => Ok(None),
            Err(error) => Err(error),
        }
    }

    async fn made_volume(&self, order: &VolumeRequest) -> Result<BackendVolume, BackendError> {
        let region = order.region.as_str();
        let failed = |error: ApiError| error.to_backend(CREATE);
        if !self.settings.regions.iter().any(|known| known == region) {
            let known = self.settings.regions.join("`, `");
            return Err(refused(
                CREATE,
                format!("region `{region}` is not configured; this backend has `{known}`"),
            ));
        }
        if let Some(external) = &order.external {
            let missing = || refused(CREATE, format!("region {region} has no volume `{external}`"));
            return Ok(self.volume(region, external).await.map_err(failed)?.ok_or_else(missing)?.describe());
        }
        let query = Params::new().with_filter(&format!("tag:{VOLUME_TAG}"), [order.volume.to_string()]);
        if let Some(found) = self.volumes_where(region, query).await.map_err(failed)?.first() {
            return Ok(found.describe());
        }
        let network = self.network(region).await.map_err(|error| error.to_backend(CREATE))?;
        let zone = match &order.zone {
            Some(zone) if network.subnets.contains_key(zone) => zone,
            Some(zone) => {
                let known = network.subnets.keys().cloned().collect::<Vec<_>>().join("`, `");
                return Err(refused(
                    CREATE,
                    format!("zone `{zone}` cannot be used; region {region} has `{known}`"),
                ));
            }
            None => network
                .subnets
                .keys()
                .next()
                .ok_or_else(|| refused(CREATE, format!("region {region} has no zone")))?,
        };
        let size = order.size_gb.ok_or_else(|| refused(CREATE, "`size` is required".to_owned()))?;
        let mut tags = self.settings.tags.clone();
        tags.insert(NAME_TAG.to_owned(), order.name.clone());
        tags.insert(VOLUME_TAG.to_owned(), order.volume.to_string());
        let params = Params::new()
            .with("AvailabilityZone", zone)
            .with("Size", (size.max(SMALLEST_GB).ceil() as u64).to_string())
            .with("VolumeType", "gp3")
            .with("ClientToken", order.volume.0.simple().to_string())
            .with_tags("volume", &tags.into_iter().collect::<Vec<_>>());
        let made = self.api.ec2(region, "CreateVolume", params).await.map_err(failed)?;
        let unexpected = || BackendError::Unavailable {
            what: CREATE,
            message: "unexpected answer to CreateVolume".to_owned(),
        };
        Ok(EbsVolume::read(&made).ok_or_else(unexpected)?.describe())
    }

    async fn removed(&self, order: &VolumeRequest, id: &str) -> Result<(), BackendError> {
        let region = order.region.as_str();
        let Some(shown) = self.volume(region, id).await.map_err(|error| error.to_backend(DELETE))? else {
            return Ok(());
        };
        if order.external.is_some() || shown.volume != Some(order.volume.to_string()) {
            return Ok(());
        }
        match self.api.ec2(region, "DeleteVolume", Params::new().with("VolumeId", id)).await {
            Ok(_) => Ok(()),
            Err(error) if error.is_not_found() => Ok(()),
            Err(_) if !shown.attachments.is_empty() => {
                let users: Vec<&str> = shown.attachments.iter().map(|one| one.machine.as_str()).collect();
                Err(BackendError::Unavailable {
                    what: DELETE,
                    message: format!("{id} is still attached to {}", users.join(", ")),
                })
            }
            Err(error) => Err(error.to_backend(DELETE)),
        }
    }

    async fn attached_volume(
        &self,
        id: &str,
        machine: &BackendInstance,
    ) -> Result<AttachmentState, BackendError> {
        let region = region(ATTACH, machine)?;
        let shown = self.volume(&region, id).await.map_err(|error| error.to_backend(ATTACH))?;
        let shown = shown.ok_or_else(|| refused(ATTACH, format!("region {region} has no volume {id}")))?;
        match shown.attachment_to(&machine.id) {
            AttachmentState::No => {}
            state @ (AttachmentState::Yes(_) | AttachmentState::Coming) => return Ok(state),
        }
        if let Some(other) = shown.attachments.first() {
            return Err(BackendError::Unavailable {
                what: ATTACH,
                message: format!("{id} is attached to {}", other.machine),
            });
        }
        let mut last = None;
        for letter in DEVICE_LETTERS {
            let device = format!("/dev/sd{letter}");
            let params =
                Params::new().with("VolumeId", id).with("InstanceId", &machine.id).with("Device", &device);
            match self.api.ec2(&region, "AttachVolume", params).await {
                Ok(answer) if answer.text("status") == Some("attached") => {
                    return Ok(AttachmentState::Yes(Attachment { device_name: Some(device) }));
                }
                Ok(_) => return Ok(AttachmentState::Coming),
                // Another request attached it at the same moment, or the machine is ending.
                Err(error) if error.class() == ErrorClass::Conflict => return Err(error.to_backend(ATTACH)),
                Err(error) if is_device_in_use(&error) => last = Some(error),
                Err(error) => return Err(error.to_backend(ATTACH)),
            }
        }
        let message = last.map(|error| error.to_string()).unwrap_or_default();
        Err(refused(ATTACH, format!("all names of disks of {} are in use: {message}", machine.id)))
    }

    async fn detached(&self, id: &str, machine: &BackendInstance, force: bool) -> Result<(), BackendError> {
        let region = region(DETACH, machine)?;
        let params = Params::new().with("VolumeId", id).with("InstanceId", &machine.id);
        let params = if force { params.with("Force", "true") } else { params };
        match self.api.ec2(&region, "DetachVolume", params).await {
            Ok(_) => Ok(()),
            // It is not attached, or one of the two no longer exists.
            Err(error) if matches!(error.class(), ErrorClass::NotFound | ErrorClass::Conflict) => Ok(()),
            Err(error) if error.code().starts_with("InvalidAttachment") => Ok(()),
            Err(error) => Err(error.to_backend(DETACH)),
        }
    }
}

/// AWS has no separate code for a device name that is taken.
fn is_device_in_use(error: &ApiError) -> bool {
    let text = error.to_string().to_lowercase();
    error.code() == "InvalidParameterValue" && text.contains("in use")
}

impl VolumeBackend for AwsProvider {
    fn make<'a>(&'a self, order: &'a VolumeRequest) -> BackendFuture<'a, BackendVolume> {
        Box::pin(self.made_volume(order))
    }

    fn get<'a>(&'a self, order: &'a VolumeRequest, id: &'a str) -> BackendFuture<'a, Option<BackendVolume>> {
        Box::pin(async move {
            let found = self.volume(&order.region, id).await.map_err(|error| error.to_backend(FIND))?;
            Ok(found.as_ref().map(EbsVolume::describe))
        })
    }

    fn remove<'a>(&'a self, order: &'a VolumeRequest, id: &'a str) -> BackendFuture<'a, ()> {
        Box::pin(self.removed(order, id))
    }

    fn attach<'a>(&'a self, id: &'a str, machine: &'a BackendInstance) -> BackendFuture<'a, AttachmentState> {
        Box::pin(self.attached_volume(id, machine))
    }

    fn detach<'a>(&'a self, id: &'a str, machine: &'a BackendInstance, force: bool) -> BackendFuture<'a, ()> {
        Box::pin(self.detached(id, machine, force))
    }

    fn attached<'a>(
        &'a self,
        id: &'a str,
        machine: &'a BackendInstance,
    ) -> BackendFuture<'a, AttachmentState> {
        Box::pin(async move {
            let region = region(FIND, machine)?;
            let shown = self.volume(&region, id).await.map_err(|error| error.to_backend(FIND))?;
            Ok(shown.map_or(AttachmentState::No, |shown| shown.attachment_to(&machine.id)))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_disk_is_read_with_its_attachments() {
        let text = "<item><volumeId>vol-1</volumeId><status>in-use</status><size>20</size>
            <availabilityZone>eu-1a</availabilityZone><attachmentSet>
            <item><instanceId>i-1</instanceId><device>/dev/sdf</device><status>attached</status></item>
            <item><instanceId>i-2</instanceId><device>/dev/sdf</device><status>detaching</status></item>
            </attachmentSet><tagSet><item><key>windlass-volume</key><value>v</value></item></tagSet></item>";
        let shown = EbsVolume::read(&Element::parse(text).unwrap()).unwrap();
        let described = shown.describe();
        assert_eq!(
            (described.size_gb, described.zone.as_deref(), described.ready),
            (Some(20.0), Some("eu-1a"), true)
        );
        let yes = AttachmentState::Yes(Attachment { device_name: Some("/dev/sdf".into()) });
        assert_eq!(shown.attachment_to("i-1"), yes);
        assert_eq!(shown.attachment_to("i-2"), AttachmentState::Coming);
        assert_eq!(shown.attachment_to("i-3"), AttachmentState::No);
        let creating = EbsVolume { state: "creating".into(), ..shown.clone() };
        assert!(!creating.describe().ready && creating.exists());
        assert!(!EbsVolume { state: "deleting".into(), ..shown }.exists());
    }
}
