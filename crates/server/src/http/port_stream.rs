//! Connections that become streams: bytes between a caller and a port of a job.
//!
//! The stream of a caller who lost the rights is closed, and a stopping server does not wait for the end.

use std::future::Future;

use axum::{
    body::Body,
    extract::Request,
    http::{HeaderValue, StatusCode, header},
    response::Response,
};
use hyper::upgrade::OnUpgrade;
use hyper_util::rt::TokioIo;
use tokio::sync::{Semaphore, SemaphorePermit};
use windlass_api::agent::PORT_PROTOCOL;
use windlass_model::id::UserId;

use crate::{
    agents::PortStream,
    app::App,
    error::{Error, Result},
    open_counts::{OpenCounts, OpenGuard},
    stream_rights::StreamRegistration,
};

/// Maximum number of open streams in this process.
static STREAM_SLOTS: Semaphore = Semaphore::const_new(2048);
/// Number of streams and streaming responses of each user.
static OPEN_PER_USER: OpenCounts<UserId> = OpenCounts::new();

/// Caller's end of the stream; an error if the request is not an upgrade.
pub(super) fn require_upgrade(request: &mut Request) -> Result<OnUpgrade> {
    if request.headers().get(header::UPGRADE).is_none_or(|to| to != PORT_PROTOCOL) {
        return Err(Error::refused(format!("expected the header `Upgrade: {PORT_PROTOCOL}`")));
    }
    Ok(hyper::upgrade::on(request))
}

/// Slot of an open stream or streaming response of a user, held until it is dropped.
pub(super) struct StreamSlot {
    _opened: OpenGuard<UserId>,
    _shared: Option<SemaphorePermit<'static>>,
}

impl StreamSlot {
    /// Acquires a slot for a stream, if the server and the user have one left.
    pub(super) fn for_stream(app: &App, user: UserId) -> Result<Self> {
        let place = Self::for_response(app, user)?;
        let shared =
            STREAM_SLOTS.try_acquire().map_err(|_| Error::Busy { msg: "Too many streams are open" })?;
        Ok(Self { _shared: Some(shared), ..place })
    }

    /// Acquires a slot for a streaming response, which needs only its connection.
    pub(super) fn for_response(app: &App, user: UserId) -> Result<Self> {
        let limit = app.settings().limits.streams;
        let opened = OPEN_PER_USER.open(user, limit).ok_or(Error::StreamLimit { limit })?;
        Ok(Self { _opened: opened, _shared: None })
    }
}

pub(super) fn respond<A, R>(
    app: App,
    caller: OnUpgrade,
    port: PortStream,
    place: StreamSlot,
    rights: StreamRegistration,
    allowed: A,
) -> Response
where
    A: Fn() -> R + Send + Sync + 'static,
    R: Future<Output = Result<()>> + Send,
{
    tokio::spawn(async move {
        let _place = place;
        let carried = async {
            match caller.await {
                Ok(caller) => port.join(&mut TokioIo::new(caller)).await,
                Err(error) => Err(std::io::Error::other(error)),
            }
        };
        let denied = async {
            loop {
                rights.changed().await;
                match allowed().await {
                    Ok(()) => {}
                    // A database that does not answer revokes no rights.
                    Err(Error::Db(_)) => rights.again(),
                    Err(_) => return,
                }
            }
        };
        tokio::select! {
            carried = carried => if let Err(error) = carried {
                tracing::debug!(%error, "failed to relay stream to port");
            },
            () = denied => {}
            () = app.closed() => {}
        }
    });
    let mut response = Response::new(Body::empty());
    *response.status_mut() = StatusCode::SWITCHING_PROTOCOLS;
    let headers = response.headers_mut();
    headers.insert(header::CONNECTION, HeaderValue::from_static("upgrade"));
    headers.insert(header::UPGRADE, HeaderValue::from_static(PORT_PROTOCOL));
    response
}
