//! Pipeline `jobs_submitted`: places the whole queue onto the whole inventory.
//!
//! Claims   jobs in Submitted.
//! Owns     jobs.instance_id, jobs.instance_assigned, jobs.blocks, jobs.fleet_id, jobs.provisioned_at,
//!          jobs.shortfalls, jobs.wait_class, jobs.parked, jobs.promised, jobs.promised_until, jobs.preempted_at,
//!          jobs.preempted_for, jobs.preemption, instances.promise_num, runs.fleet_id.
//! Wakes    on hint (a job was submitted, blocks were freed, an instance was granted), else every 4 s. Of jobs that
//!          placement cannot tell apart only the first is due; it wakes the next one when it leaves the queue.
//! Shares   instances.busy_blocks with `jobs_terminating`: both add, neither sets.
//! Why not  lock the instances? Blocks are claimed by one conditional update (`busy + n <= total`): two
//!          replicas that place at once cannot claim the same blocks, and neither waits for a lock.
//! Why not  create instances here? A backend may take minutes, and the queue would wait with it. A row is
//!          added with the offers to try; `instances` tries them, and the job reads the result.

mod free_rounds;
mod placeholders;
mod preemption;
mod stored;
mod wait_classes;

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use futures_util::future::try_join_all;
use uuid::Uuid;
use windlass_engine::{ApplyOutcome, BatchPipeline, Lease, Queue};
use windlass_model::{
    config::job_spec::JobSpec,
    decide::jobs_submitted::{self as brain, AssignmentStage, Plan, SubmittedJobObservation},
    event,
    id::{FleetId, InstanceId, ProjectId, RunId, SubmissionId},
    job,
    plan::{
        place::{
            Inventory, NodePlacement, PlacementOutcome, RESERVE_AFTER, RefusalReport, ReplicaPlacement,
            WaitingReplica, place_replicas,
        },
        preemption::next_wait_end,
        quota::HeldResources,
    },
    time::{Span, Timestamp},
};
use windlass_planted_bugs::{Bug, is_planted};

pub(super) use self::free_rounds::RecentWaits;
use self::{
    stored::{fail, read_specs},
    wait_classes::QueuedReplica,
};
use super::{PipelineContext, apply_outcome, due_in, pipeline_cause};
use crate::{
    attachments::mounts::{self, VolumeCatalog},
    db::{
        Change, Val, WriteOutcome,
        fleets::Fleet,
        jobs::Job,
        pipeline_rows::{
            jobs::{self as rows, JobUpdate},
            placement::{self, NodeAssignment, SeatTarget, TargetFleet},
            wait_classes::{self as class_rows, WokenDue},
        },
        runs::Run,
    },
    hints::Hint,
    inventory,
    offer_cache::OfferCache,
    pass_error::PassError,
    plain_processes::ProcessRights,
};

pub(super) struct JobsSubmittedPipeline {
    pub(super) context: PipelineContext,
    pub(super) market: OfferCache,
    pub(super) recent_waits: RecentWaits,
}

pub(crate) const QUEUE: Queue =
    Queue { pipeline: Hint::JobsSubmitted.as_str(), table: "jobs", statuses: &["submitted"] };

/// The nodes of one replica, and the leases on them.
struct LeasedReplica {
    run: RunId,
    num: i64,
    project: ProjectId,
    nodes: Vec<Job>,
    /// Specifications of the nodes, in the same order.
    specs: Vec<JobSpec>,
    leases: BTreeMap<Uuid, Lease>,
}

impl LeasedReplica {
    fn lease(&self, job: &Job) -> Option<&Lease> {
        self.leases.get(&job.id.0)
    }
}

type Outcomes = Vec<(Uuid, ApplyOutcome)>;

impl BatchPipeline for JobsSubmittedPipeline {
    type Error = PassError;

    fn queue(&self) -> Queue {
        QUEUE
    }

    async fn process(&self, leases: Vec<Lease>) -> Result<Outcomes, PassError> {
        let mut outcomes: BTreeMap<Uuid, ApplyOutcome> =
            leases.iter().map(|lease| (lease.id, ApplyOutcome::LeaseLost)).collect();
        let (jobs, runs) = placement::leased_jobs(&self.context.db, &leases).await?;
        let leases: BTreeMap<Uuid, Lease> = leases.into_iter().map(|lease| (lease.id, lease)).collect();
        let mut waiting = Vec::new();
        let places = placement::assigned_instances(&self.context.db, &jobs).await?;
        for job in jobs {
            let Some(lease) = leases.get(&job.id.0) else { continue };
            let requested_end = match job.requested_end() {
                Ok(requested) => requested,
                Err(error) => {
                    fail(&error, &mut outcomes, [job.id.0]);
                    continue;
                }
            };
            if let Some(ending) = requested_end {
                let end = JobEnding::new(&ending, job::Event::StopRequested);
                outcomes.insert(job.id.0, self.end(lease, &job, end).await?);
            } else if let Some(instance) = job.instance_id {
                outcomes.insert(job.id.0, self.check_placeholder(lease, &job, places.get(&instance)).await?);
            } else {
                waiting.push(job);
            }
        }
        let replicas = self.group_replicas(waiting, leases, &mut outcomes).await?;
        self.place(replicas, &runs, &mut outcomes).await?;
        Ok(outcomes.into_iter().collect())
    }
}

impl JobsSubmittedPipeline {
    /// Groups nodes by replica. If a claim returned only some nodes of a replica (another server claimed the rest),
    /// they are released: all nodes become due at the same moment, and one claim returns everything that is due.
    async fn group_replicas(
        &self,
        jobs: Vec<Job>,
        mut leases: BTreeMap<Uuid, Lease>,
        outcomes: &mut BTreeMap<Uuid, ApplyOutcome>,
    ) -> Result<Vec<LeasedReplica>, PassError> {
        let mut by_replica: BTreeMap<(RunId, i64), Vec<Job>> = BTreeMap::new();
        for job in jobs {
            by_replica.entry((job.run_id, job.replica_num)).or_default().push(job);
        }
        let mut replicas = Vec::new();
        for ((run, num), mut nodes) in by_replica {
            nodes.sort_by_key(|job| job.job_num);
            let held: BTreeMap<Uuid, Lease> =
                nodes.iter().filter_map(|n| leases.remove(&n.id.0)).map(|l| (l.id, l)).collect();
            let specs = match read_specs(&nodes) {
                Ok(specs) => specs,
                Err(error) => {
                    fail(&error, outcomes, nodes.iter().map(|node| node.id.0));
                    continue;
                }
            };
            let replica =
                LeasedReplica { run, num, project: nodes[0].project_id, nodes, specs, leases: held };
            if replica.nodes.len() < replica.specs[0].jobs_per_replica as usize {
                for node in &replica.nodes {
                    let Some(lease) = replica.lease(node) else { continue };
                    let due = Timestamp(lease.now());
                    let due = next_whole_second(due);
                    outcomes.insert(node.id.0, self.wait(lease, node, JobUpdate::default(), due).await?);
                }
                continue;
            }
            replicas.push(replica);
        }
        Ok(replicas)
    }

    /// Places replicas of all projects together, because they may share fleets.
    async fn place(
        &self,
        replicas: Vec<LeasedReplica>,
        runs: &BTreeMap<RunId, Run>,
        outcomes: &mut BTreeMap<Uuid, ApplyOutcome>,
    ) -> Result<(), PassError> {
        let Some(first) = replicas.first() else { return Ok(()) };
        let now = Timestamp(first.leases.values().map(Lease::now).max().unwrap_or_default());
        let volumes = self.volumes(&replicas).await?;
        let full = self.full(&replicas).await?;
        let mut queue = Vec::with_capacity(replicas.len());
        for replica in &replicas {
            let Some(run) = runs.get(&replica.run) else { continue };
            let full = full.get(&(replica.run, replica.num)).map(Vec::as_slice).unwrap_or_default();
            match self.queued(replica, run, &volumes, full) {
                Ok(queued) => queue.push(queued),
                Err(error) => fail(&error, outcomes, replica.nodes.iter().map(|node| node.id.0)),
            }
        }
        // Before the inventory is read: most new jobs of a full house wait behind others.
        let mut queue = self.park_followers(queue, outcomes).await?;
        if queue.is_empty() {
            return Ok(());
        }
        let projects: BTreeSet<ProjectId> = queue.iter().map(|one| one.replica.project).collect();
        let mut projects: Vec<ProjectId> = projects.into_iter().collect();
        let (others, other_runs) = self.other_reserving(&projects, &queue, now).await?;
        let mut others = self.queue_others(&others, &other_runs).await?;
        let allowed = ProcessRights::now(&self.context.db, self.context.local_processes).await?;
        let has_others = !others.is_empty();
        if let Some(placed) = self.place_on_free(&projects, &mut queue, has_others, allowed, now).await? {
            outcomes.extend(placed);
            return Ok(());
        }
        let known: BTreeSet<ProjectId> = projects.iter().copied().collect();
        let more: BTreeSet<ProjectId> = others.iter().map(|one| one.waiting.project).collect();
        projects.extend(more.difference(&known));
        let mut stock = placement::load_inventory(&self.context.db, &projects, now).await?;
        self.load_running(&mut stock, now).await?;
        let inventory = inventory::build_inventory(&stock, &self.market.seen().await.offers, allowed)?;
        queue.iter_mut().chain(&mut others).for_each(|one| one.select_fleets(&stock));
        let others: Vec<WaitingReplica> = others.into_iter().map(|one| one.waiting).collect();
        let views: Vec<_> = queue.iter().map(|one| one.waiting.clone()).chain(others.clone()).collect();
        let mut placements = place_replicas(&views, &inventory, now);
        let counts = self.wake_counts((&queue, &others), &inventory, now, &mut placements).await?;
        self.wake_placed(&others, &placements).await?;
        self.record_waits(&queue, &placements, &inventory, now);
        let site = PlacementContext { stock: &stock, inventory: &inventory, now, scope: RoundScope::Whole };
        outcomes.extend(self.write_all(&queue, &placements, counts, &site).await?);
        Ok(())
    }

    /// Replicas that this round does not place, and that may reserve instances: without them, each job that arrives would
    /// use the blocks that become free for one which needs more.
    async fn other_reserving(
        &self,
        projects: &[ProjectId],
        queue: &[QueuedReplica<'_>],
        now: Timestamp,
    ) -> Result<(Vec<LeasedReplica>, BTreeMap<RunId, Run>), PassError> {
        if is_planted(Bug::ReservationsForgotten) {
            return Ok((Vec::new(), BTreeMap::new()));
        }
        let (jobs, runs) = placement::long_waiting(&self.context.db, projects, now - RESERVE_AFTER).await?;
        let batch: BTreeSet<(RunId, i64)> =
            queue.iter().map(|one| (one.replica.run, one.replica.num)).collect();
        let mut by_replica: BTreeMap<(RunId, i64), Vec<Job>> = BTreeMap::new();
        for job in jobs.into_iter().filter(|job| !batch.contains(&(job.run_id, job.replica_num))) {
            by_replica.entry((job.run_id, job.replica_num)).or_default().push(job);
        }
        let mut replicas = Vec::new();
        for ((run, num), mut nodes) in by_replica {
            nodes.sort_by_key(|job| job.job_num);
            let specs = match read_specs(&nodes) {
                Ok(specs) => specs,
                // Its own pass fails, and records the reason.
                Err(_) => continue,
            };
            let is_complete = nodes.len() >= specs[0].jobs_per_replica as usize;
            let is_ending = |node: &Job| !matches!(node.requested_end(), Ok(None));
            if is_complete && !nodes.iter().any(is_ending) {
                let (project, leases) = (nodes[0].project_id, BTreeMap::new());
                replicas.push(LeasedReplica { run, num, project, nodes, specs, leases });
            }
        }
        Ok((replicas, runs))
    }

    async fn queue_others<'a>(
        &self,
        replicas: &'a [LeasedReplica],
        runs: &'a BTreeMap<RunId, Run>,
    ) -> Result<Vec<QueuedReplica<'a>>, PassError> {
        let volumes = self.volumes(replicas).await?;
        let mut queue = Vec::with_capacity(replicas.len());
        for replica in replicas {
            let Some(run) = runs.get(&replica.run) else { continue };
            // One that cannot be read is reported by its own pass.
            queue.extend(self.queued(replica, run, &volumes, &[]).ok());
        }
        Ok(queue)
    }

    /// Makes those due that could be placed now.
    async fn wake_placed(
        &self,
        others: &[WaitingReplica],
        placements: &[ReplicaPlacement],
    ) -> Result<(), PassError> {
        let ids: BTreeSet<SubmissionId> = others.iter().filter_map(WaitingReplica::first_job).collect();
        let placed = placements.iter().filter(|one| matches!(one.outcome, PlacementOutcome::Placed { .. }));
        let placed = placed.filter(|one| one.jobs.first().is_some_and(|job| ids.contains(job)));
        let jobs: Vec<SubmissionId> = placed.flat_map(|one| one.jobs.iter().copied()).collect();
        if !jobs.is_empty() {
            placement::mark_due(&self.context.db, &jobs).await?;
        }
        Ok(())
    }

    /// Writes all placements concurrently, so that the database commits them together.
    async fn write_all(
        &self,
        queue: &[QueuedReplica<'_>],
        placements: &[ReplicaPlacement],
        mut counts: BTreeMap<String, i64>,
        site: &PlacementContext<'_>,
    ) -> Result<Outcomes, PassError> {
        let by_job: BTreeMap<SubmissionId, &QueuedReplica<'_>> =
            queue.iter().filter_map(|one| Some((one.waiting.first_job()?, one))).collect();
        let mut passes: Vec<ReplicaPass<'_>> = Vec::with_capacity(placements.len());
        // The first of a class that waits is evaluated for the others, which are in the order of the queue.
        let mut heads: BTreeMap<&str, usize> = BTreeMap::new();
        for placement in placements {
            let Some(queued) = placement.jobs.first().and_then(|job| by_job.get(job)) else { continue };
            // One for which others are preempted waits for them by itself.
            let class = queued.class.as_deref().filter(|_| placement.preemption.is_none());
            if let (PlacementOutcome::Waits { .. }, Some(class)) = (&placement.outcome, class) {
                if let Some(head) = heads.get(class) {
                    passes[*head].followers.push(queued);
                    continue;
                }
                heads.insert(class, passes.len());
            }
            let is_placed = matches!(placement.outcome, PlacementOutcome::Placed { .. });
            let wakes = class.filter(|_| is_placed).and_then(|class| counts.remove(class));
            passes.push(ReplicaPass { queued, placement, wakes, followers: Vec::new() });
        }
        let written = passes.iter().map(|pass| async move {
            let mut outcomes = self.write(pass, site).await?;
            if let Some(class) = &pass.queued.class {
                outcomes.extend(self.park(class, &pass.followers).await?);
            }
            Ok::<_, PassError>(outcomes)
        });
        Ok(try_join_all(written).await?.concat())
    }

    /// Loads the volumes that the nodes of these replicas name, by project.
    async fn volumes(
        &self,
        replicas: &[LeasedReplica],
    ) -> Result<BTreeMap<ProjectId, VolumeCatalog>, PassError> {
        let mut wanted: BTreeMap<ProjectId, Vec<_>> = BTreeMap::new();
        for replica in replicas {
            let mounts = replica.specs.iter().flat_map(mounts::for_spec);
            wanted.entry(replica.project).or_default().extend(mounts);
        }
        let mut volumes = BTreeMap::new();
        for (project, wanted) in wanted {
            volumes.insert(project, VolumeCatalog::of(&self.context.db, project, &wanted).await?);
        }
        Ok(volumes)
    }

    /// Writes the placement of a replica as one unit for all nodes, or as one unit per node that waits.
    async fn write(
        &self,
        pass: &ReplicaPass<'_>,
        site: &PlacementContext<'_>,
    ) -> Result<Outcomes, PassError> {
        let ReplicaPass { queued, placement, .. } = pass;
        let (replica, class) = (queued.replica, queued.class.as_deref());
        let mut seated = Vec::new();
        let mut outcomes = Vec::new();
        let name = |instance| site.instance_name(instance);
        let observed = |n| SubmittedJobObservation::from_outcome(&placement.outcome, n, name);
        let decided = |(n, job)| (job, brain::decide(&unassigned_view(job), observed(n), site.now));
        let plans: Vec<_> = replica.nodes.iter().enumerate().map(decided).collect();
        let mut fleet_of = None;
        for (job, plan) in &plans {
            let Some(lease) = replica.lease(job) else { continue };
            match plan {
                Plan::Provision { assign: Some((fleet, seat)), change, .. } => {
                    let why =
                        pipeline_cause(event::Pipeline::JobSubmitted, lease, change.reason, &change.message);
                    let moved =
                        event::transition::<job::JobLifecycle>(job.id, job.status, change.event, why)?;
                    let Some(event) = moved.record else { continue };
                    fleet_of = Some(*fleet);
                    let (resources, seat_of) = (site.held_by(seat), seat);
                    let seat = SeatTarget::There { seat, event };
                    let promise_num = site.promise_num(seat_of);
                    let held = lease.key();
                    seated.push(NodeAssignment { held, job, seat, resources, promise_num, now: site.now });
                }
                Plan::Assign { fleet, seat, message, .. } => {
                    fleet_of = Some(*fleet);
                    let resources = site.held_by(seat);
                    let seat = self.new_placeholder(lease, job, queued.run, (*fleet, seat), message, site)?;
                    seated.extend(seat.map(|seat| NodeAssignment {
                        held: lease.key(),
                        job,
                        seat,
                        resources,
                        promise_num: 0,
                        now: site.now,
                    }));
                }
                Plan::End { ending, change } => {
                    let why = rejection_reason(&placement.outcome).map(serde_json::to_string);
                    let shortfalls = why.transpose().map_err(PassError::document)?;
                    // The same holds for all of its class.
                    let wakes = if job.wait_class.as_deref() == class { END_WAKES } else { 1 };
                    let end = JobEnding { ending, event: change.event, shortfalls, wakes };
                    outcomes.push((job.id.0, self.end(lease, job, end).await?));
                }
                Plan::Wait { why, message, due, .. } => {
                    let due = match next_wait_end(&queued.waiting, &site.inventory.fleets, site.now) {
                        Some(wait_end) => wait_end.min(*due),
                        None => *due,
                    };
                    let due = if plans.len() > 1 { next_whole_second(due) } else { due };
                    let why = serde_json::to_string(&**why).map_err(PassError::document)?;
                    let is_first = replica.nodes.first().is_some_and(|first| first.id == job.id);
                    if let Some(preemption) = placement.preemption.as_ref().filter(|_| is_first) {
                        let wait = (why, due);
                        outcomes.push((
                            job.id.0,
                            self.preempt(lease, job, queued, preemption, wait, site).await?,
                        ));
                        continue;
                    }
                    let reason = match site.scope {
                        RoundScope::Whole => (Some(why), Some(message.clone())),
                        // It is not known completely, and the stored one is not old.
                        RoundScope::Free => (job.shortfalls.clone(), job.status_message.clone()),
                    };
                    outcomes.push((job.id.0, self.wait_in(lease, job, class, reason, due).await?));
                }
                Plan::Provision { assign: None, due, .. } | Plan::Attach { due } | Plan::Recheck { due } => {
                    let due = (*due).max(site.now + Span::secs(1));
                    outcomes.push((job.id.0, self.wait(lease, job, JobUpdate::default(), due).await?));
                }
            }
        }
        if let Some(fleet) = fleet_of {
            let ids: Vec<Uuid> = seated.iter().map(|one| one.job.id.0).collect();
            let each = self.seat(site, pass, fleet, seated).await?;
            outcomes.extend(ids.into_iter().map(|id| (id, each.clone())));
        }
        Ok(outcomes)
    }

    /// Leaves a job in the queue, with the reason, as the job that is evaluated for its class.
    async fn wait_in(
        &self,
        lease: &Lease,
        job: &Job,
        class: Option<&str>,
        (why, message): (Option<String>, Option<String>),
        due: Timestamp,
    ) -> Result<ApplyOutcome, PassError> {
        let is_stored = job.wait_class.as_deref() == class && !job.parked;
        let is_known = job.shortfalls == why && job.status_message == message;
        // In a long queue most jobs have no new message: they are released together, in one statement.
        if is_stored && is_known {
            let due_in = u64::try_from(due_in(lease, due)).unwrap_or_default();
            return Ok(ApplyOutcome::Unchanged { due_in: Some(Duration::from_micros(due_in)) });
        }
        let mut set = vec![("shortfalls", why.into()), ("status_message", message.into())];
        if !is_stored {
            set.extend([("wait_class", class.into()), ("parked", false.into())]);
        }
        let left = job.wait_class.as_deref().filter(|left| Some(*left) != class);
        let wakes = left.map(|left| class_rows::wake_if_headless(&self.context.db, left));
        let moved = JobUpdate { set, wakes: wakes.into_iter().collect(), ..JobUpdate::default() };
        self.wait(lease, job, moved, due).await
    }

    /// Places all nodes or none.
    async fn seat(
        &self,
        site: &PlacementContext<'_>,
        pass: &ReplicaPass<'_>,
        fleet: FleetId,
        seated: Vec<NodeAssignment<'_>>,
    ) -> Result<ApplyOutcome, PassError> {
        let makes = seated.iter().any(|one| matches!(one.seat, SeatTarget::New { .. }));
        let room = site.inventory.fleets.iter().find(|one| one.id == fleet);
        let into = TargetFleet {
            fleet,
            chooses: pass.queued.run.fleet_id.is_none(),
            nodes_max: room.and_then(|room| room.nodes_max),
            has_quotas: site.stock.limited.contains(&pass.queued.replica.project),
        };
        // A job that does not carry the wake-up of its class may still have been the only one that was evaluated.
        let count = |job: &Job| pass.wakes.filter(|_| job.wait_class == pass.queued.class);
        let nodes = pass.queued.replica.nodes.iter();
        let wakes = nodes.filter_map(|job| self.wake(job, count(job), site.woken_due(count(job)))).collect();
        let written = match placement::place_replica(&self.context.db, &into, seated, wakes).await {
            Ok(written) => written,
            // Another writer used the number of the new instance: repeat the pass.
            Err(error) if error.is_conflict_on("instances_num_key") => return Ok(ApplyOutcome::RelatedBusy),
            Err(error) => return Err(error.into()),
        };
        let mut wake = vec![Hint::RunsDueSoon.as_str(), super::jobs_running::QUEUE.pipeline];
        if makes {
            wake.push(super::instances::QUEUE.pipeline);
        }
        let woken = WokenJobs::of(&written);
        wake.extend(woken.pipeline());
        Ok(match written {
            WriteOutcome::Done { .. } => ApplyOutcome::Written { due_in_us: woken.due_in_us(), wake },
            WriteOutcome::Stale { at: None } => ApplyOutcome::LeaseLost,
            // Another writer claimed the blocks, the slot, or one of the nodes: repeat the pass.
            WriteOutcome::Stale { at: Some(_) } => ApplyOutcome::RelatedBusy,
        })
    }

    /// Statement that wakes jobs of the class that a job leaves: this many, or one if no other is evaluated.
    fn wake(&self, job: &Job, count: Option<i64>, due: WokenDue) -> Option<Change> {
        let class = job.wait_class.as_deref()?;
        Some(match count {
            Some(count) => class_rows::wake_next(&self.context.db, class, count, job, due),
            None => class_rows::wake_if_headless(&self.context.db, class),
        })
    }

    async fn wait(
        &self,
        lease: &Lease,
        job: &Job,
        moved: JobUpdate,
        due: Timestamp,
    ) -> Result<ApplyOutcome, PassError> {
        let due_in_us = Some(due_in(lease, due));
        let written =
            rows::apply(&self.context.db, lease.key(), job, JobUpdate { due_in_us, ..moved }).await?;
        Ok(apply_outcome(&written, due_in_us, WokenJobs::of(&written).pipeline().into_iter().collect()))
    }

    async fn end(&self, lease: &Lease, job: &Job, end: JobEnding<'_>) -> Result<ApplyOutcome, PassError> {
        let JobEnding { ending, event, shortfalls, wakes } = end;
        let message = ending.message().unwrap_or("the run requested its end");
        let why = pipeline_cause(event::Pipeline::JobSubmitted, lease, ending.reason().as_str(), message);
        let moved = event::transition::<job::JobLifecycle>(job.id, job.status, event, why)?;
        let mut set = rows::ending_columns(ending);
        set.extend(shortfalls.map(|why| ("shortfalls", why.into())));
        if job.wait_class.is_some() {
            set.extend([("wait_class", Val::Null), ("parked", false.into())]);
        }
        // A parked job may have been woken since it was read.
        let count = Some(wakes).filter(|_| !job.parked);
        let wakes = self.wake(job, count, WokenDue::AtOnce).into_iter().collect();
        let events = moved.record.into_iter().collect();
        let moved = JobUpdate { set, events, wakes, ..JobUpdate::default() };
        let written = rows::apply(&self.context.db, lease.key(), job, moved).await?;
        let mut wake = vec![super::runs::QUEUE.pipeline, super::jobs_terminating::QUEUE.pipeline];
        wake.extend(WokenJobs::of(&written).pipeline());
        Ok(apply_outcome(&written, None, wake))
    }
}

/// Number of jobs of a class that are woken when one of them can never be placed.
const END_WAKES: i64 = 256;

/// One placement and what is written with it.
struct ReplicaPass<'a> {
    queued: &'a QueuedReplica<'a>,
    placement: &'a ReplicaPlacement,
    /// Number of parked jobs of its class that it wakes.
    wakes: Option<i64>,
    /// Replicas of its class that are parked behind it.
    followers: Vec<&'a QueuedReplica<'a>>,
}

/// End of a job that was not placed.
struct JobEnding<'a> {
    ending: &'a job::Ending,
    event: job::Event,
    /// JSON.
    shortfalls: Option<String>,
    /// Number of jobs of its class that are woken.
    wakes: i64,
}

impl<'a> JobEnding<'a> {
    fn new(ending: &'a job::Ending, event: job::Event) -> Self {
        Self { ending, event, shortfalls: None, wakes: 1 }
    }
}

/// Jobs of the queue that a write woke: the only statements that return rows are those.
#[derive(Clone, Copy, PartialEq, Eq)]
enum WokenJobs {
    None,
    Due,
    /// None of them is due before the next evaluation of waiting jobs.
    Later,
}

impl WokenJobs {
    fn of(written: &WriteOutcome) -> Self {
        let WriteOutcome::Done { rows, .. } = written else { return Self::None };
        let woken: Vec<bool> = rows.iter().flatten().map(|row| row.bool(1).unwrap_or(true)).collect();
        match woken.contains(&true) {
            true => Self::Due,
            false if woken.is_empty() => Self::None,
            false => Self::Later,
        }
    }

    /// This pipeline, if some are due.
    fn pipeline(self) -> Option<&'static str> {
        (self == Self::Due).then_some(QUEUE.pipeline)
    }

    /// For the timer of this pipeline.
    fn due_in_us(self) -> Option<i64> {
        (self == Self::Later).then_some(brain::POLL_INTERVAL.0)
    }
}

/// Shortfalls of a replica that was not placed.
fn rejection_reason(outcome: &PlacementOutcome) -> Option<&RefusalReport> {
    match outcome {
        PlacementOutcome::Placed { .. } => None,
        PlacementOutcome::Waits { why, .. } | PlacementOutcome::Never { why } => Some(why),
    }
}

/// The next whole second: a time on which all nodes of a replica agree without coordination.
fn next_whole_second(after: Timestamp) -> Timestamp {
    Timestamp::from_secs(after.0.div_euclid(1_000_000) + 1)
}

/// A job without an instance. Volumes are attached when the instance exists; placement only has to find one to which
/// they can be attached.
fn unassigned_view(job: &Job) -> brain::SubmittedJobView {
    brain::SubmittedJobView {
        submitted_at: job.submitted_at,
        stage: AssignmentStage::Unassigned,
        has_volumes: false,
    }
}

/// Context of one round of placement.
struct PlacementContext<'a> {
    stock: &'a placement::PoolInventory,
    inventory: &'a Inventory,
    now: Timestamp,
    scope: RoundScope,
}

/// Instances that a round considers.
#[derive(Clone, Copy, PartialEq, Eq)]
enum RoundScope {
    Whole,
    Free,
}

impl PlacementContext<'_> {
    /// When jobs are due that are woken because one of their class is placed. A round that wakes several found capacity for
    /// them; instances that a fleet could create for one are not in the database.
    fn woken_due(&self, count: Option<i64>) -> WokenDue {
        let may_create = self.inventory.fleets.iter().any(|fleet| fleet.can_create);
        if may_create || count.is_some_and(|count| count > 1) { WokenDue::AtOnce } else { WokenDue::IfFree }
    }

    fn fleet(&self, id: FleetId) -> Option<&Fleet> {
        self.stock.fleets.iter().find(|fleet| fleet.id == id)
    }

    fn instance_name(&self, id: InstanceId) -> String {
        let found = self.inventory.instances.iter().find(|known| known.id == id);
        found.map_or_else(|| id.to_string(), |found| found.name.clone())
    }

    /// Number of promises on the instance when it was read.
    fn promise_num(&self, seat: &NodePlacement) -> i64 {
        let NodePlacement::Existing { instance, .. } = seat else { return 0 };
        let found = self.stock.instances.iter().find(|known| known.id == *instance);
        found.map_or(0, |found| found.promise_num)
    }

    /// Resources that a node holds there; at an instance that is to be created, at most.
    fn held_by(&self, seat: &NodePlacement) -> HeldResources {
        match seat {
            NodePlacement::Existing { instance, blocks, .. } => {
                let found = self.inventory.instances.iter().find(|known| known.id == *instance);
                let offer = found.map(|found| &found.offer);
                offer.map_or_else(HeldResources::default, |offer| {
                    HeldResources::of(offer, *blocks, offer.total_blocks)
                })
            }
            NodePlacement::New { offers, .. } => {
                let known =
                    offers.iter().filter_map(|new| Some((new, self.inventory.offers.get(new.offer)?)));
                HeldResources::largest(
                    known.map(|(new, offer)| HeldResources::of(offer, new.blocks, new.total_blocks)),
                )
            }
        }
    }
}
