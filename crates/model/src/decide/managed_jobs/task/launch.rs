//! Launching of a task: attempts, the candidates of a round, and the handling of failed launches.

use super::TaskPass;
use crate::{
    deadline_policy::Market,
    decide::managed_jobs::{
        AttemptAction, AttemptObservation, SubmitAttempt,
        classify_end::{AttemptInstances, AttemptOutcome, classify_end},
        slots::backoff,
    },
    managed_job::{
        Event, RecoverySource, ScheduleEvent, ScheduleState, Status,
        plan::RecoveryStrategy,
        record::{AttemptPhase, NodeLocation},
    },
    time::Span,
};

/// A run that waits longer for nodes is withdrawn, if its slot or another launch is of use meanwhile.
const QUEUE_TIMEOUT: Span = Span::secs(60);
const NO_NODES_MESSAGE: &str = "no nodes in time";
/// Launches in a row that had nodes and could not start on them, after which the task fails.
pub(super) const START_ATTEMPTS_MAX: u32 = 3;
/// Launches in a row for which a lost location is avoided, or preferred.
const LOCATION_ATTEMPTS_MAX: u32 = 3;

impl TaskPass<'_> {
    /// Acquires nodes for a task in STARTING or RECOVERING.
    pub(super) fn plan_launching(&mut self) {
        let has_slot = self.record.schedule == ScheduleState::Launching;
        match self.record.phase {
            AttemptPhase::Resolved if has_slot => self.number_attempt(),
            AttemptPhase::Resolved => {
                if let Some(at) = self.record.next_retry_at {
                    self.recheck_at(at);
                }
            }
            AttemptPhase::Superseded | AttemptPhase::Withdrawn => self.replace_attempt(has_slot),
            AttemptPhase::Launched if has_slot => self.plan_launched(),
            AttemptPhase::Launched => {}
        }
    }

    /// Waits for the old attempt to be gone before a new one starts.
    fn replace_attempt(&mut self, has_slot: bool) {
        if self.view.observation == AttemptObservation::Unclear {
            return;
        }
        if !self.is_attempt_gone() {
            return self.stop_attempt(None);
        }
        let withdrawn = self.record.phase == AttemptPhase::Withdrawn;
        self.record.phase = AttemptPhase::Resolved;
        if withdrawn {
            let why = self.record.last_failure.clone().unwrap_or_else(|| NO_NODES_MESSAGE.to_owned());
            self.launch_refused(&why, false);
        } else if has_slot {
            self.number_attempt();
        }
    }

    fn plan_launched(&mut self) {
        match &self.view.observation {
            AttemptObservation::Nothing => self.submit_run(),
            AttemptObservation::Queued { since, message: text } => {
                let at = *since + QUEUE_TIMEOUT;
                if !self.should_withdraw_queued() {
                    // It keeps its place in the queue; slots may become contended.
                } else if self.now >= at {
                    // Written first, stopped in the next pass: an end that we cause is never mistaken for another.
                    self.record.phase = AttemptPhase::Withdrawn;
                    let why = text.as_ref().map(|text| format!("{NO_NODES_MESSAGE}: {text}"));
                    self.record.last_failure = Some(why.unwrap_or_else(|| NO_NODES_MESSAGE.to_owned()));
                    self.recheck_at(self.now);
                } else {
                    self.recheck_at(at);
                }
            }
            AttemptObservation::Running { placement } => self.attempt_started(placement.clone()),
            AttemptObservation::Over { ends, placement } => {
                let verdict = classify_end(ends);
                let placement = placement.clone();
                match verdict {
                    AttemptOutcome::Success | AttemptOutcome::UserFailure { .. } => {
                        self.attempt_started(placement);
                        self.attempt_ended(verdict);
                    }
                    AttemptOutcome::NodesLost { machines, message } => {
                        self.lost_at_launch(placement, machines, message)
                    }
                    AttemptOutcome::NoCapacity { message } => self.launch_refused(&message, false),
                    AttemptOutcome::NotStarted { message } => self.launch_refused(&message, true),
                    // The location constraint may be the reason why nothing fits.
                    AttemptOutcome::NeverFits { .. } if self.has_location_constraints() => {
                        self.lift_location_constraints()
                    }
                    AttemptOutcome::NeverFits { message } => self.rule_out_candidate(&message),
                    AttemptOutcome::Stopped { message } => self.run_stopped(&message),
                }
            }
            AttemptObservation::Provisioning
            | AttemptObservation::Ending
            | AttemptObservation::Unclear
            | AttemptObservation::Impossible { .. } => {}
        }
    }

    /// Returns whether something is gained when an attempt stops waiting in the queue: others wait for its launch slot,
    /// another launch may fit elsewhere, or the launches of the task are limited, so that it must fail at some time.
    fn should_withdraw_queued(&self) -> bool {
        let recovery = &self.plan.recovery;
        self.view.has_contended_slots
            || self.has_other_candidate()
            || self.has_location_constraints()
            || self.plan.deadline.is_some()
            || recovery.max_launch_tries.is_some()
            || recovery.max_launch_wait.is_some()
    }

    /// Handles nodes that were lost before they accepted the task, or between two passes.
    fn lost_at_launch(
        &mut self,
        placement: Option<NodeLocation>,
        machines: AttemptInstances,
        message: String,
    ) {
        if self.record.status == Status::Recovering {
            // A task without recovery ends the same as a running one.
            if self.plan.recovery.strategy == RecoveryStrategy::None {
                self.attempt_started(placement);
                return self.attempt_ended(AttemptOutcome::NodesLost { machines, message });
            }
            self.transition(Event::Lost, Some(RecoverySource::Failure), format!("nodes lost: {message}"));
            let known = placement.or_else(|| self.record.placement.clone());
            self.avoid_locations(machines, known);
        } else {
            self.avoid_locations(machines, placement);
        }
        // Losing nodes is not a lack of capacity: the next launch need not wait, unless it happens repeatedly.
        let tries = self.record.launch_tries + 1;
        if tries >= LOCATION_ATTEMPTS_MAX || self.should_give_up(tries) {
            return self.launch_refused(&message, false);
        }
        self.record.launch_tries = tries;
        self.record.waiting_since = self.record.waiting_since.or(Some(self.now));
        self.record.phase = AttemptPhase::Resolved;
        self.number_attempt();
    }

    fn attempt_started(&mut self, placement: Option<NodeLocation>) {
        let recovering = self.record.status == Status::Recovering;
        let event = if recovering { Event::Recovered } else { Event::Started };
        self.record.placement = placement.or_else(|| self.record.placement.clone());
        let attempt = self.record.attempt;
        self.transition(event, None, format!("attempt {attempt} started on its nodes"));
        self.record.schedule(ScheduleEvent::LaunchEnded);
    }

    /// Numbers the next attempt. The next pass submits it.
    fn number_attempt(&mut self) {
        if self.record.next_retry_at.is_some_and(|at| at > self.now) {
            return;
        }
        if self.has_launch_timed_out() {
            return self.end(Event::GaveUp, "no nodes within `max_launch_wait`");
        }
        let market = match self.market_policy() {
            None => None,
            Some((Some(market), _)) => Some(market),
            Some((None, rule)) => return self.wait_for_spot(rule.message()),
        };
        self.record.candidate = self.next_candidate().unwrap_or_default();
        // The number is written before the run is submitted, so that the next pass knows which run to find and to stop.
        self.record.attempt += 1;
        self.record.phase = AttemptPhase::Launched;
        self.record.market = market.or(self.requested_market());
        self.recheck_at(self.now);
    }

    /// Submits the run of the newest attempt, or finds it if it was submitted before.
    fn submit_run(&mut self) {
        let market = self.plan.deadline.and(self.record.market);
        self.action = Some(AttemptAction::Submit(SubmitAttempt {
            attempt: self.record.attempt,
            candidate: self.record.candidate,
            market,
            avoid: self.record.blocked.clone(),
            prefer: self.record.sought.clone(),
        }));
    }

    fn requested_market(&self) -> Option<Market> {
        let candidate =
            usize::try_from(self.record.candidate).ok().and_then(|index| self.plan.candidates.get(index));
        let spot = candidate.and_then(|candidate| candidate.spot);
        Some(if spot == Some(true) { Market::Spot } else { Market::OnDemand })
    }

    /// Returns whether the number of refused launches, or the wait so far, reached the limit of the task.
    pub(super) fn should_give_up(&self, tries: u32) -> bool {
        self.plan.recovery.max_launch_tries.is_some_and(|most| tries >= most) || self.has_launch_timed_out()
    }

    fn has_launch_timed_out(&self) -> bool {
        match (self.plan.recovery.max_launch_wait, self.record.waiting_since) {
            (Some(most), Some(since)) => self.now.since(since) >= Span::secs(most),
            (_, _) => false,
        }
    }

    /// Handles a failed launch: the next candidate, another location, or a wait that releases the slot.
    fn launch_refused(&mut self, message: &str, broken: bool) {
        self.record.phase = AttemptPhase::Resolved;
        if !broken {
            self.mark_candidate_tried();
            if self.next_candidate().is_some() {
                return self.number_attempt();
            }
        }
        self.reset_candidates();
        self.record.launch_tries += 1;
        self.record.waiting_since = self.record.waiting_since.or(Some(self.now));
        let tries = self.record.launch_tries;
        if broken && tries >= START_ATTEMPTS_MAX {
            return self
                .end(Event::PrechecksFailed, format!("failed to start {tries} times in a row: {message}"));
        }
        if self.should_give_up(tries) {
            return self.end(Event::GaveUp, format!("gave up after {tries} launch attempts: {message}"));
        }
        if self.lift_one_constraint() {
            return self.number_attempt();
        }
        self.transition(Event::BackedOff, None, message);
        self.record.schedule(ScheduleEvent::CapacityRefused);
        // No wait extends beyond `max_launch_wait`.
        let bound = self.plan.recovery.max_launch_wait.zip(self.record.waiting_since);
        let last = bound.map(|(most, since)| since + Span::secs(most));
        let at = self.now + backoff(tries, self.jitter);
        let at = last.map_or(at, |last| at.min(last));
        self.record.next_retry_at = Some(at);
        self.recheck_at(at);
    }

    /// Returns the next candidate: the cheapest of those not tried in this round, or the first if the file specifies
    /// the order. A candidate that nothing fits now has no price and comes last.
    fn next_candidate(&self) -> Option<u32> {
        let count = u32::try_from(self.plan.candidates.len().max(1)).unwrap_or(u32::MAX);
        let untried = (0..count).filter(|candidate| !self.record.tried.contains(candidate));
        let price = |candidate: u32| {
            let prices = self.view.prices.as_slice();
            usize::try_from(candidate).ok().and_then(|index| prices.get(index).copied().flatten())
        };
        if self.plan.cheapest_first {
            untried.min_by_key(|candidate| (price(*candidate).is_none(), price(*candidate), *candidate))
        } else {
            untried.min()
        }
    }

    fn mark_candidate_tried(&mut self) {
        if !self.record.tried.contains(&self.record.candidate) {
            self.record.tried.push(self.record.candidate);
        }
    }

    /// Permits the next launch to use any candidate again.
    pub(super) fn reset_candidates(&mut self) {
        self.record.candidate = 0;
        self.record.tried.clear();
        self.record.ruled_out.clear();
    }

    /// Rules out a candidate that nothing can ever fit and tries the next; if there is none, the task cannot start.
    fn rule_out_candidate(&mut self, message: &str) {
        let is_last = !self.has_other_candidate();
        self.record.ruled_out.push(self.record.candidate);
        if is_last {
            self.record.phase = AttemptPhase::Resolved;
            return self.end(Event::PrechecksFailed, message);
        }
        self.launch_refused(message, false);
    }

    /// Returns whether a candidate other than that of the newest attempt may still find nodes.
    pub(super) fn has_other_candidate(&self) -> bool {
        let count = u32::try_from(self.plan.candidates.len()).unwrap_or(u32::MAX);
        let mut others = (0..count).filter(|other| *other != self.record.candidate);
        others.any(|other| !self.record.ruled_out.contains(&other))
    }

    /// Lifts one constraint that the strategy set; `false` if none is left.
    fn lift_one_constraint(&mut self) -> bool {
        if self.record.sought.is_some() {
            let failover = self.plan.recovery.strategy == RecoveryStrategy::Failover;
            if !failover || self.record.launch_tries >= LOCATION_ATTEMPTS_MAX {
                self.record.sought = None;
            }
            return true;
        }
        // Nothing else fits: the lost location is better than none.
        !std::mem::take(&mut self.record.blocked).is_empty()
    }

    pub(super) fn has_location_constraints(&self) -> bool {
        self.record.sought.is_some() || !self.record.blocked.is_empty()
    }

    fn lift_location_constraints(&mut self) {
        self.record.sought = None;
        self.record.blocked.clear();
        self.record.phase = AttemptPhase::Resolved;
        self.number_attempt();
    }
}
