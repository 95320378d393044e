//! Pipeline `fleets`: as many instances as a fleet requests.
//!
//! Claims   fleets in Submitted, Active, Terminating.
//! Owns     fleets.status, fleets.status_message, fleets.finished, fleets.deleted, fleets.deleted_at,
//!          fleets.consolidation_attempt, fleets.last_consolidated_at.
//! Wakes    on hint (applied, deleted, an instance was added or removed), else every 30 s.
//! Why not  lock the instances? A fleet never changes one: it requests its end (`termination_asked_at`), or
//!          adds a row whose number is unique, and the `instances` pipeline does the rest.

use windlass_engine::{ApplyOutcome, DbTime, Lease, Pipeline, Queue};
use windlass_model::{
    decide::fleets::{self as brain, FleetMember, Plan},
    event::{self, Event},
    fleet::{self, Status},
    id::InstanceId,
    instance,
    plan::{
        offers::{Offer, shortfalls, smallest_fit},
        place::OFFERS_MAX,
    },
    time::Timestamp,
};

use super::{PipelineContext, due_in, pipeline_cause};
use crate::{
    db::{
        Change, Val, WriteOutcome, backends,
        events::{self, EventContext, EventTarget},
        instances::{self, Instance, NewInstance},
        pipeline_rows::fleets::{self as rows, FleetInputs, FleetUpdate},
    },
    hints::Hint,
    instance_documents::{OfferAttempts, OrderProfile, offer_instance_type},
    offer_cache::{OfferCache, OfferSnapshot},
    parsed_fleet_spec::{self, ParsedFleetSpec},
    pass_error::PassError,
};
use std::{collections::BTreeMap, sync::Arc};

pub(super) struct FleetsPipeline {
    pub(super) context: PipelineContext,
    pub(super) market: OfferCache,
}

pub(crate) const QUEUE: Queue = Queue {
    pipeline: Hint::Fleets.as_str(),
    table: "fleets",
    statuses: &["submitted", "active", "terminating"],
};

pub(crate) struct Row {
    loaded: FleetInputs,
    shape: Arc<ParsedFleetSpec>,
    /// Offers from which the members were created.
    offered: BTreeMap<InstanceId, Offer>,
}

pub(crate) struct FleetPassPlan {
    plan: Plan,
    /// Offers from which the new instances may be created.
    offers: Vec<Offer>,
    /// The reason why there are none.
    message: Option<String>,
}

impl Pipeline for FleetsPipeline {
    type Row = Row;
    type Observation = ();
    type Plan = FleetPassPlan;
    type Error = PassError;

    fn queue(&self) -> Queue {
        QUEUE
    }

    async fn load(&self, lease: &Lease) -> Result<Option<Row>, PassError> {
        let Some(loaded) = rows::load(&self.context.db, lease).await? else { return Ok(None) };
        let shape = parsed_fleet_spec::for_fleet(&loaded.fleet)?;
        let mut offered = BTreeMap::new();
        for member in &loaded.members {
            offered.extend(
                OfferAttempts::of(member)?.and_then(|tries| Some((member.id, tries.current()?.clone()))),
            );
        }
        Ok(Some(Row { loaded, shape, offered }))
    }

    /// Backends are queried only if instances are to be created.
    async fn observe(&self, _lease: &Lease, _row: &Row) -> Result<(), PassError> {
        Ok(())
    }

    fn decide(row: &Row, (): (), now: DbTime) -> FleetPassPlan {
        let plan = brain::decide(&view(row), Timestamp(now));
        FleetPassPlan { plan, offers: Vec::new(), message: None }
    }

    async fn act(&self, _lease: &Lease, row: &Row, next: &mut FleetPassPlan) -> Result<(), PassError> {
        if next.plan.create.is_empty() {
            return Ok(());
        }
        let all = self.market.seen().await;
        let seen = all.granted(&backends::list_granted(&self.context.db, row.loaded.fleet.project_id).await?);
        next.offers = seen.for_fleet(&row.shape);
        next.offers.truncate(OFFERS_MAX);
        if next.offers.is_empty() {
            // Without an offer this is not counted as an attempt.
            next.message = Some(describe_no_offers(&seen, &row.shape, all.offers.len() > seen.offers.len()));
            next.plan.create.clear();
            let fleet = &row.loaded.fleet;
            next.plan.attempts = u32::try_from(fleet.consolidation_attempt).unwrap_or_default();
            next.plan.last_attempt_at = fleet.last_consolidated_at;
        }
        Ok(())
    }

    async fn apply(&self, lease: &Lease, row: Row, next: FleetPassPlan) -> Result<ApplyOutcome, PassError> {
        let due_in_us = Some(due_in(lease, next.plan.due));
        let fleet = &row.loaded.fleet;
        let mut moved = FleetUpdate {
            set: vec![
                ("consolidation_attempt", i64::from(next.plan.attempts).into()),
                ("last_consolidated_at", next.plan.last_attempt_at.into()),
            ],
            end: next.plan.end.clone(),
            ..FleetUpdate::default()
        };
        for num in &next.plan.create {
            moved.create.extend(self.member(lease, &row, *num, &next.offers)?);
        }
        let message = status_message(&row, &next);
        if let Some(change) = &next.plan.change {
            let why = pipeline_cause(event::Pipeline::Fleet, lease, change.reason, &change.message);
            let step = event::transition::<fleet::FleetLifecycle>(fleet.id, fleet.status, change.event, why)?;
            moved.set.push(("status", step.status.into()));
            if step.status == Status::Terminated {
                moved.set.extend([
                    ("finished", true.into()),
                    ("deleted", true.into()),
                    ("deleted_at", Val::Now),
                ]);
            }
            moved.event = step.record;
        } else if let Some(message) =
            message.as_ref().filter(|text| fleet.status_message.as_ref() != Some(text))
        {
            let why = pipeline_cause(event::Pipeline::Fleet, lease, "note", message);
            moved.event = Some(Event::note(event::Entity::Fleet, fleet.id, why));
        }
        moved.set.push(("status_message", message.into()));
        let wake = if moved.end.is_empty() && moved.create.is_empty() {
            vec![]
        } else {
            vec![super::instances::QUEUE.pipeline]
        };
        let written = rows::apply(&self.context.db, lease.key(), fleet, moved, due_in_us).await;
        match written {
            Ok(WriteOutcome::Done { .. }) => Ok(ApplyOutcome::Written { due_in_us, wake }),
            Ok(WriteOutcome::Stale { .. }) => Ok(ApplyOutcome::LeaseLost),
            // A job's placeholder used the number at the same moment: repeat the pass.
            Err(error) if error.is_conflict_on("instances_num_key") => Ok(ApplyOutcome::RelatedBusy),
            Err(error) => Err(error.into()),
        }
    }
}

impl FleetsPipeline {
    /// Adds one instance, to be created from the first offer that is granted.
    fn member(&self, lease: &Lease, row: &Row, num: u32, offers: &[Offer]) -> Result<Vec<Change>, PassError> {
        let (db, fleet) = (&self.context.db, &row.loaded.fleet);
        let id = InstanceId(db.new_id()?);
        let name = format!("{}-{num}", fleet.name);
        let tags = row.shape.tags(None);
        let new = NewInstance { idle_seconds_max: row.shape.idle(), ..new_instance(id, offers, tags)? };
        let new = NewInstance {
            project_id: fleet.project_id,
            fleet_id: Some(fleet.id),
            name: name.clone(),
            instance_num: num.into(),
            ..new
        };
        let message = match row.shape.nodes().map_or(0, |n| n.min) {
            1 => "the fleet requires at least 1 node".to_owned(),
            min => format!("the fleet requires at least {min} nodes"),
        };
        let why = pipeline_cause(event::Pipeline::Fleet, lease, "nodes_min", message);
        let created = Event::created::<instance::InstanceLifecycle>(id, instance::Status::Pending, why);
        let targets = [EventTarget { entity: created.entity, id: id.0, name: &name }];
        let place = EventContext {
            project: Some(fleet.project_id),
            user: None,
            lock_token: Some(lease.token),
            targets: &targets,
        };
        let mut changes = vec![instances::insert(new)];
        changes.extend(events::append(db, &created, &place)?);
        Ok(changes)
    }
}

/// A new instance to be created from one of these offers; the caller sets its project and fleet.
pub(super) fn new_instance(
    id: InstanceId,
    offers: &[Offer],
    tags: std::collections::BTreeMap<String, String>,
) -> Result<NewInstance, PassError> {
    let first = offers.first();
    let document = |value: Result<String, serde_json::Error>| value.map_err(PassError::document);
    let tries = OfferAttempts { at: 0, offers: offers.to_vec() };
    Ok(NewInstance {
        id,
        project_id: windlass_model::id::ProjectId(uuid::Uuid::nil()),
        fleet_id: None,
        name: String::new(),
        instance_num: 0,
        backend: first.map(|offer| offer.backend.clone()),
        region: first.map(|offer| offer.region.clone()),
        hostname: None,
        price: first.and_then(|offer| offer.price.known_dollars()),
        spot: first.is_some_and(|offer| offer.host.spot),
        instance_type: first.map(|offer| offer_instance_type(offer).to_string()),
        offer: Some(document(serde_json::to_string(&tries))?),
        provisioning: None,
        ssh: None,
        ssh_sealed: None,
        requirements: None,
        profile: Some(document(serde_json::to_string(&OrderProfile { tags }))?),
        status: instance::Status::Pending,
        total_blocks: first.map(|offer| offer.total_blocks.into()),
        idle_seconds_max: None,
    })
}

/// Explains why there are no offers.
fn describe_no_offers(seen: &OfferSnapshot, shape: &ParsedFleetSpec, left_out: bool) -> String {
    let mut message = vec!["no backend has a matching offer".to_owned()];
    message.extend(seen.silent.iter().cloned());
    if seen.offers.is_empty() && seen.silent.is_empty() {
        message = vec!["no backend has any offers".to_owned()];
    }
    if left_out {
        message.push(
            "other backends are not granted to the project; hint: a global admin can grant them with \
             `windlass project grant-backend`"
                .to_owned(),
        );
    }
    let limits = shape.own_limits();
    let mut misses: Vec<_> = seen.offers.iter().map(|offer| (shortfalls(offer, &limits), offer)).collect();
    misses.sort_by_key(|(short, _)| short.len());
    if let Some((short, offer)) = misses.first() {
        let short: Vec<String> = short.iter().map(ToString::to_string).collect();
        message.push(format!(
            "the closest offer is {} {}: {}",
            offer.backend,
            offer.instance_type,
            short.join(", ")
        ));
    }
    message.join("; ")
}

/// Status message of the fleet for users; none while everything is as requested.
fn status_message(row: &Row, next: &FleetPassPlan) -> Option<String> {
    let mut message: Vec<String> = next.plan.note.iter().chain(&next.message).cloned().collect();
    if next.message.is_some() {
        message.retain(|text| Some(text) != next.plan.note.as_ref());
    }
    if row.loaded.fleet.status == Status::Terminating && !row.loaded.members.is_empty() {
        message.push(format!("waiting for {} instances to end", row.loaded.members.len()));
    }
    let (nodes, have) = (row.shape.nodes(), row.loaded.members.len());
    let short = nodes.is_some_and(|nodes| have < nodes.min as usize);
    if short
        && next.plan.attempts > 0
        && let Some(last) = &row.loaded.last_word
    {
        message.push(format!("the last instance failed: {last}"));
    }
    if message.is_empty() && short {
        // Between two attempts the last message still applies.
        return row.loaded.fleet.status_message.clone();
    }
    (!message.is_empty()).then(|| message.join("; "))
}

fn view(row: &Row) -> brain::FleetView {
    let (fleet, nodes) = (&row.loaded.fleet, row.shape.nodes());
    let creates = row.shape.creates();
    brain::FleetView {
        status: fleet.status,
        is_ssh: !creates,
        is_delete_requested: fleet.termination_asked_at.is_some(),
        nodes_min: nodes.map_or(0, |nodes| nodes.min),
        nodes_target: nodes.map_or(0, |nodes| nodes.target),
        nodes_max: nodes.and_then(|nodes| nodes.max),
        members: row.loaded.members.iter().map(|member| to_member(member, row)).collect(),
        attempts: u32::try_from(fleet.consolidation_attempt).unwrap_or_default(),
        last_attempt_at: fleet.last_consolidated_at,
    }
}

fn to_member(member: &Instance, row: &Row) -> FleetMember {
    // Compares the offer of the backend, not the actual resources: a replacement would have the same.
    let offered = row.offered.get(&member.id);
    FleetMember {
        id: member.id,
        instance_num: u32::try_from(member.instance_num).unwrap_or_default(),
        status: member.status,
        jobs: u32::from(member.busy_blocks > 0),
        is_end_requested: member.termination_asked_at.is_some(),
        is_up_to_date: offered.is_none_or(|offer| smallest_fit(offer, row.shape.limits()).is_ok()),
    }
}
