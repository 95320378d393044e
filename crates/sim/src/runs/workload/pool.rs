//! Several projects that share fleets: exports, quotas, classes and preemption.

use anyhow::Result;
use serde_json::{Value, json};
use uuid::Uuid;
use windlass_model::{
    id::{FleetId, ProjectId, RunId, UserId},
    plan::quota::{Quota, QuotaResource},
};
use windlass_server::db::{Db, Unit, exports, invariant_queries::pool_watch, projects, quotas, users};

use super::Workload;
use crate::{cloud, rng::Rng};

/// Longest run of a job in the stream of small ones, in milliseconds.
pub(in crate::runs) const STREAM_RUN_MAX_MS: u64 = 120_000;

/// Time for which a job that found no capacity is submitted again: less than the simulation waits for the end of all
/// jobs, because hosts that failed are not replaced.
const RETRY_SECS: u64 = 1_800;

/// Projects that share the hosts of the first one.
pub(super) struct Pool {
    projects: Vec<PoolProject>,
    export: Uuid,
    /// Whether jobs on the hosts may be preempted.
    preempts: bool,
    /// The project of the large jobs, which used nothing before.
    late: PoolProject,
    streamed: usize,
    is_calm: bool,
}

struct PoolProject {
    id: ProjectId,
    users: Vec<UserId>,
}

impl Pool {
    pub(super) fn random(rng: &mut Rng, db: &Db, (owner, user): (ProjectId, UserId)) -> Result<Self> {
        let project = |rng: &mut Rng, id: ProjectId, users: Vec<UserId>| -> Result<PoolProject> {
            let mut users = users;
            while users.is_empty() || rng.chance(40) {
                users.push(UserId(db.new_id()?));
            }
            Ok(PoolProject { id, users })
        };
        let mut projects = vec![PoolProject { id: owner, users: vec![user] }];
        for _ in 0..rng.between(1, 3) {
            let id = ProjectId(db.new_id()?);
            projects.push(project(rng, id, Vec::new())?);
        }
        let late = project(rng, ProjectId(db.new_id()?), Vec::new())?;
        Ok(Self {
            projects,
            export: db.new_id()?,
            preempts: rng.chance(75),
            late,
            streamed: 0,
            is_calm: false,
        })
    }

    /// Unit that deletes all quotas.
    async fn without_quotas(&self, db: &Db) -> Result<Unit> {
        let mut unit = Unit::new();
        for project in &self.projects {
            for named in quotas::list(db, &[project.id]).await? {
                let Quota { project, member, resource, .. } = named.quota;
                unit = unit.and([quotas::delete(project, member, &resource)]);
            }
            unit = unit.and([quotas::mark_waiting_due(project.id)]);
        }
        Ok(unit)
    }

    /// Rules of the fleet of the hosts.
    pub(super) fn rules(&self, rng: &mut Rng) -> Value {
        if !self.preempts {
            return json!(null);
        }
        json!({"min_run": rng.between(0, 60), "wait": rng.between(0, 30), "grace": rng.between(5, 40),
            "budget": rng.pick(&[2, 8, 32])})
    }
}

impl Workload {
    /// Creates the projects, their members, and the export that they import.
    pub(super) async fn set_up_pool(&self, rng: &mut Rng, db: &Db) -> Result<()> {
        let Some(pool) = &self.pool else { return Ok(()) };
        let mut unit = Unit::new();
        for (number, project) in pool.projects[1..].iter().chain([&pool.late]).enumerate() {
            for (of_project, user) in project.users.iter().enumerate() {
                let name = format!("user-{number}-{of_project}");
                unit = unit.and([users::create(users::NewUser {
                    id: *user,
                    name: &name,
                    admin: false,
                    email: None,
                    active: true,
                    ssh_public_key: "",
                    ssh_private_key_sealed: Vec::new(),
                })]);
            }
            let name = format!("team-{number}");
            unit = unit.and([projects::create(project.id, &name, project.users[0], false, None)]);
        }
        unit = unit.and([
            exports::insert(pool.export, self.project, "shared", false),
            exports::add_fleet(pool.export, self.ssh_fleet),
        ]);
        if let Some(fleet) = self.fleets.first().filter(|_| rng.chance(50)) {
            unit = unit.and([exports::add_fleet(pool.export, fleet.id)]);
        }
        for project in &pool.projects[1..] {
            unit = unit.and([exports::add_import(db.new_id()?, pool.export, project.id)]);
        }
        db.write(unit).await?.done()?;
        for _ in 0..rng.between(2, 6) {
            self.set_quota(rng, db).await?;
        }
        Ok(())
    }

    /// A project and one of its members.
    pub(super) fn submitter(&self, rng: &mut Rng) -> (ProjectId, UserId) {
        let Some(pool) = &self.pool else { return (self.project, self.user) };
        let project = rng.pick(&pool.projects);
        (project.id, *rng.pick(&project.users))
    }

    /// Changes a quota or an import.
    pub(super) async fn act_on_pool(&self, rng: &mut Rng, db: &Db) -> Result<()> {
        let Some(pool) = &self.pool else { return Ok(()) };
        let importer = rng.pick(&pool.projects[1..]).id;
        let unit = match rng.between(1, 10) {
            1..=5 => return self.set_quota(rng, db).await,
            6 | 7 => {
                let project = rng.pick(&pool.projects);
                let member = rng.chance(30).then(|| *rng.pick(&project.users));
                let resource = random_resource(rng);
                let change = quotas::delete(project.id, member, &resource);
                Unit::new().and([change, quotas::mark_waiting_due(project.id)])
            }
            8 => {
                Unit::new().and([exports::remove_import(pool.export, importer)]).and(exports::mark_jobs_due())
            }
            _ => {
                let added = exports::add_import(db.new_id()?, pool.export, importer);
                Unit::new().and([added]).and(exports::mark_jobs_due())
            }
        };
        // Stale if there is no such quota or import.
        db.write(unit).await?;
        Ok(())
    }

    async fn set_quota(&self, rng: &mut Rng, db: &Db) -> Result<()> {
        let Some(pool) = &self.pool else { return Ok(()) };
        let project = rng.pick(&pool.projects);
        let member = rng.chance(30).then(|| *rng.pick(&project.users));
        let resource = random_resource(rng);
        // A host has 32 CPUs and 4 GPUs.
        let scale = if resource == QuotaResource::Cpus { 8 } else { 1 };
        let max = rng.chance(70).then(|| rng.between(2, 10) * scale);
        let share = (member.is_none() && (max.is_none() || rng.chance(70)))
            .then(|| (rng.between(0, 6) * scale).min(max.unwrap_or(u64::MAX)));
        if max.is_none() && share.is_none() {
            return Ok(());
        }
        let quota = Quota { project: project.id, member, resource, max, share, used: 0, first_end: None };
        let change = quotas::set(db.new_id()?, &quota);
        db.write(Unit::new().and([change, quotas::mark_waiting_due(project.id)])).await?.done()?;
        Ok(())
    }

    /// All projects may use the hosts again, as far as they want, so that everything can end: a managed job waits as long
    /// as a quota is too small for it. The quotas of the calm time suffice for each job.
    pub(super) async fn restore_imports(&self, db: &Db) -> Result<()> {
        let Some(pool) = &self.pool else { return Ok(()) };
        let mut unit = if pool.is_calm { Unit::new() } else { pool.without_quotas(db).await? };
        for project in &pool.projects[1..] {
            unit = unit.and([exports::add_import(db.new_id()?, pool.export, project.id)]);
        }
        db.write(unit.and(exports::mark_jobs_due())).await?.done()?;
        Ok(())
    }

    /// Begins a time without faults and without changes of quotas and exports. The project of the large jobs joins; it is
    /// within its share, as others may be.
    pub(in crate::runs) async fn begin_calm(&mut self, rng: &mut Rng, db: &Db) -> Result<()> {
        let Some(pool) = &mut self.pool else { return Ok(()) };
        pool.is_calm = true;
        let mut unit = pool.without_quotas(db).await?;
        unit = unit.and([exports::add_import(db.new_id()?, pool.export, pool.late.id)]);
        let mut shares: Vec<_> =
            pool.projects[1..].iter().map(|project| (project.id, rng.between(0, 6))).collect();
        shares.push((pool.late.id, (self.hosts.len() * cloud::GPUS) as u64));
        for (project, share) in shares {
            let max = (project != pool.late.id && rng.chance(40)).then(|| rng.between(share.max(1), 10));
            let (member, resource, share) = (None, QuotaResource::Gpus, Some(share));
            let quota = Quota { project, member, resource, max, share, used: 0, first_end: None };
            unit = unit.and([quotas::set(db.new_id()?, &quota)]);
        }
        db.write(unit.exec(pool_watch::CALM, Vec::new())).await?.done()?;
        Ok(())
    }

    /// Submits a small job of one of the importing projects.
    pub(in crate::runs) async fn submit_small(&mut self, rng: &mut Rng, db: &Db) -> Result<()> {
        let Some(pool) = &mut self.pool else { return Ok(()) };
        pool.streamed += 1;
        let name = format!("small-{}", pool.streamed);
        let project = rng.pick(&pool.projects[1..]);
        let (project, user) = (project.id, *rng.pick(&project.users));
        let run_ms = rng.between(10_000, STREAM_RUN_MAX_MS);
        let class = *rng.pick(&["normal", "normal", "idle"]);
        let spec = pool_task(rng, &name, (class, 1), run_ms);
        self.submit_for(db, (project, user), &name, &spec).await?;
        Ok(())
    }

    /// Submits a job that needs a whole host.
    pub(in crate::runs) async fn submit_large(&mut self, rng: &mut Rng, db: &Db) -> Result<Option<RunId>> {
        let Some(pool) = &self.pool else { return Ok(None) };
        let owner = (pool.late.id, pool.late.users[0]);
        let gpus = u64::try_from(cloud::GPUS)?;
        let spec = pool_task(rng, "large", ("normal", gpus), 20_000);
        Ok(Some(self.submit_for(db, owner, "large", &spec).await?))
    }

    /// Fleet of the hosts.
    pub(in crate::runs) const fn hosts_fleet(&self) -> FleetId {
        self.ssh_fleet
    }
}

fn random_resource(rng: &mut Rng) -> QuotaResource {
    match rng.between(1, 10) {
        1..=6 => QuotaResource::Gpus,
        7 | 8 => QuotaResource::GpusNamed("a100".to_owned()),
        _ => QuotaResource::Cpus,
    }
}

/// A task that ends by itself, and that may be preempted if its class is `idle` or it is retried.
fn pool_task(rng: &mut Rng, name: &str, (class, gpus): (&str, u64), run_ms: u64) -> Value {
    let retry = json!({"on_events": ["no-capacity", "interruption", "error"], "duration": RETRY_SECS});
    json!({
        "run_name": name, "repo_id": "none", "repo_data": {"repo_type": "virtual"},
        "configuration": {
            "type": "task", "name": name, "image": format!("sim:pull-{}", rng.between(0, 5_000)),
            "user": "root", "commands": ["work"], "class": class, "priority": rng.between(0, 2), "fleets": ["hosts"],
            "env": {"SIM_RUN_MS": run_ms.to_string(), "SIM_FAILS": "0", "SIM_LOG_RATE": "0"},
            "retry": if rng.chance(70) { retry } else { json!(null) },
            "resources": {"cpu": {"count": {"min": 1}}, "memory": {"min": 1.0}, "disk": null,
                "gpu": {"count": {"min": gpus, "max": null}}},
        },
        "profile": {"name": "default"}, "ssh_key_pub": "ssh-ed25519 AAAA sim",
    })
}
