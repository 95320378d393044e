//! One task in one pass.

mod launch;

use launch::START_ATTEMPTS_MAX;
use windlass_planted_bugs::{Bug, is_planted};

use super::{
    AttemptAction, AttemptObservation, StopAttempt, TaskDecision, TaskPermission, TaskTransition, TaskView,
    classify_end::{AttemptInstances, AttemptOutcome, classify_end},
    earliest, internal_error,
    slots::backoff,
};
use crate::{
    deadline_policy::{self, DeadlineTerms, Market},
    job::TerminationReason,
    managed_job::{
        Event, RecoverySource, ScheduleEvent, ScheduleState, Status,
        plan::{RecoveryStrategy, TaskPlan},
        record::{AttemptPhase, NodeLocation, TaskRecord},
    },
    time::{Span, Timestamp},
};

/// Exit code of a program that was killed.
const KILLED_CODE: i32 = 137;
/// Nodes that are not released by then may have leaked, which is reported.
const RELEASE_TIMEOUT: Span = Span::mins(30);
/// An attempt that ends within this time because of the agent counts as a failed start.
const EARLY_FAILURE: Span = Span::mins(1);
/// Restarts in a row without a delay of a program that fails within that time.
const IMMEDIATE_RESTARTS_MAX: u32 = 3;
/// Poll interval of a task that waits for spot capacity.
const SPOT_POLL_INTERVAL: Span = Span::secs(60);

/// Reason why a task is launched again after it failed.
enum RestartCause {
    /// This exit code is always retried, and not counted.
    ListedCode(i32),
    /// One of the restarts that the task may use for errors.
    Counted,
}

pub(super) struct TaskPass<'a> {
    plan: &'a TaskPlan,
    view: &'a TaskView,
    jitter: f64,
    now: Timestamp,
    record: TaskRecord,
    transitions: Vec<TaskTransition>,
    action: Option<AttemptAction>,
    due: Option<Timestamp>,
}

impl<'a> TaskPass<'a> {
    pub(super) fn new(plan: &'a TaskPlan, view: &'a TaskView, jitter: f64, now: Timestamp) -> Self {
        let record = view.record.clone();
        Self { plan, view, jitter, now, record, transitions: Vec::new(), action: None, due: None }
    }

    pub(super) fn finish(self, index: usize) -> (TaskRecord, Option<TaskDecision>, Option<Timestamp>) {
        let changed =
            self.record != self.view.record || self.action.is_some() || !self.transitions.is_empty();
        let decision = u32::try_from(index).ok().filter(|_| changed).map(|task| TaskDecision {
            task,
            record: self.record.clone(),
            transitions: self.transitions,
            action: self.action,
        });
        (self.record, decision, self.due)
    }

    pub(super) fn run(&mut self, permission: TaskPermission) {
        self.check_invariants();
        let mut graceful = None;
        match &permission {
            TaskPermission::Run | TaskPermission::Wait => {}
            TaskPermission::RunUntil(at) => self.recheck_at(*at),
            TaskPermission::End { why, graceful: grace, unclaimed } => {
                graceful = *grace;
                self.cancel(why, *unclaimed);
            }
        }
        match self.record.status {
            Status::Pending => self.plan_pending(&permission),
            Status::Starting | Status::Recovering => self.plan_launching(),
            Status::Running => self.plan_running(),
            Status::Cancelling => self.finish_cancel(graceful),
            Status::Succeeded
            | Status::Cancelled
            | Status::Failed
            | Status::FailedSetup
            | Status::FailedPrechecks
            | Status::FailedNoResource
            | Status::FailedController => self.clean_up(),
        }
    }

    /// Fails the task with an internal error if its state is invalid.
    fn check_invariants(&mut self) {
        if let AttemptObservation::Impossible { what } = &self.view.observation {
            self.fail(&format!("its run reports an invalid state: {what}"));
        } else if self.record.schedule == ScheduleState::Done && !self.record.status.is_final() {
            self.fail("the job is done, but this task is not");
        }
    }

    fn fail(&mut self, why: &str) {
        self.transitions.extend(internal_error::fail_controller(&mut self.record, why, self.now));
    }

    fn recheck_at(&mut self, at: Timestamp) {
        self.due = earliest(self.due, Some(at));
    }

    /// Applies an event and records it. An event that the state machine rejects is not written.
    fn transition(
        &mut self,
        event: Event,
        source: Option<RecoverySource>,
        message: impl Into<String>,
    ) -> bool {
        let from = self.record.status;
        let applied = self.record.apply(event, source.unwrap_or(RecoverySource::Failure), self.now);
        debug_assert!(applied.is_ok(), "{applied:?}");
        if applied.is_err() {
            return false;
        }
        let message = message.into();
        if matches!(event, Event::BackedOff | Event::Lost | Event::Interrupted) {
            self.record.last_failure = Some(message.clone());
        }
        self.transitions.push(TaskTransition {
            from,
            to: self.record.status,
            event,
            source,
            rule: None,
            message,
        });
        true
    }

    /// Ends the task. Its schedule state also ends once all of its nodes are released.
    fn end(&mut self, event: Event, message: impl Into<String>) {
        let message = message.into();
        if self.transition(event, None, message.clone()) && self.record.status != Status::Succeeded {
            self.record.failure_reason = Some(message);
        }
        if self.record.phase == AttemptPhase::Resolved {
            self.release_slots();
        } else if self.record.schedule == ScheduleState::Launching {
            self.record.schedule(ScheduleEvent::LaunchEnded);
        }
    }

    /// Releases the slots: all of the task's nodes are released.
    fn release_slots(&mut self) {
        if self.record.schedule == ScheduleState::Launching {
            self.record.schedule(ScheduleEvent::LaunchEnded);
        }
        let event = if self.record.schedule == ScheduleState::Alive {
            ScheduleEvent::Finished
        } else {
            ScheduleEvent::Stopped
        };
        self.record.schedule(event);
    }

    /// Returns whether the run of the newest attempt is gone for good.
    fn is_attempt_gone(&self) -> bool {
        match self.view.observation {
            AttemptObservation::Nothing | AttemptObservation::Over { .. } => true,
            AttemptObservation::Queued { .. }
            | AttemptObservation::Provisioning
            | AttemptObservation::Running { .. }
            | AttemptObservation::Ending => false,
            AttemptObservation::Unclear | AttemptObservation::Impossible { .. } => false,
        }
    }

    fn stop_attempt(&mut self, graceful: Option<Span>) {
        // A repeated request is harmless, and covers one that was lost.
        if self.record.attempt > 0 {
            self.action =
                Some(AttemptAction::Stop(StopAttempt { attempt: self.record.attempt, grace: graceful }));
        }
    }

    fn cancel(&mut self, why: &str, unclaimed: bool) {
        let never = matches!(self.record.schedule, ScheduleState::Inactive | ScheduleState::Waiting);
        match self.record.status {
            Status::Pending if never && unclaimed => self.end(Event::CancelledUnclaimed, why),
            Status::Pending | Status::Starting | Status::Running | Status::Recovering => {
                self.transition(Event::CancelRequested, None, why);
                self.record.failure_reason = Some(why.to_owned());
                if self.record.schedule == ScheduleState::Launching {
                    self.record.schedule(ScheduleEvent::LaunchEnded);
                }
            }
            Status::Cancelling
            | Status::Succeeded
            | Status::Cancelled
            | Status::Failed
            | Status::FailedSetup
            | Status::FailedPrechecks
            | Status::FailedNoResource
            | Status::FailedController => {}
        }
    }

    /// Sentence about a program that did not end within the time that the cancellation gave it.
    fn describe_forced_kill(&self, graceful: Option<Span>) -> Option<String> {
        let grace = graceful?.as_secs();
        let AttemptObservation::Over { ends, .. } = &self.view.observation else { return None };
        let was_killed = ends.iter().any(|end| {
            end.reason == TerminationReason::TerminatedByUser && end.exit_code == Some(KILLED_CODE)
        });
        was_killed.then(|| format!("its program was still running after {grace} s and was killed"))
    }

    /// Ends in CANCELLED, or in the final status that the task had reached before the cancellation. An attempt that
    /// ended and would have been retried is not a final status of the task.
    fn finish_cancel(&mut self, graceful: Option<Span>) {
        let why = self.record.failure_reason.clone().unwrap_or_else(|| "cancelled".to_owned());
        if self.record.phase == AttemptPhase::Resolved {
            return self.end(Event::Released, why);
        }
        if self.view.observation == AttemptObservation::Unclear {
            return;
        }
        if !self.is_attempt_gone() {
            return self.stop_attempt(graceful);
        }
        let counts = self.record.phase == AttemptPhase::Launched;
        self.record.phase = AttemptPhase::Resolved;
        let verdict = match &self.view.observation {
            AttemptObservation::Over { ends, .. } if counts => Some(classify_end(ends)),
            AttemptObservation::Over { .. }
            | AttemptObservation::Nothing
            | AttemptObservation::Queued { .. }
            | AttemptObservation::Provisioning => None,
            AttemptObservation::Running { .. }
            | AttemptObservation::Ending
            | AttemptObservation::Unclear
            | AttemptObservation::Impossible { .. } => None,
        };
        match verdict {
            Some(AttemptOutcome::Success) => {
                self.end(Event::Succeeded, "it succeeded before the cancellation took effect")
            }
            Some(AttemptOutcome::UserFailure { restartable: true, codes, .. })
                if self.find_restart(&codes).is_some() =>
            {
                self.end(Event::Released, why);
            }
            Some(AttemptOutcome::UserFailure { setup, message, .. }) => {
                let event = if setup { Event::SetupFailed } else { Event::Failed };
                self.end(event, format!("{message}, before the cancellation took effect"));
            }
            Some(AttemptOutcome::NeverFits { .. })
                if self.has_location_constraints() || self.has_other_candidate() =>
            {
                self.end(Event::Released, why);
            }
            Some(AttemptOutcome::NeverFits { message }) => self.end(Event::PrechecksFailed, message),
            Some(AttemptOutcome::NoCapacity { message })
                if self.should_give_up(self.record.launch_tries + 1) =>
            {
                self.end(Event::GaveUp, message);
            }
            Some(
                AttemptOutcome::NodesLost { .. }
                | AttemptOutcome::NoCapacity { .. }
                | AttemptOutcome::NotStarted { .. },
            ) => {
                self.end(Event::Released, why);
            }
            Some(AttemptOutcome::Stopped { .. }) => {
                let message = self.describe_forced_kill(graceful).map(|killed| format!("{why}; {killed}"));
                self.end(Event::Released, message.unwrap_or(why));
            }
            None => self.end(Event::Released, why),
        }
    }

    /// Keeps the slot of an ended task until its nodes are gone, and reports if they are not released.
    fn clean_up(&mut self) {
        if self.record.schedule == ScheduleState::Done {
            return;
        }
        if self.record.phase == AttemptPhase::Resolved || self.is_attempt_gone() {
            self.record.phase = AttemptPhase::Resolved;
            return self.release_slots();
        }
        self.stop_attempt(None);
        let stuck = self.view.releasing_since.filter(|since| self.now.since(*since) >= RELEASE_TIMEOUT);
        if stuck.is_some() {
            let placement = self.record.placement.as_ref().map(|placement| placement.place.clone());
            let place = placement.unwrap_or_else(|| "an unknown location".to_owned());
            self.fail(&format!("the nodes of attempt {} at {place} may have leaked", self.record.attempt));
        }
    }

    fn plan_pending(&mut self, permission: &TaskPermission) {
        let may_begin = matches!(permission, TaskPermission::Run | TaskPermission::RunUntil(_));
        match self.record.schedule {
            ScheduleState::Waiting if may_begin && self.plan.body.is_empty() => {
                self.transition(Event::EmptyRun, None, "there is nothing to run");
                self.end(Event::Succeeded, "there was nothing to run");
            }
            ScheduleState::AliveBackoff => {
                let over = self.record.next_retry_at.is_none_or(|at| at <= self.now);
                if over || self.view.has_new_capacity {
                    self.record.schedule(ScheduleEvent::BackoffOver);
                    self.record.next_retry_at = None;
                } else if let Some(at) = self.record.next_retry_at {
                    self.recheck_at(at);
                }
            }
            ScheduleState::Inactive
            | ScheduleState::Waiting
            | ScheduleState::Launching
            | ScheduleState::Alive
            | ScheduleState::AliveWaiting
            | ScheduleState::Done => {}
        }
    }

    fn plan_running(&mut self) {
        match &self.view.observation {
            AttemptObservation::Running { placement } => {
                if placement.is_some() && *placement != self.record.placement {
                    self.record.placement.clone_from(placement);
                }
                self.move_to_spot();
            }
            AttemptObservation::Over { ends, placement } => {
                if placement.is_some() {
                    self.record.placement.clone_from(placement);
                }
                self.attempt_ended(classify_end(ends));
            }
            AttemptObservation::Nothing => {
                self.record.phase = AttemptPhase::Resolved;
                if self.plan.recovery.strategy == RecoveryStrategy::None {
                    return self.end(Event::Failed, "nodes lost: its run no longer exists");
                }
                self.transition(
                    Event::Interrupted,
                    Some(RecoverySource::Restart),
                    "its run no longer exists",
                );
                self.record.schedule(ScheduleEvent::WantsLaunch);
            }
            AttemptObservation::Ending if is_planted(Bug::RecoverBeforeRelease) => {
                let machines = AttemptInstances::default();
                self.attempt_ended(AttemptOutcome::NodesLost { machines, message: "it ends".to_owned() });
            }
            AttemptObservation::Queued { .. }
            | AttemptObservation::Provisioning
            | AttemptObservation::Ending => {}
            // An observation that failed is no evidence against the task.
            AttemptObservation::Unclear | AttemptObservation::Impossible { .. } => {}
        }
    }

    /// Handles the end of the attempt of a RUNNING task.
    fn attempt_ended(&mut self, verdict: AttemptOutcome) {
        self.record.phase = AttemptPhase::Resolved;
        match verdict {
            AttemptOutcome::Success => self.end(Event::Succeeded, "the program exited successfully"),
            AttemptOutcome::UserFailure { setup, codes, restartable, message } => {
                match restartable.then(|| self.count_restart(&codes)).flatten() {
                    Some(why) => {
                        // Its nodes are healthy: the next attempt finds the results of setup there.
                        self.record.sought.clone_from(&self.record.placement);
                        let early = if self.ran_briefly() { self.record.early_failures + 1 } else { 0 };
                        self.recover(format!("{message}; {why}"));
                        self.delay_restart(early);
                    }
                    None => self.end(if setup { Event::SetupFailed } else { Event::Failed }, message),
                }
            }
            AttemptOutcome::Stopped { message } => self.run_stopped(&message),
            AttemptOutcome::NodesLost { machines, message } => self.nodes_lost(machines, &message),
            AttemptOutcome::NotStarted { message } => self.start_failed(&message),
            AttemptOutcome::NoCapacity { message } | AttemptOutcome::NeverFits { message } => {
                self.nodes_lost(AttemptInstances::default(), &message);
            }
        }
    }

    /// Handles nodes on which the agent could not run the program. That may be the fault of a node, but not several
    /// times in a row right after the start.
    fn start_failed(&mut self, message: &str) {
        let tries = if self.ran_briefly() { self.record.failed_starts + 1 } else { 0 };
        if tries >= START_ATTEMPTS_MAX {
            return self.end(Event::Failed, format!("failed to start {tries} times in a row: {message}"));
        }
        self.nodes_lost(AttemptInstances::default(), message);
        self.record.failed_starts = tries;
    }

    fn ran_briefly(&self) -> bool {
        self.record.last_recovered_at.is_none_or(|since| self.now.since(since) < EARLY_FAILURE)
    }

    /// Delays the restart of a program that fails again and again right after its start: restarts by exit code have no
    /// limit.
    fn delay_restart(&mut self, early_failures: u32) {
        self.record.early_failures = early_failures;
        if early_failures > IMMEDIATE_RESTARTS_MAX {
            let at = self.now + backoff(early_failures - IMMEDIATE_RESTARTS_MAX, self.jitter);
            // It gets no slot before that time.
            self.record.next_retry_at = Some(at);
            self.recheck_at(at);
        }
    }

    /// Returns why the failure is retried, and counts the restart if it must be counted; `None`: it is not retried.
    fn count_restart(&mut self, codes: &[i32]) -> Option<String> {
        Some(match self.find_restart(codes)? {
            RestartCause::ListedCode(code) => format!("exit code {code} is in `recover_on_exit_codes`"),
            RestartCause::Counted => {
                self.record.restarts_on_errors += 1;
                let (count, of) = (self.record.restarts_on_errors, self.plan.recovery.max_restarts_on_errors);
                format!("restart {count} of {of}")
            }
        })
    }

    /// Returns the restart that follows a failure with these exit codes; `None`: the task fails.
    fn find_restart(&self, codes: &[i32]) -> Option<RestartCause> {
        let recovery = &self.plan.recovery;
        let is_listed =
            |code: &i32| recovery.recover_on_exit_codes.iter().any(|known| i32::from(*known) == *code);
        let listed = codes.iter().copied().find(is_listed).map(RestartCause::ListedCode);
        let is_left = self.record.restarts_on_errors < recovery.max_restarts_on_errors;
        listed.or(is_left.then_some(RestartCause::Counted))
    }

    fn nodes_lost(&mut self, machines: AttemptInstances, message: &str) {
        if self.plan.recovery.strategy == RecoveryStrategy::None {
            return self.end(Event::Failed, format!("nodes lost: {message}"));
        }
        let placement = self.record.placement.clone();
        let away = self.avoid_locations(machines, placement);
        self.recover(format!("nodes lost: {message}{away}"));
    }

    /// Records the lost instances as the strategy requires, and returns a message. `known` is used if nothing is known
    /// about the instances. The remaining nodes of several are prepared and available at once: an instance next to them
    /// is requested before any other location.
    fn avoid_locations(&mut self, machines: AttemptInstances, known: Option<NodeLocation>) -> String {
        let AttemptInstances { lost: gone, remaining: left } = machines;
        let (gone, left) = if gone.is_empty() { (known.into_iter().collect(), None) } else { (gone, left) };
        let Some(first) = gone.first().cloned() else { return String::new() };
        match self.plan.recovery.strategy {
            RecoveryStrategy::EagerNextRegion => {
                // Avoiding the whole location would abandon the remaining nodes as well.
                let nearby = left.filter(|left| gone.iter().any(|gone| gone.place == left.place));
                for lost in gone {
                    if !self.record.blocked.contains(&lost) {
                        self.record.blocked.push(lost);
                    }
                }
                match nearby {
                    Some(left) => self.prefer_near(left),
                    None => format!("; avoiding {}", first.place),
                }
            }
            RecoveryStrategy::Failover => match left {
                Some(left) => self.prefer_near(left),
                None => {
                    let message = format!("; trying {} again first", first.place);
                    self.record.sought = Some(first);
                    message
                }
            },
            RecoveryStrategy::None => String::new(),
        }
    }

    fn prefer_near(&mut self, left: NodeLocation) -> String {
        let message = format!("; requesting a replacement in {}, next to the remaining nodes", left.place);
        self.record.sought = Some(left);
        message
    }

    fn recover(&mut self, message: String) {
        self.reset_candidates();
        self.record.failed_starts = 0;
        self.record.early_failures = 0;
        self.record.launch_tries = 0;
        self.record.waiting_since = None;
        self.transition(Event::Lost, Some(RecoverySource::Failure), message);
        self.record.schedule(ScheduleEvent::WantsLaunch);
    }

    /// Handles a run that was stopped directly: the same as a cancellation.
    fn run_stopped(&mut self, message: &str) {
        self.record.phase = AttemptPhase::Resolved;
        let why = format!("its run was stopped: {message}");
        self.transition(Event::CancelRequested, None, why.clone());
        self.end(Event::Released, why);
    }

    /// Returns the market that a deadline requires now; `None`: the task has no deadline.
    fn market_policy(&self) -> Option<(Option<Market>, deadline_policy::MarketRule)> {
        let deadline = self.plan.deadline?;
        let terms = DeadlineTerms::from(deadline);
        let began = self.record.submitted_at.unwrap_or(self.now);
        let seconds = |span: Span| span.0 as f64 / 1e6;
        let running = self.record.status == Status::Running;
        let done = self.view.progress.unwrap_or_else(|| self.record.job_duration(self.now));
        let phase = deadline_policy::DeadlineProgress {
            elapsed: seconds(self.now.since(began)),
            done: seconds(done),
            current_market: if running { self.record.market } else { None },
            has_spot_capacity: self.view.has_spot_capacity,
        };
        Some(deadline_policy::choose_market(terms, phase))
    }

    /// Moves the task to spot nodes by rule 3: it is ahead of schedule, and cheaper nodes are available.
    fn move_to_spot(&mut self) {
        let Some((_, rule @ deadline_policy::MarketRule::MoveToSpot)) = self.market_policy() else { return };
        if self.plan.recovery.strategy == RecoveryStrategy::None {
            return;
        }
        self.record.phase = AttemptPhase::Superseded;
        if self.transition(Event::Interrupted, Some(RecoverySource::Restart), rule.message())
            && let Some(moved) = self.transitions.last_mut()
        {
            moved.rule = Some(rule);
        }
        self.record.schedule(ScheduleEvent::WantsLaunch);
        self.reset_candidates();
        self.recheck_at(self.now);
    }

    /// Waits by choice: releases the slot, although no launch was refused.
    fn wait_for_spot(&mut self, why: &str) {
        self.transition(Event::BackedOff, None, why);
        self.record.schedule(ScheduleEvent::CapacityRefused);
        self.record.next_retry_at = Some(self.now + SPOT_POLL_INTERVAL);
        self.recheck_at(self.now + SPOT_POLL_INTERVAL);
    }
}
