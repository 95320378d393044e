//! Merged live output of all jobs of a run.

use std::{future::poll_fn, task::Poll, time::Duration};

use tokio::time::{Instant, timeout, timeout_at};
use uuid::Uuid;
use windlass_api::runs::Run;
use windlass_model::time::Timestamp;

use super::{
    events::EventWriter,
    log_printer::{JobIndex, LogPrinter},
    log_tail::{LogChunk, LogRange, LogTail, TailEvent},
    progress::job_progress,
    progress_tree::ProgressTree,
};
use crate::{context::Context, error::CliError};

/// Time limit for the remaining output of a finished job.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(15);
/// Without a stream, the first page after the end is the last; one page may have been requested before.
const EMPTY_PAGES_MAX: u32 = 2;

/// Reason why pumping stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PumpEnd {
    /// The deadline passed.
    DeadlineReached,
    /// One of the logs is complete.
    Over,
    /// The reader closed stdout.
    OutputClosed,
}

/// Output format.
pub(crate) enum OutputMode {
    Text(LogPrinter),
    /// JSON events for machines.
    Events,
}

pub(crate) struct LogMux<'a> {
    output: OutputMode,
    tails: Vec<(JobIndex, LogTail<'a>)>,
    /// Round-robin index, for fairness between streams.
    next_stream: usize,
}

impl<'a> LogMux<'a> {
    pub(crate) fn new(output: OutputMode) -> Self {
        Self { output, tails: Vec::new(), next_stream: 0 }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.tails.is_empty()
    }

    /// Returns whether the output ends within a line.
    pub(super) fn mid_line(&self) -> bool {
        match &self.output {
            OutputMode::Text(printer) => printer.mid_line,
            OutputMode::Events => false,
        }
    }

    /// Returns the submission of a job that is followed.
    pub(crate) fn submission_of(&self, place: JobIndex) -> Option<Uuid> {
        self.tails.iter().find(|(other, _)| *other == place).map(|(_, tail)| tail.submission())
    }

    /// Sets the prefix for the lines of a job, instead of its replica and job number.
    pub(crate) fn set_label(&mut self, place: JobIndex, label: String) {
        if let OutputMode::Text(printer) = &mut self.output {
            printer.labels.insert(place, label);
        }
    }

    pub(crate) fn add(&mut self, place: JobIndex, tail: LogTail<'a>) {
        self.tails.push((place, tail));
        if let OutputMode::Text(printer) = &mut self.output {
            printer.several |= self.tails.len() > 1;
        }
    }

    /// Follows the newest submission of each job, after printing the rest of the previous one. Returns false if stdout
    /// is closed.
    pub(super) async fn switch_to(
        &mut self,
        cx: &'a Context,
        name: &str,
        run: &Run,
        since: Option<Timestamp>,
        tree: &mut ProgressTree,
    ) -> Result<bool, CliError> {
        let all = job_progress(run);
        if let OutputMode::Text(printer) = &mut self.output {
            printer.several |= all.len() > 1;
        }
        for job in all {
            let place = (job.replica, job.job);
            match self.submission_of(place) {
                Some(known) if known == job.submission => continue,
                Some(_) if !self.remove(place, tree).await? => return Ok(false),
                Some(_) | None => {}
            }
            self.add(place, LogTail::new(cx, LogRange { since, ..LogRange::whole(name, job.submission) }));
        }
        Ok(true)
    }

    /// Writes output until the deadline.
    pub(crate) async fn pump(
        &mut self,
        until: Instant,
        tree: &mut ProgressTree,
    ) -> Result<PumpEnd, CliError> {
        loop {
            let Ok((index, received)) = timeout_at(until, self.next_event()).await else {
                return Ok(PumpEnd::DeadlineReached);
            };
            match received? {
                TailEvent::Chunks(pieces) => {
                    if !self.write(index, &pieces, tree) {
                        return Ok(PumpEnd::OutputClosed);
                    }
                }
                TailEvent::Idle => {}
                TailEvent::Over => {
                    return Ok(if self.flush_line(index, tree) {
                        PumpEnd::Over
                    } else {
                        PumpEnd::OutputClosed
                    });
                }
            }
        }
    }

    /// Writes the remaining output after all jobs have ended. Returns false if stdout is closed.
    pub(crate) async fn finish(&mut self, tree: &mut ProgressTree) -> Result<bool, CliError> {
        for index in 0..self.tails.len() {
            if !self.drain_stream(index, tree).await? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Writes the remaining output of a job and stops following it. Returns false if stdout is closed.
    pub(crate) async fn remove(
        &mut self,
        place: JobIndex,
        tree: &mut ProgressTree,
    ) -> Result<bool, CliError> {
        let Some(index) = self.tails.iter().position(|(other, _)| *other == place) else { return Ok(true) };
        let is_read = self.drain_stream(index, tree).await?;
        self.tails.remove(index);
        Ok(is_read)
    }

    async fn drain_stream(&mut self, index: usize, tree: &mut ProgressTree) -> Result<bool, CliError> {
        let mut empty = 0;
        while !self.tails[index].1.is_over() && empty < EMPTY_PAGES_MAX {
            let tail = &mut self.tails[index].1;
            // A log without an end, because its host is lost, has been read as far as it was stored.
            let Ok(received) = timeout(DRAIN_TIMEOUT, poll_fn(|cx| tail.poll_next(cx))).await else { break };
            match received? {
                TailEvent::Chunks(pieces) => {
                    empty = 0;
                    if !self.write(index, &pieces, tree) {
                        return Ok(false);
                    }
                }
                TailEvent::Idle => empty += 1,
                TailEvent::Over => break,
            }
        }
        Ok(self.flush_line(index, tree))
    }

    /// Returns the next event of any log. Never completes if there is none. Cancel-safe.
    async fn next_event(&mut self) -> (usize, Result<TailEvent, CliError>) {
        poll_fn(|cx| {
            let count = self.tails.len();
            for step in 0..count {
                let index = (self.next_stream + step) % count;
                if let Poll::Ready(received) = self.tails[index].1.poll_next(cx) {
                    self.next_stream = index + 1;
                    return Poll::Ready((index, received));
                }
            }
            Poll::Pending
        })
        .await
    }

    /// Returns false if stdout is closed.
    fn write(&mut self, index: usize, pieces: &[LogChunk], tree: &mut ProgressTree) -> bool {
        let (place, tail) = &self.tails[index];
        match &mut self.output {
            OutputMode::Events => {
                pieces.iter().for_each(|piece| EventWriter::log(*place, tail.submission(), piece));
                true
            }
            OutputMode::Text(printer) => {
                tree.erase();
                pieces.iter().all(|piece| printer.write(*place, piece.at, &piece.bytes))
            }
        }
    }

    fn flush_line(&mut self, index: usize, tree: &mut ProgressTree) -> bool {
        match &mut self.output {
            OutputMode::Events => true,
            OutputMode::Text(printer) => {
                tree.erase();
                printer.finish_job(self.tails[index].0)
            }
        }
    }
}
