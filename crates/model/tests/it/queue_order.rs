//! Order of waiting replicas of several projects.

use proptest::{collection::vec, prelude::*};
use uuid::Uuid;
use windlass_model::{
    config::run::RunClass,
    id::{ProjectId, RunId},
    plan::{
        place::{InstanceSnapshot, Inventory, PlacementOutcome, WaitingReplica, place_replicas},
        queue_order::{OVERDUE_AFTER, OrderRule, ProjectUsage, list_before, list_order},
        quota::{Quota, QuotaResource},
    },
    time::Span,
};

use crate::placement::{NOW, fleet, held, host, instance, needs, offer, stock, waiting};

fn project(n: u128) -> ProjectId {
    ProjectId(Uuid::from_u128(n))
}

/// Run `n` of a project; lower numbers wait for longer. It is for one of eight blocks with a CPU each.
fn of(n: u128, owner: u128) -> WaitingReplica {
    let since = NOW.0 / 1_000_000 - 200 + i64::try_from(n).unwrap();
    WaitingReplica { project: project(owner), ..waiting(n, since, vec![needs(1, 0)]) }
}

/// One instance with so many free blocks of eight.
fn free(blocks: u32) -> Inventory {
    let f = fleet(1, "f");
    let holds = if blocks < 8 { vec![held(900, 8 - blocks, None)] } else { Vec::new() };
    let here = InstanceSnapshot { holds, ..instance(1, &f, offer(host(8, 0), 8, 0.0)) };
    stock(f, vec![here])
}

fn usage(owner: u128, used: f64, held: u64, weight: u32) -> ProjectUsage {
    ProjectUsage { project: project(owner), used, held, weight }
}

fn share(owner: u128, share: u64, used: u64) -> Quota {
    let resource = QuotaResource::Cpus;
    Quota {
        project: project(owner),
        member: None,
        resource,
        max: None,
        share: Some(share),
        used,
        first_end: None,
    }
}

/// Numbers of the runs in the order in which they were considered, and of those that were placed.
fn order(queue: &[WaitingReplica], inventory: &Inventory) -> (Vec<u128>, Vec<u128>) {
    let placements = place_replicas(queue, inventory, NOW);
    let all = placements.iter().map(|one| one.run.0.as_u128()).collect();
    let placed = placements.iter().filter(|one| matches!(one.outcome, PlacementOutcome::Placed { .. }));
    (all, placed.map(|one| one.run.0.as_u128()).collect())
}

#[test]
fn classes_come_before_everything_else() {
    let idle = WaitingReplica { class: RunClass::Idle, priority: 100, ..of(1, 1) };
    let normal = of(2, 2);
    let urgent = WaitingReplica { class: RunClass::Urgent, ..of(3, 3) };
    let inventory =
        Inventory { quotas: vec![share(1, 8, 0)], usage: vec![usage(3, 1e9, 8_000, 1)], ..free(1) };
    assert_eq!(order(&[idle, normal, urgent], &inventory), (vec![3, 2, 1], vec![3]));
}

#[test]
fn a_run_that_has_waited_for_a_week_comes_before_all_others() {
    let week =
        |n: u128| WaitingReplica { since: NOW - OVERDUE_AFTER - Span::secs(10 - n as i64), ..of(n, 1) };
    let idle = WaitingReplica { class: RunClass::Idle, ..week(2) };
    let oldest = WaitingReplica { project: project(2), ..week(1) };
    let urgent = WaitingReplica { class: RunClass::Urgent, ..of(3, 3) };
    let inventory = Inventory { usage: vec![usage(1, 1e9, 8_000, 1)], ..free(1) };
    let queue = [urgent, idle.clone(), oldest];
    assert_eq!(order(&queue, &inventory), (vec![1, 2, 3], vec![1]));
    // It was preempted after it had run for long: it waits since then.
    let again = WaitingReplica { resubmitted_at: Some(NOW), ..idle };
    assert_eq!(order(&[queue[0].clone(), again], &inventory).0, [3, 2]);
    let before = list_before(&queue, &[], Vec::new(), RunId(Uuid::from_u128(3)), NOW);
    assert_eq!(before.iter().map(|(_, rule)| *rule).collect::<Vec<_>>(), [OrderRule::Age, OrderRule::Age]);
}

#[test]
fn a_project_within_its_share_comes_before_those_that_borrow() {
    let queue = [of(1, 1), of(2, 1), of(3, 2), of(4, 2)];
    let inventory = Inventory {
        quotas: vec![share(1, 4, 4), share(2, 4, 3)],
        usage: vec![usage(2, 1e9, 0, 1)],
        ..free(2)
    };
    // The second run of project 2 would borrow, and that project used more.
    assert_eq!(order(&queue, &inventory), (vec![3, 1, 2, 4], vec![3, 1]));
}

#[test]
fn the_project_that_used_less_for_its_weight_comes_first_and_priority_counts_within_a_project() {
    let high = WaitingReplica { priority: 100, ..of(3, 1) };
    let queue = [of(1, 1), of(2, 2), high];
    let used = |first, second| Inventory { usage: vec![first, second], ..free(1) };
    let (all, placed) = order(&queue, &used(usage(1, 7_000_000.0, 0, 1), usage(2, 6_000_000.0, 0, 1)));
    assert_eq!((all, placed), (vec![2, 3, 1], vec![2]));
    let (all, _) = order(&queue, &used(usage(1, 7_000_000.0, 0, 2), usage(2, 6_000_000.0, 0, 1)));
    assert_eq!(all, [3, 1, 2]);
}

#[test]
fn projects_that_start_together_take_turns() {
    let queue = [of(1, 1), of(2, 1), of(3, 1), of(4, 2), of(5, 2), of(6, 3)];
    let (all, placed) = order(&queue, &free(4));
    assert_eq!((all, placed), (vec![1, 4, 6, 2, 5, 3], vec![1, 4, 6, 2]));
    // What a project holds already counts.
    let inventory = Inventory { usage: vec![usage(1, 0.0, 250, 1)], ..free(4) };
    assert_eq!(order(&queue, &inventory).0, [4, 6, 5, 1, 2, 3]);
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    /// Every replica is considered once; within a project the order is that of a project alone; the order of the
    /// arguments does not matter.
    #[test]
    fn the_order_is_complete_and_keeps_the_queue_of_each_project(
        runs in vec((1_u128..5, 0_u32..4, 0_usize..3), 1..40),
        used in vec((0_u32..1_000_000, 0_u64..9_000, 1_u32..4), 4),
        shares in vec(0_u64..5, 4),
        blocks in 0_u32..9,
    ) {
        let queue: Vec<WaitingReplica> = runs.iter().enumerate().map(|(at, (owner, priority, class))| {
            let class = RunClass::ALL[*class];
            WaitingReplica { class, priority: *priority, ..of(at as u128 + 1, *owner) }
        }).collect();
        let mut inventory = free(blocks.max(1));
        inventory.usage = (1..).zip(&used)
            .map(|(owner, (used, held, weight))| usage(owner, f64::from(*used), *held, *weight)).collect();
        inventory.quotas = (1..).zip(&shares).map(|(owner, amount)| share(owner, *amount, 0)).collect();
        let (all, _) = order(&queue, &inventory);
        prop_assert_eq!(all.len(), queue.len());
        let turned: Vec<WaitingReplica> = queue.iter().rev().cloned().collect();
        prop_assert_eq!(&order(&turned, &inventory).0, &all);
        for owner in 1..5 {
            let alone: Vec<_> = queue.iter().filter(|one| one.project == project(owner)).cloned().collect();
            let names: Vec<u128> = alone.iter().map(|one| one.run.0.as_u128()).collect();
            let kept: Vec<u128> = all.iter().copied().filter(|run| names.contains(run)).collect();
            prop_assert_eq!(order(&alone, &free(8)).0, kept);
        }
    }
}

#[test]
fn a_waiting_run_learns_who_comes_before_it_and_by_which_rule() {
    let urgent = WaitingReplica { class: RunClass::Urgent, ..of(5, 2) };
    let high = WaitingReplica { priority: 9, ..of(6, 1) };
    // Projects 2 and 3 have a share; 3 uses it up with its first run. Project 4 used more than all others.
    let queue = [of(1, 1), of(2, 1), of(3, 3), of(4, 3), of(7, 4), urgent, high];
    let usage = [usage(4, 1e9, 0, 1), usage(3, 1e6, 0, 1)];
    let before = list_before(&queue, &usage, vec![share(3, 1, 0)], RunId(Uuid::from_u128(2)), NOW);
    let before: Vec<(u128, OrderRule)> =
        before.into_iter().map(|(run, rule)| (run.0.as_u128(), rule)).collect();
    assert_eq!(
        before,
        [(5, OrderRule::Class), (3, OrderRule::Share), (6, OrderRule::Priority), (1, OrderRule::Age)]
    );
    assert_eq!(list_before(&queue, &usage, Vec::new(), RunId(Uuid::from_u128(99)), NOW), []);
    let listed: Vec<(u128, Option<OrderRule>)> = list_order(&queue, &usage, vec![share(3, 1, 0)], NOW)
        .into_iter()
        .map(|(run, rule)| (run.0.as_u128(), rule))
        .collect();
    let rules = [None, Some(OrderRule::Class), Some(OrderRule::Share)];
    assert_eq!(listed[..3].iter().map(|(run, _)| *run).collect::<Vec<_>>(), [5, 3, 6]);
    assert_eq!(listed[..3].iter().map(|(_, rule)| *rule).collect::<Vec<_>>(), rules);
    assert_eq!(listed.len(), queue.len());
    // Everything that is listed before a run comes before it.
    for (position, (run, _)) in listed.iter().enumerate() {
        let before = list_before(&queue, &usage, vec![share(3, 1, 0)], RunId(Uuid::from_u128(*run)), NOW);
        assert_eq!(before.len(), position, "{run}");
    }
}
