//! Benchmarks. Timings live here and not in tests; what is compared is measured in one run.

pub mod agent;
pub mod api;
pub mod cli;
pub mod closed;
pub mod dispatch;
pub mod engine;
pub mod flags;
pub mod growth;
pub mod hosts;
pub mod jobs;
pub mod load;
pub mod open;
pub mod peer;
pub mod plot;
pub mod process;
pub mod proxy;
pub mod report;
pub mod runs;
pub mod sheet;
pub mod spot;

use std::path::PathBuf;

use anyhow::{Context, Result, bail};

use self::flags::Flags;

/// A directory that goes when it is dropped.
pub struct Scratch(PathBuf);

impl Scratch {
    pub fn new(name: &str) -> Result<Self> {
        let path = std::env::temp_dir().join(format!("windlass-bench-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&path).context("make a scratch directory")?;
        Ok(Self(path))
    }

    pub fn path(&self) -> &std::path::Path {
        &self.0
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        // What is left behind lies in the system's own temporary directory.
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// What `--db` asks for: `None` is SQLite. `url` is that of the Postgres that is there.
fn postgres_of(flags: &mut Flags, url: Option<String>) -> Result<Option<String>> {
    let database = flags.value::<String>("--db")?.unwrap_or_else(|| "sqlite".to_owned());
    match (database.as_str(), url) {
        ("sqlite", _) => Ok(None),
        ("postgres", Some(url)) => Ok(Some(url)),
        ("postgres", None) => bail!("no Postgres: WINDLASS_BENCH_DATABASE_URL is not set"),
        (other, _) => bail!("`--db {other}`: want sqlite or postgres"),
    }
}
