//! Names in the API, consequences of termination reasons, and the two columns of a managed job.

use std::{fmt::Debug, str::FromStr};

use proptest::prelude::*;
use serde::{Serialize, de::DeserializeOwned};
use uuid::Uuid;
use windlass_model::{
    container,
    event::{self, Actor, Event, EventCause, EventKind, Pipeline},
    fleet, gateway, instance,
    job::{self, Ending, TerminationDetail},
    managed_job::{
        self, PendingKind, RecoveryEpisode, RecoverySource, ScheduleEvent, ScheduleState, is_legal,
    },
    retry, run,
    state_machine::{Step, StrEnum, UnknownValue},
    volume,
};

#[track_caller]
fn check_words<W>(words: &str)
where
    W: StrEnum + FromStr<Err = UnknownValue> + Serialize + DeserializeOwned + Debug,
{
    let found: Vec<_> = W::ALL.iter().map(|word| word.as_str()).collect();
    assert_eq!(found.join(" "), words);
    for &word in W::ALL {
        assert_eq!(word.as_str().parse(), Ok(word));
        let json = serde_json::to_string(&word).unwrap();
        assert_eq!(json, format!("\"{}\"", word.as_str()));
        assert_eq!(serde_json::from_str::<W>(&json).unwrap(), word);
    }
    assert!("Nonsense".parse::<W>().is_err());
}

#[test]
fn status_and_reason_words_match_the_wire_format() {
    check_words::<run::Status>("pending submitted provisioning running terminating terminated failed done");
    check_words::<job::Status>(
        "submitted provisioning pulling running terminating terminated aborted failed done",
    );
    check_words::<instance::Status>("pending provisioning idle busy terminating terminated");
    check_words::<instance::Health>("healthy warning failure");
    check_words::<fleet::Status>("submitted active terminating terminated failed");
    check_words::<volume::Status>("submitted provisioning active failed");
    check_words::<gateway::Status>("submitted provisioning running failed");
    check_words::<gateway::ReplicaStatus>("submitted provisioning running terminating terminated");
    check_words::<container::Status>("Queued Locked Running Complete Cancelled");
    check_words::<retry::Event>("no-capacity interruption error");
    check_words::<managed_job::Status>(
        "PENDING STARTING RUNNING RECOVERING CANCELLING SUCCEEDED CANCELLED FAILED FAILED_SETUP \
         FAILED_PRECHECKS FAILED_NO_RESOURCE FAILED_CONTROLLER",
    );
    check_words::<ScheduleState>("INACTIVE WAITING LAUNCHING ALIVE ALIVE_WAITING ALIVE_BACKOFF DONE");
    check_words::<instance::TerminationReason>(
        "terminated_by_user idle_timeout provisioning_timeout error job_finished unreachable no_offers \
         master_failed max_instances_limit fleet_spec_mismatch no_balance",
    );
}

#[test]
fn an_unknown_status_is_named_in_the_error() {
    let error = "sleeping".parse::<job::Status>().unwrap_err();
    assert_eq!(error.to_string(), "unknown job status `sleeping`");
}

/// reason | final | retry event | error text, as documented.
const JOB_REASONS: &str = "
    failed_to_start_due_to_no_capacity   | failed     | no-capacity  | -
    interrupted_by_no_capacity           | failed     | interruption | -
    instance_unreachable                 | failed     | error        | instance unreachable
    instance_access_revoked              | failed     | error        | instance access revoked
    waiting_instance_limit_exceeded      | failed     | error        | waiting instance limit exceeded
    waiting_runner_limit_exceeded        | failed     | error        | waiting runner limit exceeded
    volume_error                         | failed     | error        | volume error
    gateway_error                        | failed     | error        | gateway error
    container_exited_with_error          | failed     | error        | -
    ports_binding_failed                 | failed     | error        | ports binding failed
    creating_container_error             | failed     | error        | runner error
    executor_error                       | failed     | error        | executor error
    log_quota_exceeded                   | failed     | error        | log quota exceeded
    terminated_by_user                   | terminated | -            | -
    terminated_by_server                 | terminated | -            | -
    scaled_down                          | terminated | -            | scaled down
    inactivity_duration_exceeded         | terminated | -            | inactivity duration exceeded
    terminated_due_to_utilization_policy | terminated | -            | utilization policy
    max_duration_exceeded                | terminated | -            | max duration exceeded
    done_by_runner                       | done       | -            | -
    aborted_by_user                      | aborted    | -            | -";

#[test]
fn a_job_termination_reason_determines_status_retry_event_and_error() {
    let rows: Vec<_> = JOB_REASONS.trim().lines().collect();
    assert_eq!(rows.len(), job::TerminationReason::ALL.len());
    for row in rows {
        let [reason, last, event, error] = row.split('|').map(str::trim).collect::<Vec<_>>()[..] else {
            panic!("{row}")
        };
        let ending = Ending::new(reason.parse().unwrap());
        assert_eq!(ending.final_status().as_str(), last, "{reason}");
        assert_eq!(ending.retry_event().map_or("-", |event| event.as_str()), event, "{reason}");
        assert_eq!(ending.error().unwrap_or("-"), error, "{reason}");
    }
}

/// reason | final | reason of its unfinished jobs | error text, as documented.
const RUN_REASONS: &str = "
    all_jobs_done        | done       | done_by_runner       | -
    job_failed           | failed     | terminated_by_server | -
    retry_limit_exceeded | failed     | terminated_by_server | retry limit exceeded
    stopped_by_user      | terminated | terminated_by_user   | -
    aborted_by_user      | terminated | aborted_by_user      | -
    server_error         | failed     | terminated_by_server | server error
    gateway_error        | failed     | terminated_by_server | gateway error";

#[test]
fn a_run_termination_reason_determines_status_job_reason_and_error() {
    let rows: Vec<_> = RUN_REASONS.trim().lines().collect();
    assert_eq!(rows.len(), run::TerminationReason::ALL.len());
    for row in rows {
        let [reason, last, jobs, error] = row.split('|').map(str::trim).collect::<Vec<_>>()[..] else {
            panic!("{row}")
        };
        let reason: run::TerminationReason = reason.parse().unwrap();
        assert_eq!(reason.final_status().as_str(), last, "{reason}");
        assert_eq!(reason.job_reason().as_str(), jobs, "{reason}");
        assert_eq!(reason.error().unwrap_or("-"), error, "{reason}");
    }
}

#[test]
fn r4_a_terminating_job_or_run_reaches_the_final_status_of_its_reason() {
    for &reason in job::TerminationReason::ALL {
        let last = reason.final_status();
        assert_eq!(job::step(job::Status::Terminating, last.event()), Step::To(last.status()));
        assert!(last.status().is_final());
    }
    for &reason in run::TerminationReason::ALL {
        let last = reason.final_status();
        assert_eq!(run::step(run::Status::Terminating, last.event()), Step::To(last.status()));
    }
}

#[test]
fn windlass_specific_details_accompany_a_reason_known_to_all_clients() {
    #[track_caller]
    fn check(ending: &Ending, reason: &str, detail: TerminationDetail, retried: retry::Event) {
        assert_eq!(ending.reason().as_str(), reason);
        assert_eq!(ending.detail(), Some(detail));
        assert_eq!(ending.retry_event(), Some(retried));
    }
    check(
        &Ending::oom_killed(),
        "container_exited_with_error",
        TerminationDetail::OomKilled,
        retry::Event::Error,
    );
    check(&Ending::no_disk(), "executor_error", TerminationDetail::NoDisk, retry::Event::Error);
    let full = Ending::disk_limit_exceeded();
    check(&full, "executor_error", TerminationDetail::DiskLimitExceeded, retry::Event::Error);
    assert_eq!(job::status_message(job::Status::Failed, Some(&full)), "disk limit exceeded");
    check(&Ending::host_reboot(), "instance_unreachable", TerminationDetail::HostReboot, retry::Event::Error);
    let restart = Ending::host_runtime_restart();
    check(
        &restart,
        "container_exited_with_error",
        TerminationDetail::HostRuntimeRestart,
        retry::Event::Error,
    );
    assert_eq!(Ending::oom_killed().exit_status(), Some(137));
}

#[test]
fn an_ending_round_trips_through_storage() {
    let ending = Ending::oom_killed().with_message("killed at 8 GB");
    let json = serde_json::to_string(&ending).unwrap();
    assert_eq!(
        json,
        r#"{"reason":"container_exited_with_error","detail":"oom_killed","exit_status":137,"said":"killed at 8 GB"}"#
    );
    assert_eq!(serde_json::from_str::<Ending>(&json).unwrap(), ending);
    assert!(serde_json::from_str::<Ending>(r#"{"said":"no reason"}"#).is_err());
}

#[test]
fn a_job_status_message_reflects_its_status_and_ending() {
    #[track_caller]
    fn check(status: &str, ending: Option<Ending>, message: &str) {
        assert_eq!(job::status_message(status.parse().unwrap(), ending.as_ref()), message);
    }
    use job::TerminationReason as R;
    check("done", Some(Ending::exited(0)), "exited (0)");
    check("failed", Some(Ending::exited(3)), "exited (3)");
    check("failed", Some(Ending::no_capacity("full")), "no capacity");
    check("failed", Some(Ending::no_fleets("none matched")), "no fleets");
    check("failed", Some(Ending::new(R::InterruptedByNoCapacity)), "interrupted");
    check("failed", Some(Ending::new(R::VolumeError)), "error");
    check("terminated", Some(Ending::new(R::TerminatedByUser)), "stopped");
    check("terminated", Some(Ending::new(R::ScaledDown)), "terminated");
    check("aborted", Some(Ending::new(R::AbortedByUser)), "aborted");
    check("terminating", Some(Ending::exited(3)), "terminating");
    check("pulling", None, "pulling");
}

#[test]
fn a_run_status_message_shows_pulling_and_retrying() {
    let glance = |status: &str, last_ended| run::JobSummary { status: status.parse().unwrap(), last_ended };
    let lacked = Some(job::TerminationReason::FailedToStartDueToNoCapacity);
    let all = retry::Policy::always();
    let errors = retry::Policy { on_events: vec![retry::Event::Error], ..retry::Policy::always() };
    let message = run::status_message;

    let pulling = [glance("pulling", None), glance("pulling", lacked)];
    assert_eq!(message(run::Status::Provisioning, &pulling, None), "pulling");
    let partly = [glance("pulling", None), glance("running", None)];
    assert_eq!(message(run::Status::Running, &partly, None), "running");
    let again = [glance("submitted", lacked)];
    assert_eq!(message(run::Status::Submitted, &again, Some(&all)), "retrying");
    assert_eq!(message(run::Status::Pending, &[glance("failed", lacked)], Some(&all)), "retrying");
    assert_eq!(message(run::Status::Submitted, &again, Some(&errors)), "submitted");
    assert_eq!(message(run::Status::Submitted, &again, None), "submitted");
    assert_eq!(message(run::Status::Running, &[glance("running", lacked)], Some(&all)), "running");
    assert_eq!(message(run::Status::Pending, &[], Some(&all)), "pending");
}

// Events.

fn because(pipeline: Pipeline) -> EventCause {
    EventCause {
        actor: Actor::Pipeline { name: pipeline, epoch: 7 },
        reason: "done_by_runner".to_owned(),
        message: "the program exited successfully".to_owned(),
    }
}

#[test]
fn a_transition_writes_one_record_that_says_who_and_why() {
    let id = Uuid::from_u128(1);
    let moved = event::transition::<job::JobLifecycle>(
        id,
        job::Status::Terminating,
        job::Event::ReleasedDone,
        because(Pipeline::JobTerminating),
    )
    .unwrap();
    assert_eq!(moved.status, job::Status::Done);
    let record = moved.record.unwrap();
    assert_eq!((record.entity.as_str(), record.kind), ("job", EventKind::Status));
    assert_eq!((record.from, record.to, record.is_final), (Some("terminating"), Some("done"), true));
    assert_eq!((record.actor.as_str(), record.epoch), ("JobTerminating", Some(7)));
    assert_eq!((record.reason.as_str(), record.id), ("done_by_runner", id));
}

#[test]
fn a_transition_that_changes_nothing_writes_nothing() {
    let id = Uuid::from_u128(1);
    let stop = run::Event::StopRequested;
    let moved =
        event::transition::<run::RunLifecycle>(id, run::Status::Done, stop, because(Pipeline::Run)).unwrap();
    assert_eq!(moved, event::TransitionResult { status: run::Status::Done, record: None });
}

#[test]
fn r5_a_refused_transition_is_an_error_and_a_record() {
    let started = job::Event::Started;
    let refused = event::transition::<job::JobLifecycle>(
        Uuid::from_u128(1),
        job::Status::Done,
        started,
        because(Pipeline::JobRunning),
    )
    .unwrap_err();
    assert_eq!(refused.to_string(), "job with status `done` refuses `started`");
    assert_eq!((refused.record.kind, refused.record.to), (EventKind::Refused, None));
    assert!(!refused.record.is_final);
}

#[test]
fn schedule_state_done_is_not_recorded_as_a_final_status() {
    let done = Event::created::<managed_job::ScheduleLifecycle>(
        Uuid::nil(),
        ScheduleState::Done,
        because(Pipeline::ManagedJob),
    );
    assert_eq!((done.kind, done.is_final), (EventKind::Schedule, false));
}

// Managed jobs.

#[test]
fn m2_a_cancelling_task_can_only_move_to_a_final_status() {
    use managed_job::{Event as E, Status as S};
    let mut ends = Vec::new();
    for &event in E::ALL {
        match managed_job::step(S::Cancelling, event) {
            Step::To(to) => {
                assert!(to.is_final(), "{event} leads from CANCELLING to {to}");
                ends.push(to);
            }
            Step::Stay | Step::Refuse => {}
        }
    }
    assert_eq!(managed_job::step(S::Cancelling, E::Released), Step::To(S::Cancelled));
    assert_eq!(ends.len(), 7);
}

#[test]
fn m7_only_the_succeeded_event_makes_a_task_succeed() {
    use managed_job::{Event as E, Status as S};
    for &status in S::ALL {
        for &event in E::ALL {
            if managed_job::step(status, event) == Step::To(S::Succeeded) {
                assert_eq!(event, E::Succeeded);
                assert!(status == S::Running || status == S::Cancelling, "{status} succeeded");
            }
        }
    }
}

#[test]
fn m7_a_task_that_was_cancelled_before_its_start_never_starts() {
    use managed_job::{Event as E, Status as S};
    // Later tasks of a failed pipeline follow this path.
    assert_eq!(managed_job::step(S::Pending, E::CancelRequested), Step::To(S::Cancelling));
    for &status in &[S::Cancelling, S::Cancelled] {
        for &event in &[E::SlotGranted, E::Rescheduled, E::EmptyRun, E::Started, E::Recovered] {
            assert_eq!(managed_job::step(status, event), Step::Refuse);
        }
    }
}

#[test]
fn r17_an_episode_counts_iff_a_genuine_failure_took_part() {
    use RecoverySource::*;
    assert_eq!(RecoveryEpisode::open(Failure).recovery_increment(), 1);
    assert_eq!(RecoveryEpisode::open(Failure).merge(Restart).merge(Emergency).recovery_increment(), 1);
    assert_eq!(RecoveryEpisode::open(Restart).merge(Emergency).recovery_increment(), 0);
    assert_eq!(RecoveryEpisode::open(Restart).merge(Failure).merge(Failure).recovery_increment(), 1);
    let stored = RecoveryEpisode::open(Failure).has_credit();
    assert_eq!(RecoveryEpisode::from_stored(stored).recovery_increment(), 1);
}

#[test]
fn each_schedule_state_allows_only_the_listed_task_statuses() {
    #[track_caller]
    fn check(state: &str, legal: &str) {
        let state: ScheduleState = state.parse().unwrap();
        let mut found = Vec::new();
        for &status in managed_job::Status::ALL {
            let kinds: Vec<Option<PendingKind>> = if status == managed_job::Status::Pending {
                PendingKind::ALL.iter().copied().map(Some).collect()
            } else {
                vec![None]
            };
            for &kind in kinds.iter().filter(|kind| is_legal(state, status, **kind)) {
                found.push(kind.map_or(status.to_string(), |kind| format!("{status}({kind})")));
            }
        }
        assert_eq!(found.join(" "), legal, "{state}");
    }
    let finals =
        "SUCCEEDED CANCELLED FAILED FAILED_SETUP FAILED_PRECHECKS FAILED_NO_RESOURCE FAILED_CONTROLLER";
    check("INACTIVE", "PENDING(queued)");
    check("WAITING", "PENDING(queued)");
    check("LAUNCHING", "STARTING RECOVERING CANCELLING");
    check("ALIVE", &format!("PENDING(queued) RUNNING CANCELLING {finals}"));
    check(
        "ALIVE_WAITING",
        "PENDING(queued) PENDING(launch_backoff) PENDING(recovery_backoff) RECOVERING CANCELLING FAILED_CONTROLLER",
    );
    check("ALIVE_BACKOFF", "PENDING(launch_backoff) PENDING(recovery_backoff) CANCELLING FAILED_CONTROLLER");
    check("DONE", finals);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() })]

    /// Slots counted from the states equal slots counted from claims and releases.
    #[test]
    fn m5_every_slot_is_released_once_and_every_launch_claims_one(
        events in prop::collection::vec(prop::sample::select(ScheduleEvent::ALL), 0..60),
    ) {
        let (mut launch, mut alive) = (0_i32, 0_i32);
        let mut state = ScheduleState::Inactive;
        for event in events {
            let Some(next) = managed_job::step_schedule(state, event).status_after(state) else { continue };
            launch += i32::from(next.holds_launch_slot()) - i32::from(state.holds_launch_slot());
            alive += i32::from(next.holds_alive_slot()) - i32::from(state.holds_alive_slot());
            if next.holds_launch_slot() && !state.holds_launch_slot() {
                prop_assert_eq!(event, ScheduleEvent::Claimed, "a launch slot is taken by a claim only");
            }
            prop_assert!((0..=1).contains(&launch) && (0..=1).contains(&alive));
            prop_assert!(launch <= alive, "a launching job is alive");
            state = next;
        }
        if state == ScheduleState::Done {
            prop_assert_eq!((launch, alive), (0, 0));
        }
    }

    /// In any order of events of a task, final stays final, except for an internal error.
    #[test]
    fn r3_m2_a_final_task_changes_only_by_an_internal_error(
        events in prop::collection::vec(prop::sample::select(managed_job::Event::ALL), 0..80),
    ) {
        let mut status = managed_job::Status::Pending;
        for event in events {
            let before = status;
            status = managed_job::step(status, event).status_after(status).unwrap_or(status);
            if before.is_final() && status != before {
                prop_assert_eq!(status, managed_job::Status::FailedController);
            }
        }
    }
}

// Containers.

#[test]
fn c1_only_the_holder_its_executor_or_an_admins_cancel_changes_a_held_container() {
    use container::{ContainerActor, Event, Status};
    for &status in &[Status::Locked, Status::Running] {
        for &event in Event::ALL {
            if container::step(status, event) == Step::Refuse {
                continue;
            }
            assert!(
                !container::is_allowed(ContainerActor::Dispatcher, status, event),
                "a stranger may {event} in {status}"
            );
            assert!(!container::is_allowed(ContainerActor::Server, status, event));
            assert_eq!(container::is_allowed(ContainerActor::Admin, status, event), event == Event::Cancel);
            assert!(container::is_allowed(ContainerActor::Holder, status, event));
            assert!(container::is_allowed(ContainerActor::Executor, status, event));
        }
    }
    assert!(container::is_allowed(ContainerActor::Dispatcher, Status::Queued, Event::Lock));
    assert!(!container::is_allowed(ContainerActor::Dispatcher, Status::Queued, Event::Cancel));
}

#[test]
fn c2_a_repeated_write_is_refused() {
    use container::{Event, Status};
    assert_eq!(container::step(Status::Running, Event::Start), Step::Refuse);
    assert_eq!(container::step(Status::Locked, Event::Lock), Step::Refuse);
    assert_eq!(container::step(Status::Complete, Event::Cancel), Step::Refuse);
}
