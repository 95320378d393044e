//! Pipeline `jobs_submitted`: the whole queue at once, onto the whole inventory.
//!
//! Claims   jobs in Submitted.
//! Owns     jobs.instance_id, jobs.instance_assigned, jobs.blocks, jobs.fleet_id, jobs.provisioned_at,
//!          jobs.shortfalls, runs.fleet_id.
//! Wakes    on hint (a job was submitted, blocks were freed), else every 4 s.
//! Shares   instances.busy_blocks with `jobs_terminating`: both add, neither sets.
//! Why not  lock the instances? A seat is taken by one conditional update (`busy + n <= total`): two
//!          replicas that place at once cannot take the same blocks, and nobody waits for a lock.

use std::{collections::BTreeMap, sync::Arc};

use uuid::Uuid;
use windlass_engine::{Applied, BatchPipeline, Lease, Queue};
use windlass_model::{
    decide::jobs_submitted::{self as brain, Plan, Seen, Stage},
    event,
    id::{ProjectId, RunId},
    job,
    plan::place::{FleetChoice, Node, Placement, Waiting, place},
    time::{Span, Timestamp},
};

use super::{Hands, applied, because, due_in};
use crate::{
    db::{
        Val, Written,
        jobs::Job,
        passes::{
            jobs::{self as rows, Moved},
            placing::{self, Seated},
        },
        runs::Run,
    },
    inventory,
    job_facts::JobFacts,
    pass_error::PassError,
    run_shape::RunShape,
};

pub(super) struct JobsSubmitted(pub(super) Hands);

pub(crate) const QUEUE: Queue = Queue { pipeline: "jobs_submitted", table: "jobs", statuses: &["submitted"] };

/// The nodes of one replica, the leases that hold them, and who is asked first.
struct Replica {
    run: RunId,
    num: i64,
    project: ProjectId,
    nodes: Vec<Job>,
    leases: BTreeMap<Uuid, Lease>,
}

impl Replica {
    fn lease(&self, job: &Job) -> Option<&Lease> {
        self.leases.get(&job.id.0)
    }
}

type Outcomes = Vec<(Uuid, Applied)>;

impl BatchPipeline for JobsSubmitted {
    type Error = PassError;

    fn queue(&self) -> Queue {
        QUEUE
    }

    async fn process(&self, leases: Vec<Lease>) -> Result<Outcomes, PassError> {
        let mut outcomes: BTreeMap<Uuid, Applied> =
            leases.iter().map(|lease| (lease.id, Applied::LeaseLost)).collect();
        let (jobs, runs) = placing::leased(&self.0.db, &leases).await?;
        let leases: BTreeMap<Uuid, Lease> = leases.into_iter().map(|lease| (lease.id, lease)).collect();
        let mut waiting = Vec::new();
        for job in jobs {
            let Some(lease) = leases.get(&job.id.0) else { continue };
            if let Some(ending) = job.end_asked() {
                outcomes.insert(job.id.0, self.end(lease, &job, &ending, job::Event::StopAsked).await?);
            } else {
                waiting.push(job);
            }
        }
        for replica in self.gather(waiting, leases, &mut outcomes).await? {
            self.place(replica, &runs, &mut outcomes).await?;
        }
        Ok(outcomes.into_iter().collect())
    }
}

impl JobsSubmitted {
    /// Puts the nodes of each replica together. A claim that brought only some of them (another replica took
    /// the rest) puts them back: all nodes become due at the same moment, and one claim takes what is due.
    async fn gather(
        &self,
        jobs: Vec<Job>,
        mut leases: BTreeMap<Uuid, Lease>,
        outcomes: &mut BTreeMap<Uuid, Applied>,
    ) -> Result<Vec<Vec<Replica>>, PassError> {
        let mut by_replica: BTreeMap<(RunId, i64), Vec<Job>> = BTreeMap::new();
        for job in jobs {
            by_replica.entry((job.run_id, job.replica_num)).or_default().push(job);
        }
        let mut by_project: BTreeMap<ProjectId, Vec<Replica>> = BTreeMap::new();
        for ((run, num), mut nodes) in by_replica {
            nodes.sort_by_key(|job| job.job_num);
            let held: BTreeMap<Uuid, Lease> =
                nodes.iter().filter_map(|n| leases.remove(&n.id.0)).map(|l| (l.id, l)).collect();
            let replica = Replica { run, num, project: nodes[0].project_id, nodes, leases: held };
            if replica.nodes.len() < JobFacts::of(&replica.nodes[0])?.jobs_per_replica as usize {
                for node in &replica.nodes {
                    let Some(lease) = replica.lease(node) else { continue };
                    let due = Timestamp(lease.now());
                    outcomes.insert(node.id.0, self.wait(lease, node, Vec::new(), together(due)).await?);
                }
                continue;
            }
            by_project.entry(replica.project).or_default().push(replica);
        }
        Ok(by_project.into_values().collect())
    }

    async fn place(
        &self,
        replicas: Vec<Replica>,
        runs: &BTreeMap<RunId, Run>,
        outcomes: &mut BTreeMap<Uuid, Applied>,
    ) -> Result<(), PassError> {
        let Some(first) = replicas.first() else { return Ok(()) };
        let now = first.leases.values().map(Lease::now).max().unwrap_or_default();
        let stock = placing::stock(&self.0.db, first.project).await?;
        let inventory = inventory::of(&stock)?;
        let mut queue = Vec::with_capacity(replicas.len());
        for replica in &replicas {
            if let Some(run) = runs.get(&replica.run) {
                queue.push(waiting(replica, run, &*self.0.shapes.of(run)?, &stock)?);
            }
        }
        let placements = place(&queue, &inventory, Timestamp(now));
        for placement in &placements {
            let replica =
                replicas.iter().find(|r| r.run == placement.run && i64::from(placement.replica_num) == r.num);
            let Some(replica) = replica else { continue };
            let chooses = runs.get(&replica.run).is_some_and(|run| run.fleet_id.is_none());
            for (id, applied) in self.write(replica, placement, chooses, Timestamp(now)).await? {
                outcomes.insert(id, applied);
            }
        }
        Ok(())
    }

    /// What placement says of a replica becomes one unit (a seat for all nodes), or one per node.
    async fn write(
        &self,
        replica: &Replica,
        placement: &Placement,
        chooses: bool,
        now: Timestamp,
    ) -> Result<Outcomes, PassError> {
        let mut seated = Vec::new();
        let mut outcomes = Vec::new();
        let plans: Vec<_> = replica
            .nodes
            .iter()
            .enumerate()
            .map(|(n, job)| (job, brain::decide(&view(job), Seen::of(&placement.outcome, n), now)))
            .collect();
        let mut fleet_of = None;
        for (job, plan) in &plans {
            let Some(lease) = replica.lease(job) else { continue };
            match plan {
                Plan::Provision { assign: Some((fleet, seat)), change, .. } => {
                    let why = because(event::Pipeline::JobSubmitted, lease, change.reason, &change.message);
                    let moved = event::transition::<job::Job>(job.id, job.status, change.event, why)?;
                    let Some(event) = moved.record else { continue };
                    fleet_of = Some(*fleet);
                    seated.push(Seated { held: lease.held(), job, seat, event });
                }
                Plan::End { ending, change } => {
                    outcomes.push((job.id.0, self.end(lease, job, ending, change.event).await?));
                }
                Plan::Wait { why, message, due, .. } => {
                    let set =
                        vec![("shortfalls", Val::json(&**why)?), ("status_message", message.as_str().into())];
                    let due = if plans.len() > 1 { together(*due) } else { *due };
                    outcomes.push((job.id.0, self.wait(lease, job, set, due).await?));
                }
                // Volumes and new instances arrive with the backends.
                Plan::Provision { assign: None, due, .. }
                | Plan::Assign { due, .. }
                | Plan::Attach { due }
                | Plan::Create { due, .. }
                | Plan::Again { due } => {
                    let due = (*due).max(now + Span::secs(1));
                    outcomes.push((job.id.0, self.wait(lease, job, Vec::new(), due).await?));
                }
            }
        }
        if let Some(fleet) = fleet_of {
            let written = placing::seat(&self.0.db, fleet, chooses, &seated).await?;
            let wake = vec![super::runs::QUEUE.pipeline, super::jobs_running::QUEUE.pipeline];
            let each = match written {
                Written::Done { .. } => Applied::Written { due_in_us: None, wake },
                Written::Stale { at: None } => Applied::LeaseLost,
                // Somebody else took the blocks, or one of the nodes: look again.
                Written::Stale { at: Some(_) } => Applied::RelatedBusy,
            };
            outcomes.extend(seated.iter().map(|one| (one.job.id.0, each.clone())));
        }
        Ok(outcomes)
    }

    async fn wait(
        &self,
        lease: &Lease,
        job: &Job,
        set: Vec<(&'static str, Val)>,
        due: Timestamp,
    ) -> Result<Applied, PassError> {
        let due_in_us = Some(due_in(lease, due));
        let moved = Moved { set, event: None, due_in_us };
        let written = rows::apply(&self.0.db, lease.held(), job, moved).await?;
        Ok(applied(&written, due_in_us, vec![]))
    }

    async fn end(
        &self,
        lease: &Lease,
        job: &Job,
        ending: &job::Ending,
        event: job::Event,
    ) -> Result<Applied, PassError> {
        let message = ending.said().unwrap_or("the run asked for its end");
        let why = because(event::Pipeline::JobSubmitted, lease, ending.reason().as_str(), message);
        let moved = event::transition::<job::Job>(job.id, job.status, event, why)?;
        let moved = Moved { set: rows::ending(ending), event: moved.record, due_in_us: None };
        let written = rows::apply(&self.0.db, lease.held(), job, moved).await?;
        Ok(applied(
            &written,
            None,
            vec![super::runs::QUEUE.pipeline, super::jobs_terminating::QUEUE.pipeline],
        ))
    }
}

/// The next whole second: a moment that all nodes of a replica agree on without knowing of each other.
fn together(after: Timestamp) -> Timestamp {
    Timestamp::from_secs(after.0.div_euclid(1_000_000) + 1)
}

fn view(job: &Job) -> brain::Job {
    brain::Job { submitted_at: job.submitted_at, stage: Stage::Unassigned, has_volumes: false }
}

fn waiting(
    replica: &Replica,
    run: &Run,
    shape: &RunShape,
    stock: &placing::Stock,
) -> Result<Waiting, PassError> {
    let first = &replica.nodes[0];
    let choice = match run.fleet_id {
        Some(fleet) => FleetChoice::Chosen(fleet),
        None if first.job_num == 0 && first.replica_num == 0 => FleetChoice::Choose,
        None => FleetChoice::Follow,
    };
    let mut nodes = Vec::with_capacity(replica.nodes.len());
    for job in &replica.nodes {
        nodes.push(Node { job: job.id, needs: Arc::new(shape.needs(job)?) });
    }
    let fleets = shape.fleet_names().map(|names| {
        let named = stock.fleets.iter().filter(|f| names.contains(&f.name));
        named.map(|f| f.id).collect()
    });
    Ok(Waiting {
        project: replica.project,
        run: replica.run,
        replica_num: u32::try_from(replica.num).unwrap_or_default(),
        priority: u32::try_from(run.priority).unwrap_or_default(),
        since: replica.nodes.iter().map(|j| j.submitted_at).min().unwrap_or_default(),
        nodes,
        choice,
        fleets,
        creation: shape.creation(),
        lasts: JobFacts::of(first)?.max_duration.map(Span::secs),
    })
}
