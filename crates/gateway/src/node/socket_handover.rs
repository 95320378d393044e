//! Handover of listening sockets to the next process, so that no connection is refused during a restart.
//!
//! The new process connects to `handover.sock` in the state directory and receives the listening sockets themselves,
//! with the connections pending in them. Once it serves, it acknowledges; the old process then stops accepting,
//! completes its requests and exits.

use std::{
    fs, io,
    io::{IoSlice, IoSliceMut, Read as _, Write as _},
    mem::MaybeUninit,
    net::{SocketAddr, TcpListener},
    os::{
        fd::{AsFd as _, BorrowedFd, OwnedFd},
        unix::net::{UnixListener, UnixStream},
    },
    path::{Path, PathBuf},
    time::Duration,
};

use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, recvmsg, sendmsg,
};

/// Maximum number of listeners of one gateway.
const LISTENERS_MAX: usize = 4;
/// Time within which the new process must serve; otherwise the old one continues.
const HANDOVER_TIMEOUT: Duration = Duration::from_secs(30);
const GREETING: &[u8] = b"windlass-gateway 1\n";
const ACKNOWLEDGED: u8 = b'!';

fn socket_path(state: &Path) -> PathBuf {
    state.join("handover.sock")
}

/// Listeners received from a running process, which continues to serve until [`InheritedListeners::taken`].
pub(super) struct InheritedListeners {
    stream: UnixStream,
    listeners: Vec<TcpListener>,
}

impl InheritedListeners {
    /// Returns the listener with this address, if there is one.
    pub(super) fn take_listener(&mut self, address: SocketAddr) -> Option<TcpListener> {
        let at =
            self.listeners.iter().position(|one| one.local_addr().is_ok_and(|local| local == address))?;
        Some(self.listeners.swap_remove(at))
    }

    /// Acknowledges that this process serves, so that the other one can exit.
    pub(super) fn acknowledge(mut self) -> io::Result<()> {
        self.stream.write_all(&[ACKNOWLEDGED])
    }
}

/// Requests the listeners of a running process, if there is one.
pub(super) fn request_listeners(state: &Path) -> io::Result<Option<InheritedListeners>> {
    let stream = match UnixStream::connect(socket_path(state)) {
        Ok(stream) => stream,
        Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused) => {
            return Ok(None);
        }
        Err(error) => return Err(error),
    };
    stream.set_read_timeout(Some(HANDOVER_TIMEOUT))?;
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(LISTENERS_MAX))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut words = [0_u8; GREETING.len()];
    let got =
        recvmsg(stream.as_fd(), &mut [IoSliceMut::new(&mut words)], &mut control, RecvFlags::CMSG_CLOEXEC)?;
    if got.bytes != GREETING.len() || words != *GREETING {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "unexpected data on the handover socket"));
    }
    let mut fds: Vec<OwnedFd> = Vec::new();
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = message {
            fds.extend(rights);
        }
    }
    Ok(Some(InheritedListeners { stream, listeners: fds.into_iter().map(TcpListener::from).collect() }))
}

/// Opens the socket for the next process. Replaces that of a previous process.
pub(super) fn bind(state: &Path) -> io::Result<UnixListener> {
    let path = socket_path(state);
    let fresh = path.with_extension("new");
    let _ = fs::remove_file(&fresh);
    let listener = UnixListener::bind(&fresh)?;
    listener.set_nonblocking(true)?;
    fs::rename(&fresh, &path)?;
    Ok(listener)
}

/// Sends the listeners to the process that requested them. Returns whether it acknowledged; if not, this process
/// continues.
pub(super) fn send_listeners(stream: &UnixStream, listeners: &[TcpListener]) -> io::Result<bool> {
    stream.set_nonblocking(false)?;
    stream.set_read_timeout(Some(HANDOVER_TIMEOUT))?;
    stream.set_write_timeout(Some(HANDOVER_TIMEOUT))?;
    let fds: Vec<BorrowedFd<'_>> = listeners.iter().map(TcpListener::as_fd).take(LISTENERS_MAX).collect();
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(LISTENERS_MAX))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !control.push(SendAncillaryMessage::ScmRights(&fds)) {
        return Err(io::Error::other("too many listeners"));
    }
    sendmsg(stream.as_fd(), &[IoSlice::new(GREETING)], &mut control, SendFlags::empty())?;
    let mut word = [0_u8; 1];
    let read = (&*stream).read(&mut word)?;
    Ok(read == 1 && word == [ACKNOWLEDGED])
}

#[cfg(test)]
mod tests {
    use std::net::TcpStream;

    use windlass_testkit::temp_dir;

    use super::*;

    #[test]
    fn a_listener_is_handed_over_with_its_pending_connections() {
        let folder = temp_dir("handover").unwrap();
        assert!(request_listeners(folder.path()).unwrap().is_none(), "nobody is there");
        let socket = bind(folder.path()).unwrap();
        socket.set_nonblocking(false).unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let waiting = TcpStream::connect(address).unwrap();
        let old = std::thread::spawn(move || {
            let (stream, _) = socket.accept().unwrap();
            send_listeners(&stream, &[listener]).unwrap()
        });
        let mut given = request_listeners(folder.path()).unwrap().unwrap();
        let taken = given.take_listener(address).unwrap();
        assert!(given.take_listener(address).is_none());
        given.acknowledge().unwrap();
        assert!(old.join().unwrap());
        // The old process has closed its listener; a connection that was pending is accepted here.
        assert_eq!(taken.accept().unwrap().1, waiting.local_addr().unwrap());
        assert!(
            request_listeners(folder.path()).unwrap().is_none(),
            "it is gone, though its socket lies there"
        );
    }

    #[test]
    fn an_unconfirmed_handover_leaves_the_listeners_with_the_old_process() {
        let folder = temp_dir("handover").unwrap();
        let socket = bind(folder.path()).unwrap();
        socket.set_nonblocking(false).unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let old = std::thread::spawn(move || {
            let (stream, _) = socket.accept().unwrap();
            send_listeners(&stream, &[listener]).unwrap()
        });
        drop(request_listeners(folder.path()).unwrap().unwrap());
        assert!(!old.join().unwrap());
    }
}
