//! Metrics of a dispatcher.
//!
//! They are a file in the text format of Prometheus, for the textfile collector of a node exporter: a dispatcher on a
//! login node opens no port.

use std::{fmt::Write as _, io, path::PathBuf, time::Duration};

use crate::reconcile_loop::RoundSummary;

#[derive(Debug)]
pub struct Metrics {
    file: Option<PathBuf>,
    rounds: u64,
    failures: u64,
    taken: usize,
    last: RoundSummary,
    seconds: f64,
}

impl Metrics {
    pub fn new(file: Option<PathBuf>) -> Self {
        Self { file, rounds: 0, failures: 0, taken: 0, last: RoundSummary::default(), seconds: 0.0 }
    }

    /// Records a round: its summary, or `None` if it failed.
    pub fn add(&mut self, done: Option<RoundSummary>, lasted: Duration) {
        self.rounds += 1;
        self.seconds += lasted.as_secs_f64();
        match done {
            Some(done) => {
                self.taken += done.taken;
                self.last = done;
            }
            None => self.failures += 1,
        }
        if let Err(error) = self.write() {
            tracing::warn!(%error, "failed to write metrics");
        }
    }

    fn write(&self) -> io::Result<()> {
        let Some(file) = &self.file else { return Ok(()) };
        // Renamed at the end: a reader sees either the new file or the previous one.
        let aside = file.with_extension("new");
        std::fs::write(&aside, self.text())?;
        std::fs::rename(aside, file)
    }

    fn text(&self) -> String {
        let mut text = String::new();
        let mut say = |name: &str, kind: &str, help: &str, value: f64| {
            let name = format!("windlass_dispatch_{name}");
            let _ = writeln!(text, "# HELP {name} {help}\n# TYPE {name} {kind}\n{name} {value}");
        };
        say("held", "gauge", "Containers that this dispatcher holds.", self.last.held as f64);
        say("waiting", "gauge", "Containers that wait in the queue.", self.last.waiting as f64);
        say("taken_total", "counter", "Containers that were submitted to the scheduler.", self.taken as f64);
        say("rounds_total", "counter", "Polls of the queue and the scheduler.", self.rounds as f64);
        say("failed_rounds_total", "counter", "Failed polls of queue or scheduler.", self.failures as f64);
        say("round_seconds_total", "counter", "Total duration of polls.", self.seconds);
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn metrics_sum_up_rounds_and_a_failed_round_keeps_the_last_gauges() {
        let mut metrics = Metrics::new(None);
        metrics.add(Some(RoundSummary { held: 3, taken: 2, waiting: 7 }), Duration::from_millis(500));
        metrics.add(None, Duration::from_millis(250));
        let text = metrics.text();
        for line in [
            "windlass_dispatch_held 3",
            "windlass_dispatch_waiting 7",
            "windlass_dispatch_taken_total 2",
            "windlass_dispatch_rounds_total 2",
            "windlass_dispatch_failed_rounds_total 1",
            "windlass_dispatch_round_seconds_total 0.75",
            "# TYPE windlass_dispatch_held gauge",
        ] {
            assert!(text.lines().any(|one| one == line), "{line} is not in\n{text}");
        }
    }
}
