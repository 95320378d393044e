//! The simulation on a few seeds, and proof that a seed determines its whole history.

use windlass_sim::runs;

/// Few, because tests are built without optimisation; `cargo xtask sim` runs hundreds.
const SEEDS: u64 = 5;

#[test]
fn no_seed_breaks_an_invariant() {
    for seed in 0..SEEDS {
        let report = runs::simulate(seed).unwrap();
        assert_eq!(report.violations, [], "replay with SEED={seed} cargo xtask sim");
        assert!(report.runs > 0 && report.passes > 0, "nothing happened in seed {seed}");
    }
}

/// Maximum number of seeds until every rare fault has occurred.
const FAULT_SEEDS_MAX: u64 = 60;
/// Seeds with many kinds of faults, run first because rare kinds take long to occur.
const EVENTFUL_SEEDS: [u64; 3] = [22, 1, 0];

const FAULTS: [&str; 20] = [
    "duplicated call",
    "lost response",
    "lost request",
    "slow call",
    "partition",
    "reboot",
    "replica frozen",
    "replica killed",
    "no capacity",
    "slow boot",
    "machine never boots",
    "machine listed late",
    "preemption",
    "machine vanished",
    "lost cloud request",
    "lost cloud response",
    "slow cloud",
    "attach refused",
    "attach hangs",
    "detach hangs",
];

#[test]
fn every_kind_of_fault_occurs() {
    let mut fired = std::collections::BTreeSet::new();
    for seed in EVENTFUL_SEEDS.into_iter().chain(0..FAULT_SEEDS_MAX) {
        fired.extend(runs::simulate(seed).unwrap().fired.into_keys());
        if FAULTS.iter().all(|fault| fired.contains(fault)) {
            return;
        }
    }
    let missing: Vec<_> = FAULTS.iter().filter(|fault| !fired.contains(*fault)).collect();
    panic!("these never happened: {missing:?}");
}

#[test]
fn a_seed_replays_to_the_same_history() {
    let (first, second) = (runs::simulate(3).unwrap(), runs::simulate(3).unwrap());
    assert_eq!((first.trace, first.passes), (second.trace, second.passes));
    assert_ne!(first.trace, runs::simulate(4).unwrap().trace);
}

/// Ends of managed tasks that must occur at least once: otherwise the checkers have no input.
const OUTCOMES: [&str; 6] =
    ["SUCCEEDED", "FAILED", "CANCELLED", "FAILED_NO_RESOURCE", "recovered", "backed off"];

#[test]
fn managed_jobs_reach_every_outcome_and_recover() {
    let mut seen = std::collections::BTreeMap::<String, u64>::new();
    for seed in (0..FAULT_SEEDS_MAX).step_by(2) {
        let report = runs::simulate(seed).unwrap();
        assert_eq!(report.violations, [], "replay with SEED={seed} cargo xtask sim");
        for (outcome, times) in report.outcomes {
            *seen.entry(outcome).or_default() += times;
        }
        if OUTCOMES.iter().all(|outcome| seen.get(*outcome).is_some_and(|times| *times > 0)) {
            return;
        }
    }
    panic!("not all of {OUTCOMES:?}: {seen:?}");
}

/// Fixed seeds of shared hosts that the tests run.
const SHARED_SEEDS: u64 = 20;

#[test]
fn projects_that_share_hosts_preempt_each_other_by_the_rules() {
    let mut preemptions = 0;
    for seed in 0..SHARED_SEEDS {
        let report = runs::simulate_shared(seed).unwrap();
        assert_eq!(report.violations, [], "replay with SEED={seed} cargo xtask sim --shared");
        preemptions += report.preemptions;
        if preemptions > 0 {
            return;
        }
    }
    panic!("nothing was preempted in {SHARED_SEEDS} seeds, so no checker of preemption had any input");
}
