//! Copies output from the job's pipe or terminal to the spool, on a separate thread.
//!
//! The thread does nothing but read and write, so output is never delayed by calls, and memory stays at one buffer
//! however much output there is. Output that cannot be stored is still read, because a full pipe would keep the job
//! from ending.

use std::{
    fs::File,
    io::{self, PipeReader, PipeWriter, Read},
};

use rustix::event::{PollFd, PollFlags, poll};
use tokio::sync::oneshot;

use crate::spool::{Writer, write::Error};

const BUFFER: usize = 64 * 1024;
/// Maximum number of bytes read after a cut: a process that cannot be killed may print without limit.
const DRAIN_BYTES_MAX: usize = 16 << 20;

/// Reason for which output is no longer stored.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum OutputError {
    Quota { per_hour: u64 },
    NoSpace { why: String },
    Io { why: String },
}

#[derive(Debug)]
pub struct OutputPump {
    cut: Option<PipeWriter>,
    ended: oneshot::Receiver<()>,
    failure: oneshot::Receiver<OutputError>,
}

impl OutputPump {
    pub fn start(output: File, writer: Writer) -> io::Result<Self> {
        let (reported, cut) = io::pipe()?;
        let (end, ended) = oneshot::channel();
        let (report, failure) = oneshot::channel();
        std::thread::Builder::new().name("output".to_owned()).spawn(move || {
            let mut flow = PumpThread { output, writer, report: Some(report) };
            flow.run(&reported);
            drop(flow);
            // The receiver is dropped if the job was abandoned; then no notification is needed.
            let _ = end.send(());
        })?;
        Ok(Self { cut: Some(cut), ended, failure })
    }

    /// Waits until all output is in the spool and no process can write more.
    pub async fn ended(&mut self) {
        if !self.ended.is_terminated() {
            let _ = (&mut self.ended).await;
        }
    }

    /// Waits for the first error; never returns if there is none.
    pub async fn failure(&mut self) -> OutputError {
        if !self.failure.is_terminated()
            && let Ok(failure) = (&mut self.failure).await
        {
            return failure;
        }
        std::future::pending().await
    }

    /// Returns an error that was not yet reported.
    pub fn take_error(&mut self) -> Option<OutputError> {
        self.failure.try_recv().ok()
    }

    /// Reads what is available now and ends, even if a process could still write.
    pub fn cut(&mut self) {
        self.cut = None;
    }
}

struct PumpThread {
    output: File,
    writer: Writer,
    report: Option<oneshot::Sender<OutputError>>,
}

impl PumpThread {
    fn run(&mut self, reported: &PipeReader) {
        let mut buffer = vec![0; BUFFER];
        loop {
            let (readable, cut) = match self.wait(reported) {
                Ok(ready) => ready,
                Err(error) => return self.report_error(OutputError::Io { why: error.to_string() }),
            };
            if readable && !self.copy_chunk(&mut buffer) {
                return;
            }
            if cut {
                return self.drain(&mut buffer);
            }
        }
    }

    fn wait(&self, reported: &PipeReader) -> io::Result<(bool, bool)> {
        let mut fds = [PollFd::new(&self.output, PollFlags::IN), PollFd::new(reported, PollFlags::IN)];
        match poll(&mut fds, None) {
            Err(rustix::io::Errno::INTR) => return Ok((false, false)),
            ready => ready?,
        };
        Ok((!fds[0].revents().is_empty(), !fds[1].revents().is_empty()))
    }

    /// Copies one buffer; returns `false` at the end.
    fn copy_chunk(&mut self, buffer: &mut [u8]) -> bool {
        match self.output.read(buffer) {
            Ok(0) => false,
            Ok(count) => {
                self.keep(&buffer[..count]);
                true
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => true,
            // A terminal returns an error when its other side is closed permanently.
            Err(_) => false,
        }
    }

    fn drain(&mut self, buffer: &mut [u8]) {
        let mut left = DRAIN_BYTES_MAX;
        while left > 0 {
            let mut fds = [PollFd::new(&self.output, PollFlags::IN)];
            let now = rustix::event::Timespec { tv_sec: 0, tv_nsec: 0 };
            let is_ready =
                matches!(poll(&mut fds, Some(&now)), Ok(1)) && fds[0].revents().contains(PollFlags::IN);
            if !is_ready || !self.copy_chunk(buffer) {
                return;
            }
            left = left.saturating_sub(buffer.len());
        }
    }

    fn keep(&mut self, bytes: &[u8]) {
        if self.report.is_none() {
            return;
        }
        match self.writer.append(bytes) {
            Ok(()) => {}
            Err(Error::QuotaExceeded { per_hour, .. }) => self.report_error(OutputError::Quota { per_hour }),
            Err(Error::NoSpace { source, .. }) => {
                self.report_error(OutputError::NoSpace { why: source.to_string() })
            }
            Err(error @ (Error::Open { .. } | Error::Complete | Error::Io { .. })) => {
                self.report_error(OutputError::Io { why: error.to_string() });
            }
        }
    }

    fn report_error(&mut self, failure: OutputError) {
        if let Some(report) = self.report.take() {
            let _ = report.send(failure);
        }
    }
}
