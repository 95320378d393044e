//! Forecast of a queue: when waiting runs start if jobs last until their time limits.

use std::collections::{BTreeMap, BTreeSet};

use proptest::{collection::vec, prelude::*};
use uuid::Uuid;
use windlass_model::{
    id::{ProjectId, RunId, SubmissionId, UserId},
    plan::{
        budget::{Budget, BudgetPeriod, BudgetUnit},
        forecast::{HoldOwner, forecast_starts},
        place::{BlockHold, InstanceSnapshot, Inventory, PlacementOutcome, WaitingReplica, place_replicas},
        quota::{HeldResources, Quota, QuotaResource},
    },
    time::{Span, Timestamp},
};

use crate::placement::{NOW, fleet, held, host, instance, needs, offer, stock, waiting};

const NOW_SECS: i64 = NOW.0 / 1_000_000;

/// Run `n`, which needs so many of the eight CPUs.
fn run(n: u128, cpus: u32, limit: Option<i64>) -> WaitingReplica {
    let since = NOW_SECS - 100 + i64::try_from(n).unwrap();
    WaitingReplica { max_duration: limit.map(Span::secs), ..waiting(n, since, vec![needs(cpus, 0)]) }
}

/// One instance with eight blocks of a CPU each, and who holds them.
fn pool(holds: Vec<BlockHold>) -> Inventory {
    let f = fleet(1, "f");
    stock(f.clone(), vec![InstanceSnapshot { holds, ..instance(1, &f, offer(host(8, 0), 8, 0.0)) }])
}

/// Seconds from now until each run starts, by number.
fn starts(queue: &[WaitingReplica], inventory: &Inventory) -> Vec<(u128, i64)> {
    in_secs(forecast_starts(queue, inventory, &BTreeMap::new(), NOW))
}

fn in_secs(starts: BTreeMap<RunId, Timestamp>) -> Vec<(u128, i64)> {
    starts.into_iter().map(|(run, at)| (run.0.as_u128(), at.since(NOW).as_secs())).collect()
}

#[test]
fn a_run_starts_when_enough_jobs_have_reached_their_limits() {
    let inventory = pool(vec![held(900, 4, Some(NOW_SECS + 100)), held(901, 4, Some(NOW_SECS + 200))]);
    let queue = [run(1, 4, Some(50)), run(2, 8, None), run(3, 4, None)];
    // The third run uses the blocks of the first one, for ever: nothing reserves them for the second one yet.
    assert_eq!(starts(&queue, &inventory), [(1, 100), (3, 150)]);
    assert_eq!(starts(&queue[..2], &inventory), [(1, 100), (2, 200)]);
    // It waits for longer than five minutes, so its blocks are reserved.
    let older = WaitingReplica { since: NOW - Span::mins(6), ..run(2, 8, None) };
    assert_eq!(starts(&[run(1, 4, Some(50)), older, run(3, 4, None)], &inventory), [(1, 100), (2, 200)]);
}

#[test]
fn the_start_is_unknown_behind_a_job_without_a_limit() {
    let inventory = pool(vec![held(900, 8, None)]);
    assert_eq!(starts(&[run(1, 1, None)], &inventory), []);
    let inventory = pool(vec![held(900, 4, None), held(901, 4, Some(NOW_SECS + 9))]);
    assert_eq!(starts(&[run(1, 8, None), run(2, 4, None)], &inventory), [(2, 9)]);
}

#[test]
fn a_job_past_its_limit_and_a_preempted_one_end_within_a_minute() {
    let preempted = BlockHold { is_preempted: true, ..held(900, 4, None) };
    let inventory = pool(vec![preempted, held(901, 4, Some(NOW_SECS - 5))]);
    assert_eq!(starts(&[run(1, 8, None)], &inventory), [(1, 60)]);
}

#[test]
fn a_run_over_its_quota_starts_when_a_job_of_its_project_ends() {
    let project = ProjectId(Uuid::from_u128(1));
    let mut inventory = pool(vec![held(900, 2, Some(NOW_SECS + 300)), held(901, 2, Some(NOW_SECS + 30))]);
    let resource = QuotaResource::Cpus;
    inventory.quotas =
        vec![Quota { project, member: None, resource, max: Some(4), share: None, used: 2, first_end: None }];
    let user = UserId(Uuid::from_u128(1));
    let cpus = |cpus| HeldResources { cpus, ..HeldResources::default() };
    let owner = |project| HoldOwner { project, user, held: cpus(2) };
    let other = ProjectId(Uuid::from_u128(2));
    let job = |n| SubmissionId(Uuid::from_u128(n));
    let owners = BTreeMap::from([(job(900), owner(project)), (job(901), owner(other))]);
    let queue = [run(1, 2, Some(60)), run(2, 4, None)];
    assert_eq!(in_secs(forecast_starts(&queue, &inventory, &owners, NOW)), [(1, 0), (2, 300)]);
}

#[test]
fn a_run_over_its_budget_starts_with_the_next_period() {
    let mut inventory = pool(Vec::new());
    let project = ProjectId(Uuid::from_u128(1));
    inventory.budgets = vec![Budget {
        project,
        member: None,
        unit: BudgetUnit::Cost,
        period: BudgetPeriod::Day,
        warn: None,
        cap: Some(10),
        spent: 10,
        ends_at: NOW + Span::mins(30),
    }];
    let other = WaitingReplica { project: ProjectId(Uuid::from_u128(2)), ..run(2, 1, None) };
    assert_eq!(starts(&[run(1, 1, None), other.clone()], &inventory), [(1, 1_800), (2, 0)]);
    // It waits with its reason and reserves nothing.
    let older = WaitingReplica { since: NOW - Span::mins(9), ..run(1, 1, None) };
    let placements = place_replicas(&[older, other], &inventory, NOW);
    let PlacementOutcome::Waits { why, reserved } = &placements[0].outcome else { panic!("{placements:?}") };
    assert!(reserved.is_empty() && why.refusals[0].to_string().starts_with("budget: the project has spent"));
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    /// The runs that start now are those that a round of placement starts; nothing starts before.
    #[test]
    fn the_forecast_of_now_is_a_round_of_placement(
        runs in vec((1_u32..9, prop::option::of(1_i64..500)), 1..12),
        holds in vec((1_u32..4, prop::option::of(-50_i64..500)), 0..4),
    ) {
        let queue: Vec<WaitingReplica> =
            (1..).zip(&runs).map(|(n, (cpus, limit))| run(n, *cpus, *limit)).collect();
        let mut free = 8;
        let mut all = Vec::new();
        for (n, (blocks, until)) in (900..).zip(&holds) {
            if *blocks <= free {
                free -= blocks;
                all.push(held(n, *blocks, until.map(|secs| NOW_SECS + secs)));
            }
        }
        let inventory = pool(all);
        let starts = forecast_starts(&queue, &inventory, &BTreeMap::new(), NOW);
        let now: BTreeSet<RunId> = starts.iter().filter(|(_, at)| **at == NOW).map(|(run, _)| *run).collect();
        let is_placed = |outcome: &PlacementOutcome| matches!(outcome, PlacementOutcome::Placed { .. });
        let placements = place_replicas(&queue, &inventory, NOW);
        let placed: BTreeSet<RunId> =
            placements.iter().filter(|one| is_placed(&one.outcome)).map(|one| one.run).collect();
        prop_assert_eq!(now, placed);
        prop_assert!(starts.values().all(|at| *at >= NOW));
    }
}
