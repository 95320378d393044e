//! Replay of policies on recorded capacity: the cost of each, and whether it is on time.
//!
//! One decision at the start of each tick, with that tick's capacity known and nothing after it. New nodes are paid
//! from their acquisition, and make no progress for the time of a changeover.

use std::fmt::Write as _;

use serde::Deserialize;

use super::{DeadlineProgress, DeadlineTerms, Market, choose_market};

/// Recorded capacity.
#[derive(Clone, Debug, PartialEq)]
pub struct Trace {
    /// Seconds of one tick.
    pub gap: f64,
    /// For each tick, true if all nodes were available.
    pub full: Vec<bool>,
}

#[derive(Debug, thiserror::Error)]
pub enum TraceError {
    #[error("invalid trace")]
    Json(#[from] serde_json::Error),
    #[error("invalid trace: no nodes in any tick, or `gap_seconds` is not positive")]
    Empty,
}

#[derive(Deserialize)]
struct TraceFile {
    metadata: TraceMetadata,
    data: Vec<u32>,
}

#[derive(Deserialize)]
struct TraceMetadata {
    gap_seconds: f64,
}

impl Trace {
    /// Parses `{"metadata": {"gap_seconds": G}, "data": [n, …]}`. A task needs the maximum number of nodes that it ever
    /// has.
    pub fn parse(text: &str) -> Result<Self, TraceError> {
        let file: TraceFile = serde_json::from_str(text)?;
        let gap = file.metadata.gap_seconds;
        let most = file.data.iter().copied().max().unwrap_or(0);
        if most == 0 || !gap.is_finite() || gap <= 0.0 {
            return Err(TraceError::Empty);
        }
        Ok(Self { gap, full: file.data.iter().map(|nodes| *nodes == most).collect() })
    }

    /// Returns this number of starts, evenly over the trace, each with room for the whole deadline.
    pub fn starts(&self, terms: DeadlineTerms, count: usize) -> Vec<usize> {
        let room = (terms.within / self.gap) as usize + 2;
        let last = self.full.len().saturating_sub(room);
        (0..count).map(|start| start * last / count.max(1)).collect()
    }
}

/// Policy to replay.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReplayPolicy {
    /// On-demand nodes from start to end.
    OnDemand,
    /// Spot if available, else nothing, until only on-demand nodes are in time.
    Greedy,
    /// The policy of this module.
    Uniform,
}

/// Result of one replay. Times are in seconds.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct ReplayOutcome {
    pub spot: f64,
    pub on_demand: f64,
    pub changeovers: u32,
    /// Time at which the work was done; `None`: not before the deadline.
    pub done_at: Option<f64>,
}

impl ReplayOutcome {
    /// Returns the cost in units of the plain work on demand; `ratio` is the price of spot over that of on-demand.
    pub fn cost(&self, terms: DeadlineTerms, ratio: f64) -> f64 {
        (self.on_demand + self.spot * ratio) / terms.work
    }
}

/// Replays one policy from one start.
pub fn replay(trace: &Trace, start: usize, terms: DeadlineTerms, policy: ReplayPolicy) -> ReplayOutcome {
    let mut out = ReplayOutcome::default();
    let (mut done, mut holding, mut warming) = (0.0, None, 0.0);
    for (tick, &spot) in trace.full.iter().skip(start).enumerate() {
        let elapsed = tick as f64 * trace.gap;
        if elapsed >= terms.within {
            break;
        }
        if holding == Some(Market::Spot) && !spot {
            holding = None;
        }
        let next = decide(
            policy,
            terms,
            DeadlineProgress { elapsed, done, current_market: holding, has_spot_capacity: spot },
        );
        if next.is_some() && next != holding {
            out.changeovers += 1;
            warming = terms.changeover;
        }
        holding = next;
        let Some(market) = holding else { continue };
        let idle = f64::min(warming, trace.gap);
        warming -= idle;
        let worked = f64::min(trace.gap - idle, terms.work - done);
        done += worked;
        match market {
            Market::Spot => out.spot += idle + worked,
            Market::OnDemand => out.on_demand += idle + worked,
        }
        // Sums of fractions end slightly below the whole.
        if done >= terms.work - 1e-6 {
            let at = elapsed + idle + worked;
            out.done_at = (at <= terms.within + 1e-6).then_some(at);
            break;
        }
    }
    out
}

fn decide(policy: ReplayPolicy, terms: DeadlineTerms, at: DeadlineProgress) -> Option<Market> {
    match policy {
        ReplayPolicy::OnDemand => Some(Market::OnDemand),
        ReplayPolicy::Uniform => choose_market(terms, at).0,
        ReplayPolicy::Greedy => {
            let late = terms.within - at.elapsed < terms.work - at.done + 2.0 * terms.changeover;
            match at.current_market {
                Some(market) => Some(market),
                None if late => Some(Market::OnDemand),
                None if at.has_spot_capacity => Some(Market::Spot),
                None => None,
            }
        }
    }
}

/// Returns the minimum cost with perfect foresight, in the same units as [`Outcome::cost`]: the cheapest path through
/// the trace, in steps of one changeover. A step has spot capacity if any tick of it has, so this errs downwards.
/// `None`: not even on-demand nodes are in time.
pub fn optimal_cost(trace: &Trace, start: usize, terms: DeadlineTerms, ratio: f64) -> Option<f64> {
    let ticks = ((terms.changeover / trace.gap).round() as usize).max(1);
    let step = trace.gap * ticks as f64;
    let steps = (terms.within / step) as usize;
    let work = (terms.work / step).floor() as usize;
    let spot: Vec<bool> = trace.full[start.min(trace.full.len())..]
        .chunks(ticks)
        .take(steps)
        .map(|chunk| chunk.iter().any(|full| *full))
        .collect();
    // best[progress][holding]: the minimum cost; holding is nothing, spot or on-demand.
    let mut best = vec![[f64::INFINITY; 3]; work + 1];
    best[0][0] = 0.0;
    for (index, spot) in spot.into_iter().enumerate() {
        let mut next = vec![[f64::INFINITY; 3]; work + 1];
        next[work] = best[work];
        for (progress, cells) in best.iter().enumerate().take(work.min(index + 1)) {
            for (holding, &paid) in cells.iter().enumerate().filter(|(_, paid)| paid.is_finite()) {
                let mut reach = |to: usize, holding: usize, price: f64| {
                    let cell = &mut next[to][holding];
                    *cell = f64::min(*cell, paid + price);
                };
                reach(progress, 0, 0.0);
                if spot {
                    reach(progress + usize::from(holding == 1), 1, ratio);
                }
                reach(progress + usize::from(holding == 2), 2, 1.0);
            }
        }
        best = next;
    }
    let least = best[work].iter().copied().fold(f64::INFINITY, f64::min);
    least.is_finite().then(|| least * step / terms.work)
}

/// One line of the report: means over all starts, and the number of missed deadlines.
#[derive(Clone, Debug, PartialEq)]
pub struct ReplayRow {
    pub trace: String,
    /// Work over time: 0.8 leaves a fifth of the time free.
    pub tightness: f64,
    pub on_demand: f64,
    pub greedy: f64,
    pub uniform: f64,
    pub missed: [u32; 3],
    /// The optimum costs a thousand times more to compute than a replay, so it has few starts: the mean of the optimum
    /// over them, and that of Uniform Progress over the same ones.
    pub optimum: f64,
    pub uniform_there: f64,
}

/// Replays all policies from `starts` starts, and computes the optimum for `optima` of them.
pub fn replay_row(
    name: &str,
    trace: &Trace,
    terms: DeadlineTerms,
    ratio: f64,
    starts: usize,
    optima: usize,
) -> ReplayRow {
    let policies = [ReplayPolicy::OnDemand, ReplayPolicy::Greedy, ReplayPolicy::Uniform];
    let (mut costs, mut missed) = ([0.0; 3], [0; 3]);
    let at = trace.starts(terms, starts);
    for &start in &at {
        for (index, policy) in policies.into_iter().enumerate() {
            let outcome = replay(trace, start, terms, policy);
            costs[index] += outcome.cost(terms, ratio) / at.len() as f64;
            missed[index] += u32::from(outcome.done_at.is_none());
        }
    }
    let few: Vec<(f64, f64)> = at
        .iter()
        .step_by((at.len() / optima.max(1)).max(1))
        .filter_map(|&start| {
            let ours = replay(trace, start, terms, ReplayPolicy::Uniform).cost(terms, ratio);
            optimal_cost(trace, start, terms, ratio).map(|best| (best, ours))
        })
        .collect();
    let mean = |of: fn(&(f64, f64)) -> f64| few.iter().map(of).sum::<f64>() / few.len().max(1) as f64;
    ReplayRow {
        trace: name.to_owned(),
        tightness: terms.work / terms.within,
        on_demand: costs[0],
        greedy: costs[1],
        uniform: costs[2],
        missed,
        optimum: mean(|pair| pair.0),
        uniform_there: mean(|pair| pair.1),
    }
}

/// Renders the report as a table.
pub fn render(rows: &[ReplayRow]) -> String {
    let mut text = String::from(
        "| trace | work/time | on-demand | greedy | ours | saved | missed | optimum, few starts | ours there |\n\
         | --- | --- | --- | --- | --- | --- | --- | --- | --- |\n",
    );
    for row in rows {
        let saved = (1.0 - row.uniform) * 100.0;
        // Writing to a String cannot fail.
        let _ = writeln!(
            text,
            "| {} | {:.1} | {:.3} | {:.3} | {:.3} | {saved:.0} % | {} | {:.3} | {:.3} |",
            row.trace,
            row.tightness,
            row.on_demand,
            row.greedy,
            row.uniform,
            row.missed[2],
            row.optimum,
            row.uniform_there
        );
    }
    text
}
