//! Input of one channel, and the table of all channels of a connection.

use std::{collections::HashMap, future::poll_fn, io, pin::Pin, sync::Arc};

use parking_lot::Mutex;
use russh::{ChannelId, ChannelWriteHalf, server};
use tokio::{
    io::{AsyncRead, ReadBuf},
    sync::mpsc,
};
use tokio_util::sync::CancellationToken;

use super::{
    program::ProgramControl,
    receive_buffer::{ConnectionBacklog, Overflow, ReceiveBuffer},
};

/// Maximum number of open channels of a connection.
const CHANNELS_MAX: usize = 512;
const CHUNK_BYTES: usize = 32 * 1024;

/// Input side of a channel.
#[derive(Clone)]
pub(super) struct ChannelInput {
    pub(super) inflow: Arc<ReceiveBuffer>,
    /// Cancelled when the client has closed the channel, or its connection has ended.
    pub(super) closed: CancellationToken,
    /// Cancelled when the connection has ended.
    pub(super) over: CancellationToken,
}

/// All channels of a connection.
pub(super) struct Channels {
    open: Mutex<HashMap<ChannelId, ChannelEntry>>,
    total: Arc<ConnectionBacklog>,
    over: CancellationToken,
}

struct ChannelEntry {
    inlet: ChannelInput,
    session: Option<SessionRequest>,
    control: Option<mpsc::Sender<ProgramControl>>,
}

/// Requests for a session before its program is started.
pub(super) struct SessionRequest {
    pub(super) write: ChannelWriteHalf<server::Msg>,
    pub(super) env: Vec<(String, String)>,
    pub(super) terminal: Option<TerminalRequest>,
    pub(super) agent: bool,
}

pub(super) struct TerminalRequest {
    pub(super) kind: String,
    pub(super) opened: io::Result<(super::terminal::Terminal, std::os::fd::OwnedFd)>,
}

impl Channels {
    pub(super) fn new(over: CancellationToken, total: Arc<ConnectionBacklog>) -> Self {
        Self { open: Mutex::default(), total, over }
    }

    pub(super) fn is_full(&self) -> bool {
        self.open.lock().len() >= CHANNELS_MAX
    }

    /// Returns the input of a channel. The first caller creates it: the task that opens the channel, or the loop that
    /// receives its confirmation.
    pub(super) fn enter(&self, id: ChannelId) -> ChannelInput {
        self.open.lock().entry(id).or_insert_with(|| self.entry()).inlet.clone()
    }

    fn entry(&self) -> ChannelEntry {
        let inlet = ChannelInput {
            inflow: Arc::new(ReceiveBuffer::new(Arc::clone(&self.total))),
            closed: self.over.child_token(),
            over: self.over.clone(),
        };
        ChannelEntry { inlet, session: None, control: None }
    }

    pub(super) fn add_session(&self, id: ChannelId, requested: SessionRequest) {
        let mut entry = self.entry();
        entry.session = Some(requested);
        self.open.lock().insert(id, entry);
    }

    /// Changes the requests of a session. Returns false if its program was started, or there is none.
    pub(super) fn update_request(&self, id: ChannelId, change: impl FnOnce(&mut SessionRequest)) -> bool {
        self.open.lock().get_mut(&id).and_then(|entry| entry.session.as_mut()).map(change).is_some()
    }

    /// Returns the requests, once; from now on the session is controlled through `control`.
    pub(super) fn start(
        &self,
        id: ChannelId,
        control: mpsc::Sender<ProgramControl>,
    ) -> Option<(SessionRequest, ChannelInput)> {
        let mut open = self.open.lock();
        let entry = open.get_mut(&id)?;
        let requested = entry.session.take()?;
        entry.control = Some(control);
        Some((requested, entry.inlet.clone()))
    }

    /// Sends a control message. Returns false if the program cannot receive it now.
    pub(super) fn steer(&self, id: ChannelId, control: ProgramControl) -> bool {
        let open = self.open.lock();
        open.get(&id).and_then(|entry| entry.control.as_ref()).is_some_and(|to| to.try_send(control).is_ok())
    }

    pub(super) fn put(&self, id: ChannelId, data: &[u8]) -> Result<(), Overflow> {
        let inflow = self.open.lock().get(&id).map(|entry| Arc::clone(&entry.inlet.inflow));
        let Some(inflow) = inflow else { return Ok(()) };
        inflow.put(data).inspect_err(|Overflow| inflow.refuse())
    }

    pub(super) fn end(&self, id: ChannelId) {
        if let Some(entry) = self.open.lock().get(&id) {
            entry.inlet.inflow.end();
        }
    }

    /// Removes a channel and notifies the task that serves it.
    pub(super) fn remove(&self, id: ChannelId) {
        if let Some(entry) = self.open.lock().remove(&id) {
            entry.inlet.inflow.end();
            entry.inlet.closed.cancel();
        }
    }

    pub(super) fn next_window(&self, just_given: u32, id: ChannelId) -> u32 {
        let inflow = self.open.lock().get(&id).map(|entry| Arc::clone(&entry.inlet.inflow));
        self.total.next_window(just_given, inflow.as_deref())
    }
}

/// Reads some bytes; none at the end. Holds no buffer while there is nothing to read: most channels are idle most of
/// the time.
pub(super) async fn read_chunk(from: &mut (impl AsyncRead + Unpin)) -> io::Result<Vec<u8>> {
    poll_fn(|context| {
        let mut space = [0u8; CHUNK_BYTES];
        let mut buffer = ReadBuf::new(&mut space);
        Pin::new(&mut *from).poll_read(context, &mut buffer).map_ok(|()| buffer.filled().to_vec())
    })
    .await
}
