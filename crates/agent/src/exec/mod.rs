//! `windlass-agent exec`: runs one attempt of one container from the queue, and reports how it ended.
//!
//! The order matters: no code of the user runs before the queue has committed that the container runs, and an executor
//! that lost its attempt kills what it started and writes nothing. The container's program runs in an image if the host
//! has an engine for it, or as a process of this host; in a separate directory and control group either way, with a
//! guard process that cleans up if the executor is killed.

mod apptainer;
mod container_group;
mod container_network;
mod guard;
mod image;
mod oci;
mod output;
mod output_glob;
mod output_upload;
mod process_isolation;
mod program;
mod program_environment;
mod program_mounts;
mod work_dir;

use std::{
    io::{Read as _, Write as _},
    path::PathBuf,
    process::ExitCode,
    time::Duration,
};

use crate::shim::oci::attempt::default_store;
use serde_json::{Value, json};
use tokio::{
    signal::unix::{Signal, SignalKind, signal},
    time::{Instant, sleep, sleep_until, timeout},
};
use windlass_api::queue_client::{QueueError, QueueHttpClient};
use windlass_model::{
    error_chain::format_chain,
    queue::{STOP_SECS_DEFAULT, STOP_SECS_MAX},
};

pub use self::guard::{Args as GuardArgs, main as guard};
use self::{
    image::{ImageRuntime, Network},
    output::OutputStore,
    output_glob::OutputPatterns,
    output_upload::{FencedReceiver, OutputUpload},
    process_isolation::UserRange,
    program::{EndRequest, Program, ProgramEnd, ProgramSpec, RunningProgram},
    work_dir::WorkDir,
};

/// Exit code if nothing was written, because the attempt does not belong to this executor.
const EXIT_NOT_OWNER: u8 = 4;
/// Time that a program has to exit if the cluster ends its job without a request of the queue: the cluster itself kills
/// it soon afterwards, together with this process, which could not report the end any more.
const RECLAIM_GRACE: Duration = Duration::from_secs(10);
const RETRY_DELAY_MIN: Duration = Duration::from_millis(200);
const RETRY_DELAY_MAX: Duration = Duration::from_secs(10);
/// Time to wait for the remaining output after the program has exited.
const OUTPUT_DRAIN_TIMEOUT: Duration = Duration::from_secs(2);
/// Maximum length of a token.
const TOKEN_BYTES_MAX: u64 = 4096;
const FAR_FUTURE: Duration = Duration::from_secs(365 * 24 * 3600);

/// Runs one attempt. The attempt's token is read from standard input, where neither a list of processes nor their
/// environments show it.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// UUID of the container
    uuid: String,
    /// Number of this attempt
    #[arg(long, value_name = "NUMBER")]
    attempt: u64,
    /// Directory for files of this attempt; if not given, a temporary directory that is removed at the end
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,
    /// Runtime of containers with an image
    #[arg(long, env = "WINDLASS_EXEC_RUNTIME", value_name = "RUNTIME", default_value = "auto")]
    runtime: ImageRuntime,
    /// Run containers without an image as plain processes: each with a separate user if the executor is root, otherwise
    /// as the executor's user
    #[arg(long, env = "WINDLASS_EXEC_ALLOW_PROCESS")]
    allow_process: bool,
    /// Range of user ids for plain processes, one each, if the executor is root
    #[arg(long, env = "WINDLASS_EXEC_PROCESS_USERS", value_name = "FIRST-LAST", default_value = UserRange::DEFAULT)]
    process_users: UserRange,
    /// Paths that are hidden from plain processes with a separate user, separated by colons
    #[arg(long, env = "WINDLASS_EXEC_HIDE", value_name = "PATHS", value_delimiter = ':')]
    hide: Vec<PathBuf>,
    /// Network of containers with an image
    #[arg(long, env = "WINDLASS_EXEC_NETWORK", value_name = "NETWORK", default_value = "bridge")]
    network: Network,
    /// Directory with the images of containers that run without an engine, shared by all executors of a user
    #[arg(long, env = "WINDLASS_EXEC_IMAGES", value_name = "DIR")]
    images: Option<PathBuf>,
    /// Policy file of this host
    #[arg(long, env = "WINDLASS_AGENT_POLICY", value_name = "FILE", default_value = crate::shim::policy::DEFAULT_FILE)]
    policy: PathBuf,
    /// Directory or bucket (`s3://BUCKET/PREFIX?endpoint=URL`) where output of containers is stored: files that a
    /// program leaves below its `output_path` are moved to a separate directory there. If not given, output is discarded
    #[arg(long, env = "WINDLASS_EXEC_OUTPUTS", value_name = "DIR|URL")]
    outputs: Option<OutputStore>,
    /// URL of the server
    #[arg(long, env = "WINDLASS_QUEUE_URL", value_name = "URL")]
    url: String,
    /// Certificate of an `https` server: a file, or the PEM text itself
    #[arg(long, env = "WINDLASS_CERT", value_name = "FILE", hide_env_values = true)]
    server_cert: Option<String>,
}

#[derive(Debug, thiserror::Error)]
enum AttemptError {
    /// Another attempt is current.
    #[error("the attempt is no longer current: {0}")]
    Fenced(#[source] QueueError),
    /// This host cannot run anything at present.
    #[error("failed to prepare the container")]
    Host(#[source] std::io::Error),
    /// This container cannot be run.
    #[error("{why}")]
    CannotRun { reason: &'static str, why: String },
    #[error("stopped before the program was started")]
    Reported,
    #[error("failed to reach the queue")]
    Queue(#[source] QueueError),
}

pub fn main(args: &Args) -> ExitCode {
    let runtime = match tokio::runtime::Builder::new_current_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => {
            print_message(&format!("failed to start: {error}"));
            return ExitCode::FAILURE;
        }
    };
    runtime.block_on(run(args))
}

fn print_message(text: &str) {
    let _ = writeln!(std::io::stderr(), "windlass-agent exec: {text}");
}

/// Reads the attempt's token from standard input.
fn read_token() -> std::io::Result<String> {
    let mut text = String::new();
    std::io::stdin().take(TOKEN_BYTES_MAX).read_to_string(&mut text)?;
    let token = text.trim().to_owned();
    if token.is_empty() { Err(std::io::Error::other("it is empty")) } else { Ok(token) }
}

async fn run(args: &Args) -> ExitCode {
    // Prevents other processes of the same user from reading our memory and our open files.
    let _ = crate::isolation::restrict::hide_memory();
    let token = match read_token() {
        Ok(token) => token,
        Err(error) => {
            print_message(&format!("failed to read the token from standard input: {error}"));
            return ExitCode::FAILURE;
        }
    };
    let client = match QueueHttpClient::with_certificate(&args.url, &token, args.server_cert.as_deref()) {
        Ok(client) => client,
        Err(error) => {
            print_message(&format_chain(&error));
            return ExitCode::FAILURE;
        }
    };
    let queue = AttemptClient { client, uuid: args.uuid.clone(), attempt: args.attempt };
    let record = match queue.read().await {
        Ok(record) => record,
        Err(error) => {
            print_message(&format!("failed to read the container: {error}"));
            return if error.is_refusal() { ExitCode::from(EXIT_NOT_OWNER) } else { ExitCode::FAILURE };
        }
    };
    if record["state"] != "Locked" || record["attempt"].as_u64() != Some(queue.attempt) {
        print_message(&format!(
            "cannot run this attempt: the container is {} in attempt {}",
            record["state"], record["attempt"]
        ));
        return ExitCode::from(EXIT_NOT_OWNER);
    }
    // After the checks: an executor of another attempt must not touch the files of the current one.
    match WorkDir::take(&queue.name(), args.dir.as_deref()) {
        Ok(Some(home)) => run_and_report(&queue, &record, &home, args).await,
        Ok(None) => {
            print_message("this attempt is already running on this host");
            ExitCode::from(EXIT_NOT_OWNER)
        }
        Err(error) => return_to_queue(&queue, &error).await,
    }
}

async fn run_and_report(queue: &AttemptClient, record: &Value, home: &WorkDir, args: &Args) -> ExitCode {
    match run_attempt(queue, record, home, args).await {
        Ok(()) => ExitCode::SUCCESS,
        Err(AttemptError::Fenced(error)) => {
            print_message(&error.to_string());
            ExitCode::from(EXIT_NOT_OWNER)
        }
        Err(AttemptError::Host(error)) => return_to_queue(queue, &error).await,
        Err(AttemptError::Reported) => {
            print_message("stopped before the program was started");
            let done = queue.put(&json!({ "state": "Queued" }), "give-back").await;
            if done.is_ok() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
        }
        Err(AttemptError::CannotRun { reason, why }) => {
            let status = json!({ "error": why, "reason": reason });
            let done = queue.put(&json!({ "state": "Cancelled", "runtime_status": status }), "cancel").await;
            if done.is_ok() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
        }
        Err(AttemptError::Queue(error)) => {
            print_message(&error.to_string());
            ExitCode::FAILURE
        }
    }
}

/// Returns the container to the queue with the error, for another executor to try: no code of the user ran.
async fn return_to_queue(queue: &AttemptClient, error: &std::io::Error) -> ExitCode {
    print_message(&format!("failed to prepare the container: {error}"));
    let status = json!({ "error": format!("failed to prepare the container: {error}") });
    let _ = queue.put(&json!({ "state": "Queued", "runtime_status": status }), "give-back").await;
    ExitCode::FAILURE
}

/// Signals that request a stop. Handled from creation on: a signal ends the container, not its executor.
struct StopSignals {
    terminate: Signal,
    interrupt: Signal,
}

impl StopSignals {
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

async fn run_attempt(
    queue: &AttemptClient,
    record: &Value,
    home: &WorkDir,
    args: &Args,
) -> Result<(), AttemptError> {
    let mut calls = StopSignals::listen().map_err(AttemptError::Host)?;
    let work = tokio::select! {
        work = prepare(queue, record, home, args) => work?,
        // Pulling images may take long.
        () = calls.next() => return Err(AttemptError::Reported),
    };
    if let Err(stopped) = queue.put(&json!({ "state": "Running" }), "run").await {
        work.clean_up().await;
        return Err(stopped);
    }
    let (report, mut fenced) = match OutputUpload::start(queue.client.clone(), &queue.uuid, &home.dir) {
        Ok(started) => started,
        Err(error) => return start_failed(&work, &error).await,
    };
    let mut running = match work.start() {
        Ok(running) => running,
        Err(error) => return start_failed(&work, &error).await,
    };
    let limit = record["scheduling_parameters"]["max_run_time"].as_u64().filter(|secs| *secs > 0);
    let limits = TimeLimits { run: limit.map(Duration::from_secs), stop: configured_stop_duration(record) };
    let watched = wait_for_end(queue, &work, &mut running, &report, &mut calls, &mut fenced, limits).await;
    // Kill the processes that it left behind, and read its last output.
    work.kill_leftovers();
    while let Ok(Some((stream, bytes))) = timeout(OUTPUT_DRAIN_TIMEOUT, running.output.recv()).await {
        report.append(stream, &bytes);
    }
    let (status, end) = match watched {
        Ok(ended) => ended,
        Err(stopped) => {
            work.clean_up().await;
            return Err(stopped);
        }
    };
    let mut ending = work.ending(status, end).await;
    let kept = save_output(&work, record, args.outputs.as_ref(), &queue.name()).await;
    work.clean_up().await;
    let missing = report.finish().await.map_err(AttemptError::Fenced)?;
    // Path at which the server returns the program's output.
    ending["log"] = format!("containers/{}/output", queue.uuid).into();
    let lost = match kept {
        Ok((place, warning)) => {
            ending["output"] = place.into();
            warning
        }
        Err(lost) => lost,
    };
    for warning in missing.into_iter().chain(lost) {
        let message = &mut ending["runtime_status"];
        let before = message["warning"].as_str().map(|warning| format!("{warning}; ")).unwrap_or_default();
        message["warning"] = format!("{before}{warning}").into();
    }
    queue.put(&ending, "end").await
}

/// Stores what the program left below its `output_path`, and returns the location and a warning. Otherwise returns a warning about
/// output that was lost; `None` if there was none.
async fn save_output(
    work: &Program,
    record: &Value,
    outputs: Option<&OutputStore>,
    name: &str,
) -> Result<(String, Option<String>), Option<String>> {
    let Some(from) = record["output_path"].as_str().filter(|path| !path.is_empty()) else { return Err(None) };
    let from = work.reclaim_path(from).map_err(|error| Some(format!("the output was not saved: {error}")))?;
    let Some(outputs) = outputs else {
        let lost = output::has_entries(&from).then(|| {
            "the files in `output_path` were discarded: the dispatcher has no `--outputs`".to_owned()
        });
        return Err(lost);
    };
    let to = outputs.address(name);
    let patterns = record["output_glob"].as_array().into_iter().flatten().filter_map(Value::as_str);
    let patterns = OutputPatterns::new(patterns);
    match outputs.save(from, name, patterns).await {
        Ok(warning) => Ok((to, warning)),
        Err(error) => Err(Some(format!("failed to save the output in {to}: {}", format_chain(&error)))),
    }
}

/// Ends an attempt that the queue records as running, but whose program could not be started.
async fn start_failed(work: &Program, error: &std::io::Error) -> Result<(), AttemptError> {
    work.clean_up().await;
    Err(AttemptError::CannotRun { reason: "start_failed", why: format!("cannot start the program: {error}") })
}

async fn prepare(
    queue: &AttemptClient,
    record: &Value,
    home: &WorkDir,
    args: &Args,
) -> Result<Program, AttemptError> {
    let secrets = queue.get("secret_mounts").await?;
    let auth = queue.get("auth").await?;
    let token = format!(
        "v2/{}/{}/{}",
        auth["uuid"].as_str().unwrap_or_default(),
        auth["api_token"].as_str().unwrap_or_default(),
        queue.uuid
    );
    let given = ProgramSpec {
        name: &queue.name(),
        record,
        secrets: &secrets["secret_mounts"],
        dir: &home.dir,
        is_own: home.is_own,
        token: &token,
        host: queue.client.authority(),
        // The program trusts neither a plain-text port nor a certificate that only the executor received.
        is_unknown: args.server_cert.is_some() || args.url.starts_with("http://"),
        runtime: args.runtime,
        allow_process: args.allow_process,
        users: args.process_users,
        hidden: &args.hide,
        network: args.network,
        images: &args.images.clone().unwrap_or_else(default_store),
        policy: &args.policy,
    };
    Program::prepare(&given).await
}

/// Times of a program.
#[derive(Clone, Copy)]
struct TimeLimits {
    run: Option<Duration>,
    /// Time to exit after a request, unless the stop request sets another one.
    stop: Duration,
}

/// Returns the time that a program has to exit, as its container specifies it.
fn configured_stop_duration(record: &Value) -> Duration {
    let secs = record["scheduling_parameters"]["stop_duration"].as_u64().unwrap_or(STOP_SECS_DEFAULT);
    Duration::from_secs(secs.min(STOP_SECS_MAX))
}

/// Returns the time that the program has to exit, as the record of its container says after a stop request.
fn requested_stop_duration(record: &Value) -> Duration {
    let configured = configured_stop_duration(record);
    match record["stop_duration"].as_u64() {
        Some(secs) => Duration::from_secs(secs.min(STOP_SECS_MAX)),
        None if record["priority"] == 0 => configured,
        None => configured.min(RECLAIM_GRACE),
    }
}

/// Waits until the program has exited, by itself or because it was stopped.
///
/// The program is signalled once: a second signal means to many programs that they should give up what they save. Each
/// later stop request is only a reason to read again how much time there is.
async fn wait_for_end(
    queue: &AttemptClient,
    work: &Program,
    running: &mut RunningProgram,
    report: &OutputUpload,
    calls: &mut StopSignals,
    fenced: &mut FencedReceiver,
    limits: TimeLimits,
) -> Result<(std::process::ExitStatus, Option<ProgramEnd>), AttemptError> {
    let far = Instant::now() + FAR_FUTURE;
    let ends = limits.run.map_or(far, |limit| Instant::now() + limit);
    let mut end: Option<ProgramEnd> = None;
    let mut question = None;
    loop {
        let kill_at = end.filter(|end| !end.was_killed).map_or(far, |end| end.at + end.grace);
        tokio::select! {
            status = running.child.wait() => return status.map(|status| (status, end)).map_err(AttemptError::Host),
            Some((stream, bytes)) = running.output.recv() => report.append(stream, &bytes),
            Ok(error) = &mut *fenced => {
                running.kill();
                work.kill().await;
                return Err(AttemptError::Fenced(error));
            }
            () = calls.next() => {
                end.get_or_insert_with(|| begin_end(work, running, EndRequest::Stopped, limits.stop));
                question = Some(Box::pin(queue.stop_duration()));
            }
            grace = resolve(&mut question) => {
                question = None;
                if let Some(end) = &mut end {
                    end.grace = grace;
                }
            }
            () = sleep_until(ends), if end.is_none() => {
                end = Some(begin_end(work, running, EndRequest::TimedOut, limits.stop));
            }
            () = sleep_until(kill_at), if kill_at < far => {
                if let Some(end) = &mut end {
                    end.was_killed = true;
                }
                running.kill();
                work.kill().await;
            }
        }
    }
}

/// Requests the program to exit.
fn begin_end(work: &Program, running: &RunningProgram, request: EndRequest, grace: Duration) -> ProgramEnd {
    work.request_stop(running);
    ProgramEnd { request, at: Instant::now(), grace, was_killed: false }
}

/// Waits for a future, if there is one.
async fn resolve<F: Future + Unpin>(future: &mut Option<F>) -> F::Output {
    match future {
        Some(future) => future.await,
        None => std::future::pending().await,
    }
}

/// Client of the queue for one attempt.
struct AttemptClient {
    client: QueueHttpClient,
    uuid: String,
    attempt: u64,
}

impl AttemptClient {
    fn name(&self) -> String {
        format!("{}.{}", self.uuid, self.attempt)
    }

    async fn read(&self) -> Result<Value, QueueError> {
        self.client.get(&format!("containers/{}", self.uuid)).await
    }

    /// Returns the time that the program has to exit, as soon as the server responds.
    async fn stop_duration(&self) -> Duration {
        let mut pause = RETRY_DELAY_MIN;
        loop {
            match self.read().await {
                Ok(record) => return requested_stop_duration(&record),
                Err(error) if error.is_refusal() => return RECLAIM_GRACE,
                Err(error) => print_message(&format!("failed to read the container: {error}")),
            }
            sleep(pause).await;
            pause = (pause * 2).min(RETRY_DELAY_MAX);
        }
    }

    async fn get(&self, what: &str) -> Result<Value, AttemptError> {
        match self.client.get(&format!("containers/{}/{what}", self.uuid)).await {
            Ok(value) => Ok(value),
            Err(error) if error.is_refusal() => Err(AttemptError::Fenced(error)),
            Err(error) => Err(AttemptError::Queue(error)),
        }
    }

    /// Writes a change, and retries until the server responds. The name makes it safe to repeat a write whose response
    /// was lost.
    async fn put(&self, change: &Value, what: &str) -> Result<(), AttemptError> {
        let mut change = change.clone();
        change["attempt"] = self.attempt.into();
        let body = json!({ "container": change });
        let name = format!("exec-{}-{}-{what}", self.attempt, std::process::id());
        let mut pause = RETRY_DELAY_MIN;
        loop {
            match self.client.send_idempotent("PUT", &format!("containers/{}", self.uuid), &body, &name).await
            {
                Ok(_) => return Ok(()),
                Err(error) if error.is_refusal() => return Err(AttemptError::Fenced(error)),
                Err(error) => print_message(&format!("failed to report `{what}` to the queue: {error}")),
            }
            sleep(pause).await;
            pause = (pause * 2).min(RETRY_DELAY_MAX);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_time_to_exit_is_that_of_the_request_or_else_that_of_the_container() {
        let secs = |record: Value| requested_stop_duration(&record).as_secs();
        assert_eq!(secs(json!({ "priority": 0 })), STOP_SECS_DEFAULT);
        let own = json!({ "stop_duration": 90 });
        assert_eq!(secs(json!({ "priority": 0, "scheduling_parameters": own })), 90);
        assert_eq!(secs(json!({ "priority": 0, "scheduling_parameters": own, "stop_duration": 0 })), 0);
        let forever = json!({ "priority": 0, "stop_duration": u64::MAX });
        assert_eq!(secs(forever), STOP_SECS_MAX, "it does not overflow the clock");
        // Only the cluster ends it.
        assert_eq!(secs(json!({ "priority": 5, "scheduling_parameters": own })), RECLAIM_GRACE.as_secs());
    }
}
