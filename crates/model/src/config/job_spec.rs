//! Specification of one job: the `JobSpec` of the API, without anything that is decided later.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::{
    mounts::{Mount, RepoExists},
    name::UnixUser,
    profile::{AllBackendOptions, RetryEvent, UtilizationPolicy},
    run::RegistryAuth,
    traffic::{Method, ProbeHeader, ProbeKind},
};
use crate::resources::{CpuArch, ResourcesSpec};

/// Default directory of the repository.
pub const REPO_DIR: &str = "/workflow";

/// Setting that names the default image of a job.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DefaultImageSource {
    /// `default_image` of the configuration or of its profile.
    Run,
    Project,
    #[default]
    Server,
}

impl DefaultImageSource {
    pub const fn is_server(&self) -> bool {
        matches!(self, Self::Server)
    }
}

/// Prints `the project`.
impl std::fmt::Display for DefaultImageSource {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Run => "the configuration or its profile",
            Self::Project => "the project",
            Self::Server => "the server",
        })
    }
}

/// Complete specification of one job of one replica.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct JobSpec {
    #[serde(default)]
    pub replica_num: u32,
    pub job_num: u32,
    pub job_name: String,
    #[serde(default = "one")]
    pub jobs_per_replica: u32,
    #[serde(default = "first_group")]
    pub replica_group: String,
    #[serde(default)]
    pub node_group_index: u32,
    #[serde(default = "first_group")]
    pub node_group_name: String,
    #[serde(default)]
    pub node_group_job_index: u32,
    /// An empty list if there are none: a client that receives null cannot stream logs.
    #[serde(default)]
    pub app_specs: Vec<AppSpec>,
    #[serde(default)]
    pub user: Option<UnixUser>,
    pub commands: Vec<String>,
    pub env: BTreeMap<String, String>,
    #[serde(default)]
    pub home_dir: Option<String>,
    /// Empty if the run names none, `none` for a plain process.
    pub image_name: String,
    /// Architectures of the image; empty if they are unknown or do not restrict the choice of an instance.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub image_architectures: Vec<CpuArch>,
    /// Image for instances that allow no plain processes, if the run names none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub default_image: Option<String>,
    /// Origin of the default image: the setting that applies.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub default_image_from: Option<DefaultImageSource>,
    /// Version of Python to prepare.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub python: Option<String>,
    #[serde(default)]
    pub privileged: bool,
    #[serde(default)]
    pub single_branch: Option<bool>,
    /// In seconds; null means no limit.
    #[serde(default)]
    pub max_duration: Option<i64>,
    /// In seconds; null waits without limit.
    #[serde(default)]
    pub stop_duration: Option<i64>,
    #[serde(default)]
    pub utilization_policy: Option<UtilizationPolicy>,
    #[serde(default)]
    pub registry_auth: Option<RegistryAuth>,
    pub requirements: Requirements,
    #[serde(default)]
    pub retry: Option<RetrySpec>,
    /// Each name is a list: the first usable volume is mounted.
    #[serde(default)]
    pub volumes: Option<Vec<Mount>>,
    /// Shared by the jobs of a multi-node replica. Never leaves the server.
    #[serde(default)]
    pub ssh_key: Option<JobSshKey>,
    #[serde(default)]
    pub working_dir: Option<String>,
    #[serde(default = "repo_dir")]
    pub repo_dir: String,
    #[serde(default)]
    pub repo_exists_action: Option<RepoExists>,
    #[serde(default)]
    pub repo_data: Option<serde_json::Value>,
    #[serde(default)]
    pub repo_code_hash: Option<String>,
    #[serde(default)]
    pub file_archives: Vec<FileArchive>,
    #[serde(default)]
    pub service_port: Option<u16>,
    #[serde(default)]
    pub probes: Vec<ProbeSpec>,
}

fn one() -> u32 {
    1
}

fn first_group() -> String {
    "0".to_owned()
}

fn repo_dir() -> String {
    REPO_DIR.to_owned()
}

/// A port that clients forward.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AppSpec {
    pub port: u16,
    #[serde(default)]
    pub map_to_port: Option<u16>,
    pub app_name: String,
    #[serde(default)]
    pub url_path: Option<String>,
    #[serde(default)]
    pub url_query_params: Option<BTreeMap<String, String>>,
}

/// Requirements that placement evaluates.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Requirements {
    pub resources: ResourcesSpec,
    #[serde(default)]
    pub max_price: Option<f64>,
    /// True: spot only. False: on demand only. Null: either.
    #[serde(default)]
    pub spot: Option<bool>,
    #[serde(default)]
    pub reservation: Option<String>,
    #[serde(default)]
    pub multinode: Option<bool>,
    #[serde(default)]
    pub backend_options: Option<AllBackendOptions>,
}

/// Retry policy with all defaults filled in.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RetrySpec {
    pub on_events: Vec<RetryEvent>,
    /// In seconds.
    pub duration: i64,
}

/// SSH key pair for connections between the jobs of a replica.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct JobSshKey {
    pub private: String,
    pub public: String,
}

/// Omits the private key, which must not appear in logs.
impl std::fmt::Debug for JobSshKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("JobSshKey").field("public", &self.public).finish_non_exhaustive()
    }
}

/// An uploaded archive and the directory to unpack it in.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileArchive {
    pub id: uuid::Uuid,
    pub path: String,
}

/// A probe with all defaults filled in. Times are in seconds.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ProbeSpec {
    #[serde(rename = "type")]
    pub kind: ProbeKind,
    pub url: String,
    pub method: Method,
    #[serde(default)]
    pub headers: Vec<ProbeHeader>,
    #[serde(default)]
    pub body: Option<String>,
    pub timeout: i64,
    pub interval: i64,
    pub ready_after: i64,
    #[serde(default)]
    pub until_ready: bool,
}
