//! The report of nextest: each test with its duration and result.

use std::path::Path;

use anyhow::{Context, Result};

/// The result of one test.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct TestResult {
    /// Package and binary in nextest's notation: `windlass-server::it`.
    pub(crate) binary: String,
    pub(crate) name: String,
    pub(crate) secs: f64,
    pub(crate) failed: bool,
}

impl TestResult {
    /// Returns the command that repeats this test with everything that it needs.
    pub(crate) fn repeat(&self) -> String {
        format!("cargo xtask test --only {}", self.name)
    }
}

pub(crate) fn read_report(path: &Path) -> Result<Vec<TestResult>> {
    let text =
        std::fs::read_to_string(path).with_context(|| format!("failed to read `{}`", path.display()))?;
    parse_report(&text).with_context(|| format!("failed to parse `{}`", path.display()))
}

fn parse_report(text: &str) -> Result<Vec<TestResult>> {
    let document = roxmltree::Document::parse(text)?;
    let cases = document.descendants().filter(|node| node.has_tag_name("testcase"));
    cases
        .map(|case| {
            let attribute = |name: &str| {
                case.attribute(name).with_context(|| format!("a test has no attribute `{name}`"))
            };
            let failed =
                case.children().any(|child| child.has_tag_name("failure") || child.has_tag_name("error"));
            Ok(TestResult {
                binary: attribute("classname")?.to_owned(),
                name: attribute("name")?.to_owned(),
                secs: attribute("time")?.parse()?,
                failed,
            })
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const REPORT: &str = r#"<?xml version="1.0" encoding="UTF-8"?>
<testsuites name="nextest-run" tests="2" failures="1" errors="0" time="1.2">
    <testsuite name="windlass-model::it" tests="2" disabled="0" errors="0" failures="1">
        <testcase name="runs::a_run_ends" classname="windlass-model::it" timestamp="2026-11-17T05:00:00.000+00:00" time="0.250"/>
        <testcase name="runs::a_run_stays" classname="windlass-model::it" timestamp="2026-11-17T05:00:00.000+00:00" time="1.000">
            <failure type="test failure">thread panicked</failure>
        </testcase>
    </testsuite>
</testsuites>"#;

    #[test]
    fn a_junit_report_yields_times_and_failures() {
        let results = parse_report(REPORT).unwrap();
        assert_eq!(results.len(), 2);
        assert_eq!((results[0].secs, results[0].failed), (0.25, false));
        assert!(results[1].failed);
        assert_eq!(results[1].repeat(), "cargo xtask test --only runs::a_run_stays");
    }

    #[test]
    fn a_truncated_junit_report_is_an_error() {
        assert!(parse_report(&REPORT[..REPORT.len() - 20]).is_err());
    }
}
