//! What a task needs from its host beside a runtime, and who is told of changes.
//!
//! The tasks decide when; whoever implements these knows how. Every call may be repeated, also by a shim that was
//! killed half way through the first: it has one effect.

use std::io;

use futures_util::future::BoxFuture;

use windlass_api::agent::shim::{TaskInfo, TaskSpec};
use windlass_model::id::SubmissionId;

use crate::shim::runtime::{BindMount, PolicyLimits};

/// What policy makes of a specification.
#[derive(Clone, Debug, PartialEq)]
pub struct PolicyGrant {
    pub limits: PolicyLimits,
    /// Variables every task on this host gets. Never secrets.
    pub env: Vec<(String, String)>,
}

#[derive(Debug, thiserror::Error)]
pub enum HostError {
    #[error("{what}: {why}")]
    Refused { what: String, why: String },
    #[error("{what}")]
    Io {
        what: String,
        #[source]
        source: io::Error,
    },
}

pub type HostFuture<'a, T> = BoxFuture<'a, Result<T, HostError>>;

pub trait Host: Send + Sync + 'static {
    /// Whether the policy allows the task, in every respect, as things stand now.
    fn allow<'a>(&'a self, _spec: &'a TaskSpec) -> HostFuture<'a, ()> {
        Box::pin(std::future::ready(Ok(())))
    }

    /// What policy grants now. Asked again at every preparation: policy may have changed since the submission.
    fn grant(&self, spec: &TaskSpec) -> Result<PolicyGrant, HostError>;

    /// Lets `spec.host_ssh_keys` in as `spec.host_ssh_user` for this task's life.
    fn add_keys<'a>(&'a self, spec: &'a TaskSpec) -> HostFuture<'a, ()>;
    /// Lets the same people in a little longer, to this port of the loopback alone: the task has ended, and they may
    /// want its output. `remove_keys` ends it.
    fn keep_keys<'a>(&'a self, _spec: &'a TaskSpec, _port: u16) -> HostFuture<'a, ()> {
        Box::pin(std::future::ready(Ok(())))
    }
    /// Takes away this task's keys and nobody else's.
    fn remove_keys<'a>(&'a self, spec: &'a TaskSpec) -> HostFuture<'a, ()>;

    /// Volumes and instance mounts, with links resolved. A volume two tasks use is mounted once. Called again
    /// for every living task after a restart, so that holders can be counted afresh.
    fn mount<'a>(&'a self, spec: &'a TaskSpec) -> HostFuture<'a, Vec<BindMount>>;
    /// Unmounts what no other task uses.
    fn unmount<'a>(&'a self, spec: &'a TaskSpec) -> HostFuture<'a, ()>;

    /// Takes away keys and mounts of every task but these: left by a shim that was killed.
    fn sweep<'a>(&'a self, living: &'a [SubmissionId]) -> HostFuture<'a, ()>;
}

/// Told of every change, in the order of the changes of a task. Must not block nor call back.
pub trait Observer: Send + Sync + 'static {
    /// The status or anything beside it but the pull's progress changed.
    fn changed(&self, info: &TaskInfo);
    fn removed(&self, id: SubmissionId);
}

/// Nobody looks.
#[derive(Clone, Copy, Debug)]
pub struct NoObserver;

impl Observer for NoObserver {
    fn changed(&self, _: &TaskInfo) {}
    fn removed(&self, _: SubmissionId) {}
}

impl HostError {
    pub(super) fn is_disk_full(&self) -> bool {
        match self {
            Self::Refused { .. } => false,
            Self::Io { source, .. } => source.kind() == io::ErrorKind::StorageFull,
        }
    }
}
