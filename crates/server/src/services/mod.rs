//! What the server does when asked. Knows no HTTP; asks `db` for everything stored.

pub mod boot;
pub mod costs;
pub mod events;
mod fleet_hosts;
pub mod fleets;
pub mod gateway_nodes;
pub mod gateways;
pub mod grants;
pub mod instances;
pub mod managed_jobs;
pub mod names;
pub(crate) mod offers;
pub mod project_keys;
pub mod projects;
pub(crate) mod publishing;
pub mod queue;
pub mod repos;
pub mod runs;
pub mod secrets;
pub mod users;
pub mod volumes;
pub mod watch;

/// A file that somebody sent. Its name is what they say, nothing more.
#[derive(Debug)]
pub struct Upload {
    pub name: String,
    pub content: Vec<u8>,
}

/// What goes over an answer that lasts.
#[derive(Debug)]
pub enum SseEvent<T> {
    /// Whoever comes back after it names its `id`.
    Event { id: u64, name: &'static str, data: T },
    /// Nothing happened for a while.
    Alive,
}

/// An answer that lasts. It ends by itself, with its caller's rights, or with the server.
pub type SseStream<T> = futures_util::stream::BoxStream<'static, SseEvent<T>>;
