//! Hints between replicas. A lost hint costs time, never the outcome: the timers are the safety net.

use std::{future::poll_fn, time::Duration};

use tokio::{sync::broadcast, time::sleep};
use tokio_postgres::AsyncMessage;

use super::tls::PostgresTarget;

pub(super) const CHANNEL: &str = "windlass_hints";
/// Sent instead of a name: every pipeline becomes due.
pub(in crate::db) const ALL_PIPELINES: &str = "*";
const RETRY_DELAY_MIN: Duration = Duration::from_millis(100);
const RETRY_DELAY_MAX: Duration = Duration::from_secs(5);

/// Listens, and reconnects after a failure, until it is stopped.
pub(super) async fn serve(
    target: PostgresTarget,
    hints: broadcast::Sender<String>,
    mut stop: broadcast::Receiver<()>,
) {
    let mut pause = RETRY_DELAY_MIN;
    let mut has_listened = false;
    loop {
        let once = async {
            let before = tokio::time::Instant::now();
            if let Err(error) = listen(&target, &hints, &mut has_listened).await {
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
                Some(Ok(AsyncMessage::Notification(hint))) => {
                    // There may be no receiver yet; a hint is not stored.
                    let _ = hints.send(hint.payload().to_owned());
                }
                Some(Ok(_)) => {}
                Some(Err(error)) => return Err(error),
                None => return Ok(()),
            }
        }
    }
}
