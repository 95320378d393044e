//! Tests of the evaluation: a row without faults fails, and so does one that exceeds its bound.

use std::time::Duration;

use windlass_faults::{
    self as faults, FaultRow, RowTest, RunOptions, Trial, TrialFuture, TrialOutcome, report,
};
use windlass_testkit::{TempDir, temp_dir};

fn row(play: fn(&mut Trial) -> TrialFuture<'_>) -> FaultRow {
    let (injection, expected, bound, proves) = ("something", "nothing", "≤ 1 s", "R1 R2");
    FaultRow { id: "F0", injection, expected, bound, proves, play: RowTest::Now(play) }
}

fn run_row(dir: &TempDir, row: FaultRow, times: u64) -> Vec<TrialOutcome> {
    let dir = dir.path().to_owned();
    let order = RunOptions { rows: vec![row], times, jobs: 2, seed: 7, is_long: false, slack: 1, dir };
    let mut outcomes = faults::run_trials(&order, |_| {}).unwrap();
    outcomes.sort_by_key(|outcome| outcome.seed);
    outcomes
}

#[test]
fn fault_matrix_lists_each_row_once_and_in_order() {
    let ids: Vec<u32> = faults::all_rows().iter().map(|row| row.id[1..].parse().unwrap()).collect();
    assert!(ids.is_sorted_by(|a, b| a < b), "{ids:?}");
    assert!(ids.iter().all(|id| (1..=37).contains(id)), "{ids:?}");
}

#[test]
fn a_passing_fault_row_leaves_no_files_behind() {
    let dir = temp_dir("faults").unwrap();
    let outcomes = run_row(&dir, row(|trial| Box::pin(async move { trial.fired("harm") })), 3);
    let seeds: Vec<u64> = outcomes.iter().map(|outcome| outcome.seed).collect();
    assert_eq!(seeds, [7, 8, 9]);
    for outcome in &outcomes {
        assert_eq!((outcome.violations.len(), outcome.fired.as_slice()), (0, &[("harm", 1)][..]));
    }
    assert_eq!(std::fs::read_dir(&dir).unwrap().count(), 0);
}

#[test]
fn a_fault_row_fails_if_no_fault_fired() {
    let dir = temp_dir("faults").unwrap();
    let outcomes = run_row(&dir, row(|_| Box::pin(async move {})), 1);
    assert!(outcomes[0].violations[0].contains("no fault fired"), "{outcomes:?}");
}

#[test]
fn a_failed_assertion_is_a_violation_and_keeps_its_directory() {
    let broken = row(|trial| {
        Box::pin(async move {
            trial.fired("harm");
            std::fs::write(trial.dir().join("found"), "").unwrap();
            assert!(trial.seed == 0, "R7: twice");
        })
    });
    let dir = temp_dir("faults").unwrap();
    let outcomes = run_row(&dir, broken, 1);
    let outcome = &outcomes[0];
    assert!(outcome.violations[0].contains("R7: twice"), "{outcome:?}");
    let kept = outcome.kept.clone().unwrap();
    assert!(kept.join("found").exists() && kept.join("violations.txt").exists());
    assert!(
        report::render_trial(outcome).contains("cargo xtask faults --row F0 --seed 7"),
        "{}",
        report::render_trial(outcome)
    );
}

#[test]
fn exceeding_a_time_limit_is_a_violation_and_the_report_shows_the_worst_time() {
    let late = row(|trial| {
        Box::pin(async move {
            trial.fired("harm");
            trial.within("quick", Duration::from_secs(10), Duration::from_secs(9));
            if trial.seed == 8 {
                trial.within("slow", Duration::from_secs(1), Duration::from_secs(2));
            }
        })
    });
    let dir = temp_dir("faults").unwrap();
    let outcomes = run_row(&dir, late, 2);
    assert_eq!(outcomes[0].violations.len(), 0);
    assert!(outcomes[1].violations[0].contains("slow took 2"), "{outcomes:?}");
    let rows = [late];
    let lines = report::summarize_rows(&rows, &outcomes);
    let table = report::render_table(&lines);
    assert!(table.contains("F0       2      2          1  slow: 2.0 of 1 s"), "{table}");
    assert!(
        report::render_markdown(&lines)
            .contains("| F0 | something | nothing | ≤ 1 s | R1 R2 | 2 | harm 2 | 1 |")
    );
    assert_eq!(report::render_json(&lines)["rows"][0]["worst"]["took_ms"], 2000);
}
