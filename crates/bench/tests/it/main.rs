//! Tests of the benchmarks.

mod performance;
