//! Selection of the next candidate of a task, and the record of a failed launch.

use windlass_model::{
    decide::managed_jobs::{AttemptObservation, classify_end::NodeEnd},
    job::{TerminationDetail, TerminationReason as Reason},
    managed_job::{
        ScheduleState,
        reason::{TaskContext, task_reason},
    },
    money::Price,
};

use crate::managed_jobs_fixture::{ManagedJobFixture, ended, ended_observation, no_capacity};

fn started(text: &str, prices: &[Option<f64>]) -> ManagedJobFixture {
    let mut fixture = ManagedJobFixture::new(text);
    fixture.prices = prices.iter().map(|price| price.map(Price::from_dollars)).collect();
    fixture.run_until_stable();
    fixture
}

fn never_fits(message: &str) -> AttemptObservation {
    let end = ended(Reason::FailedToStartDueToNoCapacity, None);
    ended_observation(NodeEnd {
        detail: Some(TerminationDetail::NeverFits),
        message: Some(message.to_owned()),
        ..end
    })
}

/// Returns the candidates that are requested if none of them finds nodes, until the task waits.
fn tried(mut fixture: ManagedJobFixture) -> Vec<u32> {
    let mut order = Vec::new();
    while fixture.statuses() == ["STARTING"] {
        order.push(fixture.last_submit().candidate);
        fixture.observe(0, no_capacity());
    }
    order
}

const ANY: &str = "run: a\nresources:\n  any_of: [{cpus: 8}, {cpus: 2}, {cpus: 4}]\n";

#[test]
fn any_of_candidates_are_tried_by_price_and_those_without_offers_last() {
    assert_eq!(tried(started(ANY, &[Some(3.0), Some(1.0), Some(2.0)])), [1, 2, 0]);
    assert_eq!(tried(started(ANY, &[None, Some(2.0), Some(1.0)])), [2, 1, 0]);
    assert_eq!(
        tried(started(ANY, &[Some(1.0), Some(1.0), None])),
        [0, 1, 2],
        "the file's order among equals"
    );
    let ordered = ANY.replace("any_of", "ordered");
    assert_eq!(tried(started(&ordered, &[Some(3.0), Some(1.0), Some(2.0)])), [0, 1, 2]);
}

#[test]
fn prices_are_read_again_after_each_backoff() {
    let mut fixture = started(ANY, &[Some(3.0), Some(1.0), Some(2.0)]);
    for _ in 0..3 {
        fixture.observe(0, no_capacity());
    }
    assert_eq!(fixture.statuses(), ["PENDING"]);
    fixture.prices = vec![Some(Price::from_dollars(0.5)), Some(Price::from_dollars(1.0)), None];
    fixture.wait(100).run_until_stable();
    assert_eq!(fixture.last_submit().candidate, 0);
}

#[test]
fn a_task_that_can_never_fit_fails_prechecks_with_the_reason() {
    let mut fixture = started("run: a\nresources: {cpus: 64+}\n", &[]);
    fixture.observe(0, never_fits("local-0: needs at least 64 CPUs, has 2 (lower cpu to 2)"));
    assert_eq!(fixture.statuses(), ["FAILED_PRECHECKS"]);
    assert_eq!(
        task_reason(&fixture.records[0], &TaskContext::default()).unwrap(),
        "no instance can ever run it: local-0: needs at least 64 CPUs, has 2 (lower cpu to 2)"
    );
}

#[test]
fn a_candidate_that_can_never_fit_does_not_rule_out_the_others() {
    let text = "run: a\nresources:\n  ordered: [{cpus: 64}, {cpus: 2}]\n";
    let mut fixture = started(text, &[]);
    fixture.observe(0, never_fits("needs 64 CPUs"));
    assert_eq!((fixture.statuses(), fixture.last_submit().candidate), (vec!["STARTING"], 1));
    fixture.observe(0, no_capacity());
    assert_eq!(fixture.statuses(), ["PENDING"], "the other may fit another time");
    fixture.wait(100).run_until_stable();
    fixture.observe(0, never_fits("needs 64 CPUs")).observe(0, never_fits("needs 2 CPUs"));
    assert_eq!(fixture.statuses(), ["FAILED_PRECHECKS"]);
}

#[test]
fn reason_of_a_capacity_backoff_names_where_the_attempt_did_not_fit() {
    let mut fixture = started("run: a\n", &[]);
    fixture.contended_slots = true;
    let (since, message) = (fixture.now, Some("host-0: is busy (wait until jobs on it end)".to_owned()));
    fixture.observe(0, AttemptObservation::Queued { since, message });
    fixture.wait(61).run_until_stable();
    let record = &fixture.records[0];
    assert_eq!(record.schedule, ScheduleState::AliveBackoff);
    let reported = task_reason(record, &TaskContext::default()).unwrap();
    assert!(
        reported.starts_with(
            "attempt 1: no nodes in time: host-0: is busy (wait until jobs on it end); next attempt at "
        ),
        "{reported}"
    );
    let event = fixture.log.iter().find(|(_, moved, _)| moved.to.as_str() == "PENDING").unwrap();
    assert!(event.1.message.contains("host-0: is busy"), "{event:?}");
}
