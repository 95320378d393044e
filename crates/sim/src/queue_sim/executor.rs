//! A simulated executor: the same calls to the queue in the same order as `windlass-agent exec`, without a program.

use std::time::Duration;

use serde_json::{Value, json};
use tokio::{
    sync::watch,
    time::{Instant, sleep, sleep_until},
};
use windlass_api::queue_client::{QueueError, QueueHttpClient};
use windlass_model::dispatch::Attempt;

use super::{ProgramStart, SharedQueueState};
use crate::rng::Rng;

const RETRY_DELAY: Duration = Duration::from_secs(1);
const ATTEMPTS_MAX: u32 = 3;
/// Interval at which an idle executor checks whether its attempt is still valid.
const LOCK_CHECK_INTERVAL: Duration = Duration::from_secs(10);

/// Behaviour of an executor.
#[derive(Clone, Copy, Debug)]
pub(super) enum ExecutorBehaviour {
    Completes {
        prepares: Duration,
        runs: Duration,
        exit: u64,
    },
    CrashesBeforeRunning,
    CrashesAfterRunning,
    Hangs,
    /// The worker has no executor program.
    Missing,
    /// A foreign process with the dispatcher's tag, which runs until it is stopped.
    ForeignProcess,
}

impl ExecutorBehaviour {
    pub(super) fn draw(rng: &mut Rng) -> Self {
        match rng.between(1, 100) {
            1..=5 => Self::CrashesBeforeRunning,
            6..=10 => Self::CrashesAfterRunning,
            11..=20 => Self::Hangs,
            21..=35 => Self::Completes {
                prepares: rng.millis(50, 5_000),
                runs: rng.millis(60_000, 140_000),
                exit: 0,
            },
            _ => Self::Completes {
                prepares: rng.millis(50, 5_000),
                runs: rng.millis(100, 60_000),
                exit: rng.between(0, 2),
            },
        }
    }

    pub(super) fn fault(self) -> Option<&'static str> {
        match self {
            Self::Completes { .. } | Self::ForeignProcess => None,
            Self::CrashesBeforeRunning => Some("executor crashed before Running"),
            Self::CrashesAfterRunning => Some("executor crashed after Running"),
            Self::Hangs => Some("executor hangs in set-up"),
            Self::Missing => Some("worker without an executor"),
        }
    }
}

/// Returns whether it failed before the program started.
pub(super) async fn execute(
    client: &QueueHttpClient,
    attempt: &Attempt,
    behaviour: ExecutorBehaviour,
    mut reported: watch::Receiver<bool>,
    state: &SharedQueueState,
) -> bool {
    let (prepares, runs, exit) = match behaviour {
        ExecutorBehaviour::Missing => return true,
        ExecutorBehaviour::ForeignProcess => {
            wait_for_stop(&mut reported).await;
            return false;
        }
        ExecutorBehaviour::Completes { prepares, runs, exit } => (prepares, Some(runs), exit),
        ExecutorBehaviour::CrashesBeforeRunning
        | ExecutorBehaviour::CrashesAfterRunning
        | ExecutorBehaviour::Hangs => (RETRY_DELAY, None, 0),
    };
    let path = format!("containers/{}", attempt.uuid);
    let Some(record) = read_with_retry(client, &path).await else { return true };
    if record["state"] != "Locked" || record["attempt"].as_u64() != Some(attempt.number) {
        return false;
    }
    sleep(prepares).await;
    if *reported.borrow() || matches!(behaviour, ExecutorBehaviour::CrashesBeforeRunning) {
        return true;
    }
    if matches!(behaviour, ExecutorBehaviour::Hangs) {
        wait_for_stop(&mut reported).await;
        return true;
    }
    if put_with_retry(client, &path, attempt, json!({ "state": "Running" }), "run").await.is_err() {
        return true;
    }
    let started = ProgramStart { uuid: attempt.uuid.clone(), attempt: attempt.number };
    state.lock().started.push(started);
    let Some(runs) = runs else {
        sleep(RETRY_DELAY).await;
        return false;
    };
    let ends = Instant::now() + runs;
    let ending = loop {
        tokio::select! {
            biased;
            () = wait_for_stop(&mut reported) => break json!({ "state": "Cancelled" }),
            () = sleep_until(ends) => break json!({ "state": "Complete", "exit_code": exit }),
            () = sleep(LOCK_CHECK_INTERVAL) => match client.get(&path).await {
                // The program ends here: the attempt belongs to another executor now.
                Err(error) if error.is_refusal() => {
                    state.lock().record_fault("executor fenced");
                    return false;
                }
                Ok(_) | Err(_) => {}
            }
        }
    };
    let _ = put_with_retry(client, &path, attempt, ending, "end").await;
    false
}

/// Waits for a stop; never returns if the sender is gone.
async fn wait_for_stop(reported: &mut watch::Receiver<bool>) {
    if reported.wait_for(|reported| *reported).await.is_err() {
        std::future::pending::<()>().await;
    }
}

async fn read_with_retry(client: &QueueHttpClient, path: &str) -> Option<Value> {
    for _ in 0..ATTEMPTS_MAX {
        match client.get(path).await {
            Ok(record) => return Some(record),
            Err(error) if error.is_refusal() => return None,
            Err(_) => sleep(RETRY_DELAY).await,
        }
    }
    None
}

/// Repeats a call until it is answered; repetitions are recognised by their name.
async fn put_with_retry(
    client: &QueueHttpClient,
    path: &str,
    attempt: &Attempt,
    mut change: Value,
    what: &str,
) -> Result<(), QueueError> {
    change["attempt"] = attempt.number.into();
    let body = json!({ "container": change });
    let name = format!("exec-{}-{what}", attempt.number);
    loop {
        match client.send_idempotent("PUT", path, &body, &name).await {
            Ok(_) => return Ok(()),
            Err(error) if error.is_refusal() => return Err(error),
            Err(_) => sleep(RETRY_DELAY).await,
        }
    }
}
