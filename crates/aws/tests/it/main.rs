//! Tests of the backend against moto, which `cargo xtask test` installs.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on says where")]

mod chain;
mod moto;
mod support;
