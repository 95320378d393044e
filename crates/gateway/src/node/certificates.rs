//! Certificates of a gateway: from files, or ordered from an authority for each name that it serves.
//!
//! Ordered certificates are stored in the state directory and used again after a restart. They are renewed after two
//! thirds of their lifetime. Failed orders are retried at increasing intervals, because authorities count failures.

use std::{
    collections::{BTreeSet, HashMap},
    fs::{self, File},
    io::{self, Write as _},
    os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _},
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use futures_util::future::BoxFuture;
use parking_lot::Mutex;
use rustls::pki_types::{CertificateDer, pem::PemObject as _};
use tokio::{
    sync::Notify,
    time::{Instant, timeout},
};
use windlass_dial::{Endpoint, TlsRoots};
use windlass_model::error_chain::format_chain;
use x509_cert::{Certificate, der::Decode as _, time::Time};

use super::NodeError;
use crate::{
    acme::{Account, AccountKey, AcmeError, Challenges, Dialer},
    connect::Stream,
    gateway_config::{CertificateSource, GatewayConfig},
    tls::{CertificatePem, Certificates},
};

/// Interval at which certificates are checked for renewal.
const RENEWAL_CHECK_INTERVAL: Duration = Duration::from_secs(3_600);
/// Delay before the next order for a name, by the number of failures.
const RETRY_DELAYS_S: [u64; 4] = [60, 300, 900, 3_600];
/// Delay before unreadable files are read again.
const FILE_RETRY_DELAY: Duration = Duration::from_secs(60);
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// Timeout of a whole order.
const ORDER_TIMEOUT: Duration = Duration::from_secs(300);
/// Maximum number of names for which one gateway orders certificates.
const NAMES_MAX: usize = 10_000;

/// Settings of the certificate authority.
#[derive(Clone, Debug)]
pub struct AcmeSettings {
    /// Directory URL of the authority.
    pub directory: String,
    pub contact: Option<String>,
    /// Certificates that identify the authority, if the machine does not trust it by itself.
    pub roots: Option<String>,
}

pub(super) struct CertificateManager {
    certificates: Arc<Certificates>,
    challenges: Arc<Challenges>,
    folder: PathBuf,
    acme: AcmeSettings,
    /// Files given at the start of the process; they take precedence over everything else.
    fixed_files: Option<(PathBuf, PathBuf)>,
    requested: Mutex<RequestedCertificates>,
    changed: Notify,
}

#[derive(Clone, Debug, Default, PartialEq)]
struct RequestedCertificates {
    source: Option<CertificateSource>,
    names: BTreeSet<String>,
}

/// Failure to obtain a certificate for a name.
#[derive(Debug, thiserror::Error)]
enum OrderError {
    #[error(transparent)]
    Acme(#[from] AcmeError),
    #[error("failed to read or write `{}`", path.display())]
    Store {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error(transparent)]
    Tls(#[from] crate::tls::TlsError),
    #[error("timed out waiting for the certificate authority")]
    TimedOut,
}

impl CertificateManager {
    pub(super) fn new(
        state: &Path,
        acme: AcmeSettings,
        given: Option<(PathBuf, PathBuf)>,
    ) -> Result<Self, NodeError> {
        let folder = state.join("certificates");
        let failed = |source| NodeError::Directory { path: folder.clone(), source };
        fs::DirBuilder::new().recursive(true).mode(0o700).create(&folder).map_err(failed)?;
        let keeper = Self {
            certificates: Arc::default(),
            challenges: Arc::default(),
            folder,
            acme,
            fixed_files: given,
            requested: Mutex::default(),
            changed: Notify::new(),
        };
        if let Some((chain, key)) = &keeper.fixed_files {
            keeper.load(chain, key)?;
        }
        Ok(keeper)
    }

    pub(super) fn certificates(&self) -> Arc<Certificates> {
        Arc::clone(&self.certificates)
    }

    pub(super) fn challenges(&self) -> Arc<Challenges> {
        Arc::clone(&self.challenges)
    }

    /// Applies the settings from the server. Names without HTTPS need no certificate.
    pub(super) fn update(&self, reported: &GatewayConfig) {
        let services = reported.services.iter().filter(|service| service.https);
        let names = services.flat_map(|service| &service.domains).chain(&reported.own);
        let names = names.map(|name| name.to_ascii_lowercase()).filter(|name| is_valid_name(name));
        let wanted = RequestedCertificates {
            source: reported.certificate.clone(),
            names: names.take(NAMES_MAX).collect(),
        };
        let mut slot = self.requested.lock();
        if *slot != wanted {
            *slot = wanted;
            self.changed.notify_one();
        }
    }

    /// Reads the files again.
    pub(super) fn reload(&self) -> Result<(), NodeError> {
        let source = self.requested.lock().source.clone();
        match (&self.fixed_files, source) {
            (Some((chain, key)), _) => self.load(chain, key),
            (None, Some(CertificateSource::Files { chain, key })) => self.load(&chain, &key),
            (None, Some(CertificateSource::Acme) | None) => Ok(()),
        }
    }

    fn load(&self, chain: &Path, key: &Path) -> Result<(), NodeError> {
        let read =
            |path: &Path| fs::read(path).map_err(|source| NodeError::File { path: path.to_owned(), source });
        self.certificates.put(&CertificatePem {
            name: "*".to_owned(),
            chain: read(chain)?,
            key: read(key)?,
        })?;
        Ok(())
    }

    /// Runs until dropped.
    pub(super) async fn run(self: Arc<Self>) {
        let mut orders = OrderState::default();
        let mut loaded = None;
        loop {
            let wanted = self.requested.lock().clone();
            let pause = match (&self.fixed_files, wanted.source) {
                (Some(_), _) | (None, None) => RENEWAL_CHECK_INTERVAL,
                (None, Some(CertificateSource::Acme)) => self.order_missing(&wanted.names, &mut orders).await,
                (None, Some(CertificateSource::Files { chain, key })) => {
                    let files = Some((chain.clone(), key.clone()));
                    if loaded != files {
                        match self.load(&chain, &key) {
                            Ok(()) => loaded = files,
                            Err(error) => {
                                tracing::warn!(%error, "failed to load the configured certificate")
                            }
                        }
                    }
                    if loaded.is_some() { RENEWAL_CHECK_INTERVAL } else { FILE_RETRY_DELAY }
                }
            };
            let _ = timeout(pause, self.changed.notified()).await;
        }
    }

    /// Orders missing certificates, one after the other. Returns the time until the next check.
    async fn order_missing(&self, names: &BTreeSet<String>, orders: &mut OrderState) -> Duration {
        orders.failures.retain(|name, _| names.contains(name));
        let mut next = RENEWAL_CHECK_INTERVAL;
        for name in names {
            if self.is_current(name) {
                continue;
            }
            let now = Instant::now();
            if let Some((_, until)) = orders.failures.get(name)
                && *until > now
            {
                next = next.min(*until - now);
                continue;
            }
            let ordered = match timeout(ORDER_TIMEOUT, self.order(name, &mut orders.account)).await {
                Ok(ordered) => ordered,
                Err(_) => Err(OrderError::TimedOut),
            };
            match ordered {
                Ok(()) => {
                    orders.failures.remove(name);
                    tracing::info!(name, "certificate issued");
                }
                Err(error) => {
                    orders.account = None;
                    let failures = orders.failures.get(name).map_or(0, |(failures, _)| *failures);
                    let last = RETRY_DELAYS_S.len() - 1;
                    let after = RETRY_DELAYS_S.get(failures.min(last)).copied().unwrap_or(3_600);
                    let after = Duration::from_secs(after);
                    tracing::warn!(name, error = %format_chain(&error), again_s = after.as_secs(), "failed to obtain certificate");
                    orders.failures.insert(name.clone(), (failures + 1, Instant::now() + after));
                    next = next.min(after);
                }
            }
        }
        next
    }

    /// Returns whether a certificate is in use or stored, and not due for renewal. Loads a stored one.
    fn is_current(&self, name: &str) -> bool {
        let Ok(kept) = fs::read(self.path_for(name)) else { return false };
        let Some(Ok(first)) = CertificateDer::pem_slice_iter(&kept).next() else { return false };
        let Some((from, until)) = validity_period(&first) else { return false };
        if unix_now() > from + (until - from) / 3 * 2 {
            return false;
        }
        self.certificates.has_own(name) || self.certificates.put(&combined_pem(name, kept)).is_ok()
    }

    async fn order(&self, name: &str, account: &mut Option<Account>) -> Result<(), OrderError> {
        let account = match account {
            Some(account) => account,
            None => account.insert(self.open_account().await?),
        };
        let got = account.order_certificate(&[name.to_owned()], &self.challenges).await?;
        let path = self.path_for(name);
        let whole = [got.chain.as_slice(), b"\n", &got.key].concat();
        write_private_file(&path, &whole).map_err(|source| OrderError::Store { path, source })?;
        Ok(self.certificates.put(&combined_pem(name, whole))?)
    }

    /// Opens the account of this gateway; generates its key at the first use.
    async fn open_account(&self) -> Result<Account, OrderError> {
        let path = self.folder.join("account.key");
        let key = match fs::read(&path) {
            Ok(kept) => AccountKey::load(&kept)?,
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                let key = AccountKey::generate()?;
                write_private_file(&path, key.pkcs8())
                    .map_err(|source| OrderError::Store { path, source })?;
                key
            }
            Err(source) => return Err(OrderError::Store { path, source }),
        };
        let dialer = Arc::new(AuthorityDialer { roots: self.acme.roots.clone() });
        Ok(Account::open(dialer, &self.acme.directory, &key, self.acme.contact.as_deref()).await?)
    }

    fn path_for(&self, name: &str) -> PathBuf {
        self.folder.join(format!("{name}.pem"))
    }
}

/// State of orders.
#[derive(Default)]
struct OrderState {
    account: Option<Account>,
    /// Number of consecutive failures of a name, and the time of the next attempt.
    failures: HashMap<String, (usize, Instant)>,
}

/// Returns whether a name can be validated over HTTP and used as a file name.
fn is_valid_name(name: &str) -> bool {
    !name.is_empty()
        && !name.starts_with(['.', '-'])
        && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'-'))
}

/// Returns the start and the end of the validity of a certificate, in seconds of Unix time.
fn validity_period(der: &[u8]) -> Option<(i64, i64)> {
    let certificate = Certificate::from_der(der).ok()?;
    let validity = certificate.tbs_certificate().validity();
    let seconds = |time: &Time| i64::try_from(time.to_unix_duration().as_secs()).ok();
    Some((seconds(&validity.not_before)?, seconds(&validity.not_after)?))
}

/// Builds a PEM from text that contains both chain and key.
fn combined_pem(name: &str, text: Vec<u8>) -> CertificatePem {
    CertificatePem { name: name.to_owned(), chain: text.clone(), key: text }
}

/// Writes a file durably, readable by this user only.
fn write_private_file(path: &Path, content: &[u8]) -> io::Result<()> {
    let fresh = path.with_extension("new");
    let mut file = File::options().write(true).create(true).truncate(true).mode(0o600).open(&fresh)?;
    file.write_all(content)?;
    file.sync_all()?;
    fs::rename(&fresh, path)
}

#[expect(clippy::disallowed_methods, reason = "certificates live by the calendar")]
fn unix_now() -> i64 {
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
    i64::try_from(since.as_secs()).unwrap_or(i64::MAX)
}

struct AuthorityDialer {
    roots: Option<String>,
}

impl Dialer for AuthorityDialer {
    fn dial<'a>(&'a self, https: bool, host: &'a str, port: u16) -> BoxFuture<'a, io::Result<Stream>> {
        Box::pin(async move {
            let peer = if https {
                let trust = TlsRoots::load(self.roots.as_deref()).map_err(io::Error::other)?;
                Endpoint::with_tls(host, port, &trust)
            } else {
                Endpoint::plain(host, port)
            };
            Ok(peer.connect(CONNECT_TIMEOUT).await?)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn validity_period_of_a_certificate_is_parsed() {
        let pem = CertificatePem::self_signed(&["a.test".to_owned()]).unwrap();
        let der = CertificateDer::from_pem_slice(&pem.chain).unwrap();
        assert_eq!(validity_period(&der), Some((1_704_067_200, 253_402_214_400)));
        for end in 0..der.len() {
            assert_eq!(validity_period(&der[..end]), None);
        }
    }
}
