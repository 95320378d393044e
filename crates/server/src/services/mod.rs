//! What the server does when asked. Knows no HTTP; asks `db` for everything stored.

pub mod boot;
pub mod names;
pub mod projects;
pub mod users;
