//! Managed jobs, scenario by scenario.

use std::collections::BTreeMap;

use windlass_model::{
    deadline_policy::Market,
    decide::managed_jobs::{
        AttemptAction, AttemptObservation,
        classify_end::{AttemptOutcome, NodeEnd, classify_end, is_lost},
        internal_error,
        slots::{SlotLimits, SlotRequest, SlotUsage, backoff, grant_slots, job_schedule},
    },
    id::ProjectId,
    job::{TerminationDetail, TerminationReason as Reason},
    managed_job::{Event, RecoverySource, ScheduleState, Status, record::NodeLocation},
    skypilot::Phase,
    time::Span,
};

use crate::managed_jobs_fixture::{
    ManagedJobFixture, check_log, ended, ended_observation, failure, loss, no_capacity, place, success,
};

pub(crate) const ONE: &str = "name: one\nrun: work\n";

pub(crate) fn started(text: &str) -> ManagedJobFixture {
    let mut fixture = ManagedJobFixture::new(text);
    fixture.run_until_stable();
    fixture
}

// A single task.

#[test]
fn a_task_goes_from_pending_to_succeeded() {
    let mut fixture = started(ONE);
    assert_eq!(fixture.statuses(), ["STARTING"]);
    assert_eq!(fixture.records[0].submitted_at, Some(fixture.now));
    fixture.wait(20).running(0, "east");
    let began = fixture.now;
    fixture.wait(100).observe(0, success());
    let record = &fixture.records[0];
    assert_eq!(fixture.path(0), "PENDING STARTING RUNNING SUCCEEDED");
    assert_eq!((record.start_at, record.end_at), (Some(began), Some(fixture.now)));
    assert_eq!(record.total_duration(fixture.now), Some(Span::secs(120)));
    assert_eq!(record.job_duration(fixture.now), Span::secs(100), "provisioning is not part of it");
    assert_eq!((record.schedule, fixture.decide().due_at), (ScheduleState::Done, None));
    assert_eq!(
        fixture.schedules,
        [ScheduleState::Waiting, ScheduleState::Launching, ScheduleState::Alive, ScheduleState::Done]
    );
}

#[test]
fn an_empty_task_succeeds_without_nodes_even_if_it_has_a_setup() {
    let mut fixture = started("setup: exit 1\n");
    assert_eq!(fixture.path(0), "PENDING RUNNING SUCCEEDED");
    assert!(fixture.acts.is_empty() && fixture.run_until_stable().records[0].end_at.is_some());
}

#[test]
fn a_failed_setup_is_distinguished_from_a_failed_program() {
    let mut fixture = started(ONE);
    let end = NodeEnd { phase: Some(Phase::Setup), ..ended(Reason::ContainerExitedWithError, Some(3)) };
    fixture.running(0, "east").observe(0, ended_observation(end));
    assert_eq!(fixture.statuses(), ["FAILED_SETUP"]);
    assert!(
        fixture.records[0].failure_reason.as_ref().unwrap().contains("the commands exited with status 3")
    );
    let mut fixture = started(ONE);
    fixture.running(0, "east").observe(0, failure(3));
    assert_eq!(fixture.statuses(), ["FAILED"]);
}

// Capacity.

#[test]
fn a_refused_launch_releases_its_slot_and_is_retried_after_the_backoff() {
    let mut fixture = started(ONE);
    fixture.observe(0, no_capacity());
    assert_eq!((fixture.records[0].schedule, fixture.in_use().launching), (ScheduleState::AliveBackoff, 0));
    assert_eq!(fixture.records[0].next_retry_at, Some(fixture.now + Span::secs(60)));
    assert_eq!(fixture.in_use().alive, 1);
    fixture.wait(59).run_until_stable();
    assert_eq!(fixture.statuses(), ["PENDING"]);
    fixture.wait(1).run_until_stable();
    assert_eq!((fixture.statuses(), fixture.last_submit().attempt), (vec!["STARTING"], 2));
    assert_eq!(fixture.path(0), "PENDING STARTING PENDING STARTING");
    assert!(
        fixture.schedules.ends_with(&[
            ScheduleState::AliveBackoff,
            ScheduleState::AliveWaiting,
            ScheduleState::Launching
        ]),
        "{:?}",
        fixture.schedules
    );
}

#[test]
fn a_launch_that_stays_queued_is_stopped_if_others_wait_for_its_slot() {
    let mut fixture = started(ONE);
    fixture.wait(3_600).run_until_stable();
    assert_eq!(fixture.statuses(), ["STARTING"], "nothing is gained by another attempt");
    fixture.contended_slots = true;
    fixture.run_until_stable();
    assert_eq!(
        (fixture.statuses(), fixture.records[0].schedule),
        (vec!["PENDING"], ScheduleState::AliveBackoff)
    );
    assert!(matches!(fixture.acts.last(), Some((0, AttemptAction::Stop(stop))) if stop.attempt == 1));
}

#[test]
fn a_launch_that_stays_queued_is_stopped_if_another_may_fit_or_its_launches_are_limited() {
    for text in [
        "run: a\nresources:\n  ordered: [{cpus: 1}, {cpus: 2}]\n",
        "run: a\nresources: {job_recovery: {max_launch_tries: 2}}\n",
        "run: a\nresources: {job_recovery: {max_launch_wait: 1h}}\n",
    ] {
        let mut fixture = started(text);
        fixture.wait(59).run_until_stable();
        assert_eq!(fixture.acts.len(), 1, "{text}");
        fixture.wait(1).run_until_stable();
        let stopped =
            |(_, act): &(u32, AttemptAction)| matches!(act, AttemptAction::Stop(stop) if stop.attempt == 1);
        assert!(fixture.acts.iter().any(stopped), "{text}: {:?}", fixture.acts);
    }
}

#[test]
fn a_launch_for_which_others_are_preempted_is_not_stopped() {
    let mut fixture = started("run: a\nresources:\n  ordered: [{cpus: 1}, {cpus: 2}]\n");
    fixture.contended_slots = true;
    fixture.observe(0, AttemptObservation::Provisioning);
    fixture.wait(3_600).run_until_stable();
    assert_eq!((fixture.statuses(), fixture.acts.len()), (vec!["STARTING"], 1));
}

#[test]
fn every_candidate_is_tried_before_the_wait() {
    let mut fixture = started("run: a\nresources:\n  ordered: [{cpus: 1}, {cpus: 2}, {cpus: 4}]\n");
    for candidate in 0..3 {
        assert_eq!((fixture.last_submit().candidate, fixture.statuses()), (candidate, vec!["STARTING"]));
        fixture.observe(0, no_capacity());
    }
    assert_eq!(fixture.statuses(), ["PENDING"]);
    fixture.wait(60).run_until_stable();
    assert_eq!(fixture.last_submit().candidate, 0);
}

#[test]
fn launch_limits_fail_the_task_from_starting_and_from_recovering() {
    let tries = "run: a\nresources: {job_recovery: {max_launch_tries: 2}}\n";
    let mut fixture = started(tries);
    fixture.observe(0, no_capacity()).wait(60).run_until_stable();
    fixture.observe(0, no_capacity());
    assert_eq!(fixture.path(0), "PENDING STARTING PENDING STARTING FAILED_NO_RESOURCE");
    let time = "run: a\nresources: {job_recovery: {max_launch_wait: 90s, strategy: FAILOVER}}\n";
    let mut fixture = started(time);
    fixture.running(0, "east").observe(0, loss());
    for _ in 0..3 {
        fixture.observe(0, no_capacity());
    }
    fixture.observe(0, no_capacity());
    fixture.wait(200).run_until_stable();
    assert_eq!(fixture.path(0), "PENDING STARTING RUNNING RECOVERING PENDING RECOVERING FAILED_NO_RESOURCE");
    assert_eq!(fixture.records[0].recovery_count, 0, "an aborted episode does not count");
    assert_eq!(fixture.records[0].schedule, ScheduleState::Done);
}

#[test]
fn a_task_that_can_never_fit_fails_prechecks_also_during_recovery() {
    let never = NodeEnd {
        detail: Some(TerminationDetail::NoFleets),
        ..ended(Reason::FailedToStartDueToNoCapacity, None)
    };
    let mut fixture = started(ONE);
    fixture.observe(0, ended_observation(never.clone()));
    assert_eq!(fixture.statuses(), ["FAILED_PRECHECKS"]);
    let mut fixture = started(ONE);
    // The first time, the avoided location may be the reason.
    fixture.running(0, "east").observe(0, loss()).observe(0, ended_observation(never.clone()));
    assert_eq!((fixture.statuses(), fixture.last_submit().avoid.len()), (vec!["RECOVERING"], 0));
    fixture.observe(0, ended_observation(never));
    assert_eq!(fixture.path(0), "PENDING STARTING RUNNING RECOVERING FAILED_PRECHECKS");
}

#[test]
fn three_container_creation_errors_end_a_task_as_failed_prechecks() {
    let mut fixture = started(ONE);
    for _ in 0..3 {
        fixture
            .observe(0, ended_observation(ended(Reason::CreatingContainerError, None)))
            .wait(400)
            .run_until_stable();
    }
    assert_eq!(fixture.statuses(), ["FAILED_PRECHECKS"]);
}

#[test]
fn a_program_that_does_not_exist_fails_the_setup_at_once() {
    let end = NodeEnd {
        detail: Some(TerminationDetail::SetupFailed),
        phase: Some(Phase::Setup),
        ..ended(Reason::ExecutorError, None)
    };
    let mut fixture = started(ONE);
    fixture.running(0, "east").observe(0, ended_observation(end.clone()));
    assert_eq!((fixture.statuses(), fixture.last_submit().attempt), (vec!["FAILED_SETUP"], 1));
    let mut fixture = started(ONE);
    fixture.observe(0, ended_observation(end));
    assert_eq!((fixture.statuses(), fixture.last_submit().attempt), (vec!["FAILED_SETUP"], 1));
}

#[test]
fn a_third_failed_start_in_a_row_ends_the_task_and_a_loss_of_nodes_resets_the_count() {
    let not_started = || ended_observation(ended(Reason::ExecutorError, None));
    let mut fixture = started(ONE);
    fixture.running(0, "east").observe(0, not_started()).running(0, "west").observe(0, not_started());
    assert_eq!(fixture.statuses(), ["RECOVERING"]);
    fixture.running(0, "east").observe(0, loss()).running(0, "west").observe(0, not_started());
    fixture.running(0, "east").observe(0, not_started());
    assert_eq!(fixture.statuses(), ["RECOVERING"]);
    fixture.running(0, "west").observe(0, not_started());
    assert_eq!(fixture.statuses(), ["FAILED"]);
    assert!(
        fixture.records[0].failure_reason.as_ref().unwrap().starts_with("failed to start 3 times in a row")
    );
    // A program that ran for some time had started.
    let mut fixture = started(ONE);
    for _ in 0..4 {
        fixture.running(0, "east").wait(60).observe(0, not_started());
    }
    assert_eq!(fixture.statuses(), ["RECOVERING"]);
}

#[test]
fn m5_waits_grow_to_five_minutes_with_jitter() {
    let secs: Vec<i64> = (1..7).map(|tries| backoff(tries, 0.5).as_secs()).collect();
    assert_eq!(secs, [60, 96, 153, 245, 300, 300]);
    assert_eq!((backoff(1, 0.0).as_secs(), backoff(1, 1.0).as_secs()), (36, 84));
    assert!(backoff(u32::MAX, 1.0) <= Span::secs(420));
}

// Recovery.

#[test]
fn r17_eager_next_region_avoids_the_lost_location_until_nothing_else_fits() {
    let mut fixture = started(ONE);
    fixture.wait(10).running(0, "east").wait(50).observe(0, loss());
    assert_eq!(fixture.statuses(), ["RECOVERING"]);
    assert_eq!(fixture.last_submit().avoid, [place("east").unwrap()]);
    assert!(fixture.log.iter().any(|(_, moved, _)| moved.message.contains("avoiding east")));
    fixture.observe(0, no_capacity());
    assert_eq!(
        (fixture.statuses(), fixture.last_submit().avoid.len()),
        (vec!["RECOVERING"], 0),
        "the block is lifted"
    );
    fixture.wait(30).running(0, "east");
    assert_eq!((fixture.records[0].recovery_count, fixture.records[0].attempt), (1, 3));
    fixture.wait(50).observe(0, success());
    assert_eq!(fixture.records[0].job_duration(fixture.now), Span::secs(100));
    assert_eq!(fixture.running_by_log(0), Span::secs(100));
}

/// Returns an end of two nodes, of which the second is lost.
fn half_lost(first: &str, second: &str) -> (AttemptObservation, NodeLocation, NodeLocation) {
    let on =
        |place: &str, machine: &str| NodeLocation { place: place.into(), instance: Some(machine.into()) };
    let (left, gone) = (on(first, "one"), on(second, "two"));
    let ends = vec![
        NodeEnd { location: Some(left.clone()), ..ended(Reason::TerminatedByServer, None) },
        NodeEnd { location: Some(gone.clone()), ..ended(Reason::InterruptedByNoCapacity, None) },
    ];
    (AttemptObservation::Over { ends, placement: Some(left.clone()) }, left, gone)
}

#[test]
fn recovery_first_prefers_the_location_of_the_remaining_nodes() {
    let mut fixture = started("run: a\nnum_nodes: 2\n");
    let (seen, left, gone) = half_lost("east", "east");
    fixture.running(0, "east").observe(0, seen);
    let requested = fixture.last_submit();
    assert_eq!((requested.prefer, requested.avoid), (Some(left), vec![gone.clone()]));
    let reported = |text: &str| fixture.log.iter().any(|(_, moved, _)| moved.message.contains(text));
    assert!(reported("requesting a replacement in east, next to the remaining nodes"), "{:?}", fixture.log);
    fixture.observe(0, no_capacity());
    let requested = fixture.last_submit();
    assert_eq!((requested.prefer, requested.avoid), (None, vec![gone]), "nothing is free beside it");
}

#[test]
fn recovery_avoids_only_the_lost_location_when_nodes_span_several() {
    let (seen, _, gone) = half_lost("host-1", "host-2");
    let mut fixture = started("run: a\nnum_nodes: 2\n");
    fixture.running(0, "host-1").observe(0, seen);
    let requested = fixture.last_submit();
    assert_eq!((requested.prefer, requested.avoid), (None, vec![gone]));
    let (seen, left, _) = half_lost("east/a", "east/b");
    let mut fixture = started("run: a\nnum_nodes: 2\nresources: {job_recovery: FAILOVER}\n");
    fixture.running(0, "east/a").observe(0, seen);
    assert_eq!((fixture.last_submit().prefer, fixture.last_submit().avoid.len()), (Some(left), 0));
}

#[test]
fn failover_prefers_the_same_location_three_times() {
    let mut fixture = started("run: a\nresources: {job_recovery: FAILOVER}\n");
    fixture.running(0, "east").observe(0, loss());
    for _ in 0..3 {
        assert_eq!((fixture.last_submit().prefer, fixture.last_submit().avoid.len()), (place("east"), 0));
        fixture.observe(0, no_capacity());
    }
    assert_eq!((fixture.last_submit().prefer, fixture.statuses()), (None, vec!["RECOVERING"]));
    fixture.observe(0, no_capacity());
    assert_eq!(fixture.statuses(), ["PENDING"]);
}

#[test]
fn the_strategy_none_never_launches_again() {
    let text = "run: a\nresources: {job_recovery: NONE}\n";
    let mut fixture = started(text);
    fixture.running(0, "east").observe(0, loss());
    assert_eq!(fixture.statuses(), ["FAILED"]);
    assert!(fixture.records[0].failure_reason.as_ref().unwrap().starts_with("nodes lost"));
    let mut fixture = started(text);
    fixture.running(0, "east");
    fixture.internal_error(0);
    fixture.wait(100).observe(0, loss());
    assert_eq!((fixture.statuses(), fixture.records[0].attempt), (vec!["FAILED"], 1));
}

#[test]
fn restarts_after_errors_are_counted_and_reuse_the_nodes() {
    let mut fixture = started("run: a\nresources: {job_recovery: {max_restarts_on_errors: 1}}\n");
    fixture.running(0, "east").observe(0, failure(1));
    assert_eq!((fixture.statuses(), fixture.last_submit().prefer), (vec!["RECOVERING"], place("east")));
    fixture.running(0, "east").observe(0, failure(1));
    assert_eq!(fixture.statuses(), ["FAILED"]);
    let record = &fixture.records[0];
    assert_eq!((record.restarts_on_errors, record.recovery_count, record.attempt), (1, 1, 2));
}

#[test]
fn listed_exit_codes_are_always_restarted_without_being_counted() {
    let mut fixture = started("run: a\nresources: {job_recovery: {recover_on_exit_codes: [33]}}\n");
    for _ in 0..5 {
        fixture.running(0, "east").wait(60).observe(0, failure(33));
    }
    assert_eq!((fixture.statuses(), fixture.records[0].restarts_on_errors), (vec!["RECOVERING"], 0));
    fixture.running(0, "east").observe(0, failure(34));
    assert_eq!((fixture.statuses(), fixture.records[0].recovery_count), (vec!["FAILED"], 5));
}

#[test]
fn restarts_of_a_program_that_fails_right_after_its_start_are_delayed_more_and_more() {
    let mut fixture = started("run: a\nresources: {job_recovery: {recover_on_exit_codes: [33]}}\n");
    for _ in 0..3 {
        fixture.running(0, "east").observe(0, failure(33));
        assert_eq!(fixture.records[0].next_retry_at, None);
    }
    let mut delays = Vec::new();
    for _ in 0..2 {
        fixture.running(0, "east").observe(0, failure(33));
        let (now, attempt) = (fixture.now, fixture.last_submit().attempt);
        let at = fixture.records[0].next_retry_at.unwrap();
        assert_eq!(fixture.statuses(), ["RECOVERING"]);
        fixture.run_until_stable();
        assert_eq!(fixture.last_submit().attempt, attempt, "not before its time");
        delays.push(at.since(now));
        fixture.wait(at.since(now).as_secs() + 1).run_until_stable();
        assert_eq!(fixture.last_submit().attempt, attempt + 1);
    }
    assert!(delays[0].as_secs() > 5 && delays[1] > delays[0], "{delays:?}");
    // A program that ran for a minute is started again at once.
    fixture.running(0, "east").wait(60).observe(0, failure(33));
    assert_eq!((fixture.records[0].next_retry_at, fixture.records[0].early_failures), (None, 0));
}

#[test]
fn r17_a_back_off_in_a_recovery_keeps_the_episode_open() {
    let mut fixture = started(ONE);
    fixture.running(0, "east").observe(0, loss()).observe(0, no_capacity()).observe(0, no_capacity());
    let record = &fixture.records[0];
    assert_eq!((record.status, record.pending.unwrap().as_str()), (Status::Pending, "recovery_backoff"));
    let (submitted, start) = (record.submitted_at, record.start_at);
    fixture.wait(100).run_until_stable();
    assert_eq!(fixture.statuses(), ["RECOVERING"], "not STARTING");
    fixture.running(0, "west");
    let record = &fixture.records[0];
    assert_eq!((record.submitted_at, record.start_at, record.recovery_count), (submitted, start, 1));
    check_log(&fixture);
}

#[test]
fn a_loss_while_still_starting_does_not_count() {
    let mut fixture = started(ONE);
    fixture.observe(0, loss());
    assert_eq!((fixture.statuses(), fixture.last_submit().attempt), (vec!["STARTING"], 2));
    fixture.running(0, "east");
    assert_eq!(fixture.records[0].recovery_count, 0);
}

#[test]
fn m3_every_recovery_names_its_source() {
    let mut fixture = started(ONE);
    fixture.running(0, "east").observe(0, loss()).running(0, "west");
    fixture.internal_error(0);
    fixture.wait(100).run_until_stable();
    fixture.observe(0, AttemptObservation::Nothing);
    for (_, moved, _) in
        fixture.log.iter().filter(|(_, moved, _)| matches!(moved.event, Event::Lost | Event::Interrupted))
    {
        assert!(moved.source.is_some(), "{moved:?}");
    }
    let sources: Vec<_> = fixture.log.iter().filter_map(|(_, moved, _)| moved.source).collect();
    assert_eq!(sources, [RecoverySource::Failure, RecoverySource::Emergency, RecoverySource::Restart]);
}

// Preemption or failure.

#[test]
fn a_preemption_is_distinguished_from_a_failure() {
    let exited = |code| ended(Reason::ContainerExitedWithError, Some(code));
    let is = |verdict: AttemptOutcome| match verdict {
        AttemptOutcome::Success => "success",
        AttemptOutcome::UserFailure { .. } => "failure",
        AttemptOutcome::NodesLost { .. } => "loss",
        AttemptOutcome::NoCapacity { .. } => "no capacity",
        AttemptOutcome::NotStarted { .. } => "not started",
        AttemptOutcome::NeverFits { .. } => "never",
        AttemptOutcome::Stopped { .. } => "stopped",
    };
    let preempted = NodeEnd { is_preempted: true, ..exited(1) };
    let oom = NodeEnd { detail: Some(TerminationDetail::OomKilled), ..exited(137) };
    let rebooted = NodeEnd { detail: Some(TerminationDetail::HostReboot), ..exited(1) };
    let done = ended(Reason::DoneByRunner, Some(0));
    let cases: [(&[NodeEnd], &str); 12] = [
        (&[done.clone(), done.clone()], "success"),
        (&[exited(1)], "failure"),
        (&[preempted], "loss"),
        (&[oom], "failure"),
        (&[rebooted], "loss"),
        (&[ended(Reason::InstanceUnreachable, None)], "loss"),
        (&[exited(2), ended(Reason::InterruptedByNoCapacity, None)], "loss"),
        (&[exited(137), exited(2), done.clone()], "failure"),
        (&[exited(137), exited(137)], "failure"),
        (&[ended(Reason::TerminatedByUser, None)], "stopped"),
        (&[ended(Reason::MaxDurationExceeded, None)], "failure"),
        (&[], "loss"),
    ];
    for (ends, verdict) in cases {
        assert_eq!(is(classify_end(ends)), verdict, "{ends:?}");
    }
    let AttemptOutcome::UserFailure { codes, .. } = classify_end(&[exited(137), exited(2), exited(3)]) else {
        panic!("no failure")
    };
    assert_eq!(codes, [2, 3], "siblings that were killed do not count");
}

#[test]
fn m4_one_bad_probe_never_restarts_a_healthy_job() {
    assert!(!is_lost(Span::secs(600), 1));
    assert!(!is_lost(Span::secs(59), 100));
    assert!(is_lost(Span::secs(60), 5));
    let mut fixture = started(ONE);
    fixture.running(0, "east").observe(0, AttemptObservation::Unclear).wait(86_400).run_until_stable();
    assert_eq!((fixture.statuses(), fixture.records[0].attempt), (vec!["RUNNING"], 1));
}

// Other servers, and internal errors.

#[test]
fn m4_a_new_server_takes_over_a_running_task_without_changes() {
    let mut fixture = started(ONE);
    fixture.running(0, "east");
    let before = fixture.records[0].clone();
    // The next server reads the same rows: nothing is decided.
    assert!(fixture.wait(1000).decide().tasks.is_empty());
    assert_eq!(fixture.records[0], before);
}

#[test]
fn m6_a_launch_that_was_not_recorded_is_found_and_not_repeated() {
    let mut fixture = ManagedJobFixture::new(ONE);
    fixture.pass();
    assert_eq!((fixture.statuses(), fixture.records[0].attempt), (vec!["STARTING"], 0));
    fixture.pass();
    assert_eq!((fixture.records[0].attempt, fixture.runs.len()), (1, 0), "numbered before it is made");
    let decision = fixture.decide();
    fixture.carry_out(&decision, false);
    fixture.carry_out(&decision, false);
    assert_eq!(fixture.runs.len(), 1, "one run, however often it is made");
    fixture.run_until_stable();
    assert_eq!(
        (fixture.statuses(), fixture.records[0].attempt, fixture.runs.len()),
        (vec!["STARTING"], 1, 1)
    );
    // A cancellation finds a run that was submitted and not recorded.
    let mut fixture = ManagedJobFixture::new(ONE);
    fixture.flush_twice();
    let decision = fixture.decide();
    fixture.carry_out(&decision, false);
    fixture.cancel();
    assert!(matches!(fixture.runs[&(0, 1)], AttemptObservation::Over { .. }), "{:?}", fixture.runs);
}

#[test]
fn m6_the_old_attempt_is_gone_before_the_next_is_made() {
    let mut fixture = started("run: a\ndeadline: {within: 10h, work: 1h, changeover: 1m}\n");
    // It only has to keep up with its progress line, which has just begun: it starts on demand when behind.
    fixture.wait(100).run_until_stable();
    assert_eq!(fixture.last_submit().market, Some(Market::OnDemand));
    fixture.running(0, "east").wait(2000);
    fixture.spot_capacity = true;
    let decision = fixture.pass();
    assert!(decision.tasks[0].action.is_none(), "first it is written that the end is ours");
    let decision = fixture.pass();
    assert!(matches!(decision.tasks[0].action, Some(AttemptAction::Stop(_))));
    fixture.pass();
    assert_eq!(fixture.runs[&(0, 1)], AttemptObservation::Ending);
    assert_eq!(fixture.last_submit().attempt, 1, "the old one is not gone yet");
    fixture.run_until_stable();
    assert_eq!((fixture.last_submit().attempt, fixture.last_submit().market), (2, Some(Market::Spot)));
    fixture.running(0, "west");
    assert_eq!(fixture.records[0].recovery_count, 0, "a move is not a failure");
}

#[test]
fn m1_ten_internal_errors_are_retried_with_growing_delays_and_the_next_fails() {
    let minutes: Vec<i64> =
        (1..8).map(|count| internal_error::retry_delay(count, 0.5).as_secs() / 60).collect();
    assert_eq!(minutes, [1, 2, 4, 8, 16, 30, 30]);
    assert_eq!(
        (internal_error::retry_delay(6, 0.0).as_secs(), internal_error::retry_delay(6, 1.0).as_secs()),
        (900, 2700)
    );
    let mut fixture = started(ONE);
    fixture.running(0, "east");
    for count in 1..=10 {
        fixture.internal_error(0);
        assert_eq!((fixture.records[0].emergencies, fixture.records[0].status), (count, Status::Recovering));
        fixture.wait(60);
    }
    fixture.internal_error(0);
    assert_eq!(fixture.statuses(), ["FAILED_CONTROLLER"]);
    assert!(fixture.records[0].failure_reason.as_ref().unwrap().contains("(was RECOVERING)"));
    fixture.run_until_stable();
    assert_eq!(fixture.records[0].schedule, ScheduleState::Done);
    assert!(matches!(fixture.acts.last(), Some((0, AttemptAction::Stop(_)))), "with full clean-up");
}

#[test]
fn m1_the_internal_error_count_resets_after_six_hours_and_a_live_attempt_is_kept() {
    let mut fixture = started(ONE);
    fixture.running(0, "east");
    for _ in 0..9 {
        fixture.internal_error(0);
    }
    fixture.wait(6 * 3600).run_until_stable();
    assert_eq!(
        (fixture.statuses(), fixture.records[0].attempt),
        (vec!["RUNNING"], 1),
        "found again, not launched again"
    );
    assert_eq!(fixture.records[0].recovery_count, 0, "r17: an internal error gives no credit");
    fixture.internal_error(0);
    assert_eq!(fixture.records[0].emergencies, 1);
}

#[test]
fn r17_a_loss_counts_as_a_recovery_despite_an_internal_error() {
    let mut fixture = started(ONE);
    fixture.running(0, "east").observe(0, loss());
    fixture.internal_error(0);
    fixture.wait(200).run_until_stable();
    fixture.running(0, "west");
    assert_eq!(fixture.records[0].recovery_count, 1);
    fixture.internal_error(0);
    fixture.wait(200);
    fixture.observe(0, loss()).running(0, "north");
    assert_eq!(fixture.records[0].recovery_count, 2, "the loss was found while nobody looked");
}

#[test]
fn an_impossible_observation_fails_the_controller_and_names_the_previous_status() {
    let mut fixture = started(ONE);
    fixture.running(0, "east").observe(0, success());
    let ended_at = fixture.records[0].end_at;
    fixture.wait(10).observe(0, AttemptObservation::Impossible { what: "half done".to_owned() });
    assert_eq!((fixture.statuses(), fixture.records[0].end_at), (vec!["FAILED_CONTROLLER"], ended_at));
    assert!(fixture.records[0].failure_reason.as_ref().unwrap().contains("(was SUCCEEDED)"));
}

// Several tasks.

#[test]
fn m7_a_pipeline_continues_after_success_and_stops_after_failure() {
    let text = "name: p\n---\nrun: a\n---\nrun: b\n---\nrun: c\n";
    let mut fixture = started(text);
    assert_eq!(fixture.statuses(), ["STARTING", "PENDING", "PENDING"]);
    fixture.running(0, "east");
    assert_eq!(fixture.records[1].attempt, 0);
    fixture.observe(0, success());
    assert_eq!(fixture.statuses(), ["SUCCEEDED", "STARTING", "PENDING"]);
    fixture.running(1, "east").observe(1, failure(1));
    assert_eq!(fixture.statuses(), ["SUCCEEDED", "FAILED", "CANCELLED"]);
    assert_eq!(fixture.path(2), "PENDING CANCELLING CANCELLED");
    assert_eq!((fixture.records[2].attempt, fixture.status()), (0, Status::Failed));
    assert_eq!(
        fixture.schedules,
        [
            ScheduleState::Waiting,
            ScheduleState::Launching,
            ScheduleState::Alive,
            ScheduleState::AliveWaiting,
            ScheduleState::Launching,
            ScheduleState::Alive,
            ScheduleState::Done,
        ]
    );
}

#[test]
fn m7_a_graph_starts_ready_tasks_and_cancels_those_with_failed_dependencies() {
    let text = "name: a\nrun: a\n---\nname: b\ndepends_on: a\nrun: b\n---\nname: c\ndepends_on: a\nrun: c\n---\nname: d\ndepends_on: [b, c]\nrun: d\n";
    let mut fixture = started(text);
    fixture.running(0, "x").observe(0, success());
    assert_eq!(fixture.statuses(), ["SUCCEEDED", "STARTING", "STARTING", "PENDING"]);
    fixture.running(1, "x").running(2, "x").observe(1, failure(1));
    assert_eq!(fixture.statuses(), ["SUCCEEDED", "FAILED", "RUNNING", "CANCELLED"]);
    fixture.observe(2, success());
    assert_eq!((fixture.status(), fixture.decide().schedule), (Status::Failed, ScheduleState::Done));
}

const GROUP: &str = "name: g\nexecution: parallel\nprimary_tasks: [a, b]\ntermination_delay: 30s\n---\nname: a\nrun: a\n---\nname: b\nrun: b\n---\nname: c\nrun: c\n";

#[test]
fn a_group_starts_at_once_and_ends_with_its_primaries() {
    let mut fixture = started(GROUP);
    assert_eq!(fixture.statuses(), ["STARTING"; 3]);
    for task in 0..3 {
        fixture.running(task, "x");
    }
    fixture.observe(0, success());
    assert_eq!(fixture.statuses(), ["SUCCEEDED", "RUNNING", "RUNNING"]);
    fixture.wait(100).observe(1, success());
    assert_eq!(fixture.statuses()[2], "RUNNING", "the auxiliary has 30 seconds");
    assert!(fixture.decide().due_at.unwrap() <= fixture.now + Span::secs(30));
    fixture.wait(30).run_until_stable();
    assert_eq!((fixture.statuses()[2], fixture.status()), ("CANCELLED", Status::Succeeded));
}

#[test]
fn a_failed_primary_stops_no_other_primary_and_denies_auxiliaries_their_delay() {
    let mut fixture = started(GROUP);
    for task in 0..3 {
        fixture.running(task, "x");
    }
    fixture.observe(0, failure(1));
    assert_eq!(fixture.statuses(), ["FAILED", "RUNNING", "RUNNING"]);
    fixture.observe(1, success());
    assert_eq!(
        (fixture.statuses(), fixture.status()),
        (vec!["FAILED", "SUCCEEDED", "CANCELLED"], Status::Failed)
    );
}

#[test]
fn a_failed_first_launch_cancels_the_group() {
    let mut fixture = started(GROUP);
    fixture.running(0, "x");
    let never = NodeEnd {
        detail: Some(TerminationDetail::NoFleets),
        ..ended(Reason::FailedToStartDueToNoCapacity, None)
    };
    fixture.observe(2, ended_observation(never));
    assert_eq!(fixture.statuses(), ["CANCELLED", "CANCELLED", "FAILED_PRECHECKS"]);
}

#[test]
fn m5_a_group_takes_a_slot_for_each_launch() {
    let mut fixture = ManagedJobFixture::new(GROUP);
    fixture.limits = SlotLimits { max_launching: 2, max_alive: 1 };
    fixture.run_passes();
    assert_eq!(fixture.in_use(), SlotUsage { launching: 2, alive: 1 });
    assert_eq!(fixture.statuses(), ["STARTING", "STARTING", "PENDING"]);
    fixture.runs.insert((0, 1), AttemptObservation::Running { placement: None });
    fixture.run_passes();
    assert_eq!(
        (fixture.in_use().launching, fixture.statuses()),
        (2, vec!["RUNNING", "STARTING", "STARTING"])
    );
}

// Slots.

#[test]
fn m5_slots_go_by_priority_then_age_and_a_blocked_job_blocks_no_other() {
    let waiting = |job, priority, has_alive_slot| SlotRequest {
        project: ProjectId(uuid::Uuid::nil()),
        weight: 1,
        job,
        task: 0,
        priority,
        has_alive_slot,
    };
    let queue = [waiting(3, 0, false), waiting(1, 0, false), waiting(2, 10, false), waiting(4, -5, true)];
    let names =
        |limits, in_use| grant_slots(&queue, limits, in_use, None).iter().map(|w| w.job).collect::<Vec<_>>();
    let limits = |max_launching, max_alive| SlotLimits { max_launching, max_alive };
    assert_eq!(names(limits(9, 9), SlotUsage::default()), [2, 1, 3, 4]);
    assert_eq!(names(limits(2, 9), SlotUsage::default()), [2, 1]);
    assert_eq!(names(limits(9, 9), SlotUsage { launching: 9, alive: 0 }), Vec::<u64>::new());
    assert_eq!(
        names(limits(9, 9), SlotUsage { launching: 0, alive: 8 }),
        [2, 4],
        "the living need no alive slot"
    );
    assert_eq!(names(limits(9, 9), SlotUsage { launching: 20, alive: 20 }), Vec::<u64>::new());
}

#[test]
fn projects_take_turns_for_launch_slots_and_leave_some_to_others() {
    let project = |number| ProjectId(uuid::Uuid::from_u128(number));
    let waiting = |owner, weight, job| SlotRequest {
        project: project(owner),
        weight,
        job,
        task: 0,
        priority: if owner == 1 { 100 } else { 0 },
        has_alive_slot: false,
    };
    let limits = SlotLimits { max_launching: 8, max_alive: 99 };
    let grant = |queue: &[SlotRequest], held: &[(u128, u32)]| -> Vec<u64> {
        let held: BTreeMap<ProjectId, u32> =
            held.iter().map(|(owner, count)| (project(*owner), *count)).collect();
        let in_use = SlotUsage { launching: held.values().sum(), alive: 0 };
        grant_slots(queue, limits, in_use, Some(&held)).iter().map(|granted| granted.job).collect()
    };
    // A high priority does not get a project ahead of others.
    let first: Vec<SlotRequest> = (1..=20).map(|job| waiting(1, 1, job)).collect();
    let both = [&first[..], &[waiting(2, 1, 30), waiting(2, 1, 31)]].concat();
    assert_eq!(grant(&both, &[]), [1, 30, 2, 31, 3, 4]);
    // Alone, it leaves a quarter to projects that come later; each of those gets one.
    assert_eq!(grant(&first, &[]), [1, 2, 3, 4, 5, 6]);
    assert_eq!(grant(&both, &[(1, 6)]), [30]);
    assert_eq!(grant(&[waiting(3, 1, 40)], &[(1, 6), (2, 1)]), [40]);
    assert_eq!(grant(&first, &[(1, 6)]), Vec::<u64>::new());
    // With twice the weight, it gets twice as many.
    let weighted: Vec<SlotRequest> =
        (1..=9).map(|job| waiting(1, 2, job)).chain((30..39).map(|job| waiting(2, 1, job))).collect();
    assert_eq!(grant(&weighted, &[]), [1, 30, 2, 3, 31, 4, 32]);
}

#[test]
fn slot_limits_scale_with_host_cpus_and_memory() {
    assert_eq!(SlotLimits::for_host(2, 4096), SlotLimits { max_launching: 32, max_alive: 16_384 });
    assert_eq!(SlotLimits::for_host(0, 0), SlotLimits { max_launching: 8, max_alive: 2_000 });
    assert_eq!(SlotLimits::for_host(1000, u64::MAX), SlotLimits { max_launching: 512, max_alive: 100_000 });
}

#[test]
fn a_job_shows_the_most_active_schedule_state_of_its_tasks() {
    use ScheduleState::*;
    let show = |lanes: &[ScheduleState]| {
        job_schedule(&lanes.iter().map(|lane| (*lane, true)).collect::<Vec<_>>(), true)
    };
    assert_eq!(show(&[Alive, AliveBackoff, AliveWaiting, Launching]), Launching);
    assert_eq!(show(&[Alive, AliveBackoff, AliveWaiting]), AliveWaiting);
    assert_eq!(show(&[Alive, AliveBackoff, Done]), AliveBackoff);
    assert_eq!(show(&[Alive, Done]), Alive);
    assert_eq!(show(&[Done, Waiting]), AliveWaiting);
    assert_eq!(show(&[Done, Done]), Done);
    assert_eq!(job_schedule(&[(Waiting, true), (Waiting, false)], false), Waiting);
    assert_eq!(job_schedule(&[(Inactive, false)], false), Inactive);
}

// Names and results.

#[test]
fn run_names_of_attempts_are_deterministic_valid_and_distinct() {
    use windlass_model::config::name::is_resource_name;
    let plan = crate::managed_jobs_fixture::plan("name: 9 Lives_of a.Very-long name for a job\nrun: a\n");
    let id = "0b9f0d3a-0000-4000-8000-000000000017";
    assert_eq!(plan.run_name(id, 0, 1), "j-9-lives-of-a-very-0b9f0d3a00004000-0-1");
    for text in ["run: a\n", "name: \"---\"\nrun: a\n", "name: Ünïcode\nrun: a\n"] {
        let plan = crate::managed_jobs_fixture::plan(text);
        let (first, second) = (plan.run_name(id, 0, 1), plan.run_name(id, 999, u32::MAX));
        assert!(is_resource_name(&first) && is_resource_name(&second), "{first} {second}");
        assert_ne!(first, second);
    }
}

#[test]
fn each_job_status_maps_to_its_exit_code() {
    let codes: Vec<u8> = Status::ALL.iter().map(|status| status.exit_code()).collect();
    assert_eq!(codes, [101, 101, 101, 101, 101, 0, 103, 100, 100, 100, 100, 100]);
}
