//! One client: who it is, and what it asks for.
//!
//! The library calls these methods from the loop that serves the whole connection, so none of them waits for
//! the network or for a program: whatever takes time is a task of its own.

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
    channel::{Asked, AskedTerminal, Channels},
    command,
    connections::Entered,
    forward::{self, Backward, Far, Opening},
    keys,
    program::{self, Control, Link, Start, What},
    terminal::{Size, Terminal},
};
use crate::{
    isolation::restrict::Restrictions,
    runner::{
        session::Session,
        user::{Account, Users},
    },
};

/// Listeners that a client may open here.
const LISTENERS_MAX: usize = 64;
/// Signals and new sizes that wait for one program.
const CONTROL_MAX: usize = 16;

#[derive(Debug, thiserror::Error)]
#[error("serve a connection")]
pub(super) struct Error(#[from] russh::Error);

pub(super) struct Connection {
    config: Arc<Config>,
    peer: SocketAddr,
    local: SocketAddr,
    /// Told once a key was proven.
    admitted: CancellationToken,
    login: String,
    entered: Option<Entered>,
    channels: Arc<Channels>,
    listeners: HashMap<Listener, CancellationToken>,
    agent: Option<PathBuf>,
    over: CancellationToken,
}

#[derive(Debug, PartialEq, Eq, Hash)]
enum Listener {
    Port(String, u32),
    Socket(String),
}

impl Drop for Connection {
    fn drop(&mut self) {
        // Every channel, listener and program of the connection learns of its end here.
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

    /// As whom the client works here; nothing where nobody works.
    fn session(&self) -> Option<Session> {
        session_of(&self.config, &self.login)
    }

    fn account(&self) -> Option<Account> {
        self.session().map(|session| session.account)
    }

    async fn may_enter(&self, user: &str, key: &PublicKey) -> bool {
        if self.config.keys.hold(key) {
            return true;
        }
        let Some(Session { account, .. }) = session_of(&self.config, user) else { return false };
        let key = key.clone();
        let holds = tokio::task::spawn_blocking(move || {
            keys::file_holds(&account.home.join(".ssh/authorized_keys"), account.uid, &key)
        });
        holds.await.unwrap_or(false)
    }

    fn opening(&self, channel: Channel<Msg>, reply: ChannelOpenHandle) -> Option<Opening> {
        if self.channels.full() {
            // Dropping the reply refuses the channel.
            return None;
        }
        let inlet = self.channels.enter(channel.id());
        Some(Opening { channel, reply, inlet, channels: Arc::clone(&self.channels) })
    }

    fn backward(&self, session: &server::Session, until: CancellationToken) -> Backward {
        Backward { handle: session.handle(), channels: Arc::clone(&self.channels), until }
    }

    fn begin(&mut self, id: ChannelId, what: What, session: &mut server::Session) -> Result<(), Error> {
        let (steer, control) = mpsc::channel(CONTROL_MAX);
        let Some(as_whom) = self.session() else { return Ok(session.channel_failure(id)?) };
        let Some((asked, inlet)) = self.channels.start(id, steer) else {
            return Ok(session.channel_failure(id)?);
        };
        session.channel_success(id)?;
        let Asked { write, env, terminal, agent } = asked;
        let (mut notice, mut kind, mut opened) = (None, None, None);
        match terminal {
            Some(AskedTerminal { kind: asked, opened: Ok(pair) }) => {
                kind = Some(asked);
                opened = Some(pair);
            }
            Some(AskedTerminal { opened: Err(error), .. }) => notice = Some(format!("no terminal: {error}")),
            None => {}
        }
        let from = format!("{} {} {}", self.peer.ip(), self.peer.port(), self.local.port());
        let both =
            format!("{} {} {} {}", self.peer.ip(), self.peer.port(), self.local.ip(), self.local.port());
        let mut own = vec![("SSH_CLIENT", from.as_ref()), ("SSH_CONNECTION", both.as_ref())];
        own.extend(kind.as_ref().map(|kind| ("TERM", kind.as_ref())));
        own.extend(opened.as_ref().map(|(terminal, _)| ("SSH_TTY", terminal.name.as_os_str())));
        own.extend(self.agent.as_ref().filter(|_| agent).map(|path| ("SSH_AUTH_SOCK", path.as_os_str())));
        let env = command::environment(&as_whom, &own, &env);
        let start = Start { what, session: as_whom, env, terminal: opened, notice };
        let link = Link { id, inlet, write, handle: session.handle(), control };
        let channels = Arc::clone(&self.channels);
        tokio::spawn(async move {
            program::run(start, link).await;
            channels.leave(id);
        });
        Ok(())
    }
}

/// As whom somebody who logs in under this name works: root as root, everybody else as the job's user. In a task that is
/// confined nobody is root.
fn session_of(config: &Config, login: &str) -> Option<Session> {
    let sessions = config.sessions.as_ref()?;
    let mut session = sessions();
    let may_be_root = rustix::process::geteuid().is_root() && !Restrictions::of_children().are_active();
    if login == "root" && session.account.uid != 0 && may_be_root {
        let root = User { uid: Some(0), ..User::default() };
        session.account = Users::read("/".as_ref())
            .and_then(|users| users.account(Some(&root), 0))
            .unwrap_or_else(|_| Account::root());
    }
    Some(session)
}

impl server::Handler for Connection {
    type Error = Error;

    async fn auth_publickey_offered(&mut self, user: &str, offer: PublicKeyOffer<'_>) -> Result<Auth, Error> {
        if keys::acceptable(offer.algorithm) && self.may_enter(user, offer.public_key).await {
            return Ok(Auth::Accept);
        }
        Ok(Auth::reject())
    }

    /// Decided anew on the key whose signature was verified: an offered key proves nothing.
    async fn auth_publickey(&mut self, user: &str, key: VerifiedPublicKey<'_>) -> Result<Auth, Error> {
        if !keys::acceptable(key.algorithm) || !self.may_enter(user, key.public_key).await {
            return Ok(Auth::reject());
        }
        user.clone_into(&mut self.login);
        Ok(Auth::Accept)
    }

    async fn auth_succeeded(&mut self, _session: &mut server::Session) -> Result<(), Error> {
        self.admitted.cancel();
        self.entered = Some(self.config.connections.enter());
        tracing::info!(peer = %self.peer, login = self.login, "ssh connection");
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
        if self.channels.full() {
            reply.reject(ChannelOpenFailure::ResourceShortage).await;
            return Ok(());
        }
        let id = channel.id();
        // What comes in is taken from `data` below; see `inflow`.
        let (_, write) = channel.split();
        self.channels.enter_session(id, Asked { write, env: Vec::new(), terminal: None, agent: false });
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
        let is_runner = self.config.runner.is_some() && forward::is_runner(host, port);
        if self.config.sessions.is_none() && !is_runner {
            reply.reject(ChannelOpenFailure::AdministrativelyProhibited).await;
            return Ok(());
        }
        let Some(opening) = self.opening(channel, reply) else { return Ok(()) };
        match &self.config.runner {
            Some(router) if is_runner => {
                tokio::spawn(forward::to_runner(opening, router.clone()));
            }
            Some(_) | None => {
                tokio::spawn(forward::to_port(opening, host.to_owned(), port));
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
            tokio::spawn(forward::to_socket(opening, path.to_owned(), account));
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
            tracing::warn!(peer = %self.peer, "close a channel that nobody reads");
            session.close(id)?;
            self.channels.leave(id);
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
        self.channels.leave(id);
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
        let size = Size { columns, rows, width, height };
        let Some(account) = self.account() else { return answer(session, id, false) };
        let kind = if kind.contains('\0') { String::new() } else { kind.to_owned() };
        // A client that is refused closes the channel without a word to its user. So the failure is told by the
        // program that is started on it.
        let asked = self.channels.ask(id, |asked| {
            let opened = Terminal::open(size, modes, &account);
            asked.terminal = Some(AskedTerminal { kind, opened });
        });
        answer(session, id, asked)
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
        if command::may_set(name, value) {
            self.channels.ask(id, |asked| {
                taken = asked.env.len() < command::CLIENT_VARIABLES_MAX;
                if taken {
                    asked.env.push((name.to_owned(), value.to_owned()));
                }
            });
        }
        answer(session, id, taken)
    }

    async fn shell_request(&mut self, id: ChannelId, session: &mut server::Session) -> Result<(), Error> {
        self.begin(id, What::Shell, session)
    }

    async fn exec_request(
        &mut self,
        id: ChannelId,
        line: &[u8],
        session: &mut server::Session,
    ) -> Result<(), Error> {
        self.begin(id, What::Command(line.to_vec()), session)
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
        self.begin(id, What::Sftp, session)
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
        let told = self.channels.steer(id, Control::Resize(Size { columns, rows, width, height }));
        answer(session, id, told)
    }

    async fn signal(
        &mut self,
        id: ChannelId,
        signal: Sig,
        session: &mut server::Session,
    ) -> Result<(), Error> {
        let told = signal_of(&signal).is_some_and(|signal| self.channels.steer(id, Control::Signal(signal)));
        answer(session, id, told)
    }

    async fn agent_request(&mut self, id: ChannelId, session: &mut server::Session) -> Result<bool, Error> {
        if self.agent.is_none() {
            let Some(account) = self.account() else { return Ok(false) };
            // One socket for the connection, as with sshd.
            let Ok((named, path)) = forward::listen_agent(&account).await else {
                return Ok(false);
            };
            let backward = self.backward(session, self.over.child_token());
            tokio::spawn(forward::from_socket(named, Far::Agent, backward));
            self.agent = Some(path);
        }
        Ok(self.channels.ask(id, |asked| asked.agent = true))
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
        let Ok((listeners, bound)) = forward::listen(wanted, &account).await else { return Ok(false) };
        *port = u32::from(bound);
        let until = self.over.child_token();
        for listener in listeners {
            let backward = self.backward(session, until.clone());
            tokio::spawn(forward::from_port(listener, address.to_owned(), *port, backward));
        }
        self.listeners.insert(Listener::Port(address.to_owned(), *port), until);
        Ok(true)
    }

    async fn cancel_tcpip_forward(
        &mut self,
        address: &str,
        port: u32,
        _session: &mut server::Session,
    ) -> Result<bool, Error> {
        let known = self.listeners.remove(&Listener::Port(address.to_owned(), port));
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
        let Ok(named) = forward::listen_socket(PathBuf::from(path), &account).await else { return Ok(false) };
        let until = self.over.child_token();
        let backward = self.backward(session, until.clone());
        tokio::spawn(forward::from_socket(named, Far::Socket(path.to_owned()), backward));
        self.listeners.insert(Listener::Socket(path.to_owned()), until);
        Ok(true)
    }

    async fn cancel_streamlocal_forward(
        &mut self,
        path: &str,
        _session: &mut server::Session,
    ) -> Result<bool, Error> {
        let known = self.listeners.remove(&Listener::Socket(path.to_owned()));
        Ok(known.map(|until| until.cancel()).is_some())
    }
}

fn answer(session: &mut server::Session, id: ChannelId, done: bool) -> Result<(), Error> {
    if done {
        session.channel_success(id)?;
    } else {
        session.channel_failure(id)?;
    }
    Ok(())
}

fn signal_of(signal: &Sig) -> Option<Signal> {
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
