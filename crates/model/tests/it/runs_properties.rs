//! Invariants of every plan for every run.

use std::collections::BTreeSet;

use proptest::prelude::*;
use windlass_model::{
    decide::runs::{
        JobView, Plan, ReplicaRole, ReplicaStart, ReplicaView, RequestedStop, RunView, ScheduleState,
        StopCriteria, SubmissionState, decide,
        derive::{DerivedStatus, derive},
    },
    job::{self, TerminationReason},
    retry, run,
    schedule::CronSchedule,
    time::Span,
};

use crate::runs_fixture::NOW;

fn any_of<T: Copy + std::fmt::Debug + 'static>(all: &'static [T]) -> impl Strategy<Value = T> + Clone {
    prop::sample::select(all)
}

fn any_state() -> impl Strategy<Value = SubmissionState> + Clone {
    let ending = any_of(TerminationReason::ALL).prop_map(job::Ending::new);
    // Most rules concern retryable ends.
    let retryable = any_of(&[
        TerminationReason::ContainerExitedWithError,
        TerminationReason::FailedToStartDueToNoCapacity,
        TerminationReason::InterruptedByNoCapacity,
        TerminationReason::TerminatedByServer,
        TerminationReason::DoneByRunner,
        TerminationReason::ScaledDown,
    ])
    .prop_map(job::Ending::new);
    prop_oneof![
        1 => Just(SubmissionState::Submitted),
        1 => Just(SubmissionState::Provisioning),
        1 => Just(SubmissionState::Pulling),
        1 => Just(SubmissionState::Running),
        1 => ending.clone().prop_map(SubmissionState::Terminating),
        1 => ending.prop_map(SubmissionState::Final),
        2 => retryable.clone().prop_map(SubmissionState::Terminating),
        4 => retryable.prop_map(SubmissionState::Final),
    ]
}

/// Generates states for a retry: replicas that run next to replicas that are over.
fn retried_state() -> impl Strategy<Value = SubmissionState> + Clone {
    let over = any_of(&[
        TerminationReason::ContainerExitedWithError,
        TerminationReason::FailedToStartDueToNoCapacity,
        TerminationReason::TerminatedByServer,
        TerminationReason::DoneByRunner,
    ]);
    prop_oneof![1 => Just(SubmissionState::Running), 4 => over.prop_map(|reason| SubmissionState::Final(job::Ending::new(reason)))]
}

fn job(state: impl Strategy<Value = SubmissionState>) -> impl Strategy<Value = JobView> {
    (state, 0..6_u32, prop::option::weighted(0.8, 0..7_200_i64)).prop_map(|(state, submission, ago)| {
        JobView {
            num: 0,
            submission,
            state,
            attempts: submission + 1,
            failures: submission + 1,
            failing_since: ago.map(|secs| NOW - Span::secs(secs)),
        }
    })
}

fn replicas(state: impl Strategy<Value = SubmissionState>) -> impl Strategy<Value = Vec<ReplicaView>> {
    prop::collection::vec(prop::collection::vec(job(state), 1..4), 0..4).prop_map(|replicas| {
        let number = |(num, mut job): (u32, JobView)| {
            job.num = num;
            job
        };
        let replica = |(num, jobs): (u32, Vec<JobView>)| ReplicaView {
            num,
            role: ReplicaRole::Full,
            jobs: (0..).zip(jobs).map(number).collect(),
        };
        (0..).zip(replicas).map(replica).collect()
    })
}

fn policy() -> impl Strategy<Value = Option<retry::Policy>> {
    let policy = (prop::sample::subsequence(retry::Event::ALL, 1..=3), 1..5_400_i64, 1..8_u32).prop_map(
        |(on_events, secs, max_total)| retry::Policy { on_events, duration: Span::secs(secs), max_total },
    );
    prop::option::weighted(0.8, policy)
}

fn schedule() -> impl Strategy<Value = Option<ScheduleState>> {
    let moment = || prop::option::of((-7_200..7_200_i64).prop_map(|secs| NOW + Span::secs(secs)));
    let scheduled = (moment(), moment()).prop_map(|(next, fired)| ScheduleState {
        crons: CronSchedule::parse(&["*/7 * * * *"]).unwrap(),
        next_slot: next,
        last_slot: fired,
    });
    prop::option::weighted(0.3, scheduled)
}

prop_compose! {
    fn run_of(statuses: &'static [run::Status], state: BoxedStrategy<SubmissionState>)(
        status in any_of(statuses),
        reason in prop::option::of(any_of(run::TerminationReason::ALL)),
        submitted in 0..10_000_i64,
        attempt in 0..9_u32,
        pending in 0..1_000_i64,
        schedule in schedule(),
        retry in policy(),
        master_done in any::<bool>(),
        gateway_failed in prop::bool::weighted(0.1),
        replicas in replicas(state),
        wanted in 0..5_u32,
        surplus in prop::sample::subsequence(&[0_u32, 1, 2, 3][..], 0..=4),
    ) -> RunView {
        let jobs = |num| replicas.iter().find(|r| r.num == num).map_or(1, |r| r.jobs.len() as u32);
        RunView {
            status,
            ending: reason.map(|reason| run::Ending::new(reason, "said so")),
            requested_stop: (submitted % 5 == 0).then_some(RequestedStop { is_abort: attempt % 2 == 0 }),
            submitted_at: NOW - Span::secs(submitted),
            attempt,
            pending_since: NOW - Span::secs(pending),
            retry_delay: retry::DELAY_FIRST,
            schedule,
            retry,
            stop_criteria: if master_done { StopCriteria::MasterDone } else { StopCriteria::AllDone },
            has_gateway_failed: gateway_failed,
            is_rolling_back: false,
            start: (0..wanted).map(|replica| ReplicaStart { replica, jobs: jobs(replica) }).collect(),
            replicas,
            surplus,
        }
    }
}

fn any_run() -> impl Strategy<Value = RunView> {
    run_of(run::Status::ALL, any_state().boxed())
}

fn final_run() -> impl Strategy<Value = RunView> {
    run_of(&[run::Status::Terminated, run::Status::Failed, run::Status::Done], any_state().boxed())
}

fn retried_run() -> impl Strategy<Value = RunView> {
    run_of(&[run::Status::Running, run::Status::Pending], retried_state().boxed())
}

fn jobs(run: &RunView) -> impl Iterator<Item = (u32, &JobView)> {
    run.replicas.iter().flat_map(|replica| replica.jobs.iter().map(|job| (replica.num, job)))
}

fn find(run: &RunView, replica: u32, num: u32) -> Option<&JobView> {
    jobs(run).find(|(r, job)| *r == replica && job.num == num).map(|(_, job)| job)
}

fn is_final(job: &JobView) -> bool {
    job.state.status().is_final()
}

fn ending(job: &JobView) -> Option<&job::Ending> {
    match &job.state {
        SubmissionState::Terminating(ending) | SubmissionState::Final(ending) => Some(ending),
        SubmissionState::Submitted
        | SubmissionState::Provisioning
        | SubmissionState::Pulling
        | SubmissionState::Running => None,
    }
}

/// R11 derived from the policy, not from the code: returns why this replica may not be retried.
fn retry_problem(run: &RunView, replica: &ReplicaView) -> Option<String> {
    let Some(policy) = &run.retry else { return Some("no policy".to_owned()) };
    let mut covered = false;
    for job in &replica.jobs {
        let Some(reason) = ending(job).map(job::Ending::reason) else { return Some("alive".to_owned()) };
        if matches!(reason, TerminationReason::DoneByRunner | TerminationReason::TerminatedByServer) {
            continue;
        }
        let Some(event) = reason.retry_event() else { return Some(format!("{reason} is no failure")) };
        let began = run.schedule.as_ref().and_then(|s| s.last_slot).unwrap_or(run.submitted_at);
        let since = job.failing_since.or((event == retry::Event::NoCapacity).then_some(began));
        // For a run that waits for its retry, that was decided when it began to wait.
        let at = if run.status == run::Status::Pending { run.pending_since.min(NOW) } else { NOW };
        let in_time = since.is_some_and(|since| at.since(since) < policy.duration);
        if !policy.on_events.contains(&event) || !in_time || job.attempts >= policy.max_total {
            return Some(format!("{reason}: {event}, tries {}", job.attempts));
        }
        covered = true;
    }
    (!covered).then(|| "nothing failed".to_owned())
}

fn plan_of(run: &RunView) -> Plan {
    decide(run, NOW)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 600, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn r5_a_run_plan_follows_an_edge_of_the_state_machine(run in any_run()) {
        let plan = plan_of(&run);
        let after = plan.event.map_or(Some(run.status), |event| run::step(run.status, event).status_after(run.status));
        prop_assert_eq!(after, Some(plan.status));
        prop_assert!(!plan.message.is_empty());
        prop_assert_eq!(plan.due_at.is_none(), plan.status.is_final());
    }

    #[test]
    fn r3_a_final_run_is_never_touched(run in final_run()) {
        let plan = plan_of(&run);
        prop_assert!(plan.event.is_none() && plan.submit.is_empty() && plan.end.is_empty());
    }

    #[test]
    fn r4_a_plan_never_finishes_a_job_and_finishes_a_run_only_after_its_jobs(run in any_run()) {
        let plan = plan_of(&run);
        for end in &plan.end {
            let job = find(&run, end.replica, end.job).unwrap();
            prop_assert!(!is_final(job), "a final job is asked to end");
            // The plan can end a job only with this event, which never leads to a final status.
            let after = job::step(job.state.status(), job::Event::StopRequested).status_after(job.state.status());
            prop_assert_eq!(after, Some(job::Status::Terminating));
        }
        if plan.status.is_final() && !run.status.is_final() {
            prop_assert_eq!(run.status, run::Status::Terminating);
            prop_assert!(jobs(&run).all(|(_, job)| is_final(job)));
        }
    }

    #[test]
    fn r4_a_terminating_run_ends_every_live_job(run in any_run()) {
        let plan = plan_of(&run);
        if plan.status != run::Status::Terminating {
            return Ok(());
        }
        prop_assert!(run.status == run::Status::Terminating || plan.ending.is_some());
        for (replica, job) in jobs(&run).filter(|(_, job)| ending(job).is_none()) {
            prop_assert!(plan.end.iter().any(|end| end.replica == replica && end.job == job.num));
        }
    }

    #[test]
    fn r6_submission_numbers_grow_by_one_after_the_previous_submission_is_final(run in any_run()) {
        let plan = plan_of(&run);
        let mut seen = BTreeSet::new();
        for submit in &plan.submit {
            prop_assert!(seen.insert((submit.replica, submit.job)), "submitted twice in one plan");
            match find(&run, submit.replica, submit.job) {
                Some(job) => {
                    prop_assert!(is_final(job));
                    prop_assert_eq!(submit.submission, job.submission + 1);
                }
                None => prop_assert_eq!(submit.submission, 0),
            }
        }
    }

    #[test]
    fn r9_a_replica_is_submitted_as_a_whole_or_not_at_all(run in any_run()) {
        let plan = plan_of(&run);
        let submitted: BTreeSet<_> = plan.submit.iter().map(|submit| submit.replica).collect();
        for replica in run.replicas.iter().filter(|replica| submitted.contains(&replica.num)) {
            let nums: BTreeSet<_> =
                plan.submit.iter().filter(|s| s.replica == replica.num).map(|s| s.job).collect();
            prop_assert_eq!(nums.len(), replica.jobs.len());
            prop_assert!(plan.end.iter().all(|end| end.replica != replica.num), "ended and begun at once");
        }
    }

    #[test]
    fn r11_a_retry_respects_the_policy_the_limits_and_its_delay(run in prop_oneof![any_run(), retried_run()]) {
        let plan = plan_of(&run);
        let fresh = run.status == run::Status::Pending && run.attempt == 0;
        if fresh {
            return Ok(());
        }
        let submitted: BTreeSet<_> = plan.submit.iter().map(|submit| submit.replica).collect();
        for replica in run.replicas.iter().filter(|replica| submitted.contains(&replica.num)) {
            let scaled_down = |job: &JobView| {
                ending(job).is_some_and(|ending| ending.reason() == TerminationReason::ScaledDown)
            };
            // A replica that was scaled down and is started again is no retry.
            if !replica.jobs.iter().any(scaled_down) {
                prop_assert_eq!(retry_problem(&run, replica), None);
            }
        }
        // Only a failure of the job itself delays the next submission.
        let failed_itself = |job: &JobView| {
            ending(job).is_some_and(|ending| {
                ending.detail() != Some(job::TerminationDetail::RegionFull)
                    && !matches!(
                        ending.reason(),
                        TerminationReason::DoneByRunner | TerminationReason::TerminatedByServer
                    )
            })
        };
        let waits = run.replicas.iter().flat_map(|replica| &replica.jobs).any(failed_itself);
        if run.status == run::Status::Pending && waits && !plan.submit.is_empty() {
            prop_assert!(NOW.since(run.pending_since) >= Span::secs(1));
        }
    }

    #[test]
    fn r12_nothing_is_submitted_once_the_run_has_a_reason_to_end(run in any_run()) {
        let plan = plan_of(&run);
        let ending = run.status == run::Status::Terminating || run.status.is_final();
        if ending || plan.status == run::Status::Terminating {
            prop_assert!(plan.submit.is_empty());
        }
        let by_user = run.ending.as_ref().is_some_and(|ending| ending.reason().is_by_user());
        if run.status == run::Status::Terminating && by_user {
            prop_assert!(plan.status == run::Status::Terminating || plan.status == run::Status::Terminated);
        }
    }

    #[test]
    fn r20_the_derived_status_depends_on_the_jobs_alone(run in any_run(), other in any_run(), round in 0..4_usize) {
        let verdict = derive(&run, NOW).status;
        let mut same = RunView { status: other.status, attempt: other.attempt, start: other.start, ..run.clone() };
        same.ending = other.ending;
        same.pending_since = other.pending_since;
        let len = same.replicas.len();
        if len > 0 {
            same.replicas.rotate_left(round % len);
        }
        for replica in &mut same.replicas {
            replica.jobs.reverse();
        }
        prop_assert_eq!(derive(&same, NOW).status, verdict);
    }

    #[test]
    fn r20_the_rules_are_tried_in_the_documented_order(run in any_run()) {
        let scaled = |replica: &ReplicaView| {
            replica.jobs.iter().any(|job| ending(job).is_some_and(|e| e.reason() == TerminationReason::ScaledDown))
        };
        let derived = derive(&run, NOW);
        let is_retry = |replica: &ReplicaView| derived.retries.iter().any(|retry| retry.num == replica.num);
        let counts = |wanted: &[job::Status]| {
            let live = run.replicas.iter().filter(|r| !scaled(r) && !is_retry(r));
            live.flat_map(|r| &r.jobs).any(|job| wanted.contains(&job.state.status()))
        };
        let runs = counts(&[job::Status::Running]);
        let provisions = counts(&[job::Status::Provisioning, job::Status::Pulling]);
        let waits = counts(&[job::Status::Submitted]);
        match derived.status {
            DerivedStatus::Runs => prop_assert!(runs),
            DerivedStatus::Provisions => prop_assert!(provisions && !runs),
            DerivedStatus::Waits => prop_assert!(waits && !provisions && !runs),
            DerivedStatus::Idle(_) => prop_assert!(!waits && !provisions && !runs),
            DerivedStatus::End(ending) => {
                let live = runs || provisions || waits;
                let well = ending.reason() == run::TerminationReason::AllJobsDone;
                prop_assert!(!(well && live) || run.stop_criteria == StopCriteria::MasterDone);
            }
        }
    }

    #[test]
    fn r21_a_scaled_down_replica_changes_nothing(run in any_run(), final_ in any::<bool>()) {
        let verdict = derive(&run, NOW).status;
        let scaled = job::Ending::new(TerminationReason::ScaledDown);
        let state = if final_ { SubmissionState::Final(scaled) } else { SubmissionState::Terminating(scaled) };
        let job = JobView { num: 0, submission: 0, state, attempts: 1, failures: 1, failing_since: Some(NOW) };
        let mut more = run.clone();
        more.replicas.push(ReplicaView { num: 99, role: ReplicaRole::Full, jobs: vec![job] });
        prop_assert_eq!(derive(&more, NOW).status, verdict);
    }
}
