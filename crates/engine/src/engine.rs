//! Starts the tasks of each pipeline, restarts them after a crash, and stops them in order.

use std::{sync::Arc, time::Duration};

use parking_lot::Mutex;
use tokio::{
    sync::{mpsc, watch},
    task::{AbortHandle, JoinSet},
    time::{Instant, sleep, timeout, timeout_at},
};

use crate::{
    batch::BatchPipeline,
    fetch::{ClaimTiming, Fetcher, StopSignal},
    finish, heartbeat,
    hint::Hints,
    pipeline::Pipeline,
    runtime::PipelineRuntime,
    settings::Settings,
    status::{Monitor, PipelineMeter, Snapshot},
    store::{LeaseStore, Queue},
    work_queue::WorkQueue,
    worker::{self, WorkerContext},
};

/// The pipelines of one replica.
///
/// Dropping it is an abrupt stop: no task continues, nothing is handed back, and other replicas claim the rows when
/// their locks expire.
pub struct Engine<S> {
    store: Arc<S>,
    hints: Hints,
    meters: Vec<Arc<PipelineMeter>>,
    stop: watch::Sender<Option<Instant>>,
    aborts: AbortHandles,
    pipelines: JoinSet<()>,
}

/// Handles of all tasks of the engine, so that they are aborted at once and not one after the other.
#[derive(Clone, Default)]
struct AbortHandles(Arc<Mutex<Vec<AbortHandle>>>);

impl<S: LeaseStore> Engine<S> {
    pub fn new(store: Arc<S>, hints: Hints) -> Self {
        Self {
            store,
            hints,
            meters: Vec::new(),
            stop: watch::Sender::new(None),
            aborts: AbortHandles::default(),
            pipelines: JoinSet::new(),
        }
    }

    /// Starts a pipeline that processes its rows one by one.
    pub fn spawn<P: Pipeline>(&mut self, pipeline: P, settings: Settings) {
        let queue = pipeline.queue();
        let pipeline = Arc::new(pipeline);
        let work = move |context| -> WorkerFuture { Box::pin(worker::run(context, pipeline.clone())) };
        self.supervise(queue, settings, ClaimTiming::Ahead, work);
    }

    /// Starts a pipeline that processes all rows of a claim at once.
    pub fn spawn_batch<P: BatchPipeline>(&mut self, pipeline: P, settings: Settings) {
        let queue = pipeline.queue();
        let pipeline = Arc::new(pipeline);
        let work =
            move |context| -> WorkerFuture { Box::pin(worker::run_batches(context, pipeline.clone())) };
        self.supervise(queue, settings, ClaimTiming::BetweenBatches, work);
    }

    pub fn hints(&self) -> &Hints {
        &self.hints
    }

    /// Returns one snapshot per pipeline, in the order in which they were started.
    pub fn status(&self) -> Vec<Snapshot> {
        self.monitor().snapshots()
    }

    /// Returns a view of the pipelines started so far, for callers that do not own the engine.
    pub fn monitor(&self) -> Monitor {
        Monitor::new(self.meters.clone())
    }

    /// Stops the engine: no more claims, queued rows are handed back at once, rows in progress are finished within
    /// `grace` or dropped and handed back. After it returns no task of this engine runs.
    pub async fn stop(mut self, grace: Duration) {
        self.stop.send_replace(Some(Instant::now() + grace));
        while self.pipelines.join_next().await.is_some() {}
    }

    fn supervise(&mut self, queue: Queue, settings: Settings, claims: ClaimTiming, work: impl WorkerFn<S>) {
        debug_assert!(settings.is_valid(), "a lease must outlive its renewal: {settings:?}");
        let meter = Arc::new(PipelineMeter::new(queue.pipeline));
        self.meters.push(meter.clone());
        let runtime =
            Arc::new(PipelineRuntime::new(self.store.clone(), queue, settings, self.hints.clone(), meter));
        let aborts = self.aborts.clone();
        let stop = self.stop.subscribe();
        self.aborts.add(self.pipelines.spawn(supervise(runtime, claims, work, stop, aborts)));
    }
}

impl<S> Drop for Engine<S> {
    fn drop(&mut self) {
        for task in self.aborts.0.lock().drain(..) {
            task.abort();
        }
    }
}

impl AbortHandles {
    fn add(&self, task: AbortHandle) {
        let mut tasks = self.0.lock();
        tasks.retain(|task| !task.is_finished());
        tasks.push(task);
    }
}

type WorkerFuture = std::pin::Pin<Box<dyn Future<Output = ()> + Send>>;

/// Function that a worker of the pipeline runs with its context.
trait WorkerFn<S>: Fn(WorkerContext<S>) -> WorkerFuture + Send + Sync + 'static {}

impl<S, F: Fn(WorkerContext<S>) -> WorkerFuture + Send + Sync + 'static> WorkerFn<S> for F {}

/// Tasks of one pipeline. Dropping them aborts them.
struct PipelineTasks {
    queue: Arc<WorkQueue>,
    fetcher: JoinSet<()>,
    workers: JoinSet<()>,
    finisher: JoinSet<()>,
    heartbeater: JoinSet<()>,
}

impl PipelineTasks {
    fn start<S: LeaseStore>(
        runtime: &Arc<PipelineRuntime<S>>,
        claims: ClaimTiming,
        work: &impl WorkerFn<S>,
        stop: StopSignal,
        aborts: &AbortHandles,
    ) -> Self {
        let line = runtime.new_work_queue();
        let mut tasks = Self {
            queue: line.clone(),
            fetcher: JoinSet::new(),
            workers: JoinSet::new(),
            finisher: JoinSet::new(),
            heartbeater: JoinSet::new(),
        };
        // Workers wait for the finisher only if it is a full batch behind.
        let (out, inbox) = mpsc::channel(runtime.settings.finish_max.max(1));
        aborts.add(tasks.finisher.spawn(finish::run(runtime.clone(), inbox)));
        aborts.add(tasks.heartbeater.spawn(heartbeat::run(runtime.clone())));
        for _ in 0..runtime.settings.workers.max(1) {
            let context =
                WorkerContext { runtime: runtime.clone(), queue: line.clone(), finishes: out.clone() };
            aborts.add(tasks.workers.spawn(work(context)));
        }
        let hints = runtime.hints.subscribe(runtime.queue.pipeline);
        aborts.add(tasks.fetcher.spawn(Fetcher::new(runtime.clone(), line, hints, stop, claims).run()));
        tasks
    }

    /// Waits for a task to end, which none should. Returns which one ended and how.
    async fn next_exit(&mut self) -> (&'static str, String) {
        let (which, ended) = tokio::select! {
            biased;
            ended = self.fetcher.join_next() => ("fetcher", ended),
            ended = self.workers.join_next() => ("worker", ended),
            ended = self.finisher.join_next() => ("finisher", ended),
            ended = self.heartbeater.join_next() => ("heartbeater", ended),
        };
        let how = match ended {
            Some(Err(error)) => error.to_string(),
            Some(Ok(())) | None => "ended".to_owned(),
        };
        (which, how)
    }

    /// Waits until the tasks have ended: their rows may only be handed back after that.
    async fn shut_down(mut self) {
        for tasks in [&mut self.fetcher, &mut self.workers, &mut self.finisher, &mut self.heartbeater] {
            tasks.shutdown().await;
        }
    }
}

async fn supervise<S: LeaseStore>(
    runtime: Arc<PipelineRuntime<S>>,
    claims: ClaimTiming,
    work: impl WorkerFn<S>,
    mut stop: StopSignal,
    aborts: AbortHandles,
) {
    loop {
        let mut tasks = PipelineTasks::start(&runtime, claims, &work, stop.clone(), &aborts);
        let (which, how) = tokio::select! {
            biased;
            deadline = wait_for_stop(&mut stop) => return stop_gracefully(&runtime, tasks, deadline).await,
            crashed = tasks.next_exit() => crashed,
        };
        // A task that ended because of the stop signal did not crash.
        let ordered = *stop.borrow();
        if let Some(deadline) = ordered {
            return stop_gracefully(&runtime, tasks, deadline).await;
        }
        tracing::error!(pipeline = runtime.queue.pipeline, task = which, error = how, "pipeline crashed");
        runtime.meter.restarts.add(1);
        tasks.shut_down().await;
        runtime.hand_back(runtime.meter.leases.take_all()).await;
        tokio::select! {
            biased;
            _ = wait_for_stop(&mut stop) => return,
            () = sleep(runtime.settings.restart_delay) => {}
        }
    }
}

/// Waits for the stop signal and returns its deadline. A dropped sender counts as a signal.
async fn wait_for_stop(stop: &mut StopSignal) -> Instant {
    match stop.wait_for(Option::is_some).await {
        Ok(deadline) => deadline.unwrap_or_else(Instant::now),
        Err(_) => Instant::now(),
    }
}

async fn stop_gracefully<S: LeaseStore>(
    runtime: &PipelineRuntime<S>,
    mut tasks: PipelineTasks,
    deadline: Instant,
) {
    // No worker starts another row, even if the fetcher still adds some.
    tasks.queue.close();
    runtime.hand_back(tasks.queue.drain()).await;
    // A claim may be in progress; wait for it and hand its rows back too.
    let _ = timeout_at(deadline, tasks.fetcher.join_next()).await;
    tasks.fetcher.shutdown().await;
    runtime.hand_back(tasks.queue.drain()).await;
    let _ = timeout_at(deadline, async { while tasks.workers.join_next().await.is_some() {} }).await;
    tasks.workers.shutdown().await;
    // Without workers the finisher has no senders left: it completes its batch and ends.
    let _ = timeout(runtime.settings.lease_margin, tasks.finisher.join_next()).await;
    tasks.shut_down().await;
    runtime.hand_back(runtime.meter.leases.take_all()).await;
}
