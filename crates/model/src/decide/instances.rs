//! Brain of `instances`: a host from wish to waste.
//!
//! Cloud instances are created, watched and deleted; SSH hosts are deployed to and watched, and are never
//! ended for being idle or unreachable. A placeholder belongs to the job that made it, not to us.

use crate::{
    decide::change::Change,
    instance::{Event, Health, Status, TerminationReason},
    time::{Span, Timestamp},
};

/// Between two looks at a host.
pub const POLL: Span = Span::secs(7);
/// Between two looks at one that is starting.
pub const POLL_STARTING: Span = Span::secs(5);
/// How long an SSH host may take to be deployed.
pub const DEPLOY_MAX: Span = Span::mins(10);
/// How long a cloud host may be unreachable.
pub const UNREACHABLE_MAX: Span = Span::mins(20);
/// Between two tries to delete one.
pub const DELETE_RETRY: Span = Span::secs(30);
/// After this long the tries become rare, and people are told.
pub const DELETE_MAX: Span = Span::mins(15);
/// Between two tries after that.
pub const DELETE_RETRY_LATE: Span = Span::mins(10);
/// Between two looks at a placeholder, which somebody else moves.
pub const POLL_PLACEHOLDER: Span = Span::mins(1);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Cloud,
    Ssh,
}

/// What is stored about the instance.
#[derive(Clone, Debug, PartialEq)]
pub struct Instance {
    pub kind: Kind,
    pub status: Status,
    pub placeholder: bool,
    pub created_at: Timestamp,
    pub provisioning_max: Span,
    pub jobs: u32,
    pub idle_since: Option<Timestamp>,
    /// `None` = keep for ever.
    pub idle_max: Option<Span>,
    /// Whether the fleet would still have `nodes.min` without it.
    pub above_min: bool,
    pub unreachable_since: Option<Timestamp>,
    pub health: Health,
    pub terminating_since: Option<Timestamp>,
    /// People were told that it cannot be deleted.
    pub delete_told: bool,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Seen {
    NotAsked,
    /// The backend made it.
    Created,
    NoOffers {
        said: String,
    },
    /// The SSH host is deployed; `healthy` when its shim answers too.
    Deployed {
        healthy: bool,
    },
    /// `fatal`: no further try would help (key, network, blocks).
    NotDeployed {
        fatal: bool,
        said: String,
    },
    Answers {
        health: Health,
    },
    Silent,
    /// The backend's list does not contain it.
    Deleted,
    NotDeleted {
        said: String,
    },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    Create,
    Deploy,
    Check,
    Delete,
}

#[derive(Clone, Debug, PartialEq)]
pub struct Plan {
    pub action: Option<Action>,
    pub change: Option<Change<Event>>,
    pub reason: Option<TerminationReason>,
    /// To be stored as it is.
    pub unreachable_since: Option<Timestamp>,
    pub health: Health,
    /// Worth telling, though the status stays.
    pub note: Option<String>,
    pub due: Timestamp,
}

impl Plan {
    fn keep(instance: &Instance, due: Timestamp) -> Self {
        Self {
            action: None,
            change: None,
            reason: None,
            unreachable_since: instance.unreachable_since,
            health: instance.health,
            note: None,
            due,
        }
    }

    fn act(instance: &Instance, action: Action, now: Timestamp) -> Self {
        Self { action: Some(action), ..Self::keep(instance, now) }
    }

    fn change(instance: &Instance, event: Event, message: impl Into<String>, now: Timestamp) -> Self {
        Self { change: Some(Change::told(event, message)), ..Self::keep(instance, now) }
    }

    fn end(
        instance: &Instance,
        event: Event,
        reason: TerminationReason,
        message: impl Into<String>,
        now: Timestamp,
    ) -> Self {
        let change = Some(Change::why(event, reason.as_str(), message));
        Self { change, reason: Some(reason), ..Self::keep(instance, now) }
    }
}

pub fn decide(instance: &Instance, seen: &Seen, now: Timestamp) -> Plan {
    match instance.status {
        Status::Pending if instance.placeholder => Plan::keep(instance, now + POLL_PLACEHOLDER),
        Status::Pending => pending(instance, seen, now),
        Status::Provisioning => provisioning(instance, seen, now),
        Status::Idle | Status::Busy => watching(instance, seen, now),
        Status::Terminating => terminating(instance, seen, now),
        Status::Terminated => Plan::keep(instance, now + POLL_PLACEHOLDER),
    }
}

fn pending(instance: &Instance, seen: &Seen, now: Timestamp) -> Plan {
    let first = match instance.kind {
        Kind::Cloud => Action::Create,
        Kind::Ssh => Action::Deploy,
    };
    match seen {
        Seen::Created => Plan::change(instance, Event::Created, "the backend made it", now),
        Seen::NoOffers { said } => Plan::end(instance, Event::GaveUp, TerminationReason::NoOffers, said, now),
        Seen::Deployed { healthy: true } => {
            Plan::change(instance, Event::ReadyIdle, "deployed and healthy", now)
        }
        Seen::Deployed { healthy: false } => Plan::change(instance, Event::Created, "deployed", now),
        Seen::NotDeployed { fatal: true, said } => {
            Plan::end(instance, Event::GaveUp, TerminationReason::Error, said, now)
        }
        Seen::NotDeployed { fatal: false, said } => {
            let deadline = instance.created_at + DEPLOY_MAX;
            if now >= deadline {
                let message = format!("not deployed within {} s: {said}", DEPLOY_MAX.as_secs());
                return Plan::end(instance, Event::GaveUp, TerminationReason::Error, message, now);
            }
            Plan { note: Some(said.clone()), ..Plan::keep(instance, (now + POLL_STARTING).min(deadline)) }
        }
        Seen::NotAsked | Seen::Answers { .. } | Seen::Silent | Seen::Deleted | Seen::NotDeleted { .. } => {
            Plan::act(instance, first, now)
        }
    }
}

fn provisioning(instance: &Instance, seen: &Seen, now: Timestamp) -> Plan {
    let deadline = instance.created_at + instance.provisioning_max;
    match seen {
        Seen::Answers { health } => ready(instance, *health, now),
        Seen::Deployed { healthy: true } => ready(instance, Health::Healthy, now),
        Seen::Deleted => {
            let message = "the backend took it back before it was ready";
            Plan::end(instance, Event::Expired, TerminationReason::Error, message, now)
        }
        Seen::NotAsked if now < deadline => Plan::act(instance, Action::Check, now),
        Seen::NotAsked
        | Seen::Silent
        | Seen::Created
        | Seen::NoOffers { .. }
        | Seen::Deployed { healthy: false }
        | Seen::NotDeployed { .. }
        | Seen::NotDeleted { .. } => {
            if now >= deadline {
                let message = format!("not ready within {} s", instance.provisioning_max.as_secs());
                let reason = TerminationReason::ProvisioningTimeout;
                return Plan::end(instance, Event::Expired, reason, message, now);
            }
            Plan::keep(instance, (now + POLL_STARTING).min(deadline))
        }
    }
}

fn ready(instance: &Instance, health: Health, now: Timestamp) -> Plan {
    let event = if instance.jobs > 0 { Event::ReadyBusy } else { Event::ReadyIdle };
    Plan { health, unreachable_since: None, ..Plan::change(instance, event, "its agent answers", now) }
}

fn watching(instance: &Instance, seen: &Seen, now: Timestamp) -> Plan {
    match seen {
        Seen::Answers { health } => answers(instance, *health, now),
        Seen::Deployed { healthy: true } => answers(instance, Health::Healthy, now),
        Seen::Deleted => {
            let message = "the backend does not have it any more";
            Plan::end(instance, Event::Unreachable, TerminationReason::Unreachable, message, now)
        }
        Seen::NotAsked => Plan::act(instance, Action::Check, now),
        Seen::Silent
        | Seen::Created
        | Seen::NoOffers { .. }
        | Seen::Deployed { healthy: false }
        | Seen::NotDeployed { .. }
        | Seen::NotDeleted { .. } => silent(instance, now),
    }
}

fn answers(instance: &Instance, health: Health, now: Timestamp) -> Plan {
    let mut plan = Plan { health, unreachable_since: None, ..Plan::keep(instance, now + POLL) };
    if instance.unreachable_since.is_some() {
        plan.note = Some("reachable again".to_owned());
    }
    match idle_deadline(instance) {
        Some(deadline) if now >= deadline => Plan {
            health,
            unreachable_since: None,
            ..Plan::end(
                instance,
                Event::Surplus,
                TerminationReason::IdleTimeout,
                format!("idle for {} s", now.since(instance.idle_since.unwrap_or(now)).as_secs()),
                now,
            )
        },
        Some(deadline) => Plan { due: plan.due.min(deadline), ..plan },
        None => plan,
    }
}

/// When it goes for being idle: never an SSH host, never one the fleet needs.
fn idle_deadline(instance: &Instance) -> Option<Timestamp> {
    let may_go = match instance.kind {
        Kind::Cloud => instance.status == Status::Idle && instance.jobs == 0 && instance.above_min,
        Kind::Ssh => false,
    };
    if may_go { Some(instance.idle_since? + instance.idle_max?) } else { None }
}

fn silent(instance: &Instance, now: Timestamp) -> Plan {
    let since = instance.unreachable_since.unwrap_or(now);
    let mut plan = Plan { unreachable_since: Some(since), ..Plan::keep(instance, now + POLL) };
    if instance.unreachable_since.is_none() {
        plan.note = Some("unreachable".to_owned());
    }
    match instance.kind {
        Kind::Ssh => plan,
        Kind::Cloud if now.since(since) >= UNREACHABLE_MAX => {
            let message = format!("unreachable for {} s", now.since(since).as_secs());
            let end = Plan::end(instance, Event::Unreachable, TerminationReason::Unreachable, message, now);
            Plan { unreachable_since: Some(since), ..end }
        }
        // An idle one is given back in time whether or not it answers.
        Kind::Cloud => match idle_deadline(instance) {
            Some(deadline) if now >= deadline => {
                let message = "idle for too long, and unreachable";
                let end = Plan::end(instance, Event::Surplus, TerminationReason::IdleTimeout, message, now);
                Plan { unreachable_since: Some(since), ..end }
            }
            Some(_) | None => Plan { due: plan.due.min(since + UNREACHABLE_MAX), ..plan },
        },
    }
}

fn terminating(instance: &Instance, seen: &Seen, now: Timestamp) -> Plan {
    let since = instance.terminating_since.unwrap_or(now);
    match seen {
        Seen::Deleted => Plan::change(instance, Event::Deleted, "the backend does not have it any more", now),
        Seen::NotDeleted { said } if now.since(since) < DELETE_MAX => {
            let due = (now + DELETE_RETRY).min(since + DELETE_MAX);
            Plan { note: Some(format!("not deleted yet: {said}")), ..Plan::keep(instance, due) }
        }
        Seen::NotDeleted { said } => match instance.kind {
            // Nothing of ours is billed on it, and a host that does not answer cannot be cleaned.
            Kind::Ssh => {
                Plan::change(instance, Event::Deleted, format!("gave up cleaning the host: {said}"), now)
            }
            // A machine that may still be billed is never called terminated.
            Kind::Cloud => {
                let note = (!instance.delete_told)
                    .then(|| format!("cannot be deleted, look at the backend: {said}"));
                Plan { note, ..Plan::keep(instance, now + DELETE_RETRY_LATE) }
            }
        },
        Seen::NotAsked
        | Seen::Created
        | Seen::NoOffers { .. }
        | Seen::Deployed { .. }
        | Seen::NotDeployed { .. }
        | Seen::Answers { .. }
        | Seen::Silent => Plan::act(instance, Action::Delete, now),
    }
}
