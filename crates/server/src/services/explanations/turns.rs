//! The turn of a waiting run: its place in the queue and by which rules, what is kept for whom, and when it starts if jobs
//! last until their limits. The sentences are made here, so that every client shows the same.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use windlass_api::explanations::{QueueTurn, ReservedInstance, RunInFront};
use windlass_model::{
    config::job_spec::JobSpec,
    id::{FleetId, InstanceId, ProjectId, RunId},
    plan::{
        forecast::{HoldOwner, forecast_starts},
        place::{Inventory, PlacementOutcome, WaitingReplica, place_replicas},
        queue_order::is_within_share,
        quota::{Quota, QuotaBook},
    },
    time::Timestamp,
};

use super::instance_queue::InstanceQueue;
use crate::{
    app::App,
    attachments::mounts::{self, VolumeCatalog},
    auth::Caller,
    db::{
        documents::{JOB_SPEC, leave_out, of_run},
        instance_queue as rows,
        jobs::Job,
        pipeline_rows::placement,
        projects,
        quotas::NamedQuota,
        runs,
    },
    error::Result,
    inventory,
    parsed_run_spec::ParsedRunSpec,
    pass_error::PassError,
    plain_processes::ProcessRights,
    services::{offers::supply_error, quotas, rows::requested_resources},
    waiting_replica::waiting_replica,
};

/// Runs before a waiting one that are listed.
const IN_FRONT_MAX: usize = 10;
/// Runs of a queue whose start is foreseen.
pub(super) const FORECAST_MAX: usize = 200;
const HOUR_OF_MILLI_UNITS: f64 = 3_600_000.0;

/// Decisions of the next rounds of placement.
#[derive(Default)]
pub(super) struct QueueForecast {
    now: Timestamp,
    starts: BTreeMap<RunId, Timestamp>,
    /// Runs that can never start as things are.
    hopeless: BTreeSet<RunId>,
    reservations: Vec<Reservation>,
    /// Fleets that each project may use: the instances of others are not named.
    usable: BTreeMap<ProjectId, Arc<BTreeSet<FleetId>>>,
}

struct Reservation {
    run: RunId,
    fleet: FleetId,
    place: String,
    is_preempted: bool,
    until: Option<Timestamp>,
}

/// Everything that a round would read about these runs and a planned replica.
struct RoundInputs {
    queue: Vec<WaitingReplica>,
    inventory: Inventory,
    owners: BTreeMap<windlass_model::id::SubmissionId, HoldOwner>,
    /// Time until which blocks are kept for a run, if they are.
    promised: BTreeMap<RunId, Timestamp>,
    usable: BTreeMap<ProjectId, Arc<BTreeSet<FleetId>>>,
    now: Timestamp,
}

impl QueueForecast {
    /// Forecast of the first of these runs.
    pub(super) async fn load(app: &App, runs: &[RunId], planned: Option<WaitingReplica>) -> Result<Self> {
        let runs = &runs[..runs.len().min(FORECAST_MAX)];
        let inputs = RoundInputs::load(app, runs, planned).await.map_err(supply_error)?;
        // Many rounds over a large inventory take some time.
        let forecast = tokio::task::spawn_blocking(move || Self::compute(&inputs));
        Ok(forecast.await.unwrap_or_default())
    }

    fn compute(inputs: &RoundInputs) -> Self {
        let RoundInputs { queue, inventory, owners, promised, usable, now } = inputs;
        let starts = forecast_starts(queue, inventory, owners, *now);
        let names: BTreeMap<InstanceId, (FleetId, &str)> =
            inventory.instances.iter().map(|one| (one.id, (one.fleet, one.name.as_str()))).collect();
        let (mut reservations, mut hopeless) = (Vec::new(), BTreeSet::new());
        for placement in place_replicas(queue, inventory, *now) {
            let run = placement.run;
            let reserved = match placement.outcome {
                PlacementOutcome::Waits { reserved, .. } => reserved,
                PlacementOutcome::Placed { .. } => continue,
                PlacementOutcome::Never { .. } => {
                    hopeless.insert(run);
                    continue;
                }
            };
            for instance in reserved {
                let is_kept = |promise: &&windlass_model::plan::preemption::BlockPromise| {
                    promise.instance == instance && placement.jobs.first() == Some(&promise.job)
                };
                let is_preempted = inventory.promises.iter().any(|promise| is_kept(&promise));
                let until = if is_preempted { promised.get(&run) } else { starts.get(&run) }.copied();
                let Some((fleet, place)) = names.get(&instance) else { continue };
                let (fleet, place) = (*fleet, (*place).to_owned());
                reservations.push(Reservation { run, fleet, place, is_preempted, until });
            }
        }
        Self { now: *now, starts, hopeless, reservations, usable: usable.clone() }
    }
}

impl RoundInputs {
    async fn load(
        app: &App,
        runs: &[RunId],
        planned: Option<WaitingReplica>,
    ) -> std::result::Result<Self, PassError> {
        let db = app.db();
        let now = db.now().await?;
        let mut of_run: BTreeMap<RunId, Vec<Job>> = BTreeMap::new();
        for job in rows::jobs(db, runs).await? {
            of_run.entry(job.run_id).or_default().push(job);
        }
        let (mut queue, mut promised) = (Vec::new(), BTreeMap::new());
        let mut named_fleets = BTreeMap::new();
        for named in runs::find_all(db, runs).await? {
            let run = named.run;
            let jobs = of_run.remove(&run.id).unwrap_or_default();
            // A specification of another version is not foreseen.
            let Ok(shape) = ParsedRunSpec::of(&run) else { continue };
            promised.extend(jobs.iter().filter_map(|job| Some((run.id, job.promised_until?))).max());
            if let Some(names) = shape.fleet_names() {
                named_fleets.insert(run.id, names.to_vec());
            }
            for nodes in jobs.chunk_by(|one, other| one.replica_num == other.replica_num) {
                let specs = nodes.iter().map(|node| JOB_SPEC.decode(node.id, &node.job_spec));
                let specs: Vec<JobSpec> = match specs.collect() {
                    Ok(specs) => specs,
                    Err(error) => {
                        leave_out(&error);
                        continue;
                    }
                };
                let mounts: Vec<_> = specs.iter().flat_map(mounts::for_spec).collect();
                let volumes = VolumeCatalog::of(db, run.project_id, &mounts).await?;
                queue.push(waiting_replica(&run, nodes, &specs, &shape, &volumes)?);
            }
        }
        let projects: BTreeSet<ProjectId> =
            queue.iter().chain(&planned).map(|replica| replica.project).collect();
        let projects: Vec<ProjectId> = projects.into_iter().collect();
        let stock = placement::load_inventory(db, &projects, now).await?;
        let allowed = ProcessRights::now(db, app.settings().local_processes).await?;
        let inventory = inventory::build_inventory(&stock, &app.market().seen().await.offers, allowed)?;
        for replica in &mut queue {
            replica.usable_fleets = Some(stock.usable_fleets(replica.project));
            let names = named_fleets.get(&replica.run);
            replica.fleets = names.map(|names| stock.select(replica.project, names));
            replica.missing_fleets =
                names.map(|names| stock.missing(replica.project, names)).unwrap_or_default();
        }
        queue.extend(planned.map(|planned| {
            let usable_fleets = Some(stock.usable_fleets(planned.project));
            WaitingReplica { usable_fleets, since: now, ..planned }
        }));
        let used = inventory.instances.iter().filter(|one| !one.holds.is_empty());
        let used: Vec<InstanceId> = used.map(|one| one.id).collect();
        let owners = rows::hold_owners(db, &used).await?;
        Ok(Self { queue, inventory, owners, promised, usable: stock.usable, now })
    }
}

/// Projects whose names a caller may see.
pub(super) async fn visible_projects(app: &App, caller: &Caller) -> Result<BTreeSet<ProjectId>> {
    let visible = projects::visible(app.db(), caller.user.id, caller.user.admin).await?;
    Ok(visible.into_iter().map(|(id, ..)| id).collect())
}

/// The turn of a run, with the runs before it.
pub(super) async fn turn_of(app: &App, caller: &Caller, run: RunId) -> Result<Option<QueueTurn>> {
    let queue = InstanceQueue::load(app.db()).await?;
    if queue.replica(run).is_none() {
        return Ok(None);
    }
    let forecast = QueueForecast::load(app, &queue.competing(run), None).await?;
    let visible = visible_projects(app, caller).await?;
    Ok(turn(&queue, &forecast, run, &visible, true))
}

/// The turn that a run would have if it were submitted now.
pub(crate) async fn planned_turn(
    app: &App,
    caller: &Caller,
    planned: WaitingReplica,
) -> Result<Option<QueueTurn>> {
    let planned = WaitingReplica { since: app.db().now().await?, ..planned };
    let queue = InstanceQueue::load_with(app.db(), Some(&planned)).await?;
    let run = planned.run;
    let competing: Vec<RunId> = queue.competing(run).into_iter().filter(|other| *other != run).collect();
    let forecast = QueueForecast::load(app, &competing, Some(planned)).await?;
    let visible = visible_projects(app, caller).await?;
    Ok(turn(&queue, &forecast, run, &visible, true))
}

/// The turn of a run of the queue; the runs before it only if they are wanted.
pub(super) fn turn(
    queue: &InstanceQueue,
    forecast: &QueueForecast,
    run: RunId,
    visible: &BTreeSet<ProjectId>,
    with_runs: bool,
) -> Option<QueueTurn> {
    let replica = queue.replica(run)?;
    let competing = queue.competing(run);
    let position = competing.iter().position(|other| *other == run)?;
    let book = QuotaBook::new(queue.quotas.iter().map(|named| named.quota.clone()).collect());
    let usage = queue.usage.iter().find(|usage| usage.project == replica.project);
    let own = queue.quotas.iter().filter(|named| named.quota.applies_to(replica.project, replica.user));
    let own: Vec<&NamedQuota> = own.collect();
    let count = |number: usize| i64::try_from(number).unwrap_or(i64::MAX);
    let usable = forecast.usable.get(&replica.project);
    let is_shown = |one: &&Reservation| {
        one.run == run
            || (competing.contains(&one.run) && usable.is_some_and(|usable| usable.contains(&one.fleet)))
    };
    let reserved: Vec<&Reservation> = forecast.reservations.iter().filter(is_shown).collect();
    let mut turn = QueueTurn {
        position: count(position),
        length: count(competing.len()),
        class: replica.class.as_str().to_owned(),
        priority: replica.priority.into(),
        is_within_share: is_within_share(replica, &book),
        quotas: own.iter().map(|named| quotas::to_wire((*named).clone())).collect(),
        usage: usage.map_or(0.0, |usage| usage.used / HOUR_OF_MILLI_UNITS),
        weight: usage.map_or(1, |usage| usage.weight.max(1).into()),
        in_front: if with_runs { in_front(queue, run, visible) } else { Vec::new() },
        reserved: reserved.iter().map(|one| reserved_instance(queue, one, visible)).collect(),
        starts_at: forecast.starts.get(&run).copied(),
        sentences: Vec::new(),
    };
    let (mine, others): (Vec<&Reservation>, Vec<&Reservation>) =
        reserved.into_iter().partition(|one| one.run == run);
    let mut sentences = vec![position_sentence(&turn)];
    sentences.extend(share_sentence(&turn, own.iter().map(|named| &named.quota)));
    sentences.extend(usage_sentence(&turn, queue, replica.project));
    sentences.extend(mine.iter().map(|one| own_reservation(one)));
    let named = others
        .iter()
        .take(IN_FRONT_MAX)
        .map(|one| foreign_reservation(&reserved_instance(queue, one, visible)));
    sentences.extend(named);
    sentences.extend(start_sentence(&turn, forecast, run));
    turn.sentences = sentences;
    Some(turn)
}

/// The runs before one, with the names that the caller may see.
fn in_front(queue: &InstanceQueue, run: RunId, visible: &BTreeSet<ProjectId>) -> Vec<RunInFront> {
    let mut seen = BTreeSet::new();
    let mut ahead: Vec<RunInFront> = Vec::new();
    for (other, rule) in queue.before(run) {
        let Some(job) = queue.jobs.get(&other).filter(|_| seen.insert(other)) else { continue };
        let is_visible = visible.contains(&job.project_id);
        let spec: serde_json::Value = match JOB_SPEC.decode(of_run(other), &job.job_spec) {
            Ok(spec) => spec,
            Err(error) => {
                leave_out(&error);
                continue;
            }
        };
        ahead.push(RunInFront {
            position: i64::try_from(ahead.len()).unwrap_or(i64::MAX),
            project: is_visible.then(|| job.project.clone()),
            run: is_visible.then(|| job.run.clone()),
            requested: requested_resources(&spec["requirements"]["resources"]),
            rule: rule.as_str().to_owned(),
            waits_since: job.submitted_at,
        });
        if ahead.len() == IN_FRONT_MAX {
            break;
        }
    }
    ahead
}

fn reserved_instance(
    queue: &InstanceQueue,
    reserved: &Reservation,
    visible: &BTreeSet<ProjectId>,
) -> ReservedInstance {
    let job = queue.jobs.get(&reserved.run).filter(|job| visible.contains(&job.project_id));
    ReservedInstance {
        place: reserved.place.clone(),
        project: job.map(|job| job.project.clone()),
        run: job.map(|job| job.run.clone()),
        is_preempted: reserved.is_preempted,
        until: reserved.until,
    }
}

fn position_sentence(turn: &QueueTurn) -> String {
    let others = turn.length - 1;
    match (turn.position, others) {
        (_, 0) => "It is the only run in the queue.".to_owned(),
        (0, 1) => "It comes before the other run in the queue.".to_owned(),
        (0, _) => format!("It comes before the {others} other runs in the queue."),
        (_, 1) => "The other run in the queue comes before it.".to_owned(),
        (1, _) => format!("1 of the {others} other runs in the queue comes before it."),
        (before, _) => format!("{before} of the {others} other runs in the queue come before it."),
    }
}

/// Part of its share that the project holds, and the consequence.
fn share_sentence<'a>(turn: &QueueTurn, quotas: impl Iterator<Item = &'a Quota>) -> Option<String> {
    let shares: Vec<String> = quotas
        .filter_map(|quota| {
            let amount = |amount| quota.resource.amount(amount);
            let share = format!("{} of its share of {}", amount(quota.used), amount(quota.share?));
            Some(format!("{share} `{}`", quota.resource))
        })
        .collect();
    if shares.is_empty() {
        return None;
    }
    let effect = match turn.is_within_share {
        true => "so it comes before those that borrow",
        false => "so it borrows: runs within the shares of their projects come first",
    };
    Some(format!("Its project holds {}, {effect}.", shares.join(" and ")))
}

/// Usage of the project, if others compete with it.
fn usage_sentence(turn: &QueueTurn, queue: &InstanceQueue, project: ProjectId) -> Option<String> {
    let pool = queue.pool(project);
    let has_others =
        queue.replicas.iter().any(|other| other.project != project && queue.pool(other.project) == pool);
    let weight =
        if turn.weight == 1 { String::new() } else { format!(", divided by its weight of {}", turn.weight) };
    has_others.then(|| {
        format!(
            "Its project used {:.1} GPU hours lately{weight}; projects that used less come first.",
            turn.usage
        )
    })
}

fn own_reservation(reserved: &Reservation) -> String {
    let place = &reserved.place;
    match (reserved.is_preempted, reserved.until) {
        (true, Some(until)) => format!(
            "Blocks of `{place}` are kept for it until {}: jobs there were preempted for it.",
            whole_second(until)
        ),
        (true, None) => format!("Blocks of `{place}` are kept for it: jobs there were preempted for it."),
        (false, _) => {
            format!("`{place}` is reserved for it: others start there only if they end before it needs it.")
        }
    }
}

fn foreign_reservation(reserved: &ReservedInstance) -> String {
    let whom = match (&reserved.project, &reserved.run) {
        (Some(project), Some(run)) => format!("`{project}/{run}`"),
        (..) => "a run of another project".to_owned(),
    };
    let until = reserved.until.map(|until| format!(", until {} at most", whole_second(until)));
    format!("`{}` is reserved for {whom}{}.", reserved.place, until.unwrap_or_default())
}

fn start_sentence(turn: &QueueTurn, forecast: &QueueForecast, run: RunId) -> Option<String> {
    if forecast.hopeless.contains(&run) {
        return None;
    }
    Some(match turn.starts_at {
        Some(at) if at <= forecast.now => "There is room for it now.".to_owned(),
        Some(at) => format!("If all jobs last until their time limits, it starts at {}.", whole_second(at)),
        None => "Its start cannot be foreseen: it waits for jobs without a time limit (`max_duration`)."
            .to_owned(),
    })
}

pub(super) fn whole_second(at: Timestamp) -> Timestamp {
    Timestamp::from_secs(at.0.div_euclid(1_000_000))
}
