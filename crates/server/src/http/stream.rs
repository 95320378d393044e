//! Connections that become streams: bytes between a caller and a port of a job.
//!
//! A caller who lost their rights is cut off, and a server that stops does not wait for the end.

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

/// Streams open at once in this process.
static STREAM_SLOTS: Semaphore = Semaphore::const_new(2048);
/// How many each user has, of streams and of answers that last.
static OPEN_PER_USER: OpenCounts<UserId> = OpenCounts::new();

/// The caller's end of the stream, if they asked for one.
pub(super) fn require_upgrade(request: &mut Request) -> Result<OnUpgrade> {
    if request.headers().get(header::UPGRADE).is_none_or(|to| to != PORT_PROTOCOL) {
        return Err(Error::refused(format!("ask for it with `Upgrade: {PORT_PROTOCOL}`")));
    }
    Ok(hyper::upgrade::on(request))
}

/// A stream of a user that is open, or an answer that lasts, until it is dropped.
pub(super) struct StreamSlot {
    _opened: OpenGuard<UserId>,
    _shared: Option<SemaphorePermit<'static>>,
}

impl StreamSlot {
    /// A place for a stream, if this server and this user have one left.
    pub(super) fn for_stream(app: &App, user: UserId) -> Result<Self> {
        let place = Self::for_response(app, user)?;
        let shared =
            STREAM_SLOTS.try_acquire().map_err(|_| Error::Busy { msg: "Too many streams are open" })?;
        Ok(Self { _shared: Some(shared), ..place })
    }

    /// The same for an answer, which takes no more than its connection.
    pub(super) fn for_response(app: &App, user: UserId) -> Result<Self> {
        let limit = app.settings().limits.streams;
        let opened = OPEN_PER_USER.open(user, limit).ok_or(Error::StreamLimit { limit })?;
        Ok(Self { _opened: opened, _shared: None })
    }
}

pub(super) fn answer<A, R>(
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
                    // A database that does not answer takes nobody's rights away.
                    Err(Error::Db(_)) => rights.again(),
                    Err(_) => return,
                }
            }
        };
        tokio::select! {
            carried = carried => if let Err(error) = carried {
                tracing::debug!(%error, "carry bytes to a port");
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
