//! The hook that wakes a service which sleeps at nought replicas.

/// Told that a request waits for a service without replicas. Called for each such request: it must be cheap, and
/// saying it twice must do no harm.
pub trait ServiceWaker: Send + Sync + 'static {
    fn wake(&self, project: &str, run: &str);
}

/// Nobody to wake.
#[derive(Clone, Copy, Debug)]
pub struct NoWaker;

impl ServiceWaker for NoWaker {
    fn wake(&self, _project: &str, _run: &str) {}
}
