//! `windlass gateway serve`: takes requests for services, on a host of its own.

use std::{
    net::SocketAddr,
    path::{Path, PathBuf},
    time::Duration,
};

use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;
use windlass_gateway::node::{AcmeSettings, Node, ServerClient, Settings, TlsSettings};

use crate::{
    commands::server::{LogFormat, LogLevel, block_on_workers, log},
    exit::Exit,
    output,
    problem::CliError,
};

pub(super) const EXAMPLES: &str = "\
Examples:
  windlass gateway serve entry --server http://127.0.0.1:3000 --token-file entry.token
  windlass gateway serve entry --server https://windlass:3443 --server-cert cert.pem --token-file entry.token
  windlass gateway serve entry --token-file entry.token --tls-listen 0.0.0.0:443 --tls-cert my.pem --tls-key my.key
  windlass gateway serve entry --token-file entry.token --tls-listen 0.0.0.0:443    certificates as the gateway says
  kill -HUP PID    reads the certificate anew";

/// Let's Encrypt.
const DEFAULT_ACME_DIRECTORY: &str = "https://acme-v02.api.letsencrypt.org/directory";
/// Longer, and a token that was revoked would live too long.
const TRUST_TOKENS_MAX_SECS: u64 = 600;

#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// The gateway; names the directory of its state
    #[arg(value_name = "GATEWAY")]
    pub(crate) name: String,
    /// Where the server is
    #[arg(long, env = "WINDLASS_URL", value_name = "URL", default_value = "http://127.0.0.1:3000")]
    pub(crate) server: String,
    /// The certificate that an `https` server is known by, as PEM; what this machine trusts, if not given
    #[arg(long, env = "WINDLASS_CERT", value_name = "FILE")]
    pub(crate) server_cert: Option<String>,
    /// File with the gateway's token; `windlass gateway token` makes one
    #[arg(long, value_name = "FILE")]
    pub(crate) token_file: PathBuf,
    /// Where to listen for HTTP
    #[arg(long, value_name = "ADDRESS", default_value = "0.0.0.0:80")]
    pub(crate) listen: SocketAddr,
    /// Where to listen for HTTPS
    #[arg(long, value_name = "ADDRESS")]
    pub(crate) tls_listen: Option<SocketAddr>,
    /// Certificate for HTTPS, as PEM; as the gateway's configuration says unless given
    #[arg(long, value_name = "FILE", requires = "tls_key")]
    pub(crate) tls_cert: Option<PathBuf>,
    /// Its private key, as PEM
    #[arg(long, value_name = "FILE", requires = "tls_cert", requires = "tls_listen")]
    pub(crate) tls_key: Option<PathBuf>,
    /// The authority that certificates are ordered from, where the gateway has `lets-encrypt`
    #[arg(long, value_name = "URL", default_value = DEFAULT_ACME_DIRECTORY)]
    pub(crate) acme_directory: String,
    /// Whom the authority writes to
    #[arg(long, value_name = "MAIL")]
    pub(crate) acme_contact: Option<String>,
    /// Certificates that the authority is known by, as PEM; those that this machine trusts, if not given
    #[arg(long, value_name = "FILE")]
    pub(crate) acme_roots: Option<String>,
    /// Where to show metrics, for Prometheus at /metrics
    #[arg(long, value_name = "ADDRESS")]
    pub(crate) metrics_listen: Option<SocketAddr>,
    /// Where people find this host: shown in lists
    #[arg(long, value_name = "HOST")]
    pub(crate) address: Option<String>,
    /// Seconds for which a token is believed after the server said yes to it
    #[arg(long, value_name = "SECONDS", default_value_t = 60, value_parser = clap::value_parser!(u64).range(0..=TRUST_TOKENS_MAX_SECS))]
    pub(crate) trust_tokens: u64,
    /// Where routes are kept for a restart
    #[arg(long, value_name = "DIR", default_value = "/var/lib/windlass/gateways")]
    pub(crate) state_dir: PathBuf,
}

pub(super) fn run(args: &Args) -> Result<Exit, CliError> {
    log(LogLevel::Info, LogFormat::Auto);
    if args.name.is_empty() || args.name.contains(['/', '.']) {
        return Err(CliError::usage("a gateway has a name such as `entry`"));
    }
    let token = read_token(&args.token_file)?;
    let server = ServerClient::new(&args.server, &token, args.server_cert.as_deref())
        .map_err(|error| CliError::from_error("find the server", &error))?;
    let tls = args.tls_listen.map(|listen| TlsSettings {
        listen,
        given: args.tls_cert.clone().zip(args.tls_key.clone()),
        acme: AcmeSettings {
            directory: args.acme_directory.clone(),
            contact: args.acme_contact.clone(),
            roots: args.acme_roots.clone(),
        },
    });
    let settings = Settings {
        server,
        state: args.state_dir.join(&args.name),
        listen: args.listen,
        tls,
        metrics: args.metrics_listen,
        address: args.address.clone(),
        trust: Duration::from_secs(args.trust_tokens),
    };
    block_on_workers(serve(settings))?;
    Ok(Exit::Done)
}

pub(super) fn read_token(path: &Path) -> Result<String, CliError> {
    std::fs::read_to_string(path)
        .map_err(|error| CliError::from_error(&format!("read {}", path.display()), &error))
        .map(|text| text.trim().to_owned())
}

async fn serve(settings: Settings) -> anyhow::Result<()> {
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    let mut hangup = signal(SignalKind::hangup())?;
    crate::open_files::raise_limit();
    let mut bits = [0_u8; 16];
    getrandom::fill(&mut bits)?;
    let node = Node::start(settings, uuid::Builder::from_random_bytes(bits).into_uuid())?;
    let (plain, encrypted) = node.addresses();
    if let Some(address) = encrypted {
        output::print_message(&format!("HTTPS is at {address}"));
    }
    if let Some(address) = plain {
        output::print_message(&format!("the gateway is ready at {address} (stop it with Ctrl-C)"));
    }
    let reload = node.reloader();
    let stop = CancellationToken::new();
    let told = stop.clone();
    let signals = tokio::spawn(async move {
        loop {
            tokio::select! {
                _ = terminate.recv() => break,
                _ = interrupt.recv() => break,
                _ = hangup.recv() => match reload() {
                    Ok(()) => tracing::info!("read the certificate anew"),
                    Err(error) => tracing::warn!(%error, "read the certificate anew; the old one stays"),
                },
            }
        }
        told.cancel();
    });
    node.run(stop).await?;
    signals.abort();
    Ok(())
}
