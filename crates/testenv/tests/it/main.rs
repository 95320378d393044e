//! Hosts in network namespaces, and those that are reached over SSH.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on should stop")]

mod lab;
mod remote;
