//! The writer thread: many units, one fsync.
//!
//! It receives all queued units, runs each in a separate savepoint, commits once, and only then answers. It does not
//! wait for more units: while one group is being written to disk, the next one is collected, so a single write is not
//! delayed and a thousand share a few commits.

use std::{sync::Arc, thread, time::Instant};

use tokio::sync::{mpsc, oneshot};

use super::{ReplySender, conn::Conn, lock::FileLock};
use crate::{
    counters::Counters,
    error::DbError,
    migrate,
    unit::{Unit, WriteOutcome},
    value::Row,
};

const GROUP_MAX: usize = 256;
const QUEUE_MAX: usize = 4096;

enum WriterCommand {
    Write(Unit, ReplySender<WriteOutcome>),
    Prepare(String, ReplySender<usize>),
    Pragma(&'static str, ReplySender<Vec<Row>>),
    Migrate(ReplySender<()>),
    Close(oneshot::Sender<()>),
}

pub(super) struct SqliteWriter {
    orders: mpsc::Sender<WriterCommand>,
}

impl SqliteWriter {
    pub(super) fn start(conn: Conn, lock: FileLock, counters: Arc<Counters>) -> Result<Self, DbError> {
        let (orders, queue) = mpsc::channel(QUEUE_MAX);
        thread::Builder::new()
            .name("sqlite-write".to_owned())
            .spawn(move || {
                let closed = serve(&conn, queue, &counters);
                // The file is closed before it is unlocked, and unlocked before the caller is notified.
                drop(conn);
                drop(lock);
                if let Some(closed) = closed {
                    let _ = closed.send(());
                }
            })
            .map_err(|error| DbError::open("the database: cannot start the writer thread", error))?;
        Ok(Self { orders })
    }

    pub(super) async fn write(&self, unit: Unit) -> Result<WriteOutcome, DbError> {
        self.send_command("write", |answer| WriterCommand::Write(unit, answer)).await
    }

    pub(super) async fn prepare(&self, sql: String) -> Result<usize, DbError> {
        self.send_command("prepare", |answer| WriterCommand::Prepare(sql, answer)).await
    }

    pub(super) async fn pragma(&self, name: &'static str) -> Result<Vec<Row>, DbError> {
        self.send_command("read a pragma", |answer| WriterCommand::Pragma(name, answer)).await
    }

    pub(super) async fn migrate_again(&self) -> Result<(), DbError> {
        self.send_command("migrate", WriterCommand::Migrate).await
    }

    async fn send_command<T>(
        &self,
        what: &'static str,
        order: impl FnOnce(ReplySender<T>) -> WriterCommand,
    ) -> Result<T, DbError> {
        let (answer, answered) = oneshot::channel();
        self.orders.send(order(answer)).await.map_err(|_| DbError::closed(what))?;
        answered.await.map_err(|_| DbError::closed(what))?
    }

    pub(super) async fn close(&self) {
        let (closed, waits) = oneshot::channel();
        if self.orders.send(WriterCommand::Close(closed)).await.is_ok() {
            let _ = waits.await;
        }
    }
}

/// Runs until all senders are gone; returns the channel to notify.
fn serve(
    conn: &Conn,
    mut queue: mpsc::Receiver<WriterCommand>,
    counters: &Counters,
) -> Option<oneshot::Sender<()>> {
    let mut group = Vec::with_capacity(GROUP_MAX);
    while let Some(first) = queue.blocking_recv() {
        let mut next = Some(first);
        let mut other = None;
        while let Some(order) = next.take() {
            match order {
                WriterCommand::Write(unit, answer) => group.push((unit, answer)),
                order @ (WriterCommand::Prepare(..)
                | WriterCommand::Pragma(..)
                | WriterCommand::Migrate(_)
                | WriterCommand::Close(_)) => other = Some(order),
            }
            if group.len() < GROUP_MAX && other.is_none() {
                next = queue.try_recv().ok();
            }
        }
        if !group.is_empty() {
            let began = Instant::now();
            commit(conn, &mut group, counters);
            counters.count_busy(began.elapsed());
        }
        match other {
            Some(WriterCommand::Prepare(sql, answer)) => {
                let _ = answer.send(conn.prepare(&sql));
            }
            Some(WriterCommand::Pragma(name, answer)) => {
                let _ = answer.send(conn.query(&format!("PRAGMA {name}"), &[]));
            }
            Some(WriterCommand::Migrate(answer)) => {
                let _ = answer.send(migrate::sqlite(conn));
            }
            Some(WriterCommand::Close(closed)) => return Some(closed),
            Some(WriterCommand::Write(..)) | None => {}
        }
    }
    None
}

/// Commits a group. Callers are answered after the commit, never before.
fn commit(conn: &Conn, group: &mut Vec<(Unit, ReplySender<WriteOutcome>)>, counters: &Counters) {
    let outcome = transaction(conn, group);
    counters.count_commit();
    for (at, (unit, _)) in group.iter().enumerate() {
        let rows = match outcome.as_ref().map(|written| written.get(at)) {
            Ok(Some(Ok(WriteOutcome::Done { rows, .. }))) => rows.iter().map(Vec::len).sum(),
            _ => 0,
        };
        counters.count_statements(unit.changes.len() + usize::from(unit.guard.is_some()), rows);
    }
    match outcome {
        Ok(written) => {
            for ((_, answer), written) in group.drain(..).zip(written) {
                let _ = answer.send(written);
            }
        }
        Err(error) => {
            conn.rollback();
            for (_, answer) in group.drain(..) {
                let _ = answer.send(Err(error.clone()));
            }
        }
    }
}

fn transaction(
    conn: &Conn,
    group: &[(Unit, ReplySender<WriteOutcome>)],
) -> Result<Vec<Result<WriteOutcome, DbError>>, DbError> {
    let now = conn.begin()?;
    if let [(unit, _)] = group {
        // For a single unit the transaction replaces the savepoint.
        return Ok(vec![conn.unit_alone(unit, now)]);
    }
    let mut outcomes = Vec::with_capacity(group.len());
    for (unit, _) in group {
        let written = conn.unit(unit, now);
        // A full disk or a broken file rolls back all units, not only this one.
        if conn.is_rolled_back() {
            return Err(written.err().unwrap_or_else(|| DbError::closed("write")));
        }
        outcomes.push(written);
    }
    conn.commit()?;
    Ok(outcomes)
}
