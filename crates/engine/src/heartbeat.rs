//! The heartbeater: keeps the leases of everything queued or in work, and gives up in time what it cannot.

use std::{collections::BTreeSet, sync::Arc};

use tokio::time::{Instant, sleep, timeout};
use uuid::Uuid;

use windlass_planted_bugs::{Bug, is_planted};

use crate::{
    crank::{Crank, chain},
    lease::Tracked,
    store::{Held, LeaseStore},
};

pub(crate) async fn run<S: LeaseStore>(crank: Arc<Crank<S>>) {
    loop {
        // An idle pipeline has nothing to keep and costs nothing.
        crank.meter.leases.some().await;
        sleep(crank.settings.heartbeat_every).await;
        let now = Instant::now();
        for row in crank.meter.leases.sweep(now) {
            crank.settle_lost(&row);
        }
        let old = crank.meter.leases.older_than(crank.settings.renew_after, now);
        if !old.is_empty() {
            renew(&crank, &old).await;
        }
    }
}

async fn renew<S: LeaseStore>(crank: &Crank<S>, rows: &[Arc<Tracked>]) {
    let settings = &crank.settings;
    // Counted from before the statement is sent: the database counts from later.
    let asked_at = Instant::now();
    if is_planted(Bug::HeartbeatStopsRenewing) {
        for row in rows {
            row.renew(asked_at, settings.lease_use());
        }
        return;
    }
    let held: Vec<Held> = rows.iter().map(|row| row.held()).collect();
    let call = crank.store.extend(&crank.queue, &held, settings.lease_ttl);
    let said = match timeout(settings.renew_after, call).await {
        Ok(Ok(extended)) => {
            let extended: BTreeSet<Uuid> = extended.into_iter().collect();
            for row in rows {
                if extended.contains(&row.lease.id) {
                    row.renew(asked_at, settings.lease_use());
                } else {
                    row.refuse();
                }
            }
            return;
        }
        Ok(Err(error)) => chain(&error),
        Err(_) => "no answer in time".to_owned(),
    };
    // Tried again at the next tick; the deadlines of the leases stand meanwhile.
    crank.meter.store_errors.add(1);
    tracing::warn!(pipeline = crank.queue.pipeline, rows = held.len(), error = said, "heartbeat failed");
}
