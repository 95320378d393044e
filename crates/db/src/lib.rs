//! All SQL, behind one thin facade for SQLite and Postgres.
//!
//! A write is a `Unit`: data, not a closure. It is passed as a whole, committed together with many others (group
//! commit), and acknowledged after the commit. So no transaction can be open across a network call: code outside this
//! crate never sees one.
//!
//! One SQL text serves both databases. What they share, beyond the obvious: `$1…$n` parameters; `now_us()`, the
//! database's time in microseconds, one per unit; `new_uuid()`; `IN (SELECT value FROM json_each(CAST($1 AS TEXT)))`
//! with `Val::list` for lists; TEXT, BIGINT, BOOLEAN, DOUBLE PRECISION and BYTEA columns. On Postgres `sum()` of BIGINT
//! is NUMERIC: cast it.
//!
//! Functions of the table files that change something return a `Change` for `Unit::and`; add a new one to its table
//! file, with its SQL in that file's `statements!`.

pub mod agents;
pub mod backends;
pub mod backup;
pub mod budgets;
pub mod changes;
mod clock;
pub mod containers;
pub mod costs;
mod counters;
pub mod dispatchers;
pub mod documents;
pub mod encrypted_columns;
mod error;
pub mod events;
pub mod explanations;
pub mod exports;
#[cfg(feature = "testing")]
mod fault_hook;
mod filter;
pub mod fleets;
pub mod gateways;
pub mod identities;
mod ids;
pub mod instance_queue;
pub mod instances;
pub mod invariant_queries;
pub mod job_metrics;
pub mod jobs;
mod lease_sql;
mod leases;
pub mod managed_jobs;
mod migrate;
pub mod overview;
pub mod pipeline_rows;
mod postgres;
pub mod projects;
pub mod queue_list;
pub mod queue_rank;
pub mod queue_tokens;
pub mod queue_usage;
pub mod quotas;
mod record;
pub mod registry_passwords;
pub mod repos;
pub mod retention;
pub mod run_rows;
pub mod runs;
pub mod secrets;
pub mod series;
pub mod service_replicas;
pub mod sessions;
mod sqlite;
pub mod tokens;
pub mod unit;
pub mod usage;
pub mod users;
pub mod value;
pub mod volumes;

use std::{
    borrow::Cow,
    path::{Path, PathBuf},
    sync::Arc,
};

use uuid::Uuid;

#[cfg(feature = "testing")]
pub use self::fault_hook::{FaultHook, HookFuture};
use self::{counters::Counters, ids::Ids};
pub use self::{
    counters::DbCounts,
    error::DbError,
    filter::{Page, TieOrder},
    migrate::{Dialect, MigrateError},
    unit::{Change, Expect, Guard, Unit, Values, WriteOutcome},
    value::{Row, Val},
};

/// The database. Cheap to clone; every clone is the same database.
#[derive(Clone)]
pub struct Db {
    store: Arc<Store>,
    ids: Ids,
    counters: Arc<Counters>,
    #[cfg(feature = "testing")]
    fault_hook: Option<Arc<dyn FaultHook>>,
    /// Kept open so that a listener on SQLite waits instead of receiving an end.
    silence: tokio::sync::broadcast::Sender<String>,
}

enum Store {
    File(sqlite::SqliteFile),
    Inline(sqlite::InlineSqlite),
    Postgres(Box<postgres::Pool>),
}

/// `sqlite:PATH` or `postgres://…`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DatabaseUrl {
    Sqlite(PathBuf),
    Postgres(String),
}

impl std::str::FromStr for DatabaseUrl {
    type Err = DbError;

    fn from_str(text: &str) -> Result<Self, DbError> {
        if let Some(path) = text.strip_prefix("sqlite:")
            && !path.is_empty()
        {
            // Other tools write an absolute path as `sqlite:///var/x`.
            return Ok(Self::Sqlite(PathBuf::from(path.strip_prefix("//").unwrap_or(path))));
        }
        if text.starts_with("postgres://") || text.starts_with("postgresql://") {
            return Ok(Self::Postgres(text.to_owned()));
        }
        Err(DbError::Url { url: text.split('@').next_back().unwrap_or_default().to_owned() })
    }
}

impl Db {
    /// Received instead of a pipeline's name when notifications may have been missed.
    pub const EVERYTHING: &'static str = postgres::ALL_PIPELINES;

    /// Opens the database and migrates its schema.
    pub async fn open(url: &DatabaseUrl) -> Result<Self, DbError> {
        match url {
            DatabaseUrl::Sqlite(path) => Self::open_sqlite(path),
            DatabaseUrl::Postgres(url) => {
                let counters = Arc::<Counters>::default();
                let pool = postgres::Pool::open(url, Arc::clone(&counters)).await?;
                Ok(Self::of(Store::Postgres(Box::new(pool)), Ids::system(), counters))
            }
        }
    }

    fn open_sqlite(path: &Path) -> Result<Self, DbError> {
        let counters = Arc::<Counters>::default();
        let file = sqlite::SqliteFile::open(path, Ids::system(), Arc::clone(&counters))?;
        Ok(Self::of(Store::File(file), Ids::system(), counters))
    }

    /// Opens a database in memory, without threads, on the given clock (microseconds) and with ids from a seed: for the
    /// simulation. Replicas are clones of the handle.
    pub fn open_inline(clock: Arc<dyn Fn() -> i64 + Send + Sync>, seed: u64) -> Result<Self, DbError> {
        let ids = Ids::seeded(seed);
        Ok(Self::of(Store::Inline(sqlite::InlineSqlite::open(clock, ids.clone())?), ids, Arc::default()))
    }

    fn of(store: Store, ids: Ids, counters: Arc<Counters>) -> Self {
        let (silence, _) = tokio::sync::broadcast::channel(1);
        Self {
            store: Arc::new(store),
            ids,
            counters,
            silence,
            #[cfg(feature = "testing")]
            fault_hook: None,
        }
    }

    /// Returns the same database with these faults around every call.
    #[cfg(feature = "testing")]
    #[must_use]
    pub fn with_fault_hook(&self, fault_hook: Arc<dyn FaultHook>) -> Self {
        Self { fault_hook: Some(fault_hook), ..self.clone() }
    }

    pub fn dialect(&self) -> Dialect {
        match &*self.store {
            Store::File(_) | Store::Inline(_) => Dialect::Sqlite,
            Store::Postgres(_) => Dialect::Postgres,
        }
    }

    /// Counts of what this process asked of the database; not of one in memory.
    pub fn counts(&self) -> DbCounts {
        self.counters.counts()
    }

    /// Returns a new UUIDv4.
    pub fn new_id(&self) -> Result<Uuid, DbError> {
        self.ids.generate()
    }

    /// Returns a new UUIDv4 that sorts after all earlier ones from this function: for rows that are read in the order
    /// of their insertion.
    pub fn next_id(&self) -> Result<Uuid, DbError> {
        self.ids.generate_ordered()
    }

    /// Reads rows. Sees every write that was acknowledged before the call.
    pub async fn query(
        &self,
        sql: impl Into<Cow<'static, str>>,
        params: Vec<Val>,
    ) -> Result<Vec<Row>, DbError> {
        self.before("query").await?;
        let sql = sql.into();
        let rows = match &*self.store {
            Store::File(file) => file.read(sql.into_owned(), params).await,
            Store::Inline(inline) => inline.read(&sql, &params),
            Store::Postgres(pool) => pool.read(&sql, &params).await,
        };
        self.after("query").await?;
        rows
    }

    /// Reads the first row, if there is one.
    pub async fn query_opt(
        &self,
        sql: impl Into<Cow<'static, str>>,
        params: Vec<Val>,
    ) -> Result<Option<Row>, DbError> {
        Ok(self.query(sql, params).await?.into_iter().next())
    }

    /// For tests: query plan of a statement.
    async fn explain(&self, sql: &str, params: Vec<Val>) -> Result<String, DbError> {
        let how = match self.dialect() {
            Dialect::Sqlite => "EXPLAIN QUERY PLAN",
            Dialect::Postgres => "EXPLAIN",
        };
        let rows = self.query(format!("{how} {sql}"), params).await?;
        let line = |row: &Row| {
            row.0.iter().rev().find_map(|value| match value {
                Val::Text(text) => Some(text.clone()),
                Val::Null
                | Val::Bool(_)
                | Val::Int(_)
                | Val::Real(_)
                | Val::Bytes(_)
                | Val::Now
                | Val::NowPlus(_) => None,
            })
        };
        Ok(rows.iter().filter_map(line).collect::<Vec<_>>().join("\n"))
    }

    /// Current time of the database.
    pub async fn now(&self) -> Result<windlass_model::time::Timestamp, DbError> {
        if let Store::File(file) = &*self.store {
            return Ok(windlass_model::time::Timestamp(file.now()));
        }
        if let Store::Postgres(pool) = &*self.store {
            self.before("query").await?;
            let now = pool.now().await;
            self.after("query").await?;
            return now.map(windlass_model::time::Timestamp);
        }
        let row = self.query_opt("SELECT now_us()", vec![]).await?;
        row.ok_or(DbError::Shape { column: 0, want: "a time", have: "nothing" })?.time(0)
    }

    /// Writes all of the unit, or nothing. Returns after the commit.
    pub async fn write(&self, unit: Unit) -> Result<WriteOutcome, DbError> {
        self.write_as("write", unit).await
    }

    async fn write_as(&self, what: &'static str, unit: Unit) -> Result<WriteOutcome, DbError> {
        self.before(what).await?;
        let written = match &*self.store {
            Store::File(file) => file.write(unit).await,
            Store::Inline(inline) => inline.write(&unit),
            Store::Postgres(pool) => pool.write(unit).await,
        };
        self.after(what).await?;
        written
    }

    async fn before(&self, what: &'static str) -> Result<(), DbError> {
        #[cfg(feature = "testing")]
        if let Some(fault_hook) = &self.fault_hook {
            return fault_hook.before(what).await;
        }
        let _ = what;
        Ok(())
    }

    async fn after(&self, what: &'static str) -> Result<(), DbError> {
        #[cfg(feature = "testing")]
        if let Some(fault_hook) = &self.fault_hook {
            return fault_hook.after(what).await;
        }
        let _ = what;
        Ok(())
    }

    /// Commits queued writes and closes the file or the connections. Later calls fail.
    pub async fn close(&self) {
        match &*self.store {
            Store::File(file) => file.close().await,
            Store::Inline(_) => {}
            Store::Postgres(pool) => pool.close().await,
        }
    }

    /// Notifies the other replicas that these pipelines have work. There are none on SQLite.
    pub async fn notify(&self, pipelines: &[&str]) -> Result<(), DbError> {
        match &*self.store {
            Store::File(_) | Store::Inline(_) => Ok(()),
            Store::Postgres(pool) => {
                self.counters.count_notification();
                pool.notify(pipelines).await
            }
        }
    }

    /// Subscribes to `notify` of the other replicas; yields [`Db::EVERYTHING`] after a time without a
    /// connection. Never yields anything on SQLite.
    pub fn listen(&self) -> tokio::sync::broadcast::Receiver<String> {
        match &*self.store {
            Store::File(_) | Store::Inline(_) => self.silence.subscribe(),
            Store::Postgres(pool) => pool.listen(),
        }
    }

    /// For tests: checks that the text compiles here, and returns its number of parameters.
    pub async fn prepare(&self, sql: &str) -> Result<usize, DbError> {
        match &*self.store {
            Store::File(file) => file.prepare(sql.to_owned()).await,
            Store::Inline(inline) => inline.prepare(sql),
            Store::Postgres(pool) => pool.prepare(sql).await,
        }
    }

    /// For tests: runs the migrations of the schema again.
    pub async fn migrate_again(&self) -> Result<(), DbError> {
        match &*self.store {
            Store::File(file) => file.migrate_again().await,
            Store::Inline(inline) => inline.migrate_again(),
            Store::Postgres(pool) => pool.migrate_again().await,
        }
    }

    /// For tests: a setting of the connection that writes.
    pub async fn setting(&self, name: &'static str) -> Result<String, DbError> {
        let rows = match &*self.store {
            Store::File(file) => file.pragma(name).await?,
            Store::Inline(inline) => inline.read(&format!("PRAGMA {name}"), &[])?,
            Store::Postgres(pool) => pool.setting(name).await?,
        };
        let first = rows.first().ok_or(DbError::Shape { column: 0, want: "a setting", have: "nothing" })?;
        first.text(0).or_else(|_| first.int(0).map(|number| number.to_string()))
    }
}

/// Every fixed statement of the table files, for the test that prepares them on both databases.
pub fn statements() -> Vec<&'static str> {
    [
        agents::statements(),
        backends::statements(),
        budgets::statements(),
        changes::statements(),
        containers::statements(),
        costs::statements(),
        dispatchers::statements(),
        explanations::statements(),
        exports::statements(),
        quotas::statements(),
        fleets::statements(),
        gateways::statements(),
        instance_queue::statements(),
        instances::statements(),
        job_metrics::statements(),
        jobs::statements(),
        managed_jobs::statements(),
        overview::statements(),
        pipeline_rows::statements(),
        series::statements(),
        service_replicas::statements(),
        queue_tokens::statements(),
        queue_usage::statements(),
        repos::statements(),
        retention::statements(),
        run_rows::statements(),
        runs::statements(),
        secrets::statements(),
        sessions::statements(),
        usage::statements(),
        volumes::statements(),
    ]
    .concat()
}

impl std::fmt::Debug for Db {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Db").field("dialect", &self.dialect()).finish_non_exhaustive()
    }
}
