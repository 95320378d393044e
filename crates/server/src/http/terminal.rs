//! Terminals of browsers: a WebSocket to a shell in a job.
//!
//! Binary messages are bytes of the terminal. Text messages are JSON: `{"type":"resize","columns","rows"}` from the
//! browser, `{"type":"exit","status"}` and `{"type":"alive"}` to it. The terminal of a caller who lost the rights is closed
//! with the code [`RIGHTS_LOST`].

use std::{future::Future, time::Duration};

use axum::{
    body::Body,
    extract::Request,
    http::{HeaderValue, StatusCode, header},
    response::Response,
};
use futures_util::{SinkExt as _, StreamExt as _, stream::SplitSink};
use hyper::upgrade::{OnUpgrade, Upgraded};
use hyper_util::rt::TokioIo;
use serde::Deserialize;
use serde_json::json;
use tokio::time::{interval, timeout};
use tokio_tungstenite::{
    WebSocketStream,
    tungstenite::{
        Error as SocketError, Message,
        handshake::derive_accept_key,
        protocol::{CloseFrame, Role, WebSocketConfig, frame::coding::CloseCode},
    },
};
use windlass_tunnel::{ShellEvent, ShellInput, ShellOutput, TerminalSize};

use super::port_stream::StreamSlot;
use crate::{
    app::App,
    error::{Error, Result},
    services::runs::OpenedShell,
    stream_rights::StreamRegistration,
};

const PROTOCOL: &str = "windlass.terminal.v1";
/// Code with which a terminal is closed whose caller lost the rights.
const RIGHTS_LOST: u16 = 4403;
const ALIVE_INTERVAL: Duration = Duration::from_secs(20);
const CLOSE_TIMEOUT: Duration = Duration::from_secs(1);
const MESSAGE_BYTES_MAX: usize = 1 << 20;
const SIZE_MAX: u32 = 1000;

type Sender = SplitSink<WebSocketStream<TokioIo<Upgraded>>, Message>;

/// A handshake that was checked.
pub(super) struct Handshake {
    upgrade: OnUpgrade,
    accept: HeaderValue,
}

/// Checks the handshake of a browser.
pub(super) fn require_handshake(request: &mut Request) -> Result<Handshake> {
    let headers = request.headers();
    let offered = headers.get(header::SEC_WEBSOCKET_PROTOCOL).and_then(|value| value.to_str().ok());
    let offers_protocol = offered.is_some_and(|all| all.split(',').any(|one| one.trim() == PROTOCOL));
    let key = headers.get(header::SEC_WEBSOCKET_KEY).map(|key| derive_accept_key(key.as_bytes()));
    let accept = key.and_then(|key| HeaderValue::from_str(&key).ok()).filter(|_| offers_protocol);
    let accept = accept.ok_or_else(|| {
        Error::refused(format!("expected a WebSocket handshake with the protocol `{PROTOCOL}`"))
    })?;
    Ok(Handshake { upgrade: hyper::upgrade::on(request), accept })
}

pub(super) fn respond<A, R>(
    app: App,
    handshake: Handshake,
    shell: OpenedShell,
    slot: StreamSlot,
    rights: StreamRegistration,
    allowed: A,
) -> Response
where
    A: Fn() -> R + Send + Sync + 'static,
    R: Future<Output = Result<()>> + Send,
{
    let Handshake { upgrade, accept } = handshake;
    tokio::spawn(async move {
        let _slot = slot;
        let Ok(stream) = upgrade.await else { return };
        let limits = WebSocketConfig::default().max_message_size(Some(MESSAGE_BYTES_MAX));
        let socket = WebSocketStream::from_raw_socket(TokioIo::new(stream), Role::Server, Some(limits)).await;
        let (mut sender, receiver) = socket.split();
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
        let OpenedShell { mut output, input } = shell;
        let code = tokio::select! {
            // Output after the loss of the rights is not sent.
            biased;
            () = denied => CloseCode::Library(RIGHTS_LOST),
            () = app.closed() => CloseCode::Away,
            () = send_output(&mut output, &mut sender) => CloseCode::Normal,
            () = receive_input(receiver, &input) => CloseCode::Normal,
        };
        input.close().await;
        let frame = CloseFrame { code, reason: "".into() };
        let _ = timeout(CLOSE_TIMEOUT, sender.send(Message::Close(Some(frame)))).await;
    });
    let mut response = Response::new(Body::empty());
    *response.status_mut() = StatusCode::SWITCHING_PROTOCOLS;
    let headers = response.headers_mut();
    headers.insert(header::CONNECTION, HeaderValue::from_static("Upgrade"));
    headers.insert(header::UPGRADE, HeaderValue::from_static("websocket"));
    headers.insert(header::SEC_WEBSOCKET_PROTOCOL, HeaderValue::from_static(PROTOCOL));
    headers.insert(header::SEC_WEBSOCKET_ACCEPT, accept);
    response
}

/// Sends what the shell prints, until it ends.
async fn send_output(output: &mut ShellOutput, sender: &mut Sender) {
    let mut alive = interval(ALIVE_INTERVAL);
    let mut status = None;
    loop {
        let message = tokio::select! {
            event = output.next() => match event {
                Some(ShellEvent::Output(bytes)) => Message::Binary(bytes),
                Some(ShellEvent::Exit(code)) => {
                    status = Some(code);
                    continue;
                }
                None => break,
            },
            _ = alive.tick() => Message::text(json!({ "type": "alive" }).to_string()),
        };
        if sender.send(message).await.is_err() {
            return;
        }
    }
    let exit = json!({ "type": "exit", "status": status });
    let _ = sender.send(Message::text(exit.to_string())).await;
}

#[derive(Deserialize)]
#[serde(tag = "type", rename_all = "lowercase")]
enum BrowserMessage {
    Resize { columns: u32, rows: u32 },
}

/// Passes on what is typed, until the browser or the shell ends.
async fn receive_input(
    mut receiver: impl futures_util::Stream<Item = std::result::Result<Message, SocketError>> + Unpin,
    input: &ShellInput,
) {
    while let Some(Ok(message)) = receiver.next().await {
        let done = match message {
            Message::Binary(bytes) => input.write(bytes).await,
            Message::Text(text) => match parse_resize(&text) {
                Some(size) => input.resize(size).await,
                None => Ok(()),
            },
            Message::Close(_) => return,
            Message::Ping(_) | Message::Pong(_) | Message::Frame(_) => Ok(()),
        };
        if done.is_err() {
            return;
        }
    }
}

/// Size of a terminal, if it is possible.
fn parse_resize(text: &str) -> Option<TerminalSize> {
    let BrowserMessage::Resize { columns, rows } = serde_json::from_str(text).ok()?;
    let is_possible = |size: u32| (1..=SIZE_MAX).contains(&size);
    (is_possible(columns) && is_possible(rows)).then_some(TerminalSize { columns, rows })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_possible_sizes_are_passed_on() {
        let resize = |columns: u32| {
            parse_resize(&json!({ "type": "resize", "columns": columns, "rows": 24 }).to_string())
        };
        assert_eq!(resize(80), Some(TerminalSize { columns: 80, rows: 24 }));
        assert_eq!((resize(0), resize(1001)), (None, None));
        assert_eq!(parse_resize("{}"), None);
        assert_eq!(parse_resize("nonsense"), None);
    }

    #[test]
    fn a_handshake_names_the_protocol() {
        let request = |protocol: Option<&str>| {
            let mut request = Request::get("/").header("sec-websocket-key", "x3JJHMbDL1EzLkh9GBhXDw==");
            if let Some(protocol) = protocol {
                request = request.header("sec-websocket-protocol", protocol);
            }
            request.body(Body::empty()).unwrap()
        };
        assert!(require_handshake(&mut request(Some("other, windlass.terminal.v1"))).is_ok());
        assert!(require_handshake(&mut request(Some("other"))).is_err());
        assert!(require_handshake(&mut request(None)).is_err());
    }
}
