//! Output of ended tasks, for users who attach late.
//!
//! dstack's client attaches to a run that is already done and reads its output over SSH. The SSH server of a task ends
//! with the task, so the shim listens on that port instead: until the output was read, for at most a minute. It holds
//! no device and no directory of the task, only the open files of its output. A user who connects may read that and
//! nothing else: there are no sessions, files or forwarded ports.

use std::{
    collections::VecDeque,
    io,
    net::Ipv4Addr,
    sync::{Arc, OnceLock},
    time::Duration,
};

use parking_lot::Mutex;
use tokio::{
    net::TcpListener,
    time::{Instant, sleep},
};
use tokio_util::sync::CancellationToken;

use windlass_api::agent::{SSH_PORT, shim::Port};
use windlass_model::{error_chain::format_chain, job::TerminationReason};

use super::{
    Storage, Tasks,
    task::{Task, TaskEnd},
    task_files,
};
use crate::{
    runner::{api, ssh},
    safe_open::DirHandle,
    spool::{Reader, ReaderTracker, Stream, StreamSource, Watcher, http as spool},
    task_dir::TaskDir,
};

/// Maximum time to wait for readers. Tests wait until everything of a task is removed, so it is shorter in test builds.
const OPEN_TIMEOUT: Duration = Duration::from_secs(if cfg!(feature = "testing") { 15 } else { 60 });
/// A client that has read everything closes its connection itself.
const CLOSE_DELAY: Duration = Duration::from_secs(2);
/// The engine releases a port shortly after the container has ended.
const BIND_TIMEOUT: Duration = Duration::from_secs(5);
const BIND_RETRY_DELAY: Duration = Duration::from_millis(50);
/// Maximum number of open ports; the oldest is closed for a new one.
const PORTS_MAX: usize = 64;

/// Open ports, oldest first.
#[derive(Default)]
pub(super) struct LateReaders {
    open: Mutex<VecDeque<OpenPort>>,
    host_key: OnceLock<ssh::HostKey>,
}

#[derive(Clone)]
struct OpenPort {
    port: u16,
    stop: CancellationToken,
    closed: CancellationToken,
}

impl LateReaders {
    fn register(&self, port: u16) -> OpenPort {
        let entered = OpenPort { port, stop: CancellationToken::new(), closed: CancellationToken::new() };
        let mut open = self.open.lock();
        open.retain(|other| !other.closed.is_cancelled());
        while open.len() >= PORTS_MAX {
            if let Some(oldest) = open.pop_front() {
                oldest.stop.cancel();
            }
        }
        open.push_back(entered.clone());
        entered
    }

    /// Closes a port that a task needs, and waits until it is free.
    pub(super) async fn close_port(&self, port: u16) {
        let there: Vec<OpenPort> =
            self.open.lock().iter().filter(|open| open.port == port).cloned().collect();
        for open in there {
            open.stop.cancel();
            open.closed.cancelled().await;
        }
    }

    fn host_key(&self) -> Result<ssh::HostKey, ssh::KeyError> {
        match self.host_key.get() {
            Some(known) => Ok(known.clone()),
            None => {
                let made = ssh::HostKey::make()?;
                Ok(self.host_key.get_or_init(|| made).clone())
            }
        }
    }
}

/// Output of an ended task, and the port where users expect it.
pub(super) struct EndedOutput {
    reader: Reader,
    port: u16,
}

/// Opens the output of an ending task while it exists. `None` if no reader is expected: users only attach to runs that
/// are done, and a dstack server keeps the task until its output was read.
pub(super) async fn open_output(tasks: &Tasks, task: &Task, end: &TaskEnd) -> Option<EndedOutput> {
    let is_done = end.reason == TerminationReason::DoneByRunner.as_str();
    let is_kept =
        tasks.settings.keep == Storage::OnDisk && !task_files::is_from_dstack(&tasks.settings, &task.spec);
    if !is_done || !is_kept || task.spec.container_ssh_keys.is_empty() {
        return None;
    }
    let port = ssh_port(task.state.lock().ports.as_deref()?);
    let dir = task.dir.clone();
    let opened = tokio::task::spawn_blocking(move || open_reader(&dir)).await.ok()?;
    opened.ok().map(|reader| EndedOutput { reader, port })
}

/// Opens both files: they stay readable when their directory is removed.
fn open_reader(dir: &TaskDir) -> io::Result<Reader> {
    let reader = Reader::new(Arc::new(DirHandle::open(&dir.run())?), Stream::Job);
    reader.position()?;
    Ok(reader)
}

/// Returns the port of the SSH server. On the host's network it is the default port unless another is listed.
fn ssh_port(ports: &[Port]) -> u16 {
    ports.iter().find(|port| port.container == SSH_PORT).map_or(SSH_PORT, |port| port.host)
}

/// Serves the output for a limited time.
pub(super) async fn serve(tasks: Arc<Tasks>, task: Arc<Task>, output: EndedOutput) {
    let open = tasks.late_readers.register(output.port);
    // However this function ends, no other task waits for the port any longer.
    let _closed = open.closed.clone().drop_guard();
    let Some(listener) = bind(&open).await else { return };
    let host_key = match tasks.late_readers.host_key() {
        Ok(host_key) => host_key,
        Err(error) => return tracing::warn!(error = format_chain(&error), "failed to create a host key"),
    };
    if let Err(error) = tasks.host.keep_keys(&task.spec, output.port).await {
        tracing::warn!(error = format_chain(&error), id = %task.id, "failed to keep the keys of an ended task");
    }
    let keys = ssh::AuthorizedKeys::new();
    keys.add(&task.spec.container_ssh_keys.join("\n"));
    let ended = CancellationToken::new();
    ended.cancel();
    let readers = Arc::<ReaderTracker>::default();
    let source = StreamSource::there(output.reader, Watcher::default(), ended);
    let config = ssh::Config {
        keys,
        host_key,
        sessions: None,
        connections: ssh::ConnectionTracker::new(),
        runner: Some(api::guest_router(spool::tail_router(source, Arc::clone(&readers)))),
    };
    let over = async {
        let read = async {
            readers.tailed().await;
            sleep(CLOSE_DELAY).await;
        };
        tokio::select! {
            () = read => {}
            () = sleep(OPEN_TIMEOUT) => {}
            () = open.stop.cancelled() => {}
        }
        open.stop.cancel();
    };
    tokio::join!(ssh::serve(listener, config, open.stop.clone()), over);
    if let Err(error) = tasks.host.remove_keys(&task.spec).await {
        tracing::warn!(error = format_chain(&error), id = %task.id, "failed to remove the keys of an ended task");
    }
}

/// Binds to the loopback only: users connect through the host's SSH server, or from this host.
async fn bind(open: &OpenPort) -> Option<TcpListener> {
    let until = Instant::now() + BIND_TIMEOUT;
    loop {
        match TcpListener::bind((Ipv4Addr::LOCALHOST, open.port)).await {
            Ok(listener) => return Some(listener),
            Err(error) if Instant::now() >= until => {
                tracing::debug!(%error, port = open.port, "failed to listen on the port of an ended task");
                return None;
            }
            Err(_) => {}
        }
        tokio::select! {
            () = sleep(BIND_RETRY_DELAY) => {}
            () = open.stop.cancelled() => return None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn the_oldest_port_is_closed_when_too_many_are_open() {
        let late = LateReaders::default();
        let first = late.register(1);
        let rest: Vec<OpenPort> = (2..=64).map(|port| late.register(port)).collect();
        assert!(!first.stop.is_cancelled());
        // A closed port does not count.
        rest[0].closed.cancel();
        late.register(65);
        assert!(!first.stop.is_cancelled());
        late.register(66);
        assert!(first.stop.is_cancelled() && !rest[1].stop.is_cancelled());
    }

    #[tokio::test]
    async fn a_port_is_closed_before_a_new_task_gets_it() {
        let late = Arc::new(LateReaders::default());
        let (wanted, other) = (late.register(SSH_PORT), late.register(7));
        let given = tokio::spawn({
            let late = Arc::clone(&late);
            async move { late.close_port(SSH_PORT).await }
        });
        wanted.stop.cancelled().await;
        assert!(!given.is_finished(), "it is not closed yet");
        wanted.closed.cancel();
        given.await.unwrap();
        assert!(!other.stop.is_cancelled());
    }

    #[test]
    fn late_readers_connect_to_the_former_ssh_port_of_the_task() {
        assert_eq!(ssh_port(&[]), SSH_PORT);
        let ports = [Port { host: 1, container: 8000 }, Port { host: 4242, container: SSH_PORT }];
        assert_eq!(ssh_port(&ports), 4242);
    }
}
