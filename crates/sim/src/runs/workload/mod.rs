//! The simulated workload: a project with hosts, fleets in a cloud and volumes, and users who use and change them.

mod fleets;
mod managed;
pub(super) mod pool;
mod runs;

use std::{collections::BTreeMap, sync::Arc};

use anyhow::Result;
use uuid::Uuid;
use windlass_model::id::{FleetId, InstanceId, ProjectId, RunId, UserId, VolumeId};
use windlass_server::{
    db::{
        Db, Unit, backends,
        events::{EventContext, EventTarget},
        projects, users,
    },
    encryption::Keyring,
};

use self::{fleets::CloudFleet, pool::Pool};
use super::replica::Replica;
use crate::{network::SharedSimState, rng::Rng};

const RUNS_MAX: usize = 14;
/// Maximum number of runs of several projects.
const POOL_RUNS_MAX: usize = 28;
const FLEETS_MAX: usize = 4;

/// A host of an SSH fleet.
pub(super) struct SshHost {
    id: InstanceId,
    blocks: i64,
}

pub(super) struct Workload {
    keys: Arc<Keyring>,
    user: UserId,
    project: ProjectId,
    ssh_fleet: FleetId,
    hosts: Vec<SshHost>,
    /// Most runs request the same, so that they wait in one class.
    are_alike: bool,
    fleets: Vec<CloudFleet>,
    volumes: Vec<(VolumeId, String)>,
    runs: Vec<RunId>,
    /// Runs with a schedule, which repeat until they are stopped.
    scheduled: Vec<RunId>,
    /// Numbers of managed jobs, and their maximum count.
    managed: Vec<i64>,
    managed_max: usize,
    /// Time at which each stop was acknowledged, by the database's clock.
    stopped: BTreeMap<Uuid, i64>,
    /// Other projects that share the hosts.
    pool: Option<Pool>,
}

impl Workload {
    /// `managed_share`: whether users have managed jobs too. `with_pool`: whether several projects share the hosts.
    pub(super) fn random(
        rng: &mut Rng,
        db: &Db,
        keys: Arc<Keyring>,
        (managed_share, with_pool): (bool, bool),
    ) -> Result<Self> {
        let managed_max = if managed_share { rng.between(2, managed::MANAGED_JOBS_MAX) } else { 0 };
        let are_alike = rng.chance(50);
        let mut hosts = Vec::new();
        for _ in 0..rng.between(1, 3) {
            let blocks = *rng.pick(&[1, 2, 4]);
            hosts.push(SshHost { id: InstanceId(db.new_id()?), blocks });
        }
        let (user, project) = (UserId(db.new_id()?), ProjectId(db.new_id()?));
        let pool = if with_pool { Some(Pool::random(rng, db, (project, user))?) } else { None };
        Ok(Self {
            keys,
            user,
            project,
            ssh_fleet: FleetId(db.new_id()?),
            hosts,
            are_alike,
            fleets: Vec::new(),
            volumes: Vec::new(),
            runs: Vec::new(),
            scheduled: Vec::new(),
            managed: Vec::new(),
            managed_max: usize::try_from(managed_max)?,
            stopped: BTreeMap::new(),
            pool,
        })
    }

    pub(super) fn stopped_at(&self, run: Uuid) -> Option<i64> {
        self.stopped.get(&run).copied()
    }

    /// Highest maximum that a fleet ever had.
    pub(super) fn nodes_max_ever(&self, fleet: Uuid) -> Option<i64> {
        self.fleets.iter().find(|one| one.id.0 == fleet).map(|one| one.max_ever)
    }

    pub(super) async fn set_up_env(&mut self, rng: &mut Rng, db: &Db, state: &SharedSimState) -> Result<()> {
        let unit = Unit::new().and([
            users::create(users::NewUser {
                id: self.user,
                name: "ada",
                admin: true,
                email: None,
                active: true,
                ssh_public_key: "",
                ssh_private_key_sealed: Vec::new(),
            }),
            projects::create(self.project, "sim", self.user, false, None),
            backends::grant(db.new_id()?, self.project, "mock"),
        ]);
        db.write(unit).await?.done()?;
        self.add_ssh_hosts(rng, db, state).await?;
        for _ in 0..rng.between(1, 2) {
            self.create_fleet(rng, db).await?;
        }
        for _ in 0..rng.between(1, 3) {
            self.create_volume(rng, db).await?;
        }
        self.set_up_pool(rng, db).await
    }

    /// Returns whether several projects share the hosts.
    pub(super) const fn has_pool(&self) -> bool {
        self.pool.is_some()
    }

    /// Performs one user action: usually a new run, sometimes a stop, occasionally a change of resources.
    pub(super) async fn act(&mut self, rng: &mut Rng, db: &Db, replicas: &[Replica]) -> Result<()> {
        let received: &[&'static str] = match rng.between(1, 100) {
            // In seeds with managed jobs a third of the actions concern them.
            _ if self.managed_max > 0 && rng.chance(35) => self.act_on_managed(rng, db).await?,
            _ if self.has_pool() && rng.chance(20) => {
                self.act_on_pool(rng, db).await?;
                &["jobs_submitted", "jobs_running"]
            }
            1..=10 => {
                self.change_resources(rng, db).await?;
                &["fleets", "instances", "volumes"]
            }
            11..=70 if self.runs.len() < if self.has_pool() { POOL_RUNS_MAX } else { RUNS_MAX } => {
                self.submit(rng, db).await?;
                &["runs", "jobs_submitted"]
            }
            _ if self.runs.is_empty() => return Ok(()),
            _ => {
                let run = *rng.pick(&self.runs);
                self.stop(db, run, rng.chance(30)).await?;
                &["runs"]
            }
        };
        // The request reached one replica; only that one is woken.
        let at = rng.between(0, replicas.len() as u64 - 1) as usize;
        if rng.chance(70) {
            for pipeline in received {
                replicas[at].hint(pipeline);
            }
        }
        Ok(())
    }

    async fn change_resources(&mut self, rng: &mut Rng, db: &Db) -> Result<()> {
        match rng.between(1, 10) {
            1..=4 => self.update_fleet(rng, db).await,
            5 if self.fleets.len() < FLEETS_MAX => self.create_fleet(rng, db).await,
            5 | 6 => self.delete_fleet(rng, db).await,
            7 | 8 => self.create_volume(rng, db).await,
            _ => self.delete_volume(rng, db).await,
        }
    }

    /// Stops all schedules after the faults: repeating runs would never end.
    pub(super) async fn stop_schedules(&mut self, db: &Db) -> Result<()> {
        for run in self.scheduled.clone() {
            self.stop(db, run, false).await?;
        }
        self.restore_imports(db).await
    }

    /// Requests the deletion of everything; the caller repeats requests that are refused because of use.
    pub(super) async fn sweep(&mut self, db: &Db) -> Result<()> {
        let fleets: Vec<FleetId> = self.fleets.iter().map(|fleet| fleet.id).chain([self.ssh_fleet]).collect();
        for fleet in fleets {
            db.write(Unit::new().and([windlass_server::db::fleets::request_delete(fleet)])).await?;
        }
        for (volume, _) in &self.volumes {
            db.write(Unit::new().and(windlass_server::db::volumes::request_delete(*volume))).await?;
        }
        Ok(())
    }

    fn event_context<'a>(&self, targets: &'a [EventTarget<'a>]) -> EventContext<'a> {
        event_context((self.project, self.user), targets)
    }
}

fn event_context<'a>(
    (project, user): (ProjectId, UserId),
    targets: &'a [EventTarget<'a>],
) -> EventContext<'a> {
    EventContext { project: Some(project), user: Some(user), lock_token: None, targets }
}
