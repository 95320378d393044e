//! A store that can be told to misbehave and a pipeline that does what a test says.

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
    Applied, Claim, DbTime, Engine, Held, Hints, Lease, LeaseStore, MemoryStore, Pipeline, Queue, Related,
    RelatedLock, Settings, StoreError, memory::Row,
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

/// One replica's way to the common store, with faults of its own.
pub(crate) struct Fickle {
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

impl Fickle {
    pub(crate) fn over(inner: Arc<MemoryStore>) -> Arc<Self> {
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

    async fn mood(&self) -> Result<(), StoreError> {
        if self.hangs.load(SeqCst) {
            pending::<()>().await;
        }
        // Every call takes a moment, as it does in life.
        sleep(Duration::from_micros(100)).await;
        if self.fails.load(SeqCst) {
            return Err(StoreError::Failed { what: "reach the database", source: Box::new(Oops("down")) });
        }
        Ok(())
    }
}

impl LeaseStore for Fickle {
    async fn claim(&self, queue: &Queue, limit: usize, ttl: Duration) -> Result<Claim, StoreError> {
        let asked_at = Instant::now();
        self.claimed_at.lock().push(asked_at);
        assert!(!self.panics_at_claim.swap(false, SeqCst), "told to panic");
        let takes = *self.claim_takes.lock();
        sleep(takes).await;
        self.mood().await?;
        let mut claim = self.inner.claim(queue, limit, ttl).await?;
        claim.leases.iter_mut().for_each(|lease| lease.asked_at = asked_at);
        Ok(claim)
    }

    async fn extend(&self, queue: &Queue, held: &[Held], ttl: Duration) -> Result<Vec<Uuid>, StoreError> {
        self.extends.fetch_add(1, SeqCst);
        self.mood().await?;
        if self.refuses_extend.load(SeqCst) {
            return Ok(Vec::new());
        }
        self.inner.extend(queue, held, ttl).await
    }

    async fn finish(
        &self,
        queue: &Queue,
        done: &[(Held, Option<Duration>)],
    ) -> Result<Vec<Uuid>, StoreError> {
        self.finishes.fetch_add(1, SeqCst);
        self.mood().await?;
        self.inner.finish(queue, done).await
    }

    async fn poke(&self, table: &'static str, ids: &[Uuid]) -> Result<(), StoreError> {
        self.mood().await?;
        self.inner.poke(table, ids).await
    }

    async fn hand_back(&self, queue: &Queue, held: &[Held]) -> Result<(), StoreError> {
        self.mood().await?;
        self.inner.hand_back(queue, held).await
    }

    async fn reset(&self, queue: &Queue, held: Held) -> Result<bool, StoreError> {
        self.mood().await?;
        self.inner.reset(queue, held).await
    }

    async fn lock_related(&self, lock: RelatedLock<'_>) -> Result<Related, StoreError> {
        self.mood().await?;
        self.inner.lock_related(lock).await
    }

    async fn unlock_related(&self, table: &'static str, held: &[Held]) -> Result<(), StoreError> {
        self.mood().await?;
        self.inner.unlock_related(table, held).await
    }
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct Oops(pub(crate) &'static str);

impl fmt::Display for Oops {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.0)
    }
}

impl std::error::Error for Oops {}

/// What happened to which row when.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum What {
    Started,
    /// The pass was dropped before it came to its end.
    Dropped,
    Ended,
}

#[derive(Clone, Debug)]
pub(crate) struct Entry {
    pub(crate) at: Instant,
    pub(crate) what: What,
    pub(crate) id: Uuid,
    pub(crate) epoch: i64,
}

#[derive(Clone, Default)]
pub(crate) struct Journal(Arc<Mutex<Vec<Entry>>>);

impl Journal {
    fn note(&self, what: What, lease: &Lease) {
        self.0.lock().push(Entry { at: Instant::now(), what, id: lease.id, epoch: lease.epoch });
    }

    pub(crate) fn entries(&self) -> Vec<Entry> {
        self.0.lock().clone()
    }

    pub(crate) fn times(&self, what: What, id: Uuid) -> Vec<Instant> {
        self.0.lock().iter().filter(|e| e.what == what && e.id == id).map(|e| e.at).collect()
    }

    pub(crate) fn count(&self, what: What) -> usize {
        self.0.lock().iter().filter(|e| e.what == what).count()
    }

    /// Notes the end of a visit, however it comes.
    pub(crate) fn visit(&self, lease: &Lease) -> Visit {
        self.note(What::Started, lease);
        Visit { journal: self.clone(), lease: lease.clone(), is_over: false }
    }
}

pub(crate) struct Visit {
    journal: Journal,
    lease: Lease,
    is_over: bool,
}

impl Visit {
    pub(crate) fn end(mut self) {
        self.is_over = true;
        self.journal.note(What::Ended, &self.lease);
    }
}

impl Drop for Visit {
    fn drop(&mut self) {
        if !self.is_over {
            self.journal.note(What::Dropped, &self.lease);
        }
    }
}

type Acting = Pin<Box<dyn Future<Output = Result<(), Oops>> + Send>>;
type Act = Box<dyn Fn(Lease) -> Acting + Send + Sync>;
type Apply = Box<dyn Fn(&MemoryStore, &Lease) -> Applied + Send + Sync>;

/// Marks its rows done, unless told otherwise.
pub(crate) struct Toy {
    pub(crate) queue: Queue,
    pub(crate) store: Arc<Fickle>,
    pub(crate) journal: Journal,
    pub(crate) act: Act,
    pub(crate) apply_takes: Duration,
    pub(crate) apply: Apply,
}

impl Toy {
    pub(crate) fn new(store: &Arc<Fickle>, journal: &Journal) -> Self {
        Self {
            queue: QUEUE,
            store: store.clone(),
            journal: journal.clone(),
            act: Box::new(|_| Box::pin(async { Ok(()) })),
            apply_takes: Duration::ZERO,
            apply: Box::new(done),
        }
    }

    pub(crate) fn on(mut self, queue: Queue) -> Self {
        self.queue = queue;
        self
    }

    pub(crate) fn acting<F: Future<Output = Result<(), Oops>> + Send + 'static>(
        mut self,
        act: impl Fn(Lease) -> F + Send + Sync + 'static,
    ) -> Self {
        self.act = Box::new(move |lease| Box::pin(act(lease)));
        self
    }

    pub(crate) fn applying(
        mut self,
        apply: impl Fn(&MemoryStore, &Lease) -> Applied + Send + Sync + 'static,
    ) -> Self {
        self.apply = Box::new(apply);
        self
    }
}

pub(crate) fn done(store: &MemoryStore, lease: &Lease) -> Applied {
    if store.apply(TABLE, lease.held(), |row, _| row.status = "done".to_owned()) {
        Applied::Written { due_in_us: None, wake: Vec::new() }
    } else {
        Applied::LeaseLost
    }
}

impl Pipeline for Toy {
    type Row = (Row, Visit);
    type Seen = ();
    type Plan = ();
    type Error = Oops;

    fn queue(&self) -> Queue {
        self.queue
    }

    async fn load(&self, lease: &Lease) -> Result<Option<(Row, Visit)>, Oops> {
        Ok(self.store.inner.row(self.queue.table, lease.id).map(|row| (row, self.journal.visit(lease))))
    }

    async fn observe(&self, _lease: &Lease, _row: &(Row, Visit)) -> Result<(), Oops> {
        Ok(())
    }

    fn decide(_row: &(Row, Visit), (): (), _now: DbTime) {}

    async fn act(&self, lease: &Lease, _row: &(Row, Visit), _plan: &mut ()) -> Result<(), Oops> {
        (self.act)(lease.clone()).await
    }

    async fn apply(&self, lease: &Lease, (_, visit): (Row, Visit), _plan: ()) -> Result<Applied, Oops> {
        sleep(self.apply_takes).await;
        self.store.mood().await.map_err(|_| Oops("apply"))?;
        let applied = (self.apply)(&self.store.inner, lease);
        visit.end();
        Ok(applied)
    }
}

/// A store with rows and what was seen of them; replicas are started on it.
pub(crate) struct Lab {
    pub(crate) store: Arc<MemoryStore>,
    pub(crate) journal: Journal,
    pub(crate) hints: Hints,
}

impl Lab {
    pub(crate) fn new(rows: u64) -> Self {
        let lab =
            Self { store: Arc::new(MemoryStore::new()), journal: Journal::default(), hints: Hints::new() };
        (0..rows).for_each(|number| lab.put(number));
        lab
    }

    pub(crate) fn put(&self, number: u64) {
        let row = Row::new(id(number), "new", self.store.now());
        self.store.put(TABLE, row);
    }

    pub(crate) fn row(&self, number: u64) -> Row {
        self.store.row(TABLE, id(number)).unwrap()
    }

    /// A way to the store for one replica.
    pub(crate) fn way(&self) -> Arc<Fickle> {
        Fickle::over(self.store.clone())
    }

    pub(crate) fn toy(&self, way: &Arc<Fickle>) -> Toy {
        Toy::new(way, &self.journal)
    }

    pub(crate) fn start(&self, way: &Arc<Fickle>, toy: Toy, settings: Settings) -> Engine<Fickle> {
        let mut engine = Engine::new(way.clone(), self.hints.clone());
        engine.spawn(toy, settings);
        engine
    }

    pub(crate) fn done(&self) -> usize {
        self.store.rows(TABLE).iter().filter(|row| row.status == "done").count()
    }

    pub(crate) fn held(&self) -> usize {
        self.store.rows(TABLE).iter().filter(|row| row.lock_token.is_some()).count()
    }

    /// Waits for a state; answers how long it took.
    #[track_caller]
    pub(crate) fn until(
        &self,
        limit: Duration,
        what: &'static str,
        is_so: impl Fn(&Self) -> bool,
    ) -> impl Future<Output = Duration> {
        let place = std::panic::Location::caller();
        async move {
            let since = Instant::now();
            // Virtual time is free, looking is not.
            let step = if limit >= secs(100) { secs(1) } else { millis(1) };
            while !is_so(self) {
                assert!(since.elapsed() < limit, "{place}: not within {limit:?}: {what}");
                sleep(step).await;
            }
            since.elapsed()
        }
    }
}

pub(crate) fn standard() -> Settings {
    Settings::standard(7)
}
