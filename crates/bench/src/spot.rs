//! Deadlines on recorded spot capacity: a table with the cost of each policy.
//!
//! The traces cannot be shipped: the user names their directory.

use std::{
    io::Write,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result, ensure};
use windlass_model::deadline_policy::{
    DeadlineTerms,
    replay::{ReplayRow, Trace, render, replay_row},
};

use super::flags::Flags;

/// The page with the table, from the root of the repository.
const PAGE: &str = "docs/spot-policy.md";
const TABLE_START: &str = "<!-- spot -->\n";
const TABLE_END: &str = "<!-- end -->";

const HOUR: f64 = 3600.0;
/// As in the study that published the traces.
const WORK: f64 = 48.0 * HOUR;
const CHANGEOVER: f64 = 0.2 * HOUR;
const TIGHTNESS: [f64; 3] = [0.6, 0.8, 0.9];
/// Ratio of the spot price to the on-demand price.
const SPOT_PRICE_RATIO: f64 = 0.918 / 3.06;

pub struct SpotPlan {
    pub traces: PathBuf,
    pub starts: usize,
    pub optima: usize,
}

impl SpotPlan {
    pub fn read(flags: &mut Flags) -> Result<Self> {
        let traces = flags.value::<PathBuf>("--traces")?;
        Ok(Self {
            traces: traces.context("missing `--traces DIR`: the directory of the traces")?,
            starts: flags.value("--starts")?.unwrap_or(300),
            optima: flags.value("--optima")?.unwrap_or(10),
        })
    }
}

/// Replays all traces, prints the table, and writes it into the page of the repository at `root`.
pub fn run(root: &Path, plan: &SpotPlan) -> Result<()> {
    let table = render(&replay_traces(plan)?);
    write!(std::io::stdout(), "{table}")?;
    let page = root.join(PAGE);
    let text = std::fs::read_to_string(&page).with_context(|| format!("failed to read {PAGE}"))?;
    std::fs::write(&page, fill_page(&text, &table)?)?;
    Ok(())
}

fn replay_traces(plan: &SpotPlan) -> Result<Vec<ReplayRow>> {
    let entries = std::fs::read_dir(&plan.traces)
        .with_context(|| format!("failed to read {}", plan.traces.display()))?;
    let mut files = entries.map(|entry| Ok(entry?.path())).collect::<Result<Vec<_>>>()?;
    files.retain(|path| path.extension().is_some_and(|end| end == "json"));
    files.sort();
    ensure!(!files.is_empty(), "no traces in {}", plan.traces.display());
    let mut rows = Vec::new();
    for path in files {
        let name = path.file_stem().context("the path has no file name")?.to_string_lossy().into_owned();
        let trace = Trace::parse(&std::fs::read_to_string(&path)?)
            .with_context(|| format!("failed to parse trace `{name}`"))?;
        for tightness in TIGHTNESS {
            let terms = DeadlineTerms { within: WORK / tightness, work: WORK, changeover: CHANGEOVER };
            rows.push(replay_row(&name, &trace, terms, SPOT_PRICE_RATIO, plan.starts, plan.optima));
        }
    }
    Ok(rows)
}

/// Replaces the part of the page between its marks.
fn fill_page(text: &str, table: &str) -> Result<String> {
    let from =
        text.find(TABLE_START).with_context(|| format!("{PAGE} has no part `spot`"))? + TABLE_START.len();
    let to = from + text[from..].find(TABLE_END).context("the part `spot` has no end mark")?;
    Ok(format!("{}\n{table}\n{}", &text[..from], &text[to..]))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn filling_the_page_replaces_only_the_table() {
        let page = "a\n<!-- spot -->\nold\n<!-- end -->\nb\n";
        let once = fill_page(page, "| t |\n").unwrap();
        assert_eq!(once, "a\n<!-- spot -->\n\n| t |\n\n<!-- end -->\nb\n");
        assert_eq!(fill_page(&once, "| t |\n").unwrap(), once);
        assert!(fill_page("nothing", "").is_err());
    }

    #[test]
    fn every_trace_in_a_directory_is_replayed_for_every_deadline_tightness() {
        let dir = windlass_testkit::temp_dir("spot").unwrap();
        let ticks = vec!["1"; 2_000].join(",");
        std::fs::write(
            dir.path().join("calm.json"),
            format!("{{\"metadata\":{{\"gap_seconds\":300}},\"data\":[{ticks}]}}"),
        )
        .unwrap();
        let rows = replay_traces(&SpotPlan { traces: dir.path().to_owned(), starts: 3, optima: 1 }).unwrap();
        assert_eq!(rows.iter().map(|row| row.trace.as_str()).collect::<Vec<_>>(), ["calm"; 3]);
        assert!(rows.iter().all(|row| row.missed == [0; 3] && row.uniform < 0.31), "{rows:?}");
    }
}
