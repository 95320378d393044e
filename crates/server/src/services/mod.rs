//! Operations of the server, independent of HTTP. All stored data is accessed through `db`.

pub(crate) mod blocks;
pub mod bootstrap;
pub mod budgets;
pub(crate) mod configurations;
pub mod costs;
pub mod events;
pub(crate) mod explanations;
pub mod exports;
mod fleet_hosts;
pub mod fleets;
pub mod gateway_nodes;
pub mod gateways;
pub mod grants;
pub mod instances;
pub(crate) mod log_search;
pub mod managed_jobs;
pub mod names;
pub mod observability;
pub(crate) mod offers;
pub(crate) mod oidc;
pub(crate) mod overview;
pub mod project_keys;
pub mod projects;
pub mod queue;
pub mod quotas;
pub mod repos;
pub(crate) mod rows;
pub mod runs;
pub mod secrets;
pub(crate) mod series;
pub(crate) mod service_domains;
pub(crate) mod sessions;
pub(crate) mod settings;
pub(crate) mod usage;
pub mod users;
pub(crate) mod views;
pub mod volumes;

use windlass_api::Document;

use crate::db::{DbError, documents::JsonColumn};

/// Wraps a stored document that is returned as it is.
pub(crate) fn stored_document(
    column: JsonColumn,
    row: impl std::fmt::Display,
    text: String,
) -> Result<Document, DbError> {
    Document::from_text(text).map_err(|error| column.invalid(row, error))
}

/// An uploaded file. Its name is chosen by the client.
#[derive(Debug)]
pub struct Upload {
    pub name: String,
    pub content: Vec<u8>,
}

/// Item of a streaming response.
#[derive(Debug)]
pub enum SseEvent<T> {
    /// A client that reconnects afterwards sends its `id`.
    Event { id: u64, name: &'static str, data: T },
    /// Keepalive after a while without events.
    Alive,
}

/// Stream of a response. It ends by itself, when the caller loses the rights, or with the server.
pub type SseStream<T> = futures_util::stream::BoxStream<'static, SseEvent<T>>;
