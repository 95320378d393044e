//! What may happen between the server and its database: the simulation makes it happen.

use std::{future::Future, pin::Pin};

use super::error::DbError;

/// What a hook answers.
pub type HookFuture<'a> = Pin<Box<dyn Future<Output = Result<(), DbError>> + Send + 'a>>;

/// Asked around every call. `what` names the call: `query`, `write`, `claim`, `extend`, …
pub trait FaultHook: Send + Sync {
    /// May delay; an error means that the call never reached the database.
    fn before<'a>(&'a self, what: &'static str) -> HookFuture<'a>;

    /// May delay; an error means that the call took effect and its acknowledgement was lost.
    fn after<'a>(&'a self, what: &'static str) -> HookFuture<'a>;
}
