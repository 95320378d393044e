//! Reads for the orders of a placed job.

use windlass_model::id::InstanceId;

use crate::{
    Db, DbError, Val, instances::Instance, params, pipeline_rows::jobs::JobInputs, record::statements,
    runs::Run,
};

statements! {
    /// The whole generation of a replica, including the job itself.
    NODES = "SELECT j.job_num, j.blocks, j.job_spec, j.instance_id FROM jobs j WHERE j.run_id = $1 \
             AND j.replica_num = $2 AND j.submission_num = $3 ORDER BY j.job_num";
    /// Active replicas of a service.
    REPLICAS = "SELECT j.replica_num, j.blocks, j.job_spec, j.instance_id FROM jobs j WHERE j.run_id = $1 \
                AND j.job_num = 0 AND NOT j.finished ORDER BY j.replica_num";
    INSTANCES = "SELECT {} FROM instances i WHERE i.id IN (SELECT value FROM json_each(CAST($1 AS TEXT)))",
                Instance::columns("i");
}

/// A job of the same run, and its instance.
#[derive(Clone, Debug)]
pub struct JobNode {
    /// Number of the job among the nodes, or of the replica among those of a service.
    pub num: i64,
    pub blocks: i64,
    pub job_spec: String,
    pub instance: Option<Instance>,
}

/// Nodes of the job's replica, in order.
pub async fn nodes(db: &Db, loaded: &JobInputs) -> Result<Vec<JobNode>, DbError> {
    let job = &loaded.job;
    if loaded.siblings.is_empty() {
        let (blocks, job_spec) = (job.blocks, job.job_spec.clone());
        return Ok(vec![JobNode { num: job.job_num, blocks, job_spec, instance: loaded.instance.clone() }]);
    }
    with_instances(db, NODES.as_str(), params![job.run_id, job.replica_num, job.submission_num]).await
}

/// One job of each active replica, in order.
pub async fn replicas(db: &Db, run: &Run) -> Result<Vec<JobNode>, DbError> {
    with_instances(db, REPLICAS.as_str(), params![run.id]).await
}

async fn with_instances(db: &Db, sql: &'static str, params: Vec<Val>) -> Result<Vec<JobNode>, DbError> {
    let rows = db.query(sql, params).await?;
    let mut ids = std::collections::BTreeSet::<InstanceId>::new();
    for row in &rows {
        ids.extend(row.opt_id::<InstanceId>(3)?);
    }
    let found = db.query(INSTANCES.as_str(), vec![Val::list(&ids)]).await?;
    let found = found.into_iter().map(Instance::read).collect::<Result<Vec<_>, _>>()?;
    let node = |row: &crate::Row| {
        let id: Option<InstanceId> = row.opt_id(3)?;
        Ok(JobNode {
            num: row.int(0)?,
            blocks: row.int(1)?,
            job_spec: row.text(2)?,
            instance: id.and_then(|id| found.iter().find(|i| i.id == id)).cloned(),
        })
    };
    rows.iter().map(node).collect()
}
