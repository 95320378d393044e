//! Tests of the settings.

use std::{path::Path, time::Duration};

use super::{ProcessMode, Settings, SettingsSource, Span};
use crate::db::DatabaseUrl;

#[test]
fn the_admins_token_may_be_in_a_file() {
    let home = windlass_testkit::temp_dir("token").unwrap();
    let file = home.path().join("token");
    let read =
        |given: SettingsSource| Settings::new(given, Some(home.path())).map(|settings| settings.admin_token);
    let named = || SettingsSource { admin_token_file: Some(file.clone()), ..SettingsSource::default() };
    assert!(read(named()).is_err(), "it is not there");
    std::fs::write(&file, " \n").unwrap();
    assert!(read(named()).unwrap_err().to_string().contains("is empty"));
    std::fs::write(&file, "of-a-file\n").unwrap();
    assert_eq!(read(named()).unwrap().as_deref(), Some("of-a-file"));
    std::fs::create_dir(home.path().join("server")).unwrap();
    std::fs::write(home.path().join("server/config.yml"), "admin_token: of-the-configuration\n").unwrap();
    assert_eq!(read(named()).unwrap().as_deref(), Some("of-a-file"), "a flag wins over the file");
    assert_eq!(read(SettingsSource::default()).unwrap().as_deref(), Some("of-the-configuration"));
}

#[test]
fn an_earlier_settings_source_overrides_a_later_one() {
    let flags = SettingsSource { port: Some(1), ..SettingsSource::default() };
    let file = SettingsSource { port: Some(2), host: Some("::1".into()), ..SettingsSource::default() };
    let settings = Settings::new(flags.or(file), Some(Path::new("/h"))).unwrap();
    assert_eq!(settings.address.to_string(), "[::1]:1");
    assert_eq!(settings.database_url, DatabaseUrl::Sqlite("/h/server/windlass.db".into()));
}

#[test]
fn settings_file_supplies_missing_values_and_unknown_keys_are_named() {
    let dir = windlass_testkit::temp_dir("config").unwrap();
    let file = dir.path().join("config.yml");
    std::fs::write(&file, "port: 8080\nhost: 0.0.0.0\n").unwrap();
    let given =
        SettingsSource { port: Some(1), data_dir: Some(dir.path().to_owned()), ..SettingsSource::default() };
    assert_eq!(Settings::new(given, None).unwrap().address.to_string(), "0.0.0.0:1");
    std::fs::write(&file, "upload_max: 1MB\nkeep_events: off\n").unwrap();
    let limits = Settings::new(
        SettingsSource { data_dir: Some(dir.path().to_owned()), ..SettingsSource::default() },
        None,
    );
    let limits = limits.unwrap().limits;
    assert_eq!((limits.upload_bytes, limits.keep.events), (1 << 20, None));
    std::fs::write(&file, "prot: 8080\n").unwrap();
    let problem = SettingsSource::from_file(&file).unwrap_err().to_string();
    assert!(problem.contains("`prot`"), "{problem}");
}

#[test]
fn plain_processes_are_confined_unless_the_settings_say_otherwise() {
    let mode = |word: Option<&str>| {
        let given = SettingsSource { local_processes: word.map(str::to_owned), ..SettingsSource::default() };
        Settings::new(given, Some(Path::new("/h"))).map(|settings| settings.local_processes)
    };
    assert_eq!(mode(None).unwrap(), ProcessMode::Confined);
    assert_eq!(mode(Some("own")).unwrap(), ProcessMode::Own);
    assert_eq!(mode(Some("refused")).unwrap(), ProcessMode::Refused);
    assert!(mode(Some("root")).unwrap_err().to_string().contains("`confined`, `own` or `refused`"));
    let dir = windlass_testkit::temp_dir("config").unwrap();
    std::fs::write(dir.path().join("config.yml"), "local_processes: own\n").unwrap();
    let given = SettingsSource { data_dir: Some(dir.path().to_owned()), ..SettingsSource::default() };
    assert_eq!(Settings::new(given, None).unwrap().local_processes, ProcessMode::Own);
}

#[test]
fn image_lookups_have_a_time_limit_and_list_insecure_registries() {
    let read = |lookup: Option<&str>, insecure: &str| {
        let given = SettingsSource {
            image_lookup: lookup.map(str::to_owned),
            insecure_registries: Some(insecure.to_owned()),
            ..SettingsSource::default()
        };
        let settings = Settings::new(given, Some(Path::new("/h")));
        settings.map(|settings| (settings.image_lookup, settings.insecure_registries))
    };
    assert_eq!(read(None, "").unwrap(), (Some(Duration::from_secs(5)), vec![]));
    let two = vec!["10.0.0.5:5000".to_owned(), "localhost:1".to_owned()];
    assert_eq!(read(Some("off"), "10.0.0.5:5000, localhost:1").unwrap(), (None, two));
    for (lookup, insecure, quoted) in
        [("0s", "", "`0s`"), ("2m", "", "`2m`"), ("off", "http://x", "`http://x`")]
    {
        assert!(read(Some(lookup), insecure).unwrap_err().to_string().contains(quoted));
    }
}

#[test]
fn a_retry_delay_has_bounds() {
    let delay = |text: Option<&str>| {
        let given = SettingsSource { retry_delay: text.map(str::to_owned), ..SettingsSource::default() };
        Settings::new(given, Some(Path::new("/h"))).map(|settings| settings.retry_delay)
    };
    assert_eq!(delay(None).unwrap(), Span::secs(15));
    assert_eq!(delay(Some("1m")).unwrap(), Span::mins(1));
    for text in ["0s", "2h", "soon"] {
        assert!(delay(Some(text)).unwrap_err().to_string().contains(&format!("`{text}`")));
    }
}

#[test]
fn a_lock_timeout_has_bounds() {
    let timeout = |text: Option<&str>| {
        let given = SettingsSource { lock_timeout: text.map(str::to_owned), ..SettingsSource::default() };
        Settings::new(given, Some(Path::new("/h"))).map(|settings| settings.lock_timeout)
    };
    assert_eq!(timeout(None).unwrap(), Duration::from_secs(30));
    assert_eq!(timeout(Some("10s")).unwrap(), Duration::from_secs(10));
    for text in ["4s", "31s", "1m", "soon"] {
        assert!(timeout(Some(text)).unwrap_err().to_string().contains(&format!("`{text}`")));
    }
}

#[test]
fn debug_output_of_settings_hides_the_token() {
    let given = SettingsSource { admin_token: Some("canary".into()), ..SettingsSource::default() };
    let settings = Settings::new(given, Some(Path::new("/h"))).unwrap();
    assert!(!format!("{settings:?}").contains("canary"));
}
