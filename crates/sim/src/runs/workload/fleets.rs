//! Hosts, fleets in the cloud, and volumes; created, changed and deleted by their users.

use anyhow::{Result, anyhow};
use serde_json::{Value, json};
use windlass_model::{
    config::Configuration,
    event::{Actor, Event, EventCause},
    fleet,
    id::{FleetId, VolumeId},
    instance, volume,
};
use windlass_server::{
    db::{
        Db, Unit,
        events::{self, EventTarget},
        fleets, instances, volumes,
    },
    encryption::AssociatedData,
};

use super::{SshHost, Workload};
use crate::{cloud, network::SharedSimState, rng::Rng, runs::ssh_key};

const VOLUMES_MAX: usize = 5;

pub(super) struct CloudFleet {
    pub(super) id: FleetId,
    name: String,
    blocks: i64,
    cluster: bool,
    pub(super) max_ever: i64,
}

impl CloudFleet {
    fn spec(&self, rng: &mut Rng, min: u64, max: u64) -> Value {
        let idle = *rng.pick(&[30, 120, 600, -1]);
        json!({"configuration": {"type": "fleet", "name": self.name, "backends": ["mock"],
            "nodes": {"min": min, "target": min, "max": max}, "blocks": self.blocks, "idle_duration": idle,
            "placement": if self.cluster { "cluster" } else { "any" },
            "spot_policy": rng.pick(&["auto", "on-demand", "auto"])},
            "profile": {"name": "default"}})
    }
}

fn host_name(num: usize) -> String {
    format!("host-{num}")
}

impl Workload {
    /// Fails if the pipelines could not parse the specification: they would take its rules for none.
    fn new_fleet_row(&self, id: FleetId, name: &str, spec: &Value) -> Result<fleets::NewFleet> {
        Configuration::from_json(&spec["configuration"])
            .map_err(|problems| anyhow!("the configuration of fleet `{name}` is invalid: {problems:?}"))?;
        Ok(fleets::NewFleet {
            id,
            project_id: self.project,
            user_id: Some(self.user),
            name: name.into(),
            spec: spec.to_string(),
            spec_sealed: None,
            status: fleet::Status::Active,
            auto_created: false,
        })
    }

    /// Adds an SSH fleet: its hosts exist, but have no agents yet.
    pub(super) async fn add_ssh_hosts(&self, rng: &mut Rng, db: &Db, state: &SharedSimState) -> Result<()> {
        let hosts: Vec<_> = (0..self.hosts.len()).map(host_name).collect();
        let mut spec = json!({"configuration": {"type": "fleet", "name": "hosts", "placement": "cluster",
            "ssh_config": {"user": "sim", "hosts": hosts}}, "profile": {"name": "default"}});
        if let Some(pool) = &self.pool {
            spec["configuration"]["preemption"] = pool.rules(rng);
        }
        let mut unit =
            Unit::new().and([fleets::insert(self.new_fleet_row(self.ssh_fleet, "hosts", &spec)?)]);
        for (num, host) in self.hosts.iter().enumerate() {
            state.lock().add_host(host.id, cloud::GPUS);
            unit = unit.and([instances::insert(self.host_row(num, host)?)]);
            let because = EventCause {
                actor: Actor::User(self.user),
                reason: "applied".into(),
                message: "Instance created".into(),
            };
            let created =
                Event::created::<instance::InstanceLifecycle>(host.id, instance::Status::Pending, because);
            let name = format!("hosts-{num}");
            let targets = [EventTarget { entity: created.entity, id: host.id.0, name: &name }];
            unit = unit.and(events::append(db, &created, &self.event_context(&targets))?);
        }
        db.write(unit).await?.done()?;
        Ok(())
    }

    fn host_row(&self, num: usize, host: &SshHost) -> Result<instances::NewInstance> {
        let hostname = host_name(num);
        let own = json!({"hostname": hostname});
        let settings =
            json!({"user": "sim", "hosts": [own], "ssh_key": {"public": "", "private": ssh_key()?}});
        let belongs = AssociatedData::row("instances", "ssh_sealed", host.id.0);
        Ok(instances::NewInstance {
            id: host.id,
            project_id: self.project,
            fleet_id: Some(self.ssh_fleet),
            name: format!("hosts-{num}"),
            instance_num: i64::try_from(num)?,
            backend: Some("remote".into()),
            region: Some("remote".into()),
            hostname: Some(hostname),
            price: Some(0.0),
            spot: false,
            instance_type: None,
            offer: None,
            provisioning: None,
            ssh: Some(own.to_string()),
            ssh_sealed: Some(self.keys.seal(&belongs, settings.to_string().as_bytes())?),
            requirements: None,
            profile: None,
            status: instance::Status::Pending,
            total_blocks: Some(host.blocks),
            idle_seconds_max: None,
        })
    }

    pub(super) async fn create_fleet(&mut self, rng: &mut Rng, db: &Db) -> Result<()> {
        let (min, more) = (rng.between(0, 2), rng.between(0, 2));
        let max = (min + more).max(1);
        let fleet = CloudFleet {
            id: FleetId(db.new_id()?),
            name: format!("cloud-{}", self.fleets.len()),
            blocks: *rng.pick(&[1, 1, 2, 4]),
            cluster: rng.chance(40),
            max_ever: i64::try_from(max)?,
        };
        let spec = fleet.spec(rng, min, max);
        let row = self.new_fleet_row(fleet.id, &fleet.name, &spec)?;
        db.write(Unit::new().and([fleets::insert(row)])).await?.done()?;
        self.fleets.push(fleet);
        Ok(())
    }

    /// Changes the number of nodes.
    pub(super) async fn update_fleet(&mut self, rng: &mut Rng, db: &Db) -> Result<()> {
        if self.fleets.is_empty() {
            return Ok(());
        }
        let at = rng.between(0, self.fleets.len() as u64 - 1) as usize;
        let (min, more) = (rng.between(0, 2), rng.between(0, 2));
        let max = (min + more).max(1);
        let spec = self.fleets[at].spec(rng, min, max);
        // Recorded before the write: the pipelines may act before it returns.
        self.fleets[at].max_ever = self.fleets[at].max_ever.max(i64::try_from(max)?);
        let change = fleets::set_spec(self.fleets[at].id, &spec.to_string(), None);
        // A fleet that is to be deleted cannot be changed.
        db.write(Unit::new().and([change])).await?;
        Ok(())
    }

    pub(super) async fn delete_fleet(&self, rng: &mut Rng, db: &Db) -> Result<()> {
        if !self.fleets.is_empty() {
            let id = rng.pick(&self.fleets).id;
            // Refused while it is in use.
            db.write(Unit::new().and([fleets::request_delete(id)])).await?;
        }
        Ok(())
    }

    pub(super) async fn create_volume(&mut self, rng: &mut Rng, db: &Db) -> Result<()> {
        if self.volumes.len() >= VOLUMES_MAX {
            return Ok(());
        }
        let (id, name) = (VolumeId(db.new_id()?), format!("disk-{}", self.volumes.len()));
        let cleanup = *rng.pick(&[-1, -1, 60, 600]);
        let configuration = json!({"type": "volume", "name": name, "backend": "mock", "region": cloud::REGION,
            "size": 10, "auto_cleanup_duration": cleanup});
        let row = volumes::NewVolume {
            id,
            project_id: self.project,
            user_id: self.user,
            name: name.clone(),
            configuration: configuration.to_string(),
            external: false,
            status: volume::Status::Submitted,
        };
        db.write(Unit::new().and([volumes::insert(row)])).await?.done()?;
        self.volumes.push((id, name));
        Ok(())
    }

    pub(super) async fn delete_volume(&self, rng: &mut Rng, db: &Db) -> Result<()> {
        if !self.volumes.is_empty() {
            let id = rng.pick(&self.volumes).0;
            // Refused while it is attached.
            db.write(Unit::new().and(volumes::request_delete(id))).await?;
        }
        Ok(())
    }
}
