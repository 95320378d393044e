//! Runs of every kind: submitted and stopped.

use anyhow::Result;
use serde_json::{Value, json};
use windlass_model::{
    event::{Actor, Event, EventCause},
    id::{ProjectId, RunId, SubmissionId, UserId},
    job, run,
    time::Timestamp,
};
use windlass_server::{
    db::{
        Db, Unit, WriteOutcome,
        events::{self, EventTarget},
        jobs, runs,
    },
    parsed_run_spec::ParsedRunSpec,
};

use super::{Workload, event_context};
use crate::rng::Rng;

impl Workload {
    pub(super) async fn submit(&mut self, rng: &mut Rng, db: &Db) -> Result<()> {
        let name = format!("run-{}", self.runs.len());
        let owner = self.submitter(rng);
        let spec = self.specification(rng, &name, owner.0);
        self.submit_for(db, owner, &name, &spec).await?;
        Ok(())
    }

    #[cfg(test)]
    pub(in crate::runs) async fn submit_as(&mut self, db: &Db, name: &str, spec: &Value) -> Result<RunId> {
        self.submit_for(db, (self.project, self.user), name, spec).await
    }

    pub(super) async fn submit_for(
        &mut self,
        db: &Db,
        owner: (ProjectId, UserId),
        name: &str,
        spec: &Value,
    ) -> Result<RunId> {
        let id = RunId(db.new_id()?);
        let shape = ParsedRunSpec::read(name, spec)?;
        let unit = self.submission_unit(db, (id, owner), name, &spec.to_string(), &shape).await?;
        db.write(unit).await?.done()?;
        self.runs.push(id);
        if shape.crons().is_some() {
            self.scheduled.push(id);
        }
        Ok(id)
    }

    fn specification(&self, rng: &mut Rng, name: &str, project: ProjectId) -> Value {
        let nodes = *rng.pick(&[1, 1, 1, 1, 1, 2, 3]);
        let are_alike = self.are_alike && nodes == 1;
        let retry = *rng.pick(&["none", "all", "error"]);
        // Volumes belong to the first project.
        let volumes: Value =
            if nodes == 1 && project == self.project && !self.volumes.is_empty() && rng.chance(50) {
                let names: Vec<&str> =
                    (0..rng.between(1, 2)).map(|_| rng.pick(&self.volumes).1.as_str()).collect();
                json!([{ "name": names, "path": "/data" }])
            } else {
                json!([])
            };
        let mut spec = json!({
            "run_name": name, "repo_id": "none", "repo_data": {"repo_type": "virtual"},
            "configuration": {
                "type": "task", "name": name, "image": format!("sim:pull-{}", rng.between(0, 20_000)),
                "user": "root", "commands": ["work"], "nodes": nodes, "volumes": volumes,
                "env": {
                    "SIM_RUN_MS": rng.between(0, 180_000).to_string(),
                    "SIM_FAILS": rng.pick(&["0", "0", "0", "1", "3"]).to_string(),
                    "SIM_LOG_RATE": rng.pick(&["0", "50", "50", "2000"]).to_string(),
                },
                "retry": match retry {
                    "none" => json!(null),
                    "all" => json!({"on_events": ["no-capacity", "interruption", "error"], "duration": 1200}),
                    _ => json!({"on_events": ["error"], "duration": 300}),
                },
                "max_duration": if !are_alike && rng.chance(15) { json!(rng.between(10, 120)) } else { json!(null) },
                "schedule": if rng.chance(8) { json!({"cron": ["*/2 * * * *"]}) } else { json!(null) },
                "stop_criteria": if nodes > 1 && rng.chance(30) { "master-done" } else { "all-done" },
                "creation_policy": if !are_alike && rng.chance(15) { "reuse" } else { "reuse-or-create" },
                "idle_duration": rng.pick(&[0, 60, 300]),
                "spot_policy": if are_alike { "auto" } else { rng.pick(&["auto", "auto", "on-demand"]) },
                "priority": if are_alike { rng.between(0, 1) } else { rng.between(0, 3) },
                "resources": {"cpu": {"count": {"min": 1}}, "memory": {"min": 1.0}, "disk": null,
                    "gpu": {"count": {"min": if are_alike { 1 } else { rng.between(0, 2) }, "max": null}}},
            },
            "profile": {"name": "default"}, "ssh_key_pub": "ssh-ed25519 AAAA sim",
        });
        if self.has_pool() {
            let configuration = &mut spec["configuration"];
            configuration["class"] = json!(rng.pick(&["urgent", "normal", "normal", "idle"]));
            configuration["preemptible"] = json!(rng.pick(&[None, None, Some(true), Some(false)]));
            configuration["schedule"] = json!(null);
            if rng.chance(50) {
                configuration["retry"] =
                    json!({"on_events": ["no-capacity", "interruption", "error"], "duration": 1200});
            }
        }
        spec
    }

    async fn submission_unit(
        &self,
        db: &Db,
        (id, (project, user)): (RunId, (ProjectId, UserId)),
        name: &str,
        spec: &str,
        shape: &ParsedRunSpec,
    ) -> Result<Unit> {
        let because = |what: &str| EventCause {
            actor: Actor::User(user),
            reason: "submitted".into(),
            message: format!("{what} submitted"),
        };
        let next: Option<Timestamp> = match shape.crons() {
            Some(crons) => crons.next_after(db.now().await?),
            None => None,
        };
        let status = if next.is_some() { run::Status::Pending } else { run::Status::Submitted };
        let mut unit = Unit::new().and([runs::insert(runs::NewRun {
            id,
            project_id: project,
            user_id: user,
            repo_id: None,
            name: name.into(),
            spec: spec.into(),
            service: None,
            gateway_id: None,
            status,
            desired_replicas: 1,
            priority: shape.rank().to_stored(),
            next_triggered_at: next,
            idempotency_key: None,
            idempotency_hash: None,
            managed_job_id: None,
            places: None,
        })]);
        let starts = if next.is_some() { Vec::new() } else { shape.starts()? };
        for start in starts {
            for job_num in 0..start.jobs {
                let (spec, job_spec) = shape.job(None, start.replica, job_num)?;
                let job_name = spec.job_name;
                let submission = SubmissionId(db.new_id()?);
                let event = Event::created::<job::JobLifecycle>(
                    submission,
                    job::Status::Submitted,
                    because(&job_name),
                );
                let targets = [EventTarget { entity: event.entity, id: submission.0, name: &job_name }];
                unit = unit.and(events::append(db, &event, &event_context((project, user), &targets))?);
                unit = unit.and([jobs::insert(jobs::NewJob {
                    id: submission,
                    run_id: id,
                    project_id: project,
                    job_name,
                    replica_num: start.replica.into(),
                    job_num: job_num.into(),
                    submission_num: 0,
                    deployment_num: 0,
                    replica_group: None,
                    status: job::Status::Submitted,
                    job_spec,
                    secrets_sealed: None,
                    priority: shape.rank().to_stored(),
                    preemptible: shape.preemptibility(false).as_str().to_owned(),
                    preempted_before: 0,
                    queued_at: None,
                })]);
            }
        }
        let event = Event::created::<run::RunLifecycle>(id, status, because(name));
        let targets = [EventTarget { entity: event.entity, id: id.0, name }];
        Ok(unit.and(events::append(db, &event, &event_context((project, user), &targets))?))
    }

    pub(super) async fn stop(&mut self, db: &Db, id: RunId, abort: bool) -> Result<()> {
        let written = db.write(Unit::new().and([runs::request_stop(id, abort, self.user)])).await?;
        // A finished run cannot be stopped, and no stop is acknowledged.
        if let WriteOutcome::Done { now, .. } = written {
            self.stopped.entry(id.0).or_insert(now);
        }
        Ok(())
    }
}
