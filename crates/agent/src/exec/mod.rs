//! `windlass-agent exec`: runs one attempt of one container from the queue, and says how it ended.
//!
//! The order is the point: nothing of the user's runs before the queue has committed that it runs, and whoever
//! lost its attempt kills what it started and writes nothing. The container's program is a process of this machine
//! in a directory and a control group of its own.

mod report;
mod work;

use std::{
    io::Write as _,
    path::{Path, PathBuf},
    process::ExitCode,
    time::Duration,
};

use serde_json::{Value, json};
use tokio::{
    signal::unix::{SignalKind, signal},
    time::{Instant, sleep, sleep_until},
};
use windlass_api::queue::{Client, QueueError};

use self::{report::Report, work::Work};

/// Nothing was written: the attempt is not ours.
const NOT_OURS: u8 = 4;
/// How long a program may take to end after it was told to.
const STOP_WITHIN: Duration = Duration::from_secs(10);
const TRY_AGAIN_MIN: Duration = Duration::from_millis(200);
const TRY_AGAIN_MAX: Duration = Duration::from_secs(10);
/// The server is told what was written this often.
const SEND_EVERY: Duration = Duration::from_millis(500);

#[derive(Debug, clap::Args)]
pub struct Args {
    /// The container
    uuid: String,
    /// The attempt that this is
    #[arg(long, value_name = "NUMBER")]
    attempt: u64,
    /// Where files of this attempt go; a directory of its own, removed at the end, if not given
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,
    /// Where the server is
    #[arg(long, env = "WINDLASS_QUEUE_URL", value_name = "URL")]
    url: String,
    /// Token of this attempt
    #[arg(long, env = "WINDLASS_EXECUTOR_TOKEN", value_name = "TOKEN", hide_env_values = true)]
    token: String,
}

#[derive(Debug, thiserror::Error)]
enum Stopped {
    /// Another attempt counts now.
    #[error("the attempt is not ours any more: {0}")]
    Fenced(#[source] QueueError),
    /// This machine cannot run anything now.
    #[error("prepare the container")]
    Machine(#[source] std::io::Error),
    /// Nothing could run this.
    #[error("{why}")]
    Impossible { reason: &'static str, why: String },
    #[error("reach the queue")]
    Queue(#[source] QueueError),
}

pub fn main(args: &Args) -> ExitCode {
    let runtime = match tokio::runtime::Builder::new_current_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => {
            tell(&format!("start: {error}"));
            return ExitCode::FAILURE;
        }
    };
    runtime.block_on(run(args))
}

fn tell(text: &str) {
    let _ = writeln!(std::io::stderr(), "windlass-agent exec: {text}");
}

async fn run(args: &Args) -> ExitCode {
    let client = match Client::new(&args.url, &args.token) {
        Ok(client) => client,
        Err(error) => {
            tell(&error.to_string());
            return ExitCode::FAILURE;
        }
    };
    let (dir, is_own) = match directory(args) {
        Ok(made) => made,
        Err(error) => {
            tell(&format!("make a directory: {error}"));
            return ExitCode::FAILURE;
        }
    };
    let queue = Attempt { client, uuid: args.uuid.clone(), attempt: args.attempt };
    let code = attempt(&queue, &dir).await;
    if is_own {
        let _ = std::fs::remove_dir_all(&dir);
    } else {
        let _ = std::fs::remove_dir_all(dir.join("root"));
    }
    code
}

/// Where this attempt lives. Who runs it is written down first: a dispatcher that comes back finds it there.
fn directory(args: &Args) -> std::io::Result<(PathBuf, bool)> {
    let Some(dir) = &args.dir else {
        let dir = std::env::temp_dir().join(format!("windlass-exec-{}.{}", args.uuid, args.attempt));
        std::fs::create_dir_all(&dir)?;
        return Ok((dir, true));
    };
    std::fs::create_dir_all(dir)?;
    let stat = std::fs::read_to_string("/proc/self/stat")?;
    let started = stat.rsplit_once(") ").and_then(|(_, rest)| rest.split(' ').nth(19)?.parse::<u64>().ok());
    let own = json!({ "pid": std::process::id(), "started": started });
    std::fs::write(dir.join("executor.own"), own.to_string())?;
    std::fs::rename(dir.join("executor.own"), dir.join("executor.json"))?;
    Ok((dir.clone(), false))
}

async fn attempt(queue: &Attempt, dir: &Path) -> ExitCode {
    let record = match queue.read().await {
        Ok(record) => record,
        Err(error) => {
            tell(&format!("read the container: {error}"));
            return if error.is_refusal() { ExitCode::from(NOT_OURS) } else { ExitCode::FAILURE };
        }
    };
    if record["state"] != "Locked" || record["attempt"].as_u64() != Some(queue.attempt) {
        tell(&format!("the container is {} in attempt {}", record["state"], record["attempt"]));
        return ExitCode::from(NOT_OURS);
    }
    match carry_out(queue, &record, dir).await {
        Ok(()) => ExitCode::SUCCESS,
        Err(Stopped::Fenced(error)) => {
            tell(&format!("{error}"));
            ExitCode::from(NOT_OURS)
        }
        Err(Stopped::Machine(error)) => {
            tell(&format!("prepare: {error}"));
            // Nothing of the user's ran: somebody else may try.
            let _ = queue.put(&json!({ "state": "Queued" }), "give-back").await;
            ExitCode::FAILURE
        }
        Err(Stopped::Impossible { reason, why }) => {
            let status = json!({ "error": why, "reason": reason });
            let done = queue.put(&json!({ "state": "Cancelled", "runtime_status": status }), "cancel").await;
            if done.is_ok() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
        }
        Err(Stopped::Queue(error)) => {
            tell(&error.to_string());
            ExitCode::FAILURE
        }
    }
}

async fn carry_out(queue: &Attempt, record: &Value, dir: &Path) -> Result<(), Stopped> {
    // Heard from here on: a signal ends the container, not its keeper.
    let mut terminate = signal(SignalKind::terminate()).map_err(Stopped::Machine)?;
    let mut interrupt = signal(SignalKind::interrupt()).map_err(Stopped::Machine)?;
    let secrets = queue.get("secret_mounts").await?;
    let auth = queue.get("auth").await?;
    let inside = format!(
        "v2/{}/{}/{}",
        auth["uuid"].as_str().unwrap_or_default(),
        auth["api_token"].as_str().unwrap_or_default(),
        queue.uuid
    );
    let name = format!("{}.{}", queue.uuid, queue.attempt);
    let work = Work::prepare(&name, record, &secrets["secret_mounts"], dir, &inside, &queue.client.url())?;
    queue.put(&json!({ "state": "Running" }), "run").await?;
    let mut running = work.start().map_err(|error| Stopped::Impossible {
        reason: "start_failed",
        why: format!("start the program: {error}"),
    })?;
    let mut report = Report::new(queue.client.clone(), &queue.uuid);
    let limit = record["scheduling_parameters"]["max_run_time"].as_u64().filter(|secs| *secs > 0);
    let ends = limit.map(|secs| Instant::now() + Duration::from_secs(secs));
    let mut told: Option<&'static str> = None;
    let mut kill_at: Option<Instant> = None;
    let far = Instant::now() + Duration::from_secs(365 * 24 * 3600);
    let mut next_send = Instant::now() + SEND_EVERY;
    let status = loop {
        tokio::select! {
            status = running.child.wait() => break status.map_err(Stopped::Machine)?,
            piece = running.output.recv() => if let Some((stream, bytes)) = piece {
                report.add(stream, &bytes);
            },
            () = sleep_until(next_send) => {
                if let Err(error) = report.send().await
                    && error.is_refusal()
                {
                    work.kill();
                    return Err(Stopped::Fenced(error));
                }
                next_send = Instant::now() + SEND_EVERY;
            }
            _ = terminate.recv() => { told.get_or_insert("stopped"); running.ask_to_end(); kill_at.get_or_insert(Instant::now() + STOP_WITHIN); }
            _ = interrupt.recv() => { told.get_or_insert("stopped"); running.ask_to_end(); kill_at.get_or_insert(Instant::now() + STOP_WITHIN); }
            () = sleep_until(ends.unwrap_or(far)), if told.is_none() && ends.is_some() => {
                told = Some("max_run_time");
                running.ask_to_end();
                kill_at = Some(Instant::now() + STOP_WITHIN);
            }
            () = sleep_until(kill_at.unwrap_or(far)), if kill_at.is_some() => { work.kill(); kill_at = None; }
        }
    };
    // What it started and left behind ends with it.
    work.kill();
    while let Ok(Some((stream, bytes))) =
        tokio::time::timeout(Duration::from_secs(2), running.output.recv()).await
    {
        report.add(stream, &bytes);
    }
    let ending = work.ending(status, told);
    work.clean();
    finish(queue, &mut report, &ending).await
}

/// Until the server has it: the scheduler sees a job as long as this process lives.
async fn finish(queue: &Attempt, report: &mut Report, ending: &Value) -> Result<(), Stopped> {
    let mut pause = TRY_AGAIN_MIN;
    loop {
        match report.send().await {
            Ok(()) => break,
            Err(error) if error.is_refusal() => return Err(Stopped::Fenced(error)),
            Err(_) => {
                sleep(pause).await;
                pause = (pause * 2).min(TRY_AGAIN_MAX);
            }
        }
    }
    queue.put(ending, "end").await
}

/// One attempt's door to the queue.
struct Attempt {
    client: Client,
    uuid: String,
    attempt: u64,
}

impl Attempt {
    async fn read(&self) -> Result<Value, QueueError> {
        self.client.get(&format!("containers/{}", self.uuid)).await
    }

    async fn get(&self, what: &str) -> Result<Value, Stopped> {
        match self.client.get(&format!("containers/{}/{what}", self.uuid)).await {
            Ok(value) => Ok(value),
            Err(error) if error.is_refusal() => Err(Stopped::Fenced(error)),
            Err(error) => Err(Stopped::Queue(error)),
        }
    }

    /// Writes, until somebody answers. The name makes a repeat of a write whose answer was lost harmless.
    async fn put(&self, change: &Value, what: &str) -> Result<(), Stopped> {
        let mut change = change.clone();
        change["attempt"] = self.attempt.into();
        let body = json!({ "container": change });
        let name = format!("exec-{}-{}-{what}", self.attempt, std::process::id());
        let mut pause = TRY_AGAIN_MIN;
        loop {
            match self.client.named("PUT", &format!("containers/{}", self.uuid), &body, &name).await {
                Ok(_) => return Ok(()),
                Err(error) if error.is_refusal() => return Err(Stopped::Fenced(error)),
                Err(error) => tell(&format!("write {what}: {error}")),
            }
            sleep(pause).await;
            pause = (pause * 2).min(TRY_AGAIN_MAX);
        }
    }
}
