//! End-to-end tests: the real server and the real agent, on this machine, in containers, and on SSH hosts.
//!
//! A test ends everything it started, also on failure: servers, agents, jobs, hosts, directories.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on should stop")]

mod arvados;
mod canary;
mod code;
mod confined;
mod containers;
mod dstack;
mod endings;
mod hosts;
mod jobs;
mod local;
mod own;
mod reach;
mod regions;
mod replicas;
mod services;
mod ways_out;

use windlass_testenv::stage;
