//! The simulation on a handful of seeds, and the proof that a seed is a whole history.

use windlass_testkit::sim;

/// Few, because tests are built without optimisation; `cargo xtask sim` plays hundreds.
const SEEDS: u64 = 5;

#[test]
fn no_seed_breaks_an_invariant() {
    for seed in 0..SEEDS {
        let report = sim::play(seed).unwrap();
        assert_eq!(report.violations, [], "replay with SEED={seed} cargo xtask sim");
        assert!(report.runs > 0 && report.passes > 0, "nothing happened in seed {seed}");
    }
}

#[test]
fn every_kind_of_fault_really_happens() {
    let mut fired = std::collections::BTreeMap::new();
    for seed in 0..SEEDS {
        for (fault, times) in sim::play(seed).unwrap().fired {
            *fired.entry(fault).or_insert(0) += times;
        }
    }
    for fault in [
        "doubled call",
        "lost answer",
        "lost request",
        "slow call",
        "partition",
        "reboot",
        "replica frozen",
        "replica killed",
        "no capacity",
        "slow boot",
        "machine never boots",
        "preemption",
        "machine vanished",
        "cloud deaf",
        "cloud mute",
        "slow cloud",
        "attach refused",
        "attach hangs",
        "detach hangs",
    ] {
        assert!(fired.get(fault).is_some_and(|times| *times > 0), "`{fault}` never happened: {fired:?}");
    }
}

#[test]
fn a_seed_replays_to_the_same_history() {
    let (first, second) = (sim::play(3).unwrap(), sim::play(3).unwrap());
    assert_eq!((first.trace, first.passes), (second.trace, second.passes));
    assert_ne!(first.trace, sim::play(4).unwrap().trace);
}
