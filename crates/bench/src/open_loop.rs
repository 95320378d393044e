//! An open-loop load: requests are sent at their planned times, independent of earlier responses.
//!
//! Latency counts from the planned time. A server that stalls is therefore charged for every request that would have
//! been sent meanwhile, not only for the one that waited.

use std::{
    collections::BTreeMap,
    sync::Arc,
    time::{Duration, Instant},
};

use anyhow::{Context, Result};
use parking_lot::Mutex;
use serde_json::Value;
use tokio::{io::AsyncWriteExt, net::TcpStream, sync::Semaphore, task::JoinSet};
use windlass_testkit::rng::Rng;

use windlass_testenv::closed_loop;
use windlass_testenv::server::TOKEN;

/// Maximum number of open connections; further requests wait, and the wait counts as latency.
const CONNECTIONS_MAX: usize = 1_000;
/// Idle time after which the other side may have closed a connection.
const IDLE_MAX: Duration = Duration::from_secs(5);
/// Maximum number of distinct errors that are recorded.
const ERRORS_MAX: usize = 8;

/// Latencies and errors of one kind of request.
#[derive(Debug, Default)]
pub struct LatencyCounts {
    taken: Mutex<Vec<Duration>>,
    errors: Mutex<BTreeMap<String, usize>>,
}

impl LatencyCounts {
    pub fn took(&self, since: Instant) {
        self.taken.lock().push(since.elapsed());
    }

    fn record_error(&self, error: &anyhow::Error) {
        let mut errors = self.errors.lock();
        let text: String = format!("{error:#}").chars().take(200).collect();
        let full = errors.len() >= ERRORS_MAX;
        *errors.entry(if full { "others".to_owned() } else { text }).or_default() += 1;
    }

    /// Records an error and returns `None`.
    pub fn keep<T>(&self, result: Result<T>) -> Option<T> {
        result.map_err(|error| self.record_error(&error)).ok()
    }

    pub fn taken(&self) -> Vec<Duration> {
        self.taken.lock().clone()
    }

    pub fn errors(&self) -> BTreeMap<String, usize> {
        self.errors.lock().clone()
    }
}

/// Keep-alive connections to one server.
pub struct ConnectionPool {
    address: String,
    resting: Mutex<Vec<(TcpStream, Instant)>>,
    permits: Semaphore,
}

impl ConnectionPool {
    pub fn new(address: &str) -> Arc<Self> {
        let permits = Semaphore::new(CONNECTIONS_MAX);
        Arc::new(Self { address: address.to_owned(), resting: Mutex::default(), permits })
    }

    /// Sends one call; any status but 200 is an error.
    pub async fn post(&self, path: &str, body: &Value) -> Result<Value> {
        let answer = self.send(&closed_loop::build_post(path, TOKEN, &body.to_string())).await?;
        serde_json::from_slice(&answer).with_context(|| format!("failed to parse the response of {path}"))
    }

    /// Sends a request and returns the body of the response.
    pub async fn send(&self, request: &[u8]) -> Result<Vec<u8>> {
        let _permit = self.permits.acquire().await?;
        let mut stream = match self.take_idle() {
            Some(stream) => stream,
            None => {
                let stream = TcpStream::connect(&self.address).await.context("failed to connect")?;
                stream.set_nodelay(true)?;
                stream
            }
        };
        let mut buffer = Vec::with_capacity(8 << 10);
        stream.write_all(request).await?;
        closed_loop::read_response(&mut stream, &mut buffer).await?;
        self.resting.lock().push((stream, Instant::now()));
        let head = buffer.windows(4).position(|w| w == b"\r\n\r\n").context("the response has no head")?;
        buffer.drain(..head + 4);
        Ok(buffer)
    }

    /// Returns the most recently used connection, so that surplus ones expire.
    fn take_idle(&self) -> Option<TcpStream> {
        let mut resting = self.resting.lock();
        let (stream, since) = resting.pop()?;
        if since.elapsed() < IDLE_MAX {
            return Some(stream);
        }
        // All others have been idle for longer.
        resting.clear();
        None
    }
}

/// End condition of a stream of requests.
#[derive(Clone, Copy, Debug)]
pub enum StreamLimit {
    Time(Duration),
    Number(usize),
}

/// Schedule of one kind of request.
pub struct ArrivalPlan {
    pub begin: Instant,
    pub until: StreamLimit,
    pub per_second: f64,
    pub rng: Rng,
}

impl ArrivalPlan {
    /// Starts `call` with its number and its planned time, at random times with the mean rate, and waits for all of
    /// them. `late` records the delay of this driver itself.
    pub async fn run<F>(
        mut self,
        late: &LatencyCounts,
        mut call: impl FnMut(usize, Instant) -> F,
    ) -> Result<()>
    where
        F: Future<Output = ()> + Send + 'static,
    {
        let mut calls = JoinSet::new();
        let mut planned = self.begin;
        for number in 0.. {
            planned += self.next_gap();
            let over = match self.until {
                StreamLimit::Time(lasts) => planned.duration_since(self.begin) >= lasts,
                StreamLimit::Number(last) => number >= last,
            };
            if over {
                break;
            }
            tokio::time::sleep_until(planned.into()).await;
            late.took(planned);
            calls.spawn(call(number, planned));
            while calls.try_join_next().transpose()?.is_some() {}
        }
        while calls.join_next().await.transpose()?.is_some() {}
        Ok(())
    }

    /// Exponentially distributed, as for independent users.
    fn next_gap(&mut self) -> Duration {
        let unit = (self.rng.draw() >> 11) as f64 / (1_u64 << 53) as f64;
        Duration::from_secs_f64(-(1.0 - unit).ln() / self.per_second)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn requests_are_sent_on_schedule_even_if_none_is_answered() {
        let arrivals = ArrivalPlan {
            begin: Instant::now(),
            until: StreamLimit::Time(Duration::from_millis(500)),
            per_second: 200.0,
            rng: Rng::new(7),
        };
        let (late, done) = (LatencyCounts::default(), Arc::new(LatencyCounts::default()));
        let latencies = Arc::clone(&done);
        let call = move |_, planned| {
            let latencies = Arc::clone(&latencies);
            async move {
                // A server that does not respond before the end.
                tokio::time::sleep(Duration::from_secs(1)).await;
                latencies.took(planned);
            }
        };
        arrivals.run(&late, call).await.unwrap();
        let sent = done.taken().len();
        assert!((60..160).contains(&sent), "100 are expected, {sent} were sent");
        assert!(done.taken().iter().all(|took| *took >= Duration::from_secs(1)));
    }

    #[test]
    fn distinct_errors_above_the_limit_are_only_counted() {
        let latencies = LatencyCounts::default();
        for n in 0..20 {
            assert!(latencies.keep::<()>(Err(anyhow::anyhow!("error {n}"))).is_none());
        }
        assert_eq!(latencies.errors().len(), ERRORS_MAX + 1);
        assert_eq!(latencies.errors().values().sum::<usize>(), 20);
    }
}
