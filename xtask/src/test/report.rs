//! Output of a test run: a line for each level, a summary, timings, and commands to repeat.

use std::{fmt::Write as _, time::Duration};

use super::levels::LevelOutcome;
use crate::core_usage::CoreUsage;

const SLOWEST: usize = 20;

/// The result of one level.
pub(super) struct LevelRow {
    pub(super) name: &'static str,
    pub(super) usage: CoreUsage,
    pub(super) outcome: LevelOutcome,
}

/// `tests: ok in 3 min 20 s (2,390 tests, 0 failed)`
pub(super) fn level_line(row: &LevelRow) -> String {
    let took = format_duration(row.usage.wall);
    match &row.outcome.failure {
        None => format!("{}: ok in {took} ({})", row.name, row.outcome.summary),
        Some(failure) => format!("{}: FAILED after {took}: {failure}", row.name),
    }
}

pub(super) fn summary(rows: &[LevelRow]) -> String {
    let mut text = String::new();
    for row in rows {
        let (verdict, note) = match &row.outcome.failure {
            None => ("ok", &row.outcome.summary),
            Some(failure) => ("FAILED", failure),
        };
        let _ =
            writeln!(text, "{:<12} {verdict:<6} {:>12}  {note}", row.name, format_duration(row.usage.wall));
    }
    text.trim_end().to_owned()
}

/// Renders the timings: the wall time and the idle CPU share of each level, the slowest tests, and how long the test
/// threads were idle.
pub(super) fn timings(rows: &[LevelRow], threads: usize) -> String {
    let mut text = String::from("| level | time | cores idle |\n| --- | ---: | ---: |\n");
    for row in rows {
        let idle = row.usage.idle.map_or("?".to_owned(), |idle| format!("{:.0} %", idle * 100.0));
        let _ = writeln!(text, "| {} | {} | {idle} |", row.name, format_duration(row.usage.wall));
    }
    for row in rows {
        let Some(running) = row.outcome.running else { continue };
        let mut tests: Vec<_> = row.outcome.tests.iter().collect();
        let busy: f64 = tests.iter().map(|test| test.secs).sum();
        let slots = running.as_secs_f64() * threads as f64;
        let _ = writeln!(
            text,
            "\n{} tests took {} in total; {threads} workers were idle for {:.0} % of the time.\n",
            tests.len(),
            format_duration(Duration::from_secs_f64(busy)),
            (1.0 - busy / slots).max(0.0) * 100.0
        );
        tests.sort_by(|a, b| b.secs.total_cmp(&a.secs));
        text.push_str("| slowest tests | seconds |\n| --- | ---: |\n");
        for test in tests.iter().take(SLOWEST) {
            let _ = writeln!(text, "| `{}` `{}` | {:.1} |", test.binary, test.name, test.secs);
        }
    }
    text.trim_end().to_owned()
}

pub(super) fn rerun_lines(rows: &[LevelRow]) -> String {
    let commands = rows.iter().flat_map(|row| &row.outcome.repeat);
    commands.map(|command| format!("  {command}")).collect::<Vec<_>>().join("\n")
}

pub(super) fn format_duration(took: Duration) -> String {
    let secs = took.as_secs_f64();
    if secs < 60.0 {
        return format!("{secs:.1} s");
    }
    let whole = secs.round() as u64;
    format!("{} min {:02} s", whole / 60, whole % 60)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::junit::TestResult;

    fn row(name: &'static str, secs: u64, outcome: LevelOutcome) -> LevelRow {
        LevelRow { name, usage: CoreUsage { wall: Duration::from_secs(secs), idle: Some(0.25) }, outcome }
    }

    fn test(name: &str, secs: f64, failed: bool) -> TestResult {
        TestResult { binary: "windlass-model::it".to_owned(), name: name.to_owned(), secs, failed }
    }

    fn rows() -> Vec<LevelRow> {
        let passed = LevelOutcome { summary: "formatted".to_owned(), ..LevelOutcome::default() };
        let tests = LevelOutcome {
            failure: Some("1 of 2 tests failed".to_owned()),
            repeat: vec!["cargo xtask test --only slow".to_owned()],
            tests: vec![test("quick", 10.0, false), test("slow", 50.0, true)],
            running: Some(Duration::from_secs(60)),
            ..LevelOutcome::default()
        };
        vec![row("format", 2, passed), row("tests", 61, tests)]
    }

    #[test]
    fn the_summary_names_what_failed_and_how_to_repeat_it() {
        let rows = rows();
        let expect = "\
format       ok            2.0 s  formatted
tests        FAILED   1 min 01 s  1 of 2 tests failed";
        assert_eq!(summary(&rows), expect);
        assert_eq!(level_line(&rows[0]), "format: ok in 2.0 s (formatted)");
        assert_eq!(level_line(&rows[1]), "tests: FAILED after 1 min 01 s: 1 of 2 tests failed");
        assert_eq!(rerun_lines(&rows), "  cargo xtask test --only slow");
    }

    #[test]
    fn timings_show_idle_cores_idle_workers_and_the_slowest_tests_first() {
        let text = timings(&rows(), 2);
        assert!(text.contains("| tests | 1 min 01 s | 25 % |"), "{text}");
        assert!(text.contains("2 tests took 1 min 00 s in total"), "{text}");
        assert!(text.contains("2 workers were idle for 50 %"), "{text}");
        let (slow, quick) = (text.find("`slow`").unwrap(), text.find("`quick`").unwrap());
        assert!(slow < quick, "{text}");
    }
}
