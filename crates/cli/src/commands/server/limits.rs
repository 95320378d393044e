//! Flags of `windlass server` for limits that users can meet, and for how long things are kept.

use windlass_server::limits::LimitSettings;

#[derive(Clone, Debug, Default, clap::Args)]
#[command(next_help_heading = "Limits")]
pub(crate) struct LimitArgs {
    /// Largest file that can be uploaded: files and code of runs; `64MB` if not given, `1GB` at most
    #[arg(long, env = "WINDLASS_SERVER_UPLOAD_MAX", global = true, value_name = "SIZE")]
    upload_max: Option<String>,
    /// How much the uploads of one user may take together: `2GB` if not given, or `off`
    #[arg(long, env = "WINDLASS_SERVER_UPLOADS_MAX", global = true, value_name = "SIZE")]
    uploads_max: Option<String>,
    /// How many streams and followed logs one user may have open at once; 512 if not given
    #[arg(long, env = "WINDLASS_SERVER_STREAMS_MAX", global = true, value_name = "N")]
    streams_max: Option<String>,
    /// Largest body of any other request; `2MB` if not given
    #[arg(long, env = "WINDLASS_SERVER_REQUEST_MAX", global = true, value_name = "SIZE")]
    request_max: Option<String>,
    /// How much a job may write to its log in an hour: `50MB` if not given, or `off`
    #[arg(long, env = "WINDLASS_SERVER_LOG_RATE_MAX", global = true, value_name = "SIZE")]
    log_rate_max: Option<String>,
    /// How many projects one user may own; 10 if not given
    #[arg(long, env = "WINDLASS_SERVER_PROJECTS_MAX", global = true, value_name = "N")]
    projects_max: Option<String>,
    /// How many jobs a run may start with; 1000 if not given
    #[arg(long, env = "WINDLASS_SERVER_RUN_JOBS_MAX", global = true, value_name = "N")]
    run_jobs_max: Option<String>,
    /// How many hosts a fleet may have; 1000 if not given
    #[arg(long, env = "WINDLASS_SERVER_FLEET_HOSTS_MAX", global = true, value_name = "N")]
    fleet_hosts_max: Option<String>,
    /// How many characters a secret may have; 5000 if not given
    #[arg(long, env = "WINDLASS_SERVER_SECRET_MAX", global = true, value_name = "N")]
    secret_max: Option<String>,
    /// How long events are kept, unless what they tell of goes on: `30d` if not given, or `off` for ever
    #[arg(long, env = "WINDLASS_SERVER_KEEP_EVENTS", global = true, value_name = "DAYS")]
    keep_events: Option<String>,
    /// How long finished runs are kept with their jobs, logs and metrics: `90d` if not given, or `off` for ever
    #[arg(long, env = "WINDLASS_SERVER_KEEP_RUNS", global = true, value_name = "DAYS")]
    keep_runs: Option<String>,
    /// How long uploads are kept that no kept run names: `7d` if not given, or `off` for ever
    #[arg(long, env = "WINDLASS_SERVER_KEEP_UPLOADS", global = true, value_name = "DAYS")]
    keep_uploads: Option<String>,
}

impl From<LimitArgs> for LimitSettings {
    fn from(flags: LimitArgs) -> Self {
        Self {
            upload_max: flags.upload_max,
            uploads_max: flags.uploads_max,
            streams_max: flags.streams_max,
            request_max: flags.request_max,
            log_rate_max: flags.log_rate_max,
            projects_max: flags.projects_max,
            run_jobs_max: flags.run_jobs_max,
            fleet_hosts_max: flags.fleet_hosts_max,
            secret_max: flags.secret_max,
            keep_events: flags.keep_events,
            keep_runs: flags.keep_runs,
            keep_uploads: flags.keep_uploads,
        }
    }
}
