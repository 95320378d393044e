//! WebSocket that follows the job's output.
//!
//! A tailer that does not read is blocked by its socket: this task waits with one chunk in memory, and no other task is
//! affected. Meanwhile it still detects when the client closes.

use std::{io, time::Duration};

use axum::{
    body::Bytes,
    extract::ws::{CloseFrame, Message, WebSocket, close_code},
};
use futures_util::{
    SinkExt, StreamExt,
    stream::{SplitSink, SplitStream},
};
use tokio::time::{Instant, interval_at, timeout};

use super::{Follower, reader_tracking::TailerGuard};

/// Interval of pings to a tailer to which nothing else is sent.
const PING_INTERVAL: Duration = Duration::from_secs(15);
/// Maximum time for which the client may accept no data.
const SEND_TIMEOUT: Duration = Duration::from_secs(600);
/// Time that the client has to close the connection.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(5);

enum TailEnd {
    /// Every byte was sent.
    Complete,
    /// The client disconnected.
    ClientLeft,
    Failed(io::Error),
}

/// Sends everything from the follower's offset on, closes the connection and releases the tailer's slot.
pub(super) async fn serve_tailer(socket: WebSocket, mut follow: Follower, place: TailerGuard) {
    let (mut sink, mut received) = socket.split();
    let (code, reason) = match send_all(&mut sink, &mut received, &mut follow).await {
        TailEnd::ClientLeft => return,
        TailEnd::Complete => {
            place.mark_complete();
            (close_code::NORMAL, "")
        }
        TailEnd::Failed(error) => {
            tracing::warn!(%error, "failed to read output for a tailer");
            (close_code::ERROR, "failed to read the output")
        }
    };
    let close = Message::Close(Some(CloseFrame { code, reason: reason.into() }));
    let goodbye = async {
        if sink.send(close).await.is_ok() {
            while let Some(Ok(_)) = received.next().await {}
        }
    };
    // The socket is closed in either case.
    let _ = timeout(CLOSE_TIMEOUT, goodbye).await;
}

async fn send_all(
    sink: &mut SplitSink<WebSocket, Message>,
    received: &mut SplitStream<WebSocket>,
    follow: &mut Follower,
) -> TailEnd {
    let mut ping = interval_at(Instant::now() + PING_INTERVAL, PING_INTERVAL);
    loop {
        let message = tokio::select! {
            chunk = follow.next() => match chunk {
                Ok(Some(bytes)) => Message::Binary(bytes),
                Ok(None) => return TailEnd::Complete,
                Err(error) => return TailEnd::Failed(error),
            },
            _ = ping.tick() => Message::Ping(Bytes::new()),
            () = wait_closed(received) => return TailEnd::ClientLeft,
        };
        let sent = tokio::select! {
            sent = timeout(SEND_TIMEOUT, sink.send(message)) => matches!(sent, Ok(Ok(()))),
            () = wait_closed(received) => false,
        };
        if !sent {
            return TailEnd::ClientLeft;
        }
    }
}

/// Returns when the client closes or has disconnected. Other messages are ignored.
async fn wait_closed(received: &mut SplitStream<WebSocket>) {
    loop {
        match received.next().await {
            Some(Ok(Message::Close(_)) | Err(_)) | None => return,
            Some(Ok(Message::Text(_) | Message::Binary(_) | Message::Ping(_) | Message::Pong(_))) => {}
        }
    }
}
