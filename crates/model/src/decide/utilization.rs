//! `utilization_policy`: detection of a GPU that was idle for the whole window.

use crate::time::{Span, Timestamp};

/// Maximum time from the start of the window to its first sample: without early samples nothing is proven.
pub const WINDOW_SLACK: Span = Span::mins(1);

/// One measurement of a job's GPUs, in percent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sample {
    pub at: Timestamp,
    pub gpu_percent: Vec<u32>,
}

/// Returns whether a GPU was below `percent_min` in every sample of the window, and the samples reach back to its
/// start.
pub fn is_gpu_idle(samples: &[Sample], percent_min: u32, window: Span, now: Timestamp) -> bool {
    let start = now - window;
    let inside: Vec<&Sample> =
        samples.iter().filter(|sample| sample.at >= start && sample.at <= now).collect();
    let Some(first) = inside.iter().map(|sample| sample.at).min() else { return false };
    if first > start + WINDOW_SLACK {
        return false;
    }
    let gpus = inside.iter().map(|sample| sample.gpu_percent.len()).min().unwrap_or(0);
    (0..gpus).any(|gpu| inside.iter().all(|sample| sample.gpu_percent[gpu] < percent_min))
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: Timestamp = Timestamp::from_secs(1_000_000);

    /// Returns one sample per minute over the last `minutes`, oldest first.
    fn samples(minutes: i64, percent: impl Fn(i64) -> Vec<u32>) -> Vec<Sample> {
        let sample = |ago| Sample { at: NOW - Span::mins(ago), gpu_percent: percent(ago) };
        (0..=minutes).rev().map(sample).collect()
    }

    fn is_idle(samples: &[Sample]) -> bool {
        is_gpu_idle(samples, 20, Span::mins(10), NOW)
    }

    #[test]
    fn one_idle_gpu_of_two_makes_the_job_idle() {
        assert!(is_idle(&samples(10, |_| vec![95, 19])));
        assert!(!is_idle(&samples(10, |_| vec![95, 20])));
    }

    #[test]
    fn a_busy_sample_prevents_idleness_only_inside_the_window() {
        assert!(!is_idle(&samples(10, |ago| vec![if ago == 7 { 50 } else { 0 }])));
        assert!(is_idle(&samples(12, |ago| vec![if ago == 11 { 50 } else { 0 }])));
    }

    #[test]
    fn samples_must_reach_back_to_the_start_of_the_window() {
        assert!(is_idle(&samples(9, |_| vec![0])));
        assert!(!is_idle(&samples(8, |_| vec![0])));
        assert!(!is_idle(&[]));
        assert!(!is_idle(&samples(10, |_| vec![])));
    }
}
