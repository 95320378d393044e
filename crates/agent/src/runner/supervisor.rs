//! Supervision of a job: preparing, running and ending it.

use std::{
    fs::File,
    io::Write,
    path::{Path, PathBuf},
    process::ExitStatus,
    sync::Arc,
    time::Duration,
};

use rustix::process::Signal;
use tokio::time::{Instant, sleep, sleep_until, timeout};
use windlass_api::agent::runner::RepoData;
use windlass_model::skypilot::Phase;

use super::{
    env, files,
    job::{Job, Plan, StopSignal, error_chain},
    job_end::EndCause,
    launch::{self, ExecError},
    node_access::{self, NodeAccess},
    output_pump::{OutputError, OutputPump},
    phase_file,
    process_tree::ProcessTree,
    python, repo,
    steps::Step,
    user::{create_dir_as, run_as_account},
};
use crate::{cgroup, proc, safe_open::LandlockStatus, spool::Stream};

/// Default time between the stop signal and the kill.
const GRACE: Duration = Duration::from_secs(10);
/// Maximum grace period.
const GRACE_MAX: Duration = Duration::from_secs(24 * 3600);
/// Time for which processes that the commands left in the background may continue to print.
const BACKGROUND_GRACE: Duration = Duration::from_secs(1);
/// Time to wait after a kill. The pipe closes at once, unless a process that cannot be killed holds it.
const KILL_TIMEOUT: Duration = Duration::from_secs(2);
const POLL_INTERVAL: Duration = Duration::from_millis(50);
/// Flag of an interactive shell, which ignores the stop signal; only the processes that it started react to it.
const INTERACTIVE_FLAG: &str = "-i";
/// Ctrl-D.
const END_OF_INPUT: &[u8] = b"\x04";
const PROFILE_DIR: &str = "/etc/profile.d";
const PROFILE: &str = "/etc/profile.d/windlass_job.sh";

/// Files that were created for the job and are removed after it.
#[derive(Debug, Default)]
struct InstalledFiles {
    access: Option<NodeAccess>,
    files: Vec<PathBuf>,
}

impl InstalledFiles {
    fn remove(self) {
        if let Some(access) = self.access
            && let Err(error) = access.remove()
        {
            tracing::warn!(%error, "failed to remove the key for other nodes");
        }
        for file in self.files {
            if let Err(error) = std::fs::remove_file(&file) {
                tracing::warn!(%error, file = %file.display(), "failed to remove a file of the job");
            }
        }
    }
}

/// Supervises the job and records its end in every case.
pub fn start(job: &Arc<Job>, plan: Box<Plan>) {
    let supervised = tokio::spawn(supervise(Arc::clone(job), plan));
    let job = Arc::clone(job);
    tokio::spawn(async move {
        if let Err(error) = supervised.await {
            // A panic must not leave a runner that waits without limit; processes that still run end with it.
            tracing::error!(%error, "job supervision failed");
            let why = "the runner failed".to_owned();
            job.end(EndCause::NotStarted { reason: "executor_error", why }, None, false);
        }
    });
}

async fn supervise(job: Arc<Job>, plan: Box<Plan>) {
    let kills_before = oom_kills();
    let mut traces = InstalledFiles::default();
    let outcome = match prepare(&job, &plan, &mut traces).await {
        Ok(()) => {
            let watch = tokio::spawn(report_ready(Arc::clone(&job), plan.phase.clone(), plan.gate.is_some()));
            let outcome = run_commands(&job, &plan).await;
            // No state may follow the end.
            watch.abort();
            let _ = watch.await;
            outcome
        }
        Err(cause) => Err(cause),
    };
    traces.remove();
    let outcome = outcome.map(|(cause, exit)| (refine_cause(cause, exit, plan.phase.as_deref()), exit));
    let oom = oom_kills() > kills_before;
    match outcome {
        Ok((cause, exit)) => job.end(cause, Some(exit), oom),
        Err(cause) => job.end(cause, None, oom),
    }
}

/// Reports that the job is prepared, if its nodes wait for each other.
async fn report_ready(job: Arc<Job>, phase: Option<PathBuf>, waits: bool) {
    let Some(phase) = phase.filter(|_| waits) else { return };
    while !phase_file::is_in_phase(&phase, Phase::Ready) {
        sleep(POLL_INTERVAL).await;
    }
    job.states.ready();
}

/// Returns the cause of the end, which is `SetupFailed` if the phase file shows that the program had not started.
fn refine_cause(cause: EndCause, exit: ExitStatus, phase: Option<&Path>) -> EndCause {
    let is_setup = || !exit.success() && phase.is_some_and(phase_file::is_in_setup);
    if matches!(cause, EndCause::Exited) && is_setup() { EndCause::SetupFailed } else { cause }
}

fn oom_kills() -> u64 {
    cgroup::Group::own().map(|group| group.oom_kills()).unwrap_or_default()
}

/// Prepares everything that the commands need. A stop cancels it at once.
async fn prepare(job: &Job, plan: &Plan, traces: &mut InstalledFiles) -> Result<(), EndCause> {
    let result = tokio::select! {
        biased;
        halt = job.wait_for_stop() => Err(stop_cause(halt)),
        result = install_inputs(job, plan, traces) => result,
    };
    // Uploads are no longer needed.
    match std::fs::remove_dir_all(job.uploads()) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            tracing::warn!(%error, "failed to remove uploads");
        }
        Ok(()) | Err(_) => {}
    }
    result
}

async fn install_inputs(job: &Job, plan: &Plan, traces: &mut InstalledFiles) -> Result<(), EndCause> {
    let site = &plan.site;
    chown_scratch(job, plan)
        .map_err(|error| start_failure("failed to set the owner of the job's directory", &error))?;
    create_dir_as(&site.working_dir, &site.account, job.around.in_container).map_err(|error| {
        start_failure(&format!("failed to create {}", site.working_dir.display()), &error)
    })?;
    write_cluster_files(job, plan, traces)?;
    let spec = &plan.submit.job_spec;
    let run_spec = plan.submit.run_spec.as_ref().or(plan.submit.run.run_spec.as_ref());
    let data = spec.repo_data.as_ref().or(run_spec.and_then(|spec| spec.repo_data.as_ref()));
    let code = job.uploaded(Job::code_name());
    if code.is_some() || matches!(data, Some(RepoData::Remote { .. })) {
        let wanted = repo::RepoRequest {
            data,
            credentials: plan.submit.repo_credentials.as_ref(),
            dir: spec.repo_dir.as_deref().unwrap_or("."),
            exists_action: spec.repo_exists_action.as_deref(),
            single_branch: spec.single_branch,
            code: code.as_deref(),
            any_url: false,
        };
        let say = |line: &str| tracing::info!("{line}");
        repo::prepare(site, &wanted, &say).await.map_err(|error| EndCause::NotStarted {
            reason: "container_exited_with_error",
            why: error_chain(&error),
        })?;
    }
    let mut loose = None;
    for archive in &spec.file_archives {
        let missing = || EndCause::NotStarted {
            reason: "executor_error",
            why: format!("failed to place files at `{}`: the archive was not uploaded", archive.path),
        };
        let file = job.uploaded(&archive.id).ok_or_else(missing)?;
        let placed = files::unpack_to(site, &file, &archive.path).await;
        let unpacked = placed.map_err(|error| start_failure("", &error))?;
        loose = loose.or(landlock_warning(unpacked.landlock));
    }
    if let Some(gap) = loose {
        tracing::warn!("{gap}");
    }
    if let Some(version) = &spec.python {
        let dir = python::venv_dir(&job.around);
        python::create_venv(site, &plan.env, version, &dir)
            .await
            .map_err(|error| start_failure("", &error))?;
    }
    write_profile(job, plan, traces);
    Ok(())
}

/// Changes the owner of the directories of a plain process to its user. Only root can write above them.
fn chown_scratch(job: &Job, plan: &Plan) -> std::io::Result<()> {
    let around = &job.around;
    if around.in_container || around.uid != 0 || plan.site.account.uid == 0 {
        return Ok(());
    }
    let account = &plan.site.account;
    let confined = around.confined.iter().flat_map(|inside| [&inside.home, &inside.python]);
    { around.scratch.iter().chain(confined) }
        .try_for_each(|dir| std::os::unix::fs::lchown(dir, Some(account.uid), Some(account.gid)))
}

/// Returns a warning if the kernel could not fully restrict the unpacking of archives.
fn landlock_warning(landlock: LandlockStatus) -> Option<&'static str> {
    match landlock {
        LandlockStatus::Whole => None,
        LandlockStatus::Partial => {
            Some("archives were unpacked with partial isolation: this kernel has an old version of Landlock")
        }
        LandlockStatus::Absent => {
            Some("archives were unpacked without additional isolation: this kernel has no Landlock")
        }
    }
}

/// Writes the files with which the job reaches the other nodes of the replica.
fn write_cluster_files(job: &Job, plan: &Plan, traces: &mut InstalledFiles) -> Result<(), EndCause> {
    let Some(cluster) = &plan.submit.cluster_info else { return Ok(()) };
    if let Some(path) = &plan.hostfile {
        let text = node_access::render_hostfile(cluster);
        let written = match &job.around.confined {
            Some(_) => run_as_account(&plan.site.account, || write_hostfile(path, &text)),
            None => write_hostfile(path, &text),
        };
        written.map_err(|error| start_failure("failed to write the list of hosts", &error))?;
        traces.files.push(path.clone());
    }
    if let Some(key) = &plan.submit.job_spec.ssh_key {
        job.keys.add(&key.public);
        let access = NodeAccess::give(job.ssh_config_target(&plan.site.account), cluster, key)
            .map_err(|error| start_failure("failed to install the SSH key for other nodes", &error))?;
        traces.access = Some(access);
    }
    Ok(())
}

fn write_hostfile(path: &Path, text: &str) -> std::io::Result<()> {
    if let Some(dir) = path.parent() {
        std::fs::create_dir_all(dir)?;
    }
    launch::write_with_mode(path, text.as_bytes(), 0o644)
}

/// Provides the job's variables to login shells, if the image has a directory for that. Failure is not an error.
fn write_profile(job: &Job, plan: &Plan, traces: &mut InstalledFiles) {
    if !job.around.in_container || !Path::new(PROFILE_DIR).is_dir() {
        return;
    }
    let account = &plan.site.account;
    let path = Path::new(PROFILE);
    let written = launch::write_with_mode(path, &env::shell_exports(&job.around.base, &plan.env), 0o600)
        .and_then(|()| std::os::unix::fs::chown(path, Some(account.uid), Some(account.gid)));
    match written {
        Ok(()) => traces.files.push(path.to_owned()),
        Err(error) => tracing::debug!(%error, "failed to write variables for login shells"),
    }
}

fn start_failure(what: &str, error: &dyn std::error::Error) -> EndCause {
    let text = error_chain(error);
    let why = if what.is_empty() { text } else { format!("{what}: {text}") };
    EndCause::NotStarted { reason: "executor_error", why }
}

fn stop_cause(halt: StopSignal) -> EndCause {
    match halt {
        StopSignal::Stop { .. } => EndCause::Stopped { killed_after: None },
        StopSignal::End => EndCause::Ended,
    }
}

/// Running job.
struct SupervisedJob<'a> {
    job: &'a Job,
    tree: ProcessTree,
    pump: OutputPump,
    keyboard: Option<File>,
    polite: Signal,
    grace: Duration,
    /// True if the commands are led by an interactive shell, which ignores the stop signal.
    is_interactive: bool,
    /// Processes that the stop signal reached.
    requested: Vec<proc::ProcessId>,
    /// Reason for which the job is being stopped, if it is.
    cause: Option<EndCause>,
    /// End of the grace period.
    kill_at: Option<Instant>,
    /// True if the grace period ended before the commands did.
    was_killed: bool,
}

async fn run_commands(job: &Job, plan: &Plan) -> Result<(EndCause, ExitStatus), EndCause> {
    let spec = &plan.submit.job_spec;
    let writer = job.spool.writer(Stream::Job).clone();
    writer.limit(plan.submit.log_quota_hour);
    let launch = launch::LaunchSpec {
        argv: &plan.argv,
        env: &plan.env,
        dir: &plan.site.working_dir,
        account: &plan.site.account,
        terminal: launch::terminal_mode(spec.tty, &plan.argv),
        names: plan.names.as_ref(),
    };
    let mut started = launch::start(&launch).map_err(|error| match error {
        // The program, its working directory or its interpreter is missing or cannot be executed: another attempt with
        // the same files would fail as well.
        ExecError::NoCommands | ExecError::NulInArgument | ExecError::Start { .. } => {
            EndCause::CannotStart { why: error_chain(&error) }
        }
        ExecError::Terminal(_) | ExecError::Pipe(_) | ExecError::Names(_) => start_failure("", &error),
    })?;
    let deadline = run_deadline(spec.max_duration);
    let tree = ProcessTree::new(started.pid);
    // Before the first byte is read: all output is later than this.
    job.states.running();
    let pump = match OutputPump::start(started.output, writer) {
        Ok(pump) => pump,
        Err(error) => {
            tree.kill();
            return Err(start_failure("failed to read the output", &error));
        }
    };
    let (polite, grace) = match spec.stop_duration.and_then(|secs| u64::try_from(secs).ok()) {
        Some(secs) => (Signal::TERM, Duration::from_secs(secs).min(GRACE_MAX)),
        None => (Signal::INT, GRACE),
    };
    let mut under = SupervisedJob {
        job,
        tree,
        pump,
        keyboard: started.keyboard,
        polite,
        grace,
        is_interactive: plan.argv.get(1).is_some_and(|word| word == INTERACTIVE_FLAG),
        requested: Vec::new(),
        cause: None,
        kill_at: None,
        was_killed: false,
    };
    let exit = under.wait(&mut started.child, deadline).await;
    under.finish_output().await;
    let exit = exit.map_err(|error| start_failure("failed to wait for the commands", &error))?;
    let cause = match under.cause {
        Some(EndCause::Stopped { .. }) if under.was_killed => {
            EndCause::Stopped { killed_after: Some(under.grace.as_secs()) }
        }
        Some(cause) => cause,
        None => EndCause::Exited,
    };
    Ok((cause, exit))
}

/// Returns the maximum run time of the commands, and its deadline counted from now.
fn run_deadline(max_duration: Option<i64>) -> Option<(u64, Instant)> {
    let secs = u64::try_from(max_duration?).ok().filter(|secs| *secs > 0)?;
    // A time that overflows never comes.
    Some((secs, Instant::now().checked_add(Duration::from_secs(secs))?))
}

impl SupervisedJob<'_> {
    /// Waits for the main process, and stops it if required.
    async fn wait(
        &mut self,
        child: &mut tokio::process::Child,
        deadline: Option<(u64, Instant)>,
    ) -> std::io::Result<ExitStatus> {
        loop {
            let is_free = self.cause.is_none();
            let cause = tokio::select! {
                biased;
                exit = child.wait() => return exit,
                halt = self.job.wait_for_stop(), if is_free => {
                    if let StopSignal::Stop { grace: Some(grace) } = halt {
                        self.grace = grace.min(GRACE_MAX);
                    }
                    stop_cause(halt)
                }
                secs = wait_for_deadline(deadline), if is_free => EndCause::MaxDuration { secs },
                failure = self.pump.failure(), if is_free => output_error_cause(failure),
                () = sleep(POLL_INTERVAL), if self.is_interactive && !is_free => {
                    if self.tree.is_ignored_by_leader(self.polite, &self.requested) {
                        self.tree.hang_up();
                        self.is_interactive = false;
                    }
                    continue;
                }
                () = sleep_until_some(self.kill_at) => {
                    self.was_killed = true;
                    self.tree.kill();
                    self.kill_at = Some(Instant::now() + KILL_TIMEOUT);
                    continue;
                }
            };
            tracing::info!(?cause, grace_secs = self.grace.as_secs(), "stopping the job");
            self.cause = Some(cause);
            self.requested = self.tree.signal_session(self.polite);
            if let Some(keyboard) = &mut self.keyboard {
                // An interactive shell returns to its prompt when it is interrupted, and reads this there.
                let _ = keyboard.write_all(END_OF_INPUT);
            }
            self.kill_at = Some(Instant::now() + self.grace);
        }
    }

    /// Runs after the main process has exited: remaining processes get the rest of the grace period, or a moment to
    /// finish their output. Afterwards no process of the job runs, and all its output is stored.
    async fn finish_output(&mut self) {
        match self.kill_at {
            Some(kill_at) => {
                let gone = async {
                    while self.tree.has_members() {
                        sleep(POLL_INTERVAL).await;
                    }
                };
                self.was_killed |= tokio::time::timeout_at(kill_at, gone).await.is_err();
            }
            None => {
                let _ = timeout(BACKGROUND_GRACE, self.pump.ended()).await;
            }
        }
        self.tree.kill();
        if timeout(KILL_TIMEOUT, self.pump.ended()).await.is_err() {
            self.pump.cut();
            self.pump.ended().await;
        }
        if self.cause.is_none()
            && let Some(failure) = self.pump.take_error()
        {
            self.cause = Some(output_error_cause(failure));
        }
    }
}

fn output_error_cause(failure: OutputError) -> EndCause {
    match failure {
        OutputError::Quota { per_hour } => EndCause::LogQuota { bytes: per_hour },
        OutputError::NoSpace { why } => EndCause::OutputNotStored { why, no_disk: true },
        OutputError::Io { why } => EndCause::OutputNotStored { why, no_disk: false },
    }
}

/// Sleeps until the time; forever if there is none.
async fn sleep_until_some(time: Option<Instant>) {
    match time {
        Some(time) => sleep_until(time).await,
        None => std::future::pending().await,
    }
}

async fn wait_for_deadline(deadline: Option<(u64, Instant)>) -> u64 {
    match deadline {
        Some((secs, time)) => {
            sleep_until(time).await;
            secs
        }
        None => std::future::pending().await,
    }
}

/// Waits until the job has started. Returns false if that does not happen within `patience`.
pub async fn wait_for_start(job: &Job, time_limit: Duration) -> bool {
    timeout(time_limit, job.reached(Step::Running)).await.is_ok()
}
