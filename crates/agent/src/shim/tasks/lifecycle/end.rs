//! End of a task: stops its container, releases each resource once, records the end and reports it.

use std::{sync::Arc, time::Duration};

use futures_util::future::BoxFuture;
use tokio::{
    sync::watch,
    time::{Instant, sleep, timeout},
};

use windlass_model::{
    error_chain::format_chain,
    state_machine::Step,
    task::{self as machine, Event, Status},
};

use super::{
    super::{
        PauseAt,
        host::HostError,
        late_readers,
        task::{StopRequest, TaskEnd, TaskState},
        task_end, task_files,
    },
    TaskLifecycle, retry_delays,
};
use crate::shim::{
    journal::JournalEvent,
    runtime::{Exit, Handle, LossReason, PreparedTask, RuntimeError},
};

/// Attempts to release a resource before the end of the task is reported without it; the removal tries again.
const RELEASE_ATTEMPTS_MAX: usize = 5;
/// Attempts to record the end before it is reported anyway: a full disk must not keep a task alive.
const END_ATTEMPTS_MAX: usize = 5;
/// Time to wait for the exit status after a stop: it is available at once, unless the engine has a problem.
const EXIT_STATUS_TIMEOUT: Duration = Duration::from_secs(5);

impl TaskLifecycle {
    /// Waits for the end of the container, or ends it on request.
    pub(super) async fn watch(&self, prepared: &PreparedTask) -> (Event, TaskEnd) {
        let handle = self.task.state.lock().container.handle.clone();
        let Some(handle) = handle else { return (Event::Ended, task_end::for_vanished()) };
        let mut stop_request = self.task.stop_request.subscribe();
        let exit = tokio::select! {
            biased;
            exit = self.wait(prepared, &handle) => Some(exit),
            _ = stop_request.wait_for(Option::is_some) => None,
        };
        let Some(exit) = exit else {
            self.pause(PauseAt::Terminating).await;
            let exit = self.stop(prepared, &handle).await;
            let code = exit.as_ref().and_then(|exit| exit.code);
            self.record_exited(code);
            let Some(stop_request) = self.stop_request() else {
                return (Event::Stopped, task_end::for_vanished());
            };
            return (Event::Stopped, task_end::for_stop(&stop_request, exit.as_ref()));
        };
        let exit = match exit {
            Ok(exit) => Ok(self.attribute_engine_stop(exit, &mut stop_request).await),
            Err(error) => Err(error),
        };
        // Its first process ended; nothing of it may run when its devices are allocated to the next task.
        self.force_stop(&handle).await;
        match exit {
            Ok(exit) => {
                self.record_exited(exit.code);
                (Event::Ended, self.describe_end(exit).await)
            }
            Err(error) => {
                self.record_exited(None);
                (Event::Ended, task_end::for_prepare_error(&error))
            }
        }
    }

    /// Checks whether an engine that is shutting down ended the task: an end by a signal that neither the shim nor the
    /// runner sent may have this cause, which shows a moment later. A stop request meanwhile is not delayed.
    async fn attribute_engine_stop(
        &self,
        mut exit: Exit,
        stop_request: &mut watch::Receiver<Option<StopRequest>>,
    ) -> Exit {
        let dir = self.task.dir.clone();
        let left = tokio::task::spawn_blocking(move || task_files::read_exit_evidence(&dir))
            .await
            .unwrap_or_default();
        if task_end::is_external_kill(&exit, &left) {
            tokio::select! {
                biased;
                _ = stop_request.wait_for(Option::is_some) => {}
                is_away = self.tasks.runtime.goes_away(&self.task.spec) => {
                    exit.lost = is_away.then_some(LossReason::EngineRestarted);
                }
            }
        }
        exit
    }

    /// Waits for the exit. An unreachable engine is waited for: its containers continue without it.
    async fn wait(&self, prepared: &PreparedTask, handle: &Handle) -> Result<Exit, RuntimeError> {
        let mut waits = retry_delays();
        loop {
            match self.tasks.runtime.wait(prepared, handle).await {
                Err(RuntimeError::Away { what, source }) => {
                    tracing::warn!(id = %self.task.id, %what, %source, "container engine unreachable");
                }
                answer => return answer,
            }
            sleep(waits.next().unwrap_or_default()).await;
        }
    }

    /// Stops the container, with the grace period of the request. Repeats until it succeeds.
    async fn stop(&self, prepared: &PreparedTask, handle: &Handle) -> Option<Exit> {
        let mut stop_request = self.task.stop_request.subscribe();
        let wait = self.wait(prepared, handle);
        tokio::pin!(wait);
        let mut exit = None;
        for pause in retry_delays() {
            let until = stop_request
                .borrow_and_update()
                .as_ref()
                .map_or_else(Instant::now, |stop_request| stop_request.until);
            let grace = match exit {
                None => until.saturating_duration_since(Instant::now()),
                Some(_) => Duration::ZERO,
            };
            tokio::select! {
                biased;
                stopped = self.tasks.runtime.stop(&self.task.dir, handle, grace) => match stopped {
                    Ok(()) => break,
                    Err(error) => tracing::warn!(%error, id = %self.task.id, "failed to stop container"),
                },
                ended = &mut wait, if exit.is_none() => {
                    exit = Some(ended);
                    continue;
                }
                // The grace period was shortened.
                _ = stop_request.changed() => continue,
            }
            sleep(pause).await;
        }
        let exit = match exit {
            Some(exit) => Some(exit),
            None => timeout(EXIT_STATUS_TIMEOUT, wait).await.ok(),
        };
        exit.and_then(Result::ok)
    }

    async fn force_stop(&self, handle: &Handle) {
        for pause in retry_delays() {
            match self.tasks.runtime.stop(&self.task.dir, handle, Duration::ZERO).await {
                Ok(()) => return,
                Err(error) => tracing::warn!(%error, id = %self.task.id, "failed to stop container"),
            }
            sleep(pause).await;
        }
    }

    /// Removes everything that the runtime created, found by its mark.
    pub(super) async fn remove_container(&self) {
        let handle = self.task.state.lock().container.handle.clone();
        for pause in retry_delays() {
            match self.tasks.runtime.remove(&self.task.dir, handle.as_ref()).await {
                Ok(()) => return,
                Err(error) => tracing::warn!(%error, id = %self.task.id, "failed to remove container"),
            }
            sleep(pause).await;
        }
    }

    /// Determines the end from the exit and from the files that the task left.
    async fn describe_end(&self, mut exit: Exit) -> TaskEnd {
        let dir = self.task.dir.clone();
        let left = tokio::task::spawn_blocking(move || task_files::read_exit_evidence(&dir))
            .await
            .unwrap_or_default();
        let same_boot = {
            let state = self.task.state.lock();
            state.container.starting.as_ref().is_none_or(|boot| *boot == self.tasks.settings.boot)
        };
        // When the host went down, the runner could not write its exit record.
        if !same_boot && exit.lost.is_none() && left.last_word.is_none() {
            exit.lost = Some(LossReason::HostRebooted);
        }
        task_end::from_exit(&exit, &left)
    }

    pub(super) fn record_exited(&self, code: Option<i32>) {
        let mut state = self.task.state.lock();
        if !std::mem::replace(&mut state.container.exited, true) {
            self.tasks.journal.append(self.task.id, state.epoch, JournalEvent::ContainerExited { code });
        }
    }

    /// Ends the task; all other functions end it through this one.
    pub(super) async fn finish(&self, event: Event, end: TaskEnd) {
        let output = late_readers::open_output(&self.tasks, &self.task, &end).await;
        self.release().await;
        let seq = self.append_record(JournalEvent::Terminated { end: end.clone() });
        self.sync_journal(seq, END_ATTEMPTS_MAX).await;
        {
            let mut state = self.task.state.lock();
            match machine::step(state.status, event) {
                Step::To(status) => state.status = status,
                Step::Stay | Step::Refuse => {
                    tracing::error!(id = %self.task.id, status = %state.status, %event, "state machine rejected end");
                    state.status = Status::Terminated;
                }
            }
            state.end = Some(end);
            self.notify_changed(&state);
        }
        if let Some(output) = output {
            let (tasks, task) = (Arc::clone(&self.tasks), Arc::clone(&self.task));
            self.tasks.spawn(late_readers::serve(tasks, task, output));
        }
        self.write_task_file().await;
    }

    /// Releases each held resource once, and records it.
    pub(super) async fn release(&self) {
        let (tasks, task) = (&self.tasks, &self.task);
        let held = task.state.lock().held.clone();
        if held.keys {
            let gone =
                self.give_back("remove the keys of a task", || tasks.host.remove_keys(&task.spec)).await;
            self.record_released(gone, JournalEvent::KeyRemoved, |state| &mut state.held.keys);
        }
        if held.mounts {
            let gone =
                self.give_back("unmount the volumes of a task", || tasks.host.unmount(&task.spec)).await;
            self.record_released(gone, JournalEvent::Unmounted, |state| &mut state.held.mounts);
        }
        let mut ledger = tasks.ledger.lock();
        let mut state = task.state.lock();
        let gpus = ledger.release(&task.id);
        if !gpus.is_empty() {
            tasks.journal.append(task.id, state.epoch, JournalEvent::GpuReleased { gpus });
        }
        state.held.gpus.clear();
    }

    async fn give_back<'a>(
        &self,
        what: &str,
        mut give: impl FnMut() -> BoxFuture<'a, Result<(), HostError>>,
    ) -> bool {
        for wait in retry_delays().take(RELEASE_ATTEMPTS_MAX) {
            match give().await {
                Ok(()) => return true,
                Err(error) => {
                    tracing::warn!(error = format_chain(&error), id = %self.task.id, "failed to {what}")
                }
            }
            sleep(wait).await;
        }
        false
    }

    fn record_released(&self, gone: bool, kind: JournalEvent, what: fn(&mut TaskState) -> &mut bool) {
        let mut state = self.task.state.lock();
        if gone && std::mem::replace(what(&mut state), false) {
            self.tasks.journal.append(self.task.id, state.epoch, kind);
        }
    }
}
