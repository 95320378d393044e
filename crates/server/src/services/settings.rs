//! The settings of a server replica, for its admins. Without secrets: no token, key or password is shown.

use windlass_api::server::{Setting, SettingList};
use windlass_model::time::Span;

use crate::{app::App, config::Settings, db::DatabaseUrl};

pub(crate) fn list(app: &App) -> SettingList {
    let settings = settings(app.settings());
    let setting = |(name, value): (&str, String)| Setting { name: name.to_owned(), value };
    SettingList { settings: settings.into_iter().map(setting).collect() }
}

fn settings(of: &Settings) -> Vec<(&'static str, String)> {
    let switch = |on: bool| if on { "yes" } else { "no" }.to_owned();
    let span = |span: Option<Span>| span.map_or_else(|| "off".to_owned(), format_span);
    let database = match &of.database_url {
        DatabaseUrl::Sqlite(path) => format!("SQLite, {}", path.display()),
        DatabaseUrl::Postgres(_) => "Postgres".to_owned(),
    };
    vec![
        ("address", of.address.to_string()),
        ("data directory", of.data_dir.display().to_string()),
        ("database", database),
        ("runs pipelines", switch(of.pipelines)),
        ("fleet of this machine", switch(of.local)),
        ("HTTPS", switch(of.tls.is_some())),
        ("port for services", of.services_address.map_or_else(|| "none".to_owned(), |at| at.to_string())),
        ("login without encryption", switch(of.insecure_web_login)),
        ("identity provider", of.oidc.as_ref().map_or_else(|| "none".to_owned(), |oidc| oidc.issuer.clone())),
        ("lifetime of tokens", span(of.token_expiry)),
        ("masks secrets in logs", switch(of.mask_secrets)),
        ("logs are kept for", span(of.keep_logs)),
        ("agents are lost after", format_span(of.lost_after)),
        ("first retry after", format_span(of.retry_delay)),
        ("managed jobs that launch", of.job_limits.max_launching.to_string()),
        ("managed jobs that are alive", of.job_limits.max_alive.to_string()),
        ("queue for every user", switch(of.queue_for_everyone)),
        ("looks up images", switch(of.image_lookup.is_some())),
    ]
}

fn format_span(span: Span) -> String {
    let seconds = span.as_secs();
    let units = [(86_400, "d"), (3_600, "h"), (60, "min")];
    match units.into_iter().find(|(unit, _)| seconds >= *unit && seconds % unit == 0) {
        Some((unit, word)) => format!("{} {word}", seconds / unit),
        None => format!("{seconds} s"),
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::config::SettingsSource;

    #[test]
    fn settings_show_no_token_and_no_password() {
        let given = SettingsSource {
            admin_token: Some("canary-token".into()),
            database_url: Some("postgres://user:canary-password@host/db".into()),
            ..SettingsSource::default()
        };
        let of = Settings::new(given, Some(Path::new("/home/of/windlass"))).unwrap();
        let shown =
            settings(&of).into_iter().map(|(name, value)| format!("{name}={value}\n")).collect::<String>();
        assert!(!shown.contains("canary") && shown.contains("database=Postgres"), "{shown}");
        assert_eq!(format_span(Span::hours(36)), "36 h");
        assert_eq!(format_span(Span::secs(90)), "90 s");
    }
}
