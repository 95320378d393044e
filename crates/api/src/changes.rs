//! Feed of changes: one stream for everything that the caller may see.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use windlass_model::time::Timestamp;

use crate::{
    overview::Summary,
    rows::{ContainerRow, InstanceRow, ManagedJobRow, RunRow},
};

#[derive(Clone, Debug, Default, Serialize, Deserialize, JsonSchema)]
pub struct StreamRequest {
    /// Only changes in these projects, separated by commas.
    #[serde(default)]
    pub projects: Option<String>,
    /// Only changes of these kinds, separated by commas.
    #[serde(default)]
    pub kinds: Option<String>,
    /// Position after which the feed continues. A `Last-Event-ID` header takes precedence.
    #[serde(default)]
    pub since: Option<u64>,
}

/// Event `hello`: the first one of every stream.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct FeedHello {
    /// Current position.
    pub seq: u64,
    /// Version of windlass.
    pub server_version: String,
    /// Entry script of the web UI that the server serves.
    pub ui_version: String,
    #[schemars(with = "crate::document::DateTime")]
    pub now: Timestamp,
}

/// Row of the object that changed.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(untagged)]
pub enum FeedRow {
    Run(Box<RunRow>),
    ManagedJob(Box<ManagedJobRow>),
    Instance(Box<InstanceRow>),
    Container(Box<ContainerRow>),
}

/// Event `change`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct FeedChange {
    /// Position in the feed; for a change without an event, that of the last event.
    pub seq: u64,
    /// Time of the database when the row was read, in microseconds.
    pub as_of: i64,
    /// `run`, `job`, `instance`, `fleet`, `volume`, `gateway`, `managed-job` or `container`.
    pub kind: String,
    pub id: String,
    pub project: String,
    pub name: String,
    /// Status before and after.
    pub from: Option<String>,
    pub to: Option<String>,
    pub reason: Option<String>,
    /// Message of the event; null if the row changed without one.
    pub message: Option<String>,
    /// Null for kinds without rows.
    pub row: Option<FeedRow>,
}

/// Event `gone`: the object was deleted.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct FeedGone {
    pub seq: u64,
    pub as_of: i64,
    pub kind: String,
    pub id: String,
}

/// Event `resync`: changes were missed; lists must be read again.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct FeedResync {}

/// One event of the feed; its name is that of the variant. `counts` is the summary without `attention`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(untagged)]
pub enum FeedEvent {
    Change(Box<FeedChange>),
    Gone(FeedGone),
    Counts(Box<Summary>),
    Hello(FeedHello),
    Resync(FeedResync),
}
