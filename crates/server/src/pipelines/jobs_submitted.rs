//! Pipeline `jobs_submitted`: places the whole queue onto the whole inventory.
//!
//! Claims   jobs in Submitted.
//! Owns     jobs.instance_id, jobs.instance_assigned, jobs.blocks, jobs.fleet_id, jobs.provisioned_at,
//!          jobs.shortfalls, runs.fleet_id.
//! Wakes    on hint (a job was submitted, blocks were freed, an instance was granted), else every 4 s.
//! Shares   instances.busy_blocks with `jobs_terminating`: both add, neither sets.
//! Why not  lock the instances? Blocks are claimed by one conditional update (`busy + n <= total`): two
//!          replicas that place at once cannot claim the same blocks, and neither waits for a lock.
//! Why not  create instances here? A backend may take minutes, and the queue would wait with it. A row is
//!          added with the offers to try; `instances` tries them, and the job reads the result.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use futures_util::future::try_join_all;
use uuid::Uuid;
use windlass_engine::{ApplyOutcome, BatchPipeline, Lease, Queue};
use windlass_model::{
    config::job_spec::JobSpec,
    decide::jobs_submitted::{self as brain, AssignmentStage, Plan, SubmittedJobObservation},
    event::{self, Event},
    id::{FleetId, InstanceId, ProjectId, RunId},
    instance, job,
    plan::{
        offers::{InstanceNeeds, Location, Offer},
        place::{
            FleetChoice, Inventory, NodePlacement, PlacementOutcome, RefusalReport, ReplicaPlacement,
            WaitingNode, WaitingReplica, place_replicas,
        },
    },
    time::{Span, Timestamp},
};

use super::{PipelineContext, apply_outcome, due_in, pipeline_cause};
use crate::{
    attachments::mounts::{self, VolumeCatalog},
    attempt_specs::PlacementPreferences,
    db::{
        Val, WriteOutcome,
        fleets::Fleet,
        instances::{Instance, NewInstance},
        jobs::Job,
        pipeline_rows::{
            jobs::{self as rows, JobUpdate},
            placement::{self, NodeAssignment, SeatTarget, TargetFleet},
        },
        runs::Run,
    },
    instance_documents::OfferAttempts,
    inventory,
    offer_cache::OfferCache,
    parsed_fleet_spec,
    parsed_run_spec::ParsedRunSpec,
    pass_error::PassError,
    plain_processes::ProcessRights,
};

pub(super) struct JobsSubmittedPipeline {
    pub(super) context: PipelineContext,
    pub(super) market: OfferCache,
}

pub(crate) const QUEUE: Queue = Queue { pipeline: "jobs_submitted", table: "jobs", statuses: &["submitted"] };

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
            if let Some(ending) = job.end_asked() {
                outcomes
                    .insert(job.id.0, self.end(lease, &job, &ending, job::Event::StopRequested, None).await?);
            } else if let Some(instance) = job.instance_id {
                outcomes.insert(job.id.0, self.check_placeholder(lease, &job, places.get(&instance)).await?);
            } else {
                waiting.push(job);
            }
        }
        for replica in self.group_replicas(waiting, leases, &mut outcomes).await? {
            self.place(replica, &runs, &mut outcomes).await?;
        }
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
    ) -> Result<Vec<Vec<LeasedReplica>>, PassError> {
        let mut by_replica: BTreeMap<(RunId, i64), Vec<Job>> = BTreeMap::new();
        for job in jobs {
            by_replica.entry((job.run_id, job.replica_num)).or_default().push(job);
        }
        let mut by_project: BTreeMap<ProjectId, Vec<LeasedReplica>> = BTreeMap::new();
        for ((run, num), mut nodes) in by_replica {
            nodes.sort_by_key(|job| job.job_num);
            let held: BTreeMap<Uuid, Lease> =
                nodes.iter().filter_map(|n| leases.remove(&n.id.0)).map(|l| (l.id, l)).collect();
            let specs = nodes.iter().map(|node| serde_json::from_str(&node.job_spec));
            let specs: Vec<JobSpec> = specs.collect::<Result<_, _>>().map_err(PassError::document)?;
            let replica =
                LeasedReplica { run, num, project: nodes[0].project_id, nodes, specs, leases: held };
            if replica.nodes.len() < replica.specs[0].jobs_per_replica as usize {
                for node in &replica.nodes {
                    let Some(lease) = replica.lease(node) else { continue };
                    let due = Timestamp(lease.now());
                    outcomes
                        .insert(node.id.0, self.wait(lease, node, Vec::new(), next_whole_second(due)).await?);
                }
                continue;
            }
            by_project.entry(replica.project).or_default().push(replica);
        }
        Ok(by_project.into_values().collect())
    }

    async fn place(
        &self,
        replicas: Vec<LeasedReplica>,
        runs: &BTreeMap<RunId, Run>,
        outcomes: &mut BTreeMap<Uuid, ApplyOutcome>,
    ) -> Result<(), PassError> {
        let Some(first) = replicas.first() else { return Ok(()) };
        let now = first.leases.values().map(Lease::now).max().unwrap_or_default();
        let stock = placement::load_inventory(&self.context.db, first.project).await?;
        let allowed = ProcessRights::now(&self.context.db, self.context.local_processes).await?;
        let inventory = inventory::build_inventory(&stock, &self.market.seen().await.offers, allowed)?;
        let volumes = self.volumes(first.project, &replicas).await?;
        let full = self.full(&replicas).await?;
        let mut queue = Vec::with_capacity(replicas.len());
        for replica in &replicas {
            if let Some(run) = runs.get(&replica.run) {
                let mut waiting =
                    waiting_view(replica, run, &*self.context.shapes.of(run)?, &stock, &volumes)?;
                if let Some(full) = full.get(&(replica.run, replica.num)) {
                    for node in &mut waiting.nodes {
                        Arc::make_mut(&mut node.needs).avoid_locations.extend(full.iter().cloned());
                    }
                }
                queue.push(waiting);
            }
        }
        let placements = place_replicas(&queue, &inventory, Timestamp(now));
        let by_place: BTreeMap<(RunId, i64), &LeasedReplica> =
            replicas.iter().map(|replica| ((replica.run, replica.num), replica)).collect();
        // Concurrently, so that the database commits them together.
        let written = placements.iter().filter_map(|placement| {
            let replica = *by_place.get(&(placement.run, i64::from(placement.replica_num)))?;
            let run = runs.get(&replica.run)?;
            let site = PlacementContext { run, stock: &stock, inventory: &inventory, now: Timestamp(now) };
            Some(async move { self.write(replica, placement, &site).await })
        });
        for each in try_join_all(written).await? {
            outcomes.extend(each);
        }
        Ok(())
    }

    /// Regions in which a recent attempt found no capacity for all nodes of a replica.
    async fn full(
        &self,
        replicas: &[LeasedReplica],
    ) -> Result<BTreeMap<(RunId, i64), Vec<Location>>, PassError> {
        let again = replicas.iter().filter(|one| one.nodes.len() > 1 && one.nodes[0].submission_num > 0);
        let runs: Vec<RunId> = again.map(|one| one.run).collect();
        let mut full: BTreeMap<(RunId, i64), Vec<Location>> = BTreeMap::new();
        for (replica, tries) in placement::failed_offers(&self.context.db, &runs).await? {
            let tries: Option<OfferAttempts> = serde_json::from_str(&tries).ok();
            let Some(offer) = tries.and_then(|tries| tries.offers.into_iter().next()) else { continue };
            let place = Location { backend: offer.backend, region: offer.region, zone: None };
            let of_replica = full.entry(replica).or_default();
            if !of_replica.contains(&place) {
                of_replica.push(place);
            }
        }
        Ok(full)
    }

    /// Loads the volumes that the nodes of these replicas name.
    async fn volumes(
        &self,
        project: ProjectId,
        replicas: &[LeasedReplica],
    ) -> Result<VolumeCatalog, PassError> {
        let specs = replicas.iter().flat_map(|replica| &replica.specs);
        let wanted: Vec<_> = specs.flat_map(mounts::for_spec).collect();
        Ok(VolumeCatalog::of(&self.context.db, project, &wanted).await?)
    }

    /// Writes the placement of a replica as one unit for all nodes, or as one unit per node that waits.
    async fn write(
        &self,
        replica: &LeasedReplica,
        placement: &ReplicaPlacement,
        site: &PlacementContext<'_>,
    ) -> Result<Outcomes, PassError> {
        let mut seated = Vec::new();
        let mut outcomes = Vec::new();
        let plans: Vec<_> = replica
            .nodes
            .iter()
            .enumerate()
            .map(|(n, job)| {
                (
                    job,
                    brain::decide(
                        &unassigned_view(job),
                        SubmittedJobObservation::from_outcome(&placement.outcome, n),
                        site.now,
                    ),
                )
            })
            .collect();
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
                    seated.push(NodeAssignment {
                        held: lease.key(),
                        job,
                        seat: SeatTarget::There { seat, event },
                    });
                }
                Plan::Assign { fleet, seat, message, .. } => {
                    fleet_of = Some(*fleet);
                    let seat = self.new_placeholder(lease, job, *fleet, seat, message, site)?;
                    seated.extend(seat.map(|seat| NodeAssignment { held: lease.key(), job, seat }));
                }
                Plan::End { ending, change } => {
                    let why = rejection_reason(&placement.outcome).map(serde_json::to_string);
                    let why = why.transpose().map_err(PassError::document)?;
                    outcomes.push((job.id.0, self.end(lease, job, ending, change.event, why).await?));
                }
                Plan::Wait { why, message, due, .. } => {
                    let due = if plans.len() > 1 { next_whole_second(*due) } else { *due };
                    let why = serde_json::to_string(&**why).map_err(PassError::document)?;
                    let is_known =
                        job.shortfalls.as_ref() == Some(&why) && job.status_message.as_ref() == Some(message);
                    // In a long queue most jobs have no new message: they are released together, in one statement.
                    let applied = if is_known {
                        let due_in = u64::try_from(due_in(lease, due)).unwrap_or_default();
                        ApplyOutcome::Unchanged { due_in: Some(Duration::from_micros(due_in)) }
                    } else {
                        let set =
                            vec![("shortfalls", why.into()), ("status_message", message.as_str().into())];
                        self.wait(lease, job, set, due).await?
                    };
                    outcomes.push((job.id.0, applied));
                }
                Plan::Provision { assign: None, due, .. } | Plan::Attach { due } | Plan::Recheck { due } => {
                    let due = (*due).max(site.now + Span::secs(1));
                    outcomes.push((job.id.0, self.wait(lease, job, Vec::new(), due).await?));
                }
            }
        }
        if let Some(fleet) = fleet_of {
            let ids: Vec<Uuid> = seated.iter().map(|one| one.job.id.0).collect();
            let each = self.seat(site, fleet, seated).await?;
            outcomes.extend(ids.into_iter().map(|id| (id, each.clone())));
        }
        Ok(outcomes)
    }

    /// Places all nodes or none.
    async fn seat(
        &self,
        site: &PlacementContext<'_>,
        fleet: FleetId,
        seated: Vec<NodeAssignment<'_>>,
    ) -> Result<ApplyOutcome, PassError> {
        let makes = seated.iter().any(|one| matches!(one.seat, SeatTarget::New { .. }));
        let room = site.inventory.fleets.iter().find(|one| one.id == fleet);
        let into = TargetFleet {
            fleet,
            chooses: site.run.fleet_id.is_none(),
            nodes_max: room.and_then(|room| room.nodes_max),
        };
        let written = match placement::place_replica(&self.context.db, &into, seated).await {
            Ok(written) => written,
            // Another writer used the number of the new instance: repeat the pass.
            Err(error) if error.is_conflict_on("instances_num_key") => return Ok(ApplyOutcome::RelatedBusy),
            Err(error) => return Err(error.into()),
        };
        let mut wake = vec![super::runs::QUEUE.pipeline, super::jobs_running::QUEUE.pipeline];
        if makes {
            wake.push(super::instances::QUEUE.pipeline);
        }
        Ok(match written {
            WriteOutcome::Done { .. } => ApplyOutcome::Written { due_in_us: None, wake },
            WriteOutcome::Stale { at: None } => ApplyOutcome::LeaseLost,
            // Another writer claimed the blocks, the slot, or one of the nodes: repeat the pass.
            WriteOutcome::Stale { at: Some(_) } => ApplyOutcome::RelatedBusy,
        })
    }

    /// A row for the instance that is to be created for a job.
    fn new_placeholder<'a>(
        &self,
        lease: &Lease,
        job: &Job,
        fleet: FleetId,
        seat: &NodePlacement,
        message: &str,
        site: &PlacementContext<'_>,
    ) -> Result<Option<SeatTarget<'a>>, PassError> {
        let NodePlacement::New { instance_num, offers, .. } = seat else { return Ok(None) };
        let (Some(fleet), Some(first)) = (site.fleet(fleet), offers.first()) else { return Ok(None) };
        let (shape, run) = (parsed_fleet_spec::for_fleet(fleet), self.context.shapes.of(site.run)?);
        // The job already holds its blocks, so every offer must provide the same number.
        let alike = offers.iter().filter(|new| new.blocks == first.blocks);
        let offers: Vec<Offer> = alike
            .filter_map(|new| {
                let offer = site.inventory.offers.get(new.offer)?;
                Some(Offer { total_blocks: new.total_blocks, ..offer.clone() })
            })
            .collect();
        let id = InstanceId(self.context.db.new_id()?);
        let why = format!("required by job {}", job.job_name);
        let why = pipeline_cause(event::Pipeline::JobSubmitted, lease, "job", why);
        let created = Event::created::<instance::InstanceLifecycle>(id, instance::Status::Pending, why);
        let request = super::fleets::new_instance(id, &offers, shape.tags(run.tags()))?;
        let instance = NewInstance {
            project_id: fleet.project_id,
            fleet_id: Some(fleet.id),
            name: format!("{}-{instance_num}", fleet.name),
            instance_num: (*instance_num).into(),
            idle_seconds_max: shape.run_idle_secs(run.idle_duration()),
            ..request
        };
        let blocks = first.blocks.into();
        Ok(Some(SeatTarget::New {
            instance: Box::new(instance),
            created,
            blocks,
            message: message.to_owned(),
        }))
    }

    /// Observes the creation of a job's instance.
    async fn check_placeholder(
        &self,
        lease: &Lease,
        job: &Job,
        instance: Option<&Instance>,
    ) -> Result<ApplyOutcome, PassError> {
        let since = instance.map_or(job.submitted_at, |instance| instance.created_at);
        let view = brain::SubmittedJobView {
            submitted_at: job.submitted_at,
            stage: AssignmentStage::Placeholder { since },
            has_volumes: false,
        };
        match brain::decide(&view, placeholder_observation(instance), Timestamp(lease.now())) {
            Plan::Provision { change, .. } => {
                let why =
                    pipeline_cause(event::Pipeline::JobSubmitted, lease, change.reason, &change.message);
                let step = event::transition::<job::JobLifecycle>(job.id, job.status, change.event, why)?;
                let set = vec![
                    ("status", step.status.into()),
                    ("provisioned_at", Val::Now),
                    ("status_message", Val::Null),
                ];
                let moved = JobUpdate {
                    set,
                    events: step.record.into_iter().collect(),
                    due_in_us: None,
                    marks_siblings_due: false,
                    marks_group_due: None,
                };
                let written = rows::apply(&self.context.db, lease.key(), job, moved).await?;
                let wake = vec![super::runs::QUEUE.pipeline, super::jobs_running::QUEUE.pipeline];
                Ok(apply_outcome(&written, None, wake))
            }
            Plan::End { ending, change } => {
                let spec: JobSpec = serde_json::from_str(&job.job_spec).map_err(PassError::document)?;
                let is_full = ending.reason() == job::TerminationReason::FailedToStartDueToNoCapacity
                    && spec.jobs_per_replica > 1;
                let ending =
                    if is_full { ending.with_detail(job::TerminationDetail::RegionFull) } else { ending };
                self.end(lease, job, &ending, change.event, None).await
            }
            Plan::Assign { due, .. }
            | Plan::Attach { due }
            | Plan::Wait { due, .. }
            | Plan::Recheck { due } => {
                let message = instance.and_then(|instance| instance.status_message.clone());
                let set = message.map(|message| ("status_message", message.into())).into_iter().collect();
                self.wait(lease, job, set, due).await
            }
        }
    }

    async fn wait(
        &self,
        lease: &Lease,
        job: &Job,
        set: Vec<(&'static str, Val)>,
        due: Timestamp,
    ) -> Result<ApplyOutcome, PassError> {
        let due_in_us = Some(due_in(lease, due));
        let moved = JobUpdate {
            set,
            events: Vec::new(),
            due_in_us,
            marks_siblings_due: false,
            marks_group_due: None,
        };
        let written = rows::apply(&self.context.db, lease.key(), job, moved).await?;
        Ok(apply_outcome(&written, due_in_us, vec![]))
    }

    async fn end(
        &self,
        lease: &Lease,
        job: &Job,
        ending: &job::Ending,
        event: job::Event,
        shortfalls: Option<String>,
    ) -> Result<ApplyOutcome, PassError> {
        let message = ending.message().unwrap_or("the run requested its end");
        let why = pipeline_cause(event::Pipeline::JobSubmitted, lease, ending.reason().as_str(), message);
        let moved = event::transition::<job::JobLifecycle>(job.id, job.status, event, why)?;
        let mut set = rows::ending_columns(ending);
        set.extend(shortfalls.map(|why| ("shortfalls", why.into())));
        let moved = JobUpdate {
            set,
            events: moved.record.into_iter().collect(),
            due_in_us: None,
            marks_siblings_due: false,
            marks_group_due: None,
        };
        let written = rows::apply(&self.context.db, lease.key(), job, moved).await?;
        Ok(apply_outcome(
            &written,
            None,
            vec![super::runs::QUEUE.pipeline, super::jobs_terminating::QUEUE.pipeline],
        ))
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

/// State of the creation of an instance, for the job that requested it.
fn placeholder_observation(instance: Option<&Instance>) -> SubmittedJobObservation {
    let Some(instance) = instance else {
        return SubmittedJobObservation::Refused { message: "its instance no longer exists".to_owned() };
    };
    match instance.status {
        instance::Status::Pending => SubmittedJobObservation::Creating,
        instance::Status::Provisioning | instance::Status::Idle | instance::Status::Busy => {
            SubmittedJobObservation::Created
        }
        instance::Status::Terminating | instance::Status::Terminated => {
            let message = instance.termination_message.clone();
            SubmittedJobObservation::Refused {
                message: message.unwrap_or_else(|| "its instance was terminated".to_owned()),
            }
        }
    }
}

/// Context of the placement of a replica.
struct PlacementContext<'a> {
    run: &'a Run,
    stock: &'a placement::ProjectInventory,
    inventory: &'a Inventory,
    now: Timestamp,
}

impl PlacementContext<'_> {
    fn fleet(&self, id: FleetId) -> Option<&Fleet> {
        self.stock.fleets.iter().find(|fleet| fleet.id == id)
    }
}

fn waiting_view(
    replica: &LeasedReplica,
    run: &Run,
    shape: &ParsedRunSpec,
    stock: &placement::ProjectInventory,
    volumes: &VolumeCatalog,
) -> Result<WaitingReplica, PassError> {
    let first = &replica.nodes[0];
    let choice = match run.fleet_id {
        Some(fleet) => FleetChoice::Chosen(fleet),
        None if first.job_num == 0 && first.replica_num == 0 => FleetChoice::Choose,
        None => FleetChoice::Follow,
    };
    let mut nodes = Vec::with_capacity(replica.nodes.len());
    let placing = PlacementPreferences::of(run);
    let (avoided, sought) = (placing.avoided(), placing.sought());
    for (job, spec) in replica.nodes.iter().zip(&replica.specs) {
        let volumes = volumes.locations(&mounts::for_spec(spec))?;
        let (avoid, avoid_instances) = avoided.clone();
        let mut needs =
            InstanceNeeds { volumes, avoid_locations: avoid, avoid_instances, ..shape.needs_of(spec) };
        if let Some(Location { backend, region, zone }) = sought.clone() {
            (needs.backends, needs.regions) = (Some(vec![backend]), Some(vec![region]));
            needs.zones = zone.map(|zone| vec![zone]).or(needs.zones);
        }
        nodes.push(WaitingNode { job: job.id, needs: Arc::new(needs) });
    }
    let fleets = shape.fleet_names().map(|names| {
        let named = stock.fleets.iter().filter(|f| names.contains(&f.name));
        named.map(|f| f.id).collect()
    });
    Ok(WaitingReplica {
        project: replica.project,
        run: replica.run,
        replica_num: u32::try_from(replica.num).unwrap_or_default(),
        priority: u32::try_from(run.priority).unwrap_or_default(),
        since: replica.nodes.iter().map(|j| j.submitted_at).min().unwrap_or_default(),
        nodes,
        fleet_choice: choice,
        fleets,
        creation: shape.creation(),
        max_duration: replica.specs[0].max_duration.map(Span::secs),
    })
}
