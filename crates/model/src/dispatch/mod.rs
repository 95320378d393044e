//! Decisions of dispatchers: handling of held containers, and selection of the next ones.
//!
//! A dispatcher compares two snapshots, that of the queue and that of the scheduler below (Slurm, or this machine).
//! Both can be old or incomplete, and the rules here define what may be concluded from them: a missing entry is never
//! treated as an end, and an end only counts if the queue was read after it.

pub mod capacity;
pub mod reconcile;
pub mod select;
pub mod turns;

use std::{fmt, str::FromStr};

use crate::{
    container::Status,
    gpu,
    plan::offers::Gpu,
    time::{Span, Timestamp},
};

/// One attempt to run one container. Jobs of the scheduler are named after it, so that a repeated submission can be
/// found.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Attempt {
    pub uuid: String,
    pub number: u64,
}

impl fmt::Display for Attempt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.uuid, self.number)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("invalid attempt: expected UUID.NUMBER")]
pub struct ParseAttemptError;

impl FromStr for Attempt {
    type Err = ParseAttemptError;

    fn from_str(text: &str) -> Result<Self, ParseAttemptError> {
        let (uuid, number) = text.rsplit_once('.').ok_or(ParseAttemptError)?;
        let number = number.parse().map_err(|_| ParseAttemptError)?;
        if uuid.is_empty() { Err(ParseAttemptError) } else { Ok(Self { uuid: uuid.to_owned(), number }) }
    }
}

/// Requirements on each GPU of a container. Empty: any GPU.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct GpuRequirement {
    /// Any usual name, with or without the memory: `A100`, `a100-80gb`.
    pub model: Option<String>,
    /// In bytes.
    pub min_memory: u64,
    pub min_compute_capability: Option<(u32, u32)>,
}

impl GpuRequirement {
    pub fn is_any(&self) -> bool {
        *self == Self::default()
    }

    /// Returns whether a GPU of this type matches. A property that the type does not state counts as not met.
    pub fn matches(&self, gpu_type: &str) -> bool {
        let gpu = Gpu::from_name(None, gpu_type, 0, None);
        self.model.as_ref().is_none_or(|model| gpu::matches_request(model, &gpu.name, gpu.memory_mib))
            && (self.min_memory == 0 || gpu.memory_mib << 20 >= self.min_memory)
            && self
                .min_compute_capability
                .is_none_or(|wanted| gpu.compute_capability.is_some_and(|has| has >= wanted))
    }
}

/// Prints ` A100 with 81920 MiB of compute capability 8.0`, limited to what was requested.
impl fmt::Display for GpuRequirement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(model) = &self.model {
            write!(f, " {model}")?;
        }
        if self.min_memory > 0 {
            write!(f, " with {} MiB", self.min_memory.div_ceil(1 << 20))?;
        }
        if let Some((major, minor)) = self.min_compute_capability {
            write!(f, " of compute capability {major}.{minor}")?;
        }
        Ok(())
    }
}

/// Requirements of a container on its node.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ContainerNeeds {
    pub cpus: u32,
    pub memory: u64,
    pub gpus: u32,
    /// Requirements on each of the GPUs.
    pub gpu_requirement: GpuRequirement,
    /// Empty: any partition.
    pub partitions: Vec<String>,
    /// Features that a node must have, as its administrator names them.
    pub features: Vec<String>,
    pub max_run_time: Option<Span>,
    /// Time that its program has to exit once it is stopped.
    pub stop_duration: Span,
    pub is_preemptible: bool,
}

/// A container in a snapshot of the queue.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ContainerView {
    pub uuid: String,
    pub status: Status,
    /// 0: not wanted now.
    pub priority: u64,
    /// Number of the current lock, or of the last one.
    pub attempt: u64,
    pub created_at: Timestamp,
    /// Uuid of the user who requested it.
    pub owner: String,
    /// This dispatcher holds its lock.
    pub is_locked_here: bool,
    pub needs: ContainerNeeds,
}

impl ContainerView {
    pub fn attempt(&self) -> Attempt {
        Attempt { uuid: self.uuid.clone(), number: self.attempt }
    }

    /// Returns whether this dispatcher is responsible for it now.
    pub fn is_held(&self) -> bool {
        match self.status {
            Status::Locked | Status::Running => self.is_locked_here,
            Status::Queued | Status::Complete | Status::Cancelled => false,
        }
    }

    /// Returns whether this attempt is the one that may run now.
    pub fn is_current(&self, attempt: &Attempt) -> bool {
        self.is_held() && self.attempt() == *attempt
    }
}

/// Snapshot of the queue: containers that this dispatcher holds, still has jobs of, or might lock.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct QueueSnapshot {
    pub containers: Vec<ContainerView>,
    /// Usage and ranks by which the queued containers are ordered.
    pub usage: turns::QueueUsage,
    /// Time at which the first request was sent, by the dispatcher's clock: later changes may be missing.
    pub requested_at: Timestamp,
}

impl QueueSnapshot {
    pub fn find(&self, uuid: &str) -> Option<&ContainerView> {
        self.containers.iter().find(|container| container.uuid == uuid)
    }
}

/// A job of the scheduler with our tag.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SchedulerJob {
    pub attempt: Attempt,
    /// ID of the job in the scheduler.
    pub id: String,
    pub state: SchedulerJobState,
    /// Last priority that was set, if it can be read back.
    pub priority: Option<u64>,
    /// Message of the scheduler: why it waits, or how it ended.
    pub message: Option<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SchedulerJobState {
    Waiting,
    Running,
    /// Ended, with the time of the observation by the dispatcher's clock.
    Ended(Timestamp),
    /// Its node does not respond: it may or may not be running.
    Unknown,
}

impl SchedulerJobState {
    pub const fn is_ended(self) -> bool {
        match self {
            Self::Ended(_) => true,
            Self::Waiting | Self::Running | Self::Unknown => false,
        }
    }
}

/// Snapshot of the scheduler's jobs with our tag.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct SchedulerSnapshot {
    pub jobs: Vec<SchedulerJob>,
    /// Time at which the scheduler was queried.
    pub requested_at: Timestamp,
    /// All nodes have reported, so a job that is missing here does not exist.
    pub is_complete: bool,
}

impl SchedulerSnapshot {
    pub fn find(&self, attempt: &Attempt) -> Option<&SchedulerJob> {
        self.jobs.iter().find(|job| job.attempt == *attempt)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_attempt_round_trips_through_its_name() {
        let attempt = Attempt { uuid: "wlass-dz642-0a1b2c3d4e5f6g7".into(), number: 12 };
        assert_eq!(attempt.to_string().parse(), Ok(attempt));
        for wrong in ["", "wlass", ".3", "wlass.x", "wlass.-1"] {
            assert_eq!(wrong.parse::<Attempt>(), Err(ParseAttemptError), "{wrong}");
        }
    }
}
