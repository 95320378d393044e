//! Log store of the simulated servers: in memory, shared by all replicas.

use std::collections::HashMap;

use parking_lot::Mutex;
use windlass_model::id::{ProjectId, RunId, SubmissionId};
use windlass_server::logs::{Log, LogChunk, LogError, LogFuture, LogRange, LogSource, LogStore};

#[derive(Default)]
pub(super) struct MemoryLogs(Mutex<HashMap<Log, Vec<u8>>>);

impl MemoryLogs {
    /// Visits the log of every job.
    pub(super) fn all_logs(&self, mut visit_log: impl FnMut(SubmissionId, &[u8])) {
        for (log, bytes) in self.0.lock().iter().filter(|(log, _)| log.stream == LogSource::Job) {
            visit_log(log.submission, bytes);
        }
    }
}

impl LogStore for MemoryLogs {
    fn append_to_files<'a>(
        &'a self,
        log: &'a Log,
        offset: u64,
        _at: i64,
        bytes: &'a [u8],
    ) -> LogFuture<'a, u64> {
        Box::pin(async move {
            let mut logs = self.0.lock();
            let kept = logs.entry(*log).or_default();
            let end = kept.len() as u64;
            if offset > end {
                return Err(LogError::Gap { offset, end });
            }
            let known = usize::try_from(end - offset).unwrap_or(usize::MAX).min(bytes.len());
            kept.extend_from_slice(&bytes[known..]);
            Ok(kept.len() as u64)
        })
    }

    fn end<'a>(&'a self, log: &'a Log) -> LogFuture<'a, u64> {
        Box::pin(async move { Ok(self.0.lock().get(log).map_or(0, |kept| kept.len() as u64)) })
    }

    fn read<'a>(&'a self, log: &'a Log, _range: LogRange) -> LogFuture<'a, Vec<LogChunk>> {
        Box::pin(async move {
            let bytes = self.0.lock().get(log).cloned().unwrap_or_default();
            Ok(vec![LogChunk { offset: 0, at: 0, bytes }])
        })
    }

    fn sync<'a>(&'a self, _log: &'a Log) -> LogFuture<'a, ()> {
        Box::pin(async { Ok(()) })
    }

    fn remove(&self, _project: ProjectId, run: RunId) -> LogFuture<'_, ()> {
        Box::pin(async move {
            self.0.lock().retain(|log, _| log.run != run);
            Ok(())
        })
    }
}
