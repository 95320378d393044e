//! A job from the queue to an instance, or to the end if none is available.

use std::sync::Arc;

use uuid::Uuid;
use windlass_model::{
    decide::jobs_submitted::{
        ATTACH_TIMEOUT, AssignmentStage, CREATE_TIMEOUT, Plan, SubmittedJobObservation, SubmittedJobView,
        decide,
    },
    explain::Shortfall,
    id::{FleetId, InstanceId, SubmissionId},
    job::TerminationDetail,
    plan::place::{NewOffer, NodePlacement, PlacementOutcome, RefusalReport},
    time::{Span, Timestamp},
};

const NOW: Timestamp = Timestamp::from_secs(1_000_000);

fn job(stage: AssignmentStage) -> SubmittedJobView {
    SubmittedJobView { submitted_at: NOW - Span::secs(5), stage, has_volumes: false }
}

fn fleet() -> FleetId {
    FleetId(Uuid::from_u128(1))
}

fn existing() -> NodePlacement {
    let job = SubmissionId(Uuid::from_u128(2));
    NodePlacement::Existing { job, instance: InstanceId(Uuid::from_u128(3)), blocks: 2 }
}

fn offers() -> Vec<NewOffer> {
    vec![NewOffer { offer: 0, blocks: 1, total_blocks: 1 }]
}

fn words(plan: &Plan) -> String {
    let again = |due: &Timestamp| format!("again in {} s", due.since(NOW).as_secs());
    match plan {
        Plan::Assign { seat: NodePlacement::Existing { .. }, due, .. } => format!("assign, {}", again(due)),
        Plan::Assign { seat: NodePlacement::New { instance_num, .. }, due, .. } => {
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
            let no_fleets =
                if ending.detail() == Some(TerminationDetail::NoFleets) { " (no fleets)" } else { "" };
            format!(
                "{}: {}{no_fleets}: {}",
                change.event,
                ending.reason(),
                ending.message().unwrap_or_default()
            )
        }
    }
}

#[track_caller]
fn check(job: &SubmittedJobView, seen: SubmittedJobObservation, expect: &str) {
    assert_eq!(words(&decide(job, seen, NOW)), expect);
}

#[test]
fn an_idle_instance_is_taken_in_one_pass() {
    let seen = SubmittedJobObservation::from_outcome(
        &PlacementOutcome::Placed { fleet: fleet(), seats: vec![existing()] },
        0,
        |_| "gpu-0".to_owned(),
    );
    let Plan::Provision { change, .. } = decide(&job(AssignmentStage::Unassigned), seen.clone(), NOW) else {
        panic!("it is placed");
    };
    assert_eq!(change.message, "assigned to instance gpu-0, blocks: 2");
    check(&job(AssignmentStage::Unassigned), seen.clone(), "assign, placed, again in 0 s");
    let with_volumes = SubmittedJobView { has_volumes: true, ..job(AssignmentStage::Unassigned) };
    check(&with_volumes, seen, "assign, again in 0 s");
}

#[test]
fn a_new_instance_begins_as_a_placeholder() {
    let seat =
        NodePlacement::New { job: SubmissionId(Uuid::from_u128(2)), instance_num: 4, offers: offers() };
    check(
        &job(AssignmentStage::Unassigned),
        SubmittedJobObservation::Seat { fleet: fleet(), seat, instance_name: String::new() },
        "placeholder 4, again in 0 s",
    );
}

#[test]
fn a_waiting_job_gives_the_reason_and_is_due_when_it_may_reserve() {
    let why = Arc::new(RefusalReport::single("gpu-0", Shortfall::Unreachable));
    let waits = SubmittedJobObservation::Waits { why, reserved: Vec::new() };
    let expect = "waits: gpu-0: is unreachable (check its network and agent), again in";
    check(&job(AssignmentStage::Unassigned), waits.clone(), &format!("{expect} 4 s"));
    let nearly = SubmittedJobView { submitted_at: NOW - Span::secs(299), ..job(AssignmentStage::Unassigned) };
    check(&nearly, waits.clone(), &format!("{expect} 1 s"));
    let old = SubmittedJobView { submitted_at: NOW - Span::secs(301), ..job(AssignmentStage::Unassigned) };
    check(&old, waits, &format!("{expect} 4 s"));
}

#[test]
fn a_job_that_can_never_fit_ends_with_no_capacity_or_no_fleets() {
    let never =
        |shortfall| SubmittedJobObservation::Never { why: Arc::new(RefusalReport::single("f", shortfall)) };
    let expect = "not-placed: failed_to_start_due_to_no_capacity: f: has no instances and creates none \
                  (add hosts to the fleet)";
    check(&job(AssignmentStage::Unassigned), never(Shortfall::FleetEmpty), expect);
    let expect = "not-placed: failed_to_start_due_to_no_capacity (no fleets): \
                  f: no fleet exists that this run may use (create a fleet)";
    check(&job(AssignmentStage::Unassigned), never(Shortfall::NoFleets), expect);
}

#[test]
fn volumes_are_attached_or_the_job_ends() {
    let assigned = |secs| job(AssignmentStage::Assigned { since: NOW - Span::secs(secs) });
    check(&assigned(0), SubmittedJobObservation::NotTried, "attach, again in 0 s");
    check(&assigned(3), SubmittedJobObservation::Attaching, "again in 4 s");
    check(&assigned(3), SubmittedJobObservation::Attached, "placed, again in 0 s");
    check(
        &assigned(3),
        SubmittedJobObservation::AttachFailed { message: "in use".into() },
        "not-placed: volume_error: in use",
    );
    let late = assigned(ATTACH_TIMEOUT.as_secs());
    check(
        &late,
        SubmittedJobObservation::Attaching,
        "not-placed: volume_error: volumes not attached within 300 s",
    );
}

#[test]
fn a_placeholder_waits_for_its_backend_and_ends_with_no_capacity_on_refusal() {
    let placeholder = |secs| job(AssignmentStage::Placeholder { since: NOW - Span::secs(secs) });
    check(&placeholder(0), SubmittedJobObservation::Creating, "again in 30 s");
    check(&placeholder(5), SubmittedJobObservation::Created, "placed, again in 0 s");
    let refused = SubmittedJobObservation::Refused { message: "no quota".into() };
    check(&placeholder(5), refused, "not-placed: failed_to_start_due_to_no_capacity: no quota");
    check(&placeholder(CREATE_TIMEOUT.as_secs() - 1), SubmittedJobObservation::Creating, "again in 1 s");
    let expect = "not-placed: failed_to_start_due_to_no_capacity: no instance was created within 600 s";
    check(&placeholder(CREATE_TIMEOUT.as_secs()), SubmittedJobObservation::Creating, expect);
}
