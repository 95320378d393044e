//! Tests of the checkers of managed jobs: each gets a history that violates its rule.

use uuid::Uuid;
use windlass_model::{
    id::{InstanceId, SubmissionId},
    managed_job::{
        PendingKind, ScheduleState, Status,
        plan::{ManagedJobPlan, RecoveryStrategy},
        record::TaskRecord,
    },
    skypilot::{self, CommandLineValues},
};
use windlass_sim::{
    host::{HostEffect, HostEntry},
    invariants::{
        self, Event, History, RunRow, check_after_faults, check_always,
        managed::{ManagedJobRow, RunAttempt, TaskRow},
    },
};

const JOB: Uuid = Uuid::from_u128(1);

fn plan(text: &str) -> ManagedJobPlan {
    skypilot::parse_task_file(text, &CommandLineValues::default()).unwrap().plan
}

/// A job whose tasks are in these states.
fn job(plan: ManagedJobPlan, records: Vec<TaskRecord>) -> ManagedJobRow {
    let rows = (100..).zip(records).map(|(id, record)| TaskRow {
        id: Uuid::from_u128(id),
        status: record.status.to_string(),
        schedule: record.schedule.to_string(),
        record,
    });
    let tasks: Vec<TaskRow> = rows.collect();
    let all = tasks.iter().map(|task| task.record.status);
    let status = windlass_model::managed_job::record::job_status(all).to_string();
    let finished = tasks.iter().all(|task| task.record.schedule == ScheduleState::Done);
    let schedule = if finished { ScheduleState::Done } else { ScheduleState::Alive }.to_string();
    ManagedJobRow {
        id: JOB,
        number: 1,
        plan,
        status,
        schedule,
        claimed: !finished,
        finished,
        cancel_asked_at: None,
        tasks,
    }
}

fn single_task_job(record: TaskRecord) -> ManagedJobRow {
    job(plan("run: work"), vec![record])
}

fn ended_record(status: Status) -> TaskRecord {
    TaskRecord { status, schedule: ScheduleState::Done, pending: None, attempt: 1, ..TaskRecord::default() }
}

fn attempt(number: u32, status: &str) -> RunRow {
    let attempt = RunAttempt { job: JOB, task: 0, number, made_at: 1_000 };
    let id = Uuid::from_u128(200 + u128::from(number));
    RunRow { id, status: status.into(), stopped_at: None, attempt: Some(attempt) }
}

fn submission(number: u32) -> SubmissionId {
    SubmissionId(Uuid::from_u128(300 + u128::from(number)))
}

/// The only job of an attempt.
fn job_of_attempt(number: u32, status: &str) -> invariants::JobRow {
    invariants::JobRow {
        id: submission(number).0,
        run_id: attempt(number, "").id,
        replica_num: 0,
        job_num: 0,
        submission_num: 0,
        status: status.into(),
        finished: true,
        instance_id: None,
        blocks: 1,
        submitted_at: 0,
        host_lost: false,
    }
}

/// Parses `"STARTING -> RUNNING for started"`, for the task with this number.
fn event(seq: i64, task: u128, text: &str) -> Event {
    let (edge, reason) = text.split_once(" for ").unwrap();
    let (from, to) = edge.split_once(" -> ").unwrap();
    Event {
        seq,
        entity: "managed-job".into(),
        entity_id: Uuid::from_u128(100 + task),
        kind: "status".into(),
        from: (from != "new").then(|| from.into()),
        to: Some(to.into()),
        is_final: to.parse::<Status>().unwrap().is_final(),
        actor: "ManagedJob".into(),
        epoch: Some(seq),
        at: seq,
        reason: reason.into(),
    }
}

fn events(of_tasks: &[(u128, &str)]) -> Vec<Event> {
    (1..).zip(of_tasks).map(|(seq, (task, text))| event(seq, *task, text)).collect()
}

const STARTED: [(u128, &str); 3] = [
    (0, "new -> PENDING for submitted"),
    (0, "PENDING -> STARTING for slot-granted"),
    (0, "STARTING -> RUNNING for started"),
];

fn running() -> TaskRecord {
    TaskRecord {
        status: Status::Running,
        schedule: ScheduleState::Alive,
        pending: None,
        attempt: 1,
        ..TaskRecord::default()
    }
}

#[track_caller]
fn assert_breaks(id: &str, words: &str, history: &History) {
    let found = check_always(history);
    assert!(
        found.iter().any(|v| v.id == id && v.what.contains(words)),
        "expected {id} {words}, found {found:?}"
    );
}

fn history_with(job: ManagedJobRow, runs: Vec<RunRow>) -> History {
    History { managed: vec![job], runs, ..History::default() }
}

#[test]
fn a_managed_job_that_recovers_and_succeeds_has_no_violations() {
    let record = TaskRecord { recovery_count: 1, attempt: 2, ..ended_record(Status::Succeeded) };
    let more = [
        (0, "RUNNING -> RECOVERING for failure"),
        (0, "RECOVERING -> RUNNING for recovered"),
        (0, "RUNNING -> SUCCEEDED for succeeded"),
    ];
    let history = History {
        events: events(&[&STARTED[..], &more[..]].concat()),
        ..history_with(single_task_job(record), vec![attempt(1, "failed"), attempt(2, "done")])
    };
    assert_eq!(check_always(&history), []);
    assert_eq!(check_after_faults(&history), []);
    assert_eq!(invariants::managed::count_outcomes(&history)["recovered"], 1);
}

#[test]
fn r2_a_managed_job_that_never_ends_is_detected() {
    let found = check_after_faults(&history_with(single_task_job(running()), vec![]));
    assert!(found.iter().any(|v| v.id == "R2"), "{found:?}");
}

#[test]
fn m5_excess_and_unreleased_slots_are_detected() {
    let history = History { watched: vec![("M5", "3 tasks launch".into())], ..History::default() };
    assert_breaks("M5", "3 tasks launch", &history);
    let kept = ManagedJobRow { claimed: true, ..single_task_job(ended_record(Status::Succeeded)) };
    let found = check_after_faults(&history_with(kept, vec![attempt(1, "done")]));
    assert!(found.iter().any(|v| v.id == "M5"), "{found:?}");
}

#[test]
fn r5_contradictory_columns_and_unlisted_transitions_are_detected() {
    let record = TaskRecord { schedule: ScheduleState::Launching, ..running() };
    assert_breaks("R5", "not legal with LAUNCHING", &history_with(single_task_job(record), vec![]));
    let mut job = single_task_job(running());
    job.tasks[0].status = "PENDING".into();
    assert_breaks("R5", "do not match", &history_with(job, vec![]));
    let shown = ManagedJobRow { status: "PENDING".into(), ..single_task_job(running()) };
    assert_breaks("R20", "shows PENDING", &history_with(shown, vec![]));
    let edge = [STARTED[0], (0, "PENDING -> SUCCEEDED for succeeded")];
    assert_breaks(
        "R5",
        "not an edge",
        &History { events: events(&edge), ..history_with(single_task_job(running()), vec![]) },
    );
}

#[test]
fn r20_a_final_status_that_contradicts_its_attempt_is_detected() {
    assert_breaks(
        "R20",
        "its run did not",
        &history_with(single_task_job(ended_record(Status::Succeeded)), vec![attempt(1, "failed")]),
    );
    assert_breaks(
        "R20",
        "its run did not",
        &history_with(single_task_job(ended_record(Status::Failed)), vec![attempt(1, "done")]),
    );
    assert_breaks(
        "R20",
        "no limit is configured",
        &history_with(single_task_job(ended_record(Status::FailedNoResource)), vec![attempt(1, "failed")]),
    );
    assert_breaks(
        "R20",
        "its run is done",
        &history_with(single_task_job(ended_record(Status::FailedPrechecks)), vec![attempt(1, "done")]),
    );
    let mut left = single_task_job(ended_record(Status::Failed));
    left.plan.tasks[0].recovery.max_restarts_on_errors = 1;
    assert_breaks("R20", "restarts left", &history_with(left.clone(), vec![attempt(1, "failed")]));
    left.plan.tasks[0].recovery.strategy = RecoveryStrategy::None;
    assert_eq!(check_always(&history_with(left, vec![attempt(1, "failed")])), []);
    // A stop after everything is done changes nothing, regardless of who requested it.
    let stopped = |status| History {
        jobs: vec![job_of_attempt(1, status)],
        ..history_with(single_task_job(ended_record(Status::Succeeded)), vec![attempt(1, "terminated")])
    };
    assert_eq!(check_always(&stopped("done")), []);
    assert_breaks("R20", "its run did not", &stopped("terminated"));
}

#[test]
fn m2_an_unrequested_cancel_and_a_launch_after_a_cancel_are_detected() {
    let cancelled = single_task_job(ended_record(Status::Cancelled));
    assert_breaks(
        "M2",
        "without a request",
        &history_with(cancelled.clone(), vec![attempt(1, "terminated")]),
    );
    let stopped = RunRow { stopped_at: Some(5), ..attempt(1, "terminated") };
    assert_eq!(check_always(&history_with(cancelled.clone(), vec![stopped])), []);
    let requested = ManagedJobRow { cancel_asked_at: Some(-200_000_000), ..cancelled };
    assert_breaks("M2", "long after its cancel", &history_with(requested, vec![attempt(1, "terminated")]));
}

#[test]
fn m8_a_controller_failure_is_detected() {
    assert_breaks(
        "M8",
        "FAILED_CONTROLLER",
        &history_with(single_task_job(ended_record(Status::FailedController)), vec![attempt(1, "failed")]),
    );
}

#[test]
fn m6_concurrent_attempts_are_detected() {
    assert_breaks(
        "M6",
        "two active",
        &history_with(single_task_job(running()), vec![attempt(1, "running"), attempt(2, "submitted")]),
    );
    assert_breaks(
        "M6",
        "its run has not",
        &history_with(single_task_job(ended_record(Status::Failed)), vec![attempt(1, "terminating")]),
    );
    let row = |number: u32| job_of_attempt(number, "running");
    let host = |number: u32| InstanceId(Uuid::from_u128(400 + u128::from(number)));
    let entry = |number, at, kind| HostEntry {
        at,
        host: host(number),
        submission: submission(number),
        epoch: 1,
        kind,
    };
    let journal = |second_at| {
        vec![
            entry(1, 10, HostEffect::ContainerStarted),
            entry(1, 20, HostEffect::ContainerExited),
            entry(2, second_at, HostEffect::ContainerStarted),
        ]
    };
    let history = |second_at| History {
        jobs: vec![row(1), row(2)],
        journal: journal(second_at),
        ..history_with(single_task_job(running()), vec![attempt(1, "failed"), attempt(2, "running")])
    };
    assert_breaks("M6", "ran at the same time", &history(15));
    assert_eq!(check_always(&history(20)), []);
    let mut lost = history(15);
    lost.jobs[0].host_lost = true;
    assert_eq!(check_always(&lost), []);
}

#[test]
fn m7_a_task_that_starts_before_its_predecessor_ends_is_detected() {
    let chain = || plan("name: chain\n---\nname: a\nrun: work\n---\nname: b\nrun: work\n");
    let waiting = TaskRecord {
        schedule: ScheduleState::Waiting,
        pending: Some(PendingKind::Queued),
        ..TaskRecord::default()
    };
    assert_eq!(check_always(&history_with(job(chain(), vec![running(), waiting]), vec![])), []);
    let early = [
        &STARTED[..],
        &[
            (1, "new -> PENDING for submitted"),
            (1, "PENDING -> STARTING for slot-granted"),
            (1, "STARTING -> RUNNING for started"),
        ],
    ]
    .concat();
    let history =
        History { events: events(&early), ..history_with(job(chain(), vec![running(), running()]), vec![]) };
    assert_breaks("M7", "started before", &history);
}

#[test]
fn r17_wrong_recovery_and_restart_counts_are_detected() {
    let record = TaskRecord { recovery_count: 1, ..running() };
    assert_breaks(
        "R17",
        "counts 1",
        &History { events: events(&STARTED), ..history_with(single_task_job(record), vec![]) },
    );
    let record = TaskRecord { restarts_on_errors: 1, ..running() };
    assert_breaks("R17", "restarted 1", &history_with(single_task_job(record), vec![]));
}

#[test]
fn m1_m3_and_m4_recoveries_without_a_valid_cause_are_detected() {
    for (id, reason, words) in [
        ("M1", "emergency", "internal error"),
        ("M3", "boredom", "not a recovery source"),
        ("M4", "restart", "adopted"),
    ] {
        let text = format!("RUNNING -> RECOVERING for {reason}");
        let more = [(0, text.as_str())];
        let record =
            TaskRecord { status: Status::Recovering, schedule: ScheduleState::AliveWaiting, ..running() };
        let events = events(&[&STARTED[..], &more[..]].concat());
        assert_breaks(id, words, &History { events, ..history_with(single_task_job(record), vec![]) });
    }
}
