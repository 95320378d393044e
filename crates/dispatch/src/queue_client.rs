//! Client of the container queue for a dispatcher: over the public API, with a separate token.

use std::sync::{
    LazyLock,
    atomic::{AtomicU64, Ordering},
};

use serde_json::{Value, json};
use windlass_api::queue_client::{QueueError, QueueHttpClient, percent_encode};
use windlass_model::{
    container::Status,
    dispatch::{
        Attempt, ContainerNeeds, ContainerView, GpuRequirement, QueueSnapshot, capacity::NodeClass,
        turns::QueueUsage,
    },
    gpu::compute_capability,
    queue::{STOP_SECS_DEFAULT, STOP_SECS_MAX},
    time::{Span, Timestamp},
};

/// Maximum number of queued containers that one request reads; the rest is read later.
const QUEUED_MAX: usize = 1_000;
/// Maximum number of uuids in one request.
const UUID_BATCH_MAX: usize = 100;
/// Fields that [`Door::read`] reads; records with all their mounts would be large.
const SELECTED_FIELDS: [&str; 10] = [
    "uuid",
    "owner_uuid",
    "state",
    "priority",
    "attempt",
    "created_at",
    "locked_by_uuid",
    "runtime_constraints",
    "scheduling_parameters",
    "stop_duration",
];

/// A dispatcher's client of the queue.
#[derive(Debug)]
pub struct QueueClient {
    client: QueueHttpClient,
    /// Identity of this dispatcher in the queue.
    pub token_uuid: String,
    name: Option<DispatcherName>,
}

/// Name of a dispatcher for users: containers may request it by its name.
#[derive(Clone, Debug)]
pub struct DispatcherName {
    kind: &'static str,
    name: String,
}

impl DispatcherName {
    /// Name of a Slurm cluster.
    pub fn of_slurm(name: String) -> Self {
        Self { kind: "slurm", name }
    }
}

/// Lock that was just acquired.
#[derive(Debug)]
pub struct ContainerLock {
    pub attempt: Attempt,
    pub executor_token: String,
}

impl QueueClient {
    /// Creates the client and reads the identity of its token.
    pub async fn open(client: QueueHttpClient) -> Result<Self, QueueError> {
        let own = client.get("api_client_authorizations/current").await?;
        let token_uuid = own["uuid"].as_str().unwrap_or_default().to_owned();
        Ok(Self { client, token_uuid, name: None })
    }

    /// Returns the same client with a name.
    #[must_use]
    pub fn named(self, name: Option<DispatcherName>) -> Self {
        Self { name, ..self }
    }

    /// Holds the lease of this token for this many seconds; 0 releases it. Returns the holder if that is another
    /// process. A queue without leases has nothing to hold.
    pub async fn hold(&self, seconds: u64) -> Result<Option<String>, QueueError> {
        let lease =
            json!({ "lease": { "holder": *HOLDER_ID, "described": describe_process(), "seconds": seconds } });
        match self.client.put("dispatchers/current/lease", &lease).await {
            Ok(answer) if answer["held"] == false => {
                Ok(Some(answer["holder"].as_str().unwrap_or("an unknown process").to_owned()))
            }
            Ok(_) => Ok(None),
            Err(error) if error.status() == Some(404) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Announces the nodes of this dispatcher, and that it is online. Does nothing without a name.
    pub async fn announce(&self, kinds: &[NodeClass]) -> Result<(), QueueError> {
        let Some(DispatcherName { kind, name }) = &self.name else { return Ok(()) };
        let nodes = kinds.iter().map(|kind| {
            json!({
                "partition": kind.partition, "cpus": kind.size.cpus, "memory_mib": kind.size.memory >> 20,
                "gpus": kind.size.gpus, "gpu_type": kind.gpu_type, "count": kind.count,
            })
        });
        let request = json!({ "dispatcher": { "kind": kind, "nodes": nodes.collect::<Vec<_>>() } });
        self.client.put(&format!("dispatchers/{}", percent_encode(name)), &request).await.map(drop)
    }

    /// Returns false for a queued container that requests another dispatcher.
    fn is_eligible(&self, record: &Value) -> bool {
        let wanted = record["scheduling_parameters"]["dispatcher"].as_str();
        record["state"] != "Queued"
            || wanted.is_none_or(|wanted| self.name.as_ref().is_some_and(|own| own.name == wanted))
    }

    pub fn url(&self) -> String {
        self.client.url()
    }

    /// Reads the queued containers, some of every owner, and the usage by which they are ordered.
    async fn list_queued(&self) -> Result<(Vec<ContainerView>, QueueUsage), QueueError> {
        let filters = percent_encode(&json!([["state", "=", "Queued"], ["priority", ">", 0]]).to_string());
        let path = |order: Value| {
            let order = percent_encode(&order.to_string());
            format!("containers?filters={filters}&order={order}&limit={QUEUED_MAX}&count=none")
        };
        let page = match self.page(&path(json!(["turn"]))).await {
            // An older server, which does not know this order.
            Err(error) if error.is_refusal() => {
                self.page(&path(json!(["priority desc", "created_at", "uuid"]))).await?
            }
            other => other?,
        };
        let usage = serde_json::from_value(page["usage"].clone()).unwrap_or_default();
        Ok((self.read_items(&page), usage))
    }

    /// Reads the containers that this dispatcher holds, that it might lock, and for which it still has jobs.
    pub async fn snapshot(
        &self,
        tracked: &[String],
        requested_at: Timestamp,
    ) -> Result<QueueSnapshot, QueueError> {
        let mut containers = self.list("containers/current?limit=1000&count=none").await?;
        let (queued, usage) = self.list_queued().await?;
        containers.extend(queued);
        let missing: Vec<&String> =
            tracked.iter().filter(|uuid| !containers.iter().any(|one| one.uuid == **uuid)).collect();
        for batch in missing.chunks(UUID_BATCH_MAX) {
            let filters = percent_encode(&json!([["uuid", "in", batch]]).to_string());
            containers
                .extend(self.list(&format!("containers?filters={filters}&limit=1000&count=none")).await?);
        }
        Ok(QueueSnapshot { containers, usage, requested_at })
    }

    async fn list(&self, path: &str) -> Result<Vec<ContainerView>, QueueError> {
        Ok(self.read_items(&self.page(path).await?))
    }

    async fn page(&self, path: &str) -> Result<Value, QueueError> {
        let select = percent_encode(&json!(SELECTED_FIELDS).to_string());
        self.client.get(&format!("{path}&select={select}")).await
    }

    fn read_items(&self, page: &Value) -> Vec<ContainerView> {
        let items = page["items"].as_array().into_iter().flatten();
        items.filter(|item| self.is_eligible(item)).filter_map(|item| self.read(item)).collect()
    }

    /// Reads one container again.
    pub async fn find(&self, uuid: &str) -> Result<Option<ContainerView>, QueueError> {
        match self.client.get(&format!("containers/{uuid}")).await {
            Ok(record) => Ok(self.read(&record)),
            Err(error) if error.status() == Some(404) => Ok(None),
            Err(error) => Err(error),
        }
    }

    fn read(&self, record: &Value) -> Option<ContainerView> {
        let status: Status = record["state"].as_str()?.parse().ok()?;
        Some(ContainerView {
            uuid: record["uuid"].as_str()?.to_owned(),
            status,
            priority: record["priority"].as_u64().unwrap_or(0),
            attempt: record["attempt"].as_u64().unwrap_or(0),
            created_at: Timestamp::parse(record["created_at"].as_str()?).ok()?,
            owner: record["owner_uuid"].as_str().unwrap_or_default().to_owned(),
            is_locked_here: record["locked_by_uuid"] == self.token_uuid.as_str(),
            needs: parse_needs(record),
        })
    }

    pub async fn lock(&self, uuid: &str) -> Result<ContainerLock, QueueError> {
        // The same name on a repeat: a lost response can be recovered.
        let name = next_request_key();
        let path = format!("containers/{uuid}/lock");
        let locked = match self.client.send_idempotent("POST", &path, &Value::Null, &name).await {
            Err(QueueError::Exchange(_) | QueueError::TimedOut) => {
                self.client.send_idempotent("POST", &path, &Value::Null, &name).await?
            }
            other => other?,
        };
        let number = locked["attempt"].as_u64().unwrap_or(0);
        let executor_token = locked["executor_token"].as_str().unwrap_or_default().to_owned();
        Ok(ContainerLock { attempt: Attempt { uuid: uuid.to_owned(), number }, executor_token })
    }

    pub async fn unlock(&self, attempt: &Attempt, released: bool) -> Result<(), QueueError> {
        let path =
            format!("containers/{}/unlock?attempt={}&release={released}", attempt.uuid, attempt.number);
        self.client.post(&path, &Value::Null).await.map(drop)
    }

    /// Cancels a container because the result of this attempt is lost.
    pub async fn cancel(&self, attempt: &Attempt, reason: &str, error: &str) -> Result<(), QueueError> {
        let status = json!({ "error": error, "reason": reason });
        let change = json!({ "state": "Cancelled", "attempt": attempt.number, "runtime_status": status });
        let path = format!("containers/{}", attempt.uuid);
        self.client.put(&path, &json!({ "container": change })).await.map(drop)
    }

    /// Reports what a submitted container waits for.
    pub async fn waits(&self, attempt: &Attempt, activity: &str) -> Result<(), QueueError> {
        let change = json!({ "attempt": attempt.number, "runtime_status": json!({ "activity": activity }) });
        let path = format!("containers/{}", attempt.uuid);
        self.client.put(&path, &json!({ "container": change })).await.map(drop)
    }

    /// Writes an event of the dispatcher.
    pub async fn say(
        &self,
        uuid: &str,
        event: &str,
        text: &str,
        attempt: Option<u64>,
    ) -> Result<(), QueueError> {
        let properties = json!({
            "event": event, "text": text, "dispatcher": self.token_uuid, "attempt": attempt, "reason": text,
        });
        let log = json!({ "object_uuid": uuid, "event_type": "dispatch", "properties": properties });
        self.client.post("logs", &json!({ "log": log })).await.map(drop)
    }
}

/// Random identifier of this process.
static HOLDER_ID: LazyLock<String> = LazyLock::new(|| {
    let drawn = std::fs::read_to_string("/proc/sys/kernel/random/uuid").unwrap_or_default();
    drawn.trim().replace('-', "")
});

/// Describes this process for people: its pid and host.
fn describe_process() -> String {
    let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    let host: String = host.trim().chars().take(64).collect();
    format!("process {} on {host}", std::process::id())
}

/// Returns a key that differs for every call, also from those of the process that replaces this one.
fn next_request_key() -> String {
    static COUNT: AtomicU64 = AtomicU64::new(0);
    format!("lock-{}-{}", *HOLDER_ID, COUNT.fetch_add(1, Ordering::Relaxed))
}

fn parse_gpu_needs(requirements: &Value, scheduling: &Value) -> GpuRequirement {
    // For CUDA programs this is the minimum capability; for others, names of processors that the scheduler does not
    // report.
    let target = requirements["gpu"]["hardware_target"][0]
        .as_str()
        .or(requirements["cuda"]["hardware_capability"].as_str());
    GpuRequirement {
        model: scheduling["gpu_type"].as_str().map(str::to_owned),
        min_memory: requirements["gpu"]["vram"].as_u64().unwrap_or(0),
        min_compute_capability: target.and_then(compute_capability),
    }
}

/// Returns the requirements of a record.
fn parse_needs(record: &Value) -> ContainerNeeds {
    let requirements = &record["runtime_constraints"];
    let scheduling = &record["scheduling_parameters"];
    let number = |value: &Value| value.as_u64().unwrap_or(0);
    let gpus =
        number(&requirements["gpu"]["device_count"]).max(number(&requirements["cuda"]["device_count"]));
    let words = |name: &str| {
        let list = scheduling[name].as_array().into_iter().flatten();
        list.filter_map(Value::as_str).map(str::to_owned).collect()
    };
    let seconds = number(&scheduling["max_run_time"]);
    let span = |secs: u64| Span::secs(i64::try_from(secs).unwrap_or(i64::MAX));
    let stop = record["stop_duration"].as_u64().or(scheduling["stop_duration"].as_u64());
    ContainerNeeds {
        cpus: u32::try_from(number(&requirements["vcpus"])).unwrap_or(u32::MAX),
        memory: number(&requirements["ram"]),
        gpus: u32::try_from(gpus).unwrap_or(u32::MAX),
        gpu_requirement: parse_gpu_needs(requirements, scheduling),
        partitions: words("partitions"),
        features: words("features"),
        max_run_time: (seconds > 0).then(|| span(seconds)),
        stop_duration: span(stop.unwrap_or(STOP_SECS_DEFAULT).min(STOP_SECS_MAX)),
        is_preemptible: scheduling["preemptible"].as_bool().unwrap_or(false),
    }
}
