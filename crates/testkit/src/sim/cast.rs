//! Who plays: a project with a fleet of hosts, and users who submit and stop runs.

use std::collections::BTreeMap;

use anyhow::Result;
use serde_json::json;
use uuid::Uuid;
use windlass_model::{
    event::{Actor, Because, Event},
    fleet,
    id::{FleetId, InstanceId, ProjectId, RunId, SubmissionId, UserId},
    instance, job, run,
};
use windlass_server::{
    db::{
        Db, Unit,
        events::{self, Place, Target},
        fleets, instances, jobs, projects, runs, users,
    },
    run_shape::RunShape,
};

use super::replica::Replica;
use crate::rng::Rng;

pub(super) struct SimHost {
    pub(super) id: InstanceId,
    pub(super) gpus: usize,
    blocks: i64,
}

pub(super) struct Cast {
    user: UserId,
    project: ProjectId,
    fleet: FleetId,
    pub(super) hosts: Vec<SimHost>,
    runs: Vec<RunId>,
    /// When each stop was acknowledged, by the database's clock.
    stopped: BTreeMap<Uuid, i64>,
}

const RUNS_MAX: usize = 14;

impl Cast {
    pub(super) fn draw(rng: &mut Rng, db: &Db) -> Result<Self> {
        let mut hosts = Vec::new();
        for _ in 0..rng.between(2, 4) {
            let blocks = *rng.pick(&[1, 2, 4]);
            hosts.push(SimHost { id: InstanceId(db.new_id()?), gpus: 4, blocks });
        }
        Ok(Self {
            user: UserId(db.new_id()?),
            project: ProjectId(db.new_id()?),
            fleet: FleetId(db.new_id()?),
            hosts,
            runs: Vec::new(),
            stopped: BTreeMap::new(),
        })
    }

    pub(super) fn stopped_at(&self, run: Uuid) -> Option<i64> {
        self.stopped.get(&run).copied()
    }

    pub(super) async fn set_the_stage(&self, db: &Db) -> Result<()> {
        let mut unit = Unit::new().and([
            users::create(users::New {
                id: self.user,
                name: "ada",
                admin: true,
                email: None,
                active: true,
                ssh_public_key: "",
                ssh_private_key_sealed: Vec::new(),
            }),
            projects::create(self.project, "sim", self.user, false, None),
        ]);
        let spec = json!({"configuration": {"type": "fleet", "name": "hosts", "placement": "cluster",
            "ssh_config": {"hosts": []}}, "profile": {"name": "default"}});
        unit = unit.and([fleets::insert(fleets::NewFleet {
            id: self.fleet,
            project_id: self.project,
            name: "hosts".into(),
            spec: spec.to_string(),
            spec_sealed: None,
            status: fleet::Status::Active,
            auto_created: false,
        })]);
        for (num, host) in self.hosts.iter().enumerate() {
            unit = unit.and([instances::insert(self.instance(num, host))]);
        }
        db.write(unit).await?.done()?;
        Ok(())
    }

    fn instance(&self, num: usize, host: &SimHost) -> instances::NewInstance {
        let gpus: Vec<_> = (0..host.gpus)
            .map(|_| json!({"name": "A100", "memory_mib": 81_920, "vendor": "nvidia"}))
            .collect();
        let kind = json!({"name": "sim", "resources": {"cpus": 32, "memory_mib": 262_144, "spot": false,
            "cpu_arch": "x86", "disk": {"size_mib": 1_048_576}, "gpus": gpus}});
        instances::NewInstance {
            id: host.id,
            project_id: self.project,
            fleet_id: Some(self.fleet),
            name: format!("hosts-{num}"),
            instance_num: i64::try_from(num).unwrap_or_default(),
            backend: Some("remote".into()),
            region: Some("remote".into()),
            hostname: Some(format!("host-{num}")),
            price: Some(0.0),
            spot: false,
            instance_type: Some(kind.to_string()),
            offer: None,
            provisioning: None,
            ssh: None,
            ssh_sealed: None,
            requirements: None,
            profile: None,
            status: instance::Status::Idle,
            total_blocks: Some(host.blocks),
            idle_seconds_max: None,
        }
    }

    /// One thing a user does: mostly a new run, sometimes a stop.
    pub(super) async fn act(&mut self, rng: &mut Rng, db: &Db, replicas: &[Replica]) -> Result<()> {
        if self.runs.len() < RUNS_MAX && (self.runs.is_empty() || rng.chance(65)) {
            self.submit(rng, db).await?;
        } else {
            self.stop(rng, db).await?;
        }
        // The request reached one replica; only that one hears of it at once.
        let heard = rng.between(0, replicas.len() as u64 - 1) as usize;
        if rng.chance(70) {
            replicas[heard].hint("runs");
            replicas[heard].hint("jobs_submitted");
        }
        Ok(())
    }

    async fn submit(&mut self, rng: &mut Rng, db: &Db) -> Result<()> {
        let id = RunId(db.new_id()?);
        let name = format!("run-{}", self.runs.len());
        let nodes = *rng.pick(&[1, 1, 1, 1, 2, 3]).min(&self.hosts.len());
        let retry = *rng.pick(&["none", "all", "error"]);
        let spec = json!({
            "run_name": name, "repo_id": "none", "repo_data": {"repo_type": "virtual"},
            "configuration": {
                "type": "task", "name": name, "image": format!("sim:pull-{}", rng.between(0, 20_000)), "commands": ["work"], "nodes": nodes,
                "env": {
                    "SIM_RUN_MS": rng.between(0, 180_000).to_string(),
                    "SIM_FAILS": rng.pick(&["0", "0", "0", "1", "3"]).to_string(),
                },
                "retry": match retry {
                    "none" => json!(null),
                    "all" => json!({"on_events": ["no-capacity", "interruption", "error"], "duration": 1200}),
                    _ => json!({"on_events": ["error"], "duration": 300}),
                },
                "stop_criteria": if nodes > 1 && rng.chance(30) { "master-done" } else { "all-done" },
                "priority": rng.between(0, 3),
                "resources": {"cpu": {"count": {"min": 1}}, "memory": {"min": 1.0}, "disk": null,
                    "gpu": {"count": {"min": rng.between(0, 2), "max": null}}},
            },
            "profile": {"name": "default"}, "ssh_key_pub": "ssh-ed25519 AAAA sim",
        });
        let unit = self.submission_unit(db, id, &name, &spec.to_string())?;
        db.write(unit).await?.done()?;
        self.runs.push(id);
        Ok(())
    }

    fn submission_unit(&self, db: &Db, id: RunId, name: &str, spec: &str) -> Result<Unit> {
        let shape = RunShape::parse(name, spec)?;
        let because = |what: &str| Because {
            actor: Actor::User(self.user),
            reason: "submitted".into(),
            message: format!("{what} submitted"),
        };
        let mut unit = Unit::new().and([runs::insert(runs::NewRun {
            id,
            project_id: self.project,
            user_id: self.user,
            repo_id: None,
            name: name.into(),
            spec: spec.into(),
            service: None,
            gateway_id: None,
            status: run::Status::Submitted,
            desired_replicas: 1,
            priority: shape.priority(),
            next_triggered_at: None,
            idempotency_key: None,
            idempotency_hash: None,
        })]);
        for start in shape.starts()? {
            for job_num in 0..start.jobs {
                let (spec, job_spec) = shape.job(start.replica, job_num)?;
                let job_name = spec.job_name;
                let submission = SubmissionId(db.new_id()?);
                let event =
                    Event::created::<job::Job>(submission, job::Status::Submitted, because(&job_name));
                let targets = [Target { entity: event.entity, id: submission.0, name: &job_name }];
                unit = unit.and(events::append(db, &event, &self.place(&targets))?);
                unit = unit.and([jobs::insert(jobs::NewJob {
                    id: submission,
                    run_id: id,
                    project_id: self.project,
                    job_name,
                    replica_num: start.replica.into(),
                    job_num: job_num.into(),
                    submission_num: 0,
                    deployment_num: 0,
                    replica_group: None,
                    status: job::Status::Submitted,
                    job_spec,
                    secrets_sealed: None,
                    priority: shape.priority(),
                })]);
            }
        }
        let event = Event::created::<run::Run>(id, run::Status::Submitted, because(name));
        let targets = [Target { entity: event.entity, id: id.0, name }];
        Ok(unit.and(events::append(db, &event, &self.place(&targets))?))
    }

    fn place<'a>(&self, targets: &'a [Target<'a>]) -> Place<'a> {
        Place { project: Some(self.project), user: Some(self.user), lock_token: None, targets }
    }

    async fn stop(&mut self, rng: &mut Rng, db: &Db) -> Result<()> {
        let id = *rng.pick(&self.runs);
        let written = db.write(Unit::new().and([runs::ask_stop(id, rng.chance(30), self.user)])).await?;
        // A run that is over cannot be stopped, and nobody is told that it was.
        if let windlass_server::db::Written::Done { now, .. } = written {
            self.stopped.entry(id.0).or_insert(now);
        }
        Ok(())
    }
}
