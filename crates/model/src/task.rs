//! The task: what a shim keeps of one submission on its host.
//!
//! The words are those of the agents' API, which knows no "terminating": an ask to terminate is kept beside the
//! status, and the status changes once nothing of the task runs and everything it held was given back.

use crate::machine::{StateMachine, Step, final_statuses, words};

words! {
    /// The status of a task.
    pub enum Status: "task status" {
        /// accepted and written down
        Pending = "pending",
        /// GPUs, keys, volumes and mounts are being taken
        Preparing = "preparing",
        /// the image is being brought
        Pulling = "pulling",
        /// the container is being made and started
        Creating = "creating",
        /// the container runs
        Running = "running",
        /// nothing of it runs and it holds nothing; its files stay until it is removed
        Terminated = "terminated",
    }

    /// What can happen to a task.
    pub enum Event: "task event" {
        /// its turn came
        Begun = "begun",
        /// everything it needs was taken
        Prepared = "prepared",
        /// the image is here
        Pulled = "pulled",
        /// the container was started, or found to run
        Started = "started",
        /// a step before the start failed; what was taken is given back
        Failed = "failed",
        /// the container ended of itself, or is gone; what was taken is given back
        Ended = "ended",
        /// the server wants it to end
        TerminateAsked = "terminate-asked",
        /// it was made to end as asked; what was taken is given back
        Stopped = "stopped",
        /// the server wants it forgotten
        RemoveRequested = "remove-asked",
    }
}

final_statuses!(Status: Terminated; active: Pending | Preparing | Pulling | Creating | Running);

/// The task's machine.
#[derive(Clone, Copy, Debug)]
pub struct ShimTaskLifecycle;

impl StateMachine for ShimTaskLifecycle {
    type Status = Status;
    type Event = Event;
    const NAME: &'static str = "task";
    const ABOUT: &'static str = "What a shim keeps of one submission, from its acceptance to its removal.";
    const START: &'static [Status] = &[Status::Pending];
    const STOP: &'static [Event] = &[Event::TerminateAsked];

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
            TerminateAsked => Stay,
            Prepared | Pulled | Started | Ended | RemoveRequested => Refuse,
        },
        Preparing => match event {
            Prepared => To(Pulling),
            Failed | Stopped => To(Terminated),
            Begun | TerminateAsked => Stay,
            Pulled | Started | Ended | RemoveRequested => Refuse,
        },
        Pulling => match event {
            Pulled => To(Creating),
            Failed | Stopped => To(Terminated),
            Prepared | TerminateAsked => Stay,
            Begun | Started | Ended | RemoveRequested => Refuse,
        },
        Creating => match event {
            Started => To(Running),
            Failed | Ended | Stopped => To(Terminated),
            Pulled | TerminateAsked => Stay,
            Begun | Prepared | RemoveRequested => Refuse,
        },
        Running => match event {
            Ended | Stopped => To(Terminated),
            Started | TerminateAsked => Stay,
            Begun | Prepared | Pulled | Failed | RemoveRequested => Refuse,
        },
        Terminated => match event {
            Ended | TerminateAsked | Stopped | RemoveRequested => Stay,
            Begun | Prepared | Pulled | Started | Failed => Refuse,
        },
    }
}
