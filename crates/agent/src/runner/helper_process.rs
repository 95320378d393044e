//! Helper processes of the runner, to unpack or to clone: they run as the job's user, cannot gain privileges, and are
//! never left behind.

use std::{
    io,
    os::unix::process::CommandExt as _,
    process::{ExitStatus, Stdio},
    time::Duration,
};

use nix::{
    sys::signal::{Signal, killpg},
    unistd::{Gid, Pid, Uid, setgroups, setresgid, setresuid},
};
use tokio::{
    io::{AsyncRead, AsyncReadExt as _},
    process::{Child, Command},
};

use super::{user::Account, user_context::UserContext};
use crate::isolation::{probe, restrict::Restrictions, user_map::can_set_groups};

/// Subcommands of the agent's binary that are started as children.
#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(subcommand)]
    part: HelperCommand,
}

#[derive(Debug, clap::Subcommand)]
enum HelperCommand {
    /// Unpack the archive on standard input into the current directory
    Unpack(super::unpack::subprocess::Args),
    /// Answer git's request for a credential
    GitCredential(super::repo::credential::Args),
    /// Run a command on a host, as git requests it from an SSH client
    GitSsh(super::repo::ssh::Args),
    /// Check whether this host can confine plain processes
    TryConfinement,
    /// Unpack the layer of an image on standard input into the current directory
    UnpackLayer(crate::image::layer::subprocess::Args),
    /// Start a container, wait for its end and record it
    ContainerMonitor(crate::shim::oci::monitor::Args),
    /// Run a container to its end
    RunContainer(crate::shim::oci::foreground::Args),
    /// Be the first process of a container: run a program and reap orphans
    ContainerInit(crate::shim::oci::foreground::InitArgs),
    /// Check whether this user can run containers with their files in a directory
    TryRootless(crate::shim::oci::rootless::Args),
    /// Remove a directory with files of subordinate ids
    RemoveTree(crate::isolation::user_map::RemoveTreeArgs),
}

pub fn main(args: &Args) -> std::process::ExitCode {
    match &args.part {
        HelperCommand::Unpack(args) => super::unpack::subprocess::main(args),
        HelperCommand::GitCredential(args) => super::repo::credential::main(args),
        HelperCommand::GitSsh(args) => super::repo::ssh::main(args),
        HelperCommand::TryConfinement => probe::main(),
        HelperCommand::UnpackLayer(args) => crate::image::layer::subprocess::main(args),
        HelperCommand::ContainerMonitor(args) => crate::shim::oci::monitor::main(args),
        HelperCommand::RunContainer(args) => crate::shim::oci::foreground::main(args),
        HelperCommand::ContainerInit(args) => crate::shim::oci::foreground::init_main(args),
        HelperCommand::TryRootless(args) => crate::shim::oci::rootless::main(args),
        HelperCommand::RemoveTree(args) => crate::isolation::user_map::remove_tree_main(args),
    }
}

/// Returns a command that starts as the job's user, in a separate process group.
pub(super) fn user_command(program: impl AsRef<std::ffi::OsStr>, account: &Account) -> Command {
    let mut command = std::process::Command::new(program);
    command.env_clear().process_group(0).stdin(Stdio::null());
    let switch = Uid::effective().is_root().then(|| {
        let groups: Vec<Gid> = account.groups.iter().copied().map(Gid::from_raw).collect();
        (Uid::from_raw(account.uid), Gid::from_raw(account.gid), groups)
    });
    let restrictions = Restrictions::for_children();
    let can_set_groups = can_set_groups();
    let lower = move || {
        if let Some((uid, gid, groups)) = &switch {
            restrictions.drop_capabilities()?;
            if can_set_groups {
                setgroups(groups)?;
            }
            setresgid(*gid, *gid, *gid)?;
            setresuid(*uid, *uid, *uid)?;
        }
        rustix::thread::set_no_new_privs(true)?;
        restrictions.seal()
    };
    #[expect(unsafe_code, reason = "the user of a child is set between fork and exec")]
    // SAFETY: the closure makes system calls only; it neither allocates nor acquires a lock.
    unsafe {
        command.pre_exec(lower);
    }
    let mut command = Command::from(command);
    command.kill_on_drop(true);
    command
}

/// Returns a command that starts the agent's binary as a child.
pub(super) fn agent_command(part: &str, site: &UserContext) -> Command {
    let mut command = user_command(&site.agent, &site.account);
    command.arg0("windlass-agent").args(["child", part]);
    command
}

/// A child and everything that it started: killed together when dropped.
pub(super) struct ProcessGroup {
    child: Child,
    id: Option<Pid>,
}

impl ProcessGroup {
    pub(super) fn spawn(command: &mut Command) -> io::Result<Self> {
        let child = command.spawn()?;
        let id = child.id().and_then(|id| i32::try_from(id).ok()).map(Pid::from_raw);
        Ok(Self { child, id })
    }

    pub(super) fn child(&mut self) -> &mut Child {
        &mut self.child
    }

    /// Waits for the exit; at the deadline the group is killed and `None` is returned.
    pub(super) async fn wait(&mut self, within: Duration) -> io::Result<Option<ExitStatus>> {
        let ended = tokio::time::timeout(within, self.child.wait()).await;
        // Also after a regular exit: processes that the child left in its group are killed.
        self.kill();
        match ended {
            Ok(status) => status.map(Some),
            Err(_) => self.child.wait().await.map(|_| None),
        }
    }

    /// Kills the group. Only once: later the id may belong to another group.
    fn kill(&mut self) {
        if let Some(id) = self.id.take() {
            let _ = killpg(id, Signal::SIGKILL);
        }
    }
}

impl Drop for ProcessGroup {
    fn drop(&mut self) {
        self.kill();
    }
}

/// Reads everything and returns the last `most` bytes.
pub(super) async fn read_tail(from: Option<impl AsyncRead + Unpin>, most: usize) -> Vec<u8> {
    let mut kept = Vec::new();
    let Some(mut from) = from else { return kept };
    let mut buffer = vec![0; 8192];
    while let Ok(count @ 1..) = from.read(&mut buffer).await {
        kept.extend_from_slice(&buffer[..count]);
        if kept.len() > 2 * most {
            kept.drain(..kept.len() - most);
        }
    }
    kept.drain(..kept.len().saturating_sub(most));
    kept
}
