//! Simulated tasks: they run for a set time, with a set result, at almost no cost.
//!
//! A load test needs thousands of hosts, and it measures the server. So there is no process and no file here: states
//! and output of a job are functions of its start time, its settings and the current time. The runner is simulated as
//! well. The behaviour of a task is set by flags, and by each job in its environment:
//!
//! | variable | meaning |
//! |---|---|
//! | `SIMULATED_RUN_MS` | duration of the job |
//! | `SIMULATED_EXIT` | exit status |
//! | `SIMULATED_LOG_LINES` | lines of output, spread over that time |
//!
//! The duration of the image pull must be known before the job is: it is set by the tag `pull-MS` of the image.

mod job;
mod runner_api;

use std::{collections::HashMap, sync::Arc, time::Duration};

use axum::{
    body::{Body, Bytes},
    http::{Request, Response},
};
use futures_util::future::BoxFuture;
use parking_lot::Mutex;
use tokio::sync::watch;

use windlass_api::agent::{
    events::ShimEventKind,
    shim::{Port, PullProgress},
};
use windlass_model::id::SubmissionId;

use super::{
    events::EventLog,
    runtime::{
        Exit, FoundState, FoundTask, Handle, PreparedTask, ProgressCallback, RegistryAuth, Runtime,
        RuntimeError, RuntimeFuture,
    },
};
use crate::{clock, task_dir::TaskDir};
use job::{JobPhase, SimulatedJob};

/// Default behaviour of the tasks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SimulationPlan {
    pub pull: Duration,
    pub run: Duration,
    pub exit: i32,
    pub log_lines: u32,
}

impl Default for SimulationPlan {
    fn default() -> Self {
        Self { pull: Duration::ZERO, run: Duration::from_secs(1), exit: 0, log_lines: 2 }
    }
}

/// [`Plan`] as command-line flags.
#[derive(Clone, Copy, Debug, clap::Args)]
pub struct SimulationFlags {
    /// Simulated tasks: duration of an image pull, in milliseconds
    #[arg(long, value_name = "MS", env = "SIMULATED_PULL_MS", default_value_t = 0)]
    simulated_pull_ms: u64,
    /// Simulated tasks: duration of a job, in milliseconds
    #[arg(long, value_name = "MS", env = "SIMULATED_RUN_MS", default_value_t = 1000)]
    simulated_run_ms: u64,
    /// Simulated tasks: exit status of a job
    #[arg(long, value_name = "CODE", env = "SIMULATED_EXIT", default_value_t = 0)]
    simulated_exit: i32,
    /// Simulated tasks: lines of output
    #[arg(long, value_name = "N", env = "SIMULATED_LOG_LINES", default_value_t = 2)]
    simulated_log_lines: u32,
}

impl From<SimulationFlags> for SimulationPlan {
    fn from(flags: SimulationFlags) -> Self {
        Self {
            pull: Duration::from_millis(flags.simulated_pull_ms),
            run: Duration::from_millis(flags.simulated_run_ms),
            exit: flags.simulated_exit,
            log_lines: flags.simulated_log_lines,
        }
    }
}

/// Time after the job's end in which its output can be read, as with a real runner.
const READ_GRACE: Duration = Duration::from_secs(300);
/// Size that a simulated image reports.
const IMAGE_BYTES: u64 = 1 << 20;

/// Runtime of one simulated host.
#[derive(Debug)]
pub struct SimulatedRuntime {
    plan: SimulationPlan,
    /// Receives states of jobs directly; there is no file to watch.
    events: EventLog,
    tasks: Mutex<HashMap<SubmissionId, Arc<SimulatedTask>>>,
}

#[derive(Debug)]
struct SimulatedTask {
    job: Mutex<SimulatedJob>,
    /// Changes whenever `job` does.
    changed: watch::Sender<()>,
}

impl SimulatedRuntime {
    pub fn new(plan: SimulationPlan, events: EventLog) -> Self {
        Self { plan, events, tasks: Mutex::new(HashMap::new()) }
    }

    fn task(&self, id: SubmissionId) -> Option<Arc<SimulatedTask>> {
        self.tasks.lock().get(&id).cloned()
    }

    /// Changes a job and publishes the resulting states.
    fn change<T>(
        &self,
        id: SubmissionId,
        task: &SimulatedTask,
        change: impl FnOnce(&mut SimulatedJob, i64) -> T,
    ) -> T {
        let now = clock::now_ms();
        let (result, reported) = {
            let mut job = task.job.lock();
            let result = change(&mut job, now);
            (result, job.take_new_states(now))
        };
        task.changed.send_replace(());
        for state in reported {
            self.events.publish(ShimEventKind::Job { id, state });
        }
        result
    }

    /// Returns when the task has ended; publishes the job's end when it is due.
    async fn wait_ended(&self, id: SubmissionId, task: &SimulatedTask) -> Exit {
        let mut changed = task.changed.subscribe();
        loop {
            let life = self.poll(id, task);
            let sleep = match life {
                JobPhase::Ended { code } => {
                    return Exit { code: Some(code), oom_killed: false, tail: Vec::new(), lost: None };
                }
                JobPhase::ChangesIn { in_ms } => Duration::from_millis(in_ms),
                JobPhase::Waiting => {
                    let _ = changed.changed().await;
                    continue;
                }
            };
            let _ = tokio::time::timeout(sleep, changed.changed()).await;
        }
    }

    fn poll(&self, id: SubmissionId, task: &SimulatedTask) -> JobPhase {
        let now = clock::now_ms();
        let (life, reported, grown) = {
            let mut job = task.job.lock();
            let reported = job.take_new_states(now);
            (job.life(now, READ_GRACE), reported, job.take_new_output_end(now))
        };
        if let Some(end) = grown {
            self.events.publish(ShimEventKind::Log { id, stream: "job".to_owned(), end });
        }
        for state in reported {
            self.events.publish(ShimEventKind::Job { id, state });
        }
        life
    }
}

fn handle_for(id: SubmissionId) -> Handle {
    Handle { name: format!("simulated-{id}"), id: id.to_string() }
}

/// Parses the tag `pull-MS`.
fn pull_time(image: &str) -> Option<Duration> {
    let (_, tag) = image.rsplit_once(':')?;
    tag.strip_prefix("pull-")?.parse().ok().map(Duration::from_millis)
}

impl Runtime for SimulatedRuntime {
    fn name(&self) -> &'static str {
        "simulated"
    }

    fn pull<'a>(
        &'a self,
        task: &'a PreparedTask,
        _auth: Option<&'a RegistryAuth>,
        progress: ProgressCallback,
    ) -> RuntimeFuture<'a, ()> {
        Box::pin(async move {
            tokio::time::sleep(pull_time(&task.spec.image_name).unwrap_or(self.plan.pull)).await;
            progress(PullProgress {
                downloaded_bytes: IMAGE_BYTES,
                extracted_bytes: IMAGE_BYTES,
                total_bytes: IMAGE_BYTES,
                is_total_bytes_final: true,
            });
            Ok(())
        })
    }

    fn create<'a>(&'a self, task: &'a PreparedTask) -> RuntimeFuture<'a, Handle> {
        let id = task.spec.id;
        let fresh = || {
            Arc::new(SimulatedTask {
                job: Mutex::new(SimulatedJob::new(self.plan)),
                changed: watch::Sender::new(()),
            })
        };
        self.tasks.lock().entry(id).or_insert_with(fresh);
        Box::pin(async move { Ok(handle_for(id)) })
    }

    fn start<'a>(&'a self, task: &'a PreparedTask, _handle: &'a Handle) -> RuntimeFuture<'a, Vec<Port>> {
        Box::pin(async move {
            let id = task.spec.id;
            let known = self.task(id).ok_or_else(|| no_such_task("start", id))?;
            known.job.lock().start();
            Ok(Vec::new())
        })
    }

    fn wait<'a>(&'a self, task: &'a PreparedTask, _handle: &'a Handle) -> RuntimeFuture<'a, Exit> {
        Box::pin(async move {
            let id = task.spec.id;
            let known = self.task(id).ok_or_else(|| no_such_task("wait for", id))?;
            Ok(self.wait_ended(id, &known).await)
        })
    }

    fn stop<'a>(&'a self, task: &'a TaskDir, _handle: &'a Handle, _grace: Duration) -> RuntimeFuture<'a, ()> {
        if let Some(known) = self.task(task.id) {
            self.change(task.id, &known, SimulatedJob::kill);
        }
        Box::pin(async { Ok(()) })
    }

    fn remove<'a>(&'a self, task: &'a TaskDir, _handle: Option<&'a Handle>) -> RuntimeFuture<'a, ()> {
        let removed = self.tasks.lock().remove(&task.id);
        if let Some(known) = removed {
            self.change(task.id, &known, SimulatedJob::kill);
        }
        Box::pin(async { Ok(()) })
    }

    fn found(&self) -> RuntimeFuture<'_, Vec<FoundTask>> {
        let tasks = self.tasks.lock();
        let found = tasks.iter().map(|(&task, known)| {
            let job = known.job.lock();
            let state = match job.life(clock::now_ms(), READ_GRACE) {
                JobPhase::Ended { .. } => FoundState::Ended,
                JobPhase::ChangesIn { .. } | JobPhase::Waiting if job.started() => FoundState::Running,
                JobPhase::ChangesIn { .. } | JobPhase::Waiting => FoundState::Created,
            };
            FoundTask { task, handle: handle_for(task), state }
        });
        let found = found.collect();
        Box::pin(async { Ok(found) })
    }

    fn play(&self, task: SubmissionId, call: Request<Bytes>) -> Option<BoxFuture<'_, Response<Body>>> {
        Some(Box::pin(self.respond(task, call)))
    }
}

fn no_such_task(what: &str, id: SubmissionId) -> RuntimeError {
    RuntimeError::Refused { what: format!("cannot {what} {id}"), why: "no such simulated task".to_owned() }
}
