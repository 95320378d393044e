//! Lifecycle of a container, from its start to its removal.

use std::{
    collections::HashMap,
    io,
    path::{Path, PathBuf},
    time::Duration,
};

use bollard::{
    Docker as Engine,
    container::LogOutput,
    errors::Error,
    models::{
        ContainerInspectResponse, ContainerState, ContainerStateStatusEnum as State, ContainerSummary,
        ContainerSummaryStateEnum as Listed,
    },
    query_parameters::{
        InspectContainerOptionsBuilder, ListContainersOptionsBuilder, LogsOptionsBuilder,
        RemoveContainerOptionsBuilder, StopContainerOptionsBuilder, WaitContainerOptionsBuilder,
    },
};
use futures_util::StreamExt;
use tokio::time::{Instant, sleep, timeout};

use windlass_api::agent::{
    SSH_PORT,
    shim::{NetworkMode, Port},
};

use super::{
    CALL_TIMEOUT, DockerRuntime, call_until_known_state, call_with_timeout, container, control_group,
    error_map,
    exit_reason::{self, ContainerEnd},
    host_probe,
    oom::{self, KillCounter},
};
use crate::{
    clock,
    shim::runtime::{Exit, FoundState, FoundTask, Handle, LossReason, PreparedTask, RuntimeError},
    task_dir::{self, TaskDir},
};

/// Starting is the engine's longest step: images with many layers, GPUs that wake up.
const START_TIMEOUT: Duration = Duration::from_secs(120);
/// Time that a stop may need in addition to the task's grace period.
const STOP_TIMEOUT_EXTRA: Duration = Duration::from_secs(20);
/// Maximum time to wait for a removal that another caller began.
const REMOVAL_TIMEOUT: Duration = Duration::from_secs(30);
const REMOVAL_POLL_INTERVAL: Duration = Duration::from_millis(50);
/// Delay between two requests to an unreachable engine.
const BACKOFF_MIN: Duration = Duration::from_millis(100);
const BACKOFF_MAX: Duration = Duration::from_secs(2);
/// Time for the engine to measure the data that a container wrote.
const MEASURE_TIMEOUT: Duration = Duration::from_secs(120);
/// Exit status that a shell reports after SIGKILL.
const SIGKILL_EXIT_CODE: i64 = 137;
/// Maximum delay of the OOM report of a busy engine.
const OOM_REPORT_TIMEOUT: Duration = Duration::from_secs(1);
const OOM_POLL_INTERVAL: Duration = Duration::from_millis(30);
/// Time within which an engine that is being stopped ends, unless other containers of it ignore the stop signal.
const ENGINE_SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(6);
/// Maximum time for a runner to report the port of its SSH server.
const PORT_TIMEOUT: Duration = Duration::from_secs(15);
/// Time between two reads of the file with the port. The job waits for it, so it is short.
const PORT_POLL_INTERVAL: Duration = Duration::from_millis(5);
/// Time between two checks with the engine whether the container is still alive.
const LIVENESS_CHECK_INTERVAL: Duration = Duration::from_millis(100);
const TAIL_LINES: usize = 5;
const TAIL_LINE_MAX: usize = 2048;
const TAIL_BYTES_MAX: usize = 64 * 1024;
/// Time stamp that engines report for an event that never happened.
const ZERO_TIME: &str = "0001-01-01T00:00:00Z";

pub(super) async fn inspect(engine: &Engine, name: &str) -> Result<ContainerInspectResponse, InspectError> {
    let what = format!("failed to inspect container {name}");
    match call_until_known_state(what.clone(), || engine.inspect_container(name, None)).await {
        Err(overdue) => Err(InspectError::Failed(overdue)),
        Ok(Ok(seen)) => Ok(seen),
        Ok(Err(error)) if error_map::error_status(&error) == Some(404) => Err(InspectError::NotFound),
        Ok(Err(error)) => Err(InspectError::Failed(error_map::from_call_error(what, error))),
    }
}

/// Bytes that the container wrote to its own layer; the engine computes them on request.
pub(super) async fn written_bytes(engine: &Engine, name: &str) -> Result<u64, RuntimeError> {
    let what = format!("failed to measure the disk usage of container {name}");
    let options = InspectContainerOptionsBuilder::default().size(true).build();
    // Many files take long, and no caller waits for the result.
    let requested =
        tokio::time::timeout(MEASURE_TIMEOUT, engine.inspect_container(name, Some(options))).await;
    let seen = requested.map_err(|_| error_map::timed_out(what.clone()))?;
    let seen = seen.map_err(|error| error_map::from_call_error(what, error))?;
    Ok(seen.size_rw.and_then(|bytes| u64::try_from(bytes).ok()).unwrap_or_default())
}

pub(super) enum InspectError {
    NotFound,
    Failed(RuntimeError),
}

impl InspectError {
    fn into_runtime_error(self, what: String) -> RuntimeError {
        match self {
            Self::NotFound => RuntimeError::Refused { what, why: "it no longer exists".to_owned() },
            Self::Failed(error) => error,
        }
    }
}

/// Returns whether the container ever ran: an engine would start an ended container again, and a task runs once.
fn was_started(state: &ContainerState) -> bool {
    state.started_at.as_deref().is_some_and(|at| !at.is_empty() && at != ZERO_TIME)
}

impl DockerRuntime {
    pub(super) async fn start_once(
        &self,
        task: &PreparedTask,
        handle: &Handle,
    ) -> Result<Vec<Port>, RuntimeError> {
        let publish = container::published_ports(task);
        let what = || format!("failed to start container {}", handle.name);
        let seen =
            inspect(&self.engine, &handle.id).await.map_err(|error| error.into_runtime_error(what()))?;
        if !seen.state.as_ref().is_some_and(was_started) {
            let mounts = seen.mounts.iter().flatten();
            let agent =
                mounts.filter(|mount| mount.destination.as_deref() == Some(task_dir::AGENT_IN_CONTAINER));
            for source in agent.filter_map(|mount| mount.source.as_ref()) {
                let verified = self.binary.verify_copy(Path::new(source));
                verified.map_err(|source| error_map::from_io_error(what(), source))?;
            }
            self.with_restricted_binds(what(), task, |binds, task| binds.mount(task.spec.id, &task.binds))
                .await?;
            self.start_or_repair_network(handle, publish).await?;
        }
        self.with_restricted_binds(what(), task, |binds, task| binds.unmount(task.spec.id)).await?;
        // The runner is the first process. It runs nothing of the job before the server submits that, which is after
        // this start was reported.
        let group = control_group::find(&handle.id);
        if let Some(group) = &group {
            Self::report_unblocked(handle, control_group::block_metadata_in(group));
            if task.spec.network_mode == NetworkMode::Host {
                return self.host_network_ports(&task.dir, handle).await;
            }
        }
        let seen =
            inspect(&self.engine, &handle.id).await.map_err(|error| error.into_runtime_error(what()))?;
        if group.is_none() {
            let pid = seen.state.as_ref().filter(|state| is_running(state)).and_then(|state| state.pid);
            Self::report_unblocked(handle, control_group::block_metadata(pid, &handle.id));
        }
        if task.spec.network_mode == NetworkMode::Host {
            return self.host_network_ports(&task.dir, handle).await;
        }
        match mapped_ports(&seen, publish) {
            Some(mapped_ports) => Ok(mapped_ports),
            // A container that ended at once has no ports any more. `wait` reports its exit.
            None if !seen.state.as_ref().is_some_and(is_running) => Ok(Vec::new()),
            None => Err(RuntimeError::Refused { what: what(), why: "the engine mapped no ports".to_owned() }),
        }
    }

    fn report_unblocked(handle: &Handle, blocked: io::Result<()>) {
        if let Err(error) = blocked {
            tracing::warn!(container = handle.name, %error, "failed to block the cloud's metadata address for a container");
        }
    }

    /// Returns the ports of a container on the host's network. Only the SSH server may have had to choose another port.
    async fn host_network_ports(&self, dir: &TaskDir, handle: &Handle) -> Result<Vec<Port>, RuntimeError> {
        if !dir.runner_config().is_some_and(|config| config.ssh_any_port_if_taken) {
            return Ok(Vec::new());
        }
        let deadline = Instant::now() + PORT_TIMEOUT;
        let mut start = Instant::now();
        loop {
            match dir.ssh_port() {
                Some(SSH_PORT) => return Ok(Vec::new()),
                Some(host) => return Ok(vec![Port { host, container: SSH_PORT }]),
                None => {}
            }
            if Instant::now() >= deadline {
                tracing::warn!(task = %dir.id, "runner did not report the port of its SSH server");
                return Ok(Vec::new());
            }
            sleep(PORT_POLL_INTERVAL).await;
            if start.elapsed() < LIVENESS_CHECK_INTERVAL {
                continue;
            }
            start = Instant::now();
            match inspect(&self.engine, &handle.id).await {
                Ok(seen) if seen.state.as_ref().is_some_and(is_running) => {}
                // `wait` reports the exit.
                Ok(_) | Err(InspectError::NotFound) => return Ok(Vec::new()),
                Err(InspectError::Failed(error)) => return Err(error),
            }
        }
    }

    async fn start_or_repair_network(&self, handle: &Handle, publish: &[u16]) -> Result<(), RuntimeError> {
        let what = || format!("failed to start container {}", handle.name);
        match self.try_start(handle).await? {
            Ok(()) => Ok(()),
            // The network was removed meanwhile, or two networks with its name were created at once.
            Err(error) if !publish.is_empty() && error_map::engine_message(&error).contains("network") => {
                self.network.ensure(&self.engine, self.is_podman).await?.block_metadata().await;
                self.try_start(handle).await?.map_err(|error| error_map::from_call_error(what(), error))
            }
            Err(error) => Err(error_map::from_call_error(what(), error)),
        }
    }

    async fn try_start(&self, handle: &Handle) -> Result<Result<(), Error>, RuntimeError> {
        let started = timeout(START_TIMEOUT, self.engine.start_container(&handle.id, None)).await;
        started.map_err(|_| error_map::timed_out(format!("failed to start container {}", handle.name)))
    }

    pub(super) async fn wait_for_end(&self, handle: &Handle) -> Result<Exit, RuntimeError> {
        let mut pause = BACKOFF_MIN;
        let mut answered = clock::now_ms();
        let mut away = None;
        let mut counter: Option<KillCounter> = None;
        let mut kills = 0;
        loop {
            match inspect(&self.engine, &handle.id).await {
                Ok(seen) => {
                    let state = seen.state.unwrap_or_default();
                    if !is_running(&state) {
                        kills = kills.max(counter.map_or(0, |counter| counter.kills()));
                        let state = self.await_oom_report(handle, state, kills).await;
                        return self.exit(handle, &state, away, kills).await;
                    }
                    counter = counter.or_else(|| KillCounter::open(state.pid, &handle.id));
                    // The container outlived the engine's absence, which therefore does not explain a later end.
                    away = None;
                    answered = clock::now_ms();
                }
                Err(InspectError::NotFound) => return Ok(vanished_exit()),
                Err(InspectError::Failed(RuntimeError::Away { .. })) => {
                    away = away.or(Some(answered));
                    sleep(pause).await;
                    pause = (pause * 2).min(BACKOFF_MAX);
                    continue;
                }
                Err(InspectError::Failed(error)) => return Err(error),
            }
            let start = Instant::now();
            if self.wait_until_ended(handle, counter.as_ref(), &mut kills).await.is_err() {
                // The engine became unreachable during the wait: an end from here on happens in its absence.
                away = Some(clock::now_ms());
            }
            // An engine that responds at once although the container runs must not be polled in a busy loop.
            if start.elapsed() < BACKOFF_MIN {
                sleep(pause).await;
                pause = (pause * 2).min(BACKOFF_MAX);
            } else {
                pause = BACKOFF_MIN;
            }
        }
    }

    /// Waits briefly for the OOM report of a container that was killed: the engine learns of the end and of its cause
    /// from two sources, in any order.
    async fn await_oom_report(
        &self,
        handle: &Handle,
        mut state: ContainerState,
        kills: u64,
    ) -> ContainerState {
        let deadline = Instant::now() + OOM_REPORT_TIMEOUT;
        let is_open = |state: &ContainerState| {
            state.exit_code == Some(SIGKILL_EXIT_CODE) && !oom::is_oom(state.oom_killed, kills)
        };
        while is_open(&state) && Instant::now() < deadline {
            sleep(OOM_POLL_INTERVAL).await;
            match inspect(&self.engine, &handle.id).await {
                Ok(seen) => state = seen.state.unwrap_or(state),
                Err(_) => break,
            }
        }
        state
    }

    /// Waits until the engine reports the end, and reads the kernel's count as soon as the first process has ended.
    async fn wait_until_ended(
        &self,
        handle: &Handle,
        counter: Option<&KillCounter>,
        kills: &mut u64,
    ) -> Result<(), Error> {
        let mut reported = std::pin::pin!(self.wait_not_running(handle));
        if let Some(counter) = counter {
            tokio::select! {
                biased;
                counted = counter.kills_at_exit() => *kills = counted.max(*kills),
                reported = &mut reported => return reported,
            }
        }
        reported.await
    }

    /// Uses `not-running`, never `next-exit`: the latter hangs without limit if the container ended before the call.
    async fn wait_not_running(&self, handle: &Handle) -> Result<(), Error> {
        let options = WaitContainerOptionsBuilder::default().condition("not-running").build();
        let mut answers = std::pin::pin!(self.engine.wait_container(&handle.id, Some(options)));
        match answers.next().await {
            // The client reports every status but 0 as an error.
            Some(Ok(_) | Err(Error::DockerContainerWaitError { .. })) => Ok(()),
            Some(Err(error)) if error_map::is_engine_unavailable(&error) => Err(error),
            Some(Err(_)) => Ok(()),
            None => Err(Error::RequestTimeoutError),
        }
    }

    async fn exit(
        &self,
        handle: &Handle,
        state: &ContainerState,
        away: Option<i64>,
        kills: u64,
    ) -> Result<Exit, RuntimeError> {
        if !was_started(state) {
            let what = format!("failed to wait for container {}", handle.name);
            return Err(RuntimeError::Refused { what, why: "it was never started".to_owned() });
        }
        let code = state.exit_code.unwrap_or(-1);
        let oom_killed = oom::is_oom(state.oom_killed, kills);
        let end = ContainerEnd {
            code,
            oom_killed,
            started: parse_millis(state.started_at.as_deref()),
            finished: parse_millis(state.finished_at.as_deref()),
            away,
            engine: if self.is_podman { None } else { host_probe::engine_started_at_ms(&self.socket) },
            boot: host_probe::booted_at_ms(),
        };
        let mut lost = exit_reason::loss_reason(end);
        if lost == Some(LossReason::EngineRestarted) && self.keeps_containers().await {
            lost = None;
        }
        let tail = self.tail(handle).await;
        Ok(Exit { code: i32::try_from(code).ok(), oom_killed, tail, lost })
    }

    /// Returns whether containers outlive this engine.
    async fn keeps_containers(&self) -> bool {
        if self.is_podman {
            return true;
        }
        let info = call_with_timeout("failed to query the engine", self.engine.info()).await;
        matches!(info, Ok(Ok(info)) if info.live_restore_enabled == Some(true))
    }

    /// Returns whether the engine is being stopped in an orderly manner: it ends its containers first, and responds
    /// until the last of them has ended.
    pub(super) async fn is_engine_shutting_down(&self) -> bool {
        if self.keeps_containers().await {
            return false;
        }
        let deadline = Instant::now() + ENGINE_SHUTDOWN_TIMEOUT;
        while Instant::now() < deadline {
            match call_with_timeout("failed to ping the engine", self.engine.ping()).await {
                Ok(Err(error)) if error_map::is_engine_unavailable(&error) => return true,
                Ok(_) | Err(_) => sleep(BACKOFF_MIN).await,
            }
        }
        false
    }

    /// Returns the last lines that the container printed. Empty if they cannot be read: the exit is reported without
    /// them.
    async fn tail(&self, handle: &Handle) -> Vec<String> {
        let options =
            LogsOptionsBuilder::default().stdout(true).stderr(true).tail(&TAIL_LINES.to_string()).build();
        let read = async {
            let mut logs = std::pin::pin!(self.engine.logs(&handle.id, Some(options)));
            let mut bytes = Vec::new();
            while let Some(Ok(piece)) = logs.next().await {
                bytes.extend_from_slice(&LogOutput::into_bytes(piece));
                if bytes.len() > TAIL_BYTES_MAX {
                    break;
                }
            }
            bytes
        };
        let bytes = timeout(CALL_TIMEOUT, read).await.unwrap_or_default();
        last_lines(&bytes)
    }

    pub(super) async fn stop_within(&self, handle: &Handle, grace: Duration) -> Result<(), RuntimeError> {
        let what = format!("failed to stop container {}", handle.name);
        // The engine counts whole seconds. Rounding down would lose the last second of every grace period.
        let seconds = i32::try_from(grace.as_millis().div_ceil(1000)).unwrap_or(i32::MAX);
        let options = StopContainerOptionsBuilder::default().t(seconds).build();
        let stopped =
            timeout(grace + STOP_TIMEOUT_EXTRA, self.engine.stop_container(&handle.id, Some(options))).await;
        match stopped.map_err(|_| error_map::timed_out(what.clone()))? {
            Ok(()) => Ok(()),
            Err(error) if error_map::error_status(&error) == Some(404) => Ok(()),
            Err(error) => Err(error_map::from_call_error(what, error)),
        }
    }

    pub(super) async fn remove_all(
        &self,
        task: &TaskDir,
        handle: Option<&Handle>,
    ) -> Result<(), RuntimeError> {
        let names = match handle {
            Some(handle) => vec![handle.id.clone()],
            None => {
                let mark = format!("{}={}", container::TASK_ID_LABEL, task.id);
                let listed = self.list(vec![mark]).await?;
                listed.into_iter().filter_map(|one| one.id).collect()
            }
        };
        for name in names {
            self.remove_one(&name).await?;
        }
        let Some(binds) = self.around.restricted_binds.clone() else { return Ok(()) };
        let id = task.id;
        let unmounted = tokio::task::spawn_blocking(move || binds.unmount(id)).await;
        let what = format!("failed to unmount the directories of task {id}");
        unmounted.map_err(io::Error::other).flatten().map_err(|source| error_map::from_io_error(what, source))
    }

    async fn remove_one(&self, name: &str) -> Result<(), RuntimeError> {
        let what = || format!("failed to remove container {name}");
        let deadline = Instant::now() + REMOVAL_TIMEOUT;
        loop {
            let options = RemoveContainerOptionsBuilder::default().force(true).v(true).build();
            let removed = timeout(REMOVAL_TIMEOUT, self.engine.remove_container(name, Some(options))).await;
            match removed.map_err(|_| error_map::timed_out(what()))? {
                Ok(()) => return Ok(()),
                Err(error) if error_map::error_status(&error) == Some(404) => return Ok(()),
                // A removal is already in progress.
                Err(error) if error_map::error_status(&error) == Some(409) && Instant::now() < deadline => {
                    sleep(REMOVAL_POLL_INTERVAL).await;
                }
                Err(error) => return Err(error_map::from_call_error(what(), error)),
            }
        }
    }

    /// Lists all containers of this shim that have the labels.
    async fn list(&self, mut marks: Vec<String>) -> Result<Vec<ContainerSummary>, RuntimeError> {
        marks.push(format!("{}={}", container::HOME_LABEL, self.around.home));
        let filters = HashMap::from([("label", marks)]);
        let options = ListContainersOptionsBuilder::default().all(true).filters(&filters).build();
        let listed = call_until_known_state("container listing", || {
            self.engine.list_containers(Some(options.clone()))
        })
        .await?;
        listed.map_err(|error| error_map::from_call_error("failed to list containers", error))
    }

    /// Lists all paths of the host that are mounted into containers of this shim.
    pub(super) async fn mounted_sources(&self) -> Result<Vec<PathBuf>, RuntimeError> {
        let listed = self.list(Vec::new()).await?;
        let mounts = listed.into_iter().flat_map(|one| one.mounts.unwrap_or_default());
        Ok(mounts.filter_map(|mount| mount.source).map(PathBuf::from).collect())
    }

    pub(super) async fn find_containers(&self) -> Result<Vec<FoundTask>, RuntimeError> {
        let listed = self.list(vec![format!("{}=true", container::IS_TASK_LABEL)]).await?;
        Ok(listed.into_iter().filter_map(to_found_task).collect())
    }
}

fn to_found_task(one: ContainerSummary) -> Option<FoundTask> {
    let task = one.labels?.get(container::TASK_ID_LABEL)?.parse().ok()?;
    let name = one.names?.first()?.trim_start_matches('/').to_owned();
    let state = match one.state? {
        Listed::CREATED | Listed::EMPTY => FoundState::Created,
        Listed::RUNNING | Listed::PAUSED | Listed::RESTARTING | Listed::STOPPING => FoundState::Running,
        Listed::EXITED | Listed::REMOVING | Listed::DEAD => FoundState::Ended,
    };
    Some(FoundTask { task, handle: Handle { name, id: one.id? }, state })
}

fn is_running(state: &ContainerState) -> bool {
    match state.status {
        Some(State::RUNNING | State::PAUSED | State::RESTARTING | State::STOPPING) => true,
        Some(State::CREATED | State::REMOVING | State::EXITED | State::DEAD | State::EMPTY) | None => {
            state.running.unwrap_or(false)
        }
    }
}

fn vanished_exit() -> Exit {
    Exit { code: None, oom_killed: false, tail: Vec::new(), lost: Some(LossReason::Vanished) }
}

fn parse_millis(text: Option<&str>) -> i64 {
    text.and_then(|text| text.parse::<jiff::Timestamp>().ok()).map_or(0, jiff::Timestamp::as_millisecond)
}

/// Returns the ports that the engine mapped, in the requested order; `None` if one is missing.
fn mapped_ports(seen: &ContainerInspectResponse, publish: &[u16]) -> Option<Vec<Port>> {
    let mapped = seen.network_settings.as_ref()?.ports.as_ref()?;
    let one = |container: &u16| {
        let bindings = mapped.get(&format!("{container}/tcp"))?.as_ref()?;
        let host = bindings.iter().find_map(|binding| binding.host_port.as_ref()?.parse().ok())?;
        Some(Port { host, container: *container })
    };
    publish.iter().map(one).collect()
}

fn last_lines(bytes: &[u8]) -> Vec<String> {
    let text = String::from_utf8_lossy(bytes);
    let lines: Vec<&str> = text.lines().collect();
    let last = lines.iter().skip(lines.len().saturating_sub(TAIL_LINES));
    last.map(|line| line.chars().take(TAIL_LINE_MAX).collect()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_output_lines_are_kept_and_truncated() {
        assert_eq!(last_lines(b"1\n2\n3\n4\n5\n6\n"), ["2", "3", "4", "5", "6"]);
        assert_eq!(last_lines(b""), Vec::<String>::new());
        assert_eq!(last_lines(&[b'x'; 5000])[0].len(), TAIL_LINE_MAX);
        assert_eq!(last_lines(b"\xff\n"), ["\u{fffd}"]);
    }

    #[test]
    fn a_container_that_never_ran_counts_as_not_started() {
        let state = |at: &str| ContainerState { started_at: Some(at.into()), ..ContainerState::default() };
        assert!(!was_started(&state(ZERO_TIME)));
        assert!(!was_started(&state("")));
        assert!(was_started(&state("2026-11-15T07:00:00.1Z")));
    }
}
