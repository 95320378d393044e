//! One transaction for many units.
//!
//! Guards of one shape become one UPDATE; units whose guard failed drop out; inserts of one shape become one INSERT;
//! the rest runs unit by unit, in order, without waiting between statements. The error of a single unit is only ever
//! determined in a separate transaction: a group in which anything fails is rolled back and retried in halves.

use std::{
    collections::{BTreeMap, HashMap, HashSet},
    future::Future,
    pin::pin,
    sync::Arc,
};

use futures_util::future::{maybe_done, try_join};
use tokio::time::Instant;
use tokio_postgres::types::ToSql;

use windlass_planted_bugs::{Bug, is_planted};

use super::{
    bind::{Array, Bind, read_row},
    clock::{ClockWatch, READ_CLOCK},
    fault::{classify, is_lost, is_race},
    session::{Session, check_count},
};
use crate::{
    error::DbError,
    unit::{Change, Expect, Unit, Values, WriteOutcome, assign},
    value::{Row, Val},
};

/// Types of all columns, by table and column.
pub(super) type ColumnTypes = HashMap<String, HashMap<String, String>>;

/// Time for which the first attempt waits for a row, and how many times it is doubled.
const LOCK_WAIT_MS: u32 = 200;
const LOCK_WAIT_DOUBLINGS: u32 = 5;

pub(super) enum Failure {
    /// Nothing was applied; the error is caused by a unit of the group.
    Refused(DbError),
    /// The change at this position of the only unit did not match.
    Stale(usize),
    /// Nothing was applied; the same group can be retried at once.
    Race(DbError),
    /// Nothing was applied; the connection was lost.
    ConnectionLost(DbError),
    /// The connection broke during the commit.
    Unknown(DbError),
    /// Nothing was applied: the clock, with this version of the offset, jumped by this much.
    ClockJump { by: i64, version: i64 },
}

type GroupResult<T> = Result<T, Failure>;

fn classify_failure(sql: &str, error: tokio_postgres::Error) -> Failure {
    let (race, lost) = (is_race(&error), is_lost(&error));
    let error = classify("write", sql, error);
    match (race, lost) {
        (true, _) => Failure::Race(error),
        (_, true) => Failure::ConnectionLost(error),
        _ => Failure::Refused(error),
    }
}

/// Runs the units in one transaction. On failure the transaction is rolled back.
pub(super) async fn commit(
    session: &Session,
    watch: &ClockWatch,
    catalog: &ColumnTypes,
    units: &[&Unit],
    races: u32,
) -> GroupResult<Vec<WriteOutcome>> {
    let group = Group { session, watch, catalog, units, races };
    // Not the commit: once it is sent, it cannot be cancelled.
    match session.cancel_if_stuck(group.transaction()).await {
        Ok(written) => match session.client.batch_execute("COMMIT").await {
            Ok(()) => {
                session.count_commit();
                Ok(written)
            }
            Err(error) if error.as_db_error().is_some() && !is_lost(&error) => {
                Err(classify_failure("COMMIT", error))
            }
            Err(error) => Err(Failure::Unknown(DbError::Unknown { source: Arc::new(error) })),
        },
        Err(failure) => {
            // A session that cannot roll back has ended, and its transaction with it.
            let _ = session.client.batch_execute("ROLLBACK").await;
            Err(failure)
        }
    }
}

struct Group<'a> {
    session: &'a Session,
    watch: &'a ClockWatch,
    catalog: &'a ColumnTypes,
    units: &'a [&'a Unit],
    /// Number of lost races so far.
    races: u32,
}

impl Group<'_> {
    async fn transaction(&self) -> GroupResult<Vec<WriteOutcome>> {
        let now = self.begin().await?;
        let stale = self.guards(now).await?;
        let live: Vec<usize> = (0..self.units.len()).filter(|at| !stale.contains(at)).collect();
        let parts: Vec<UnitParts<'_>> =
            live.iter().map(|at| UnitParts::split(&self.units[*at].changes)).collect();
        self.inserts(parts.iter().map(|part| part.first), now).await?;
        let mut rows = self.middle(&parts, now).await?.into_iter();
        self.inserts(parts.iter().map(|part| part.last), now).await?;
        let written = |at| {
            if stale.contains(&at) {
                return WriteOutcome::Stale { at: None };
            }
            WriteOutcome::Done { now, rows: rows.next().unwrap_or_default() }
        };
        Ok((0..self.units.len()).map(written).collect())
    }

    /// Opens the transaction and reads its time, in one round trip.
    async fn begin(&self) -> GroupResult<i64> {
        let failed = |error| classify_failure(READ_CLOCK, error);
        let now = self.session.prepare(READ_CLOCK).await.map_err(failed)?;
        let start = Instant::now();
        let begin = begin_sql(self.races);
        let (begin, read) = (self.session.client.batch_execute(&begin), self.session.run(&now, &[]));
        let ((), (rows, _)) = try_join(begin, read).await.map_err(failed)?;
        let reported = rows.first().and_then(|row| Some((row.try_get(0).ok()?, row.try_get(1).ok()?)));
        let (now, version) = reported.ok_or(Failure::Refused(DbError::closed("write")))?;
        // Times recorded with a clock that jumped would be wrong once it is corrected.
        let jump = self.watch.jump(start, Instant::now(), now);
        jump.map_or(Ok(now), |by| Err(Failure::ClockJump { by, version }))
    }

    /// Positions of units whose lease is no longer valid.
    async fn guards(&self, now: i64) -> GroupResult<HashSet<usize>> {
        // Tables in order, and rows in order within: two groups with the same rows do not deadlock.
        let mut shapes: BTreeMap<(&str, Vec<&str>), Vec<usize>> = BTreeMap::new();
        for (at, unit) in self.units.iter().enumerate() {
            if let Some(guard) = &unit.guard {
                let columns = guard.set.iter().map(|(column, _)| *column).collect();
                shapes.entry((guard.table, columns)).or_default().push(at);
            }
        }
        let mut stale = HashSet::new();
        for ((table, columns), members) in shapes {
            let held = self.guard(table, &columns, &members, now).await?;
            let is_stale = |at: &usize| {
                self.units[*at].guard.as_ref().is_some_and(|guard| !held.contains(&guard.id.to_string()))
            };
            stale.extend(members.into_iter().filter(is_stale));
        }
        Ok(stale)
    }

    async fn guard(
        &self,
        table: &str,
        columns: &[&str],
        members: &[usize],
        now: i64,
    ) -> GroupResult<HashSet<String>> {
        let mut arrays = vec![Array::Text(Vec::new()), Array::Text(Vec::new())];
        let mut casts = vec!["text".to_owned(), "text".to_owned()];
        for column in columns {
            let (array, udt) = self.array(table, column)?;
            arrays.push(array);
            casts.push(udt.to_owned());
        }
        for guard in members.iter().filter_map(|at| self.units[*at].guard.as_ref()) {
            let keys = [guard.id.into(), guard.token.into()];
            let set = guard.set.iter().map(|(_, value)| value.clone().at(now));
            for (array, value) in arrays.iter_mut().zip(keys.into_iter().chain(set)) {
                array.push(value).map_err(Failure::Refused)?;
            }
        }
        let sql = guard_sql(table, columns, &casts);
        let (rows, _) = self.bulk(&sql, &arrays).await?;
        Ok(rows.iter().filter_map(|row| row.try_get(0).ok()).collect())
    }

    /// Bulk inserts, shape by shape in the order in which the shapes first appear.
    async fn inserts<'c>(&self, changes: impl Iterator<Item = &'c [Change]>, now: i64) -> GroupResult<()> {
        let mut order: Vec<(&str, Vec<&str>)> = Vec::new();
        let mut shapes: HashMap<(&str, Vec<&str>), Vec<&Values>> = HashMap::new();
        for change in changes.flatten() {
            if let Change::Insert { table, values } = change {
                let shape = (*table, values.iter().map(|(column, _)| *column).collect::<Vec<_>>());
                let rows = shapes.entry(shape.clone()).or_default();
                if rows.is_empty() {
                    order.push(shape);
                }
                rows.push(values);
            }
        }
        let mut bulks = Vec::with_capacity(order.len());
        for shape in order {
            let rows = shapes.remove(&shape).unwrap_or_default();
            bulks.push(self.insert(shape.0, &shape.1, &rows, now).await?);
        }
        // Sent in order without waiting for responses. The first failure is the cause.
        for written in poll_in_order(bulks.iter().map(|bulk| bulk.send(self.session))).await {
            written?;
        }
        Ok(())
    }

    async fn insert(
        &self,
        table: &str,
        columns: &[&str],
        rows: &[&Values],
        now: i64,
    ) -> GroupResult<BulkInsert> {
        let mut arrays = Vec::with_capacity(columns.len());
        let mut casts = Vec::with_capacity(columns.len());
        for (at, column) in columns.iter().enumerate() {
            let (mut array, udt) = self.array(table, column)?;
            for values in rows {
                array.push(values[at].1.clone().at(now)).map_err(Failure::Refused)?;
            }
            arrays.push(array);
            casts.push(format!("${}::{udt}[]", at + 1));
        }
        let sql = format!(
            "INSERT INTO {table} ({}) SELECT * FROM unnest({})",
            columns.join(", "),
            casts.join(", ")
        );
        let statement = self.session.prepare(&sql).await.map_err(|error| classify_failure(&sql, error))?;
        Ok(BulkInsert { sql, statement, arrays })
    }

    fn array(&self, table: &str, column: &str) -> GroupResult<(Array, &str)> {
        let udt = self.catalog.get(table).and_then(|columns| columns.get(column)).map(String::as_str);
        udt.and_then(|udt| Some((Array::new(udt)?, udt))).ok_or(Failure::Refused(DbError::Shape {
            column: 0,
            want: "a column of a portable type",
            have: "an unknown type",
        }))
    }

    async fn bulk(&self, sql: &str, arrays: &[Array]) -> GroupResult<(Vec<tokio_postgres::Row>, u64)> {
        let failed = |error| classify_failure(sql, error);
        let statement = self.session.prepare(sql).await.map_err(failed)?;
        let params: Vec<&(dyn ToSql + Sync)> = arrays.iter().map(Array::param).collect();
        self.session.run(&statement, &params).await.map_err(failed)
    }

    /// Runs everything that is neither a guard nor a leading or trailing insert: sent in order without waiting for
    /// responses, then checked. Returns the rows of each unit's queries.
    async fn middle(&self, parts: &[UnitParts<'_>], now: i64) -> GroupResult<Vec<Vec<Vec<Row>>>> {
        let mut steps = Vec::new();
        for (unit, part) in parts.iter().enumerate() {
            for (at, change) in part.middle.iter().enumerate() {
                steps.push(self.step(unit, at + part.first.len(), change, now).await?);
            }
        }
        let outcomes = poll_in_order(steps.iter().map(|step| step.send(self.session))).await;
        let mut rows: Vec<Vec<Vec<Row>>> = vec![Vec::new(); parts.len()];
        for (step, outcome) in steps.iter().zip(outcomes) {
            // The first failure is the cause: after it the transaction rejects everything.
            let (found, touched) = outcome.map_err(|error| classify_failure(&step.sql, error))?;
            if step.expect == Expect::One && touched != 1 {
                return Err(Failure::Stale(step.at));
            }
            if step.is_query {
                let found: Result<Vec<Row>, DbError> = found.iter().map(read_row).collect();
                rows[step.unit].push(found.map_err(Failure::Refused)?);
            }
        }
        Ok(rows)
    }

    async fn step(&self, unit: usize, at: usize, change: &Change, now: i64) -> GroupResult<GroupStep> {
        let (sql, params, expect, is_query) = match change {
            Change::Insert { table, values } => {
                let sql = crate::sqlite::insert_sql(table, values);
                let params = values.iter().map(|(_, value)| value.clone()).collect();
                (sql, params, Expect::Any, false)
            }
            Change::Exec { sql, params, expect } => (sql.to_string(), params.clone(), *expect, false),
            Change::Query { sql, params } => (sql.to_string(), params.clone(), Expect::Any, true),
        };
        let statement = self.session.prepare(&sql).await.map_err(|error| classify_failure(&sql, error))?;
        check_count(&sql, &statement, params.len()).map_err(Failure::Refused)?;
        let params = params.into_iter().map(|value| value.at(now)).collect();
        Ok(GroupStep { unit, at, sql, statement, params, expect, is_query })
    }
}

/// Rows of one shape.
struct BulkInsert {
    sql: String,
    statement: tokio_postgres::Statement,
    arrays: Vec<Array>,
}

impl BulkInsert {
    async fn send(&self, session: &Session) -> GroupResult<()> {
        let params: Vec<&(dyn ToSql + Sync)> = self.arrays.iter().map(Array::param).collect();
        let written = session.run(&self.statement, &params).await;
        written.map(drop).map_err(|error| classify_failure(&self.sql, error))
    }
}

struct GroupStep {
    /// Index of the unit, and of the change in it.
    unit: usize,
    at: usize,
    sql: String,
    statement: tokio_postgres::Statement,
    params: Vec<Val>,
    expect: Expect,
    is_query: bool,
}

impl GroupStep {
    async fn send(
        &self,
        session: &Session,
    ) -> Result<(Vec<tokio_postgres::Row>, u64), tokio_postgres::Error> {
        let binds: Vec<Bind<'_>> = self.params.iter().map(Bind).collect();
        let params: Vec<&(dyn ToSql + Sync)> = binds.iter().map(|bind| bind as _).collect();
        session.run(&self.statement, &params).await
    }
}

/// Rows of this table are numbered under a lock that is held until the commit. They are inserted last: the holder of
/// that lock must not wait for other rows, or two groups would deadlock.
const NUMBERED: &str = "queue_logs";

/// Leading inserts, changes that must keep their order, and trailing inserts.
struct UnitParts<'a> {
    first: &'a [Change],
    middle: &'a [Change],
    last: &'a [Change],
}

impl<'a> UnitParts<'a> {
    fn split(changes: &'a [Change]) -> Self {
        let is_insert = |change: &Change| matches!(change, Change::Insert { .. });
        let is_numbered =
            |change: &Change| matches!(change, Change::Insert { table, .. } if *table == NUMBERED);
        let leads = |change: &&Change| is_insert(change) && !is_numbered(change);
        let first = changes.iter().take_while(leads).count();
        let (first, rest) = changes.split_at(first);
        let last = rest.iter().rev().take_while(|change| is_insert(change)).count();
        let (middle, last) = rest.split_at(rest.len() - last);
        Self { first, middle, last }
    }
}

/// Groups of two replicas may lock the same rows in different orders. Postgres detects that only after a second, during
/// which neither writes: a waiting group releases its locks sooner, and waits about twice as long the next time. The
/// random part keeps both from releasing at the same time and colliding again.
fn begin_sql(races: u32) -> String {
    let wait = LOCK_WAIT_MS << races.min(LOCK_WAIT_DOUBLINGS);
    let mut drawn = [0];
    // If there is no random number it stays zero, which works as well.
    let _ = getrandom::fill(&mut drawn);
    format!("BEGIN; SET LOCAL lock_timeout = {}", wait / 2 + wait * u32::from(drawn[0]) / 256)
}

fn guard_sql(table: &str, columns: &[&str], casts: &[String]) -> String {
    let arrays: Vec<String> =
        casts.iter().enumerate().map(|(at, udt)| format!("${}::{udt}[]", at + 1)).collect();
    let names: Vec<String> = (0..columns.len()).map(|at| format!(", c{at}")).collect();
    let set: Vec<String> =
        columns.iter().enumerate().map(|(at, column)| assign(column, &format!("v.c{at}"))).collect();
    let set = if set.is_empty() { "lock_token = t.lock_token".to_owned() } else { set.join(", ") };
    // The planted bug still names the token, so that the statement keeps its parameters.
    let check = if is_planted(Bug::ApplyWithoutTokenCheck) {
        "v.token IS NOT NULL"
    } else {
        "t.lock_token = v.token"
    };
    format!(
        "WITH v AS MATERIALIZED (SELECT * FROM unnest({}) AS v (id, token{})), \
         held AS MATERIALIZED (SELECT t.id FROM {table} t JOIN v ON t.id = v.id AND {check} \
         WHERE t.id = ANY ($1) ORDER BY t.id FOR NO KEY UPDATE OF t) \
         UPDATE {table} t SET {set} FROM v JOIN held ON held.id = v.id WHERE t.id = v.id AND {check} \
         AND t.id = ANY ($1) RETURNING t.id",
        arrays.join(", "),
        names.concat(),
    )
}

/// Polls all futures in order, so that they are sent in this order.
async fn poll_in_order<F: Future>(futures: impl Iterator<Item = F>) -> Vec<F::Output> {
    let mut all: Vec<_> = futures.map(|future| Box::pin(maybe_done(future))).collect();
    let mut everyone_of = pin!(std::future::poll_fn(move |context| {
        let mut is_ready = true;
        for future in &mut all {
            is_ready &= future.as_mut().poll(context).is_ready();
        }
        if !is_ready {
            return std::task::Poll::Pending;
        }
        std::task::Poll::Ready(all.iter_mut().filter_map(|future| future.as_mut().take_output()).collect())
    }));
    everyone_of.as_mut().await
}
