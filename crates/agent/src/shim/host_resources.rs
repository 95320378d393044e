//! Host resources that a task uses in addition to its runtime: permissions of the policy, keys in accounts, mounts and
//! volumes. `tasks` decides when; this module implements how.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    sync::Arc,
};

use parking_lot::Mutex;
use windlass_api::agent::{
    SSH_PORT,
    shim::{TaskInfo, TaskSpec, TaskStatus},
};
use windlass_model::id::SubmissionId;

use super::{
    authorized_keys::{self, HostAuthorizedKeys, KeysError},
    enrolment::Enrolment,
    gateway_key::{GatewayKey, GatewayLine},
    mounts::{self, MountError},
    policy::Policy,
    runtime::BindMount,
    tasks::{Host, HostError, HostFuture, PolicyGrant},
    volumes::{VolumeError, Volumes},
};

/// Variables of the shim that every task receives: without them, nothing behind a proxy is reachable.
const PROXY_VARIABLES: [&str; 8] = [
    "HTTP_PROXY",
    "HTTPS_PROXY",
    "NO_PROXY",
    "ALL_PROXY",
    "http_proxy",
    "https_proxy",
    "no_proxy",
    "all_proxy",
];

/// Directory that contains `/etc/passwd` and the homes. Release builds ignore the variable.
fn accounts_root() -> PathBuf {
    let elsewhere = cfg!(debug_assertions).then(|| std::env::var_os("WINDLASS_DEBUG_ACCOUNTS")).flatten();
    elsewhere.map_or_else(|| PathBuf::from("/"), PathBuf::from)
}

/// Returns the path of a program, also if its file was replaced while it runs.
fn installed_path(running: &Path) -> PathBuf {
    let text = running.to_string_lossy();
    text.strip_suffix(" (deleted)").map_or_else(|| running.to_owned(), PathBuf::from)
}

/// A real host.
#[derive(Clone, Debug)]
pub struct HostResources {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    policy: Policy,
    keys: HostAuthorizedKeys,
    volumes: Volumes,
    env: Vec<(String, String)>,
    /// Accounts that hold keys of tasks now.
    granted: Mutex<BTreeMap<SubmissionId, GrantedKeys>>,
    gateway_line: GatewayLine,
    /// Gateway key that was applied last; `None` before the first.
    gateway_key: tokio::sync::Mutex<Option<Option<GatewayKey>>>,
}

#[derive(Clone, Debug)]
struct GrantedKeys {
    user: String,
    keys: Vec<String>,
}

impl HostResources {
    pub fn new(home: &Path, socket: &Path, policy: Policy) -> Self {
        let agent = std::env::current_exe().unwrap_or_default();
        let shared = Shared {
            policy,
            keys: HostAuthorizedKeys::new(&accounts_root(), home),
            volumes: Volumes::new(home),
            env: PROXY_VARIABLES
                .iter()
                .filter_map(|name| Some(((*name).to_owned(), std::env::var(name).ok()?)))
                .collect(),
            granted: Mutex::new(BTreeMap::new()),
            gateway_line: GatewayLine::new(home, &installed_path(&agent), socket),
            gateway_key: tokio::sync::Mutex::new(None),
        };
        Self { shared: Arc::new(shared) }
    }

    pub fn policy(&self) -> &Policy {
        &self.shared.policy
    }

    /// Checks the task against the policy at this time.
    pub async fn check(&self, spec: &TaskSpec) -> Result<(), MountError> {
        let (shared, spec) = (Arc::clone(&self.shared), spec.clone());
        // A path may be on a file server that does not respond.
        let inspected =
            tokio::task::spawn_blocking(move || mounts::check_policy(&spec, &shared.policy)).await;
        inspected.unwrap_or_else(|error| std::panic::resume_unwind(error.into_panic()))
    }

    /// Applies the gateway key of the enrolment, if it changed. An account that may not hold keys gets none.
    pub async fn sync_gateway_key(&self, enrolment: &Enrolment) {
        let mut applied = self.shared.gateway_key.lock().await;
        if applied.as_ref() == Some(&enrolment.gateway) {
            return;
        }
        *applied = Some(enrolment.gateway.clone());
        let (instance, mut wanted) = (enrolment.instance_id, enrolment.gateway.clone());
        if let Some(refused) = wanted.take_if(|wanted| !self.shared.policy.allows_keys_for(&wanted.user)) {
            tracing::warn!(
                user = refused.user,
                "gateways cannot connect: the policy allows no keys for the account"
            );
        }
        let done = self
            .run_blocking(move |shared| {
                let line = &shared.gateway_line;
                line.apply(&shared.keys, instance, wanted.as_ref()).map_err(from_keys_error)
            })
            .await;
        if let Err(error) = done {
            tracing::warn!(error = &error as &dyn std::error::Error, "failed to apply the key of gateways");
        }
    }

    /// Restricts the keys of a task to the port of its SSH server, once that is known.
    pub fn narrow_keys(&self, info: &TaskInfo) {
        if info.status != TaskStatus::Running {
            return;
        }
        let Some(granted) = self.shared.granted.lock().get(&info.id).cloned() else { return };
        let mapped = info.ports.iter().flatten().find(|port| port.container == SSH_PORT);
        let port = mapped.map_or(SSH_PORT, |port| port.host);
        let (shared, task) = (Arc::clone(&self.shared), info.id);
        tokio::task::spawn_blocking(move || {
            if let Err(error) = shared.grant(task, &granted, &[port]) {
                tracing::warn!(error = &error as &dyn std::error::Error, %task, "failed to restrict keys of task");
            }
        });
    }

    async fn run_blocking<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Shared) -> Result<T, HostError> + Send + 'static,
    ) -> Result<T, HostError> {
        let shared = Arc::clone(&self.shared);
        let done = tokio::task::spawn_blocking(move || work(&shared)).await;
        done.unwrap_or_else(|error| std::panic::resume_unwind(error.into_panic()))
    }
}

impl Shared {
    fn grant(&self, task: SubmissionId, granted: &GrantedKeys, ports: &[u16]) -> Result<(), KeysError> {
        let grant = authorized_keys::KeyGrant { task, user: &granted.user, keys: &granted.keys, ports };
        self.keys.grant(&grant, || self.granted.lock().contains_key(&task))
    }
}

impl HostResources {
    /// Permits the keys of a task for this port alone.
    fn grant_task_keys<'a>(&'a self, spec: &'a TaskSpec, port: u16) -> HostFuture<'a, ()> {
        let task = spec.id;
        let granted = GrantedKeys { user: spec.host_ssh_user.clone(), keys: spec.host_ssh_keys.clone() };
        Box::pin(async move {
            if granted.user.is_empty() || granted.keys.is_empty() {
                return Ok(());
            }
            self.shared.granted.lock().insert(task, granted.clone());
            self.run_blocking(move |shared| shared.grant(task, &granted, &[port]).map_err(from_keys_error))
                .await
        })
    }
}

impl Host for HostResources {
    fn allow<'a>(&'a self, spec: &'a TaskSpec) -> HostFuture<'a, ()> {
        Box::pin(async move {
            let forbidden = |error: MountError| HostError::Refused {
                what: "failed to start the task".to_owned(),
                why: error.to_string().trim_end().to_owned(),
            };
            self.check(spec).await.map_err(forbidden)
        })
    }

    fn grant(&self, spec: &TaskSpec) -> Result<PolicyGrant, HostError> {
        Ok(PolicyGrant { limits: self.shared.policy.limits(spec), env: self.shared.env.clone() })
    }

    fn add_keys<'a>(&'a self, spec: &'a TaskSpec) -> HostFuture<'a, ()> {
        self.grant_task_keys(spec, SSH_PORT)
    }

    fn keep_keys<'a>(&'a self, spec: &'a TaskSpec, port: u16) -> HostFuture<'a, ()> {
        self.grant_task_keys(spec, port)
    }

    fn remove_keys<'a>(&'a self, spec: &'a TaskSpec) -> HostFuture<'a, ()> {
        let (task, user) = (spec.id, spec.host_ssh_user.clone());
        Box::pin(async move {
            if user.is_empty() || spec.host_ssh_keys.is_empty() {
                return Ok(());
            }
            self.run_blocking(move |shared| {
                shared.granted.lock().remove(&task);
                shared.keys.revoke(task, &user).map_err(from_keys_error)
            })
            .await
        })
    }

    fn mount<'a>(&'a self, spec: &'a TaskSpec) -> HostFuture<'a, Vec<BindMount>> {
        let spec = spec.clone();
        Box::pin(self.run_blocking(move |shared| {
            let mut places = BTreeMap::new();
            for volume in &spec.volumes {
                let place = shared.volumes.attach(spec.id, volume).map_err(from_volume_error)?;
                places.insert(volume.name.clone(), place);
            }
            mounts::resolve_binds(&spec, &shared.policy, |name| places.get(name).cloned())
                .map_err(from_mount_error)
        }))
    }

    fn unmount<'a>(&'a self, spec: &'a TaskSpec) -> HostFuture<'a, ()> {
        let task = spec.id;
        Box::pin(self.run_blocking(move |shared| shared.volumes.detach(task).map_err(from_volume_error)))
    }

    fn sweep<'a>(&'a self, living: &'a [SubmissionId]) -> HostFuture<'a, ()> {
        let living = living.to_vec();
        Box::pin(self.run_blocking(move |shared| {
            shared.keys.sweep(&living).map_err(from_keys_error)?;
            shared.volumes.sweep().map_err(from_volume_error)
        }))
    }
}

fn from_keys_error(error: KeysError) -> HostError {
    match error {
        KeysError::Write { file, source } => {
            HostError::Io { what: format!("failed to write {}", file.display()), source }
        }
        refused @ (KeysError::User(_)
        | KeysError::Key { .. }
        | KeysError::TooMany { .. }
        | KeysError::Odd { .. }) => {
            HostError::Refused { what: "failed to add SSH keys".to_owned(), why: refused.to_string() }
        }
    }
}

fn from_volume_error(error: VolumeError) -> HostError {
    match error {
        VolumeError::Io { what, source } => HostError::Io { what, source },
        refused @ (VolumeError::Name { .. }
        | VolumeError::NoDevice { .. }
        | VolumeError::NotADisk { .. }
        | VolumeError::NotMounted { .. }
        | VolumeError::InUse { .. }
        | VolumeError::NoFileSystem { .. }
        | VolumeError::Program { .. }) => {
            HostError::Refused { what: "failed to attach a volume".to_owned(), why: refused.to_string() }
        }
    }
}

fn from_mount_error(error: MountError) -> HostError {
    match error {
        MountError::Make { path, source } => {
            HostError::Io { what: format!("failed to create {}", path.display()), source }
        }
        refused @ (MountError::Forbidden { .. } | MountError::NoVolume { .. }) => {
            HostError::Refused { what: "failed to mount".to_owned(), why: refused.to_string() }
        }
    }
}

/// A simulated host without resources.
#[derive(Clone, Debug)]
pub struct NoHostResources {
    pub policy: Policy,
}

impl Host for NoHostResources {
    fn grant(&self, spec: &TaskSpec) -> Result<PolicyGrant, HostError> {
        Ok(PolicyGrant { limits: self.policy.limits(spec), env: Vec::new() })
    }
    fn add_keys<'a>(&'a self, _: &'a TaskSpec) -> HostFuture<'a, ()> {
        Box::pin(std::future::ready(Ok(())))
    }
    fn remove_keys<'a>(&'a self, _: &'a TaskSpec) -> HostFuture<'a, ()> {
        Box::pin(std::future::ready(Ok(())))
    }
    fn mount<'a>(&'a self, _: &'a TaskSpec) -> HostFuture<'a, Vec<BindMount>> {
        Box::pin(std::future::ready(Ok(Vec::new())))
    }
    fn unmount<'a>(&'a self, _: &'a TaskSpec) -> HostFuture<'a, ()> {
        Box::pin(std::future::ready(Ok(())))
    }
    fn sweep<'a>(&'a self, _: &'a [SubmissionId]) -> HostFuture<'a, ()> {
        Box::pin(std::future::ready(Ok(())))
    }
}
