//! `windlass server backup` and `restore`: copies an SQLite database to or from one file.

use std::path::{Path, PathBuf};

use serde_json::json;
use windlass_server::{
    config::Settings,
    db::{
        DatabaseUrl,
        backup::{self, BackupError, BackupSummary},
    },
};

use crate::{cli::Format, error::CliError, output};

pub(super) const BACKUP: &str = "\
Examples:
  windlass server backup /backups/windlass-monday.db
  windlass server backup --data-dir /var/lib/windlass-server /backups/windlass.db

The server may be running. The copy is verified before it gets its final name, and never replaces an existing file.
Secrets are encrypted: also keep a copy of the key file (`keys/master` in the data directory), elsewhere. Job logs are
not included.";

pub(super) const RESTORE: &str = "\
Examples:
  windlass server stop && windlass server restore /backups/windlass-monday.db
  windlass server restore --data-dir /var/lib/windlass-server /backups/windlass.db

No server may be using the database. The replaced database is kept next to it, under another name.";

pub(super) fn back_up(settings: &Settings, file: &Path, format: Format) -> Result<(), CliError> {
    let database =
        require_sqlite(settings, "back up", |url| format!("pg_dump --format=custom --file=FILE '{url}'"))?;
    let copied = backup::backup(&database, file)
        .map_err(|error| backup_error("failed to back up the database", &error))?;
    print_copied(format, file, &copied, |copied| {
        format!("Wrote {} ({} runs, {}).", file.display(), copied.runs, format_size(copied.bytes))
    })
}

pub(super) fn restore(settings: &Settings, file: &Path, format: Format) -> Result<(), CliError> {
    let database =
        require_sqlite(settings, "restore", |url| format!("pg_restore --clean --dbname='{url}' FILE"))?;
    let copied = backup::restore(&database, file)
        .map_err(|error| backup_error("failed to restore the database", &error))?;
    if !settings.key_file.exists() {
        output::print_message(&format!(
            "Note: the key file {} does not exist. Without it the server cannot decrypt the secrets in this copy.",
            settings.key_file.display()
        ));
    }
    print_copied(format, &database, &copied, |copied| {
        let aside = copied.aside.as_ref();
        let aside =
            aside.map_or(String::new(), |path| format!(" The previous database is {}.", path.display()));
        format!("Restored the database from {} ({} runs).{aside}", file.display(), copied.runs)
    })
}

/// Fails for Postgres, which has its own backup tools.
fn require_sqlite(
    settings: &Settings,
    what: &str,
    tool: impl Fn(&str) -> String,
) -> Result<PathBuf, CliError> {
    match &settings.database_url {
        DatabaseUrl::Sqlite(path) => Ok(path.clone()),
        DatabaseUrl::Postgres(url) => Err(CliError::new(format!("cannot {what} a Postgres database"))
            .why(
                "this command supports only SQLite; Postgres has its own tools, which work while servers run",
            )
            .hint(format!("run `{}`", tool(&without_password(url))))),
    }
}

fn without_password(url: &str) -> String {
    let Some((scheme, rest)) = url.split_once("://") else { return url.to_owned() };
    let rest = rest.split(['?', '#']).next().unwrap_or_default();
    match rest.rsplit_once('@') {
        Some((who, place)) => {
            let user = who.split(':').next().unwrap_or_default();
            format!("{scheme}://{user}@{place}")
        }
        None => format!("{scheme}://{rest}"),
    }
}

fn print_copied(
    format: Format,
    path: &Path,
    copied: &BackupSummary,
    sentence: impl Fn(&BackupSummary) -> String,
) -> Result<(), CliError> {
    let document = json!({"path": path, "bytes": copied.bytes, "runs": copied.runs, "aside": copied.aside});
    output::print_one(format, &document, &path.display().to_string(), |_| {
        output::print_data(&sentence(copied))
    })
}

fn backup_error(what: &str, error: &BackupError) -> CliError {
    let problem = CliError::from_error(what, error);
    match error {
        BackupError::Exists { .. } => problem.hint("choose another file name; backups are never overwritten"),
        BackupError::Db(windlass_server::db::DbError::InUse { .. }) => {
            problem.hint("run `windlass server stop` first")
        }
        BackupError::Damaged { .. } | BackupError::Foreign { .. } => {
            problem.hint("nothing was changed; use another backup")
        }
        BackupError::Absent { .. } | BackupError::File { .. } | BackupError::Db(_) => problem,
    }
}

fn format_size(bytes: u64) -> String {
    if bytes < 1024 * 1024 { format!("{} KiB", bytes.div_ceil(1024)) } else { format!("{} MiB", bytes >> 20) }
}

#[cfg(test)]
mod tests {
    use super::without_password;

    #[test]
    fn backup_hint_omits_the_database_password() {
        let plain = "postgres://windlass@db:5432/windlass";
        assert_eq!(without_password("postgres://windlass:p@ss@db:5432/windlass?password=x"), plain);
        assert_eq!(without_password(plain), plain);
        assert_eq!(without_password("postgres:///windlass?host=/run"), "postgres:///windlass");
    }
}
