//! Decision of the `instances` pipeline: the lifecycle of an instance.
//!
//! Cloud instances are created, polled and deleted; SSH hosts are deployed to and polled, and are never terminated for
//! being idle or unreachable. Until it is ready, an instance that was created for a job is kept only while a job is
//! assigned to it; after that it is like any other.

use crate::{
    decide::change::Change,
    instance::{Event, Health, Status, TerminationReason},
    time::{Span, Timestamp},
};

/// Poll interval of a host.
pub const POLL_INTERVAL: Span = Span::secs(7);
/// Validity of the last observation while the agent streams events, if only the blocks changed. When the stream breaks,
/// the host is polled.
pub const POLL_WITH_EVENTS: Span = Span::secs(20);
/// Poll interval of an instance that is starting; the first polls follow faster, see `next_starting_poll`.
pub const POLL_STARTING: Span = Span::secs(5);
/// Initial poll interval of an instance that is starting.
pub const POLL_STARTING_FIRST: Span = Span::millis(100);
/// Maximum time to deploy to an SSH host, and for a backend to accept or reject a request.
pub const DEPLOY_MAX: Span = Span::mins(10);
/// Time after creation during which a backend may not list an instance: cloud listings lag behind.
pub const LISTING_LAG_MAX: Span = Span::mins(1);
/// Maximum time for which a cloud instance may be unreachable.
pub const UNREACHABLE_MAX: Span = Span::mins(20);
const NOT_LISTED_MESSAGE: &str = "the backend does not list the instance";
/// Interval between attempts to delete an instance.
pub const DELETE_RETRY: Span = Span::secs(30);
/// After this time, attempts become rare and an event is recorded.
pub const DELETE_MAX: Span = Span::mins(15);
/// Prefix of the message of that event.
const DELETE_FAILED_MESSAGE: &str = "cannot be deleted";
/// Interval between attempts after that.
pub const DELETE_RETRY_LATE: Span = Span::mins(10);
/// Interval for a terminated instance, which should not be polled at all.
const POLL_TERMINATED: Span = Span::mins(1);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InstanceKind {
    Cloud,
    Ssh,
}

/// Stored state of the instance.
#[derive(Clone, Debug, PartialEq)]
pub struct InstanceView {
    pub kind: InstanceKind,
    pub status: Status,
    pub created_at: Timestamp,
    /// Time of creation by the backend.
    pub started_at: Option<Timestamp>,
    pub provisioning_max: Span,
    pub jobs: u32,
    /// Created for a job; before it is ready it is kept only while jobs are assigned to it.
    pub is_made_for_job: bool,
    /// Termination was requested by a user or the fleet. Jobs on it end first.
    pub requested_end: Option<TerminationReason>,
    pub idle_since: Option<Timestamp>,
    /// `None`: no limit.
    pub idle_max: Option<Span>,
    /// True if the fleet still has `nodes.min` instances without it.
    pub is_above_min: bool,
    pub unreachable_since: Option<Timestamp>,
    pub health: Health,
    pub terminating_since: Option<Timestamp>,
    /// The user wants it removed even if it does not respond.
    pub is_forced: bool,
    /// An event already reported that it cannot be deleted.
    pub is_delete_failure_reported: bool,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum InstanceObservation {
    NotRequested,
    /// The backend created it.
    Created,
    /// Every offer was refused, and no instance was created.
    NoOffers {
        message: String,
    },
    /// The SSH host is deployed; `healthy` if its shim also responds.
    Deployed {
        healthy: bool,
    },
    /// Not created, or the result is unknown. `fatal`: no further attempt can succeed (key, network, blocks).
    DeployFailed {
        fatal: bool,
        message: String,
    },
    /// It exists, but the backend reports that it is not usable yet.
    Starting,
    Answers {
        health: Health,
    },
    Silent,
    /// The host presents a different key than the pinned one, so its identity is unknown.
    Untrusted {
        message: String,
    },
    /// The backend does not have it (any more).
    Gone {
        message: String,
    },
    /// The backend does not list it; a new instance may not be listed yet.
    Unknown,
    NotDeleted {
        message: String,
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
    /// Value to store as it is.
    pub unreachable_since: Option<Timestamp>,
    pub health: Health,
    /// Message for the event log although the status does not change.
    pub note: Option<String>,
    /// The note reports that the instance cannot be deleted; it is not repeated.
    pub reports_delete_failure: bool,
    pub due: Timestamp,
}

impl Plan {
    fn unchanged(instance: &InstanceView, due: Timestamp) -> Self {
        Self {
            action: None,
            change: None,
            reason: None,
            unreachable_since: instance.unreachable_since,
            health: instance.health,
            note: None,
            reports_delete_failure: false,
            due,
        }
    }

    fn with_action(instance: &InstanceView, action: Action, now: Timestamp) -> Self {
        Self { action: Some(action), ..Self::unchanged(instance, now) }
    }

    fn change(instance: &InstanceView, event: Event, message: impl Into<String>, now: Timestamp) -> Self {
        Self { change: Some(Change::from_event(event, message)), ..Self::unchanged(instance, now) }
    }

    fn end(
        instance: &InstanceView,
        event: Event,
        reason: TerminationReason,
        message: impl Into<String>,
        now: Timestamp,
    ) -> Self {
        let change = Some(Change::new(event, reason.as_str(), message));
        Self { change, reason: Some(reason), ..Self::unchanged(instance, now) }
    }
}

pub fn decide(instance: &InstanceView, seen: &InstanceObservation, now: Timestamp) -> Plan {
    if let Some(plan) = end_unneeded(instance, now) {
        return plan;
    }
    match instance.status {
        Status::Pending => plan_pending(instance, seen, now),
        Status::Provisioning => plan_provisioning(instance, seen, now),
        Status::Idle | Status::Busy => plan_ready(instance, seen, now),
        Status::Terminating => plan_terminating(instance, seen, now),
        Status::Terminated => Plan::unchanged(instance, now + POLL_TERMINATED),
    }
}

/// Returns whether an observation is needed before the decision.
pub fn should_probe(instance: &InstanceView, now: Timestamp) -> bool {
    end_unneeded(instance, now).is_none()
}

/// Returns the time until which the last observation of a host is valid, if a pass only concerns its blocks: a job was
/// assigned or removed, and the status follows from stored state. A host is polled every `poll`, regardless of the
/// number of jobs in between.
pub fn answer_valid_until(
    instance: &InstanceView,
    seen_at: Option<Timestamp>,
    poll: Span,
    now: Timestamp,
) -> Option<Timestamp> {
    let until = seen_at? + poll;
    let word_is_old = match instance.status {
        Status::Idle => instance.jobs > 0,
        Status::Busy => instance.jobs == 0,
        Status::Pending | Status::Provisioning | Status::Terminating | Status::Terminated => false,
    };
    (word_is_old && instance.unreachable_since.is_none() && now < until).then_some(until)
}

/// Terminates an instance that is no longer needed, unless jobs are on it: those end first.
fn end_unneeded(instance: &InstanceView, now: Timestamp) -> Option<Plan> {
    if instance.jobs > 0 {
        return None;
    }
    let starting = match instance.status {
        Status::Pending | Status::Provisioning => true,
        Status::Idle | Status::Busy => false,
        Status::Terminating | Status::Terminated => return None,
    };
    if let Some(reason) = instance.requested_end {
        let message = if reason == TerminationReason::MaxInstancesLimit {
            "the fleet has more instances than `nodes.max`"
        } else if reason == TerminationReason::FleetSpecMismatch {
            "it no longer matches the configuration of the fleet"
        } else {
            "deletion requested"
        };
        return Some(Plan::end(instance, Event::StopRequested, reason, message, now));
    }
    (starting && instance.is_made_for_job).then(|| {
        let message = "the job it was created for has ended";
        Plan::end(instance, Event::JobFinished, TerminationReason::JobFinished, message, now)
    })
}

/// Returns the next poll of an instance that is starting: soon at first, then less frequently.
pub fn next_starting_poll(since: Timestamp, now: Timestamp) -> Timestamp {
    let waited = now.since(since).0.max(0);
    now + Span(waited / 4).clamp(POLL_STARTING_FIRST, POLL_STARTING)
}

fn plan_pending(instance: &InstanceView, seen: &InstanceObservation, now: Timestamp) -> Plan {
    let first = match instance.kind {
        InstanceKind::Cloud => Action::Create,
        InstanceKind::Ssh => Action::Deploy,
    };
    match seen {
        InstanceObservation::Created => Plan::change(instance, Event::Created, "created by the backend", now),
        InstanceObservation::NoOffers { message: text } => {
            Plan::end(instance, Event::GaveUp, TerminationReason::NoOffers, text, now)
        }
        InstanceObservation::Deployed { healthy: true } if instance.jobs == 0 => {
            Plan::change(instance, Event::ReadyIdle, "deployed and healthy", now)
        }
        InstanceObservation::Deployed { .. } => Plan::change(instance, Event::Created, "deployed", now),
        InstanceObservation::DeployFailed { fatal: true, message: text } => {
            give_up(instance, text.clone(), now)
        }
        InstanceObservation::Untrusted { message: text } => give_up(instance, text.clone(), now),
        InstanceObservation::DeployFailed { fatal: false, message: text } => {
            let deadline = instance.created_at + DEPLOY_MAX;
            if now >= deadline {
                let message = format!("not deployed within {} s: {text}", DEPLOY_MAX.as_secs());
                return give_up(instance, message, now);
            }
            Plan {
                note: Some(text.clone()),
                ..Plan::unchanged(instance, (now + POLL_STARTING).min(deadline))
            }
        }
        InstanceObservation::NotRequested
        | InstanceObservation::Starting
        | InstanceObservation::Answers { .. }
        | InstanceObservation::Silent
        | InstanceObservation::Gone { .. }
        | InstanceObservation::Unknown
        | InstanceObservation::NotDeleted { .. } => Plan::with_action(instance, first, now),
    }
}

/// Ends an instance that failed to start. An SSH host is released; a cloud instance that may exist is deleted first.
fn give_up(instance: &InstanceView, message: String, now: Timestamp) -> Plan {
    let event = match instance.kind {
        InstanceKind::Ssh => Event::GaveUp,
        InstanceKind::Cloud => Event::Expired,
    };
    Plan::end(instance, event, TerminationReason::Error, message, now)
}

fn plan_provisioning(instance: &InstanceView, seen: &InstanceObservation, now: Timestamp) -> Plan {
    let since = instance.started_at.unwrap_or(instance.created_at);
    let deadline = since + instance.provisioning_max;
    match seen {
        InstanceObservation::Answers { health } => mark_ready(instance, *health, now),
        InstanceObservation::Deployed { healthy: true } => mark_ready(instance, Health::Healthy, now),
        InstanceObservation::Gone { message: text } => {
            let message = format!("the backend removed it before it was ready: {text}");
            Plan::end(instance, Event::Expired, TerminationReason::Error, message, now)
        }
        InstanceObservation::Unknown if !is_young(instance, now) => {
            Plan::end(instance, Event::Expired, TerminationReason::Error, NOT_LISTED_MESSAGE, now)
        }
        InstanceObservation::Untrusted { message: text } => {
            Plan::end(instance, Event::Expired, TerminationReason::Error, text.clone(), now)
        }
        InstanceObservation::NotRequested if now < deadline => {
            Plan::with_action(instance, Action::Check, now)
        }
        InstanceObservation::NotRequested
        | InstanceObservation::Starting
        | InstanceObservation::Silent
        | InstanceObservation::Unknown
        | InstanceObservation::Created
        | InstanceObservation::NoOffers { .. }
        | InstanceObservation::Deployed { healthy: false }
        | InstanceObservation::DeployFailed { .. }
        | InstanceObservation::NotDeleted { .. } => {
            if now >= deadline {
                let message = format!("not ready within {} s", instance.provisioning_max.as_secs());
                let reason = TerminationReason::ProvisioningTimeout;
                return Plan::end(instance, Event::Expired, reason, message, now);
            }
            Plan::unchanged(instance, next_starting_poll(since, now).min(deadline))
        }
    }
}

/// Returns whether the backend may not list it yet.
fn is_young(instance: &InstanceView, now: Timestamp) -> bool {
    now < instance.started_at.unwrap_or(instance.created_at) + LISTING_LAG_MAX
}

fn mark_ready(instance: &InstanceView, health: Health, now: Timestamp) -> Plan {
    let event = if instance.jobs > 0 { Event::ReadyBusy } else { Event::ReadyIdle };
    Plan { health, unreachable_since: None, ..Plan::change(instance, event, "its agent responds", now) }
}

fn plan_ready(instance: &InstanceView, seen: &InstanceObservation, now: Timestamp) -> Plan {
    match (seen, instance.kind) {
        (InstanceObservation::Answers { health }, _) => plan_reachable(instance, *health, now),
        (InstanceObservation::Deployed { healthy: true }, _) => {
            plan_reachable(instance, Health::Healthy, now)
        }
        (InstanceObservation::Gone { message: text }, InstanceKind::Cloud) => {
            let message = format!("it no longer exists at the backend: {text}");
            Plan::end(instance, Event::Unreachable, TerminationReason::Unreachable, message, now)
        }
        (InstanceObservation::Unknown, InstanceKind::Cloud) if !is_young(instance, now) => {
            Plan::end(instance, Event::Unreachable, TerminationReason::Unreachable, NOT_LISTED_MESSAGE, now)
        }
        (InstanceObservation::Untrusted { message: text }, _) => {
            let plan = plan_unreachable(instance, now);
            let note = (instance.health != Health::Failure).then(|| text.clone());
            Plan { health: Health::Failure, note, ..plan }
        }
        (InstanceObservation::NotRequested, _) => Plan::with_action(instance, Action::Check, now),
        (
            InstanceObservation::Silent
            | InstanceObservation::Starting
            | InstanceObservation::Created
            | InstanceObservation::Gone { .. }
            | InstanceObservation::Unknown
            | InstanceObservation::NoOffers { .. }
            | InstanceObservation::Deployed { healthy: false }
            | InstanceObservation::DeployFailed { .. }
            | InstanceObservation::NotDeleted { .. },
            InstanceKind::Cloud | InstanceKind::Ssh,
        ) => plan_unreachable(instance, now),
    }
}

fn plan_reachable(instance: &InstanceView, health: Health, now: Timestamp) -> Plan {
    let mut plan = Plan { health, unreachable_since: None, ..Plan::unchanged(instance, now + POLL_INTERVAL) };
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

/// Returns the time at which it is terminated for being idle: never for an SSH host, or an instance that the fleet
/// needs.
fn idle_deadline(instance: &InstanceView) -> Option<Timestamp> {
    let may_go = match instance.kind {
        InstanceKind::Cloud => instance.status == Status::Idle && instance.jobs == 0 && instance.is_above_min,
        InstanceKind::Ssh => false,
    };
    if may_go { Some(instance.idle_since? + instance.idle_max?) } else { None }
}

fn plan_unreachable(instance: &InstanceView, now: Timestamp) -> Plan {
    let since = instance.unreachable_since.unwrap_or(now);
    let mut plan = Plan { unreachable_since: Some(since), ..Plan::unchanged(instance, now + POLL_INTERVAL) };
    if instance.unreachable_since.is_none() {
        plan.note = Some("unreachable".to_owned());
    }
    match instance.kind {
        InstanceKind::Ssh => plan,
        InstanceKind::Cloud if now.since(since) >= UNREACHABLE_MAX => {
            let message = format!("unreachable for {} s", now.since(since).as_secs());
            let end = Plan::end(instance, Event::Unreachable, TerminationReason::Unreachable, message, now);
            Plan { unreachable_since: Some(since), ..end }
        }
        // An idle instance is terminated on time even if it does not respond.
        InstanceKind::Cloud => match idle_deadline(instance) {
            Some(deadline) if now >= deadline => {
                let message = "idle for too long while unreachable";
                let end = Plan::end(instance, Event::Surplus, TerminationReason::IdleTimeout, message, now);
                Plan { unreachable_since: Some(since), ..end }
            }
            Some(_) | None => Plan { due: plan.due.min(since + UNREACHABLE_MAX), ..plan },
        },
    }
}

fn plan_terminating(instance: &InstanceView, seen: &InstanceObservation, now: Timestamp) -> Plan {
    let since = instance.terminating_since.unwrap_or(now);
    match seen {
        InstanceObservation::Gone { message: text } => {
            Plan::change(instance, Event::Deleted, format!("it no longer exists at the backend: {text}"), now)
        }
        // If windlass never connected to the host, there is nothing to clean up on it.
        InstanceObservation::NotDeleted { message: text }
            if instance.kind == InstanceKind::Ssh && instance.started_at.is_none() =>
        {
            let message = format!("the host was never ready; released without cleanup: {text}");
            Plan::change(instance, Event::Deleted, message, now)
        }
        // The host causes no cost, and the user does not want to wait.
        InstanceObservation::NotDeleted { message: text }
            if instance.kind == InstanceKind::Ssh && instance.is_forced =>
        {
            let message = format!("deletion was forced; released without cleanup: {text}");
            Plan::change(instance, Event::Deleted, message, now)
        }
        InstanceObservation::NotDeleted { message: text } if now.since(since) < DELETE_MAX => {
            let due = (now + DELETE_RETRY).min(since + DELETE_MAX);
            Plan { note: Some(format!("not deleted yet: {text}")), ..Plan::unchanged(instance, due) }
        }
        InstanceObservation::NotDeleted { message: text } => match instance.kind {
            // The host causes no cost, and a host that does not respond cannot be cleaned up.
            InstanceKind::Ssh => {
                Plan::change(instance, Event::Deleted, format!("gave up cleaning up the host: {text}"), now)
            }
            // An instance that may still be billed is never marked terminated.
            InstanceKind::Cloud => {
                let reports_delete_failure = !instance.is_delete_failure_reported;
                let note = reports_delete_failure
                    .then(|| format!("{DELETE_FAILED_MESSAGE}, check the backend: {text}"));
                Plan { note, reports_delete_failure, ..Plan::unchanged(instance, now + DELETE_RETRY_LATE) }
            }
        },
        InstanceObservation::NotRequested
        | InstanceObservation::Created
        | InstanceObservation::Starting
        | InstanceObservation::NoOffers { .. }
        | InstanceObservation::Deployed { .. }
        | InstanceObservation::DeployFailed { .. }
        | InstanceObservation::Answers { .. }
        | InstanceObservation::Untrusted { .. }
        | InstanceObservation::Unknown
        | InstanceObservation::Silent => Plan::with_action(instance, Action::Delete, now),
    }
}
