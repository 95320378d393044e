//! Usage of projects: what their jobs held, with a half-life.
//!
//! Usage is counted in units and seconds. A unit is one GPU, or 8 CPUs, or 64 GiB of memory, whichever is most. Instead
//! of making old usage smaller, new usage is written larger: the sum of all entries, divided by the growth at the time
//! of reading, is the decayed usage. So entries are only added, each once, and nothing has to be updated later.

use crate::time::{Span, Timestamp};

/// Time after which usage counts half.
pub const HALF_LIFE: Span = Span::mins(7 * 24 * 60);
/// 2026-01-01, in microseconds. Growth since then fits a double for 19 years.
const EPOCH: i64 = 1_767_225_600_000_000;
const CPUS_PER_UNIT: u64 = 8;
const MEMORY_MIB_PER_UNIT: u64 = 64 * 1024;
/// Units are counted in thousandths.
const MILLI: u64 = 1_000;
const DAY_US: i64 = 86_400_000_000;

/// Thousandths of units that are held with these resources.
pub fn milli_units(gpus: u64, cpus: u64, memory_mib: u64) -> u64 {
    let cpus = cpus.saturating_mul(MILLI) / CPUS_PER_UNIT;
    let memory = memory_mib.saturating_mul(MILLI) / MEMORY_MIB_PER_UNIT;
    gpus.saturating_mul(MILLI).max(cpus).max(memory)
}

fn growth(at: Timestamp) -> f64 {
    ((at.0 - EPOCH) as f64 / HALF_LIFE.0 as f64).exp2()
}

/// Seconds of constant use that are worth one when they end, in the long run.
fn mean_life_secs() -> f64 {
    HALF_LIFE.0 as f64 / 1e6 / std::f64::consts::LN_2
}

/// Growth-weighted seconds from the beginning of time to `at`, per unit.
pub fn weighted_secs_at(at: Timestamp) -> f64 {
    mean_life_secs() * growth(at)
}

/// Growth-weighted seconds of a period, per unit.
pub fn weighted_secs(from: Timestamp, to: Timestamp) -> f64 {
    let share = std::f64::consts::LN_2 * to.since(from).0.max(0) as f64 / HALF_LIFE.0 as f64;
    weighted_secs_at(from) * share.exp_m1()
}

/// Seconds that growth-weighted seconds are worth at `now`.
pub fn decayed_secs(weighted: f64, now: Timestamp) -> f64 {
    weighted / growth(now)
}

/// Divides a period at midnight UTC. Each part has the number of its day since 1970.
pub fn split_by_day(from: Timestamp, to: Timestamp) -> Vec<(i64, Timestamp, Timestamp)> {
    let mut parts = Vec::new();
    let mut from = from.0;
    while from < to.0 {
        let day = from.div_euclid(DAY_US);
        let end = ((day + 1) * DAY_US).min(to.0);
        parts.push((day, Timestamp(from), Timestamp(end)));
        from = end;
    }
    parts
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: Timestamp = Timestamp(EPOCH + 400 * DAY_US);

    #[test]
    fn a_unit_is_a_gpu_or_as_many_cpus_or_as_much_memory() {
        assert_eq!(milli_units(2, 1, 1), 2_000);
        assert_eq!(milli_units(0, 4, 1), 500);
        assert_eq!(milli_units(0, 1, 128 * 1024), 2_000);
        assert_eq!(milli_units(1, 16, 0), 2_000);
    }

    #[test]
    fn usage_counts_half_after_the_half_life_and_recent_usage_counts_whole() {
        let hour = Span::mins(60);
        let recent = decayed_secs(weighted_secs(NOW - hour, NOW), NOW);
        assert!((recent - 3_600.0).abs() < 10.0, "{recent}");
        let later = decayed_secs(weighted_secs(NOW - hour, NOW), NOW + HALF_LIFE);
        assert!((later * 2.0 - recent).abs() < 1e-6, "{later}");
        assert_eq!(weighted_secs(NOW, NOW - hour), 0.0);
    }

    #[test]
    fn a_period_is_worth_as_much_as_its_parts() {
        let (from, to) = (NOW - Span::mins(5_000), NOW);
        let parts = split_by_day(from, to);
        assert!(parts.len() >= 4);
        assert_eq!((parts[0].1, parts.last().unwrap().2), (from, to));
        assert!(parts.windows(2).all(|pair| pair[0].2 == pair[1].1 && pair[0].0 + 1 == pair[1].0));
        let sum: f64 = parts.iter().map(|(_, from, to)| weighted_secs(*from, *to)).sum();
        let whole = weighted_secs(from, to);
        assert!((sum / whole - 1.0).abs() < 1e-9);
        let difference = weighted_secs_at(to) - weighted_secs_at(from);
        assert!((difference / whole - 1.0).abs() < 1e-9);
    }
}
