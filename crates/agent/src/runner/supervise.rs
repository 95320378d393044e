//! From the start of a job to its last word: preparing, running, ending.

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
use windlass_model::sky::Phase;

use super::{
    cluster::{self, Access},
    ending::Cause,
    env, exec, files,
    job::{Halt, Job, Plan, told},
    phase,
    pump::{Pump, Trouble},
    python, repo,
    steps::Step,
    tree::Tree,
    user::{acting_as, make_dir},
};
use crate::{cgroup, confine::Landlock, proc, spool::Stream};

/// Between the polite signal and the kill where the job says nothing.
const GRACE: Duration = Duration::from_secs(10);
/// Nobody is waited for longer.
const GRACE_MAX: Duration = Duration::from_secs(24 * 3600);
/// How long what the commands left in the background may go on printing.
const LINGER: Duration = Duration::from_secs(1);
/// After a kill the pipe closes at once, or somebody has it whom nobody can kill.
const AFTER_KILL: Duration = Duration::from_secs(2);
const LOOK_AGAIN: Duration = Duration::from_millis(50);
/// What makes a shell interactive: then it ignores the polite signal, which is for those that it started.
const INTERACTIVE: &str = "-i";
/// Ctrl-D.
const END_OF_INPUT: &[u8] = b"\x04";
const PROFILE_DIR: &str = "/etc/profile.d";
const PROFILE: &str = "/etc/profile.d/windlass_job.sh";

/// What was put somewhere for the job alone.
#[derive(Debug, Default)]
struct Traces {
    access: Option<Access>,
    files: Vec<PathBuf>,
}

impl Traces {
    fn remove(self) {
        if let Some(access) = self.access
            && let Err(error) = access.remove()
        {
            tracing::warn!(%error, "take back the key for other nodes");
        }
        for file in self.files {
            if let Err(error) = std::fs::remove_file(&file) {
                tracing::warn!(%error, file = %file.display(), "remove a file of the job");
            }
        }
    }
}

/// Takes the job to its end and says its last word, whatever happens.
pub fn begin(job: &Arc<Job>, plan: Box<Plan>) {
    let supervised = tokio::spawn(supervise(Arc::clone(job), plan));
    let job = Arc::clone(job);
    tokio::spawn(async move {
        if let Err(error) = supervised.await {
            // A fault of our own must not leave a runner that waits for ever; what still runs ends with it.
            tracing::error!(%error, "supervise the job");
            let why = "the runner failed".to_owned();
            job.end(Cause::NotStarted { reason: "executor_error", why }, None, false);
        }
    });
}

async fn supervise(job: Arc<Job>, plan: Box<Plan>) {
    let kills_before = oom_kills();
    let mut traces = Traces::default();
    let outcome = match prepare(&job, &plan, &mut traces).await {
        Ok(()) => {
            let watch =
                tokio::spawn(say_when_ready(Arc::clone(&job), plan.phase.clone(), plan.gate.is_some()));
            let outcome = run(&job, &plan).await;
            // Nothing is said after the last word.
            watch.abort();
            let _ = watch.await;
            outcome
        }
        Err(cause) => Err(cause),
    };
    traces.remove();
    let outcome = outcome.map(|(cause, exit)| (finer(cause, exit, plan.phase.as_deref()), exit));
    let oom = oom_kills() > kills_before;
    match outcome {
        Ok((cause, exit)) => job.end(cause, Some(exit), oom),
        Err(cause) => job.end(cause, None, oom),
    }
}

/// Tells that the job is prepared, where its nodes wait for each other.
async fn say_when_ready(job: Arc<Job>, phase: Option<PathBuf>, waits: bool) {
    let Some(phase) = phase.filter(|_| waits) else { return };
    while !phase::is_at(&phase, Phase::Ready) {
        sleep(LOOK_AGAIN).await;
    }
    job.states.ready();
}

/// A job that failed may have said that it was not yet in its program.
fn finer(cause: Cause, exit: ExitStatus, phase: Option<&Path>) -> Cause {
    let is_setup = || !exit.success() && phase.is_some_and(phase::is_setup);
    if matches!(cause, Cause::Exited) && is_setup() { Cause::SetupFailed } else { cause }
}

fn oom_kills() -> u64 {
    cgroup::Group::own().map(|group| group.oom_kills()).unwrap_or_default()
}

/// Brings everything the commands need. A stop ends it at once.
async fn prepare(job: &Job, plan: &Plan, traces: &mut Traces) -> Result<(), Cause> {
    let result = tokio::select! {
        biased;
        halt = job.halted() => Err(halt_cause(halt)),
        result = bring(job, plan, traces) => result,
    };
    // Uploads have served.
    match std::fs::remove_dir_all(job.uploads()) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            tracing::warn!(%error, "remove what was uploaded");
        }
        Ok(()) | Err(_) => {}
    }
    result
}

async fn bring(job: &Job, plan: &Plan, traces: &mut Traces) -> Result<(), Cause> {
    let site = &plan.site;
    give_scratch(job, plan).map_err(|error| not_started("give the job its directory", &error))?;
    make_dir(&site.working_dir, &site.account, job.around.in_container)
        .map_err(|error| not_started(&format!("make {}", site.working_dir.display()), &error))?;
    cluster_files(job, plan, traces)?;
    let spec = &plan.submit.job_spec;
    let run_spec = plan.submit.run_spec.as_ref().or(plan.submit.run.run_spec.as_ref());
    let data = spec.repo_data.as_ref().or(run_spec.and_then(|spec| spec.repo_data.as_ref()));
    let code = job.uploaded(Job::code_name());
    if code.is_some() || matches!(data, Some(RepoData::Remote { .. })) {
        let wanted = repo::Wanted {
            data,
            credentials: plan.submit.repo_credentials.as_ref(),
            dir: spec.repo_dir.as_deref().unwrap_or("."),
            exists_action: spec.repo_exists_action.as_deref(),
            single_branch: spec.single_branch,
            code: code.as_deref(),
            any_url: false,
        };
        let say = |line: &str| tracing::info!("{line}");
        repo::prepare(site, &wanted, &say).await.map_err(|error| Cause::NotStarted {
            reason: "container_exited_with_error",
            why: told(&error),
        })?;
    }
    let mut loose = None;
    for archive in &spec.file_archives {
        let missing = || Cause::NotStarted {
            reason: "executor_error",
            why: format!("place files at `{}`: the archive was not uploaded", archive.path),
        };
        let file = job.uploaded(&archive.id).ok_or_else(missing)?;
        let placed = files::place(site, &file, &archive.path).await;
        let unpacked = placed.map_err(|error| not_started("", &error))?;
        loose = loose.or(fence_gap(unpacked.landlock));
    }
    if let Some(gap) = loose {
        tracing::warn!("{gap}");
    }
    if let Some(version) = &spec.python {
        let dir = python::directory(&job.around);
        python::prepare(site, &plan.env, version, &dir).await.map_err(|error| not_started("", &error))?;
    }
    profile(job, plan, traces);
    Ok(())
}

/// The directory where a plain process starts is its user's alone. Nobody but root can write above it.
fn give_scratch(job: &Job, plan: &Plan) -> std::io::Result<()> {
    let around = &job.around;
    if around.in_container || around.uid != 0 || plan.site.account.uid == 0 {
        return Ok(());
    }
    let account = &plan.site.account;
    let confined = around.confined.iter().flat_map(|inside| [&inside.home, &inside.python]);
    { around.scratch.iter().chain(confined) }
        .try_for_each(|dir| std::os::unix::fs::lchown(dir, Some(account.uid), Some(account.gid)))
}

/// What the kernel could not do to hold the unpacking of archives in.
fn fence_gap(landlock: Landlock) -> Option<&'static str> {
    match landlock {
        Landlock::Whole => None,
        Landlock::Partial => {
            Some("archives were unpacked behind a partial fence: this kernel's Landlock is old")
        }
        Landlock::Absent => {
            Some("archives were unpacked without a second fence: this kernel has no Landlock")
        }
    }
}

/// Files for reaching the other nodes of the replica.
fn cluster_files(job: &Job, plan: &Plan, traces: &mut Traces) -> Result<(), Cause> {
    let Some(cluster) = &plan.submit.cluster_info else { return Ok(()) };
    if let Some(path) = &plan.hostfile {
        let text = cluster::hostfile(cluster);
        let written = match &job.around.confined {
            Some(_) => acting_as(&plan.site.account, || write_hostfile(path, &text)),
            None => write_hostfile(path, &text),
        };
        written.map_err(|error| not_started("write the list of hosts", &error))?;
        traces.files.push(path.clone());
    }
    if let Some(key) = &plan.submit.job_spec.ssh_key {
        job.keys.add(&key.public);
        let access = Access::give(job.cluster_place(&plan.site.account), cluster, key)
            .map_err(|error| not_started("give the key for other nodes", &error))?;
        traces.access = Some(access);
    }
    Ok(())
}

fn write_hostfile(path: &Path, text: &str) -> std::io::Result<()> {
    if let Some(dir) = path.parent() {
        std::fs::create_dir_all(dir)?;
    }
    exec::write_as(path, text.as_bytes(), 0o644)
}

/// Gives login shells the job's variables, where the image has a place for that. Nothing depends on it.
fn profile(job: &Job, plan: &Plan, traces: &mut Traces) {
    if !job.around.in_container || !Path::new(PROFILE_DIR).is_dir() {
        return;
    }
    let account = &plan.site.account;
    let path = Path::new(PROFILE);
    let written = exec::write_as(path, &env::exports(&job.around.base, &plan.env), 0o600)
        .and_then(|()| std::os::unix::fs::chown(path, Some(account.uid), Some(account.gid)));
    match written {
        Ok(()) => traces.files.push(path.to_owned()),
        Err(error) => tracing::debug!(%error, "write variables for login shells"),
    }
}

fn not_started(what: &str, error: &dyn std::error::Error) -> Cause {
    let text = told(error);
    let why = if what.is_empty() { text } else { format!("{what}: {text}") };
    Cause::NotStarted { reason: "executor_error", why }
}

fn halt_cause(halt: Halt) -> Cause {
    match halt {
        Halt::Stop { .. } => Cause::Stopped { killed_after: None },
        Halt::End => Cause::Ended,
    }
}

/// A job under way.
struct Under<'a> {
    job: &'a Job,
    tree: Tree,
    pump: Pump,
    keyboard: Option<File>,
    polite: Signal,
    grace: Duration,
    /// Its commands are led by an interactive shell, which ignores the polite signal.
    is_interactive: bool,
    /// Whom the polite signal reached.
    asked: Vec<proc::Name>,
    /// Why it is being ended, if it is.
    cause: Option<Cause>,
    /// When patience ends.
    kill_at: Option<Instant>,
    /// Patience ended before the commands did.
    was_killed: bool,
}

async fn run(job: &Job, plan: &Plan) -> Result<(Cause, ExitStatus), Cause> {
    let spec = &plan.submit.job_spec;
    let writer = job.spool.writer(Stream::Job).clone();
    writer.limit(plan.submit.log_quota_hour);
    let launch = exec::Launch {
        argv: &plan.argv,
        env: &plan.env,
        dir: &plan.site.working_dir,
        account: &plan.site.account,
        terminal: exec::terminal(spec.tty, &plan.argv),
        names: plan.names.as_ref(),
    };
    let mut started = exec::start(&launch).map_err(|error| not_started("", &error))?;
    let deadline = limit(spec.max_duration);
    let tree = Tree::new(started.pid);
    // Before the first byte is taken: what is printed comes after this in time.
    job.states.running();
    let pump = match Pump::start(started.output, writer) {
        Ok(pump) => pump,
        Err(error) => {
            tree.kill();
            return Err(not_started("read the output", &error));
        }
    };
    let (polite, grace) = match spec.stop_duration.and_then(|secs| u64::try_from(secs).ok()) {
        Some(secs) => (Signal::TERM, Duration::from_secs(secs).min(GRACE_MAX)),
        None => (Signal::INT, GRACE),
    };
    let mut under = Under {
        job,
        tree,
        pump,
        keyboard: started.keyboard,
        polite,
        grace,
        is_interactive: plan.argv.get(1).is_some_and(|word| word == INTERACTIVE),
        asked: Vec::new(),
        cause: None,
        kill_at: None,
        was_killed: false,
    };
    let exit = under.wait(&mut started.child, deadline).await;
    under.settle().await;
    let exit = exit.map_err(|error| not_started("wait for the commands", &error))?;
    let cause = match under.cause {
        Some(Cause::Stopped { .. }) if under.was_killed => {
            Cause::Stopped { killed_after: Some(under.grace.as_secs()) }
        }
        Some(cause) => cause,
        None => Cause::Exited,
    };
    Ok((cause, exit))
}

/// The longest the commands may run, and from now on when that is over.
fn limit(max_duration: Option<i64>) -> Option<(u64, Instant)> {
    let secs = u64::try_from(max_duration?).ok().filter(|secs| *secs > 0)?;
    // A time that cannot be reckoned with never comes.
    Some((secs, Instant::now().checked_add(Duration::from_secs(secs))?))
}

impl Under<'_> {
    /// Waits for the main process, and sees to its end where it must.
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
                halt = self.job.halted(), if is_free => {
                    if let Halt::Stop { grace: Some(grace) } = halt {
                        self.grace = grace.min(GRACE_MAX);
                    }
                    halt_cause(halt)
                }
                secs = over(deadline), if is_free => Cause::MaxDuration { secs },
                trouble = self.pump.trouble(), if is_free => trouble_cause(trouble),
                () = sleep(LOOK_AGAIN), if self.is_interactive && !is_free => {
                    if self.tree.is_ignored_by_leader(self.polite, &self.asked) {
                        self.tree.hang_up();
                        self.is_interactive = false;
                    }
                    continue;
                }
                () = at(self.kill_at) => {
                    self.was_killed = true;
                    self.tree.kill();
                    self.kill_at = Some(Instant::now() + AFTER_KILL);
                    continue;
                }
            };
            tracing::info!(?cause, grace_secs = self.grace.as_secs(), "end the job");
            self.cause = Some(cause);
            self.asked = self.tree.signal_session(self.polite);
            if let Some(keyboard) = &mut self.keyboard {
                // An interactive shell goes back to its prompt when it is interrupted. There it reads this.
                let _ = keyboard.write_all(END_OF_INPUT);
            }
            self.kill_at = Some(Instant::now() + self.grace);
        }
    }

    /// After the main process: whoever is left gets what is left of the grace, or a moment to say their last.
    /// Then nothing of the job runs, and all it printed is kept.
    async fn settle(&mut self) {
        match self.kill_at {
            Some(kill_at) => {
                let gone = async {
                    while self.tree.has_members() {
                        sleep(LOOK_AGAIN).await;
                    }
                };
                self.was_killed |= tokio::time::timeout_at(kill_at, gone).await.is_err();
            }
            None => {
                let _ = timeout(LINGER, self.pump.ended()).await;
            }
        }
        self.tree.kill();
        if timeout(AFTER_KILL, self.pump.ended()).await.is_err() {
            self.pump.cut();
            self.pump.ended().await;
        }
        if self.cause.is_none()
            && let Some(trouble) = self.pump.last_trouble()
        {
            self.cause = Some(trouble_cause(trouble));
        }
    }
}

fn trouble_cause(trouble: Trouble) -> Cause {
    match trouble {
        Trouble::Quota { per_hour } => Cause::LogQuota { bytes: per_hour },
        Trouble::NoSpace { why } => Cause::NotKept { why, no_disk: true },
        Trouble::Io { why } => Cause::NotKept { why, no_disk: false },
    }
}

/// Never, where there is no time.
async fn at(time: Option<Instant>) {
    match time {
        Some(time) => sleep_until(time).await,
        None => std::future::pending().await,
    }
}

async fn over(deadline: Option<(u64, Instant)>) -> u64 {
    match deadline {
        Some((secs, time)) => {
            sleep_until(time).await;
            secs
        }
        None => std::future::pending().await,
    }
}

/// Waits until the job has ended, or nobody started it in time.
pub async fn started_or_given_up(job: &Job, patience: Duration) -> bool {
    timeout(patience, job.reached(Step::Running)).await.is_ok()
}
