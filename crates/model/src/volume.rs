//! The volume: storage that outlives jobs.
//!
//! Deletion is not a status: a deleted row keeps its status and is removed from every list.

use crate::state_machine::{StateMachine, Step, final_statuses, words};

words! {
    /// Status of a volume.
    pub enum Status: "volume status" {
        /// requested; no request was sent to the backend yet
        Submitted = "submitted",
        /// the backend is creating it
        Provisioning = "provisioning",
        /// can be attached
        Active = "active",
        /// could not be created or found
        Failed = "failed",
    }

    /// Events of a volume.
    pub enum Event: "volume event" {
        /// the backend began to create it
        Created = "created",
        /// it exists and can be attached
        Ready = "ready",
        /// the backend refused, or does not have it
        Broken = "broken",
        /// a user deletes it, or it was unattached for auto_cleanup_duration: the row is removed from all lists
        DeleteRequested = "delete-asked",
    }
}

final_statuses!(Status: Failed; active: Submitted | Provisioning | Active);

/// State machine of a volume.
#[derive(Clone, Copy, Debug)]
pub struct VolumeLifecycle;

impl StateMachine for VolumeLifecycle {
    type Status = Status;
    type Event = Event;
    const NAME: &'static str = "volume";
    const ABOUT: &'static str =
        "Storage that outlives jobs. A deleted row keeps its status and is no longer listed.";
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
            Ready => To(Active),
            Broken => To(Failed),
            DeleteRequested => Stay,
        },
        Provisioning => match event {
            Ready => To(Active),
            Broken => To(Failed),
            Created | DeleteRequested => Stay,
        },
        Active => match event {
            Ready | DeleteRequested => Stay,
            Created | Broken => Refuse,
        },
        Failed => match event {
            DeleteRequested => Stay,
            Created | Ready | Broken => Refuse,
        },
    }
}
