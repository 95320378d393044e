//! State shared by the tasks of one pipeline, and the handling of rows after their pass.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use parking_lot::Mutex;
use tokio::{
    sync::{Notify, mpsc},
    time::{Instant, timeout},
};
use uuid::Uuid;

use crate::{
    finish::FinishRequest,
    hint::Hints,
    lease::TrackedLease,
    pipeline::ApplyOutcome,
    settings::{Settings, delay_at},
    status::PipelineMeter,
    store::{LeaseKey, LeaseStore, Queue, StoreError},
    work_queue::WorkQueue,
};

/// Maximum number of rows whose failures are remembered; beyond it those that failed longest ago are forgotten and
/// start again with the shortest delay.
const FAILURES_MAX: usize = 4096;

pub(crate) struct PipelineRuntime<S> {
    pub(crate) store: Arc<S>,
    pub(crate) queue: Queue,
    pub(crate) settings: Settings,
    pub(crate) hints: Hints,
    pub(crate) meter: Arc<PipelineMeter>,
    pub(crate) due_timer: DueTimer,
    /// Rows that were put back without progress, and the time until which a claim of only such rows leads to a pause.
    pub(crate) returned_rows: Mutex<BTreeMap<Uuid, Instant>>,
    failures: Mutex<BTreeMap<Uuid, Failures>>,
}

#[derive(Clone, Copy, Debug)]
struct Failures {
    count: usize,
    last_at: Instant,
}

impl<S: LeaseStore> PipelineRuntime<S> {
    pub(crate) fn new(
        store: Arc<S>,
        queue: Queue,
        settings: Settings,
        hints: Hints,
        meter: Arc<PipelineMeter>,
    ) -> Self {
        Self {
            store,
            queue,
            settings,
            hints,
            meter,
            due_timer: DueTimer::default(),
            returned_rows: Mutex::default(),
            failures: Mutex::default(),
        }
    }

    pub(crate) fn new_work_queue(&self) -> Arc<WorkQueue> {
        // A lower limit above the maximum would make the fetcher claim into a full queue.
        let len_min = self.settings.queue_len_min.min(self.settings.queue_len_max);
        let line = Arc::new(WorkQueue::new(len_min));
        self.meter.set_queue(line.clone());
        line
    }

    /// Handles the outcome of a pass.
    pub(crate) async fn handle_outcome(
        &self,
        row: Arc<TrackedLease>,
        applied: ApplyOutcome,
        out: &mpsc::Sender<FinishRequest>,
    ) {
        match applied {
            ApplyOutcome::Written { due_in_us, wake } => {
                self.record_success(&row);
                self.meter.applied(1);
                if let Some(due_in) = due_in_us {
                    self.due_timer
                        .schedule(Instant::now() + Duration::from_micros(u64::try_from(due_in).unwrap_or(0)));
                }
                for pipeline in wake {
                    self.hints.hint(pipeline);
                }
            }
            ApplyOutcome::Unchanged { due_in } => {
                self.clear_failures(row.lease.id);
                FinishRequest::done(row, due_in).send(out).await;
            }
            ApplyOutcome::LeaseLost => {
                self.meter.leases.release(&row);
                self.meter.stale.add(1);
            }
            ApplyOutcome::RelatedBusy => self.reset(&row).await,
        }
    }

    /// Handles a row that is gone, or not processed by this pipeline: unlocks it if it is still held.
    pub(crate) async fn handle_missing_row(&self, row: Arc<TrackedLease>, out: &mpsc::Sender<FinishRequest>) {
        self.clear_failures(row.lease.id);
        self.schedule_return(row.lease.id);
        FinishRequest::row_missing(row).send(out).await;
    }

    /// Handles a failed pass: the row is due again after a growing delay, so that it cannot spin.
    pub(crate) async fn handle_failure(&self, row: Arc<TrackedLease>, out: &mpsc::Sender<FinishRequest>) {
        self.meter.errors.add(1);
        let retry_in = self.record_failure(row.lease.id);
        FinishRequest::failed(row, retry_in).send(out).await;
    }

    /// Logs the error of a pass: once, with the row and all causes.
    pub(crate) fn log_failure(&self, row: &TrackedLease, error: &str) {
        tracing::warn!(pipeline = self.queue.pipeline, id = %row.lease.id, error, "failed to process row");
    }

    pub(crate) fn handle_lost_lease(&self, row: &TrackedLease) {
        self.meter.leases.release(row);
        if row.mark_lost() {
            self.meter.lost.add(1);
            tracing::warn!(pipeline = self.queue.pipeline, id = %row.lease.id, "lost lease of row");
        }
    }

    async fn reset(&self, row: &TrackedLease) {
        let answer = self.with_timeout(self.store.reset(&self.queue, row.key())).await;
        self.meter.leases.release(row);
        match answer {
            Some(true) => {
                self.meter.reset.add(1);
                self.schedule_return(row.lease.id);
            }
            Some(false) => self.meter.stale.add(1),
            None => {} // Logged already; the lock expires by itself.
        }
    }

    fn record_success(&self, row: &TrackedLease) {
        self.meter.leases.release(row);
        self.clear_failures(row.lease.id);
    }

    fn schedule_return(&self, id: Uuid) {
        let back_at = Instant::now() + self.settings.related_retry_delay;
        self.due_timer.schedule(back_at);
        // Also remembered for the fetch at that time, since every other retry would otherwise follow immediately.
        self.returned_rows.lock().insert(id, back_at + self.settings.related_retry_delay);
    }

    fn clear_failures(&self, id: Uuid) {
        self.failures.lock().remove(&id);
    }

    fn record_failure(&self, id: Uuid) -> Duration {
        let now = Instant::now();
        let mut failures = self.failures.lock();
        if failures.len() >= FAILURES_MAX
            && let Some((oldest, _)) = failures.iter().min_by_key(|(_, failures)| failures.last_at)
        {
            let oldest = *oldest;
            failures.remove(&oldest);
        }
        let entry = failures.entry(id).or_insert(Failures { count: 0, last_at: now });
        let delay = delay_at(self.settings.error_delays, entry.count);
        entry.count += 1;
        entry.last_at = now;
        delay
    }

    /// Hands rows back as they were claimed. Best effort: locks that cannot be released expire.
    pub(crate) async fn hand_back(&self, rows: Vec<Arc<TrackedLease>>) {
        if rows.is_empty() {
            return;
        }
        let held: Vec<LeaseKey> = rows.iter().map(|row| row.key()).collect();
        for row in &rows {
            self.meter.leases.release(row);
        }
        // A stop must not hang if the store does.
        let call =
            timeout(self.settings.lease_margin, self.with_timeout(self.store.hand_back(&self.queue, &held)));
        if let Ok(Some(())) = call.await {
            self.meter.handed_back.add(held.len());
            // Other replicas continue with them now, not at their next fetch.
            self.hints.hint(self.queue.pipeline);
        }
    }

    /// Returns the result of the store; `None`, with a log event, if it fails or exceeds the lifetime of a lease.
    pub(crate) async fn with_timeout<T>(
        &self,
        call: impl Future<Output = Result<T, StoreError>>,
    ) -> Option<T> {
        let message = match timeout(self.settings.lease_ttl, call).await {
            Ok(Ok(answer)) => return Some(answer),
            Ok(Err(error)) => error_chain(&error),
            Err(_) => "no response in time".to_owned(),
        };
        self.meter.store_errors.add(1);
        tracing::warn!(pipeline = self.queue.pipeline, error = message, "failed to access lease store");
        None
    }
}

/// Earliest time at which a row is known to be due.
#[derive(Debug, Default)]
pub(crate) struct DueTimer {
    earliest: Mutex<Option<Instant>>,
    rescheduled: Notify,
}

impl DueTimer {
    pub(crate) fn schedule(&self, due_at: Instant) {
        let mut earliest = self.earliest.lock();
        if earliest.is_none_or(|known| due_at < known) {
            *earliest = Some(due_at);
            self.rescheduled.notify_one();
        }
    }

    /// Clears the known time: the next claim will return it again.
    pub(crate) fn take(&self) -> Option<Instant> {
        self.earliest.lock().take()
    }

    pub(crate) fn earliest(&self) -> Option<Instant> {
        *self.earliest.lock()
    }

    /// Waits until an earlier time is set.
    pub(crate) async fn rescheduled(&self) {
        self.rescheduled.notified().await;
    }
}

/// Returns an error and all its causes on one line.
pub(crate) fn error_chain(error: &(dyn std::error::Error + 'static)) -> String {
    let causes = std::iter::successors(Some(error), |error| error.source());
    causes.map(ToString::to_string).collect::<Vec<_>>().join(": ")
}
