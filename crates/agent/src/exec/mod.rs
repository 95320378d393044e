//! `windlass-agent exec`: runs one attempt of one container from the queue, and says how it ended.
//!
//! The order is the point: nothing of the user's runs before the queue has committed that it runs, and whoever
//! lost its attempt kills what it started and writes nothing. The container's program runs in an image where the
//! machine has an engine for it, or as a process of this machine; in a directory and a control group of its own
//! either way, with a guard beside it that cleans up should the executor be killed.

mod guard;
mod home;
mod image;
mod isolation;
mod output;
mod report;
mod work;

use std::{
    io::{Read as _, Write as _},
    path::{Path, PathBuf},
    process::ExitCode,
    time::Duration,
};

use serde_json::{Value, json};
use tokio::{
    signal::unix::{Signal, SignalKind, signal},
    time::{Instant, sleep, sleep_until, timeout},
};
use windlass_api::queue::{Client, QueueError};
use windlass_model::causes::chain;

pub use self::guard::{Args as GuardArgs, main as guard};
use self::{
    home::Home,
    image::{Network, Runtime},
    isolation::Users,
    report::{Fenced, Report},
    work::{Given, Running, Told, Work},
};

/// Nothing was written: the attempt is not ours.
const NOT_OURS: u8 = 4;
/// How long a program may take to end after it was told to.
const STOP_WITHIN: Duration = Duration::from_secs(10);
const TRY_AGAIN_MIN: Duration = Duration::from_millis(200);
const TRY_AGAIN_MAX: Duration = Duration::from_secs(10);
/// How long the last output may be on its way after the program has ended.
const LAST_WORDS_WITHIN: Duration = Duration::from_secs(2);
/// Longer tokens are none.
const TOKEN_BYTES_MAX: u64 = 4096;
const FAR: Duration = Duration::from_secs(365 * 24 * 3600);

/// Runs one attempt. The attempt's token comes on standard input, where neither a list of processes nor their
/// environments show it.
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
    /// What runs containers with an image
    #[arg(long, env = "WINDLASS_EXEC_RUNTIME", value_name = "RUNTIME", default_value = "auto")]
    runtime: Runtime,
    /// Run containers without an image as plain processes: each with a user of its own where the executor is root, else as
    /// the executor's own user
    #[arg(long, env = "WINDLASS_EXEC_ALLOW_PROCESS")]
    allow_process: bool,
    /// Users that plain processes have, one each, where the executor is root
    #[arg(long, env = "WINDLASS_EXEC_PROCESS_USERS", value_name = "FIRST-LAST", default_value = Users::USUAL)]
    process_users: Users,
    /// What plain processes with a user of their own do not see, separated by colons
    #[arg(long, env = "WINDLASS_EXEC_HIDE", value_name = "PATHS", value_delimiter = ':')]
    hide: Vec<PathBuf>,
    /// Network of containers with an image
    #[arg(long, env = "WINDLASS_EXEC_NETWORK", value_name = "NETWORK", default_value = "bridge")]
    network: Network,
    /// File with what this host allows containers
    #[arg(long, env = "WINDLASS_AGENT_POLICY", value_name = "FILE", default_value = crate::shim::policy::DEFAULT_FILE)]
    policy: PathBuf,
    /// Where the output of containers is kept: what a program leaves below its `output_path` goes to a directory of its
    /// own there. It is not kept, if not given
    #[arg(long, env = "WINDLASS_EXEC_OUTPUTS", value_name = "DIR")]
    outputs: Option<PathBuf>,
    /// Where the server is
    #[arg(long, env = "WINDLASS_QUEUE_URL", value_name = "URL")]
    url: String,
    /// The certificate that an `https` server is known by: a file, or itself as PEM
    #[arg(long, env = "WINDLASS_CERT", value_name = "FILE", hide_env_values = true)]
    server_cert: Option<String>,
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
    #[error("told to stop before anything ran")]
    Told,
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

/// The attempt's token, from standard input.
fn read_token() -> std::io::Result<String> {
    let mut text = String::new();
    std::io::stdin().take(TOKEN_BYTES_MAX).read_to_string(&mut text)?;
    let token = text.trim().to_owned();
    if token.is_empty() { Err(std::io::Error::other("it is empty")) } else { Ok(token) }
}

async fn run(args: &Args) -> ExitCode {
    // Other processes of the same user read neither our memory nor what we have open.
    let _ = crate::isolation::restrict::hide_memory();
    let token = match read_token() {
        Ok(token) => token,
        Err(error) => {
            tell(&format!("read the token from standard input: {error}"));
            return ExitCode::FAILURE;
        }
    };
    let client = match Client::knowing(&args.url, &token, args.server_cert.as_deref()) {
        Ok(client) => client,
        Err(error) => {
            tell(&chain(&error));
            return ExitCode::FAILURE;
        }
    };
    let queue = Attempt { client, uuid: args.uuid.clone(), attempt: args.attempt };
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
    // After the refusals: whoever has no business here must not touch the files of who has.
    match Home::take(&queue.name(), args.dir.as_deref()) {
        Ok(Some(home)) => attempt(&queue, &record, &home, args).await,
        Ok(None) => {
            tell("this attempt runs here already");
            ExitCode::from(NOT_OURS)
        }
        Err(error) => give_back(&queue, &error).await,
    }
}

async fn attempt(queue: &Attempt, record: &Value, home: &Home, args: &Args) -> ExitCode {
    match carry_out(queue, record, home, args).await {
        Ok(()) => ExitCode::SUCCESS,
        Err(Stopped::Fenced(error)) => {
            tell(&error.to_string());
            ExitCode::from(NOT_OURS)
        }
        Err(Stopped::Machine(error)) => give_back(queue, &error).await,
        Err(Stopped::Told) => {
            tell("told to stop before anything ran");
            let done = queue.put(&json!({ "state": "Queued" }), "give-back").await;
            if done.is_ok() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
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

/// Nothing of the user's ran: somebody else may try, and people see why nobody did.
async fn give_back(queue: &Attempt, error: &std::io::Error) -> ExitCode {
    tell(&format!("prepare: {error}"));
    let status = json!({ "error": format!("prepare the container: {error}") });
    let _ = queue.put(&json!({ "state": "Queued", "runtime_status": status }), "give-back").await;
    ExitCode::FAILURE
}

/// Who tells us to stop. Heard from its making on: a signal ends the container, not its keeper.
struct Calls {
    terminate: Signal,
    interrupt: Signal,
}

impl Calls {
    fn listen() -> std::io::Result<Self> {
        Ok(Self { terminate: signal(SignalKind::terminate())?, interrupt: signal(SignalKind::interrupt())? })
    }

    async fn next(&mut self) {
        tokio::select! {
            _ = self.terminate.recv() => {}
            _ = self.interrupt.recv() => {}
        }
    }
}

async fn carry_out(queue: &Attempt, record: &Value, home: &Home, args: &Args) -> Result<(), Stopped> {
    let mut calls = Calls::listen().map_err(Stopped::Machine)?;
    let work = tokio::select! {
        work = prepare(queue, record, home, args) => work?,
        // Images may take their time.
        () = calls.next() => return Err(Stopped::Told),
    };
    if let Err(stopped) = queue.put(&json!({ "state": "Running" }), "run").await {
        work.clean().await;
        return Err(stopped);
    }
    let (report, mut fenced) = match Report::start(queue.client.clone(), &queue.uuid, &home.dir) {
        Ok(started) => started,
        Err(error) => return cannot_start(&work, &error).await,
    };
    let mut running = match work.start() {
        Ok(running) => running,
        Err(error) => return cannot_start(&work, &error).await,
    };
    let limit = record["scheduling_parameters"]["max_run_time"].as_u64().filter(|secs| *secs > 0);
    let watched = watch(&work, &mut running, &report, &mut calls, &mut fenced, limit).await;
    // What it started and left behind ends with it, and what it said at last is heard.
    work.kill_rest();
    while let Ok(Some((stream, bytes))) = timeout(LAST_WORDS_WITHIN, running.output.recv()).await {
        report.add(stream, &bytes);
    }
    let (status, told) = match watched {
        Ok(ended) => ended,
        Err(stopped) => {
            work.clean().await;
            return Err(stopped);
        }
    };
    let mut ending = work.ending(status, told).await;
    let kept = keep_output(&work, record, args.outputs.as_deref(), &queue.name()).await;
    work.clean().await;
    let missing = report.finish().await.map_err(Stopped::Fenced)?;
    // Where the server gives what the program wrote.
    ending["log"] = format!("containers/{}/output", queue.uuid).into();
    let lost = match kept {
        Ok(place) => {
            ending["output"] = place.into();
            None
        }
        Err(lost) => lost,
    };
    for warning in missing.into_iter().chain(lost) {
        let said = &mut ending["runtime_status"];
        let before = said["warning"].as_str().map(|warning| format!("{warning}; ")).unwrap_or_default();
        said["warning"] = format!("{before}{warning}").into();
    }
    queue.put(&ending, "end").await
}

/// Keeps what the program left below its `output_path`, and says where. Else, what of it was lost: nothing where there
/// was nothing.
async fn keep_output(
    work: &Work,
    record: &Value,
    outputs: Option<&Path>,
    name: &str,
) -> Result<String, Option<String>> {
    let Some(from) = record["output_path"].as_str().filter(|path| !path.is_empty()) else { return Err(None) };
    let from = work.take_back(from).map_err(|error| Some(format!("its output was not kept: {error}")))?;
    let Some(outputs) = outputs else {
        let lost = output::has_any(&from).then(|| {
            "what it left in `output_path` was not kept: the dispatcher has no `--outputs`".to_owned()
        });
        return Err(lost);
    };
    let to = outputs.join(name);
    let target = to.clone();
    let kept = tokio::task::spawn_blocking(move || output::keep(&from, &target)).await;
    match kept.unwrap_or_else(|error| Err(std::io::Error::other(error))) {
        Ok(()) => Ok(to.display().to_string()),
        Err(error) => Err(Some(format!("its output could not be kept in {}: {error}", to.display()))),
    }
}

/// The queue says that it runs, and it never will.
async fn cannot_start(work: &Work, error: &std::io::Error) -> Result<(), Stopped> {
    work.clean().await;
    Err(Stopped::Impossible { reason: "start_failed", why: format!("start the program: {error}") })
}

async fn prepare(queue: &Attempt, record: &Value, home: &Home, args: &Args) -> Result<Work, Stopped> {
    let secrets = queue.get("secret_mounts").await?;
    let auth = queue.get("auth").await?;
    let token = format!(
        "v2/{}/{}/{}",
        auth["uuid"].as_str().unwrap_or_default(),
        auth["api_token"].as_str().unwrap_or_default(),
        queue.uuid
    );
    let given = Given {
        name: &queue.name(),
        record,
        secrets: &secrets["secret_mounts"],
        dir: &home.dir,
        is_own: home.is_own,
        token: &token,
        host: queue.client.authority(),
        // Neither a plain port nor a certificate that only we were told of is known to the program.
        is_unknown: args.server_cert.is_some() || args.url.starts_with("http://"),
        runtime: args.runtime,
        allow_process: args.allow_process,
        users: args.process_users,
        hidden: &args.hide,
        network: args.network,
        policy: &args.policy,
    };
    Work::prepare(&given).await
}

/// Until the program has ended, by itself or because somebody wanted it.
async fn watch(
    work: &Work,
    running: &mut Running,
    report: &Report,
    calls: &mut Calls,
    fenced: &mut Fenced,
    limit: Option<u64>,
) -> Result<(std::process::ExitStatus, Option<Told>), Stopped> {
    let far = Instant::now() + FAR;
    let ends = limit.map_or(far, |secs| Instant::now() + Duration::from_secs(secs));
    let mut told: Option<Told> = None;
    let mut kill_at = far;
    loop {
        tokio::select! {
            status = running.child.wait() => return status.map(|status| (status, told)).map_err(Stopped::Machine),
            Some((stream, bytes)) = running.output.recv() => report.add(stream, &bytes),
            Ok(error) = &mut *fenced => {
                running.kill();
                work.kill().await;
                return Err(Stopped::Fenced(error));
            }
            () = calls.next() => {
                told.get_or_insert(Told::Stopped);
                running.ask_to_end();
                kill_at = kill_at.min(Instant::now() + STOP_WITHIN);
            }
            () = sleep_until(ends), if told.is_none() => {
                told = Some(Told::OverTime);
                running.ask_to_end();
                kill_at = kill_at.min(Instant::now() + STOP_WITHIN);
            }
            () = sleep_until(kill_at), if told.is_some() => {
                running.kill();
                work.kill().await;
                kill_at = far;
            }
        }
    }
}

/// One attempt's door to the queue.
struct Attempt {
    client: Client,
    uuid: String,
    attempt: u64,
}

impl Attempt {
    fn name(&self) -> String {
        format!("{}.{}", self.uuid, self.attempt)
    }

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
