//! Planted bugs: each must be detected, or the simulation proves nothing about the real code.
//!
//! The switches are process-wide, so each of these tests needs a separate process, as nextest provides.

use std::{collections::BTreeSet, io::Write as _};

use windlass_planted_bugs::{Bug, plant};
use windlass_sim::{
    queue_sim,
    runs::{FaultBias, Report, simulate, simulate_shared, simulate_with},
};

/// Maximum number of seeds until a bug is detected.
const SEEDS_MAX: u64 = 1_000;

/// Runs seeds until one violates one of these invariants. A bug may violate others before: the failure message lists
/// them.
#[track_caller]
fn assert_caught(play: impl Fn(u64) -> anyhow::Result<Report>, by: &[&str]) {
    assert_caught_from(0, play, by);
}

/// Begins with a seed that detected the bug when this was written: for a rare one the seeds before it take minutes.
#[track_caller]
fn assert_caught_from(first: u64, play: impl Fn(u64) -> anyhow::Result<Report>, by: &[&str]) {
    let mut others = BTreeSet::new();
    for seed in first..first + SEEDS_MAX {
        let found = play(seed).unwrap().violations;
        if found.iter().any(|violation| by.contains(&violation.id)) {
            let _ = writeln!(std::io::stderr(), "caught by seed {seed}");
            return;
        }
        others.extend(found.iter().map(|violation| violation.id));
    }
    panic!("no violation of {by:?} in {SEEDS_MAX} seeds from {first} on, only of {others:?}");
}

#[test]
fn l1_an_apply_without_token_check_is_caught() {
    plant(Some(Bug::ApplyWithoutTokenCheck));
    // A stale write also releases the lease of the current holder.
    assert_caught_from(
        78,
        |seed| simulate_with(seed, FaultBias::ClockJumps),
        &["L1", "L9", "R3", "R5", "R6", "R8", "R22"],
    );
}

#[test]
fn l9_a_heartbeat_that_stops_renewing_is_caught() {
    plant(Some(Bug::HeartbeatStopsRenewing));
    assert_caught(|seed| simulate_with(seed, FaultBias::SlowCalls), &["L9"]);
}

#[test]
fn r4_a_final_status_written_outside_the_terminating_pipeline_is_caught() {
    plant(Some(Bug::FinishOutsideTerminating));
    assert_caught(simulate, &["R4", "R5"]);
}

#[test]
fn g1_a_release_that_frees_another_owners_gpu_is_caught() {
    plant(Some(Bug::ReleaseFreesFormerDevices));
    assert_caught(simulate, &["G1"]);
}

#[test]
fn r15_a_dispatcher_that_treats_missing_jobs_as_ended_is_caught() {
    plant(Some(Bug::MissingJobsTreatedAsEnded));
    assert_caught_from(3, queue_sim::simulate, &["R15"]);
}

#[test]
fn c8_a_dispatcher_that_ignores_priorities_is_caught() {
    plant(Some(Bug::IgnorePriority));
    assert_caught(queue_sim::simulate, &["C8"]);
}

#[test]
fn r27_a_waiting_job_that_is_not_woken_is_caught() {
    plant(Some(Bug::FollowerNotWoken));
    assert_caught(simulate, &["R27"]);
}

#[test]
fn m5_slots_granted_without_being_counted_are_caught() {
    plant(Some(Bug::SlotGrantWithoutRecount));
    assert_caught_from(40, simulate, &["M5"]);
}

#[test]
fn m6_an_attempt_started_before_the_previous_one_is_released_is_caught() {
    plant(Some(Bug::RecoverBeforeRelease));
    assert_caught(simulate, &["M6"]);
}

#[test]
fn m7_a_task_started_after_a_failed_task_is_caught() {
    plant(Some(Bug::StartAfterFailedTask));
    assert_caught_from(12, simulate, &["M7"]);
}

/// Projects that share hosts. Their seeds take long.
mod nightly {
    use super::*;

    #[test]
    fn q1_a_quota_that_is_not_counted_again_is_caught() {
        plant(Some(Bug::QuotaWithoutRecount));
        assert_caught(simulate_shared, &["Q1"]);
    }

    #[test]
    fn p4_blocks_that_are_not_kept_are_caught() {
        plant(Some(Bug::PromisesForgotten));
        assert_caught(simulate_shared, &["P3", "P4"]);
    }

    #[test]
    fn p2_a_preemption_without_a_rule_is_caught() {
        plant(Some(Bug::PreemptionWithoutRule));
        assert_caught(simulate_shared, &["P2"]);
    }

    #[test]
    fn s1_a_large_job_that_small_ones_starve_is_caught() {
        plant(Some(Bug::ReservationsForgotten));
        assert_caught(simulate_shared, &["S1"]);
    }
}
