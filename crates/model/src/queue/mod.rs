//! Rules of the container queue: containers, requests for them, and permissions.
//!
//! Users submit requests. The server assigns each request a container, new or existing, and dispatchers lock
//! containers. All rules here are pure: they receive the relevant rows and return their new values; `settle` then
//! updates everything that depends on them.

pub mod change;
pub mod propagate;
pub mod request;
pub mod reuse;

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::{
    container::{ContainerActor, Status},
    plan::usage,
    state_machine::words,
    time::Timestamp,
};

/// Highest priority of a request.
pub const PRIORITY_MAX: u64 = 1000;
/// Time that a program has to exit once it is stopped, in seconds, if its container sets none.
pub const STOP_SECS_DEFAULT: u64 = 10;
/// Maximum of that time.
pub const STOP_SECS_MAX: u64 = 24 * 3600;
/// Variable of a container that names the job of a run that it is.
pub const JOB_VARIABLE: &str = "WINDLASS_JOB_ID";

words! {
    /// State of a request.
    pub enum RequestState: "container request state" {
        /// may still be changed; nothing runs for it
        Uncommitted = "Uncommitted",
        /// has a container
        Committed = "Committed",
        /// its container ended
        Final = "Final",
    }
}

/// Work specification, the same in a request and in its container.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct ContainerSpec {
    pub command: Vec<String>,
    pub cwd: String,
    pub environment: BTreeMap<String, String>,
    pub container_image: String,
    pub mounts: Map<String, Value>,
    pub output_path: String,
    pub output_glob: Vec<String>,
    pub service: bool,
    pub published_ports: Map<String, Value>,
    pub runtime_constraints: Map<String, Value>,
    pub scheduling_parameters: Map<String, Value>,
}

impl ContainerSpec {
    pub fn is_preemptible(&self) -> bool {
        self.scheduling_parameters.get("preemptible").and_then(Value::as_bool).unwrap_or(false)
    }

    pub fn max_run_time(&self) -> u64 {
        self.scheduling_parameters.get("max_run_time").and_then(Value::as_u64).unwrap_or(0)
    }

    /// Returns the time that the program has to exit once it is stopped, in seconds.
    pub fn stop_duration(&self) -> u64 {
        let given = self.scheduling_parameters.get("stop_duration").and_then(Value::as_u64);
        given.unwrap_or(STOP_SECS_DEFAULT).min(STOP_SECS_MAX)
    }

    /// Returns the requested thousandths of units of usage.
    pub fn milli_units(&self) -> u64 {
        let constraints = &self.runtime_constraints;
        let number = |name: &str| constraints.get(name).and_then(Value::as_u64).unwrap_or(0);
        let devices =
            |name: &str| constraints.get(name).and_then(|one| one["device_count"].as_u64()).unwrap_or(0);
        usage::milli_units(devices("gpu").max(devices("cuda")), number("vcpus"), number("ram") >> 20)
    }

    pub fn partitions(&self) -> Vec<String> {
        self.string_list("partitions")
    }

    /// Returns the features that a node must have.
    pub fn features(&self) -> Vec<String> {
        self.string_list("features")
    }

    fn string_list(&self, name: &str) -> Vec<String> {
        let list = self.scheduling_parameters.get(name).and_then(Value::as_array);
        let words = list.into_iter().flatten().filter_map(Value::as_str);
        words.map(str::to_owned).collect()
    }
}

/// The last write of a state, so that a repeated call returns the same response.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LastCall {
    pub token: String,
    pub request: String,
    pub what: String,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Container {
    pub uuid: String,
    pub owner_uuid: String,
    pub created_at: Timestamp,
    pub modified_at: Timestamp,
    pub modified_by_user_uuid: Option<String>,
    #[serde(flatten)]
    pub work: ContainerSpec,
    #[serde(with = "word")]
    pub state: Status,
    pub priority: u64,
    pub progress: f64,
    pub started_at: Option<Timestamp>,
    pub finished_at: Option<Timestamp>,
    pub locked_by_uuid: Option<String>,
    pub auth_uuid: Option<String>,
    pub lock_count: u32,
    /// Increases with each lock and is never reused: the fence.
    pub attempt: u64,
    pub runtime_status: Map<String, Value>,
    pub runtime_user_uuid: String,
    pub runtime_auth_scopes: Vec<String>,
    pub gateway_address: Option<String>,
    pub interactive_session_started: bool,
    pub exit_code: Option<i64>,
    pub output: Option<String>,
    pub log: Option<String>,
    pub output_properties: Map<String, Value>,
    pub output_storage_classes: Vec<String>,
    pub cost: f64,
    pub subrequests_cost: f64,
    /// Reason why it waits, as reported by the last dispatcher that left it.
    pub scheduling_status: String,
    pub reusable: bool,
    pub secret_mounts_digest: Option<String>,
    pub last_call: Option<LastCall>,
    /// Time that the program has to exit, in seconds, if the stop request sets another one than the specification.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stop_duration: Option<u64>,
}

impl Container {
    /// Creates a queued container.
    pub fn new(uuid: String, work: ContainerSpec, user: &str, now: Timestamp) -> Self {
        Self {
            uuid,
            owner_uuid: user.to_owned(),
            created_at: now,
            modified_at: now,
            modified_by_user_uuid: Some(user.to_owned()),
            runtime_status: request::initial_status(&work),
            work,
            state: Status::Queued,
            priority: 0,
            progress: 0.0,
            started_at: None,
            finished_at: None,
            locked_by_uuid: None,
            auth_uuid: None,
            lock_count: 0,
            attempt: 0,
            runtime_user_uuid: user.to_owned(),
            runtime_auth_scopes: vec!["all".to_owned()],
            gateway_address: None,
            interactive_session_started: false,
            exit_code: None,
            output: None,
            log: None,
            output_properties: Map::new(),
            output_storage_classes: vec!["default".to_owned()],
            cost: 0.0,
            subrequests_cost: 0.0,
            scheduling_status: String::new(),
            reusable: true,
            secret_mounts_digest: None,
            last_call: None,
            stop_duration: None,
        }
    }

    pub fn is_final(&self) -> bool {
        match self.state {
            Status::Complete | Status::Cancelled => true,
            Status::Queued | Status::Locked | Status::Running => false,
        }
    }

    /// Returns whether tokens of this attempt are valid.
    pub fn is_held(&self) -> bool {
        match self.state {
            Status::Locked | Status::Running => true,
            Status::Queued | Status::Complete | Status::Cancelled => false,
        }
    }
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ContainerRequest {
    pub uuid: String,
    pub owner_uuid: String,
    pub created_at: Timestamp,
    pub modified_at: Timestamp,
    pub modified_by_user_uuid: Option<String>,
    pub name: String,
    pub description: Option<String>,
    pub properties: Map<String, Value>,
    #[serde(with = "word")]
    pub state: RequestState,
    pub requesting_container_uuid: Option<String>,
    pub container_uuid: Option<String>,
    pub container_count: u32,
    pub container_count_max: u32,
    pub priority: u64,
    pub use_existing: bool,
    pub output_name: Option<String>,
    pub output_ttl: u64,
    pub output_uuid: Option<String>,
    pub log_uuid: Option<String>,
    pub cumulative_cost: f64,
    pub secret_mounts_digest: Option<String>,
    #[serde(flatten)]
    pub work: ContainerSpec,
}

impl ContainerRequest {
    pub fn new(uuid: String, user: &str, now: Timestamp) -> Self {
        Self {
            uuid,
            owner_uuid: user.to_owned(),
            created_at: now,
            modified_at: now,
            modified_by_user_uuid: Some(user.to_owned()),
            name: String::new(),
            description: None,
            properties: Map::new(),
            state: RequestState::Uncommitted,
            requesting_container_uuid: None,
            container_uuid: None,
            container_count: 0,
            container_count_max: 3,
            priority: 0,
            use_existing: true,
            output_name: None,
            output_ttl: 0,
            output_uuid: None,
            log_uuid: None,
            cumulative_cost: 0.0,
            secret_mounts_digest: None,
            work: ContainerSpec { cwd: ".".to_owned(), ..ContainerSpec::default() },
        }
    }
}

/// Value of `reason` in `runtime_status` of a container that the dispatcher or host refused to run. Another attempt
/// would be refused too.
pub const REFUSED_REASON: &str = "refused";

/// Caller, as far as these rules distinguish it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum QueueCaller {
    Admin,
    /// A user with a personal token.
    User,
    Dispatcher {
        token: String,
    },
    /// Runs one attempt of one container.
    Executor {
        container: String,
        attempt: u64,
    },
    /// The program in the container.
    Inside {
        container: String,
        attempt: u64,
    },
}

impl QueueCaller {
    /// Returns the role of the caller for this container; `None` if it may only read.
    fn actor(&self, container: &Container) -> Option<ContainerActor> {
        match self {
            Self::Admin => Some(ContainerActor::Admin),
            Self::User | Self::Inside { .. } => None,
            Self::Dispatcher { token } => {
                let holds = container.is_held() && container.locked_by_uuid.as_ref() == Some(token);
                Some(if holds { ContainerActor::Holder } else { ContainerActor::Dispatcher })
            }
            Self::Executor { container: uuid, attempt } => {
                (*uuid == container.uuid && *attempt == container.attempt).then_some(ContainerActor::Executor)
            }
        }
    }
}

/// Reason why a call was refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum QueueRefusal {
    /// The caller has no permission.
    #[error("{0}")]
    Denied(String),
    /// Not possible in the current state, or not at all.
    #[error("{0}")]
    Invalid(String),
}

fn refuse_invalid<T>(why: impl Into<String>) -> Result<T, QueueRefusal> {
    Err(QueueRefusal::Invalid(why.into()))
}

/// Returns the value with some attributes changed. Each must be among `allowed` and have the right type.
fn apply_patch<T: Serialize + serde::de::DeserializeOwned>(
    thing: &T,
    patch: &Map<String, Value>,
    allowed: &[&str],
) -> Result<T, QueueRefusal> {
    let unreadable = |error: serde_json::Error| QueueRefusal::Invalid(error.to_string());
    let mut whole = serde_json::to_value(thing).map_err(unreadable)?;
    for (name, value) in patch {
        if !allowed.contains(&name.as_str()) {
            return refuse_invalid(format!(
                "attribute `{name}` does not exist or cannot be set in this state"
            ));
        }
        if let Some(whole) = whole.as_object_mut() {
            whole.insert(name.clone(), value.clone());
        }
    }
    let names: Vec<&str> = patch.keys().map(String::as_str).collect();
    serde_json::from_value(whole)
        .map_err(|error| QueueRefusal::Invalid(format!("invalid {}: {error}", names.join(", "))))
}

/// Serialises enums with fixed names as text.
mod word {
    use serde::{Deserialize as _, Deserializer, Serializer, de::Error as _};

    use crate::state_machine::StrEnum;

    pub(super) fn serialize<T: StrEnum, S: Serializer>(word: &T, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(word.as_str())
    }

    pub(super) fn deserialize<'de, T: StrEnum, D: Deserializer<'de>>(deserializer: D) -> Result<T, D::Error> {
        let text = String::deserialize(deserializer)?;
        let found = T::ALL.iter().copied().find(|word| word.as_str() == text);
        found.ok_or_else(|| D::Error::custom(format!("unknown value `{text}`")))
    }
}
