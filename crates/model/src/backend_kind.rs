//! Capabilities of backends. Code asks for a capability, and never compares the name of a backend.

pub use crate::config::profile::BackendType;
use crate::time::Span;

/// Origin of the instances of a backend.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BackendKind {
    /// The machine that the server runs on.
    ServerMachine,
    /// Hosts of users, over SSH.
    UserHosts,
    /// Clusters behind dispatchers: jobs become containers of the queue.
    Queue,
    /// Pods, each made for one job.
    Pods,
    /// Machines that are created and deleted.
    Cloud,
}

impl BackendKind {
    /// Returns the kind of a configured or stored backend.
    pub fn of(name: &str) -> Self {
        BackendType::parse(name).map_or(Self::Cloud, BackendType::kind)
    }

    /// Returns whether instances are created for jobs, in a region of the backend.
    pub const fn is_rented(self) -> bool {
        match self {
            Self::ServerMachine | Self::UserHosts | Self::Queue => false,
            Self::Pods | Self::Cloud => true,
        }
    }

    /// Returns whether each instance is a separate location, which exists also without jobs.
    pub const fn has_permanent_instances(self) -> bool {
        match self {
            Self::ServerMachine | Self::UserHosts => true,
            Self::Queue | Self::Pods | Self::Cloud => false,
        }
    }

    /// Returns whether a larger instance costs no more. Then a job may use a part of it: only lower bounds count. Rented
    /// machines that are larger than requested do not match.
    pub const fn can_be_larger(self) -> bool {
        match self {
            Self::ServerMachine | Self::UserHosts | Self::Queue | Self::Pods => true,
            Self::Cloud => false,
        }
    }

    /// Returns whether the defaults of requests apply. They are meant for a choice among many instances: on the machine of
    /// the server a first job would not start if it is small, and so it is for pods.
    pub const fn uses_default_resources(self) -> bool {
        match self {
            Self::ServerMachine | Self::Pods => false,
            Self::UserHosts | Self::Queue | Self::Cloud => true,
        }
    }

    /// Returns whether a global admin must grant it to a project. Hosts of SSH fleets are part of their fleet: adding them
    /// is a right of members.
    pub const fn needs_grant(self) -> bool {
        match self {
            Self::UserHosts => false,
            Self::ServerMachine | Self::Queue | Self::Pods | Self::Cloud => true,
        }
    }
}

const PROVISIONING_TIMEOUT: Span = Span::mins(10);

impl BackendType {
    pub const fn kind(self) -> BackendKind {
        match self {
            Self::Local => BackendKind::ServerMachine,
            Self::Remote => BackendKind::UserHosts,
            Self::Slurm => BackendKind::Queue,
            Self::Kubernetes => BackendKind::Pods,
            Self::AmdDevCloud
            | Self::Aws
            | Self::Azure
            | Self::CloudRift
            | Self::Crusoe
            | Self::Cudo
            | Self::DataCrunch
            | Self::Daytona
            | Self::DigitalOcean
            | Self::Dstack
            | Self::Gcp
            | Self::HotAisle
            | Self::JarvisLabs
            | Self::Lambda
            | Self::Lium
            | Self::Lxd
            | Self::Mock
            | Self::Nebius
            | Self::Oci
            | Self::Runpod
            | Self::Seeweb
            | Self::TensorDock
            | Self::VastAi
            | Self::Verda
            | Self::Vultr => BackendKind::Cloud,
        }
    }

    /// Type that clients of dstack know: they reject a response with any other.
    #[must_use]
    pub const fn client_type(self) -> Self {
        if matches!(self, Self::Local | Self::Lxd | Self::Mock) { Self::Remote } else { self }
    }

    /// Returns whether a disk is attached to one instance at a time; for the others only the backend itself knows.
    pub const fn attaches_to_one_instance(self) -> bool {
        matches!(self, Self::Aws | Self::Gcp | Self::Lxd | Self::Mock)
    }

    /// Returns the time from the request until an instance must respond; some backends are slow.
    #[expect(clippy::wildcard_enum_match_arm, reason = "most backends need no more time than others")]
    pub fn provisioning_timeout(self, instance_type: &str) -> Span {
        match self {
            Self::Runpod | Self::Kubernetes | Self::Slurm | Self::Daytona | Self::Seeweb => Span::mins(20),
            Self::Oci if instance_type.starts_with("BM.") => Span::mins(20),
            Self::Lambda | Self::CloudRift => Span::mins(30),
            Self::Vultr if instance_type.starts_with("vbm") => Span::mins(55),
            Self::Gcp if instance_type == "a4-highgpu-8g" => Span::mins(16),
            _ => PROVISIONING_TIMEOUT,
        }
    }
}

/// Returns the time from the request until an instance of this backend must respond.
pub fn provisioning_timeout(backend: &str, instance_type: &str) -> Span {
    BackendType::parse(backend)
        .map_or(PROVISIONING_TIMEOUT, |backend| backend.provisioning_timeout(instance_type))
}

/// Returns whether instances of this backend are the machine of the server.
pub fn is_server_machine(backend: &str) -> bool {
    BackendKind::of(backend) == BackendKind::ServerMachine
}

/// Name of a backend as clients of dstack see it.
pub fn client_name(backend: &str) -> &'static str {
    BackendType::parse(backend).map_or(BackendType::Remote, BackendType::client_type).as_str()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slow_backends_and_instance_types_have_more_time() {
        assert_eq!(provisioning_timeout("aws", "m5.large"), Span::mins(10));
        assert_eq!(provisioning_timeout("kubernetes", ""), Span::mins(20));
        assert_eq!(provisioning_timeout("lambda", ""), Span::mins(30));
        assert_eq!(provisioning_timeout("gcp", "a4-highgpu-8g"), Span::mins(16));
        assert_eq!(provisioning_timeout("a future one", ""), Span::mins(10));
    }

    #[test]
    fn clients_see_only_backends_that_they_know() {
        for own in ["local", "lxd", "mock", "a future one", ""] {
            assert_eq!(client_name(own), "remote");
        }
        assert_eq!((client_name("aws"), client_name("slurm")), ("aws", "slurm"));
    }

    #[test]
    fn a_name_without_a_type_is_that_of_a_cloud() {
        assert_eq!(BackendKind::of("a future one"), BackendKind::Cloud);
        assert_eq!(BackendKind::of("kubernetes"), BackendKind::Pods);
        assert!(BackendKind::of("kubernetes").is_rented() && !BackendKind::of("slurm").is_rented());
    }
}
