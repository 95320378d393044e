//! JSON columns. A stored document that does not decode is an error which names its column and its row, never a default.

use std::{
    collections::BTreeSet,
    error::Error,
    fmt::Display,
    sync::{Arc, LazyLock},
};

use parking_lot::Mutex;
use serde::de::DeserializeOwned;
use windlass_model::id::RunId;

use super::error::DbError;

/// A column of JSON text, as its table names it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct JsonColumn {
    table: &'static str,
    name: &'static str,
}

impl JsonColumn {
    const fn new(table: &'static str, name: &'static str) -> Self {
        Self { table, name }
    }

    pub fn table(self) -> &'static str {
        self.table
    }

    pub(super) fn name(self) -> &'static str {
        self.name
    }

    /// Decodes the document of this row.
    pub fn decode<T: DeserializeOwned>(self, row: impl Display, text: &str) -> Result<T, DbError> {
        serde_json::from_str(text).map_err(|source| self.invalid(row, source))
    }

    /// Decodes a document that the row may not have.
    pub fn decode_opt<T: DeserializeOwned>(
        self,
        row: impl Display,
        text: Option<&str>,
    ) -> Result<Option<T>, DbError> {
        text.map(|text| self.decode(row, text)).transpose()
    }

    /// Decodes a document that was encrypted.
    pub fn decode_bytes<T: DeserializeOwned>(self, row: impl Display, bytes: &[u8]) -> Result<T, DbError> {
        serde_json::from_slice(bytes).map_err(|source| self.invalid(row, source))
    }

    /// Error for a document that is valid JSON and not what this column contains.
    pub fn invalid(self, row: impl Display, source: impl Error + Send + Sync + 'static) -> DbError {
        let Self { table, name: column } = self;
        DbError::StoredDocument { table, column, row: row.to_string(), source: Arc::new(source) }
    }
}

/// Names the row of a job by its run, where its own id is not known.
pub fn of_run(run: RunId) -> impl Display {
    format!("of run {run}")
}

/// Maximum number of remembered rows; beyond it they are reported again.
const LEFT_OUT_MAX: usize = 1024;

/// Reports, once, that a row is left out of a task that concerns many rows, because one of its documents cannot be read:
/// an error would stop the task for all of them.
pub fn leave_out(error: &DbError) {
    static REPORTED: LazyLock<Mutex<BTreeSet<String>>> = LazyLock::new(Mutex::default);
    let mut reported = REPORTED.lock();
    if reported.len() >= LEFT_OUT_MAX {
        reported.clear();
    }
    if reported.insert(error.to_string()) {
        let cause = error.source().map(ToString::to_string);
        tracing::warn!(%error, cause, "left out a row that cannot be read");
    }
}

macro_rules! columns {
    ($($name:ident = $table:literal, $column:literal;)*) => {
        $(pub const $name: JsonColumn = JsonColumn::new($table, $column);)*

        #[cfg(test)]
        const ALL: &[JsonColumn] = &[$($name),*];
    };
}

columns! {
    ATTACHMENT_DATA = "volume_attachments", "data";
    CONTAINER_SECRETS = "containers", "secrets_sealed";
    DISPATCHER_NODES = "dispatchers", "nodes";
    FLEET_SPEC = "fleets", "spec";
    GATEWAY_CONFIGURATION = "gateways", "configuration";
    INSTANCE_GPU_DRIVER = "instances", "gpu_driver";
    INSTANCE_HOST_KEY = "instances", "host_key";
    INSTANCE_OFFER = "instances", "offer";
    INSTANCE_PROFILE = "instances", "profile";
    INSTANCE_PROVISIONING = "instances", "provisioning";
    INSTANCE_SSH = "instances", "ssh";
    INSTANCE_SSH_SEALED = "instances", "ssh_sealed";
    INSTANCE_TRACKING = "instances", "tracking";
    INSTANCE_TYPE = "instances", "instance_type";
    JOB_CONNECTION = "jobs", "connection_info";
    JOB_PREEMPTION = "jobs", "preemption";
    JOB_PROBES = "jobs", "probes";
    JOB_PROMISED = "jobs", "promised";
    JOB_PROVISIONING = "jobs", "provisioning";
    JOB_PULL_PROGRESS = "jobs", "pull_progress";
    JOB_RUNTIME = "jobs", "runtime";
    JOB_SHORTFALLS = "jobs", "shortfalls";
    JOB_SPEC = "jobs", "job_spec";
    MANAGED_JOB_FILES = "managed_jobs", "files";
    MANAGED_JOB_PLAN = "managed_jobs", "plan";
    MANAGED_JOB_SECRETS = "managed_jobs", "secrets_sealed";
    MANAGED_TASK_RECORD = "managed_job_tasks", "record";
    METRICS_GPUS = "job_metrics", "gpus";
    NODE_KEY = "jobs", "secrets_sealed";
    REPO_CREDENTIALS = "repo_creds", "sealed";
    REPO_INFO = "repos", "info";
    RUN_PLACES = "runs", "places";
    RUN_SERVICE = "runs", "service";
    RUN_COMPLETE_SPEC = "runs", "settled_spec";
    RUN_SPEC = "runs", "spec";
    RUN_TRACKING = "runs", "tracking";
    SECRET_USERS = "secrets", "users";
    SERVICE_ANSWERS = "service_answers", "answers";
    VOLUME_CONFIGURATION = "volumes", "configuration";
    VOLUME_PROVISIONING = "volumes", "provisioning";
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Db, DbError};

    #[test]
    fn a_broken_document_is_an_error_with_its_table_its_column_and_its_row() {
        let error = RUN_SPEC.decode::<serde_json::Value>("r-1", "{").unwrap_err();
        assert_eq!(
            error.to_string(),
            "the document in column `spec` of table `runs`, row r-1, cannot be read"
        );
        assert!(matches!(error, DbError::StoredDocument { .. }));
        assert_eq!(RUN_TRACKING.decode_opt::<serde_json::Value>("r-1", None).unwrap(), None);
        assert!(RUN_TRACKING.decode_opt::<u8>("r-1", Some("")).is_err());
    }

    #[tokio::test]
    async fn every_document_is_in_a_column_of_the_database() {
        let db = Db::open_inline(Arc::new(|| 1), 1).unwrap();
        for JsonColumn { table, name } in ALL {
            db.query(format!("SELECT {name} FROM {table} LIMIT 1"), vec![]).await.unwrap();
        }
    }
}
