//! Brain of the dispatchers: what to do with the containers one holds, and which to take next.
//!
//! A dispatcher compares two pictures, the queue's and that of whatever runs the containers (Slurm, or
//! this machine). Both can be old or have holes, and the rules here say what may be concluded from them:
//! a hole is never taken for an end, and an end only counts if the queue was asked after it.

pub mod choose;
pub mod room;
pub mod settle;

use std::{fmt, str::FromStr};

use crate::{
    container::Status,
    gpu,
    plan::offers::Gpu,
    time::{Span, Timestamp},
};

/// One try to run one container. Jobs below are named after it, so that a repeat can be found.
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
#[error("read an attempt: want UUID.NUMBER")]
pub struct ParseAttemptError;

impl FromStr for Attempt {
    type Err = ParseAttemptError;

    fn from_str(text: &str) -> Result<Self, ParseAttemptError> {
        let (uuid, number) = text.rsplit_once('.').ok_or(ParseAttemptError)?;
        let number = number.parse().map_err(|_| ParseAttemptError)?;
        if uuid.is_empty() { Err(ParseAttemptError) } else { Ok(Self { uuid: uuid.to_owned(), number }) }
    }
}

/// What a container asks of each of its GPUs. Empty: any will do.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct GpuRequirement {
    /// By any name that people give it, with the memory or not: `A100`, `a100-80gb`.
    pub model: Option<String>,
    /// In bytes.
    pub min_memory: u64,
    pub min_compute_capability: Option<(u32, u32)>,
}

impl GpuRequirement {
    pub fn is_any(&self) -> bool {
        *self == Self::default()
    }

    /// Whether a GPU of this type is meant. What the type does not tell was not met.
    pub fn matches(&self, gpu_type: &str) -> bool {
        let gpu = Gpu::known(None, gpu_type, 0, None);
        self.model.as_ref().is_none_or(|model| gpu::matches_request(model, &gpu.name, gpu.memory_mib))
            && (self.min_memory == 0 || gpu.memory_mib << 20 >= self.min_memory)
            && self
                .min_compute_capability
                .is_none_or(|wanted| gpu.compute_capability.is_some_and(|has| has >= wanted))
    }
}

/// ` A100 with 81920 MiB of compute capability 8.0`, of which it says what was asked for.
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

/// What a container asks of the machine that runs it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ContainerNeeds {
    pub cpus: u32,
    pub memory: u64,
    pub gpus: u32,
    /// What each of the GPUs must be.
    pub gpu: GpuRequirement,
    /// Empty: wherever.
    pub partitions: Vec<String>,
    /// What a node must be, in words of its administrator.
    pub features: Vec<String>,
    pub max_run_time: Option<Span>,
    pub preemptible: bool,
}

/// A container as the queue showed it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ContainerView {
    pub uuid: String,
    pub status: Status,
    /// 0: it is not wanted now.
    pub priority: u64,
    /// Of the lock it is under, or the last one it was.
    pub attempt: u64,
    pub created_at: Timestamp,
    /// This dispatcher holds its lock.
    pub is_mine: bool,
    pub needs: ContainerNeeds,
}

impl ContainerView {
    pub fn attempt(&self) -> Attempt {
        Attempt { uuid: self.uuid.clone(), number: self.attempt }
    }

    /// Whether this dispatcher answers for it now.
    pub fn is_held(&self) -> bool {
        match self.status {
            Status::Locked | Status::Running => self.is_mine,
            Status::Queued | Status::Complete | Status::Cancelled => false,
        }
    }

    /// Whether this attempt is the one that may run now.
    pub fn is_current(&self, attempt: &Attempt) -> bool {
        self.is_held() && self.attempt() == *attempt
    }
}

/// The queue: what this dispatcher holds, what it still has jobs of, and what it might take.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct QueueSnapshot {
    pub containers: Vec<ContainerView>,
    /// When the first of its requests was sent, by the dispatcher's clock: whatever happened later need not
    /// be in it.
    pub asked_at: Timestamp,
}

impl QueueSnapshot {
    pub fn find(&self, uuid: &str) -> Option<&ContainerView> {
        self.containers.iter().find(|container| container.uuid == uuid)
    }
}

/// A job of the scheduler below that carries our tag.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SchedulerJob {
    pub attempt: Attempt,
    /// How the scheduler calls it.
    pub id: String,
    pub life: SchedulerJobState,
    /// The priority it was last given, where that can be read back.
    pub priority: Option<u64>,
    /// What the scheduler says of it: why it waits, or how it ended.
    pub said: Option<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SchedulerJobState {
    Waiting,
    Running,
    /// Over. When that was seen, by the dispatcher's clock.
    Ended(Timestamp),
    /// Its node does not answer: it may run or not.
    Unknown,
}

impl SchedulerJobState {
    pub const fn is_over(self) -> bool {
        match self {
            Self::Ended(_) => true,
            Self::Waiting | Self::Running | Self::Unknown => false,
        }
    }
}

/// The scheduler's jobs with our tag.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct SchedulerSnapshot {
    pub jobs: Vec<SchedulerJob>,
    /// When the scheduler was asked.
    pub asked_at: Timestamp,
    /// All nodes have reported, so that a job that is not here is nowhere.
    pub is_whole: bool,
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
    fn an_attempt_reads_back_from_its_name() {
        let attempt = Attempt { uuid: "wlass-dz642-0a1b2c3d4e5f6g7".into(), number: 12 };
        assert_eq!(attempt.to_string().parse(), Ok(attempt));
        for wrong in ["", "wlass", ".3", "wlass.x", "wlass.-1"] {
            assert_eq!(wrong.parse::<Attempt>(), Err(ParseAttemptError), "{wrong}");
        }
    }
}
