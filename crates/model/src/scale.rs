//! How many replicas a service has: autoscaling, who goes first, and rolling deployment.

use crate::time::{Span, Timestamp};

pub const SCALE_UP_DELAY_DEFAULT: Span = Span::mins(5);
pub const SCALE_DOWN_DELAY_DEFAULT: Span = Span::mins(10);
/// How many replicas above the desired number a rolling deployment may have.
pub const SURGE_MAX: u32 = 1;

/// `replicas:` and `scaling:` of one group.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Scaling {
    pub min: u32,
    pub max: u32,
    /// `None` = a fixed count.
    pub rule: Option<Rule>,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rule {
    /// Requests per second that one replica is to serve.
    pub target: f64,
    pub window: Span,
    pub up_delay: Span,
    pub down_delay: Span,
}

/// The desired number and why.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Desired {
    pub count: u32,
    pub reason: Reason,
    /// When it may change without new statistics: a delay runs out.
    pub due: Option<Timestamp>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Reason {
    /// As it was.
    Steady,
    /// Outside `min..max`, or a fixed count.
    Bounds,
    /// Nobody measured: hold, never drop.
    NoStatistics,
    /// The load asks for it.
    Load,
    /// From nothing: at once.
    FirstRequest,
    /// The load asks for another number, but the last change was too recent.
    Delayed { wants: u32 },
}

/// Requests per second from a count over a window.
pub fn rps(requests: u64, window: Span) -> f64 {
    let seconds = window.0 as f64 / 1e6;
    if seconds > 0.0 { requests as f64 / seconds } else { 0.0 }
}

/// What the group should have. `current` is the last desired number; `requests` those of the last window
/// over all gateway replicas, `None` where nobody measured.
pub fn desired(
    scaling: &Scaling,
    current: u32,
    requests: Option<u64>,
    scaled_at: Option<Timestamp>,
    now: Timestamp,
) -> Desired {
    let (min, max) = (scaling.min.min(scaling.max), scaling.max);
    let bounded = current.clamp(min, max);
    let hold = |reason| {
        let reason = if bounded == current { reason } else { Reason::Bounds };
        Desired { count: bounded, reason, due: None }
    };
    let Some(rule) = &scaling.rule else { return hold(Reason::Steady) };
    let Some(requests) = requests else { return hold(Reason::NoStatistics) };
    let wants = replicas_for(rps(requests, rule.window), rule.target).clamp(min, max);
    if wants == bounded {
        return hold(Reason::Steady);
    }
    if bounded == 0 {
        return Desired { count: wants, reason: Reason::FirstRequest, due: None };
    }
    let delay = if wants > bounded { rule.up_delay } else { rule.down_delay };
    match scaled_at.map(|at| at + delay) {
        Some(ripe) if now < ripe => Desired { due: Some(ripe), ..hold(Reason::Delayed { wants }) },
        Some(_) | None => Desired { count: wants, reason: Reason::Load, due: None },
    }
}

fn replicas_for(rps: f64, target: f64) -> u32 {
    let replicas = (rps / target).ceil();
    if replicas.is_finite() && replicas > 0.0 { replicas.min(f64::from(u32::MAX)) as u32 } else { 0 }
}

/// How far a replica has come; those that serve least come first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Progress {
    Submitted,
    /// Provisioning or pulling.
    Starting,
    /// Runs, but gets no traffic.
    Running,
    Serving,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Replica {
    pub num: u32,
    pub progress: Progress,
    pub up_to_date: bool,
    /// On its way out: not final, but nobody counts on it.
    pub stopping: bool,
}

/// Which `count` replicas go: out-of-date ones, then those that serve least, then the highest numbers.
pub fn scale_down(replicas: &[Replica], count: u32) -> Vec<u32> {
    let mut order: Vec<&Replica> = replicas.iter().filter(|replica| !replica.stopping).collect();
    order.sort_by_key(|replica| (replica.up_to_date, replica.progress, std::cmp::Reverse(replica.num)));
    order.iter().take(count as usize).map(|replica| replica.num).collect()
}

/// Numbers for `count` new replicas: inactive ones of the group first, then the next free ones.
/// `taken` are the numbers of all groups, active or not.
pub fn scale_up(inactive: &[u32], taken: &[u32], count: u32) -> Vec<u32> {
    let mut reused = inactive.to_vec();
    reused.sort_unstable();
    reused.dedup();
    let next = taken.iter().chain(inactive).max().map_or(0, |last| last + 1);
    reused.into_iter().chain(next..).take(count as usize).collect()
}

/// What a rolling deployment does now.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Roll {
    /// How many up-to-date replicas to create.
    pub create: u32,
    pub stop: Vec<u32>,
}

/// One step of a rolling deployment of a group with out-of-date replicas. Call again when something
/// changed; nothing to do and nothing out of date means it is over.
///
/// Replicas that get no traffic go at once, the others only as far as enough serve without them; new ones
/// are created while all together are at most one more than desired.
pub fn roll(replicas: &[Replica], desired: u32) -> Roll {
    let count = |test: &dyn Fn(&&Replica) -> bool| {
        u32::try_from(replicas.iter().filter(test).count()).unwrap_or(u32::MAX)
    };
    let total = count(&|_| true);
    let current = count(&|replica| replica.up_to_date && !replica.stopping);
    let serving = count(&|replica| replica.progress == Progress::Serving && !replica.stopping);
    let create = desired.saturating_sub(current).min((desired + SURGE_MAX).saturating_sub(total));
    let mut old: Vec<&Replica> =
        replicas.iter().filter(|replica| !replica.up_to_date && !replica.stopping).collect();
    old.sort_by_key(|replica| (replica.progress, std::cmp::Reverse(replica.num)));
    let mut spare = serving.saturating_sub(desired);
    let mut stop = Vec::new();
    for replica in old {
        match replica.progress {
            Progress::Submitted | Progress::Starting | Progress::Running => stop.push(replica.num),
            Progress::Serving if spare > 0 => {
                spare -= 1;
                stop.push(replica.num);
            }
            Progress::Serving => {}
        }
    }
    Roll { create, stop }
}
