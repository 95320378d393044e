//! The pipelines of a running server, and the tasks next to them.

use std::sync::Arc;

use tokio::{sync::broadcast::error::RecvError, task::JoinSet};
use windlass_backend::Backends;
use windlass_engine::{BatchPipeline, Engine, Hints, Pipeline, Settings};

use crate::{
    agents::AgentApi,
    app::App,
    db::{Db, pipeline_rows::wait_classes},
    hints::Hint,
    job_metrics::sampler,
    logs::retention as log_retention,
    parsed_run_spec::RunSpecCache,
    pipelines::{PipelineContext, PipelineRegistry, register_all},
    retention,
    services::budgets,
};

/// The pipelines of a running server, and the tasks that exchange hints with other replicas.
pub struct RunningPipelines {
    engine: Engine<Db>,
    db: Db,
    _hints: JoinSet<()>,
}

/// Starts all pipelines.
pub fn start(
    app: &App,
    agents: Arc<dyn AgentApi>,
    backends: Backends,
) -> Result<RunningPipelines, getrandom::Error> {
    let context = PipelineContext {
        db: app.db().clone(),
        agents,
        backends,
        logs: Arc::clone(app.logs()),
        keys: Arc::clone(app.keys()),
        shapes: RunSpecCache::default(),
        lost_after: app.settings().lost_after,
        retry_delay: app.settings().retry_delay,
        job_limits: app.settings().job_limits,
        images: app.settings().images.clone(),
        local_processes: app.settings().local_processes,
        limits: app.settings().limits.clone(),
    };
    // Replicas that were started together must not fetch in step.
    let seed = getrandom::u64()?;
    let mut engine = Engine::new(Arc::new(app.db().clone()), app.hints().clone());
    let settings = Settings::standard(seed).with_lease(app.settings().lock_timeout);
    register_all(&context, &mut EngineRegistry { engine: &mut engine, settings });
    app.metrics().watch(engine.monitor());
    let mut hints = JoinSet::new();
    hints.spawn(receive_hints(app.db().clone(), app.hints().clone()));
    hints.spawn(send_hints(app.db().clone(), app.hints().clone()));
    for (hint, pipeline, delay) in [
        (Hint::RunsDueSoon, Hint::Runs, RUNS_DUE_SOON_DELAY),
        (Hint::InstancesDueSoon, Hint::Instances, INSTANCES_DUE_SOON_DELAY),
    ] {
        hints.spawn(forward_due_soon(app.hints().clone(), hint, pipeline, delay));
    }
    hints.spawn(mark_all_hosts_due(app.db().clone(), app.hints().clone()));
    hints.spawn(wake_headless_classes(app.db().clone(), app.hints().clone()));
    hints.spawn(sampler::run(
        app.db().clone(),
        Arc::clone(&context.agents),
        app.settings().limits.keep.metrics,
    ));
    hints.spawn(log_retention::run(app.db().clone(), Arc::clone(app.logs()), app.settings().keep_logs));
    hints.spawn(retention::run(app.clone()));
    hints.spawn(budgets::watch(app.clone()));
    Ok(RunningPipelines { engine, db: app.db().clone(), _hints: hints })
}

impl RunningPipelines {
    /// Finishes the passes in progress and releases all other rows.
    pub async fn stop(self) {
        self.engine.stop(STOP_GRACE).await;
        // The task that sends hints to the other replicas ends here, so this wakes them for the released rows.
        if let Err(error) = self.db.notify(&[Db::EVERYTHING]).await {
            tracing::debug!(%error, "failed to send a hint to the other replicas");
        }
    }
}

/// Maximum time for passes in progress when the server stops; a call to an agent takes at most 9 s.
const STOP_GRACE: std::time::Duration = std::time::Duration::from_secs(10);

struct EngineRegistry<'a> {
    engine: &'a mut Engine<Db>,
    settings: Settings,
}

impl PipelineRegistry for EngineRegistry<'_> {
    fn add<P: Pipeline>(&mut self, pipeline: P) {
        self.engine.spawn(pipeline, self.settings.clone());
    }

    fn add_batch<P: BatchPipeline>(&mut self, pipeline: P) {
        // One worker: two would compete for the same blocks.
        self.engine.spawn_batch(pipeline, Settings { workers: 1, ..self.settings.clone() });
    }
}

/// A little more than the time after which a row is due that will be due shortly.
const RUNS_DUE_SOON_DELAY: std::time::Duration = std::time::Duration::from_millis(520);
const INSTANCES_DUE_SOON_DELAY: std::time::Duration = std::time::Duration::from_millis(270);

/// Wakes a pipeline when rows are due for which there was a hint. Many of them share one wake-up.
async fn forward_due_soon(hints: Hints, hint: Hint, pipeline: Hint, delay: std::time::Duration) {
    let soon = hints.subscribe(hint.as_str());
    loop {
        soon.wait().await;
        tokio::time::sleep(delay).await;
        // Each replica does this by itself.
        hints.hint_local(pipeline.as_str());
    }
}

/// Marks all hosts as due, because what they reported while no server ran may be lost: each is observed once, and its
/// events are received from then on.
async fn mark_all_hosts_due(db: Db, hints: Hints) {
    match crate::db::agents::mark_hosts_due(&db).await {
        Ok(()) => hints.hint(Hint::Instances.as_str()),
        Err(error) => tracing::debug!(%error, "failed to mark all hosts as due"),
    }
}

/// Interval of the search for waiting jobs that nothing would wake.
const HEADLESS_INTERVAL: std::time::Duration = std::time::Duration::from_secs(30);

/// Wakes classes of waiting jobs in which all are parked: a safety net, at the start and at intervals.
async fn wake_headless_classes(db: Db, hints: Hints) {
    loop {
        match wait_classes::wake_headless(&db).await {
            Ok(true) => {
                tracing::warn!("woke waiting jobs that no other job would have woken");
                hints.hint(Hint::JobsSubmitted.as_str());
            }
            Ok(false) => {}
            Err(error) => tracing::debug!(%error, "failed to search for parked jobs"),
        }
        tokio::time::sleep(HEADLESS_INTERVAL).await;
    }
}

/// Receives hints of other replicas, where the database carries them.
async fn receive_hints(db: Db, hints: Hints) {
    let mut news = db.listen();
    loop {
        match news.recv().await {
            Ok(pipeline) if pipeline == Db::EVERYTHING => hints.hint_all_local(),
            Ok(pipeline) => hints.hint_local(&pipeline),
            // Any hint may have been missed, so all pipelines are woken.
            Err(RecvError::Lagged(_)) => hints.hint_all_local(),
            Err(RecvError::Closed) => return,
        }
    }
}

/// Minimum time between two messages to the other replicas. This server processes its own changes at once; the others
/// are woken in case it cannot.
const HINT_INTERVAL: std::time::Duration = std::time::Duration::from_millis(25);

/// Sends local hints to the other replicas, all that arrived meanwhile in one message. A lost hint only delays them.
async fn send_hints(db: Db, hints: Hints) {
    let mut outgoing = hints.outgoing();
    loop {
        let pipelines = outgoing.next().await;
        if let Err(error) = db.notify(&pipelines).await {
            tracing::debug!(%error, ?pipelines, "failed to send hints to the other replicas");
        }
        tokio::time::sleep(HINT_INTERVAL).await;
    }
}
