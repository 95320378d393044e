//! From the queue to an instance, or to the end for want of one.

use std::sync::Arc;

use uuid::Uuid;
use windlass_model::{
    decide::jobs_submitted::{ATTACH_TIMEOUT, CREATE_TIMEOUT, Job, Plan, Seen, Stage, decide},
    explain::Shortfall,
    id::{FleetId, InstanceId, SubmissionId},
    job::Detail,
    plan::place::{NewOffer, Outcome, Seat, Why},
    time::{Span, Timestamp},
};

const NOW: Timestamp = Timestamp::from_secs(1_000_000);

fn job(stage: Stage) -> Job {
    Job { submitted_at: NOW - Span::secs(5), stage, has_volumes: false }
}

fn fleet() -> FleetId {
    FleetId(Uuid::from_u128(1))
}

fn existing() -> Seat {
    let job = SubmissionId(Uuid::from_u128(2));
    Seat::Existing { job, instance: InstanceId(Uuid::from_u128(3)), blocks: 2 }
}

fn offers() -> Vec<NewOffer> {
    vec![NewOffer { offer: 0, blocks: 1, total_blocks: 1 }]
}

fn words(plan: &Plan) -> String {
    let again = |due: &Timestamp| format!("again in {} s", due.since(NOW).as_secs());
    match plan {
        Plan::Assign { seat: Seat::Existing { .. }, due, .. } => format!("assign, {}", again(due)),
        Plan::Assign { seat: Seat::New { instance_num, .. }, due, .. } => {
            format!("placeholder {instance_num}, {}", again(due))
        }
        Plan::Provision { assign, change, due } => {
            let assign = if assign.is_some() { "assign, " } else { "" };
            format!("{assign}{}, {}", change.event, again(due))
        }
        Plan::Attach { due } => format!("attach, {}", again(due)),
        Plan::Wait { message, due, .. } => format!("waits: {message}, {}", again(due)),
        Plan::Recheck { due } => again(due),
        Plan::End { ending, change } => {
            assert_eq!(change.reason, ending.reason().as_str());
            let no_fleets = if ending.detail() == Some(Detail::NoFleets) { " (no fleets)" } else { "" };
            format!("{}: {}{no_fleets}: {}", change.event, ending.reason(), ending.said().unwrap_or_default())
        }
    }
}

#[track_caller]
fn check(job: &Job, seen: Seen, expect: &str) {
    assert_eq!(words(&decide(job, seen, NOW)), expect);
}

#[test]
fn an_idle_instance_is_taken_in_one_pass() {
    let seen = Seen::of(&Outcome::Placed { fleet: fleet(), seats: vec![existing()] }, 0);
    check(&job(Stage::Unassigned), seen.clone(), "assign, placed, again in 0 s");
    let with_volumes = Job { has_volumes: true, ..job(Stage::Unassigned) };
    check(&with_volumes, seen, "assign, again in 0 s");
}

#[test]
fn a_new_instance_begins_as_a_placeholder() {
    let seat = Seat::New { job: SubmissionId(Uuid::from_u128(2)), instance_num: 4, offers: offers() };
    check(&job(Stage::Unassigned), Seen::Seat { fleet: fleet(), seat }, "placeholder 4, again in 0 s");
}

#[test]
fn who_waits_says_why_and_looks_again_when_it_may_reserve() {
    let why = Arc::new(Why::one("gpu-0", Shortfall::Unreachable));
    let waits = Seen::Waits { why, reserved: Vec::new() };
    let expect = "waits: gpu-0: is unreachable (check its network and agent), again in";
    check(&job(Stage::Unassigned), waits.clone(), &format!("{expect} 4 s"));
    let nearly = Job { submitted_at: NOW - Span::secs(299), ..job(Stage::Unassigned) };
    check(&nearly, waits.clone(), &format!("{expect} 1 s"));
    let old = Job { submitted_at: NOW - Span::secs(301), ..job(Stage::Unassigned) };
    check(&old, waits, &format!("{expect} 4 s"));
}

#[test]
fn what_can_never_fit_ends_for_want_of_capacity_or_of_fleets() {
    let never = |shortfall| Seen::Never { why: Arc::new(Why::one("f", shortfall)) };
    let expect = "not-placed: failed_to_start_due_to_no_capacity: f: has no instances and creates none \
                  (add hosts to the fleet)";
    check(&job(Stage::Unassigned), never(Shortfall::FleetEmpty), expect);
    let expect = "not-placed: failed_to_start_due_to_no_capacity (no fleets): \
                  f: no fleet exists that this run may use (create a fleet)";
    check(&job(Stage::Unassigned), never(Shortfall::NoFleets), expect);
}

#[test]
fn volumes_are_attached_or_the_job_ends() {
    let assigned = |secs| job(Stage::Assigned { since: NOW - Span::secs(secs) });
    check(&assigned(0), Seen::NotTried, "attach, again in 0 s");
    check(&assigned(3), Seen::Attaching, "again in 4 s");
    check(&assigned(3), Seen::Attached, "placed, again in 0 s");
    check(&assigned(3), Seen::AttachFailed { said: "in use".into() }, "not-placed: volume_error: in use");
    let late = assigned(ATTACH_TIMEOUT.as_secs());
    check(&late, Seen::Attaching, "not-placed: volume_error: not attached within 300 s");
}

#[test]
fn a_placeholder_waits_for_its_backend_and_a_refusal_is_want_of_capacity() {
    let placeholder = |secs| job(Stage::Placeholder { since: NOW - Span::secs(secs) });
    check(&placeholder(0), Seen::Creating, "again in 30 s");
    check(&placeholder(5), Seen::Created, "placed, again in 0 s");
    let refused = Seen::Refused { said: "no quota".into() };
    check(&placeholder(5), refused, "not-placed: failed_to_start_due_to_no_capacity: no quota");
    check(&placeholder(CREATE_TIMEOUT.as_secs() - 1), Seen::Creating, "again in 1 s");
    let expect = "not-placed: failed_to_start_due_to_no_capacity: no instance was granted within 600 s";
    check(&placeholder(CREATE_TIMEOUT.as_secs()), Seen::Creating, expect);
}
