//! Connections that become streams: bytes between a caller and a port of a job.
//!
//! A caller who lost their rights is cut off, and a server that stops does not wait for the end.

use std::{collections::HashMap, future::Future, sync::LazyLock, time::Duration};

use axum::{
    body::Body,
    extract::Request,
    http::{HeaderValue, StatusCode, header},
    response::Response,
};
use hyper::upgrade::OnUpgrade;
use hyper_util::rt::TokioIo;
use parking_lot::Mutex;
use tokio::sync::{Semaphore, SemaphorePermit};
use windlass_api::agent::PORT_PROTOCOL;
use windlass_model::id::UserId;

use crate::{
    agents::Port,
    app::App,
    error::{Error, Result},
};

/// Streams open at once in this process.
static PLACES: Semaphore = Semaphore::const_new(2048);
/// How many each user has, of streams and of answers that last.
static OPEN: LazyLock<Mutex<HashMap<UserId, usize>>> = LazyLock::new(Mutex::default);
/// How often the caller's rights are looked up again.
const LOOK_EVERY: Duration = Duration::from_secs(2);

/// The caller's end of the stream, if they asked for one.
pub(super) fn wanted(request: &mut Request) -> Result<OnUpgrade> {
    if request.headers().get(header::UPGRADE).is_none_or(|to| to != PORT_PROTOCOL) {
        return Err(Error::refused(format!("ask for it with `Upgrade: {PORT_PROTOCOL}`")));
    }
    Ok(hyper::upgrade::on(request))
}

/// A stream of a user that is open, or an answer that lasts, until it is dropped.
pub(super) struct Place {
    user: UserId,
    shared: Option<SemaphorePermit<'static>>,
}

impl Place {
    /// A place for a stream, if this server and this user have one left.
    pub(super) fn for_stream(app: &App, user: UserId) -> Result<Self> {
        let mut place = Self::for_answer(app, user)?;
        let shared = PLACES.try_acquire().map_err(|_| Error::Busy { msg: "Too many streams are open" })?;
        place.shared = Some(shared);
        Ok(place)
    }

    /// The same for an answer, which takes no more than its connection.
    pub(super) fn for_answer(app: &App, user: UserId) -> Result<Self> {
        let limit = app.settings().limits.streams;
        let mut open = OPEN.lock();
        let count = open.entry(user).or_default();
        if *count >= limit {
            return Err(Error::Streams { limit });
        }
        *count += 1;
        Ok(Self { user, shared: None })
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut open = OPEN.lock();
        if let Some(count) = open.get_mut(&self.user) {
            *count -= 1;
            if *count == 0 {
                open.remove(&self.user);
            }
        }
    }
}

pub(super) fn answer<A, R>(app: App, caller: OnUpgrade, port: Port, place: Place, allowed: A) -> Response
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
                tokio::time::sleep(LOOK_EVERY).await;
                match allowed().await {
                    // A database that does not answer takes nobody's rights away.
                    Ok(()) | Err(Error::Db(_)) => {}
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
