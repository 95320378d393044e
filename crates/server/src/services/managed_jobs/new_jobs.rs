//! Rows of new managed jobs: the jobs, their tasks, and their events.

use windlass_model::{
    decide::managed_jobs as brain,
    event::{Entity, Event, EventCause},
    id::{ManagedJobId, ProjectId, UserId},
    managed_job::{self, Status, plan::ManagedJobPlan, record::TaskRecord},
    skypilot::TaskSecrets,
};

use crate::{
    db::{
        Change, Db, Unit,
        managed_jobs::{self as rows, NewManagedJob, Task},
    },
    encryption::{AssociatedData, Keyring},
    error::Result,
    events::{EventSubject, actor, record},
};

/// Jobs to create: copies of one plan, all or none.
pub struct NewJobs<'a> {
    pub db: &'a Db,
    pub keys: &'a Keyring,
    pub project: ProjectId,
    pub user: UserId,
    pub name: &'a str,
    pub plan: &'a ManagedJobPlan,
    /// JSON: the archives of each task.
    pub files: String,
    /// One entry per task.
    pub secrets: &'a [TaskSecrets],
    pub copies: u32,
    /// Key of the request and hash of its content.
    pub key: Option<(String, String)>,
}

impl NewJobs<'_> {
    /// Builds the unit with all rows. The first result of the unit is the number of the last job.
    pub fn unit(&self) -> Result<(Vec<ManagedJobId>, Unit)> {
        let plan = serde_json::to_string(self.plan)?;
        // INACTIVE: the first pass completes its submission.
        let record = TaskRecord::default();
        let written = serde_json::to_string(&record)?;
        let has_secrets = self.secrets.iter().any(|of_task| !of_task.is_empty());
        let plain = has_secrets.then(|| serde_json::to_vec(self.secrets)).transpose()?;
        let mut unit = Unit::new().and([rows::allocate_numbers(i64::from(self.copies))]);
        let mut ids = Vec::new();
        for rank in 0..self.copies {
            let id = ManagedJobId(self.db.new_id()?);
            let belongs = AssociatedData::row("managed_jobs", "secrets_sealed", id.0);
            let seal = |plain: &Vec<u8>| self.keys.seal(&belongs, plain);
            // One key for all copies: it is stored with the first.
            let (idempotency_key, idempotency_hash) = self.key.clone().filter(|_| rank == 0).unzip();
            unit = unit.and([rows::insert(NewManagedJob {
                id,
                project_id: self.project,
                user_id: self.user,
                name: self.name.to_owned(),
                plan: plan.clone(),
                files: self.files.clone(),
                secrets_sealed: plain.as_ref().map(seal).transpose()?,
                rank: rank.into(),
                copies: self.copies.into(),
                priority: self.plan.priority.into(),
                status: Status::Pending,
                schedule: record.schedule,
                idempotency_key,
                idempotency_hash,
            })]);
            unit = unit.and(self.tasks(id, &record, &written)?);
            ids.push(id);
        }
        Ok((ids, unit))
    }

    fn tasks(&self, id: ManagedJobId, first: &TaskRecord, written: &str) -> Result<Vec<Change>> {
        let by = Some(self.user);
        let about = EventSubject {
            entity: Entity::ManagedJob,
            id: id.0,
            name: self.name,
            project: Some(self.project),
        };
        let mut changes = Vec::new();
        for (task, of) in (0..).zip(&self.plan.tasks) {
            let own = self.db.new_id()?;
            changes.push(rows::insert_task(Task {
                id: own,
                job_id: id,
                task,
                status: first.status,
                schedule: first.schedule,
                record: written.to_owned(),
                // The task waits for a slot from now on, before the first pass over its job: the first copy is served
                // first.
                wants_slot: brain::is_initially_ready(of),
                granted: false,
            }));
            let because = EventCause {
                actor: actor(by),
                reason: "submitted".to_owned(),
                message: "Managed job submitted".to_owned(),
            };
            let created = Event::created::<managed_job::ManagedTaskLifecycle>(own, first.status, because);
            changes.extend(record(self.db, by, &about, &created)?);
        }
        Ok(changes)
    }
}
