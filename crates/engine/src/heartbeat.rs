//! The heartbeater: extends the leases of all rows queued or in progress, and drops those that it cannot extend in
//! time.

use std::{collections::BTreeSet, sync::Arc};

use tokio::time::{Instant, sleep, timeout};
use uuid::Uuid;

use windlass_planted_bugs::{Bug, is_planted};

use crate::{
    lease::TrackedLease,
    runtime::{PipelineRuntime, error_chain},
    store::{LeaseKey, LeaseStore},
};

pub(crate) async fn run<S: LeaseStore>(crank: Arc<PipelineRuntime<S>>) {
    loop {
        // An idle pipeline has nothing to extend and costs nothing.
        crank.meter.leases.wait_for_any().await;
        sleep(crank.settings.heartbeat_interval).await;
        let now = Instant::now();
        for row in crank.meter.leases.remove_expired(now) {
            crank.handle_lost_lease(&row);
        }
        let old = crank.meter.leases.older_than(crank.settings.renew_after, now);
        if !old.is_empty() {
            renew(&crank, &old).await;
        }
    }
}

async fn renew<S: LeaseStore>(crank: &PipelineRuntime<S>, rows: &[Arc<TrackedLease>]) {
    let settings = &crank.settings;
    // Counted from before the statement is sent: the database counts from later.
    let asked_at = Instant::now();
    if is_planted(Bug::HeartbeatStopsRenewing) {
        for row in rows {
            row.renew(asked_at, settings.lease_validity());
        }
        return;
    }
    let held: Vec<LeaseKey> = rows.iter().map(|row| row.key()).collect();
    let call = crank.store.extend(&crank.queue, &held, settings.lease_ttl);
    let said = match timeout(settings.renew_after, call).await {
        Ok(Ok(extended)) => {
            let extended: BTreeSet<Uuid> = extended.into_iter().collect();
            for row in rows {
                if extended.contains(&row.lease.id) {
                    row.renew(asked_at, settings.lease_validity());
                } else {
                    row.mark_refused();
                }
            }
            return;
        }
        Ok(Err(error)) => error_chain(&error),
        Err(_) => "no response in time".to_owned(),
    };
    // Retried at the next tick; the deadlines of the leases stay unchanged meanwhile.
    crank.meter.store_errors.add(1);
    tracing::warn!(
        pipeline = crank.queue.pipeline,
        rows = held.len(),
        error = said,
        "failed to extend leases"
    );
}
