//! The runner: the first process of a task. It takes one job through its steps.

pub mod api;
pub mod cli;
pub mod cluster;
pub mod exec;
pub mod files;
pub mod init;
pub mod job;
pub mod metrics;
pub mod repo;
pub mod ssh;
pub mod user;
