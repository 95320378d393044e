//! A simulated job, as a function of time. No I/O and no clock: times are arguments, in milliseconds.

use std::{collections::BTreeMap, time::Duration};

use windlass_api::agent::runner::JobState;

use super::SimulationPlan;

/// All lines of output have the same length, so that the line of a byte is found by division.
pub(super) const LINE_BYTES: u64 = 26;
/// Maximum number of lines returned at once.
pub(super) const LINES_MAX: u64 = 2000;
/// Maximum number of lines of one job: lines of one millisecond are returned together.
const JOB_LINES_MAX: u32 = 1_000_000;
/// Exit statuses of a job that is interrupted, and of one whose task is ended.
const EXIT_INTERRUPTED: i32 = 130;
const EXIT_TERMINATED: i32 = 143;

#[derive(Clone, Debug)]
pub(super) struct SimulatedJob {
    plan: SimulationPlan,
    started: bool,
    /// Start time of the commands.
    began: Option<i64>,
    /// Time and exit status of an early end.
    cut: Option<(i64, i32)>,
    /// The task itself was ended.
    killed: bool,
    /// All output was read after the end.
    read: bool,
    /// Number of states and bytes already reported.
    reported_states: usize,
    reported_bytes: u64,
}

/// Next change of a task.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum JobPhase {
    Ended {
        code: i32,
    },
    /// A change happens without a call.
    ChangesIn {
        in_ms: u64,
    },
    /// A change happens only after a call.
    Waiting,
}

impl SimulatedJob {
    pub(super) fn new(plan: SimulationPlan) -> Self {
        Self {
            plan,
            started: false,
            began: None,
            cut: None,
            killed: false,
            read: false,
            reported_states: 0,
            reported_bytes: 0,
        }
    }

    pub(super) fn start(&mut self) {
        self.started = true;
    }

    pub(super) fn started(&self) -> bool {
        self.started
    }

    pub(super) fn began(&self) -> bool {
        self.began.is_some()
    }

    /// Applies the settings in the job's environment; values that are not numbers are ignored.
    pub(super) fn configure(&mut self, env: &BTreeMap<String, String>) {
        fn number<T: std::str::FromStr>(env: &BTreeMap<String, String>, name: &str) -> Option<T> {
            env.get(name)?.parse().ok()
        }
        self.plan.run = number(env, "SIMULATED_RUN_MS").map_or(self.plan.run, Duration::from_millis);
        self.plan.exit = number(env, "SIMULATED_EXIT").unwrap_or(self.plan.exit);
        self.plan.log_lines =
            number(env, "SIMULATED_LOG_LINES").unwrap_or(self.plan.log_lines).min(JOB_LINES_MAX);
    }

    pub(super) fn run(&mut self, now: i64) {
        self.began.get_or_insert(now);
    }

    /// Interrupts the job; no effect before its start or after its end.
    pub(super) fn stop(&mut self, now: i64) {
        self.end(now, EXIT_INTERRUPTED);
    }

    /// Ends the task, and the job with it.
    pub(super) fn kill(&mut self, now: i64) {
        self.end(now, EXIT_TERMINATED);
        self.killed = true;
    }

    fn end(&mut self, now: i64, code: i32) {
        let running =
            self.began.is_some() && self.cut.is_none() && self.ended_at().is_some_and(|end| now < end);
        if running {
            // The state that reports the end comes one millisecond after the last line.
            self.cut = Some((now - 1, code));
        }
    }

    /// At least one: the time of every line lies between the first state and the last.
    fn run_ms(&self) -> i64 {
        i64::try_from(self.plan.run.as_millis()).unwrap_or(i64::MAX / 4).max(1)
    }

    /// Returns a time after the last line, so that times of states and lines increase strictly.
    fn ended_at(&self) -> Option<i64> {
        let began = self.began?;
        Some(self.cut.map_or(began.saturating_add(self.run_ms()), |(at, _)| at.max(began)).saturating_add(1))
    }

    pub(super) fn over(&self, now: i64) -> bool {
        self.ended_at().is_some_and(|end| end <= now)
    }

    pub(super) fn states(&self, now: i64) -> Vec<JobState> {
        let Some(began) = self.began else { return Vec::new() };
        let state = |state: &str, timestamp, exit_status| JobState {
            state: state.to_owned(),
            timestamp,
            termination_reason: String::new(),
            termination_message: String::new(),
            detail: None,
            exit_status,
        };
        let mut states = vec![state("running", began, None)];
        if let Some(end) = self.ended_at().filter(|&end| end <= now) {
            states.push(match (self.cut, self.plan.exit) {
                (Some((_, code)), _) => state("terminated", end, Some(code)),
                (None, 0) => state("done", end, Some(0)),
                (None, code) => JobState {
                    termination_reason: "container_exited_with_error".to_owned(),
                    ..state("failed", end, Some(code))
                },
            });
        }
        states
    }

    /// Returns the states not yet reported and marks them as reported.
    pub(super) fn take_new_states(&mut self, now: i64) -> Vec<JobState> {
        let states = self.states(now);
        let fresh = states.get(self.reported_states..).unwrap_or_default().to_vec();
        self.reported_states = states.len();
        fresh
    }

    /// Returns the end of the output if it grew since the last call.
    pub(super) fn take_new_output_end(&mut self, now: i64) -> Option<u64> {
        let end = self.output_end(now);
        (std::mem::replace(&mut self.reported_bytes, end) < end).then_some(end)
    }

    fn lines(&self, now: i64) -> u64 {
        let Some(began) = self.began else { return 0 };
        let until = self.cut.map_or(now, |(at, _)| at.min(now));
        let Ok(since) = u128::try_from(until - began - 1) else { return 0 };
        let lines = u128::from(self.plan.log_lines);
        let run = u128::try_from(self.run_ms()).unwrap_or(0);
        let out =
            ((since + 1) * lines).checked_div(run).map_or(lines, |_| ((since + 1) * lines).div_ceil(run));
        u64::try_from(out.min(lines)).unwrap_or(0)
    }

    fn line_time(&self, n: u64) -> i64 {
        let offset = u128::from(n) * u128::try_from(self.run_ms()).unwrap_or(0);
        let offset = offset.checked_div(u128::from(self.plan.log_lines)).unwrap_or(0);
        self.began
            .unwrap_or(0)
            .saturating_add(1)
            .saturating_add(i64::try_from(offset).unwrap_or(i64::MAX / 4))
    }

    fn format_line(&self, n: u64) -> String {
        format!("line {:>8} of {:>8}\n", (n + 1) % 100_000_000, self.plan.log_lines % 100_000_000)
    }

    pub(super) fn output_end(&self, now: i64) -> u64 {
        self.lines(now) * LINE_BYTES
    }

    /// Returns output from `offset`, at most `limit` bytes.
    pub(super) fn output(&self, now: i64, offset: u64, limit: u64) -> Vec<u8> {
        let end = self.output_end(now).min(offset.saturating_add(limit.min(LINES_MAX * LINE_BYTES)));
        let (first, last) = (offset / LINE_BYTES, end.div_ceil(LINE_BYTES));
        let text: String = (first..last).map(|n| self.format_line(n)).collect();
        let from = usize::try_from(offset % LINE_BYTES).unwrap_or(0);
        let length = usize::try_from(end.saturating_sub(offset)).unwrap_or(0);
        text.into_bytes().into_iter().skip(from).take(length).collect()
    }

    /// Returns the output after `after`, with lines of the same millisecond together, and whether it is complete for
    /// now.
    pub(super) fn output_after(&self, now: i64, after: i64) -> (Vec<(i64, String)>, bool) {
        let (mut low, total) = (0, self.lines(now));
        let mut high = total;
        while low < high {
            let middle = low.midpoint(high);
            if self.line_time(middle) <= after {
                low = middle + 1;
            } else {
                high = middle;
            }
        }
        let mut lines: Vec<(i64, String)> = Vec::new();
        for (n, taken) in (low..total).zip(0..) {
            let at = self.line_time(n);
            match lines.last_mut() {
                Some((last, text)) if *last == at => text.push_str(&self.format_line(n)),
                Some(_) | None if taken >= LINES_MAX => return (lines, false),
                Some(_) | None => lines.push((at, self.format_line(n))),
            }
        }
        (lines, true)
    }

    /// Marks the complete output as read.
    pub(super) fn mark_read(&mut self) {
        self.read = true;
    }

    pub(super) fn life(&self, now: i64, linger: Duration) -> JobPhase {
        let code = self.cut.map_or(self.plan.exit, |(_, code)| code);
        let Some(end) = self.ended_at() else {
            return if self.killed { JobPhase::Ended { code: EXIT_TERMINATED } } else { JobPhase::Waiting };
        };
        let until = |at: i64| JobPhase::ChangesIn { in_ms: u64::try_from(at - now).unwrap_or(1) };
        let last = end.saturating_add(i64::try_from(linger.as_millis()).unwrap_or(i64::MAX / 4));
        if end <= now && (self.killed || self.read || last <= now) {
            return JobPhase::Ended { code };
        }
        if now < end { until(end) } else { until(last) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn job(run_ms: u64, lines: u32, exit: i32) -> SimulatedJob {
        let plan = SimulationPlan {
            pull: Duration::ZERO,
            run: Duration::from_millis(run_ms),
            exit,
            log_lines: lines,
        };
        let mut job = SimulatedJob::new(plan);
        job.start();
        job.run(1000);
        job
    }

    fn state_tuples(job: &SimulatedJob, now: i64) -> Vec<(String, i64, Option<i32>)> {
        job.states(now).into_iter().map(|s| (s.state, s.timestamp, s.exit_status)).collect()
    }

    #[test]
    fn a_simulated_job_runs_for_its_duration_and_ends_with_its_exit_code() {
        let job = job(500, 10, 3);
        assert_eq!(state_tuples(&job, 1000), [("running".into(), 1000, None)]);
        assert_eq!(state_tuples(&job, 1501).last().unwrap(), &("failed".into(), 1501, Some(3)));
        assert_eq!(job.life(1100, READ_GRACE), JobPhase::ChangesIn { in_ms: 401 });
        assert_eq!(job.life(1501, READ_GRACE), JobPhase::ChangesIn { in_ms: 1000 });
        assert_eq!(job.life(2501, READ_GRACE), JobPhase::Ended { code: 3 });
    }

    const READ_GRACE: Duration = Duration::from_secs(1);

    #[test]
    fn output_by_offset_equals_output_by_time_and_is_complete_at_the_end() {
        for (run, lines) in [(500, 10), (0, 5), (3, 5000), (7, 7), (1, 1), (10, 0)] {
            let job = job(run, lines, 0);
            let end = 1000 + i64::try_from(run).unwrap().max(1) + 1;
            let mut by_time = String::new();
            let mut after = 0;
            loop {
                let (part, complete) = job.output_after(end, after);
                for (at, text) in part {
                    assert!(at > after && at < end, "strictly growing, before the last state");
                    after = at;
                    by_time.push_str(&text);
                }
                if complete {
                    break;
                }
            }
            let mut by_offset = Vec::new();
            while (by_offset.len() as u64) < job.output_end(end) {
                by_offset.extend(job.output(end, by_offset.len() as u64, 100));
            }
            assert_eq!(by_time.as_bytes(), by_offset);
            assert_eq!(by_time.lines().count(), lines as usize);
        }
    }

    #[test]
    fn output_only_grows_and_earlier_bytes_never_change() {
        let job = job(100, 7, 0);
        let mut before = Vec::new();
        for now in 999..1120 {
            let all = job.output(now, 0, u64::MAX);
            assert!(all.starts_with(&before));
            assert_eq!(all.len() as u64, job.output_end(now));
            before = all;
        }
        assert_eq!(before.len() as u64, 7 * LINE_BYTES);
    }

    #[test]
    fn an_interrupted_job_ends_once_at_the_first_interrupt() {
        let mut job = job(60_000, 60, 0);
        job.stop(11_000);
        job.stop(12_000);
        job.kill(13_000);
        assert_eq!(state_tuples(&job, 20_000).last().unwrap(), &("terminated".into(), 11_000, Some(130)));
        assert_eq!(job.output_end(90_000), 10 * LINE_BYTES);
        assert_eq!(job.life(13_000, READ_GRACE), JobPhase::Ended { code: 130 });
    }

    #[test]
    fn a_job_killed_at_its_start_ends_one_millisecond_later() {
        let mut job = job(60_000, 60, 0);
        job.kill(1000);
        assert_eq!(job.life(1000, READ_GRACE), JobPhase::ChangesIn { in_ms: 1 });
        assert_eq!(job.life(1001, READ_GRACE), JobPhase::Ended { code: 143 });
        assert_eq!(state_tuples(&job, 1001).last().unwrap(), &("terminated".into(), 1001, Some(143)));
    }

    #[test]
    fn a_job_that_ended_is_not_changed_by_a_late_stop() {
        let mut job = job(10, 0, 0);
        job.stop(5000);
        assert_eq!(state_tuples(&job, 6000).last().unwrap(), &("done".into(), 1011, Some(0)));
        job.mark_read();
        assert_eq!(job.life(6000, READ_GRACE), JobPhase::Ended { code: 0 });
    }

    #[test]
    fn a_task_without_a_started_job_waits_until_it_is_killed() {
        let mut job = SimulatedJob::new(SimulationPlan::default());
        assert_eq!(job.life(0, READ_GRACE), JobPhase::Waiting);
        job.kill(5);
        assert_eq!(job.life(6, READ_GRACE), JobPhase::Ended { code: 143 });
        assert!(job.states(7).is_empty());
    }

    #[test]
    fn states_and_output_growth_are_reported_once() {
        let mut job = job(10, 2, 0);
        assert_eq!(job.take_new_states(1000).len(), 1);
        assert_eq!(job.take_new_states(1005).len(), 0);
        assert_eq!(job.take_new_states(1011).len(), 1);
        assert_eq!(job.take_new_output_end(1011), Some(2 * LINE_BYTES));
        assert_eq!(job.take_new_output_end(1011), None);
    }
}
