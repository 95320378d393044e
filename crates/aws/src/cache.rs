//! Answers that stay true for a while.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use parking_lot::Mutex;
use tokio::time::Instant;

/// Values by name, each with the time at which it was fetched.
#[derive(Debug)]
pub(crate) struct Cache<T> {
    lifetime: Duration,
    known: Mutex<BTreeMap<String, (Instant, Arc<T>)>>,
}

impl<T> Cache<T> {
    pub(crate) fn new(lifetime: Duration) -> Self {
        Self { lifetime, known: Mutex::default() }
    }

    /// Returns the value, or fetches it. An error is not kept.
    pub(crate) async fn get<E>(
        &self,
        name: &str,
        fetch: impl Future<Output = Result<T, E>>,
    ) -> Result<Arc<T>, E> {
        if let Some((fetched, value)) = self.known.lock().get(name)
            && fetched.elapsed() < self.lifetime
        {
            return Ok(Arc::clone(value));
        }
        let value = Arc::new(fetch.await?);
        self.known.lock().insert(name.to_owned(), (Instant::now(), Arc::clone(&value)));
        Ok(value)
    }

    /// Drops all values.
    pub(crate) fn clear(&self) {
        self.known.lock().clear();
    }

    /// Drops a value that turned out to be wrong.
    pub(crate) fn forget(&self, name: &str) {
        self.known.lock().remove(name);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_value_is_fetched_again_after_its_lifetime_or_when_it_was_dropped() {
        let cache = Cache::new(Duration::from_secs(60));
        let get = async |value: u32| *cache.get("a", async { Ok::<_, ()>(value) }).await.unwrap();
        assert_eq!((get(1).await, get(2).await), (1, 1));
        tokio::time::advance(Duration::from_secs(61)).await;
        assert_eq!(get(3).await, 3);
        cache.forget("a");
        assert_eq!(get(4).await, 4);
        assert!(cache.get("b", async { Err::<u32, _>(()) }).await.is_err());
        assert_eq!(*cache.get("b", async { Ok::<_, ()>(5) }).await.unwrap(), 5);
    }
}
