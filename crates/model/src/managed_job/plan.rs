//! Plan of a managed job: its tasks, their order and their needs. Plain data, stored with the job.
//!
//! Every file format is converted to it. Order has a single form: a task starts when every task it comes
//! [`after`](Task::after) has succeeded. A pipeline is a chain, a group has no order.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::{
    config::{
        self,
        mounts::{FileMapping, Mount},
    },
    resources::CpuArch,
    state_machine::words,
};

/// Lowest and highest priority of a job.
pub const PRIORITY: std::ops::RangeInclusive<i64> = -1000..=1000;

/// Maps the priority of a job to that of its runs, so that the queue for nodes keeps the order of the queue for slots.
pub fn run_priority(of_job: i64) -> i64 {
    let (low, high) = (*PRIORITY.start(), *PRIORITY.end());
    (of_job.clamp(low, high) - low) * 100 / (high - low)
}
/// Maximum number of tasks of one job.
pub const TASKS_MAX: usize = 1_000;
/// Maximum number of jobs that one call may create from a file.
pub const COPIES_MAX: u32 = 10_000;

/// Maximum length of the name of a run.
const RUN_NAME_MAX: usize = 41;

/// A managed job as it was requested.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ManagedJobPlan {
    pub name: Option<String>,
    pub shape: Shape,
    pub priority: i32,
    pub tasks: Vec<TaskPlan>,
    /// Architectures of the images that have no build for all of them, as their registries reported at the launch.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub image_architectures: BTreeMap<String, Vec<CpuArch>>,
}

/// Relation between the tasks of a job.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Shape {
    /// One task.
    Single,
    /// One after the other.
    Pipeline,
    /// Each after the tasks that it names.
    Dag,
    /// All at once.
    Group(JobGroup),
}

/// Settings of a group in addition to its tasks. Indices are those of the tasks.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct JobGroup {
    pub name: String,
    /// Tasks whose end is the end of the group; never empty.
    pub primary: Vec<u32>,
    /// Seconds that each task may continue after the last primary succeeded; one for each task.
    pub termination_delay: Vec<i64>,
    /// True if tasks must reach each other by name; `None` tries, and warns if it is not possible.
    pub inter_connection: Option<bool>,
}

impl JobGroup {
    pub fn is_primary(&self, task: u32) -> bool {
        self.primary.contains(&task)
    }
}

/// One task.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TaskPlan {
    pub name: Option<String>,
    pub body: TaskBody,
    pub nodes: u32,
    /// Alternatives for each node; never empty.
    pub candidates: Vec<Candidate>,
    /// True if the cheapest candidate is tried first; otherwise the first of the list.
    #[serde(default)]
    pub cheapest_first: bool,
    pub recovery: RecoveryPolicy,
    /// Tasks that must have succeeded before this one starts.
    #[serde(default)]
    pub after: Vec<u32>,
    #[serde(default)]
    pub deadline: Option<Deadline>,
    /// Seconds that one attempt may run.
    #[serde(default)]
    pub max_duration: Option<i64>,
}

/// Program of a task.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TaskBody {
    Script(Script),
    /// A task in the format of `windlass apply`.
    Configuration(Box<config::task::Task>),
}

impl TaskBody {
    /// Returns whether there is nothing to run: the task succeeds without any node, even if it has a setup.
    pub fn is_empty(&self) -> bool {
        match self {
            Self::Script(script) => script.run.as_ref().is_none_or(|run| run.trim().is_empty()),
            Self::Configuration(_) => false,
        }
    }

    /// Returns the names of its secrets.
    pub fn secrets(&self) -> &[String] {
        match self {
            Self::Script(script) => &script.secrets,
            Self::Configuration(_) => &[],
        }
    }

    /// Returns the files to upload from the client's machine: a local path, and the target of its content.
    pub fn local_files(&self) -> Vec<(String, String)> {
        let of = |files: &[FileMapping]| -> Vec<(String, String)> {
            files.iter().map(|file| (file.local_path.clone(), file.path.clone())).collect()
        };
        match self {
            Self::Script(script) => {
                // A file replaces what exists at its path: the directory comes before the files in it.
                let mut all = Vec::new();
                if let Some(Workdir::Local(path)) = &script.workdir {
                    all.push((path.clone(), WORKDIR.to_owned()));
                }
                all.extend(of(&script.files));
                all
            }
            Self::Configuration(task) => of(&task.run.files),
        }
    }
}

/// Working directory of a script, below that of its run.
pub const WORKDIR: &str = "sky_workdir";

/// A setup and a program, both for bash.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Script {
    pub setup: Option<String>,
    pub run: Option<String>,
    pub envs: BTreeMap<String, String>,
    /// Names only: the values are sent and stored separately.
    pub secrets: Vec<String>,
    pub workdir: Option<Workdir>,
    pub files: Vec<FileMapping>,
    pub volumes: Vec<Mount>,
    /// Size of shared memory in gibibytes; `None`: the default of the container engine.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub shm_size: Option<f64>,
}

/// Source of the working directory of a task.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Workdir {
    Local(String),
    Git { url: String, reference: Option<String> },
}

/// A requested quantity.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct RequestedAmount {
    pub of: f64,
    /// `4+`: more is also accepted.
    pub or_more: bool,
}

/// One alternative for a node.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Candidate {
    pub cpus: Option<RequestedAmount>,
    /// In gibibytes.
    pub memory: Option<RequestedAmount>,
    pub accelerator: Option<Accelerator>,
    /// Spot nodes, which may be reclaimed; `None`: not specified.
    pub spot: Option<bool>,
    /// A container image, without the prefix `docker:`.
    pub image: Option<String>,
    /// `cloud/region/zone`, mapped to a fleet of the project or to a backend of the server.
    pub infra: Option<String>,
    /// Highest price of a node, per hour.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_price: Option<f64>,
    /// Minimum size of the disk, in gibibytes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub disk: Option<f64>,
    /// Name of the type that a provider gives its instances.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub instance_type: Option<String>,
    pub ports: Vec<u16>,
    pub labels: BTreeMap<String, String>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Accelerator {
    pub name: String,
    pub count: f64,
}

words! {
    /// Strategy for lost nodes.
    pub enum RecoveryStrategy: "recovery strategy" {
        /// release at once and try other locations first
        EagerNextRegion = "EAGER_NEXT_REGION",
        /// try the same location a few times, then everywhere
        Failover = "FAILOVER",
        /// never retry: for jobs with side effects
        None = "NONE",
    }
}

/// Conditions under which a task is retried.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RecoveryPolicy {
    pub strategy: RecoveryStrategy,
    /// Restarts after errors of the user's program.
    pub max_restarts_on_errors: u32,
    /// Exit codes that are always restarted, and not counted.
    pub recover_on_exit_codes: Vec<u8>,
    /// Launches that may be refused in a row before the task gives up. Default: no limit.
    #[serde(default)]
    pub max_launch_tries: Option<u32>,
    /// Seconds of waiting for capacity after which the task gives up. Default: no limit.
    #[serde(default)]
    pub max_launch_wait: Option<i64>,
}

impl Default for RecoveryPolicy {
    fn default() -> Self {
        Self {
            strategy: RecoveryStrategy::EagerNextRegion,
            max_restarts_on_errors: 0,
            recover_on_exit_codes: vec![],
            max_launch_tries: None,
            max_launch_wait: None,
        }
    }
}

/// Time by which a task must be done, and what is known about its work. Times are in seconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Deadline {
    /// Counted from the first launch slot.
    pub within: i64,
    /// Duration of the task without interruptions.
    pub work: i64,
    /// Time from acquiring new nodes until the program makes progress again.
    pub changeover: i64,
}

impl ManagedJobPlan {
    /// Returns the name of a task: its own, or `{job}-{task}` if it has none and is not the only one.
    pub fn task_name(&self, task: u32) -> String {
        let job = self.name.clone().unwrap_or_else(|| "job".to_owned());
        let own = usize::try_from(task).ok().and_then(|index| self.tasks.get(index)?.name.clone());
        match own {
            Some(name) => name,
            None if self.tasks.len() <= 1 => job,
            None => format!("{job}-{task}"),
        }
    }

    /// Returns the name of the run of an attempt. The same attempt has the same name, so submitting it again finds it.
    pub fn run_name(&self, job_id: &str, task: u32, attempt: u32) -> String {
        // Half a UUID: many jobs share a name, and one must never find the run of another.
        let id: String = job_id.chars().filter(char::is_ascii_alphanumeric).take(16).collect();
        let end = format!("-{}-{task}-{attempt}", id.to_ascii_lowercase());
        let lower = self.name.as_deref().unwrap_or_default().to_ascii_lowercase();
        let words: Vec<&str> =
            lower.split(|c: char| !c.is_ascii_alphanumeric()).filter(|word| !word.is_empty()).collect();
        let room = RUN_NAME_MAX.saturating_sub(2 + end.len());
        let name: String = words.join("-").chars().take(room).collect();
        let name = name.trim_matches('-');
        if name.is_empty() { format!("j{end}") } else { format!("j-{name}{end}") }
    }

    /// Returns the host name of a node of a task for the other tasks of its group.
    pub fn host_name(&self, task: u32, node: i64) -> Option<String> {
        match &self.shape {
            Shape::Group(group) => Some(format!("{}-{node}.{}", self.task_name(task), group.name)),
            Shape::Single | Shape::Pipeline | Shape::Dag => None,
        }
    }

    /// Returns the task that a run with this name is an attempt of.
    pub fn task_index_of_run(&self, run: &str) -> Option<usize> {
        run.rsplit('-').nth(1)?.parse().ok()
    }

    pub fn is_primary(&self, task: u32) -> bool {
        match &self.shape {
            Shape::Group(group) => group.is_primary(task),
            Shape::Single | Shape::Pipeline | Shape::Dag => true,
        }
    }
}
