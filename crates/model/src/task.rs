//! The task: the state that a shim keeps for one submission on its host.
//!
//! The statuses are those of the agents' API, which has no "terminating": a request to terminate is stored next to the
//! status, and the status changes once nothing of the task runs and everything it held is released.

use crate::state_machine::{StateMachine, Step, final_statuses, words};

words! {
    /// Status of a task.
    pub enum Status: "task status" {
        /// accepted and stored
        Pending = "pending",
        /// GPUs, keys, volumes and mounts are being acquired
        Preparing = "preparing",
        /// the image is being pulled
        Pulling = "pulling",
        /// the container is being created and started
        Creating = "creating",
        /// the container runs
        Running = "running",
        /// nothing of it runs and it holds nothing; its files stay until it is removed
        Terminated = "terminated",
    }

    /// Events of a task.
    pub enum Event: "task event" {
        /// its preparation started
        Begun = "begun",
        /// everything it needs was acquired
        Prepared = "prepared",
        /// the image is available
        Pulled = "pulled",
        /// the container was started, or found running
        Started = "started",
        /// a step before the start failed; acquired resources are released
        Failed = "failed",
        /// the container ended by itself, or is gone; acquired resources are released
        Ended = "ended",
        /// the server requests its termination
        TerminateRequested = "terminate-asked",
        /// it was terminated as requested; acquired resources are released
        Stopped = "stopped",
        /// the server requests its removal
        RemoveRequested = "remove-asked",
    }
}

final_statuses!(Status: Terminated; active: Pending | Preparing | Pulling | Creating | Running);

/// State machine of a task.
#[derive(Clone, Copy, Debug)]
pub struct ShimTaskLifecycle;

impl StateMachine for ShimTaskLifecycle {
    type Status = Status;
    type Event = Event;
    const NAME: &'static str = "task";
    const ABOUT: &'static str =
        "The record that a shim keeps of one submission, from its acceptance to its removal.";
    const START: &'static [Status] = &[Status::Pending];
    const STOP: &'static [Event] = &[Event::TerminateRequested];

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
            Begun => To(Preparing),
            Failed | Stopped => To(Terminated),
            TerminateRequested => Stay,
            Prepared | Pulled | Started | Ended | RemoveRequested => Refuse,
        },
        Preparing => match event {
            Prepared => To(Pulling),
            Failed | Stopped => To(Terminated),
            Begun | TerminateRequested => Stay,
            Pulled | Started | Ended | RemoveRequested => Refuse,
        },
        Pulling => match event {
            Pulled => To(Creating),
            Failed | Stopped => To(Terminated),
            Prepared | TerminateRequested => Stay,
            Begun | Started | Ended | RemoveRequested => Refuse,
        },
        Creating => match event {
            Started => To(Running),
            Failed | Ended | Stopped => To(Terminated),
            Pulled | TerminateRequested => Stay,
            Begun | Prepared | RemoveRequested => Refuse,
        },
        Running => match event {
            Ended | Stopped => To(Terminated),
            Started | TerminateRequested => Stay,
            Begun | Prepared | Pulled | Failed | RemoveRequested => Refuse,
        },
        Terminated => match event {
            Ended | TerminateRequested | Stopped | RemoveRequested => Stay,
            Begun | Prepared | Pulled | Started | Failed => Refuse,
        },
    }
}
