//! Planted bugs: each must be caught, or the simulation's silence about the real code means nothing.
//!
//! The switches are process-wide, so these tests run one to a process, as nextest does it.

use windlass_testkit::sim;

/// Seeds that may pass before somebody notices.
const SEEDS_MAX: u64 = 1_000;

/// The first seed that breaks one of the invariants, and what it broke.
#[track_caller]
fn caught(by: &[&str]) {
    for seed in 0..SEEDS_MAX {
        let found = sim::play(seed).unwrap().violations;
        if found.is_empty() {
            continue;
        }
        assert!(found.iter().any(|v| by.contains(&v.id)), "seed {seed}: want one of {by:?}, found {found:?}");
        return;
    }
    panic!("the planted bug went unnoticed for {SEEDS_MAX} seeds");
}

#[test]
fn l1_an_apply_without_token_check_is_caught() {
    use windlass_server::db::mutant::{Mutant, set};
    set(Some(Mutant::ApplyWithoutTokenCheck));
    // A stale write also unlocks the row under the hands of whoever holds it.
    caught(&["L1", "L9", "R3", "R5", "R6", "R8", "R22"]);
}

#[test]
fn l9_a_heartbeat_that_stops_renewing_is_caught() {
    use windlass_engine::mutant::{Mutant, set};
    set(Some(Mutant::HeartbeatStopsRenewing));
    // A pass whose lease is gone also goes on making what its successor knows nothing of.
    caught(&["L9", "G7"]);
}

#[test]
fn r4_a_final_status_written_outside_the_terminating_pipeline_is_caught() {
    use windlass_server::db::mutant::{Mutant, set};
    set(Some(Mutant::FinishedOutsideTerminating));
    caught(&["R4", "R5"]);
}

#[test]
fn g1_a_release_that_frees_another_owners_gpu_is_caught() {
    use windlass_model::mutant::{Mutant, set};
    set(Some(Mutant::ReleaseFreesAnother));
    caught(&["G1"]);
}
