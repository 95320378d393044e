//! Machines: creation, state and deletion.

use std::time::Duration;

use base64::{Engine as _, prelude::BASE64_STANDARD};
use tokio::time::Instant;
use windlass_backend::{
    BackendError, DeleteProgress, InstanceRequest, InstanceSource,
    machines::{MachineAddress, MachineRequest, MachineState},
};
use windlass_model::{id::InstanceId, plan::offers::Offer};
use windlass_sigv4::sha256_hex;

use crate::{
    AwsProvider,
    api::Params,
    errors::{ApiError, ErrorClass},
    images::{self, ImageError},
    network, quota_key,
    xml::Element,
};

/// Tag of a machine with the id of its instance.
pub(crate) const INSTANCE_TAG: &str = "windlass-instance";
/// Tag with the public key of the server that created the machine.
const SERVER_TAG: &str = "windlass-server";
pub(crate) const NAME_TAG: &str = "Name";
const SSH_PORT: u16 = 22;
const MIB_PER_GB: u64 = 1024;
/// Maximum length of a tag's value.
const TAG_CHARS_MAX: usize = 256;
/// Time after which EC2 lists a machine that a lost answer was about.
const LISTED_WITHIN: Duration = Duration::from_secs(120);
const CREATE: &str = "create the machine";
const FIND: &str = "find the machine";
const DELETE: &str = "delete the machine";

/// Machine that windlass created and that has not ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OwnedMachine {
    pub region: String,
    /// `i-…`
    pub id: String,
    /// Id of its instance.
    pub instance: String,
}

/// Status of a machine in EC2.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Status {
    Pending,
    Running,
    /// Being stopped or terminated.
    Ending,
    Stopped,
    Terminated,
}

/// Machine as EC2 shows it.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Ec2Instance {
    id: String,
    status: Status,
    launched: String,
    public_ip: Option<String>,
    private_ip: Option<String>,
    /// Code and message.
    reason: Option<(String, String)>,
    instance: Option<String>,
}

impl Ec2Instance {
    fn read(item: &Element) -> Option<Self> {
        let reason = item
            .text("stateReason/code")
            .map(|code| (code.to_owned(), item.text("stateReason/message").unwrap_or_default().to_owned()));
        Some(Self {
            id: item.text("instanceId")?.to_owned(),
            status: match item.text("instanceState/name")? {
                "pending" => Status::Pending,
                "running" => Status::Running,
                "stopped" => Status::Stopped,
                "terminated" => Status::Terminated,
                _ => Status::Ending,
            },
            launched: item.text("launchTime").unwrap_or_default().to_owned(),
            public_ip: item.text("ipAddress").map(str::to_owned),
            private_ip: item.text("privateIpAddress").map(str::to_owned),
            reason,
            instance: item.tag(INSTANCE_TAG).map(str::to_owned),
        })
    }

    /// Returns whether it costs money, and is meant to.
    fn is_live(&self) -> bool {
        matches!(self.status, Status::Pending | Status::Running | Status::Stopped)
    }

    /// Says why it has ended, for people.
    fn end_message(&self) -> String {
        let why = match &self.reason {
            None => "it was terminated".to_owned(),
            Some((code, message)) => match code.as_str() {
                "Server.SpotInstanceTermination" | "Server.SpotInstanceShutdown" => {
                    "AWS reclaimed the spot machine".to_owned()
                }
                "Client.UserInitiatedShutdown" => "it was terminated with the tools of AWS".to_owned(),
                "Client.InstanceInitiatedShutdown" => "it was shut down from within".to_owned(),
                "Server.InsufficientInstanceCapacity" => "AWS had no capacity when it started".to_owned(),
                "Client.VolumeLimitExceeded" => "a quota of the account on disks is reached".to_owned(),
                _ => message.clone(),
            },
        };
        format!("{} has ended: {why}", self.id)
    }
}

/// The offer of a machine, which names its region and its zone.
fn offer_of(order: &InstanceRequest) -> Result<&Offer, BackendError> {
    match &order.want {
        InstanceSource::Offer(offer) => Ok(offer),
        InstanceSource::Host(_) => Err(BackendError::Refused {
            what: "use AWS",
            message: "the request is for an SSH host".to_owned(),
        }),
    }
}

/// Order in which one of several live machines is kept.
fn by_age(machine: &Ec2Instance) -> (String, String) {
    (machine.launched.clone(), machine.id.clone())
}

impl AwsProvider {
    /// Machines that windlass created in the configured regions, of this and of other servers, and that have not ended.
    pub async fn list(&self) -> Result<Vec<OwnedMachine>, BackendError> {
        let mut all = Vec::new();
        for region in &self.settings.regions {
            let query = Params::new().with_filter("tag-key", [INSTANCE_TAG]);
            let found =
                self.machines(region, query).await.map_err(|error| error.to_backend("list the machines"))?;
            all.extend(found.into_iter().filter(|shown| shown.status != Status::Terminated).filter_map(
                |shown| {
                    Some(OwnedMachine { region: region.clone(), id: shown.id, instance: shown.instance? })
                },
            ));
        }
        Ok(all)
    }

    async fn machines(&self, region: &str, query: Params) -> Result<Vec<Ec2Instance>, ApiError> {
        let reservations = self.api.list(region, "DescribeInstances", query, "reservationSet").await?;
        Ok(reservations
            .iter()
            .flat_map(|reservation| reservation.items("instancesSet"))
            .filter_map(Ec2Instance::read)
            .collect())
    }

    /// Machines of one instance, also those that have ended a short time ago.
    async fn machines_of(&self, region: &str, instance: InstanceId) -> Result<Vec<Ec2Instance>, ApiError> {
        let query = Params::new().with_filter(&format!("tag:{INSTANCE_TAG}"), [instance.to_string()]);
        self.machines(region, query).await
    }

    pub(crate) async fn created(&self, request: &MachineRequest<'_>) -> Result<String, BackendError> {
        let (order, offer) = (request.order, request.offer);
        let region = offer.region.as_str();
        let found =
            self.machines_of(region, order.instance).await.map_err(|error| error.to_backend(CREATE))?;
        if let Some(oldest) = found.into_iter().filter(Ec2Instance::is_live).min_by_key(by_age) {
            return Ok(oldest.id);
        }
        let params = self.run_params(request).await?;
        self.uncertain.lock().insert(order.instance, Instant::now());
        let answer = self.api.ec2(region, "RunInstances", params).await;
        let error = match answer {
            Ok(answer) => {
                self.uncertain.lock().remove(&order.instance);
                let id = answer.items("instancesSet").next().and_then(|item| item.text("instanceId"));
                return id.map(str::to_owned).ok_or_else(|| BackendError::Unavailable {
                    what: CREATE,
                    message: "unexpected answer to RunInstances".to_owned(),
                });
            }
            Err(error) => error,
        };
        match error.class() {
            // The machine may exist.
            ErrorClass::Unavailable | ErrorClass::Throttled | ErrorClass::Conflict => {}
            ErrorClass::Quota => {
                self.over_quota.lock().insert(quota_key(offer), Instant::now());
                self.uncertain.lock().remove(&order.instance);
            }
            ErrorClass::NotFound => {
                // A subnet, a group or an image was deleted since it was looked up.
                self.networks.forget(region);
                self.groups.forget(region);
                self.images.clear();
                self.uncertain.lock().remove(&order.instance);
            }
            ErrorClass::NoCapacity
            | ErrorClass::Credentials
            | ErrorClass::Permission
            | ErrorClass::Invalid => {
                self.uncertain.lock().remove(&order.instance);
            }
        }
        Err(error.to_backend(CREATE))
    }

    /// Parameters of `RunInstances`.
    async fn run_params(&self, request: &MachineRequest<'_>) -> Result<Params, BackendError> {
        let (order, offer, settings) = (request.order, request.offer, &self.settings);
        let region = offer.region.as_str();
        let zone = offer.zones.first().ok_or_else(|| BackendError::Refused {
            what: CREATE,
            message: "the offer names no zone".to_owned(),
        })?;
        let network = self.network(region).await.map_err(|error| error.to_backend(CREATE))?;
        let subnet = network.subnets.get(zone).ok_or_else(|| BackendError::NoCapacity {
            message: format!("VPC {} has no usable subnet in zone {zone}", network.vpc),
        })?;
        let group = network::security_group(&self.api, settings, region, &network.vpc);
        let group = self.groups.get(region, group).await.map_err(|error| error.to_backend(CREATE))?;
        let image = self.image(region, images::for_host(&settings.os_images, &offer.host)).await;
        let image = image.map_err(|error| match error {
            ImageError::Api(error) => error.to_backend(CREATE),
            ImageError::Missing { message } => BackendError::Refused { what: CREATE, message },
        })?;
        let disk_gb = (offer.host.disk_mib / MIB_PER_GB).max(image.root_gb.into());
        let mut params = Params::new()
            .with("ImageId", &image.id)
            .with("InstanceType", &offer.instance_type)
            .with("MinCount", "1")
            .with("MaxCount", "1")
            .with("UserData", BASE64_STANDARD.encode(&request.user_data))
            .with("InstanceInitiatedShutdownBehavior", "terminate")
            .with("Placement.AvailabilityZone", zone)
            .with("NetworkInterface.1.DeviceIndex", "0")
            .with("NetworkInterface.1.SubnetId", subnet)
            .with("NetworkInterface.1.SecurityGroupId.1", group.as_str())
            .with("NetworkInterface.1.AssociatePublicIpAddress", settings.public_ips.to_string())
            .with("NetworkInterface.1.DeleteOnTermination", "true")
            .with("BlockDeviceMapping.1.DeviceName", &image.root_device)
            .with("BlockDeviceMapping.1.Ebs.VolumeSize", disk_gb.to_string())
            .with("BlockDeviceMapping.1.Ebs.VolumeType", "gp3")
            .with("BlockDeviceMapping.1.Ebs.DeleteOnTermination", "true")
            // Jobs must not read the machine's role by a request that a web page could make.
            .with("MetadataOptions.HttpTokens", "required")
            .with("MetadataOptions.HttpPutResponseHopLimit", "1");
        if offer.host.spot {
            params = params
                .with("InstanceMarketOptions.MarketType", "spot")
                .with("InstanceMarketOptions.SpotOptions.SpotInstanceType", "one-time")
                .with("InstanceMarketOptions.SpotOptions.InstanceInterruptionBehavior", "terminate");
        }
        if let Some(reservation) = &offer.reservation {
            let key = "CapacityReservationSpecification.CapacityReservationTarget.CapacityReservationId";
            params = params.with(key, reservation);
        }
        if let Some(profile) = &settings.iam_instance_profile {
            let key = if profile.starts_with("arn:") { "Arn" } else { "Name" };
            params = params.with(format!("IamInstanceProfile.{key}"), profile);
        }
        if let Some(key) = &settings.key_name {
            params = params.with("KeyName", key);
        }
        let tags = self.tags(order);
        params = params.with_tags("instance", &tags).with_tags("volume", &tags);
        // The same token with other parameters is refused; the first machine is found by its tag then.
        let digest = sha256_hex(params.encoded().as_bytes());
        let token = format!("{}-{}", order.instance.0.simple(), digest.get(..16).unwrap_or_default());
        Ok(params.with("ClientToken", token))
    }

    fn tags(&self, order: &InstanceRequest) -> Vec<(String, String)> {
        let mut tags = self.settings.tags.clone();
        tags.extend(order.tags.clone());
        let own = [
            (NAME_TAG, order.name.clone()),
            (INSTANCE_TAG, order.instance.to_string()),
            (SERVER_TAG, order.enrolment.server_key.clone()),
        ];
        tags.extend(own.map(|(key, value)| (key.to_owned(), value)));
        tags.into_iter().map(|(key, value)| (key, value.chars().take(TAG_CHARS_MAX).collect())).collect()
    }

    pub(crate) async fn state(&self, order: &InstanceRequest) -> Result<MachineState, BackendError> {
        let region = offer_of(order)?.region.as_str();
        let found = self.machines_of(region, order.instance).await.map_err(|error| error.to_backend(FIND))?;
        let (mut live, ended): (Vec<Ec2Instance>, Vec<Ec2Instance>) =
            found.into_iter().partition(Ec2Instance::is_live);
        live.sort_by_key(by_age);
        for extra in live.iter().skip(1) {
            // Two creations, of which one was not listed when the other began: only one is used.
            tracing::warn!(machine = %extra.id, instance = %order.instance, "terminating a second machine of an instance");
            self.terminate(region, &extra.id).await.map_err(|error| error.to_backend(DELETE))?;
        }
        let starting = |message: &str| Ok(MachineState::Starting { message: message.to_owned() });
        let Some(machine) = live.into_iter().next() else {
            let last = ended.iter().max_by_key(|machine| by_age(machine));
            return Ok(
                last.map_or(MachineState::Unknown, |last| MachineState::Gone { message: last.end_message() })
            );
        };
        match machine.status {
            Status::Pending => starting("EC2 is starting it"),
            Status::Stopped => Ok(MachineState::Gone {
                message: format!("{} was stopped with the tools of AWS", machine.id),
            }),
            Status::Running | Status::Ending | Status::Terminated => {
                let host =
                    if self.settings.public_ips { machine.public_ip } else { machine.private_ip.clone() };
                let Some(host) = host else { return starting("waiting for its address") };
                let internal_ip = machine.private_ip;
                Ok(MachineState::Running(MachineAddress {
                    host,
                    port: SSH_PORT,
                    host_key: None,
                    internal_ip,
                }))
            }
        }
    }

    pub(crate) async fn deleted(
        &self,
        order: &InstanceRequest,
        id: Option<&str>,
    ) -> Result<DeleteProgress, BackendError> {
        let region = offer_of(order)?.region.as_str();
        let failed = |error: ApiError| error.to_backend(DELETE);
        let found = self.machines_of(region, order.instance).await.map_err(failed)?;
        let mut is_ending = found.iter().any(|machine| machine.status == Status::Ending);
        let mut doomed: Vec<&str> =
            found.iter().filter(|machine| machine.is_live()).map(|machine| machine.id.as_str()).collect();
        // EC2 lists new machines with a delay.
        doomed.extend(id.filter(|id| found.iter().all(|machine| machine.id != *id)));
        for id in doomed {
            is_ending |= !self.terminate(region, id).await.map_err(failed)?;
        }
        let mut uncertain = self.uncertain.lock();
        if is_ending {
            return Ok(DeleteProgress::InProgress);
        }
        if found.is_empty() && uncertain.get(&order.instance).is_some_and(|at| at.elapsed() < LISTED_WITHIN) {
            return Ok(DeleteProgress::InProgress);
        }
        uncertain.remove(&order.instance);
        Ok(DeleteProgress::Gone)
    }

    /// Terminates a machine, and returns whether nothing of it is left.
    async fn terminate(&self, region: &str, id: &str) -> Result<bool, ApiError> {
        let answer = match self
            .api
            .ec2(region, "TerminateInstances", Params::new().with_list("InstanceId", [id]))
            .await
        {
            Ok(answer) => answer,
            Err(error) if error.is_not_found() => return Ok(true),
            Err(error) => return Err(error),
        };
        let state = answer.items("instancesSet").next().and_then(|item| item.text("currentState/name"));
        Ok(state == Some("terminated"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shown(state: &str, reason: Option<&str>) -> Ec2Instance {
        let reason = reason.map_or_else(String::new, |code| {
            format!("<stateReason><code>{code}</code><message>{code}: text</message></stateReason>")
        });
        let text = format!(
            "<item><instanceId>i-1</instanceId><instanceState><code>16</code><name>{state}</name></instanceState>\
             <privateIpAddress>10.0.0.4</privateIpAddress><launchTime>2026-11-01T00:00:00.000Z</launchTime>{reason}\
             <tagSet><item><key>windlass-instance</key><value>x</value></item></tagSet></item>"
        );
        Ec2Instance::read(&Element::parse(&text).unwrap()).unwrap()
    }

    #[test]
    fn the_state_of_a_machine_is_read() {
        let machine = shown("pending", None);
        assert_eq!((machine.status, machine.public_ip.as_deref()), (Status::Pending, None));
        assert_eq!(machine.private_ip.as_deref(), Some("10.0.0.4"));
        assert_eq!(machine.instance.as_deref(), Some("x"));
        assert!(shown("running", None).is_live() && shown("stopped", None).is_live());
        assert!(!shown("shutting-down", None).is_live() && !shown("terminated", None).is_live());
    }

    #[test]
    fn the_end_of_a_machine_names_who_ended_it() {
        let message = |code| shown("terminated", code).end_message();
        assert_eq!(
            message(Some("Server.SpotInstanceTermination")),
            "i-1 has ended: AWS reclaimed the spot machine"
        );
        assert!(message(Some("Client.UserInitiatedShutdown")).contains("tools of AWS"));
        assert!(message(Some("Server.InternalError")).ends_with("Server.InternalError: text"));
        assert!(message(None).contains("terminated"));
    }
}
