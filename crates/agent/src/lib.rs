//! What runs on machines: the shim on a host, the runner in each task.
//!
//! One static binary plays all parts. The shim keeps tasks: it prepares what a task needs, starts it through a
//! runtime and takes everything back at its end. The runner is the first process inside the task: it runs the
//! job's commands, keeps their output and lets people in. Both meet in the task's directory ([`taskdir`]).

pub mod cgroup;
pub mod clock;
pub mod confine;
pub mod digest;
pub mod exec;
pub mod host;
pub mod http;
pub mod isolation;
pub mod proc;
pub mod runner;
pub mod shim;
pub mod spool;
pub mod taskdir;
