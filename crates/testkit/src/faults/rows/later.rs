//! Rows that nobody has written yet.

use crate::faults::{Play, Row};

const DISPATCH: Play = Play::Later("not written yet; the tests of dispatchers show parts of it");

pub(super) const ROWS: &[Row] = &[
    Row {
        id: "F26",
        injection: "Slurm: reply of sbatch lost; squeue empty; scancel ignored; slurmctld restart; job purged",
        expected: "found by name, never submitted twice; cancel until gone",
        bound: "≤ 3 poll cycles",
        proves: "C4 C6 C12 R13",
        play: DISPATCH,
    },
    Row {
        id: "F27",
        injection: "stub cloud: errors, quota, rate limit, no capacity, stale tags, machines that die or never boot",
        expected: "200 jobs each exactly once, 0 instances left",
        bound: "no 5 s without progress",
        proves: "R2 R7 G7 C11",
        play: DISPATCH,
    },
];
