//! The event: what happened, to whom, by whom and why. Append-only, written with the change it tells of.

use serde::Serialize;
use uuid::Uuid;

use crate::{
    container, fleet, gateway,
    id::UserId,
    instance, job,
    machine::{StateMachine, Status as _, Step, StrEnum as _, words},
    managed_job, run, volume,
};

words! {
    /// What an event is about.
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

    /// What sort of thing happened.
    pub enum EventKind: "event kind" {
        /// the status changed
        Status = "status",
        /// the schedule state of a managed job changed
        Schedule = "schedule",
        /// something worth telling happened and the status stays
        Note = "note",
        /// a change was asked for that the machine does not know; nothing was written
        Refused = "refused",
    }

    /// The pipelines, as actors.
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

/// Who did it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Actor {
    User(UserId),
    /// A pipeline, under the lease that carries `epoch`.
    Pipeline {
        name: Pipeline,
        epoch: u64,
    },
    /// The server itself, outside any pipeline: at start-up, on a schedule of its own.
    Server,
}

impl Actor {
    /// As stored: the pipeline's name, `user:ID` or `server`.
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

/// One row of `events`, but for its number and time, which the database gives.
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
    /// A word that programs read: a termination reason, or what the machine was told.
    pub reason: String,
    /// A sentence that people read.
    pub message: String,
}

/// Who changes something, and why: no event is made without.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EventCause {
    pub actor: Actor,
    pub reason: String,
    pub message: String,
}

/// A machine whose changes are recorded.
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

/// A change that the machine does not know. The caller writes nothing but this event.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{machine} in status `{status}` refuses `{event}`")]
pub struct TransitionError {
    pub machine: &'static str,
    pub status: &'static str,
    pub event: &'static str,
    pub record: Box<Event>,
}

/// The status after a change, and its record where the status changed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TransitionResult<S> {
    pub status: S,
    pub record: Option<Event>,
}

impl Event {
    /// The first event of a row: it now exists, in `status`.
    pub fn created<M: RecordedMachine>(id: impl Into<Uuid>, status: M::Status, because: EventCause) -> Self {
        Self::record::<M>(M::KIND, id.into(), None, Some(status), because)
    }

    /// Something worth telling about a row whose status stays.
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

/// Moves a row by an event and tells of it: the one way to change a status.
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
