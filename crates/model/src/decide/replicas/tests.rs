//! Tests of replica counts, in a compact notation.

use super::{rollout::RolloutState, *};
use crate::{config::traffic::Metric, time::Span};

const NOW: Timestamp = Timestamp::from_secs(10_000);

/// Parses `0:ready 1:starts! 2:-`: a `!` is out of date, a `-` existed before.
fn group(text: &str, range: (u32, u32)) -> ReplicaGroupView {
    let mut group = ReplicaGroupView {
        name: "0".to_owned(),
        min: range.0,
        max: range.1,
        scaling: None,
        replicas: vec![],
        free_nums: vec![],
        leaving_nums: vec![],
        traffic: None,
    };
    for word in text.split_whitespace() {
        let (num, stage) = word.split_once(':').unwrap();
        let num = num.parse().unwrap();
        let stage = match stage.trim_end_matches('!') {
            "waits" => ReplicaStage::Waits,
            "starts" => ReplicaStage::Starting,
            "runs" => ReplicaStage::Runs,
            "lapsed" => ReplicaStage::NoLongerReady,
            "ready" => ReplicaStage::Ready,
            "leaves" => {
                group.leaving_nums.push(num);
                continue;
            }
            _ => {
                group.free_nums.push(num);
                continue;
            }
        };
        group.replicas.push(GroupReplica { num, is_current: !word.ends_with('!'), stage });
    }
    group
}

fn render_plan(wanted: &ReplicaPlan) -> String {
    let start: Vec<_> = wanted.start.iter().map(|start| start.replica.to_string()).collect();
    let surplus: Vec<_> = wanted.surplus.iter().map(u32::to_string).collect();
    format!("want {}; away {}", start.join(","), surplus.join(","))
}

fn memory(desired: u32) -> BTreeMap<String, ScalingState> {
    BTreeMap::from([("0".to_owned(), ScalingState { desired, scaled_at: NOW, message: None })])
}

#[track_caller]
fn check(text: &str, desired: u32, expect: &str) {
    check_pace(text, desired, &RolloutPolicy::default(), expect);
}

#[track_caller]
fn check_pace(text: &str, desired: u32, pace: &RolloutPolicy, expect: &str) {
    let wanted = decide(&[group(text, (0, 9))], &memory(desired), pace, NOW, NOW);
    assert_eq!(render_plan(&wanted), expect, "{text}");
}

#[test]
fn replicas_are_added_and_removed_to_reach_the_desired_count() {
    check("", 2, "want 0,1; away ");
    check("0:ready", 3, "want 0,1,2; away ");
    check("0:ready 1:-", 2, "want 0,1; away ");
    // A terminating replica is waited for: its capacity is not free yet.
    check("0:ready 1:leaves", 2, "want 0; away ");
    check("0:ready 1:leaves", 3, "want 0,2; away ");
    check("0:leaves 1:leaves 2:-", 1, "want ; away ");
    check("0:- 1:leaves", 2, "want 0; away ");
    check("0:- 1:-", 1, "want 0; away ");
    // The most advanced ones stay; of equals, the lower numbers.
    check("0:waits 1:ready 2:ready 3:runs", 2, "want 1,2; away 0,3");
    check("0:ready 1:ready 2:ready", 1, "want 0; away 1,2");
    check("0:ready 1:ready!", 0, "want ; away 0,1");
}

#[test]
fn ready_old_replicas_are_removed_only_as_new_ones_become_ready() {
    check("0:ready! 1:ready!", 2, "want 0,1,2; away ");
    check("0:ready! 1:ready! 2:starts", 2, "want 0,1,2; away ");
    check("0:ready! 1:ready! 2:ready", 2, "want 0,2; away 1");
    check("0:ready! 1:leaves 2:ready", 2, "want 0,2; away ");
    check("0:ready! 2:ready 1:-", 2, "want 0,1,2; away ");
    check("0:ready! 2:ready 1:ready", 2, "want 1,2; away 0");
    check("2:ready 1:ready", 2, "want 1,2; away ");
    // A replica that is not ready can be removed without loss.
    check("0:ready! 1:starts!", 2, "want 0,2; away 1");
    // Newer ones that never become ready leave the old ones in service.
    check("0:ready! 1:runs", 1, "want 0,1; away ");
}

#[test]
fn surge_and_unavailable_limit_the_replica_count_during_a_rollout() {
    let fast = RolloutPolicy { surge: 2, ..RolloutPolicy::default() };
    check_pace("0:ready! 1:ready!", 2, &fast, "want 0,1,2,3; away ");
    // Without surge, one must be removed first, and its capacity is waited for.
    let tight = RolloutPolicy { surge: 0, unavailable: 1, ..RolloutPolicy::default() };
    check_pace("0:ready! 1:ready!", 2, &tight, "want 0; away 1");
    check_pace("0:ready! 1:leaves", 2, &tight, "want 0; away ");
    check_pace("0:ready! 1:-", 2, &tight, "want 0,1; away ");
    check_pace("0:ready! 1:runs", 2, &tight, "want 0,1; away ");
    check_pace("0:ready! 1:ready", 2, &tight, "want 1; away 0");
    let all = RolloutPolicy { surge: 0, unavailable: 9, ..RolloutPolicy::default() };
    check_pace("0:ready! 1:ready!", 2, &all, "want ; away 0,1");
}

const SCALING: ScalingPolicy = ScalingPolicy {
    metric: Metric::Rps,
    target: 2.0,
    window: Span::secs(60),
    scale_up_delay: Span::secs(300),
    scale_down_delay: Span::secs(600),
    max_concurrency: None,
};

/// Arguments: desired before, seconds since, traffic in a minute, desired after.
#[track_caller]
fn check_by(
    scaling: ScalingPolicy,
    before: u32,
    waited: i64,
    traffic: Option<Traffic>,
    after: u32,
) -> ReplicaPlan {
    let group = ReplicaGroupView { scaling: Some(scaling), traffic, ..group("", (0, 4)) };
    let scaled_at = NOW - Span::secs(waited);
    let memory = ScalingState { desired: before, scaled_at, message: None };
    let memory = BTreeMap::from([("0".to_owned(), memory)]);
    let wanted = decide(&[group], &memory, &RolloutPolicy::default(), NOW, NOW);
    assert_eq!(wanted.scaling["0"].desired, after, "{before} {waited} {traffic:?}");
    assert_eq!(wanted.reasons.is_empty(), before == after);
    assert_eq!(wanted.scaling["0"].scaled_at, if before == after { scaled_at } else { NOW });
    wanted
}

#[track_caller]
fn check_scaling(before: u32, waited: i64, requests: Option<u64>, after: u32) {
    let traffic = requests.map(|requests| Traffic { requests, ..Traffic::default() });
    check_by(SCALING, before, waited, traffic, after);
}

#[test]
fn request_rate_sets_the_replica_count_and_delays_set_when_it_changes() {
    // From zero at once: one request is enough.
    check_scaling(0, 0, Some(1), 1);
    check_scaling(0, 0, Some(60 * 5), 3);
    check_scaling(0, 0, Some(0), 0);
    check_scaling(1, 299, Some(60 * 5), 1);
    check_scaling(1, 300, Some(60 * 5), 3);
    check_scaling(1, 300, Some(60 * 100), 4);
    check_scaling(3, 599, Some(0), 3);
    check_scaling(3, 600, Some(60 * 4), 2);
    check_scaling(3, 600, Some(0), 0);
    // No measurement: nothing changes.
    check_scaling(3, 6_000, None, 3);
    check_scaling(3, 6_000, Some(60 * 6), 3);
}

/// Returns traffic with these averages over the minute.
fn average(in_flight: u64, waiting: u64) -> Option<Traffic> {
    let us = |n: u64| n * 60_000_000;
    Some(Traffic { requests: 1, in_flight_us: us(in_flight), waiting_us: us(waiting) })
}

#[test]
fn concurrency_scaling_follows_the_number_of_requests_in_flight() {
    let by = ScalingPolicy { metric: Metric::Concurrency, ..SCALING };
    check_by(by, 1, 300, average(5, 0), 3);
    check_by(by, 1, 299, average(5, 0), 1);
    check_by(by, 3, 600, average(4, 4), 2);
    // The first request starts a replica, before it has lasted for any time.
    check_by(by, 0, 0, average(0, 0), 1);
    check_by(by, 0, 0, Some(Traffic::default()), 0);
    check_by(by, 3, 6_000, None, 3);
}

#[test]
fn queue_depth_scaling_counts_queued_requests_and_keeps_busy_replicas() {
    let by = ScalingPolicy { metric: Metric::QueueDepth, max_concurrency: Some(4), ..SCALING };
    check_by(by, 1, 300, average(10, 6), 3);
    // None wait, because three replicas are busy: two would be too few.
    check_by(by, 3, 600, average(10, 0), 3);
    check_by(by, 3, 600, average(8, 0), 2);
    check_by(by, 3, 600, average(0, 0), 0);
    check_by(by, 0, 0, average(1, 1), 1);
}

#[test]
fn scaling_message_states_the_measurement_and_the_earliest_change() {
    let message = |wanted: &ReplicaPlan| wanted.scaling["0"].message.clone().unwrap();
    let by = ScalingPolicy { metric: Metric::Concurrency, ..SCALING };
    let late = message(&check_by(by, 1, 290, average(5, 0), 1));
    assert_eq!(
        late,
        "5.00 concurrent requests over 60 s (target 2 per replica); scaling to 3 in 11 s at the earliest"
    );
    let moved = check_by(by, 1, 300, average(5, 0), 3);
    assert_eq!(
        moved.reasons,
        ["group 0: scaling from 1 to 3 replicas: 5.00 concurrent requests over 60 s (target 2 per replica)"]
    );
    assert_eq!(
        message(&check_by(by, 1, 300, None, 1)),
        "no request metrics received; keeping the current number of replicas"
    );
}

#[test]
fn a_deployment_pauses_scaling_and_replica_numbers_are_unique_across_groups() {
    let scaling =
        ScalingPolicy { target: 1.0, scale_up_delay: Span::ZERO, scale_down_delay: Span::ZERO, ..SCALING };
    let traffic = Some(Traffic { requests: 6_000, ..Traffic::default() });
    let first = ReplicaGroupView { scaling: Some(scaling), traffic, ..group("0:ready!", (1, 4)) };
    let second = ReplicaGroupView { name: "1".to_owned(), ..group("1:ready", (2, 2)) };
    let wanted = decide(&[first, second], &BTreeMap::new(), &RolloutPolicy::default(), NOW, NOW);
    assert_eq!(render_plan(&wanted), "want 0,1,2,3; away ");
    let groups: Vec<_> = wanted.groups.values().map(String::as_str).collect();
    assert_eq!(groups, ["0", "1", "0", "1"]);
    assert_eq!(wanted.scaling["0"].desired, 1);
}

#[test]
fn a_changed_replica_range_clamps_the_stored_desired_count() {
    let wanted = decide(&[group("0:ready", (3, 3))], &memory(1), &RolloutPolicy::default(), NOW, NOW);
    assert_eq!(render_plan(&wanted), "want 0,1,2; away ");
}

/// Evaluates replicas of one group as above, and those on trial: number, seconds since it runs, times it ended by
/// itself.
fn render_evaluation(
    text: &str,
    desired: u32,
    trials: &[(u32, i64, u32)],
    pace: &RolloutPolicy,
    before: Option<&Rollout>,
) -> RolloutEvaluation {
    let group = group(text, (0, 9));
    let trials: Vec<TrialReplica> = trials
        .iter()
        .map(|(num, runs, failures)| TrialReplica {
            num: *num,
            stage: group.replicas.iter().find(|one| one.num == *num).unwrap().stage,
            since: Some(NOW - Span::secs(*runs)),
            failures: *failures,
            is_retried: *failures > 1,
            message: Some("it answers 500".to_owned()),
        })
        .collect();
    evaluate(2, (&[group], &memory(desired)), &trials, pace, true, before, NOW)
}

#[test]
fn a_deployment_rolls_until_all_replicas_are_ready_and_then_stays_complete() {
    let pace = RolloutPolicy::default();
    let first = render_evaluation("0:ready! 1:ready! 2:runs", 2, &[(2, 30, 0)], &pace, None);
    assert_eq!((first.decision, first.rollout.state), (RolloutDecision::Continue, RolloutState::Rolling));
    let words =
        "deployment 2 started: 2 replicas to replace, with at most 1 more and 0 fewer than 2 at a time";
    assert_eq!(first.event, Some(("deployment", words.to_owned())));
    assert_eq!(first.rollout.message.as_deref(), Some("replica 2: it answers 500"));
    assert_eq!(first.due_at, Some(NOW + Span::secs(570)));
    let next = render_evaluation("1:ready! 2:ready", 2, &[(2, 60, 0)], &pace, Some(&first.rollout));
    assert_eq!((next.event, next.rollout.ready, next.rollout.old), (None, 1, 1));
    let last = render_evaluation("2:ready 3:ready", 2, &[(2, 60, 0)], &pace, Some(&first.rollout));
    assert_eq!((last.decision, last.rollout.state), (RolloutDecision::Complete, RolloutState::Complete));
    assert_eq!(last.event.as_ref().map(|reported| reported.0), Some("deployed"));
    // A deployment that was complete stays complete, whatever happens to its replicas.
    let ill = render_evaluation("2:runs 3:ready", 2, &[(2, 9_999, 0)], &pace, Some(&last.rollout));
    assert_eq!((ill.decision, ill.event), (RolloutDecision::Complete, None));
    // It was not tried, so it is not complete.
    assert_eq!(render_evaluation("", 0, &[], &pace, None).rollout.state, RolloutState::Asleep);
}

#[test]
fn replicas_that_end_or_miss_the_ready_deadline_roll_a_deployment_back() {
    let pace = RolloutPolicy::default();
    let rolls_back = |trial| {
        let evaluated = render_evaluation("0:ready! 1:runs", 1, &[trial], &pace, None);
        (evaluated.decision == RolloutDecision::RollBack).then(|| evaluated.rollout.undid.unwrap().why)
    };
    assert_eq!(rolls_back((1, 599, 0)), None);
    let late = "replica 1 is not ready after 600 s: it answers 500";
    assert_eq!(rolls_back((1, 600, 0)).as_deref(), Some(late));
    assert_eq!(rolls_back((1, 1, 1)).as_deref(), Some("replica 1 ended: it answers 500"));
    assert_eq!(rolls_back((1, 1, 2)), None);
    assert_eq!(rolls_back((1, 1, 3)).as_deref(), Some("replica 1 ended 3 times: it answers 500"));
}

#[test]
fn a_rollback_is_a_new_deployment_that_records_the_one_it_undid() {
    let pace = RolloutPolicy::default();
    let failed = render_evaluation("0:ready! 1:runs", 1, &[(1, 600, 0)], &pace, None);
    let (word, reported) = failed.event.unwrap();
    assert_eq!(word, "rolled_back");
    assert!(reported.ends_with("; rolling back to the previous configuration"), "{reported}");
    assert_eq!((failed.rollout.num, failed.rollout.state), (3, RolloutState::Rolling));
    let back =
        evaluate(3, (&[group("0:ready", (0, 9))], &memory(1)), &[], &pace, false, Some(&failed.rollout), NOW);
    assert_eq!(
        (back.rollout.state, back.rollout.undid.map(|undid| undid.num)),
        (RolloutState::Complete, Some(2))
    );
}

#[test]
fn a_failed_deployment_without_rollback_is_reported_once() {
    let pace = RolloutPolicy { should_roll_back: false, ..RolloutPolicy::default() };
    let failed = render_evaluation("0:ready! 1:runs", 1, &[(1, 600, 0)], &pace, None);
    assert_eq!((failed.decision, failed.rollout.state), (RolloutDecision::Continue, RolloutState::Failed));
    assert_eq!(failed.event.map(|reported| reported.0), Some("deployment_failed"));
    let still = render_evaluation("0:ready! 1:runs", 1, &[(1, 700, 0)], &pace, Some(&failed.rollout));
    assert_eq!((still.event, still.rollout.message), (None, failed.rollout.message));
    // There is no previous configuration: the first one is waited for without limit.
    let group = group("1:runs", (0, 9));
    let trial = TrialReplica {
        num: 1,
        stage: ReplicaStage::Runs,
        since: Some(Timestamp(0)),
        failures: 9,
        is_retried: false,
        message: None,
    };
    let first = evaluate(0, (&[group], &memory(1)), &[trial], &RolloutPolicy::default(), false, None, NOW);
    assert_eq!((first.decision, first.event), (RolloutDecision::Continue, None));
}

#[test]
fn an_old_replica_that_lost_readiness_stays_until_a_new_one_is_ready() {
    check("0:lapsed! 1:starts", 1, "want 0,1; away ");
    check("0:lapsed!", 1, "want 0,1; away ");
    check("0:lapsed! 1:ready", 1, "want 1; away 0");
    check("0:runs! 1:starts", 1, "want 1; away 0");
    let no_room = RolloutPolicy { surge: 0, unavailable: 1, ..RolloutPolicy::default() };
    check_pace("0:lapsed!", 1, &no_room, "want ; away 0");
}
