//! Steps of a runner, and the calls that each step accepts. Decisions only.
//!
//! ```text
//! wait_submit → wait_run → running → serve_logs → wait_logs_finished → exit
//! ```
//! The runner never goes back to an earlier step. A call that does not belong to the step is refused and changes
//! nothing; one that was answered before gets the same answer.

/// Current step of the runner.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Step {
    /// The job has not been submitted.
    WaitSubmit,
    /// The job was submitted; code and archives may be uploaded.
    WaitRun,
    /// The job is being prepared or runs.
    Running,
    /// The job has ended and the server has not read its output to the end.
    ServeLogs,
    /// The server has; another reader still reads.
    WaitLogsFinished,
    /// The runner may exit.
    Exit,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Call {
    Submit,
    UploadArchive,
    UploadCode,
    Run,
    Stop,
}

/// Event that is not a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StepEvent {
    /// The job was not started in time.
    SubmitTimeout,
    JobEnded,
    ServerReadAll,
    NoReadersLeft,
    /// The time for reading has passed.
    ReadTimeout,
}

/// Result of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CallVerdict {
    /// The call is performed, and the runner moves to this step.
    Take(Step),
    /// The call was performed before: the answer is the same and nothing happens.
    Repeat,
    /// The call is out of order.
    Refuse,
}

/// Returns the result of a call at a step.
pub fn evaluate_call(at: Step, call: Call) -> CallVerdict {
    use Step::{Exit, Running, ServeLogs, WaitLogsFinished, WaitRun, WaitSubmit};
    match (call, at) {
        // A later submission of the job replaces an earlier one until it is started.
        (Call::Submit, WaitSubmit | WaitRun) => CallVerdict::Take(WaitRun),
        (Call::UploadArchive | Call::UploadCode, WaitRun) => CallVerdict::Take(WaitRun),
        (Call::Run, WaitRun) => CallVerdict::Take(Running),
        (Call::Run, Running | ServeLogs | WaitLogsFinished) => CallVerdict::Repeat,
        // A job that was never started can never start after its stop.
        (Call::Stop, WaitSubmit | WaitRun) => CallVerdict::Take(ServeLogs),
        (Call::Stop, Running) => CallVerdict::Take(Running),
        (Call::Stop, ServeLogs | WaitLogsFinished | Exit) => CallVerdict::Repeat,
        (Call::Submit, Running | ServeLogs | WaitLogsFinished | Exit)
        | (
            Call::UploadArchive | Call::UploadCode,
            WaitSubmit | Running | ServeLogs | WaitLogsFinished | Exit,
        )
        | (Call::Run, WaitSubmit | Exit) => CallVerdict::Refuse,
    }
}

/// Returns the step after an event; the same step if the event has no effect there.
pub fn apply_event(at: Step, what: StepEvent) -> Step {
    use Step::{Exit, Running, ServeLogs, WaitLogsFinished, WaitRun, WaitSubmit};
    match (what, at) {
        // There is no output to read.
        (StepEvent::SubmitTimeout, WaitSubmit | WaitRun) => Exit,
        (StepEvent::JobEnded, Running) => ServeLogs,
        (StepEvent::ServerReadAll, ServeLogs) => WaitLogsFinished,
        (StepEvent::NoReadersLeft, WaitLogsFinished) => Exit,
        (StepEvent::ReadTimeout, ServeLogs | WaitLogsFinished) => Exit,
        (StepEvent::SubmitTimeout, Running | ServeLogs | WaitLogsFinished | Exit)
        | (StepEvent::JobEnded, WaitSubmit | WaitRun | ServeLogs | WaitLogsFinished | Exit)
        | (StepEvent::ServerReadAll, WaitSubmit | WaitRun | Running | WaitLogsFinished | Exit)
        | (StepEvent::NoReadersLeft, WaitSubmit | WaitRun | Running | ServeLogs | Exit)
        | (StepEvent::ReadTimeout, WaitSubmit | WaitRun | Running | Exit) => at,
    }
}

/// Returns the message of a refusal.
pub fn refusal_message(at: Step) -> &'static str {
    match at {
        Step::WaitSubmit => "the job has not been submitted",
        Step::WaitRun => "the job has not been started",
        Step::Running => "the job has already been started",
        Step::ServeLogs | Step::WaitLogsFinished | Step::Exit => "the job has ended",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use CallVerdict::{Refuse, Repeat, Take};
    use Step::{Exit, Running, ServeLogs, WaitLogsFinished, WaitRun, WaitSubmit};

    const STEPS: [Step; 6] = [WaitSubmit, WaitRun, Running, ServeLogs, WaitLogsFinished, Exit];

    #[test]
    fn r26_every_call_has_a_defined_result_at_every_step() {
        let table = [
            (Call::Submit, [Take(WaitRun), Take(WaitRun), Refuse, Refuse, Refuse, Refuse]),
            (Call::UploadArchive, [Refuse, Take(WaitRun), Refuse, Refuse, Refuse, Refuse]),
            (Call::UploadCode, [Refuse, Take(WaitRun), Refuse, Refuse, Refuse, Refuse]),
            (Call::Run, [Refuse, Take(Running), Repeat, Repeat, Repeat, Refuse]),
            (Call::Stop, [Take(ServeLogs), Take(ServeLogs), Take(Running), Repeat, Repeat, Repeat]),
        ];
        for (what, verdicts) in table {
            for (at, verdict) in STEPS.into_iter().zip(verdicts) {
                assert_eq!(evaluate_call(at, what), verdict, "{what:?} at {at:?}");
            }
        }
    }

    #[test]
    fn r26_every_event_leads_to_the_expected_step() {
        let table = [
            (StepEvent::SubmitTimeout, [Exit, Exit, Running, ServeLogs, WaitLogsFinished, Exit]),
            (StepEvent::JobEnded, [WaitSubmit, WaitRun, ServeLogs, ServeLogs, WaitLogsFinished, Exit]),
            (
                StepEvent::ServerReadAll,
                [WaitSubmit, WaitRun, Running, WaitLogsFinished, WaitLogsFinished, Exit],
            ),
            (StepEvent::NoReadersLeft, [WaitSubmit, WaitRun, Running, ServeLogs, Exit, Exit]),
            (StepEvent::ReadTimeout, [WaitSubmit, WaitRun, Running, Exit, Exit, Exit]),
        ];
        for (what, steps) in table {
            for (at, to) in STEPS.into_iter().zip(steps) {
                assert_eq!(apply_event(at, what), to, "{what:?} at {at:?}");
            }
        }
    }

    proptest::proptest! {
        #[test]
        fn r26_steps_never_go_backwards(moves in proptest::collection::vec(0usize..10, 0..40)) {
            let calls = [Call::Submit, Call::UploadArchive, Call::UploadCode, Call::Run, Call::Stop];
            let happenings = [
                StepEvent::SubmitTimeout,
                StepEvent::JobEnded,
                StepEvent::ServerReadAll,
                StepEvent::NoReadersLeft,
                StepEvent::ReadTimeout,
            ];
            let mut at = WaitSubmit;
            for one in moves {
                let to = match (calls.get(one), happenings.get(one.wrapping_sub(calls.len()))) {
                    (Some(what), _) => match evaluate_call(at, *what) {
                        Take(to) => to,
                        Repeat | Refuse => at,
                    },
                    (None, Some(what)) => apply_event(at, *what),
                    (None, None) => at,
                };
                proptest::prop_assert!(to >= at, "{at:?} → {to:?}");
                at = to;
            }
        }
    }
}
