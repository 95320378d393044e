//! CPU utilisation, from the kernel's counters.

use std::time::{Duration, Instant};

/// Start of a measurement.
pub(crate) struct CoreMeter {
    started: Instant,
    before: Option<CpuTicks>,
}

/// A period, with the share of idle CPU time.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct CoreUsage {
    pub(crate) wall: Duration,
    /// Idle share of all cores, between 0 and 1. `None` if the kernel does not report it.
    pub(crate) idle: Option<f64>,
}

#[derive(Clone, Copy, Debug, PartialEq)]
struct CpuTicks {
    idle: u64,
    all: u64,
}

impl CoreMeter {
    pub(crate) fn start() -> Self {
        Self { started: Instant::now(), before: read_ticks() }
    }

    pub(crate) fn usage(&self) -> CoreUsage {
        let idle = self.before.zip(read_ticks()).and_then(|(before, after)| idle_share(before, after));
        CoreUsage { wall: self.started.elapsed(), idle }
    }
}

fn read_ticks() -> Option<CpuTicks> {
    parse(&std::fs::read_to_string("/proc/stat").ok()?)
}

/// Parses the first line: `cpu user nice system idle iowait irq softirq steal …`.
fn parse(stat: &str) -> Option<CpuTicks> {
    let numbers = stat.lines().next()?.strip_prefix("cpu ")?.split_whitespace().take(8);
    let numbers: Vec<u64> = numbers.map(str::parse).collect::<Result<_, _>>().ok()?;
    let idle = numbers.get(3)? + numbers.get(4)?;
    Some(CpuTicks { idle, all: numbers.iter().sum() })
}

fn idle_share(before: CpuTicks, after: CpuTicks) -> Option<f64> {
    let all = after.all.checked_sub(before.all).filter(|all| *all > 0)?;
    Some(after.idle.saturating_sub(before.idle) as f64 / all as f64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn idle_time_includes_time_waiting_for_disks() {
        let before = parse("cpu  100 0 50 800 50 0 0 0 0 0\ncpu0 1 2 3\n").unwrap();
        let after = parse("cpu  160 0 70 810 60 0 0 0 0 0\n").unwrap();
        assert_eq!(before, CpuTicks { idle: 850, all: 1000 });
        assert_eq!(idle_share(before, after), Some(0.2));
        assert_eq!(idle_share(after, after), None);
        assert_eq!(parse("intr 1 2\n"), None);
    }
}
