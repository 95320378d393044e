//! What the tasks of one pipeline share, and what becomes of a row once its pass is over.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use parking_lot::Mutex;
use tokio::{
    sync::{Notify, mpsc},
    time::{Instant, timeout},
};
use uuid::Uuid;

use crate::{
    finish::Finish,
    hint::Hints,
    lease::Tracked,
    line::Line,
    pipeline::Applied,
    settings::{Settings, step_of},
    status::Meter,
    store::{Held, LeaseStore, Queue, StoreError},
};

/// Rows whose failures are remembered, at most; beyond it the ones that failed longest ago are forgotten
/// and start again with the shortest delay.
const FAILURES_MAX: usize = 4096;

pub(crate) struct Crank<S> {
    pub(crate) store: Arc<S>,
    pub(crate) queue: Queue,
    pub(crate) settings: Settings,
    pub(crate) hints: Hints,
    pub(crate) meter: Arc<Meter>,
    pub(crate) agenda: Agenda,
    /// Rows that went back without progress, and until when a claim of nothing but such rows earns a pause.
    pub(crate) put_back: Mutex<BTreeMap<Uuid, Instant>>,
    failures: Mutex<BTreeMap<Uuid, Failures>>,
}

#[derive(Clone, Copy, Debug)]
struct Failures {
    count: usize,
    last_at: Instant,
}

impl<S: LeaseStore> Crank<S> {
    pub(crate) fn new(
        store: Arc<S>,
        queue: Queue,
        settings: Settings,
        hints: Hints,
        meter: Arc<Meter>,
    ) -> Self {
        Self {
            store,
            queue,
            settings,
            hints,
            meter,
            agenda: Agenda::default(),
            put_back: Mutex::default(),
            failures: Mutex::default(),
        }
    }

    pub(crate) fn new_line(&self) -> Arc<Line> {
        // A lower limit above the bound would have the fetcher claim into a full queue.
        let len_min = self.settings.queue_len_min.min(self.settings.queue_len_max);
        let line = Arc::new(Line::new(len_min));
        self.meter.watch(line.clone());
        line
    }

    /// Does what the outcome of a pass asks for.
    pub(crate) async fn settle(&self, row: Arc<Tracked>, applied: Applied, out: &mpsc::Sender<Finish>) {
        match applied {
            Applied::Written { due_in_us, wake } => {
                self.succeeded(&row);
                self.meter.applied(1);
                if let Some(due_in) = due_in_us {
                    self.agenda
                        .tell(Instant::now() + Duration::from_micros(u64::try_from(due_in).unwrap_or(0)));
                }
                for pipeline in wake {
                    self.hints.hint(pipeline);
                }
            }
            Applied::Unchanged { due_in } => {
                self.forgive(row.lease.id);
                Finish::done(row, due_in).send(out).await;
            }
            Applied::LeaseLost => {
                self.meter.leases.release(&row);
                self.meter.stale.add(1);
            }
            Applied::RelatedBusy => self.reset(&row).await,
        }
    }

    /// The row was there no more, or not ours: unlock it if we still can.
    pub(crate) async fn settle_gone(&self, row: Arc<Tracked>, out: &mpsc::Sender<Finish>) {
        self.forgive(row.lease.id);
        self.expect_back(row.lease.id);
        Finish::gone(row).send(out).await;
    }

    /// The pass failed: the row comes back later and later, so that it cannot spin.
    pub(crate) async fn settle_failed(&self, row: Arc<Tracked>, out: &mpsc::Sender<Finish>) {
        self.meter.errors.add(1);
        let retry_in = self.failed(row.lease.id);
        Finish::failed(row, retry_in).send(out).await;
    }

    /// Errors of passes end here: said once, with the row and all causes.
    pub(crate) fn say_failed(&self, row: &Tracked, error: &str) {
        tracing::warn!(pipeline = self.queue.pipeline, id = %row.lease.id, error, "pass failed");
    }

    pub(crate) fn settle_lost(&self, row: &Tracked) {
        self.meter.leases.release(row);
        if row.lose() {
            self.meter.lost.add(1);
            tracing::warn!(pipeline = self.queue.pipeline, id = %row.lease.id, "lost the lease of a row");
        }
    }

    async fn reset(&self, row: &Tracked) {
        let answer = self.in_time(self.store.reset(&self.queue, row.held())).await;
        self.meter.leases.release(row);
        match answer {
            Some(true) => {
                self.meter.reset.add(1);
                self.expect_back(row.lease.id);
            }
            Some(false) => self.meter.stale.add(1),
            None => {} // Said already; the lock expires by itself.
        }
    }

    fn succeeded(&self, row: &Tracked) {
        self.meter.leases.release(row);
        self.forgive(row.lease.id);
    }

    fn expect_back(&self, id: Uuid) {
        let back_at = Instant::now() + self.settings.related_retry_delay;
        self.agenda.tell(back_at);
        // Remembered for the fetch at that time too, or every other retry would follow on its heels.
        self.put_back.lock().insert(id, back_at + self.settings.related_retry_delay);
    }

    fn forgive(&self, id: Uuid) {
        self.failures.lock().remove(&id);
    }

    fn failed(&self, id: Uuid) -> Duration {
        let now = Instant::now();
        let mut failures = self.failures.lock();
        if failures.len() >= FAILURES_MAX
            && let Some((oldest, _)) = failures.iter().min_by_key(|(_, failures)| failures.last_at)
        {
            let oldest = *oldest;
            failures.remove(&oldest);
        }
        let entry = failures.entry(id).or_insert(Failures { count: 0, last_at: now });
        let delay = step_of(self.settings.error_delays, entry.count);
        entry.count += 1;
        entry.last_at = now;
        delay
    }

    /// Gives rows back as they were taken. Best effort: what cannot be given back expires.
    pub(crate) async fn hand_back(&self, rows: Vec<Arc<Tracked>>) {
        if rows.is_empty() {
            return;
        }
        let held: Vec<Held> = rows.iter().map(|row| row.held()).collect();
        for row in &rows {
            self.meter.leases.release(row);
        }
        // A stop must not hang on a store that does.
        let call =
            timeout(self.settings.lease_margin, self.in_time(self.store.hand_back(&self.queue, &held)));
        if let Ok(Some(())) = call.await {
            self.meter.handed_back.add(held.len());
            // Somebody else is to go on with them now, not when its next fetch happens to come.
            self.hints.hint(self.queue.pipeline);
        }
    }

    /// The store's answer; `None`, and said, when it fails or takes as long as a lease lives.
    pub(crate) async fn in_time<T>(&self, call: impl Future<Output = Result<T, StoreError>>) -> Option<T> {
        let said = match timeout(self.settings.lease_ttl, call).await {
            Ok(Ok(answer)) => return Some(answer),
            Ok(Err(error)) => chain(&error),
            Err(_) => "no answer in time".to_owned(),
        };
        self.meter.store_errors.add(1);
        tracing::warn!(pipeline = self.queue.pipeline, error = said, "lease store failed");
        None
    }
}

/// The earliest time at which a row is known to be due.
#[derive(Debug, Default)]
pub(crate) struct Agenda {
    earliest: Mutex<Option<Instant>>,
    sooner: Notify,
}

impl Agenda {
    pub(crate) fn tell(&self, due_at: Instant) {
        let mut earliest = self.earliest.lock();
        if earliest.is_none_or(|known| due_at < known) {
            *earliest = Some(due_at);
            self.sooner.notify_one();
        }
    }

    /// Forgets what is known: the claim about to be sent will say it anew.
    pub(crate) fn take(&self) -> Option<Instant> {
        self.earliest.lock().take()
    }

    pub(crate) fn earliest(&self) -> Option<Instant> {
        *self.earliest.lock()
    }

    /// Waits until an earlier time than before is told.
    pub(crate) async fn sooner(&self) {
        self.sooner.notified().await;
    }
}

/// An error and all its causes on one line.
pub(crate) fn chain(error: &(dyn std::error::Error + 'static)) -> String {
    let causes = std::iter::successors(Some(error), |error| error.source());
    causes.map(ToString::to_string).collect::<Vec<_>>().join(": ")
}
