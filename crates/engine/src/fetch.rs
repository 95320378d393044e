//! The fetcher: claims many rows at once whenever the queue runs low, and sleeps while there is nothing to claim.
//!
//! It wakes for a hint, for the earliest known due time, or after a delay that grows with each empty fetch. The delay
//! is the fallback: it finds the rows of a dead replica and those of a lost hint.

use std::{sync::Arc, time::Duration};

use tokio::{
    sync::watch,
    time::{Instant, sleep_until},
};

use crate::{
    hint::Subscription,
    runtime::PipelineRuntime,
    settings::{Jitter, delay_at},
    store::{Claim, LeaseStore},
    work_queue::WorkQueue,
};

/// A row that is due but could not be claimed must not make the fetcher spin.
const PAUSE_MIN: Duration = Duration::from_millis(1);

/// `Some` once the pipeline is to stop: the deadline of the stop.
pub(crate) type StopSignal = watch::Receiver<Option<Instant>>;

pub(crate) struct Fetcher<S> {
    runtime: Arc<PipelineRuntime<S>>,
    queue: Arc<WorkQueue>,
    hints: Subscription,
    stop: StopSignal,
    jitter: Jitter,
    claims: ClaimTiming,
    /// Empty fetches in a row.
    empty_fetches: usize,
}

/// When rows are claimed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ClaimTiming {
    /// Ahead of the workers, so that they never wait.
    Ahead,
    /// When none is held: every batch has all rows that are due, also those of the batch before it.
    BetweenBatches,
}

/// Reason why the fetcher continues.
enum WakeReason {
    Fetch,
    Stop,
}

impl<S: LeaseStore> Fetcher<S> {
    pub(crate) fn new(
        runtime: Arc<PipelineRuntime<S>>,
        queue: Arc<WorkQueue>,
        hints: Subscription,
        stop: StopSignal,
        claims: ClaimTiming,
    ) -> Self {
        let jitter = Jitter::new(runtime.settings.jitter_seed, runtime.queue.pipeline);
        Self { runtime, queue, hints, stop, jitter, claims, empty_fetches: 0 }
    }

    /// Runs until the stop signal. A claim in progress is awaited: its rows would be locked without a holder otherwise.
    pub(crate) async fn run(mut self) {
        loop {
            tokio::select! {
                biased;
                _ = self.stop.wait_for(Option::is_some) => return,
                () = wait_for_room(&self.runtime, &self.queue, self.claims) => {}
            }
            let pause = self.fetch().await;
            if let Some(pause) = pause
                && matches!(self.pause(pause).await, WakeReason::Stop)
            {
                return;
            }
        }
    }

    /// Performs one claim. Returns the pause after it, if any.
    async fn fetch(&mut self) -> Option<Duration> {
        let (runtime, settings) = (&self.runtime, &self.runtime.settings);
        let room = settings.queue_len_max.saturating_sub(self.queue.len());
        let limit = room.min(settings.claim_max);
        // This claim includes everything that was hinted or became due until now; later hints are kept.
        self.hints.take();
        let known_due = runtime.due_timer.take();
        runtime.meter.fetches.add(1);
        let answer =
            runtime.with_timeout(runtime.store.claim(&runtime.queue, limit, settings.lease_ttl)).await;
        let Some(Claim { leases, next_due_in }) = answer else {
            if let Some(due_at) = known_due {
                runtime.due_timer.schedule(due_at);
            }
            // A hint does not make the store available again, so it is left for the fetch after the pause.
            let delay = self.next_idle_delay();
            return Some(delay);
        };
        if let Some(due_in) = next_due_in {
            runtime.due_timer.schedule(Instant::now() + due_in);
        }
        if leases.is_empty() {
            runtime.meter.fetches_empty.add(1);
            return Some(self.next_idle_delay());
        }
        runtime.meter.claimed.add(leases.len());
        let took_all = leases.len() < limit;
        let is_only_put_back = {
            let now = Instant::now();
            let mut put_back = runtime.returned_rows.lock();
            put_back.retain(|_, until| *until > now);
            leases.iter().all(|lease| put_back.contains_key(&lease.id))
        };
        let lease_use = settings.lease_validity();
        self.queue
            .push(leases.into_iter().map(|lease| runtime.meter.leases.track(lease, lease_use)).collect());
        self.empty_fetches = 0;
        if is_only_put_back {
            // Only rows that were just put back: wait for the holder of their related rows.
            return Some(self.jitter.apply(self.runtime.settings.related_retry_delay));
        }
        // No due rows are left; the next one comes with a hint or at its due time.
        took_all.then(|| self.next_idle_delay())
    }

    fn next_idle_delay(&mut self) -> Duration {
        let delays = self.runtime.settings.idle_delays;
        let delay = self.jitter.apply(delay_at(delays, self.empty_fetches));
        self.empty_fetches = self.empty_fetches.saturating_add(1);
        // The longest delay bounds the takeover of a dead replica's rows, so jitter only shortens it.
        delay.min(delays.last().copied().unwrap_or(delay))
    }

    async fn pause(&mut self, pause: Duration) -> WakeReason {
        let until = Instant::now() + pause;
        let soonest = Instant::now() + PAUSE_MIN;
        loop {
            let due_at = self.runtime.due_timer.earliest().map_or(until, |at| at.max(soonest).min(until));
            tokio::select! {
                biased;
                _ = self.stop.wait_for(Option::is_some) => return WakeReason::Stop,
                () = self.hints.wait() => {
                    // There is activity: restart with short delays.
                    self.empty_fetches = 0;
                    return WakeReason::Fetch;
                }
                () = self.runtime.due_timer.rescheduled() => {}
                () = sleep_until(due_at) => return WakeReason::Fetch,
            }
        }
    }
}

/// Waits until more rows may be claimed.
async fn wait_for_room<S>(runtime: &PipelineRuntime<S>, queue: &WorkQueue, claims: ClaimTiming) {
    match claims {
        ClaimTiming::Ahead => queue.wait_below_min().await,
        ClaimTiming::BetweenBatches => runtime.meter.leases.wait_for_none().await,
    }
}
