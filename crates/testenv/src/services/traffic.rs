//! Continuous requests.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread::JoinHandle,
    time::Duration,
};

use windlass_testkit::wait::eventually;

use super::caller::ServiceCaller;

/// A client that sends requests until the end of the test.
pub struct ConstantTraffic {
    stop: Arc<AtomicBool>,
    answered: Arc<AtomicU64>,
    thread: Option<JoinHandle<Vec<String>>>,
}

impl ConstantTraffic {
    pub fn start(caller: &ServiceCaller, path: &'static str) -> Self {
        let (stop, answered) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
        let (caller, over, count) = (caller.clone(), Arc::clone(&stop), Arc::clone(&answered));
        let thread = std::thread::spawn(move || {
            let mut failed = Vec::new();
            while !over.load(Ordering::Relaxed) {
                match caller.get(path) {
                    Ok(got) if got.status == 200 => count.fetch_add(1, Ordering::Relaxed),
                    other => {
                        failed.push(format!("{other:?}"));
                        0
                    }
                };
                std::thread::sleep(Duration::from_millis(10));
            }
            failed
        });
        Self { stop, answered, thread: Some(thread) }
    }

    /// Waits for further responses.
    pub fn goes_on(&self) {
        let before = self.answered.load(Ordering::Relaxed);
        eventually("requests are answered", || self.answered.load(Ordering::Relaxed) >= before + 20);
    }

    /// Returns the number of responses, and the failures.
    pub fn end(mut self) -> (u64, Vec<String>) {
        self.stop.store(true, Ordering::Relaxed);
        let failed = self.thread.take().unwrap().join().unwrap();
        (self.answered.load(Ordering::Relaxed), failed)
    }
}

impl Drop for ConstantTraffic {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
    }
}
