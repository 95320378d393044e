//! Backend `slurm`: clusters behind dispatchers.
//!
//! An instance of this backend is a position in the queue: it costs nothing, exists at once, and is as large as the
//! node that it may become. The cluster decides where and when its job runs. See `agents::queue`.

use futures_util::FutureExt as _;
use serde_json::json;
use windlass_backend::{
    AgentEndpoint, Backend, BackendError, BackendFuture, BackendInstance, DeleteProgress, InstanceRequest,
    InstanceSource, InstanceState,
};
use windlass_model::{
    backend_kind::BackendType,
    money::Price,
    plan::offers::{Availability, Gpu, HostSpec, Offer},
};

use crate::{
    db::{Db, DbError},
    dispatcher_nodes::{self, DispatcherView, NodeGroup, SILENT_AFTER},
};

/// Name of the backend in configurations.
pub const NAME: &str = BackendType::Slurm.as_str();
const MIB_PER_GB: u64 = 1024;

pub struct QueueBackend {
    db: Db,
}

impl QueueBackend {
    pub fn new(db: Db) -> Self {
        Self { db }
    }

    /// Dispatchers that reported recently.
    async fn present(&self) -> Result<Vec<DispatcherView>, DbError> {
        let now = self.db.now().await?;
        let all = dispatcher_nodes::list(&self.db).await?;
        Ok(all.into_iter().filter(|one| one.seen_at + SILENT_AFTER > now).collect())
    }
}

fn unavailable(error: &DbError) -> BackendError {
    BackendError::Unavailable { what: "failed to list the dispatchers", message: error.to_string() }
}

fn offer(dispatcher: &DispatcherView, nodes: &NodeGroup) -> Offer {
    let gpu = Gpu::from_name(None, &nodes.gpu_type, 0, None);
    let mut kind = format!("{}cpu-{}gb", nodes.cpus, nodes.memory_mib / MIB_PER_GB);
    if nodes.gpus > 0 {
        let name = if gpu.name.is_empty() { "gpu" } else { &gpu.name };
        kind.push_str(&format!("-{}{}", nodes.gpus, name.to_ascii_lowercase().replace(' ', "-")));
    }
    Offer {
        backend: NAME.to_owned(),
        region: dispatcher.name.clone(),
        zones: Some(nodes.partition.clone()).filter(|name| !name.is_empty()).into_iter().collect(),
        instance_type: kind,
        price: Price::ZERO,
        availability: Availability::Available,
        reservation: None,
        host: HostSpec {
            cpus: nodes.cpus,
            arch: None,
            memory_mib: nodes.memory_mib,
            disk_mib: 0,
            gpus: vec![gpu; nodes.gpus as usize],
            spot: false,
            // Each node has its own; the executor on it refuses what it cannot run.
            runtimes: None,
        },
        total_blocks: 1,
    }
}

impl Backend for QueueBackend {
    fn name(&self) -> &'static str {
        NAME
    }

    fn offers(&self) -> BackendFuture<'_, Vec<Offer>> {
        async move {
            let present = self.present().await.map_err(|error| unavailable(&error))?;
            let clusters = present.iter().filter(|one| one.kind == NAME);
            Ok(clusters.flat_map(|one| one.nodes.iter().map(|nodes| offer(one, nodes))).collect())
        }
        .boxed()
    }

    fn create<'a>(&'a self, order: &'a InstanceRequest) -> BackendFuture<'a, BackendInstance> {
        async move {
            let InstanceSource::Offer(offer) = &order.want else {
                let message = "a queue has no SSH hosts".to_owned();
                return Err(BackendError::Refused {
                    what: "cannot create an instance in the queue",
                    message,
                });
            };
            let present = self.present().await.map_err(|error| unavailable(&error))?;
            if !present.iter().any(|one| one.name == offer.region) {
                let message = format!("dispatcher `{}` is offline", offer.region);
                return Err(BackendError::NoCapacity { message });
            }
            Ok(BackendInstance {
                id: order.instance.to_string(),
                reach: Some(AgentEndpoint::Queue),
                hostname: None,
                internal_ip: None,
                has: None,
                agent_version: None,
                memo: json!({ "said": format!("jobs run through dispatcher {}", offer.region) }),
            })
        }
        .boxed()
    }

    fn find<'a>(
        &'a self,
        _order: &'a InstanceRequest,
        machine: &'a BackendInstance,
    ) -> BackendFuture<'a, InstanceState> {
        std::future::ready(Ok(InstanceState::Running(machine.clone()))).boxed()
    }

    fn delete<'a>(
        &'a self,
        _order: &'a InstanceRequest,
        _machine: Option<&'a BackendInstance>,
    ) -> BackendFuture<'a, DeleteProgress> {
        std::future::ready(Ok(DeleteProgress::Gone)).boxed()
    }
}
