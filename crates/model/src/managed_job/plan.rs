//! What a managed job is to do: its tasks, their order and what each needs. Plain data, stored with the job.
//!
//! Whatever dialect a file is written in, it becomes one of these. Order is one thing only: a task begins
//! when every task it comes [`after`](Task::after) has succeeded. A pipeline is a chain of that, a group is none.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::{
    config::{
        self,
        mounts::{FileMapping, Mount},
    },
    machine::words,
};

/// Lowest and highest priority of a job.
pub const PRIORITY: std::ops::RangeInclusive<i64> = -1000..=1000;
/// Most tasks of one job.
pub const TASKS_MAX: usize = 1_000;
/// Most jobs that one call may make of a file.
pub const COPIES_MAX: u32 = 10_000;

/// Longest name of a run.
const RUN_NAME_MAX: usize = 41;

/// A managed job as it was asked for.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ManagedJobPlan {
    pub name: Option<String>,
    pub shape: Shape,
    pub priority: i32,
    pub tasks: Vec<TaskPlan>,
}

/// How the tasks of a job belong together.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Shape {
    /// One task.
    Single,
    /// One after the other.
    Pipeline,
    /// Each after those it names.
    Dag,
    /// All at once.
    Group(JobGroup),
}

/// What a group adds to its tasks. Indices are those of the tasks.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct JobGroup {
    pub name: String,
    /// The tasks whose end is the end of the group; never empty.
    pub primary: Vec<u32>,
    /// Seconds that each task may go on after the last primary ended well; one for each task.
    pub termination_delay: Vec<i64>,
    /// Whether tasks must reach each other by name: `None` tries, and warns when it cannot be done.
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
    /// What each node may be; never empty.
    pub candidates: Vec<Candidate>,
    /// The cheapest candidate is tried first; else the first of the list.
    #[serde(default)]
    pub cheapest_first: bool,
    pub recovery: RecoveryPolicy,
    /// The tasks that must have succeeded before this one begins.
    #[serde(default)]
    pub after: Vec<u32>,
    #[serde(default)]
    pub deadline: Option<Deadline>,
    /// Seconds one attempt may run.
    #[serde(default)]
    pub max_duration: Option<i64>,
}

/// What a task does.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TaskBody {
    Script(Script),
    /// A task as `windlass apply` takes it.
    Configuration(Box<config::task::Task>),
}

impl TaskBody {
    /// Nothing to run: the task succeeds without any node, even if it has a setup.
    pub fn is_empty(&self) -> bool {
        match self {
            Self::Script(script) => script.run.as_ref().is_none_or(|run| run.trim().is_empty()),
            Self::Configuration(_) => false,
        }
    }

    /// The names of its secrets.
    pub fn secrets(&self) -> &[String] {
        match self {
            Self::Script(script) => &script.secrets,
            Self::Configuration(_) => &[],
        }
    }

    /// What it brings from the machine of whoever launches it: a local path, and where its content goes.
    pub fn local_files(&self) -> Vec<(String, String)> {
        let of = |files: &[FileMapping]| -> Vec<(String, String)> {
            files.iter().map(|file| (file.local_path.clone(), file.path.clone())).collect()
        };
        match self {
            Self::Script(script) => {
                // What is put at a path replaces what is there: the directory comes before the files in it.
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

/// Where the working directory of a script is, below that of its run.
pub const WORKDIR: &str = "sky_workdir";

/// A setup and a program, both for bash.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Script {
    pub setup: Option<String>,
    pub run: Option<String>,
    pub envs: BTreeMap<String, String>,
    /// Names only: the values travel and are kept apart.
    pub secrets: Vec<String>,
    pub workdir: Option<Workdir>,
    pub files: Vec<FileMapping>,
    pub volumes: Vec<Mount>,
}

/// Where the working directory of a task comes from.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Workdir {
    Local(String),
    Git { url: String, reference: Option<String> },
}

/// An amount that is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct RequestedAmount {
    pub of: f64,
    /// `4+`: more will do.
    pub or_more: bool,
}

/// One kind of node that would do.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Candidate {
    pub cpus: Option<RequestedAmount>,
    /// Gibibytes.
    pub memory: Option<RequestedAmount>,
    pub accelerator: Option<Accelerator>,
    /// Nodes that may be taken away again; `None`: not said.
    pub spot: Option<bool>,
    /// A container image, without its `docker:`.
    pub image: Option<String>,
    /// `cloud/region/zone`, mapped to a fleet of the project or to a backend of the server.
    pub infra: Option<String>,
    pub ports: Vec<u16>,
    pub labels: BTreeMap<String, String>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Accelerator {
    pub name: String,
    pub count: f64,
}

words! {
    /// What to do when nodes are lost.
    pub enum RecoveryStrategy: "recovery strategy" {
        /// release at once and look elsewhere first
        EagerNextRegion = "EAGER_NEXT_REGION",
        /// try the same place a few times, then everywhere
        Failover = "FAILOVER",
        /// never again: for jobs with side effects
        None = "NONE",
    }
}

/// When a task is tried again.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RecoveryPolicy {
    pub strategy: RecoveryStrategy,
    /// Restarts after errors of the user's own program.
    pub max_restarts_on_errors: u32,
    /// Exit codes that are always restarted, and not counted.
    pub recover_on_exit_codes: Vec<u8>,
    /// Launches that may be refused in a row before the task gives up; no bound unless given.
    #[serde(default)]
    pub max_launch_tries: Option<u32>,
    /// Seconds of waiting for capacity after which the task gives up; no bound unless given.
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

/// A time by which a task must be done, and what is known about its work. Times are seconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Deadline {
    /// Counted from the first launch slot.
    pub within: i64,
    /// How long the task runs when nothing disturbs it.
    pub work: i64,
    /// What taking new nodes costs before the program makes progress again.
    pub changeover: i64,
}

impl ManagedJobPlan {
    /// The name of a task: its own, or `{job}-{task}` where it has none and is not alone.
    pub fn task_name(&self, task: u32) -> String {
        let job = self.name.clone().unwrap_or_else(|| "job".to_owned());
        let own = usize::try_from(task).ok().and_then(|index| self.tasks.get(index)?.name.clone());
        match own {
            Some(name) => name,
            None if self.tasks.len() <= 1 => job,
            None => format!("{job}-{task}"),
        }
    }

    /// The name of the run of an attempt. The same attempt has the same name, so to make it again is to find it.
    pub fn run_name(&self, job_id: &str, task: u32, attempt: u32) -> String {
        // Half a UUID: jobs of one name are many, and one must never find the run of another.
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

    /// What the other tasks of its group call a node of a task.
    pub fn host_name(&self, task: u32, node: i64) -> Option<String> {
        match &self.shape {
            Shape::Group(group) => Some(format!("{}-{node}.{}", self.task_name(task), group.name)),
            Shape::Single | Shape::Pipeline | Shape::Dag => None,
        }
    }

    /// The task whose attempt a run of this name is.
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
