//! A pipeline that processes all rows of a claim at once.

use std::future::Future;

use uuid::Uuid;

use crate::{
    pipeline::ApplyOutcome,
    store::{Lease, Queue},
};

/// For decisions that need the whole queue, such as placement. Fetcher, heartbeat, hints and stop are those of any
/// pipeline.
pub trait BatchPipeline: Send + Sync + 'static {
    type Error: std::error::Error + Send + Sync + 'static;

    fn queue(&self) -> Queue;

    /// Processes the rows and returns the outcome of each; an omitted row counts as failed.
    ///
    /// All rows share one fate: if the lease of one expires, the whole batch is dropped. So write each row guarded by
    /// its own token, and write at the end.
    fn process(
        &self,
        leases: Vec<Lease>,
    ) -> impl Future<Output = Result<Vec<(Uuid, ApplyOutcome)>, Self::Error>> + Send;
}
