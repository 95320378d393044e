//! Schema migrations: numbered files, embedded, run once each in order, never changed afterwards.
//!
//! A file is plain SQL for both databases. A line `-- sqlite`, `-- postgres` or `-- both` selects the database for the
//! lines after it.

use sha2::{Digest, Sha256};

use super::{
    error::DbError,
    value::{Row, Val},
};

struct Migration {
    number: i64,
    name: &'static str,
    text: &'static str,
}

macro_rules! migrations {
    ($($number:literal $file:literal;)*) => {
        &[$(Migration {
            number: $number,
            name: $file,
            text: include_str!(concat!("../migrations/", $file)),
        }),*]
    };
}

const MIGRATIONS: &[Migration] = migrations! {
    1 "0001_core.sql";
    2 "0002_agents.sql";
    3 "0003_metrics.sql";
    4 "0004_fleets.sql";
    5 "0005_volumes.sql";
    6 "0006_costs.sql";
    7 "0007_queue.sql";
    8 "0008_clock.sql";
    9 "0009_services.sql";
    10 "0010_managed_jobs.sql";
    11 "0011_containers.sql";
    12 "0012_gateways.sql";
    13 "0013_gates.sql";
    14 "0014_seats.sql";
    15 "0015_deployments.sql";
    16 "0016_dispatchers.sql";
    17 "0017_dispatcher_leases.sql";
    18 "0018_retention.sql";
    19 "0019_queue_rights.sql";
    20 "0020_rights.sql";
    21 "0021_tokens.sql";
    22 "0022_upload_sizes.sql";
    23 "0023_default_images.sql";
    24 "0024_wait_classes.sql";
    25 "0025_web_ui.sql";
    26 "0026_exports.sql";
    27 "0027_quotas.sql";
    28 "0028_usage.sql";
    29 "0029_preemption.sql";
    30 "0030_web_ui_pages.sql";
    31 "0031_budgets.sql";
    32 "0032_identities.sql";
    33 "0033_woken_jobs.sql";
    34 "0034_export_volumes.sql";
    35 "0035_free_instances.sql";
    36 "0036_queue_usage.sql";
};

#[derive(Clone, Debug, thiserror::Error)]
pub enum MigrateError {
    #[error(
        "the database was created by a newer version (it has migration {found}, this version supports \
         {known}); run that version, or restore a backup"
    )]
    Newer { found: i64, known: i64 },
    #[error(
        "migration `{name}` was changed after it was applied; restore the file, and put the change in a new \
         migration"
    )]
    Changed { name: String },
}

/// SQL dialect of a database.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Dialect {
    Sqlite,
    Postgres,
}

pub(super) const CREATE_JOURNAL: &str = "CREATE TABLE IF NOT EXISTS migrations (number BIGINT PRIMARY KEY, name TEXT NOT NULL, \
                       checksum TEXT NOT NULL, applied_at BIGINT NOT NULL)";
pub(super) const READ: &str = "SELECT number, name, checksum FROM migrations ORDER BY number";
pub(super) const RECORD: &str =
    "INSERT INTO migrations (number, name, checksum, applied_at) VALUES ($1, $2, $3, now_us())";

impl Migration {
    fn text_for(&self, dialect: Dialect) -> String {
        let mut mine = true;
        let mut text = String::new();
        for line in self.text.lines() {
            match line.trim() {
                "-- sqlite" => mine = dialect == Dialect::Sqlite,
                "-- postgres" => mine = dialect == Dialect::Postgres,
                "-- both" => mine = true,
                _ if mine => {
                    text.push_str(line);
                    text.push('\n');
                }
                _ => {}
            }
        }
        text
    }

    fn checksum(&self) -> String {
        Sha256::digest(self.text.as_bytes()).iter().map(|byte| format!("{byte:02x}")).collect()
    }
}

/// A script to run, and the record of it for the journal.
pub(super) struct MigrationStep {
    pub(super) script: String,
    pub(super) record: Vec<Val>,
}

/// Steps that are still to run, given the journal of this database.
pub(super) fn pending_steps(dialect: Dialect, journal: &[Row]) -> Result<Vec<MigrationStep>, DbError> {
    plan(MIGRATIONS, dialect, journal)
}

fn plan(known: &[Migration], dialect: Dialect, journal: &[Row]) -> Result<Vec<MigrationStep>, DbError> {
    let mut done = 0;
    for row in journal {
        let (number, name, checksum) = (row.int(0)?, row.text(1)?, row.str(2)?);
        let Some(migration) = known.iter().find(|migration| migration.number == number) else {
            let newest = known.last().map_or(0, |migration| migration.number);
            return Err(MigrateError::Newer { found: number, known: newest }.into());
        };
        if migration.checksum() != checksum {
            return Err(MigrateError::Changed { name }.into());
        }
        done = done.max(number);
    }
    Ok(known
        .iter()
        .filter(|migration| migration.number > done)
        .map(|migration| MigrationStep {
            script: migration.text_for(dialect),
            record: vec![migration.number.into(), migration.name.into(), migration.checksum().into()],
        })
        .collect())
}

/// Operations of an SQLite connection that the migration needs.
pub(super) trait Sqlite {
    fn script(&self, sql: &str) -> Result<(), DbError>;
    fn query(&self, sql: &str, params: &[Val]) -> Result<Vec<Row>, DbError>;
}

/// Runs all steps in one exclusive transaction: a failed migration leaves nothing behind.
pub(super) fn sqlite(conn: &impl Sqlite) -> Result<(), DbError> {
    conn.script("BEGIN EXCLUSIVE")?;
    let done = sqlite_inside(conn);
    conn.script(if done.is_ok() { "COMMIT" } else { "ROLLBACK" })?;
    done
}

fn sqlite_inside(conn: &impl Sqlite) -> Result<(), DbError> {
    conn.script(CREATE_JOURNAL)?;
    for step in pending_steps(Dialect::Sqlite, &conn.query(READ, &[])?)? {
        conn.script(&step.script)?;
        conn.query(RECORD, &step.record)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const ONE: Migration =
        Migration { number: 1, name: "0001_a.sql", text: "all\n-- sqlite\nlite\n-- both\nend\n" };

    fn row(number: i64, checksum: &str) -> Row {
        Row(vec![number.into(), "0001_a.sql".into(), checksum.into()])
    }

    #[test]
    fn migration_sections_apply_only_to_their_database() {
        assert_eq!(ONE.text_for(Dialect::Sqlite), "all\nlite\nend\n");
        assert_eq!(ONE.text_for(Dialect::Postgres), "all\nend\n");
    }

    #[test]
    fn an_applied_migration_is_not_run_again() {
        let left = plan(&[ONE], Dialect::Sqlite, &[row(1, &ONE.checksum())]).unwrap();
        assert!(left.is_empty());
        assert_eq!(plan(&[ONE], Dialect::Sqlite, &[]).unwrap().len(), 1);
    }

    #[test]
    fn a_changed_migration_is_refused_by_name() {
        let refused = plan(&[ONE], Dialect::Sqlite, &[row(1, "other")]).err().unwrap();
        let DbError::Migrate(reason) = refused else { panic!("{refused}") };
        assert!(reason.to_string().contains("`0001_a.sql` was changed"), "{reason}");
    }

    #[test]
    fn a_database_of_a_newer_version_is_refused() {
        let refused = plan(&[ONE], Dialect::Sqlite, &[row(2, "x")]).err().unwrap();
        let DbError::Migrate(reason) = refused else { panic!("{refused}") };
        assert!(reason.to_string().contains("migration 2"), "{reason}");
    }

    #[test]
    fn migrations_are_numbered_without_gaps_and_match_their_file_names() {
        for (at, migration) in MIGRATIONS.iter().enumerate() {
            assert_eq!(migration.number, i64::try_from(at).unwrap() + 1);
            assert!(migration.name.starts_with(&format!("{:04}_", migration.number)));
        }
    }
}
