//! Managed jobs under random disturbances: losses, refusals, crashes and cancellations at any time.

use proptest::prelude::*;
use windlass_model::{
    decide::managed_jobs::AttemptObservation,
    job::TerminationReason as Reason,
    managed_job::{Event, RecoverySource, Status, record::TaskRecord},
    time::Span,
};

use crate::managed_jobs_fixture::{
    ManagedJobFixture, at, check_log, ended, ended_observation, failure, loss, no_capacity, place, success,
};

const SHAPES: [&str; 4] = [
    "run: a\nresources: {job_recovery: {max_restarts_on_errors: 2}}\n",
    "name: p\n---\nrun: a\n---\nrun: b\nresources: {job_recovery: FAILOVER}\n---\nrun: c\nresources: {job_recovery: NONE}\n",
    "name: g\nexecution: parallel\nprimary_tasks: [a]\ntermination_delay: 30s\n---\nname: a\nrun: a\n---\nname: b\nrun: b\n---\nname: c\nrun: c\n",
    "name: a\nrun: a\n---\nname: b\ndepends_on: a\nrun: b\nresources:\n  any_of: [{cpus: 1}, {cpus: 2}]\n---\nname: c\ndepends_on: [a]\nrun: c\ndeadline: {within: 2h, work: 30m, changeover: 1m}\n---\nname: d\ndepends_on: [b, c]\nrun: d\n",
];

/// Next random event.
#[derive(Clone, Debug)]
enum Disturbance {
    /// A pass of a server that survives.
    Pass,
    /// A server that crashes after it acted and before it wrote.
    Crash,
    Wait(i64),
    /// The run of the newest attempt makes progress, to this end.
    RunProgress(u32, u8),
    Unclear(u32),
    InternalError(u32),
    Spot(bool),
    Cancel,
}

fn disturbance() -> impl Strategy<Value = Disturbance> {
    prop_oneof![
        8 => Just(Disturbance::Pass),
        2 => Just(Disturbance::Crash),
        3 => (1_i64..200).prop_map(Disturbance::Wait),
        8 => (0_u32..4, 0_u8..8).prop_map(|(task, how)| Disturbance::RunProgress(task, how)),
        1 => (0_u32..4).prop_map(Disturbance::Unclear),
        1 => (0_u32..4).prop_map(Disturbance::InternalError),
        1 => any::<bool>().prop_map(Disturbance::Spot),
        1 => Just(Disturbance::Cancel),
    ]
}

/// Advances a run by itself: it never returns from its end.
fn advance_run(fixture: &mut ManagedJobFixture, task: u32, how: u8) {
    let Some(record) = fixture.records.get(task as usize) else { return };
    let key = (task, record.attempt);
    let next = match (fixture.runs.get(&key), how) {
        (
            None
            | Some(
                AttemptObservation::Nothing
                | AttemptObservation::Over { .. }
                | AttemptObservation::Impossible { .. },
            ),
            _,
        ) => return,
        (Some(AttemptObservation::Ending), _) => ended_observation(ended(Reason::TerminatedByServer, None)),
        (Some(AttemptObservation::Queued { .. }), 0) => no_capacity(),
        (Some(AttemptObservation::Queued { .. }), _) => AttemptObservation::Provisioning,
        (Some(AttemptObservation::Provisioning), 0 | 1) => loss(),
        (Some(AttemptObservation::Provisioning | AttemptObservation::Unclear), _) => {
            AttemptObservation::Running { placement: place("east") }
        }
        (Some(AttemptObservation::Running { .. }), 0 | 1) => loss(),
        (Some(AttemptObservation::Running { .. }), 2) => failure(1),
        (Some(AttemptObservation::Running { .. }), 3 | 4) => success(),
        (Some(AttemptObservation::Running { .. }), _) => {
            AttemptObservation::Running { placement: place("west") }
        }
    };
    fixture.runs.insert(key, next);
}

fn apply_disturbance(fixture: &mut ManagedJobFixture, disturbance: &Disturbance) {
    match disturbance {
        Disturbance::Pass => {
            fixture.pass();
        }
        Disturbance::Crash => {
            let decision = fixture.decide();
            fixture.carry_out(&decision, false);
        }
        Disturbance::Wait(secs) => {
            fixture.wait(*secs);
        }
        Disturbance::RunProgress(task, how) => advance_run(fixture, *task, *how),
        Disturbance::Unclear(task) => {
            let Some(record) = fixture.records.get(*task as usize) else { return };
            if let Some(seen @ AttemptObservation::Running { .. }) =
                fixture.runs.get_mut(&(*task, record.attempt))
            {
                *seen = AttemptObservation::Unclear;
            }
        }
        Disturbance::InternalError(task) => {
            if fixture.records.get(*task as usize).is_some_and(|record| !record.status.is_final()) {
                fixture.internal_error(*task);
            }
        }
        Disturbance::Spot(there) => fixture.spot_capacity = *there,
        Disturbance::Cancel => {
            fixture.cancel = Some(windlass_model::decide::managed_jobs::CancelRequest { grace: None })
        }
    }
}

fn check(fixture: &ManagedJobFixture) {
    check_log(fixture);
    for (task, record) in fixture.records.iter().enumerate() {
        assert!(record.is_legal(), "{} beside {}", record.schedule, record.status);
        let by_log = fixture.running_by_log(task as u32);
        assert_eq!(record.job_duration(fixture.now), by_log, "task {task}: {}", fixture.path(task as u32));
        assert_eq!(record.status.is_final(), record.end_at.is_some());
        // M7: a launched task follows successes only.
        if record.attempt > 0 {
            for before in &fixture.plan.tasks[task].after {
                assert_eq!(
                    fixture.records[*before as usize].status,
                    Status::Succeeded,
                    "task {task} began too early"
                );
            }
        }
        assert_eq!(
            record.recovery_count,
            recoveries_by_log(fixture, task as u32),
            "{}",
            fixture.path(task as u32)
        );
    }
    let in_use = fixture.in_use();
    assert!(in_use.launching <= fixture.limits.max_launching && in_use.alive <= fixture.limits.max_alive);
}

/// Returns the number of episodes that ended in RUNNING and included a failure.
fn recoveries_by_log(fixture: &ManagedJobFixture, task: u32) -> u32 {
    let (mut count, mut credit) = (0, false);
    for (_, moved, _) in fixture.log.iter().filter(|(of, ..)| *of == task) {
        credit |= moved.source == Some(RecoverySource::Failure);
        if moved.to == Status::Running && moved.from != Status::Running {
            count += u32::from(credit);
            credit = false;
        }
    }
    count
}

/// Edges of the two diagrams: the status for users and the schedule state.
const DIAGRAM: [(&str, &str); 26] = [
    ("PENDING", "STARTING"),
    ("STARTING", "PENDING"),
    ("STARTING", "RUNNING"),
    ("PENDING", "RUNNING"),
    ("RUNNING", "RECOVERING"),
    ("RECOVERING", "PENDING"),
    ("PENDING", "RECOVERING"),
    ("RECOVERING", "RUNNING"),
    ("STARTING", "FAILED_NO_RESOURCE"),
    ("RECOVERING", "FAILED_NO_RESOURCE"),
    ("STARTING", "FAILED_PRECHECKS"),
    ("RECOVERING", "FAILED_PRECHECKS"),
    ("RUNNING", "SUCCEEDED"),
    ("RUNNING", "FAILED"),
    ("RUNNING", "FAILED_SETUP"),
    ("PENDING", "CANCELLING"),
    ("STARTING", "CANCELLING"),
    ("RUNNING", "CANCELLING"),
    ("RECOVERING", "CANCELLING"),
    ("STARTING", "RECOVERING"),
    ("CANCELLING", "CANCELLED"),
    ("CANCELLING", "SUCCEEDED"),
    ("CANCELLING", "FAILED"),
    ("CANCELLING", "FAILED_SETUP"),
    ("CANCELLING", "FAILED_PRECHECKS"),
    ("CANCELLING", "FAILED_NO_RESOURCE"),
];

/// Uses fixed random disturbances, without a framework: enough of them reach every edge.
#[test]
fn decisions_reach_every_edge_of_the_state_diagrams() {
    use windlass_model::{
        decide::managed_jobs::classify_end::NodeEnd, job::TerminationDetail, managed_job::ScheduleState,
        skypilot::Phase,
    };
    let shapes = [
        "run: a\nresources: {job_recovery: {max_launch_tries: 2, max_restarts_on_errors: 1}}\n",
        "name: p\n---\nsetup: x\n---\nrun: b\nresources: {job_recovery: {max_launch_tries: 1}}\n",
    ];
    let never = NodeEnd {
        detail: Some(TerminationDetail::NoFleets),
        ..ended(Reason::FailedToStartDueToNoCapacity, None)
    };
    let setup = NodeEnd { phase: Some(Phase::Setup), ..ended(Reason::ContainerExitedWithError, Some(1)) };
    let ends =
        [success(), failure(1), loss(), no_capacity(), ended_observation(never), ended_observation(setup)];
    let mut walked = std::collections::BTreeSet::new();
    let mut lanes = std::collections::BTreeSet::new();
    let mut jitter: u64 = 17;
    let mut roll = |sides: u64| {
        jitter = jitter.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (jitter >> 33) % sides
    };
    for round in 0..2_000 {
        let mut fixture = ManagedJobFixture::new(shapes[round % shapes.len()]);
        for _ in 0..30 {
            let task = roll(fixture.records.len() as u64) as u32;
            let key = (task, fixture.records[task as usize].attempt);
            let live = fixture.runs.get(&key).is_some_and(|seen| {
                !matches!(seen, AttemptObservation::Over { .. } | AttemptObservation::Nothing)
            });
            match roll(12) {
                0..=3 => {
                    let before: Vec<ScheduleState> =
                        fixture.records.iter().map(|record| record.schedule).collect();
                    let decision = fixture.decide();
                    fixture.carry_out(&decision, true);
                    let between: Vec<ScheduleState> =
                        fixture.records.iter().map(|record| record.schedule).collect();
                    fixture.claim(&decision);
                    let after = fixture.records.iter().map(|record| record.schedule);
                    for ((before, between), after) in before.into_iter().zip(between).zip(after) {
                        lanes.insert((before, between));
                        lanes.insert((between, after));
                    }
                }
                4..=6 if live => {
                    fixture.runs.insert(key, ends[roll(ends.len() as u64) as usize].clone());
                }
                7 | 8 if live => {
                    fixture.runs.insert(key, AttemptObservation::Running { placement: place("east") });
                }
                9 if roll(3) == 0 => apply_disturbance(&mut fixture, &Disturbance::Cancel),
                10 if roll(3) == 0 => apply_disturbance(&mut fixture, &Disturbance::InternalError(task)),
                _ => apply_disturbance(&mut fixture, &Disturbance::Wait(50)),
            }
        }
        check_log(&fixture);
        walked.extend(fixture.log.iter().map(|(_, moved, _)| (moved.from.as_str(), moved.to.as_str())));
    }
    let missing: Vec<_> = DIAGRAM.iter().filter(|edge| !walked.contains(*edge)).collect();
    assert!(missing.is_empty(), "never walked: {missing:?}");
    use ScheduleState::*;
    // An ALIVE that lasts no longer than a pass is passed within it.
    let schedule = [
        (Waiting, Launching),
        (Launching, Alive),
        (Launching, AliveBackoff),
        (AliveBackoff, AliveWaiting),
        (Alive, AliveWaiting),
        (AliveWaiting, Launching),
        (Alive, Done),
        (AliveBackoff, Done),
        (AliveWaiting, Done),
        (Launching, Done),
        (Waiting, Done),
    ];
    let missing: Vec<_> = schedule.iter().filter(|edge| !lanes.contains(*edge)).collect();
    assert!(missing.is_empty(), "never walked: {missing:?}");
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() })]

    /// No task is started twice or lost, no limit is exceeded, and without disturbances everything ends.
    #[test]
    fn m5_m6_m7_r17_managed_job_invariants_hold_under_disturbances(
        shape in 0_usize..SHAPES.len(),
        fault in prop::collection::vec(disturbance(), 0..120),
        launching in 1_u32..4,
    ) {
        let mut fixture = ManagedJobFixture::new(SHAPES[shape]);
        fixture.limits.max_launching = launching;
        for disturbances in &fault {
            apply_disturbance(&mut fixture, disturbances);
            check(&fixture);
        }
        // No disturbances: runs succeed, spot is available, time passes.
        for _ in 0..400 {
            fixture.wait(40);
            fixture.spot_capacity = true;
            fixture.pass();
            for task in 0..fixture.records.len() as u32 {
                advance_run(&mut fixture, task, 3);
            }
            if fixture.records.iter().all(|record| record.schedule == windlass_model::managed_job::ScheduleState::Done) {
                break;
            }
        }
        check(&fixture);
        let decision = fixture.decide();
        prop_assert!(fixture.records.iter().all(|record| record.status.is_final()), "{:?}", fixture.statuses());
        prop_assert_eq!(decision.due_at, None);
        let live = fixture.runs.values().filter(|seen| !matches!(seen, AttemptObservation::Over { .. } | AttemptObservation::Nothing)).count();
        prop_assert_eq!(live, 0, "nothing is left running");
        if fixture.cancel.is_none() && !fixture.statuses().contains(&"FAILED") && !fixture.statuses().contains(&"FAILED_CONTROLLER") {
            prop_assert_eq!(decision.status, Status::Succeeded);
        }
    }

    /// The record alone: for any events, the accumulated time equals the time between the events.
    #[test]
    fn job_duration_is_the_total_time_in_running(
        events in prop::collection::vec((prop::sample::select(Event::ALL), 0_i64..100), 0..60),
    ) {
        let mut record = TaskRecord::default();
        let (mut now, mut total, mut since) = (at(0), 0, None);
        for (event, secs) in events {
            now = now + Span::secs(secs);
            let before = record.status;
            let ended = record.end_at;
            if record.apply(event, RecoverySource::Failure, now).is_err() {
                prop_assert_eq!(record.status, before, "a refused event writes nothing");
                continue;
            }
            if before != Status::Running && record.status == Status::Running {
                since = Some(now);
            } else if before == Status::Running && record.status != Status::Running {
                total += since.take().map_or(0, |since| now.since(since).0);
            }
            prop_assert!(ended.is_none() || record.end_at == ended, "the first end stays");
            prop_assert_eq!(record.pending.is_some(), record.status == Status::Pending);
            let open = since.map_or(0, |since| now.since(since).0);
            prop_assert_eq!(record.job_duration(now), Span(total + open));
        }
    }
}
