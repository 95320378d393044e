//! Generates `docs/performance.md`: its tables and charts, from the stored results of the benchmarks.

use std::{
    collections::BTreeMap,
    fmt::Write as _,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use super::growth;

const PAGE: &str = "docs/performance.md";
/// Directory of the stored results and of the charts.
const RESULTS_DIR: &str = "docs/performance";

const PICTURES: &str = "\
![List, submit to done and memory over the number of runs in the database](performance/growth-runs.svg)

![Submit to running, memory and idle CPU over the number of hosts](performance/growth-hosts.svg)
";

/// Stored results by the name of their benchmark.
pub type Results = BTreeMap<String, Value>;

#[derive(Clone, Copy)]
enum Limit {
    AtMost(f64),
    AtLeast(f64),
    /// Shown without a goal.
    None,
}

struct BudgetRow {
    what: &'static str,
    unit: &'static str,
    limit: Limit,
    /// Benchmark and key.
    ours: (&'static str, &'static str),
    /// Key of dstack's figure in the benchmark `peer`.
    theirs: Option<&'static str>,
}

const fn budget_row(
    what: &'static str,
    unit: &'static str,
    limit: Limit,
    ours: (&'static str, &'static str),
    theirs: Option<&'static str>,
) -> BudgetRow {
    BudgetRow { what, unit, limit, ours, theirs }
}

const BUDGET: &[BudgetRow] = &[
    budget_row(
        "submit → running, agent instant",
        "ms",
        Limit::AtMost(50.0),
        ("runs", "sqlite.running_ms"),
        Some("running_ms"),
    ),
    budget_row(
        "submit → done, empty job",
        "ms",
        Limit::AtMost(150.0),
        ("runs", "sqlite.done_ms"),
        Some("done_ms"),
    ),
    budget_row("– 16 concurrent", "ms", Limit::AtMost(500.0), ("runs", "sqlite.done_together_ms"), None),
    budget_row("lifecycles, SQLite", "/s", Limit::AtLeast(500.0), ("runs", "sqlite.lifecycles_per_s"), None),
    budget_row(
        "lifecycles, Postgres",
        "/s",
        Limit::AtLeast(500.0),
        ("runs", "postgres.lifecycles_per_s"),
        None,
    ),
    budget_row(
        "durable submits",
        "/s",
        Limit::AtLeast(1_000.0),
        ("api", "submit_per_s"),
        Some("submits_per_s"),
    ),
    budget_row(
        "list 100 of 100,000 runs (dstack: of 200)",
        "/s",
        Limit::AtLeast(2_000.0),
        ("api", "list_per_s"),
        Some("list_per_s"),
    ),
    budget_row("– p99", "ms", Limit::AtMost(25.0), ("api", "list_p99_ms"), None),
    budget_row("server CPU time per run", "ms", Limit::AtMost(5.0), ("runs", "sqlite.cpu_ms"), None),
    budget_row(
        "resident memory, idle",
        "MB",
        Limit::AtMost(40.0),
        ("api", "idle_resident_mb"),
        Some("idle_resident_mb"),
    ),
    budget_row(
        "resident memory, 10,000 active runs",
        "MB",
        Limit::AtMost(500.0),
        ("load-sqlite", "hold_resident_peak_mb"),
        None,
    ),
    budget_row("ready after start", "ms", Limit::AtMost(300.0), ("api", "ready_ms"), Some("ready_ms")),
    budget_row(
        "process job: submit → first log line",
        "ms",
        Limit::AtMost(100.0),
        ("runs", "process.first_line_ms"),
        None,
    ),
    budget_row(
        "Docker job: overhead over `docker run`",
        "ms",
        Limit::AtMost(100.0),
        ("runs", "docker.overhead_ms"),
        None,
    ),
];

/// Figures of both systems, measured in one run: label, key, unit.
const PEER: &[(&str, &str, &str)] = &[
    ("ready after start", "ready_ms", "ms"),
    ("resident memory, idle", "idle_resident_mb", "MB"),
    ("authenticated get, 16 connections", "get_per_s", "/s"),
    ("submit → running", "running_ms", "ms"),
    ("submit → done, `true`", "done_ms", "ms"),
    ("submits, 8 clients", "submits_per_s", "/s"),
    ("cancel 200 waiting runs, until all have ended", "cancel_200_ms", "ms"),
    ("list 100 runs after 200 submits", "list_per_s", "/s"),
    ("resident memory, afterwards", "end_resident_mb", "MB"),
];

/// Figures of containers: label, unit, key.
const DISPATCH: &[(&str, &str, &str)] = &[
    ("containers, all queued at the start", "/s", "per_s"),
    ("request → first instruction, one at a time", "ms", "first_ms"),
];

/// Containers without an engine: what, unit, goal, key.
const CONTAINERS: &[(&str, &str, Limit, &str)] = &[
    ("bare OCI runtime (`crun run` or `runc run`), to the first line", "ms", Limit::None, "bare_ms"),
    ("container, network of the host, to the first line of its job", "ms", Limit::None, "host_ms"),
    ("– over the bare OCI runtime", "ms", Limit::AtMost(30.0), "over_bare_ms"),
    ("– the shortest over the shortest of the bare OCI runtime", "ms", Limit::None, "least_over_bare_ms"),
    ("container, separate network", "ms", Limit::None, "bridge_ms"),
    ("plain process", "ms", Limit::None, "process_ms"),
    ("`docker run`, network of the host", "ms", Limit::None, "docker_ms"),
    ("`docker run`, separate network", "ms", Limit::None, "docker_bridge_ms"),
    ("first start, pull of 100 MiB", "ms", Limit::None, "first_ms"),
    ("first `docker run`, the same pull", "ms", Limit::None, "docker_first_ms"),
    ("200 containers at once, network of the host", "s", Limit::AtMost(10.0), "host.many_s"),
    ("200 containers at once, separate networks", "s", Limit::AtMost(10.0), "bridge.many_s"),
    ("left over after the agent was killed 20 times", "", Limit::AtMost(0.0), "leftovers"),
];

/// Figures at full load: label, unit, goal, key.
const LOAD: &[(&str, &str, Limit, &str)] = &[
    ("simulated hosts", "", Limit::None, "hosts"),
    ("active runs", "", Limit::None, "runs"),
    ("duration", "minutes", Limit::None, "minutes"),
    ("submit rate", "/s", Limit::None, "rate_per_s"),
    ("start until all hosts accept jobs", "s", Limit::None, "hosts_ready_s"),
    ("memory per host", "KiB", Limit::AtMost(256.0), "host_idle_kb"),
    ("CPU per idle host", "mcore", Limit::AtMost(0.2), "host_idle_mcore"),
    ("server CPU, all hosts idle", "mcore", Limit::None, "idle_mcore"),
    ("server memory, peak", "MB", Limit::AtMost(500.0), "hold_resident_peak_mb"),
    ("– growth during the test", "MB", Limit::None, "hold_resident_grown_mb"),
    ("server CPU", "cores", Limit::None, "hold_cpu_cores"),
    ("submit, p50", "ms", Limit::None, "submit_p50_ms"),
    ("submit, p99", "ms", Limit::AtMost(150.0), "submit_p99_ms"),
    ("submit → running, p50", "ms", Limit::AtMost(500.0), "running_p50_ms"),
    ("submit → running, p99", "ms", Limit::AtMost(2_000.0), "running_p99_ms"),
    ("get, p50", "ms", Limit::None, "get_p50_ms"),
    ("get, p99", "ms", Limit::AtMost(25.0), "get_p99_ms"),
    ("list 100 of 110,000, p50", "ms", Limit::None, "list_p50_ms"),
    ("list 100 of 110,000, p99", "ms", Limit::AtMost(50.0), "list_p99_ms"),
    ("log poll, p50", "ms", Limit::None, "logs_p50_ms"),
    ("log poll, p99", "ms", Limit::AtMost(50.0), "logs_p99_ms"),
    ("stop, p50", "ms", Limit::None, "stop_p50_ms"),
    ("stop, p99", "ms", Limit::None, "stop_p99_ms"),
    ("stop → final, p99", "ms", Limit::None, "stopped_p99_ms"),
    ("submit → running, initial fill, p99", "ms", Limit::AtMost(5_000.0), "fill_running_p99_ms"),
    ("cancel 5,000 at once, until all are final", "s", Limit::AtMost(60.0), "cancel_final_s"),
    ("failed requests", "", Limit::AtMost(0.0), "errors"),
    ("delay of the load generator, p99", "ms", Limit::None, "late_p99_ms"),
];

/// Figures of managed jobs: label, unit, key, and that of SkyPilot 0.14.1 if known.
const JOBS: &[(&str, &str, &str, &str)] = &[
    ("launch → RUNNING, simulated host", "ms", "crowd.running_ms", ""),
    ("launch → RUNNING, process", "ms", "cloud.running_ms", ""),
    ("100 one-second jobs at once: the call", "ms", "crowd.together_answered_ms", "480 ms"),
    ("– launch → RUNNING, p50", "ms", "crowd.together_running_p50_ms", "181 s"),
    ("– launch → RUNNING, p99", "ms", "crowd.together_running_p99_ms", "363 s"),
    ("– last job SUCCEEDED after", "s", "crowd.together_last_s", "378 s"),
    ("– jobs per minute, launch to end", "/min", "crowd.together_per_min", "16 /min per process"),
    ("many at once: jobs per minute, launch to end", "/min", "crowd.burst_per_min", "16 /min per process"),
    ("long jobs: launches per minute, up to `most`", "/min", "crowd.many_launches_per_min", ""),
    ("end of the program → SUCCEEDED, p50", "ms", "cloud.end_p50_ms", "14.0 s"),
    ("– p99", "ms", "cloud.end_p99_ms", "14.1 s"),
    ("instance preempted → detected, mean", "ms", "cloud.loss_mean_ms", "8.4 s"),
    ("instance preempted → RUNNING again, mean", "ms", "cloud.again_mean_ms", "8.7 s"),
    ("live jobs, `live`", "", "crowd.live", "100"),
    ("– server memory", "MB", "crowd.live_resident_mb", "185 MB (controller)"),
    ("– per job", "KiB", "crowd.live_each_kib", "205 KiB"),
    ("live jobs, `most`", "", "crowd.most", ""),
    ("– server memory", "MB", "crowd.most_resident_mb", ""),
    ("– per job", "KiB", "crowd.most_each_kib", ""),
    ("– server CPU", "cores", "crowd.most_cpu_cores", ""),
    ("– list the first 1,000 of the queue", "ms", "crowd.list_ms", "7.2 s for all 20,001 (reported)"),
    ("jobs cancelled in one call", "", "crowd.cancelled", "1,000"),
    ("– until all have ended and released their nodes", "s", "crowd.cancel_s", "5 to 10 minutes (reported)"),
];

/// Figures of the windlass proxy and nginx: label, unit, key of both.
const PROXY: &[(&str, &str, &str)] = &[
    ("keep-alive connections", "/s", "keep_per_s"),
    ("– p50", "ms", "keep_p50_ms"),
    ("– p99", "ms", "keep_p99_ms"),
    ("– CPU time per request", "µs", "keep_cpu_us"),
    ("new connection per request", "/s", "new_per_s"),
    ("– p50", "ms", "new_p50_ms"),
    ("– p99", "ms", "new_p99_ms"),
    ("– CPU time per request", "µs", "new_cpu_us"),
    ("failed requests", "", "keep_errors"),
    ("added latency, single client, p50", "µs", "added_p50_us"),
    ("added latency, single client, p99", "µs", "added_p99_us"),
    ("concurrent event streams", "", "streams"),
    ("– memory per stream", "KiB", "stream_kib"),
    ("– time to open all", "s", "streams_open_s"),
    ("– CPU, one event per stream every 10 s", "mcore", "streams_mcore"),
    ("– streams without an event", "", "streams_silent"),
];

/// Cost of the confinement of plain processes: label, goal, start of the keys.
const ISOLATION: &[(&str, Limit, &str, &str)] = &[
    ("start of the server → its machine accepts jobs", Limit::None, "start", "start_overhead_ms"),
    ("submit → first line", Limit::AtMost(10.0), "first_line", "overhead_ms"),
];

/// Goals of the proxy: label, goal, key.
const PROXY_GOALS: &[(&str, Limit, &str)] = &[
    ("throughput on keep-alive connections, relative to nginx", Limit::AtLeast(0.9), "keep_ratio"),
    ("p99 on keep-alive connections, relative to nginx", Limit::AtMost(1.5), "keep_p99_ratio"),
    ("throughput on new connections, relative to nginx", Limit::None, "new_ratio"),
    ("p99 on new connections, relative to nginx", Limit::None, "new_p99_ratio"),
];

/// Copies new results into the repository at `root`, and generates the page and the charts.
pub fn run(root: &Path, fresh: &Path) -> Result<()> {
    let store = root.join(RESULTS_DIR);
    std::fs::create_dir_all(&store)?;
    for path in results_in(fresh)? {
        let name = path.file_name().context("the path has no file name")?;
        std::fs::copy(&path, store.join(name))?;
    }
    let results = read_results(root)?;
    if let Some(record) = results.get("growth") {
        growth::draw_pictures(record, &store)?;
    }
    let page = root.join(PAGE);
    let text = std::fs::read_to_string(&page).with_context(|| format!("failed to read {PAGE}"))?;
    std::fs::write(&page, fill_page(&text, &results)?)?;
    Ok(())
}

/// Returns the current page, and the one generated from the stored results.
pub fn compare(root: &Path) -> Result<(String, String)> {
    let text = std::fs::read_to_string(root.join(PAGE)).with_context(|| format!("failed to read {PAGE}"))?;
    let filled = fill_page(&text, &read_results(root)?)?;
    Ok((text, filled))
}

fn results_in(place: &Path) -> Result<Vec<PathBuf>> {
    let Ok(entries) = std::fs::read_dir(place) else { return Ok(Vec::new()) };
    let paths = entries.map(|entry| Ok(entry?.path())).collect::<Result<Vec<_>>>()?;
    Ok(paths.into_iter().filter(|path| path.extension().is_some_and(|end| end == "json")).collect())
}

fn read_results(root: &Path) -> Result<Results> {
    let mut results = Results::new();
    for path in results_in(&root.join(RESULTS_DIR))? {
        let record: Value = serde_json::from_str(&std::fs::read_to_string(&path)?)
            .with_context(|| format!("failed to read {}", path.display()))?;
        let name = record["bench"].as_str().context("a result has no name")?.to_owned();
        results.insert(name, record);
    }
    Ok(results)
}

/// Replaces every part between `<!-- NAME -->` and `<!-- end -->`.
fn fill_page(text: &str, results: &Results) -> Result<String> {
    let mut text = text.to_owned();
    let parts = [
        ("budget", render_budget(results)),
        ("peer", render_peer(results)),
        ("dispatch", render_dispatch(results)),
        ("containers", render_containers(results)),
        ("load", render_load(results)),
        ("jobs", render_jobs(results)),
        ("growth", render_pictures(results)),
        ("proxy", render_proxy(results)),
        ("isolation", render_isolation(results)),
    ];
    for (name, table) in parts {
        let open = format!("<!-- {name} -->\n");
        let from = text.find(&open).with_context(|| format!("{PAGE} has no part `{name}`"))? + open.len();
        let to = from + text[from..].find("<!-- end -->").context("a part has no end mark")?;
        ensure!(!text[from..to].contains("<!-- "), "the part `{name}` of {PAGE} has no end mark");
        text.replace_range(from..to, &format!("\n{table}\n"));
    }
    Ok(text)
}

fn figure(results: &Results, bench: &str, key: &str) -> Option<f64> {
    results.get(bench)?["figures"][key].as_f64()
}

fn render_budget(results: &Results) -> String {
    let mut out =
        String::from("| what | dstack | budget | windlass | |\n| --- | ---: | ---: | ---: | --- |\n");
    for row in BUDGET {
        let theirs = row.theirs.and_then(|key| figure(results, "peer", &format!("dstack.{key}")));
        let ours = figure(results, row.ours.0, row.ours.1);
        let _ = writeln!(
            out,
            "| {} | {} | {} | {} | {} |",
            row.what,
            format_number(theirs, row.unit),
            format_goal(row.limit, row.unit),
            format_number(ours, row.unit),
            format_verdict(row.limit, ours)
        );
    }
    out + &render_origin(results, &["runs", "api", "load-sqlite", "peer"])
}

fn render_peer(results: &Results) -> String {
    let mut out =
        String::from("| what | dstack 0.22.5 | windlass | times better |\n| --- | ---: | ---: | ---: |\n");
    for (what, key, unit) in PEER {
        let of = |system: &str| figure(results, "peer", &format!("{system}.{key}"));
        let (theirs, ours, ratio) = (of("dstack"), of("windlass"), of("ratio"));
        let _ = writeln!(
            out,
            "| {what} | {} | {} | {} |",
            format_number(theirs, unit),
            format_number(ours, unit),
            format_number(ratio, "")
        );
    }
    out + &render_origin(results, &["peer"])
}

fn render_isolation(results: &Results) -> String {
    let mut out = String::from(
        "| what | own rights | confined | in addition, median of pairs | goal | |\n\
         | --- | ---: | ---: | ---: | ---: | --- |\n",
    );
    for (what, limit, key, overhead) in ISOLATION {
        let of = |mode: &str| figure(results, "isolation", &format!("{mode}_{key}_ms"));
        let overhead = figure(results, "isolation", overhead);
        let _ = writeln!(
            out,
            "| {what} | {} | {} | {} | {} | {} |",
            format_number(of("own"), "ms"),
            format_number(of("confined"), "ms"),
            format_number(overhead, "ms"),
            format_goal(*limit, "ms"),
            format_verdict(*limit, overhead)
        );
    }
    out + &render_origin(results, &["isolation"])
}

fn render_dispatch(results: &Results) -> String {
    let mut out = String::from(
        "| what | `sbatch` alone | Slurm through the queue | this machine |\n| --- | ---: | ---: | ---: |\n",
    );
    for (what, unit, key) in DISPATCH {
        let of =
            |path_name: &str| format_number(figure(results, "dispatch", &format!("{path_name}.{key}")), unit);
        let _ = writeln!(out, "| {what} | {} | {} | {} |", of("sbatch"), of("slurm"), of("local"));
    }
    out + &render_origin(results, &["dispatch"])
}

fn render_containers(results: &Results) -> String {
    let mut out = String::from("| what | goal | measured | |\n| --- | ---: | ---: | --- |\n");
    for (what, unit, limit, key) in CONTAINERS {
        let value = figure(results, "containers", key);
        let _ = writeln!(
            out,
            "| {what} | {} | {} | {} |",
            format_goal(*limit, unit),
            format_number(value, unit),
            format_verdict(*limit, value)
        );
    }
    out + &render_origin(results, &["containers"])
}

fn render_load(results: &Results) -> String {
    let mut out =
        String::from("| what | goal | SQLite | | Postgres | |\n| --- | ---: | ---: | --- | ---: | --- |\n");
    for (what, unit, limit, key) in LOAD {
        let (sqlite, postgres) = (figure(results, "load-sqlite", key), figure(results, "load-postgres", key));
        let _ = writeln!(
            out,
            "| {what} | {} | {} | {} | {} | {} |",
            format_goal(*limit, unit),
            format_number(sqlite, unit),
            format_verdict(*limit, sqlite),
            format_number(postgres, unit),
            format_verdict(*limit, postgres)
        );
    }
    out + &render_origin(results, &["load-sqlite", "load-postgres"])
}

fn render_jobs(results: &Results) -> String {
    let mut out = String::from("| what | SkyPilot | windlass |\n| --- | ---: | ---: |\n");
    for (what, unit, key, theirs) in JOBS {
        let theirs = if theirs.is_empty() { "–" } else { theirs };
        let _ =
            writeln!(out, "| {what} | {theirs} | {} |", format_number(figure(results, "jobs", key), unit));
    }
    out + &render_origin(results, &["jobs"])
}

fn render_proxy(results: &Results) -> String {
    let mut out = String::from("| what | nginx | windlass |\n| --- | ---: | ---: |\n");
    for (what, unit, key) in PROXY {
        let of = |system: &str| format_number(figure(results, "proxy", &format!("{system}.{key}")), unit);
        let _ = writeln!(out, "| {what} | {} | {} |", of("nginx"), of("windlass"));
    }
    out.push_str("\n| what | goal | measured | |\n| --- | ---: | ---: | --- |\n");
    for (what, limit, key) in PROXY_GOALS {
        let value = figure(results, "proxy", key);
        let _ = writeln!(
            out,
            "| {what} | {} | {} | {} |",
            format_goal(*limit, ""),
            format_number(value, ""),
            format_verdict(*limit, value)
        );
    }
    out + &render_origin(results, &["proxy"])
}

fn render_pictures(results: &Results) -> String {
    let origin = render_origin(results, &["growth"]);
    if results.contains_key("growth") {
        format!("{PICTURES}{origin}")
    } else {
        origin.trim_start().to_owned()
    }
}

/// Time, machine and commit of these results.
fn render_origin(results: &Results, names: &[&str]) -> String {
    let mut out = String::new();
    for name in names {
        let Some(record) = results.get(*name) else {
            let _ = writeln!(out, "\n`{name}`: not measured yet.");
            continue;
        };
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        let machine = &record["machine"];
        let _ = writeln!(
            out,
            "\n`{name}`: {} UTC, commit {}, profile `{}`, {} cores ({}), {} GiB; load average before {}, after {}.",
            text(&record["date"]),
            text(&record["commit"]),
            text(&record["profile"]),
            machine["cores"],
            text(&machine["cpu"]),
            machine["memory_gib"].as_f64().unwrap_or_default(),
            record["load_average"]["before"][0],
            record["load_average"]["after"][0]
        );
    }
    out
}

fn format_number(value: Option<f64>, unit: &str) -> String {
    let Some(value) = value else { return "–".to_owned() };
    let digits = match value.abs() {
        size if size >= 100.0 || size == 0.0 => 0,
        size if size >= 10.0 => 1,
        _ => 2,
    };
    let text = format!("{value:.digits$}");
    let text = if text.contains('.') { text.trim_end_matches('0').trim_end_matches('.') } else { &text };
    let text = format_thousands(text);
    if unit.is_empty() { text } else { format!("{text} {unit}") }
}

fn format_thousands(text: &str) -> String {
    let (sign, digits) = text.strip_prefix('-').map_or(("", text), |rest| ("-", rest));
    if digits.contains('.') || digits.len() < 4 {
        return text.to_owned();
    }
    let mut out = String::new();
    for (at, digit) in digits.chars().enumerate() {
        if at > 0 && (digits.len() - at).is_multiple_of(3) {
            out.push(',');
        }
        out.push(digit);
    }
    format!("{sign}{out}")
}

fn format_goal(limit: Limit, unit: &str) -> String {
    match limit {
        Limit::AtMost(most) => format!("≤ {}", format_number(Some(most), unit)),
        Limit::AtLeast(least) => format!("≥ {}", format_number(Some(least), unit)),
        Limit::None => String::new(),
    }
}

fn format_verdict(limit: Limit, value: Option<f64>) -> &'static str {
    let holds = match (limit, value) {
        (Limit::None, _) | (_, None) => return "",
        (Limit::AtMost(most), Some(value)) => value <= most,
        (Limit::AtLeast(least), Some(value)) => value >= least,
    };
    if holds { "✓" } else { "**missed**" }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    const EMPTY: &str = "# P\n<!-- budget -->\nold\n<!-- end -->\ntext\n<!-- peer -->\n<!-- end -->\n\
                         <!-- dispatch -->\n<!-- end -->\n<!-- containers -->\n<!-- end -->\n<!-- load -->\n<!-- end -->\n<!-- jobs -->\n<!-- end -->\n\
                         <!-- growth -->\n<!-- end -->\n<!-- proxy -->\n<!-- end -->\n<!-- isolation -->\n<!-- end -->\n";

    fn results(figures: &Value) -> Results {
        let machine = json!({"cores": 2, "cpu": "a", "memory_gib": 24.0});
        let record = json!({"bench": "runs", "date": "2026-11-15 18:00", "commit": "abc", "profile": "sim",
            "machine": machine, "load_average": {"before": [0.1], "after": [2.0]}, "figures": figures});
        Results::from([("runs".to_owned(), record)])
    }

    #[test]
    fn report_compares_each_result_with_its_budget() {
        let page = fill_page(EMPTY, &results(&json!({"sqlite.running_ms": 12.34, "sqlite.done_ms": 170.0})))
            .unwrap();
        assert!(page.contains("| submit → running, agent instant | – | ≤ 50 ms | 12.3 ms | ✓ |"), "{page}");
        assert!(page.contains("| ≤ 150 ms | 170 ms | **missed** |"), "{page}");
        assert!(page.contains("`api`: not measured yet."), "{page}");
        assert!(!page.contains(".svg"), "{page}");
        assert!(page.contains("\ntext\n") && !page.contains("old"), "{page}");
    }

    #[test]
    fn unmeasured_managed_job_results_stay_empty_next_to_the_peer() {
        let page = fill_page(EMPTY, &Results::new()).unwrap();
        assert!(page.contains("| end of the program → SUCCEEDED, p50 | 14.0 s | – |"), "{page}");
        assert!(page.contains("`jobs`: not measured yet."), "{page}");
    }

    #[test]
    fn filling_the_report_twice_changes_nothing() {
        let results = results(&json!({"sqlite.running_ms": 1.0}));
        let once = fill_page(EMPTY, &results).unwrap();
        assert_eq!(fill_page(&once, &results).unwrap(), once);
    }

    #[test]
    fn a_report_page_without_a_required_part_is_rejected() {
        let error = fill_page("# nothing", &Results::new()).unwrap_err();
        assert!(format!("{error:#}").contains("no part `budget`"), "{error:#}");
    }

    #[test]
    fn numbers_are_rounded_and_have_thousands_separators() {
        let shown =
            [0.0, 0.123, 4.5, 12.34, 999.6, 1234.0, 1_234_567.0, -1500.0].map(|n| format_number(Some(n), ""));
        assert_eq!(shown, ["0", "0.12", "4.5", "12.3", "1,000", "1,234", "1,234,567", "-1,500"]);
    }
}
