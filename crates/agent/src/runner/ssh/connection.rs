//! One client connection: authentication and requests.
//!
//! The library calls these methods from the loop that serves the whole connection, so none of them waits for the
//! network or for a program: whatever takes time runs in a separate task.

use std::{collections::HashMap, net::SocketAddr, path::PathBuf, sync::Arc};

use nix::sys::signal::Signal;
use russh::{
    Channel, ChannelId, ChannelOpenFailure, Pty, Sig,
    keys::PublicKey,
    server::{self, Auth, ChannelOpenHandle, Msg, PublicKeyOffer, VerifiedPublicKey},
};
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;
use windlass_api::agent::runner::User;

use super::{
    Config,
    channel_io::{Channels, SessionRequest, TerminalRequest},
    command,
    connection_tracker::TrackedConnection,
    keys,
    port_forward::{self, ClientEnd, OpenRequest, ReverseForward},
    program::{self, ProgramChannel, ProgramControl, ProgramKind, ProgramStart},
    terminal::{Terminal, TerminalSize},
};
use crate::{
    isolation::restrict::Restrictions,
    runner::{
        login_session::Session,
        user::{Account, UserDatabase},
    },
};

/// Maximum number of listeners that a client may open.
const LISTENERS_MAX: usize = 64;
/// Maximum number of signals and resizes that wait for one program.
const CONTROL_MAX: usize = 16;

#[derive(Debug, thiserror::Error)]
#[error("failed to serve the connection")]
pub(super) struct Error(#[from] russh::Error);

pub(super) struct Connection {
    config: Arc<Config>,
    peer: SocketAddr,
    local: SocketAddr,
    /// Cancelled once the client has authenticated with a key.
    admitted: CancellationToken,
    login: String,
    entered: Option<TrackedConnection>,
    channels: Arc<Channels>,
    listeners: HashMap<ListenerKey, CancellationToken>,
    agent: Option<PathBuf>,
    over: CancellationToken,
}

#[derive(Debug, PartialEq, Eq, Hash)]
enum ListenerKey {
    Port(String, u32),
    Socket(String),
}

impl Drop for Connection {
    fn drop(&mut self) {
        // Ends every channel, listener and program of the connection.
        self.over.cancel();
    }
}

impl Connection {
    pub(super) fn new(
        config: Arc<Config>,
        (peer, local): (SocketAddr, SocketAddr),
        admitted: CancellationToken,
        channels: Channels,
        over: CancellationToken,
    ) -> Self {
        Self {
            config,
            peer,
            local,
            admitted,
            login: String::new(),
            entered: None,
            channels: Arc::new(channels),
            listeners: HashMap::new(),
            agent: None,
            over,
        }
    }

    /// Returns the account and environment of the client; `None` if the server has no sessions.
    fn session(&self) -> Option<Session> {
        session_for(&self.config, &self.login)
    }

    fn account(&self) -> Option<Account> {
        self.session().map(|session| session.account)
    }

    async fn is_key_authorized(&self, user: &str, key: &PublicKey) -> bool {
        if self.config.keys.contains(key) {
            return true;
        }
        let Some(Session { account, .. }) = session_for(&self.config, user) else { return false };
        let key = key.clone();
        let holds = tokio::task::spawn_blocking(move || {
            keys::file_contains(&account.home.join(".ssh/authorized_keys"), account.uid, &key)
        });
        holds.await.unwrap_or(false)
    }

    fn opening(&self, channel: Channel<Msg>, reply: ChannelOpenHandle) -> Option<OpenRequest> {
        if self.channels.is_full() {
            // Dropping the reply refuses the channel.
            return None;
        }
        let inlet = self.channels.enter(channel.id());
        Some(OpenRequest { channel, reply, inlet, channels: Arc::clone(&self.channels) })
    }

    fn backward(&self, session: &server::Session, until: CancellationToken) -> ReverseForward {
        ReverseForward { handle: session.handle(), channels: Arc::clone(&self.channels), until }
    }

    fn begin(
        &mut self,
        id: ChannelId,
        what: ProgramKind,
        session: &mut server::Session,
    ) -> Result<(), Error> {
        let (steer, control) = mpsc::channel(CONTROL_MAX);
        let Some(as_user) = self.session() else { return Ok(session.channel_failure(id)?) };
        let Some((requested, inlet)) = self.channels.start(id, steer) else {
            return Ok(session.channel_failure(id)?);
        };
        session.channel_success(id)?;
        let SessionRequest { write, env, terminal, agent } = requested;
        let (mut notice, mut kind, mut opened) = (None, None, None);
        match terminal {
            Some(TerminalRequest { kind: requested, opened: Ok(pair) }) => {
                kind = Some(requested);
                opened = Some(pair);
            }
            Some(TerminalRequest { opened: Err(error), .. }) => {
                notice = Some(format!("failed to open a terminal: {error}"))
            }
            None => {}
        }
        let from = format!("{} {} {}", self.peer.ip(), self.peer.port(), self.local.port());
        let both =
            format!("{} {} {} {}", self.peer.ip(), self.peer.port(), self.local.ip(), self.local.port());
        let mut own = vec![("SSH_CLIENT", from.as_ref()), ("SSH_CONNECTION", both.as_ref())];
        own.extend(kind.as_ref().map(|kind| ("TERM", kind.as_ref())));
        own.extend(opened.as_ref().map(|(terminal, _)| ("SSH_TTY", terminal.name.as_os_str())));
        own.extend(self.agent.as_ref().filter(|_| agent).map(|path| ("SSH_AUTH_SOCK", path.as_os_str())));
        let env = command::environment(&as_user, &own, &env);
        let start = ProgramStart { what, session: as_user, env, terminal: opened, notice };
        let link = ProgramChannel { id, inlet, write, handle: session.handle(), control };
        let channels = Arc::clone(&self.channels);
        tokio::spawn(async move {
            program::run(start, link).await;
            channels.remove(id);
        });
        Ok(())
    }
}

/// Returns the session of a user who logs in under this name: root as root, every other name as the job's user. In a
/// confined task no session is root.
fn session_for(config: &Config, login: &str) -> Option<Session> {
    let sessions = config.sessions.as_ref()?;
    let mut session = sessions();
    let may_be_root = rustix::process::geteuid().is_root() && !Restrictions::for_children().are_active();
    if login == "root" && session.account.uid != 0 && may_be_root {
        let root = User { uid: Some(0), ..User::default() };
        session.account = UserDatabase::read_file("/".as_ref())
            .and_then(|users| users.account(Some(&root), 0))
            .unwrap_or_else(|_| Account::root());
    }
    Some(session)
}

impl server::Handler for Connection {
    type Error = Error;

    async fn auth_publickey_offered(&mut self, user: &str, offer: PublicKeyOffer<'_>) -> Result<Auth, Error> {
        if keys::is_acceptable(offer.algorithm) && self.is_key_authorized(user, offer.public_key).await {
            return Ok(Auth::Accept);
        }
        Ok(Auth::reject())
    }

    /// Decides again on the key whose signature was verified: an offered key proves nothing.
    async fn auth_publickey(&mut self, user: &str, key: VerifiedPublicKey<'_>) -> Result<Auth, Error> {
        if !keys::is_acceptable(key.algorithm) || !self.is_key_authorized(user, key.public_key).await {
            return Ok(Auth::reject());
        }
        user.clone_into(&mut self.login);
        Ok(Auth::Accept)
    }

    async fn auth_succeeded(&mut self, _session: &mut server::Session) -> Result<(), Error> {
        self.admitted.cancel();
        self.entered = Some(self.config.connections.enter());
        tracing::info!(peer = %self.peer, login = self.login, "SSH client authenticated");
        Ok(())
    }

    async fn channel_open_session(
        &mut self,
        channel: Channel<Msg>,
        reply: ChannelOpenHandle,
        _session: &mut server::Session,
    ) -> Result<(), Error> {
        if self.config.sessions.is_none() {
            reply.reject(ChannelOpenFailure::AdministrativelyProhibited).await;
            return Ok(());
        }
        if self.channels.is_full() {
            reply.reject(ChannelOpenFailure::ResourceShortage).await;
            return Ok(());
        }
        let id = channel.id();
        // Input is received in `data` below; see `inflow`.
        let (_, write) = channel.split();
        self.channels
            .add_session(id, SessionRequest { write, env: Vec::new(), terminal: None, agent: false });
        reply.accept().await;
        Ok(())
    }

    async fn channel_open_direct_tcpip(
        &mut self,
        channel: Channel<Msg>,
        host: &str,
        port: u32,
        _originator: &str,
        _originator_port: u32,
        reply: ChannelOpenHandle,
        _session: &mut server::Session,
    ) -> Result<(), Error> {
        let is_runner = self.config.runner.is_some() && port_forward::is_runner_port(host, port);
        if self.config.sessions.is_none() && !is_runner {
            reply.reject(ChannelOpenFailure::AdministrativelyProhibited).await;
            return Ok(());
        }
        let Some(opening) = self.opening(channel, reply) else { return Ok(()) };
        match &self.config.runner {
            Some(router) if is_runner => {
                tokio::spawn(port_forward::forward_to_runner(opening, router.clone()));
            }
            Some(_) | None => {
                tokio::spawn(port_forward::forward_to_port(opening, host.to_owned(), port));
            }
        }
        Ok(())
    }

    async fn channel_open_direct_streamlocal(
        &mut self,
        channel: Channel<Msg>,
        path: &str,
        reply: ChannelOpenHandle,
        _session: &mut server::Session,
    ) -> Result<(), Error> {
        let Some(account) = self.account() else {
            reply.reject(ChannelOpenFailure::AdministrativelyProhibited).await;
            return Ok(());
        };
        if let Some(opening) = self.opening(channel, reply) {
            tokio::spawn(port_forward::forward_to_socket(opening, path.to_owned(), account));
        }
        Ok(())
    }

    async fn channel_open_confirmation(
        &mut self,
        id: ChannelId,
        _packet_max: u32,
        _window: u32,
        _session: &mut server::Session,
    ) -> Result<(), Error> {
        // Bytes may follow at once, before the task that opened the channel runs again.
        self.channels.enter(id);
        Ok(())
    }

    async fn data(&mut self, id: ChannelId, data: &[u8], session: &mut server::Session) -> Result<(), Error> {
        if self.channels.put(id, data).is_err() {
            tracing::warn!(peer = %self.peer, "closed a channel that exceeded its backlog limit");
            session.close(id)?;
            self.channels.remove(id);
        }
        Ok(())
    }

    fn adjust_window(&mut self, id: ChannelId, given: u32) -> u32 {
        self.channels.next_window(given, id)
    }

    async fn channel_eof(&mut self, id: ChannelId, _session: &mut server::Session) -> Result<(), Error> {
        self.channels.end(id);
        Ok(())
    }

    async fn channel_close(&mut self, id: ChannelId, _session: &mut server::Session) -> Result<(), Error> {
        self.channels.remove(id);
        Ok(())
    }

    async fn pty_request(
        &mut self,
        id: ChannelId,
        kind: &str,
        columns: u32,
        rows: u32,
        width: u32,
        height: u32,
        modes: &[(Pty, u32)],
        session: &mut server::Session,
    ) -> Result<(), Error> {
        let size = TerminalSize { columns, rows, width, height };
        let Some(account) = self.account() else { return reply_to(session, id, false) };
        let kind = if kind.contains('\0') { String::new() } else { kind.to_owned() };
        // A client that is refused closes the channel without a message to its user. So the program that is started on
        // it reports the failure.
        let requested = self.channels.update_request(id, |requested| {
            let opened = Terminal::open(size, modes, &account);
            requested.terminal = Some(TerminalRequest { kind, opened });
        });
        reply_to(session, id, requested)
    }

    async fn x11_request(
        &mut self,
        id: ChannelId,
        _single: bool,
        _protocol: &str,
        _cookie: &str,
        _screen: u32,
        session: &mut server::Session,
    ) -> Result<(), Error> {
        Ok(session.channel_failure(id)?)
    }

    async fn env_request(
        &mut self,
        id: ChannelId,
        name: &str,
        value: &str,
        session: &mut server::Session,
    ) -> Result<(), Error> {
        let mut taken = false;
        if command::is_variable_allowed(name, value) {
            self.channels.update_request(id, |requested| {
                taken = requested.env.len() < command::CLIENT_VARIABLES_MAX;
                if taken {
                    requested.env.push((name.to_owned(), value.to_owned()));
                }
            });
        }
        reply_to(session, id, taken)
    }

    async fn shell_request(&mut self, id: ChannelId, session: &mut server::Session) -> Result<(), Error> {
        self.begin(id, ProgramKind::Shell, session)
    }

    async fn exec_request(
        &mut self,
        id: ChannelId,
        line: &[u8],
        session: &mut server::Session,
    ) -> Result<(), Error> {
        self.begin(id, ProgramKind::Command(line.to_vec()), session)
    }

    async fn subsystem_request(
        &mut self,
        id: ChannelId,
        name: &str,
        session: &mut server::Session,
    ) -> Result<(), Error> {
        if name != "sftp" {
            return Ok(session.channel_failure(id)?);
        }
        self.begin(id, ProgramKind::Sftp, session)
    }

    async fn window_change_request(
        &mut self,
        id: ChannelId,
        columns: u32,
        rows: u32,
        width: u32,
        height: u32,
        session: &mut server::Session,
    ) -> Result<(), Error> {
        let reported =
            self.channels.steer(id, ProgramControl::Resize(TerminalSize { columns, rows, width, height }));
        reply_to(session, id, reported)
    }

    async fn signal(
        &mut self,
        id: ChannelId,
        signal: Sig,
        session: &mut server::Session,
    ) -> Result<(), Error> {
        let reported =
            to_signal(&signal).is_some_and(|signal| self.channels.steer(id, ProgramControl::Signal(signal)));
        reply_to(session, id, reported)
    }

    async fn agent_request(&mut self, id: ChannelId, session: &mut server::Session) -> Result<bool, Error> {
        if self.agent.is_none() {
            let Some(account) = self.account() else { return Ok(false) };
            // One socket for the connection, as with sshd.
            let Ok((named, path)) = port_forward::listen_agent(&account).await else {
                return Ok(false);
            };
            let backward = self.backward(session, self.over.child_token());
            tokio::spawn(port_forward::serve_socket(named, ClientEnd::Agent, backward));
            self.agent = Some(path);
        }
        Ok(self.channels.update_request(id, |requested| requested.agent = true))
    }

    async fn tcpip_forward(
        &mut self,
        address: &str,
        port: &mut u32,
        session: &mut server::Session,
    ) -> Result<bool, Error> {
        let Ok(wanted) = u16::try_from(*port) else { return Ok(false) };
        let Some(account) = self.account().filter(|_| self.listeners.len() < LISTENERS_MAX) else {
            return Ok(false);
        };
        let Ok((listeners, bound)) = port_forward::listen(wanted, &account).await else { return Ok(false) };
        *port = u32::from(bound);
        let until = self.over.child_token();
        for listener in listeners {
            let backward = self.backward(session, until.clone());
            tokio::spawn(port_forward::serve_port(listener, address.to_owned(), *port, backward));
        }
        self.listeners.insert(ListenerKey::Port(address.to_owned(), *port), until);
        Ok(true)
    }

    async fn cancel_tcpip_forward(
        &mut self,
        address: &str,
        port: u32,
        _session: &mut server::Session,
    ) -> Result<bool, Error> {
        let known = self.listeners.remove(&ListenerKey::Port(address.to_owned(), port));
        Ok(known.map(|until| until.cancel()).is_some())
    }

    async fn streamlocal_forward(
        &mut self,
        path: &str,
        session: &mut server::Session,
    ) -> Result<bool, Error> {
        let Some(account) = self.account().filter(|_| self.listeners.len() < LISTENERS_MAX) else {
            return Ok(false);
        };
        let Ok(named) = port_forward::listen_socket(PathBuf::from(path), &account).await else {
            return Ok(false);
        };
        let until = self.over.child_token();
        let backward = self.backward(session, until.clone());
        tokio::spawn(port_forward::serve_socket(named, ClientEnd::Socket(path.to_owned()), backward));
        self.listeners.insert(ListenerKey::Socket(path.to_owned()), until);
        Ok(true)
    }

    async fn cancel_streamlocal_forward(
        &mut self,
        path: &str,
        _session: &mut server::Session,
    ) -> Result<bool, Error> {
        let known = self.listeners.remove(&ListenerKey::Socket(path.to_owned()));
        Ok(known.map(|until| until.cancel()).is_some())
    }
}

fn reply_to(session: &mut server::Session, id: ChannelId, done: bool) -> Result<(), Error> {
    if done {
        session.channel_success(id)?;
    } else {
        session.channel_failure(id)?;
    }
    Ok(())
}

fn to_signal(signal: &Sig) -> Option<Signal> {
    Some(match signal {
        Sig::ABRT => Signal::SIGABRT,
        Sig::ALRM => Signal::SIGALRM,
        Sig::FPE => Signal::SIGFPE,
        Sig::HUP => Signal::SIGHUP,
        Sig::ILL => Signal::SIGILL,
        Sig::INT => Signal::SIGINT,
        Sig::KILL => Signal::SIGKILL,
        Sig::PIPE => Signal::SIGPIPE,
        Sig::QUIT => Signal::SIGQUIT,
        Sig::SEGV => Signal::SIGSEGV,
        Sig::TERM => Signal::SIGTERM,
        Sig::USR1 => Signal::SIGUSR1,
        Sig::Custom(name) => format!("SIG{name}").parse().ok()?,
    })
}
