//! The crank: leased pipelines over any store. Knows rows, not runs.
//!
//! A pipeline is a fetcher, a bounded queue, workers and a heartbeater over the rows of one table.
//! The lock is a set of columns on the row (token, owner, expiry, epoch), not an open transaction,
//! so heavy work happens outside the database and any replica can pick up where another died.

#[cfg(feature = "conformance")]
pub mod conformance;
pub mod memory;
pub mod pipeline;
pub mod store;

pub use memory::MemoryStore;
pub use pipeline::{Applied, Pipeline};
pub use store::{Claim, DbTime, Held, Lease, LeaseStore, Queue, Related, RelatedLock, StoreError};
