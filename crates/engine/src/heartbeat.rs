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

pub(crate) async fn run<S: LeaseStore>(runtime: Arc<PipelineRuntime<S>>) {
    loop {
        // An idle pipeline has nothing to extend and costs nothing.
        runtime.meter.leases.wait_for_any().await;
        sleep(runtime.settings.heartbeat_interval).await;
        let now = Instant::now();
        for row in runtime.meter.leases.remove_expired(now) {
            runtime.handle_lost_lease(&row);
        }
        let old = runtime.meter.leases.older_than(runtime.settings.renew_after, now);
        if !old.is_empty() {
            renew(&runtime, &old).await;
        }
    }
}

async fn renew<S: LeaseStore>(runtime: &PipelineRuntime<S>, rows: &[Arc<TrackedLease>]) {
    let settings = &runtime.settings;
    // Counted from before the statement is sent: the database counts from later.
    let requested_at = Instant::now();
    if is_planted(Bug::HeartbeatStopsRenewing) {
        for row in rows {
            row.renew(requested_at, settings.lease_validity());
        }
        return;
    }
    let held: Vec<LeaseKey> = rows.iter().map(|row| row.key()).collect();
    let call = runtime.store.extend(&runtime.queue, &held, settings.lease_ttl);
    let message = match timeout(settings.renew_after, call).await {
        Ok(Ok(extended)) => {
            let extended: BTreeSet<Uuid> = extended.into_iter().collect();
            for row in rows {
                if extended.contains(&row.lease.id) {
                    row.renew(requested_at, settings.lease_validity());
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
    runtime.meter.store_errors.add(1);
    tracing::warn!(
        pipeline = runtime.queue.pipeline,
        rows = held.len(),
        error = message,
        "failed to extend leases"
    );
}
