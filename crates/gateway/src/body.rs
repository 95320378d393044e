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
    #[error("the body is larger than {max} bytes")]
    TooLarge { max: u64 },
    #[error("the caller sent nothing for {} s in the middle of the body", .after.as_secs())]
    Stalled { after: Duration },
    #[error("the body is not as long as it was announced")]
    LengthMismatch,
    #[error("read the body of the request")]
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
    kind: BodySource,
    /// Exact length, if it was known before the first part.
    length: Option<u64>,
    taken: u64,
    bound: Option<u64>,
    stall: Duration,
    /// Created at the first wait, because most bodies never wait.
    alarm: Option<Pin<Box<Sleep>>>,
    waiting: bool,
    /// Parts already read, as long as all of them can be replayed.
    kept: Option<Vec<Bytes>>,
    kept_len: usize,
    /// Number of buffered parts that were returned since the last rewind.
    given: usize,
    ended: bool,
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
    fn new(kind: BodySource) -> Self {
        let length = match &kind {
            BodySource::Empty => Some(0),
            BodySource::Full(bytes) => Some(bytes.as_ref().map_or(0, |bytes| bytes.len() as u64)),
            BodySource::Incoming(body) => SizeHint::exact(&body.size_hint()),
            BodySource::Boxed(body) => SizeHint::exact(&body.size_hint()),
        };
        Self {
            kind,
            length,
            taken: 0,
            bound: None,
            stall: Duration::MAX,
            alarm: None,
            waiting: false,
            kept: None,
            kept_len: 0,
            given: 0,
            ended: false,
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
        self.bound = bound;
        self.stall = stall;
    }

    pub(crate) fn is_empty(&self) -> bool {
        matches!(self.kind, BodySource::Empty)
    }

    /// Returns the exact length, if it is known in advance.
    pub(crate) const fn length(&self) -> Option<u64> {
        self.length
    }

    pub(crate) const fn taken(&self) -> u64 {
        self.taken
    }

    /// Starts to buffer the body for a replay, if it is short.
    pub(crate) fn enable_replay(&mut self) {
        if self.length().is_some_and(|length| length <= REPLAY_MAX as u64) {
            self.kept = Some(Vec::new());
        }
    }

    /// Restarts from the beginning. Returns false if that is not possible.
    pub(crate) fn rewind(&mut self) -> bool {
        if self.taken == 0 && !self.ended {
            return true;
        }
        if self.is_empty() || self.kept.is_some() {
            self.given = 0;
            return true;
        }
        false
    }

    pub(crate) fn poll_part(
        &mut self,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<BodyPart, RequestBodyError>>> {
        if let Some(kept) = &self.kept
            && let Some(piece) = kept.get(self.given)
        {
            self.given += 1;
            return Poll::Ready(Some(Ok(BodyPart::Data(piece.clone()))));
        }
        if self.ended {
            return Poll::Ready(None);
        }
        let frame = match &mut self.kind {
            BodySource::Empty => None,
            BodySource::Full(bytes) => bytes.take().map(|bytes| Ok(hyper::body::Frame::data(bytes))),
            BodySource::Incoming(body) => match Pin::new(body).poll_frame(cx) {
                Poll::Ready(frame) => {
                    frame.map(|frame| frame.map_err(|error| RequestBodyError::Read(error.into())))
                }
                Poll::Pending => return self.wait(cx),
            },
            BodySource::Boxed(body) => match Pin::new(body).poll_frame(cx) {
                Poll::Ready(frame) => frame.map(|frame| frame.map_err(RequestBodyError::Read)),
                Poll::Pending => return self.wait(cx),
            },
        };
        self.waiting = false;
        let Some(frame) = frame else {
            self.ended = true;
            return Poll::Ready(None);
        };
        Poll::Ready(Some(frame.and_then(|frame| self.accept(frame))))
    }

    fn accept(&mut self, frame: hyper::body::Frame<Bytes>) -> Result<BodyPart, RequestBodyError> {
        let data = match frame.into_data() {
            Ok(data) => data,
            Err(frame) => return Ok(BodyPart::Trailers(frame.into_trailers().unwrap_or_default())),
        };
        self.taken = self.taken.saturating_add(data.len() as u64);
        if let Some(max) = self.bound
            && self.taken > max
        {
            return Err(RequestBodyError::TooLarge { max });
        }
        if let Some(kept) = &mut self.kept {
            self.kept_len += data.len();
            if self.kept_len > REPLAY_MAX {
                self.kept = None;
            } else {
                kept.push(data.clone());
                self.given = kept.len();
            }
        }
        Ok(BodyPart::Data(data))
    }

    /// Waits for data, up to the stall timeout of the caller.
    fn wait(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<BodyPart, RequestBodyError>>> {
        let stall = self.stall;
        let Some(until) = Instant::now().checked_add(stall) else { return Poll::Pending };
        let alarm = self.alarm.get_or_insert_with(|| Box::pin(tokio::time::sleep_until(until)));
        if !self.waiting {
            self.waiting = true;
            alarm.as_mut().reset(until);
        }
        ready!(alarm.as_mut().poll(cx));
        self.ended = true;
        Poll::Ready(Some(Err(RequestBodyError::Stalled { after: stall })))
    }
}
