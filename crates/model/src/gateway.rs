//! The gateway and its replicas: hosts that take requests for services.
//!
//! Deletion is not a status of the gateway: its replicas end, and the row leaves all lists.

use crate::machine::{StateMachine, Step, final_statuses, words};

words! {
    /// The status of a gateway.
    pub enum Status: "gateway status" {
        /// wanted; nothing exists yet
        Submitted = "submitted",
        /// its load balancer and replicas are being made
        Provisioning = "provisioning",
        /// all its replicas were running: it takes services
        Running = "running",
        /// a replica ended before all were running
        Failed = "failed",
    }

    /// What can happen to a gateway.
    pub enum Event: "gateway event" {
        /// its replicas were asked for
        Created = "created",
        /// all replicas are running
        Ready = "ready",
        /// a replica ended meanwhile, or none can be made
        Broken = "broken",
        /// a user deletes it: its replicas end and the row leaves all lists
        DeleteAsked = "delete-asked",
    }

    /// The status of one replica of a gateway.
    pub enum ReplicaStatus: "gateway replica status" {
        /// wanted; nothing exists yet
        Submitted = "submitted",
        /// exists; the gateway program does not answer yet
        Provisioning = "provisioning",
        /// takes requests
        Running = "running",
        /// being given back
        Terminating = "terminating",
        /// gone
        Terminated = "terminated",
    }

    /// What can happen to one replica of a gateway.
    pub enum ReplicaEvent: "gateway replica event" {
        /// the backend made its host
        Created = "created",
        /// the gateway program answers
        Ready = "ready",
        /// its host failed, or was not ready in time
        Broken = "broken",
        /// the gateway is deleted or wants fewer replicas
        StopAsked = "stop-asked",
        /// the backend's list does not contain its host any more
        Deleted = "deleted",
    }
}

final_statuses!(Status: Failed; active: Submitted | Provisioning | Running);
final_statuses!(ReplicaStatus: Terminated; active: Submitted | Provisioning | Running | Terminating);

/// The gateway's machine.
#[derive(Clone, Copy, Debug)]
pub struct GatewayLifecycle;

impl StateMachine for GatewayLifecycle {
    type Status = Status;
    type Event = Event;
    const NAME: &'static str = "gateway";
    const ABOUT: &'static str =
        "Takes requests for services. A deleted row keeps its status and leaves all lists.";
    const START: &'static [Status] = &[Status::Submitted];
    const STOP: &'static [Event] = &[Event::DeleteAsked];

    fn step(status: Status, event: Event) -> Step<Status> {
        step(status, event)
    }
}

pub fn step(status: Status, event: Event) -> Step<Status> {
    use Event::*;
    use Status::*;
    use Step::{Refuse, Stay, To};
    match status {
        Submitted => match event {
            Created => To(Provisioning),
            Broken => To(Failed),
            DeleteAsked => Stay,
            Ready => Refuse,
        },
        Provisioning => match event {
            Ready => To(Running),
            Broken => To(Failed),
            Created | DeleteAsked => Stay,
        },
        // A replica lost later is replaced; the gateway stays in service with the others.
        Running => match event {
            Ready | Broken | DeleteAsked => Stay,
            Created => Refuse,
        },
        Failed => match event {
            DeleteAsked => Stay,
            Created | Ready | Broken => Refuse,
        },
    }
}

/// The machine of one replica of a gateway.
#[derive(Clone, Copy, Debug)]
pub struct GatewayReplicaLifecycle;

impl StateMachine for GatewayReplicaLifecycle {
    type Status = ReplicaStatus;
    type Event = ReplicaEvent;
    const NAME: &'static str = "gateway-replica";
    const ABOUT: &'static str = "One host of a gateway.";
    const START: &'static [ReplicaStatus] = &[ReplicaStatus::Submitted];
    const STOP: &'static [ReplicaEvent] = &[ReplicaEvent::StopAsked];

    fn step(status: ReplicaStatus, event: ReplicaEvent) -> Step<ReplicaStatus> {
        step_replica(status, event)
    }
}

pub fn step_replica(status: ReplicaStatus, event: ReplicaEvent) -> Step<ReplicaStatus> {
    use ReplicaEvent::*;
    use ReplicaStatus::*;
    use Step::{Refuse, Stay, To};
    match status {
        Submitted => match event {
            Created => To(Provisioning),
            Broken | StopAsked => To(Terminating),
            Ready | Deleted => Refuse,
        },
        Provisioning => match event {
            Ready => To(Running),
            Broken | StopAsked => To(Terminating),
            Created => Stay,
            Deleted => Refuse,
        },
        Running => match event {
            Broken | StopAsked => To(Terminating),
            Ready => Stay,
            Created | Deleted => Refuse,
        },
        Terminating => match event {
            Deleted => To(Terminated),
            Broken | StopAsked => Stay,
            Created | Ready => Refuse,
        },
        Terminated => match event {
            StopAsked | Deleted => Stay,
            Created | Ready | Broken => Refuse,
        },
    }
}
