//! The fetcher: claims many rows at once whenever the queue runs low, and sleeps while there is nothing.
//!
//! It wakes for a hint, for the earliest due time it knows of, or after a delay that grows with each empty
//! fetch. That last one is the safety net: it finds what a dead replica left behind and what a lost hint
//! would have told.

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

/// A due time that has come but whose row could not be claimed must not make the fetcher spin.
const PAUSE_MIN: Duration = Duration::from_millis(1);

/// `Some` once the pipeline is to stop: the moment by which it must have.
pub(crate) type StopSignal = watch::Receiver<Option<Instant>>;

pub(crate) struct Fetcher<S> {
    runtime: Arc<PipelineRuntime<S>>,
    queue: Arc<WorkQueue>,
    hints: Subscription,
    stop: StopSignal,
    jitter: Jitter,
    /// Empty fetches in a row.
    empty_fetches: usize,
}

/// Why the fetcher goes on.
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
    ) -> Self {
        let jitter = Jitter::new(runtime.settings.jitter_seed, runtime.queue.pipeline);
        Self { runtime, queue, hints, stop, jitter, empty_fetches: 0 }
    }

    /// Runs until it is told to stop. A claim that is on its way then is waited for: nobody else would
    /// know of its rows.
    pub(crate) async fn run(mut self) {
        loop {
            tokio::select! {
                biased;
                _ = self.stop.wait_for(Option::is_some) => return,
                () = self.queue.wait_below_min() => {}
            }
            let pause = self.fetch().await;
            if let Some(pause) = pause
                && matches!(self.pause(pause).await, WakeReason::Stop)
            {
                return;
            }
        }
    }

    /// One claim. Answers how long to pause, if at all.
    async fn fetch(&mut self) -> Option<Duration> {
        let (crank, settings) = (&self.runtime, &self.runtime.settings);
        let room = settings.queue_len_max.saturating_sub(self.queue.len());
        let limit = room.min(settings.claim_max);
        // Whatever was hinted or became due until now, this claim sees; what comes later stays noted.
        self.hints.take();
        let known_due = crank.due_timer.take();
        crank.meter.fetches.add(1);
        let answer = crank.with_timeout(crank.store.claim(&crank.queue, limit, settings.lease_ttl)).await;
        let Some(Claim { leases, next_due_in }) = answer else {
            if let Some(due_at) = known_due {
                crank.due_timer.schedule(due_at);
            }
            // A hint cannot mend the store, so it is left for the fetch after the pause.
            let delay = self.next_idle_delay();
            return Some(delay);
        };
        if let Some(due_in) = next_due_in {
            crank.due_timer.schedule(Instant::now() + due_in);
        }
        if leases.is_empty() {
            crank.meter.fetches_empty.add(1);
            return Some(self.next_idle_delay());
        }
        crank.meter.claimed.add(leases.len());
        let took_all = leases.len() < limit;
        let is_only_put_back = {
            let now = Instant::now();
            let mut put_back = crank.returned_rows.lock();
            put_back.retain(|_, until| *until > now);
            leases.iter().all(|lease| put_back.contains_key(&lease.id))
        };
        let lease_use = settings.lease_validity();
        self.queue.push(leases.into_iter().map(|lease| crank.meter.leases.track(lease, lease_use)).collect());
        self.empty_fetches = 0;
        if is_only_put_back {
            // Rows that were put back a moment ago and nothing else: give whoever is in their way some time.
            return Some(self.jitter.apply(self.runtime.settings.related_retry_delay));
        }
        // Nothing that is due is left; what comes now comes with a hint or with its time.
        took_all.then(|| self.next_idle_delay())
    }

    fn next_idle_delay(&mut self) -> Duration {
        let delays = self.runtime.settings.idle_delays;
        let delay = self.jitter.apply(delay_at(delays, self.empty_fetches));
        self.empty_fetches = self.empty_fetches.saturating_add(1);
        // The longest delay is a promise to whoever waits for a dead replica's rows: jitter only shortens it.
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
                    // Something is going on: look closely again for a while.
                    self.empty_fetches = 0;
                    return WakeReason::Fetch;
                }
                () = self.runtime.due_timer.rescheduled() => {}
                () = sleep_until(due_at) => return WakeReason::Fetch,
            }
        }
    }
}
