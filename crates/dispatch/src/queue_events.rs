//! Events of the queue, which wake a dispatcher before its next regular round.
//!
//! An event carries no data, and may be lost: a dispatcher that is woken reads the queue, and one that is not does so a
//! little later.

use std::{sync::Arc, time::Duration};

use futures_util::{SinkExt as _, StreamExt as _};
use serde_json::{Value, json};
use tokio::{
    sync::Notify,
    task::JoinHandle,
    time::{sleep, timeout},
};
use tokio_tungstenite::{
    client_async,
    tungstenite::{self, Message},
};
use windlass_api::queue_client::QueueHttpClient;
use windlass_dial::DialError;
use windlass_model::error_chain::format_chain;

const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);
/// Time without a message after which the connection counts as broken; the server sends one every half a minute.
const IDLE_TIMEOUT: Duration = Duration::from_secs(90);
const RETRY_DELAY_MIN: Duration = Duration::from_secs(1);
const RETRY_DELAY_MAX: Duration = Duration::from_secs(60);

pub struct QueueEvents {
    received: Arc<Notify>,
    listening: JoinHandle<()>,
}

impl QueueEvents {
    /// Listens until it is dropped. A server without events never wakes the dispatcher.
    pub fn listen(client: QueueHttpClient) -> Self {
        let received = Arc::new(Notify::new());
        let listening = tokio::spawn(listen(client, received.clone()));
        Self { received, listening }
    }

    pub async fn next(&self) {
        self.received.notified().await;
    }
}

impl Drop for QueueEvents {
    fn drop(&mut self) {
        self.listening.abort();
    }
}

#[derive(Debug, thiserror::Error)]
enum ListenError {
    #[error(transparent)]
    Dial(#[from] DialError),
    #[error("the WebSocket connection to the server failed")]
    WebSocket(#[from] Box<tungstenite::Error>),
    #[error("no message from the server")]
    NoEvents,
}

async fn listen(client: QueueHttpClient, received: Arc<Notify>) {
    let mut pause = RETRY_DELAY_MIN;
    loop {
        let mut any = false;
        let Err(deaf) = receive_events(&client, &received, &mut any).await;
        tracing::debug!(error = %format_chain(&deaf), "queue event stream failed");
        pause = if any { RETRY_DELAY_MIN } else { (pause * 2).min(RETRY_DELAY_MAX) };
        sleep(pause).await;
    }
}

async fn receive_events(
    client: &QueueHttpClient,
    received: &Notify,
    any: &mut bool,
) -> Result<std::convert::Infallible, ListenError> {
    let spoken = |error| ListenError::WebSocket(Box::new(error));
    let (stream, url) = client.connect_events().await?.ok_or(ListenError::NoEvents)?;
    let greeted = timeout(HANDSHAKE_TIMEOUT, client_async(url, stream)).await;
    let (mut socket, _) = greeted.map_err(|_| ListenError::NoEvents)?.map_err(spoken)?;
    let wanted = json!({ "method": "subscribe", "filters": [["object_uuid", "is_a", "arvados#container"]] });
    socket.send(Message::text(wanted.to_string())).await.map_err(spoken)?;
    *any = true;
    // Covers events that were missed while not connected.
    received.notify_one();
    loop {
        match timeout(IDLE_TIMEOUT, socket.next()).await {
            Err(_) | Ok(None) => return Err(ListenError::NoEvents),
            Ok(Some(Err(error))) => return Err(spoken(error)),
            Ok(Some(Ok(message))) => {
                if message.to_text().is_ok_and(is_relevant) {
                    received.notify_one();
                }
            }
        }
    }
}

/// Returns whether there may be a container to lock or to stop. The start of a container by this dispatcher does not
/// count, and neither does its end: the scheduler detects the freed capacity first.
fn is_relevant(text: &str) -> bool {
    let row: Value = serde_json::from_str(text).unwrap_or_default();
    let (old, new) = (&row["properties"]["old_attributes"], &row["properties"]["new_attributes"]);
    let is_open = matches!(new["state"].as_str(), Some("Queued" | "Cancelled"));
    is_open || (new["priority"].is_number() && old["priority"] != new["priority"])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn queue_events_are_relevant_only_if_the_dispatcher_must_act_on_them() {
        let row = |old: Value, new: Value| {
            json!({ "properties": { "old_attributes": old, "new_attributes": new } }).to_string()
        };
        assert!(is_relevant(&row(Value::Null, json!({ "state": "Queued", "priority": 1 }))));
        assert!(is_relevant(&row(json!({ "state": "Running" }), json!({ "state": "Cancelled" }))));
        assert!(!is_relevant(&row(json!({ "state": "Running" }), json!({ "state": "Complete" }))));
        let lowered = row(json!({ "priority": 5 }), json!({ "state": "Running", "priority": 0 }));
        assert!(is_relevant(&lowered));
        let locked = row(json!({ "priority": 5 }), json!({ "state": "Locked", "priority": 5 }));
        assert!(!is_relevant(&locked));
        assert!(!is_relevant(r#"{"status":200}"#) && !is_relevant("") && !is_relevant("no JSON"));
    }
}
