//! Rows that nobody has written yet.

use crate::faults::{Play, Row};

const SERVICES: Play = Play::Later("not written yet; the tests of services show parts of it");
const DISPATCH: Play = Play::Later("not written yet; the tests of dispatchers show parts of it");

pub(super) const ROWS: &[Row] = &[
    Row {
        id: "F21",
        injection: "gateway kill -9; state file cut mid-write; server down 10 min",
        expected: "routes restored, serving goes on",
        bound: "≤ 2 s",
        proves: "S5",
        play: SERVICES,
    },
    Row {
        id: "F22",
        injection: "service replica dies under load",
        expected: "≤ 0.1 % errors",
        bound: "0 errors after 5 s",
        proves: "S3",
        play: SERVICES,
    },
    Row {
        id: "F23",
        injection: "rolling deploy under load; new version never ready",
        expected: "old stays, 0 errors, deploy marked failed",
        bound: "deploy timeout",
        proves: "S1 S2",
        play: SERVICES,
    },
    Row {
        id: "F24",
        injection: "autoscaler stats 500, stale, zero",
        expected: "hold replicas",
        bound: "–",
        proves: "S4",
        play: SERVICES,
    },
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
