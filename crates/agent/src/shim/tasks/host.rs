//! Interfaces of the host resources of a task, and of the observer of changes.
//!
//! The tasks decide when; the implementations know how. Every call is idempotent, also when a shim that was killed
//! during the first call repeats it.

use std::io;

use futures_util::future::BoxFuture;

use windlass_api::agent::shim::{TaskInfo, TaskSpec};
use windlass_model::id::SubmissionId;

use crate::shim::runtime::{BindMount, PolicyLimits};

/// Permissions of the policy for a specification.
#[derive(Clone, Debug, PartialEq)]
pub struct PolicyGrant {
    pub limits: PolicyLimits,
    /// Variables that every task on this host receives. Never secrets.
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
    /// Checks whether the policy allows the task, in every respect, at this time.
    fn allow<'a>(&'a self, _spec: &'a TaskSpec) -> HostFuture<'a, ()> {
        Box::pin(std::future::ready(Ok(())))
    }

    /// Returns the present permissions. Called for every preparation: the policy may have changed since the submission.
    fn grant(&self, spec: &TaskSpec) -> Result<PolicyGrant, HostError>;

    /// Permits `spec.host_ssh_keys` to log in as `spec.host_ssh_user` for the lifetime of this task.
    fn add_keys<'a>(&'a self, spec: &'a TaskSpec) -> HostFuture<'a, ()>;
    /// Permits the same keys for a little longer, for this port of the loopback alone: the task has ended, and users
    /// may request its output. `remove_keys` revokes it.
    fn keep_keys<'a>(&'a self, _spec: &'a TaskSpec, _port: u16) -> HostFuture<'a, ()> {
        Box::pin(std::future::ready(Ok(())))
    }
    /// Removes the keys of this task and no others.
    fn remove_keys<'a>(&'a self, spec: &'a TaskSpec) -> HostFuture<'a, ()>;

    /// Mounts volumes and instance mounts, with links resolved. A volume of two tasks is mounted once. Called again for
    /// every live task after a restart, so that the users of a volume can be counted again.
    fn mount<'a>(&'a self, spec: &'a TaskSpec) -> HostFuture<'a, Vec<BindMount>>;
    /// Unmounts everything that no other task uses.
    fn unmount<'a>(&'a self, spec: &'a TaskSpec) -> HostFuture<'a, ()>;

    /// Removes keys and mounts of every task but these: remains of a shim that was killed.
    fn sweep<'a>(&'a self, living: &'a [SubmissionId]) -> HostFuture<'a, ()>;
}

/// Receives every change, in the order of the changes of a task. Must not block nor call back.
pub trait Observer: Send + Sync + 'static {
    /// Called when the status or any other state except the pull's progress changed.
    fn changed(&self, info: &TaskInfo);
    fn removed(&self, id: SubmissionId);
}

/// Observer that ignores all changes.
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
