//! Complete histories of runs: random jobs, random stops, random pauses, and the invariants over all of it.

use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;
use windlass_model::{
    decide::runs::{
        JobView, Plan, ReplicaRole, ReplicaStart, ReplicaView, RunView, ScheduleState, StopCriteria,
        SubmissionState, decide,
    },
    job::{self, TerminationReason},
    retry, run, schedule,
    schedule::CronSchedule,
    time::{Span, Timestamp},
};

use crate::runs_fixture::NOW;

/// An event between two passes of the run.
#[derive(Clone, Copy, Debug)]
enum RunEvent {
    /// A job advances, or ends for this reason.
    Job {
        which: usize,
        end: Option<TerminationReason>,
    },
    /// Time passes without a pass.
    Pause(i64),
    Stop,
    Abort,
}

/// A run, as the database would hold it, with all its submissions.
struct RunFixture {
    run: RunView,
    now: Timestamp,
    submitted: BTreeMap<(u32, u32), Vec<u32>>,
    fired: Vec<Timestamp>,
    stopped: bool,
    finals: Vec<run::Status>,
}

impl RunFixture {
    fn new(replicas: u32, jobs: u32, retry: Option<retry::Policy>, crons: Option<CronSchedule>) -> Self {
        let next = crons.as_ref().and_then(|crons| schedule::next_slot(crons, None, NOW));
        let mut fixture = Self {
            run: RunView {
                status: run::Status::Pending,
                ending: None,
                submitted_at: NOW,
                attempt: 0,
                pending_since: NOW,
                retry_delay: retry::DELAY_FIRST,
                schedule: crons.map(|crons| ScheduleState { crons, next_slot: next, last_slot: None }),
                retry,
                stop_criteria: StopCriteria::AllDone,
                has_gateway_failed: false,
                is_rolling_back: false,
                requested_stop: None,
                replicas: Vec::new(),
                start: (0..replicas).map(|replica| ReplicaStart { replica, jobs }).collect(),
                surplus: Vec::new(),
            },
            now: NOW,
            submitted: BTreeMap::new(),
            fired: Vec::new(),
            stopped: false,
            finals: Vec::new(),
        };
        fixture.run_pass();
        fixture
    }

    /// Runs one pass of the run pipeline: decides, and applies the whole plan.
    fn run_pass(&mut self) {
        let plan = decide(&self.run, self.now);
        let before = self.run.status;
        assert!(!self.stopped || plan.submit.is_empty(), "r12: submitted after the stop");
        assert!(!before.is_final() || plan.status == before, "r3: a final run moved");
        self.apply(plan);
        if self.run.status == run::Status::Pending && before != run::Status::Pending {
            self.run.pending_since = self.now;
        }
        if self.run.status.is_final() && before != self.run.status {
            self.finals.push(self.run.status);
        }
    }

    fn apply(&mut self, plan: Plan) {
        self.run.status = plan.status;
        self.run.ending = plan.ending;
        self.run.attempt = plan.attempt;
        if let Some(schedule) = &mut self.run.schedule {
            schedule.next_slot = plan.next_triggered_at;
            if plan.last_slot != schedule.last_slot {
                schedule.last_slot = plan.last_slot;
                self.fired.extend(plan.last_slot);
            }
        }
        for end in plan.end {
            let job = self.job(end.replica, end.job).unwrap();
            assert!(!job.state.status().is_final());
            job.state = SubmissionState::Terminating(end.ending);
        }
        for submit in plan.submit {
            self.submitted.entry((submit.replica, submit.job)).or_default().push(submit.submission);
            let fresh = self.run.attempt == 0 && self.fired.len() > 1;
            let (replica, num, submission) = (submit.replica, submit.job, submit.submission);
            match self.job(replica, num) {
                Some(job) => {
                    assert!(job.state.status().is_final(), "r6: two submissions alive");
                    let tries = if fresh { 1 } else { job.attempts + 1 };
                    let failures = if fresh { 0 } else { job.failures };
                    let failing_since = job.failing_since.filter(|_| !fresh);
                    *job = JobView {
                        submission,
                        state: SubmissionState::Submitted,
                        attempts: tries,
                        failures,
                        failing_since,
                        ..*job
                    };
                }
                None => self.add(
                    replica,
                    JobView {
                        num,
                        submission,
                        state: SubmissionState::Submitted,
                        attempts: 1,
                        failures: 0,
                        failing_since: None,
                    },
                ),
            }
        }
    }

    fn job(&mut self, replica: u32, num: u32) -> Option<&mut JobView> {
        let replica = self.run.replicas.iter_mut().find(|r| r.num == replica)?;
        replica.jobs.iter_mut().find(|job| job.num == num)
    }

    fn add(&mut self, num: u32, job: JobView) {
        match self.run.replicas.iter_mut().find(|replica| replica.num == num) {
            Some(replica) => replica.jobs.push(job),
            None => self.run.replicas.push(ReplicaView { num, role: ReplicaRole::Full, jobs: vec![job] }),
        }
    }

    fn apply_event(&mut self, transition: RunEvent) {
        match transition {
            RunEvent::Job { which, end } => self.move_job(which, end),
            RunEvent::Pause(secs) => self.now = self.now + Span::secs(secs),
            RunEvent::Stop => self.stop(run::TerminationReason::StoppedByUser),
            RunEvent::Abort => self.stop(run::TerminationReason::AbortedByUser),
        }
    }

    /// Stops as the API does: acknowledged means stored.
    fn stop(&mut self, reason: run::TerminationReason) {
        if run::step(self.run.status, run::Event::StopRequested)
            .status_after(self.run.status)
            .unwrap()
            .is_final()
        {
            return;
        }
        self.run.status = run::Status::Terminating;
        self.run.ending = Some(run::Ending::new(reason, "a user said so"));
        self.stopped = true;
    }

    fn move_job(&mut self, which: usize, end: Option<TerminationReason>) {
        let now = self.now;
        let count = self.run.replicas.iter().map(|r| r.jobs.len()).sum::<usize>().max(1);
        let Some(job) = self.run.replicas.iter_mut().flat_map(|r| &mut r.jobs).nth(which % count) else {
            return;
        };
        let end = end.map(job::Ending::new);
        job.state = match (job.state.clone(), end) {
            (SubmissionState::Submitted, Some(end)) => SubmissionState::Terminating(end),
            (SubmissionState::Submitted, None) => SubmissionState::Provisioning,
            (SubmissionState::Provisioning, None) => SubmissionState::Pulling,
            (SubmissionState::Pulling, None) => SubmissionState::Running,
            (SubmissionState::Running, None) => SubmissionState::Terminating(job::Ending::exited(0)),
            (
                SubmissionState::Provisioning | SubmissionState::Pulling | SubmissionState::Running,
                Some(end),
            ) => {
                job.failures += 1;
                job.failing_since = job.failing_since.or(Some(now));
                SubmissionState::Terminating(end)
            }
            (SubmissionState::Terminating(ending) | SubmissionState::Final(ending), _) => {
                SubmissionState::Final(ending)
            }
        };
    }

    /// Runs without further disturbances: every job that ends is released, and passes run until the run is stable.
    fn run_until_stable(&mut self) {
        for _ in 0..200 {
            for which in 0..16 {
                self.move_job(which, None);
            }
            self.now = self.now + Span::secs(700);
            self.run_pass();
        }
    }

    fn check_numbers(&self) {
        for (job, numbers) in &self.submitted {
            let expected: Vec<u32> = (0..numbers.len() as u32).collect();
            assert_eq!(numbers, &expected, "r6: numbers of {job:?} have gaps");
        }
    }

    fn check_generations(&self) {
        for replica in 0..4 {
            let counts: BTreeSet<_> =
                self.submitted.iter().filter(|((r, _), _)| *r == replica).map(|(_, n)| n.len()).collect();
            assert!(counts.len() <= 1, "r9: generations of replica {replica} mix");
        }
    }
}

fn run_event(with_stops: bool) -> impl Strategy<Value = RunEvent> {
    let end = prop::option::weighted(
        0.4,
        prop::sample::select(
            &[
                TerminationReason::ContainerExitedWithError,
                TerminationReason::FailedToStartDueToNoCapacity,
                TerminationReason::InterruptedByNoCapacity,
                TerminationReason::InstanceUnreachable,
                TerminationReason::DoneByRunner,
            ][..],
        ),
    );
    let stops = u32::from(with_stops);
    prop_oneof![
        20 => (0..12_usize, end).prop_map(|(which, end)| RunEvent::Job { which, end }),
        8 => (1..900_i64).prop_map(RunEvent::Pause),
        stops => Just(RunEvent::Stop),
        stops => Just(RunEvent::Abort),
    ]
}

fn policy() -> impl Strategy<Value = Option<retry::Policy>> {
    prop::option::weighted(0.8, (600..20_000_i64, 2..30_u32)).prop_map(|given| {
        given.map(|(secs, max_total)| retry::Policy {
            duration: Span::secs(secs),
            max_total,
            ..retry::Policy::always()
        })
    })
}

#[derive(Clone, Debug)]
struct RunScenario {
    replicas: u32,
    jobs: u32,
    retry: Option<retry::Policy>,
    happenings: Vec<RunEvent>,
}

fn scenario() -> impl Strategy<Value = RunScenario> {
    (1..4_u32, 1..4_u32, policy(), prop::collection::vec(run_event(true), 1..120))
        .prop_map(|(replicas, jobs, retry, happenings)| RunScenario { replicas, jobs, retry, happenings })
}

fn run_scenario(life: RunScenario) -> RunFixture {
    let mut fixture = RunFixture::new(life.replicas, life.jobs, life.retry, None);
    for transition in life.happenings {
        fixture.apply_event(transition);
        fixture.run_pass();
    }
    fixture.run_until_stable();
    fixture
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 60, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn r2_every_run_reaches_a_final_status_exactly_once(life in scenario()) {
        let fixture = run_scenario(life);
        prop_assert!(fixture.run.status.is_final(), "still {}", fixture.run.status);
        prop_assert_eq!(fixture.finals.len(), 1);
    }

    #[test]
    fn r6_submission_numbers_have_no_gaps_over_the_history_of_a_run(life in scenario()) {
        run_scenario(life).check_numbers();
    }

    #[test]
    fn r9_submissions_of_different_rounds_never_mix_within_a_replica(life in scenario()) {
        run_scenario(life).check_generations();
    }

    #[test]
    fn r12_a_stopped_run_submits_nothing_more_and_ends_terminated(life in scenario()) {
        // Every pass asserts that nothing is submitted after the stop.
        let fixture = run_scenario(life);
        if fixture.stopped {
            prop_assert_eq!(fixture.run.status, run::Status::Terminated);
        }
    }

    #[test]
    fn r18_no_slot_fires_twice_and_only_a_running_execution_skips_slots(
        happenings in prop::collection::vec(run_event(false), 1..200),
    ) {
        let crons = CronSchedule::parse(&["*/10 * * * *", "3 * * * *"]).unwrap();
        let mut fixture = RunFixture::new(1, 2, None, Some(crons.clone()));
        let mut busy_until = BTreeMap::new();
        for transition in happenings {
            fixture.apply_event(transition);
            fixture.run_pass();
            if let (Some(slot), false) = (fixture.fired.last(), fixture.run.status == run::Status::Pending) {
                // Covered up to the pass that returned the run to pending.
                busy_until.insert(*slot, None);
            } else if let Some(slot) = fixture.fired.last() {
                busy_until.entry(*slot).and_modify(|end| _ = end.get_or_insert(fixture.now));
            }
        }
        let mut slot = crons.next_after(NOW);
        let mut fired = fixture.fired.iter();
        let mut expected = fired.next();
        let mut covered_to = NOW;
        while let Some(current) = slot.filter(|slot| *slot <= fixture.now) {
            if expected == Some(&current) {
                covered_to = busy_until[&current].unwrap_or(fixture.now);
                expected = fired.next();
            } else {
                prop_assert!(current <= covered_to, "{current} was lost; last execution ended {covered_to}");
            }
            slot = crons.next_after(current);
        }
        prop_assert_eq!(expected, None, "fired out of order, twice, or outside any slot");
    }
}
