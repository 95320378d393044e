//! One lasting connection per instance, made when somebody needs it and shared by all calls.
//!
//! An attempt is made once for everybody who waits, and goes on when they give up: a host that is slow to let us in
//! is let in to by the second call. After a failure the next attempt waits, longer each time; whoever asks meanwhile
//! learns at once why the last one failed. What is known of an instance is read anew for each attempt.

use std::{
    collections::HashMap,
    path::Path,
    sync::{
        Arc, OnceLock, Weak,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use futures_util::{
    FutureExt,
    future::{BoxFuture, Shared},
};
use parking_lot::Mutex;
use tokio::{
    task::AbortHandle,
    time::{Instant, timeout},
};
use windlass_api::{
    agent::client::{Shim, ShimError},
    unix,
};
use windlass_backend::{Machine, Reach};
use windlass_model::{causes::chain, id::InstanceId};
use windlass_tunnel::{Backoff, Connection, Hosts, TunnelError};

use super::{
    ear, enrol,
    site::{self, SiteError},
    wire::Inner,
};
use crate::db::agents as rows;

/// A shim that lets us in says hello in this time.
const HELLO_WITHIN: Duration = Duration::from_secs(5);
/// One attempt, SSH and all hosts on the way included.
const ATTEMPT_WITHIN: Duration = Duration::from_secs(40);
const BACKOFF: Backoff = Backoff { first: Duration::from_millis(200), last: Duration::from_secs(10) };
/// A connection nobody has used for so long is let go: the instance may be over, and another replica saw it end.
const UNUSED_MAX: Duration = Duration::from_secs(300);
/// How often a loss is told; a host that takes and drops connections must not keep the pipelines busy.
const LOSS_TOLD_EVERY: Duration = Duration::from_secs(5);

/// Why there is no connection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Why {
    /// It may come.
    Silent(String),
    /// It will not before a person has looked.
    Barred(String),
}

/// A failed attempt, and when the next one may be made.
pub(super) struct Setback {
    pub(super) why: Why,
    next: Next,
}

pub(super) enum Next {
    /// Nothing was tried that costs anything.
    AtOnce,
    /// Longer with each failure.
    Backoff,
    /// The connections below have their own patience.
    After(Duration),
}

/// A live connection.
pub(super) struct Line {
    pub(super) shim: Shim,
    /// Its events come.
    pub(super) hears: AtomicBool,
    ear: OnceLock<AbortHandle>,
    /// Must live as long as the channel through it.
    _below: Option<Arc<Connection>>,
}

impl Drop for Line {
    fn drop(&mut self) {
        if let Some(ear) = self.ear.get() {
            ear.abort();
        }
    }
}

type Attempt = Shared<BoxFuture<'static, Result<Arc<Line>, Why>>>;

enum Way {
    None,
    Trying(Attempt),
    Live(Arc<Line>),
}

/// What is kept of one instance.
pub(super) struct Slot {
    pub(super) instance: InstanceId,
    state: Mutex<State>,
    /// The start of the shim and the number of the last event that was dealt with.
    pub(super) heard: Mutex<Option<(String, u64)>>,
}

struct State {
    way: Way,
    failures: u32,
    failed: Option<(Instant, Why)>,
    used: Instant,
    /// A connection was lost and none came since.
    lost: bool,
    loss_told: Option<Instant>,
}

impl Slot {
    fn new(instance: InstanceId) -> Self {
        let state = State {
            way: Way::None,
            failures: 0,
            failed: None,
            used: Instant::now(),
            lost: false,
            loss_told: None,
        };
        Self { instance, state: Mutex::new(state), heard: Mutex::default() }
    }

    /// Gives this connection up, if it is still the one in use. Whether the loss is to be told.
    pub(super) fn lose(&self, line: &Weak<Line>) -> bool {
        let mut state = self.state.lock();
        match &state.way {
            Way::Live(live) if Weak::ptr_eq(&Arc::downgrade(live), line) => {}
            Way::Live(_) | Way::Trying(_) | Way::None => return false,
        }
        state.lose()
    }
}

impl State {
    /// Whether the loss is to be told.
    fn lose(&mut self) -> bool {
        self.way = Way::None;
        self.lost = true;
        let is_due = self.loss_told.is_none_or(|at| at.elapsed() >= LOSS_TOLD_EVERY);
        if is_due {
            self.loss_told = Some(Instant::now());
        }
        is_due
    }
}

/// The connections to all instances.
pub(super) struct Lines {
    slots: Mutex<HashMap<InstanceId, Arc<Slot>>>,
    hosts: Arc<Hosts<InstanceId>>,
}

impl Lines {
    pub(super) fn new(hosts: Arc<Hosts<InstanceId>>) -> Self {
        Self { slots: Mutex::default(), hosts }
    }

    pub(super) fn hosts(&self) -> &Hosts<InstanceId> {
        &self.hosts
    }

    pub(super) fn forget(&self, instance: InstanceId) {
        self.slots.lock().remove(&instance);
        self.hosts.forget(&instance);
    }

    /// Lets go of what nobody uses.
    pub(super) fn sweep(&self) {
        let unused: Vec<InstanceId> = {
            let slots = self.slots.lock();
            let old = slots.values().filter(|slot| slot.state.lock().used.elapsed() > UNUSED_MAX);
            old.map(|slot| slot.instance).collect()
        };
        for instance in unused {
            self.forget(instance);
        }
    }

    /// How many connections live.
    pub(super) fn live(&self) -> usize {
        let slots = self.slots.lock();
        slots.values().filter(|slot| matches!(slot.state.lock().way, Way::Live(_))).count()
    }

    pub(super) fn hears(&self, instance: InstanceId) -> bool {
        let Some(slot) = self.slots.lock().get(&instance).cloned() else { return false };
        let state = slot.state.lock();
        matches!(&state.way, Way::Live(line) if line.hears.load(Ordering::Relaxed) && !line.shim.is_closed())
    }

    fn slot(&self, instance: InstanceId) -> Arc<Slot> {
        let mut slots = self.slots.lock();
        Arc::clone(slots.entry(instance).or_insert_with(|| Arc::new(Slot::new(instance))))
    }
}

impl Inner {
    /// The connection, made if need be, and whether it was there before.
    pub(super) async fn line(self: &Arc<Self>, instance: InstanceId) -> Result<(Arc<Line>, bool), Why> {
        let attempt = {
            let slot = self.lines.slot(instance);
            let mut state = slot.state.lock();
            state.used = Instant::now();
            match &state.way {
                Way::Live(line) if !line.shim.is_closed() => return Ok((Arc::clone(line), true)),
                Way::Trying(attempt) => attempt.clone(),
                Way::Live(_) | Way::None => {
                    if matches!(state.way, Way::Live(_)) && state.lose() {
                        tokio::spawn(ear::look_at(Arc::downgrade(self), instance));
                    }
                    if let Some((until, why)) = &state.failed
                        && Instant::now() < *until
                    {
                        return Err(why.clone());
                    }
                    let attempt = attempt(Arc::clone(self), Arc::clone(&slot));
                    state.way = Way::Trying(attempt.clone());
                    attempt
                }
            }
        };
        attempt.await.map(|line| (line, false))
    }

    /// A call found that nothing comes over this connection any more.
    pub(super) fn lost(self: &Arc<Self>, instance: InstanceId, line: &Arc<Line>) {
        if self.lines.slot(instance).lose(&Arc::downgrade(line)) {
            tokio::spawn(ear::look_at(Arc::downgrade(self), instance));
        }
    }

    async fn reach(&self, instance: InstanceId) -> Result<(Shim, Option<Arc<Connection>>), Setback> {
        let (reach, credential) = self.way(instance).await?;
        match reach {
            Reach::Socket { path } => Ok((over_socket(&path, &credential).await?, None)),
            Reach::Ssh { socket } => self.over_ssh(instance, &socket, &credential).await,
            Reach::Queue => Err(in_queue()),
        }
    }

    /// How to come to an instance's agent, and what it asks for at its door.
    pub(super) async fn way(&self, instance: InstanceId) -> Result<(Reach, String), Setback> {
        let silent = |said: String| Setback { why: Why::Silent(said), next: Next::AtOnce };
        let found = rows::reach(&self.db, instance).await.map_err(|error| silent(chain(&error)))?;
        let (machine, finished) = found.ok_or_else(|| silent("there is no such instance".into()))?;
        if finished {
            return Err(silent("the instance is over".into()));
        }
        let machine = machine.ok_or_else(|| silent("it has no machine yet".into()))?;
        let machine: Machine = serde_json::from_str(&machine).map_err(|error| silent(chain(&error)))?;
        let reach = machine.reach.ok_or_else(|| silent("the way to its agent is not known yet".into()))?;
        let credential = enrol::credential(&self.db, &self.keys, instance).await;
        Ok((reach, credential.map_err(|error| silent(chain(&error)))?))
    }

    async fn over_ssh(
        &self,
        instance: InstanceId,
        socket: &str,
        credential: &str,
    ) -> Result<(Shim, Option<Arc<Connection>>), Setback> {
        let hosts = &self.lines.hosts;
        let site = site::site(&self.db, &self.keys, instance).await.map_err(|error| astray(&error))?;
        let (below, _) = hosts.control(&instance, &site.target).await.map_err(tunnel)?;
        // Not only what this call learned: the connection may have been made to bring the host up.
        if let Err(error) = site::pin(&self.db, instance, &below.host_keys()).await {
            // Nobody goes on over a connection to a host whose key could not be settled.
            hosts.forget(&instance);
            return Err(astray(&error));
        }
        let stream = match below.unix(socket).await {
            Ok(stream) => stream,
            Err(error) => {
                // The shim is not there, or nobody is: in that case the connection must go as well.
                let _ = hosts.check(&instance).await;
                return Err(Setback { why: Why::Silent(chain(&error)), next: Next::Backoff });
            }
        };
        Ok((hello(stream, credential).await?, Some(below)))
    }
}

/// Makes one attempt, for all who wait for it.
fn attempt(inner: Arc<Inner>, slot: Arc<Slot>) -> Attempt {
    let made = tokio::spawn(async move {
        let reached = timeout(ATTEMPT_WITHIN, inner.reach(slot.instance)).await;
        let reached = reached.unwrap_or_else(|_| Err(failed("no connection came about in time".into())));
        settle(&inner, &slot, reached)
    });
    let made = async move {
        made.await.unwrap_or_else(|_| Err(Why::Silent("the attempt to connect was broken off".into())))
    };
    made.boxed().shared()
}

fn settle(
    inner: &Arc<Inner>,
    slot: &Arc<Slot>,
    reached: Result<(Shim, Option<Arc<Connection>>), Setback>,
) -> Result<Arc<Line>, Why> {
    let mut state = slot.state.lock();
    match reached {
        Ok((shim, below)) => {
            let hears = AtomicBool::new(false);
            let line = Arc::new(Line { shim, hears, ear: OnceLock::new(), _below: below });
            state.way = Way::Live(Arc::clone(&line));
            (state.failures, state.failed) = (0, None);
            let came_back = std::mem::take(&mut state.lost);
            drop(state);
            let ear = ear::start(Arc::downgrade(inner), slot, &line, came_back);
            // It was made a moment ago and has none.
            let _ = line.ear.set(ear);
            Ok(line)
        }
        Err(Setback { why, next }) => {
            state.way = Way::None;
            // A connection below that is not due yet says only that: what was wrong is what it was before.
            let why = match (&next, state.failed.take()) {
                (Next::After(_), Some((_, before))) => before,
                (Next::AtOnce | Next::Backoff | Next::After(_), _) => why,
            };
            let wait = match next {
                Next::AtOnce => Duration::ZERO,
                Next::After(wait) => wait,
                Next::Backoff => {
                    state.failures = state.failures.saturating_add(1);
                    BACKOFF.wait(state.failures, slot.instance.0.as_bytes()[15])
                }
            };
            state.failed = Some((Instant::now() + wait, why.clone()));
            Err(why)
        }
    }
}

async fn over_socket(path: &Path, credential: &str) -> Result<Shim, Setback> {
    let connected = timeout(HELLO_WITHIN, unix::connect(path)).await;
    let connected = connected.map_err(|_| failed("its socket takes no connection".into()))?;
    let stream = connected
        .map_err(|error| failed(format!("connect to its socket {}: {}", path.display(), chain(&error))))?;
    hello(stream, credential).await
}

/// Somebody answers at the other end, or it is no connection.
async fn hello(
    stream: impl tokio::io::AsyncRead + tokio::io::AsyncWrite + Unpin + Send + 'static,
    credential: &str,
) -> Result<Shim, Setback> {
    let greeted = async {
        let shim = Shim::connect(stream, credential).await?;
        shim.health().await?;
        Ok::<Shim, ShimError>(shim)
    };
    let greeted = timeout(HELLO_WITHIN, greeted).await;
    let greeted = greeted.map_err(|_| {
        failed(format!("somebody takes the connection and says nothing for {} s", HELLO_WITHIN.as_secs()))
    })?;
    greeted.map_err(|error| failed(chain(&error)))
}

/// Its jobs are containers of the queue: there is no agent to speak with.
pub(super) fn in_queue() -> Setback {
    Setback {
        why: Why::Silent("its jobs run behind a queue, which has no way in".into()),
        next: Next::AtOnce,
    }
}

pub(super) fn failed(said: String) -> Setback {
    Setback { why: Why::Silent(said), next: Next::Backoff }
}

pub(super) fn tunnel(error: TunnelError) -> Setback {
    let said = chain(&error);
    let why = if error.is_final() { Why::Barred(said) } else { Why::Silent(said) };
    let next = match error {
        TunnelError::Waiting { wait, .. } => Next::After(wait),
        // The connections below wait by themselves; the next call learns how long.
        TunnelError::Lookup { .. }
        | TunnelError::NotAllowed { .. }
        | TunnelError::Connect { .. }
        | TunnelError::Timeout { .. }
        | TunnelError::HostKeyChanged { .. }
        | TunnelError::Denied { .. }
        | TunnelError::Protocol { .. }
        | TunnelError::Command { .. }
        | TunnelError::Damaged { .. } => Next::AtOnce,
    };
    Setback { why, next }
}

pub(super) fn astray(error: &SiteError) -> Setback {
    let said = chain(error);
    match error {
        SiteError::Changed { .. } => Setback { why: Why::Barred(said), next: Next::Backoff },
        SiteError::Missing { .. } | SiteError::Login(_) | SiteError::Pinned { .. } => {
            Setback { why: Why::Barred(said), next: Next::AtOnce }
        }
        SiteError::Db(_)
        | SiteError::Keys(_)
        | SiteError::NoInstance { .. }
        | SiteError::NotSsh { .. }
        | SiteError::Settings { .. }
        | SiteError::Contended { .. }
        | SiteError::TooMany { .. } => Setback { why: Why::Silent(said), next: Next::AtOnce },
    }
}
