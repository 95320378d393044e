//! SQLite: one writer thread that commits in groups, reader threads beside it, one process per file.

mod conn;
mod inline;
mod lock;
mod readers;
mod writer;

use std::path::Path;

use tokio::sync::oneshot;

pub(super) use conn::insert_sql;
pub(super) use inline::Inline;

use self::{conn::Conn, lock::FileLock, readers::Readers, writer::Writer};
use super::{
    clock::Clock,
    error::DbError,
    ids::Ids,
    migrate,
    unit::{Unit, Written},
    value::{Row, Val},
};

type Answer<T> = oneshot::Sender<Result<T, DbError>>;

/// A file, opened.
pub(super) struct File {
    writer: Writer,
    readers: Readers,
}

impl File {
    pub(super) fn open(path: &Path, ids: Ids) -> Result<Self, DbError> {
        let lock = FileLock::take(path)?;
        let clock = Clock::wall();
        let mut conn = Conn::writer(path, clock.clone(), ids.clone())?;
        migrate::sqlite(&conn)?;
        conn.learn_indexes()?;
        let readers = Readers::start(path, &clock, &ids)?;
        Ok(Self { writer: Writer::start(conn, lock)?, readers })
    }

    pub(super) async fn read(&self, sql: String, params: Vec<Val>) -> Result<Vec<Row>, DbError> {
        self.readers.read(sql, params).await
    }

    pub(super) async fn write(&self, unit: Unit) -> Result<Written, DbError> {
        self.writer.write(unit).await
    }

    /// Ends after everything queued so far is committed and the file is free for the next server.
    pub(super) async fn close(&self) {
        self.writer.close().await;
    }

    pub(super) async fn prepare(&self, sql: String) -> Result<usize, DbError> {
        self.writer.prepare(sql).await
    }

    pub(super) async fn migrate_again(&self) -> Result<(), DbError> {
        self.writer.migrate_again().await
    }

    /// A PRAGMA of the writing connection; the readers' would not tell how commits are made.
    pub(super) async fn pragma(&self, name: &'static str) -> Result<Vec<Row>, DbError> {
        self.writer.pragma(name).await
    }
}

impl migrate::Sqlite for Conn {
    fn script(&self, sql: &str) -> Result<(), DbError> {
        Self::script(self, sql)
    }

    fn query(&self, sql: &str, params: &[Val]) -> Result<Vec<Row>, DbError> {
        Self::query(self, sql, params)
    }
}
