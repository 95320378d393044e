//! A store with injectable faults and a pipeline that tests control.

use std::{
    fmt,
    future::{Future, pending},
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst},
    },
    time::Duration,
};

use parking_lot::Mutex;
use tokio::time::{Instant, sleep};
use uuid::Uuid;
use windlass_engine::{
    ApplyOutcome, Claim, DbTime, Engine, Hints, Lease, LeaseKey, LeaseStore, MemoryStore, Pipeline, Queue,
    RelatedLock, RelatedLockOutcome, Settings, StoreError, memory::Row,
};

pub(crate) const TABLE: &str = "toys";
pub(crate) const QUEUE: Queue = Queue { pipeline: "toys", table: TABLE, statuses: &["new"] };

pub(crate) fn secs(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

pub(crate) fn millis(millis: u64) -> Duration {
    Duration::from_millis(millis)
}

pub(crate) fn id(number: u64) -> Uuid {
    Uuid::from_u64_pair(number, 0)
}

/// One replica's connection to the common store, with separate faults.
pub(crate) struct FaultyStore {
    pub(crate) inner: Arc<MemoryStore>,
    pub(crate) fails: AtomicBool,
    pub(crate) hangs: AtomicBool,
    pub(crate) refuses_extend: AtomicBool,
    pub(crate) panics_at_claim: AtomicBool,
    pub(crate) claim_takes: Mutex<Duration>,
    pub(crate) extends: AtomicUsize,
    pub(crate) finishes: AtomicUsize,
    pub(crate) claimed_at: Mutex<Vec<Instant>>,
}

impl FaultyStore {
    pub(crate) fn new(inner: Arc<MemoryStore>) -> Arc<Self> {
        Arc::new(Self {
            inner,
            fails: AtomicBool::default(),
            hangs: AtomicBool::default(),
            refuses_extend: AtomicBool::default(),
            panics_at_claim: AtomicBool::default(),
            claim_takes: Mutex::default(),
            extends: AtomicUsize::default(),
            finishes: AtomicUsize::default(),
            claimed_at: Mutex::default(),
        })
    }

    async fn inject_fault(&self) -> Result<(), StoreError> {
        if self.hangs.load(SeqCst) {
            pending::<()>().await;
        }
        // Every call has some latency, as in production.
        sleep(Duration::from_micros(100)).await;
        if self.fails.load(SeqCst) {
            return Err(StoreError::Failed {
                what: "reach the database",
                source: Box::new(TestError("down")),
            });
        }
        Ok(())
    }
}

impl LeaseStore for FaultyStore {
    async fn claim(&self, queue: &Queue, limit: usize, ttl: Duration) -> Result<Claim, StoreError> {
        let requested_at = Instant::now();
        self.claimed_at.lock().push(requested_at);
        assert!(!self.panics_at_claim.swap(false, SeqCst), "told to panic");
        let takes = *self.claim_takes.lock();
        sleep(takes).await;
        self.inject_fault().await?;
        let mut claim = self.inner.claim(queue, limit, ttl).await?;
        claim.leases.iter_mut().for_each(|lease| lease.requested_at = requested_at);
        Ok(claim)
    }

    async fn extend(&self, queue: &Queue, held: &[LeaseKey], ttl: Duration) -> Result<Vec<Uuid>, StoreError> {
        self.extends.fetch_add(1, SeqCst);
        self.inject_fault().await?;
        if self.refuses_extend.load(SeqCst) {
            return Ok(Vec::new());
        }
        self.inner.extend(queue, held, ttl).await
    }

    async fn finish(
        &self,
        queue: &Queue,
        done: &[(LeaseKey, Option<Duration>)],
    ) -> Result<Vec<Uuid>, StoreError> {
        self.finishes.fetch_add(1, SeqCst);
        self.inject_fault().await?;
        self.inner.finish(queue, done).await
    }

    async fn mark_due(&self, table: &'static str, ids: &[Uuid]) -> Result<(), StoreError> {
        self.inject_fault().await?;
        self.inner.mark_due(table, ids).await
    }

    async fn hand_back(&self, queue: &Queue, held: &[LeaseKey]) -> Result<(), StoreError> {
        self.inject_fault().await?;
        self.inner.hand_back(queue, held).await
    }

    async fn reset(&self, queue: &Queue, held: LeaseKey) -> Result<bool, StoreError> {
        self.inject_fault().await?;
        self.inner.reset(queue, held).await
    }

    async fn lock_related(&self, lock: RelatedLock<'_>) -> Result<RelatedLockOutcome, StoreError> {
        self.inject_fault().await?;
        self.inner.lock_related(lock).await
    }

    async fn unlock_related(&self, table: &'static str, held: &[LeaseKey]) -> Result<(), StoreError> {
        self.inject_fault().await?;
        self.inner.unlock_related(table, held).await
    }
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct TestError(pub(crate) &'static str);

impl fmt::Display for TestError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.0)
    }
}

impl std::error::Error for TestError {}

/// Event of a pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PassEvent {
    Started,
    /// The pass was dropped before its end.
    Dropped,
    Ended,
}

#[derive(Clone, Debug)]
pub(crate) struct JournalEntry {
    pub(crate) at: Instant,
    pub(crate) event: PassEvent,
    pub(crate) id: Uuid,
    pub(crate) epoch: i64,
}

#[derive(Clone, Default)]
pub(crate) struct Journal(Arc<Mutex<Vec<JournalEntry>>>);

impl Journal {
    fn record(&self, what: PassEvent, lease: &Lease) {
        self.0.lock().push(JournalEntry {
            at: Instant::now(),
            event: what,
            id: lease.id,
            epoch: lease.epoch,
        });
    }

    pub(crate) fn entries(&self) -> Vec<JournalEntry> {
        self.0.lock().clone()
    }

    pub(crate) fn times(&self, what: PassEvent, id: Uuid) -> Vec<Instant> {
        self.0.lock().iter().filter(|e| e.event == what && e.id == id).map(|e| e.at).collect()
    }

    pub(crate) fn count(&self, what: PassEvent) -> usize {
        self.0.lock().iter().filter(|e| e.event == what).count()
    }

    /// Records the start of a pass, and its end however it comes.
    pub(crate) fn start_pass(&self, lease: &Lease) -> PassGuard {
        self.record(PassEvent::Started, lease);
        PassGuard { journal: self.clone(), lease: lease.clone(), has_ended: false }
    }
}

pub(crate) struct PassGuard {
    journal: Journal,
    lease: Lease,
    has_ended: bool,
}

impl PassGuard {
    pub(crate) fn end(mut self) {
        self.has_ended = true;
        self.journal.record(PassEvent::Ended, &self.lease);
    }
}

impl Drop for PassGuard {
    fn drop(&mut self) {
        if !self.has_ended {
            self.journal.record(PassEvent::Dropped, &self.lease);
        }
    }
}

type ActFuture = Pin<Box<dyn Future<Output = Result<(), TestError>> + Send>>;
type ActFn = Box<dyn Fn(Lease) -> ActFuture + Send + Sync>;
type ApplyFn = Box<dyn Fn(&MemoryStore, &Lease) -> ApplyOutcome + Send + Sync>;

/// Marks its rows done, unless configured otherwise.
pub(crate) struct TestPipeline {
    pub(crate) queue: Queue,
    pub(crate) store: Arc<FaultyStore>,
    pub(crate) journal: Journal,
    pub(crate) act: ActFn,
    pub(crate) apply_takes: Duration,
    pub(crate) apply: ApplyFn,
}

impl TestPipeline {
    pub(crate) fn new(store: &Arc<FaultyStore>, journal: &Journal) -> Self {
        Self {
            queue: QUEUE,
            store: store.clone(),
            journal: journal.clone(),
            act: Box::new(|_| Box::pin(async { Ok(()) })),
            apply_takes: Duration::ZERO,
            apply: Box::new(mark_done),
        }
    }

    pub(crate) fn with_queue(mut self, queue: Queue) -> Self {
        self.queue = queue;
        self
    }

    pub(crate) fn with_act<F: Future<Output = Result<(), TestError>> + Send + 'static>(
        mut self,
        act: impl Fn(Lease) -> F + Send + Sync + 'static,
    ) -> Self {
        self.act = Box::new(move |lease| Box::pin(act(lease)));
        self
    }

    pub(crate) fn with_apply(
        mut self,
        apply: impl Fn(&MemoryStore, &Lease) -> ApplyOutcome + Send + Sync + 'static,
    ) -> Self {
        self.apply = Box::new(apply);
        self
    }
}

pub(crate) fn mark_done(store: &MemoryStore, lease: &Lease) -> ApplyOutcome {
    if store.apply(TABLE, lease.key(), |row, _| row.status = "done".to_owned()) {
        ApplyOutcome::Written { due_in_us: None, wake: Vec::new() }
    } else {
        ApplyOutcome::LeaseLost
    }
}

impl Pipeline for TestPipeline {
    type Row = (Row, PassGuard);
    type Observation = ();
    type Plan = ();
    type Error = TestError;

    fn queue(&self) -> Queue {
        self.queue
    }

    async fn load(&self, lease: &Lease) -> Result<Option<(Row, PassGuard)>, TestError> {
        Ok(self.store.inner.row(self.queue.table, lease.id).map(|row| (row, self.journal.start_pass(lease))))
    }

    async fn observe(&self, _lease: &Lease, _row: &(Row, PassGuard)) -> Result<(), TestError> {
        Ok(())
    }

    fn decide(_row: &(Row, PassGuard), (): (), _now: DbTime) {}

    async fn act(&self, lease: &Lease, _row: &(Row, PassGuard), _plan: &mut ()) -> Result<(), TestError> {
        (self.act)(lease.clone()).await
    }

    async fn apply(
        &self,
        lease: &Lease,
        (_, visitor): (Row, PassGuard),
        _plan: (),
    ) -> Result<ApplyOutcome, TestError> {
        sleep(self.apply_takes).await;
        self.store.inject_fault().await.map_err(|_| TestError("apply"))?;
        let applied = (self.apply)(&self.store.inner, lease);
        visitor.end();
        Ok(applied)
    }
}

/// A store with rows and a journal of their passes; replicas are started on it.
pub(crate) struct TestEnv {
    pub(crate) store: Arc<MemoryStore>,
    pub(crate) journal: Journal,
    pub(crate) hints: Hints,
}

impl TestEnv {
    pub(crate) fn new(rows: u64) -> Self {
        let lab =
            Self { store: Arc::new(MemoryStore::new()), journal: Journal::default(), hints: Hints::new() };
        (0..rows).for_each(|number| lab.insert(number));
        lab
    }

    pub(crate) fn insert(&self, number: u64) {
        let row = Row::new(id(number), "new", self.store.now());
        self.store.put(TABLE, row);
    }

    pub(crate) fn row(&self, number: u64) -> Row {
        self.store.row(TABLE, id(number)).unwrap()
    }

    /// Returns a store connection for one replica.
    pub(crate) fn new_store(&self) -> Arc<FaultyStore> {
        FaultyStore::new(self.store.clone())
    }

    pub(crate) fn pipeline(&self, store: &Arc<FaultyStore>) -> TestPipeline {
        TestPipeline::new(store, &self.journal)
    }

    pub(crate) fn start(
        &self,
        store: &Arc<FaultyStore>,
        toy: TestPipeline,
        settings: Settings,
    ) -> Engine<FaultyStore> {
        let mut engine = Engine::new(store.clone(), self.hints.clone());
        engine.spawn(toy, settings);
        engine
    }

    pub(crate) fn done_count(&self) -> usize {
        self.store.rows(TABLE).iter().filter(|row| row.status == "done").count()
    }

    pub(crate) fn locked_count(&self) -> usize {
        self.store.rows(TABLE).iter().filter(|row| row.lock_token.is_some()).count()
    }

    /// Waits for a state; returns how long it took.
    #[track_caller]
    pub(crate) fn wait_until(
        &self,
        limit: Duration,
        what: &'static str,
        is_so: impl Fn(&Self) -> bool,
    ) -> impl Future<Output = Duration> {
        let place = std::panic::Location::caller();
        async move {
            let since = Instant::now();
            // Virtual time is free, checks are not.
            let step = if limit >= secs(100) { secs(1) } else { millis(1) };
            while !is_so(self) {
                assert!(since.elapsed() < limit, "{place}: not within {limit:?}: {what}");
                sleep(step).await;
            }
            since.elapsed()
        }
    }
}

pub(crate) fn standard_settings() -> Settings {
    Settings::standard(7)
}
