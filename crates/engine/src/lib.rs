//! Engine: leased pipelines over any store. Knows rows, not runs.
//!
//! A pipeline is a fetcher, a bounded queue, workers and a heartbeater over the rows of one table. The lock is a set of
//! columns on the row (token, owner, expiry, epoch), not an open transaction, so heavy work happens outside the
//! database and any replica can continue where another died.
//!
//! ```text
//!   hint, due time, back-off ─► fetcher ─claim─► queue ─► workers ─► apply, or ─► finisher ─finish─►
//!                                                  └── heartbeater extends everything in between
//! ```

mod batch;
#[cfg(feature = "testing")]
pub mod conformance;
mod engine;
mod fetch;
mod finish;
mod heartbeat;
pub mod hint;
mod lease;
#[cfg(feature = "testing")]
pub mod memory;
pub mod pipeline;
mod runtime;
pub mod settings;
pub mod status;
pub mod store;
mod work_queue;
mod worker;

pub use batch::BatchPipeline;
pub use engine::Engine;
pub use hint::Hints;
#[cfg(feature = "testing")]
pub use memory::MemoryStore;
pub use pipeline::{ApplyOutcome, Pipeline};
pub use settings::Settings;
pub use store::{
    Claim, DbTime, Lease, LeaseKey, LeaseStore, Queue, RelatedLock, RelatedLockOutcome, StoreError,
};
