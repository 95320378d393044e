//! Backends against real agents.

mod conformance;
mod local;
mod mock;
mod support;
