//! One task in one pass.

mod launch;

use windlass_planted_bugs::{Bug, is_planted};

use super::{
    Act, Moved, Seen, Stop, TaskDecision, TaskView, Turn, earlier, emergency,
    judge::{Machines, Verdict, judge},
};
use crate::{
    managed_job::{
        Event, RecoverySource, Schedule, ScheduleEvent, Status,
        plan::{Strategy, Task},
        record::{Placement, Record, Standing},
    },
    spot::{self, Market, Terms},
    time::{Span, Timestamp},
};

/// Nodes that are not released by then may have leaked, and somebody must know.
const RELEASE_PATIENCE: Span = Span::mins(30);
/// How often a task that waits for spot capacity looks again.
const SPOT_POLL: Span = Span::secs(60);

/// Why a task is launched again after its own failure.
enum Restart {
    /// This exit code is always tried again, and not counted.
    ListedCode(i32),
    /// One of the restarts that the task has for errors.
    Counted,
}

pub(super) struct Pass<'a> {
    plan: &'a Task,
    view: &'a TaskView,
    dice: f64,
    now: Timestamp,
    record: Record,
    moves: Vec<Moved>,
    act: Option<Act>,
    due: Option<Timestamp>,
}

impl<'a> Pass<'a> {
    pub(super) fn new(plan: &'a Task, view: &'a TaskView, dice: f64, now: Timestamp) -> Self {
        let record = view.record.clone();
        Self { plan, view, dice, now, record, moves: Vec::new(), act: None, due: None }
    }

    pub(super) fn finish(self, index: usize) -> (Record, Option<TaskDecision>, Option<Timestamp>) {
        let changed = self.record != self.view.record || self.act.is_some() || !self.moves.is_empty();
        let decision = u32::try_from(index).ok().filter(|_| changed).map(|task| TaskDecision {
            task,
            record: self.record.clone(),
            moves: self.moves,
            act: self.act,
        });
        (self.record, decision, self.due)
    }

    pub(super) fn run(&mut self, turn: Turn) {
        self.check();
        let mut graceful = None;
        match &turn {
            Turn::Go | Turn::Wait => {}
            Turn::Until(at) => self.look_at(*at),
            Turn::End { why, graceful: grace, unclaimed } => {
                graceful = *grace;
                self.cancel(why, *unclaimed);
            }
        }
        match self.record.status {
            Status::Pending => self.pending(&turn),
            Status::Starting | Status::Recovering => self.launching(),
            Status::Running => self.running(),
            Status::Cancelling => self.cancelling(graceful),
            Status::Succeeded
            | Status::Cancelled
            | Status::Failed
            | Status::FailedSetup
            | Status::FailedPrechecks
            | Status::FailedNoResource
            | Status::FailedController => self.clean_up(),
        }
    }

    /// States that cannot be are told as our own failure.
    fn check(&mut self) {
        if let Seen::Impossible { what } = &self.view.seen {
            self.fail(&format!("its run reports a state that does not exist: {what}"));
        } else if self.record.schedule == Schedule::Done && !self.record.status.is_final() {
            self.fail("the job was done, and this task was not");
        }
    }

    fn fail(&mut self, why: &str) {
        self.moves.extend(emergency::fail(&mut self.record, why, self.now));
    }

    fn look_at(&mut self, at: Timestamp) {
        self.due = earlier(self.due, Some(at));
    }

    /// Applies an event and notes it. What the machine refuses is not written.
    fn go(&mut self, event: Event, source: Option<RecoverySource>, message: impl Into<String>) -> bool {
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
        self.moves.push(Moved { from, to: self.record.status, event, source, message });
        true
    }

    /// Ends the task. Its schedule state ends too once nothing of it is left.
    fn end(&mut self, event: Event, message: impl Into<String>) {
        let message = message.into();
        if self.go(event, None, message.clone()) && self.record.status != Status::Succeeded {
            self.record.failure_reason = Some(message);
        }
        if self.record.standing == Standing::Settled {
            self.retire();
        } else if self.record.schedule == Schedule::Launching {
            self.record.schedule(ScheduleEvent::LaunchEnded);
        }
    }

    /// Gives the slots back: nothing of the task is left anywhere.
    fn retire(&mut self) {
        if self.record.schedule == Schedule::Launching {
            self.record.schedule(ScheduleEvent::LaunchEnded);
        }
        let event = if self.record.schedule == Schedule::Alive {
            ScheduleEvent::Finished
        } else {
            ScheduleEvent::Stopped
        };
        self.record.schedule(event);
    }

    /// Whether the run of the newest attempt is gone for good.
    fn is_gone(&self) -> bool {
        match self.view.seen {
            Seen::Nothing | Seen::Over { .. } => true,
            Seen::Queued { .. } | Seen::Provisioning | Seen::Running { .. } | Seen::Ending => false,
            Seen::Unclear | Seen::Impossible { .. } => false,
        }
    }

    fn stop(&mut self, graceful: Option<Span>) {
        // Asking again is harmless, and heals a request that got lost.
        if self.record.attempt > 0 {
            self.act = Some(Act::Stop(Stop { attempt: self.record.attempt, graceful }));
        }
    }

    fn cancel(&mut self, why: &str, unclaimed: bool) {
        let never = matches!(self.record.schedule, Schedule::Inactive | Schedule::Waiting);
        match self.record.status {
            Status::Pending if never && unclaimed => self.end(Event::CancelledUnclaimed, why),
            Status::Pending | Status::Starting | Status::Running | Status::Recovering => {
                self.go(Event::CancelAsked, None, why);
                self.record.failure_reason = Some(why.to_owned());
                if self.record.schedule == Schedule::Launching {
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

    /// Ends in CANCELLED, or in the final status that the task had reached before the cancel took hold. An end of the
    /// attempt after which the task would have been launched again is no final status of the task.
    fn cancelling(&mut self, graceful: Option<Span>) {
        let why = self.record.failure_reason.clone().unwrap_or_else(|| "cancelled".to_owned());
        if self.record.standing == Standing::Settled {
            return self.end(Event::Released, why);
        }
        if self.view.seen == Seen::Unclear {
            return;
        }
        if !self.is_gone() {
            return self.stop(graceful);
        }
        let counts = self.record.standing == Standing::Launched;
        self.record.standing = Standing::Settled;
        let verdict = match &self.view.seen {
            Seen::Over { ends, .. } if counts => Some(judge(ends)),
            Seen::Over { .. } | Seen::Nothing | Seen::Queued { .. } | Seen::Provisioning => None,
            Seen::Running { .. } | Seen::Ending | Seen::Unclear | Seen::Impossible { .. } => None,
        };
        match verdict {
            Some(Verdict::Success) => self.end(Event::Succeeded, "it ended before the cancel took hold"),
            Some(Verdict::UserFailure { restartable: true, codes, .. })
                if self.find_restart(&codes).is_some() =>
            {
                self.end(Event::Released, why);
            }
            Some(Verdict::UserFailure { setup, message, .. }) => {
                let event = if setup { Event::SetupFailed } else { Event::Failed };
                self.end(event, format!("{message}, before the cancel took hold"));
            }
            Some(Verdict::NeverFits { .. }) if self.is_bound_to_places() || self.has_other_hope() => {
                self.end(Event::Released, why);
            }
            Some(Verdict::NeverFits { message }) => self.end(Event::PrechecksFailed, message),
            Some(Verdict::NoCapacity { message }) if self.gives_up(self.record.launch_tries + 1) => {
                self.end(Event::GaveUp, message);
            }
            Some(Verdict::Loss { .. } | Verdict::NoCapacity { .. } | Verdict::NotStarted { .. }) => {
                self.end(Event::Released, why);
            }
            Some(Verdict::Stopped { .. }) | None => self.end(Event::Released, why),
        }
    }

    /// A task that ended keeps its slot until its nodes are gone, and says so when they do not go.
    fn clean_up(&mut self) {
        if self.record.schedule == Schedule::Done {
            return;
        }
        if self.record.standing == Standing::Settled || self.is_gone() {
            self.record.standing = Standing::Settled;
            return self.retire();
        }
        self.stop(None);
        let stuck = self.view.releasing_since.filter(|since| self.now.since(*since) >= RELEASE_PATIENCE);
        if stuck.is_some() {
            let placement = self.record.placement.as_ref().map(|placement| placement.place.clone());
            let place = placement.unwrap_or_else(|| "an unknown place".to_owned());
            self.fail(&format!("the nodes of attempt {} at {place} may have leaked", self.record.attempt));
        }
    }

    fn pending(&mut self, turn: &Turn) {
        let may_begin = matches!(turn, Turn::Go | Turn::Until(_));
        match self.record.schedule {
            Schedule::Waiting if may_begin && self.plan.body.is_empty() => {
                self.go(Event::EmptyRun, None, "there is nothing to run");
                self.end(Event::Succeeded, "there was nothing to run");
            }
            Schedule::AliveBackoff => {
                let over = self.record.next_retry_at.is_none_or(|at| at <= self.now);
                if over || self.view.new_capacity {
                    self.record.schedule(ScheduleEvent::BackoffOver);
                    self.record.next_retry_at = None;
                } else if let Some(at) = self.record.next_retry_at {
                    self.look_at(at);
                }
            }
            Schedule::Inactive
            | Schedule::Waiting
            | Schedule::Launching
            | Schedule::Alive
            | Schedule::AliveWaiting
            | Schedule::Done => {}
        }
    }

    fn running(&mut self) {
        match &self.view.seen {
            Seen::Running { placement } => {
                if placement.is_some() && *placement != self.record.placement {
                    self.record.placement.clone_from(placement);
                }
                self.move_to_spot();
            }
            Seen::Over { ends, placement } => {
                if placement.is_some() {
                    self.record.placement.clone_from(placement);
                }
                self.over(judge(ends));
            }
            Seen::Nothing => {
                self.record.standing = Standing::Settled;
                if self.plan.recovery.strategy == Strategy::None {
                    return self.end(Event::Failed, "nodes lost: its run is gone");
                }
                self.go(Event::Interrupted, Some(RecoverySource::Restart), "its run is gone");
                self.record.schedule(ScheduleEvent::WantsLaunch);
            }
            Seen::Ending if is_planted(Bug::RecoversBeforeReleased) => {
                let machines = Machines::default();
                self.over(Verdict::Loss { machines, message: "it ends".to_owned() });
            }
            Seen::Queued { .. } | Seen::Provisioning | Seen::Ending => {}
            // Silence of ours is no evidence against the task.
            Seen::Unclear | Seen::Impossible { .. } => {}
        }
    }

    /// The attempt of a RUNNING task is over.
    fn over(&mut self, verdict: Verdict) {
        self.record.standing = Standing::Settled;
        match verdict {
            Verdict::Success => self.end(Event::Succeeded, "the program ended well"),
            Verdict::UserFailure { setup, codes, restartable, message } => {
                match restartable.then(|| self.restart(&codes)).flatten() {
                    Some(why) => {
                        // Its nodes are healthy: the next attempt finds setup's work there.
                        self.record.sought.clone_from(&self.record.placement);
                        self.recover(format!("{message}; {why}"));
                    }
                    None => self.end(if setup { Event::SetupFailed } else { Event::Failed }, message),
                }
            }
            Verdict::Stopped { message } => self.stopped(&message),
            Verdict::Loss { machines, message } => self.lost(machines, &message),
            Verdict::NoCapacity { message }
            | Verdict::NotStarted { message }
            | Verdict::NeverFits { message } => self.lost(Machines::default(), &message),
        }
    }

    /// Why the user's failure is tried again; `None`: it is not. Counts what must be counted.
    fn restart(&mut self, codes: &[i32]) -> Option<String> {
        Some(match self.find_restart(codes)? {
            Restart::ListedCode(code) => format!("exit code {code} is always tried again"),
            Restart::Counted => {
                self.record.restarts_on_errors += 1;
                let (count, of) = (self.record.restarts_on_errors, self.plan.recovery.max_restarts_on_errors);
                format!("restart {count} of {of}")
            }
        })
    }

    /// The restart that follows a failure with these exit codes; `None`: the task fails.
    fn find_restart(&self, codes: &[i32]) -> Option<Restart> {
        let recovery = &self.plan.recovery;
        let is_listed =
            |code: &i32| recovery.recover_on_exit_codes.iter().any(|known| i32::from(*known) == *code);
        let listed = codes.iter().copied().find(is_listed).map(Restart::ListedCode);
        let is_left = self.record.restarts_on_errors < recovery.max_restarts_on_errors;
        listed.or(is_left.then_some(Restart::Counted))
    }

    fn lost(&mut self, machines: Machines, message: &str) {
        if self.plan.recovery.strategy == Strategy::None {
            return self.end(Event::Failed, format!("nodes lost: {message}"));
        }
        let placement = self.record.placement.clone();
        let away = self.keep_away(machines, placement);
        self.recover(format!("nodes lost: {message}{away}"));
    }

    /// Remembers what was lost as the strategy wants it, and says so. `known` stands for machines of which nothing
    /// is known. Of several nodes those that are left are prepared and had at once: a machine beside them is sought
    /// before any other place.
    fn keep_away(&mut self, machines: Machines, known: Option<Placement>) -> String {
        let Machines { gone, left } = machines;
        let (gone, left) = if gone.is_empty() { (known.into_iter().collect(), None) } else { (gone, left) };
        let Some(first) = gone.first().cloned() else { return String::new() };
        match self.plan.recovery.strategy {
            Strategy::EagerNextRegion => {
                // Staying away from the place as a whole would leave the others behind as well.
                let beside = left.filter(|left| gone.iter().any(|gone| gone.place == left.place));
                for lost in gone {
                    if !self.record.blocked.contains(&lost) {
                        self.record.blocked.push(lost);
                    }
                }
                match beside {
                    Some(left) => self.seek_beside(left),
                    None => format!("; stays away from {}", first.place),
                }
            }
            Strategy::Failover => match left {
                Some(left) => self.seek_beside(left),
                None => {
                    let said = format!("; tries {} again first", first.place);
                    self.record.sought = Some(first);
                    said
                }
            },
            Strategy::None => String::new(),
        }
    }

    fn seek_beside(&mut self, left: Placement) -> String {
        let said = format!("; seeks a machine beside those that are left in {}", left.place);
        self.record.sought = Some(left);
        said
    }

    fn recover(&mut self, message: String) {
        self.end_round();
        self.record.launch_tries = 0;
        self.record.waiting_since = None;
        self.go(Event::Lost, Some(RecoverySource::Failure), message);
        self.record.schedule(ScheduleEvent::WantsLaunch);
    }

    /// Somebody ended the run itself: that is a cancel.
    fn stopped(&mut self, message: &str) {
        self.record.standing = Standing::Settled;
        let why = format!("its run was stopped: {message}");
        self.go(Event::CancelAsked, None, why.clone());
        self.end(Event::Released, why);
    }

    /// What a deadline asks for now; `None`: the task has no deadline.
    fn policy(&self) -> Option<(Option<Market>, spot::Rule)> {
        let deadline = self.plan.deadline?;
        let terms = Terms::from(deadline);
        let began = self.record.submitted_at.unwrap_or(self.now);
        let seconds = |span: Span| span.0 as f64 / 1e6;
        let running = self.record.status == Status::Running;
        let done = self.view.progress.unwrap_or_else(|| self.record.job_duration(self.now));
        let standing = spot::Standing {
            elapsed: seconds(self.now.since(began)),
            done: seconds(done),
            holding: if running { self.record.market } else { None },
            spot: self.view.spot_capacity,
        };
        Some(spot::choose(terms, standing))
    }

    /// Rule 3: ahead of its line, and cheaper nodes are there.
    fn move_to_spot(&mut self) {
        let Some((_, rule @ spot::Rule::MoveToSpot)) = self.policy() else { return };
        if self.plan.recovery.strategy == Strategy::None {
            return;
        }
        self.record.standing = Standing::Discarded;
        self.go(Event::Interrupted, Some(RecoverySource::Restart), rule.said());
        self.record.schedule(ScheduleEvent::WantsLaunch);
        self.end_round();
        self.look_at(self.now);
    }

    /// Waiting by choice: the slot is for others, and nothing was refused.
    fn wait_for_spot(&mut self, why: &str) {
        self.go(Event::BackedOff, None, why);
        self.record.schedule(ScheduleEvent::CapacityRefused);
        self.record.next_retry_at = Some(self.now + SPOT_POLL);
        self.look_at(self.now + SPOT_POLL);
    }
}
