//! Backends against real agents.

mod local;
mod support;
