//! Deadline policy: uses spot nodes, which may be reclaimed, without missing a deadline.
//!
//! The policy is Uniform Progress (Wu et al., "Can't Be Late", NSDI 2024): progress stays at or above the straight line
//! from nothing done to all done, on cheap nodes whenever available, and on on-demand nodes if behind the line or if
//! nothing else is in time. Four rules, no forecast. `replay` computes the cost on traces.

pub mod replay;

use serde::{Deserialize, Serialize};

use crate::{
    managed_job::plan::Deadline,
    time::{Span, Timestamp},
};

/// Pricing of nodes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Market {
    /// Cheap, and may be reclaimed at any time.
    Spot,
    OnDemand,
}

/// Terms of a deadline, in seconds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DeadlineTerms {
    /// R(0): time from the start to the deadline.
    pub within: f64,
    /// C(0): duration of the work without interruptions.
    pub work: f64,
    /// d: time that new nodes cost before there is progress again.
    pub changeover: f64,
}

/// Current state of a task.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DeadlineProgress {
    /// t: seconds since the start.
    pub elapsed: f64,
    /// cp(t): seconds of completed work.
    pub done: f64,
    /// Market of its current nodes; `None` if it has none, or just lost them.
    pub current_market: Option<Market>,
    /// True if all nodes that the task needs are available on the spot market now. Fewer counts as none.
    pub has_spot_capacity: bool,
}

/// Rule that chose a market, for the event and the report.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MarketRule {
    /// 1: idle and behind the line.
    CatchUp,
    /// 2: idle, and spot capacity is available.
    TakeSpot,
    /// 2: on spot, until it is lost.
    StaySpot,
    /// 3: on demand, and not far enough ahead, or nothing cheaper is available.
    StayOnDemand,
    /// 3: far enough ahead, and spot capacity is available.
    MoveToSpot,
    /// 4: only on-demand nodes are in time.
    SafetyNet,
    /// At or above the line, and no spot capacity.
    Wait,
}

impl MarketRule {
    /// Reason of the events that it causes.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::CatchUp => "catch_up",
            Self::TakeSpot => "take_spot",
            Self::StaySpot => "stay_spot",
            Self::StayOnDemand => "stay_on_demand",
            Self::MoveToSpot => "move_to_spot",
            Self::SafetyNet => "safety_net",
            Self::Wait => "wait",
        }
    }

    pub const fn message(self) -> &'static str {
        match self {
            Self::CatchUp => "behind schedule: using on-demand nodes",
            Self::TakeSpot => "spot capacity is available",
            Self::StaySpot => "on spot nodes until they are lost",
            Self::StayOnDemand => {
                "on-demand nodes until it is ahead of schedule and spot capacity is available"
            }
            Self::MoveToSpot => "ahead of schedule, and spot capacity is available",
            Self::SafetyNet => "only on-demand nodes can still meet the deadline",
            Self::Wait => "ahead of schedule: waiting for spot capacity",
        }
    }
}

/// Returns the market to use now; `None` means to wait.
pub fn choose_market(terms: DeadlineTerms, at: DeadlineProgress) -> (Option<Market>, MarketRule) {
    let DeadlineTerms { within, work, changeover } = terms;
    let line = |t: f64| t * work / within;
    let (time_left, work_left) = (within - at.elapsed, work - at.done);
    let has_slack = time_left >= work_left + 2.0 * changeover;
    match at.current_market {
        Some(Market::Spot) => (Some(Market::Spot), MarketRule::StaySpot),
        Some(Market::OnDemand) => {
            let ahead = at.done >= line(at.elapsed + 2.0 * changeover);
            if at.has_spot_capacity && ahead && has_slack {
                (Some(Market::Spot), MarketRule::MoveToSpot)
            } else {
                (Some(Market::OnDemand), MarketRule::StayOnDemand)
            }
        }
        None if !has_slack => (Some(Market::OnDemand), MarketRule::SafetyNet),
        None if at.has_spot_capacity => (Some(Market::Spot), MarketRule::TakeSpot),
        None if at.done < line(at.elapsed) => (Some(Market::OnDemand), MarketRule::CatchUp),
        None => (None, MarketRule::Wait),
    }
}

impl From<Deadline> for DeadlineTerms {
    fn from(deadline: Deadline) -> Self {
        Self {
            within: deadline.within as f64,
            work: deadline.work as f64,
            changeover: deadline.changeover as f64,
        }
    }
}

/// Summary of a task with a deadline: on time or not, and its use of both markets.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct DeadlineReport {
    pub on_time: bool,
    /// Seconds left at the end; negative if it was late.
    pub spare: f64,
    /// Seconds in RUNNING on each market, times the number of nodes.
    pub spot_node_seconds: f64,
    pub on_demand_node_seconds: f64,
    /// Number of times that nodes were acquired.
    pub changeovers: u32,
}

/// One period of time on nodes of one market.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeTime {
    pub market: Market,
    pub from: Timestamp,
    pub to: Timestamp,
}

/// Returns the report of a task that began at `began` and ended at `ended`.
pub fn deadline_report(
    deadline: Deadline,
    began: Timestamp,
    ended: Timestamp,
    nodes: u32,
    stretches: &[NodeTime],
) -> DeadlineReport {
    let spare = (began + Span::secs(deadline.within)).since(ended);
    let paid = |market: Market| -> f64 {
        let of = stretches.iter().filter(|node_time| node_time.market == market);
        of.map(|node_time| node_time.to.since(node_time.from).0.max(0) as f64 / 1e6).sum::<f64>()
            * f64::from(nodes)
    };
    DeadlineReport {
        on_time: spare.0 >= 0,
        spare: spare.0 as f64 / 1e6,
        spot_node_seconds: paid(Market::Spot),
        on_demand_node_seconds: paid(Market::OnDemand),
        changeovers: u32::try_from(stretches.len()).unwrap_or(u32::MAX),
    }
}
