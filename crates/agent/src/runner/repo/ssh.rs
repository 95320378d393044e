//! SSH client for git: one command on one host, with the key of the credential.
//!
//! Images often have git and no SSH client. And `ssh` reads keys from files only, so a key would have to be on disk,
//! where a killed runner leaves it. This client reads it from the inherited handle.

use std::{
    io::Write as _,
    net::SocketAddr,
    os::fd::{AsFd as _, BorrowedFd},
    process::ExitCode,
    sync::Arc,
    time::Duration,
};

use russh::{
    ChannelMsg,
    client::{self, AuthResult},
    keys::{HashAlg, PrivateKeyWithHashAlg, PublicKeyOrCertificate, known_hosts::known_host_keys_path},
};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
};
use windlass_model::error_chain::format_chain;

use super::credential::{Credential, Secret};

const CONNECT_TIMEOUT: Duration = Duration::from_secs(30);
const CHUNK: usize = 32 << 10;
/// Global list of known hosts; a listed host must present the listed key.
const KNOWN_HOSTS: &str = "/etc/ssh/ssh_known_hosts";

/// Arguments with which git calls `ssh`.
#[derive(Debug, clap::Args)]
pub struct Args {
    #[arg(short = 'p', default_value_t = 22)]
    port: u16,
    /// `SendEnv=GIT_PROTOCOL`
    #[arg(short = 'o')]
    options: Vec<String>,
    #[arg(short = '4')]
    only_v4: bool,
    #[arg(short = '6')]
    only_v6: bool,
    destination: String,
    command: String,
}

#[derive(Debug, thiserror::Error)]
enum SshError {
    #[error("failed to read the private key")]
    Key(#[from] russh::keys::Error),
    #[error("failed to read the credential")]
    Credential(#[source] std::io::Error),
    #[error("there is no key for {0}")]
    NoKeyForHost(String),
    #[error(transparent)]
    Lookup(#[from] windlass_dial::LookupError),
    #[error("failed to connect to {0}")]
    Connect(String, #[source] std::io::Error),
    #[error("failed to connect to {0}: no response within {secs} s", secs = CONNECT_TIMEOUT.as_secs())]
    Timeout(String),
    #[error("the key of host {0} does not match the one in {1}")]
    HostKey(String, String),
    #[error("Permission denied (publickey): {0} rejected the key")]
    Denied(String),
    #[error("SSH failed")]
    Protocol(#[from] russh::Error),
    #[error("failed to forward git's data")]
    Relay(#[from] std::io::Error),
}

pub fn main(args: &Args) -> ExitCode {
    let runtime = match tokio::runtime::Builder::new_current_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(_) => return ExitCode::FAILURE,
    };
    let code = runtime.block_on(async {
        match run(args).await {
            Ok(code) => code,
            Err(error) => {
                let _ = writeln!(std::io::stderr(), "ssh: {}", format_chain(&error));
                255
            }
        }
    });
    // A read of standard input may still block a thread, which is not waited for.
    runtime.shutdown_background();
    ExitCode::from(code)
}

async fn run(args: &Args) -> Result<u8, SshError> {
    let (user, host) = args.destination.rsplit_once('@').unwrap_or(("git", &args.destination));
    let credential = Credential::from_inherited_fd().map_err(SshError::Credential)?;
    let key = match credential.secret {
        Secret::PrivateKey(key) if same_host(&credential.host, host, args.port) => key,
        Secret::PrivateKey(_) | Secret::Login { .. } => return Err(SshError::NoKeyForHost(host.to_owned())),
    };
    let key = Arc::new(russh::keys::decode_secret_key(&with_newline(key), None)?);
    let stream = connect(args, host).await?;
    let checker = HostKeyChecker { host: host.to_owned(), port: args.port };
    let config = Arc::new(client::Config {
        keepalive_interval: Some(Duration::from_secs(30)),
        inactivity_timeout: None,
        ..client::Config::default()
    });
    let handshake = tokio::time::timeout(CONNECT_TIMEOUT, client::connect_stream(config, stream, checker));
    let mut session = handshake.await.map_err(|_| SshError::Timeout(host.to_owned()))??;
    let hash = match key.algorithm().is_rsa() {
        true => session.best_supported_rsa_hash().await?.flatten().or(Some(HashAlg::Sha256)),
        false => None,
    };
    match session.authenticate_publickey(user, PrivateKeyWithHashAlg::new(key, hash)).await? {
        AuthResult::Success => {}
        AuthResult::Failure { .. } => return Err(SshError::Denied(host.to_owned())),
    }
    let channel = session.channel_open_session().await?;
    if args.options.iter().any(|option| option == "SendEnv=GIT_PROTOCOL")
        && let Ok(version) = std::env::var("GIT_PROTOCOL")
    {
        channel.set_env(false, "GIT_PROTOCOL", version).await?;
    }
    channel.exec(true, args.command.as_str()).await?;
    forward_channel(channel).await
}

/// Compares hosts. The credential's host may include the port of its URL.
fn same_host(known: &str, host: &str, port: u16) -> bool {
    let bare = |name: &str| name.trim_matches(['[', ']']).to_owned();
    match known.rsplit_once(':') {
        Some((name, known_port)) if !known_port.contains(']') => {
            bare(name) == bare(host) && known_port == port.to_string()
        }
        _ => bare(known) == bare(host),
    }
}

/// Adds a missing newline: forms and variables often drop that of the last line of a key.
fn with_newline(mut key: String) -> String {
    if !key.ends_with('\n') {
        key.push('\n');
    }
    key
}

/// Connects to the first address that answers. Names are resolved here: a static binary does not include the C
/// library's resolver.
async fn connect(args: &Args, host: &str) -> Result<TcpStream, SshError> {
    let addresses = windlass_dial::lookup(host).await?;
    let fits = |address: &&std::net::IpAddr| {
        !(args.only_v4 && address.is_ipv6() || args.only_v6 && address.is_ipv4())
    };
    let mut last = SshError::Timeout(host.to_owned());
    for address in addresses.iter().filter(fits) {
        match tokio::time::timeout(CONNECT_TIMEOUT, TcpStream::connect(SocketAddr::new(*address, args.port)))
            .await
        {
            Ok(Ok(stream)) => {
                let _ = stream.set_nodelay(true);
                return Ok(stream);
            }
            Ok(Err(error)) => last = SshError::Connect(host.to_owned(), error),
            Err(_) => last = SshError::Timeout(host.to_owned()),
        }
    }
    Err(last)
}

struct HostKeyChecker {
    host: String,
    port: u16,
}

impl client::Handler for HostKeyChecker {
    type Error = SshError;

    /// Checks the server's key: a listed host must present the listed key; other hosts are accepted.
    async fn check_server_key(&mut self, shown: &PublicKeyOrCertificate) -> Result<bool, Self::Error> {
        let PublicKeyOrCertificate::PublicKey { key, .. } = shown else { return Ok(true) };
        let home = std::env::var_os("HOME").map(|home| std::path::Path::new(&home).join(".ssh/known_hosts"));
        for file in home.into_iter().chain([KNOWN_HOSTS.into()]) {
            let listed = known_host_keys_path(&self.host, self.port, &file).unwrap_or_default();
            let mut same_kind =
                listed.iter().filter(|(_, known)| known.algorithm() == key.algorithm()).peekable();
            if same_kind.peek().is_some() && !same_kind.any(|(_, known)| known.key_data() == key.key_data()) {
                return Err(SshError::HostKey(self.host.clone(), file.display().to_string()));
            }
        }
        Ok(true)
    }
}

fn to_async_file(fd: BorrowedFd<'_>) -> std::io::Result<tokio::fs::File> {
    Ok(tokio::fs::File::from_std(std::fs::File::from(fd.try_clone_to_owned()?)))
}

/// Forwards data in both directions until the command exits. Returns its exit status.
#[expect(
    clippy::wildcard_enum_match_arm,
    reason = "a foreign enum that grows; only these say something here"
)]
async fn forward_channel(channel: russh::Channel<client::Msg>) -> Result<u8, SshError> {
    let (mut from, to) = channel.split();
    let send = async {
        let mut stdin = to_async_file(std::io::stdin().as_fd())?;
        let mut buffer = vec![0; CHUNK];
        loop {
            match stdin.read(&mut buffer).await? {
                0 => break,
                count => to.data_bytes(buffer[..count].to_vec()).await?,
            }
        }
        to.eof().await?;
        // The response to the last message is still pending.
        std::future::pending::<Result<u8, SshError>>().await
    };
    let receive = async {
        let mut stdout = to_async_file(std::io::stdout().as_fd())?;
        let mut status = None;
        while let Some(message) = from.wait().await {
            match message {
                ChannelMsg::Data { data } => {
                    stdout.write_all(&data).await?;
                    stdout.flush().await?;
                }
                ChannelMsg::ExtendedData { data, .. } => std::io::stderr().write_all(&data)?,
                ChannelMsg::ExitStatus { exit_status } => status = Some(exit_status),
                ChannelMsg::Failure => return Err(russh::Error::RequestDenied.into()),
                _ => {}
            }
        }
        Ok(status.and_then(|status| u8::try_from(status).ok()).unwrap_or(255))
    };
    tokio::select! {
        ended = receive => ended,
        failed = send => failed,
    }
}
