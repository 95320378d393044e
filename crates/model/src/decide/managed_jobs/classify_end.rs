//! Classification of the end of an attempt: a failure of the program, or the loss of its nodes.
//!
//! A wrong answer is costly in both directions: a healthy job restarted, or a failure repeated without limit. So an
//! exit code counts only while its nodes exist, missing responses count only if they are long and repeated, and an
//! internal or transport error is never evidence.

use crate::{
    job::{TerminationDetail, TerminationReason as Reason},
    managed_job::record::NodeLocation,
    skypilot::Phase,
    time::Span,
};

/// Exit code of nodes that were killed because a sibling failed.
pub const SIBLING_KILLED_CODE: i32 = 137;
/// A node is lost after this time without a response and this number of failed probes.
pub const UNREACHABLE_TIMEOUT: Span = Span::secs(60);
pub const FAILED_PROBES_MIN: u32 = 5;

/// End of one node of an attempt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NodeEnd {
    pub reason: Reason,
    pub detail: Option<TerminationDetail>,
    pub exit_code: Option<i32>,
    /// Phase it was in; `None` if the node cannot report it.
    pub phase: Option<Phase>,
    /// The node was preempted, or its preemption was announced, around that time.
    pub is_preempted: bool,
    /// Location; `None` if it never had an instance.
    pub location: Option<NodeLocation>,
    /// Message about its end.
    pub message: Option<String>,
}

/// Instances of an attempt that are gone, and one of those that remain.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AttemptInstances {
    pub lost: Vec<NodeLocation>,
    pub remaining: Option<NodeLocation>,
}

/// Meaning of the end of an attempt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AttemptOutcome {
    Success,
    /// The user's program, or its setup, failed.
    UserFailure {
        setup: bool,
        /// Exit codes of all nodes that failed by themselves, in order of occurrence.
        codes: Vec<i32>,
        /// True if a restart could help: not after an exceeded time limit or a full quota.
        restartable: bool,
        message: String,
    },
    /// Nodes are gone.
    NodesLost {
        machines: AttemptInstances,
        message: String,
    },
    /// No capacity was available.
    NoCapacity {
        message: String,
    },
    /// It had nodes and could not be started on them.
    NotStarted {
        message: String,
    },
    /// No node can ever fit it.
    NeverFits {
        message: String,
    },
    /// The run itself was stopped by a user.
    Stopped {
        message: String,
    },
}

/// Returns whether a node that does not respond is lost. One failed probe never restarts a healthy job.
pub fn is_lost(silent_for: Span, failed_probes: u32) -> bool {
    silent_for >= UNREACHABLE_TIMEOUT && failed_probes >= FAILED_PROBES_MIN
}

/// Strongest finding about one node, in order of precedence.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum NodeOutcome {
    Done,
    /// Ended by the server or because of a sibling: not conclusive by itself.
    Collateral,
    NotStarted,
    NoCapacity,
    Failed,
    Stopped,
    NeverFits,
    Lost,
}

fn classify_node(end: &NodeEnd) -> NodeOutcome {
    if matches!(end.detail, Some(TerminationDetail::NoFleets | TerminationDetail::NeverFits)) {
        return NodeOutcome::NeverFits;
    }
    let lost =
        matches!(end.detail, Some(TerminationDetail::HostReboot | TerminationDetail::HostRuntimeRestart));
    match end.reason {
        Reason::DoneByRunner => NodeOutcome::Done,
        Reason::InterruptedByNoCapacity | Reason::InstanceUnreachable | Reason::InstanceAccessRevoked => {
            NodeOutcome::Lost
        }
        Reason::ContainerExitedWithError if lost || end.is_preempted => NodeOutcome::Lost,
        Reason::ContainerExitedWithError
            if end.exit_code == Some(SIBLING_KILLED_CODE) && end.detail.is_none() =>
        {
            NodeOutcome::Collateral
        }
        Reason::ContainerExitedWithError => NodeOutcome::Failed,
        Reason::MaxDurationExceeded
        | Reason::LogQuotaExceeded
        | Reason::InactivityDurationExceeded
        | Reason::TerminatedDueToUtilizationPolicy => NodeOutcome::Failed,
        Reason::FailedToStartDueToNoCapacity | Reason::WaitingInstanceLimitExceeded => {
            NodeOutcome::NoCapacity
        }
        Reason::WaitingRunnerLimitExceeded
        | Reason::VolumeError
        | Reason::GatewayError
        | Reason::PortsBindingFailed
        | Reason::CreatingContainerError => NodeOutcome::NotStarted,
        Reason::ExecutorError if lost || end.is_preempted => NodeOutcome::Lost,
        // Its program, or its user, does not exist: another attempt would end the same.
        Reason::ExecutorError if end.detail == Some(TerminationDetail::SetupFailed) => NodeOutcome::Failed,
        Reason::ExecutorError => NodeOutcome::NotStarted,
        Reason::TerminatedByUser | Reason::AbortedByUser => NodeOutcome::Stopped,
        Reason::TerminatedByServer | Reason::ScaledDown if end.is_preempted || lost => NodeOutcome::Lost,
        Reason::TerminatedByServer | Reason::ScaledDown => NodeOutcome::Collateral,
    }
}

/// Classifies all nodes of an attempt together: they start and end as a unit.
pub fn classify_end(ends: &[NodeEnd]) -> AttemptOutcome {
    let Some((index, finding)) = ends
        .iter()
        .map(classify_node)
        .enumerate()
        .max_by_key(|(index, finding)| (*finding, std::cmp::Reverse(*index)))
    else {
        let message = "the state of its nodes is unknown".to_owned();
        return AttemptOutcome::NodesLost { machines: AttemptInstances::default(), message };
    };
    let node = &ends[index];
    let message = node_message((ends.len() > 1).then_some(index), node);
    match finding {
        NodeOutcome::Done => AttemptOutcome::Success,
        // All nodes were killed and none reports why: they did not end by themselves.
        NodeOutcome::Collateral if node.reason == Reason::ContainerExitedWithError => {
            user_failure(ends, message)
        }
        NodeOutcome::Collateral | NodeOutcome::Lost => {
            AttemptOutcome::NodesLost { machines: attempt_instances(ends), message }
        }
        NodeOutcome::NotStarted => AttemptOutcome::NotStarted { message },
        NodeOutcome::NoCapacity => AttemptOutcome::NoCapacity { message },
        NodeOutcome::Failed => user_failure(ends, message),
        NodeOutcome::Stopped => AttemptOutcome::Stopped { message },
        NodeOutcome::NeverFits => AttemptOutcome::NeverFits { message },
    }
}

fn attempt_instances(ends: &[NodeEnd]) -> AttemptInstances {
    let (gone, left): (Vec<_>, Vec<_>) = ends.iter().partition(|end| classify_node(end) == NodeOutcome::Lost);
    // Nothing is wrong with an instance that the scheduler gave to another job.
    let gone = gone.into_iter().filter(|end| end.detail != Some(TerminationDetail::PreemptedByScheduler));
    let gone = gone.filter_map(|end| end.location.clone()).collect();
    AttemptInstances { lost: gone, remaining: left.into_iter().find_map(|end| end.location.clone()) }
}

fn user_failure(ends: &[NodeEnd], message: String) -> AttemptOutcome {
    let failed: Vec<&NodeEnd> = ends.iter().filter(|end| classify_node(end) == NodeOutcome::Failed).collect();
    let codes: Vec<i32> = failed.iter().filter_map(|end| end.exit_code).collect();
    let setup = failed.iter().any(|end| end.phase == Some(Phase::Setup));
    let restartable = failed.iter().all(|end| end.reason == Reason::ContainerExitedWithError);
    AttemptOutcome::UserFailure { setup, codes, restartable, message }
}

/// Sentence about the end of a node; `index` if there are several.
fn node_message(index: Option<usize>, node: &NodeEnd) -> String {
    let first_line = node.message.as_deref().and_then(|message| message.lines().next());
    let known = first_line.map(str::trim).filter(|message| !message.is_empty());
    // For a node without capacity, the shortfalls are all the information there is.
    if let (Some(message), Reason::FailedToStartDueToNoCapacity) = (known, node.reason) {
        return match node.detail {
            Some(TerminationDetail::NeverFits) => format!("no instance can ever run it: {message}"),
            Some(TerminationDetail::NoFleets) => format!("no fleet can run it: {message}"),
            Some(
                TerminationDetail::OomKilled
                | TerminationDetail::NoDisk
                | TerminationDetail::DiskLimitExceeded
                | TerminationDetail::HostReboot
                | TerminationDetail::HostRuntimeRestart
                | TerminationDetail::SetupFailed
                | TerminationDetail::RegionFull
                | TerminationDetail::PreemptedByScheduler,
            )
            | None => format!("no capacity: {message}"),
        };
    }
    let mut text = index.map_or_else(String::new, |index| format!("node {index}: "));
    match (node.reason, node.detail, node.exit_code) {
        (Reason::ContainerExitedWithError, None, Some(code)) => {
            text.push_str(&format!("the commands exited with status {code}"));
        }
        (reason, detail, code) => {
            text.push_str(&reason.as_str().replace('_', " "));
            if let Some(detail) = detail {
                text.push_str(&format!(" ({})", detail.as_str().replace('_', " ")));
            }
            if let Some(code) = code {
                text.push_str(&format!(", exit code {code}"));
            }
        }
    }
    if node.is_preempted {
        text.push_str(", its node was preempted");
    }
    // The last output of a program is in its log.
    if let Some(message) = known.filter(|_| node.reason != Reason::ContainerExitedWithError) {
        text.push_str(&format!(": {message}"));
    }
    text
}
