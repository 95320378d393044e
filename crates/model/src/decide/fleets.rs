//! Decision of the `fleets` pipeline: keeps the configured number of instances.
//!
//! Counts every instance that is not terminated, including those that are still to be created. Missing instances are
//! replaced with a growing delay; surplus and outdated ones are terminated when idle. Busy ones are never touched.

use std::collections::BTreeSet;

use crate::{
    decide::change::Change,
    fleet::{Event, Status},
    id::InstanceId,
    instance,
    time::{Span, Timestamp},
};

/// Interval between passes if nothing changes.
pub const POLL_INTERVAL: Span = Span::secs(30);
/// Delay before each further attempt to reach `nodes.min`; the last value repeats.
pub const RETRY_DELAYS: [Span; 5] =
    [Span::mins(1), Span::mins(2), Span::mins(5), Span::mins(10), Span::mins(30)];
/// Maximum number of attempts in a row.
pub const ATTEMPTS_MAX: u32 = 15;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FleetMember {
    pub id: InstanceId,
    pub instance_num: u32,
    pub status: instance::Status,
    pub jobs: u32,
    /// Termination was requested; the instance still occupies its slot.
    pub is_end_requested: bool,
    /// True if it matches the current configuration of the fleet.
    pub is_up_to_date: bool,
}

impl FleetMember {
    fn is_removable(&self) -> bool {
        self.status == instance::Status::Idle && self.jobs == 0
    }

    fn is_ending(&self) -> bool {
        self.is_end_requested || self.status == instance::Status::Terminating
    }
}

/// Stored state of the fleet.
#[derive(Clone, Debug, PartialEq)]
pub struct FleetView {
    pub status: Status,
    /// SSH fleets keep their configured hosts.
    pub is_ssh: bool,
    /// Deletion was requested.
    pub is_delete_requested: bool,
    pub nodes_min: u32,
    /// Initial number of instances.
    pub nodes_target: u32,
    pub nodes_max: Option<u32>,
    /// Instances that are not terminated.
    pub members: Vec<FleetMember>,
    /// Attempts in a row to reach `nodes_min`.
    pub attempts: u32,
    pub last_attempt_at: Option<Timestamp>,
}

#[derive(Clone, Debug, PartialEq)]
pub struct Plan {
    /// Numbers of the new, pending instances.
    pub create: Vec<u32>,
    pub end: Vec<(InstanceId, instance::TerminationReason)>,
    pub change: Option<Change<Event>>,
    pub attempts: u32,
    pub last_attempt_at: Option<Timestamp>,
    /// Message for the event log although the status does not change.
    pub note: Option<String>,
    pub due: Timestamp,
}

pub fn decide(fleet: &FleetView, now: Timestamp) -> Plan {
    let keep = Plan {
        create: Vec::new(),
        end: Vec::new(),
        change: None,
        attempts: fleet.attempts,
        last_attempt_at: fleet.last_attempt_at,
        note: None,
        due: now + POLL_INTERVAL,
    };
    match fleet.status {
        Status::Submitted | Status::Active if fleet.is_delete_requested => {
            let change = Change::from_event(Event::DeleteRequested, "deletion requested");
            Plan { change: Some(change), end: end_all_members(fleet), due: now, ..keep }
        }
        Status::Submitted => {
            Plan { change: Some(Change::from_event(Event::Activated, "accepted")), due: now, ..keep }
        }
        Status::Active if fleet.is_ssh => keep,
        Status::Active => plan_active(fleet, keep, now),
        Status::Terminating if fleet.members.is_empty() => Plan {
            change: Some(Change::from_event(Event::Emptied, "its last instance was removed")),
            due: now,
            ..keep
        },
        Status::Terminating => Plan { end: end_all_members(fleet), ..keep },
        Status::Terminated | Status::Failed => keep,
    }
}

fn end_all_members(fleet: &FleetView) -> Vec<(InstanceId, instance::TerminationReason)> {
    let alive = fleet.members.iter().filter(|member| !member.is_ending());
    alive.map(|member| (member.id, instance::TerminationReason::TerminatedByUser)).collect()
}

fn plan_active(fleet: &FleetView, mut plan: Plan, now: Timestamp) -> Plan {
    let mut alive: Vec<&FleetMember> = fleet.members.iter().filter(|member| !member.is_ending()).collect();
    alive.sort_by_key(|member| member.instance_num);
    let outdated: Vec<&FleetMember> =
        alive.iter().filter(|member| member.is_removable() && !member.is_up_to_date).copied().collect();
    for member in outdated {
        plan.end.push((member.id, instance::TerminationReason::FleetSpecMismatch));
    }
    // Instances that are terminating still occupy their slot: never more than the maximum exist at once.
    let total = u32::try_from(fleet.members.len()).unwrap_or(u32::MAX);
    let staying = u32::try_from(alive.len() - plan.end.len()).unwrap_or(u32::MAX);
    if let Some(max) = fleet.nodes_max {
        let surplus = staying.saturating_sub(max) as usize;
        let ended: BTreeSet<InstanceId> = plan.end.iter().map(|(id, _)| *id).collect();
        let may_go = alive.iter().rev().filter(|member| member.is_removable() && !ended.contains(&member.id));
        let surplus: Vec<InstanceId> = may_go.take(surplus).map(|member| member.id).collect();
        plan.end.extend(surplus.into_iter().map(|id| (id, instance::TerminationReason::MaxInstancesLimit)));
    }
    // A new fleet starts with its target; after that the minimum applies.
    let is_new = fleet.last_attempt_at.is_none() && fleet.attempts == 0 && fleet.members.is_empty();
    let wanted = if is_new { fleet.nodes_target.max(fleet.nodes_min) } else { fleet.nodes_min };
    if staying >= wanted {
        if alive.iter().all(|member| is_up(member.status)) {
            plan.attempts = 0;
        }
        return plan;
    }
    create_missing(fleet, plan, wanted - staying, total, now)
}

fn is_up(status: instance::Status) -> bool {
    match status {
        instance::Status::Idle | instance::Status::Busy => true,
        instance::Status::Pending
        | instance::Status::Provisioning
        | instance::Status::Terminating
        | instance::Status::Terminated => false,
    }
}

fn create_missing(fleet: &FleetView, mut plan: Plan, missing: u32, total: u32, now: Timestamp) -> Plan {
    if fleet.attempts >= ATTEMPTS_MAX {
        plan.note =
            Some(format!("instances missing: {missing}; gave up after {ATTEMPTS_MAX} failed attempts"));
        return plan;
    }
    let next = match (fleet.attempts.checked_sub(1), fleet.last_attempt_at) {
        (Some(index), Some(tried)) => {
            let last = RETRY_DELAYS.len() - 1;
            tried + RETRY_DELAYS[usize::try_from(index).unwrap_or(last).min(last)]
        }
        (None, _) | (_, None) => now,
    };
    if now < next {
        plan.due = plan.due.min(next);
        return plan;
    }
    let room = fleet.nodes_max.map_or(missing, |max| missing.min(max.saturating_sub(total)));
    if room == 0 {
        return plan;
    }
    let used: BTreeSet<u32> = fleet.members.iter().map(|member| member.instance_num).collect();
    plan.create = (0..).filter(|num| !used.contains(num)).take(room as usize).collect();
    plan.attempts = fleet.attempts + 1;
    plan.last_attempt_at = Some(now);
    let message =
        format!("instances missing: {missing}; creating {room}, attempt {} of {ATTEMPTS_MAX}", plan.attempts);
    plan.note = Some(message);
    plan
}
