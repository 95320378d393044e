//! The gateway and its replicas: hosts that receive requests for services.
//!
//! Deletion is not a status of the gateway: its replicas are terminated, and the row is removed from all lists.

use crate::state_machine::{StateMachine, Step, final_statuses, words};

words! {
    /// Status of a gateway.
    pub enum Status: "gateway status" {
        /// requested; nothing exists yet
        Submitted = "submitted",
        /// its load balancer and replicas are being created
        Provisioning = "provisioning",
        /// all its replicas were running: it accepts services
        Running = "running",
        /// a replica ended before all were running
        Failed = "failed",
    }

    /// Events of a gateway.
    pub enum Event: "gateway event" {
        /// its replicas were requested
        Created = "created",
        /// all replicas are running
        Ready = "ready",
        /// a replica ended meanwhile, or none can be created
        Broken = "broken",
        /// a user deletes it: its replicas are terminated and the row is removed from all lists
        DeleteRequested = "delete-asked",
    }

    /// Status of one replica of a gateway.
    pub enum ReplicaStatus: "gateway replica status" {
        /// requested; nothing exists yet
        Submitted = "submitted",
        /// exists; the gateway program does not respond yet
        Provisioning = "provisioning",
        /// receives requests
        Running = "running",
        /// being deleted
        Terminating = "terminating",
        /// gone
        Terminated = "terminated",
    }

    /// Events of one replica of a gateway.
    pub enum ReplicaEvent: "gateway replica event" {
        /// the backend created its host
        Created = "created",
        /// the gateway program responds
        Ready = "ready",
        /// its host failed, or was not ready in time
        Broken = "broken",
        /// the gateway is deleted or needs fewer replicas
        StopRequested = "stop-asked",
        /// the backend's list does not contain its host any more
        Deleted = "deleted",
    }
}

final_statuses!(Status: Failed; active: Submitted | Provisioning | Running);
final_statuses!(ReplicaStatus: Terminated; active: Submitted | Provisioning | Running | Terminating);

/// State machine of a gateway.
#[derive(Clone, Copy, Debug)]
pub struct GatewayLifecycle;

impl StateMachine for GatewayLifecycle {
    type Status = Status;
    type Event = Event;
    const NAME: &'static str = "gateway";
    const ABOUT: &'static str =
        "Receives requests for services. A deleted row keeps its status and is no longer listed.";
    const START: &'static [Status] = &[Status::Submitted];
    const STOP: &'static [Event] = &[Event::DeleteRequested];

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
            DeleteRequested => Stay,
            Ready => Refuse,
        },
        Provisioning => match event {
            Ready => To(Running),
            Broken => To(Failed),
            Created | DeleteRequested => Stay,
        },
        // A replica lost later is replaced; the gateway stays in service with the others.
        Running => match event {
            Ready | Broken | DeleteRequested => Stay,
            Created => Refuse,
        },
        Failed => match event {
            DeleteRequested => Stay,
            Created | Ready | Broken => Refuse,
        },
    }
}

/// State machine of one replica of a gateway.
#[derive(Clone, Copy, Debug)]
pub struct GatewayReplicaLifecycle;

impl StateMachine for GatewayReplicaLifecycle {
    type Status = ReplicaStatus;
    type Event = ReplicaEvent;
    const NAME: &'static str = "gateway-replica";
    const ABOUT: &'static str = "One host of a gateway.";
    const START: &'static [ReplicaStatus] = &[ReplicaStatus::Submitted];
    const STOP: &'static [ReplicaEvent] = &[ReplicaEvent::StopRequested];

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
            Broken | StopRequested => To(Terminating),
            Ready | Deleted => Refuse,
        },
        Provisioning => match event {
            Ready => To(Running),
            Broken | StopRequested => To(Terminating),
            Created => Stay,
            Deleted => Refuse,
        },
        Running => match event {
            Broken | StopRequested => To(Terminating),
            Ready => Stay,
            Created | Deleted => Refuse,
        },
        Terminating => match event {
            Deleted => To(Terminated),
            Broken | StopRequested => Stay,
            Created | Ready => Refuse,
        },
        Terminated => match event {
            StopRequested | Deleted => Stay,
            Created | Ready | Broken => Refuse,
        },
    }
}
