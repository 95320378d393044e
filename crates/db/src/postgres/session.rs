//! A connection with its prepared statements, and a shared handle that reconnects when it breaks.

use std::{
    collections::HashMap,
    future::Future,
    pin::pin,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use parking_lot::Mutex;
use tokio::time::{Instant, sleep, timeout};
use tokio_postgres::{Client, Statement, error::SqlState, types::ToSql};

use super::{
    bind::{Bind, read_row},
    clock::SESSION_OFFSET,
    fault::{classify, is_lost},
    query_plans,
    tls::{self, MakeTls, PostgresTarget},
};
use crate::{
    counters::Counters,
    error::DbError,
    value::{Row, Val},
};

/// Every commit is on disk before it is acknowledged, regardless of the server's default. A holder that freezes in the
/// middle of a transaction releases its row locks. A table is not scanned because it was small when the statement was
/// planned.
pub(super) const SETTINGS: &str = "SET synchronous_commit = on; SET jit = off; SET enable_seqscan = off; \
    SET TIME ZONE 'UTC'; \
    SET default_transaction_isolation = 'read committed'; \
    SET idle_in_transaction_session_timeout = '20s'; SET statement_timeout = '60s'";

/// Delays between attempts to connect, before the caller gets an error.
const CONNECT_DELAYS_MS: [u64; 5] = [0, 50, 150, 400, 1000];
/// Time after a failure in which callers get the same error without another attempt.
const FAILURE_TTL: Duration = Duration::from_millis(500);

/// A session without a response for this long is waiting for a lock; no statement takes that long by itself.
const SILENCE_TIMEOUT: Duration = Duration::from_secs(8);
/// Timeout of cancelling a statement, which is one message.
const CANCEL_TIMEOUT: Duration = Duration::from_secs(2);

pub(super) struct Session {
    pub(super) client: Client,
    /// For cancelling a statement, which needs a separate connection.
    tls: MakeTls,
    statements: Mutex<HashMap<String, Statement>>,
    counters: Arc<Counters>,
    /// Incremented with each response.
    answers: AtomicU64,
}

impl Session {
    async fn open(target: &PostgresTarget) -> Result<Self, tokio_postgres::Error> {
        let (client, connection) = target.config.connect(target.tls.clone()).await?;
        tokio::spawn(async move {
            if let Err(error) = connection.await {
                tracing::debug!(%error, "database connection ended");
            }
        });
        client.batch_execute(SETTINGS).await?;
        match client.batch_execute(SESSION_OFFSET).await {
            // The table does not exist before the first migrations have run.
            Err(error) if error.code() == Some(&SqlState::UNDEFINED_TABLE) => {}
            carried => carried?,
        }
        let (tls, counters) = (target.tls.clone(), Arc::clone(&target.counters));
        Ok(Self { client, tls, counters, statements: Mutex::default(), answers: AtomicU64::new(0) })
    }

    pub(super) async fn prepare(&self, sql: &str) -> Result<Statement, tokio_postgres::Error> {
        if let Some(statement) = self.statements.lock().get(sql) {
            return Ok(statement.clone());
        }
        let statement = self.client.prepare(&query_plans::lists_as_arrays(sql)).await?;
        self.answers.fetch_add(1, Ordering::Relaxed);
        self.statements.lock().insert(sql.to_owned(), statement.clone());
        Ok(statement)
    }

    /// Returns the rows and the number of affected rows.
    pub(super) async fn run(
        &self,
        statement: &Statement,
        params: &[&(dyn ToSql + Sync)],
    ) -> Result<(Vec<tokio_postgres::Row>, u64), tokio_postgres::Error> {
        use futures_util::{TryStreamExt, pin_mut};
        let stream = self.client.query_raw(statement, params.iter().copied()).await?;
        pin_mut!(stream);
        let mut rows = Vec::new();
        while let Some(row) = stream.try_next().await? {
            rows.push(row);
        }
        self.answers.fetch_add(1, Ordering::Relaxed);
        self.counters.count_statements(1, rows.len());
        let touched = stream.rows_affected().unwrap_or_default();
        Ok((rows, touched))
    }

    /// Counts the commit of a transaction, with the statements that open and end it.
    pub(super) fn count_commit(&self) {
        self.counters.count_commit();
        self.counters.count_statements(2, 0);
    }

    /// Runs the work, and cancels statements that wait too long. Postgres detects deadlocks by a timer that follows the
    /// wall clock: after that was set back, two transactions would wait for each other for as long as it was set back.
    pub(super) async fn cancel_if_stuck<T>(&self, work: impl Future<Output = T>) -> T {
        self.with_silence_timeout(SILENCE_TIMEOUT, work).await
    }

    async fn with_silence_timeout<T>(&self, longest: Duration, work: impl Future<Output = T>) -> T {
        let mut work = pin!(work);
        loop {
            let received = self.answers.load(Ordering::Relaxed);
            if let Ok(done) = timeout(longest, &mut work).await {
                return done;
            }
            if self.answers.load(Ordering::Relaxed) == received {
                tracing::warn!("statement waited too long for a lock and is cancelled");
                let token = self.client.cancel_token();
                let given_up = token.cancel_query(self.tls.clone());
                let _ = timeout(CANCEL_TIMEOUT, given_up).await;
            }
        }
    }

    pub(super) async fn query(
        &self,
        what: &'static str,
        sql: &str,
        params: &[Val],
    ) -> Result<Vec<Row>, DbError> {
        let failed = |error| classify(what, sql, error);
        let statement = self.prepare(sql).await.map_err(failed)?;
        check_count(sql, &statement, params.len())?;
        let binds: Vec<Bind<'_>> = params.iter().map(Bind).collect();
        let params: Vec<&(dyn ToSql + Sync)> = binds.iter().map(|bind| bind as _).collect();
        let (rows, _) = self.run(&statement, &params).await.map_err(failed)?;
        rows.iter().map(read_row).collect()
    }
}

#[derive(Debug, thiserror::Error)]
#[error("the statement has {want} parameters, but {have} were given")]
struct ParamCountError {
    want: usize,
    have: usize,
}

/// Returns an error where the driver would panic.
pub(super) fn check_count(sql: &str, statement: &Statement, have: usize) -> Result<(), DbError> {
    let want = statement.params().len();
    if want == have {
        return Ok(());
    }
    Err(DbError::Statement { sql: sql.to_owned(), source: Arc::new(ParamCountError { want, have }) })
}

/// Slot for one session, shared by all callers: the protocol pipelines.
pub(super) struct SharedSession {
    target: PostgresTarget,
    state: tokio::sync::Mutex<LinkState>,
}

#[derive(Default)]
struct LinkState {
    session: Option<Arc<Session>>,
    failed: Option<(Instant, DbError)>,
    is_shut: bool,
}

impl SharedSession {
    pub(super) fn new(target: PostgresTarget) -> Self {
        Self { target, state: tokio::sync::Mutex::default() }
    }

    /// Returns the session, or a new one if it has ended.
    pub(super) async fn session(&self, what: &'static str) -> Result<Arc<Session>, DbError> {
        let mut state = self.state.lock().await;
        if state.is_shut {
            return Err(DbError::closed(what));
        }
        if let Some(session) = state.session.as_ref().filter(|session| !session.client.is_closed()) {
            return Ok(Arc::clone(session));
        }
        state.session = None;
        if let Some((at, error)) = &state.failed
            && at.elapsed() < FAILURE_TTL
        {
            return Err(error.clone());
        }
        let outcome = self.connect(what).await;
        match &outcome {
            Ok(session) => (state.session, state.failed) = (Some(Arc::clone(session)), None),
            Err(error) => state.failed = Some((Instant::now(), error.clone())),
        }
        outcome
    }

    async fn connect(&self, what: &'static str) -> Result<Arc<Session>, DbError> {
        let mut last = DbError::closed(what);
        for pause in CONNECT_DELAYS_MS {
            sleep(Duration::from_millis(pause)).await;
            match Session::open(&self.target).await {
                Ok(session) => return Ok(Arc::new(session)),
                Err(error) => {
                    let again = (is_lost(&error) || error.code().is_none()) && !tls::is_final(&error);
                    last = DbError::Unavailable { what, source: Arc::new(error) };
                    // Retrying does not fix a wrong password or certificate.
                    if !again {
                        break;
                    }
                }
            }
        }
        Err(last)
    }

    pub(super) async fn query(
        &self,
        what: &'static str,
        sql: &str,
        params: &[Val],
    ) -> Result<Vec<Row>, DbError> {
        let session = self.session(what).await?;
        let answered = session.query(what, sql, params).await;
        if matches!(answered, Err(DbError::ReadOnly { .. })) {
            self.forget(&session).await;
        }
        answered
    }

    /// Drops a session: another server may accept writes by now, or this one again, which only a new session finds out.
    pub(super) async fn forget(&self, session: &Arc<Session>) {
        let mut state = self.state.lock().await;
        if state.session.as_ref().is_some_and(|kept| Arc::ptr_eq(kept, session)) {
            state.session = None;
        }
    }

    /// Makes the next caller open a new session; current users finish in this one.
    pub(super) async fn renew(&self) {
        self.state.lock().await.session = None;
    }

    pub(super) async fn shut(&self) {
        let mut state = self.state.lock().await;
        state.session = None;
        state.is_shut = true;
    }
}
