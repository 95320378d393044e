//! The bounded queue between the fetcher and the workers.

use std::{collections::VecDeque, sync::Arc};

use parking_lot::Mutex;
use tokio::sync::{Notify, Semaphore};

use crate::lease::TrackedLease;

#[derive(Debug)]
pub(crate) struct WorkQueue {
    waiting: Mutex<VecDeque<Arc<TrackedLease>>>,
    /// One permit per row; tokio assigns them in order, so workers alternate.
    ready: Semaphore,
    below_min: Notify,
    len_min: usize,
}

impl WorkQueue {
    pub(crate) fn new(len_min: usize) -> Self {
        Self {
            waiting: Mutex::default(),
            ready: Semaphore::new(0),
            below_min: Notify::new(),
            len_min: len_min.max(1),
        }
    }

    pub(crate) fn push(&self, rows: Vec<Arc<TrackedLease>>) {
        let count = rows.len();
        self.waiting.lock().extend(rows);
        self.ready.add_permits(count);
    }

    pub(crate) fn len(&self) -> usize {
        self.waiting.lock().len()
    }

    /// Returns the next row; `None` once the queue is closed.
    pub(crate) async fn next(&self) -> Option<Arc<TrackedLease>> {
        self.next_many(1).await?.pop()
    }

    /// Returns the next rows, at least one and as many as there are; `None` once the queue is closed.
    pub(crate) async fn next_many(&self, count_max: usize) -> Option<Vec<Arc<TrackedLease>>> {
        loop {
            self.ready.acquire().await.ok()?.forget();
            let mut waiting = self.waiting.lock();
            let count = waiting.len().min(count_max.max(1));
            let rows: Vec<_> = waiting.drain(..count).collect();
            self.ready.forget_permits(count.saturating_sub(1));
            let is_low = waiting.len() < self.len_min;
            drop(waiting);
            if is_low {
                self.below_min.notify_one();
            }
            // A permit may outlive its row, if the queue was drained.
            if !rows.is_empty() {
                return Some(rows);
            }
        }
    }

    /// Waits until fewer rows than the lower limit are waiting.
    pub(crate) async fn wait_below_min(&self) {
        while self.len() >= self.len_min {
            self.below_min.notified().await;
        }
    }

    pub(crate) fn drain(&self) -> Vec<Arc<TrackedLease>> {
        self.waiting.lock().drain(..).collect()
    }

    /// Ends the workers once each has finished its current row.
    pub(crate) fn close(&self) {
        self.ready.close();
    }
}
