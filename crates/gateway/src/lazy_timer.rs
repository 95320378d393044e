//! Timers that are set with every request and rarely fire.
//!
//! Setting one only stores a deadline. The underlying timer is armed once; if it fires before the deadline, it is armed
//! again for the remaining time. Creating a runtime timer per request costs several times as much.

use std::{
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
    time::Duration,
};

use hyper::rt;
use parking_lot::Mutex;
use tokio::time::{Instant, Sleep, sleep_until};

#[derive(Debug, Default)]
pub(crate) struct LazyTimer(Option<Pin<Box<Sleep>>>);

impl LazyTimer {
    /// Completes when the deadline has passed. Only the most recent caller is woken.
    pub(crate) fn poll(&mut self, at: Instant, cx: &mut Context<'_>) -> Poll<()> {
        let timer = self.0.get_or_insert_with(|| Box::pin(sleep_until(at)));
        loop {
            if timer.deadline() > at {
                timer.as_mut().reset(at);
            }
            ready!(timer.as_mut().poll(cx));
            if Instant::now() >= at {
                return Poll::Ready(());
            }
            timer.as_mut().reset(at);
        }
    }
}

/// Timer of one connection, which waits for one thing at a time.
#[derive(Clone, Debug, Default)]
pub(crate) struct ConnectionTimer(Arc<Mutex<LazyTimer>>);

struct TimerSleep {
    timer: Arc<Mutex<LazyTimer>>,
    deadline: Instant,
}

impl Future for TimerSleep {
    type Output = ();

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        self.timer.lock().poll(self.deadline, cx)
    }
}

impl rt::Sleep for TimerSleep {}

impl rt::Timer for ConnectionTimer {
    fn sleep(&self, duration: Duration) -> Pin<Box<dyn rt::Sleep>> {
        Box::pin(TimerSleep { timer: Arc::clone(&self.0), deadline: Instant::now() + duration })
    }

    fn sleep_until(&self, deadline: std::time::Instant) -> Pin<Box<dyn rt::Sleep>> {
        Box::pin(TimerSleep { timer: Arc::clone(&self.0), deadline: deadline.into() })
    }

    fn now(&self) -> std::time::Instant {
        Instant::now().into()
    }
}

#[cfg(test)]
mod tests {
    use std::future::poll_fn;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn lazy_timer_fires_at_the_most_recently_requested_time() {
        let (mut alarm, began) = (LazyTimer::default(), Instant::now());
        let after = |secs| began + Duration::from_secs(secs);
        let first = poll_fn(|cx| Poll::Ready(alarm.poll(after(10), cx))).await;
        assert!(first.is_pending());
        // Later than the timer, then earlier.
        poll_fn(|cx| alarm.poll(after(30), cx)).await;
        assert_eq!(began.elapsed().as_secs(), 30);
        let next = poll_fn(|cx| Poll::Ready(alarm.poll(after(90), cx))).await;
        assert!(next.is_pending());
        poll_fn(|cx| alarm.poll(after(40), cx)).await;
        assert_eq!(began.elapsed().as_secs(), 40);
        poll_fn(|cx| alarm.poll(after(20), cx)).await;
        assert_eq!(began.elapsed().as_secs(), 40);
    }
}
