//! Records of a mock cloud: files below its directory, so that it outlives servers and all server replicas see the
//! same.

use std::{
    collections::BTreeMap,
    fs, io,
    os::unix::fs::DirBuilderExt,
    path::{Path, PathBuf},
    time::{SystemTime, UNIX_EPOCH},
};

use serde::{Deserialize, Serialize, de::DeserializeOwned};
use windlass_model::id::InstanceId;

use crate::BackendError;

/// Created instance.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct InstanceRecord {
    pub instance: InstanceId,
    /// Key of its kind in the script.
    pub kind: String,
    pub made_ms: i64,
    /// Number of deletion requests.
    #[serde(default)]
    pub deletes: i64,
    /// True if it was preempted: it is gone without a deletion.
    #[serde(default)]
    pub preempted: bool,
}

/// A network volume.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct VolumeRecord {
    pub id: String,
    pub region: String,
    pub zone: Option<String>,
    pub size_gb: Option<f64>,
    pub made_ms: i64,
    /// Time of the attachment request, by instance.
    #[serde(default)]
    pub attached: BTreeMap<String, i64>,
}

#[derive(Clone, Debug)]
pub(super) struct Ledger(PathBuf);

/// Returns the time of a clock that all processes share.
#[expect(clippy::disallowed_methods, reason = "the cloud has a clock of its own, as real ones have")]
pub(super) fn now_ms() -> i64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    i64::try_from(since.as_millis()).unwrap_or(i64::MAX)
}

fn ledger_error(path: &Path, error: &io::Error) -> BackendError {
    BackendError::Unavailable {
        what: "access the records of the mock cloud",
        message: format!("{}: {error}", path.display()),
    }
}

impl Ledger {
    pub(super) fn new(dir: &Path) -> Self {
        Self(dir.to_owned())
    }

    fn read<T: DeserializeOwned>(&self, path: &Path) -> Result<Option<T>, BackendError> {
        match fs::read(path) {
            Ok(text) => match serde_json::from_slice(&text) {
                Ok(value) => Ok(Some(value)),
                Err(error) => Err(ledger_error(path, &error.into())),
            },
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(ledger_error(path, &error)),
        }
    }

    fn write(&self, path: &Path, value: &impl Serialize) -> Result<(), BackendError> {
        let written = (|| {
            if let Some(dir) = path.parent() {
                fs::DirBuilder::new().recursive(true).mode(0o700).create(dir)?;
            }
            let part = path.with_extension("part");
            fs::write(&part, serde_json::to_vec(value)?)?;
            fs::rename(&part, path)
        })();
        written.map_err(|error| ledger_error(path, &error))
    }

    fn remove(&self, path: &Path) -> Result<(), BackendError> {
        match fs::remove_file(path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(ledger_error(path, &error)),
            Ok(()) | Err(_) => Ok(()),
        }
    }

    fn instance(&self, instance: InstanceId) -> PathBuf {
        self.0.join("machines").join(format!("{instance}.json"))
    }

    fn volume_file(&self, id: &str) -> PathBuf {
        self.0.join("volumes").join(format!("{id}.json"))
    }

    pub(super) fn machine(&self, instance: InstanceId) -> Result<Option<InstanceRecord>, BackendError> {
        self.read(&self.instance(instance))
    }

    pub(super) fn put_instance(&self, made: &InstanceRecord) -> Result<(), BackendError> {
        self.write(&self.instance(made.instance), made)
    }

    pub(super) fn remove_instance(&self, instance: InstanceId) -> Result<(), BackendError> {
        self.remove(&self.instance(instance))
    }

    /// Returns the file that a user creates to preempt an instance.
    pub(super) fn preemption_file(&self, instance: InstanceId) -> PathBuf {
        self.0.join("preempt").join(instance.to_string())
    }

    /// Returns the number of instances.
    pub(super) fn instance_count(&self) -> usize {
        let made = fs::read_dir(self.0.join("machines")).into_iter().flatten().flatten();
        made.filter(|entry| entry.path().extension().is_some_and(|end| end == "json")).count()
    }

    /// Increments a counter and returns its previous value.
    pub(super) fn count(&self, what: &str) -> Result<u64, BackendError> {
        let path = self.0.join("counts").join(format!("{what}.json"));
        let before: u64 = self.read(&path)?.unwrap_or(0);
        self.write(&path, &(before + 1))?;
        Ok(before)
    }

    /// Returns whether this is one of the first `most` requests for `what`; with `-1`, always.
    pub(super) fn is_among_first(&self, what: &str, most: i64) -> Result<bool, BackendError> {
        if most <= 0 {
            return Ok(most < 0);
        }
        let path = self.0.join("counts").join(format!("{}.json", what.replace('/', "_")));
        let seen: i64 = self.read(&path)?.unwrap_or(0);
        if seen >= most {
            return Ok(false);
        }
        self.write(&path, &(seen + 1))?;
        Ok(true)
    }

    pub(super) fn volume(&self, id: &str) -> Result<Option<VolumeRecord>, BackendError> {
        self.read(&self.volume_file(id))
    }

    pub(super) fn put_volume(&self, volume: &VolumeRecord) -> Result<(), BackendError> {
        self.write(&self.volume_file(&volume.id), volume)
    }

    pub(super) fn remove_volume(&self, id: &str) -> Result<(), BackendError> {
        self.remove(&self.volume_file(id))
    }
}
