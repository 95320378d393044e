//! HTTP/1.1 client for replicas, over any stream.
//!
//! A library client is not used: it would drive each connection in a separate task and pass each part through channels.
//! Here one task carries a request from the client's socket to the replica's and back, the headers of a request are
//! written without copies, and it is known for certain whether a replica has started to respond, which decides whether
//! a request may be sent to another.

mod chunked;
mod conn;
mod head;

pub(crate) use conn::{BodyReader, RequestWriter, UpstreamConnection};
pub(crate) use head::{Framing, ResponseHead, content_length, has_token};

/// Failure of an exchange with a replica.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ExchangeError {
    #[error("failed to write to the replica")]
    Write(#[source] std::io::Error),
    #[error("failed to read from the replica")]
    Read(#[source] std::io::Error),
    #[error("the replica closed the connection before it responded")]
    ClosedBeforeResponse,
    #[error("the replica closed the connection in the middle of its response")]
    Cut,
    #[error("the replica's response is malformed: {0}")]
    Malformed(&'static str),
    #[error("the head of the replica's response is larger than {} KiB", head::HEAD_MAX / 1024)]
    HeadTooLarge,
    #[error("the replica did not respond in time")]
    Late,
    #[error("the caller's token was revoked")]
    Denied,
    #[error(transparent)]
    Request(crate::body::RequestBodyError),
}
