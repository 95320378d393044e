//! Body of a response to the caller, and the metrics that are recorded when it ends.

use std::{
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
    time::Instant,
};

use bytes::Bytes;
use hyper::{
    StatusCode,
    body::{Body, Frame, SizeHint},
};

use crate::{
    access::{AccessLog, AccessRecord},
    auth::AccessGrant,
    body::BodyPart,
    headers::is_forwardable_trailer,
    replica::OutstandingRequest,
    route_table::ServiceState,
    upstream::{BodyReader, ExchangeError, RequestWriter, UpstreamConnection},
};

/// Reason why a response ended early.
#[derive(Debug, thiserror::Error)]
#[error("failed to forward the response of a replica")]
pub struct ResponseTruncated(#[source] ExchangeError);

/// Body of a response.
pub struct ResponseBody(ResponseBodyKind);

enum ResponseBodyKind {
    Text(Bytes),
    /// Boxed, because a response is moved often.
    Flow(Box<StreamedResponse>),
}

impl ResponseBody {
    pub(crate) const fn text(text: Bytes) -> Self {
        Self(ResponseBodyKind::Text(text))
    }

    pub(crate) fn streamed(flow: StreamedResponse) -> Self {
        Self(ResponseBodyKind::Flow(Box::new(flow)))
    }
}

/// Response that is streamed from a replica as fast as the caller reads it.
pub(crate) struct StreamedResponse {
    /// Released at the end, for the next request.
    pub(crate) conn: Option<Box<UpstreamConnection>>,
    pub(crate) body_reader: BodyReader,
    /// Unsent rest of the request: a replica may respond before it has received everything.
    pub(crate) request_writer: Option<RequestWriter>,
    pub(crate) keep_alive: bool,
    /// Rights that the caller must keep.
    pub(crate) grant: Option<AccessGrant>,
    pub(crate) outstanding: OutstandingRequest,
    pub(crate) metrics: RequestMetrics,
}

impl StreamedResponse {
    fn is_finished(&self) -> bool {
        matches!(self.body_reader, BodyReader::End | BodyReader::Sized(0))
    }

    /// Ends the response, because the caller's rights were revoked.
    fn end_revoked(&mut self) -> Poll<Option<Result<Frame<Bytes>, ResponseTruncated>>> {
        self.keep_alive = false;
        self.conn = None;
        self.grant = None;
        Poll::Ready(Some(Err(ResponseTruncated(ExchangeError::Denied))))
    }

    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, ResponseTruncated>>> {
        let Some(conn) = &mut self.conn else { return Poll::Ready(None) };
        if let Some(sending) = &mut self.request_writer {
            let sent = conn.poll_send(sending, cx);
            self.metrics.bytes_in = sending.taken();
            match sent {
                Poll::Ready(Ok(())) => self.request_writer = None,
                // A replica that has responded may stop reading.
                Poll::Ready(Err(_)) => {
                    self.keep_alive = false;
                    self.request_writer = None;
                }
                Poll::Pending => {}
            }
        }
        // After a revocation nothing more is forwarded, even if it has been received already.
        if self.grant.as_mut().is_some_and(|rights| rights.is_watched() && rights.is_revoked(cx)) {
            return self.end_revoked();
        }
        let body = conn.poll_body(&mut self.body_reader, cx);
        if body.is_pending() && self.grant.as_mut().is_some_and(|rights| rights.is_revoked(cx)) {
            return self.end_revoked();
        }
        match ready!(body) {
            None => Poll::Ready(None),
            Some(Ok(BodyPart::Data(data))) => {
                self.metrics.bytes_out += data.len() as u64;
                Poll::Ready(Some(Ok(Frame::data(data))))
            }
            Some(Ok(BodyPart::Trailers(mut trailers))) => {
                let refused: Vec<_> =
                    trailers.keys().filter(|name| !is_forwardable_trailer(name)).cloned().collect();
                for name in refused {
                    trailers.remove(name);
                }
                Poll::Ready(Some(Ok(Frame::trailers(trailers))))
            }
            Some(Err(failure)) => {
                self.keep_alive = false;
                self.conn = None;
                Poll::Ready(Some(Err(ResponseTruncated(failure))))
            }
        }
    }
}

impl Drop for StreamedResponse {
    fn drop(&mut self) {
        let over = self.is_finished();
        self.metrics.is_truncated = !over;
        let sent = self.request_writer.as_ref().is_none_or(RequestWriter::is_done);
        if let Some(conn) = self.conn.take()
            && over
            && sent
            && self.keep_alive
            && conn.is_clean()
        {
            self.outstanding.replica.put_idle(conn);
        }
    }
}

impl Body for ResponseBody {
    type Data = Bytes;
    type Error = ResponseTruncated;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, ResponseTruncated>>> {
        match &mut self.get_mut().0 {
            ResponseBodyKind::Text(text) if text.is_empty() => Poll::Ready(None),
            ResponseBodyKind::Text(text) => Poll::Ready(Some(Ok(Frame::data(std::mem::take(text))))),
            ResponseBodyKind::Flow(flow) => flow.poll(cx),
        }
    }

    fn is_end_stream(&self) -> bool {
        match &self.0 {
            ResponseBodyKind::Text(text) => text.is_empty(),
            ResponseBodyKind::Flow(flow) => flow.is_finished(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match &self.0 {
            ResponseBodyKind::Text(text) => SizeHint::with_exact(text.len() as u64),
            ResponseBodyKind::Flow(flow) => match &flow.body_reader {
                BodyReader::Sized(left) => SizeHint::with_exact(*left),
                BodyReader::End => SizeHint::with_exact(0),
                BodyReader::Chunked(_) | BodyReader::Close => SizeHint::default(),
            },
        }
    }
}

/// Metrics of one request. Recorded on drop, however the request ended.
pub(crate) struct RequestMetrics {
    service: Arc<ServiceState>,
    began: Instant,
    pub(crate) status: StatusCode,
    pub(crate) bytes_in: u64,
    pub(crate) bytes_out: u64,
    pub(crate) is_truncated: bool,
    pub(crate) access: Option<Box<AccessEntry>>,
}

/// Additional data for the access log.
pub(crate) struct AccessEntry {
    pub(crate) log: Arc<dyn AccessLog>,
    pub(crate) record: AccessRecord,
}

impl RequestMetrics {
    pub(crate) fn start(live: &Arc<ServiceState>) -> Self {
        let began = Instant::now();
        live.stats().record_arrival(began);
        Self {
            service: Arc::clone(live),
            began,
            // Applies if the caller disconnects before there is a response.
            status: CLIENT_CLOSED,
            bytes_in: 0,
            bytes_out: 0,
            is_truncated: false,
            access: None,
        }
    }

    pub(crate) const fn began(&self) -> Instant {
        self.began
    }
}

/// Status of a client that closed the connection, as in nginx logs; never sent.
pub(crate) const CLIENT_CLOSED: StatusCode = match StatusCode::from_u16(499) {
    Ok(status) => status,
    Err(_) => StatusCode::BAD_REQUEST,
};

impl Drop for RequestMetrics {
    fn drop(&mut self) {
        let took = self.began.elapsed();
        self.service.stats().leave(self.status, (self.began, took), self.bytes_in, self.bytes_out);
        if let Some(note) = self.access.take() {
            let AccessEntry { log, record } = *note;
            log.record(AccessRecord {
                status: self.status,
                took,
                bytes_in: self.bytes_in,
                bytes_out: self.bytes_out,
                is_truncated: self.is_truncated,
                ..record
            });
        }
    }
}
