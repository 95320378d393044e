//! Data that a client has sent on one channel and that has not been read yet.
//!
//! The library enlarges a client's window as soon as its bytes arrive, not when they have been read, and it would wait
//! for a slow reader inside the loop that serves all channels. So data is not read through it: bytes are stored here at
//! once, and the only setting that the library offers, the size of the next window, limits the rate. A channel with a
//! backlog gets a window of two bytes: its client sends them, waits for the next window, and is held at that pace until
//! its reader has caught up. Other channels are not affected, and memory is bounded:
//!
//! * one channel alone holds at most [`BACKLOG_HIGH`] and a window;
//! * the size of the next window is one number per connection, so while another channel uploads at full speed a held
//!   one may now and then get a whole window. Over [`BACKLOG_MAX`] it is closed.

use std::{
    collections::VecDeque,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
};

use parking_lot::Mutex;
use tokio::sync::Notify;

/// Bytes that a client may send before they are processed here: enough for 20 MB/s at 100 ms.
pub(super) const WINDOW: u32 = 2 * 1024 * 1024;
/// The smallest window that the library still renews (it renews below the half).
const WINDOW_MIN: u32 = 2;
/// Backlog in bytes from which a channel is held.
const BACKLOG_HIGH: usize = 256 * 1024;
/// Backlog in bytes over which a channel is closed.
const BACKLOG_MAX: usize = 16 * 1024 * 1024;
/// The same limit over all channels of a connection.
const CONNECTION_BACKLOG_MAX: usize = 64 * 1024 * 1024;
/// Size up to which small pieces are joined, so that memory is proportional to the bytes received.
const CHUNK_BYTES: usize = 32 * 1024;

/// Returns the size of the next window, for whichever channel of the connection sends next.
fn next_window(just_given: u32, this_held: bool, any_held: bool) -> u32 {
    let by_the_drop = just_given == WINDOW_MIN;
    match (by_the_drop, this_held, any_held) {
        // The channel got two bytes and is no longer held: most likely its packet is the next to arrive.
        (true, false, _) => WINDOW,
        // The channel got a whole window. The next channel to send may be one that is held.
        (true, true, _) | (false, _, true) => WINDOW_MIN,
        (false, _, false) => WINDOW,
    }
}

/// Backlog of all channels of one connection.
#[derive(Debug, Default)]
pub(super) struct ConnectionBacklog {
    bytes: AtomicUsize,
    held: AtomicUsize,
}

impl ConnectionBacklog {
    pub(super) fn next_window(&self, just_given: u32, channel: Option<&ReceiveBuffer>) -> u32 {
        let this_held = channel.is_some_and(|inflow| inflow.queue.lock().held);
        next_window(just_given, this_held, self.any_held())
    }

    pub(super) fn any_held(&self) -> bool {
        self.held.load(Ordering::Relaxed) > 0
    }
}

#[derive(Debug, PartialEq, Eq)]
pub(super) struct Overflow;

#[derive(Debug)]
pub(super) struct ReceiveBuffer {
    queue: Mutex<ChunkQueue>,
    changed: Notify,
    total: Arc<ConnectionBacklog>,
}

#[derive(Debug, Default)]
struct ChunkQueue {
    pieces: VecDeque<Vec<u8>>,
    bytes: usize,
    held: bool,
    ended: bool,
    unwanted: bool,
}

impl ReceiveBuffer {
    pub(super) fn new(total: Arc<ConnectionBacklog>) -> Self {
        Self { queue: Mutex::new(ChunkQueue::default()), changed: Notify::new(), total }
    }

    pub(super) fn put(&self, data: &[u8]) -> Result<(), Overflow> {
        let mut queue = self.queue.lock();
        if queue.unwanted || queue.ended {
            return Ok(());
        }
        queue.bytes += data.len();
        let all = self.total.bytes.fetch_add(data.len(), Ordering::Relaxed) + data.len();
        match queue.pieces.back_mut() {
            Some(last) if last.len() + data.len() <= CHUNK_BYTES => last.extend_from_slice(data),
            Some(_) | None => queue.pieces.push_back(data.to_vec()),
        }
        self.update_throttle(&mut queue);
        let over = queue.bytes > BACKLOG_MAX || all > CONNECTION_BACKLOG_MAX;
        drop(queue);
        self.changed.notify_one();
        if over { Err(Overflow) } else { Ok(()) }
    }

    /// Marks that the client sends no more.
    pub(super) fn end(&self) {
        self.queue.lock().ended = true;
        self.changed.notify_one();
    }

    /// Discards what is stored and what arrives: the reader has stopped.
    pub(super) fn refuse(&self) {
        let mut queue = self.queue.lock();
        queue.unwanted = true;
        self.clear(&mut queue);
        drop(queue);
        self.changed.notify_one();
    }

    /// Returns the next bytes; `None` if there will be none. For one reader.
    pub(super) async fn take(&self) -> Option<Vec<u8>> {
        loop {
            {
                let mut queue = self.queue.lock();
                if let Some(piece) = queue.pieces.pop_front() {
                    queue.bytes -= piece.len();
                    self.total.bytes.fetch_sub(piece.len(), Ordering::Relaxed);
                    self.update_throttle(&mut queue);
                    return Some(piece);
                }
                if queue.ended || queue.unwanted {
                    return None;
                }
            }
            self.changed.notified().await;
        }
    }

    fn update_throttle(&self, queue: &mut ChunkQueue) {
        let held = queue.bytes >= BACKLOG_HIGH;
        if held && !queue.held {
            self.total.held.fetch_add(1, Ordering::Relaxed);
        } else if !held && queue.held {
            self.total.held.fetch_sub(1, Ordering::Relaxed);
        }
        queue.held = held;
    }

    fn clear(&self, queue: &mut ChunkQueue) {
        self.total.bytes.fetch_sub(queue.bytes, Ordering::Relaxed);
        queue.pieces = VecDeque::new();
        queue.bytes = 0;
        self.update_throttle(queue);
    }
}

impl Drop for ReceiveBuffer {
    fn drop(&mut self) {
        let mut queue = std::mem::take(&mut *self.queue.lock());
        self.clear(&mut queue);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The library's window arithmetic on one connection, with clients that send all they may.
    struct SimulatedConnection {
        total: Arc<ConnectionBacklog>,
        target: u32,
        windows: Vec<u32>,
        inflows: Vec<Arc<ReceiveBuffer>>,
    }

    impl SimulatedConnection {
        fn new(channels: usize) -> Self {
            let total = Arc::new(ConnectionBacklog::default());
            let inflows = (0..channels).map(|_| Arc::new(ReceiveBuffer::new(Arc::clone(&total)))).collect();
            Self { total, target: WINDOW, windows: vec![WINDOW; channels], inflows }
        }

        /// Sends one packet from the client of `channel`, as large as allowed.
        fn send(&mut self, channel: usize) -> Result<usize, Overflow> {
            let size = self.windows[channel].min(32 * 1024);
            self.windows[channel] -= size;
            if self.windows[channel] < self.target / 2 {
                self.windows[channel] = self.target;
                self.target = self.total.next_window(self.target, Some(&self.inflows[channel]));
            }
            self.inflows[channel].put(&vec![7; size as usize])?;
            Ok(size as usize)
        }

        fn backlog(&self, channel: usize) -> usize {
            self.inflows[channel].queue.lock().bytes
        }
    }

    fn drain(inflow: &ReceiveBuffer) -> usize {
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        runtime.block_on(async {
            let mut bytes = 0;
            while inflow.queue.lock().bytes > 0 {
                bytes += inflow.take().await.unwrap().len();
            }
            bytes
        })
    }

    #[test]
    fn a_channel_whose_reader_keeps_up_is_never_throttled() {
        let mut wire = SimulatedConnection::new(1);
        for _ in 0..10_000 {
            assert_eq!(wire.send(0), Ok(32 * 1024));
            drain(&wire.inflows[0]);
        }
    }

    #[test]
    fn a_channel_with_a_stalled_reader_has_a_bounded_backlog() {
        let mut wire = SimulatedConnection::new(1);
        for _ in 0..100_000 {
            wire.send(0).unwrap();
        }
        assert!(wire.backlog(0) < 4 * 1024 * 1024, "{} bytes", wire.backlog(0));
    }

    #[test]
    fn a_throttled_channel_recovers_when_its_reader_catches_up() {
        let mut wire = SimulatedConnection::new(1);
        for _ in 0..1000 {
            wire.send(0).unwrap();
        }
        drain(&wire.inflows[0]);
        let sent: usize = (0..100).map(|_| wire.send(0).unwrap()).sum();
        assert!(sent > 90 * 32 * 1024 / 2, "{sent} bytes in 100 packets");
    }

    #[test]
    fn a_throttled_channel_does_not_block_its_neighbour() {
        let mut wire = SimulatedConnection::new(2);
        for _ in 0..1000 {
            wire.send(0).unwrap();
        }
        let mut sent = 0;
        for _ in 0..400 {
            sent += wire.send(1).unwrap();
            drain(&wire.inflows[1]);
        }
        assert!(sent > 10 * 1024 * 1024, "{sent} bytes in 400 packets");
    }

    #[test]
    fn a_channel_over_its_backlog_limit_is_closed() {
        let inflow = ReceiveBuffer::new(Arc::default());
        let piece = vec![0; 1024 * 1024];
        let taken = (0..100).take_while(|_| inflow.put(&piece).is_ok()).count();
        assert_eq!(taken, 16);
        inflow.refuse();
        assert_eq!(inflow.total.bytes.load(Ordering::Relaxed), 0);
        assert_eq!(inflow.total.held.load(Ordering::Relaxed), 0);
    }

    #[test]
    fn the_backlog_of_all_channels_together_is_limited_too() {
        let total = Arc::new(ConnectionBacklog::default());
        let inflows: Vec<_> = (0..10).map(|_| ReceiveBuffer::new(Arc::clone(&total))).collect();
        let piece = vec![0; 15 * 1024 * 1024];
        assert_eq!(inflows.iter().take_while(|inflow| inflow.put(&piece).is_ok()).count(), 4);
        drop(inflows);
        assert_eq!(total.bytes.load(Ordering::Relaxed), 0);
    }

    #[test]
    fn data_received_before_the_end_is_still_read() {
        let inflow = ReceiveBuffer::new(Arc::default());
        inflow.put(b"one").unwrap();
        inflow.put(b"two").unwrap();
        inflow.end();
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        runtime.block_on(async {
            assert_eq!(inflow.take().await.as_deref(), Some(b"onetwo".as_slice()));
            assert_eq!(inflow.take().await, None);
        });
    }
}
