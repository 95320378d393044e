//! Simulated environment of managed jobs: controllable runs, a database that keeps what is written, and checks of the
//! guarantees.

use std::collections::BTreeMap;

use windlass_model::{
    decide::managed_jobs::{
        AttemptAction, AttemptObservation, CancelRequest, Decision, ManagedJobView, TaskTransition, TaskView,
        classify_end::NodeEnd,
        decide, internal_error,
        slots::{SlotLimits, SlotRequest, SlotUsage, apply_grant, grant_slots},
    },
    id::ProjectId,
    job::TerminationReason as Reason,
    managed_job::{
        self, ScheduleEvent, ScheduleState, Status,
        plan::ManagedJobPlan,
        record::{NodeLocation, TaskRecord},
    },
    money::Price,
    skypilot::{self, CommandLineValues, Phase},
    time::{Span, Timestamp},
};

/// Returns the time at this number of seconds into the test.
pub(crate) fn at(secs: i64) -> Timestamp {
    Timestamp::from_secs(1_000_000 + secs)
}

pub(crate) fn plan(text: &str) -> ManagedJobPlan {
    skypilot::parse_task_file(text, &CommandLineValues::default()).unwrap().plan
}

pub(crate) fn place(name: &str) -> Option<NodeLocation> {
    Some(NodeLocation { place: name.to_owned(), instance: Some(format!("{name}-1")) })
}

pub(crate) fn ended(reason: Reason, exit_code: Option<i32>) -> NodeEnd {
    NodeEnd {
        reason,
        detail: None,
        exit_code,
        phase: Some(Phase::Run),
        is_preempted: false,
        location: None,
        message: None,
    }
}

pub(crate) fn ended_observation(end: NodeEnd) -> AttemptObservation {
    AttemptObservation::Over { ends: vec![end], placement: None }
}

pub(crate) fn success() -> AttemptObservation {
    ended_observation(ended(Reason::DoneByRunner, Some(0)))
}

pub(crate) fn failure(code: i32) -> AttemptObservation {
    ended_observation(ended(Reason::ContainerExitedWithError, Some(code)))
}

pub(crate) fn loss() -> AttemptObservation {
    ended_observation(ended(Reason::InterruptedByNoCapacity, None))
}

pub(crate) fn no_capacity() -> AttemptObservation {
    ended_observation(ended(Reason::FailedToStartDueToNoCapacity, None))
}

/// One job in its environment.
pub(crate) struct ManagedJobFixture {
    pub(crate) plan: ManagedJobPlan,
    pub(crate) records: Vec<TaskRecord>,
    /// Runs of all attempts.
    pub(crate) runs: BTreeMap<(u32, u32), AttemptObservation>,
    pub(crate) cancel: Option<CancelRequest>,
    pub(crate) now: Timestamp,
    pub(crate) log: Vec<(u32, TaskTransition, Timestamp)>,
    pub(crate) acts: Vec<(u32, AttemptAction)>,
    pub(crate) spot_capacity: bool,
    /// Whether other jobs wait for launch slots.
    pub(crate) contended_slots: bool,
    pub(crate) limits: SlotLimits,
    /// Price of each candidate, the same for all tasks.
    pub(crate) prices: Vec<Option<Price>>,
    pub(crate) schedules: Vec<ScheduleState>,
}

impl ManagedJobFixture {
    /// Creates a submitted job.
    pub(crate) fn new(text: &str) -> Self {
        let plan = plan(text);
        let mut record = TaskRecord::default();
        assert!(record.schedule(ScheduleEvent::Submitted));
        let records = vec![record; plan.tasks.len()];
        let limits = SlotLimits { max_launching: 8, max_alive: 8 };
        Self {
            plan,
            records,
            runs: BTreeMap::new(),
            cancel: None,
            now: at(0),
            log: vec![],
            acts: vec![],
            spot_capacity: false,
            contended_slots: false,
            limits,
            prices: vec![],
            schedules: vec![ScheduleState::Waiting],
        }
    }

    fn view(&self) -> ManagedJobView<'_> {
        let tasks = self.records.iter().enumerate().map(|(task, record)| TaskView {
            record: record.clone(),
            observation: self
                .runs
                .get(&(task as u32, record.attempt))
                .cloned()
                .unwrap_or(AttemptObservation::Nothing),
            has_spot_capacity: self.spot_capacity,
            has_new_capacity: false,
            progress: None,
            releasing_since: None,
            has_contended_slots: self.contended_slots,
            prices: self.prices.clone(),
        });
        ManagedJobView { plan: &self.plan, cancel: self.cancel, tasks: tasks.collect(), jitter: 0.5 }
    }

    pub(crate) fn decide(&self) -> Decision {
        decide(&self.view(), self.now)
    }

    /// Performs the decision. Without `write` the server crashed after it acted and before it wrote.
    pub(crate) fn carry_out(&mut self, decision: &Decision, write: bool) {
        for task in &decision.tasks {
            if let Some(act) = &task.action {
                self.act(task.task, act);
            }
            if !write {
                continue;
            }
            for moved in &task.transitions {
                self.log.push((task.task, moved.clone(), self.now));
            }
            let record = &task.record;
            assert!(record.is_legal(), "task {}: {} beside {}", task.task, record.schedule, record.status);
            self.records[task.task as usize] = record.clone();
        }
        if write && self.schedules.last() != Some(&decision.schedule) {
            self.schedules.push(decision.schedule);
        }
    }

    fn act(&mut self, task: u32, act: &AttemptAction) {
        self.acts.push((task, act.clone()));
        match act {
            AttemptAction::Submit(submit) => {
                for ((other, attempt), seen) in &self.runs {
                    let live = !matches!(seen, AttemptObservation::Over { .. } | AttemptObservation::Nothing);
                    assert!(
                        *other != task || *attempt == submit.attempt || !live,
                        "m6: attempt {} of task {task} beside a live attempt {attempt}",
                        submit.attempt
                    );
                }
                self.runs
                    .entry((task, submit.attempt))
                    .or_insert(AttemptObservation::Queued { since: self.now, message: None });
            }
            AttemptAction::Stop(stop) => {
                let run = self.runs.entry((task, stop.attempt)).or_insert(AttemptObservation::Nothing);
                if !matches!(run, AttemptObservation::Over { .. } | AttemptObservation::Nothing) {
                    *run = AttemptObservation::Ending;
                }
            }
        }
    }

    /// Performs one pass, and grants the free slots afterwards.
    pub(crate) fn pass(&mut self) -> Decision {
        let decision = self.decide();
        self.carry_out(&decision, true);
        self.claim(&decision);
        decision
    }

    pub(crate) fn in_use(&self) -> SlotUsage {
        let launching = self.records.iter().filter(|record| record.schedule.holds_launch_slot()).count();
        let alive = windlass_model::decide::managed_jobs::has_launched(&self.records)
            && !self.records.iter().all(|record| record.schedule == ScheduleState::Done);
        SlotUsage { launching: launching as u32, alive: u32::from(alive) }
    }

    pub(crate) fn claim(&mut self, decision: &Decision) {
        let in_use = self.in_use();
        let queue: Vec<SlotRequest> = decision
            .waiting_for_slot
            .iter()
            .map(|task| SlotRequest {
                project: ProjectId(uuid::Uuid::nil()),
                weight: 1,
                job: 1,
                task: *task,
                priority: 0,
                has_alive_slot: in_use.alive > 0,
            })
            .collect();
        for waiting in grant_slots(&queue, self.limits, in_use, None) {
            let record = &self.records[waiting.task as usize];
            let from = record.status;
            let (next, event) = apply_grant(record, self.now).unwrap();
            assert!(next.is_legal());
            if from != next.status {
                let moved = TaskTransition {
                    from,
                    to: next.status,
                    event,
                    source: None,
                    rule: None,
                    message: "slot".to_owned(),
                };
                self.log.push((waiting.task, moved, self.now));
            }
            self.records[waiting.task as usize] = next;
            self.schedules.push(ScheduleState::Launching);
        }
    }

    pub(crate) fn internal_error(&mut self, task: u32) {
        let (record, moved) =
            internal_error::apply_internal_error(&self.records[task as usize], "a bug", 0.5, self.now);
        assert!(record.is_legal(), "{} beside {}", record.schedule, record.status);
        self.records[task as usize] = record;
        self.log.extend(moved.map(|moved| (task, moved, self.now)));
    }

    pub(crate) fn wait(&mut self, secs: i64) -> &mut Self {
        self.now = self.now + Span::secs(secs);
        self
    }

    /// Sets the observation of the newest attempt, and runs passes until nothing changes.
    pub(crate) fn observe(&mut self, task: u32, seen: AttemptObservation) -> &mut Self {
        let attempt = self.records[task as usize].attempt;
        self.runs.insert((task, attempt), seen);
        self.run_until_stable()
    }

    /// Runs passes until nothing changes; stopped runs end.
    pub(crate) fn run_until_stable(&mut self) -> &mut Self {
        for _ in 0..20 {
            let decision = self.pass();
            let ending: Vec<_> = self
                .runs
                .iter()
                .filter(|(_, seen)| **seen == AttemptObservation::Ending)
                .map(|(key, _)| *key)
                .collect();
            for key in &ending {
                self.runs.insert(*key, ended_observation(ended(Reason::TerminatedByServer, None)));
            }
            if decision.tasks.is_empty() && decision.waiting_for_slot.is_empty() && ending.is_empty() {
                return self;
            }
        }
        panic!("never settles: {:?}", self.decide());
    }

    /// Runs a few passes, while slots may be scarce.
    pub(crate) fn run_passes(&mut self) {
        for _ in 0..6 {
            self.pass();
        }
    }

    pub(crate) fn flush_twice(&mut self) {
        self.pass();
        self.pass();
    }

    pub(crate) fn running(&mut self, task: u32, at_place: &str) -> &mut Self {
        self.observe(task, AttemptObservation::Running { placement: place(at_place) })
    }

    pub(crate) fn statuses(&self) -> Vec<&'static str> {
        self.records.iter().map(|record| record.status.as_str()).collect()
    }

    pub(crate) fn status(&self) -> Status {
        self.decide().status
    }

    pub(crate) fn cancel(&mut self) -> &mut Self {
        self.cancel = Some(CancelRequest { grace: None });
        self.run_until_stable()
    }

    /// Returns the last submission.
    pub(crate) fn last_submit(&self) -> windlass_model::decide::managed_jobs::SubmitAttempt {
        let submits = self.acts.iter().rev().find_map(|(_, act)| match act {
            AttemptAction::Submit(submit) => Some(submit.clone()),
            AttemptAction::Stop(_) => None,
        });
        submits.unwrap()
    }

    pub(crate) fn path(&self, task: u32) -> String {
        let mut path = vec!["PENDING".to_owned()];
        path.extend(
            self.log
                .iter()
                .filter(|(of, moved, _)| *of == task && moved.from != moved.to)
                .map(|(_, m, _)| m.to.to_string()),
        );
        path.join(" ")
    }

    /// Returns the time in RUNNING from the event log alone.
    pub(crate) fn running_by_log(&self, task: u32) -> Span {
        let mut total = 0;
        let mut since = None;
        for (_, moved, when) in self.log.iter().filter(|(of, ..)| *of == task) {
            if moved.to == Status::Running && moved.from != Status::Running {
                since = Some(*when);
            } else if moved.from == Status::Running && moved.to != Status::Running {
                total += since.take().map_or(0, |since: Timestamp| when.since(since).0);
            }
        }
        Span(total + since.map_or(0, |since| self.now.since(since).0))
    }
}

/// Checks that every transition of the log is one that the state machine permits.
pub(crate) fn check_log(fixture: &ManagedJobFixture) {
    for (task, moved, _) in &fixture.log {
        let after = managed_job::step(moved.from, moved.event).status_after(moved.from);
        assert_eq!(after, Some(moved.to), "task {task}: {moved:?}");
    }
}
