//! Pipeline `instances`: the lifecycle of an instance from request to deletion; also removes orphaned tasks.
//!
//! Claims   instances in Pending, Provisioning, Idle, Busy, Terminating.
//! Owns     instances.status, instances.status_message, instances.provisioning, instances.instance_type,
//!          instances.offer, instances.backend, instances.region, instances.availability_zone, instances.price,
//!          instances.spot, instances.total_blocks, instances.agent_version, instances.unreachable,
//!          instances.unreachable_since, instances.health, instances.health_message, instances.seen_at,
//!          instances.started_at, instances.termination_reason, instances.termination_message,
//!          instances.termination_deadline_at, instances.finished, instances.finished_at, instances.tracking.
//! Wakes    on hint (requested, to be ended, blocks freed, an agent's event), else every 7 s; sooner while starting.
//! Why not  let placement mark an instance busy? Placement claims blocks; the status follows from
//!          them, and one pipeline writes it.

mod create;

use std::sync::Arc;

use futures_util::future::try_join;
use serde_json::Value;
use windlass_backend::{Backend, BackendError, BackendInstance, Backends, InstanceState};
use windlass_engine::{ApplyOutcome, DbTime, Lease, Pipeline, Queue};
use windlass_model::{
    backend_kind::{BackendKind, provisioning_timeout},
    decide::instances::{self as brain, Action, DELETE_MAX, InstanceKind, InstanceObservation, Plan},
    event,
    id::InstanceId,
    instance::{self, Health, Status, TerminationReason},
    time::{Span, Timestamp},
};

use super::{PipelineContext, due_in, pipeline_cause};
use crate::{
    agents::{self, CallContext, HostReport},
    db::{
        DbError, Val, Values, WriteOutcome,
        documents::INSTANCE_TYPE,
        instances::{self, Instance},
        pipeline_rows::instances::{self as rows, FleetSummary, InstanceUpdate, OrphanTask},
    },
    hints::Hint,
    instance_documents::{
        InstanceDocuments, InstanceTracking, OfferAttempts, engine_problem, host_health, host_instance_type,
        merge_host_report, offer_instance_type, reported_hardware,
    },
    parsed_fleet_spec::{self, ParsedFleetSpec},
    pass_error::PassError,
};

pub(super) struct InstancesPipeline(pub(super) PipelineContext);

pub(crate) const QUEUE: Queue = Queue {
    pipeline: Hint::Instances.as_str(),
    table: "instances",
    statuses: &["pending", "provisioning", "idle", "busy", "terminating"],
};

/// Interval at which a host without a working container engine is polled.
const ENGINE_POLL: Span = Span::secs(5);

pub(crate) struct Row {
    instance: Instance,
    fleet: Option<FleetContext>,
    documents: InstanceDocuments,
}

struct FleetContext {
    shape: Arc<ParsedFleetSpec>,
    members: i64,
}

impl Row {
    fn kind(&self) -> Option<BackendKind> {
        self.instance.backend.as_deref().map(BackendKind::of)
    }

    fn is_ssh(&self) -> bool {
        self.kind() == Some(BackendKind::UserHosts)
    }

    /// Returns whether it was made for one job, which is the only one that it ever runs.
    fn is_pod(&self) -> bool {
        self.kind() == Some(BackendKind::Pods)
    }

    fn backend<'a>(&self, backends: &'a Backends) -> Option<&'a Arc<dyn Backend>> {
        backends.named(self.instance.backend.as_deref()?)
    }
}

/// Results of a pass: what agents and backends reported, and the orphaned tasks on the host.
#[derive(Default)]
pub(crate) struct InstanceFindings {
    machine: Option<BackendInstance>,
    news: Option<HostReport>,
    /// The offers, with the one that was granted.
    granted: Option<OfferAttempts>,
    /// The offers, with the one that is being requested.
    tries: Option<OfferAttempts>,
    total_blocks: Option<i64>,
    orphans: Vec<OrphanTask>,
    /// Set if no query was made: the last response is valid until then.
    answered_until: Option<Timestamp>,
}

pub(crate) struct InstanceReport {
    seen: InstanceObservation,
    findings: InstanceFindings,
}

impl InstanceReport {
    fn from_observation(seen: InstanceObservation) -> Self {
        Self { seen, findings: InstanceFindings::default() }
    }
}

pub(crate) struct InstancePassPlan {
    plan: Plan,
    findings: InstanceFindings,
}

impl Pipeline for InstancesPipeline {
    type Row = Row;
    type Observation = InstanceReport;
    type Plan = InstancePassPlan;
    type Error = PassError;

    fn queue(&self) -> Queue {
        QUEUE
    }

    async fn load(&self, lease: &Lease) -> Result<Option<Row>, PassError> {
        let Some(instance) = rows::load(&self.0.db, lease).await? else { return Ok(None) };
        let fleet = match instance.fleet_id.filter(|_| needs_fleet(&instance)) {
            Some(id) => match rows::fleet_summary(&self.0.db, id).await? {
                Some(FleetSummary { spec, members }) => {
                    Some(FleetContext { shape: parsed_fleet_spec::for_spec(id, &spec)?, members })
                }
                None => None,
            },
            None => None,
        };
        let documents = InstanceDocuments::of(&instance)?;
        Ok(Some(Row { instance, fleet, documents }))
    }

    async fn observe(&self, lease: &Lease, row: &Row) -> Result<InstanceReport, PassError> {
        let (view, now) = (view(row), Timestamp(lease.now()));
        if !brain::should_probe(&view, now) {
            return Ok(InstanceReport::from_observation(InstanceObservation::NotRequested));
        }
        let answered_until = brain::answer_valid_until(&view, row.instance.seen_at, self.poll(row), now);
        if answered_until.is_some() {
            let findings = InstanceFindings { answered_until, ..InstanceFindings::default() };
            return Ok(InstanceReport {
                seen: InstanceObservation::Answers { health: view.health },
                findings,
            });
        }
        match row.instance.status {
            Status::Provisioning => Ok(self.observe_starting(row).await),
            Status::Idle | Status::Busy => self.observe_ready(row).await,
            // Nothing to observe: the actions of the pass return the state.
            Status::Pending | Status::Terminating | Status::Terminated => {
                Ok(InstanceReport::from_observation(InstanceObservation::NotRequested))
            }
        }
    }

    fn decide(row: &Row, report: InstanceReport, now: DbTime) -> InstancePassPlan {
        let plan = brain::decide(&view(row), &report.seen, Timestamp(now));
        InstancePassPlan {
            plan: with_backend_message(row, plan, &report.findings),
            findings: report.findings,
        }
    }

    async fn act(&self, lease: &Lease, row: &Row, next: &mut InstancePassPlan) -> Result<(), PassError> {
        let report = match next.plan.action {
            Some(Action::Create) => self.create(lease, row).await?,
            Some(Action::Deploy) => self.deploy(lease, row).await?,
            Some(Action::Delete) => InstanceReport::from_observation(self.delete_machine(row).await),
            Some(Action::Check) => self.observe_starting(row).await,
            None => {
                self.remove_orphans(lease, row, next).await;
                return Ok(());
            }
        };
        let plan = brain::decide(&view(row), &report.seen, Timestamp(lease.now()));
        next.plan = with_backend_message(row, plan, &report.findings);
        next.findings = report.findings;
        Ok(())
    }

    async fn apply(
        &self,
        lease: &Lease,
        row: Row,
        next: InstancePassPlan,
    ) -> Result<ApplyOutcome, PassError> {
        let InstancePassPlan { mut plan, findings } = next;
        if findings.machine.is_some() && plan.change.is_none() {
            // The address of the agent is known now, so the next pass can call it.
            plan.due = Timestamp(lease.now());
        }
        if let Some(until) = findings.answered_until {
            plan.due = plan.due.min(until);
        }
        if engine_problem(row.documents.kind.as_ref()).is_some() {
            // Jobs wait for the engine.
            plan.due = plan.due.min(Timestamp(lease.now()) + ENGINE_POLL);
        }
        let due_in_us = Some(due_in(lease, plan.due));
        let moved = build_update(lease, &row, &plan, &findings)?;
        let wake = moved.wakes();
        let ends_idle = moved.only_while_idle;
        let over = moved.is_over;
        let written = rows::apply(&self.0.db, lease.key(), &row.instance, moved, due_in_us).await?;
        if over && written.is_done() {
            self.0.agents.forget(row.instance.id);
        }
        Ok(match written {
            WriteOutcome::Done { .. } => ApplyOutcome::Written { due_in_us, wake },
            // A job was placed on it at the same moment.
            WriteOutcome::Stale { at: Some(_) } if ends_idle => ApplyOutcome::RelatedBusy,
            WriteOutcome::Stale { .. } => ApplyOutcome::LeaseLost,
        })
    }
}

impl InstancesPipeline {
    /// Time for which a response of a host is valid.
    fn poll(&self, row: &Row) -> Span {
        if self.0.agents.is_listening(row.instance.id) {
            brain::POLL_WITH_EVENTS
        } else {
            brain::POLL_INTERVAL
        }
    }

    /// Observes an instance that exists and is not ready: queries its agent, and its backend if the agent does not
    /// answer.
    async fn observe_starting(&self, row: &Row) -> InstanceReport {
        let reachable = row.documents.machine.as_ref().is_none_or(|machine| machine.reach.is_some());
        if reachable && let Ok(news) = self.0.agents.host(row.instance.id).await {
            let seen = InstanceObservation::Answers { health: host_health(&news).0 };
            return InstanceReport {
                seen,
                findings: InstanceFindings { news: Some(news), ..InstanceFindings::default() },
            };
        }
        self.query_backend(row).await
    }

    /// Observes a ready instance: its health, and its tasks.
    async fn observe_ready(&self, row: &Row) -> Result<InstanceReport, PassError> {
        if let Some(report) = self.observe_agent(row).await? {
            return Ok(report);
        }
        let found = self.query_backend(row).await;
        let is_local = row.kind() == Some(BackendKind::ServerMachine);
        if !is_local || found.seen != InstanceObservation::Silent {
            return Ok(found);
        }
        // On this machine the backend has just started the agent again, if it had ended with the previous server. The
        // failed connection would delay the next attempt.
        self.0.agents.forget(row.instance.id);
        Ok(match self.observe_agent(row).await? {
            Some(mut report) => {
                report.findings.machine = report.findings.machine.or(found.findings.machine);
                report
            }
            None => found,
        })
    }

    /// Returns what the agent reports; `None` if it does not respond.
    async fn observe_agent(&self, row: &Row) -> Result<Option<InstanceReport>, PassError> {
        let id = row.instance.id;
        match try_join(self.0.agents.tasks(id), self.0.agents.host(id)).await {
            Ok((tasks, news)) => {
                let orphans = rows::orphan_tasks(&self.0.db, id.0, &tasks).await?;
                let seen = InstanceObservation::Answers { health: host_health(&news).0 };
                let machine = self.update_agent(row).await;
                let findings =
                    InstanceFindings { news: Some(news), orphans, machine, ..InstanceFindings::default() };
                Ok(Some(InstanceReport { seen, findings }))
            }
            Err(error) => {
                tracing::debug!(instance = %id, %error, "instance did not answer");
                Ok(None)
            }
        }
    }

    /// Updates an outdated agent and returns the changed machine. Its tasks keep running meanwhile.
    async fn update_agent(&self, row: &Row) -> Option<BackendInstance> {
        let (backend, machine) = (row.backend(&self.0.backends)?, row.documents.machine.as_ref()?);
        if !backend.is_outdated(machine).await {
            return None;
        }
        match self.find(row).await? {
            Ok(InstanceState::Running(found)) => (found != *machine).then_some(found),
            Ok(InstanceState::Starting(_) | InstanceState::Gone { .. } | InstanceState::Unknown) => None,
            Err(error) => {
                tracing::debug!(instance = %row.instance.id, %error, "failed to update the agent");
                None
            }
        }
    }

    /// Queries the backend about an instance whose agent does not answer, to determine whether it still exists.
    async fn query_backend(&self, row: &Row) -> InstanceReport {
        let findings = |machine: BackendInstance| InstanceFindings {
            machine: (row.documents.machine.as_ref() != Some(&machine)).then_some(machine),
            ..InstanceFindings::default()
        };
        match self.find(row).await {
            Some(Ok(InstanceState::Starting(machine))) => {
                InstanceReport { seen: InstanceObservation::Starting, findings: findings(machine) }
            }
            Some(Ok(InstanceState::Running(machine))) => {
                InstanceReport { seen: InstanceObservation::Silent, findings: findings(machine) }
            }
            Some(Ok(InstanceState::Gone { message })) => {
                InstanceReport::from_observation(InstanceObservation::Gone { message })
            }
            Some(Ok(InstanceState::Unknown)) => {
                InstanceReport::from_observation(InstanceObservation::Unknown)
            }
            Some(Err(error @ BackendError::HostKeyChanged { .. })) => {
                InstanceReport::from_observation(InstanceObservation::Untrusted {
                    message: error.to_string(),
                })
            }
            Some(Err(error)) => {
                tracing::debug!(instance = %row.instance.id, %error, "failed to query the backend");
                InstanceReport::from_observation(InstanceObservation::Silent)
            }
            None => InstanceReport::from_observation(InstanceObservation::Silent),
        }
    }

    /// Removes the tasks of ended jobs before the host is marked reachable again.
    async fn remove_orphans(&self, lease: &Lease, row: &Row, next: &mut InstancePassPlan) {
        for orphan in &next.findings.orphans {
            let call = CallContext {
                instance: InstanceId(lease.id),
                submission: orphan.submission,
                epoch: orphan.epoch,
            };
            if let Err(error) = agents::discard(&*self.0.agents, call, "terminated_by_server").await {
                tracing::debug!(instance = %row.instance.id, orphan = %orphan.submission, %error, "failed to remove an orphaned task");
                next.plan = brain::decide(&view(row), &InstanceObservation::Silent, Timestamp(lease.now()));
                return;
            }
        }
    }
}

/// Adds what the cluster says about a pod that starts, such as why its scheduler found no node.
fn with_backend_message(row: &Row, plan: Plan, findings: &InstanceFindings) -> Plan {
    let is_starting = row.instance.status == Status::Provisioning && plan.change.is_none();
    match findings.machine.as_ref().and_then(BackendInstance::message) {
        Some(message) if row.is_pod() && is_starting => Plan { note: Some(message.to_owned()), ..plan },
        Some(_) | None => plan,
    }
}

/// Returns whether the decision needs the state of the fleet.
fn needs_fleet(instance: &Instance) -> bool {
    match instance.status {
        Status::Pending | Status::Provisioning | Status::Terminating => true,
        Status::Idle => instance.idle_seconds_max.is_some() || instance.unreachable,
        Status::Busy => instance.unreachable,
        Status::Terminated => false,
    }
}

/// Builds the changes that the pass writes.
fn build_update(
    lease: &Lease,
    row: &Row,
    plan: &Plan,
    findings: &InstanceFindings,
) -> Result<InstanceUpdate, PassError> {
    let instance = &row.instance;
    let mut moved = InstanceUpdate { set: machine_columns(row, findings)?, ..InstanceUpdate::default() };
    health_columns(instance, plan, findings, &mut moved.set);
    let mut message = plan.note.clone();
    if let Some(change) = &plan.change {
        let why = pipeline_cause(event::Pipeline::Instance, lease, change.reason, &change.message);
        let step = event::transition::<instance::InstanceLifecycle>(
            instance.id,
            instance.status,
            change.event,
            why,
        )?;
        moved.set.push(("status", step.status.into()));
        moved.event = step.record;
        message = status_columns(row, plan, step.status, &change.message, &mut moved);
    } else if let Some(word) = occupancy_event(instance) {
        let text = match instance.busy_blocks {
            0 => "no block is in use".to_owned(),
            1 => "1 block is in use".to_owned(),
            busy => format!("{busy} blocks are in use"),
        };
        let why = pipeline_cause(event::Pipeline::Instance, lease, word.as_str(), text);
        let step = event::transition::<instance::InstanceLifecycle>(instance.id, instance.status, word, why)?;
        moved.set.push(("status", step.status.into()));
        moved.event = step.record;
        message = None;
    } else if let Some(note) =
        plan.note.as_ref().filter(|note| instance.status_message.as_ref() != Some(note))
    {
        let why = pipeline_cause(event::Pipeline::Instance, lease, "note", note);
        moved.event = Some(event::Event::note(event::Entity::Instance, instance.id, why));
    } else if plan.unreachable_since.is_some() || !is_ready(instance.status) {
        // The last message still applies.
        message = instance.status_message.clone();
    }
    if instance.unreachable && plan.unreachable_since.is_none() && is_ready(instance.status) {
        moved.marks_waiting_due = true;
        message = None;
    }
    if let Some(text) = engine_note(row, &moved.set)? {
        let why = pipeline_cause(event::Pipeline::Instance, lease, "engine", text);
        moved.engine = Some(event::Event::note(event::Entity::Instance, instance.id, why));
        moved.marks_waiting_due = true;
    }
    if plan.reports_delete_failure {
        let tracking = InstanceTracking { is_delete_failure_reported: true };
        moved.set.push(("tracking", Val::json(&tracking)?));
    }
    moved.set.push(("status_message", message.into()));
    Ok(moved)
}

fn is_ready(status: Status) -> bool {
    match status {
        Status::Idle | Status::Busy => true,
        Status::Pending | Status::Provisioning | Status::Terminating | Status::Terminated => false,
    }
}

/// Adds the columns that change with the status, and returns the new status message.
fn status_columns(
    row: &Row,
    plan: &Plan,
    to: Status,
    message: &str,
    moved: &mut InstanceUpdate,
) -> Option<String> {
    let instance = &row.instance;
    moved.marks_fleet_due = true;
    match to {
        Status::Pending => None,
        Status::Provisioning => {
            moved.set.push(("started_at", Val::Now));
            moved.marks_jobs_due = true;
            Some("waiting for its agent".to_owned())
        }
        Status::Idle | Status::Busy => {
            if instance.started_at.is_none() {
                moved.set.push(("started_at", Val::Now));
            }
            if to == Status::Idle {
                moved.set.push(("idle_since", Val::Now));
            }
            (moved.marks_jobs_due, moved.marks_waiting_due) = (true, true);
            None
        }
        Status::Terminating | Status::Terminated => {
            if let Some(reason) = plan.reason {
                moved.set.push(("termination_reason", reason.as_str().into()));
                moved.set.push(("termination_message", message.into()));
            }
            moved.marks_jobs_due = true;
            if to == Status::Terminating {
                moved.set.push(("termination_deadline_at", Val::NowPlus(DELETE_MAX.0)));
                moved.only_while_idle = instance.busy_blocks == 0 && is_ready(instance.status);
                if plan.reason == Some(TerminationReason::IdleTimeout) {
                    let nodes = row.fleet.as_ref().and_then(|fleet| fleet.shape.nodes());
                    moved.leaves_at_least = Some(nodes.map_or(0, |nodes| nodes.min.into()));
                }
                return None;
            }
            moved.is_over = true;
            // An instance that was never created is shown until another replaces it; its job shows the reason as well.
            let hidden = instance.status != Status::Pending || instance.made_for.is_some();
            moved.set.extend([
                ("finished", true.into()),
                ("finished_at", Val::Now),
                ("deleted", hidden.into()),
                ("unreachable", false.into()),
            ]);
            None
        }
    }
}

/// Adds the columns of the health of a ready instance.
fn health_columns(instance: &Instance, plan: &Plan, findings: &InstanceFindings, set: &mut Values) {
    let becomes_ready = plan.change.as_ref().is_some_and(|change| {
        matches!(change.event, instance::Event::ReadyIdle | instance::Event::ReadyBusy)
    });
    if !is_ready(instance.status) && !becomes_ready {
        return;
    }
    set.extend([
        ("unreachable", plan.unreachable_since.is_some().into()),
        ("unreachable_since", plan.unreachable_since.into()),
        ("health", plan.health.as_str().into()),
    ]);
    if plan.unreachable_since.is_none() && findings.answered_until.is_none() {
        set.push(("seen_at", Val::Now));
    }
    if let Some(news) = &findings.news {
        set.push(("health_message", host_health(news).1.into()));
        set.push(("agent_version", news.version.as_str().into()));
    } else if plan.health == Health::Failure {
        set.push(("health_message", plan.note.clone().or_else(|| instance.health_message.clone()).into()));
    }
}

/// Columns of what was learned about the machine.
fn machine_columns(row: &Row, findings: &InstanceFindings) -> Result<Values, PassError> {
    let (instance, mut set) = (&row.instance, Values::new());
    if let Some(tries) = &findings.tries {
        set.push(("offer", Val::json(tries)?));
        set.push(("backend", tries.current().map(|offer| offer.backend.clone()).into()));
    }
    if let Some(tries) = &findings.granted
        && let Some(offer) = tries.current()
    {
        set.extend([
            ("offer", Val::json(tries)?),
            ("backend", offer.backend.as_str().into()),
            ("region", offer.region.as_str().into()),
            ("availability_zone", offer.zones.first().filter(|_| offer.zones.len() == 1).cloned().into()),
            ("price", offer.price.known_dollars().into()),
            ("spot", offer.host.spot.into()),
            ("total_blocks", i64::from(offer.total_blocks.max(1)).into()),
            ("instance_type", offer_instance_type(offer).to_string().into()),
        ]);
    }
    if let Some(total) = findings.total_blocks {
        set.push(("total_blocks", total.into()));
    }
    let machine = findings.machine.as_ref();
    if let Some(machine) = machine {
        set.push(("provisioning", Val::json(machine)?));
        // An SSH host keeps the name that its fleet has for it.
        if !row.is_ssh() {
            set.push(("hostname", machine.hostname.clone().or_else(|| instance.hostname.clone()).into()));
        }
        if let Some(version) = &machine.agent_version {
            set.push(("agent_version", version.as_str().into()));
        }
    }
    let stored = row.documents.kind.clone();
    let has = machine.and_then(|machine| machine.has.clone());
    let inspected = findings.news.as_ref().filter(|_| instance.instance_type.is_none());
    let found = has.or_else(|| inspected.map(|news| reported_hardware(&news.info))).map(|has| {
        let granted = findings.granted.as_ref().and_then(OfferAttempts::current);
        let name = match granted {
            Some(offer) => offer.instance_type.clone(),
            None => type_name(row)?,
        };
        let spot = granted.map_or(instance.spot, |offer| offer.host.spot);
        Ok::<_, PassError>(host_instance_type(&name, &has, spot))
    });
    let mut kind = match found.transpose()? {
        Some(found) => found,
        None => match findings.news.as_ref().and(stored.clone()) {
            Some(stored) => stored,
            None => return Ok(set),
        },
    };
    let is_local = row.kind() == Some(BackendKind::ServerMachine);
    merge_host_report(&mut kind, stored.as_ref(), findings.news.as_ref(), is_local);
    set.retain(|(column, _)| *column != "instance_type");
    if stored.as_ref() != Some(&kind) {
        set.push(("instance_type", kind.to_string().into()));
    }
    Ok(set)
}

/// Message when the container engine of the host stops responding, or responds again.
fn engine_note(row: &Row, set: &Values) -> Result<Option<String>, DbError> {
    let text = set.iter().find_map(|(column, value)| {
        if let Val::Text(text) = value { Some(text).filter(|_| *column == "instance_type") } else { None }
    });
    let Some(text) = text else { return Ok(None) };
    let kind: Value = INSTANCE_TYPE.decode(row.instance.id, text)?;
    Ok(match (engine_problem(row.documents.kind.as_ref()), engine_problem(Some(&kind))) {
        (None, Some(why)) => {
            Some(format!("its container engine is not available, and jobs with an image wait for it: {why}"))
        }
        (Some(_), None) => Some("its container engine is available again".to_owned()),
        (None, None) | (Some(_), Some(_)) => None,
    })
}

/// Type of an instance for which none was reported.
fn type_name(row: &Row) -> Result<String, PassError> {
    if row.is_ssh() {
        return Ok("ssh".to_owned());
    }
    Ok(crate::inventory::offer(&row.instance)?.instance_type)
}

/// Event that follows from the number of blocks in use.
fn occupancy_event(row: &Instance) -> Option<instance::Event> {
    match (row.status, row.busy_blocks > 0) {
        (Status::Idle, true) => Some(instance::Event::JobAssigned),
        (Status::Busy, false) => Some(instance::Event::LastJobFreed),
        (_, _) => None,
    }
}

fn view(row: &Row) -> brain::InstanceView {
    let instance = &row.instance;
    let backend = instance.backend.as_deref().unwrap_or_default();
    let kind = row.documents.offer().map(|offer| offer.instance_type.as_str());
    let requested = instance.termination_asked_at.map(|_| {
        let reason = instance.end_reason.as_deref().and_then(|word| word.parse().ok());
        reason.unwrap_or(TerminationReason::TerminatedByUser)
    });
    brain::InstanceView {
        kind: if row.is_ssh() { InstanceKind::Ssh } else { InstanceKind::Cloud },
        status: instance.status,
        created_at: instance.created_at,
        started_at: instance.started_at,
        provisioning_max: provisioning_timeout(backend, kind.unwrap_or_default()),
        jobs: u32::from(instance.busy_blocks > 0),
        is_made_for_job: instance.made_for.is_some(),
        requested_end: requested,
        idle_since: instance.idle_since.or(instance.started_at),
        idle_max: if row.is_pod() { Some(Span::ZERO) } else { instance.idle_seconds_max.map(Span::secs) },
        is_above_min: row.is_pod()
            || row.fleet.as_ref().is_some_and(|fleet| {
                fleet.members > fleet.shape.nodes().map_or(0, |nodes| i64::from(nodes.min))
            }),
        unreachable_since: instance.unreachable_since,
        health: instance.health.parse().unwrap_or(Health::Healthy),
        terminating_since: instance.termination_deadline_at.map(|deadline| deadline - DELETE_MAX),
        is_forced: instance.end_reason.as_deref() == Some(instances::FORCED),
        is_delete_failure_reported: row.documents.tracking.is_delete_failure_reported,
    }
}
