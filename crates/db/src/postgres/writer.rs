//! The task that commits in groups.
//!
//! While one group is being committed, the next one is collected; no unit waits for others to arrive.

use std::{collections::HashSet, sync::Arc};

use tokio::sync::{mpsc, oneshot};

use windlass_engine::settings::LEASE_TTL;

use super::{
    clock::{CORRECT_JUMP, ClockWatch},
    group::{self, ColumnTypes, Failure},
    session::SharedSession,
};
use crate::{
    error::DbError,
    unit::{Unit, WriteOutcome},
};

const GROUP_MAX: usize = 256;
const QUEUE_MAX: usize = 4096;
/// Number of retries of a group that lost a race with another replica, before it is split.
const RACES_MAX: u32 = 5;

type ReplySender = oneshot::Sender<Result<WriteOutcome, DbError>>;
type PendingUnits = Vec<(Box<Unit>, ReplySender)>;

enum WriterCommand {
    Write(Box<Unit>, ReplySender),
    Close(oneshot::Sender<()>),
}

pub(super) struct PostgresWriter {
    orders: mpsc::Sender<WriterCommand>,
}

impl PostgresWriter {
    pub(super) fn start(link: Arc<SharedSession>, watch: Arc<ClockWatch>, catalog: Arc<ColumnTypes>) -> Self {
        let (orders, queue) = mpsc::channel(QUEUE_MAX);
        tokio::spawn(serve(GroupWriter { link, watch, catalog }, queue));
        Self { orders }
    }

    pub(super) async fn write(&self, unit: Unit) -> Result<WriteOutcome, DbError> {
        let (answer, answered) = oneshot::channel();
        let order = WriterCommand::Write(Box::new(unit), answer);
        self.orders.send(order).await.map_err(|_| DbError::closed("write"))?;
        answered.await.map_err(|_| DbError::closed("write"))?
    }

    pub(super) async fn close(&self) {
        let (closed, waits) = oneshot::channel();
        if self.orders.send(WriterCommand::Close(closed)).await.is_ok() {
            let _ = waits.await;
        }
    }
}

/// Connection and schema for committing groups.
struct GroupWriter {
    link: Arc<SharedSession>,
    watch: Arc<ClockWatch>,
    catalog: Arc<ColumnTypes>,
}

async fn serve(place: GroupWriter, mut queue: mpsc::Receiver<WriterCommand>) {
    let mut orders = Vec::with_capacity(GROUP_MAX);
    let mut waiting: PendingUnits = Vec::new();
    while queue.recv_many(&mut orders, GROUP_MAX).await > 0 {
        let mut closing = None;
        for order in orders.drain(..) {
            match order {
                WriterCommand::Write(unit, answer) => waiting.push((unit, answer)),
                WriterCommand::Close(closed) => closing = Some(closed),
            }
        }
        while !waiting.is_empty() {
            let (group, later) = split_conflicting(waiting);
            waiting = later;
            commit(&place, group).await;
        }
        if let Some(closed) = closing {
            place.link.shut().await;
            let _ = closed.send(());
            return;
        }
    }
}

/// Two guards on one row cannot be part of one UPDATE: the second waits for the next group.
fn split_conflicting(units: PendingUnits) -> (PendingUnits, PendingUnits) {
    let mut rows = HashSet::new();
    units
        .into_iter()
        .partition(|(unit, _)| unit.guard.as_ref().is_none_or(|guard| rows.insert((guard.table, guard.id))))
}

/// Commits a group. Each caller is answered after the commit of the transaction with its unit.
async fn commit(place: &GroupWriter, group: PendingUnits) {
    let mut stack = vec![group];
    while let Some(mut part) = stack.pop() {
        match commit_with_retry(place, &part).await {
            Ok(written) => {
                for ((_, answer), written) in part.into_iter().zip(written) {
                    let _ = answer.send(Ok(written));
                }
            }
            Err(Failure::ConnectionLost(error) | Failure::Unknown(error)) => fail_all(part, &error),
            Err(Failure::Refused(_) | Failure::Race(_) | Failure::Stale(_)) if part.len() > 1 => {
                let second = part.split_off(part.len() / 2);
                stack.extend([second, part]);
            }
            Err(Failure::Refused(error) | Failure::Race(error)) => fail_all(part, &error),
            Err(Failure::ClockJump { .. }) => fail_all(part, &DbError::closed("write with a stable clock")),
            Err(Failure::Stale(at)) => {
                for (_, answer) in part {
                    let _ = answer.send(Ok(WriteOutcome::Stale { at: Some(at) }));
                }
            }
        }
    }
}

fn fail_all(part: PendingUnits, error: &DbError) {
    for (_, answer) in part {
        let _ = answer.send(Err(error.clone()));
    }
}

/// Repeats what is safe to repeat: a lost race, and once a connection that was found dead before the commit was sent.
async fn commit_with_retry(
    place: &GroupWriter,
    part: &[(Box<Unit>, ReplySender)],
) -> Result<Vec<WriteOutcome>, Failure> {
    let GroupWriter { link, watch, catalog } = place;
    let units: Vec<&Unit> = part.iter().map(|(unit, _)| &**unit).collect();
    let (mut races, mut jumps, mut is_second) = (0, 0, false);
    loop {
        let session = link.session("write").await.map_err(Failure::ConnectionLost)?;
        match group::commit(&session, watch, catalog, &units, races).await {
            Err(Failure::Race(_)) if races < RACES_MAX => races += 1,
            Err(Failure::ClockJump { by, version }) => {
                jumps += 1;
                if jumps > RACES_MAX {
                    watch.accept_clock();
                }
                watch.distrust(LEASE_TTL);
                let params = [by.into(), version.into()];
                session
                    .query("correct the clock", CORRECT_JUMP, &params)
                    .await
                    .map_err(Failure::ConnectionLost)?;
                link.renew().await;
            }
            Err(Failure::ConnectionLost(_)) if !is_second => is_second = true,
            Err(Failure::Refused(error @ DbError::ReadOnly { .. })) => {
                link.forget(&session).await;
                return Err(Failure::ConnectionLost(error));
            }
            outcome => return outcome,
        }
    }
}
