//! Data for reaching agents: the server's signing keys, and the address and credential of each instance.

use windlass_model::id::{InstanceId, ProjectId, RunId, SubmissionId};

use super::{Change, Db, DbError, Expect, Val, record::statements};
use crate::params;

statements! {
    SIGNING_KEY = "SELECT id, seed_sealed FROM signing_keys WHERE purpose = $1";
    /// The first key is kept, so that every replica reads the same.
    OFFER_SIGNING_KEY = "INSERT INTO signing_keys (id, purpose, seed_sealed, created_at) \
                         VALUES ($1, $2, $3, now_us()) ON CONFLICT (purpose) DO NOTHING";
    CREDENTIAL = "SELECT agent_credential_sealed FROM instances WHERE id = $1";
    OFFER_CREDENTIAL = "UPDATE instances SET agent_credential_sealed = $2 \
                        WHERE id = $1 AND agent_credential_sealed IS NULL";
    REACH = "SELECT provisioning, finished FROM instances WHERE id = $1";
    SITE = "SELECT ssh_sealed, host_key, name, project_id, provisioning FROM instances WHERE id = $1";
    /// Only if it is unchanged: two replicas that connect to a new host must agree on its key.
    PIN = "UPDATE instances SET host_key = $3 WHERE id = $1 AND coalesce(host_key, '') = $2";
    /// Only jobs of the instance: a host must not affect those of others. A job that is already due is left unchanged.
    MARK_JOBS_DUE = "UPDATE jobs SET due_at = NULL WHERE instance_id = $1 AND NOT finished AND due_at IS NOT NULL \
                 AND status <> 'submitted' AND id IN (SELECT value FROM json_each(CAST($2 AS TEXT))) \
                 RETURNING status";
    MARK_ALL_JOBS_DUE = "UPDATE jobs SET due_at = NULL WHERE instance_id = $1 AND NOT finished \
                     AND due_at IS NOT NULL AND status <> 'submitted' RETURNING status";
    MARK_INSTANCE_DUE = "UPDATE instances SET due_at = NULL WHERE id = $1 AND NOT finished AND due_at IS NOT NULL";
    MARK_HOSTS_DUE = "UPDATE instances SET due_at = NULL WHERE NOT finished AND status IN ('idle', 'busy')";
    PLACE_OF = "SELECT project_id, run_id FROM jobs WHERE id = $1 AND instance_id = $2 AND NOT finished";
}

/// Jobs of an instance to make due.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum JobSelection {
    Only(Vec<SubmissionId>),
    All,
}

/// Stored machine (JSON) and whether the instance has ended. `None`: no such instance.
pub async fn find_machine(db: &Db, instance: InstanceId) -> Result<Option<(Option<String>, bool)>, DbError> {
    let row = db.query_opt(REACH.as_str(), params![instance]).await?;
    row.map(|row| Ok((row.opt_text(0)?, row.bool(1)?))).transpose()
}

/// Data for reaching a host over SSH.
#[derive(Clone, Debug)]
pub struct SshTargetRow {
    pub ssh_sealed: Option<Vec<u8>>,
    /// JSON: name of a host → its key.
    pub host_key: Option<String>,
    pub name: String,
    pub project: ProjectId,
    /// JSON of the backend's instance.
    pub provisioning: Option<String>,
}

pub async fn ssh_target(db: &Db, instance: InstanceId) -> Result<Option<SshTargetRow>, DbError> {
    let row = db.query_opt(SITE.as_str(), params![instance]).await?;
    row.map(|row| {
        Ok(SshTargetRow {
            ssh_sealed: row.opt_bytes(0)?,
            host_key: row.opt_text(1)?,
            name: row.text(2)?,
            project: row.id(3)?,
            provisioning: row.opt_text(4)?,
        })
    })
    .transpose()
}

/// Stale if another replica pinned in the meantime.
pub fn pin(instance: InstanceId, old: Option<&str>, new: &str) -> Change {
    let params = params![instance, old.unwrap_or_default(), new];
    Change::Exec { sql: PIN.as_str().into(), params, expect: Expect::One }
}

/// Makes jobs of the instance due; returns their statuses.
pub fn mark_jobs_due(instance: InstanceId, which: &JobSelection) -> Change {
    match which {
        JobSelection::Only(jobs) => {
            Change::Query { sql: MARK_JOBS_DUE.as_str().into(), params: params![instance, Val::list(jobs)] }
        }
        JobSelection::All => {
            Change::Query { sql: MARK_ALL_JOBS_DUE.as_str().into(), params: params![instance] }
        }
    }
}

pub fn mark_instance_due(instance: InstanceId) -> Change {
    Change::Exec { sql: MARK_INSTANCE_DUE.as_str().into(), params: params![instance], expect: Expect::Any }
}

/// Makes all hosts due, so that the server connects to them.
pub async fn mark_hosts_due(db: &Db) -> Result<(), DbError> {
    db.write(crate::Unit::new().exec(MARK_HOSTS_DUE.as_str(), Vec::new())).await.map(drop)
}

/// Project and run of an active job on the instance.
pub async fn owner_of(
    db: &Db,
    job: SubmissionId,
    instance: InstanceId,
) -> Result<Option<(ProjectId, RunId)>, DbError> {
    let row = db.query_opt(PLACE_OF.as_str(), params![job, instance]).await?;
    row.map(|row| Ok((row.id(0)?, row.id(1)?))).transpose()
}

/// Id of the key's row and its sealed seed.
pub async fn signing_key(db: &Db, purpose: &str) -> Result<Option<(uuid::Uuid, Vec<u8>)>, DbError> {
    let row = db.query_opt(SIGNING_KEY.as_str(), params![purpose]).await?;
    row.map(|row| Ok((row.uuid(0)?, row.bytes(1)?))).transpose()
}

/// Stores the key unless there is one for this purpose.
pub fn insert_signing_key(id: uuid::Uuid, purpose: &str, sealed: Vec<u8>) -> Change {
    let params = params![id, purpose, sealed];
    Change::Exec { sql: OFFER_SIGNING_KEY.as_str().into(), params, expect: Expect::Any }
}

/// Sealed credential: `None` for no such instance, `Some(None)` for one without a credential.
pub async fn credential(db: &Db, instance: InstanceId) -> Result<Option<Option<Vec<u8>>>, DbError> {
    let row = db.query_opt(CREDENTIAL.as_str(), params![instance]).await?;
    row.map(|row| row.opt_bytes(0)).transpose()
}

/// Stores the credential unless the instance has one.
pub fn set_first_credential(instance: InstanceId, sealed: Vec<u8>) -> Change {
    let params = params![instance, sealed];
    Change::Exec { sql: OFFER_CREDENTIAL.as_str().into(), params, expect: Expect::Any }
}
