//! The instance: one host of a fleet.

use crate::state_machine::{StateMachine, Step, final_statuses, words};

words! {
    /// Status of an instance.
    pub enum Status: "instance status" {
        /// requested; nothing exists yet, or the SSH host is being deployed
        Pending = "pending",
        /// exists; its shim does not respond yet
        Provisioning = "provisioning",
        /// ready, no job on it
        Idle = "idle",
        /// ready, at least one job on it
        Busy = "busy",
        /// being deleted
        Terminating = "terminating",
        /// gone from its backend
        Terminated = "terminated",
    }

    /// Events of an instance.
    pub enum Event: "instance event" {
        /// the backend created it, or the SSH host is deployed but not healthy yet
        Created = "created",
        /// reachable, with no job assigned
        ReadyIdle = "ready-idle",
        /// reachable, with a job already assigned
        ReadyBusy = "ready-busy",
        /// no offer is left, or the SSH host cannot be deployed (time, key, network, blocks)
        GaveUp = "gave-up",
        /// not ready within its provisioning time, or a backend that did not accept or reject the request in time
        Expired = "expired",
        /// a job was assigned
        JobAssigned = "job-assigned",
        /// the last job on it was freed
        LastJobFreed = "last-job-freed",
        /// its job ended and it accepts no other: no shim, or it was still provisioning
        JobFinished = "job-finished",
        /// idle for longer than allowed, different from the fleet's spec, or above nodes.max
        Surplus = "surplus",
        /// a cloud host was unreachable for too long
        Unreachable = "unreachable",
        /// a user deletes it or its fleet
        StopRequested = "stop-asked",
        /// the backend's list does not contain it any more
        Deleted = "deleted",
    }

    /// Reason why an instance ends.
    pub enum TerminationReason: "instance termination reason" {
        TerminatedByUser = "terminated_by_user",
        IdleTimeout = "idle_timeout",
        ProvisioningTimeout = "provisioning_timeout",
        Error = "error",
        JobFinished = "job_finished",
        Unreachable = "unreachable",
        NoOffers = "no_offers",
        MasterFailed = "master_failed",
        MaxInstancesLimit = "max_instances_limit",
        FleetSpecMismatch = "fleet_spec_mismatch",
        NoBalance = "no_balance",
    }

    /// Health of a reachable host.
    pub enum Health: "instance health" {
        Healthy = "healthy",
        /// usable, worth checking
        Warning = "warning",
        /// receives no new jobs
        Failure = "failure",
    }
}

final_statuses!(Status: Terminated; active: Pending | Provisioning | Idle | Busy | Terminating);

/// State machine of an instance.
#[derive(Clone, Copy, Debug)]
pub struct InstanceLifecycle;

impl StateMachine for InstanceLifecycle {
    type Status = Status;
    type Event = Event;
    const NAME: &'static str = "instance";
    const ABOUT: &'static str = "One instance of a fleet.";
    const START: &'static [Status] = &[Status::Pending, Status::Provisioning];
    const STOP: &'static [Event] = &[Event::StopRequested];

    fn step(status: Status, event: Event) -> Step<Status> {
        step(status, event)
    }
}

pub fn step(status: Status, event: Event) -> Step<Status> {
    use Event::*;
    use Status::*;
    use Step::{Refuse, Stay, To};
    match status {
        Pending => match event {
            Created => To(Provisioning),
            ReadyIdle => To(Idle),
            GaveUp => To(Terminated),
            Expired | JobFinished | StopRequested => To(Terminating),
            JobAssigned => Stay,
            ReadyBusy | LastJobFreed | Surplus | Unreachable | Deleted => Refuse,
        },
        Provisioning => match event {
            ReadyIdle => To(Idle),
            ReadyBusy => To(Busy),
            Expired | JobFinished | StopRequested => To(Terminating),
            Created | JobAssigned => Stay,
            GaveUp | LastJobFreed | Surplus | Unreachable | Deleted => Refuse,
        },
        Idle => match event {
            JobAssigned => To(Busy),
            Surplus | Unreachable | StopRequested => To(Terminating),
            ReadyIdle => Stay,
            Created | ReadyBusy | GaveUp | Expired | LastJobFreed | JobFinished | Deleted => Refuse,
        },
        Busy => match event {
            LastJobFreed => To(Idle),
            JobFinished | Unreachable | StopRequested => To(Terminating),
            JobAssigned | ReadyBusy => Stay,
            Created | ReadyIdle | GaveUp | Expired | Surplus | Deleted => Refuse,
        },
        Terminating => match event {
            Deleted => To(Terminated),
            Expired | LastJobFreed | JobFinished | Surplus | Unreachable | StopRequested => Stay,
            Created | ReadyIdle | ReadyBusy | GaveUp | JobAssigned => Refuse,
        },
        Terminated => match event {
            StopRequested | Deleted => Stay,
            Created | ReadyIdle | ReadyBusy | GaveUp | Expired | JobAssigned => Refuse,
            LastJobFreed | JobFinished | Surplus | Unreachable => Refuse,
        },
    }
}
