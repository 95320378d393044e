//! A runtime and a host that the test controls, and that outlive the shim as real ones do.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::Duration,
};

use futures_util::FutureExt as _;
use parking_lot::Mutex;
use tokio::sync::watch;

use windlass_api::agent::shim::{Port, PullProgress, TaskInfo, TaskSpec};
use windlass_model::id::SubmissionId;

use super::super::{Host, HostError, HostFuture as HostDone, Observer, PolicyGrant};
use crate::{
    shim::runtime::{
        BindMount, Exit, FoundState, FoundTask, Handle, PolicyLimits, PreparedTask, ProgressCallback,
        RegistryAuth, Runtime, RuntimeError, RuntimeFuture,
    },
    task_dir::TaskDir,
};

/// Containers of a host.
#[derive(Default)]
pub(super) struct FakeState {
    pub(super) containers: BTreeMap<SubmissionId, FakeContainer>,
    /// Number of actual program starts per submission.
    pub(super) starts: BTreeMap<SubmissionId, u32>,
    pub(super) pulls: Vec<Option<String>>,
    pub(super) keys: BTreeSet<SubmissionId>,
    pub(super) mounts: BTreeSet<SubmissionId>,
    pub(super) calls: Vec<String>,
    pub(super) script: FaultScript,
}

/// Faults to inject.
#[derive(Clone, Default)]
pub(super) struct FaultScript {
    pub(super) away: bool,
    pub(super) pull_hangs: bool,
    pub(super) pull_fails: bool,
    pub(super) create_fails: bool,
    pub(super) start_fails: bool,
    pub(super) ends_at_once: bool,
    pub(super) keys_fail: bool,
    pub(super) mounts_fail: bool,
    pub(super) unmount_fails_times: u32,
    pub(super) refused: bool,
    pub(super) ignores_term: bool,
}

pub(super) struct FakeContainer {
    pub(super) state: FoundState,
    pub(super) exit: watch::Sender<Option<Exit>>,
    pub(super) gpus: Vec<String>,
}

#[derive(Clone, Default)]
pub(super) struct FakeHost(pub(super) Arc<Mutex<FakeState>>);

pub(super) fn exit(code: i32) -> Exit {
    Exit { code: Some(code), oom_killed: false, tail: Vec::new(), lost: None }
}

fn handle(id: SubmissionId) -> Handle {
    Handle { name: format!("task-{id}"), id: format!("container-{id}") }
}

impl FakeHost {
    pub(super) fn script(&self, change: impl FnOnce(&mut FaultScript)) {
        change(&mut self.0.lock().script);
    }

    /// Ends the program by itself.
    pub(super) fn end(&self, id: SubmissionId, exit: Exit) {
        let mut state = self.0.lock();
        let container = state.containers.get_mut(&id).unwrap();
        container.state = FoundState::Ended;
        container.exit.send_replace(Some(exit));
    }

    pub(super) fn remove_container(&self, id: SubmissionId) {
        self.0.lock().containers.remove(&id);
    }

    fn record_call(&self, call: &str, id: SubmissionId) -> Result<(), RuntimeError> {
        let mut state = self.0.lock();
        state.calls.push(format!("{call} {id}"));
        match state.script.away {
            true => Err(RuntimeError::Away { what: call.to_owned(), source: "no response".into() }),
            false => Ok(()),
        }
    }

    pub(super) fn count(&self, call: &str) -> usize {
        self.0.lock().calls.iter().filter(|message| message.starts_with(call)).count()
    }
}

impl Runtime for FakeHost {
    fn name(&self) -> &'static str {
        "fake"
    }

    fn pull<'a>(
        &'a self,
        task: &'a PreparedTask,
        auth: Option<&'a RegistryAuth>,
        progress: ProgressCallback,
    ) -> RuntimeFuture<'a, ()> {
        async move {
            self.record_call("pull", task.dir.id)?;
            let script = {
                let mut state = self.0.lock();
                state.pulls.push(auth.map(|auth| auth.password.clone()));
                state.script.clone()
            };
            progress(PullProgress { downloaded_bytes: 7, ..PullProgress::default() });
            if script.pull_hangs {
                std::future::pending::<()>().await;
            }
            match script.pull_fails {
                true => Err(RuntimeError::NoImage { what: "pull".to_owned() }),
                false => Ok(()),
            }
        }
        .boxed()
    }

    fn create<'a>(&'a self, task: &'a PreparedTask) -> RuntimeFuture<'a, Handle> {
        async move {
            let id = task.dir.id;
            self.record_call("create", id)?;
            let mut state = self.0.lock();
            if state.script.create_fails {
                return Err(RuntimeError::Refused { what: "create".to_owned(), why: "no".to_owned() });
            }
            state.containers.entry(id).or_insert_with(|| FakeContainer {
                state: FoundState::Created,
                exit: watch::Sender::new(None),
                gpus: task.gpus.iter().map(|gpu| gpu.id.clone()).collect(),
            });
            Ok(handle(id))
        }
        .boxed()
    }

    fn start<'a>(&'a self, task: &'a PreparedTask, _: &'a Handle) -> RuntimeFuture<'a, Vec<Port>> {
        async move {
            let id = task.dir.id;
            self.record_call("start", id)?;
            let mut state = self.0.lock();
            if state.script.start_fails {
                return Err(RuntimeError::NoDisk { what: "start".to_owned() });
            }
            let ends_at_once = state.script.ends_at_once;
            let Some(container) = state.containers.get_mut(&id) else {
                return Err(RuntimeError::Refused { what: "start".to_owned(), why: "not there".to_owned() });
            };
            if container.state == FoundState::Created {
                container.state = FoundState::Running;
                if ends_at_once {
                    container.state = FoundState::Ended;
                    container.exit.send_replace(Some(exit(127)));
                }
                *state.starts.entry(id).or_default() += 1;
            }
            if ends_at_once {
                return Err(RuntimeError::Refused { what: "start".to_owned(), why: "no port".to_owned() });
            }
            Ok(vec![Port { host: 32768, container: 10022 }])
        }
        .boxed()
    }

    fn wait<'a>(&'a self, task: &'a PreparedTask, _: &'a Handle) -> RuntimeFuture<'a, Exit> {
        async move {
            self.record_call("wait", task.dir.id)?;
            let exit = self.0.lock().containers.get(&task.dir.id).map(|container| container.exit.subscribe());
            let Some(mut exit) = exit else {
                return Err(RuntimeError::Refused { what: "wait".to_owned(), why: "not there".to_owned() });
            };
            let ended = exit.wait_for(Option::is_some).await.map(|exit| exit.clone());
            match ended {
                Ok(Some(exit)) => Ok(exit),
                Ok(None) | Err(_) => std::future::pending().await,
            }
        }
        .boxed()
    }

    fn stop<'a>(&'a self, task: &'a TaskDir, _: &'a Handle, grace: Duration) -> RuntimeFuture<'a, ()> {
        async move {
            self.record_call("stop", task.id)?;
            let (polite, runs) = {
                let state = self.0.lock();
                let runs = state.containers.get(&task.id).is_some_and(|c| c.state == FoundState::Running);
                (!state.script.ignores_term && !grace.is_zero(), runs)
            };
            if !runs {
                return Ok(());
            }
            if !polite {
                tokio::time::sleep(grace).await;
            }
            self.end(task.id, exit(if polite { 143 } else { 137 }));
            Ok(())
        }
        .boxed()
    }

    fn remove<'a>(&'a self, task: &'a TaskDir, _: Option<&'a Handle>) -> RuntimeFuture<'a, ()> {
        async move {
            self.record_call("remove", task.id)?;
            self.0.lock().containers.remove(&task.id);
            Ok(())
        }
        .boxed()
    }

    fn found(&self) -> RuntimeFuture<'_, Vec<FoundTask>> {
        async move {
            self.record_call("found", SubmissionId(uuid::Uuid::nil()))?;
            let state = self.0.lock();
            let found = state.containers.iter();
            Ok(found.map(|(id, c)| FoundTask { task: *id, handle: handle(*id), state: c.state }).collect())
        }
        .boxed()
    }
}

impl Host for FakeHost {
    fn grant(&self, _: &TaskSpec) -> Result<PolicyGrant, HostError> {
        if self.0.lock().script.refused {
            return Err(HostError::Refused { what: "mount /etc".to_owned(), why: "policy".to_owned() });
        }
        let limits = PolicyLimits { pids: 100, new_privileges: false, capabilities: Vec::new() };
        Ok(PolicyGrant { limits, env: Vec::new() })
    }

    fn add_keys<'a>(&'a self, spec: &'a TaskSpec) -> HostDone<'a, ()> {
        let mut state = self.0.lock();
        state.keys.insert(spec.id);
        let failed = state.script.keys_fail.then(|| failed("add keys"));
        async move { failed.map_or(Ok(()), Err) }.boxed()
    }

    fn remove_keys<'a>(&'a self, spec: &'a TaskSpec) -> HostDone<'a, ()> {
        self.0.lock().keys.remove(&spec.id);
        async { Ok(()) }.boxed()
    }

    fn mount<'a>(&'a self, spec: &'a TaskSpec) -> HostDone<'a, Vec<BindMount>> {
        let mut state = self.0.lock();
        state.mounts.insert(spec.id);
        let failed = state.script.mounts_fail.then(|| failed("mount"));
        async move { failed.map_or(Ok(Vec::new()), Err) }.boxed()
    }

    fn unmount<'a>(&'a self, spec: &'a TaskSpec) -> HostDone<'a, ()> {
        let mut state = self.0.lock();
        if state.script.unmount_fails_times > 0 {
            state.script.unmount_fails_times -= 1;
            return async { Err(failed("unmount")) }.boxed();
        }
        state.mounts.remove(&spec.id);
        async { Ok(()) }.boxed()
    }

    fn sweep<'a>(&'a self, living: &'a [SubmissionId]) -> HostDone<'a, ()> {
        let mut state = self.0.lock();
        state.keys.retain(|id| living.contains(id));
        state.mounts.retain(|id| living.contains(id));
        async { Ok(()) }.boxed()
    }
}

fn failed(what: &str) -> HostError {
    HostError::Io { what: what.to_owned(), source: std::io::ErrorKind::StorageFull.into() }
}

/// Records the changes that it receives.
#[derive(Clone, Default)]
pub(super) struct RecordingObserver(pub(super) Arc<Mutex<Vec<(SubmissionId, String)>>>);

impl Observer for RecordingObserver {
    fn changed(&self, info: &TaskInfo) {
        self.0.lock().push((info.id, format!("{:?}", info.status).to_lowercase()));
    }

    fn removed(&self, id: SubmissionId) {
        self.0.lock().push((id, "gone".to_owned()));
    }
}

impl RecordingObserver {
    pub(super) fn of(&self, id: SubmissionId) -> Vec<String> {
        self.0.lock().iter().filter(|(of, _)| *of == id).map(|(_, what)| what.clone()).collect()
    }
}
