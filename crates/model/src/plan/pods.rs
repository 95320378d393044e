//! Properties of jobs that a pod of a Kubernetes cluster does not support.

use crate::{config::job_spec::JobSpec, resources::ResourcesSpec};

/// Property of a job that would have no effect in a pod. A job with one of them is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PodObstacle {
    Volumes,
    /// The settings of the backend allow it.
    Privileged,
    /// The first process of the pod is the agent, and the image's own command is not known.
    ImageCommand,
    /// Nothing measures the disk usage of a pod from inside.
    DiskLimit,
}

impl PodObstacle {
    pub const ALL: [Self; 4] = [Self::Volumes, Self::Privileged, Self::ImageCommand, Self::DiskLimit];

    /// Returns all obstacles of a job.
    pub fn find_all(spec: &JobSpec) -> Vec<Self> {
        let mut found = Self::ALL.to_vec();
        found.retain(|one| one.applies(spec));
        found
    }

    fn applies(self, spec: &JobSpec) -> bool {
        // A new field does not compile until it is an obstacle, or the pod or the agent in it gets it.
        let JobSpec {
            volumes,
            privileged,
            commands,
            requirements,
            // The pod gets these (`pod_request`).
            image_name: _,
            default_image: _,
            default_image_from: _,
            image_architectures: _,
            registry_auth: _,
            // The agent gets these (`task_spec` and `runner_start`).
            replica_num: _,
            job_num: _,
            job_name: _,
            jobs_per_replica: _,
            app_specs: _,
            user: _,
            env: _,
            home_dir: _,
            python: _,
            single_branch: _,
            max_duration: _,
            stop_duration: _,
            ssh_key: _,
            working_dir: _,
            repo_dir: _,
            repo_exists_action: _,
            repo_data: _,
            repo_code_hash: _,
            file_archives: _,
            service_port: _,
            // Decided by the server and its pipelines.
            replica_group: _,
            node_group_index: _,
            node_group_name: _,
            node_group_job_index: _,
            utilization_policy: _,
            retry: _,
            probes: _,
        } = spec;
        let ResourcesSpec { disk, shm_size: _, cpu: _, memory: _, gpu: _ } = &requirements.resources;
        match self {
            Self::Volumes => volumes.as_ref().is_some_and(|volumes| !volumes.is_empty()),
            Self::Privileged => *privileged,
            Self::ImageCommand => commands.is_empty(),
            Self::DiskLimit => disk.as_ref().is_some_and(|disk| disk.size.max.is_some()),
        }
    }

    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Volumes => "a job with volumes",
            Self::Privileged => "a privileged job",
            Self::ImageCommand => "the command of an image",
            Self::DiskLimit => "a job with a disk limit",
        }
    }

    /// Returns what would make the job fit.
    pub const fn cure(self) -> &'static str {
        match self {
            Self::Volumes => "remove `volumes`, or use a fleet of hosts",
            Self::Privileged => {
                "remove `privileged` and `docker`, or set `privileged: true` for the backend in `config.yml`"
            }
            Self::ImageCommand => "set `commands`",
            Self::DiskLimit => "remove the upper end of `disk`, such as `disk: 100GB..`",
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn found(more: &Value) -> Vec<PodObstacle> {
        let mut spec = json!({
            "job_num": 0, "job_name": "train-0-0", "commands": ["/bin/sh", "-c", "true"], "env": {},
            "image_name": "debian:13", "requirements": {"resources": {"disk": {"size": {"min": 100.0}}}},
        });
        spec.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        PodObstacle::find_all(&serde_json::from_value(spec).unwrap())
    }

    #[test]
    fn every_property_that_a_pod_would_ignore_is_an_obstacle() {
        use PodObstacle as O;
        assert!(found(&json!({})).is_empty(), "a plain job has none");
        for (more, want) in [
            (json!({"volumes": [{"name": "data", "path": "/data"}]}), O::Volumes),
            (json!({"volumes": [{"instance_path": "/a", "path": "/data"}]}), O::Volumes),
            (json!({"privileged": true}), O::Privileged),
            (json!({"commands": []}), O::ImageCommand),
            (
                json!({"requirements": {"resources": {"disk": {"size": {"min": 100.0, "max": 200.0}}}}}),
                O::DiskLimit,
            ),
        ] {
            assert_eq!(found(&more), [want], "{more}");
        }
        let both = json!({"privileged": true, "commands": []});
        assert_eq!(found(&both), [O::Privileged, O::ImageCommand], "all are listed");
    }
}
