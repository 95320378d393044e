//! Pool of connections to one server: opened on demand, and reused.

use std::{path::PathBuf, time::Duration};

use http_body_util::{BodyExt as _, Full};
use hyper::{
    Request, StatusCode,
    body::Bytes,
    client::conn::http1::{SendRequest, handshake},
};
use hyper_util::rt::TokioIo;
use parking_lot::Mutex;
use tokio::time::Instant;
use windlass_dial::{DialError, Endpoint, Io, Stream};

use crate::unix;

/// Time after which a server that has not accepted a connection is considered unreachable.
pub(crate) const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// Maximum number of idle connections. Clients do not make more calls at once.
const IDLE_MAX: usize = 16;
/// Maximum idle time of a connection. A longer idle one may have been dropped by a middlebox without notice.
const IDLE_TIMEOUT: Duration = Duration::from_secs(20);

pub(crate) type Sender = SendRequest<Full<Bytes>>;

#[derive(Clone, Debug)]
pub(crate) enum ServerAddress {
    Tcp(Endpoint),
    Unix(PathBuf),
}

#[derive(Debug, thiserror::Error)]
pub(crate) enum HttpPoolError {
    #[error(transparent)]
    Dial(#[from] DialError),
    #[error("request to the server failed")]
    Exchange(#[from] hyper::Error),
}

pub(crate) struct HttpPool {
    address: ServerAddress,
    /// Each with the time of its last use, the most recent last.
    idle: Mutex<Vec<(Instant, Sender)>>,
}

impl std::fmt::Debug for HttpPool {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Wire").field("way", &self.address).finish_non_exhaustive()
    }
}

impl HttpPool {
    pub(crate) fn new(address: ServerAddress) -> Self {
        Self { address, idle: Mutex::default() }
    }

    /// Opens a separate connection, which may change its protocol.
    pub(crate) async fn connect(&self) -> Result<Sender, HttpPoolError> {
        match &self.address {
            ServerAddress::Tcp(peer) => open_sender(peer.connect(CONNECT_TIMEOUT).await?).await,
            ServerAddress::Unix(path) => {
                let failed = |source| DialError::Connect { name: path.display().to_string(), source };
                open_sender(Box::new(unix::connect(path).await.map_err(failed)?)).await
            }
        }
    }

    /// Makes one call. If a pooled connection turns out to be closed, the call is repeated once on a new connection,
    /// provided that nothing of it can have arrived.
    pub(crate) async fn exchange(
        &self,
        request: Request<Full<Bytes>>,
    ) -> Result<(StatusCode, Bytes), HttpPoolError> {
        let mut sender = match self.take_idle().await {
            Some(sender) => sender,
            None => self.connect().await?,
        };
        let response = match sender.try_send_request(request).await {
            Ok(response) => response,
            Err(mut failed) => match failed.take_message() {
                Some(unsent) => {
                    sender = self.connect().await?;
                    sender.send_request(unsent).await?
                }
                None => return Err(failed.into_error().into()),
            },
        };
        let status = response.status();
        let answer = response.into_body().collect().await?.to_bytes();
        self.put_idle(sender);
        Ok((status, answer))
    }

    async fn take_idle(&self) -> Option<Sender> {
        loop {
            // The most recently used one is the least likely to have been closed meanwhile.
            let (used, mut sender) = self.idle.lock().pop()?;
            if used.elapsed() < IDLE_TIMEOUT && sender.ready().await.is_ok() {
                return Some(sender);
            }
        }
    }

    fn put_idle(&self, sender: Sender) {
        let mut kept = self.idle.lock();
        if !sender.is_closed() && kept.len() < IDLE_MAX {
            kept.push((Instant::now(), sender));
        }
    }
}

/// Makes one call over its own stream.
pub async fn send_once(
    stream: impl Io,
    request: Request<Full<Bytes>>,
) -> Result<(StatusCode, Bytes), hyper::Error> {
    let (mut sender, connection) = handshake(TokioIo::new(stream)).await?;
    let carrying = tokio::spawn(connection);
    let answer = sender.send_request(request).await?;
    let status = answer.status();
    let body = answer.into_body().collect().await?.to_bytes();
    carrying.abort();
    Ok((status, body))
}

async fn open_sender(stream: Stream) -> Result<Sender, HttpPoolError> {
    let (sender, connection) = handshake(TokioIo::new(stream)).await?;
    // A caller that waits for a response receives the connection's errors.
    tokio::spawn(connection.with_upgrades());
    Ok(sender)
}

#[cfg(test)]
mod tests {
    use std::sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    };

    use tokio::{
        io::{AsyncReadExt as _, AsyncWriteExt as _},
        net::UnixListener,
        time,
    };

    use super::*;

    /// Answers with the number of the connection; on the second connection only once.
    async fn serve(listener: UnixListener, accepted: Arc<AtomicUsize>) {
        while let Ok((mut stream, _)) = listener.accept().await {
            let number = accepted.fetch_add(1, Ordering::Relaxed) + 1;
            tokio::spawn(async move {
                while stream.read(&mut [0; 4096]).await.is_ok_and(|read| read > 0) {
                    let answer = format!("HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\n{number}");
                    stream.write_all(answer.as_bytes()).await.unwrap();
                    if number == 2 {
                        return;
                    }
                }
            });
        }
    }

    #[tokio::test]
    async fn a_pooled_connection_is_reused_until_it_closes_or_exceeds_the_idle_timeout() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("wire.sock");
        let accepted = Arc::new(AtomicUsize::new(0));
        let serving = tokio::spawn(serve(UnixListener::bind(&path).unwrap(), Arc::clone(&accepted)));
        let wire = HttpPool::new(ServerAddress::Unix(path));
        let send_request = async || {
            let request = Request::get("/").header("host", "test").body(Full::default()).unwrap();
            let (status, body) = wire.exchange(request).await.unwrap();
            assert_eq!(status, StatusCode::OK);
            String::from_utf8(body.to_vec()).unwrap()
        };
        assert_eq!([send_request().await, send_request().await], ["1", "1"]);
        time::pause();
        time::advance(IDLE_TIMEOUT).await;
        time::resume();
        assert_eq!(send_request().await, "2", "one that was silent for long is used again");
        assert_eq!([send_request().await, send_request().await], ["3", "3"], "the second one has ended");
        assert_eq!(accepted.load(Ordering::Relaxed), 3);
        serving.abort();
    }
}
