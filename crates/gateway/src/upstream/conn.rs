//! Connection to a replica: writes a request, reads a response, and determines whether it can be reused.

use std::{
    io,
    pin::Pin,
    task::{Context, Poll, ready},
};

use bytes::{Buf as _, BufMut as _, Bytes, BytesMut};
use hyper::{HeaderMap, Method, StatusCode};
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    time::Instant,
};

use super::{
    ExchangeError,
    chunked::{ChunkPart, ChunkedDecoder},
    head::{self, Framing, ResponseHead},
};
use crate::{
    body::{BodyPart, RequestBody, RequestBodyError},
    connect::Stream,
    lazy_timer::LazyTimer,
};

/// Size of a read: small at first, because thousands of connections may be idle, and larger for replicas that send
/// more.
const READ_MIN: usize = 4 * 1024;
const READ_MAX: usize = 64 * 1024;
/// Maximum size of a part that is copied behind pending data: one write instead of two.
const COPY_MAX: usize = 8 * 1024;

/// Connection, passed on boxed.
pub(crate) struct UpstreamConnection {
    io: Stream,
    read: BytesMut,
    /// Size of the next read.
    room: usize,
    write: BytesMut,
    /// Large part, written after `write` without a copy.
    piece: Bytes,
    /// True if that part is a chunk whose terminator is still to be written.
    tail: bool,
    pub(crate) idle_since: Instant,
    /// Bytes of this request that the socket has accepted.
    sent: u64,
    /// Timer for the wait for a response.
    pub(crate) alarm: LazyTimer,
}

/// Part of a request that is still to be written.
pub(crate) struct RequestWriter {
    body: RequestBody,
    framing: Framing,
    /// Bytes of the announced length that are still missing.
    left: u64,
    state: WriteState,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum WriteState {
    Body,
    Flush,
    Done,
}

impl RequestWriter {
    pub(crate) fn new(body: RequestBody, framing: Framing) -> Self {
        let state = if framing == Framing::None { WriteState::Flush } else { WriteState::Body };
        let left = if let Framing::Sized(length) = framing { length } else { 0 };
        Self { body, framing, left, state }
    }

    pub(crate) fn is_done(&self) -> bool {
        self.state == WriteState::Done
    }

    pub(crate) const fn taken(&self) -> u64 {
        self.body.taken()
    }

    pub(crate) fn into_body(self) -> RequestBody {
        self.body
    }
}

impl UpstreamConnection {
    pub(crate) fn new(io: Stream) -> Self {
        Self {
            io,
            read: BytesMut::new(),
            room: READ_MIN,
            write: BytesMut::with_capacity(1024),
            piece: Bytes::new(),
            tail: false,
            idle_since: Instant::now(),
            sent: 0,
            alarm: LazyTimer::default(),
        }
    }

    /// Returns whether an idle connection is still open and silent. Any readable data, including EOF, makes it
    /// unusable.
    pub(crate) fn is_reusable(&mut self, cx: &mut Context<'_>) -> bool {
        let mut byte = [0_u8; 1];
        let mut buffer = ReadBuf::new(&mut byte);
        self.read.is_empty() && Pin::new(&mut self.io).poll_read(cx, &mut buffer).is_pending()
    }

    /// Resets the state and returns the buffer for the head of the next request.
    pub(crate) fn begin(&mut self) -> &mut BytesMut {
        self.write.clear();
        self.piece = Bytes::new();
        self.tail = false;
        self.sent = 0;
        &mut self.write
    }

    /// Returns the number of bytes of the request that were sent.
    pub(crate) const fn sent(&self) -> u64 {
        self.sent
    }

    /// Returns whether the replica may have received a part of the request.
    pub(crate) const fn has_sent(&self) -> bool {
        self.sent > 0
    }

    /// Continues to write, as far as possible.
    pub(crate) fn poll_send(
        &mut self,
        sending: &mut RequestWriter,
        cx: &mut Context<'_>,
    ) -> Poll<Result<(), ExchangeError>> {
        loop {
            // Fill before flush, so that the head and a small body are sent in one write.
            while sending.state == WriteState::Body && self.piece.is_empty() && self.write.len() < COPY_MAX {
                match sending.body.poll_part(cx) {
                    Poll::Pending => break,
                    Poll::Ready(Some(Err(fault))) => return Poll::Ready(Err(ExchangeError::Request(fault))),
                    Poll::Ready(Some(Ok(BodyPart::Data(data)))) => {
                        self.put(data, sending).map_err(ExchangeError::Request)?;
                    }
                    Poll::Ready(Some(Ok(BodyPart::Trailers(trailers)))) => {
                        self.buffer_end(sending, &trailers).map_err(ExchangeError::Request)?;
                    }
                    Poll::Ready(None) => {
                        self.buffer_end(sending, &HeaderMap::new()).map_err(ExchangeError::Request)?;
                    }
                }
            }
            if self.write.is_empty() && self.piece.is_empty() {
                return match sending.state {
                    WriteState::Body => Poll::Pending,
                    WriteState::Flush => {
                        ready!(Pin::new(&mut self.io).poll_flush(cx)).map_err(ExchangeError::Write)?;
                        sending.state = WriteState::Done;
                        Poll::Ready(Ok(()))
                    }
                    WriteState::Done => Poll::Ready(Ok(())),
                };
            }
            ready!(self.poll_write(cx)).map_err(ExchangeError::Write)?;
            if self.piece.is_empty() && self.write.is_empty() && sending.state == WriteState::Body {
                // Flushed even if not full, so that parts of a stream are sent as they arrive.
                if let Poll::Ready(Err(error)) = Pin::new(&mut self.io).poll_flush(cx) {
                    return Poll::Ready(Err(ExchangeError::Write(error)));
                }
            }
        }
    }

    fn put(&mut self, data: Bytes, sending: &mut RequestWriter) -> Result<(), RequestBodyError> {
        if data.is_empty() {
            return Ok(());
        }
        let chunked = sending.framing == Framing::Chunked;
        if chunked {
            put_chunk_size(&mut self.write, data.len());
        } else {
            // More data than announced would be parsed as another request.
            sending.left =
                sending.left.checked_sub(data.len() as u64).ok_or(RequestBodyError::LengthMismatch)?;
        }
        if data.len() <= COPY_MAX {
            self.write.put_slice(&data);
            if chunked {
                self.write.put_slice(b"\r\n");
            }
        } else {
            self.piece = data;
            self.tail = chunked;
        }
        Ok(())
    }

    fn buffer_end(
        &mut self,
        sending: &mut RequestWriter,
        trailers: &HeaderMap,
    ) -> Result<(), RequestBodyError> {
        sending.state = WriteState::Flush;
        if sending.framing != Framing::Chunked {
            return if sending.left == 0 { Ok(()) } else { Err(RequestBodyError::LengthMismatch) };
        }
        self.write.put_slice(b"0\r\n");
        for (name, value) in trailers {
            if crate::headers::is_forwardable_trailer(name) {
                crate::headers::put_header(&mut self.write, name.as_str(), value.as_bytes());
            }
        }
        self.write.put_slice(b"\r\n");
        Ok(())
    }

    fn poll_write(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let first = !self.write.is_empty();
        let bytes: &[u8] = if first { &self.write } else { &self.piece };
        let written = ready!(Pin::new(&mut self.io).poll_write(cx, bytes))?;
        if written == 0 {
            return Poll::Ready(Err(io::ErrorKind::WriteZero.into()));
        }
        self.sent += written as u64;
        if first {
            self.write.advance(written);
        } else {
            self.piece.advance(written);
            if self.piece.is_empty() && std::mem::take(&mut self.tail) {
                self.write.put_slice(b"\r\n");
            }
        }
        Poll::Ready(Ok(()))
    }

    fn poll_fill(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<usize>> {
        self.read.reserve(self.room.saturating_sub(self.read.len()).max(1024));
        let filled = ready!(tokio_util::io::poll_read_buf(Pin::new(&mut self.io), cx, &mut self.read))?;
        if self.read.len() == self.read.capacity() {
            self.room = (self.room * 4).min(READ_MAX);
        }
        Poll::Ready(Ok(filled))
    }

    /// Reads until the head of the final response is complete. `headers` is a map to reuse.
    pub(crate) fn poll_head(
        &mut self,
        method: &Method,
        upgrade: bool,
        headers: &mut HeaderMap,
        cx: &mut Context<'_>,
    ) -> Poll<Result<ResponseHead, ExchangeError>> {
        loop {
            while !self.read.is_empty() {
                let Some(answer) = head::parse(&mut self.read, method, headers)? else { break };
                if answer.status == StatusCode::SWITCHING_PROTOCOLS {
                    let fine = upgrade.then_some(answer);
                    return Poll::Ready(
                        fine.ok_or(ExchangeError::Malformed("protocol switch without an upgrade request")),
                    );
                }
                if !answer.status.is_informational() {
                    return Poll::Ready(Ok(answer));
                }
                *headers = answer.headers;
            }
            let silent = self.read.is_empty();
            match ready!(self.poll_fill(cx)) {
                Ok(0) if silent => return Poll::Ready(Err(ExchangeError::ClosedBeforeResponse)),
                Ok(0) => return Poll::Ready(Err(ExchangeError::Cut)),
                Ok(_) => {}
                Err(error) if silent => return Poll::Ready(Err(read_failure(error))),
                Err(error) => return Poll::Ready(Err(ExchangeError::Read(error))),
            }
        }
    }

    /// Returns the next part of the response body; `None` at its end.
    pub(crate) fn poll_body(
        &mut self,
        reading: &mut BodyReader,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<BodyPart, ExchangeError>>> {
        loop {
            let need_more = match reading {
                BodyReader::End => return Poll::Ready(None),
                BodyReader::Sized(left) => {
                    if *left == 0 {
                        *reading = BodyReader::End;
                        continue;
                    }
                    if self.read.is_empty() {
                        true
                    } else {
                        let take = usize::try_from(*left).unwrap_or(usize::MAX).min(self.read.len());
                        *left -= take as u64;
                        return Poll::Ready(Some(Ok(BodyPart::Data(self.read.split_to(take).freeze()))));
                    }
                }
                BodyReader::Chunked(chunked) => match chunked.next(&mut self.read) {
                    Ok(ChunkPart::Data(data)) => return Poll::Ready(Some(Ok(BodyPart::Data(data)))),
                    Ok(ChunkPart::Trailers(trailers)) => {
                        return Poll::Ready(Some(Ok(BodyPart::Trailers(trailers))));
                    }
                    Ok(ChunkPart::End) => {
                        *reading = BodyReader::End;
                        continue;
                    }
                    Ok(ChunkPart::NeedMore) => true,
                    Err(failure) => return Poll::Ready(Some(Err(failure))),
                },
                BodyReader::Close if self.read.is_empty() => true,
                BodyReader::Close => {
                    return Poll::Ready(Some(Ok(BodyPart::Data(self.read.split().freeze()))));
                }
            };
            debug_assert!(need_more, "every other case returns or continues");
            match ready!(self.poll_fill(cx)) {
                Ok(0) if matches!(reading, BodyReader::Close) => *reading = BodyReader::End,
                Ok(0) => return Poll::Ready(Some(Err(ExchangeError::Cut))),
                Ok(_) => {}
                Err(error) => return Poll::Ready(Some(Err(ExchangeError::Read(error)))),
            }
        }
    }

    /// Returns whether nothing is left over from the last exchange.
    pub(crate) fn is_clean(&self) -> bool {
        self.read.is_empty() && self.write.is_empty() && self.piece.is_empty()
    }

    /// Returns the raw stream after an upgrade, and the bytes that were read from it already.
    pub(crate) fn into_stream(self) -> (Stream, Bytes) {
        (self.io, self.read.freeze())
    }
}

/// Unread rest of a response body.
#[derive(Debug)]
pub(crate) enum BodyReader {
    Sized(u64),
    Chunked(ChunkedDecoder),
    Close,
    End,
}

impl From<Framing> for BodyReader {
    fn from(framing: Framing) -> Self {
        match framing {
            Framing::None => Self::End,
            Framing::Sized(length) => Self::Sized(length),
            Framing::Chunked => Self::Chunked(ChunkedDecoder::default()),
            Framing::Close => Self::Close,
        }
    }
}

/// Maps a reset to a close: a connection that the replica closed while idle may end with either.
fn read_failure(error: io::Error) -> ExchangeError {
    if error.kind() == io::ErrorKind::ConnectionReset {
        ExchangeError::ClosedBeforeResponse
    } else {
        ExchangeError::Read(error)
    }
}

fn put_chunk_size(buffer: &mut BytesMut, size: usize) {
    let mut digits = [0_u8; 16];
    let mut at = digits.len();
    let mut left = size;
    while left > 0 || at == digits.len() {
        at -= 1;
        if let Some(digit) = digits.get_mut(at) {
            *digit = b"0123456789abcdef"[left & 15];
        }
        left >>= 4;
    }
    buffer.put_slice(digits.get(at..).unwrap_or_default());
    buffer.put_slice(b"\r\n");
}
