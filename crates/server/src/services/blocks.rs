//! The blocks of instances: which job holds each, and how much of it is used. For heat maps.

use std::collections::HashMap;

use futures_util::{StreamExt as _, stream};
use tokio::time::{Duration, sleep};
use windlass_api::{
    metrics::{Block, BlockEvent, BlockJob, BlockStreamRequest, InstanceBlocks},
    rows::{InstanceRow, InstanceUse, RowsRequest},
};
use windlass_model::id::InstanceId;

use super::{SseEvent, SseStream, rows};
use crate::{
    app::App,
    auth::Caller,
    db::series::{self, JobOnInstance},
    error::{Error, Result},
    job_metrics::cpu_cores,
};

const INTERVAL: Duration = Duration::from_secs(5);
const PAGE: u32 = 500;
const BLOCKS_MAX: i64 = 1024;

/// Streams the blocks at once and every [`INTERVAL`].
pub(crate) async fn stream(
    app: &App,
    caller: &Caller,
    requested: BlockStreamRequest,
) -> Result<SseStream<BlockEvent>> {
    let first = sample(app, caller, &requested).await?;
    let state = (app.clone(), caller.clone(), requested, Some(first), 0_u64);
    let events = stream::unfold(state, |(app, caller, requested, first, id)| async move {
        let sampled = match first {
            Some(first) => Ok(first),
            None => {
                sleep(INTERVAL).await;
                sample(&app, &caller, &requested).await
            }
        };
        let event = match sampled {
            Ok(data) => SseEvent::Event { id, name: data.name(), data },
            // A database that does not answer ends no stream.
            Err(Error::Db(error)) => {
                tracing::debug!(%error, "failed to read the blocks of instances");
                SseEvent::Alive
            }
            Err(_) => return None,
        };
        Some((event, (app, caller, requested, None, id + 1)))
    });
    Ok(events.boxed())
}

async fn sample(app: &App, caller: &Caller, requested: &BlockStreamRequest) -> Result<BlockEvent> {
    let fleets: Vec<String> =
        requested.fleets.iter().flat_map(|fleets| fleets.split(',')).map(str::to_owned).collect();
    let mut cursor = None;
    let mut found = Vec::new();
    loop {
        let query =
            RowsRequest { fleets: fleets.clone(), cursor, limit: Some(PAGE), ..RowsRequest::default() };
        let page = rows::instances(app, caller, query).await?;
        found.extend(page.rows);
        cursor = page.next;
        if cursor.is_none() {
            break;
        }
    }
    let ids: Vec<InstanceId> = found.iter().map(|row| InstanceId(row.id)).collect();
    let mut jobs = jobs_by_instance(app, &ids).await?;
    let instances = found.into_iter().map(|row| {
        let held = jobs.remove(&InstanceId(row.id)).unwrap_or_default();
        InstanceBlocks { id: row.id, blocks: blocks(&row, &held) }
    });
    Ok(BlockEvent::Sample { at: app.db().now().await?, instances: instances.collect() })
}

async fn jobs_by_instance(app: &App, ids: &[InstanceId]) -> Result<HashMap<InstanceId, Vec<JobOnInstance>>> {
    let mut jobs = HashMap::<InstanceId, Vec<JobOnInstance>>::new();
    for job in series::present_jobs(app.db(), ids).await? {
        jobs.entry(job.instance_id).or_default().push(job);
    }
    Ok(jobs)
}

/// Blocks of an instance: those of its jobs, and free ones. Jobs that the row does not name belong to projects that the
/// caller may not see.
fn blocks(row: &InstanceRow, held: &[JobOnInstance]) -> Vec<Block> {
    let total = row.blocks_total.clamp(1, BLOCKS_MAX);
    let mut blocks = Vec::new();
    for job in held {
        let is_named = row.jobs.iter().any(|named| named.run == job.run && named.project == job.project);
        let taken = Block {
            state: "taken".to_owned(),
            job: Some(BlockJob {
                project: is_named.then(|| job.project.clone()),
                run: is_named.then(|| job.run.clone()),
                rank: job.job_num,
            }),
            used: used_of(job, share_of_cpus(row, job)),
        };
        let count = usize::try_from(job.blocks.clamp(0, BLOCKS_MAX)).unwrap_or(0);
        blocks.extend(std::iter::repeat_n(taken, count));
    }
    let total = usize::try_from(total).unwrap_or(1);
    blocks.truncate(total);
    blocks.resize(total, Block { state: "free".to_owned(), job: None, used: None });
    blocks
}

#[expect(clippy::cast_precision_loss, reason = "shares of an instance")]
fn share_of_cpus(row: &InstanceRow, job: &JobOnInstance) -> f64 {
    row.cpus as f64 * job.blocks as f64 / row.blocks_total.max(1) as f64
}

/// Use of the GPUs of a job, or of its processors if it has no GPU, from 0 to 1.
fn used_of(job: &JobOnInstance, cpus: f64) -> Option<f64> {
    let devices = job.gpus.as_ref()?;
    if !devices.is_empty() {
        return Some(mean_use(devices));
    }
    let cores = cores(job)?;
    (cpus > 0.0).then(|| (cores / cpus).clamp(0.0, 1.0))
}

#[expect(clippy::cast_precision_loss, reason = "a few devices")]
fn mean_use(devices: &[(i64, i64)]) -> f64 {
    let sum: i64 = devices.iter().map(|(_, percent)| percent).sum();
    sum as f64 / 100.0 / devices.len() as f64
}

fn cores(job: &JobOnInstance) -> Option<f64> {
    Some(cpu_cores((job.host_at?, job.cpu_us?), (job.host_at_before?, job.cpu_us_before?)))
}

/// Adds the present use to rows of instances.
pub(crate) async fn add_use(app: &App, rows: &mut [InstanceRow]) -> Result<()> {
    let ids: Vec<InstanceId> = rows.iter().map(|row| InstanceId(row.id)).collect();
    let mut jobs = jobs_by_instance(app, &ids).await?;
    for row in rows {
        let held = jobs.remove(&InstanceId(row.id)).unwrap_or_default();
        row.used = used_by(row, &held);
    }
    Ok(())
}

/// Use of an instance by its jobs; unknown where none of them was sampled.
#[expect(clippy::cast_precision_loss, reason = "shares of an instance")]
fn used_by(row: &InstanceRow, held: &[JobOnInstance]) -> InstanceUse {
    let sum = |values: Vec<f64>| (!values.is_empty()).then(|| values.into_iter().sum::<f64>());
    let share =
        |used: Option<f64>, of: f64| used.filter(|_| of > 0.0).map(|used| (used / of).clamp(0.0, 1.0));
    let memory = held.iter().filter_map(|job| job.working_set_bytes).map(|bytes| bytes as f64).collect();
    let devices: Vec<(i64, i64)> =
        held.iter().filter_map(|job| job.gpus.as_deref()).flatten().copied().collect();
    let busy = (!devices.is_empty()).then(|| mean_use(&devices) * devices.len() as f64);
    InstanceUse {
        cpu: share(sum(held.iter().filter_map(cores).collect()), row.cpus as f64),
        memory: share(sum(memory), row.memory_mib as f64 * 1_048_576.0),
        gpu: share(busy, row.gpus as f64),
    }
}

#[cfg(test)]
mod tests {
    use uuid::Uuid;
    use windlass_model::{id::ProjectId, time::Timestamp};

    use super::*;

    fn row(blocks: i64) -> InstanceRow {
        serde_json::from_value(serde_json::json!({
            "id": Uuid::nil(), "project": "main", "name": "gpu-0", "instance_num": 0, "backend": "remote",
            "status": "busy", "health": "healthy", "draining": false, "resources": "", "gpus": 4, "cpus": 8,
            "memory_mib": 1024, "blocks_total": blocks, "blocks_busy": 1, "price": 0.0, "created_at": "2026-01-01T00:00:00Z",
            "jobs": [{ "run": "train", "project": "main", "run_id": Uuid::nil(), "job": "train-0-0", "blocks": 1 }],
            "used": { "cpu": null, "memory": null, "gpu": null },
        }))
        .unwrap()
    }

    fn job(run: &str, gpus: &[(i64, i64)]) -> JobOnInstance {
        JobOnInstance {
            instance_id: InstanceId(Uuid::nil()),
            project_id: ProjectId(Uuid::nil()),
            project: "main".into(),
            run: run.into(),
            job_num: 0,
            blocks: 1,
            host_at: Some(Timestamp(20_000_000)),
            cpu_us: Some(10_000_000),
            working_set_bytes: Some(512 << 20),
            gpus: Some(gpus.into()),
            host_at_before: Some(Timestamp(10_000_000)),
            cpu_us_before: Some(0),
        }
    }

    #[test]
    fn each_block_shows_its_job_and_use_and_foreign_jobs_have_no_name() {
        let shown = blocks(&row(4), &[job("train", &[(1, 50), (1, 100)]), job("secret", &[])]);
        let states: Vec<&str> = shown.iter().map(|block| block.state.as_str()).collect();
        assert_eq!(states, ["taken", "taken", "free", "free"]);
        assert_eq!(shown[0].used, Some(0.75));
        assert_eq!(shown[0].job.as_ref().unwrap().run.as_deref(), Some("train"));
        assert_eq!(shown[1].job.as_ref().unwrap().run, None);
        assert_eq!(shown[1].used, Some(0.5), "one core of the two that belong to the block");
    }

    #[test]
    fn the_use_of_an_instance_is_that_of_its_jobs() {
        let used = used_by(&row(4), &[job("a", &[(1, 100)]), job("b", &[(1, 100)])]);
        assert_eq!((used.cpu, used.memory, used.gpu), (Some(0.25), Some(1.0), Some(0.5)));
        assert_eq!(used_by(&row(4), &[]), InstanceUse::default());
    }
}
