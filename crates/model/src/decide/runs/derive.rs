//! State of a run derived from its latest submissions: the documented rules, in the documented order.

use crate::{
    decide::runs::{JobView, ReplicaRole, ReplicaView, RunView, StopCriteria, SubmissionState},
    job,
    retry::{self, FailureHistory, RetryDecision},
    run,
    time::Timestamp,
};

/// Summary of all jobs. It depends neither on the run's status nor on the order of the jobs.
#[derive(Clone, Debug, PartialEq)]
pub struct DerivedRun<'a> {
    pub status: DerivedStatus,
    /// Replicas to retry as a whole, by number.
    pub retries: Vec<&'a ReplicaView>,
}

#[derive(Clone, Debug, PartialEq)]
pub enum DerivedStatus {
    /// The run has a reason to end.
    End(run::Ending),
    /// A job runs.
    Runs,
    /// A job is provisioning or pulling, none runs.
    Provisions,
    /// No job is past submitted.
    Waits,
    /// Nothing is alive: only replicas to retry are left, or none at all.
    Idle(String),
}

/// Contribution of one replica to the summary.
#[derive(Clone, Debug, PartialEq)]
enum ReplicaContribution {
    /// Scaled down.
    Ignored,
    /// A job may not be retried. Overrides the retry of any other.
    Failed {
        reason: run::TerminationReason,
        message: String,
    },
    /// To be retried as a whole; contributes nothing else.
    Retry {
        message: String,
    },
    Live(JobCounts),
}

#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct JobCounts {
    is_running: bool,
    is_provisioning: bool,
    is_waiting: bool,
    is_done: bool,
}

pub fn derive(run: &RunView, now: Timestamp) -> DerivedRun<'_> {
    let mut replicas: Vec<_> = run.replicas.iter().collect();
    replicas.sort_by_key(|replica| replica.num);

    let mut sum = JobCounts::default();
    let mut failures = Vec::new();
    let mut on_trial = Vec::new();
    let mut retries = Vec::new();
    let mut to_retry = None;
    for replica in replicas {
        match replica_contribution(run, replica, now) {
            ReplicaContribution::Ignored => {}
            ReplicaContribution::Failed { reason, message } => match replica.role {
                ReplicaRole::Full | ReplicaRole::Gone => failures.push((reason, message)),
                ReplicaRole::Trial => on_trial.push((reason, message)),
            },
            ReplicaContribution::Retry { message } => {
                to_retry.get_or_insert(message);
                retries.push(replica);
            }
            ReplicaContribution::Live(counts) => sum.add(counts),
        }
    }

    // Replicas of the previous deployment still answer; without them only the failure is left.
    if !sum.is_alive() && !run.is_rolling_back {
        failures.append(&mut on_trial);
    }
    let verdict = if let Some(ending) = worst_failure(failures) {
        DerivedStatus::End(ending)
    } else if run.has_gateway_failed {
        let message = "its gateway was deleted";
        DerivedStatus::End(run::Ending::new(run::TerminationReason::GatewayError, message))
    } else if run.stop_criteria == StopCriteria::MasterDone && master_is_done(run) {
        DerivedStatus::End(run::Ending::new(run::TerminationReason::AllJobsDone, "the master job is done"))
    } else if sum.is_running {
        DerivedStatus::Runs
    } else if sum.is_provisioning {
        DerivedStatus::Provisions
    } else if sum.is_waiting {
        DerivedStatus::Waits
    } else if let Some(message) = to_retry {
        DerivedStatus::Idle(message)
    } else if run.is_rolling_back {
        DerivedStatus::Idle("its deployment is being rolled back".to_owned())
    } else if sum.is_done {
        DerivedStatus::End(run::Ending::new(run::TerminationReason::AllJobsDone, "all jobs are done"))
    } else {
        DerivedStatus::Idle("no replicas are needed".to_owned())
    };
    DerivedRun { status: verdict, retries }
}

/// Returns the most informative failure: a failure has precedence over a limit.
fn worst_failure(failures: Vec<(run::TerminationReason, String)>) -> Option<run::Ending> {
    let is_limit = |reason: &run::TerminationReason| *reason == run::TerminationReason::RetryLimitExceeded;
    failures
        .into_iter()
        .min_by_key(|(reason, _)| is_limit(reason))
        .map(|(reason, message)| run::Ending::new(reason, message))
}

fn master_is_done(run: &RunView) -> bool {
    let master = run.replicas.iter().find(|replica| replica.num == 0);
    master.is_some_and(|replica| replica.jobs.iter().any(|job| job.num == 0 && is_done(job)))
}

fn replica_contribution(run: &RunView, replica: &ReplicaView, now: Timestamp) -> ReplicaContribution {
    let mut jobs: Vec<_> = replica.jobs.iter().collect();
    jobs.sort_by_key(|job| job.num);
    let is_gone = replica.role == ReplicaRole::Gone && jobs.iter().any(|job| job.state.ending().is_some());
    if is_gone || jobs.iter().any(|job| end_reason(job) == Some(job::TerminationReason::ScaledDown)) {
        return ReplicaContribution::Ignored;
    }

    let mut counts = JobCounts::default();
    let mut failures = Vec::new();
    let mut to_retry = None;
    let mut ended_by_us = None;
    for job in jobs {
        let Some(ending) = job.state.ending() else {
            counts.count(&job.state);
            continue;
        };
        if is_done(job) {
            counts.is_done = true;
            continue;
        }
        let message = describe(replica, job, ending);
        if ending.reason() == job::TerminationReason::TerminatedByServer {
            ended_by_us.get_or_insert(message);
            continue;
        }
        if ending.detail() == Some(job::TerminationDetail::RegionFull) {
            to_retry.get_or_insert(format!("{message}; trying another region"));
            continue;
        }
        match retry::decide(run.retry.as_ref(), failure_history(run, job, ending), now) {
            RetryDecision::Yes { event, .. } => {
                to_retry.get_or_insert(format!("{message}; retried on {event}"));
            }
            RetryDecision::No(refusal) => {
                let reason = match refusal.is_limit() {
                    true => run::TerminationReason::RetryLimitExceeded,
                    false => run::TerminationReason::JobFailed,
                };
                failures.push((reason, format!("{message}; {refusal}")));
            }
        }
    }
    if let Some(ending) = worst_failure(failures) {
        return ReplicaContribution::Failed { reason: ending.reason(), message: ending.message().to_owned() };
    }
    match (to_retry, ended_by_us) {
        // A job that the server ended because of a failed sibling has the result of that sibling.
        (Some(message), _) => ReplicaContribution::Retry { message },
        (None, Some(message)) => {
            ReplicaContribution::Failed { reason: run::TerminationReason::JobFailed, message }
        }
        (None, None) => ReplicaContribution::Live(counts),
    }
}

fn failure_history(run: &RunView, job: &JobView, ending: &job::Ending) -> FailureHistory {
    FailureHistory {
        reason: ending.reason(),
        attempts: job.attempts,
        run_began: run.started_at(),
        failing_since: job.failing_since,
    }
}

fn describe(replica: &ReplicaView, job: &JobView, ending: &job::Ending) -> String {
    let subject = format!("job {} of replica {}", job.num, replica.num);
    if let (job::TerminationReason::ContainerExitedWithError, None, Some(code)) =
        (ending.reason(), ending.detail(), ending.exit_status())
    {
        return format!("{subject} ended: the commands exited with status {code}");
    }
    let mut text = format!("{subject} ended: {}", ending.reason());
    if let Some(detail) = ending.detail() {
        text.push_str(&format!(" ({detail})"));
    }
    if let Some(code) = ending.exit_status() {
        text.push_str(&format!(", exit code {code}"));
    }
    text
}

fn end_reason(job: &JobView) -> Option<job::TerminationReason> {
    job.state.ending().map(job::Ending::reason)
}

fn is_done(job: &JobView) -> bool {
    end_reason(job) == Some(job::TerminationReason::DoneByRunner)
}

impl JobCounts {
    fn count(&mut self, state: &SubmissionState) {
        match state {
            SubmissionState::Submitted => self.is_waiting = true,
            SubmissionState::Provisioning | SubmissionState::Pulling => self.is_provisioning = true,
            SubmissionState::Running => self.is_running = true,
            SubmissionState::Terminating(_) | SubmissionState::Final(_) => {}
        }
    }

    const fn is_alive(&self) -> bool {
        self.is_running || self.is_provisioning || self.is_waiting
    }

    fn add(&mut self, other: Self) {
        self.is_running |= other.is_running;
        self.is_provisioning |= other.is_provisioning;
        self.is_waiting |= other.is_waiting;
        self.is_done |= other.is_done;
    }
}
