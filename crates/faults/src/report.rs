//! Results of all trials by row: a table for the terminal, JSON, and Markdown for the documentation.

use std::{collections::BTreeMap, fmt::Write as _, time::Duration};

use serde_json::{Value, json};

use super::{FaultRow, RowTest, TimedStep, TrialOutcome};

/// Maximum length of a violation in a table.
const VIOLATION_LENGTH_MAX: usize = 4000;

/// The trials of one row.
pub struct RowSummary<'a> {
    pub row: &'a FaultRow,
    pub outcomes: Vec<&'a TrialOutcome>,
}

impl RowSummary<'_> {
    fn fired(&self) -> BTreeMap<&'static str, u64> {
        let mut fired = BTreeMap::new();
        for (what, times) in self.outcomes.iter().flat_map(|outcome| &outcome.fired) {
            *fired.entry(*what).or_default() += times;
        }
        fired
    }

    fn violations(&self) -> usize {
        self.outcomes.iter().map(|outcome| outcome.violations.len()).sum()
    }

    /// The time closest to its bound, or furthest beyond.
    fn worst(&self) -> Option<&TimedStep> {
        let times = self.outcomes.iter().flat_map(|outcome| &outcome.times);
        times.max_by(|a, b| a.share().total_cmp(&b.share()))
    }

    fn longest_trial(&self) -> Duration {
        self.outcomes.iter().map(|outcome| outcome.took).max().unwrap_or_default()
    }

    fn format_worst_time(&self) -> String {
        self.worst().map_or_else(
            || "–".to_owned(),
            |worst| {
                let (took, bound) = (worst.took.as_secs_f64(), worst.bound.as_secs_f64());
                format!("{}: {took:.1} of {bound:.0} s", worst.what)
            },
        )
    }

    fn format_faults(&self) -> String {
        let fired = self.fired();
        let words: Vec<String> = fired.iter().map(|(what, times)| format!("{what} {times}")).collect();
        words.join(", ")
    }
}

/// Groups the results by row, in the order of the rows.
pub fn summarize_rows<'a>(rows: &'a [FaultRow], outcomes: &'a [TrialOutcome]) -> Vec<RowSummary<'a>> {
    let of = |row: &FaultRow| outcomes.iter().filter(|outcome| outcome.row == row.id).collect();
    rows.iter().map(|row| RowSummary { row, outcomes: of(row) }).collect()
}

/// Table for the terminal.
pub fn render_table(lines: &[RowSummary<'_>]) -> String {
    let mut text = String::new();
    let _ = writeln!(
        text,
        "{:<4} {:>5} {:>6} {:>10}  worst against its bound",
        "row", "times", "faults", "violations"
    );
    for line in lines {
        let faults: u64 = line.fired().values().sum();
        let _ = writeln!(
            text,
            "{:<4} {:>5} {faults:>6} {:>10}  {}",
            line.row.id,
            line.outcomes.len(),
            line.violations(),
            line.format_worst_time()
        );
    }
    text + &render_totals(lines)
}

fn render_totals(lines: &[RowSummary<'_>]) -> String {
    let trials: usize = lines.iter().map(|line| line.outcomes.len()).sum();
    let faults: u64 = lines.iter().flat_map(|line| line.fired().into_values()).sum();
    let violations: usize = lines.iter().map(RowSummary::violations).sum();
    let rows = lines.iter().filter(|line| !line.outcomes.is_empty()).count();
    format!("{rows} rows, {trials} trials, {faults} faults, {violations} violations")
}

/// Table for `docs/reliability.md`.
pub fn render_markdown(lines: &[RowSummary<'_>]) -> String {
    let mut text = String::from(
        "| row | injected | expected | bound | proves | times | faults that fired | violations | nearest to its bound |\n\
         | --- | --- | --- | --- | --- | ---: | --- | ---: | --- |\n",
    );
    for line in lines {
        let row = line.row;
        let (times, fired) = (line.outcomes.len(), line.format_faults());
        let (violations, worst) = (line.violations(), line.format_worst_time());
        let _ = writeln!(
            text,
            "| {} | {} | {} | {} | {} | {times} | {fired} | {violations} | {worst} |",
            row.id, row.injection, row.expected, row.bound, row.proves
        );
    }
    text + "\n" + &render_totals(lines) + ".\n"
}

pub fn render_json(lines: &[RowSummary<'_>]) -> Value {
    let timed = |timed: &TimedStep| {
        json!({"what": timed.what, "took_ms": timed.took.as_millis() as u64,
            "bound_ms": timed.bound.as_millis() as u64})
    };
    let trial = |outcome: &&TrialOutcome| {
        json!({"seed": outcome.seed, "took_ms": outcome.took.as_millis() as u64,
            "times": outcome.times.iter().map(timed).collect::<Vec<_>>(),
            "violations": outcome.violations, "kept": outcome.kept})
    };
    let line = |line: &RowSummary<'_>| {
        json!({"row": line.row.id, "injection": line.row.injection, "expected": line.row.expected,
            "bound": line.row.bound, "proves": line.row.proves.split(' ').collect::<Vec<_>>(),
            "status": {"violations": line.violations()}, "times": line.outcomes.len(), "fired": line.fired(),
            "worst": line.worst().map(timed), "longest_ms": line.longest_trial().as_millis() as u64,
            "trials": line.outcomes.iter().map(trial).collect::<Vec<_>>()})
    };
    json!({"rows": lines.iter().map(line).collect::<Vec<_>>()})
}

/// List of rows with their descriptions.
pub fn render_list(rows: &[FaultRow]) -> String {
    let mut text = String::new();
    for row in rows {
        let when = match row.play {
            RowTest::Now(_) => String::new(),
            RowTest::OutsideCi(why, _) => format!("  [not in continuous integration: it {why}]"),
        };
        let _ = writeln!(text, "{:<4} {}{when}", row.id, row.injection);
        let _ = writeln!(text, "     {}; {}; proves {}", row.expected, row.bound, row.proves);
    }
    text.trim_end().to_owned()
}

/// Line for a finished trial, with the command that repeats it.
pub fn render_trial(outcome: &TrialOutcome) -> String {
    let faults: u64 = outcome.fired.iter().map(|(_, times)| times).sum();
    let (row, seed, took) = (outcome.row, outcome.seed, outcome.took.as_secs_f64());
    let mut text = format!("{row:<4} seed {seed:<20} {took:>6.1} s  {faults:>4} faults");
    if outcome.violations.is_empty() {
        return text;
    }
    let _ = write!(text, "  {} VIOLATIONS", outcome.violations.len());
    for violation in &outcome.violations {
        let short: String = violation.chars().take(VIOLATION_LENGTH_MAX).collect();
        let short = short.replace('\n', " ");
        let more = if violation.chars().count() > VIOLATION_LENGTH_MAX { " …" } else { "" };
        let _ = write!(text, "\n       {short}{more}");
    }
    if let Some(kept) = &outcome.kept {
        let _ = write!(text, "\n       kept: {}", kept.display());
    }
    let _ = write!(text, "\n       again: cargo xtask faults --row {row} --seed {seed}");
    text
}
