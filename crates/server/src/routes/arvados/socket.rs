//! Events over a WebSocket: rows of the log as they are committed, each once per connection, in order.
//!
//! A connection reads the log from its position, woken by commits of this process and, for those of others, by a timer.
//! So nothing is buffered for a slow reader: it reads later.

use std::{collections::VecDeque, time::Duration};

use axum::{
    body::Body,
    extract::{Request, State},
    http::{HeaderValue, StatusCode, header},
    response::Response,
};
use futures_util::{SinkExt as _, StreamExt as _};
use hyper_util::rt::TokioIo;
use serde_json::{Value, json};
use tokio::{
    sync::{Semaphore, SemaphorePermit},
    time::timeout,
};
use tokio_tungstenite::{
    WebSocketStream,
    tungstenite::{Message, handshake::derive_accept_key, protocol::Role},
};
use windlass_model::queue::QueueCaller;

use super::call;
use crate::{
    app::App,
    db::queue_list::{Condition, ListKind, ListQuery, QueueVisibility},
    open_counts::{OpenCounts, OpenGuard},
    services::queue::{Error, Requester, Result, auth, records},
    stream_rights::{RightsBasis, StreamRights},
};

/// Maximum number of connections of this process. Dispatchers have separate slots, which other callers cannot use up.
static CONNECTION_SLOTS: Semaphore = Semaphore::const_new(1792);
static DISPATCHER_SLOTS: Semaphore = Semaphore::const_new(256);
/// Maximum number of connections of one user, and of one dispatcher's token.
const PER_OWNER_MAX: usize = 64;
/// Number of open connections per owner.
static OPEN_PER_OWNER: OpenCounts<String> = OpenCounts::new();
/// Maximum delay until commits of other replicas are seen.
const POLL_INTERVAL: Duration = Duration::from_millis(500);
const PING_INTERVAL: Duration = Duration::from_secs(30);
/// Time after which a reader that accepts no data is disconnected.
const SEND_TIMEOUT: Duration = Duration::from_secs(60);
const SUBSCRIPTIONS_MAX: usize = 100;
const PAGE_ROWS: i64 = 200;

pub(super) async fn respond(State(app): State<App>, mut request: Request) -> Response {
    let id = app.next_request_id();
    let pairs = call::pairs(request.uri().query().unwrap_or_default());
    let token = pairs.into_iter().find(|(name, _)| name == "api_token").map(|(_, token)| token);
    let asker = match token.or_else(|| call::token(&request)) {
        Some(token) => {
            let sender = call::RequestSender::from_request(&request, token.clone());
            sender.authenticate(&app).await.map(|asker| (asker, token))
        }
        None => Err(Error::Unauthenticated),
    };
    let (asker, token) = match asker {
        Ok(known) => known,
        Err(error) => return super::refusal(&error, &id),
    };
    let key = request.headers().get(header::SEC_WEBSOCKET_KEY).map(|key| derive_accept_key(key.as_bytes()));
    let Some(key) = key.and_then(|key| HeaderValue::from_str(&key).ok()) else {
        return super::refusal(&Error::invalid("expected a WebSocket handshake"), &id);
    };
    let place = match ConnectionSlot::take(&asker) {
        Ok(place) => place,
        Err(error) => return super::refusal(&error, &id),
    };
    let upgrade = hyper::upgrade::on(&mut request);
    tokio::spawn(async move {
        let _place = place;
        let Ok(stream) = upgrade.await else { return };
        let socket = WebSocketStream::from_raw_socket(TokioIo::new(stream), Role::Server, None).await;
        let lost = until_rights_lost(&app, &asker, &token);
        let mut listener = EventSocket {
            app: app.clone(),
            asker: asker.clone(),
            socket,
            wanted: Vec::new(),
            at: None,
            sent: 0,
        };
        tokio::select! {
            // Events after the loss of the rights are not sent, even if they are available.
            biased;
            () = lost => {}
            () = app.closed() => {}
            // A client that disconnects is not an error.
            ended = listener.serve() => if let Err(error) = ended {
                tracing::debug!(%error, "failed to serve events");
            },
        }
        let _ = timeout(Duration::from_secs(1), listener.socket.close(None)).await;
    });
    let mut response = Response::new(Body::empty());
    *response.status_mut() = StatusCode::SWITCHING_PROTOCOLS;
    let headers = response.headers_mut();
    headers.insert(header::CONNECTION, HeaderValue::from_static("Upgrade"));
    headers.insert(header::UPGRADE, HeaderValue::from_static("websocket"));
    headers.insert(header::SEC_WEBSOCKET_ACCEPT, key);
    response
}

/// Slot of one open connection, until it ends.
struct ConnectionSlot {
    _opened: OpenGuard<String>,
    _permit: SemaphorePermit<'static>,
}

impl ConnectionSlot {
    fn take(asker: &Requester) -> Result<Self> {
        let (whose, places) = match &asker.who {
            QueueCaller::Dispatcher { token } => (token.clone(), &DISPATCHER_SLOTS),
            QueueCaller::Admin
            | QueueCaller::User
            | QueueCaller::Inside { .. }
            | QueueCaller::Executor { .. } => (asker.user_uuid.clone(), &CONNECTION_SLOTS),
        };
        let permit = places.try_acquire().map_err(|_| Error::Busy)?;
        let refused = || Error::TooMany(format!("too many connections: the maximum is {PER_OWNER_MAX}"));
        let opened = OPEN_PER_OWNER.open(whose, PER_OWNER_MAX).ok_or_else(refused)?;
        Ok(Self { _opened: opened, _permit: permit })
    }
}

/// Returns when the token has changed: it was revoked, its user was deleted, or the user's role changed.
async fn until_rights_lost(app: &App, asker: &Requester, token: &str) {
    let rights = StreamRights::register(
        app,
        RightsBasis {
            user: asker.user,
            token_hash: crate::auth::Token::chosen(&asker.secret).hash(),
            queue_token: Some(asker.token_uuid.clone()),
            project: None,
        },
    );
    loop {
        rights.changed().await;
        match auth::authenticate(app, token, "").await {
            Ok(now) if now.is_admin == asker.is_admin && now.who == asker.who => {}
            // A database that does not answer revokes no rights.
            Err(Error::Inner(_)) => rights.again(),
            Ok(_) | Err(_) => return,
        }
    }
}

struct EventSocket<S> {
    app: App,
    asker: Requester,
    socket: WebSocketStream<S>,
    wanted: Vec<Subscription>,
    /// Last row that was read.
    at: Option<i64>,
    sent: u64,
}

struct Subscription {
    filters: Value,
    conditions: Vec<Condition>,
    /// Rows up to this one were not requested, or were sent before.
    after: i64,
}

#[derive(Debug, thiserror::Error)]
enum SocketEnd {
    #[error("the connection ended")]
    Closed,
    #[error(transparent)]
    Socket(#[from] tokio_tungstenite::tungstenite::Error),
    #[error("the reader is too slow")]
    SendTimeout,
    #[error(transparent)]
    Queue(#[from] Error),
}

impl<S: tokio::io::AsyncRead + tokio::io::AsyncWrite + Unpin> EventSocket<S> {
    async fn serve(&mut self) -> Result<(), SocketEnd> {
        let mut news = self.app.subscribe_queue();
        let mut poll_timer = tokio::time::interval(POLL_INTERVAL);
        let mut ping = tokio::time::interval(PING_INTERVAL);
        loop {
            tokio::select! {
                message = self.socket.next() => match message {
                    None => return Err(SocketEnd::Closed),
                    Some(message) => self.receive(message?).await?,
                },
                changed = news.changed() => {
                    changed.map_err(|_| SocketEnd::Closed)?;
                    self.notify().await?;
                }
                _ = poll_timer.tick() => self.notify().await?,
                _ = ping.tick() => self.send(Message::Ping(Vec::new().into())).await?,
            }
        }
    }

    async fn send(&mut self, message: Message) -> Result<(), SocketEnd> {
        timeout(SEND_TIMEOUT, self.socket.send(message)).await.map_err(|_| SocketEnd::SendTimeout)??;
        Ok(())
    }

    async fn receive(&mut self, message: Message) -> Result<(), SocketEnd> {
        let Message::Text(text) = message else {
            return if message.is_close() { Err(SocketEnd::Closed) } else { Ok(()) };
        };
        let status = match self.handle_request(&text).await {
            Ok(()) => 200,
            Err(Error::Inner(error)) => return Err(SocketEnd::Queue(error.into())),
            Err(_) => 400,
        };
        self.send(Message::text(json!({ "status": status }).to_string())).await?;
        self.notify().await
    }

    async fn handle_request(&mut self, text: &str) -> Result<()> {
        let message: Value =
            serde_json::from_str(text).map_err(|_| Error::invalid("the message is not valid JSON"))?;
        let filters = message.get("filters").cloned().unwrap_or_else(|| json!([]));
        match message.get("method").and_then(Value::as_str) {
            Some("subscribe") => {
                if self.wanted.len() >= SUBSCRIPTIONS_MAX {
                    return Err(Error::invalid("too many subscriptions"));
                }
                let conditions = call::filters(Some(&filters))?;
                // Run once, so that invalid filters are rejected here.
                rows(&self.app, &self.asker, &conditions, i64::MAX - 1, 0).await?;
                let now = newest_row(&self.app).await?;
                let after = message.get("last_log_id").and_then(Value::as_i64).unwrap_or(now);
                // A client that reconnects continues at its position; rows that it already has are not sent again.
                let at = self.at.unwrap_or(now).min(after);
                self.at = Some(at);
                self.wanted.push(Subscription { filters, conditions, after: after.max(0) });
                Ok(())
            }
            Some("unsubscribe") => {
                let before = self.wanted.len();
                self.wanted.retain(|wanted| wanted.filters != filters);
                if self.wanted.len() < before { Ok(()) } else { Err(Error::invalid("unknown subscription")) }
            }
            _ => Err(Error::invalid("unknown method")),
        }
    }

    /// Sends all new rows that match any subscription.
    async fn notify(&mut self) -> Result<(), SocketEnd> {
        if self.wanted.is_empty() {
            return Ok(());
        }
        loop {
            let at = self.at.unwrap_or(0);
            let newest = newest_row(&self.app).await?;
            if newest <= at {
                return Ok(());
            }
            let mut found: Vec<Value> = Vec::new();
            // Beyond this, a subscription has more rows than were read.
            let mut until = newest;
            for wanted in &self.wanted {
                let rows =
                    rows(&self.app, &self.asker, &wanted.conditions, at.max(wanted.after), PAGE_ROWS).await?;
                if rows.len() == usize::try_from(PAGE_ROWS).unwrap_or(usize::MAX) {
                    until = until.min(rows.last().and_then(|row| row["id"].as_i64()).unwrap_or(until));
                }
                found.extend(rows);
            }
            let id = |row: &Value| row["id"].as_i64().unwrap_or(0);
            found.sort_by_key(id);
            found.dedup_by_key(|row| id(row));
            let mut due: VecDeque<Value> = found.into_iter().filter(|row| id(row) <= until).collect();
            while let Some(row) = due.pop_front() {
                self.sent += 1;
                let mut message = row;
                if let Some(message) = message.as_object_mut() {
                    message.insert("msgID".into(), self.sent.into());
                }
                self.send(Message::text(message.to_string())).await?;
            }
            self.at = Some(until);
        }
    }
}

/// Id of the last row.
async fn newest_row(app: &App) -> Result<i64> {
    let requested = ListQuery { order: vec![("id".into(), true)], limit: 1, ..ListQuery::default() };
    let (items, _) = records::list(app, &QueueVisibility::All, ListKind::Logs, &requested).await?;
    Ok(items.first().and_then(|item| item["id"].as_i64()).unwrap_or(0))
}

/// Rows after this one, as far as the caller sees them.
async fn rows(
    app: &App,
    asker: &Requester,
    conditions: &[Condition],
    after: i64,
    limit: i64,
) -> Result<Vec<Value>> {
    let mut conditions = conditions.to_vec();
    conditions.push(Condition { attribute: "id".into(), op: ">".into(), operand: after.into() });
    let requested =
        ListQuery { conditions, order: vec![("id".into(), false)], limit, ..ListQuery::default() };
    Ok(records::list(app, &asker.sight(), ListKind::Logs, &requested).await?.0)
}
