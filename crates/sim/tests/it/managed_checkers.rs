//! The checkers of managed jobs are each shown a history that breaks their rule.

use uuid::Uuid;
use windlass_model::{
    id::{InstanceId, SubmissionId},
    managed_job::{
        PendingKind, Schedule, Status,
        plan::{Plan, Strategy},
        record::Record,
    },
    sky::{self, Given},
};
use windlass_sim::{
    host::{Effect, Entry},
    invariants::{
        self, Event, History, RunRow, after_faults,
        managed::{Attempt, JobRow, TaskRow},
        safety,
    },
};

const JOB: Uuid = Uuid::from_u128(1);

fn plan(text: &str) -> Plan {
    sky::parse(text, &Given::default()).unwrap().plan
}

/// A job whose tasks are in these states.
fn job(plan: Plan, records: Vec<Record>) -> JobRow {
    let rows = (100..).zip(records).map(|(id, record)| TaskRow {
        id: Uuid::from_u128(id),
        status: record.status.to_string(),
        schedule: record.schedule.to_string(),
        record,
    });
    let tasks: Vec<TaskRow> = rows.collect();
    let all = tasks.iter().map(|task| task.record.status);
    let status = windlass_model::managed_job::record::shown_status(all).to_string();
    let finished = tasks.iter().all(|task| task.record.schedule == Schedule::Done);
    let schedule = if finished { Schedule::Done } else { Schedule::Alive }.to_string();
    JobRow {
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

fn one(record: Record) -> JobRow {
    job(plan("run: work"), vec![record])
}

fn ended(status: Status) -> Record {
    Record { status, schedule: Schedule::Done, pending: None, attempt: 1, ..Record::default() }
}

fn attempt(number: u32, status: &str) -> RunRow {
    let attempt = Attempt { job: JOB, task: 0, number, made_at: 1_000 };
    let id = Uuid::from_u128(200 + u128::from(number));
    RunRow { id, status: status.into(), stopped_at: None, attempt: Some(attempt) }
}

fn submission(number: u32) -> SubmissionId {
    SubmissionId(Uuid::from_u128(300 + u128::from(number)))
}

/// The one job of an attempt.
fn submitted(number: u32, status: &str) -> invariants::JobRow {
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

/// `"STARTING -> RUNNING for started"`, of the task with this number.
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

fn running() -> Record {
    Record {
        status: Status::Running,
        schedule: Schedule::Alive,
        pending: None,
        attempt: 1,
        ..Record::default()
    }
}

#[track_caller]
fn breaks(id: &str, words: &str, history: &History) {
    let found = safety(history);
    assert!(
        found.iter().any(|v| v.id == id && v.what.contains(words)),
        "expected {id} {words}, found {found:?}"
    );
}

fn with(job: JobRow, runs: Vec<RunRow>) -> History {
    History { managed: vec![job], runs, ..History::default() }
}

#[test]
fn a_job_that_recovers_and_succeeds_breaks_nothing() {
    let record = Record { recovery_count: 1, attempt: 2, ..ended(Status::Succeeded) };
    let more = [
        (0, "RUNNING -> RECOVERING for failure"),
        (0, "RECOVERING -> RUNNING for recovered"),
        (0, "RUNNING -> SUCCEEDED for succeeded"),
    ];
    let history = History {
        events: events(&[&STARTED[..], &more[..]].concat()),
        ..with(one(record), vec![attempt(1, "failed"), attempt(2, "done")])
    };
    assert_eq!(safety(&history), []);
    assert_eq!(after_faults(&history), []);
    assert_eq!(invariants::managed::outcomes(&history)["recovered"], 1);
}

#[test]
fn r2_a_job_that_never_ends_is_seen() {
    let found = after_faults(&with(one(running()), vec![]));
    assert!(found.iter().any(|v| v.id == "R2"), "{found:?}");
}

#[test]
fn m5_what_the_database_saw_of_slots_is_told() {
    let history = History { watched: vec![("M5", "3 tasks launch".into())], ..History::default() };
    breaks("M5", "3 tasks launch", &history);
    let kept = JobRow { claimed: true, ..one(ended(Status::Succeeded)) };
    let found = after_faults(&with(kept, vec![attempt(1, "done")]));
    assert!(found.iter().any(|v| v.id == "M5"), "{found:?}");
}

#[test]
fn r5_columns_that_may_not_stand_beside_each_other_are_seen() {
    let record = Record { schedule: Schedule::Launching, ..running() };
    breaks("R5", "beside LAUNCHING", &with(one(record), vec![]));
    let mut job = one(running());
    job.tasks[0].status = "PENDING".into();
    breaks("R5", "disagree", &with(job, vec![]));
    let shown = JobRow { status: "PENDING".into(), ..one(running()) };
    breaks("R20", "shows PENDING", &with(shown, vec![]));
    let edge = [STARTED[0], (0, "PENDING -> SUCCEEDED for succeeded")];
    breaks("R5", "no edge", &History { events: events(&edge), ..with(one(running()), vec![]) });
}

#[test]
fn r20_an_end_that_its_attempt_did_not_have_is_seen() {
    breaks("R20", "its run did not", &with(one(ended(Status::Succeeded)), vec![attempt(1, "failed")]));
    breaks("R20", "its run did not", &with(one(ended(Status::Failed)), vec![attempt(1, "done")]));
    breaks("R20", "nobody asked", &with(one(ended(Status::FailedNoResource)), vec![attempt(1, "failed")]));
    breaks("R20", "its run is done", &with(one(ended(Status::FailedPrechecks)), vec![attempt(1, "done")]));
    let mut left = one(ended(Status::Failed));
    left.plan.tasks[0].recovery.max_restarts_on_errors = 1;
    breaks("R20", "restarts left", &with(left.clone(), vec![attempt(1, "failed")]));
    left.plan.tasks[0].recovery.strategy = Strategy::None;
    assert_eq!(safety(&with(left, vec![attempt(1, "failed")])), []);
    // A stop that comes when all is done takes nothing back, whoever asked for it.
    let stopped = |status| History {
        jobs: vec![submitted(1, status)],
        ..with(one(ended(Status::Succeeded)), vec![attempt(1, "terminated")])
    };
    assert_eq!(safety(&stopped("done")), []);
    breaks("R20", "its run did not", &stopped("terminated"));
}

#[test]
fn m2_a_cancel_by_nobody_and_a_launch_after_one_are_seen() {
    let cancelled = one(ended(Status::Cancelled));
    breaks("M2", "by nobody", &with(cancelled.clone(), vec![attempt(1, "terminated")]));
    let stopped = RunRow { stopped_at: Some(5), ..attempt(1, "terminated") };
    assert_eq!(safety(&with(cancelled.clone(), vec![stopped])), []);
    let asked = JobRow { cancel_asked_at: Some(-200_000_000), ..cancelled };
    breaks("M2", "long after its cancel", &with(asked, vec![attempt(1, "terminated")]));
}

#[test]
fn m8_a_failure_of_our_own_is_seen() {
    breaks("M8", "our own fault", &with(one(ended(Status::FailedController)), vec![attempt(1, "failed")]));
}

#[test]
fn m6_two_attempts_at_one_time_are_seen() {
    breaks("M6", "two active", &with(one(running()), vec![attempt(1, "running"), attempt(2, "submitted")]));
    breaks("M6", "its run is not", &with(one(ended(Status::Failed)), vec![attempt(1, "terminating")]));
    let row = |number: u32| submitted(number, "running");
    let host = |number: u32| InstanceId(Uuid::from_u128(400 + u128::from(number)));
    let entry =
        |number, at, kind| Entry { at, host: host(number), submission: submission(number), epoch: 1, kind };
    let journal = |second_at| {
        vec![
            entry(1, 10, Effect::ContainerStarted),
            entry(1, 20, Effect::ContainerExited),
            entry(2, second_at, Effect::ContainerStarted),
        ]
    };
    let history = |second_at| History {
        jobs: vec![row(1), row(2)],
        journal: journal(second_at),
        ..with(one(running()), vec![attempt(1, "failed"), attempt(2, "running")])
    };
    breaks("M6", "lived at one time", &history(15));
    assert_eq!(safety(&history(20)), []);
    let mut lost = history(15);
    lost.jobs[0].host_lost = true;
    assert_eq!(safety(&lost), []);
}

#[test]
fn m7_a_task_that_begins_before_its_turn_is_seen() {
    let chain = || plan("name: chain\n---\nname: a\nrun: work\n---\nname: b\nrun: work\n");
    let waiting =
        Record { schedule: Schedule::Waiting, pending: Some(PendingKind::Queued), ..Record::default() };
    assert_eq!(safety(&with(job(chain(), vec![running(), waiting]), vec![])), []);
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
        History { events: events(&early), ..with(job(chain(), vec![running(), running()]), vec![]) };
    breaks("M7", "began before", &history);
}

#[test]
fn r17_a_wrong_count_of_recoveries_is_seen() {
    let record = Record { recovery_count: 1, ..running() };
    breaks("R17", "counts 1", &History { events: events(&STARTED), ..with(one(record), vec![]) });
    let record = Record { restarts_on_errors: 1, ..running() };
    breaks("R17", "restarted 1", &with(one(record), vec![]));
}

#[test]
fn m1_m3_and_m4_recoveries_without_a_cause_are_seen() {
    for (id, reason, words) in
        [("M1", "emergency", "internal error"), ("M3", "boredom", "no source"), ("M4", "restart", "adopted")]
    {
        let text = format!("RUNNING -> RECOVERING for {reason}");
        let more = [(0, text.as_str())];
        let record = Record { status: Status::Recovering, schedule: Schedule::AliveWaiting, ..running() };
        let events = events(&[&STARTED[..], &more[..]].concat());
        breaks(id, words, &History { events, ..with(one(record), vec![]) });
    }
}
