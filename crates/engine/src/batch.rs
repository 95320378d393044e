//! A pipeline that looks at all rows of a claim at once.

use std::future::Future;

use uuid::Uuid;

use crate::{
    pipeline::ApplyOutcome,
    store::{Lease, Queue},
};

/// For decisions that need to see the whole queue, placement above all. Fetcher, heartbeat, hints and stop
/// are those of any pipeline.
pub trait BatchPipeline: Send + Sync + 'static {
    type Error: std::error::Error + Send + Sync + 'static;

    fn queue(&self) -> Queue;

    /// Processes the rows and says of each what became of it; one that is left out counts as failed.
    ///
    /// All rows stand and fall together: when the lease of one runs out the whole batch is dropped. So write
    /// each row guarded by its own token, and write at the end.
    fn process(
        &self,
        leases: Vec<Lease>,
    ) -> impl Future<Output = Result<Vec<(Uuid, ApplyOutcome)>, Self::Error>> + Send;
}
