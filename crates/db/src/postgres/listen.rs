//! Hints between replicas. A lost hint costs time, never the outcome: the timers are the safety net.

use std::{future::poll_fn, time::Duration};

use tokio::{sync::broadcast, time::sleep};
use tokio_postgres::AsyncMessage;

use super::tls::PostgresTarget;

pub(super) const CHANNEL: &str = "windlass_hints";
/// Begins a message, before the name of its sender: a server does not need its own hints.
const SENDER_PREFIX: &str = "from:";
/// Sent instead of a name: every pipeline becomes due.
pub(crate) const ALL_PIPELINES: &str = "*";
const RETRY_DELAY_MIN: Duration = Duration::from_millis(100);
const RETRY_DELAY_MAX: Duration = Duration::from_secs(5);

/// Text of one message with several hints.
pub(super) fn write_message(sender: &str, hints: &[&str]) -> String {
    format!("{SENDER_PREFIX}{sender} {}", hints.join(" "))
}

/// The hints of a message, unless this server sent it.
fn read_message<'a>(message: &'a str, own_name: &str) -> impl Iterator<Item = &'a str> + use<'a> {
    let sender = message.split(' ').next().and_then(|word| word.strip_prefix(SENDER_PREFIX));
    let is_own = sender == Some(own_name);
    message.split(' ').filter(move |word| !is_own && !word.starts_with(SENDER_PREFIX))
}

/// Listens, and reconnects after a failure, until it is stopped.
pub(super) async fn serve(
    target: PostgresTarget,
    own_name: String,
    hints: broadcast::Sender<String>,
    mut stop: broadcast::Receiver<()>,
) {
    let mut pause = RETRY_DELAY_MIN;
    let mut has_listened = false;
    loop {
        let once = async {
            let before = tokio::time::Instant::now();
            if let Err(error) = listen(&target, &own_name, &hints, &mut has_listened).await {
                tracing::debug!(%error, "stopped listening for hints");
            }
            pause = if before.elapsed() > RETRY_DELAY_MAX {
                RETRY_DELAY_MIN
            } else {
                (pause * 2).min(RETRY_DELAY_MAX)
            };
            sleep(pause).await;
        };
        tokio::select! {
            () = once => {}
            _ = stop.recv() => return,
        }
    }
}

async fn listen(
    target: &PostgresTarget,
    own_name: &str,
    hints: &broadcast::Sender<String>,
    has_listened: &mut bool,
) -> Result<(), tokio_postgres::Error> {
    let (client, mut connection) = target.config.connect(target.tls.clone()).await?;
    let text = client.batch_execute("LISTEN windlass_hints");
    let mut text = std::pin::pin!(text);
    let mut has_message = false;
    loop {
        tokio::select! {
            answer = &mut text, if !has_message => {
                answer?;
                has_message = true;
                if std::mem::replace(has_listened, true) {
                    // Hints may have been missed while not connected.
                    let _ = hints.send(ALL_PIPELINES.to_owned());
                }
            }
            message = poll_fn(|context| connection.poll_message(context)) => match message {
                Some(Ok(AsyncMessage::Notification(message))) => {
                    for hint in read_message(message.payload(), own_name) {
                        // There may be no receiver yet; a hint is not stored.
                        let _ = hints.send(hint.to_owned());
                    }
                }
                Some(Ok(_)) => {}
                Some(Err(error)) => return Err(error),
                None => return Ok(()),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_carries_hints_to_all_servers_but_its_sender() {
        let message = write_message("a1", &["runs", "jobs_running"]);
        assert_eq!(read_message(&message, "b2").collect::<Vec<_>>(), ["runs", "jobs_running"]);
        assert_eq!(read_message(&message, "a1").count(), 0);
        // As older servers send it.
        assert_eq!(read_message("runs", "a1").collect::<Vec<_>>(), ["runs"]);
    }
}
