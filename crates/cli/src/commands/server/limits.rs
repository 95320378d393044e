//! Flags of `windlass server` for limits that affect users, and for retention.

use windlass_server::limits::LimitSettings;

#[derive(Clone, Debug, Default, clap::Args)]
#[command(next_help_heading = "Limits")]
pub(crate) struct LimitArgs {
    /// Maximum size of an upload, such as files and code of runs: `64MB` by default, at most `1GB`
    #[arg(long, env = "WINDLASS_SERVER_UPLOAD_MAX", global = true, value_name = "SIZE")]
    upload_max: Option<String>,
    /// Maximum total size of one user's uploads: `2GB` by default, or `off`
    #[arg(long, env = "WINDLASS_SERVER_UPLOADS_MAX", global = true, value_name = "SIZE")]
    uploads_max: Option<String>,
    /// Maximum number of open streams and followed logs per user; 512 by default
    #[arg(long, env = "WINDLASS_SERVER_STREAMS_MAX", global = true, value_name = "N")]
    streams_max: Option<String>,
    /// Maximum size of any other request body; `2MB` by default
    #[arg(long, env = "WINDLASS_SERVER_REQUEST_MAX", global = true, value_name = "SIZE")]
    request_max: Option<String>,
    /// Maximum log output of a job per hour: `50MB` by default, or `off`
    #[arg(long, env = "WINDLASS_SERVER_LOG_RATE_MAX", global = true, value_name = "SIZE")]
    log_rate_max: Option<String>,
    /// Maximum stored size of a job's log: `8GB` by default, or `off`
    #[arg(long, env = "WINDLASS_SERVER_LOG_MAX", global = true, value_name = "SIZE")]
    log_max: Option<String>,
    /// Maximum time to receive an upload: `5m` by default, at most `24h`
    #[arg(long, env = "WINDLASS_SERVER_UPLOAD_TIMEOUT", global = true, value_name = "DURATION")]
    upload_timeout: Option<String>,
    /// Maximum time for a host to pull an image and start its container: `25m` by default, at most `24h`
    #[arg(long, env = "WINDLASS_SERVER_IMAGE_PULL_TIMEOUT", global = true, value_name = "DURATION")]
    image_pull_timeout: Option<String>,
    /// Time without requests after which a browser has to log in again: `12h` by default
    #[arg(long, env = "WINDLASS_SERVER_WEB_SESSION_IDLE", global = true, value_name = "DURATION")]
    web_session_idle: Option<String>,
    /// Time after a login after which a browser has to log in again: `7d` by default
    #[arg(long, env = "WINDLASS_SERVER_WEB_SESSION_LIFE", global = true, value_name = "DURATION")]
    web_session_life: Option<String>,
    /// Maximum number of projects that one user may own; 10 by default
    #[arg(long, env = "WINDLASS_SERVER_PROJECTS_MAX", global = true, value_name = "N")]
    projects_max: Option<String>,
    /// Maximum number of jobs with which a run may start; 1000 by default
    #[arg(long, env = "WINDLASS_SERVER_RUN_JOBS_MAX", global = true, value_name = "N")]
    run_jobs_max: Option<String>,
    /// Maximum number of hosts of a fleet; 1000 by default
    #[arg(long, env = "WINDLASS_SERVER_FLEET_HOSTS_MAX", global = true, value_name = "N")]
    fleet_hosts_max: Option<String>,
    /// Maximum length of a secret in characters; 5000 by default
    #[arg(long, env = "WINDLASS_SERVER_SECRET_MAX", global = true, value_name = "N")]
    secret_max: Option<String>,
    /// Retention of events, except those of active resources: `30d` by default, or `off` for no limit
    #[arg(long, env = "WINDLASS_SERVER_KEEP_EVENTS", global = true, value_name = "DAYS")]
    keep_events: Option<String>,
    /// Retention of finished runs with their jobs, logs and metrics: `90d` by default, or `off` for no limit
    #[arg(long, env = "WINDLASS_SERVER_KEEP_RUNS", global = true, value_name = "DAYS")]
    keep_runs: Option<String>,
    /// Retention of uploads that no run uses: `7d` by default, or `off` for no limit
    #[arg(long, env = "WINDLASS_SERVER_KEEP_UPLOADS", global = true, value_name = "DAYS")]
    keep_uploads: Option<String>,
    /// Retention of samples of the resource usage of jobs: `30d` by default, or `off` for no limit
    #[arg(long, env = "WINDLASS_SERVER_KEEP_METRICS", global = true, value_name = "DAYS")]
    keep_metrics: Option<String>,
}

impl From<LimitArgs> for LimitSettings {
    fn from(flags: LimitArgs) -> Self {
        Self {
            upload_max: flags.upload_max,
            uploads_max: flags.uploads_max,
            streams_max: flags.streams_max,
            request_max: flags.request_max,
            log_rate_max: flags.log_rate_max,
            log_max: flags.log_max,
            upload_timeout: flags.upload_timeout,
            image_pull_timeout: flags.image_pull_timeout,
            web_session_idle: flags.web_session_idle,
            web_session_life: flags.web_session_life,
            projects_max: flags.projects_max,
            run_jobs_max: flags.run_jobs_max,
            fleet_hosts_max: flags.fleet_hosts_max,
            secret_max: flags.secret_max,
            keep_events: flags.keep_events,
            keep_runs: flags.keep_runs,
            keep_uploads: flags.keep_uploads,
            keep_metrics: flags.keep_metrics,
        }
    }
}
