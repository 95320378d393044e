//! Hook that wakes a service that is scaled to zero.

/// Notified of a request that waits for a service without replicas. Called for each such request, so it must be cheap
/// and idempotent.
pub trait ServiceWaker: Send + Sync + 'static {
    fn wake(&self, project: &str, run: &str);
}

/// Waker that does nothing.
#[derive(Clone, Copy, Debug)]
pub struct NoWaker;

impl ServiceWaker for NoWaker {
    fn wake(&self, _project: &str, _run: &str) {}
}
