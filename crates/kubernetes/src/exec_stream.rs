//! Programs in containers, with their standard input and output as one stream: the exec call of the API over WebSocket
//! (subprotocol `v5.channel.k8s.io`). Each message starts with the number of its channel.

use std::time::Duration;

use futures_util::{SinkExt as _, StreamExt as _};
use hyper::header;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _, DuplexStream},
    sync::oneshot,
    time::{Instant, interval_at, timeout},
};
use tokio_tungstenite::{
    WebSocketStream, client_async,
    tungstenite::{Bytes, Error as WsError, Message, client::IntoClientRequest as _},
};
use windlass_dial::Stream;
use windlass_model::error_chain::format_chain;

use crate::{
    api_client::{ApiClient, ApiError, bearer},
    objects::Status,
};

const PROTOCOL: &str = "v5.channel.k8s.io";
const STDIN: u8 = 0;
const STDOUT: u8 = 1;
const STDERR: u8 = 2;
const ERROR: u8 = 3;
/// Closes the channel whose number follows.
const CLOSE: u8 = 255;
/// Bytes that are buffered in each direction.
const BUFFER_BYTES: usize = 256 * 1024;
const CHUNK_BYTES: usize = 32 * 1024;
/// Maximum length of the error output that is kept.
const ERROR_TEXT_MAX: usize = 4 * 1024;
const OPEN_TIMEOUT: Duration = Duration::from_secs(20);
/// Interval of pings: balancers drop connections without traffic.
const PING_INTERVAL: Duration = Duration::from_secs(20);

/// A running program.
pub(crate) struct ExecStream {
    /// Standard input and output. Its end closes both.
    pub(crate) stream: DuplexStream,
    /// Its end: `Ok` if it exited with 0.
    pub(crate) ended: oneshot::Receiver<Result<(), String>>,
}

/// Starts a program in a container of a pod.
pub(crate) async fn start(
    api: &ApiClient,
    pod: &str,
    container: &str,
    command: &[&str],
) -> Result<ExecStream, ApiError> {
    let message = || format!("no answer of the API server within {} s", OPEN_TIMEOUT.as_secs());
    let opened = timeout(OPEN_TIMEOUT, open(api, pod, container, command)).await;
    let socket = opened.unwrap_or_else(|_| Err(ApiError::connection(message())))?;
    let (stream, inner) = tokio::io::duplex(BUFFER_BYTES);
    let (sender, ended) = oneshot::channel();
    tokio::spawn(async move {
        // A receiver that is gone does not ask how it ended.
        let _ = sender.send(pump(socket, inner).await);
    });
    Ok(ExecStream { stream, ended })
}

async fn open(
    api: &ApiClient,
    pod: &str,
    container: &str,
    command: &[&str],
) -> Result<WebSocketStream<Stream>, ApiError> {
    let mut query = format!("container={container}&stdin=true&stdout=true&stderr=true");
    for word in command {
        query.push_str("&command=");
        query.push_str(&percent_encode(word));
    }
    let path = format!("/api/v1/namespaces/{}/pods/{pod}/exec?{query}", api.namespace());
    let url = format!("ws://{}{}", api.authority(), api.target(&path));
    let invalid = |error: WsError| ApiError::connection(error.to_string());
    let mut request = url.into_client_request().map_err(invalid)?;
    let headers = request.headers_mut();
    headers.insert(header::SEC_WEBSOCKET_PROTOCOL, header::HeaderValue::from_static(PROTOCOL));
    if let Some(token) = api.token().await? {
        headers.insert(header::AUTHORIZATION, bearer(&token)?);
    }
    match client_async(request, api.connect().await?).await {
        Ok((socket, _)) => Ok(socket),
        Err(WsError::Http(answer)) => {
            let body = answer.body().as_deref().unwrap_or_default();
            Err(ApiError::from_answer(answer.status(), body))
        }
        Err(error) => {
            Err(ApiError::connection(format!("failed to open an exec stream: {}", format_chain(&error))))
        }
    }
}

/// Encodes a word for a query.
fn percent_encode(word: &str) -> String {
    let mut encoded = String::with_capacity(word.len());
    for byte in word.bytes() {
        if byte.is_ascii_alphanumeric() || b"-._~/".contains(&byte) {
            encoded.push(char::from(byte));
        } else {
            encoded.push_str(&format!("%{byte:02X}"));
        }
    }
    encoded
}

/// Copies between the stream and the WebSocket until the program ends or one side is lost.
async fn pump(socket: WebSocketStream<Stream>, inner: DuplexStream) -> Result<(), String> {
    let (mut sink, mut messages) = socket.split();
    let (mut from_caller, mut to_caller) = tokio::io::split(inner);
    let mut errors = Vec::new();
    let mut chunk = vec![0; CHUNK_BYTES];
    let mut is_open = true;
    let mut pings = interval_at(Instant::now() + PING_INTERVAL, PING_INTERVAL);
    let lost = |error: WsError| format!("the exec stream was lost: {}", format_chain(&error));
    loop {
        tokio::select! {
            read = from_caller.read(&mut chunk), if is_open => {
                let count = read.unwrap_or_default();
                is_open = count > 0;
                let message = if is_open { framed(STDIN, &chunk[..count]) } else { framed(CLOSE, &[STDIN]) };
                sink.send(message).await.map_err(lost)?;
            }
            _ = pings.tick() => sink.send(Message::Ping(Bytes::new())).await.map_err(lost)?,
            message = messages.next() => match message {
                None => return Err("the exec stream ended without a result".to_owned()),
                Some(Err(error)) => return Err(lost(error)),
                Some(Ok(Message::Binary(bytes))) => match bytes.split_first() {
                    Some((&STDOUT, data)) => {
                        if to_caller.write_all(data).await.is_err() {
                            return Err("the reader of the exec stream is gone".to_owned());
                        }
                    }
                    Some((&STDERR, data)) => {
                        let room = ERROR_TEXT_MAX.saturating_sub(errors.len()).min(data.len());
                        errors.extend_from_slice(&data[..room]);
                    }
                    Some((&ERROR, data)) => {
                        let _ = to_caller.shutdown().await;
                        return result(data, &errors);
                    }
                    Some(_) | None => {}
                },
                // The peer answers a close itself, and the library answers pings.
                Some(Ok(Message::Text(_) | Message::Ping(_) | Message::Pong(_) | Message::Close(_)
                    | Message::Frame(_))) => {}
            },
        }
    }
}

fn framed(channel: u8, data: &[u8]) -> Message {
    let mut bytes = Vec::with_capacity(data.len() + 1);
    bytes.push(channel);
    bytes.extend_from_slice(data);
    Message::Binary(bytes.into())
}

/// Reads the last message: how the program ended.
fn result(data: &[u8], errors: &[u8]) -> Result<(), String> {
    let status: Status = serde_json::from_slice(data).unwrap_or_default();
    if status.status == "Success" {
        return Ok(());
    }
    let text = String::from_utf8_lossy(errors);
    let text = text.trim();
    let message =
        if status.message.is_empty() { String::from_utf8_lossy(data).into_owned() } else { status.message };
    Err(if text.is_empty() { message } else { format!("{message}: {text}") })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_encoded_for_a_query() {
        assert_eq!(percent_encode("/bin/sh"), "/bin/sh");
        assert_eq!(percent_encode("a b&c=\"d\"+é"), "a%20b%26c%3D%22d%22%2B%C3%A9");
    }

    #[test]
    fn the_last_message_says_how_a_program_ended() {
        assert_eq!(result(br#"{"status": "Success"}"#, b"warning"), Ok(()));
        let failed = br#"{"status": "Failure", "message": "command terminated with non-zero exit code: 3"}"#;
        assert_eq!(
            result(failed, b"no such file\n").unwrap_err(),
            "command terminated with non-zero exit code: 3: no such file"
        );
        assert_eq!(result(b"odd", b"").unwrap_err(), "odd");
    }
}
