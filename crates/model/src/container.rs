//! The container: one piece of work in the queue that dispatchers pull from.

use crate::machine::{StateMachine, Step, final_statuses, words};

words! {
    /// The state of a container.
    pub enum Status: "container state" {
        /// waits for a dispatcher
        Queued = "Queued",
        /// a dispatcher holds it and prepares its start
        Locked = "Locked",
        /// the executor runs it
        Running = "Running",
        /// its result was captured, whatever the exit code
        Complete = "Complete",
        /// its result was not captured: killed, lost, never started
        Cancelled = "Cancelled",
    }

    /// What can happen to a container.
    pub enum Event: "container event" {
        /// a dispatcher takes it; needs a priority above 0
        Lock = "lock",
        /// its holder gives it back; the attempt's tokens die
        Unlock = "unlock",
        /// its holder gives it back for the last time allowed: too many attempts
        UnlockSpent = "unlock-spent",
        /// the executor is about to run user code
        Start = "start",
        /// the program ended; needs its exit code
        Complete = "complete",
        /// killed, lost, never started, or not wanted any more
        Cancel = "cancel",
    }

    /// Who asks for a change.
    pub enum Actor: "container actor" {
        /// a dispatcher that does not hold the container
        Dispatcher = "dispatcher",
        /// the dispatcher that holds the lock
        Holder = "holder",
        /// the executor of this attempt
        Executor = "executor",
        Admin = "admin",
        Server = "server",
    }
}

final_statuses!(Status: Complete | Cancelled; active: Queued | Locked | Running);

/// How often a container may be locked and given back before it is cancelled.
pub const LOCKS_MAX: u32 = 10;

/// The container's machine.
#[derive(Clone, Copy, Debug)]
pub struct ContainerLifecycle;

impl StateMachine for ContainerLifecycle {
    type Status = Status;
    type Event = Event;
    const NAME: &'static str = "container";
    const ABOUT: &'static str = "One piece of work in the queue that dispatchers pull from.";
    const START: &'static [Status] = &[Status::Queued];
    const STOP: &'static [Event] = &[Event::Cancel];

    fn step(status: Status, event: Event) -> Step<Status> {
        step(status, event)
    }
}

/// A repeated write is refused, not tolerated: tolerance would let two executors run.
pub fn step(status: Status, event: Event) -> Step<Status> {
    use Step::{Refuse, To};
    match status {
        Status::Queued => match event {
            Event::Lock => To(Status::Locked),
            Event::Cancel => To(Status::Cancelled),
            Event::Unlock | Event::UnlockSpent | Event::Start | Event::Complete => Refuse,
        },
        Status::Locked => match event {
            Event::Unlock => To(Status::Queued),
            Event::Start => To(Status::Running),
            Event::UnlockSpent | Event::Cancel => To(Status::Cancelled),
            Event::Lock | Event::Complete => Refuse,
        },
        Status::Running => match event {
            Event::Complete => To(Status::Complete),
            Event::Cancel => To(Status::Cancelled),
            Event::Lock | Event::Unlock | Event::UnlockSpent | Event::Start => Refuse,
        },
        Status::Complete | Status::Cancelled => match event {
            Event::Lock
            | Event::Unlock
            | Event::UnlockSpent
            | Event::Start
            | Event::Complete
            | Event::Cancel => Refuse,
        },
    }
}

/// Whether `actor` may cause `event` in `status`, given that the machine accepts it.
pub fn is_allowed(actor: Actor, status: Status, event: Event) -> bool {
    match event {
        Event::Lock => match actor {
            Actor::Dispatcher => true,
            Actor::Holder | Actor::Executor | Actor::Admin | Actor::Server => false,
        },
        Event::Unlock | Event::UnlockSpent | Event::Start | Event::Complete => match actor {
            Actor::Holder | Actor::Executor => true,
            Actor::Dispatcher | Actor::Admin | Actor::Server => false,
        },
        Event::Cancel => match actor {
            Actor::Admin => true,
            Actor::Holder | Actor::Executor => status != Status::Queued,
            Actor::Server => status == Status::Queued,
            Actor::Dispatcher => false,
        },
    }
}
