//! Cancellation of managed jobs: from every state, and while they end by themselves.

use windlass_model::{
    decide::managed_jobs::{AttemptAction, AttemptObservation, CancelRequest, classify_end::NodeEnd},
    job::{TerminationDetail, TerminationReason as Reason},
    managed_job::ScheduleState,
    time::Span,
};

use crate::{
    managed_jobs::{ONE, started},
    managed_jobs_fixture::{
        ManagedJobFixture, check_log, ended, ended_observation, failure, loss, no_capacity, success,
    },
};

#[test]
fn m2_a_cancel_works_from_every_state() {
    type Prepare = fn(&mut ManagedJobFixture);
    let cancelled: [(&str, Prepare); 5] = [
        ("PENDING CANCELLED", |_| {}),
        ("PENDING STARTING CANCELLING CANCELLED", |fixture| {
            fixture.run_until_stable();
        }),
        ("PENDING STARTING RUNNING CANCELLING CANCELLED", |fixture| {
            fixture.run_until_stable().running(0, "east");
        }),
        ("PENDING STARTING PENDING CANCELLING CANCELLED", |fixture| {
            fixture.run_until_stable().observe(0, no_capacity());
        }),
        ("PENDING STARTING RUNNING RECOVERING CANCELLING CANCELLED", |fixture| {
            fixture.run_until_stable().running(0, "east").observe(0, loss());
        }),
    ];
    for (path, prepare) in cancelled {
        let mut fixture = ManagedJobFixture::new(ONE);
        prepare(&mut fixture);
        fixture.wait(5).cancel();
        assert_eq!(fixture.path(0), path);
        assert_eq!(
            (fixture.records[0].schedule, fixture.records[0].end_at),
            (ScheduleState::Done, Some(fixture.now))
        );
        assert_eq!(fixture.records[0].job_duration(fixture.now), fixture.running_by_log(0));
        assert!(
            fixture
                .runs
                .values()
                .all(|seen| matches!(seen, AttemptObservation::Over { .. } | AttemptObservation::Nothing)),
            "{:?}",
            fixture.runs
        );
        check_log(&fixture);
    }
}

#[test]
fn m2_a_job_that_ends_before_the_cancel_keeps_its_status() {
    for (seen, status) in [(success(), "SUCCEEDED"), (failure(2), "FAILED")] {
        let mut fixture = started(ONE);
        fixture.running(0, "east");
        fixture.cancel = Some(CancelRequest { grace: Some(Span::secs(30)) });
        fixture.observe(0, seen);
        assert_eq!(fixture.path(0), format!("PENDING STARTING RUNNING CANCELLING {status}"));
    }
    let mut fixture = started(ONE);
    fixture.running(0, "east").observe(0, success()).cancel();
    assert_eq!(fixture.statuses(), ["SUCCEEDED"]);
}

#[test]
fn m2_a_restartable_failure_during_a_cancel_ends_as_cancelled() {
    let restarts = "run: a\nresources: {job_recovery: {max_restarts_on_errors: 1}}\n";
    let listed = "run: a\nresources: {job_recovery: {recover_on_exit_codes: [7]}}\n";
    for (text, code, status) in [
        (restarts, 2, "CANCELLED"),
        (listed, 7, "CANCELLED"),
        // No restart follows these.
        (listed, 2, "FAILED"),
        (ONE, 7, "FAILED"),
    ] {
        let mut fixture = started(text);
        fixture.running(0, "east");
        fixture.cancel = Some(CancelRequest { grace: None });
        fixture.observe(0, failure(code));
        assert_eq!(fixture.path(0), format!("PENDING STARTING RUNNING CANCELLING {status}"), "{text}");
        // A restart that does not happen is not counted.
        assert_eq!(fixture.records[0].restarts_on_errors, 0);
        check_log(&fixture);
    }
    // The last restart is used: the failure is the end of the task.
    let mut fixture = started(restarts);
    fixture.running(0, "east").observe(0, failure(2)).running(0, "east");
    fixture.cancel = Some(CancelRequest { grace: None });
    fixture.observe(0, failure(2));
    assert_eq!(fixture.statuses(), ["FAILED"]);
    assert_eq!(fixture.records[0].restarts_on_errors, 1);
}

#[test]
fn m2_never_fits_during_a_cancel_ends_as_cancelled_while_a_location_is_avoided() {
    let never = || {
        ended_observation(NodeEnd {
            detail: Some(TerminationDetail::NoFleets),
            ..ended(Reason::FailedToStartDueToNoCapacity, None)
        })
    };
    // It avoids the lost location, and may fit there.
    let mut fixture = started(ONE);
    fixture.running(0, "east").observe(0, loss());
    fixture.cancel = Some(CancelRequest { grace: None });
    fixture.observe(0, never());
    assert_eq!(fixture.path(0), "PENDING STARTING RUNNING RECOVERING CANCELLING CANCELLED");
    // It has no location constraints.
    let mut fixture = started(ONE);
    fixture.cancel = Some(CancelRequest { grace: None });
    fixture.observe(0, never());
    assert_eq!(fixture.path(0), "PENDING STARTING CANCELLING FAILED_PRECHECKS");
}

#[test]
fn a_graceful_cancel_tells_the_run_how_long_it_has() {
    let mut fixture = started(ONE);
    fixture.running(0, "east");
    fixture.cancel = Some(CancelRequest { grace: Some(Span::secs(45)) });
    let decision = fixture.decide();
    let Some(AttemptAction::Stop(stop)) = decision.tasks[0].action.clone() else { panic!("no stop") };
    assert_eq!(stop.grace, Some(Span::secs(45)));
}

#[test]
fn a_cancelled_task_reports_that_its_program_was_killed_after_the_grace_period() {
    let killed = || ended_observation(ended(Reason::TerminatedByUser, Some(137)));
    for (grace, end, expected) in [
        (
            Some(Span::secs(3)),
            killed(),
            "a user cancelled the job; its program was still running after 3 s and was killed",
        ),
        (
            Some(Span::secs(3)),
            ended_observation(ended(Reason::TerminatedByUser, Some(0))),
            "a user cancelled the job",
        ),
        // Without a grace period it is killed at once, as requested.
        (None, killed(), "a user cancelled the job"),
    ] {
        let mut fixture = started(ONE);
        fixture.running(0, "east");
        fixture.cancel = Some(CancelRequest { grace });
        fixture.observe(0, end);
        assert_eq!(fixture.statuses(), ["CANCELLED"]);
        assert_eq!(fixture.records[0].failure_reason.as_deref(), Some(expected));
    }
}

#[test]
fn a_run_stopped_by_a_user_cancels_its_task() {
    let mut fixture = started(ONE);
    fixture.running(0, "east").observe(0, ended_observation(ended(Reason::TerminatedByUser, None)));
    assert_eq!(fixture.path(0), "PENDING STARTING RUNNING CANCELLING CANCELLED");
}
