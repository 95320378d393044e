//! `windlass gateway serve`: receives requests for services on a separate host.

use std::{
    net::SocketAddr,
    path::{Path, PathBuf},
    time::Duration,
};

use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;
use windlass_gateway::node::{AcmeSettings, Node, ServerClient, Settings, TlsSettings};

use crate::{
    commands::server::{LogFormat, LogLevel, block_on_workers, init_logging},
    error::CliError,
    exit::Exit,
    output,
};

pub(super) const EXAMPLES: &str = "\
Examples:
  windlass gateway serve entry --server http://127.0.0.1:3000 --token-file entry.token
  windlass gateway serve entry --server https://windlass:3443 --server-cert cert.pem --token-file entry.token
  windlass gateway serve entry --token-file entry.token --tls-listen 0.0.0.0:443 --tls-cert my.pem --tls-key my.key
  windlass gateway serve entry --token-file entry.token --tls-listen 0.0.0.0:443

Without `--tls-cert`, HTTPS uses the certificate setting of the gateway's configuration. SIGHUP reloads certificate
files.";

/// Let's Encrypt.
const DEFAULT_ACME_DIRECTORY: &str = "https://acme-v02.api.letsencrypt.org/directory";
/// Upper limit, so that a revoked token is rejected soon enough.
const TRUST_TOKENS_MAX_SECS: u64 = 600;

#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Name of the gateway; also names its state directory
    #[arg(value_name = "GATEWAY")]
    pub(crate) name: String,
    /// URL of the server
    #[arg(long, env = "WINDLASS_URL", value_name = "URL", default_value = "http://127.0.0.1:3000")]
    pub(crate) server: String,
    /// Certificate of an `https` server, in PEM format; defaults to the trust store of this machine
    #[arg(long, env = "WINDLASS_CERT", value_name = "FILE")]
    pub(crate) server_cert: Option<String>,
    /// File with the gateway's token; `windlass gateway token` creates one
    #[arg(long, value_name = "FILE")]
    pub(crate) token_file: PathBuf,
    /// Address to listen on for HTTP
    #[arg(long, value_name = "ADDRESS", default_value = "0.0.0.0:80")]
    pub(crate) listen: SocketAddr,
    /// Address to listen on for HTTPS
    #[arg(long, value_name = "ADDRESS")]
    pub(crate) tls_listen: Option<SocketAddr>,
    /// Certificate for HTTPS, in PEM format; defaults to the certificate setting of the gateway's configuration
    #[arg(long, value_name = "FILE", requires = "tls_key")]
    pub(crate) tls_cert: Option<PathBuf>,
    /// Private key of the certificate, in PEM format
    #[arg(long, value_name = "FILE", requires = "tls_cert", requires = "tls_listen")]
    pub(crate) tls_key: Option<PathBuf>,
    /// ACME directory to order certificates from, if the gateway uses `lets-encrypt`
    #[arg(long, value_name = "URL", default_value = DEFAULT_ACME_DIRECTORY)]
    pub(crate) acme_directory: String,
    /// Contact address for the certificate authority
    #[arg(long, value_name = "MAIL")]
    pub(crate) acme_contact: Option<String>,
    /// Root certificates of the ACME server, in PEM format; defaults to the trust store of this machine
    #[arg(long, value_name = "FILE")]
    pub(crate) acme_roots: Option<String>,
    /// Address to serve Prometheus metrics on, at `/metrics`
    #[arg(long, value_name = "ADDRESS")]
    pub(crate) metrics_listen: Option<SocketAddr>,
    /// Public address of this host, shown in lists
    #[arg(long, value_name = "HOST")]
    pub(crate) address: Option<String>,
    /// Seconds for which a token that the server accepted is cached
    #[arg(long, value_name = "SECONDS", default_value_t = 60, value_parser = clap::value_parser!(u64).range(0..=TRUST_TOKENS_MAX_SECS))]
    pub(crate) trust_tokens: u64,
    /// Directory in which routes are stored for a restart
    #[arg(long, value_name = "DIR", default_value = "/var/lib/windlass/gateways")]
    pub(crate) state_dir: PathBuf,
}

pub(super) fn run(args: &Args) -> Result<Exit, CliError> {
    init_logging(LogLevel::Info, LogFormat::Auto);
    if args.name.is_empty() || args.name.contains(['/', '.']) {
        return Err(CliError::usage(
            "invalid gateway name: expected a name such as `entry`, without `/` and `.`",
        ));
    }
    let token = read_token(&args.token_file)?;
    let server = ServerClient::new(&args.server, &token, args.server_cert.as_deref())
        .map_err(|error| CliError::from_error("cannot connect to the server", &error))?;
    let tls = args.tls_listen.map(|listen| TlsSettings {
        listen,
        certificate_files: args.tls_cert.clone().zip(args.tls_key.clone()),
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
        token_cache_ttl: Duration::from_secs(args.trust_tokens),
    };
    block_on_workers(serve(settings))?;
    Ok(Exit::Done)
}

pub(super) fn read_token(path: &Path) -> Result<String, CliError> {
    std::fs::read_to_string(path)
        .map_err(|error| CliError::from_error(&format!("failed to read {}", path.display()), &error))
        .map(|text| text.trim().to_owned())
}

async fn serve(settings: Settings) -> anyhow::Result<()> {
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    let mut hangup = signal(SignalKind::hangup())?;
    crate::fd_limit::raise_limit();
    let mut bits = [0_u8; 16];
    getrandom::fill(&mut bits)?;
    let node = Node::start(settings, uuid::Builder::from_random_bytes(bits).into_uuid())?;
    let (plain, encrypted) = node.addresses();
    if let Some(address) = encrypted {
        output::print_message(&format!("HTTPS is available at {address}"));
    }
    if let Some(address) = plain {
        output::print_message(&format!("the gateway is ready at {address} (stop it with Ctrl-C)"));
    }
    let reload = node.reloader();
    let stop = CancellationToken::new();
    let reported = stop.clone();
    let signals = tokio::spawn(async move {
        loop {
            tokio::select! {
                _ = terminate.recv() => break,
                _ = interrupt.recv() => break,
                _ = hangup.recv() => match reload() {
                    Ok(()) => tracing::info!("reloaded certificate"),
                    Err(error) => tracing::warn!(%error, "failed to reload certificate; keeping the previous one"),
                },
            }
        }
        reported.cancel();
    });
    node.run(stop).await?;
    signals.abort();
    Ok(())
}
