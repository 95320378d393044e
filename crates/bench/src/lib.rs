//! Benchmarks. Timings belong here and not in tests; figures that are compared are measured in one run.

pub mod agent;
pub mod api;
pub mod cli;
pub mod cost;
pub mod dispatch;
pub mod engine;
pub mod flags;
pub mod growth;
pub mod jobs;
pub mod load;
pub mod open_loop;
pub mod peer;
pub mod plot;
pub mod proxy;
pub mod reclaim;
pub mod report;
pub mod results;
pub mod runs;
pub mod sharing;
pub mod spot;

use anyhow::{Result, bail};

use self::flags::Flags;

/// Returns the database of `--db`: `None` is SQLite. `url` is that of the available Postgres.
fn postgres_url(flags: &mut Flags, url: Option<String>) -> Result<Option<String>> {
    let database = flags.value::<String>("--db")?.unwrap_or_else(|| "sqlite".to_owned());
    match (database.as_str(), url) {
        ("sqlite", _) => Ok(None),
        ("postgres", Some(url)) => Ok(Some(url)),
        ("postgres", None) => bail!("no Postgres: WINDLASS_BENCH_DATABASE_URL is not set"),
        (other, _) => bail!("invalid `--db` value `{other}`: expected `sqlite` or `postgres`"),
    }
}
