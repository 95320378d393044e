//! The agent: the shim on a host, the runner in each task, and the executor of queued containers.
//!
//! One static binary contains all of them. The shim manages tasks: it prepares what a task needs, starts it through a
//! runtime and releases every resource when the task ends. The runner is the first process inside the task: it runs the
//! job's commands, stores their output and serves SSH sessions. They exchange files in the task's directory
//! ([`taskdir`]).

pub mod cgroup;
pub mod clock;
pub mod digest;
pub mod exec;
pub mod host;
pub mod http;
pub mod image;
pub mod isolation;
pub mod pinned_file;
pub mod pod;
pub mod proc;
pub mod relay;
pub mod runner;
pub mod safe_open;
pub mod shim;
pub mod spool;
pub mod task_dir;
