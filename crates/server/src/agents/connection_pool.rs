//! One persistent connection per instance, opened on demand and shared by all calls.
//!
//! All callers wait for the same attempt, and the attempt continues when they time out: if a host is slow to accept,
//! the next call finds the connection ready. After a failure the next attempt is delayed, longer each time; calls in
//! the meantime fail at once with the last error. The data about the instance is read again for each attempt.

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
    agent::client::{ShimClient, ShimError},
    unix,
};
use windlass_backend::{AgentEndpoint, AgentStream, BackendInstance};
use windlass_model::{error_chain::format_chain, id::InstanceId};
use windlass_tunnel::{Backoff, Connection, SshPool, TunnelError};

use super::{
    enrolment, event_listener,
    http_agents::Inner,
    ssh_target::{self, SshTargetError},
};
use crate::db::{agents as rows, documents::INSTANCE_PROVISIONING};

/// Maximum time until an accepting shim has completed the handshake.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(5);
/// Timeout of one attempt, including SSH and all jump hosts.
const ATTEMPT_TIMEOUT: Duration = Duration::from_secs(40);
const BACKOFF: Backoff = Backoff { initial: Duration::from_millis(200), max: Duration::from_secs(10) };
/// Idle time after which a connection is closed: the instance may have ended, observed by another replica.
const IDLE_TIMEOUT: Duration = Duration::from_secs(300);
/// Minimum interval between two reports of a loss: a host that accepts and drops connections must not keep the
/// pipelines busy.
const LOSS_REPORT_INTERVAL: Duration = Duration::from_secs(5);

/// Reason why there is no connection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum ConnectError {
    /// A later attempt may succeed.
    Unreachable(String),
    /// No attempt succeeds before a person has intervened.
    Barred(String),
}

/// A failed attempt, with the delay before the next one.
pub(super) struct ConnectFailure {
    pub(super) why: ConnectError,
    next: RetryDelay,
}

pub(super) enum RetryDelay {
    /// Nothing expensive was attempted.
    Immediate,
    /// Grows with each failure.
    Backoff,
    /// The SSH connections below have a separate retry delay.
    After(Duration),
}

pub(super) struct AgentConnection {
    pub(super) shim: ShimClient,
    /// True while the event stream is open.
    pub(super) is_listening: AtomicBool,
    ear: OnceLock<AbortHandle>,
    /// Must live as long as the channel that uses it.
    _below: Option<Arc<Connection>>,
}

impl Drop for AgentConnection {
    fn drop(&mut self) {
        if let Some(ear) = self.ear.get() {
            ear.abort();
        }
    }
}

type ConnectAttempt = Shared<BoxFuture<'static, Result<Arc<AgentConnection>, ConnectError>>>;

enum ConnectionState {
    None,
    Connecting(ConnectAttempt),
    Connected(Arc<AgentConnection>),
}

/// Connection state of one instance.
pub(super) struct InstanceSlot {
    pub(super) instance: InstanceId,
    state: Mutex<SlotState>,
    /// Boot id of the shim and number of the last processed event.
    pub(super) received: Mutex<Option<(String, u64)>>,
}

struct SlotState {
    state: ConnectionState,
    failures: u32,
    failed: Option<(Instant, ConnectError)>,
    used: Instant,
    /// A connection was lost and has not been replaced.
    lost: bool,
    loss_reported: Option<Instant>,
}

impl InstanceSlot {
    fn new(instance: InstanceId) -> Self {
        let state = SlotState {
            state: ConnectionState::None,
            failures: 0,
            failed: None,
            used: Instant::now(),
            lost: false,
            loss_reported: None,
        };
        Self { instance, state: Mutex::new(state), received: Mutex::default() }
    }

    /// Drops this connection if it is still the one in use. Returns whether to report the loss.
    pub(super) fn lose(&self, line: &Weak<AgentConnection>) -> bool {
        let mut state = self.state.lock();
        match &state.state {
            ConnectionState::Connected(live) if Weak::ptr_eq(&Arc::downgrade(live), line) => {}
            ConnectionState::Connected(_) | ConnectionState::Connecting(_) | ConnectionState::None => {
                return false;
            }
        }
        state.lose()
    }
}

impl SlotState {
    /// Returns whether to report the loss.
    fn lose(&mut self) -> bool {
        self.state = ConnectionState::None;
        self.lost = true;
        let is_due = self.loss_reported.is_none_or(|at| at.elapsed() >= LOSS_REPORT_INTERVAL);
        if is_due {
            self.loss_reported = Some(Instant::now());
        }
        is_due
    }
}

/// Connections to all instances.
pub(super) struct ConnectionPool {
    slots: Mutex<HashMap<InstanceId, Arc<InstanceSlot>>>,
    hosts: Arc<SshPool<InstanceId>>,
}

impl ConnectionPool {
    pub(super) fn new(hosts: Arc<SshPool<InstanceId>>) -> Self {
        Self { slots: Mutex::default(), hosts }
    }

    pub(super) fn hosts(&self) -> &SshPool<InstanceId> {
        &self.hosts
    }

    pub(super) fn forget(&self, instance: InstanceId) {
        self.slots.lock().remove(&instance);
        self.hosts.forget(&instance);
    }

    /// Closes idle connections.
    pub(super) fn sweep(&self) {
        let unused: Vec<InstanceId> = {
            let slots = self.slots.lock();
            let old = slots.values().filter(|slot| slot.state.lock().used.elapsed() > IDLE_TIMEOUT);
            old.map(|slot| slot.instance).collect()
        };
        for instance in unused {
            self.forget(instance);
        }
    }

    /// Number of open connections.
    pub(super) fn live(&self) -> usize {
        let slots = self.slots.lock();
        slots.values().filter(|slot| matches!(slot.state.lock().state, ConnectionState::Connected(_))).count()
    }

    pub(super) fn is_listening(&self, instance: InstanceId) -> bool {
        let Some(slot) = self.slots.lock().get(&instance).cloned() else { return false };
        let state = slot.state.lock();
        matches!(&state.state, ConnectionState::Connected(line) if line.is_listening.load(Ordering::Relaxed) && !line.shim.is_closed())
    }

    fn slot(&self, instance: InstanceId) -> Arc<InstanceSlot> {
        let mut slots = self.slots.lock();
        Arc::clone(slots.entry(instance).or_insert_with(|| Arc::new(InstanceSlot::new(instance))))
    }
}

impl Inner {
    /// Returns the connection, opening it if necessary, and whether it was already open.
    pub(super) async fn line(
        self: &Arc<Self>,
        instance: InstanceId,
    ) -> Result<(Arc<AgentConnection>, bool), ConnectError> {
        let attempt = {
            let slot = self.lines.slot(instance);
            let mut state = slot.state.lock();
            state.used = Instant::now();
            match &state.state {
                ConnectionState::Connected(line) if !line.shim.is_closed() => {
                    return Ok((Arc::clone(line), true));
                }
                ConnectionState::Connecting(attempt) => attempt.clone(),
                ConnectionState::Connected(_) | ConnectionState::None => {
                    if matches!(state.state, ConnectionState::Connected(_)) && state.lose() {
                        tokio::spawn(event_listener::mark_all_due(Arc::downgrade(self), instance));
                    }
                    if let Some((until, why)) = &state.failed
                        && Instant::now() < *until
                    {
                        return Err(why.clone());
                    }
                    let attempt = start_attempt(Arc::clone(self), Arc::clone(&slot));
                    state.state = ConnectionState::Connecting(attempt.clone());
                    attempt
                }
            }
        };
        attempt.await.map(|line| (line, false))
    }

    /// Drops a connection over which a call received no data.
    pub(super) fn lost(self: &Arc<Self>, instance: InstanceId, line: &Arc<AgentConnection>) {
        if self.lines.slot(instance).lose(&Arc::downgrade(line)) {
            tokio::spawn(event_listener::mark_all_due(Arc::downgrade(self), instance));
        }
    }

    async fn reach(
        &self,
        instance: InstanceId,
    ) -> Result<(ShimClient, Option<Arc<Connection>>), ConnectFailure> {
        let (reach, credential, machine) = self.state(instance).await?;
        match reach {
            AgentEndpoint::Socket { path } => Ok((connect_socket(&path, &credential).await?, None)),
            AgentEndpoint::Ssh { socket } => self.connect_ssh(instance, &socket, &credential).await,
            AgentEndpoint::Queue => Err(queue_failure()),
            AgentEndpoint::Backend { backend } => {
                let stream = self.backend_stream(&backend, &machine).await?;
                Ok((handshake(stream, &credential).await?, None))
            }
        }
    }

    /// Opens a stream to the agent of an instance that is reached through its backend.
    pub(super) async fn backend_stream(
        &self,
        backend: &str,
        machine: &BackendInstance,
    ) -> Result<Box<dyn AgentStream>, ConnectFailure> {
        let missing = || transient_failure(format!("the server has no backend `{backend}`"));
        let backend = self.backends.named(backend).ok_or_else(missing)?;
        backend.connect(machine).await.map_err(|error| transient_failure(format_chain(&error)))
    }

    /// Endpoint of an instance's agent, the credential that it requires, and what its backend knows.
    pub(super) async fn state(
        &self,
        instance: InstanceId,
    ) -> Result<(AgentEndpoint, String, BackendInstance), ConnectFailure> {
        let silent = |message: String| ConnectFailure {
            why: ConnectError::Unreachable(message),
            next: RetryDelay::Immediate,
        };
        let found =
            rows::find_machine(&self.db, instance).await.map_err(|error| silent(format_chain(&error)))?;
        let (machine, finished) = found.ok_or_else(|| silent("the instance does not exist".into()))?;
        if finished {
            return Err(silent("the instance is terminated".into()));
        }
        let machine = machine.ok_or_else(|| silent("the instance is not created yet".into()))?;
        let machine: BackendInstance =
            INSTANCE_PROVISIONING.decode(instance, &machine).map_err(|error| silent(format_chain(&error)))?;
        let reach = machine
            .reach
            .clone()
            .ok_or_else(|| silent("the address of its agent is not known yet".into()))?;
        let credential = enrolment::credential(&self.db, &self.keys, instance).await;
        Ok((reach, credential.map_err(|error| silent(format_chain(&error)))?, machine))
    }

    async fn connect_ssh(
        &self,
        instance: InstanceId,
        socket: &str,
        credential: &str,
    ) -> Result<(ShimClient, Option<Arc<Connection>>), ConnectFailure> {
        let hosts = &self.lines.hosts;
        let site = ssh_target::load_target(&self.db, &self.keys, instance)
            .await
            .map_err(|error| target_failure(&error))?;
        let (below, _) = hosts.control_connection(&instance, &site.target).await.map_err(ssh_failure)?;
        // All keys, not only those learned by this call: the connection may have been opened to set up the host.
        if let Err(error) = ssh_target::pin(&self.db, instance, &below.host_keys()).await {
            // A connection is not used before the key of its host is pinned.
            hosts.forget(&instance);
            return Err(target_failure(&error));
        }
        let stream = match below.open_unix(socket).await {
            Ok(stream) => stream,
            Err(error) => {
                // Either the shim is not running or the host is unreachable; in the second case the SSH connection must
                // be closed too.
                let _ = hosts.check(&instance).await;
                return Err(ConnectFailure {
                    why: ConnectError::Unreachable(format_chain(&error)),
                    next: RetryDelay::Backoff,
                });
            }
        };
        Ok((handshake(stream, credential).await?, Some(below)))
    }
}

/// Starts one attempt, shared by all waiting callers.
fn start_attempt(inner: Arc<Inner>, slot: Arc<InstanceSlot>) -> ConnectAttempt {
    let made = tokio::spawn(async move {
        let reached = timeout(ATTEMPT_TIMEOUT, inner.reach(slot.instance)).await;
        let reached = reached.unwrap_or_else(|_| Err(transient_failure("timed out while connecting".into())));
        finish_attempt(&inner, &slot, reached)
    });
    let made = async move {
        made.await
            .unwrap_or_else(|_| Err(ConnectError::Unreachable("the connection attempt was aborted".into())))
    };
    made.boxed().shared()
}

fn finish_attempt(
    inner: &Arc<Inner>,
    slot: &Arc<InstanceSlot>,
    reached: Result<(ShimClient, Option<Arc<Connection>>), ConnectFailure>,
) -> Result<Arc<AgentConnection>, ConnectError> {
    let mut state = slot.state.lock();
    match reached {
        Ok((shim, below)) => {
            let is_listening = AtomicBool::new(false);
            let line = Arc::new(AgentConnection { shim, is_listening, ear: OnceLock::new(), _below: below });
            state.state = ConnectionState::Connected(Arc::clone(&line));
            (state.failures, state.failed) = (0, None);
            let came_back = std::mem::take(&mut state.lost);
            drop(state);
            let ear = event_listener::start(Arc::downgrade(inner), slot, &line, came_back);
            // Cannot fail: the connection is new and has no listener yet.
            let _ = line.ear.set(ear);
            Ok(line)
        }
        Err(ConnectFailure { why, next }) => {
            state.state = ConnectionState::None;
            // An SSH connection in its retry delay reports only that; the earlier error is still the cause.
            let why = match (&next, state.failed.take()) {
                (RetryDelay::After(_), Some((_, before))) => before,
                (RetryDelay::Immediate | RetryDelay::Backoff | RetryDelay::After(_), _) => why,
            };
            let wait = match next {
                RetryDelay::Immediate => Duration::ZERO,
                RetryDelay::After(wait) => wait,
                RetryDelay::Backoff => {
                    state.failures = state.failures.saturating_add(1);
                    BACKOFF.delay(state.failures, slot.instance.0.as_bytes()[15])
                }
            };
            state.failed = Some((Instant::now() + wait, why.clone()));
            Err(why)
        }
    }
}

async fn connect_socket(path: &Path, credential: &str) -> Result<ShimClient, ConnectFailure> {
    let connected = timeout(HANDSHAKE_TIMEOUT, unix::connect(path)).await;
    let connected =
        connected.map_err(|_| transient_failure("timed out while connecting to its socket".into()))?;
    let stream = connected.map_err(|error| {
        transient_failure(format!(
            "failed to connect to its socket {}: {}",
            path.display(),
            format_chain(&error)
        ))
    })?;
    handshake(stream, credential).await
}

/// Completes the handshake; a stream without an answer is not a connection.
async fn handshake(
    stream: impl tokio::io::AsyncRead + tokio::io::AsyncWrite + Unpin + Send + 'static,
    credential: &str,
) -> Result<ShimClient, ConnectFailure> {
    let greeted = async {
        let shim = ShimClient::connect(stream, credential).await?;
        shim.health().await?;
        Ok::<ShimClient, ShimError>(shim)
    };
    let greeted = timeout(HANDSHAKE_TIMEOUT, greeted).await;
    let greeted = greeted.map_err(|_| {
        transient_failure(format!("connected, but no response within {} s", HANDSHAKE_TIMEOUT.as_secs()))
    })?;
    greeted.map_err(|error| transient_failure(format_chain(&error)))
}

/// Error for an instance whose jobs are containers of the queue: it has no agent.
pub(super) fn queue_failure() -> ConnectFailure {
    ConnectFailure {
        why: ConnectError::Unreachable("its jobs run in a queue, which accepts no connections".into()),
        next: RetryDelay::Immediate,
    }
}

pub(super) fn transient_failure(message: String) -> ConnectFailure {
    ConnectFailure { why: ConnectError::Unreachable(message), next: RetryDelay::Backoff }
}

pub(super) fn ssh_failure(error: TunnelError) -> ConnectFailure {
    let message = format_chain(&error);
    let why =
        if error.is_final() { ConnectError::Barred(message) } else { ConnectError::Unreachable(message) };
    let next = match error {
        TunnelError::BackingOff { wait, .. } => RetryDelay::After(wait),
        // The SSH connections back off by themselves; the next call gets their delay.
        TunnelError::Lookup { .. }
        | TunnelError::NotAllowed { .. }
        | TunnelError::Connect { .. }
        | TunnelError::Timeout { .. }
        | TunnelError::HostKeyChanged { .. }
        | TunnelError::Denied { .. }
        | TunnelError::Protocol { .. }
        | TunnelError::Command { .. }
        | TunnelError::ChecksumMismatch { .. } => RetryDelay::Immediate,
    };
    ConnectFailure { why, next }
}

pub(super) fn target_failure(error: &SshTargetError) -> ConnectFailure {
    let message = format_chain(error);
    match error {
        SshTargetError::Changed { .. } => {
            ConnectFailure { why: ConnectError::Barred(message), next: RetryDelay::Backoff }
        }
        SshTargetError::Missing { .. } | SshTargetError::Login(_) | SshTargetError::Pinned { .. } => {
            ConnectFailure { why: ConnectError::Barred(message), next: RetryDelay::Immediate }
        }
        SshTargetError::Db(_)
        | SshTargetError::Keys(_)
        | SshTargetError::NoInstance { .. }
        | SshTargetError::NotSsh { .. }
        | SshTargetError::LoginKey(_)
        | SshTargetError::Contended { .. }
        | SshTargetError::TooMany { .. } => {
            ConnectFailure { why: ConnectError::Unreachable(message), next: RetryDelay::Immediate }
        }
    }
}
