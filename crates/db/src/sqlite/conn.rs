//! One SQLite connection: settings, functions, binding, one unit inside an open transaction.

use std::{
    collections::HashMap,
    fs::OpenOptions,
    os::unix::fs::{OpenOptionsExt as _, PermissionsExt},
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicI64, Ordering},
    },
    time::Duration,
};

use rusqlite::{
    CachedStatement, Connection, ErrorCode, OpenFlags,
    config::DbConfig,
    functions::FunctionFlags,
    types::{ToSql, ToSqlOutput, Value, ValueRef},
};

use windlass_planted_bugs::{Bug, is_planted};

use crate::{
    clock::Clock,
    error::DbError,
    ids::Ids,
    unit::{Change, Expect, Guard, Unit, WriteOutcome, assign},
    value::{Row, Val},
};

/// Time to wait for another process (a backup, a shell) that has locked the file.
const BUSY_TIMEOUT: Duration = Duration::from_secs(5);
const STATEMENTS_MAX: usize = 512;

pub(crate) struct Conn {
    raw: Connection,
    clock: Clock,
    /// Result of `now_us()`: set when a transaction begins.
    frozen: Arc<AtomicI64>,
    /// `table.column, table.column` as SQLite names a violated unique index, and the index's own name.
    unique: HashMap<String, String>,
}

/// Makes the database, and files that an earlier server left next to it, accessible only to their owner. SQLite creates
/// its files with the mode of the database.
fn restrict_permissions(path: &Path) -> std::io::Result<()> {
    OpenOptions::new().write(true).create(true).truncate(false).mode(0o600).open(path)?;
    for file in [path.to_owned(), super::suffixed(path, "-wal"), super::suffixed(path, "-shm")] {
        match std::fs::set_permissions(&file, PermissionsExt::from_mode(0o600)) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
            // Only the owner can change the mode of a file that another user created.
            Err(error) if error.kind() == std::io::ErrorKind::PermissionDenied => {
                tracing::warn!(file = %file.display(), %error, "failed to restrict permissions of database file");
            }
            done => done?,
        }
    }
    Ok(())
}

impl Conn {
    pub(crate) fn writer(path: &Path, clock: Clock, ids: Ids) -> Result<Self, DbError> {
        restrict_permissions(path).map_err(|error| DbError::open(path.display().to_string(), error))?;
        let raw = Connection::open(path).map_err(|error| DbError::open(path.display().to_string(), error))?;
        let conn = Self::set_up(raw, clock, ids)?;
        conn.pragmas("PRAGMA journal_mode = WAL; PRAGMA synchronous = FULL; PRAGMA foreign_keys = ON;")?;
        // The built-in 2 MB are less than the indexes of a busy server: pages would be read again for every row. Memory
        // is allocated as needed. A longer log means fewer, larger checkpoints. The undo data of savepoints is kept in
        // memory, not in a separate file.
        conn.pragmas(
            "PRAGMA cache_size = -65536; PRAGMA wal_autocheckpoint = 8000; PRAGMA temp_store = MEMORY;",
        )?;
        Ok(conn)
    }

    pub(crate) fn reader(path: &Path, clock: Clock, ids: Ids) -> Result<Self, DbError> {
        let flags = OpenFlags::SQLITE_OPEN_READ_ONLY | OpenFlags::SQLITE_OPEN_NO_MUTEX;
        let raw = Connection::open_with_flags(path, flags)
            .map_err(|error| DbError::open(path.display().to_string(), error))?;
        let conn = Self::set_up(raw, clock, ids)?;
        conn.pragmas("PRAGMA query_only = ON; PRAGMA cache_size = -16384;")?;
        Ok(conn)
    }

    pub(super) fn memory(clock: Clock, ids: Ids) -> Result<Self, DbError> {
        let raw = Connection::open_in_memory().map_err(|error| DbError::open(":memory:", error))?;
        let conn = Self::set_up(raw, clock, ids)?;
        conn.pragmas("PRAGMA foreign_keys = ON;")?;
        Ok(conn)
    }

    fn set_up(raw: Connection, clock: Clock, ids: Ids) -> Result<Self, DbError> {
        let frozen = Arc::new(AtomicI64::new(clock.now()));
        let answer = Arc::clone(&frozen);
        let flags = FunctionFlags::SQLITE_UTF8 | FunctionFlags::SQLITE_INNOCUOUS;
        raw.busy_timeout(BUSY_TIMEOUT)
            .and_then(|()| {
                raw.create_scalar_function("now_us", 0, flags, move |_| Ok(answer.load(Ordering::Relaxed)))
            })
            .and_then(|()| {
                raw.create_scalar_function("new_uuid", 0, flags, move |_| {
                    let id = ids
                        .generate()
                        .map_err(|error| rusqlite::Error::UserFunctionError(Box::new(error)))?;
                    Ok(id.to_string())
                })
            })
            .map_err(|error| fault("open", &error_sql("set up"), error, &HashMap::new()))?;
        // Without this a new value of a parameter may cause a cached statement to be compiled again.
        raw.set_db_config(DbConfig::SQLITE_DBCONFIG_ENABLE_QPSG, true)
            .map_err(|error| fault("open", &error_sql("set up"), error, &HashMap::new()))?;
        raw.set_prepared_statement_cache_capacity(STATEMENTS_MAX);
        Ok(Self { raw, clock, frozen, unique: HashMap::new() })
    }

    fn pragmas(&self, text: &str) -> Result<(), DbError> {
        self.raw.execute_batch(text).map_err(|error| fault("open", text, error, &self.unique))
    }

    /// Reads the names of unique indexes. Called after the migrations.
    pub(super) fn learn_indexes(&mut self) -> Result<(), DbError> {
        let sql = "SELECT m.name, i.name, i.origin, \
                   (SELECT group_concat(m.name || '.' || c.name, ', ') FROM pragma_index_info(i.name) c) \
                   FROM sqlite_schema m, pragma_index_list(m.name) i WHERE m.type = 'table' AND i.\"unique\"";
        for row in self.query(sql, &[])? {
            let (table, index) = (row.text(0)?, row.text(1)?);
            let name = if row.str(2)? == "pk" { format!("{table}_pkey") } else { index };
            if let Some(columns) = row.opt_text(3)? {
                self.unique.insert(columns, name);
            }
        }
        Ok(())
    }

    pub(super) fn begin(&self) -> Result<i64, DbError> {
        self.run("BEGIN IMMEDIATE")?;
        let now = self.clock.now();
        self.frozen.store(now, Ordering::Relaxed);
        Ok(now)
    }

    pub(super) fn commit(&self) -> Result<(), DbError> {
        self.run("COMMIT")
    }

    pub(super) fn rollback(&self) {
        // Some failures (a full disk) have already rolled everything back.
        if !self.raw.is_autocommit()
            && let Err(error) = self.run("ROLLBACK")
        {
            tracing::error!(%error, "failed to roll back transaction");
        }
    }

    /// Returns whether a failure has rolled back the whole transaction.
    pub(super) fn is_rolled_back(&self) -> bool {
        self.raw.is_autocommit()
    }

    fn run(&self, sql: &str) -> Result<(), DbError> {
        self.statement(sql)?.raw_execute().map(drop).map_err(|error| self.fault(sql, error))
    }

    pub(super) fn script(&self, sql: &str) -> Result<(), DbError> {
        self.raw.execute_batch(sql).map_err(|error| self.fault(sql, error))
    }

    /// For tests: checks that the text compiles, and returns its number of parameters.
    pub(super) fn prepare(&self, sql: &str) -> Result<usize, DbError> {
        Ok(self.statement(sql)?.parameter_count())
    }

    fn statement(&self, sql: &str) -> Result<CachedStatement<'_>, DbError> {
        self.raw.prepare_cached(sql).map_err(|error| self.fault(sql, error))
    }

    fn fault(&self, sql: &str, error: rusqlite::Error) -> DbError {
        fault("run a statement", sql, error, &self.unique)
    }

    /// To SQLite `$n` is a name, numbered by first appearance; so parameters are bound by name.
    fn bind_params(&self, sql: &str, params: &[Val], now: i64) -> Result<CachedStatement<'_>, DbError> {
        let mut statement = self.statement(sql)?;
        if statement.parameter_count() != params.len() {
            let error = rusqlite::Error::InvalidParameterCount(params.len(), statement.parameter_count());
            return Err(self.fault(sql, error));
        }
        for index in 1..=params.len() {
            let name = statement.parameter_name(index).unwrap_or_default();
            let position = name.strip_prefix('$').and_then(|number| number.parse::<usize>().ok());
            let Some(value) = position.and_then(|position| params.get(position.checked_sub(1)?)) else {
                let error = rusqlite::Error::InvalidParameterName(name.to_owned());
                return Err(self.fault(sql, error));
            };
            statement
                .raw_bind_parameter(index, Bind { value, now })
                .map_err(|error| self.fault(sql, error))?;
        }
        Ok(statement)
    }

    /// Starts a snapshot: from the first read on all others see the same data.
    pub(super) fn begin_view(&self) -> Result<(), DbError> {
        self.run("BEGIN DEFERRED")
    }

    /// Ends a snapshot. There is nothing to do if an error has already ended it.
    pub(super) fn end_view(&self) {
        let _ = self.run("ROLLBACK");
    }

    /// A read outside of a write transaction: `now_us()` is the current time.
    pub(super) fn read(&self, sql: &str, params: &[Val]) -> Result<Vec<Row>, DbError> {
        self.frozen.store(self.clock.now(), Ordering::Relaxed);
        self.query(sql, params)
    }

    pub(crate) fn query(&self, sql: &str, params: &[Val]) -> Result<Vec<Row>, DbError> {
        let mut statement = self.bind_params(sql, params, self.frozen.load(Ordering::Relaxed))?;
        let width = statement.column_count();
        let mut rows = statement.raw_query();
        let mut found = Vec::new();
        loop {
            match rows.next() {
                Ok(Some(row)) => {
                    let values: Result<Vec<Val>, _> =
                        (0..width).map(|column| row.get_ref(column).map(read_value)).collect();
                    found.push(Row(values.map_err(|error| self.fault(sql, error))?));
                }
                Ok(None) => return Ok(found),
                Err(error) => return Err(self.fault(sql, error)),
            }
        }
    }

    fn execute(&self, sql: &str, params: &[Val], now: i64) -> Result<usize, DbError> {
        self.bind_params(sql, params, now)?.raw_execute().map_err(|error| self.fault(sql, error))
    }

    /// Runs a unit that has the transaction to itself: it is committed, or everything is rolled back.
    pub(super) fn unit_alone(&self, unit: &Unit, now: i64) -> Result<WriteOutcome, DbError> {
        let written = self.unit_inside(unit, now);
        if !matches!(written, Ok(WriteOutcome::Done { .. })) {
            self.rollback();
            return written;
        }
        if let Err(error) = self.commit() {
            self.rollback();
            return Err(error);
        }
        written
    }

    /// Runs a unit in a separate savepoint: all of its writes are kept, or none.
    pub(super) fn unit(&self, unit: &Unit, now: i64) -> Result<WriteOutcome, DbError> {
        self.run("SAVEPOINT unit")?;
        let written = self.unit_inside(unit, now);
        if !matches!(written, Ok(WriteOutcome::Done { .. })) && !self.raw.is_autocommit() {
            self.run("ROLLBACK TO unit")?;
        }
        if !self.raw.is_autocommit() {
            self.run("RELEASE unit")?;
        }
        written
    }

    fn unit_inside(&self, unit: &Unit, now: i64) -> Result<WriteOutcome, DbError> {
        if let Some(guard) = &unit.guard
            && !self.guard(guard, now)?
        {
            return Ok(WriteOutcome::Stale { at: None });
        }
        let mut rows = Vec::new();
        for (at, change) in unit.changes.iter().enumerate() {
            match change {
                Change::Insert { table, values } => {
                    let sql = insert_sql(table, values);
                    let params: Vec<Val> = values.iter().map(|(_, value)| value.clone()).collect();
                    self.execute(&sql, &params, now)?;
                }
                Change::Exec { sql, params, expect } => {
                    let touched = self.execute(sql, params, now)?;
                    if *expect == Expect::One && touched != 1 {
                        return Ok(WriteOutcome::Stale { at: Some(at) });
                    }
                }
                Change::Query { sql, params } => rows.push(self.query(sql, params)?),
            }
        }
        Ok(WriteOutcome::Done { now, rows })
    }

    fn guard(&self, guard: &Guard, now: i64) -> Result<bool, DbError> {
        let sql = guard_sql(guard);
        let mut params = vec![guard.id.into(), guard.token.into()];
        params.extend(guard.set.iter().map(|(_, value)| value.clone()));
        if is_planted(Bug::ApplyWithoutTokenCheck) {
            params.remove(1);
        }
        Ok(self.execute(&sql, &params, now)? == 1)
    }
}

fn guard_sql(guard: &Guard) -> String {
    let unchecked = is_planted(Bug::ApplyWithoutTokenCheck);
    let first = if unchecked { 2 } else { 3 };
    let set: Vec<String> = guard
        .set
        .iter()
        .enumerate()
        .map(|(at, (column, _))| assign(column, &format!("${}", at + first)))
        .collect();
    // A guard that changes nothing still has to lock and match the row.
    let set = if set.is_empty() { "lock_token = lock_token".to_owned() } else { set.join(", ") };
    let check = if unchecked { "" } else { " AND lock_token = $2" };
    format!("UPDATE {} SET {set} WHERE id = $1{check}", guard.table)
}

pub(crate) fn insert_sql(table: &str, values: &[(&'static str, Val)]) -> String {
    let columns: Vec<&str> = values.iter().map(|(column, _)| *column).collect();
    let marks: Vec<String> = (1..=values.len()).map(|n| format!("${n}")).collect();
    format!("INSERT INTO {table} ({}) VALUES ({})", columns.join(", "), marks.join(", "))
}

struct Bind<'a> {
    value: &'a Val,
    now: i64,
}

impl ToSql for Bind<'_> {
    fn to_sql(&self) -> rusqlite::Result<ToSqlOutput<'_>> {
        Ok(match self.value {
            Val::Null => ToSqlOutput::Owned(Value::Null),
            Val::Bool(flag) => ToSqlOutput::Owned(Value::Integer(i64::from(*flag))),
            Val::Int(number) => ToSqlOutput::Owned(Value::Integer(*number)),
            Val::Real(number) => ToSqlOutput::Owned(Value::Real(*number)),
            Val::Text(text) => ToSqlOutput::Borrowed(ValueRef::Text(text.as_bytes())),
            Val::Bytes(bytes) => ToSqlOutput::Borrowed(ValueRef::Blob(bytes)),
            Val::Now => ToSqlOutput::Owned(Value::Integer(self.now)),
            Val::NowPlus(us) => ToSqlOutput::Owned(Value::Integer(self.now.saturating_add(*us))),
        })
    }
}

fn read_value(value: ValueRef<'_>) -> Val {
    match value {
        ValueRef::Null => Val::Null,
        ValueRef::Integer(number) => Val::Int(number),
        ValueRef::Real(number) => Val::Real(number),
        ValueRef::Text(text) => Val::Text(match std::str::from_utf8(text) {
            Ok(text) => text.to_owned(),
            Err(_) => String::from_utf8_lossy(text).into_owned(),
        }),
        ValueRef::Blob(bytes) => Val::Bytes(bytes.to_vec()),
    }
}

fn error_sql(what: &str) -> String {
    format!("-- {what}")
}

#[expect(clippy::wildcard_enum_match_arm, reason = "dozens of codes, four of which we can act on")]
fn fault(what: &'static str, sql: &str, error: rusqlite::Error, unique: &HashMap<String, String>) -> DbError {
    let (code, extended, text) = match &error {
        rusqlite::Error::SqliteFailure(failure, text) => {
            (failure.code, failure.extended_code, text.clone().unwrap_or_default())
        }
        _ => return DbError::Statement { sql: sql.to_owned(), source: Arc::new(error) },
    };
    match code {
        ErrorCode::ConstraintViolation => constraint_name(extended, &text, unique),
        ErrorCode::DiskFull => DbError::Full { source: Arc::new(error) },
        ErrorCode::ReadOnly => DbError::ReadOnly { source: Arc::new(error) },
        ErrorCode::DatabaseCorrupt | ErrorCode::NotADatabase => DbError::Corrupt { source: Arc::new(error) },
        ErrorCode::DatabaseBusy
        | ErrorCode::DatabaseLocked
        | ErrorCode::SystemIoFailure
        | ErrorCode::CannotOpen
        | ErrorCode::OutOfMemory => DbError::Unavailable { what, source: Arc::new(error) },
        _ => DbError::Statement { sql: sql.to_owned(), source: Arc::new(error) },
    }
}

/// SQLite reports `UNIQUE constraint failed: runs.project_id, runs.name`; callers need the index's name.
fn constraint_name(extended: i32, text: &str, unique: &HashMap<String, String>) -> DbError {
    use rusqlite::ffi::{SQLITE_CONSTRAINT_PRIMARYKEY, SQLITE_CONSTRAINT_ROWID, SQLITE_CONSTRAINT_UNIQUE};
    let columns = text.split_once(": ").map_or(text, |(_, columns)| columns);
    if [SQLITE_CONSTRAINT_PRIMARYKEY, SQLITE_CONSTRAINT_ROWID, SQLITE_CONSTRAINT_UNIQUE].contains(&extended) {
        let constraint = unique.get(columns).cloned().unwrap_or_else(|| columns.to_owned());
        return DbError::Conflict { constraint };
    }
    DbError::ConstraintViolated { constraint: text.to_owned() }
}
