//! Table `instances`.

use windlass_model::{
    id::{FleetId, InstanceId, ProjectId, RunId, SubmissionId},
    instance::Status,
    time::Timestamp,
};

use super::{
    Change, Db, DbError, Val,
    filter::{Filter, Page},
    record::{record, statements},
};
use crate::params;

record! {
    pub struct Instance {
        pub id: InstanceId,
        pub project_id: ProjectId,
        pub fleet_id: Option<FleetId>,
        pub name: String,
        pub instance_num: i64,
        pub backend: Option<String>,
        pub region: Option<String>,
        pub availability_zone: Option<String>,
        pub hostname: Option<String>,
        pub price: Option<f64>,
        pub spot: bool,
        /// JSON documents.
        pub instance_type: Option<String>,
        pub offer: Option<String>,
        pub provisioning: Option<String>,
        pub ssh: Option<String>,
        pub gpu_driver: Option<String>,
        pub requirements: Option<String>,
        pub profile: Option<String>,
        pub status: Status,
        pub finished: bool,
        pub total_blocks: Option<i64>,
        pub busy_blocks: i64,
        pub health: String,
        pub health_message: Option<String>,
        pub unreachable: bool,
        pub termination_reason: Option<String>,
        pub termination_message: Option<String>,
        pub idle_seconds_max: Option<i64>,
        pub agent_version: Option<String>,
        pub host_key: Option<String>,
        pub created_at: Timestamp,
        pub started_at: Option<Timestamp>,
        pub idle_since: Option<Timestamp>,
        pub seen_at: Option<Timestamp>,
        pub unreachable_since: Option<Timestamp>,
        pub first_attempt_at: Option<Timestamp>,
        pub last_attempt_at: Option<Timestamp>,
        pub termination_asked_at: Option<Timestamp>,
        pub termination_deadline_at: Option<Timestamp>,
        pub finished_at: Option<Timestamp>,
        pub last_processed_at: Timestamp,
        pub tracking: Option<String>,
        pub lock_epoch: i64,
        pub status_message: Option<String>,
        /// Submission that requested it.
        pub made_for: Option<SubmissionId>,
        /// Reason of the requested end; `None`: a user requested it.
        pub end_reason: Option<String>,
        /// Number of times that blocks were kept here for a waiting job.
        pub promise_num: i64,
    }
}

record! {
    pub struct NewInstance {
        pub id: InstanceId,
        pub project_id: ProjectId,
        pub fleet_id: Option<FleetId>,
        pub name: String,
        pub instance_num: i64,
        pub backend: Option<String>,
        pub region: Option<String>,
        pub hostname: Option<String>,
        pub price: Option<f64>,
        pub spot: bool,
        pub instance_type: Option<String>,
        pub offer: Option<String>,
        pub provisioning: Option<String>,
        pub ssh: Option<String>,
        pub ssh_sealed: Option<Vec<u8>>,
        pub requirements: Option<String>,
        pub profile: Option<String>,
        pub status: Status,
        pub total_blocks: Option<i64>,
        pub idle_seconds_max: Option<i64>,
    }
}

statements! {
    FIND = "SELECT {} FROM instances i WHERE i.id = $1", Instance::columns("i");
    OF_FLEETS = "SELECT {} FROM instances i WHERE i.fleet_id IN (SELECT value FROM json_each(CAST($1 AS TEXT))) \
                 AND NOT i.deleted ORDER BY i.fleet_id, i.instance_num, i.created_at", Instance::columns("i");
    /// A request that the pipeline reads; rejected while a job is there.
    REQUEST_END = "UPDATE instances SET termination_asked_at = coalesce(termination_asked_at, now_us()), due_at = NULL \
               WHERE id = $1 AND NOT finished AND busy_blocks = 0 \
               AND NOT EXISTS (SELECT 1 FROM jobs j WHERE j.instance_id = $1 AND NOT j.finished)";
    /// A host of the fleet that does not answer is released as it is. Rolled back together with the deletion of the
    /// fleet.
    FORCE_END = "UPDATE instances SET end_reason = 'forced', termination_asked_at = coalesce(termination_asked_at, now_us()), \
                 due_at = NULL WHERE fleet_id = $1 AND NOT finished";
    SSH_HOSTS = "SELECT {} FROM instances i WHERE i.hostname IN (SELECT value FROM json_each(CAST($1 AS TEXT))) \
                 AND i.backend = 'remote' AND NOT i.finished AND NOT i.deleted", Instance::columns("i");
    /// Hides ended instances when each host of the fleet is tried again.
    HIDE_OVER = "UPDATE instances SET deleted = TRUE WHERE fleet_id = $1 AND finished AND NOT deleted";
    SEALED = "SELECT ssh_sealed, agent_credential_sealed FROM instances WHERE id = $1";
    PLACED_JOBS = "SELECT j.instance_id, r.name, r.project_id, p.name, r.id, j.job_name, j.blocks FROM jobs j \
                   JOIN runs r ON r.id = j.run_id JOIN projects p ON p.id = r.project_id WHERE j.instance_id IN \
                   (SELECT value FROM json_each(CAST($1 AS TEXT))) AND NOT j.finished ORDER BY j.submitted_at, j.id";
    /// Name of the job that a busy instance shows.
    JOB_NAMES = "SELECT j.instance_id, j.project_id, j.job_name FROM jobs j WHERE j.instance_id IN \
                 (SELECT value FROM json_each(CAST($1 AS TEXT))) AND NOT j.finished ORDER BY j.submitted_at, j.id";
}

record! {
    /// A job on an instance, with the names of its run and project.
    pub struct PlacedJob {
        pub instance_id: InstanceId,
        pub run_name: String,
        pub project_id: ProjectId,
        pub project_name: String,
        pub run_id: RunId,
        pub job_name: String,
        pub blocks: i64,
    }
}

/// Projects whose jobs may be named; `None`: all. Instances are shared between projects, their jobs are not.
pub type NamedProjects<'a> = Option<&'a [ProjectId]>;

fn may_name(projects: NamedProjects<'_>, project: ProjectId) -> bool {
    projects.is_none_or(|projects| projects.contains(&project))
}

/// Unfinished jobs of these projects on these instances.
pub async fn list_jobs(
    db: &Db,
    instances: &[InstanceId],
    projects: NamedProjects<'_>,
) -> Result<Vec<PlacedJob>, DbError> {
    let mut jobs = Vec::new();
    for row in db.query(PLACED_JOBS.as_str(), vec![Val::list(instances)]).await? {
        let job = PlacedJob::read(row)?;
        if may_name(projects, job.project_id) {
            jobs.push(job);
        }
    }
    Ok(jobs)
}

/// Two live instances of one number in a fleet are a conflict on `instances_num_key`.
pub fn insert(instance: NewInstance) -> Change {
    let mut values = instance.into_values();
    values.extend([("created_at", Val::Now), ("last_processed_at", Val::Now)]);
    Change::Insert { table: "instances", values }
}

/// Inserts an instance that is to be created for a job, which occupies these blocks from the start.
pub fn insert_for_job(instance: NewInstance, job: SubmissionId, blocks: i64) -> Change {
    let mut values = instance.into_values();
    values.extend([
        ("made_for", job.into()),
        ("busy_blocks", blocks.into()),
        ("created_at", Val::Now),
        ("last_processed_at", Val::Now),
    ]);
    Change::Insert { table: "instances", values }
}

/// Stores the request to end; the instance's pipeline performs it. Stale while a job is there.
pub fn request_end(id: InstanceId) -> Change {
    Change::Exec { sql: REQUEST_END.as_str().into(), params: params![id], expect: super::Expect::One }
}

/// Value of `end_reason` in addition to the reasons of the model.
pub const FORCED: &str = "forced";

/// Stores the request to end all instances of a fleet, whether or not they answer.
pub fn force_end(fleet: FleetId) -> Change {
    Change::Exec { sql: FORCE_END.as_str().into(), params: params![fleet], expect: super::Expect::Any }
}

/// Hides ended instances from lists.
pub fn hide_finished(fleet: FleetId) -> Change {
    Change::Exec { sql: HIDE_OVER.as_str().into(), params: params![fleet], expect: super::Expect::Any }
}

pub async fn find(db: &Db, id: InstanceId) -> Result<Option<Instance>, DbError> {
    db.query_opt(FIND.as_str(), params![id]).await?.map(Instance::read).transpose()
}

/// Instances by fleet, then by number.
pub async fn list_by_fleets(db: &Db, fleets: &[FleetId]) -> Result<Vec<Instance>, DbError> {
    db.query(OF_FLEETS.as_str(), vec![Val::list(fleets)]).await?.into_iter().map(Instance::read).collect()
}

/// Hosts of SSH fleets with one of these names, in all projects.
pub async fn ssh_hosts<'a>(
    db: &Db,
    names: impl IntoIterator<Item = &'a str>,
) -> Result<Vec<Instance>, DbError> {
    db.query(SSH_HOSTS.as_str(), vec![Val::list(names)]).await?.into_iter().map(Instance::read).collect()
}

/// Sealed SSH keys and sealed agent credential.
pub async fn sealed_columns(db: &Db, id: InstanceId) -> Result<(Option<Vec<u8>>, Option<Vec<u8>>), DbError> {
    let row = db.query_opt(SEALED.as_str(), params![id]).await?;
    row.map_or(Ok((None, None)), |row| Ok((row.opt_bytes(0)?, row.opt_bytes(1)?)))
}

/// Names of the unfinished jobs of these projects on these instances.
pub async fn job_names(
    db: &Db,
    instances: &[InstanceId],
    projects: NamedProjects<'_>,
) -> Result<Vec<(InstanceId, String)>, DbError> {
    let mut names = Vec::new();
    for row in db.query(JOB_NAMES.as_str(), vec![Val::list(instances)]).await? {
        if may_name(projects, row.id(1)?) {
            names.push((row.id(0)?, row.text(2)?));
        }
    }
    Ok(names)
}

/// Selection of instances: newest first unless the page specifies otherwise, ties by id.
#[derive(Clone, Debug, Default)]
pub struct Query {
    pub projects: Option<Vec<ProjectId>>,
    /// Also those of fleets that other projects export to these.
    pub include_imported: bool,
    pub fleets: Option<Vec<FleetId>>,
    /// Without those that ended.
    pub only_active: bool,
    pub page: Page,
}

pub async fn list(db: &Db, query: &Query) -> Result<Vec<Instance>, DbError> {
    let mut filter = Filter::new();
    if let Some(projects) = &query.projects {
        match query.include_imported {
            true => filter.is(
                "i.fleet_id IN (SELECT u.fleet_id FROM usable_fleets u WHERE u.project_id IN \
                 (SELECT value FROM json_each(CAST(? AS TEXT))))",
                Val::list(projects),
            ),
            false => filter.and_in("i.project_id", projects),
        }
    }
    if let Some(fleets) = &query.fleets {
        filter.and_in("i.fleet_id", fleets);
    }
    if query.only_active {
        filter.and("NOT i.finished");
        filter.and("NOT i.deleted");
    }
    filter.after("i.created_at", "i.id", &query.page);
    let (found, params) = filter.done();
    let order = query.page.order("i.created_at", "i.id");
    let sql = format!("SELECT {} FROM instances i{found}{order}", Instance::columns("i"));
    db.query(sql, params).await?.into_iter().map(Instance::read).collect()
}
