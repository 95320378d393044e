//! The brain: what windlass knows and decides, and nothing else.
//!
//! Pure by construction: no async, clock, I/O, SQL, environment or randomness. Whatever a decision
//! needs to know is an argument; whatever should happen is a return value. `clippy.toml` beside this
//! crate's manifest holds the bans.

pub mod id;
pub mod resources;
pub mod time;
