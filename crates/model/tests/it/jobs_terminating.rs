//! The last steps of a job: R22, R4, G4.

use proptest::prelude::*;
use uuid::Uuid;
use windlass_model::{
    decide::jobs_terminating::{
        DRAIN_GRACE, GIVE_UP_TIMEOUT, HeldInstance, InstanceRelease, LOGS_GRACE, LogDrain, Plan,
        StopDelivery, TaskPresence, TerminatingJobObservation, TerminatingJobView, TerminationStep,
        VolumeAttachment, decide,
    },
    id::VolumeId,
    instance,
    job::{self, Ending, Status, TerminationReason},
    state_machine,
    time::{Span, Timestamp},
};

const NOW: Timestamp = Timestamp::from_secs(1_000_000);

fn ago(secs: i64) -> Timestamp {
    NOW - Span::secs(secs)
}

fn job(reason: TerminationReason) -> TerminatingJobView {
    TerminatingJobView {
        ending: Ending::new(reason),
        terminating_since: ago(10),
        is_registered: false,
        has_open_requests: false,
        has_run: true,
        is_task_submitted: true,
        deadline: None,
        stop_duration: Some(Span::mins(5)),
        stop_grace: Span::mins(2),
        volumes: Vec::new(),
        instance: Some(HeldInstance { has_shim: true, status: instance::Status::Busy, other_jobs: 0 }),
        give_up_after: GIVE_UP_TIMEOUT,
    }
}

fn volume(requested: Option<i64>) -> VolumeAttachment {
    VolumeAttachment {
        id: VolumeId(Uuid::from_u128(1)),
        detach_requested_at: requested.map(ago),
        is_forced: false,
        is_attached: true,
    }
}

fn words(plan: &Plan) -> String {
    match plan {
        Plan::Step { step, waits_for, due } => {
            let step = match step {
                TerminationStep::Unregister => "unregister".to_owned(),
                TerminationStep::Stop { grace, deadline } => {
                    let request = if grace.is_some() { "stop" } else { "let end" };
                    format!("{request} within {} s", deadline.since(NOW).as_secs())
                }
                TerminationStep::DrainLogs => "drain".to_owned(),
                TerminationStep::RemoveTask => "remove".to_owned(),
                TerminationStep::Detach { force: false, volumes } => format!("detach {}", volumes.len()),
                TerminationStep::Detach { force: true, volumes } => format!("force {}", volumes.len()),
                TerminationStep::Wait => "wait".to_owned(),
            };
            format!("{step}, for {waits_for}, again in {} s", due.since(NOW).as_secs())
        }
        Plan::End(end) => {
            let gave_up = if end.gave_up_host() { ", host given up" } else { "" };
            format!(
                "{} ({}), instance {:?}{gave_up}",
                end.change().event,
                end.ending().reason(),
                end.instance()
            )
        }
    }
}

#[track_caller]
fn check(job: &TerminatingJobView, logs: LogDrain, task: TaskPresence, expect: &str) {
    assert_eq!(
        words(&decide(
            job,
            TerminatingJobObservation { logs, task, ..TerminatingJobObservation::NOTHING },
            NOW
        )),
        expect
    );
}

#[test]
fn a_stop_is_sent_with_a_deadline() {
    let job = job(TerminationReason::TerminatedByUser);
    let expect = "stop within 150 s, for the job to stop, again in 0 s";
    check(&job, LogDrain::NotRequested, TaskPresence::NotRequested, expect);
}

#[test]
fn a_stop_that_did_not_reach_the_host_is_repeated_with_the_whole_grace_period() {
    let stopped = job(TerminationReason::TerminatedByUser);
    let unheard =
        TerminatingJobObservation { stop: StopDelivery::Silent, ..TerminatingJobObservation::NOTHING };
    let expect = "stop within 150 s, for the host to respond, again in 2 s";
    assert_eq!(words(&decide(&stopped, unheard, NOW)), expect);
    let late = TerminatingJobView { terminating_since: NOW - GIVE_UP_TIMEOUT, ..stopped };
    let expect = "remove, for its container to be removed, again in 0 s";
    assert_eq!(words(&decide(&late, unheard, NOW)), expect);
}

#[test]
fn a_job_that_ended_by_itself_is_not_stopped_but_its_logs_are_drained() {
    let mut job = job(TerminationReason::DoneByRunner);
    check(
        &job,
        LogDrain::NotRequested,
        TaskPresence::There,
        "let end within 30 s, for the job to stop, again in 0 s",
    );
    job.deadline = Some(NOW + Span::secs(29));
    check(&job, LogDrain::NotRequested, TaskPresence::There, "drain, for its last output, again in 0 s");
    check(&job, LogDrain::More, TaskPresence::There, "drain, for its last output, again in 2 s");
    check(
        &job,
        LogDrain::Drained,
        TaskPresence::There,
        "remove, for its container to be removed, again in 2 s",
    );
    check(&job, LogDrain::Drained, TaskPresence::Gone, "released-done (done_by_runner), instance Freed");
}

#[test]
fn the_deadline_ends_the_drain() {
    let job = TerminatingJobView { deadline: Some(NOW), ..job(TerminationReason::TerminatedByUser) };
    check(
        &job,
        LogDrain::More,
        TaskPresence::NotRequested,
        "remove, for its container to be removed, again in 0 s",
    );
}

#[test]
fn an_abort_skips_the_runner() {
    let job = job(TerminationReason::AbortedByUser);
    check(
        &job,
        LogDrain::NotRequested,
        TaskPresence::NotRequested,
        "remove, for its container to be removed, again in 0 s",
    );
    check(
        &job,
        LogDrain::NotRequested,
        TaskPresence::Gone,
        "released-aborted (aborted_by_user), instance Freed",
    );
}

#[test]
fn s2_a_job_is_unregistered_from_the_proxy_before_it_is_stopped() {
    let job = TerminatingJobView { is_registered: true, ..job(TerminationReason::ScaledDown) };
    check(
        &job,
        LogDrain::NotRequested,
        TaskPresence::There,
        "unregister, for the proxy to unregister it, again in 0 s",
    );
}

#[test]
fn s2_a_stop_waits_a_limited_time_for_requests_in_flight() {
    let busy = TerminatingJobView { has_open_requests: true, ..job(TerminationReason::ScaledDown) };
    let busy = TerminatingJobView { terminating_since: ago(5), deadline: None, ..busy };
    check(&busy, LogDrain::NotRequested, TaskPresence::There, "wait, for requests in flight, again in 1 s");
    let late = TerminatingJobView { terminating_since: NOW - DRAIN_GRACE, ..busy.clone() };
    check(
        &late,
        LogDrain::NotRequested,
        TaskPresence::There,
        "stop within 150 s, for the job to stop, again in 0 s",
    );
    // No process is left to answer, or the end does not wait.
    for reason in [TerminationReason::ContainerExitedWithError, TerminationReason::AbortedByUser] {
        let over = TerminatingJobView { ending: job(reason).ending, ..busy.clone() };
        assert!(!matches!(
            decide(&over, TerminatingJobObservation::NOTHING, NOW),
            Plan::Step { step: TerminationStep::Wait, .. }
        ));
    }
}

#[test]
fn a_job_that_never_had_an_instance_ends_at_once() {
    let job = TerminatingJobView {
        instance: None,
        has_run: false,
        ..job(TerminationReason::FailedToStartDueToNoCapacity)
    };
    let expect = "released-failed (failed_to_start_due_to_no_capacity), instance None";
    check(&job, LogDrain::NotRequested, TaskPresence::NotRequested, expect);
}

#[test]
fn a_job_on_a_silent_host_terminates_only_after_the_give_up_timeout() {
    let lost = TerminatingJobView { deadline: Some(ago(1)), ..job(TerminationReason::InstanceUnreachable) };
    check(&lost, LogDrain::Silent, TaskPresence::Silent, "wait, for the host to respond, again in 2 s");
    let late = TerminatingJobView { terminating_since: NOW - GIVE_UP_TIMEOUT, ..lost.clone() };
    let expect = "released-failed (instance_unreachable), instance Freed, host given up";
    check(&late, LogDrain::Silent, TaskPresence::Silent, expect);
    let place = HeldInstance { has_shim: true, status: instance::Status::Terminated, other_jobs: 0 };
    let ended = TerminatingJobView { instance: Some(place), deadline: None, ..lost };
    let expect = "released-failed (instance_unreachable), instance Unchanged";
    check(&ended, LogDrain::NotRequested, TaskPresence::NotRequested, expect);
}

#[test]
fn g4_volumes_are_detached_gracefully_and_then_by_force() {
    let stopped = |secs: i64, requested| TerminatingJobView {
        deadline: Some(ago(1)),
        terminating_since: ago(secs),
        volumes: vec![volume(requested)],
        ..job(TerminationReason::TerminatedByUser)
    };
    let gone = |job: &TerminatingJobView, expect| check(job, LogDrain::Drained, TaskPresence::Gone, expect);
    gone(&stopped(40, None), "detach 1, for its volumes to detach, again in 2 s");
    gone(&stopped(299, Some(100)), "wait, for its volumes to detach, again in 2 s");
    gone(&stopped(300, Some(59)), "wait, for its volumes to detach, again in 2 s");
    gone(&stopped(300, Some(60)), "force 1, for its volumes to detach, again in 2 s");
    let aborted =
        TerminatingJobView { ending: Ending::new(TerminationReason::AbortedByUser), ..stopped(70, Some(60)) };
    gone(&aborted, "force 1, for its volumes to detach, again in 2 s");
    let patient = TerminatingJobView { stop_duration: None, ..stopped(9_000, Some(9_000)) };
    gone(&patient, "wait, for its volumes to detach, again in 2 s");
    let free = TerminatingJobView {
        volumes: vec![VolumeAttachment { is_attached: false, ..volume(Some(5)) }],
        ..stopped(40, None)
    };
    gone(&free, "released-terminated (terminated_by_user), instance Freed");
}

#[test]
fn a_job_ends_without_contacting_an_instance_that_was_never_ready() {
    let place = Some(HeldInstance { has_shim: true, status: instance::Status::Provisioning, other_jobs: 0 });
    let early = TerminatingJobView {
        instance: place,
        has_run: false,
        is_task_submitted: false,
        ..job(TerminationReason::TerminatedByUser)
    };
    let expect = "released-terminated (terminated_by_user), instance Ended";
    check(&early, LogDrain::NotRequested, TaskPresence::NotRequested, expect);
    let reported = TerminatingJobView { is_task_submitted: true, ..early };
    check(
        &reported,
        LogDrain::NotRequested,
        TaskPresence::NotRequested,
        "remove, for its container to be removed, again in 0 s",
    );
}

#[test]
fn the_instance_of_a_finished_job_is_freed_ended_or_left_unchanged() {
    let on = |has_shim, status, other_jobs| {
        let place = Some(HeldInstance { has_shim, status, other_jobs });
        let job = TerminatingJobView {
            deadline: Some(ago(1)),
            instance: place,
            ..job(TerminationReason::DoneByRunner)
        };
        match decide(
            &job,
            TerminatingJobObservation {
                logs: LogDrain::Drained,
                task: TaskPresence::Gone,
                ..TerminatingJobObservation::NOTHING
            },
            NOW,
        ) {
            Plan::End(end) => end.instance(),
            Plan::Step { .. } => panic!("it should end"),
        }
    };
    assert_eq!(on(true, instance::Status::Busy, 0), InstanceRelease::Freed);
    assert_eq!(on(true, instance::Status::Busy, 2), InstanceRelease::StaysBusy);
    assert_eq!(on(false, instance::Status::Busy, 0), InstanceRelease::Ended);
    assert_eq!(on(true, instance::Status::Provisioning, 0), InstanceRelease::Ended);
    assert_eq!(on(true, instance::Status::Terminating, 0), InstanceRelease::Unchanged);
}

/// A simulated environment for the controller: everything may be slow, nothing reports false state.
#[derive(Clone, Debug)]
struct ReleaseFixture {
    log_polls: u32,
    remove_polls: u32,
    detach_polls: u32,
    silent: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum ReleaseEvent {
    Unregistered,
    Stopped,
    Quiet,
    Removed,
    Detached,
    Ended,
}

fn run_to_end(
    mut job: TerminatingJobView,
    mut fixture: ReleaseFixture,
) -> (Vec<ReleaseEvent>, Timestamp, Plan) {
    let (mut now, mut seen, mut did) = (NOW, TerminatingJobObservation::NOTHING, Vec::new());
    job.terminating_since = NOW;
    for _ in 0..10_000 {
        let plan = decide(&job, seen, now);
        let Plan::Step { step, due, .. } = &plan else {
            did.push(ReleaseEvent::Ended);
            return (did, now, plan);
        };
        match step {
            TerminationStep::Unregister => {
                job.is_registered = false;
                did.push(ReleaseEvent::Unregistered);
            }
            TerminationStep::Stop { grace, deadline } => {
                if grace.is_some() && fixture.silent {
                    seen.stop = StopDelivery::Silent;
                } else {
                    job.deadline = Some(*deadline);
                }
                did.push(ReleaseEvent::Stopped);
            }
            TerminationStep::DrainLogs => {
                fixture.log_polls = fixture.log_polls.saturating_sub(1);
                seen.logs = match (fixture.silent, fixture.log_polls) {
                    (true, _) => LogDrain::Silent,
                    (false, 0) => LogDrain::Drained,
                    (false, _) => LogDrain::More,
                };
                did.push(ReleaseEvent::Quiet);
            }
            TerminationStep::RemoveTask => {
                fixture.remove_polls = fixture.remove_polls.saturating_sub(1);
                seen.task = match (fixture.silent, fixture.remove_polls) {
                    (true, _) => TaskPresence::Silent,
                    (false, 0) => TaskPresence::Gone,
                    (false, _) => TaskPresence::There,
                };
                did.push(ReleaseEvent::Removed);
            }
            TerminationStep::Detach { .. } => {
                for volume in &mut job.volumes {
                    volume.detach_requested_at = volume.detach_requested_at.or(Some(now));
                }
                did.push(ReleaseEvent::Detached);
            }
            TerminationStep::Wait => {}
        }
        if did.contains(&ReleaseEvent::Detached) {
            fixture.detach_polls = fixture.detach_polls.saturating_sub(1);
            if fixture.detach_polls == 0 {
                job.volumes.iter_mut().for_each(|volume| volume.is_attached = false);
            }
        }
        now = (*due).max(now + Span::millis(1));
    }
    (did, now, decide(&job, seen, now))
}

fn any_job() -> impl Strategy<Value = TerminatingJobView> {
    let reason = prop::sample::select(TerminationReason::ALL.to_vec());
    let status = prop::sample::select(vec![
        instance::Status::Provisioning,
        instance::Status::Busy,
        instance::Status::Terminating,
        instance::Status::Terminated,
    ]);
    let place = prop::option::of((any::<bool>(), status, 0_u32..3));
    (reason, any::<bool>(), any::<bool>(), place, 0_usize..3).prop_map(
        |(reason, registered, ran, place, volumes)| TerminatingJobView {
            is_registered: registered,
            has_run: ran,
            volumes: vec![volume(None); volumes],
            instance: place.map(|(has_shim, status, other_jobs)| HeldInstance {
                has_shim,
                status,
                other_jobs,
            }),
            ..job(reason)
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, cases: 1_000, ..ProptestConfig::default() })]

    /// R22, R2, R4: at any pace of the environment, the steps come in order, the end comes, and it matches its reason.
    #[test]
    fn r22_termination_steps_run_in_order_and_always_finish(
        job in any_job(), polls in (1_u32..20, 1_u32..5, 1_u32..9), silent in any::<bool>(),
    ) {
        let fixture = ReleaseFixture { log_polls: polls.0, remove_polls: polls.1, detach_polls: polls.2, silent };
        let (did, at, plan) = run_to_end(job.clone(), fixture);
        prop_assert!(did.is_sorted(), "{:?}", did);
        let Plan::End(end) = plan else { return Err(TestCaseError::fail(format!("never ended: {did:?}"))) };
        let outcome = job::step(Status::Terminating, end.change().event);
        prop_assert_eq!(outcome, state_machine::Step::To(job.ending.reason().final_status().status()));
        prop_assert!(at <= NOW + GIVE_UP_TIMEOUT + LOGS_GRACE + Span::secs(60), "took {:?}", at.since(NOW));
        let on_shim = job.instance.is_some_and(|place| place.has_shim && place.status != instance::Status::Terminated);
        prop_assert_eq!(end.gave_up_host(), silent && on_shim, "given up without cause, or kept in spite of it");
        if on_shim && !silent {
            prop_assert!(did.contains(&ReleaseEvent::Removed));
        }
        prop_assert_eq!(job.is_registered, did.contains(&ReleaseEvent::Unregistered));
        prop_assert_eq!(!job.volumes.is_empty(), did.contains(&ReleaseEvent::Detached));
        if let (Some(event), Some(place)) = (end.instance().event(), job.instance) {
            prop_assert!(!matches!(instance::step(place.status, event), state_machine::Step::Refuse));
            prop_assert!(place.other_jobs == 0, "r8: others are still on it");
        }
    }
}

#[test]
fn a_stopping_job_is_reported_with_the_time_at_which_it_is_killed() {
    let stopped = job(TerminationReason::TerminatedByUser);
    // Thirty seconds of the deadline are for the last output.
    let deadline = Some(Timestamp::from_secs(1_000_090) + Span::millis(700));
    let message = Plan::status_message(&stopped, "the job to stop", deadline);
    let killed_at = Timestamp::from_secs(1_000_060);
    assert_eq!(message, format!("waiting for the job to stop, which is killed at {killed_at} at the latest"));
    assert_eq!(Plan::status_message(&stopped, "the job to stop", None), "waiting for the job to stop");
    assert_eq!(Plan::status_message(&stopped, "its last output", deadline), "waiting for its last output");
    let done = job(TerminationReason::DoneByRunner);
    assert_eq!(Plan::status_message(&done, "the job to stop", deadline), "waiting for the job to stop");
}
