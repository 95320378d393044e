//! Hidden commands: the file server that a session starts, and the SSH server without a job.

use std::{path::PathBuf, process::ExitCode};

use tokio_util::sync::CancellationToken;
use windlass_api::agent::runner::User;

use super::{AuthorizedKeys, Config, ConnectionTracker, HostKey};
use crate::runner::{
    login_session::Session,
    user::{Account, UserDatabase},
};

/// Arguments of the SSH server without a job.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Address to listen on
    #[arg(long, value_name = "ADDRESS:PORT")]
    listen: String,
    /// File with the keys that may log in
    #[arg(long, value_name = "FILE")]
    authorized_keys: PathBuf,
    /// File with the host key, created if missing
    #[arg(long, value_name = "FILE")]
    host_key: PathBuf,
    /// File to which the actual address is written
    #[arg(long, value_name = "FILE")]
    address_file: PathBuf,
    /// User of sessions
    #[arg(long, value_name = "NAME")]
    user: Option<String>,
    /// Shell of sessions, in place of the user's own
    #[arg(long, value_name = "FILE")]
    shell: Option<PathBuf>,
    /// Home directory of sessions, in place of the user's own
    #[arg(long, value_name = "DIR")]
    home: Option<PathBuf>,
}

#[derive(Debug, thiserror::Error)]
enum Error {
    #[error("{0}")]
    Io(#[from] std::io::Error),
    #[error("{0}")]
    Key(#[from] super::KeyError),
    #[error("{0}")]
    User(#[from] crate::runner::user::UserError),
}

/// Serves files on standard input and output.
pub fn serve_sftp() -> ExitCode {
    super::sftp::serve()
}

pub fn main(args: &Args) -> ExitCode {
    match serve(args) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            tracing::error!(%error, "failed to serve SSH");
            ExitCode::FAILURE
        }
    }
}

fn serve(args: &Args) -> Result<(), Error> {
    let session = Session {
        account: resolve_account(args)?,
        env: std::env::vars_os().collect(),
        dir: args.home.clone().unwrap_or_else(|| "/".into()),
    };
    let keys = AuthorizedKeys::new();
    keys.add(&std::fs::read_to_string(&args.authorized_keys)?);
    let config = Config {
        keys,
        host_key: HostKey::keep(&args.host_key)?,
        sessions: Some(std::sync::Arc::new(move || session.clone())),
        connections: ConnectionTracker::new(),
        runner: None,
    };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let listener = tokio::net::TcpListener::bind(&args.listen).await?;
        let next_to = args.address_file.with_extension("new");
        std::fs::write(&next_to, listener.local_addr()?.to_string())?;
        std::fs::rename(&next_to, &args.address_file)?;
        let stop = CancellationToken::new();
        let mut terminate = tokio::signal::unix::signal(tokio::signal::unix::SignalKind::terminate())?;
        let stopped = stop.clone();
        tokio::spawn(async move {
            terminate.recv().await;
            stopped.cancel();
        });
        super::serve(listener, config, stop).await;
        Ok(())
    })
}

fn resolve_account(args: &Args) -> Result<Account, Error> {
    let requested = args.user.as_ref().map(|name| User { username: Some(name.clone()), ..User::default() });
    let own = rustix::process::geteuid().as_raw();
    let mut account = UserDatabase::read_file("/".as_ref())?.account(requested.as_ref(), own)?;
    if let Some(shell) = &args.shell {
        account.shell.clone_from(shell);
    }
    if let Some(home) = &args.home {
        account.home.clone_from(home);
    }
    Ok(account)
}
