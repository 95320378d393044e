//! Decision of the `volumes` pipeline: creates or finds storage, and deletes it if unused.

use crate::{
    decide::change::Change,
    time::{Span, Timestamp},
    volume::{Event, Status},
};

/// Poll interval of a volume that is being created.
pub const POLL_STARTING: Span = Span::secs(5);
/// Poll interval of a volume that is ready.
pub const POLL_INTERVAL: Span = Span::mins(1);
/// Maximum time for a backend to create a volume.
pub const PROVISIONING_TIMEOUT: Span = Span::mins(10);
/// Interval between attempts to delete a volume.
pub const DELETE_RETRY: Span = Span::secs(30);

/// Stored state of the volume.
#[derive(Clone, Debug, PartialEq)]
pub struct VolumeView {
    pub status: Status,
    pub created_at: Timestamp,
    /// Not created by windlass, and not deleted by it.
    pub is_external: bool,
    pub is_delete_requested: bool,
    pub is_attached: bool,
    /// Time at which it was last detached, or created.
    pub unattached_since: Option<Timestamp>,
    pub cleanup_after: Option<Span>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum VolumeObservation {
    NotRequested,
    Creating,
    Ready,
    Broken { message: String },
    Deleted,
    NotDeleted { message: String },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    Create,
    Register,
    Check,
    Delete,
}

#[derive(Clone, Debug, PartialEq)]
pub struct Plan {
    pub action: Option<Action>,
    pub change: Option<Change<Event>>,
    /// The row is removed from all lists.
    pub is_removed: bool,
    pub note: Option<String>,
    pub due: Timestamp,
}

fn unchanged(due: Timestamp) -> Plan {
    Plan { action: None, change: None, is_removed: false, note: None, due }
}

fn with_action(action: Action, now: Timestamp) -> Plan {
    Plan { action: Some(action), ..unchanged(now) }
}

fn with_change(event: Event, message: impl Into<String>, now: Timestamp) -> Plan {
    Plan { change: Some(Change::from_event(event, message)), ..unchanged(now) }
}

pub fn decide(volume: &VolumeView, seen: &VolumeObservation, now: Timestamp) -> Plan {
    if volume.is_delete_requested {
        return plan_deleting(volume, seen, now);
    }
    match volume.status {
        Status::Submitted | Status::Provisioning => plan_starting(volume, seen, now),
        Status::Active => plan_active(volume, now),
        Status::Failed => unchanged(now + POLL_INTERVAL),
    }
}

fn plan_starting(volume: &VolumeView, seen: &VolumeObservation, now: Timestamp) -> Plan {
    let deadline = volume.created_at + PROVISIONING_TIMEOUT;
    match seen {
        VolumeObservation::Ready => with_change(Event::Ready, "ready to be attached", now),
        VolumeObservation::Broken { message } => with_change(Event::Broken, message, now),
        VolumeObservation::Creating | VolumeObservation::NotRequested if now >= deadline => {
            with_change(Event::Broken, format!("not ready within {} s", PROVISIONING_TIMEOUT.as_secs()), now)
        }
        VolumeObservation::Creating if volume.status == Status::Submitted => Plan {
            due: (now + POLL_STARTING).min(deadline),
            ..with_change(Event::Created, "being created", now)
        },
        VolumeObservation::Creating => unchanged((now + POLL_STARTING).min(deadline)),
        VolumeObservation::NotRequested
        | VolumeObservation::Deleted
        | VolumeObservation::NotDeleted { .. } => match volume.status {
            Status::Submitted if volume.is_external => with_action(Action::Register, now),
            Status::Submitted => with_action(Action::Create, now),
            Status::Provisioning | Status::Active | Status::Failed => with_action(Action::Check, now),
        },
    }
}

fn plan_active(volume: &VolumeView, now: Timestamp) -> Plan {
    let idle = if volume.is_attached || volume.is_external { None } else { volume.unattached_since };
    let Some((since, limit)) = idle.zip(volume.cleanup_after) else { return unchanged(now + POLL_INTERVAL) };
    if now >= since + limit {
        let message = format!("unattached for {} s", now.since(since).as_secs());
        return Plan { change: Some(Change::from_event(Event::DeleteRequested, message)), ..unchanged(now) };
    }
    unchanged((now + POLL_INTERVAL).min(since + limit))
}

fn plan_deleting(volume: &VolumeView, seen: &VolumeObservation, now: Timestamp) -> Plan {
    match seen {
        VolumeObservation::Deleted => {
            Plan { is_removed: true, note: Some("deleted".to_owned()), ..unchanged(now) }
        }
        // A volume in use is never deleted.
        VolumeObservation::NotRequested
        | VolumeObservation::Creating
        | VolumeObservation::Ready
        | VolumeObservation::Broken { .. }
        | VolumeObservation::NotDeleted { .. }
            if volume.is_attached =>
        {
            unchanged(now + POLL_STARTING)
        }
        VolumeObservation::NotRequested
        | VolumeObservation::Creating
        | VolumeObservation::Ready
        | VolumeObservation::Broken { .. }
        | VolumeObservation::NotDeleted { .. }
            if volume.is_external =>
        {
            Plan {
                is_removed: true,
                note: Some("unregistered; the external volume is kept".to_owned()),
                ..unchanged(now)
            }
        }
        VolumeObservation::NotDeleted { message } => {
            Plan { note: Some(format!("not deleted yet: {message}")), ..unchanged(now + DELETE_RETRY) }
        }
        VolumeObservation::NotRequested
        | VolumeObservation::Creating
        | VolumeObservation::Ready
        | VolumeObservation::Broken { .. } => with_action(Action::Delete, now),
    }
}
