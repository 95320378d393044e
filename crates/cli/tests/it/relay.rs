//! A relay to the server that can cut connections and hide log streams.

use std::{
    io::{Read as _, Write as _},
    net::{Shutdown, TcpListener, TcpStream},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use parking_lot::Mutex;

#[derive(Default)]
struct RelayState {
    /// First line of each connection's first request.
    requested: Mutex<Vec<String>>,
    open: Mutex<Vec<TcpStream>>,
    over: AtomicBool,
}

/// Closed with its test, with every connection.
pub(crate) struct Relay {
    state: Arc<RelayState>,
    address: String,
}

impl Relay {
    /// If `streams` is false, it answers every request for a log stream with "not found".
    pub(crate) fn new(server: &str, streams: bool) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let server = server.trim_start_matches("http://").to_owned();
        let state = Arc::<RelayState>::default();
        let shared = Arc::clone(&state);
        std::thread::spawn(move || {
            for client in listener.incoming().map_while(Result::ok) {
                if shared.over.load(Ordering::SeqCst) {
                    return;
                }
                let (shared, server) = (Arc::clone(&shared), server.clone());
                std::thread::spawn(move || copy_both_ways(&shared, client, &server, streams));
            }
        });
        Self { state, address }
    }

    pub(crate) fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    /// Closes all open connections; new ones are accepted.
    pub(crate) fn cut(&self) {
        for stream in self.state.open.lock().drain(..) {
            let _ = stream.shutdown(Shutdown::Both);
        }
    }

    pub(crate) fn streams(&self) -> usize {
        self.state.requested.lock().iter().filter(|line| line.contains("/logs/stream")).count()
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        self.state.over.store(true, Ordering::SeqCst);
        self.cut();
        let _ = TcpStream::connect(&self.address);
    }
}

/// Relays until either side closes.
fn copy_both_ways(state: &RelayState, mut client: TcpStream, server: &str, streams: bool) -> Option<()> {
    let mut first = [0; 4096];
    let length = client.read(&mut first).ok()?;
    let line = String::from_utf8_lossy(&first[..length]).lines().next().unwrap_or_default().to_owned();
    let hidden = !streams && line.contains("/logs/stream");
    state.requested.lock().push(line);
    if hidden {
        return client.write_all(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n").ok();
    }
    let mut far = TcpStream::connect(server).ok()?;
    far.write_all(&first[..length]).ok()?;
    let (mut from_client, mut to_far) = (client.try_clone().ok()?, far.try_clone().ok()?);
    state.open.lock().extend([client.try_clone().ok()?, far.try_clone().ok()?]);
    std::thread::spawn(move || {
        let _ = std::io::copy(&mut from_client, &mut to_far);
        let _ = to_far.shutdown(Shutdown::Both);
    });
    let _ = std::io::copy(&mut far, &mut client);
    client.shutdown(Shutdown::Both).ok()
}
