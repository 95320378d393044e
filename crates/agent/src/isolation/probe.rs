//! Probe of a host's support for confinement, in a process that exits afterwards.

use std::{io::Write as _, path::Path, process::ExitCode};

use rustix::process::{WaitOptions, waitpid};
use windlass_api::agent::shim::{ConfinementMethod, ProcessMode, ProcessesInfo};

use super::namespaces::{ForkSide, fork_into_namespaces, try_confinement};
use crate::{
    cgroup::{Hierarchies, cloud_metadata},
    runner::job::error_chain,
};

/// Describes how plain processes run on this host.
pub fn probe(agent: &Path, mode: ProcessMode) -> ProcessesInfo {
    match detect_confinement(agent) {
        Ok(by) => ProcessesInfo { mode, confined_by: Some(by), problem: missing_protection(by) },
        Err(problem) => ProcessesInfo { mode, confined_by: None, problem: Some(problem) },
    }
}

/// Starts the agent's binary as a child that tries confinement; it must have one thread, and this process has several.
pub fn detect_confinement(agent: &Path) -> Result<ConfinementMethod, String> {
    let tried = std::process::Command::new(agent).args(["child", "try-confinement"]).output();
    let tried = tried.map_err(|error| format!("failed to test confinement: {error}"))?;
    if tried.status.success() {
        let is_root = rustix::process::geteuid().is_root();
        return Ok(if is_root { ConfinementMethod::Users } else { ConfinementMethod::Namespaces });
    }
    let message = String::from_utf8_lossy(&tried.stderr).trim().to_owned();
    Err(if message.is_empty() { format!("failed to test confinement: {}", tried.status) } else { message })
}

/// Returns the protection that is missing although processes are confined.
fn missing_protection(by: ConfinementMethod) -> Option<String> {
    let missing = match by {
        ConfinementMethod::Namespaces => {
            return Some(
                "jobs run as the agent's user and can reach the cloud's metadata address: run the agent as \
                 root to give them separate users"
                    .to_owned(),
            );
        }
        ConfinementMethod::Users => match Hierarchies::mounted() {
            Ok(Hierarchies { v2: Some(_), .. }) => cloud_metadata::check_supported().err()?,
            Ok(_) => std::io::Error::other("control groups v2 are not mounted"),
            Err(error) => error,
        },
    };
    Some(format!("jobs can reach the cloud's metadata address: {missing}"))
}

/// `windlass-agent child try-confinement`: prints to standard error what does not work.
pub fn main() -> ExitCode {
    let is_root = rustix::process::geteuid().is_root();
    match fork_into_namespaces(!is_root) {
        Ok(ForkSide::Inner) => report_result(try_confinement(is_root).map_err(|error| error_chain(&error))),
        Ok(ForkSide::Outer(pid)) => match waitpid(Some(pid), WaitOptions::empty()) {
            Ok(Some((_, status))) if status.exit_status() == Some(0) => ExitCode::SUCCESS,
            Ok(_) | Err(_) => ExitCode::FAILURE,
        },
        Err(error) if is_root => report_result(Err(format!("failed to create namespaces: {error}"))),
        Err(error) => report_result(Err(format!(
            "failed to create a user namespace: {error} (allow it on this host, or run the agent as root)"
        ))),
    }
}

fn report_result(tried: Result<(), String>) -> ExitCode {
    match tried {
        Ok(()) => ExitCode::SUCCESS,
        Err(why) => {
            let _ = writeln!(std::io::stderr(), "{why}");
            ExitCode::FAILURE
        }
    }
}
