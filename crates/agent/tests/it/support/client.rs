//! A small HTTP client over a unix socket or a TCP port.
//!
//! ```text
//! let client = Client::unix(&path).credential("secret").epoch(3);
//! let reply = client.get("/api/tasks").await;
//! assert_eq!(reply.status, 200);
//! let info: TaskInfo = reply.json();
//! ```

use std::{
    net::SocketAddr,
    path::{Path, PathBuf},
};

use axum::{
    body::{Body, Bytes},
    http::{HeaderMap, Method, Request, Response, StatusCode, header},
};
use http_body_util::BodyExt;
use hyper::{body::Incoming, client::conn::http1};
use hyper_util::rt::TokioIo;
use serde::{Serialize, de::DeserializeOwned};
use tokio::net::{TcpStream, UnixStream};
use windlass_api::agent::EPOCH_HEADER;

#[derive(Clone, Debug)]
pub(crate) struct Client {
    to: Target,
    credential: Option<String>,
    epoch: Option<i64>,
    headers: Vec<(String, String)>,
}

#[derive(Clone, Debug)]
enum Target {
    Unix(PathBuf),
    Tcp(SocketAddr),
}

/// A complete response.
#[derive(Clone, Debug)]
pub(crate) struct Reply {
    pub(crate) status: StatusCode,
    pub(crate) headers: HeaderMap,
    pub(crate) body: Bytes,
}

impl Reply {
    pub(crate) fn text(&self) -> &str {
        std::str::from_utf8(&self.body).unwrap()
    }

    #[track_caller]
    pub(crate) fn json<T: DeserializeOwned>(&self) -> T {
        assert!(self.status.is_success(), "{}: {}", self.status, self.text());
        serde_json::from_slice(&self.body).unwrap_or_else(|error| panic!("{error} in {}", self.text()))
    }

    #[track_caller]
    pub(crate) fn expect(self, status: u16) -> Self {
        assert_eq!(self.status.as_u16(), status, "{}", self.text());
        self
    }
}

impl Client {
    pub(crate) fn unix(socket: &Path) -> Self {
        Self { to: Target::Unix(socket.to_owned()), credential: None, epoch: None, headers: Vec::new() }
    }

    pub(crate) fn tcp(address: SocketAddr) -> Self {
        Self { to: Target::Tcp(address), credential: None, epoch: None, headers: Vec::new() }
    }

    /// Sends `Authorization: Bearer …` with every call.
    pub(crate) fn credential(mut self, credential: &str) -> Self {
        self.credential = Some(credential.to_owned());
        self
    }

    pub(crate) fn epoch(mut self, epoch: i64) -> Self {
        self.epoch = Some(epoch);
        self
    }

    /// Sends one more header with every call.
    pub(crate) fn header(mut self, name: &str, value: &str) -> Self {
        self.headers.push((name.to_owned(), value.to_owned()));
        self
    }

    pub(crate) async fn get(&self, path: &str) -> Reply {
        self.call(Method::GET, path, Body::empty()).await
    }

    pub(crate) async fn post(&self, path: &str, body: &impl Serialize) -> Reply {
        self.call(Method::POST, path, Body::from(serde_json::to_vec(body).unwrap())).await
    }

    pub(crate) async fn call(&self, method: Method, path: &str, body: Body) -> Reply {
        let response = self.open(method, path, body).await;
        let (parts, body) = response.into_parts();
        let body = body.collect().await.unwrap().to_bytes();
        Reply { status: parts.status, headers: parts.headers, body }
    }

    /// Returns a response whose body is not read yet: streams, upgrades.
    pub(crate) async fn open(&self, method: Method, path: &str, body: Body) -> Response<Incoming> {
        self.try_open(method, path, body).await.unwrap()
    }

    /// Like [`Client::open`], for a server that may have ended.
    pub(crate) async fn try_open(
        &self,
        method: Method,
        path: &str,
        body: Body,
    ) -> anyhow::Result<Response<Incoming>> {
        let mut request = Request::builder().method(method).uri(path).header(header::HOST, "shim");
        if let Some(credential) = &self.credential {
            request = request.header(header::AUTHORIZATION, format!("Bearer {credential}"));
        }
        if let Some(epoch) = self.epoch {
            request = request.header(EPOCH_HEADER, epoch);
        }
        for (name, value) in &self.headers {
            request = request.header(name, value);
        }
        let request = request.body(body)?;
        match &self.to {
            Target::Unix(path) => exchange(UnixStream::connect(path).await?, request).await,
            Target::Tcp(address) => exchange(TcpStream::connect(address).await?, request).await,
        }
    }
}

async fn exchange<S>(stream: S, request: Request<Body>) -> anyhow::Result<Response<Incoming>>
where
    S: tokio::io::AsyncRead + tokio::io::AsyncWrite + Unpin + Send + 'static,
{
    let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await?;
    tokio::spawn(connection.with_upgrades());
    Ok(sender.send_request(request).await?)
}
