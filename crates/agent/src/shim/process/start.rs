//! Start of a task: directories, groups, the gated init and its orders.

use std::{
    fs,
    io::{self, Read, Write},
    net::Shutdown,
    os::{
        fd::OwnedFd,
        unix::{
            fs::{DirBuilderExt, OpenOptionsExt, PermissionsExt},
            net::UnixStream,
            process::CommandExt,
        },
    },
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::Duration,
};

use windlass_api::agent::shim::ProcessIsolation;

use super::{
    Handle, OUTPUT_FILE, PreparedTask, RuntimeError, Shared, TaskDir,
    confinement::is_private_dir,
    environment, handle_for, is_plain_path, ports, runtime_error,
    state_file::{ProcessRecord, ignore_not_found},
};
use crate::{
    cgroup::{port_rewrite::rewrite_ports, task::TaskLimits},
    proc,
    runner::init::{BindRequest, GATE_VARIABLE, InitRequest, NEVER_STARTED_FILE, REQUEST_DONE},
    task_dir::{EXIT_RECORD, OWN_CONTAINER_VARIABLE, PORTS, TaskPorts},
};

/// Mounts and groups take milliseconds; a network file system may hang without limit.
const ORDERS_TIMEOUT: Duration = Duration::from_secs(30);
/// Search permission for group and others.
const SEARCH_BITS: u32 = 0o011;
/// The answer to orders is one sentence.
const ANSWER_BYTES_MAX: u64 = 4096;

/// Returns whether an init was started but the shim ended before it sent orders: nothing of the task ever ran.
pub(super) fn was_never_started(dir: &TaskDir) -> bool {
    dir.read_small_file(NEVER_STARTED_FILE).is_some() && dir.read_small_file(EXIT_RECORD).is_none()
}

fn refused_error(what: &str, why: impl Into<String>) -> RuntimeError {
    RuntimeError::Refused { what: what.to_owned(), why: why.into() }
}

impl Shared {
    pub(super) fn create(&self, task: &PreparedTask) -> Result<Handle, RuntimeError> {
        let is_confined = task.spec.process_isolation.is_confined();
        if !task.binds.is_empty() && !is_confined && !rustix::process::geteuid().is_root() {
            return Err(refused_error("cannot mount into the task", "root is required without an engine"));
        }
        if let Some(odd) = task.binds.iter().find(|bind| !is_plain_path(Path::new(&bind.target))) {
            return Err(refused_error(
                "cannot mount into the task",
                format!("`{}` is not an absolute path without `..`", odd.target),
            ));
        }
        self.create_scratch(&task.dir, is_confined)
            .map_err(|error| runtime_error("failed to create the scratch directory", error))?;
        let record = ProcessRecord::load(&task.dir)
            .map_err(|error| runtime_error("cannot read the task's record", error))?;
        if record.is_none() {
            let boot = proc::boot_id().map_err(|error| runtime_error("failed to read the boot id", error))?;
            ProcessRecord::new(boot)
                .save(&task.dir)
                .map_err(|error| runtime_error("failed to write the task's record", error))?;
        }
        self.groups.make(&task.spec.id.to_string(), &cgroup_limits(task));
        Ok(handle_for(task.spec.id))
    }

    /// Starts the task unless that was done before.
    pub(super) fn start(&self, task: &PreparedTask) -> Result<(), RuntimeError> {
        let _one_at_a_time = self.starting.lock();
        let boot = proc::boot_id().map_err(|error| runtime_error("failed to read the boot id", error))?;
        let record = ProcessRecord::load(&task.dir)
            .map_err(|error| runtime_error("cannot read the task's record", error))?;
        let mut record = record.unwrap_or_else(|| ProcessRecord::new(boot.clone()));
        if record.process.is_some() {
            let alive = super::first_process(&task.dir)
                .map_err(|error| runtime_error("cannot find the process", error))?;
            if alive.is_some() || !was_never_started(&task.dir) {
                return Ok(());
            }
            ignore_not_found(fs::remove_file(task.dir.run().join(NEVER_STARTED_FILE)))
                .map_err(|error| runtime_error("failed to reset a failed start", error))?;
        }
        record.boot = boot;
        let orders = self.orders(task, &mut record)?;
        self.launch(task, &mut record, &orders)
    }

    /// Creates the scratch directory. The runner later assigns it to the user of the job, which is not known yet; that
    /// user must be able to traverse the parents. A confined task does not need that.
    fn create_scratch(&self, dir: &TaskDir, is_confined: bool) -> io::Result<()> {
        match fs::DirBuilder::new().recursive(true).mode(0o700).create(dir.scratch()) {
            Ok(()) if rustix::process::geteuid().is_root() && !is_confined => {}
            done => return done,
        }
        let above = [self.home.as_path(), &self.home.join("tasks"), dir.root()];
        above.into_iter().try_for_each(allow_search)
    }

    fn orders(&self, task: &PreparedTask, record: &mut ProcessRecord) -> Result<InitRequest, RuntimeError> {
        let (group, unenforced) = self.groups.make(&task.spec.id.to_string(), &cgroup_limits(task));
        for one in &unenforced {
            tracing::warn!(task = %task.spec.id, "{one}");
        }
        let mut notices: Vec<String> = unenforced.iter().map(ToString::to_string).collect();
        notices.extend(self.assign_ports(task, record, group.group.v2.as_deref())?);
        let confinement = match task.spec.process_isolation {
            ProcessIsolation::Confined => {
                Some(self.build_confinement(task, record, group.group.v2.as_deref())?)
            }
            ProcessIsolation::Own => None,
        };
        let confinement = confinement.map(|(confinement, gap)| {
            notices.extend(gap);
            confinement
        });
        let mut binds = Vec::new();
        for bind in &task.binds {
            let target = PathBuf::from(&bind.target);
            let is_hidden = confinement.as_ref().is_some_and(|task| is_private_dir(task, &target));
            // The private directories of the task are created in its namespaces.
            if !is_hidden {
                record.targets.push(target.clone());
                create_mount_point(&bind.source, &target, &mut record.made).map_err(|error| {
                    runtime_error(&format!("cannot create mount point {}", bind.target), error)
                })?;
            }
            binds.push(BindRequest { source: bind.source.clone(), target, read_only: bind.read_only });
        }
        Ok(InitRequest {
            job_group: group.create_job_subgroup(),
            // All hierarchies: those of version 1 limit, that of version 2 kills.
            enter: group.directories(),
            binds,
            notices,
            confinement,
        })
    }

    /// Chooses the task's ports on this host, once, and writes them for its runner. Returns notices for its program.
    fn assign_ports(
        &self,
        task: &PreparedTask,
        record: &mut ProcessRecord,
        group: Option<&Path>,
    ) -> Result<Vec<String>, RuntimeError> {
        if task.spec.app_ports.is_empty() {
            return Ok(Vec::new());
        }
        if record.ports.is_none() {
            let map =
                ports::choose_ports(&task.spec.app_ports, &ProcessRecord::other_ports(&self.home, &task.dir))
                    .map_err(|error| runtime_error("failed to find free ports", error))?;
            let rewritten = match group {
                Some(group) => rewrite_ports(group, &map),
                None => Err(io::Error::new(io::ErrorKind::Unsupported, "cgroup v2 is not available")),
            };
            if let Err(error) = &rewritten {
                tracing::debug!(%error, task = %task.spec.id, "failed to rewrite the ports of a task");
            }
            record.ports = Some(TaskPorts { map, is_rewritten: rewritten.is_ok() });
        }
        let Some(given) = &record.ports else { return Ok(Vec::new()) };
        let written = serde_json::to_vec(given).map_err(io::Error::from);
        let written = written.and_then(|text| fs::write(task.dir.run().join(PORTS), text));
        written.map_err(|error| runtime_error("failed to write the task's ports", error))?;
        let moved = given.map.iter().filter(|(from, to)| !given.is_rewritten && from != to);
        let notice = |(from, to): (&u16, &u16)| {
            format!("port {from} of this host is in use: listen on port {to}, the value of `PORT`")
        };
        Ok(moved.map(notice).collect())
    }

    fn launch(
        &self,
        task: &PreparedTask,
        record: &mut ProcessRecord,
        orders: &InitRequest,
    ) -> Result<(), RuntimeError> {
        let cannot = |error| runtime_error("failed to start the task's first process", error);
        let (ours, theirs) = UnixStream::pair().map_err(cannot)?;
        let mut child = self.command(task, theirs).and_then(|mut command| command.spawn()).map_err(cannot)?;
        // The child is not reaped yet, so its pid cannot be reused.
        let stat = i32::try_from(child.id()).map_err(io::Error::other).and_then(proc::stat);
        record.process = stat.map_err(cannot)?.map(|stat| stat.name);
        if let Err(error) = record.save(&task.dir) {
            // No orders were sent: closing the gate ends it.
            drop(ours);
            let _ = child.wait();
            return Err(runtime_error("failed to write the task's record", error));
        }
        let answer = send_orders(ours, orders)
            .map_err(|error| runtime_error("failed to set up the task's first process", error))?;
        if answer != REQUEST_DONE {
            let _ = child.wait();
            let why = if answer.is_empty() { "it ended without a response".to_owned() } else { answer };
            return Err(refused_error("failed to start the task's first process", why));
        }
        Ok(())
    }

    fn command(&self, task: &PreparedTask, gate: UnixStream) -> io::Result<Command> {
        let output = fs::OpenOptions::new()
            .append(true)
            .create(true)
            .mode(0o600)
            .open(task.dir.root().join(OUTPUT_FILE))?;
        let home =
            std::env::var_os("HOME").or_else(|| Some("/root".into())).filter(|home| Path::new(home).is_dir());
        let marks = environment::task_marks(&self.home_id, task.spec.id);
        let mut command = Command::new(&self.agent);
        command
            .arg0("windlass-agent")
            .args(["runner", "--dir"])
            .arg(task.dir.run())
            .env(GATE_VARIABLE, "1")
            .stdin(Stdio::from(OwnedFd::from(gate)))
            .stderr(Stdio::from(output.try_clone()?))
            .stdout(Stdio::from(output));
        if self.in_own_container {
            // Variables and devices of the image and of the pod are meant for the job.
            command.envs(task.env.iter().cloned()).envs(marks).env(OWN_CONTAINER_VARIABLE, "1");
            return Ok(command);
        }
        let variables = environment::variables(home, &task.env, &marks, &task.gpus);
        command.env_clear().envs(variables).env(GATE_VARIABLE, "1").current_dir(task.dir.scratch());
        Ok(command)
    }
}

/// Lets other users traverse the directory, but not list it.
fn allow_search(dir: &Path) -> io::Result<()> {
    let mode = fs::metadata(dir)?.permissions().mode() & 0o7777;
    let wanted = mode & 0o7770 | SEARCH_BITS;
    if mode == wanted {
        return Ok(());
    }
    fs::set_permissions(dir, fs::Permissions::from_mode(wanted))
}

fn cgroup_limits(task: &PreparedTask) -> TaskLimits {
    let positive = |number: i64| u64::try_from(number).ok().filter(|&number| number > 0);
    let requested = positive(task.spec.pids);
    let granted = positive(task.limits.pids);
    TaskLimits {
        cpu: Some(task.spec.cpu).filter(|&cores| cores > 0.0),
        memory: positive(task.spec.memory),
        // The request may lower the granted limit, never raise it.
        pids: requested
            .map_or(granted, |requested| Some(granted.map_or(requested, |granted| requested.min(granted)))),
    }
}

fn send_orders(mut gate: UnixStream, orders: &InitRequest) -> io::Result<String> {
    gate.set_read_timeout(Some(ORDERS_TIMEOUT))?;
    gate.write_all(&serde_json::to_vec(orders)?)?;
    gate.shutdown(Shutdown::Write)?;
    let mut answer = String::new();
    gate.take(ANSWER_BYTES_MAX).read_to_string(&mut answer)?;
    Ok(answer)
}

/// Creates a mount point of the source's kind and records the directories that were created for it.
fn create_mount_point(source: &Path, target: &Path, made: &mut Vec<PathBuf>) -> io::Result<()> {
    if target.symlink_metadata().is_ok() {
        return Ok(());
    }
    let missing: Vec<&Path> =
        target.ancestors().take_while(|above| above.symlink_metadata().is_err()).collect();
    let source_is_directory = source.metadata()?.is_dir();
    for path in missing.into_iter().rev() {
        if path == target && !source_is_directory {
            fs::OpenOptions::new().write(true).create_new(true).open(path)?;
        } else {
            ignore_exists(fs::create_dir(path))?;
        }
        made.push(path.to_owned());
    }
    Ok(())
}

/// Another task may create the same mount point at the same time.
fn ignore_exists(result: io::Result<()>) -> io::Result<()> {
    match result {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
        other => other,
    }
}
