//! Postgres: a few shared, pipelined connections, with writes committed in groups.

mod bind;
mod clock;
mod fault;
mod group;
mod listen;
mod query_plans;
mod session;
mod tls;
mod writer;

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use tokio::{sync::broadcast, time::Instant};

pub(super) use self::listen::ALL_PIPELINES;

use self::{
    clock::ClockWatch, group::ColumnTypes, session::SharedSession, tls::PostgresTarget,
    writer::PostgresWriter,
};
use super::{
    counters::Counters,
    error::DbError,
    migrate::{self, Dialect},
    unit::{Unit, WriteOutcome},
    value::{Row, Val},
};

/// Connections for reads; with those of the writer, the leases, the listener and housekeeping there are eight.
const READERS: usize = 4;
/// Any number works, as long as no other program uses the same advisory lock.
const MIGRATION_LOCK: i64 = 0x0077_696e_646c;
const HINTS_MAX: usize = 256;

/// Clock reading of a poll.
#[derive(Clone, Copy, Debug)]
pub(super) struct ClockReading {
    pub(super) now: i64,
    /// Version of the offset that the session carries.
    pub(super) version: i64,
    /// True if the session does not carry the current offset.
    pub(super) is_old: bool,
}

pub(super) struct Pool {
    readers: Vec<SharedSession>,
    next: AtomicUsize,
    /// For claims and heartbeats, so that they wait for no long read and no large commit.
    leases: SharedSession,
    writer: PostgresWriter,
    /// Session of the writer.
    commits: Arc<SharedSession>,
    watch: Arc<ClockWatch>,
    /// Name of this server in its messages to the others.
    name: String,
    hints: broadcast::Sender<String>,
    stop: broadcast::Sender<()>,
}

impl Pool {
    pub(super) async fn open(url: &str, counters: Arc<Counters>) -> Result<Self, DbError> {
        let mut target = configure(url)?;
        target.counters = counters;
        let leases = SharedSession::new(target.clone());
        migrate(&leases).await.map_err(|error| target.explain(error))?;
        let catalog = Arc::new(catalog(&leases).await?);
        let commits = Arc::new(SharedSession::new(target.clone()));
        let watch = Arc::new(ClockWatch::default());
        let (hints, _) = broadcast::channel(HINTS_MAX);
        let (stop, stopped) = broadcast::channel(1);
        let mut name = [0; 8];
        // Without a random number, hints of another such server are not received, which only delays.
        let _ = getrandom::fill(&mut name);
        let name = hex::encode(name);
        tokio::spawn(listen::serve(target.clone(), name.clone(), hints.clone(), stopped));
        tokio::spawn(query_plans::analyze_loop(SharedSession::new(target.clone()), stop.subscribe()));
        Ok(Self {
            readers: (0..READERS).map(|_| SharedSession::new(target.clone())).collect(),
            next: AtomicUsize::new(0),
            leases,
            writer: PostgresWriter::start(Arc::clone(&commits), Arc::clone(&watch), catalog),
            commits,
            watch,
            name,
            hints,
            stop,
        })
    }

    fn reader(&self) -> &SharedSession {
        &self.readers[self.next.fetch_add(1, Ordering::Relaxed) % self.readers.len()]
    }

    pub(super) async fn read(&self, sql: &str, params: &[Val]) -> Result<Vec<Row>, DbError> {
        let link = self.reader();
        match link.query("read", sql, params).await {
            // A dead connection is detected by using it; a read can be repeated.
            Err(DbError::Unavailable { .. }) => link.query("read", sql, params).await,
            outcome => outcome,
        }
    }

    pub(super) async fn write(&self, unit: Unit) -> Result<WriteOutcome, DbError> {
        self.writer.write(unit).await
    }

    /// Runs one statement as a separate transaction, on the connection for claims and heartbeats.
    pub(super) async fn lease(
        &self,
        what: &'static str,
        sql: &str,
        params: &[Val],
    ) -> Result<Vec<Row>, DbError> {
        self.leases.query(what, sql, params).await
    }

    /// Checks the time that a poll read, before it is used. `false`: the clock jumped and is corrected now, so poll
    /// again.
    pub(super) async fn check_clock(
        &self,
        requested: Instant,
        reported: ClockReading,
        ttl: Duration,
    ) -> Result<bool, DbError> {
        if reported.is_old {
            // Another server detected it, and times written here in the meantime are as wrong as there.
            self.watch.distrust(ttl);
            self.renew_sessions().await;
            return Ok(false);
        }
        let Some(jump) = self.watch.jump(requested, Instant::now(), reported.now) else { return Ok(true) };
        tracing::warn!(seconds = jump / 1_000_000, "database clock jumped");
        self.watch.distrust(ttl);
        self.lease("correct the clock", clock::CORRECT_JUMP, &[jump.into(), reported.version.into()]).await?;
        self.renew_sessions().await;
        Ok(false)
    }

    /// Corrected time, whether or not a jump is already subtracted.
    pub(super) async fn now(&self) -> Result<i64, DbError> {
        let start = Instant::now();
        let rows = self.read(clock::READ_CLOCK, &[]).await?;
        let row = rows.first().ok_or(DbError::Shape { column: 0, want: "a time", have: "nothing" })?;
        let now = row.int(0)?;
        Ok(now - self.watch.jump(start, Instant::now(), now).unwrap_or(0))
    }

    pub(super) fn watch(&self) -> &ClockWatch {
        &self.watch
    }

    /// Makes the next calls open new sessions, which carry the current offset.
    async fn renew_sessions(&self) {
        for link in self.readers.iter().chain([&self.leases, &*self.commits]) {
            link.renew().await;
        }
    }

    pub(super) async fn notify(&self, hints: &[&str]) -> Result<(), DbError> {
        let params = [listen::CHANNEL.into(), listen::write_message(&self.name, hints).into()];
        let sql = "SELECT 1 FROM pg_notify($1, $2)";
        self.reader().query("notify", sql, &params).await.map(drop)
    }

    pub(super) fn listen(&self) -> broadcast::Receiver<String> {
        self.hints.subscribe()
    }

    pub(super) async fn prepare(&self, sql: &str) -> Result<usize, DbError> {
        let session = self.reader().session("prepare").await?;
        let statement = session.prepare(sql).await.map_err(|error| fault::classify("prepare", sql, error))?;
        Ok(statement.params().len())
    }

    pub(super) async fn migrate_again(&self) -> Result<(), DbError> {
        migrate(&self.leases).await
    }

    pub(super) async fn setting(&self, name: &str) -> Result<Vec<Row>, DbError> {
        self.leases.query("read a setting", "SELECT current_setting($1)", &[name.into()]).await
    }

    pub(super) async fn close(&self) {
        self.writer.close().await;
        self.leases.shut().await;
        for reader in &self.readers {
            reader.shut().await;
        }
        let _ = self.stop.send(());
    }
}

fn configure(url: &str) -> Result<PostgresTarget, DbError> {
    let mut target = PostgresTarget::read(url, &|name| std::env::var(name).ok())?;
    let config = &mut target.config;
    if config.get_connect_timeout().is_none() {
        config.connect_timeout(Duration::from_secs(5));
    }
    // A database server that disappeared is detected within the duration of a lease, not within hours.
    if config.get_tcp_user_timeout().is_none() {
        config.tcp_user_timeout(Duration::from_secs(15));
    }
    config.keepalives_idle(Duration::from_secs(15));
    if config.get_application_name().is_none() {
        config.application_name("windlass");
    }
    Ok(target)
}

/// Runs all migrations in one transaction, one replica at a time.
async fn migrate(link: &SharedSession) -> Result<(), DbError> {
    let session = link.session("migrate").await?;
    let script = async |sql: &str| {
        session.client.batch_execute(sql).await.map_err(|error| fault::classify("migrate", sql, error))
    };
    script("BEGIN").await?;
    let inside = async {
        session.query("migrate", "SELECT 1 FROM pg_advisory_xact_lock($1)", &[MIGRATION_LOCK.into()]).await?;
        script(migrate::CREATE_JOURNAL).await?;
        let journal = session.query("migrate", migrate::READ, &[]).await?;
        for step in migrate::pending_steps(Dialect::Postgres, &journal)? {
            script(&step.script).await?;
            session.query("migrate", migrate::RECORD, &step.record).await?;
        }
        Ok(())
    };
    let done = inside.await;
    script(if done.is_ok() { "COMMIT" } else { "ROLLBACK" }).await?;
    done
}

async fn catalog(link: &SharedSession) -> Result<ColumnTypes, DbError> {
    let sql = "SELECT table_name::TEXT, column_name::TEXT, udt_name::TEXT FROM information_schema.columns \
               WHERE table_schema = current_schema()";
    let mut catalog = ColumnTypes::new();
    for row in link.query("read the catalogue", sql, &[]).await? {
        catalog.entry(row.text(0)?).or_default().insert(row.text(1)?, row.text(2)?);
    }
    Ok(catalog)
}
