//! The backend: pods of instances, and streams to their agents.

use std::time::Duration;

use futures_util::future::join_all;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use tokio::{
    io::AsyncWriteExt as _,
    time::{Instant, sleep, timeout},
};
use windlass_backend::{
    AgentEndpoint, AgentStream, Backend, BackendError, BackendFuture, BackendInstance, ContainerRequest,
    DeleteProgress, GpuInfo, HardwareInfo, InstanceRequest, InstanceSource, InstanceState,
    remote::AgentBinaries,
};
use windlass_model::{
    backend_kind::BackendType,
    error_chain::format_chain,
    id::InstanceId,
    money::Price,
    plan::{
        execution_mode::Runtimes,
        offers::{Availability, HostSpec, Offer},
    },
    resources::CpuArch,
};

use crate::{
    api_client::{ApiClient, ApiError},
    exec_stream, kubeconfig, nodes,
    objects::{Node, Pod},
    pod_manifest::{
        self, AGENT_CONTAINER, AGENT_PATH, AGENT_SOCKET, INSTANCE_LABEL, JOB_CONTAINER, PodInputs,
    },
    pod_state::{self, PodState},
    settings::{KubernetesSettings, SettingsError},
};

pub const NAME: &str = BackendType::Kubernetes.as_str();
/// Type of the only offer of a cluster whose nodes may not be listed.
pub(crate) const ANY_NODE: &str = "any-node";
/// Size of that offer: the scheduler knows the real one.
const ANY_CPUS: u32 = 1024;
const ANY_MEMORY_MIB: u64 = 1 << 30;
/// Name of the runtime in the hardware of an instance.
const RUNTIME: &str = "pod";
/// Maximum time for which a deletion is awaited; then it is checked again later.
const DELETE_WAIT: Duration = Duration::from_secs(10);
const DELETE_POLL: Duration = Duration::from_millis(200);
/// Grace period of a deletion: the job was stopped before.
const DELETE_GRACE_SECS: u32 = 5;
/// Maximum time to send the agent to a pod.
const INSTALL_TIMEOUT: Duration = Duration::from_secs(300);
const LIVE_PODS: &str = "fieldSelector=status.phase!%3DSucceeded%2Cstatus.phase!%3DFailed&";

/// Private state of this backend in an instance.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
struct PodMemo {
    context: String,
    namespace: String,
    /// Node that the pod runs on.
    node: Option<String>,
    #[serde(rename = "said")]
    message: Option<String>,
}

pub struct KubernetesBackend {
    settings: KubernetesSettings,
    clusters: Vec<ApiClient>,
    binaries: AgentBinaries,
}

impl KubernetesBackend {
    /// Reads the kubeconfig; calls nothing.
    pub fn new(settings: KubernetesSettings, binaries: AgentBinaries) -> Result<Self, SettingsError> {
        let clusters =
            kubeconfig::load(&settings)?.into_iter().map(ApiClient::new).collect::<Result<_, _>>()?;
        Ok(Self { settings, clusters, binaries })
    }

    fn cluster(&self, name: &str) -> Result<&ApiClient, BackendError> {
        self.clusters.iter().find(|cluster| cluster.name() == name).ok_or_else(|| BackendError::Refused {
            what: "find the cluster",
            message: format!("the settings have no context `{name}`"),
        })
    }

    /// Returns the cluster of an instance: that of its pod, or of its offer if it has none yet.
    fn cluster_of(
        &self,
        order: &InstanceRequest,
        machine: Option<&BackendInstance>,
    ) -> Result<&ApiClient, BackendError> {
        if let Some(memo) = machine.and_then(memo) {
            return self.cluster(&memo.context);
        }
        self.cluster(&offer(order)?.region)
    }

    async fn list_offers(&self) -> Result<Vec<Offer>, BackendError> {
        let found = join_all(self.clusters.iter().map(|cluster| self.cluster_offers(cluster))).await;
        let mut offers = Vec::new();
        for one in found {
            offers.extend(one?);
        }
        Ok(offers)
    }

    async fn cluster_offers(&self, cluster: &ApiClient) -> Result<Vec<Offer>, BackendError> {
        let nodes = match cluster.list::<Node>("/api/v1/nodes", "").await {
            Ok(nodes) => nodes,
            Err(error) if error.is_forbidden() => {
                return Ok(vec![any_node(cluster.name(), self.settings.privileged)]);
            }
            Err(error) => return Err(backend_error("list the nodes", error)),
        };
        let pods = match cluster.list::<Pod>("/api/v1/pods", LIVE_PODS).await {
            Ok(pods) => pods,
            // What others use is not known then, and the scheduler decides.
            Err(error) if error.is_forbidden() => Vec::new(),
            Err(error) => return Err(backend_error("list the pods", error)),
        };
        Ok(nodes::offers(cluster.name(), &nodes, &pods, &self.settings))
    }

    async fn create_pod(&self, order: &InstanceRequest) -> Result<BackendInstance, BackendError> {
        let offer = offer(order)?;
        let cluster = self.cluster(&offer.region)?;
        let Some(container) = &order.container else {
            return Err(BackendError::Refused {
                what: "create a pod",
                message: "a pod is made for a job: set `nodes` of the fleet to a range from 0, such as `0..`"
                    .to_owned(),
            });
        };
        if let Some(secret) = pod_manifest::pull_secret(order.instance, container) {
            let created = cluster.create::<Value>(&secrets_path(cluster), &secret).await;
            if let Err(error) = created
                && !error.is_conflict()
            {
                return Err(backend_error("create the secret for the registry", error));
            }
        }
        let mut offers = vec![offer.clone()];
        offers.extend(order.alternatives.iter().filter(|other| *other != offer).cloned());
        let pod = pod_manifest::pod(&PodInputs {
            instance: order.instance,
            display_name: &order.name,
            container,
            offers: &offers,
            enrolment: &order.enrolment,
            tags: &order.tags,
            settings: &self.settings,
        });
        let created = match cluster.create::<Pod>(&pods_path(cluster), &pod).await {
            Ok(pod) => pod,
            Err(error) if error.is_conflict() => self.existing_pod(cluster, order.instance).await?,
            Err(error) => return Err(creation_error(error)),
        };
        let mut machine = machine(cluster, order.instance, &created, None);
        machine.has = Some(hardware(container, offer));
        Ok(machine)
    }

    /// Returns the pod that an earlier request has created.
    async fn existing_pod(&self, cluster: &ApiClient, instance: InstanceId) -> Result<Pod, BackendError> {
        let pod = cluster.get::<Pod>(&pod_path(cluster, instance)).await;
        let pod = pod.map_err(|error| backend_error("find the pod", error))?;
        if pod.metadata.labels.get(INSTANCE_LABEL) != Some(&instance.to_string()) {
            let message = format!("pod `{}` exists and is not of this instance", pod.metadata.name);
            return Err(BackendError::Refused { what: "create a pod", message });
        }
        Ok(pod)
    }

    async fn find_pod(
        &self,
        order: &InstanceRequest,
        known: &BackendInstance,
    ) -> Result<InstanceState, BackendError> {
        let cluster = self.cluster_of(order, Some(known))?;
        let pod = match cluster.get::<Pod>(&pod_path(cluster, order.instance)).await {
            Ok(pod) => pod,
            Err(error) if error.is_not_found() => {
                return Ok(InstanceState::Gone { message: "the pod was deleted".to_owned() });
            }
            Err(error) => return Err(backend_error("find the pod", error)),
        };
        let found = |message: Option<String>| BackendInstance {
            has: known.has.clone(),
            ..machine(cluster, order.instance, &pod, message)
        };
        Ok(match pod_state::read(&pod) {
            PodState::Over { message } => InstanceState::Gone { message },
            PodState::Waiting { message } => InstanceState::Starting(found(message)),
            PodState::WaitingForAgent => {
                let arch = arch_of(order);
                let message = if self.settings.agent_image.is_some() {
                    None
                } else {
                    match self.install(cluster, order.instance, arch).await {
                        Ok(()) => None,
                        // The state of a pod lags behind: an earlier call has sent it already.
                        Err(BackendError::Unavailable { message, .. }) if is_container_over(&message) => None,
                        Err(BackendError::Unavailable { message, .. }) => Some(message),
                        Err(error) => return Err(error),
                    }
                };
                InstanceState::Starting(found(message))
            }
            PodState::Running => InstanceState::Running(BackendInstance {
                reach: Some(AgentEndpoint::Backend { backend: NAME.to_owned() }),
                ..found(None)
            }),
        })
    }

    /// Sends the agent to the init container, which then ends.
    async fn install(
        &self,
        cluster: &ApiClient,
        instance: InstanceId,
        arch: &str,
    ) -> Result<(), BackendError> {
        let what = "send the agent to the pod";
        let unavailable = |message: String| BackendError::Unavailable { what, message };
        let binary = self
            .binaries
            .load(arch)
            .map_err(|error| BackendError::Refused { what, message: format_chain(&error) })?;
        let binary = binary.ok_or_else(|| BackendError::Refused {
            what,
            message: format!(
                "the server has no agent for {arch}, only for {}",
                self.binaries.arches().join(", ")
            ),
        })?;
        let script = pod_manifest::install_script(binary.bytes.len());
        let name = pod_manifest::name(instance);
        let sent = timeout(INSTALL_TIMEOUT, async {
            let program = exec_stream::start(cluster, &name, AGENT_CONTAINER, &["sh", "-c", &script]).await;
            let mut program = program.map_err(|error| error.to_string())?;
            // The reason why it ended is better than the one why it reads no more.
            let written = program.stream.write_all(&binary.bytes).await;
            let _ = program.stream.shutdown().await;
            let ended = program.ended.await.map_err(|_| "the stream was lost".to_owned())?;
            ended.and_then(|()| written.map_err(|error| error.to_string()))
        });
        match sent.await {
            Ok(Ok(())) => Ok(()),
            Ok(Err(message)) => Err(unavailable(message)),
            Err(_) => Err(unavailable(format!("not done within {} s", INSTALL_TIMEOUT.as_secs()))),
        }
    }

    async fn delete_pod(
        &self,
        order: &InstanceRequest,
        known: Option<&BackendInstance>,
    ) -> Result<DeleteProgress, BackendError> {
        let cluster = self.cluster_of(order, known)?;
        let options = json!({
            "apiVersion": "v1", "kind": "DeleteOptions", "gracePeriodSeconds": DELETE_GRACE_SECS,
        });
        let secret = format!("{}/{}", secrets_path(cluster), pod_manifest::name(order.instance));
        match cluster.delete(&secret, &json!({"apiVersion": "v1", "kind": "DeleteOptions"})).await {
            Ok(()) => {}
            // Without the right to delete secrets, there are none.
            Err(error) if error.is_not_found() || error.is_forbidden() => {}
            Err(error) => return Err(backend_error("delete the secret for the registry", error)),
        }
        let path = pod_path(cluster, order.instance);
        let until = Instant::now() + DELETE_WAIT;
        match cluster.delete(&path, &options).await {
            Ok(()) => {}
            Err(error) if error.is_not_found() => return Ok(DeleteProgress::Gone),
            Err(error) => return Err(backend_error("delete the pod", error)),
        }
        while Instant::now() < until {
            match cluster.get::<Pod>(&path).await {
                Ok(_) => sleep(DELETE_POLL).await,
                Err(error) if error.is_not_found() => return Ok(DeleteProgress::Gone),
                Err(error) => return Err(backend_error("find the pod", error)),
            }
        }
        Ok(DeleteProgress::InProgress)
    }

    async fn connect_agent(&self, machine: &BackendInstance) -> Result<Box<dyn AgentStream>, BackendError> {
        let memo = memo(machine).ok_or_else(|| BackendError::Refused {
            what: "connect to the agent",
            message: "the record of the pod cannot be read".to_owned(),
        })?;
        let cluster = self.cluster(&memo.context)?;
        let command = [AGENT_PATH, "relay", AGENT_SOCKET];
        let started = exec_stream::start(cluster, &machine.id, JOB_CONTAINER, &command).await;
        let program = started.map_err(|error| backend_error("connect to the agent", error))?;
        Ok(Box::new(program.stream))
    }
}

/// Returns whether a program was not started because its container has ended.
fn is_container_over(message: &str) -> bool {
    ["in a stopped state", "container not found", "not running", "is completed"]
        .iter()
        .any(|words| message.contains(words))
}

fn offer(order: &InstanceRequest) -> Result<&Offer, BackendError> {
    match &order.want {
        InstanceSource::Offer(offer) => Ok(offer),
        InstanceSource::Host(_) => Err(BackendError::Refused {
            what: "create a pod",
            message: "a cluster has no SSH hosts".to_owned(),
        }),
    }
}

/// Returns the architecture of the agent, as `uname -m` names it.
fn arch_of(order: &InstanceRequest) -> &'static str {
    match offer(order).ok().and_then(|offer| offer.host.arch) {
        Some(CpuArch::Arm) => "aarch64",
        Some(CpuArch::X86) | None => "x86_64",
    }
}

fn memo(machine: &BackendInstance) -> Option<PodMemo> {
    serde_json::from_value(machine.memo.clone()).ok()
}

fn machine(cluster: &ApiClient, instance: InstanceId, pod: &Pod, message: Option<String>) -> BackendInstance {
    let node = pod.spec.node_name.clone();
    let memo = PodMemo {
        context: cluster.name().to_owned(),
        namespace: cluster.namespace().to_owned(),
        message: message.or_else(|| node.as_ref().map(|node| format!("a pod on node {node}"))),
        node,
    };
    let address = pod.status.pod_ip.clone();
    BackendInstance {
        id: pod_manifest::name(instance),
        reach: None,
        hostname: address.clone(),
        internal_ip: address,
        has: None,
        agent_version: None,
        memo: json!(memo),
    }
}

/// Returns what the pod has: what the job asked for, and what the node offers where it asked for nothing.
fn hardware(container: &ContainerRequest, offer: &Offer) -> HardwareInfo {
    let gpus = offer.host.gpus.iter().take(container.gpus as usize);
    HardwareInfo {
        cpus: container.cpus.unwrap_or(offer.host.cpus).max(1),
        arch: offer.host.arch.map(|arch| {
            let word = match arch {
                CpuArch::X86 => "x86",
                CpuArch::Arm => "arm",
            };
            word.to_owned()
        }),
        memory_mib: container.memory_mib.unwrap_or(offer.host.memory_mib),
        disk_mib: container.disk_mib.unwrap_or(offer.host.disk_mib),
        gpus: gpus.map(GpuInfo::from).collect(),
        runtime: RUNTIME.to_owned(),
        engine_away: None,
        processes: None,
        addresses: Vec::new(),
    }
}

/// Returns the offer of a cluster whose nodes may not be listed. It has no GPUs, because their names are not known.
fn any_node(region: &str, privileged: bool) -> Offer {
    Offer {
        backend: NAME.to_owned(),
        region: region.to_owned(),
        zones: Vec::new(),
        instance_type: ANY_NODE.to_owned(),
        price: Price::ZERO,
        availability: Availability::Unknown,
        reservation: None,
        host: HostSpec {
            cpus: ANY_CPUS,
            arch: None,
            memory_mib: ANY_MEMORY_MIB,
            disk_mib: 0,
            gpus: Vec::new(),
            spot: false,
            runtimes: Some(Runtimes::pod(privileged)),
        },
        total_blocks: 1,
    }
}

fn pods_path(cluster: &ApiClient) -> String {
    format!("/api/v1/namespaces/{}/pods", cluster.namespace())
}

fn pod_path(cluster: &ApiClient, instance: InstanceId) -> String {
    format!("{}/{}", pods_path(cluster), pod_manifest::name(instance))
}

fn secrets_path(cluster: &ApiClient) -> String {
    format!("/api/v1/namespaces/{}/secrets", cluster.namespace())
}

fn backend_error(what: &'static str, error: ApiError) -> BackendError {
    let message = error.to_string();
    if error.is_temporary() {
        BackendError::Unavailable { what, message }
    } else {
        BackendError::Refused { what, message }
    }
}

/// Converts a refusal of a pod. A quota that is used up may have room elsewhere, or later.
fn creation_error(error: ApiError) -> BackendError {
    match error {
        ApiError::Refused { code: 403, message, .. } if message.contains("exceeded quota") => {
            BackendError::NoCapacity { message }
        }
        error @ (ApiError::Refused { .. } | ApiError::Connection { .. } | ApiError::Login { .. }) => {
            backend_error("create a pod", error)
        }
    }
}

impl std::fmt::Debug for KubernetesBackend {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("KubernetesBackend").field(&self.clusters).finish()
    }
}

impl Backend for KubernetesBackend {
    fn name(&self) -> &'static str {
        NAME
    }

    fn offers(&self) -> BackendFuture<'_, Vec<Offer>> {
        Box::pin(self.list_offers())
    }

    fn create<'a>(&'a self, order: &'a InstanceRequest) -> BackendFuture<'a, BackendInstance> {
        Box::pin(self.create_pod(order))
    }

    fn find<'a>(
        &'a self,
        order: &'a InstanceRequest,
        machine: &'a BackendInstance,
    ) -> BackendFuture<'a, InstanceState> {
        Box::pin(self.find_pod(order, machine))
    }

    fn delete<'a>(
        &'a self,
        order: &'a InstanceRequest,
        machine: Option<&'a BackendInstance>,
    ) -> BackendFuture<'a, DeleteProgress> {
        Box::pin(self.delete_pod(order, machine))
    }

    fn connect<'a>(&'a self, machine: &'a BackendInstance) -> BackendFuture<'a, Box<dyn AgentStream>> {
        Box::pin(self.connect_agent(machine))
    }
}
