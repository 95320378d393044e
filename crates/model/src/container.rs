//! The container: one unit of work in the queue that dispatchers pull from.

use crate::state_machine::{StateMachine, Step, final_statuses, words};

words! {
    /// State of a container.
    pub enum Status: "container state" {
        /// waits for a dispatcher
        Queued = "Queued",
        /// a dispatcher has locked it and prepares its start
        Locked = "Locked",
        /// the executor runs it
        Running = "Running",
        /// its result was captured, whatever the exit code
        Complete = "Complete",
        /// its result was not captured: killed, lost, never started
        Cancelled = "Cancelled",
    }

    /// Events of a container.
    pub enum Event: "container event" {
        /// a dispatcher locks it; needs a priority above 0
        Lock = "lock",
        /// its holder returns it to the queue; the attempt's tokens expire
        Unlock = "unlock",
        /// its holder returns it for the last time allowed: too many attempts
        UnlockSpent = "unlock-spent",
        /// the executor is about to run user code
        Start = "start",
        /// the program ended; needs its exit code
        Complete = "complete",
        /// killed, lost, never started, or no longer wanted
        Cancel = "cancel",
    }

    /// Actor that requests a change.
    pub enum ContainerActor: "container actor" {
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

/// Maximum number of times that a container may be locked before it is cancelled.
pub const LOCKS_MAX: u32 = 10;

/// State machine of a container.
#[derive(Clone, Copy, Debug)]
pub struct ContainerLifecycle;

impl StateMachine for ContainerLifecycle {
    type Status = Status;
    type Event = Event;
    const NAME: &'static str = "container";
    const ABOUT: &'static str = "One unit of work in the queue that dispatchers pull from.";
    const START: &'static [Status] = &[Status::Queued];
    const STOP: &'static [Event] = &[Event::Cancel];

    fn step(status: Status, event: Event) -> Step<Status> {
        step(status, event)
    }
}

/// Returns the next state. A repeated write is refused: accepting it would let two executors run.
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

/// Returns whether `actor` may cause `event` in `status`, provided that the state machine accepts it.
pub fn is_allowed(actor: ContainerActor, status: Status, event: Event) -> bool {
    match event {
        Event::Lock => match actor {
            ContainerActor::Dispatcher => true,
            ContainerActor::Holder
            | ContainerActor::Executor
            | ContainerActor::Admin
            | ContainerActor::Server => false,
        },
        Event::Unlock | Event::UnlockSpent | Event::Start | Event::Complete => match actor {
            ContainerActor::Holder | ContainerActor::Executor => true,
            ContainerActor::Dispatcher | ContainerActor::Admin | ContainerActor::Server => false,
        },
        Event::Cancel => match actor {
            ContainerActor::Admin => true,
            ContainerActor::Holder | ContainerActor::Executor => status != Status::Queued,
            ContainerActor::Server => status == Status::Queued,
            ContainerActor::Dispatcher => false,
        },
    }
}
