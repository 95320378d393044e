//! Rows claimed and applied per second without work in between, compared with a bare loop on the same database in the
//! same run.

use std::{
    io::Write,
    sync::Arc,
    time::{Duration, Instant},
};

use anyhow::{Context, Result};
use uuid::Uuid;
use windlass_engine::{ApplyOutcome, DbTime, Engine, Hints, Lease, Pipeline, Queue, Settings};
use windlass_server::db::{Change, DatabaseUrl, Db, DbError, Unit, Val, WriteOutcome};

use windlass_testkit::temp_dir;

const ROWS: usize = 10_000;
const DURATION: Duration = Duration::from_secs(4);
const BATCH: usize = 256;
const QUEUE: Queue = Queue { pipeline: "bench", table: "fleets", statuses: &["active"] };

/// Prints a table for SQLite, and for Postgres if `postgres` is set.
pub async fn run(postgres: Option<String>) -> Result<()> {
    let scratch = temp_dir("engine")?;
    let file = scratch.path().join("engine.db");
    let sqlite = format!("sqlite:{}", file.display());
    insert_rows(&sqlite).await?;
    measure("SQLite", &sqlite, measure_raw_sqlite(&file)?).await?;
    match postgres {
        Some(url) => {
            insert_rows(&url).await?;
            measure("Postgres", &url, measure_raw_postgres(&url).await?).await
        }
        None => {
            writeln!(std::io::stdout(), "Postgres: not measured, no database configured")?;
            Ok(())
        }
    }
}

async fn measure(name: &str, url: &str, raw: f64) -> Result<()> {
    let db = Db::open(&url.parse::<DatabaseUrl>()?).await?;
    let unchanged = measure_once(&db, NoopPipeline { db: db.clone(), writes: false }).await?;
    let written = measure_once(&db, NoopPipeline { db: db.clone(), writes: true }).await?;
    db.close().await;
    let mut out = std::io::stdout();
    writeln!(out, "{name}, {ROWS} rows of a real table: rows claimed and applied per second")?;
    writeln!(out, "  bare loop, {BATCH} rows per claim and per apply  {raw:>9.0}")?;
    writeln!(
        out,
        "  engine, nothing to write                  {unchanged:>9.0}  {:>5.2} of bare",
        unchanged / raw
    )?;
    writeln!(
        out,
        "  engine, a guarded write for each row      {written:>9.0}  {:>5.2} of bare",
        written / raw
    )?;
    Ok(())
}

/// Inserts rows into a real table with the real indexes.
async fn insert_rows(url: &str) -> Result<()> {
    let db = Db::open(&url.parse::<DatabaseUrl>()?).await?;
    let (user, project) = (db.new_id()?, db.new_id()?);
    let insert = |table, values| Change::Insert { table, values };
    let mut unit = Unit::new().and([
        insert(
            "users",
            vec![
                ("id", user.into()),
                ("name", format!("bench-{user}").into()),
                ("global_role", "user".into()),
                ("created_at", Val::Now),
            ],
        ),
        insert(
            "projects",
            vec![
                ("id", project.into()),
                ("name", format!("bench-{project}").into()),
                ("owner_id", user.into()),
                ("created_at", Val::Now),
            ],
        ),
    ]);
    for n in 0..ROWS {
        let row = vec![
            ("id", db.new_id()?.into()),
            ("project_id", project.into()),
            ("name", format!("row-{n}").into()),
            ("spec", "x".repeat(500).into()),
            ("status", "active".into()),
            ("created_at", Val::Now),
            ("last_processed_at", Val::Now),
        ];
        unit = unit.and([insert("fleets", row)]);
    }
    db.write(unit).await?.done()?;
    db.close().await;
    Ok(())
}

async fn measure_once(db: &Db, pipeline: NoopPipeline) -> Result<f64> {
    let mut engine = Engine::new(Arc::new(db.clone()), Hints::new());
    let settings = Settings {
        workers: 512,
        queue_len_max: 2_048,
        queue_len_min: 1_024,
        claim_max: 512,
        ..Settings::standard(1)
    };
    engine.spawn(pipeline, settings);
    let applied = || engine.status().first().map_or(0, |s| s.totals.applied);
    tokio::time::sleep(Duration::from_millis(500)).await;
    let (started, before) = (Instant::now(), applied());
    tokio::time::sleep(DURATION).await;
    let rate = (applied() - before) as f64 / started.elapsed().as_secs_f64();
    engine.stop(Duration::from_secs(2)).await;
    Ok(rate)
}

/// A pipeline without work: either nothing to write, or one guarded write.
struct NoopPipeline {
    db: Db,
    writes: bool,
}

impl Pipeline for NoopPipeline {
    type Row = ();
    type Observation = ();
    type Plan = ();
    type Error = DbError;

    fn queue(&self) -> Queue {
        QUEUE
    }
    async fn load(&self, _: &Lease) -> Result<Option<()>, DbError> {
        Ok(Some(()))
    }
    async fn observe(&self, _: &Lease, (): &()) -> Result<(), DbError> {
        Ok(())
    }
    fn decide((): &(), (): (), _: DbTime) {}
    async fn act(&self, _: &Lease, (): &(), (): &mut ()) -> Result<(), DbError> {
        Ok(())
    }
    async fn apply(&self, lease: &Lease, (): (), (): ()) -> Result<ApplyOutcome, DbError> {
        if !self.writes {
            return Ok(ApplyOutcome::Unchanged { due_in: None });
        }
        let unit = Unit::apply("fleets", lease.key(), None, vec![("status_message", "seen".into())]);
        Ok(match self.db.write(unit).await? {
            WriteOutcome::Done { .. } => ApplyOutcome::Written { due_in_us: Some(0), wake: vec![] },
            WriteOutcome::Stale { .. } => ApplyOutcome::LeaseLost,
        })
    }
}

/// One connection, no threads, one token for all, rows in the engine's order: the limit of the database for this table.
fn measure_raw_sqlite(path: &std::path::Path) -> Result<f64> {
    let connection = rusqlite::Connection::open(path)?;
    let pragmas = "PRAGMA journal_mode = WAL; PRAGMA synchronous = FULL; PRAGMA cache_size = -65536;
        PRAGMA wal_autocheckpoint = 8000";
    connection.execute_batch(pragmas)?;
    let (started, mut rows) = (Instant::now(), 0);
    let mut now = 1_i64;
    while started.elapsed() < DURATION {
        now += 1;
        let mut claim = connection.prepare_cached(
            "UPDATE fleets SET lock_token = ?1, lock_expires_at = ?2, lock_epoch = lock_epoch + 1 WHERE id IN
             (SELECT id FROM fleets WHERE lock_token IS NULL AND NOT finished AND status = 'active'
              ORDER BY last_processed_at, id LIMIT ?3) RETURNING id",
        )?;
        let token = Uuid::from_u128(now as u128).to_string();
        let ids: Vec<String> =
            claim.query_map((&token, now, BATCH as i64), |row| row.get(0))?.collect::<Result<_, _>>()?;
        let list = serde_json::to_string(&ids)?;
        rows += connection
            .prepare_cached(
                "UPDATE fleets SET lock_token = NULL, lock_expires_at = NULL, last_processed_at = ?1
                 WHERE lock_token = ?2 AND id IN (SELECT value FROM json_each(?3))",
            )?
            .execute((now, &token, &list))?;
    }
    Ok(rows as f64 / started.elapsed().as_secs_f64())
}

async fn measure_raw_postgres(url: &str) -> Result<f64> {
    let (client, connection) =
        tokio_postgres::connect(url, tokio_postgres::NoTls).await.context("connect")?;
    let connection = tokio::spawn(connection);
    let claim = client
        .prepare(
            "WITH c AS MATERIALIZED (SELECT id FROM fleets WHERE lock_token IS NULL AND NOT finished
             AND status = 'active' ORDER BY last_processed_at, id LIMIT $3 FOR UPDATE SKIP LOCKED)
             UPDATE fleets SET lock_token = $1, lock_expires_at = $2, lock_epoch = lock_epoch + 1
             FROM c WHERE fleets.id = c.id RETURNING fleets.id",
        )
        .await?;
    let apply = client
        .prepare(
            "UPDATE fleets SET lock_token = NULL, lock_expires_at = NULL, last_processed_at = $1
             FROM unnest($3::TEXT[]) AS v (id) WHERE fleets.id = v.id AND lock_token = $2",
        )
        .await?;
    let (started, mut rows) = (Instant::now(), 0);
    let mut now = 1_i64;
    while started.elapsed() < DURATION {
        now += 1;
        let token = Uuid::from_u128(now as u128).to_string();
        let taken = client.query(&claim, &[&token, &now, &i64::try_from(BATCH)?]).await?;
        let ids: Vec<String> = taken.iter().map(|row| row.get(0)).collect();
        rows += client.execute(&apply, &[&now, &token, &ids]).await?;
    }
    drop(client);
    connection.await??;
    Ok(rows as f64 / started.elapsed().as_secs_f64())
}
