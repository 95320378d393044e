//! Waiting for a state by polling.

use std::{
    fmt::Display,
    os::unix::net::UnixStream,
    panic::Location,
    path::Path,
    thread,
    time::{Duration, Instant},
};

/// Long enough that only a bug reaches it.
pub const TIMEOUT: Duration = Duration::from_secs(150);
const POLL_INTERVAL: Duration = Duration::from_millis(10);

/// Returns whether a program accepts connections at `socket`. The file alone proves nothing: it exists a moment before.
#[must_use]
pub fn is_listening(socket: &Path) -> bool {
    UnixStream::connect(socket).is_ok()
}

/// Waits until `check` holds, and returns how long that took.
///
/// # Panics
/// If it does not hold within [`WITHIN`].
#[track_caller]
pub fn eventually(what: &str, mut check: impl FnMut() -> bool) -> Duration {
    let began = Instant::now();
    eventually_ok(what, || check().then_some(()).ok_or("no"));
    began.elapsed()
}

/// Waits until `check` succeeds. The panic shows the last error.
///
/// # Panics
/// If it does not succeed within [`WITHIN`].
#[track_caller]
pub fn eventually_ok<T, E: Display>(what: &str, mut check: impl FnMut() -> Result<T, E>) -> T {
    let began = Instant::now();
    loop {
        match check() {
            Ok(value) => return value,
            Err(last) => {
                assert!(began.elapsed() < TIMEOUT, "not within {TIMEOUT:?}: {what}\nlast seen: {last}");
            }
        }
        thread::sleep(POLL_INTERVAL);
    }
}

/// Waits until `check` returns a value, by tokio's clock.
///
/// # Panics
/// If it returns none within [`WITHIN`].
#[track_caller]
pub fn eventually_async<T>(what: &str, mut check: impl AsyncFnMut() -> Option<T>) -> impl Future<Output = T> {
    eventually_ok_async(what, async move || check().await.ok_or("no"))
}

/// Waits until `check` succeeds, by tokio's clock. The panic shows the last error.
///
/// # Panics
/// If it does not succeed within [`WITHIN`].
#[track_caller]
pub fn eventually_ok_async<T, E: Display>(
    what: &str,
    mut check: impl AsyncFnMut() -> Result<T, E>,
) -> impl Future<Output = T> {
    let caller = Location::caller();
    async move {
        let began = tokio::time::Instant::now();
        loop {
            match check().await {
                Ok(value) => return value,
                Err(last) => {
                    assert!(
                        began.elapsed() < TIMEOUT,
                        "{caller}: not within {TIMEOUT:?}: {what}\nlast seen: {last}"
                    );
                }
            }
            tokio::time::sleep(POLL_INTERVAL).await;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn eventually_polls_until_the_condition_holds() {
        let mut looks = 0;
        eventually("three looks", || {
            looks += 1;
            looks == 3
        });
        assert_eq!(looks, 3);
    }

    #[tokio::test(start_paused = true)]
    async fn eventually_works_with_virtual_time() {
        let began = tokio::time::Instant::now();
        let late = async || (began.elapsed() > Duration::from_secs(50)).then_some("here");
        assert_eq!(eventually_async("fifty seconds", late).await, "here");
    }

    #[tokio::test(start_paused = true)]
    async fn a_wait_that_times_out_reports_the_last_result() {
        let waited = tokio::spawn(eventually_ok_async::<(), _>("the end", async || Err("still 7"))).await;
        let panic = waited.unwrap_err().into_panic();
        let message = panic.downcast_ref::<String>().unwrap();
        assert!(message.contains("last seen: still 7"), "{message}");
    }
}
