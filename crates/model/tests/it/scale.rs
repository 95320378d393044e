//! Autoscaling and rolling deployment: S1 and S4.

use proptest::prelude::*;
use windlass_model::{
    scale::{
        Progress, Reason, Replica, Roll, Rule, SURGE_MAX, Scaling, desired, roll, rps, scale_down, scale_up,
    },
    time::{Span, Timestamp},
};

const NOW: Timestamp = Timestamp::from_secs(1_000_000);

fn scaling(min: u32, max: u32) -> Scaling {
    let rule =
        Rule { target: 10.0, window: Span::secs(60), up_delay: Span::mins(5), down_delay: Span::mins(10) };
    Scaling { min, max, rule: Some(rule) }
}

/// `rps` requests per second over the window, `secs` after the last scaling.
#[track_caller]
fn check(scaling: &Scaling, current: u32, rps: Option<u64>, secs: i64, expect: (u32, Reason)) {
    let scaled_at = Some(NOW - Span::secs(secs));
    let answer = desired(scaling, current, rps.map(|rps| rps * 60), scaled_at, NOW);
    assert_eq!((answer.count, answer.reason), expect);
}

#[test]
fn the_load_divided_by_the_target_rounded_up_within_bounds() {
    let rule = scaling(1, 4);
    check(&rule, 1, Some(11), 9_999, (2, Reason::Load));
    check(&rule, 1, Some(10), 9_999, (1, Reason::Steady));
    check(&rule, 1, Some(999), 9_999, (4, Reason::Load));
    check(&rule, 3, Some(0), 9_999, (1, Reason::Load));
    assert_eq!(rps(90, Span::secs(60)), 1.5);
}

#[test]
fn up_waits_five_minutes_and_down_ten_after_the_last_change() {
    let rule = scaling(1, 4);
    check(&rule, 1, Some(30), 299, (1, Reason::Delayed { wants: 3 }));
    check(&rule, 1, Some(30), 300, (3, Reason::Load));
    check(&rule, 3, Some(5), 599, (3, Reason::Delayed { wants: 1 }));
    check(&rule, 3, Some(5), 600, (1, Reason::Load));
    let ripe = desired(&rule, 1, Some(1_800), Some(NOW - Span::secs(299)), NOW).due;
    assert_eq!(ripe, Some(NOW + Span::secs(1)));
}

#[test]
fn from_nothing_the_first_request_scales_at_once() {
    check(&scaling(0, 4), 0, Some(1), 0, (1, Reason::FirstRequest));
    check(&scaling(0, 4), 0, Some(0), 0, (0, Reason::Steady));
}

#[test]
fn s4_missing_statistics_hold_the_count() {
    check(&scaling(0, 4), 3, None, 9_999, (3, Reason::NoStatistics));
}

#[test]
fn a_fixed_count_and_new_bounds_apply_at_once() {
    let fixed = Scaling { min: 2, max: 2, rule: None };
    check(&fixed, 5, None, 0, (2, Reason::Bounds));
    check(&scaling(2, 3), 1, None, 0, (2, Reason::Bounds));
    check(&scaling(2, 3), 1, Some(0), 0, (2, Reason::Bounds));
}

fn replica(num: u32, progress: Progress, up_to_date: bool) -> Replica {
    Replica { num, progress, up_to_date, stopping: false }
}

#[test]
fn the_least_useful_replicas_go_first() {
    let replicas = [
        replica(0, Progress::Serving, true),
        replica(1, Progress::Running, true),
        replica(2, Progress::Submitted, true),
        replica(3, Progress::Serving, false),
        replica(4, Progress::Starting, true),
        replica(5, Progress::Serving, true),
    ];
    assert_eq!(scale_down(&replicas, 6), [3, 2, 4, 1, 5, 0]);
    assert_eq!(scale_down(&replicas, 2), [3, 2]);
}

#[test]
fn inactive_numbers_are_used_again_first() {
    assert_eq!(scale_up(&[4, 1], &[0, 1, 2, 3, 4], 3), [1, 4, 5]);
    assert_eq!(scale_up(&[], &[], 2), [0, 1]);
}

#[test]
fn a_deployment_surges_by_one_and_stops_an_old_one_when_a_new_one_serves() {
    let (old, new) = (|num| replica(num, Progress::Serving, false), |num, at| replica(num, at, true));
    let step = |replicas: &[Replica]| roll(replicas, 2);
    assert_eq!(step(&[old(0), old(1)]), Roll { create: 1, stop: vec![] });
    assert_eq!(step(&[old(0), old(1), new(2, Progress::Starting)]), Roll::default());
    assert_eq!(step(&[old(0), old(1), new(2, Progress::Serving)]), Roll { create: 0, stop: vec![1] });
    assert_eq!(step(&[old(0), new(2, Progress::Serving)]), Roll { create: 1, stop: vec![] });
    let done = [old(0), new(2, Progress::Serving), new(3, Progress::Serving)];
    assert_eq!(step(&done), Roll { create: 0, stop: vec![0] });
}

#[test]
fn an_old_replica_without_traffic_goes_at_once() {
    let replicas = [replica(0, Progress::Serving, false), replica(1, Progress::Starting, false)];
    assert_eq!(roll(&replicas, 2), Roll { create: 1, stop: vec![1] });
}

fn any_replicas() -> impl Strategy<Value = Vec<Replica>> {
    let progress = vec![Progress::Submitted, Progress::Starting, Progress::Running, Progress::Serving];
    let one = (prop::sample::select(progress), any::<bool>(), prop::bool::weighted(0.2));
    prop::collection::vec(one, 0..8).prop_map(|replicas| {
        let replicas = replicas.into_iter().enumerate();
        let replica = |(num, (progress, up_to_date, stopping)): (usize, (Progress, bool, bool))| Replica {
            num: num as u32,
            progress,
            up_to_date,
            stopping,
        };
        replicas.map(replica).collect()
    })
}

fn serving(replicas: &[Replica]) -> u32 {
    replicas.iter().filter(|replica| replica.progress == Progress::Serving && !replica.stopping).count()
        as u32
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn s4_the_desired_count_keeps_its_bounds_and_delays(
        min in 0_u32..4, more in 0_u32..5, current in 0_u32..12, load in prop::option::of(0_u64..9_000),
        secs in prop::option::of(0_i64..900),
    ) {
        let scaling = scaling(min, min + more);
        let answer = desired(&scaling, current, load, secs.map(|secs| NOW - Span::secs(secs)), NOW);
        prop_assert!((min..=min + more).contains(&answer.count));
        let bounded = current.clamp(min, min + more);
        if load.is_none() {
            prop_assert_eq!(answer.count, bounded);
        }
        if answer.count > bounded && bounded > 0 {
            prop_assert!(secs.is_none_or(|secs| secs >= 300));
        }
        if answer.count < bounded {
            prop_assert!(secs.is_none_or(|secs| secs >= 600));
        }
        prop_assert!(answer.due.is_none_or(|due| due > NOW));
    }

    #[test]
    fn s1_a_step_keeps_enough_serving_and_the_total_small(replicas in any_replicas(), desired in 0_u32..5) {
        let step = roll(&replicas, desired);
        let mut after = replicas.clone();
        after.iter_mut().filter(|replica| step.stop.contains(&replica.num)).for_each(|replica| replica.stopping = true);
        prop_assert!(serving(&after) >= desired.min(serving(&replicas)));
        let total = replicas.len() as u32 + step.create;
        prop_assert!(step.create == 0 || total <= desired + SURGE_MAX);
        let old: Vec<u32> = replicas.iter().filter(|replica| !replica.up_to_date).map(|replica| replica.num).collect();
        prop_assert!(step.stop.iter().all(|num| old.contains(num)));
    }

    /// Any start, any pace: it comes to an end with the desired number of new replicas and no old one,
    /// and never dips below what it had.
    #[test]
    fn s1_a_deployment_ends(start in any_replicas(), desired in 1_u32..5) {
        let mut replicas = start;
        let mut next = 100;
        for _ in 0..60 {
            let before = serving(&replicas);
            let step = roll(&replicas, desired);
            replicas.retain(|replica| !replica.stopping);
            for replica in &mut replicas {
                replica.stopping = step.stop.contains(&replica.num);
            }
            prop_assert!(serving(&replicas) >= desired.min(before));
            for replica in replicas.iter_mut().filter(|replica| replica.up_to_date) {
                replica.progress = Progress::Serving;
            }
            for _ in 0..step.create {
                replicas.push(replica(next, Progress::Submitted, true));
                next += 1;
            }
        }
        prop_assert!(replicas.iter().all(|replica| replica.up_to_date), "{:?}", replicas);
        prop_assert!(replicas.len() as u32 >= desired);
    }
}
