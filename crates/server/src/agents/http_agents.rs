//! Calls to real agents over persistent connections, each limited in time and in the size of its response.
//!
//! A call that finds its connection lost is repeated once over a new one, because all calls are idempotent.

use std::{
    sync::{Arc, Weak},
    time::Duration,
};

use tokio::{sync::OnceCell, time::timeout};
use windlass_api::agent::{
    client::{LogPart, ShimClient, ShimError},
    runner::{GroupHosts as HostNames, JobStarted, Metrics},
    shim::{Claims, TaskInfo, TaskSpec, TerminateRequest},
};
use windlass_backend::Backends;
use windlass_engine::Hints;
use windlass_model::{
    error_chain::format_chain,
    id::{InstanceId, SubmissionId},
};
use windlass_tunnel::SshPool;

use super::{
    AgentApi, AgentError, AgentFuture, CallContext, HostReport, JobProgress, JobStart, PortStream,
    connection_pool::{ConnectError, ConnectionPool},
    enrolment::{EnrolmentError, Signer},
    sanitize,
};
use crate::{
    app::App,
    db::Db,
    encryption::Keyring,
    logs::copier::{CopyLimits, LogCopier},
};

/// Timeout of all calls except uploads.
pub const CALL_TIMEOUT: Duration = Duration::from_secs(9);
/// Timeout of the runner's report about connections, which must not delay the report of its shim.
const RUNNER_TIMEOUT: Duration = Duration::from_secs(2);
/// Size per additional second of an upload's timeout.
const UPLOAD_BYTES_PER_SEC: usize = 1 << 20;
/// Validity of a signed specification; every attempt signs again. The clocks of the database and the host may be off by
/// ten minutes each, in opposite directions.
const SIGNATURE_VALID_SECS: i64 = 30 * 60;
const SWEEP_INTERVAL: Duration = Duration::from_secs(60);

/// Agents over local sockets and over SSH. Cheap to clone; all clones share one state.
#[derive(Clone)]
pub struct HttpAgents(Arc<Inner>);

pub(super) struct Inner {
    pub(super) db: Db,
    pub(super) keys: Arc<Keyring>,
    pub(super) hints: Hints,
    pub(super) copier: LogCopier,
    pub(super) lines: ConnectionPool,
    /// Some agents are reached through their backend.
    pub(super) backends: Backends,
    signer: OnceCell<Signer>,
}

/// Reason why a call failed.
pub(super) enum CallError {
    NoConnection(ConnectError),
    Shim(ShimError),
    Timeout(Duration),
}

impl HttpAgents {
    /// Creates the client. `hosts` are the SSH connections, shared with other users of the same hosts.
    pub fn new(app: &App, hosts: Arc<SshPool<InstanceId>>) -> Arc<Self> {
        let inner = Arc::new(Inner {
            db: app.db().clone(),
            keys: Arc::clone(app.keys()),
            hints: app.hints().clone(),
            copier: LogCopier::new(
                Arc::clone(app.logs()),
                app.db().clone(),
                CopyLimits::for_log_size(app.settings().limits.log_bytes),
            ),
            lines: ConnectionPool::new(hosts),
            backends: app.backends().clone(),
            signer: OnceCell::new(),
        });
        tokio::spawn(sweep(Arc::downgrade(&inner)));
        Arc::new(Self(inner))
    }

    /// Number of connected hosts.
    pub fn connected(&self) -> usize {
        self.0.lines.live()
    }

    pub(super) fn of(inner: Arc<Inner>) -> Self {
        Self(inner)
    }

    async fn call_shim<T, F, Fut>(
        &self,
        instance: InstanceId,
        within: Duration,
        what: F,
    ) -> Result<T, CallError>
    where
        F: Fn(ShimClient) -> Fut,
        Fut: Future<Output = Result<T, ShimError>>,
    {
        let requested = async {
            let (line, was_there) = self.0.line(instance).await.map_err(CallError::NoConnection)?;
            match what(line.shim.clone()).await {
                Err(ShimError::Exchange(_)) if was_there => {
                    self.0.lost(instance, &line);
                    let (line, _) = self.0.line(instance).await.map_err(CallError::NoConnection)?;
                    what(line.shim.clone()).await.map_err(CallError::Shim)
                }
                answered => answered.map_err(CallError::Shim),
            }
        };
        timeout(within, requested).await.unwrap_or(Err(CallError::Timeout(within)))
    }

    /// Makes a call about one submission.
    async fn call<T, F, Fut>(&self, call: CallContext, what: F) -> Result<T, AgentError>
    where
        F: Fn(ShimClient) -> Fut,
        Fut: Future<Output = Result<T, ShimError>>,
    {
        self.call_shim(call.instance, CALL_TIMEOUT, what).await.map_err(|error| task_error(call, error))
    }

    async fn signer(&self) -> Result<&Signer, EnrolmentError> {
        self.0.signer.get_or_try_init(|| Signer::of(&self.0.db, &self.0.keys)).await
    }

    async fn submit(&self, call: CallContext, task: &TaskSpec) -> Result<(), AgentError> {
        let signer = self.signer().await.map_err(unsigned)?;
        let now = self.0.db.now().await.map_err(|error| unsigned(error.into()))?;
        let claims = Claims {
            instance_id: call.instance,
            epoch: call.epoch,
            expires_at: now.0 / 1_000_000 + SIGNATURE_VALID_SECS,
        };
        let spec = TaskSpec { id: call.submission, claims: Some(claims), ..task.clone() };
        let signed = signer.sign(&spec).map_err(unsigned)?;
        let signed = &signed;
        self.call(call, |shim| async move { shim.submit(signed, call.epoch).await }).await
    }

    async fn begin(&self, call: CallContext, job: &JobStart) -> Result<Option<JobStarted>, AgentError> {
        let (id, epoch) = (call.submission, call.epoch);
        let submit = &job.submit;
        let handed = self.call(call, |shim| async move { shim.submit_job(id, submit, epoch).await }).await;
        match handed {
            Ok(()) => self.upload(call, job).await?,
            // An earlier call started it and its response was lost: nothing to upload.
            Err(AgentError::Conflict { .. }) => {}
            Err(error) => return Err(error),
        }
        let started = self.call(call, |shim| async move { shim.run_job(id, epoch).await }).await?;
        Ok(started.map(sanitize::started))
    }

    async fn upload(&self, call: CallContext, job: &JobStart) -> Result<(), AgentError> {
        let (instance, id, epoch) = (call.instance, call.submission, call.epoch);
        let failed = |error| task_error(call, error);
        for (archive, tar) in &job.archives {
            let within = upload_timeout(tar.len());
            let sent = |shim: ShimClient| async move { shim.upload_archive(id, archive, tar, epoch).await };
            self.call_shim(instance, within, sent).await.map_err(failed)?;
        }
        if let Some(code) = &job.code {
            let sent = |shim: ShimClient| async move { shim.upload_code(id, code.to_vec(), epoch).await };
            self.call_shim(instance, upload_timeout(code.len()), sent).await.map_err(failed)?;
        }
        Ok(())
    }

    async fn job_progress(&self, call: CallContext) -> Result<JobProgress, AgentError> {
        let id = call.submission;
        let record = self.call(call, |shim| async move { shim.job(id).await }).await?;
        let record = sanitize::record(record);
        let runs = record.states.last().is_some_and(|state| state.state == "running");
        let no_connections_secs = if runs {
            let idle = |shim: ShimClient| async move { shim.idle_seconds(id).await };
            self.call_shim(call.instance, RUNNER_TIMEOUT, idle).await.ok().map(|secs| secs.max(0))
        } else {
            None
        };
        Ok(JobProgress { record, no_connections_secs })
    }
}

/// Proportional to the size: a host that accepts data more slowly than this has failed.
fn upload_timeout(bytes: usize) -> Duration {
    CALL_TIMEOUT + Duration::from_secs((bytes / UPLOAD_BYTES_PER_SEC) as u64)
}

async fn sweep(inner: Weak<Inner>) {
    loop {
        tokio::time::sleep(SWEEP_INTERVAL).await;
        let Some(inner) = inner.upgrade() else { return };
        inner.lines.sweep();
    }
}

impl AgentApi for HttpAgents {
    fn tasks(&self, instance: InstanceId) -> AgentFuture<'_, Vec<SubmissionId>> {
        Box::pin(async move {
            let requested =
                self.call_shim(instance, CALL_TIMEOUT, |shim| async move { shim.tasks().await }).await;
            let list = requested.map_err(|error| host_error(instance, error))?;
            Ok(list.tasks.into_iter().map(|task| task.id).collect())
        })
    }

    fn host(&self, instance: InstanceId) -> AgentFuture<'_, HostReport> {
        Box::pin(async move {
            let requested = |shim: ShimClient| async move {
                tokio::try_join!(shim.health(), shim.host(), shim.instance_health())
            };
            let (health, info, well) = self
                .call_shim(instance, CALL_TIMEOUT, requested)
                .await
                .map_err(|error| host_error(instance, error))?;
            Ok(HostReport {
                version: sanitize::name(health.version),
                info: sanitize::host(info),
                health: sanitize::health(well),
            })
        })
    }

    fn submit_task<'a>(&'a self, call: CallContext, task: &'a TaskSpec) -> AgentFuture<'a, ()> {
        Box::pin(self.submit(call, task))
    }

    fn task(&self, call: CallContext) -> AgentFuture<'_, TaskInfo> {
        Box::pin(async move {
            let id = call.submission;
            let info = self.call(call, |shim| async move { shim.task(id).await }).await?;
            if info.id != id {
                let why = format!("requested task {id}, but received task {}", info.id);
                return Err(AgentError::Unreachable { instance: call.instance, why });
            }
            Ok(sanitize::task(info))
        })
    }

    fn terminate_task<'a>(
        &'a self,
        call: CallContext,
        reason: &'a str,
        timeout_secs: i64,
    ) -> AgentFuture<'a, ()> {
        Box::pin(async move {
            let how = TerminateRequest {
                termination_reason: reason.to_owned(),
                termination_message: String::new(),
                timeout: u64::try_from(timeout_secs).unwrap_or_default(),
            };
            let (how, id) = (&how, call.submission);
            self.call(call, |shim| async move { shim.terminate(id, how, call.epoch).await.map(drop) }).await
        })
    }

    fn remove_task(&self, call: CallContext) -> AgentFuture<'_, ()> {
        Box::pin(self.call(call, move |shim| async move { shim.remove(call.submission, call.epoch).await }))
    }

    fn start_job<'a>(&'a self, call: CallContext, job: &'a JobStart) -> AgentFuture<'a, Option<JobStarted>> {
        Box::pin(self.begin(call, job))
    }

    fn pull(&self, call: CallContext) -> AgentFuture<'_, JobProgress> {
        Box::pin(self.job_progress(call))
    }

    fn log<'a>(
        &'a self,
        call: CallContext,
        stream: &'a str,
        offset: u64,
        limit: usize,
    ) -> AgentFuture<'a, LogPart> {
        Box::pin(async move {
            let id = call.submission;
            let requested =
                |shim: ShimClient| async move { shim.log(id, stream, offset, limit, Duration::ZERO).await };
            self.call(call, requested).await.map(|part| sanitize::log(part, limit))
        })
    }

    fn log_was_read<'a>(&'a self, call: CallContext, stream: &'a str, offset: u64) -> AgentFuture<'a, ()> {
        let id = call.submission;
        Box::pin(self.call(call, move |shim| async move { shim.acknowledge_log(id, stream, offset).await }))
    }

    fn metrics(&self, call: CallContext) -> AgentFuture<'_, Metrics> {
        Box::pin(async move {
            let id = call.submission;
            self.call(call, |shim| async move { shim.job_metrics(id).await }).await.map(sanitize::metrics)
        })
    }

    fn stop_job(&self, call: CallContext, grace_secs: u64, is_preempted: bool) -> AgentFuture<'_, ()> {
        Box::pin(self.call(call, move |shim| async move {
            shim.stop_job(call.submission, call.epoch, Some(grace_secs), is_preempted).await
        }))
    }

    fn open_gate(&self, call: CallContext) -> AgentFuture<'_, ()> {
        Box::pin(
            self.call(call, move |shim| async move { shim.open_gate(call.submission, call.epoch).await }),
        )
    }

    fn send_hosts<'a>(&'a self, call: CallContext, hosts: &'a HostNames) -> AgentFuture<'a, ()> {
        let (id, epoch) = (call.submission, call.epoch);
        Box::pin(self.call(call, move |shim| async move { shim.send_hosts(id, epoch, hosts).await }))
    }

    fn connect(&self, call: CallContext, port: u16) -> AgentFuture<'_, PortStream> {
        Box::pin(async move {
            let opened = self.0.port(call.instance, call.submission, port).await;
            opened.map_err(|error| task_error(call, error))
        })
    }

    fn is_listening(&self, instance: InstanceId) -> bool {
        self.0.lines.is_listening(instance)
    }

    fn forget(&self, instance: InstanceId) {
        self.0.lines.forget(instance);
    }
}

fn host_error(instance: InstanceId, error: CallError) -> AgentError {
    let call = CallContext { instance, submission: SubmissionId(uuid::Uuid::nil()), epoch: 0 };
    match task_error(call, error) {
        AgentError::UnknownTask { .. } | AgentError::Gone { .. } => {
            AgentError::Refused { reason: "it does not support this call".into() }
        }
        other @ (AgentError::Unreachable { .. }
        | AgentError::Barred { .. }
        | AgentError::Fenced { .. }
        | AgentError::Conflict { .. }
        | AgentError::Unsigned { .. }
        | AgentError::Refused { .. }) => other,
    }
}

/// Translates a failed signature. Only a task that cannot be encoded is the job's fault: all else, such as a database
/// that is away, ends by itself or by the operator.
fn unsigned(error: EnrolmentError) -> AgentError {
    let why = format_chain(&error);
    match error {
        EnrolmentError::Spec(_) => AgentError::Refused { reason: why },
        EnrolmentError::Db(_)
        | EnrolmentError::Keys(_)
        | EnrolmentError::Random(_)
        | EnrolmentError::NoInstance { .. }
        | EnrolmentError::NotEnrolled { .. }
        | EnrolmentError::Seed
        | EnrolmentError::Credential { .. }
        | EnrolmentError::GatewayKey(_) => AgentError::Unsigned { why },
    }
}

/// Translates a failed call about a task.
fn task_error(call: CallContext, call_error: CallError) -> AgentError {
    let CallContext { instance, submission, epoch } = call;
    let silent = |why: String| AgentError::Unreachable { instance, why: sanitize::message(why) };
    let error = match call_error {
        CallError::NoConnection(ConnectError::Unreachable(why)) => return silent(why),
        CallError::NoConnection(ConnectError::Barred(why)) => {
            return AgentError::Barred { instance, why: sanitize::message(why) };
        }
        CallError::Timeout(within) => return silent(format!("no answer within {} s", within.as_secs())),
        CallError::Shim(error) => error,
    };
    match error {
        ShimError::Exchange(_) | ShimError::Decode(_) | ShimError::TooLong => silent(format_chain(&error)),
        ShimError::Unauthorized { why } => AgentError::Barred {
            instance,
            why: format!("its shim rejected the server's credential: {}", sanitize::message(why)),
        },
        ShimError::Forbidden { why } => AgentError::Refused { reason: sanitize::message(why) },
        ShimError::StaleEpoch { seen } => AgentError::Fenced { epoch, seen },
        ShimError::TaskNotFound => AgentError::UnknownTask { submission },
        ShimError::TaskRemoved => AgentError::Gone { submission },
        ShimError::Conflict { why } => AgentError::Conflict { reason: sanitize::message(why) },
        // Not ready, or temporarily broken.
        ShimError::Status { status, why } if status.is_server_error() => {
            AgentError::Conflict { reason: sanitize::message(format!("{status}: {why}")) }
        }
        ShimError::Status { status, why } => {
            AgentError::Refused { reason: sanitize::message(format!("{status}: {why}")) }
        }
        ShimError::Encode(_) | ShimError::Build(_) => AgentError::Refused { reason: format_chain(&error) },
    }
}

impl std::fmt::Debug for HttpAgents {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("HttpAgents").field("connected", &self.connected()).finish_non_exhaustive()
    }
}
