//! The deadline policy: its rules, and its cost on recorded capacity.

use std::path::{Path, PathBuf};

use proptest::prelude::*;
use windlass_model::{
    deadline_policy::{
        DeadlineProgress, DeadlineTerms, Market, MarketRule, NodeTime, choose_market, deadline_report,
        replay::{ReplayPolicy, Trace, optimal_cost, render, replay, replay_row},
    },
    managed_job::plan::Deadline,
    time::Timestamp,
};

/// Price of spot over that of on-demand, as in the published study.
const RATIO: f64 = 0.918 / 3.06;
const HOUR: f64 = 3600.0;

fn terms(tightness: f64) -> DeadlineTerms {
    DeadlineTerms { within: 48.0 * HOUR / tightness, work: 48.0 * HOUR, changeover: 0.2 * HOUR }
}

#[expect(clippy::disallowed_methods, reason = "traces are files")]
fn read(path: &Path) -> Option<String> {
    std::fs::read_to_string(path).ok()
}

fn traces() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../shared/corpus/spot-traces")
}

#[test]
fn market_choice_follows_the_four_deadline_rules() {
    use Market::{OnDemand, Spot};
    let terms = DeadlineTerms { within: 100.0, work: 50.0, changeover: 5.0 };
    let at = |elapsed, done, holding, spot| DeadlineProgress {
        elapsed,
        done,
        current_market: holding,
        has_spot_capacity: spot,
    };
    let cases = [
        // 1: behind the line, which is at 10 after 20.
        (at(20.0, 9.0, None, false), Some(OnDemand), MarketRule::CatchUp),
        (at(20.0, 10.0, None, false), None, MarketRule::Wait),
        // 2: spot has precedence even when behind, and is kept.
        (at(20.0, 0.0, None, true), Some(Spot), MarketRule::TakeSpot),
        (at(20.0, 0.0, Some(Spot), true), Some(Spot), MarketRule::StaySpot),
        // 3: on demand until the line of 30 (15) is reached and spot is available; never to nothing.
        (at(20.0, 14.0, Some(OnDemand), true), Some(OnDemand), MarketRule::StayOnDemand),
        (at(20.0, 15.0, Some(OnDemand), true), Some(Spot), MarketRule::MoveToSpot),
        (at(20.0, 40.0, Some(OnDemand), false), Some(OnDemand), MarketRule::StayOnDemand),
        // 4: 59 left for 50 and twice 5.
        (at(41.0, 0.0, None, true), Some(OnDemand), MarketRule::SafetyNet),
        (at(40.0, 0.0, None, true), Some(Spot), MarketRule::TakeSpot),
        (at(99.0, 10.0, Some(OnDemand), true), Some(OnDemand), MarketRule::StayOnDemand),
    ];
    for (phase, market, rule) in cases {
        assert_eq!(choose_market(terms, phase), (market, rule), "{phase:?}");
    }
}

#[test]
fn the_synthetic_trace_meets_every_deadline_at_a_lower_cost_than_on_demand() {
    let trace = Trace::parse(include_str!("spot_trace.json")).unwrap();
    let rows: Vec<_> =
        [0.6, 0.8, 0.9].map(|f| replay_row("synthetic", &trace, terms(f), RATIO, 60, 6)).into();
    println!("{}", render(&rows));
    for row in rows {
        assert_eq!(row.missed, [0, 0, 0], "{row:?}");
        assert!(row.uniform < 0.85 * row.on_demand && row.optimum <= row.uniform_there, "{row:?}");
    }
    // With a tight deadline the line is better than greedy.
    let tight = replay_row("synthetic", &trace, terms(0.9), RATIO, 60, 1);
    assert!(tight.uniform < tight.greedy, "{tight:?}");
}

#[test]
fn a_trace_without_capacity_costs_what_on_demand_costs() {
    let trace = Trace { gap: 300.0, full: vec![false; 2000] };
    let outcome = replay(&trace, 0, terms(0.8), ReplayPolicy::Uniform);
    assert!(outcome.done_at.is_some_and(|at| at <= terms(0.8).within));
    assert!((outcome.cost(terms(0.8), RATIO) - 48.2 / 48.0).abs() < 1e-6, "{outcome:?}");
    let best = optimal_cost(&trace, 0, terms(0.8), RATIO).unwrap();
    assert!((0.99..1.01).contains(&best), "{best}");
    let all = Trace { gap: 300.0, full: vec![true; 2000] };
    assert!(replay(&all, 0, terms(0.8), ReplayPolicy::Uniform).cost(terms(0.8), RATIO) < 0.302);
    assert!(Trace::parse(r#"{"metadata":{"gap_seconds":0},"data":[1]}"#).is_err());
}

/// Published figures, greedy and Uniform Progress, for work/time of 0.6, 0.8 and 0.9.
const REFERENCE: [(&str, [(f64, f64); 3]); 6] = [
    ("avail-1node-aws-us-east-1a-v100", [(0.936, 0.914), (0.975, 0.955), (0.988, 0.975)]),
    ("avail-1node-aws-us-east-1c-v100", [(0.690, 0.652), (0.852, 0.764), (0.908, 0.848)]),
    ("avail-1node-aws-us-west-2b-v100", [(0.323, 0.330), (0.381, 0.373), (0.464, 0.421)]),
    ("avail-16node-aws-us-west-2a-v100", [(0.738, 0.702), (0.807, 0.770), (0.829, 0.802)]),
    ("preempt-4node-aws-us-west-2c-v100", [(0.353, 0.373), (0.509, 0.468), (0.671, 0.574)]),
    ("preempt-1node-aws-us-east-1b-intel64", [(0.319, 0.337), (0.410, 0.387), (0.595, 0.532)]),
];

#[test]
fn recorded_traces_meet_every_deadline_and_stay_within_published_costs() {
    let mut rows = Vec::new();
    let mut wrong = Vec::new();
    for (name, figures) in REFERENCE {
        let Some(text) = read(&traces().join(format!("{name}.json"))) else { continue };
        let trace = Trace::parse(&text).unwrap();
        for (f, (greedy, uniform)) in [0.6, 0.8, 0.9].into_iter().zip(figures) {
            let row = replay_row(name, &trace, terms(f), RATIO, 300, 10);
            let near = |found: f64, reported: f64| found <= reported * 1.02;
            if row.missed != [0, 0, 0] || !near(row.uniform, uniform) || !near(row.greedy, greedy) {
                wrong.push(format!("{row:?}, published {greedy} / {uniform}"));
            }
            if row.optimum > row.uniform_there {
                wrong.push(format!("{row:?}: better than the optimum"));
            }
            rows.push(row);
        }
    }
    if rows.is_empty() {
        println!("the traces are absent ({}): nothing to replay", traces().display());
    }
    println!("{}", render(&rows));
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn deadline_report_gives_node_time_per_market_and_whether_it_was_on_time() {
    let at = |secs| Timestamp::from_secs(secs);
    let deadline = Deadline { within: 100, work: 50, changeover: 5 };
    let stretches = [
        NodeTime { market: Market::Spot, from: at(10), to: at(30) },
        NodeTime { market: Market::OnDemand, from: at(40), to: at(80) },
    ];
    let on_time = deadline_report(deadline, at(0), at(80), 2, &stretches);
    assert_eq!((on_time.on_time, on_time.spare), (true, 20.0));
    assert_eq!((on_time.spot_node_seconds, on_time.on_demand_node_seconds), (40.0, 80.0));
    assert!(!deadline_report(deadline, at(0), at(101), 2, &stretches).on_time);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, failure_persistence: None, ..ProptestConfig::default() })]

    /// For any capacity: if on-demand nodes could meet the deadline, it is met.
    #[test]
    fn no_feasible_deadline_is_missed_for_any_spot_capacity(
        lengths in prop::collection::vec(1_usize..60, 1..60),
        first in any::<bool>(),
        tightness in 0.3_f64..0.95,
        hours in 1_u32..48,
    ) {
        let mut full = Vec::new();
        for (index, length) in lengths.into_iter().enumerate() {
            full.extend(std::iter::repeat_n((index % 2 == 0) == first, length));
        }
        full.resize(4000, false);
        let trace = Trace { gap: 300.0, full };
        let work = f64::from(hours) * HOUR;
        let terms = DeadlineTerms { within: work / tightness, work, changeover: 0.2 * HOUR };
        let feasible = replay(&trace, 0, terms, ReplayPolicy::OnDemand).done_at.is_some();
        if feasible && terms.within >= terms.work + 2.0 * terms.changeover {
            let outcome = replay(&trace, 0, terms, ReplayPolicy::Uniform);
            prop_assert!(outcome.done_at.is_some(), "{outcome:?}");
        }
    }
}
