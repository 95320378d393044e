//! Wakes readers that are in another process than the writer.
//!
//! There is one inotify handle for the whole process, because a user has few. A hostile job can cause any number of
//! events; they are read in batches, and a batch is one wake-up. If the kernel refuses a watch, readers still poll
//! ([`super::follow`]).

use std::{
    collections::HashMap,
    io,
    os::fd::{AsRawFd, OwnedFd},
    sync::Arc,
    time::Duration,
};

use parking_lot::Mutex;
use rustix::fs::inotify::{self, CreateFlags, ReadFlags, WatchFlags};
use tokio::{
    io::{Interest, unix::AsyncFd},
    sync::watch,
    task::JoinHandle,
    time::Instant,
};

use crate::safe_open::DirHandle;
use rustix::fd::AsFd;

/// Delay between two batches of events, once there were many in a short time.
const BATCH_DELAY: Duration = Duration::from_millis(5);
/// Number of batches without a delay: a job that starts creates a few files, and its callers wait for each of them.
const BURST: u32 = 16;

/// Watches directories. Created once and cloned.
#[derive(Clone, Debug, Default)]
pub struct Watcher {
    hub: Arc<Mutex<Option<Arc<InotifyHub>>>>,
}

#[derive(Debug)]
struct InotifyHub {
    fd: Arc<AsyncFd<OwnedFd>>,
    dirs: Arc<WatchedDirs>,
    task: JoinHandle<()>,
}

type WatchedDirs = Mutex<HashMap<i32, WatchedDir>>;

#[derive(Debug)]
struct WatchedDir {
    wake: watch::Sender<u64>,
    watchers: usize,
}

/// Watch of one directory, active until it is dropped.
#[derive(Debug)]
pub(crate) struct DirWatch {
    pub(crate) wake: watch::Receiver<u64>,
    hub: Arc<InotifyHub>,
    id: i32,
}

impl Watcher {
    /// Watches a directory. Returns `None` if the kernel has no more watches.
    pub(crate) fn dir(&self, dir: &DirHandle) -> Option<DirWatch> {
        let hub = self.hub().inspect_err(|error| tracing::debug!(%error, "inotify failed; polling")).ok()?;
        let path = format!("/proc/self/fd/{}", dir.as_fd().as_raw_fd());
        let flags = WatchFlags::MODIFY | WatchFlags::CREATE | WatchFlags::MOVED_TO | WatchFlags::ONLYDIR;
        // The same directory gets the same id; under the lock, so that it is not released meanwhile.
        let mut dirs = hub.dirs.lock();
        let id = inotify::add_watch(hub.fd.get_ref(), path, flags)
            .inspect_err(|error| tracing::debug!(%error, "failed to add watch; polling"))
            .ok()?;
        let known = dirs.entry(id).or_insert_with(|| WatchedDir { wake: watch::Sender::new(0), watchers: 0 });
        known.watchers += 1;
        let wake = known.wake.subscribe();
        drop(dirs);
        Some(DirWatch { wake, hub, id })
    }

    fn hub(&self) -> io::Result<Arc<InotifyHub>> {
        let mut hub = self.hub.lock();
        if let Some(hub) = &*hub {
            return Ok(Arc::clone(hub));
        }
        let fd = inotify::init(CreateFlags::CLOEXEC | CreateFlags::NONBLOCK)?;
        let fd = Arc::new(to_async_fd(fd)?);
        let dirs = Arc::new(WatchedDirs::default());
        let task = tokio::spawn(dispatch_events(Arc::clone(&fd), Arc::clone(&dirs)));
        let made = Arc::new(InotifyHub { fd, dirs, task });
        *hub = Some(Arc::clone(&made));
        Ok(made)
    }
}

impl Drop for DirWatch {
    fn drop(&mut self) {
        let mut dirs = self.hub.dirs.lock();
        let Some(known) = dirs.get_mut(&self.id) else { return };
        known.watchers -= 1;
        if known.watchers == 0 {
            dirs.remove(&self.id);
            // Fails if the directory was removed, and then the watch no longer exists either.
            let _ = inotify::remove_watch(self.hub.fd.get_ref(), self.id);
        }
    }
}

impl Drop for InotifyHub {
    fn drop(&mut self) {
        self.task.abort();
    }
}

#[expect(unsafe_code, reason = "the runtime watches a handle by its number")]
fn to_async_fd(fd: OwnedFd) -> io::Result<AsyncFd<OwnedFd>> {
    // SAFETY: an `OwnedFd` is open and stays the same file until it is dropped, and the `AsyncFd` owns it.
    Ok(unsafe { AsyncFd::register_with_interest(fd, Interest::READABLE) }?)
}

async fn dispatch_events(fd: Arc<AsyncFd<OwnedFd>>, dirs: Arc<WatchedDirs>) {
    let (mut without_delay, mut before) = (BURST, Instant::now());
    loop {
        let Ok(mut ready) = fd.readable().await else { return };
        if dispatch_batch(fd.get_ref(), &dirs) {
            ready.clear_ready();
        }
        drop(ready);
        let passed = before.elapsed().as_millis() / BATCH_DELAY.as_millis();
        without_delay = BURST.min(without_delay.saturating_add(u32::try_from(passed).unwrap_or(BURST)));
        before = Instant::now();
        match without_delay.checked_sub(1) {
            Some(left) => without_delay = left,
            None => tokio::time::sleep(BATCH_DELAY).await,
        }
    }
}

/// Reads one buffer of events and wakes the watchers concerned. Returns whether that was all.
fn dispatch_batch(fd: &OwnedFd, dirs: &WatchedDirs) -> bool {
    let mut buffer = [std::mem::MaybeUninit::uninit(); 8192];
    let mut events = inotify::Reader::new(fd, &mut buffer);
    let mut seen: Vec<i32> = Vec::new();
    let (mut all, mut lost) = (false, false);
    loop {
        match events.next() {
            Ok(event) => {
                lost |= event.events().contains(ReadFlags::QUEUE_OVERFLOW);
                if seen.last() != Some(&event.wd()) {
                    seen.push(event.wd());
                }
            }
            Err(error) => {
                all = error == rustix::io::Errno::AGAIN;
                break;
            }
        }
        if events.is_buffer_empty() && !seen.is_empty() {
            break;
        }
    }
    let dirs = dirs.lock();
    let wake = |dir: &WatchedDir| dir.wake.send_modify(|count| *count = count.wrapping_add(1));
    if lost {
        dirs.values().for_each(wake);
    } else {
        seen.iter().filter_map(|id| dirs.get(id)).for_each(wake);
    }
    all
}
