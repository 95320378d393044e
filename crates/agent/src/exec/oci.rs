//! Containers with an image on hosts without an engine.

use std::{io, net::IpAddr, path::Path, sync::Arc};

use windlass_api::agent::shim::NetworkMode;

use super::{
    AttemptError,
    image::{OciDirs, load_policy},
};
use crate::{
    cgroup::task::TaskLimits,
    host::gpu::{self, Gpu},
    shim::{
        docker::ContainerConfinement,
        oci::attempt::{AttemptContainer, AttemptRuntime, ImageClaim},
        runtime::{PolicyLimits, RuntimeError},
    },
};
use windlass_model::{error_chain::format_chain, queue::REFUSED_REASON};

const NO_NEW_PRIVILEGES: &str = "no-new-privileges";
const HOST_NETWORK: &str = "host";

/// A container whose image is here.
pub(super) struct OciContainer {
    runtime: Arc<AttemptRuntime>,
    claim: ImageClaim,
    pub(super) image: String,
    pub(super) gpus: Vec<Gpu>,
    /// Address by which the container reaches this host.
    pub(super) gateway: Option<IpAddr>,
}

impl OciContainer {
    /// Pulls the image, and finds the GPUs and the network of the container.
    pub(super) async fn prepare(
        dirs: OciDirs<'_>,
        image: &str,
        attempt: &str,
        confinement: &ContainerConfinement,
        policy: &Path,
        gpus: Option<&str>,
    ) -> Result<Self, AttemptError> {
        let policy = load_policy(policy)?;
        let (store, dir) = (dirs.store.to_owned(), dirs.attempt.to_owned());
        let network = network_mode(confinement);
        let (runtime, gateway) = run_blocking(move || {
            let runtime = AttemptRuntime::find(&store, &dir).map_err(io::Error::other)?;
            let gateway = runtime.gateway(network)?;
            Ok((Arc::new(runtime), gateway))
        })
        .await
        .map_err(AttemptError::Host)?;
        let claim = runtime.claim_image(image, attempt, &policy).await;
        let claim = claim.map_err(|error| attempt_error(error, "image"))?;
        let gpus = match gpus {
            None => Vec::new(),
            Some(names) => select_gpus(names, gpu::discover().await.gpus)?,
        };
        Ok(Self { runtime, claim, image: image.to_owned(), gpus, gateway })
    }

    /// Writes the files of the container, and returns the command that runs it. The image stays in the store while its
    /// claim lives.
    pub(super) async fn into_command(
        self,
        spec: AttemptContainer<'_>,
        errors: &Path,
    ) -> Result<(Vec<String>, ImageClaim), AttemptError> {
        let command = self.runtime.prepare(spec, &self.claim, errors);
        Ok((command.map_err(|error| attempt_error(error, "start_failed"))?, self.claim))
    }
}

async fn run_blocking<T: Send + 'static>(
    work: impl FnOnce() -> io::Result<T> + Send + 'static,
) -> io::Result<T> {
    tokio::task::spawn_blocking(work).await.map_err(io::Error::other)?
}

/// Returns whether other hosts could run the container.
fn attempt_error(error: RuntimeError, reason: &'static str) -> AttemptError {
    let why = format_chain(&error);
    match error {
        RuntimeError::NoImage { .. } | RuntimeError::Unauthorized { .. } => {
            AttemptError::CannotRun { reason: "image", why }
        }
        RuntimeError::Refused { .. } => AttemptError::CannotRun { reason, why },
        RuntimeError::Stalled { .. }
        | RuntimeError::NoDisk { .. }
        | RuntimeError::Away { .. }
        | RuntimeError::Failed { .. } => AttemptError::Host(io::Error::other(why)),
    }
}

/// Selects the GPUs that the dispatcher or the cluster has assigned, by index or by name.
fn select_gpus(names: &str, all: Vec<Gpu>) -> Result<Vec<Gpu>, AttemptError> {
    let find = |name: &str| all.iter().find(|gpu| gpu.id == name || gpu.index.to_string() == name).cloned();
    let missing = |name: &str| AttemptError::CannotRun {
        reason: REFUSED_REASON,
        why: format!("GPU `{name}` of `CUDA_VISIBLE_DEVICES` was not found on this host"),
    };
    let names = names.split(',').map(str::trim).filter(|name| !name.is_empty());
    names.map(|name| find(name).ok_or_else(|| missing(name))).collect()
}

pub(super) fn network_mode(confinement: &ContainerConfinement) -> NetworkMode {
    if confinement.network == HOST_NETWORK { NetworkMode::Host } else { NetworkMode::Bridge }
}

pub(super) fn policy_limits(confinement: &ContainerConfinement) -> PolicyLimits {
    PolicyLimits {
        pids: confinement.pids_limit.unwrap_or(0),
        new_privileges: !confinement.security_opt.iter().any(|option| option == NO_NEW_PRIVILEGES),
        capabilities: confinement.cap_add.clone(),
    }
}

/// Limits of the group of the attempt. Without root it is also that of the container; the OCI runtime of root creates
/// another one.
pub(super) fn group_limits(
    memory: Option<u64>,
    cpus: Option<u64>,
    confinement: Option<&ContainerConfinement>,
) -> TaskLimits {
    if rustix::process::geteuid().is_root() {
        return TaskLimits::default();
    }
    let pids = confinement.and_then(|kept_in| kept_in.pids_limit);
    #[expect(clippy::cast_precision_loss, reason = "numbers of cores are small")]
    let cpu = cpus.map(|cpus| cpus as f64);
    TaskLimits { cpu, memory, pids: pids.and_then(|pids| u64::try_from(pids).ok()) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        host::gpu::Vendor,
        shim::docker::{NETWORK, container_confinement},
    };

    #[test]
    fn gpus_are_those_that_were_assigned() {
        let gpu = |index: u32| Gpu {
            vendor: Vendor::Nvidia,
            id: format!("GPU-{index}"),
            index,
            name: "G".to_owned(),
            memory_mib: 1,
            compute_capability: None,
            devices: vec!["/dev/null".into()],
        };
        let all = || (0..4).map(gpu).collect();
        let selected = |names| {
            select_gpus(names, all()).map(|gpus| gpus.iter().map(|one| one.index).collect::<Vec<_>>())
        };
        assert_eq!(selected("2,0").unwrap(), [2, 0]);
        assert_eq!(selected("GPU-3, 1").unwrap(), [3, 1]);
        let Err(AttemptError::CannotRun { why, .. }) = selected("7") else { panic!("it was found") };
        assert!(why.contains("GPU `7`"), "{why}");
    }

    #[test]
    fn the_confinement_is_that_of_the_policy() {
        let limits = PolicyLimits { pids: 7, new_privileges: false, capabilities: vec!["CHOWN".to_owned()] };
        for network in [NetworkMode::Host, NetworkMode::Bridge] {
            let confinement = container_confinement(&limits, false, network);
            assert_eq!((policy_limits(&confinement), network_mode(&confinement)), (limits.clone(), network));
        }
        let free = PolicyLimits { new_privileges: true, ..limits };
        assert_eq!(policy_limits(&container_confinement(&free, false, NetworkMode::Host)), free);
        assert_ne!(NETWORK, HOST_NETWORK);
    }
}
