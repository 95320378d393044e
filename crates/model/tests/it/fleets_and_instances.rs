//! Instances, fleets and volumes, step by step.

use std::collections::BTreeSet;

use proptest::prelude::*;
use uuid::Uuid;
use windlass_model::{
    decide::{
        fleets::{self, ATTEMPTS_MAX, FleetMember, FleetView},
        instances::{self, DELETE_MAX, InstanceKind, InstanceView, UNREACHABLE_MAX},
        volumes::{self, VolumeView},
    },
    fleet,
    id::InstanceId,
    instance::{Health, Status, TerminationReason},
    state_machine,
    time::{Span, Timestamp},
    volume,
};

const NOW: Timestamp = Timestamp::from_secs(1_000_000);

fn ago(secs: i64) -> Timestamp {
    NOW - Span::secs(secs)
}

fn instance(kind: InstanceKind, status: Status) -> InstanceView {
    InstanceView {
        kind,
        status,
        created_at: ago(60),
        started_at: None,
        provisioning_max: Span::mins(10),
        jobs: u32::from(status == Status::Busy),
        is_made_for_job: false,
        requested_end: None,
        idle_since: (status == Status::Idle).then(|| ago(60)),
        idle_max: Some(Span::mins(5)),
        is_above_min: true,
        unreachable_since: None,
        health: Health::Healthy,
        terminating_since: (status == Status::Terminating).then(|| ago(60)),
        is_forced: false,
        is_delete_failure_reported: false,
    }
}

#[test]
fn a_host_is_not_polled_again_when_a_job_is_assigned_or_removed() {
    let until = |status, jobs, seen_at| {
        let instance = InstanceView { jobs, ..instance(InstanceKind::Ssh, status) };
        instances::answer_valid_until(&instance, seen_at, instances::POLL_INTERVAL, NOW)
            .map(|until| until.since(NOW).as_secs())
    };
    assert_eq!(until(Status::Idle, 1, Some(ago(2))), Some(5));
    assert_eq!(until(Status::Busy, 0, Some(ago(6))), Some(1));
    // The poll is due; it never responded; nothing changed, so a pass was requested; it is not ready.
    assert_eq!(until(Status::Busy, 0, Some(ago(7))), None);
    assert_eq!(until(Status::Idle, 1, None), None);
    assert_eq!(until(Status::Busy, 2, Some(ago(2))), None);
    assert_eq!(until(Status::Provisioning, 1, Some(ago(2))), None);
    let silent = InstanceView {
        jobs: 1,
        unreachable_since: Some(ago(1)),
        ..instance(InstanceKind::Ssh, Status::Idle)
    };
    assert_eq!(instances::answer_valid_until(&silent, Some(ago(2)), instances::POLL_INTERVAL, NOW), None);
}

#[track_caller]
fn check(instance: &InstanceView, seen: &instances::InstanceObservation, expect: &str) {
    let plan = instances::decide(instance, seen, NOW);
    let mut words: Vec<String> = plan.action.iter().map(|action| format!("{action:?}")).collect();
    words.extend(plan.change.as_ref().map(|change| match plan.reason {
        Some(reason) => format!("{}: {reason}", change.event),
        None => change.event.to_string(),
    }));
    words.extend(plan.note);
    words.extend(plan.unreachable_since.map(|at| format!("silent {} s", NOW.since(at).as_secs())));
    words.push(format!("again in {} s", plan.due.since(NOW).as_secs()));
    assert_eq!(words.join(", "), expect);
}

#[test]
fn a_starting_instance_created_for_a_job_ends_when_the_job_is_gone() {
    let made =
        |status, jobs| InstanceView { is_made_for_job: true, jobs, ..instance(InstanceKind::Cloud, status) };
    let seen = instances::InstanceObservation::NotRequested;
    check(&made(Status::Pending, 1), &seen, "Create, again in 0 s");
    check(&made(Status::Pending, 0), &seen, "job-finished: job_finished, again in 0 s");
    check(&made(Status::Provisioning, 1), &seen, "Check, again in 0 s");
    check(&made(Status::Provisioning, 0), &seen, "job-finished: job_finished, again in 0 s");
    check(&made(Status::Idle, 0), &seen, "Check, again in 0 s");
}

#[test]
fn a_requested_end_of_an_instance_waits_until_it_has_no_jobs() {
    let requested = |status, jobs| InstanceView {
        requested_end: Some(TerminationReason::FleetSpecMismatch),
        jobs,
        ..instance(InstanceKind::Ssh, status)
    };
    let healthy = instances::InstanceObservation::Answers { health: Health::Healthy };
    for status in [Status::Pending, Status::Provisioning, Status::Idle, Status::Busy] {
        check(&requested(status, 0), &healthy, "stop-asked: fleet_spec_mismatch, again in 0 s");
    }
    check(&requested(Status::Busy, 1), &healthy, "again in 7 s");
    check(
        &requested(Status::Terminating, 0),
        &instances::InstanceObservation::NotRequested,
        "Delete, again in 0 s",
    );
}

#[test]
fn an_ssh_host_with_a_changed_key_becomes_unhealthy_but_is_kept() {
    let other = instances::InstanceObservation::Untrusted { message: "another key".into() };
    check(&instance(InstanceKind::Ssh, Status::Idle), &other, "another key, silent 0 s, again in 7 s");
    let known = InstanceView {
        health: Health::Failure,
        unreachable_since: Some(ago(900_000)),
        ..instance(InstanceKind::Ssh, Status::Idle)
    };
    check(&known, &other, "silent 900000 s, again in 7 s");
    assert_eq!(instances::decide(&known, &other, NOW).health, Health::Failure);
    check(&instance(InstanceKind::Ssh, Status::Pending), &other, "gave-up: error, again in 0 s");
}

#[test]
fn a_cloud_instance_gone_from_its_backend_ends_and_an_ssh_host_is_only_unreachable() {
    let gone = instances::InstanceObservation::Gone { message: "preempted".into() };
    check(&instance(InstanceKind::Cloud, Status::Busy), &gone, "unreachable: unreachable, again in 0 s");
    check(&instance(InstanceKind::Cloud, Status::Provisioning), &gone, "expired: error, again in 0 s");
    check(&instance(InstanceKind::Ssh, Status::Busy), &gone, "unreachable, silent 0 s, again in 7 s");
}

#[test]
fn a_new_instance_unknown_to_its_backend_gets_a_minute_to_appear() {
    let unknown = instances::InstanceObservation::Unknown;
    let made = |kind, status, secs| InstanceView { started_at: Some(ago(secs)), ..instance(kind, status) };
    check(&made(InstanceKind::Cloud, Status::Provisioning, 59), &unknown, "again in 5 s");
    check(&made(InstanceKind::Cloud, Status::Provisioning, 60), &unknown, "expired: error, again in 0 s");
    check(&made(InstanceKind::Cloud, Status::Busy, 59), &unknown, "unreachable, silent 0 s, again in 7 s");
    check(&made(InstanceKind::Cloud, Status::Busy, 60), &unknown, "unreachable: unreachable, again in 0 s");
    check(&made(InstanceKind::Ssh, Status::Busy, 60), &unknown, "unreachable, silent 0 s, again in 7 s");
    check(&made(InstanceKind::Cloud, Status::Terminating, 60), &unknown, "Delete, again in 0 s");
}

#[test]
fn a_starting_instance_is_polled_often_at_first_and_then_less() {
    let again = |micros| {
        let now = Timestamp(NOW.0 + micros);
        instances::next_starting_poll(NOW, now).since(now).0
    };
    assert_eq!(again(0), 100_000);
    assert_eq!(again(4_000_000), 1_000_000);
    assert_eq!(again(400_000_000), 5_000_000);
}

#[test]
fn a_pending_instance_is_created_or_deployed() {
    let (cloud, ssh) =
        (instance(InstanceKind::Cloud, Status::Pending), instance(InstanceKind::Ssh, Status::Pending));
    check(&cloud, &instances::InstanceObservation::NotRequested, "Create, again in 0 s");
    check(&cloud, &instances::InstanceObservation::Created, "created, again in 0 s");
    check(
        &cloud,
        &instances::InstanceObservation::NoOffers { message: "none".into() },
        "gave-up: no_offers, again in 0 s",
    );
    check(&ssh, &instances::InstanceObservation::NotRequested, "Deploy, again in 0 s");
    check(&ssh, &instances::InstanceObservation::Deployed { healthy: true }, "ready-idle, again in 0 s");
    check(&ssh, &instances::InstanceObservation::Deployed { healthy: false }, "created, again in 0 s");
    let failed = |fatal| instances::InstanceObservation::DeployFailed { fatal, message: "refused".into() };
    check(&ssh, &failed(false), "refused, again in 5 s");
    check(&ssh, &failed(true), "gave-up: error, again in 0 s");
    let late = InstanceView { created_at: ago(600), ..ssh };
    check(&late, &failed(false), "gave-up: error, again in 0 s");
    // A request without a response may have succeeded: the instance is deleted.
    let late = InstanceView { created_at: ago(600), ..cloud.clone() };
    check(&late, &failed(false), "expired: error, again in 0 s");
    check(&cloud, &failed(true), "expired: error, again in 0 s");
}

#[test]
fn provisioning_ends_when_the_instance_is_ready_or_at_the_deadline() {
    let starting = instance(InstanceKind::Cloud, Status::Provisioning);
    let healthy = instances::InstanceObservation::Answers { health: Health::Healthy };
    check(&starting, &instances::InstanceObservation::NotRequested, "Check, again in 0 s");
    check(&starting, &healthy, "ready-idle, again in 0 s");
    check(&InstanceView { jobs: 1, ..starting.clone() }, &healthy, "ready-busy, again in 0 s");
    check(&starting, &instances::InstanceObservation::Silent, "again in 5 s");
    check(&starting, &instances::InstanceObservation::Starting, "again in 5 s");
    let late = InstanceView { created_at: ago(600), ..starting };
    check(&late, &instances::InstanceObservation::Silent, "expired: provisioning_timeout, again in 0 s");
}

#[test]
fn an_idle_cloud_instance_above_the_minimum_ends_after_its_idle_duration() {
    let idle =
        |secs| InstanceView { idle_since: Some(ago(secs)), ..instance(InstanceKind::Cloud, Status::Idle) };
    let healthy = instances::InstanceObservation::Answers { health: Health::Healthy };
    check(&idle(298), &healthy, "again in 2 s");
    check(&idle(300), &healthy, "surplus: idle_timeout, again in 0 s");
    check(&InstanceView { is_above_min: false, ..idle(300) }, &healthy, "again in 7 s");
    check(&InstanceView { idle_max: None, ..idle(300) }, &healthy, "again in 7 s");
    check(&InstanceView { kind: InstanceKind::Ssh, ..idle(300) }, &healthy, "again in 7 s");
}

#[test]
fn an_unreachable_cloud_instance_ends_after_twenty_minutes_and_an_ssh_host_never() {
    let lost =
        |kind, secs| InstanceView { unreachable_since: Some(ago(secs)), ..instance(kind, Status::Busy) };
    let silent = instances::InstanceObservation::Silent;
    check(&instance(InstanceKind::Cloud, Status::Busy), &silent, "unreachable, silent 0 s, again in 7 s");
    check(&lost(InstanceKind::Cloud, 1_197), &silent, "silent 1197 s, again in 3 s");
    let over = UNREACHABLE_MAX.as_secs();
    check(&lost(InstanceKind::Cloud, over), &silent, "unreachable: unreachable, silent 1200 s, again in 0 s");
    check(&lost(InstanceKind::Ssh, 900_000), &silent, "silent 900000 s, again in 7 s");
    let back = instances::InstanceObservation::Answers { health: Health::Healthy };
    check(&lost(InstanceKind::Ssh, 5), &back, "reachable again, again in 7 s");
}

#[test]
fn g7_a_cloud_instance_is_terminated_only_after_the_backend_deleted_it() {
    let ending = |kind, secs| InstanceView {
        terminating_since: Some(ago(secs)),
        ..instance(kind, Status::Terminating)
    };
    let not = instances::InstanceObservation::NotDeleted { message: "busy".into() };
    check(
        &ending(InstanceKind::Cloud, 0),
        &instances::InstanceObservation::NotRequested,
        "Delete, again in 0 s",
    );
    check(&ending(InstanceKind::Cloud, 60), &not, "not deleted yet: busy, again in 30 s");
    check(&ending(InstanceKind::Cloud, 890), &not, "not deleted yet: busy, again in 10 s");
    let late = DELETE_MAX.as_secs();
    check(
        &ending(InstanceKind::Cloud, late),
        &not,
        "cannot be deleted, check the backend: busy, again in 600 s",
    );
    let reported = InstanceView { is_delete_failure_reported: true, ..ending(InstanceKind::Cloud, late) };
    check(&reported, &not, "again in 600 s");
    let used = |secs| InstanceView { started_at: Some(ago(9_000)), ..ending(InstanceKind::Ssh, secs) };
    check(&used(60), &not, "not deleted yet: busy, again in 30 s");
    check(&used(late), &not, "deleted, again in 0 s");
    // A forced deletion does not wait either; an instance that may be billed stays.
    check(&InstanceView { is_forced: true, ..used(60) }, &not, "deleted, again in 0 s");
    let cloud = InstanceView { is_forced: true, ..ending(InstanceKind::Cloud, 60) };
    check(&cloud, &not, "not deleted yet: busy, again in 30 s");
    // A host that was never ready is not waited for.
    check(&ending(InstanceKind::Ssh, 0), &not, "deleted, again in 0 s");
    let gone = instances::InstanceObservation::Gone { message: "not listed".into() };
    check(&ending(InstanceKind::Cloud, 5), &gone, "deleted, again in 0 s");
}

fn member(n: u32, status: Status, up_to_date: bool) -> FleetMember {
    let id = InstanceId(Uuid::from_u128(n.into()));
    FleetMember {
        id,
        instance_num: n,
        status,
        jobs: u32::from(status == Status::Busy),
        is_end_requested: false,
        is_up_to_date: up_to_date,
    }
}

fn of(nodes_min: u32, nodes_max: Option<u32>, members: Vec<FleetMember>) -> FleetView {
    let status = fleet::Status::Active;
    FleetView {
        status,
        is_ssh: false,
        is_delete_requested: false,
        nodes_min,
        nodes_target: nodes_min,
        nodes_max,
        members,
        attempts: 0,
        last_attempt_at: None,
    }
}

#[track_caller]
fn check_fleet(fleet: &FleetView, expect: &str) {
    let plan = fleets::decide(fleet, NOW);
    let mut words: Vec<String> = plan.create.iter().map(|num| format!("create {num}")).collect();
    words.extend(plan.end.iter().map(|(id, reason)| format!("end {} {reason}", id.0.as_u128())));
    words.extend(plan.change.as_ref().map(|change| change.event.to_string()));
    words.push(format!("tries {}, again in {} s", plan.attempts, plan.due.since(NOW).as_secs()));
    assert_eq!(words.join(", "), expect);
}

#[test]
fn g5_a_fleet_below_its_minimum_creates_instances_with_the_lowest_free_numbers() {
    let fleet = of(3, Some(4), vec![member(1, Status::Busy, true)]);
    check_fleet(&fleet, "create 0, create 2, tries 1, again in 30 s");
}

#[test]
fn g5_idle_instances_above_the_maximum_end_highest_number_first() {
    let members = vec![
        member(0, Status::Idle, true),
        member(1, Status::Busy, true),
        member(2, Status::Idle, true),
        member(3, Status::Busy, true),
    ];
    check_fleet(&of(0, Some(3), members.clone()), "end 2 max_instances_limit, tries 0, again in 30 s");
    let expect = "end 2 max_instances_limit, end 0 max_instances_limit, tries 0, again in 30 s";
    check_fleet(&of(0, Some(1), members), expect);
}

#[test]
fn an_outdated_idle_instance_ends_and_is_replaced_if_the_fleet_has_room() {
    let members = vec![member(0, Status::Idle, false), member(1, Status::Busy, false)];
    let expect = "create 2, end 0 fleet_spec_mismatch, tries 1, again in 30 s";
    check_fleet(&of(2, Some(3), members.clone()), expect);
    check_fleet(&of(2, Some(2), members), "end 0 fleet_spec_mismatch, tries 0, again in 30 s");
}

#[test]
fn creation_retries_wait_from_one_up_to_thirty_minutes_and_stop_at_the_limit() {
    let tried =
        |attempts, secs| FleetView { attempts, last_attempt_at: Some(ago(secs)), ..of(1, None, Vec::new()) };
    for (attempts, minutes) in [(1, 1), (2, 2), (3, 5), (4, 10), (5, 30), (9, 30)] {
        check_fleet(&tried(attempts, minutes * 60 - 9), &format!("tries {attempts}, again in 9 s"));
        let expect = format!("create 0, tries {}, again in 30 s", attempts + 1);
        check_fleet(&tried(attempts, minutes * 60), &expect);
    }
    check_fleet(&tried(ATTEMPTS_MAX, 900_000), "tries 15, again in 30 s");
}

#[test]
fn a_deleted_fleet_ends_its_instances_and_then_itself() {
    let status = fleet::Status::Terminating;
    let members = vec![member(0, Status::Idle, true), member(1, Status::Terminating, true)];
    let fleet = FleetView { status, ..of(1, None, members) };
    check_fleet(&fleet, "end 0 terminated_by_user, tries 0, again in 30 s");
    check_fleet(&FleetView { members: Vec::new(), ..fleet }, "emptied, tries 0, again in 0 s");
}

#[test]
fn a_fleet_begins_with_its_target_and_keeps_its_minimum() {
    let fleet = FleetView { nodes_target: 2, ..of(1, None, Vec::new()) };
    check_fleet(&fleet, "create 0, create 1, tries 1, again in 30 s");
    let one =
        FleetView { last_attempt_at: Some(ago(900)), members: vec![member(0, Status::Idle, true)], ..fleet };
    check_fleet(&one, "tries 0, again in 30 s");
}

#[test]
fn a_fleet_with_a_requested_delete_ends_all_its_instances_at_once() {
    let mut members = vec![member(0, Status::Idle, true), member(1, Status::Pending, true)];
    members.push(FleetMember { is_end_requested: true, ..member(2, Status::Idle, true) });
    let fleet = FleetView { is_delete_requested: true, is_ssh: true, ..of(1, None, members) };
    let expect = "end 0 terminated_by_user, end 1 terminated_by_user, delete-asked, tries 0, again in 0 s";
    check_fleet(&fleet, expect);
}

#[test]
fn an_ending_instance_counts_toward_the_maximum_but_not_the_minimum() {
    let ending = vec![FleetMember { is_end_requested: true, ..member(0, Status::Idle, true) }];
    check_fleet(&of(1, Some(1), ending.clone()), "tries 0, again in 30 s");
    check_fleet(&of(1, Some(2), ending), "create 1, tries 1, again in 30 s");
}

#[test]
fn an_ssh_fleet_creates_and_ends_nothing_by_itself() {
    let fleet = FleetView { is_ssh: true, ..of(5, Some(0), vec![member(0, Status::Idle, false)]) };
    check_fleet(&fleet, "tries 0, again in 30 s");
}

fn any_fleet() -> impl Strategy<Value = FleetView> {
    let status = prop::sample::select(vec![
        Status::Pending,
        Status::Provisioning,
        Status::Idle,
        Status::Busy,
        Status::Terminating,
    ]);
    let members = prop::collection::vec((status, any::<bool>()), 0..8);
    (0_u32..5, 0_u32..5, members).prop_map(|(min, more, members)| {
        let members = members.into_iter().enumerate();
        let members = members.map(|(n, (status, up_to_date))| member(n as u32, status, up_to_date)).collect();
        of(min, Some(min + more), members)
    })
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn g5_a_fleet_plan_never_exceeds_the_maximum_or_ends_a_busy_instance(fleet in any_fleet()) {
        let plan = fleets::decide(&fleet, NOW);
        let before = fleet.members.len() as u32;
        let after = before + plan.create.len() as u32;
        prop_assert!(plan.create.is_empty() || after <= fleet.nodes_max.unwrap());
        let ended: BTreeSet<_> = plan.end.iter().map(|(id, _)| *id).collect();
        prop_assert_eq!(ended.len(), plan.end.len(), "nobody ends twice");
        for member in fleet.members.iter().filter(|member| ended.contains(&member.id)) {
            prop_assert_eq!(member.status, Status::Idle);
        }
        let nums: BTreeSet<u32> = fleet.members.iter().map(|member| member.instance_num).collect();
        prop_assert!(plan.create.iter().all(|num| !nums.contains(num)));
    }

    /// Round after round, with instant instances, the fleet reaches a stable size between minimum and maximum.
    #[test]
    fn g5_a_fleet_settles_within_its_bounds(start in any_fleet()) {
        let mut fleet = start;
        let mut now = NOW;
        for _ in 0..40 {
            let plan = fleets::decide(&fleet, now);
            fleet.members.retain(|member| member.status != Status::Terminating);
            for member in &mut fleet.members {
                member.jobs = 0;
                member.status = Status::Idle;
                if plan.end.iter().any(|(id, _)| *id == member.id) {
                    member.status = Status::Terminating;
                }
            }
            fleet.members.extend(plan.create.iter().map(|num| member(*num, Status::Idle, true)));
            (fleet.attempts, fleet.last_attempt_at) = (plan.attempts, plan.last_attempt_at);
            now = plan.due;
        }
        let count = fleet.members.len() as u32;
        prop_assert!(fleet.nodes_min <= count && count <= fleet.nodes_max.unwrap(), "{:?}", fleet);
        prop_assert!(fleet.members.iter().all(|member| member.is_up_to_date));
    }

    #[test]
    fn r5_instance_plans_contain_only_transitions_the_state_machine_accepts(
        kind in prop::sample::select(vec![InstanceKind::Cloud, InstanceKind::Ssh]),
        status in prop::sample::select(Status::ALL.to_vec()),
        seen in prop::sample::select(vec![
            instances::InstanceObservation::NotRequested, instances::InstanceObservation::Created, instances::InstanceObservation::Silent,
            instances::InstanceObservation::Gone { message: String::new() }, instances::InstanceObservation::Untrusted { message: String::new() },
            instances::InstanceObservation::Starting, instances::InstanceObservation::Unknown,
            instances::InstanceObservation::NoOffers { message: String::new() }, instances::InstanceObservation::Deployed { healthy: true },
            instances::InstanceObservation::Deployed { healthy: false }, instances::InstanceObservation::DeployFailed { fatal: true, message: String::new() },
            instances::InstanceObservation::Answers { health: Health::Failure }, instances::InstanceObservation::NotDeleted { message: String::new() },
        ]),
        secs in 0_i64..5_000,
    ) {
        let row = InstanceView {
            created_at: ago(secs), idle_since: Some(ago(secs)), unreachable_since: Some(ago(secs)),
            ..instance(kind, status)
        };
        let plan = instances::decide(&row, &seen, NOW);
        if let Some(change) = plan.change {
            let step = windlass_model::instance::step(status, change.event);
            prop_assert!(!matches!(step, state_machine::Step::Refuse), "{} in {}", change.event, status);
        } else {
            prop_assert!(plan.action.is_some() || plan.due > NOW);
        }
    }
}

fn stored(status: volume::Status) -> VolumeView {
    VolumeView {
        status,
        created_at: ago(60),
        is_external: false,
        is_delete_requested: false,
        is_attached: false,
        unattached_since: Some(ago(60)),
        cleanup_after: None,
    }
}

#[track_caller]
fn check_volume(volume: &VolumeView, seen: &volumes::VolumeObservation, expect: &str) {
    let plan = volumes::decide(volume, seen, NOW);
    let mut words: Vec<String> = plan.action.iter().map(|action| format!("{action:?}")).collect();
    words.extend(plan.change.as_ref().map(|change| change.event.to_string()));
    words.extend(plan.is_removed.then(|| "gone".to_owned()));
    words.push(format!("again in {} s", plan.due.since(NOW).as_secs()));
    assert_eq!(words.join(", "), expect);
}

#[test]
fn a_volume_is_created_or_registered_and_fails_at_the_deadline() {
    let new = stored(volume::Status::Submitted);
    check_volume(&new, &volumes::VolumeObservation::NotRequested, "Create, again in 0 s");
    check_volume(
        &VolumeView { is_external: true, ..new.clone() },
        &volumes::VolumeObservation::NotRequested,
        "Register, again in 0 s",
    );
    check_volume(&new, &volumes::VolumeObservation::Creating, "created, again in 5 s");
    check_volume(&new, &volumes::VolumeObservation::Ready, "ready, again in 0 s");
    check_volume(&new, &volumes::VolumeObservation::Broken { message: "no".into() }, "broken, again in 0 s");
    let late = VolumeView { created_at: ago(600), ..stored(volume::Status::Provisioning) };
    check_volume(&late, &volumes::VolumeObservation::Creating, "broken, again in 0 s");
}

#[test]
fn an_unused_volume_is_deleted_only_if_automatic_cleanup_is_configured() {
    let idle = |secs| VolumeView { cleanup_after: Some(Span::secs(secs)), ..stored(volume::Status::Active) };
    let seen = volumes::VolumeObservation::NotRequested;
    check_volume(&stored(volume::Status::Active), &seen, "again in 60 s");
    check_volume(&idle(70), &seen, "again in 10 s");
    check_volume(&idle(60), &seen, "delete-asked, again in 0 s");
    check_volume(&VolumeView { is_attached: true, ..idle(60) }, &seen, "again in 60 s");
    check_volume(&VolumeView { is_external: true, ..idle(60) }, &seen, "again in 60 s");
}

#[test]
fn a_volume_in_use_is_never_deleted() {
    let requested = VolumeView { is_delete_requested: true, ..stored(volume::Status::Active) };
    check_volume(&requested, &volumes::VolumeObservation::NotRequested, "Delete, again in 0 s");
    let used = VolumeView { is_attached: true, ..requested.clone() };
    check_volume(&used, &volumes::VolumeObservation::NotRequested, "again in 5 s");
    check_volume(
        &requested,
        &volumes::VolumeObservation::NotDeleted { message: "busy".into() },
        "again in 30 s",
    );
    check_volume(&requested, &volumes::VolumeObservation::Deleted, "gone, again in 0 s");
    check_volume(
        &VolumeView { is_external: true, ..requested },
        &volumes::VolumeObservation::NotRequested,
        "gone, again in 0 s",
    );
}
