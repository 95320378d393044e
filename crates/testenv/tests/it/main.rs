//! Hosts in network namespaces, and the SSH backend.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on should stop")]

mod lab;
mod remote;
