//! Settings of the server: flags, then environment, then `config.yml` in the data directory.

mod kubernetes;
mod oidc;
mod projects;

use std::{
    net::{IpAddr, Ipv4Addr, SocketAddr},
    path::{Path, PathBuf},
    time::Duration,
};

use windlass_api::agent::shim::ProcessMode;
use windlass_backend::{
    local::Runtime,
    remote::{OciProgramError, OciPrograms},
};
use windlass_dial::{AllowedAddresses, Network, NetworkError};
use windlass_engine::settings::{LEASE_TTL, LEASE_TTL_MIN};
use windlass_kubernetes::KubernetesSettings;
use windlass_model::{
    config::{
        error::Diagnosis,
        job_spec_builder::DefaultImages,
        quantities::parse_duration,
        yaml::{self, Value},
    },
    decide::{jobs_running::UNREACHABLE_GRACE, managed_jobs::slots::SlotLimits as JobLimits},
    retry,
    time::Span,
};

pub use self::{
    oidc::{GroupRole, OidcSettings, OidcSource},
    projects::{BackendConfig, ProjectConfig},
};
use crate::{
    db::{DatabaseUrl, DbError},
    limits::{self, Limits},
    logs::{
        location::{LogLocation, LogLocationError},
        retention,
    },
    rate_limit::RateLimits,
    tls::TlsSettings,
};

/// Interval at which the rights of all streams are checked. Streams end within 5 s of losing their rights: an interval,
/// a statement, and the check of the stream.
pub(crate) const RIGHTS_POLL_INTERVAL: Duration = Duration::from_secs(2);

/// Keys that `config.yml` may have, besides limits.
const KNOWN_KEYS: &str = "host, port, database_url, admin_token, admin_token_file, token_expiry, mask_secrets, key_file, no_local, agent, oci_programs, local_runtime, \
                     local_processes, docker_socket, default_image, nvcc_image, docker_image, keep_logs, log_store, lost_after, \
                     retry_delay, lock_timeout, \
                     jobs_launching_max, jobs_alive_max, tls_port, tls_cert, tls_key, queue_for_everyone, \
                     queue_token_life, allow_host_networks, image_lookup, insecure_registries, registry_networks, no_ui, \
                     services_port, \
                     insecure_web_login, backends, projects";
const HEAD_TIMEOUT: Duration = Duration::from_secs(30);
const LOST_AFTER_MIN: Span = Span::secs(5);
/// Default time limit for the lookup of an image.
const IMAGE_LOOKUP: Duration = Duration::from_secs(5);
const BODY_TIMEOUT: Duration = Duration::from_secs(30);
/// Default that the clients of Arvados expect.
const QUEUE_TOKEN_TTL: Span = Span::days(14);

#[derive(Debug, thiserror::Error)]
pub enum SettingsError {
    #[error("invalid `--host` value `{host}`: expected an IP address or `localhost`")]
    Host { host: String },
    #[error("invalid `--local-runtime` value `{word}`: expected `any`, `any-oci`, `docker` or `process`")]
    Runtime { word: String },
    #[error("invalid `--local-processes` value `{word}`: expected `confined`, `own` or `refused`")]
    Processes { word: String },
    #[error("invalid `--database-url` value")]
    Database(#[from] DbError),
    #[error("invalid `{name}` value `{text}`: expected {expected}")]
    Limit { name: &'static str, text: String, expected: &'static str },
    #[error("invalid `--lost-after` value `{text}`: expected a duration of at least 5 s, such as `2m`")]
    LostAfter { text: String },
    #[error("invalid `--retry-delay` value `{text}`: expected a duration from `1s` to `1h`")]
    RetryDelay { text: String },
    #[error("invalid `--lock-timeout` value `{text}`: expected a duration from `5s` to `30s`")]
    LockTimeout { text: String },
    #[error("`--tls-cert` and `--tls-key` must be set together, and require `--tls-port`")]
    Tls,
    #[error("invalid `--image-lookup` value `{text}`: expected a duration from `1s` to `1m`, or `off`")]
    ImageLookup { text: String },
    #[error(
        "invalid `--insecure-registries` value `{text}`: expected hosts with ports, such as `10.0.0.5:5000`"
    )]
    InsecureRegistries { text: String },
    #[error("an identity provider needs `oidc_issuer` and `oidc_client_id`")]
    OidcIncomplete,
    #[error("invalid `oidc_issuer` value `{text}`: expected an `https` URL, as the provider states it")]
    OidcIssuer { text: String },
    #[error(
        "invalid `oidc_groups` entry `{text}`: expected `GROUP=PROJECT:ROLE` with the role `user`, `manager` or `admin`"
    )]
    OidcGroups { text: String },
    #[error(transparent)]
    HostNetworks(#[from] NetworkError),
    #[error("invalid `--oci-programs` value")]
    OciPrograms(#[from] OciProgramError),
    #[error(transparent)]
    LogStore(#[from] LogLocationError),
    #[error("no home directory found: set `WINDLASS_HOME`, `HOME` or `--data-dir`")]
    NoHome,
    #[error("failed to read `{}`", path.display())]
    File {
        path: PathBuf,
        #[source]
        source: std::io::Error,
    },
    #[error("the token file `{}` of user `admin` is empty", path.display())]
    NoToken { path: PathBuf },
    #[error("cannot parse `{}`: {problem}", path.display())]
    Content { path: PathBuf, problem: Diagnosis },
    #[error("invalid `{key}` in `{}`: {want}", path.display())]
    Key { path: PathBuf, key: String, want: String },
}

pub const DEFAULT_PORT: u16 = 3000;

/// One source of settings; a later source fills only what an earlier one left unset.
#[derive(Clone, Debug, Default)]
pub struct SettingsSource {
    pub host: Option<String>,
    pub port: Option<u16>,
    /// Port to use where none is set; any other if it is in use.
    pub usual_port: Option<u16>,
    pub data_dir: Option<PathBuf>,
    pub database_url: Option<String>,
    pub admin_token: Option<String>,
    /// File that contains the admin token.
    pub admin_token_file: Option<PathBuf>,
    /// Lifetime of the tokens that the server generates.
    pub token_expiry: Option<String>,
    /// True to mask values of secrets in logs.
    pub mask_secrets: Option<bool>,
    pub key_file: Option<PathBuf>,
    pub no_local: Option<bool>,
    /// Program of the agent, if it is not next to the server's.
    pub agent: Option<PathBuf>,
    /// Programs that run containers on hosts without an engine, as `FILE@sha256:HEX[,…]`.
    pub oci_programs: Option<String>,
    /// Runtime of jobs on this machine: `any`, `docker` or `process`.
    pub local_runtime: Option<String>,
    /// Rights of plain processes on this machine: `confined`, `own` or `refused`.
    pub local_processes: Option<String>,
    pub docker_socket: Option<PathBuf>,
    /// Images of runs that name none: where plain processes are not allowed, for `nvcc` and for `docker`.
    pub default_image: Option<String>,
    pub nvcc_image: Option<String>,
    pub docker_image: Option<String>,
    pub keep_logs: Option<String>,
    pub log_store: Option<String>,
    pub lost_after: Option<String>,
    pub retry_delay: Option<String>,
    pub lock_timeout: Option<String>,
    /// Maximum number of managed jobs that launch, and that are alive, at once.
    pub jobs_launching_max: Option<u32>,
    pub jobs_alive_max: Option<u32>,
    pub tls_port: Option<u16>,
    pub tls_cert: Option<PathBuf>,
    pub tls_key: Option<PathBuf>,
    /// True to let every user request containers of the queue.
    pub queue_for_everyone: Option<bool>,
    /// Lifetime of the queue API tokens that users create: `14d`, or `off`.
    pub queue_token_life: Option<String>,
    /// Networks in which SSH hosts are allowed although they are the server's own.
    pub allow_host_networks: Option<String>,
    /// Time limit for the lookup of an image at its registry: `5s`, or `off`.
    pub image_lookup: Option<String>,
    /// Registries that are contacted without TLS, and at any address.
    pub insecure_registries: Option<String>,
    pub registry_networks: Option<String>,
    /// True to serve no web UI.
    pub no_ui: Option<bool>,
    /// Additional port that serves only services, as a separate origin.
    pub services_port: Option<u16>,
    /// True to let browsers log in without TLS from other machines.
    pub insecure_web_login: Option<bool>,
    /// Identity provider.
    pub oidc: OidcSource,
    /// Clusters whose pods are instances.
    pub kubernetes: Option<KubernetesSettings>,
    /// Backends of projects; only in `config.yml`.
    pub projects: Option<Vec<ProjectConfig>>,
    pub limits: limits::LimitSettings,
}

impl SettingsSource {
    /// Reads `config.yml`; a file that does not exist sets nothing.
    pub fn from_file(path: &Path) -> Result<Self, SettingsError> {
        let text = match std::fs::read_to_string(path) {
            Ok(text) => text,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Self::default()),
            Err(source) => return Err(SettingsError::File { path: path.to_owned(), source }),
        };
        let tree =
            yaml::read(&text).map_err(|problem| SettingsError::Content { path: path.to_owned(), problem })?;
        let wrong = |key: &str, want: &str| SettingsError::Key {
            path: path.to_owned(),
            key: key.to_owned(),
            want: want.to_owned(),
        };
        let entries = match tree.value {
            Value::Null => return Ok(Self::default()),
            Value::Map(entries) => entries,
            Value::Scalar(_) | Value::Seq(_) => return Err(wrong("", "expected keys and values")),
        };
        let mut given = Self::default();
        for entry in entries {
            if entry.key == kubernetes::SETTING {
                let read = kubernetes::read(&entry.value);
                given.kubernetes = read.map_err(|want| wrong(kubernetes::SETTING, &want))?;
                continue;
            }
            if entry.key == projects::KEY {
                given.projects =
                    Some(projects::read(&entry.value).map_err(|want| wrong(projects::KEY, &want))?);
                continue;
            }
            let Value::Scalar(word) = entry.value.value else {
                return Err(wrong(&entry.key, "expected a single value"));
            };
            match entry.key.as_str() {
                "host" => given.host = Some(word.text),
                "port" => {
                    given.port =
                        Some(word.text.parse().map_err(|_| wrong("port", "expected a port number"))?);
                }
                "database_url" => given.database_url = Some(word.text),
                "admin_token" => given.admin_token = Some(word.text),
                "admin_token_file" => given.admin_token_file = Some(word.text.into()),
                "token_expiry" => given.token_expiry = Some(word.text),
                "mask_secrets" => {
                    given.mask_secrets = Some(
                        word.text.parse().map_err(|_| wrong("mask_secrets", "expected `true` or `false`"))?,
                    );
                }
                "key_file" => given.key_file = Some(word.text.into()),
                "no_local" => {
                    given.no_local =
                        Some(word.text.parse().map_err(|_| wrong("no_local", "expected `true` or `false`"))?);
                }
                "agent" => given.agent = Some(word.text.into()),
                "oci_programs" => given.oci_programs = Some(word.text),
                "local_runtime" => given.local_runtime = Some(word.text),
                "local_processes" => given.local_processes = Some(word.text),
                "docker_socket" => given.docker_socket = Some(word.text.into()),
                "default_image" => given.default_image = Some(word.text),
                "nvcc_image" => given.nvcc_image = Some(word.text),
                "docker_image" => given.docker_image = Some(word.text),
                "log_store" => given.log_store = Some(word.text),
                "keep_logs" => given.keep_logs = Some(word.text),
                "lost_after" => given.lost_after = Some(word.text),
                "retry_delay" => given.retry_delay = Some(word.text),
                "lock_timeout" => given.lock_timeout = Some(word.text),
                "jobs_launching_max" => {
                    let number =
                        word.text.parse().map_err(|_| wrong("jobs_launching_max", "expected a number"))?;
                    given.jobs_launching_max = Some(number);
                }
                "jobs_alive_max" => {
                    let number =
                        word.text.parse().map_err(|_| wrong("jobs_alive_max", "expected a number"))?;
                    given.jobs_alive_max = Some(number);
                }
                "tls_port" => {
                    let port = word.text.parse().map_err(|_| wrong("tls_port", "expected a port number"))?;
                    given.tls_port = Some(port);
                }
                "tls_cert" => given.tls_cert = Some(word.text.into()),
                "tls_key" => given.tls_key = Some(word.text.into()),
                "queue_for_everyone" => {
                    let wrong = |_| wrong("queue_for_everyone", "expected `true` or `false`");
                    given.queue_for_everyone = Some(word.text.parse().map_err(wrong)?);
                }
                "queue_token_life" => given.queue_token_life = Some(word.text),
                "allow_host_networks" => given.allow_host_networks = Some(word.text),
                "image_lookup" => given.image_lookup = Some(word.text),
                "insecure_registries" => given.insecure_registries = Some(word.text),
                "registry_networks" => given.registry_networks = Some(word.text),
                "no_ui" => {
                    given.no_ui =
                        Some(word.text.parse().map_err(|_| wrong("no_ui", "expected `true` or `false`"))?);
                }
                "services_port" => {
                    let wrong = |_| wrong("services_port", "expected a port number");
                    given.services_port = Some(word.text.parse().map_err(wrong)?);
                }
                "insecure_web_login" => {
                    let wrong = |_| wrong("insecure_web_login", "expected `true` or `false`");
                    given.insecure_web_login = Some(word.text.parse().map_err(wrong)?);
                }
                other if given.oidc.set(other, &word.text).map_err(|want| wrong(other, want))? => {}
                other => match given.limits.named(other) {
                    Some(limit) => *limit = Some(word.text),
                    None => {
                        let want = format!(
                            "unknown setting; known settings: {KNOWN_KEYS}, {}, {}",
                            oidc::SETTING_NAMES.join(", "),
                            limits::SETTING_NAMES.join(", ")
                        );
                        return Err(wrong(other, &want));
                    }
                },
            }
        }
        Ok(given)
    }

    /// Returns these settings, with those of `other` where they are unset.
    #[must_use]
    pub fn or(self, other: Self) -> Self {
        Self {
            host: self.host.or(other.host),
            port: self.port.or(other.port),
            usual_port: self.usual_port.or(other.usual_port),
            data_dir: self.data_dir.or(other.data_dir),
            database_url: self.database_url.or(other.database_url),
            // A named file takes precedence over a token from a later source.
            admin_token: self
                .admin_token
                .or_else(|| other.admin_token.filter(|_| self.admin_token_file.is_none())),
            admin_token_file: self.admin_token_file.or(other.admin_token_file),
            token_expiry: self.token_expiry.or(other.token_expiry),
            mask_secrets: self.mask_secrets.or(other.mask_secrets),
            key_file: self.key_file.or(other.key_file),
            no_local: self.no_local.or(other.no_local),
            agent: self.agent.or(other.agent),
            oci_programs: self.oci_programs.or(other.oci_programs),
            local_runtime: self.local_runtime.or(other.local_runtime),
            local_processes: self.local_processes.or(other.local_processes),
            docker_socket: self.docker_socket.or(other.docker_socket),
            default_image: self.default_image.or(other.default_image),
            nvcc_image: self.nvcc_image.or(other.nvcc_image),
            docker_image: self.docker_image.or(other.docker_image),
            keep_logs: self.keep_logs.or(other.keep_logs),
            log_store: self.log_store.or(other.log_store),
            lost_after: self.lost_after.or(other.lost_after),
            retry_delay: self.retry_delay.or(other.retry_delay),
            lock_timeout: self.lock_timeout.or(other.lock_timeout),
            jobs_launching_max: self.jobs_launching_max.or(other.jobs_launching_max),
            jobs_alive_max: self.jobs_alive_max.or(other.jobs_alive_max),
            tls_port: self.tls_port.or(other.tls_port),
            tls_cert: self.tls_cert.or(other.tls_cert),
            tls_key: self.tls_key.or(other.tls_key),
            queue_for_everyone: self.queue_for_everyone.or(other.queue_for_everyone),
            queue_token_life: self.queue_token_life.or(other.queue_token_life),
            allow_host_networks: self.allow_host_networks.or(other.allow_host_networks),
            image_lookup: self.image_lookup.or(other.image_lookup),
            insecure_registries: self.insecure_registries.or(other.insecure_registries),
            registry_networks: self.registry_networks.or(other.registry_networks),
            no_ui: self.no_ui.or(other.no_ui),
            services_port: self.services_port.or(other.services_port),
            insecure_web_login: self.insecure_web_login.or(other.insecure_web_login),
            oidc: self.oidc.or(other.oidc),
            kubernetes: self.kubernetes.or(other.kubernetes),
            projects: self.projects.or(other.projects),
            limits: self.limits.or(other.limits),
        }
    }
}

#[derive(Clone)]
pub struct Settings {
    pub address: SocketAddr,
    /// True to use another port if that one is in use.
    pub any_port: bool,
    pub data_dir: PathBuf,
    pub database_url: DatabaseUrl,
    pub admin_token: Option<String>,
    /// Lifetime of the tokens that the server generates for users; `None`: no expiry.
    pub token_expiry: Option<Span>,
    /// True to mask values of secrets in logs.
    pub mask_secrets: bool,
    pub key_file: PathBuf,
    /// True to give project `main` a fleet `local` with this machine.
    pub local: bool,
    /// Program of the agent; `None`: the one next to the server's.
    pub agent_binary: Option<PathBuf>,
    /// Programs that run containers, which are brought along to SSH hosts.
    pub oci_programs: OciPrograms,
    /// Runtime of jobs on this machine; `None`: containers and plain processes where a container engine
    /// answers or once did, else only plain processes.
    pub local_runtime: Option<Runtime>,
    /// Rights of plain processes on this machine.
    pub local_processes: ProcessMode,
    /// Socket of this machine's container engine; `None`: `DOCKER_HOST`, or the usual paths.
    pub docker_socket: Option<PathBuf>,
    /// Images of runs that name none.
    pub images: DefaultImages,
    /// True if this replica runs the pipelines; otherwise it only answers requests.
    pub pipelines: bool,
    /// Time for which logs are kept after the end of their run; `None`: no limit.
    pub keep_logs: Option<Span>,
    pub log_store: LogLocation,
    /// Time without a response after which the jobs of an agent that once answered are lost.
    pub lost_after: Span,
    /// Delay of a run's first retry; later delays grow from it.
    pub retry_delay: Span,
    /// Time for which the rows of a dead replica stay locked.
    pub lock_timeout: Duration,
    /// Maximum number of managed jobs that launch, and that are alive, at once, over all replicas.
    pub job_limits: JobLimits,
    /// Additional listener for HTTPS.
    pub tls: Option<TlsSettings>,
    /// True to let every user request containers of the queue, not only those with a grant.
    pub queue_for_everyone: bool,
    /// Lifetime of the queue API tokens that users create; `None`: that of the token with which they were created.
    pub queue_token_life: Option<Span>,
    /// Addresses that SSH hosts may have.
    pub allowed_hosts: AllowedAddresses,
    /// Time limit for the lookup of an image at its registry; `None`: no lookups.
    pub image_lookup: Option<Duration>,
    /// Registries that are contacted without TLS, and at any address.
    pub insecure_registries: Vec<String>,
    /// Private networks whose registries may be asked.
    pub registry_networks: Vec<Network>,
    /// True to serve the web UI, and to open sessions for it.
    pub web_ui: bool,
    /// True to let browsers log in without TLS from other machines.
    pub insecure_web_login: bool,
    /// Identity provider with which users log in to the web UI.
    pub oidc: Option<OidcSettings>,
    /// Clusters whose pods are instances.
    pub kubernetes: Option<KubernetesSettings>,
    /// Backends of projects.
    pub projects: Vec<ProjectConfig>,
    /// Additional listener that serves only services.
    pub services_address: Option<SocketAddr>,
    /// Limits that users can reach, and retention times.
    pub limits: Limits,
    pub paces: RateLimits,
    /// Maximum number of simultaneous connections; `None`: as many as the process's limit of open files permits.
    pub connections_max: Option<usize>,
    /// Time within which a client must have sent its request head; also how long an idle connection is kept.
    pub head_timeout: Duration,
    /// Interval at which the rights of open streams are checked.
    pub rights_poll_interval: Duration,
    /// Time within which a client must have sent its body; uploads have longer.
    pub body_timeout: Duration,
}

/// Omits the token and the password in the URL.
impl std::fmt::Debug for Settings {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Settings")
            .field("address", &self.address)
            .field("data_dir", &self.data_dir)
            .field("local", &self.local)
            .finish_non_exhaustive()
    }
}

impl Settings {
    /// Completes the settings. `home` contains all data unless a data directory is named. Unset values are read from
    /// `config.yml` of the data directory.
    pub fn new(given: SettingsSource, home: Option<&Path>) -> Result<Self, SettingsError> {
        let data_dir = match (&given.data_dir, home) {
            (Some(dir), _) => dir.clone(),
            (None, Some(home)) => home.join("server"),
            (None, None) => return Err(SettingsError::NoHome),
        };
        let given = given.or(SettingsSource::from_file(&data_dir.join("config.yml"))?);
        let admin_token = match (given.admin_token, &given.admin_token_file) {
            (Some(token), _) => Some(token),
            (None, Some(path)) => Some(read_token_file(path)?),
            (None, None) => None,
        };
        let host = match given.host.as_deref() {
            None | Some("localhost") => IpAddr::V4(Ipv4Addr::LOCALHOST),
            Some(host) => host
                .trim_start_matches('[')
                .trim_end_matches(']')
                .parse()
                .map_err(|_| SettingsError::Host { host: host.to_owned() })?,
        };
        let database_url = match given.database_url {
            Some(url) => url.parse()?,
            None => DatabaseUrl::Sqlite(data_dir.join("windlass.db")),
        };
        let local_runtime = match given.local_runtime {
            Some(word) => Some(Runtime::parse(&word).ok_or(SettingsError::Runtime { word })?),
            None => None,
        };
        let local_processes = match given.local_processes {
            Some(word) => ProcessMode::parse(&word).ok_or(SettingsError::Processes { word })?,
            None => ProcessMode::default(),
        };
        let keep_logs =
            limits::parse_retention("keep_logs", given.keep_logs, Some(retention::DEFAULT_RETENTION))?;
        let lost_after = match given.lost_after.as_deref() {
            None => UNREACHABLE_GRACE,
            Some(text) => {
                parse_lost_after(text).ok_or_else(|| SettingsError::LostAfter { text: text.to_owned() })?
            }
        };
        let retry_delay = match given.retry_delay.as_deref() {
            None => retry::DELAY_FIRST,
            Some(text) => {
                parse_retry_delay(text).ok_or_else(|| SettingsError::RetryDelay { text: text.to_owned() })?
            }
        };
        let lock_timeout = match given.lock_timeout.as_deref() {
            None => LEASE_TTL,
            Some(text) => parse_lock_timeout(text)
                .ok_or_else(|| SettingsError::LockTimeout { text: text.to_owned() })?,
        };
        let queue_token_life =
            limits::parse_retention("queue_token_life", given.queue_token_life, Some(QUEUE_TOKEN_TTL))?;
        let usual = host_limits();
        let tls = match (given.tls_port, given.tls_cert, given.tls_key) {
            (None, None, None) => None,
            (Some(port), None, None) => {
                Some(TlsSettings { address: SocketAddr::new(host, port), given: None })
            }
            (Some(port), Some(cert), Some(key)) => {
                Some(TlsSettings { address: SocketAddr::new(host, port), given: Some((cert, key)) })
            }
            _ => return Err(SettingsError::Tls),
        };
        let but = parse_networks(given.allow_host_networks.as_deref())?;
        let image_lookup = parse_image_lookup(given.image_lookup.as_deref())?;
        let insecure_registries = parse_registries(given.insecure_registries.as_deref().unwrap_or_default())?;
        Ok(Self {
            web_ui: !given.no_ui.unwrap_or(false),
            insecure_web_login: given.insecure_web_login.unwrap_or(false),
            oidc: OidcSettings::new(given.oidc)?,
            kubernetes: given.kubernetes,
            projects: given.projects.unwrap_or_default(),
            services_address: given.services_port.map(|port| SocketAddr::new(host, port)),
            image_lookup,
            insecure_registries,
            registry_networks: parse_networks(given.registry_networks.as_deref())?,
            allowed_hosts: AllowedAddresses::External { but },
            job_limits: JobLimits {
                max_launching: given.jobs_launching_max.unwrap_or(usual.max_launching).max(1),
                max_alive: given.jobs_alive_max.unwrap_or(usual.max_alive).max(1),
            },
            keep_logs,
            lost_after,
            retry_delay,
            lock_timeout,
            tls,
            log_store: given.log_store.as_deref().unwrap_or("files").parse()?,
            address: SocketAddr::new(host, given.port.or(given.usual_port).unwrap_or(DEFAULT_PORT)),
            any_port: given.port.is_none() && given.usual_port.is_some(),
            key_file: given.key_file.unwrap_or_else(|| data_dir.join("keys").join("master")),
            data_dir,
            database_url,
            admin_token: admin_token.filter(|token| !token.is_empty()),
            token_expiry: limits::parse_retention("token_expiry", given.token_expiry, None)?,
            mask_secrets: given.mask_secrets.unwrap_or(true),
            local: !given.no_local.unwrap_or(false),
            agent_binary: given.agent,
            oci_programs: OciPrograms::parse(given.oci_programs.as_deref().unwrap_or_default())?,
            local_runtime,
            local_processes,
            docker_socket: given.docker_socket,
            images: DefaultImages {
                base: given.default_image,
                nvcc: given.nvcc_image,
                docker: given.docker_image,
                ..DefaultImages::default()
            },
            pipelines: true,
            queue_for_everyone: given.queue_for_everyone.unwrap_or(false),
            queue_token_life,
            limits: Limits::new(given.limits)?,
            paces: RateLimits::default(),
            connections_max: None,
            head_timeout: HEAD_TIMEOUT,
            rights_poll_interval: RIGHTS_POLL_INTERVAL,
            body_timeout: BODY_TIMEOUT,
        })
    }
}

/// Reads a token from a file.
pub fn read_token_file(path: &Path) -> Result<String, SettingsError> {
    let text = std::fs::read_to_string(path)
        .map_err(|source| SettingsError::File { path: path.to_owned(), source })?;
    let token = text.trim();
    if token.is_empty() {
        return Err(SettingsError::NoToken { path: path.to_owned() });
    }
    Ok(token.to_owned())
}

/// Limits suitable for this machine's cores and memory, as far as known.
fn host_limits() -> JobLimits {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let memory = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let total = memory.lines().find_map(|line| line.strip_prefix("MemTotal:"));
    let kib = total.and_then(|rest| rest.split_whitespace().next()?.parse::<u64>().ok()).unwrap_or_default();
    JobLimits::for_host(u32::try_from(cores).unwrap_or(u32::MAX), kib / 1024)
}

/// Parses for example `2m`, at least the time that agents need to reconnect after an interruption.
fn parse_lost_after(text: &str) -> Option<Span> {
    let span = Span::secs(parse_duration(text).ok()?);
    (span >= LOST_AFTER_MIN).then_some(span)
}

/// Parses for example `15s`. Without a delay a run that fails at once would be retried in a busy loop.
fn parse_retry_delay(text: &str) -> Option<Span> {
    parse_duration(text).ok().filter(|secs| (1..=3600).contains(secs)).map(Span::secs)
}

/// Parses for example `5s`. A user waits for the lookup.
fn parse_image_lookup(text: Option<&str>) -> Result<Option<Duration>, SettingsError> {
    match text {
        None => Ok(Some(IMAGE_LOOKUP)),
        Some("off") => Ok(None),
        Some(text) => {
            let secs = parse_duration(text).ok().filter(|secs| (1..=60).contains(secs));
            let secs = secs.and_then(|secs| u64::try_from(secs).ok());
            let wrong = || SettingsError::ImageLookup { text: text.to_owned() };
            Ok(Some(Duration::from_secs(secs.ok_or_else(wrong)?)))
        }
    }
}

/// Parses `10.0.0.0/8,…`.
fn parse_networks(list: Option<&str>) -> Result<Vec<Network>, NetworkError> {
    let all = list.iter().flat_map(|list| list.split(',')).map(str::trim);
    all.filter(|text| !text.is_empty()).map(str::parse).collect()
}

/// Parses `HOST:PORT,…`, as image names spell registries.
fn parse_registries(list: &str) -> Result<Vec<String>, SettingsError> {
    let all: Vec<String> =
        list.split(',').map(|one| one.trim().to_owned()).filter(|one| !one.is_empty()).collect();
    let is_wrong = |one: &&String| one.contains(|letter: char| letter == '/' || letter.is_whitespace());
    match all.iter().find(is_wrong) {
        Some(text) => Err(SettingsError::InsecureRegistries { text: text.clone() }),
        None => Ok(all),
    }
}

/// Parses for example `10s`. At most the default: after a jump of the database's clock, locks are distrusted for as
/// long as that.
fn parse_lock_timeout(text: &str) -> Option<Duration> {
    let ttl = Duration::from_secs(u64::try_from(parse_duration(text).ok()?).ok()?);
    (LEASE_TTL_MIN..=LEASE_TTL).contains(&ttl).then_some(ttl)
}

#[cfg(test)]
mod tests;
