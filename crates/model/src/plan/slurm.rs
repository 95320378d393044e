//! Properties of jobs that a Slurm cluster does not support: there, a job is a container of the queue.

use crate::{
    config::job_spec::{DefaultImageSource, JobSpec},
    resources::{DiskSpec, ResourcesSpec},
};

/// Property of a job that has no effect in a container of the queue. A job with one of them is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SlurmObstacle {
    SeveralNodes,
    /// Its port cannot be reached.
    Service,
    /// It cannot be attached to.
    DevEnvironment,
    Volumes,
    Repository,
    /// Nothing measures its disk usage there.
    DiskLimit,
    /// Dispatchers do not report disks.
    DiskSize,
    SharedMemory,
    /// The node determines the user.
    User,
    Privileged,
    /// The engine of the node pulls the image with its own credentials.
    RegistryAuth,
    Python,
    /// A node runs plain processes or not, and dispatchers do not report which.
    DefaultImage,
    /// Its metrics are not collected there.
    UtilizationPolicy,
    Ports,
}

impl SlurmObstacle {
    pub const ALL: [Self; 15] = [
        Self::SeveralNodes,
        Self::Service,
        Self::DevEnvironment,
        Self::Volumes,
        Self::Repository,
        Self::DiskLimit,
        Self::DiskSize,
        Self::SharedMemory,
        Self::User,
        Self::Privileged,
        Self::RegistryAuth,
        Self::Python,
        Self::DefaultImage,
        Self::UtilizationPolicy,
        Self::Ports,
    ];

    /// Returns all obstacles of a job.
    pub fn find_all(spec: &JobSpec, is_dev_environment: bool) -> Vec<Self> {
        let mut found = Self::ALL.to_vec();
        found.retain(|one| one.applies(spec, is_dev_environment));
        found
    }

    fn applies(self, spec: &JobSpec, is_dev_environment: bool) -> bool {
        // A new field does not compile until it is an obstacle, or the container gets it (`container_request`).
        let JobSpec {
            jobs_per_replica,
            service_port,
            volumes,
            repo_data,
            user,
            privileged,
            registry_auth,
            python,
            default_image_from,
            image_name,
            utilization_policy,
            app_specs,
            requirements,
            // The container gets these.
            replica_num: _,
            job_num: _,
            job_name: _,
            commands: _,
            env: _,
            max_duration: _,
            stop_duration: _,
            working_dir: _,
            repo_dir: _,
            repo_exists_action: _,
            repo_code_hash: _,
            file_archives: _,
            // Part of others: of a default image, a repository, several nodes or a service.
            default_image: _,
            single_branch: _,
            ssh_key: _,
            probes: _,
            // The node determines it.
            home_dir: _,
            // Decided by the server and its pipelines.
            replica_group: _,
            node_group_index: _,
            node_group_name: _,
            node_group_job_index: _,
            image_architectures: _,
            retry: _,
        } = spec;
        let ResourcesSpec { disk, shm_size, cpu: _, memory: _, gpu: _ } = &requirements.resources;
        let is_default = *default_image_from == Some(DefaultImageSource::Run);
        match self {
            Self::SeveralNodes => *jobs_per_replica > 1,
            Self::Service => service_port.is_some(),
            Self::DevEnvironment => is_dev_environment,
            Self::Volumes => volumes.as_ref().is_some_and(|volumes| !volumes.is_empty()),
            Self::Repository => repo_data.as_ref().is_some_and(|data| data["repo_type"] == "remote"),
            Self::DiskLimit => disk.as_ref().is_some_and(|disk| disk.size.max.is_some()),
            // A configuration without a size has the default one.
            Self::DiskSize => {
                let min = |disk: &Option<DiskSpec>| disk.as_ref().and_then(|disk| disk.size.min);
                min(disk).is_some() && min(disk) != min(&ResourcesSpec::default().disk)
            }
            Self::SharedMemory => shm_size.is_some(),
            Self::User => user.is_some(),
            Self::Privileged => *privileged,
            Self::RegistryAuth => registry_auth.is_some(),
            Self::Python => python.is_some(),
            Self::DefaultImage => is_default && image_name.is_empty(),
            Self::UtilizationPolicy => utilization_policy.is_some(),
            Self::Ports => !is_dev_environment && !app_specs.is_empty(),
        }
    }

    pub const fn as_str(self) -> &'static str {
        match self {
            Self::SeveralNodes => "several nodes",
            Self::Service => "a service",
            Self::DevEnvironment => "a dev environment",
            Self::Volumes => "a job with volumes",
            Self::Repository => "a job with a repository",
            Self::DiskLimit => "a job with a disk limit",
            Self::DiskSize => "a job with a disk size, which its nodes do not report",
            Self::SharedMemory => "a job with `shm_size`",
            Self::User => "a job with a `user`",
            Self::Privileged => "a privileged job",
            Self::RegistryAuth => "a job with `registry_auth`",
            Self::Python => "a job with `python`",
            Self::DefaultImage => "a job with a `default_image`",
            Self::UtilizationPolicy => "a job with a `utilization_policy`",
            Self::Ports => "a job with `ports`",
        }
    }

    /// Returns what would make the job fit.
    pub const fn cure(self) -> &'static str {
        match self {
            Self::SeveralNodes | Self::Service | Self::DevEnvironment => "use a fleet of hosts",
            Self::Volumes => "use a file system that the nodes of the cluster share",
            Self::Repository => "clone it in `commands`, or send files with `files`",
            Self::DiskLimit => "remove the upper end of `disk`, such as `disk: 100GB..`",
            Self::DiskSize => "remove `disk`",
            Self::SharedMemory => "remove `shm_size`, or use a fleet of hosts",
            Self::User => "remove `user`: the node determines it",
            Self::Privileged => "remove `privileged` and `docker`, or use a fleet of hosts",
            Self::RegistryAuth => "log the engine of the nodes in to the registry",
            Self::Python => "set `image` to one with Python, or remove `python`",
            Self::DefaultImage => "set `image` instead",
            Self::UtilizationPolicy => "remove `utilization_policy`, or use a fleet of hosts",
            Self::Ports => "remove `ports`, or use a fleet of hosts",
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn found(more: &Value) -> Vec<SlurmObstacle> {
        let mut spec = json!({
            "job_num": 0, "job_name": "train-0-0", "commands": [], "env": {}, "image_name": "",
            "requirements": {"resources": {"disk": {"size": {"min": 100.0}}}},
        });
        spec.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        SlurmObstacle::find_all(&serde_json::from_value(spec).unwrap(), false)
    }

    #[test]
    fn every_property_that_slurm_would_ignore_is_an_obstacle() {
        use SlurmObstacle as O;
        assert!(found(&json!({})).is_empty(), "a plain job has none");
        let resources = |more: Value| json!({"requirements": {"resources": more}});
        for (more, want) in [
            (json!({"jobs_per_replica": 2}), O::SeveralNodes),
            (json!({"service_port": 80}), O::Service),
            (json!({"volumes": [{"name": "data", "path": "/data"}]}), O::Volumes),
            (json!({"repo_data": {"repo_type": "remote"}}), O::Repository),
            (resources(json!({"disk": {"size": {"min": 100.0, "max": 200.0}}})), O::DiskLimit),
            (resources(json!({"disk": {"size": {"min": 500.0}}})), O::DiskSize),
            (resources(json!({"shm_size": 2.0})), O::SharedMemory),
            (json!({"user": {"username": "ada"}}), O::User),
            (json!({"privileged": true}), O::Privileged),
            (json!({"registry_auth": {"username": "a", "password": "b"}}), O::RegistryAuth),
            (json!({"python": "3.12"}), O::Python),
            (json!({"default_image": "debian:12", "default_image_from": "run"}), O::DefaultImage),
            (
                json!({"utilization_policy": {"min_gpu_utilization": 10, "time_window": 3600}}),
                O::UtilizationPolicy,
            ),
            (json!({"app_specs": [{"port": 8080, "app_name": "app_0"}]}), O::Ports),
        ] {
            assert_eq!(found(&more), [want], "{more}");
        }
        let both = json!({"privileged": true, "python": "3.12"});
        assert_eq!(found(&both), [O::Privileged, O::Python], "all are listed");
        let server = json!({"default_image": "debian:12", "default_image_from": "server"});
        assert!(found(&server).is_empty(), "the default of the server is not a setting of the job");
    }

    #[test]
    fn a_dev_environment_is_refused_as_such_and_not_for_its_ports() {
        let spec = json!({
            "job_num": 0, "job_name": "dev-0-0", "commands": [], "env": {}, "image_name": "",
            "requirements": {"resources": {}}, "app_specs": [{"port": 8080, "app_name": "app_0"}],
        });
        let spec = serde_json::from_value(spec).unwrap();
        assert_eq!(SlurmObstacle::find_all(&spec, true), [SlurmObstacle::DevEnvironment]);
    }
}
