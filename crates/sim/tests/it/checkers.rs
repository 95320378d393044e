//! Tests of the checkers: each gets a history that violates its rule, because a checker that cannot fail proves
//! nothing.

use uuid::Uuid;
use windlass_model::id::{InstanceId, SubmissionId, VolumeId};
use windlass_sim::{
    cloud::{self, MachineEvent},
    host::{HostEffect, HostEntry},
    invariants::{
        Event, FleetRow, History, InstanceRow, JobRow, LogRow, RunRow, VolumeRow, check_after_deletion,
        check_after_faults, check_always, check_ssh_hosts,
        pool::{HeldRow, PoolRecords, PreemptionRow, Role, ShareRow},
    },
};

const HOST: InstanceId = InstanceId(Uuid::from_u128(1));
const FLEET: Uuid = Uuid::from_u128(50);
const VOLUME: VolumeId = VolumeId(Uuid::from_u128(60));

fn submission(n: u128) -> SubmissionId {
    SubmissionId(Uuid::from_u128(n))
}

/// `"job 7: running -> terminating by JobRunning @3"`
fn event(text: &str) -> Event {
    let (entity, rest) = text.split_once(' ').unwrap();
    let (id, rest) = rest.split_once(": ").unwrap();
    let (edge, rest) = rest.split_once(" by ").unwrap();
    let (actor, epoch) = rest.split_once(" @").unwrap();
    let (from, to) = edge.split_once(" -> ").unwrap();
    Event {
        seq: 0,
        entity: entity.into(),
        entity_id: Uuid::from_u128(id.parse().unwrap()),
        kind: "status".into(),
        from: (from != "new").then(|| from.into()),
        to: Some(to.into()),
        is_final: ["done", "failed", "terminated", "aborted"].contains(&to),
        actor: actor.into(),
        epoch: Some(epoch.parse().unwrap()),
        at: 10,
        reason: String::new(),
    }
}

fn entry(n: u128, epoch: i64, at: i64, kind: HostEffect) -> HostEntry {
    HostEntry { at, host: HOST, submission: submission(n), epoch, kind }
}

fn job(id: u128, submission_num: i64, finished: bool) -> JobRow {
    JobRow {
        id: Uuid::from_u128(id),
        run_id: Uuid::from_u128(100),
        replica_num: 0,
        job_num: 0,
        submission_num,
        status: if finished { "done" } else { "running" }.into(),
        finished,
        instance_id: Some(HOST.0),
        blocks: 1,
        submitted_at: 5,
        host_lost: false,
    }
}

fn instance(busy_blocks: i64, total_blocks: i64) -> InstanceRow {
    InstanceRow {
        id: HOST.0,
        busy_blocks,
        total_blocks,
        status: "idle".into(),
        finished: false,
        fleet_id: Some(FLEET),
        reason: None,
    }
}

fn fleet(nodes_min: i64, nodes_max: i64) -> FleetRow {
    FleetRow {
        id: FLEET,
        status: "active".into(),
        finished: false,
        nodes_min: Some(nodes_min),
        nodes_max: Some(nodes_max),
        nodes_max_ever: Some(nodes_max),
    }
}

fn machine(name: &str, kind: MachineEvent) -> cloud::CloudEntry {
    cloud::CloudEntry { at: 1, instance: HOST, machine: name.into(), kind }
}

#[track_caller]
fn assert_left(id: &str, history: &History) {
    let found = check_after_faults(history);
    assert!(found.iter().any(|v| v.id == id), "expected {id}, found {found:?}");
}

#[track_caller]
fn assert_breaks(id: &str, history: &History) {
    let found = check_always(history);
    assert!(found.iter().any(|v| v.id == id), "expected {id}, found {found:?}");
}

#[track_caller]
fn assert_events_break(id: &str, events: &[&str]) {
    assert_breaks(id, &History { events: events.iter().map(|e| event(e)).collect(), ..History::default() });
}

#[test]
fn a_correct_history_has_no_violations() {
    let history = History {
        events: [
            "job 7: new -> submitted by user @1",
            "job 7: submitted -> provisioning by JobSubmitted @2",
            "job 7: provisioning -> pulling by JobRunning @3",
            "job 7: pulling -> running by JobRunning @4",
            "job 7: running -> terminating by JobRunning @5",
            "job 7: terminating -> done by JobTerminating @6",
        ]
        .map(event)
        .into(),
        journal: vec![
            entry(7, 3, 1, HostEffect::GpuAcquired("GPU-0".into())),
            entry(7, 3, 2, HostEffect::ContainerStarted),
            entry(7, 5, 3, HostEffect::ContainerExited),
            entry(7, 5, 3, HostEffect::GpuReleased("GPU-0".into())),
        ],
        jobs: vec![job(7, 0, true)],
        instances: vec![instance(0, 1)],
        ..History::default()
    };
    assert_eq!(check_always(&history), []);
    assert_eq!(check_after_faults(&history), []);
}

#[test]
fn r3_leaving_a_final_status_is_detected() {
    assert_events_break(
        "R3",
        &["job 7: terminating -> done by JobTerminating @1", "job 7: done -> running by JobRunning @2"],
    );
}

#[test]
fn r4_a_final_status_written_by_the_wrong_pipeline_is_detected() {
    assert_events_break("R4", &["job 7: running -> done by JobRunning @1"]);
    assert_events_break("R4", &["run 8: terminating -> done by JobTerminating @1"]);
}

#[test]
fn r5_an_unlisted_transition_is_detected() {
    assert_events_break(
        "R5",
        &["job 7: new -> submitted by user @1", "job 7: submitted -> running by JobRunning @2"],
    );
}

#[test]
fn r5_an_event_that_does_not_continue_the_previous_status_is_detected() {
    assert_events_break(
        "R5",
        &["job 7: new -> submitted by user @1", "job 7: pulling -> running by JobRunning @2"],
    );
}

#[test]
fn l1_a_write_under_an_older_epoch_is_detected() {
    assert_events_break(
        "L1",
        &[
            "job 7: submitted -> provisioning by JobSubmitted @5",
            "job 7: provisioning -> pulling by JobRunning @4",
        ],
    );
}

#[test]
fn r6_two_active_submissions_and_gaps_in_their_numbers_are_detected() {
    assert_breaks("R6", &History { jobs: vec![job(7, 0, false), job(8, 1, false)], ..History::default() });
    assert_breaks("R6", &History { jobs: vec![job(7, 0, true), job(8, 2, true)], ..History::default() });
}

#[test]
fn r7_a_second_container_of_a_submission_is_detected() {
    let journal =
        vec![entry(7, 1, 1, HostEffect::ContainerStarted), entry(7, 2, 2, HostEffect::ContainerStarted)];
    assert_breaks("R7", &History { journal, ..History::default() });
}

#[test]
fn r8_wrong_or_too_many_busy_blocks_are_detected() {
    let jobs = vec![job(7, 0, false)];
    assert_breaks(
        "R8",
        &History { jobs: jobs.clone(), instances: vec![instance(0, 4)], ..History::default() },
    );
    assert_breaks("R8", &History { jobs, instances: vec![instance(1, 0)], ..History::default() });
}

#[test]
fn r12_a_submission_after_a_stop_is_detected() {
    let run =
        RunRow { id: Uuid::from_u128(100), status: "running".into(), stopped_at: Some(4), attempt: None };
    assert_breaks("R12", &History { runs: vec![run], jobs: vec![job(7, 0, true)], ..History::default() });
}

#[test]
fn r27_a_class_of_parked_jobs_and_a_placed_job_in_a_class_are_detected() {
    assert_breaks("R27", &History { headless_classes: vec!["class".into()], ..History::default() });
    assert_breaks("R27", &History { left_in_class: vec![Uuid::from_u128(7)], ..History::default() });
}

#[test]
fn r22_a_container_that_outlives_its_job_is_detected() {
    let events = vec![event("job 7: terminating -> done by JobTerminating @1")];
    let started = entry(7, 1, 1, HostEffect::ContainerStarted);
    let runs_on = History { events: events.clone(), journal: vec![started.clone()], ..History::default() };
    assert_breaks("R22", &runs_on);
    let late = entry(7, 1, 11, HostEffect::ContainerExited);
    assert_breaks(
        "R22",
        &History { events: events.clone(), journal: vec![started, late], ..History::default() },
    );
    let revived = entry(7, 1, 12, HostEffect::ContainerStarted);
    assert_breaks("R22", &History { events, journal: vec![revived], ..History::default() });
}

#[test]
fn l2_an_effect_of_an_older_holder_is_detected() {
    let journal =
        vec![entry(7, 2, 1, HostEffect::ContainerStarted), entry(7, 1, 2, HostEffect::ContainerExited)];
    assert_breaks("L2", &History { journal, ..History::default() });
}

#[test]
fn g1_a_gpu_acquired_twice_or_released_by_another_job_is_detected() {
    let gpu = || "GPU-0".to_owned();
    let twice =
        vec![entry(7, 1, 1, HostEffect::GpuAcquired(gpu())), entry(8, 1, 2, HostEffect::GpuAcquired(gpu()))];
    assert_breaks("G1", &History { journal: twice, ..History::default() });
    let foreign =
        vec![entry(7, 1, 1, HostEffect::GpuAcquired(gpu())), entry(8, 1, 2, HostEffect::GpuReleased(gpu()))];
    assert_breaks("G1", &History { journal: foreign, ..History::default() });
}

#[test]
fn r2_and_g6_unfinished_runs_and_leftover_containers_are_detected() {
    let run = RunRow { id: Uuid::from_u128(100), status: "running".into(), stopped_at: None, attempt: None };
    let history = History { runs: vec![run], containers: vec![submission(7)], ..History::default() };
    let ids: Vec<_> = check_after_faults(&history).iter().map(|v| v.id).collect();
    assert_eq!(ids, ["R2", "G6"]);
}

#[test]
fn g4_a_volume_attached_twice_or_deleted_while_attached_is_detected() {
    let both = vec![(VOLUME, vec!["vm-1".to_owned(), "vm-2".to_owned()])];
    assert_breaks("G4", &History { disks: both, ..History::default() });
    let rows = vec![(VOLUME.0, HOST.0), (VOLUME.0, Uuid::from_u128(2))];
    assert_breaks("G4", &History { attachments: rows, ..History::default() });
    assert_breaks("G4", &History { outrages: vec!["deleted while attached".into()], ..History::default() });
    let volumes = vec![VolumeRow { id: VOLUME.0, deleted: true, delete_requested: true }];
    assert_breaks("G4", &History { volumes, attachments: vec![(VOLUME.0, HOST.0)], ..History::default() });
    assert_breaks("G4", &History { holders: vec![Uuid::from_u128(7)], ..History::default() });
    assert_left("G4", &History { attachments: vec![(VOLUME.0, HOST.0)], ..History::default() });
}

#[test]
fn g5_a_fleet_that_is_too_large_or_too_small_is_detected() {
    let two = vec![instance(0, 1), InstanceRow { id: Uuid::from_u128(2), ..instance(0, 1) }];
    assert_breaks("G5", &History { instances: two.clone(), fleets: vec![fleet(0, 1)], ..History::default() });
    assert_left("G5", &History { instances: two.clone(), fleets: vec![fleet(3, 4)], ..History::default() });
    let shrunk = FleetRow { nodes_max_ever: Some(2), ..fleet(0, 1) };
    assert_left("G5", &History { instances: two, fleets: vec![shrunk], ..History::default() });
}

#[test]
fn m8_a_host_that_ended_with_an_error_is_detected() {
    let ssh = || FleetRow { nodes_min: None, nodes_max: None, nodes_max_ever: None, ..fleet(0, 0) };
    let over = InstanceRow { finished: true, reason: Some("error".into()), ..instance(0, 1) };
    let failed = History { instances: vec![over.clone()], fleets: vec![ssh()], ..History::default() };
    assert_eq!(check_ssh_hosts(&failed).iter().map(|v| v.id).collect::<Vec<_>>(), ["M8"]);
    // Machines of clouds regularly end this way, and hosts end when their users delete them.
    let rented = History { instances: vec![over.clone()], fleets: vec![fleet(0, 1)], ..History::default() };
    assert_eq!(check_ssh_hosts(&rented), []);
    let requested = InstanceRow { reason: Some("terminated_by_user".into()), ..over };
    let removed = History { instances: vec![requested], fleets: vec![ssh()], ..History::default() };
    assert_eq!(check_ssh_hosts(&removed), []);
}

#[test]
fn g7_orphaned_or_duplicate_machines_and_deletion_under_a_job_are_detected() {
    let machines = vec![(HOST, "vm-1".to_owned())];
    assert_breaks("G7", &History { machines: machines.clone(), ..History::default() });
    let over = InstanceRow { finished: true, ..instance(0, 1) };
    assert_breaks("G7", &History { machines: machines.clone(), instances: vec![over], ..History::default() });
    let twice = vec![machine("vm-1", MachineEvent::Created), machine("vm-2", MachineEvent::Created)];
    assert_breaks("G7", &History { machine_journal: twice, ..History::default() });
    let idle = InstanceRow { reason: Some("idle_timeout".into()), ..instance(0, 1) };
    let under = vec![machine("vm-1", MachineEvent::DeleteRequested { running: 1 })];
    assert_breaks("G7", &History { instances: vec![idle], machine_journal: under, ..History::default() });
    let left: Vec<_> =
        check_after_deletion(&History { machines, ..History::default() }).iter().map(|v| v.id).collect();
    assert_eq!(left, ["G7"]);
}

#[test]
fn o1_a_log_with_wrong_missing_or_extra_bytes_is_detected() {
    let log = LogRow { submission: Uuid::from_u128(7), is_true: true, stored: 5, written: Some(9) };
    let events = [
        "job 7: pulling -> running by JobRunning @1",
        "job 7: running -> terminating by JobRunning @2",
        "job 7: terminating -> done by JobTerminating @3",
    ];
    let history = |log| History { events: events.map(event).into(), logs: vec![log], ..History::default() };
    assert_breaks("O1", &history(log.clone()));
    assert_breaks("O1", &history(LogRow { is_true: false, stored: 9, ..log.clone() }));
    assert_breaks("O1", &history(LogRow { stored: 10, ..log }));
}

/// A replica with a GPU, of a project and a priority as stored.
fn holds(n: u128, role: Role, project: u128, priority: i64) -> HeldRow {
    HeldRow {
        waiting: Uuid::from_u128(1),
        at: 10,
        role,
        project: Uuid::from_u128(project),
        priority,
        replica: (Uuid::from_u128(n), 0),
        gpus: 1,
        cpus: 8,
        memory_mib: 1,
    }
}

fn preempted(held: Vec<HeldRow>, shares: &[(u128, i64)], placed_at: Option<i64>) -> History {
    let preemption = PreemptionRow {
        waiting: Uuid::from_u128(1),
        at: 10,
        placed_at,
        finished: false,
        reason: None,
        until: 20,
    };
    let share = |(project, amount): &(u128, i64)| ShareRow {
        waiting: Uuid::from_u128(1),
        at: 10,
        project: Uuid::from_u128(*project),
        resource: "gpu".into(),
        amount: *amount,
    };
    let shares = shares.iter().map(share).collect();
    let preemptions = vec![preemption];
    let pool = PoolRecords { preemptions, held, shares, calm_since: Some(5), crashes: vec![], now: 30 };
    History { pool, ..History::default() }
}

#[test]
fn p2_a_preemption_that_leads_back_is_detected() {
    let (waits, ends) = (holds(1, Role::Waiting, 1, 50), holds(2, Role::Victim, 2, 50));
    // Both borrow, and in the same class.
    assert_breaks("P2", &preempted(vec![waits.clone(), ends.clone()], &[], Some(15)));
    assert_breaks("P2", &preempted(vec![waits.clone(), ends.clone()], &[(1, 1), (2, 1)], Some(15)));
    // A share is taken back, or the class is higher.
    assert_eq!(check_always(&preempted(vec![waits.clone(), ends.clone()], &[(1, 1)], Some(15))), []);
    let idle = HeldRow { priority: -50, ..ends };
    assert_eq!(check_always(&preempted(vec![waits, idle], &[(2, 1)], Some(15))), []);
}

#[test]
fn p3_a_preemption_without_its_start_is_detected() {
    let held = vec![holds(1, Role::Waiting, 1, 50), holds(2, Role::Victim, 2, -50)];
    for placed_at in [None, Some(21)] {
        assert_breaks("P3", &preempted(held.clone(), &[], placed_at));
    }
    assert_eq!(check_always(&preempted(held.clone(), &[], Some(20))), []);
    // A server that crashes while blocks are kept may delay the start; before or afterwards it does not matter.
    let crashed = |at: i64| {
        let mut history = preempted(held.clone(), &[], None);
        history.pool.crashes = vec![at];
        history
    };
    assert_eq!(check_always(&crashed(15)), []);
    for at in [9, 21] {
        assert_breaks("P3", &crashed(at));
    }
}
