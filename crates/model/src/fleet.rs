//! The fleet: a set of instances kept between a minimum and a maximum.

use crate::state_machine::{StateMachine, Step, final_statuses, words};

words! {
    /// Status of a fleet. Fleets are created active; `submitted` and `failed` exist in the API.
    pub enum Status: "fleet status" {
        /// accepted, not processed yet
        Submitted = "submitted",
        /// keeps its instances
        Active = "active",
        /// deleted; waits until its instances are gone
        Terminating = "terminating",
        /// deleted and empty
        Terminated = "terminated",
        /// could not be processed
        Failed = "failed",
    }

    /// Events of a fleet.
    pub enum Event: "fleet event" {
        /// the pipeline processed it
        Activated = "activated",
        /// it cannot be processed
        Broken = "broken",
        /// a user deletes it while no job uses it, or the run that it was created for has ended
        DeleteRequested = "delete-asked",
        /// the last instance is terminated
        Emptied = "emptied",
    }
}

final_statuses!(Status: Terminated | Failed; active: Submitted | Active | Terminating);

/// State machine of a fleet.
#[derive(Clone, Copy, Debug)]
pub struct FleetLifecycle;

impl StateMachine for FleetLifecycle {
    type Status = Status;
    type Event = Event;
    const NAME: &'static str = "fleet";
    const ABOUT: &'static str = "A set of instances with a minimum and a maximum size.";
    const START: &'static [Status] = &[Status::Active, Status::Submitted];
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
            Activated => To(Active),
            Broken => To(Failed),
            DeleteRequested => To(Terminating),
            Emptied => Refuse,
        },
        Active => match event {
            DeleteRequested => To(Terminating),
            Activated => Stay,
            Broken | Emptied => Refuse,
        },
        Terminating => match event {
            Emptied => To(Terminated),
            DeleteRequested => Stay,
            Activated | Broken => Refuse,
        },
        Terminated | Failed => match event {
            DeleteRequested => Stay,
            Activated | Broken | Emptied => Refuse,
        },
    }
}
