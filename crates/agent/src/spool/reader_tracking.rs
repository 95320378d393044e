//! Progress of readers: the runner stays until the server has the output and the tailers have disconnected.

use std::sync::Arc;

use tokio::sync::watch;

/// Maximum number of tailers of one task.
pub const TAILERS_MAX: usize = 1024;

#[derive(Debug, Default)]
pub struct ReaderTracker {
    state: watch::Sender<ReadProgress>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct ReadProgress {
    /// Offset up to which the job's output is stored elsewhere.
    read: u64,
    /// True if a dstack server has received the last answer.
    pulled: bool,
    tailers: usize,
    /// True if some tailer was sent everything.
    tailed: bool,
}

impl ReaderTracker {
    /// Records that the server has stored everything before `offset`. The offset never decreases.
    pub fn mark_read(&self, offset: u64) {
        self.state.send_if_modified(|state| {
            let further = offset > state.read;
            state.read = state.read.max(offset);
            further
        });
    }

    /// Records that the last answer of a pull was sent.
    pub fn mark_pulled(&self) {
        self.state.send_modify(|state| state.pulled = true);
    }

    pub fn tailers(&self) -> usize {
        self.state.borrow().tailers
    }

    /// Counts a tailer until the guard is dropped. Returns `None` if there are too many.
    pub fn tailer(self: &Arc<Self>) -> Option<TailerGuard> {
        let counted = self.state.send_if_modified(|state| {
            let room = state.tailers < TAILERS_MAX;
            state.tailers += usize::from(room);
            room
        });
        counted.then(|| TailerGuard(Arc::clone(self)))
    }

    /// Waits until the server has everything before `end` and no tailer is left.
    pub async fn all_read(&self, end: u64) {
        let done = |state: &ReadProgress| (state.read >= end || state.pulled) && state.tailers == 0;
        // This cannot fail: the sender belongs to this struct.
        let _ = self.state.subscribe().wait_for(done).await;
    }

    /// Waits until some tailer was sent everything and no tailer is left.
    pub async fn tailed(&self) {
        // This cannot fail: the sender belongs to this struct.
        let _ = self.state.subscribe().wait_for(|state| state.tailed && state.tailers == 0).await;
    }
}

#[derive(Debug)]
pub struct TailerGuard(Arc<ReaderTracker>);

impl TailerGuard {
    /// Records that this tailer was sent everything.
    pub fn mark_complete(&self) {
        self.0.state.send_modify(|state| state.tailed = true);
    }
}

impl Drop for TailerGuard {
    fn drop(&mut self) {
        self.0.state.send_modify(|state| state.tailers -= 1);
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt;

    use super::*;

    #[test]
    fn o7_output_counts_as_read_once_the_server_has_it_and_the_tailers_have_left() {
        let readers = Arc::new(ReaderTracker::default());
        let done = || readers.all_read(10).now_or_never().is_some();
        assert!(!done());
        let tailer = readers.tailer().unwrap();
        readers.mark_read(10);
        readers.mark_read(4);
        assert!(!done(), "a tailer is still there");
        drop(tailer);
        assert!(done());
    }

    #[test]
    fn o7_the_last_pull_marks_all_output_as_read() {
        let readers = ReaderTracker::default();
        readers.mark_pulled();
        assert!(readers.all_read(u64::MAX).now_or_never().is_some());
    }

    #[test]
    fn output_counts_as_tailed_once_a_tailer_has_read_all_of_it_and_left() {
        let readers = Arc::new(ReaderTracker::default());
        let done = || readers.tailed().now_or_never().is_some();
        drop(readers.tailer().unwrap());
        assert!(!done(), "it left before the end");
        let tailer = readers.tailer().unwrap();
        tailer.mark_complete();
        assert!(!done(), "it is still there");
        drop(tailer);
        assert!(done());
    }

    #[test]
    fn the_number_of_tailers_is_limited() {
        let readers = Arc::new(ReaderTracker::default());
        let held: Vec<TailerGuard> = (0..TAILERS_MAX).map(|_| readers.tailer().unwrap()).collect();
        assert!(readers.tailer().is_none());
        drop(held);
        assert_eq!(readers.tailers(), 0);
        assert!(readers.tailer().is_some());
    }
}
