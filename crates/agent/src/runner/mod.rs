//! The runner: the first process of a task. It takes one job through its steps.

pub mod api;
pub mod child;
pub mod cli;
pub mod cluster;
pub mod ending;
pub mod env;
mod excerpt;
pub mod exec;
pub mod files;
pub mod init;
pub mod job;
pub mod metrics;
mod phase;
mod ports;
pub mod pump;
pub mod repo;
pub mod serve;
pub mod session;
pub mod site;
pub mod ssh;
pub mod states;
pub mod steps;
pub mod supervise;
pub mod tree;
pub mod unpack;
pub mod uploads;
pub mod user;
