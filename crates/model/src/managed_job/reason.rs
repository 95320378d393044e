//! Reason for the state of a task of a managed job: one sentence, the same in all views.

use super::{PendingKind, ScheduleState, Status, record::TaskRecord};
use crate::{
    decide::managed_jobs::slots::{SlotLimits, SlotUsage},
    time::Timestamp,
};

/// Context of a task in addition to its record.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TaskContext {
    /// Tasks that must succeed before this one starts.
    pub waits_for: Vec<String>,
    /// Slots that exist and slots in use.
    pub slots: Option<(SlotLimits, SlotUsage)>,
    /// Run of the newest attempt, while the task is being launched.
    pub attempt: AttemptProgress,
}

/// Progress of the run of an attempt.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum AttemptProgress {
    /// There is none, or none is needed.
    #[default]
    Unknown,
    /// It waits for nodes.
    Queued { message: Option<String> },
    /// It has nodes, and they are being prepared.
    Preparing { message: Option<String> },
    /// It is terminating, and its nodes are being released.
    Ending,
}

/// Returns why the task waits, recovers, ended, or is being ended. `None` if the status is sufficient.
pub fn task_reason(record: &TaskRecord, of: &TaskContext) -> Option<String> {
    match record.status {
        Status::Pending => Some(pending_reason(record, of)),
        Status::Starting => Some(launching_reason(record, of)),
        Status::Recovering => {
            let cause = record.last_failure.as_deref().unwrap_or("its nodes were lost");
            Some(format!("{cause}; {}", launching_reason(record, of)))
        }
        Status::Cancelling => {
            let why = record.failure_reason.as_deref().unwrap_or("it is being cancelled");
            Some(format!("{why}; its nodes are being released"))
        }
        Status::Running | Status::Succeeded => None,
        Status::Cancelled
        | Status::Failed
        | Status::FailedSetup
        | Status::FailedPrechecks
        | Status::FailedNoResource
        | Status::FailedController => record.failure_reason.clone(),
    }
}

fn pending_reason(record: &TaskRecord, of: &TaskContext) -> String {
    match record.pending {
        Some(PendingKind::Queued) | None => queued_reason(record, of),
        Some(PendingKind::LaunchBackoff | PendingKind::RecoveryBackoff) => {
            let cause = record.last_failure.as_deref().unwrap_or("no nodes available");
            let next = match record.next_retry_at.filter(|_| record.schedule == ScheduleState::AliveBackoff) {
                Some(at) => format!("next attempt at {}", truncate_to_second(at)),
                None => slot_reason(record, of),
            };
            format!("attempt {}: {cause}; {next}", record.attempt)
        }
    }
}

fn queued_reason(record: &TaskRecord, of: &TaskContext) -> String {
    if !of.waits_for.is_empty() {
        return format!("it begins when {} succeeded", format_task_names(&of.waits_for));
    }
    if record.schedule == ScheduleState::Inactive {
        return "submitted; the server has not processed it yet".to_owned();
    }
    match record.next_retry_at {
        Some(at) => format!("internal error; next attempt at {}", truncate_to_second(at)),
        None => slot_reason(record, of),
    }
}

/// Formats names as `task a has` or `tasks a and b have`.
fn format_task_names(tasks: &[String]) -> String {
    match tasks {
        [one] => format!("task {one} has"),
        [first @ .., last] => format!("tasks {} and {last} have", first.join(", ")),
        [] => "all others have".to_owned(),
    }
}

fn slot_reason(record: &TaskRecord, of: &TaskContext) -> String {
    let Some((limits, in_use)) = of.slots else { return "waiting for a launch slot".to_owned() };
    if in_use.launching >= limits.max_launching {
        let (taken, all) = (in_use.launching, limits.max_launching);
        return format!("waiting for a launch slot: {taken} of {all} are in use (`jobs_launching_max`)");
    }
    if !record.schedule.holds_alive_slot() && in_use.alive >= limits.max_alive {
        let (taken, all) = (in_use.alive, limits.max_alive);
        return format!("waiting for another job to end: {taken} of {all} are alive (`jobs_alive_max`)");
    }
    "waiting for a launch slot".to_owned()
}

fn launching_reason(record: &TaskRecord, of: &TaskContext) -> String {
    let attempt = record.attempt;
    if record.schedule != ScheduleState::Launching {
        return match record.next_retry_at {
            Some(at) => format!("next attempt at {}", truncate_to_second(at)),
            None => slot_reason(record, of),
        };
    }
    let reported = |what: &str, message: Option<&str>| match message {
        Some(message) => format!("attempt {attempt} {what}: {message}"),
        None => format!("attempt {attempt} {what}"),
    };
    match &of.attempt {
        AttemptProgress::Unknown if attempt == 0 => "its first attempt is being created".to_owned(),
        AttemptProgress::Unknown => format!("attempt {attempt} is being created"),
        AttemptProgress::Queued { message } => reported("is waiting for nodes", message.as_deref()),
        AttemptProgress::Preparing { message } => {
            reported("has nodes, which are being prepared", message.as_deref())
        }
        AttemptProgress::Ending => format!("attempt {attempt} is ending, and its nodes are being released"),
    }
}

fn truncate_to_second(at: Timestamp) -> Timestamp {
    Timestamp::from_secs(at.0.div_euclid(1_000_000))
}

/// Returns the reason of a job: that of the first of its tasks that has one.
pub fn job_reason<'a>(tasks: impl IntoIterator<Item = (&'a str, Option<&'a str>)>) -> Option<String> {
    let mut count = 0;
    let mut found: Option<(&str, &str)> = None;
    for (name, reason) in tasks {
        count += 1;
        found = found.or(reason.map(|reason| (name, reason)));
    }
    let (name, reason) = found?;
    Some(if count > 1 { format!("task {name}: {reason}") } else { reason.to_owned() })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::managed_job::{Event, RecoverySource, ScheduleEvent};

    fn at(secs: i64) -> Timestamp {
        Timestamp::from_secs(secs)
    }

    fn waiting() -> TaskRecord {
        let mut record = TaskRecord::default();
        assert!(record.schedule(ScheduleEvent::Submitted));
        record
    }

    fn launched() -> TaskRecord {
        let mut record = waiting();
        record.apply(Event::SlotGranted, RecoverySource::Failure, at(0)).unwrap();
        assert!(record.schedule(ScheduleEvent::Claimed));
        TaskRecord { attempt: 1, ..record }
    }

    fn message(record: &TaskRecord, of: &TaskContext) -> String {
        task_reason(record, of).unwrap()
    }

    #[test]
    fn reason_of_a_queued_task_names_what_it_waits_for() {
        let slots = |launching, alive| TaskContext {
            slots: Some((SlotLimits { max_launching: 8, max_alive: 9 }, SlotUsage { launching, alive })),
            ..TaskContext::default()
        };
        let of = |names: &[&str]| TaskContext {
            waits_for: names.iter().map(|name| (*name).to_owned()).collect(),
            ..TaskContext::default()
        };
        assert_eq!(message(&waiting(), &of(&["a"])), "it begins when task a has succeeded");
        assert_eq!(
            message(&waiting(), &of(&["a", "b", "c"])),
            "it begins when tasks a, b and c have succeeded"
        );
        assert_eq!(message(&waiting(), &slots(1, 1)), "waiting for a launch slot");
        assert!(
            message(&waiting(), &slots(8, 8)).starts_with("waiting for a launch slot: 8 of 8 are in use")
        );
        assert!(
            message(&waiting(), &slots(1, 9)).starts_with("waiting for another job to end: 9 of 9 are alive")
        );
        assert!(message(&TaskRecord::default(), &slots(1, 1)).contains("has not processed it yet"));
    }

    #[test]
    fn reason_of_a_launching_task_names_what_its_attempt_waits_for() {
        let with = |attempt| TaskContext { attempt, ..TaskContext::default() };
        let queued = AttemptProgress::Queued { message: Some("host-0: is busy".to_owned()) };
        assert_eq!(message(&launched(), &with(queued)), "attempt 1 is waiting for nodes: host-0: is busy");
        assert_eq!(message(&launched(), &TaskContext::default()), "attempt 1 is being created");
        let preparing = with(AttemptProgress::Preparing { message: None });
        let mut record = launched();
        record.apply(Event::Started, RecoverySource::Failure, at(1)).unwrap();
        assert!(record.schedule(ScheduleEvent::LaunchEnded));
        assert_eq!(task_reason(&record, &preparing), None, "what runs waits for nothing");
        record.apply(Event::Lost, RecoverySource::Failure, at(2)).unwrap();
        assert!(record.schedule(ScheduleEvent::WantsLaunch));
        record.last_failure = Some("nodes lost: node 0 is gone".to_owned());
        assert_eq!(message(&record, &preparing), "nodes lost: node 0 is gone; waiting for a launch slot");
    }

    #[test]
    fn reason_of_a_task_in_backoff_gives_the_cause_and_the_time_of_the_next_try() {
        let mut record = launched();
        record.apply(Event::BackedOff, RecoverySource::Failure, at(1)).unwrap();
        assert!(record.schedule(ScheduleEvent::CapacityRefused));
        record.last_failure = Some("no nodes in time: host-0: is busy".to_owned());
        record.next_retry_at = Some(Timestamp(1_790_000_000_500_000));
        assert_eq!(
            message(&record, &TaskContext::default()),
            "attempt 1: no nodes in time: host-0: is busy; next attempt at 2026-09-21T14:13:20Z"
        );
        assert!(record.schedule(ScheduleEvent::BackoffOver));
        assert!(message(&record, &TaskContext::default()).ends_with("is busy; waiting for a launch slot"));
    }

    #[test]
    fn reason_of_a_job_is_the_first_reason_among_its_tasks() {
        assert_eq!(job_reason([("a", Some("why"))]).as_deref(), Some("why"));
        assert_eq!(job_reason([("a", None), ("b", Some("why"))]).as_deref(), Some("task b: why"));
        assert_eq!(job_reason([("a", None)]), None);
    }
}
