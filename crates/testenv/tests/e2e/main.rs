//! End-to-end tests: the real server and the real agent, on this machine, in containers, and on SSH hosts.
//!
//! A test ends everything it started, also on failure: servers, agents, jobs, hosts, directories.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on should stop")]

mod arvados;
mod attach;
mod canary;
mod code;
mod containers;
mod demonstrations;
mod disk_limits;
mod dstack;
mod endings;
mod engine_free;
mod escape_attempts;
mod hosts;
mod jobs;
mod kubernetes;
mod local;
mod lxd;
mod process_isolation;
mod regions;
mod replicas;
mod runtimes;
mod self_hosted;
mod services;
mod sharing;
mod terminals;

use windlass_testenv::test_env;
