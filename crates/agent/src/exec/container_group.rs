//! Parent control group of the container of an attempt. It blocks the cloud's metadata address for the container, also on
//! the host's network, before the container exists.
//!
//! The engine creates the container's own group below it. An engine that leaves groups to systemd accepts no such parent.

use std::{io, path::PathBuf};

use super::{guard::attempt_groups, image::Engine};
use crate::{
    cgroup::{
        cloud_metadata,
        task::{TaskGroup, TaskLimits, create_in_all_hierarchies, remove_from_all_hierarchies},
    },
    shim::oci::attempt::CONTAINER_GROUP,
};

/// Parent of all control groups of executors.
pub(super) const CGROUP_HOME: &str = "exec";

/// Name of the network without separation, as engines name it.
const HOST_NETWORK: &str = "host";

/// Name of the group, beside that of the attempt: a group with processes cannot have groups with limits below it.
fn group_name(attempt: &str) -> String {
    format!("{attempt}.container")
}

/// Path of the group, from the root of each hierarchy.
pub(super) fn path(attempt: &str) -> String {
    format!("/windlass/{CGROUP_HOME}/{}", group_name(attempt))
}

/// Finds the group of a container without an engine, which its OCI runtime creates below.
pub(super) fn find_container(attempt: &str) -> io::Result<TaskGroup> {
    Ok(attempt_groups()?.find(&format!("{}/{CONTAINER_GROUP}", group_name(attempt))))
}

/// Blocks the cloud's metadata address for the processes of an attempt that runs without an engine.
pub(super) fn block_metadata(group: &TaskGroup) {
    if !rustix::process::geteuid().is_root() {
        return;
    }
    let missing = || Err(io::Error::other("control groups v2 are not available"));
    if let Err(error) = group.group.v2.as_deref().map_or_else(missing, cloud_metadata::block) {
        report("program", &error);
    }
}

/// Creates the group for the container of an engine and returns its path for the engine.
pub(super) async fn create_for(engine: Engine, attempt: &str, network: &str) -> Option<String> {
    if matches!(engine, Engine::Apptainer(_)) {
        return None;
    }
    let created = create(engine, attempt).await;
    // On the bridge, there are firewall rules as well.
    if let (Err(error), HOST_NETWORK) = (&created, network) {
        report("container", error);
    }
    created.ok()
}

fn report(what: &str, error: &io::Error) {
    super::print_message(&format!("failed to block the cloud's metadata address for the {what}: {error}"));
}

async fn create(engine: Engine, attempt: &str) -> io::Result<String> {
    if !rustix::process::geteuid().is_root() {
        return Err(io::Error::other("it requires root"));
    }
    if !engine.creates_control_groups().await {
        return Err(io::Error::other("the engine leaves control groups to systemd"));
    }
    let name = group_name(attempt);
    create_in_all_hierarchies(CGROUP_HOME, &name);
    let (group, _) = attempt_groups()?.make(&name, &TaskLimits::default());
    let path = PathBuf::from(path(attempt));
    let blocked = match &group.group.v2 {
        // The engine's path starts at the root of the hierarchy.
        Some(v2) if v2.ends_with(path.strip_prefix("/").unwrap_or(&path)) => cloud_metadata::block(v2),
        Some(_) | None => Err(io::Error::other("control groups v2 are not available")),
    };
    if let Err(error) = blocked {
        remove(attempt);
        return Err(error);
    }
    Ok(path.display().to_string())
}

/// Removes the group, after the container. Blocks for a moment if the kernel lags.
pub(super) fn remove(attempt: &str) {
    remove_from_all_hierarchies(CGROUP_HOME, &group_name(attempt));
}
