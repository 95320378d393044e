//! Launch slots and alive slots: the order in which tasks receive them.
//!
//! One queue: higher priority first, then the older job. A job that is alive needs only a launch slot, so a head of the
//! queue that waits for both never blocks it. Slots are counted in the transaction that claims.
//!
//! Projects take turns: the project that holds the fewest launch slots for its weight is next, and one that holds some
//! leaves a quarter of the slots free. So launches of a project that wait for instances leave slots to others.

use std::collections::BTreeMap;

use crate::{
    id::ProjectId,
    managed_job::{Event, RecoverySource, ScheduleEvent, ScheduleState, Status, record::TaskRecord},
    time::{Span, Timestamp},
};

/// Maximum number of jobs that launch and are alive at once, over all replicas.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SlotLimits {
    pub max_launching: u32,
    pub max_alive: u32,
}

impl SlotLimits {
    /// Returns the defaults for a host. A job is a row, not a process: memory limits the runs that are alive, and a
    /// launch mostly waits.
    pub fn for_host(cores: u32, memory_mib: u64) -> Self {
        let alive = u32::try_from(memory_mib.saturating_mul(4)).unwrap_or(u32::MAX);
        Self { max_launching: cores.saturating_mul(16).clamp(8, 512), max_alive: alive.clamp(2_000, 100_000) }
    }
}

/// Slots in use now.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SlotUsage {
    pub launching: u32,
    pub alive: u32,
}

/// A task that waits to launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SlotRequest {
    pub project: ProjectId,
    /// Of the project; 0 counts as 1.
    pub weight: u32,
    /// Increases with submission: a smaller number is an older job.
    pub job: u64,
    pub task: u32,
    pub priority: i32,
    /// Its job already holds an alive slot.
    pub has_alive_slot: bool,
}

/// A project may get another launch slot if it then has at most this many times those that stay free.
const FREE_SHARE: u32 = 3;

/// Returns the tasks that may launch now, in order. Never exceeds a limit, whatever was in use before. `held` are the
/// launch slots of each project; `None` if there is only one project.
pub fn grant_slots(
    queue: &[SlotRequest],
    limits: SlotLimits,
    in_use: SlotUsage,
    held: Option<&BTreeMap<ProjectId, u32>>,
) -> Vec<SlotRequest> {
    let mut order: Vec<&SlotRequest> = queue.iter().collect();
    order.sort_by_key(|waiting| (std::cmp::Reverse(waiting.priority), waiting.job, waiting.task));
    let mut launching = limits.max_launching.saturating_sub(in_use.launching);
    let mut alive = limits.max_alive.saturating_sub(in_use.alive);
    let mut held = held.cloned();
    let mut woken: Vec<u64> = Vec::new();
    let mut granted = Vec::new();
    while launching > 0 {
        let may_be_alive =
            |waiting: &SlotRequest| alive > 0 || waiting.has_alive_slot || woken.contains(&waiting.job);
        let next = match &held {
            None => order.iter().position(|waiting| may_be_alive(waiting)),
            Some(held) => {
                let of = |waiting: &SlotRequest| held.get(&waiting.project).copied().unwrap_or_default();
                let mut turns: Vec<(usize, u64)> = Vec::new();
                for (at, waiting) in order.iter().enumerate() {
                    let most = (launching - 1).saturating_mul(FREE_SHARE);
                    let may_launch = of(waiting) == 0 || of(waiting) < most;
                    if may_launch && may_be_alive(waiting) {
                        // Thousandths of slots for a weight of one.
                        let turn = u64::from(of(waiting)) * 1_000 / u64::from(waiting.weight.max(1));
                        turns.push((at, turn));
                    }
                }
                turns.into_iter().min_by_key(|(at, turn)| (*turn, *at)).map(|(at, _)| at)
            }
        };
        let Some(next) = next else { break };
        let waiting = order.remove(next);
        if !waiting.has_alive_slot && !woken.contains(&waiting.job) {
            alive -= 1;
            woken.push(waiting.job);
        }
        launching -= 1;
        if let Some(held) = &mut held {
            *held.entry(waiting.project).or_default() += 1;
        }
        granted.push(*waiting);
    }
    granted
}

/// Applies a granted slot to a task: the columns that the claim writes. `None`: it does not need one.
pub fn apply_grant(record: &TaskRecord, now: Timestamp) -> Option<(TaskRecord, Event)> {
    let event = match (record.status, record.episode.is_some()) {
        (Status::Pending, false) => Event::SlotGranted,
        (Status::Pending | Status::Recovering, _) => Event::Rescheduled,
        (_, _) => return None,
    };
    let mut next = record.clone();
    next.apply(event, RecoverySource::Failure, now).ok()?;
    next.schedule(ScheduleEvent::Claimed).then_some((next, event))
}

/// Backoff after a refused launch, in seconds: first delay, growth factor, maximum and jitter.
const BACKOFF_FIRST: f64 = 60.0;
const BACKOFF_FACTOR: f64 = 1.6;
const BACKOFF_MAX: f64 = 300.0;
const BACKOFF_JITTER: f64 = 0.4;

/// Returns the delay after `tries` refused launches in a row. `dice` is any number from 0 to 1.
pub fn backoff(tries: u32, jitter: f64) -> Span {
    let power = i32::try_from(tries.saturating_sub(1)).unwrap_or(i32::MAX);
    let base = f64::min(BACKOFF_FIRST * BACKOFF_FACTOR.powi(power), BACKOFF_MAX);
    with_jitter(base, BACKOFF_JITTER, jitter)
}

/// Returns `base` seconds, plus or minus a random share of it.
pub(super) fn with_jitter(base: f64, share: f64, jitter: f64) -> Span {
    let factor = 1.0 - share + 2.0 * share * jitter.clamp(0.0, 1.0);
    Span((base * factor * 1e6) as i64)
}

/// Returns the displayed state of a job whose tasks are in these states. The flag of a lane: it was never claimed, and
/// it is its turn. `claimed`: a task of the job was launched, so the job holds an alive slot until it is done.
pub fn job_schedule(lanes: &[(ScheduleState, bool)], claimed: bool) -> ScheduleState {
    let any = |state: ScheduleState| lanes.iter().any(|(lane, _)| *lane == state);
    if lanes.iter().all(|(lane, _)| *lane == ScheduleState::Done) {
        return ScheduleState::Done;
    }
    if any(ScheduleState::Inactive) {
        return ScheduleState::Inactive;
    }
    if !claimed && !lanes.iter().any(|(lane, _)| lane.holds_alive_slot()) {
        return ScheduleState::Waiting;
    }
    let requirements =
        lanes.iter().any(|(lane, requirements)| *lane == ScheduleState::Waiting && *requirements);
    if any(ScheduleState::Launching) {
        ScheduleState::Launching
    } else if any(ScheduleState::AliveWaiting) || requirements {
        ScheduleState::AliveWaiting
    } else if any(ScheduleState::AliveBackoff) {
        ScheduleState::AliveBackoff
    } else {
        ScheduleState::Alive
    }
}
