//! What the server does when asked. Knows no HTTP; asks `db` for everything stored.

pub mod boot;
pub mod events;
pub mod fleets;
pub mod gateways;
pub mod instances;
pub mod names;
pub(crate) mod offers;
pub mod projects;
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
