//! An executor, as `windlass-agent exec` is one to the queue: the same calls in the same order, and no program.

use std::time::Duration;

use serde_json::{Value, json};
use tokio::{
    sync::watch,
    time::{Instant, sleep, sleep_until},
};
use windlass_api::queue::{Client, QueueError};
use windlass_model::dispatch::Attempt;

use super::{SharedWorld, Started};
use crate::rng::Rng;

const AGAIN: Duration = Duration::from_secs(1);
const TRIES: u32 = 3;
/// How often one that has nothing to say asks whether it still counts.
const ASK_EVERY: Duration = Duration::from_secs(10);

/// What becomes of an executor.
#[derive(Clone, Copy, Debug)]
pub(super) enum Fate {
    Lives {
        prepares: Duration,
        runs: Duration,
        exit: u64,
    },
    CrashesBefore,
    CrashesAfter,
    Hangs,
    /// There is none on that worker.
    Missing,
    /// Something else that carries our mark, and goes on until it is told to end.
    Deaf,
}

impl Fate {
    pub(super) fn draw(rng: &mut Rng) -> Self {
        match rng.between(1, 100) {
            1..=5 => Self::CrashesBefore,
            6..=10 => Self::CrashesAfter,
            11..=20 => Self::Hangs,
            21..=35 => {
                Self::Lives { prepares: rng.millis(50, 5_000), runs: rng.millis(60_000, 140_000), exit: 0 }
            }
            _ => Self::Lives {
                prepares: rng.millis(50, 5_000),
                runs: rng.millis(100, 60_000),
                exit: rng.between(0, 2),
            },
        }
    }

    pub(super) fn fault(self) -> Option<&'static str> {
        match self {
            Self::Lives { .. } | Self::Deaf => None,
            Self::CrashesBefore => Some("executor crashed before Running"),
            Self::CrashesAfter => Some("executor crashed after Running"),
            Self::Hangs => Some("executor hangs in set-up"),
            Self::Missing => Some("worker without an executor"),
        }
    }
}

/// Whether it failed before anything ran.
pub(super) async fn execute(
    client: &Client,
    attempt: &Attempt,
    fate: Fate,
    mut told: watch::Receiver<bool>,
    world: &SharedWorld,
) -> bool {
    let (prepares, runs, exit) = match fate {
        Fate::Missing => return true,
        Fate::Deaf => {
            until_told(&mut told).await;
            return false;
        }
        Fate::Lives { prepares, runs, exit } => (prepares, Some(runs), exit),
        Fate::CrashesBefore | Fate::CrashesAfter | Fate::Hangs => (AGAIN, None, 0),
    };
    let path = format!("containers/{}", attempt.uuid);
    let Some(record) = read(client, &path).await else { return true };
    if record["state"] != "Locked" || record["attempt"].as_u64() != Some(attempt.number) {
        return false;
    }
    sleep(prepares).await;
    if *told.borrow() || matches!(fate, Fate::CrashesBefore) {
        return true;
    }
    if matches!(fate, Fate::Hangs) {
        until_told(&mut told).await;
        return true;
    }
    if put(client, &path, attempt, json!({ "state": "Running" }), "run").await.is_err() {
        return true;
    }
    let started = Started { uuid: attempt.uuid.clone(), attempt: attempt.number };
    world.lock().started.push(started);
    let Some(runs) = runs else {
        sleep(AGAIN).await;
        return false;
    };
    let ends = Instant::now() + runs;
    let ending = loop {
        tokio::select! {
            biased;
            () = until_told(&mut told) => break json!({ "state": "Cancelled" }),
            () = sleep_until(ends) => break json!({ "state": "Complete", "exit_code": exit }),
            () = sleep(ASK_EVERY) => match client.get(&path).await {
                // The program ends here: the attempt is somebody else's.
                Err(error) if error.is_refusal() => {
                    world.lock().fire("executor fenced");
                    return false;
                }
                Ok(_) | Err(_) => {}
            }
        }
    };
    let _ = put(client, &path, attempt, ending, "end").await;
    false
}

/// For ever, if there is nobody left who could tell.
async fn until_told(told: &mut watch::Receiver<bool>) {
    if told.wait_for(|told| *told).await.is_err() {
        std::future::pending::<()>().await;
    }
}

async fn read(client: &Client, path: &str) -> Option<Value> {
    for _ in 0..TRIES {
        match client.get(path).await {
            Ok(record) => return Some(record),
            Err(error) if error.is_refusal() => return None,
            Err(_) => sleep(AGAIN).await,
        }
    }
    None
}

/// Until somebody answers; a repeat is known by its name.
async fn put(
    client: &Client,
    path: &str,
    attempt: &Attempt,
    mut change: Value,
    what: &str,
) -> Result<(), QueueError> {
    change["attempt"] = attempt.number.into();
    let body = json!({ "container": change });
    let name = format!("exec-{}-{what}", attempt.number);
    loop {
        match client.named("PUT", path, &body, &name).await {
            Ok(_) => return Ok(()),
            Err(error) if error.is_refusal() => return Err(error),
            Err(_) => sleep(AGAIN).await,
        }
    }
}
