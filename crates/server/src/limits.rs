//! Limits that users can reach, and retention periods. Each is a setting, and every refusal names the setting that
//! caused it.

use std::time::Duration;

use windlass_model::{config::quantities::parse_duration, decide::jobs_running::PULLING_TIMEOUT, time::Span};

use crate::{config::SettingsError, logs::copier::LOG_BYTES_MAX};

/// Names of the settings in `config.yml`, as refusals quote them.
pub const UPLOAD_MAX: &str = "upload_max";
pub const UPLOADS_MAX: &str = "uploads_max";
pub const STREAMS_MAX: &str = "streams_max";
pub const REQUEST_MAX: &str = "request_max";
pub const LOG_RATE_MAX: &str = "log_rate_max";
pub const LOG_MAX: &str = "log_max";
pub const UPLOAD_TIMEOUT: &str = "upload_timeout";
pub const IMAGE_PULL_TIMEOUT: &str = "image_pull_timeout";
pub const WEB_SESSION_IDLE: &str = "web_session_idle";
pub const WEB_SESSION_LIFE: &str = "web_session_life";
pub const PROJECTS_MAX: &str = "projects_max";
pub const RUN_JOBS_MAX: &str = "run_jobs_max";
pub const FLEET_HOSTS_MAX: &str = "fleet_hosts_max";
pub const SECRET_MAX: &str = "secret_max";
const KEEP_EVENTS: &str = "keep_events";
const KEEP_RUNS: &str = "keep_runs";
const KEEP_UPLOADS: &str = "keep_uploads";
const KEEP_METRICS: &str = "keep_metrics";

/// All settings of this module, as `config.yml` spells them.
pub const SETTING_NAMES: [&str; 18] = [
    UPLOAD_MAX,
    UPLOADS_MAX,
    STREAMS_MAX,
    REQUEST_MAX,
    LOG_RATE_MAX,
    LOG_MAX,
    UPLOAD_TIMEOUT,
    IMAGE_PULL_TIMEOUT,
    WEB_SESSION_IDLE,
    WEB_SESSION_LIFE,
    PROJECTS_MAX,
    RUN_JOBS_MAX,
    FLEET_HOSTS_MAX,
    SECRET_MAX,
    KEEP_EVENTS,
    KEEP_RUNS,
    KEEP_UPLOADS,
    KEEP_METRICS,
];

const MIB: usize = 1 << 20;
/// Uploads are rows of the database, written and read as a whole.
const SIZE_CEILING: usize = 1 << 30;
const COUNT_CEILING: usize = 1_000_000;
/// Maximum of a time limit, in seconds: a day.
const TIME_CEILING: i64 = 24 * 3600;
/// Maximum lifetime of a web session, in seconds: a year.
const SESSION_CEILING: i64 = 365 * 24 * 3600;

/// The last clause of a refusal: names the setting and the option that raise the limit.
pub fn limit_hint(name: &str) -> String {
    format!("raise the server's setting `{name}` (`--{}`) to allow more", name.replace('_', "-"))
}

/// Limits as one source (file, environment or command line) sets them; `None` where it does not.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LimitSettings {
    pub upload_max: Option<String>,
    pub uploads_max: Option<String>,
    pub streams_max: Option<String>,
    pub request_max: Option<String>,
    pub log_rate_max: Option<String>,
    pub log_max: Option<String>,
    pub upload_timeout: Option<String>,
    pub image_pull_timeout: Option<String>,
    pub web_session_idle: Option<String>,
    pub web_session_life: Option<String>,
    pub projects_max: Option<String>,
    pub run_jobs_max: Option<String>,
    pub fleet_hosts_max: Option<String>,
    pub secret_max: Option<String>,
    pub keep_events: Option<String>,
    pub keep_runs: Option<String>,
    pub keep_uploads: Option<String>,
    pub keep_metrics: Option<String>,
}

impl LimitSettings {
    /// Returns the setting with this name, or `None` if there is none.
    pub fn named(&mut self, name: &str) -> Option<&mut Option<String>> {
        match name {
            UPLOAD_MAX => Some(&mut self.upload_max),
            UPLOADS_MAX => Some(&mut self.uploads_max),
            STREAMS_MAX => Some(&mut self.streams_max),
            REQUEST_MAX => Some(&mut self.request_max),
            LOG_RATE_MAX => Some(&mut self.log_rate_max),
            LOG_MAX => Some(&mut self.log_max),
            UPLOAD_TIMEOUT => Some(&mut self.upload_timeout),
            IMAGE_PULL_TIMEOUT => Some(&mut self.image_pull_timeout),
            WEB_SESSION_IDLE => Some(&mut self.web_session_idle),
            WEB_SESSION_LIFE => Some(&mut self.web_session_life),
            PROJECTS_MAX => Some(&mut self.projects_max),
            RUN_JOBS_MAX => Some(&mut self.run_jobs_max),
            FLEET_HOSTS_MAX => Some(&mut self.fleet_hosts_max),
            SECRET_MAX => Some(&mut self.secret_max),
            KEEP_EVENTS => Some(&mut self.keep_events),
            KEEP_RUNS => Some(&mut self.keep_runs),
            KEEP_UPLOADS => Some(&mut self.keep_uploads),
            KEEP_METRICS => Some(&mut self.keep_metrics),
            _ => None,
        }
    }

    /// Fills unset values from `other`.
    #[must_use]
    pub fn or(self, other: Self) -> Self {
        Self {
            upload_max: self.upload_max.or(other.upload_max),
            uploads_max: self.uploads_max.or(other.uploads_max),
            streams_max: self.streams_max.or(other.streams_max),
            request_max: self.request_max.or(other.request_max),
            log_rate_max: self.log_rate_max.or(other.log_rate_max),
            log_max: self.log_max.or(other.log_max),
            upload_timeout: self.upload_timeout.or(other.upload_timeout),
            image_pull_timeout: self.image_pull_timeout.or(other.image_pull_timeout),
            web_session_idle: self.web_session_idle.or(other.web_session_idle),
            web_session_life: self.web_session_life.or(other.web_session_life),
            projects_max: self.projects_max.or(other.projects_max),
            run_jobs_max: self.run_jobs_max.or(other.run_jobs_max),
            fleet_hosts_max: self.fleet_hosts_max.or(other.fleet_hosts_max),
            secret_max: self.secret_max.or(other.secret_max),
            keep_events: self.keep_events.or(other.keep_events),
            keep_runs: self.keep_runs.or(other.keep_runs),
            keep_uploads: self.keep_uploads.or(other.keep_uploads),
            keep_metrics: self.keep_metrics.or(other.keep_metrics),
        }
    }
}

/// Effective limits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Maximum size of one uploaded file.
    pub upload_bytes: usize,
    /// Maximum total size of one user's uploads; `None` means no limit.
    pub uploads_bytes: Option<u64>,
    /// Maximum number of streams that one user has open at once, followed logs included.
    pub streams: usize,
    /// Maximum size of one JSON body.
    pub request_bytes: usize,
    /// Maximum log output of one job per hour; `None` means no limit.
    pub log_bytes_hour: Option<u64>,
    /// Maximum number of bytes stored of one log.
    pub log_bytes: u64,
    /// Time within which a client must have sent an upload.
    pub upload_timeout: Duration,
    /// Time within which a host must have pulled an image and started its container.
    pub image_pull_timeout: Span,
    pub web_sessions: WebSessionLimits,
    /// Maximum number of projects that one user owns.
    pub projects: i64,
    /// Maximum number of jobs with which a run starts.
    pub run_jobs: usize,
    pub fleet_hosts: usize,
    /// Maximum length of one secret, in characters.
    pub secret_chars: usize,
    pub keep: RetentionPeriods,
}

/// Times after which a browser has to log in again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WebSessionLimits {
    /// Counted from the last request.
    pub idle: Span,
    /// Counted from the login.
    pub life: Span,
}

/// Retention periods; `None` means without limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RetentionPeriods {
    /// Counted from the time of the event. Events of unfinished runs, jobs, managed jobs and instances, and of fleets,
    /// volumes and gateways that are not deleted, are kept.
    pub events: Option<Span>,
    /// Counted from the end of the run. Its jobs, logs and metrics are deleted with it.
    pub runs: Option<Span>,
    /// Counted from the last use. Uploads that a kept run or managed job refers to are kept.
    pub uploads: Option<Span>,
    /// Samples of the resource usage of jobs, counted from their time.
    pub metrics: Option<Span>,
}

impl Default for Limits {
    fn default() -> Self {
        let days = |days| Some(Span::days(days));
        Self {
            upload_bytes: 64 * MIB,
            uploads_bytes: Some(2 << 30),
            streams: 512,
            request_bytes: 2 * MIB,
            log_bytes_hour: Some(50 << 20),
            log_bytes: LOG_BYTES_MAX,
            upload_timeout: Duration::from_secs(300),
            image_pull_timeout: PULLING_TIMEOUT,
            web_sessions: WebSessionLimits { idle: Span::hours(12), life: Span::days(7) },
            projects: 10,
            run_jobs: 1000,
            fleet_hosts: 1000,
            secret_chars: 5000,
            keep: RetentionPeriods { events: days(30), runs: days(90), uploads: days(7), metrics: days(30) },
        }
    }
}

impl Limits {
    pub fn new(given: LimitSettings) -> Result<Self, SettingsError> {
        let usual = Self::default();
        let size = |name, text: Option<String>, usual: usize| match text {
            None => Ok(usual),
            Some(text) => {
                let size = parse_bytes(&text).and_then(|bytes| usize::try_from(bytes).ok());
                let expected = "a size of at most 1GB, such as `64MB`";
                let size = size.filter(|size| (1..=SIZE_CEILING).contains(size));
                size.ok_or(SettingsError::Limit { name, text, expected })
            }
        };
        let number = |name, text: Option<String>, usual: usize| match text {
            None => Ok(usual),
            Some(text) => {
                let number = text.parse().ok().filter(|number| (1..=COUNT_CEILING).contains(number));
                number.ok_or(SettingsError::Limit { name, text, expected: "a number from 1 to 1000000" })
            }
        };
        let log_bytes = parse_optional_size(LOG_MAX, given.log_max, Some(usual.log_bytes))?;
        let upload = Span::secs(i64::try_from(usual.upload_timeout.as_secs()).unwrap_or(TIME_CEILING));
        let upload = parse_time(UPLOAD_TIMEOUT, given.upload_timeout, upload, TIME_CEILING)?;
        let pull = usual.image_pull_timeout;
        let sessions = usual.web_sessions;
        let projects = number(PROJECTS_MAX, given.projects_max, 10)?;
        Ok(Self {
            upload_bytes: size(UPLOAD_MAX, given.upload_max, usual.upload_bytes)?,
            uploads_bytes: parse_optional_size(UPLOADS_MAX, given.uploads_max, usual.uploads_bytes)?,
            streams: number(STREAMS_MAX, given.streams_max, usual.streams)?,
            request_bytes: size(REQUEST_MAX, given.request_max, usual.request_bytes)?,
            log_bytes_hour: parse_optional_size(LOG_RATE_MAX, given.log_rate_max, usual.log_bytes_hour)?,
            log_bytes: log_bytes.unwrap_or(u64::MAX),
            upload_timeout: Duration::from_secs(u64::try_from(upload.as_secs()).unwrap_or_default()),
            image_pull_timeout: parse_time(IMAGE_PULL_TIMEOUT, given.image_pull_timeout, pull, TIME_CEILING)?,
            web_sessions: WebSessionLimits {
                idle: parse_time(WEB_SESSION_IDLE, given.web_session_idle, sessions.idle, SESSION_CEILING)?,
                life: parse_time(WEB_SESSION_LIFE, given.web_session_life, sessions.life, SESSION_CEILING)?,
            },
            projects: i64::try_from(projects).unwrap_or(usual.projects),
            run_jobs: number(RUN_JOBS_MAX, given.run_jobs_max, usual.run_jobs)?,
            fleet_hosts: number(FLEET_HOSTS_MAX, given.fleet_hosts_max, usual.fleet_hosts)?,
            secret_chars: number(SECRET_MAX, given.secret_max, usual.secret_chars)?,
            keep: RetentionPeriods {
                events: parse_retention(KEEP_EVENTS, given.keep_events, usual.keep.events)?,
                runs: parse_retention(KEEP_RUNS, given.keep_runs, usual.keep.runs)?,
                uploads: parse_retention(KEEP_UPLOADS, given.keep_uploads, usual.keep.uploads)?,
                metrics: parse_retention(KEEP_METRICS, given.keep_metrics, usual.keep.metrics)?,
            },
        })
    }
}

/// Parses a number of bytes; `off` and `0` mean no limit.
fn parse_optional_size(
    name: &'static str,
    text: Option<String>,
    usual: Option<u64>,
) -> Result<Option<u64>, SettingsError> {
    let Some(text) = text else { return Ok(usual) };
    if matches!(text.as_str(), "off" | "0") {
        return Ok(None);
    }
    let expected = "a size such as `50MB`, or `off` for no limit";
    let bytes = parse_bytes(&text).filter(|bytes| *bytes > 0);
    bytes.map(Some).ok_or(SettingsError::Limit { name, text, expected })
}

/// Parses a time limit such as `25m`, of at most `ceiling` seconds.
fn parse_time(
    name: &'static str,
    text: Option<String>,
    usual: Span,
    ceiling: i64,
) -> Result<Span, SettingsError> {
    let Some(text) = text else { return Ok(usual) };
    let expected = match ceiling {
        SESSION_CEILING => "a duration from `1s` to `365d`, such as `12h`",
        _ => "a duration from `1s` to `24h`, such as `25m`",
    };
    let secs = parse_duration(&text).ok().filter(|secs| (1..=ceiling).contains(secs));
    secs.map(Span::secs).ok_or(SettingsError::Limit { name, text, expected })
}

/// Parses a retention period such as `30d`; `off` and `0` mean without limit.
pub(crate) fn parse_retention(
    name: &'static str,
    text: Option<String>,
    usual: Option<Span>,
) -> Result<Option<Span>, SettingsError> {
    let Some(text) = text else { return Ok(usual) };
    if matches!(text.as_str(), "off" | "0" | "0d") {
        return Ok(None);
    }
    let days = text.strip_suffix('d').and_then(|days| days.parse::<u16>().ok());
    let expected = "a number of days such as `30d`, or `off` for no limit";
    days.map(|days| Some(Span::days(days.into()))).ok_or(SettingsError::Limit { name, text, expected })
}

/// Parses a size such as `65536`, `64KB`, `64MB` or `1GB`. Units are powers of 1024.
fn parse_bytes(text: &str) -> Option<u64> {
    let text = text.trim().to_ascii_uppercase();
    let end = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (number, unit) = text.split_at(end);
    let factor: u64 = match unit.trim() {
        "" | "B" => 1,
        "KB" | "KIB" => 1 << 10,
        "MB" | "MIB" => 1 << 20,
        "GB" | "GIB" => 1 << 30,
        _ => return None,
    };
    number.parse::<u64>().ok()?.checked_mul(factor)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn limits(name: &str, text: &str) -> Result<Limits, SettingsError> {
        let mut given = LimitSettings::default();
        *given.named(name).unwrap() = Some(text.to_owned());
        Limits::new(given)
    }

    #[test]
    fn every_limit_has_a_default_and_can_be_set() {
        let usual = Limits::new(LimitSettings::default()).unwrap();
        assert_eq!((usual.upload_bytes, usual.request_bytes), (64 << 20, 2 << 20));
        assert_eq!((usual.log_bytes_hour, usual.projects, usual.run_jobs), (Some(50 << 20), 10, 1000));
        assert_eq!((usual.uploads_bytes, usual.streams), (Some(2 << 30), 512));
        assert_eq!(limits(UPLOADS_MAX, "off").unwrap().uploads_bytes, None);
        assert_eq!(usual.keep.events, Some(Span::days(30)));
        assert_eq!((usual.keep.runs, usual.keep.uploads), (Some(Span::days(90)), Some(Span::days(7))));
        for name in SETTING_NAMES {
            let text = if name.starts_with("keep") { "3d" } else { "7" };
            assert_ne!(limits(name, text).unwrap(), usual, "{name}");
        }
        assert_eq!(limits(UPLOAD_MAX, "1gb").unwrap().upload_bytes, 1 << 30);
        assert_eq!(limits(LOG_RATE_MAX, "off").unwrap().log_bytes_hour, None);
        assert_eq!((usual.log_bytes, limits(LOG_MAX, "off").unwrap().log_bytes), (8 << 30, u64::MAX));
        assert_eq!(limits(UPLOAD_TIMEOUT, "1h").unwrap().upload_timeout, Duration::from_secs(3600));
        assert_eq!((usual.image_pull_timeout, usual.keep.metrics), (Span::mins(25), Some(Span::days(30))));
        assert_eq!(limits(IMAGE_PULL_TIMEOUT, "2h").unwrap().image_pull_timeout, Span::hours(2));
        let hours = |idle, life| WebSessionLimits { idle: Span::hours(idle), life: Span::hours(life) };
        assert_eq!(usual.web_sessions, hours(12, 7 * 24));
        assert_eq!(limits(WEB_SESSION_IDLE, "1h").unwrap().web_sessions, hours(1, 7 * 24));
        assert_eq!(limits(WEB_SESSION_LIFE, "1d").unwrap().web_sessions, hours(12, 24));
        for off in ["off", "0", "0d"] {
            assert_eq!(limits(KEEP_RUNS, off).unwrap().keep.runs, None);
        }
    }

    #[test]
    fn an_invalid_limit_is_refused_with_the_setting_name() {
        for (name, text) in [
            (UPLOAD_MAX, "2GB"),
            (UPLOAD_MAX, "much"),
            (REQUEST_MAX, "0"),
            (UPLOADS_MAX, "lots"),
            (STREAMS_MAX, "0"),
            (LOG_RATE_MAX, "-1"),
            (PROJECTS_MAX, "0"),
            (LOG_MAX, "long"),
            (UPLOAD_TIMEOUT, "0"),
            (IMAGE_PULL_TIMEOUT, "25h"),
            (WEB_SESSION_IDLE, "off"),
            (WEB_SESSION_LIFE, "366d"),
            (KEEP_METRICS, "2"),
            (KEEP_EVENTS, "soon"),
            (KEEP_EVENTS, "30"),
        ] {
            let message = limits(name, text).unwrap_err().to_string();
            assert!(message.contains(name) && message.contains(text), "{message}");
        }
        assert_eq!(LimitSettings::default().named("prot"), None);
        assert!(limit_hint(UPLOAD_MAX).contains("`upload_max` (`--upload-max`)"));
    }
}
