//! Body of a request that is forwarded to a replica.
//!
//! It is read only as fast as the replica accepts it. A small body is buffered, so that it can be sent again to another
//! replica.

use std::{
    future::Future as _,
    pin::Pin,
    task::{Context, Poll, ready},
    time::Duration,
};

use bytes::Bytes;
use http_body_util::{BodyExt as _, combinators::UnsyncBoxBody};
use hyper::{
    HeaderMap,
    body::{Body, Incoming, SizeHint},
};
use tokio::time::{Instant, Sleep};

pub(crate) type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// Maximum size of a body that is buffered for a replay.
const REPLAY_MAX: usize = 64 * 1024;

/// Reason why the body of a request ended early.
#[derive(Debug, thiserror::Error)]
pub(crate) enum RequestBodyError {
    #[error("the request body is larger than {max} bytes")]
    TooLarge { max: u64 },
    #[error("no data received for {} s while reading the request body", .after.as_secs())]
    Stalled { after: Duration },
    #[error("the length of the request body does not match `Content-Length`")]
    LengthMismatch,
    #[error("failed to read the request body")]
    Read(#[source] BoxError),
}

/// Part of the body.
pub(crate) enum BodyPart {
    Data(Bytes),
    Trailers(HeaderMap),
}

enum BodySource {
    Empty,
    Full(Option<Bytes>),
    Incoming(Incoming),
    Boxed(UnsyncBoxBody<Bytes, BoxError>),
}

pub struct RequestBody {
    source: BodySource,
    /// Exact length, if it was known before the first part.
    length: Option<u64>,
    bytes_read: u64,
    length_max: Option<u64>,
    stall_timeout: Duration,
    /// Created at the first wait, because most bodies never wait.
    stall_timer: Option<Pin<Box<Sleep>>>,
    is_waiting: bool,
    /// Parts already read, as long as all of them can be replayed.
    replay: Option<Vec<Bytes>>,
    replay_len: usize,
    /// Number of buffered parts that were returned since the last rewind.
    replayed: usize,
    is_ended: bool,
}

impl From<Incoming> for RequestBody {
    fn from(body: Incoming) -> Self {
        if body.is_end_stream() {
            Self::new(BodySource::Empty)
        } else {
            Self::new(BodySource::Incoming(body))
        }
    }
}

impl From<Bytes> for RequestBody {
    fn from(body: Bytes) -> Self {
        if body.is_empty() { Self::new(BodySource::Empty) } else { Self::new(BodySource::Full(Some(body))) }
    }
}

impl RequestBody {
    fn new(source: BodySource) -> Self {
        let length = match &source {
            BodySource::Empty => Some(0),
            BodySource::Full(bytes) => Some(bytes.as_ref().map_or(0, |bytes| bytes.len() as u64)),
            BodySource::Incoming(body) => SizeHint::exact(&body.size_hint()),
            BodySource::Boxed(body) => SizeHint::exact(&body.size_hint()),
        };
        Self {
            source,
            length,
            bytes_read: 0,
            length_max: None,
            stall_timeout: Duration::MAX,
            stall_timer: None,
            is_waiting: false,
            replay: None,
            replay_len: 0,
            replayed: 0,
            is_ended: false,
        }
    }

    pub fn empty() -> Self {
        Self::new(BodySource::Empty)
    }

    /// Wraps any other body.
    pub fn boxed<B>(body: B) -> Self
    where
        B: Body<Data = Bytes> + Send + 'static,
        B::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
    {
        if body.is_end_stream() {
            return Self::new(BodySource::Empty);
        }
        Self::new(BodySource::Boxed(body.map_err(Into::into).boxed_unsync()))
    }

    pub(crate) fn set_limits(&mut self, bound: Option<u64>, stall: Duration) {
        self.length_max = bound;
        self.stall_timeout = stall;
    }

    pub(crate) fn is_empty(&self) -> bool {
        matches!(self.source, BodySource::Empty)
    }

    /// Returns the exact length, if it is known in advance.
    pub(crate) const fn length(&self) -> Option<u64> {
        self.length
    }

    pub(crate) const fn taken(&self) -> u64 {
        self.bytes_read
    }

    /// Starts to buffer the body for a replay, if it is short.
    pub(crate) fn enable_replay(&mut self) {
        if self.length().is_some_and(|length| length <= REPLAY_MAX as u64) {
            self.replay = Some(Vec::new());
        }
    }

    /// Restarts from the beginning. Returns false if that is not possible.
    pub(crate) fn rewind(&mut self) -> bool {
        if self.bytes_read == 0 && !self.is_ended {
            return true;
        }
        if self.is_empty() || self.replay.is_some() {
            self.replayed = 0;
            return true;
        }
        false
    }

    pub(crate) fn poll_part(
        &mut self,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<BodyPart, RequestBodyError>>> {
        if let Some(kept) = &self.replay
            && let Some(piece) = kept.get(self.replayed)
        {
            self.replayed += 1;
            return Poll::Ready(Some(Ok(BodyPart::Data(piece.clone()))));
        }
        if self.is_ended {
            return Poll::Ready(None);
        }
        let frame = match &mut self.source {
            BodySource::Empty => None,
            BodySource::Full(bytes) => bytes.take().map(|bytes| Ok(hyper::body::Frame::data(bytes))),
            BodySource::Incoming(body) => match Pin::new(body).poll_frame(cx) {
                Poll::Ready(frame) => {
                    frame.map(|frame| frame.map_err(|error| RequestBodyError::Read(error.into())))
                }
                Poll::Pending => return self.poll_stall(cx),
            },
            BodySource::Boxed(body) => match Pin::new(body).poll_frame(cx) {
                Poll::Ready(frame) => frame.map(|frame| frame.map_err(RequestBodyError::Read)),
                Poll::Pending => return self.poll_stall(cx),
            },
        };
        self.is_waiting = false;
        let Some(frame) = frame else {
            self.is_ended = true;
            return Poll::Ready(None);
        };
        Poll::Ready(Some(frame.and_then(|frame| self.accept_frame(frame))))
    }

    fn accept_frame(&mut self, frame: hyper::body::Frame<Bytes>) -> Result<BodyPart, RequestBodyError> {
        let data = match frame.into_data() {
            Ok(data) => data,
            Err(frame) => return Ok(BodyPart::Trailers(frame.into_trailers().unwrap_or_default())),
        };
        self.bytes_read = self.bytes_read.saturating_add(data.len() as u64);
        if let Some(max) = self.length_max
            && self.bytes_read > max
        {
            return Err(RequestBodyError::TooLarge { max });
        }
        if let Some(kept) = &mut self.replay {
            self.replay_len += data.len();
            if self.replay_len > REPLAY_MAX {
                self.replay = None;
            } else {
                kept.push(data.clone());
                self.replayed = kept.len();
            }
        }
        Ok(BodyPart::Data(data))
    }

    /// Waits for data, up to the stall timeout of the caller.
    fn poll_stall(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<BodyPart, RequestBodyError>>> {
        let stall = self.stall_timeout;
        let Some(until) = Instant::now().checked_add(stall) else { return Poll::Pending };
        let alarm = self.stall_timer.get_or_insert_with(|| Box::pin(tokio::time::sleep_until(until)));
        if !self.is_waiting {
            self.is_waiting = true;
            alarm.as_mut().reset(until);
        }
        ready!(alarm.as_mut().poll(cx));
        self.is_ended = true;
        Poll::Ready(Some(Err(RequestBodyError::Stalled { after: stall })))
    }
}
