//! Events: what happened to a row, the actor and the reason. Append-only, written together with the change.

use serde::Serialize;
use uuid::Uuid;

use crate::{
    container, fleet, gateway,
    id::UserId,
    instance, job, managed_job, run,
    state_machine::{StateMachine, Status as _, Step, StrEnum as _, words},
    volume,
};

words! {
    /// Kind of row that an event belongs to.
    pub enum Entity: "event entity" {
        Project = "project",
        User = "user",
        Fleet = "fleet",
        Instance = "instance",
        Run = "run",
        Job = "job",
        Volume = "volume",
        Gateway = "gateway",
        GatewayReplica = "gateway-replica",
        Secret = "secret",
        ManagedJob = "managed-job",
        Container = "container",
    }

    /// Kind of event.
    pub enum EventKind: "event kind" {
        /// the status changed
        Status = "status",
        /// the schedule state of a managed job changed
        Schedule = "schedule",
        /// something notable happened and the status stays
        Note = "note",
        /// a change was requested that the state machine does not permit; nothing was written
        Refused = "refused",
    }

    /// Pipelines, as actors.
    pub enum Pipeline: "pipeline" {
        Run = "Run",
        JobSubmitted = "JobSubmitted",
        JobRunning = "JobRunning",
        JobTerminating = "JobTerminating",
        Instance = "Instance",
        Fleet = "Fleet",
        Volume = "Volume",
        Gateway = "Gateway",
        ManagedJob = "ManagedJob",
        Container = "Container",
    }
}

/// Actor that caused an event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Actor {
    User(UserId),
    /// A pipeline, under the lease with this `epoch`.
    Pipeline {
        name: Pipeline,
        epoch: u64,
    },
    /// The server itself, outside any pipeline: at start-up, or on an internal schedule.
    Server,
}

impl Actor {
    /// Returns the stored form: the pipeline's name, `user:ID` or `server`.
    pub fn label(self) -> String {
        match self {
            Self::User(id) => format!("user:{id}"),
            Self::Pipeline { name, .. } => name.as_str().to_owned(),
            Self::Server => "server".to_owned(),
        }
    }

    pub const fn epoch(self) -> Option<u64> {
        match self {
            Self::Pipeline { epoch, .. } => Some(epoch),
            Self::User(_) | Self::Server => None,
        }
    }
}

/// One row of `events`, except for its number and time, which the database assigns.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Event {
    pub entity: Entity,
    pub id: Uuid,
    pub kind: EventKind,
    pub from: Option<&'static str>,
    pub to: Option<&'static str>,
    pub is_final: bool,
    pub actor: String,
    pub epoch: Option<u64>,
    /// Fixed value for programs: a termination reason, or the event of the state machine.
    pub reason: String,
    /// Message for people.
    pub message: String,
}

/// Actor and reason of a change, required by every event.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EventCause {
    pub actor: Actor,
    pub reason: String,
    pub message: String,
}

/// A state machine whose changes are recorded.
pub trait RecordedMachine: StateMachine {
    const ENTITY: Entity;
    const KIND: EventKind = EventKind::Status;
}

macro_rules! recorded {
    ($($machine:ty => $entity:ident $kind:ident;)*) => {$(
        impl RecordedMachine for $machine {
            const ENTITY: Entity = Entity::$entity;
            const KIND: EventKind = EventKind::$kind;
        }
    )*};
}

recorded! {
    run::RunLifecycle => Run Status;
    job::JobLifecycle => Job Status;
    instance::InstanceLifecycle => Instance Status;
    fleet::FleetLifecycle => Fleet Status;
    volume::VolumeLifecycle => Volume Status;
    gateway::GatewayLifecycle => Gateway Status;
    gateway::GatewayReplicaLifecycle => GatewayReplica Status;
    managed_job::ManagedTaskLifecycle => ManagedJob Status;
    managed_job::ScheduleLifecycle => ManagedJob Schedule;
    container::ContainerLifecycle => Container Status;
}

/// A change that the state machine does not permit. The caller writes only this event.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{machine} with status `{status}` refuses `{event}`")]
pub struct TransitionError {
    pub machine: &'static str,
    pub status: &'static str,
    pub event: &'static str,
    pub record: Box<Event>,
}

/// Status after a change, and its record if the status changed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TransitionResult<S> {
    pub status: S,
    pub record: Option<Event>,
}

impl Event {
    /// Returns the first event of a row: it was created, in `status`.
    pub fn created<M: RecordedMachine>(id: impl Into<Uuid>, status: M::Status, because: EventCause) -> Self {
        Self::record::<M>(M::KIND, id.into(), None, Some(status), because)
    }

    /// Returns a notable event of a row whose status stays.
    pub fn note(entity: Entity, id: impl Into<Uuid>, because: EventCause) -> Self {
        let EventCause { actor, reason, message } = because;
        Self {
            entity,
            id: id.into(),
            kind: EventKind::Note,
            from: None,
            to: None,
            is_final: false,
            actor: actor.label(),
            epoch: actor.epoch(),
            reason,
            message,
        }
    }

    fn record<M: RecordedMachine>(
        kind: EventKind,
        id: Uuid,
        from: Option<M::Status>,
        to: Option<M::Status>,
        because: EventCause,
    ) -> Self {
        Self {
            kind,
            from: from.map(|status| status.as_str()),
            to: to.map(|status| status.as_str()),
            // Only the status column has a final value that others rely on.
            is_final: kind == EventKind::Status && to.is_some_and(|status| status.is_final()),
            ..Self::note(M::ENTITY, id, because)
        }
    }
}

/// Applies an event to a row and records it: the only means to change a status.
pub fn transition<M: RecordedMachine>(
    id: impl Into<Uuid>,
    from: M::Status,
    event: M::Event,
    because: EventCause,
) -> Result<TransitionResult<M::Status>, TransitionError> {
    match M::step(from, event) {
        Step::To(to) => {
            let record = Event::record::<M>(M::KIND, id.into(), Some(from), Some(to), because);
            Ok(TransitionResult { status: to, record: Some(record) })
        }
        Step::Stay => Ok(TransitionResult { status: from, record: None }),
        Step::Refuse => Err(TransitionError {
            machine: M::NAME,
            status: from.as_str(),
            event: event.as_str(),
            record: Box::new(Event::record::<M>(EventKind::Refused, id.into(), Some(from), None, because)),
        }),
    }
}
