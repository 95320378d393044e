//! Decision of the `jobs_submitted` pipeline: from the queue to an instance, or to the end if none is available.
//!
//! Pass 1 assigns: an idle instance is claimed, or a placeholder reserves a number and a slot. Pass 2, only if there is
//! something to wait for, attaches volumes, or checks whether a backend granted the instance: the `instances` pipeline
//! sends the requests to backends. The run decides whether a job without capacity is retried.

use std::sync::Arc;

use crate::{
    decide::change::Change,
    explain::{Shortfall, refusal_summary},
    id::{FleetId, InstanceId},
    job::{Ending, Event, TerminationReason},
    plan::place::{NodePlacement, PlacementOutcome, RESERVE_AFTER, RefusalReport},
    time::{Span, Timestamp},
};

/// Interval after which a waiting job is evaluated again, unless it is woken before.
pub const POLL_INTERVAL: Span = Span::secs(4);
/// Maximum time to attach a volume.
pub const ATTACH_TIMEOUT: Span = Span::mins(5);
/// Maximum time for a backend to grant an instance, over all offers.
pub const CREATE_TIMEOUT: Span = Span::mins(10);
/// Interval for a job with a placeholder; a change of the placeholder wakes the job at once.
pub const POLL_PLACEHOLDER: Span = Span::secs(30);

/// Stored state of the submission.
#[derive(Clone, Debug, PartialEq)]
pub struct SubmittedJobView {
    pub submitted_at: Timestamp,
    pub stage: AssignmentStage,
    pub has_volumes: bool,
}

#[derive(Clone, Debug, PartialEq)]
pub enum AssignmentStage {
    Unassigned,
    /// Assigned to an existing instance; volumes are still to be attached.
    Assigned {
        since: Timestamp,
    },
    /// A placeholder reserves its number; a backend was requested to create the instance.
    Placeholder {
        since: Timestamp,
    },
}

/// Observation: in pass 1 the result of placement for this node, in pass 2 the progress of the work.
#[derive(Clone, Debug, PartialEq)]
pub enum SubmittedJobObservation {
    Seat {
        fleet: FleetId,
        seat: NodePlacement,
        /// Name of the instance, if it exists.
        instance_name: String,
    },
    Waits {
        why: Arc<RefusalReport>,
        reserved: Vec<InstanceId>,
    },
    Never {
        why: Arc<RefusalReport>,
    },
    /// Nothing was attempted in this pass yet.
    NotTried,
    Attached,
    Attaching,
    AttachFailed {
        message: String,
    },
    Created,
    /// The backend accepted the request; the instance does not exist yet.
    Creating,
    /// Every offer was refused, or the placeholder ended for another reason.
    Refused {
        message: String,
    },
}

impl SubmittedJobObservation {
    /// Converts the outcome of placement for one node of the replica. `name` returns the names of instances.
    pub fn from_outcome(
        outcome: &PlacementOutcome,
        node: usize,
        name: impl Fn(InstanceId) -> String,
    ) -> Self {
        match outcome {
            PlacementOutcome::Placed { fleet, seats } => match seats.get(node) {
                Some(seat) => {
                    let instance_name = match seat {
                        NodePlacement::Existing { instance, .. } => name(*instance),
                        NodePlacement::New { .. } => String::new(),
                    };
                    Self::Seat { fleet: *fleet, seat: seat.clone(), instance_name }
                }
                None => Self::NotTried,
            },
            PlacementOutcome::Waits { why, reserved } => {
                Self::Waits { why: Arc::clone(why), reserved: reserved.clone() }
            }
            PlacementOutcome::Never { why } => Self::Never { why: Arc::clone(why) },
        }
    }
}

#[derive(Clone, Debug, PartialEq)]
pub enum Plan {
    /// Store the assignment; the status stays until pass 2 is done.
    Assign {
        fleet: FleetId,
        seat: NodePlacement,
        message: String,
        due: Timestamp,
    },
    /// Store the assignment if there is one, and set the job to provisioning.
    Provision {
        assign: Option<(FleetId, NodePlacement)>,
        change: Change<Event>,
        due: Timestamp,
    },
    Attach {
        due: Timestamp,
    },
    /// Stay in the queue, and store why.
    Wait {
        why: Arc<RefusalReport>,
        reserved: Vec<InstanceId>,
        message: String,
        due: Timestamp,
    },
    /// Evaluate again later; nothing new to store.
    Recheck {
        due: Timestamp,
    },
    /// Terminate with the reason. A placeholder is removed as well.
    End {
        ending: Ending,
        change: Change<Event>,
    },
}

pub fn decide(job: &SubmittedJobView, seen: SubmittedJobObservation, now: Timestamp) -> Plan {
    match &job.stage {
        AssignmentStage::Unassigned => plan_unassigned(job, seen, now),
        AssignmentStage::Assigned { since } => plan_assigned(seen, *since, now),
        AssignmentStage::Placeholder { since } => plan_placeholder(seen, *since, now),
    }
}

fn plan_unassigned(job: &SubmittedJobView, seen: SubmittedJobObservation, now: Timestamp) -> Plan {
    match seen {
        SubmittedJobObservation::Seat { fleet, seat, instance_name } => match &seat {
            NodePlacement::Existing { blocks, .. } if !job.has_volumes => {
                let message = format!("assigned to instance {instance_name}, blocks: {blocks}");
                let change = Change::from_event(Event::Placed, message);
                Plan::Provision { assign: Some((fleet, seat)), change, due: now }
            }
            NodePlacement::Existing { .. } => {
                let message = format!("assigned to instance {instance_name}, attaching volumes");
                Plan::Assign { fleet, seat, message, due: now }
            }
            NodePlacement::New { instance_num, offers, .. } => {
                let message =
                    format!("creating instance {instance_num} of the fleet, offers: {}", offers.len());
                Plan::Assign { fleet, seat, message, due: now }
            }
        },
        SubmittedJobObservation::Waits { why, reserved } => {
            let message = refusal_summary(&why.refusals).unwrap_or_else(|| "waits for its turn".to_owned());
            // Wake at the time when the job may reserve instances.
            let reserve_at = job.submitted_at + RESERVE_AFTER;
            let due =
                if reserve_at > now { reserve_at.min(now + POLL_INTERVAL) } else { now + POLL_INTERVAL };
            Plan::Wait { why, reserved, message, due }
        }
        SubmittedJobObservation::Never { why } => {
            let text =
                refusal_summary(&why.refusals).unwrap_or_else(|| "no instance or offer fits".to_owned());
            let no_fleet = why.refusals.iter().flat_map(|refusal| &refusal.shortfalls).all(|shortfall| {
                matches!(
                    shortfall,
                    Shortfall::NoFleets
                        | Shortfall::FleetMissing { .. }
                        | Shortfall::FleetNotNamed
                        | Shortfall::NotCluster
                )
            });
            end(match (no_fleet, why.for_good) {
                (true, _) => Ending::no_fleets(text),
                (false, true) => Ending::never_fits(text),
                (false, false) => Ending::no_capacity(text),
            })
        }
        SubmittedJobObservation::NotTried
        | SubmittedJobObservation::Attached
        | SubmittedJobObservation::Attaching
        | SubmittedJobObservation::AttachFailed { .. }
        | SubmittedJobObservation::Created
        | SubmittedJobObservation::Creating
        | SubmittedJobObservation::Refused { .. } => Plan::Recheck { due: now + POLL_INTERVAL },
    }
}

fn plan_assigned(seen: SubmittedJobObservation, since: Timestamp, now: Timestamp) -> Plan {
    match seen {
        SubmittedJobObservation::Attached => provision("volumes are attached", now),
        SubmittedJobObservation::AttachFailed { message } => end_with_volume_error(message),
        SubmittedJobObservation::Attaching if now.since(since) >= ATTACH_TIMEOUT => {
            end_with_volume_error(format!("volumes not attached within {} s", ATTACH_TIMEOUT.as_secs()))
        }
        SubmittedJobObservation::Attaching => {
            Plan::Recheck { due: (now + POLL_INTERVAL).min(since + ATTACH_TIMEOUT) }
        }
        SubmittedJobObservation::NotTried
        | SubmittedJobObservation::Seat { .. }
        | SubmittedJobObservation::Waits { .. }
        | SubmittedJobObservation::Never { .. }
        | SubmittedJobObservation::Created
        | SubmittedJobObservation::Creating
        | SubmittedJobObservation::Refused { .. } => Plan::Attach { due: now },
    }
}

fn plan_placeholder(seen: SubmittedJobObservation, since: Timestamp, now: Timestamp) -> Plan {
    match seen {
        SubmittedJobObservation::Created => provision("its instance is being created", now),
        SubmittedJobObservation::Refused { message } => end(Ending::no_capacity(message)),
        SubmittedJobObservation::Creating if now.since(since) >= CREATE_TIMEOUT => {
            end(Ending::no_capacity(format!("no instance was created within {} s", CREATE_TIMEOUT.as_secs())))
        }
        SubmittedJobObservation::Creating
        | SubmittedJobObservation::NotTried
        | SubmittedJobObservation::Seat { .. }
        | SubmittedJobObservation::Waits { .. }
        | SubmittedJobObservation::Never { .. }
        | SubmittedJobObservation::Attached
        | SubmittedJobObservation::Attaching
        | SubmittedJobObservation::AttachFailed { .. } => {
            Plan::Recheck { due: (now + POLL_PLACEHOLDER).min(since + CREATE_TIMEOUT) }
        }
    }
}

fn provision(message: &str, now: Timestamp) -> Plan {
    Plan::Provision { assign: None, change: Change::from_event(Event::Placed, message), due: now }
}

fn end_with_volume_error(message: String) -> Plan {
    end(Ending::new(TerminationReason::VolumeError).with_message(message))
}

fn end(ending: Ending) -> Plan {
    let message = ending.message().unwrap_or("no capacity").to_owned();
    Plan::End { change: Change::new(Event::NotPlaced, ending.reason().as_str(), message), ending }
}
