//! Rows that are played elsewhere.

use crate::faults::{Play, Row};

pub(super) const ROWS: &[Row] = &[Row {
    id: "F27",
    injection: "stub cloud: errors, quota, rate limit, no capacity, stale tags, machines that die or never boot",
    expected: "200 jobs each exactly once, 0 instances left",
    bound: "no 5 s without progress",
    proves: "R2 R7 G7 C11",
    play: Play::Later("played in simulation: `cargo xtask sim --queue`"),
}];
