//! Results of a benchmark: printed immediately, and stored as JSON for the performance page.

use std::{
    io::Write,
    path::{Path, PathBuf},
    process::Command,
    time::Duration,
};

use anyhow::{Context, Result, ensure};
use serde_json::{Map, Value, json};

/// Variable with the directory for results; `cargo xtask bench` sets one below `target`.
const RESULTS_VARIABLE: &str = "WINDLASS_BENCH_RESULTS";

/// The results of one benchmark.
pub struct BenchResults {
    bench: String,
    place: PathBuf,
    before: Value,
    figures: Map<String, Value>,
    series: Map<String, Value>,
    /// Prefix of the following keys, for example the database.
    prefix: String,
}

impl BenchResults {
    pub fn new(bench: &str) -> Result<Self> {
        Ok(Self {
            bench: bench.to_owned(),
            place: results_dir()?,
            before: load_average()?,
            figures: Map::new(),
            series: Map::new(),
            prefix: String::new(),
        })
    }

    /// Sets the prefix of the following keys, for example the database.
    pub fn about(&mut self, prefix: &str) {
        self.prefix = if prefix.is_empty() { String::new() } else { format!("{prefix}.") };
    }

    /// Prints a line without a figure.
    pub fn say(&mut self, line: &str) -> Result<()> {
        Ok(writeln!(std::io::stdout(), "{line}")?)
    }

    /// Stores a figure without printing it.
    pub fn put(&mut self, key: &str, value: f64) {
        let rounded = (value * 1e4).round() / 1e4;
        self.figures.insert(format!("{}{key}", self.prefix), rounded.into());
    }

    /// Returns the figure of a key.
    pub fn read(&self, key: &str) -> Option<f64> {
        self.figures.get(&format!("{}{key}", self.prefix))?.as_f64()
    }

    pub fn figure(&mut self, key: &str, what: &str, value: f64, unit: &str) -> Result<()> {
        self.put(key, value);
        let digits = if value.abs() >= 1000.0 { 0 } else { 2 };
        self.say(&format!("{:<48} {value:>10.digits$} {unit}", format!("  {what}")))
    }

    /// Records the median of the samples, with minimum and maximum.
    pub fn times(&mut self, key: &str, what: &str, taken: &mut [Duration]) -> Result<()> {
        ensure!(!taken.is_empty(), "nothing was measured for `{what}`");
        taken.sort();
        let ms = |at: usize| taken[at].as_secs_f64() * 1e3;
        let middle = ms(taken.len() / 2);
        self.put(&format!("{key}_ms"), middle);
        let (least, most) = (ms(0), ms(taken.len() - 1));
        self.say(&format!("{:<48} {middle:>10.1} ms   ({least:.1} to {most:.1})", format!("  {what}")))
    }

    /// Records p50 and p99 of the samples.
    pub fn spread(&mut self, key: &str, what: &str, taken: &mut [Duration]) -> Result<()> {
        ensure!(!taken.is_empty(), "nothing was measured for `{what}`");
        taken.sort();
        let ms = |part: f64| percentile(taken, part).as_secs_f64() * 1e3;
        let (p50, p99, most) = (ms(0.5), ms(0.99), ms(1.0));
        self.put(&format!("{key}_p50_ms"), p50);
        self.put(&format!("{key}_p99_ms"), p99);
        self.put(&format!("{key}_count"), taken.len() as f64);
        self.say(&format!(
            "{:<34} p50 {p50:>9.1} ms   p99 {p99:>9.1} ms   max {most:>9.1} ms   ({} samples)",
            format!("  {what}"),
            taken.len()
        ))
    }

    /// Adds a point to a curve: `key` over `x`.
    pub fn point(&mut self, key: &str, x: f64, y: f64) {
        let points = self.series.entry(key).or_insert_with(|| json!([]));
        if let Some(points) = points.as_array_mut() {
            points.push(json!([x, (y * 1e4).round() / 1e4]));
        }
    }

    /// Writes the file and prints its path.
    pub fn save(self) -> Result<PathBuf> {
        let args: Vec<String> = std::env::args().skip(2).collect();
        let record = json!({
            "bench": self.bench,
            "args": args.join(" "),
            "date": command_stdout(Command::new("date").args(["-u", "+%Y-%m-%d %H:%M"]))?,
            "commit": command_stdout(Command::new("git").args(["-c", "safe.directory=*", "describe", "--always", "--dirty"]))
                .unwrap_or_default(),
            "profile": cargo_profile()?,
            "machine": machine_info()?,
            "load_average": {"before": self.before, "after": load_average()?},
            "figures": self.figures,
            "series": self.series,
        });
        std::fs::create_dir_all(&self.place)?;
        let path = self.place.join(format!("{}.json", self.bench));
        std::fs::write(&path, serde_json::to_string_pretty(&record)? + "\n")?;
        writeln!(std::io::stderr(), "results: {}", path.display())?;
        Ok(path)
    }
}

/// Directory of the results.
pub fn results_dir() -> Result<PathBuf> {
    Ok(match std::env::var_os(RESULTS_VARIABLE) {
        Some(path) => PathBuf::from(path),
        None => std::env::current_exe()?.with_file_name("bench-results"),
    })
}

pub fn percentile(sorted: &[Duration], part: f64) -> Duration {
    sorted[((sorted.len() - 1) as f64 * part) as usize]
}

/// Name of the cargo profile directory that contains this program.
fn cargo_profile() -> Result<String> {
    let program = std::env::current_exe()?;
    let name = program.parent().and_then(Path::file_name).context("the program has no parent directory")?;
    Ok(name.to_string_lossy().into_owned())
}

fn machine_info() -> Result<Value> {
    let cpus = std::fs::read_to_string("/proc/cpuinfo")?;
    let model = cpus.lines().find_map(|line| line.strip_prefix("model name")?.split_once(": "));
    let memory = std::fs::read_to_string("/proc/meminfo")?;
    let kb: f64 = memory.split_whitespace().nth(1).context("/proc/meminfo has no memory size")?.parse()?;
    Ok(json!({
        "cores": std::thread::available_parallelism()?.get(),
        "cpu": model.map_or("unknown", |(_, name)| name.trim()),
        "memory_gib": (kb / 1024.0 / 1024.0).round(),
        "kernel": command_stdout(Command::new("uname").arg("-r"))?,
    }))
}

fn load_average() -> Result<Value> {
    let text = std::fs::read_to_string("/proc/loadavg")?;
    let parts = text.split_whitespace().take(3).map(str::parse::<f64>);
    Ok(parts.collect::<Result<Vec<_>, _>>()?.into())
}

fn command_stdout(command: &mut Command) -> Result<String> {
    let output = command.output().with_context(|| format!("failed to start {:?}", command.get_program()))?;
    ensure!(output.status.success(), "{command:?} failed: {}", String::from_utf8_lossy(&output.stderr));
    Ok(String::from_utf8(output.stdout)?.trim().to_owned())
}
