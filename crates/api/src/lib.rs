//! Wire types of the API: requests, responses, the operation table and the typed HTTP client.
//!
//! Contains no logic. The table in `operations` is the only list of what the server answers: the router, the OpenAPI
//! document, the client and the authorisation tests are all generated from it.

pub mod agent;
pub mod auth;
pub mod backends;
pub mod budgets;
pub mod changes;
pub mod client;
pub mod configurations;
pub mod costs;
pub mod dispatchers;
pub mod document;
pub mod error;
pub mod events;
pub mod explanations;
pub mod exports;
pub mod files;
pub mod fleets;
pub mod gateways;
pub mod gpus;
pub mod http_pool;
pub mod instances;
pub mod log_stream;
pub mod logs;
pub mod managed_jobs;
pub mod metrics;
pub mod offers;
pub mod openapi;
pub mod operation;
pub mod operations;
pub mod overview;
pub mod projects;
pub mod queue_client;
pub mod quotas;
pub mod repos;
pub mod rights;
pub mod rows;
pub mod runs;
pub mod secrets;
pub mod server;
pub mod session;
pub mod templates;
pub mod unix;
pub mod usage;
pub mod users;
pub mod views;
pub mod volumes;

pub use document::{Document, RenderedJson};
pub use operation::{Access, Body, Entry, Method, Operation};
