//! Checkers over the event history, the hosts' journals and the rows. They never read logs.
//!
//! Their names start with the IDs of the invariants they check. Safety checkers may run at any time; those under
//! `check_after_faults` only after the faults have stopped and the system has had time to recover.

pub mod containers;
mod machines;
pub mod managed;
mod output;
pub mod pool;
pub mod rows;

use std::collections::{BTreeMap, BTreeSet};

use uuid::Uuid;
use windlass_model::{
    fleet,
    id::{InstanceId, SubmissionId, VolumeId},
    instance, job,
    managed_job::{self, Status::FailedController},
    run,
    state_machine::{StateMachine, Step, StrEnum},
    volume,
};

use crate::{
    cloud,
    host::{HostEffect, HostEntry},
};

/// One row of `events`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Event {
    pub seq: i64,
    pub entity: String,
    pub entity_id: Uuid,
    pub kind: String,
    pub from: Option<String>,
    pub to: Option<String>,
    pub is_final: bool,
    pub actor: String,
    pub epoch: Option<i64>,
    pub at: i64,
    pub reason: String,
}

/// One submission as stored.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct JobRow {
    pub id: Uuid,
    pub run_id: Uuid,
    pub replica_num: i64,
    pub job_num: i64,
    pub submission_num: i64,
    pub status: String,
    pub finished: bool,
    pub instance_id: Option<Uuid>,
    pub blocks: i64,
    pub submitted_at: i64,
    /// Its host was abandoned: its container, if any, ends when the host responds again.
    pub host_lost: bool,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RunRow {
    pub id: Uuid,
    pub status: String,
    /// Time at which a stop was acknowledged to the user.
    pub stopped_at: Option<i64>,
    /// Set for attempts of managed jobs.
    pub attempt: Option<managed::RunAttempt>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InstanceRow {
    pub id: Uuid,
    pub busy_blocks: i64,
    pub total_blocks: i64,
    pub status: String,
    pub finished: bool,
    pub fleet_id: Option<Uuid>,
    /// Termination reason.
    pub reason: Option<String>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FleetRow {
    pub id: Uuid,
    pub status: String,
    pub finished: bool,
    /// `None` for SSH fleets.
    pub nodes_min: Option<i64>,
    pub nodes_max: Option<i64>,
    /// Highest maximum it ever had.
    pub nodes_max_ever: Option<i64>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VolumeRow {
    pub id: Uuid,
    pub deleted: bool,
    pub delete_requested: bool,
}

/// The stored log of one submission, compared with what its job wrote.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LogRow {
    pub submission: Uuid,
    /// True if every stored byte equals the written byte at its offset.
    pub is_true: bool,
    pub stored: u64,
    /// Total length of the written log; `None` while the job runs, and if its machine is deleted.
    pub written: Option<u64>,
}

/// Input of the checkers.
#[derive(Clone, Debug, Default)]
pub struct History {
    pub events: Vec<Event>,
    /// Journals of all hosts, each in its order.
    pub journal: Vec<HostEntry>,
    pub runs: Vec<RunRow>,
    pub jobs: Vec<JobRow>,
    /// Classes of waiting jobs of which none is evaluated.
    pub headless_classes: Vec<String>,
    /// Jobs of such a class that do not wait.
    pub left_in_class: Vec<Uuid>,
    pub instances: Vec<InstanceRow>,
    /// Submissions with a container that is alive on any host.
    pub containers: Vec<SubmissionId>,
    pub fleets: Vec<FleetRow>,
    pub volumes: Vec<VolumeRow>,
    /// Volume and instance.
    pub attachments: Vec<(Uuid, Uuid)>,
    /// Finished jobs that still hold a volume.
    pub holders: Vec<Uuid>,
    pub logs: Vec<LogRow>,
    /// Existing machines of the cloud, with their instance.
    pub machines: Vec<(InstanceId, String)>,
    pub machine_journal: Vec<cloud::CloudEntry>,
    /// Existing disks of the cloud, with the machines to which they are attached.
    pub disks: Vec<(VolumeId, Vec<String>)>,
    /// Forbidden requests to the cloud.
    pub outrages: Vec<String>,
    pub managed: Vec<managed::ManagedJobRow>,
    /// Violations of slots and attempts that the database recorded at each write: the invariant's ID and the details.
    pub watched: Vec<(&'static str, String)>,
    /// Of shared fleets.
    pub pool: pool::PoolRecords,
}

/// A violated invariant with its ID and a description.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Violation {
    pub id: &'static str,
    pub what: String,
}

fn violation(id: &'static str, what: impl Into<String>) -> Violation {
    Violation { id, what: what.into() }
}

/// Must hold at any time.
pub fn check_always(h: &History) -> Vec<Violation> {
    let mut found = Vec::new();
    found.extend(r3_final_is_absorbing(&h.events));
    found.extend(r4_only_the_terminating_pipeline_ends_a_job(&h.events));
    found.extend(r5_only_listed_edges(&h.events));
    found.extend(l1_epochs_of_a_row_never_go_back(&h.events));
    found.extend(r6_one_active_submission_without_gaps(&h.jobs));
    found.extend(r7_one_container_per_submission(&h.journal));
    found.extend(r8_busy_blocks_are_the_sum_of_jobs(h));
    found.extend(r12_no_submission_after_an_acknowledged_stop(h));
    found.extend(r22_a_final_job_has_no_container(h));
    found.extend(l2_no_effect_of_an_older_holder(&h.journal));
    found.extend(g1_a_gpu_has_one_owner(&h.journal));
    found.extend(r27_a_waiting_job_is_evaluated_for_its_class(h));
    found.extend(machines::check_always(h));
    found.extend(managed::check_always(h));
    found.extend(pool::check_always(h));
    found.extend(output::o1_a_stored_log_is_what_was_written(h));
    found
}

/// Must hold after the faults have stopped and time has passed.
pub fn check_after_faults(h: &History) -> Vec<Violation> {
    let mut found = Vec::new();
    for run in &h.runs {
        if !run.status.parse::<run::Status>().is_ok_and(|s| s.is_final()) {
            found.push(violation("R2", format!("run {} is still {}", run.id, run.status)));
        }
    }
    for id in &h.containers {
        found.push(violation("G6", format!("container of {id} still exists")));
    }
    for i in &h.instances {
        if i.busy_blocks != 0 {
            found.push(violation("R8", format!("instance {} still has {} busy blocks", i.id, i.busy_blocks)));
        }
    }
    found.extend(machines::check_after_faults(h));
    found.extend(managed::check_after_faults(h));
    found
}

/// Must hold if hosts of SSH fleets keep their keys and no fault lasts as long as the time limit of their provisioning:
/// a host that ends with an error there was ended by a fault between the server and its database.
pub fn check_ssh_hosts(h: &History) -> Vec<Violation> {
    machines::m8_no_ssh_host_failed(h)
}

/// Must hold after every fleet and volume was deleted and time has passed: nothing costs money.
pub fn check_after_deletion(h: &History) -> Vec<Violation> {
    machines::check_after_deletion(h)
}

fn status_events(events: &[Event]) -> impl Iterator<Item = &Event> {
    events.iter().filter(|e| e.kind == "status")
}

fn r3_final_is_absorbing(events: &[Event]) -> Vec<Violation> {
    let mut ended = BTreeSet::new();
    let mut found = Vec::new();
    for e in status_events(events) {
        if !ended.contains(&e.entity_id) {
            if e.is_final {
                ended.insert(e.entity_id);
            }
            continue;
        }
        // The only status that may follow a final one: the previous one stays in the reason.
        if e.entity == "managed-job" && e.to.as_deref() == Some(FailedController.as_str()) {
            continue;
        }
        found.push(violation(
            "R3",
            format!("{} {} left its final status for {:?}", e.entity, e.entity_id, e.to),
        ));
    }
    found
}

fn r4_only_the_terminating_pipeline_ends_a_job(events: &[Event]) -> Vec<Violation> {
    status_events(events)
        .filter(|e| e.is_final)
        .filter(|e| match e.entity.as_str() {
            "job" => e.actor != "JobTerminating",
            "run" => e.actor != "Run",
            _ => false,
        })
        .map(|e| violation("R4", format!("{} {} was ended by {}", e.entity, e.entity_id, e.actor)))
        .collect()
}

/// Replays each entity's history: each event must start at the status of the previous one, along a listed edge.
fn r5_only_listed_edges(events: &[Event]) -> Vec<Violation> {
    let mut at: BTreeMap<Uuid, String> = BTreeMap::new();
    let mut found = Vec::new();
    for e in status_events(events) {
        let (from, Some(to)) = (e.from.as_deref(), e.to.as_deref()) else { continue };
        let known = at.insert(e.entity_id, to.to_owned());
        // Fleets and volumes of a test exist before the first event.
        let began_unseen = known.is_none() && (e.entity == "fleet" || e.entity == "volume");
        if known.as_deref() != from && !began_unseen {
            found.push(violation(
                "R5",
                format!(
                    "{} {}: an event leaves status {from:?}, but the status was {known:?}",
                    e.entity, e.entity_id
                ),
            ));
        }
        let Some(from) = from else { continue };
        let legal = match e.entity.as_str() {
            "job" => is_legal_transition::<job::JobLifecycle>(from, to),
            "run" => is_legal_transition::<run::RunLifecycle>(from, to),
            "instance" => is_legal_transition::<instance::InstanceLifecycle>(from, to),
            "fleet" => is_legal_transition::<fleet::FleetLifecycle>(from, to),
            "volume" => is_legal_transition::<volume::VolumeLifecycle>(from, to),
            "managed-job" => is_legal_transition::<managed_job::ManagedTaskLifecycle>(from, to),
            _ => true,
        };
        if !legal {
            found
                .push(violation("R5", format!("{} {}: {from} → {to} is not an edge", e.entity, e.entity_id)));
        }
    }
    found
}

/// Returns whether any event leads from one status to the other.
fn is_legal_transition<M: StateMachine>(from: &str, to: &str) -> bool {
    let status = |word: &str| M::Status::ALL.iter().copied().find(|s| s.as_str() == word);
    let (Some(from), Some(to)) = (status(from), status(to)) else { return false };
    M::Event::ALL.iter().any(|event| M::step(from, *event) == Step::To(to))
}

/// A write under an older epoch after one under a newer is a write of a stale lease holder.
fn l1_epochs_of_a_row_never_go_back(events: &[Event]) -> Vec<Violation> {
    let mut newest: BTreeMap<Uuid, i64> = BTreeMap::new();
    let mut found = Vec::new();
    // A row is created under the lease of another row.
    for e in status_events(events).filter(|e| e.from.is_some()) {
        let Some(epoch) = e.epoch else { continue };
        let seen = newest.entry(e.entity_id).or_insert(epoch);
        if epoch < *seen {
            found.push(violation(
                "L1",
                format!("{} {}: {:?} written under epoch {epoch} after {seen}", e.entity, e.entity_id, e.to),
            ));
        }
        *seen = (*seen).max(epoch);
    }
    found
}

fn r6_one_active_submission_without_gaps(jobs: &[JobRow]) -> Vec<Violation> {
    let mut by_job: BTreeMap<(Uuid, i64, i64), Vec<&JobRow>> = BTreeMap::new();
    for job in jobs {
        by_job.entry((job.run_id, job.replica_num, job.job_num)).or_default().push(job);
    }
    let mut found = Vec::new();
    for (key, mut rows) in by_job {
        rows.sort_by_key(|j| j.submission_num);
        if rows.iter().filter(|j| !j.finished).count() > 1 {
            found.push(violation("R6", format!("job {key:?} has two active submissions")));
        }
        if rows.iter().enumerate().any(|(n, j)| j.submission_num != n as i64) {
            found.push(violation("R6", format!("submissions of job {key:?} are not numbered 0, 1, 2, …")));
        }
    }
    found
}

fn r7_one_container_per_submission(journal: &[HostEntry]) -> Vec<Violation> {
    let mut started = BTreeSet::new();
    journal
        .iter()
        .filter(|e| e.kind == HostEffect::ContainerStarted)
        .filter(|e| !started.insert(e.submission))
        .map(|e| violation("R7", format!("submission {} started a second container", e.submission)))
        .collect()
}

fn r8_busy_blocks_are_the_sum_of_jobs(h: &History) -> Vec<Violation> {
    let mut busy: BTreeMap<Uuid, i64> = BTreeMap::new();
    for job in h.jobs.iter().filter(|j| !j.finished) {
        if let Some(instance) = job.instance_id {
            *busy.entry(instance).or_default() += job.blocks;
        }
    }
    h.instances
        .iter()
        .filter_map(|i| {
            let sum = busy.get(&i.id).copied().unwrap_or_default();
            if sum != i.busy_blocks {
                return Some(violation(
                    "R8",
                    format!("instance {}: {} blocks are busy, but jobs hold {sum}", i.id, i.busy_blocks),
                ));
            }
            (sum > i.total_blocks).then(|| {
                violation("R8", format!("instance {} holds {sum} of {} blocks", i.id, i.total_blocks))
            })
        })
        .collect()
}

fn r12_no_submission_after_an_acknowledged_stop(h: &History) -> Vec<Violation> {
    let stopped: BTreeMap<Uuid, i64> = h.runs.iter().filter_map(|r| Some((r.id, r.stopped_at?))).collect();
    h.jobs
        .iter()
        .filter(|j| stopped.get(&j.run_id).is_some_and(|at| j.submitted_at > *at))
        .map(|j| violation("R12", format!("run {} got submission {} after its stop", j.run_id, j.id)))
        .collect()
}

/// When a job becomes final its container has ended, and none starts later. Jobs of an abandoned host are excluded,
/// because their state is unknown.
/// As long as jobs of a class wait, one of them is evaluated; the safety net of a server does not run here.
fn r27_a_waiting_job_is_evaluated_for_its_class(h: &History) -> Vec<Violation> {
    let headless =
        h.headless_classes.iter().map(|class| format!("all waiting jobs of class {class} are parked"));
    let left = h.left_in_class.iter().map(|id| format!("job {id} does not wait, but is in a class"));
    headless.chain(left).map(|what| violation("R27", what)).collect()
}

fn r22_a_final_job_has_no_container(h: &History) -> Vec<Violation> {
    let lost: BTreeSet<Uuid> = h.jobs.iter().filter(|j| j.host_lost).map(|j| j.id).collect();
    let finals: BTreeMap<Uuid, i64> = status_events(&h.events)
        .filter(|e| e.entity == "job" && e.is_final && !lost.contains(&e.entity_id))
        .map(|e| (e.entity_id, e.at))
        .collect();
    let mut open: BTreeMap<SubmissionId, i64> = BTreeMap::new();
    let mut found = Vec::new();
    for entry in &h.journal {
        match &entry.kind {
            HostEffect::ContainerStarted => {
                open.insert(entry.submission, entry.at);
                if finals.get(&entry.submission.0).is_some_and(|at| entry.at > *at) {
                    found.push(violation(
                        "R22",
                        format!("container of {} started after the submission was final", entry.submission),
                    ));
                }
            }
            HostEffect::ContainerExited => {
                open.remove(&entry.submission);
                if finals.get(&entry.submission.0).is_some_and(|at| entry.at > *at) {
                    found.push(violation(
                        "R22",
                        format!("{} was final before its container ended", entry.submission),
                    ));
                }
            }
            HostEffect::GpuAcquired(_)
            | HostEffect::GpuReleased(_)
            | HostEffect::RefusedEpoch
            | HostEffect::Removed => {}
        }
    }
    found.extend(
        open.keys()
            .filter(|id| finals.contains_key(&id.0))
            .map(|id| violation("R22", format!("{id} is final, but its container is running"))),
    );
    found
}

fn l2_no_effect_of_an_older_holder(journal: &[HostEntry]) -> Vec<Violation> {
    let mut newest = BTreeMap::new();
    let mut found = Vec::new();
    for e in journal.iter().filter(|e| e.kind != HostEffect::RefusedEpoch) {
        let seen = newest.entry((e.host, e.submission)).or_insert(e.epoch);
        if e.epoch < *seen {
            found.push(violation(
                "L2",
                format!("{:?} of {} under epoch {} after {seen}", e.kind, e.submission, e.epoch),
            ));
        }
        *seen = (*seen).max(e.epoch);
    }
    found
}

fn g1_a_gpu_has_one_owner(journal: &[HostEntry]) -> Vec<Violation> {
    let mut owner = BTreeMap::new();
    let mut found = Vec::new();
    for e in journal {
        match &e.kind {
            HostEffect::GpuAcquired(gpu) => {
                if let Some(other) = owner.insert((e.host, gpu.clone()), e.submission) {
                    found.push(violation(
                        "G1",
                        format!("{gpu} was acquired by {} while {other} held it", e.submission),
                    ));
                }
            }
            HostEffect::GpuReleased(gpu) => {
                if owner.remove(&(e.host, gpu.clone())) != Some(e.submission) {
                    found.push(violation(
                        "G1",
                        format!("{} released {gpu}, which it did not hold", e.submission),
                    ));
                }
            }
            HostEffect::ContainerStarted
            | HostEffect::ContainerExited
            | HostEffect::RefusedEpoch
            | HostEffect::Removed => {}
        }
    }
    found
}
