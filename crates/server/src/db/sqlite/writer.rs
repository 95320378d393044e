//! The writer thread: many units, one fsync.
//!
//! It takes whatever is queued, gives each unit a savepoint of its own, commits once, and only then
//! answers. There is no waiting for company: while one group is on its way to the disk, the next one
//! gathers, so a lone write is not delayed and a thousand share a handful of commits.

use std::thread;

use tokio::sync::{mpsc, oneshot};

use super::{Answer, conn::Conn, lock::FileLock};
use crate::db::{
    error::DbError,
    migrate,
    unit::{Unit, Written},
    value::Row,
};

const GROUP_MAX: usize = 256;
const QUEUE_MAX: usize = 4096;

enum Order {
    Write(Unit, Answer<Written>),
    Prepare(String, Answer<usize>),
    Pragma(&'static str, Answer<Vec<Row>>),
    Migrate(Answer<()>),
    Close(oneshot::Sender<()>),
}

pub(super) struct Writer {
    orders: mpsc::Sender<Order>,
}

impl Writer {
    pub(super) fn start(conn: Conn, lock: FileLock) -> Result<Self, DbError> {
        let (orders, queue) = mpsc::channel(QUEUE_MAX);
        thread::Builder::new()
            .name("sqlite-write".to_owned())
            .spawn(move || {
                let closed = serve(&conn, queue);
                // The file is closed before it is given free, and free before anybody is told.
                drop(conn);
                drop(lock);
                if let Some(closed) = closed {
                    let _ = closed.send(());
                }
            })
            .map_err(|error| DbError::open("the writer thread", error))?;
        Ok(Self { orders })
    }

    pub(super) async fn write(&self, unit: Unit) -> Result<Written, DbError> {
        self.ask("write", |answer| Order::Write(unit, answer)).await
    }

    pub(super) async fn prepare(&self, sql: String) -> Result<usize, DbError> {
        self.ask("prepare", |answer| Order::Prepare(sql, answer)).await
    }

    pub(super) async fn pragma(&self, name: &'static str) -> Result<Vec<Row>, DbError> {
        self.ask("read a pragma", |answer| Order::Pragma(name, answer)).await
    }

    pub(super) async fn migrate_again(&self) -> Result<(), DbError> {
        self.ask("migrate", Order::Migrate).await
    }

    async fn ask<T>(&self, what: &'static str, order: impl FnOnce(Answer<T>) -> Order) -> Result<T, DbError> {
        let (answer, answered) = oneshot::channel();
        self.orders.send(order(answer)).await.map_err(|_| DbError::closed(what))?;
        answered.await.map_err(|_| DbError::closed(what))?
    }

    pub(super) async fn close(&self) {
        let (closed, waits) = oneshot::channel();
        if self.orders.send(Order::Close(closed)).await.is_ok() {
            let _ = waits.await;
        }
    }
}

/// Ends when nobody can write any more; answers whom to tell.
fn serve(conn: &Conn, mut queue: mpsc::Receiver<Order>) -> Option<oneshot::Sender<()>> {
    let mut group = Vec::with_capacity(GROUP_MAX);
    while let Some(first) = queue.blocking_recv() {
        let mut next = Some(first);
        let mut other = None;
        while let Some(order) = next.take() {
            match order {
                Order::Write(unit, answer) => group.push((unit, answer)),
                order @ (Order::Prepare(..) | Order::Pragma(..) | Order::Migrate(_) | Order::Close(_)) => {
                    other = Some(order)
                }
            }
            if group.len() < GROUP_MAX && other.is_none() {
                next = queue.try_recv().ok();
            }
        }
        if !group.is_empty() {
            commit(conn, &mut group);
        }
        match other {
            Some(Order::Prepare(sql, answer)) => {
                let _ = answer.send(conn.prepare(&sql));
            }
            Some(Order::Pragma(name, answer)) => {
                let _ = answer.send(conn.query(&format!("PRAGMA {name}"), &[]));
            }
            Some(Order::Migrate(answer)) => {
                let _ = answer.send(migrate::sqlite(conn));
            }
            Some(Order::Close(closed)) => return Some(closed),
            Some(Order::Write(..)) | None => {}
        }
    }
    None
}

/// Everybody is answered after the commit, never before.
fn commit(conn: &Conn, group: &mut Vec<(Unit, Answer<Written>)>) {
    let outcome = transaction(conn, group);
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
    group: &[(Unit, Answer<Written>)],
) -> Result<Vec<Result<Written, DbError>>, DbError> {
    let now = conn.begin()?;
    if let [(unit, _)] = group {
        // With nobody beside it the transaction does what a savepoint would.
        return Ok(vec![conn.unit_alone(unit, now)]);
    }
    let mut outcomes = Vec::with_capacity(group.len());
    for (unit, _) in group {
        let written = conn.unit(unit, now);
        // A full disk or a broken file rolls back everybody's work, not only this unit's.
        if conn.is_rolled_back() {
            return Err(written.err().unwrap_or_else(|| DbError::closed("write")));
        }
        outcomes.push(written);
    }
    conn.commit()?;
    Ok(outcomes)
}
