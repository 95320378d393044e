//! Faults between the server and its database, which the simulation injects.

use std::{future::Future, pin::Pin};

use super::error::DbError;

/// Result of a hook.
pub type HookFuture<'a> = Pin<Box<dyn Future<Output = Result<(), DbError>> + Send + 'a>>;

/// Hooks around every call. `what` names the call: `query`, `write`, `claim`, `extend`, …
pub trait FaultHook: Send + Sync {
    /// Runs before the call. May delay; an error means that the call never reached the database.
    fn before<'a>(&'a self, what: &'static str) -> HookFuture<'a>;

    /// Runs after the call. May delay; an error means that the call was applied and its acknowledgement was lost.
    fn after<'a>(&'a self, what: &'static str) -> HookFuture<'a>;
}
