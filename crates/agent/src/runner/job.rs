//! The job of a runner: its submission, its current step, and the decisions at its start.

use std::{
    io,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use parking_lot::Mutex;
use tokio::sync::watch;
use windlass_api::agent::runner::{HostName, JobStarted, JobState, SubmitBody, User};
use windlass_model::config::name::UnixUser;

use super::{
    env::{self, Env},
    hosts_file::HostsFile,
    job_end::{EndCause, JobStateName, describe_end},
    log_tail,
    login_session::Session,
    node_access, phase_file, python,
    ssh::{AuthorizedKeys, ConnectionTracker},
    state_log::StateLog,
    steps::{self, Call, CallVerdict, Step, StepEvent},
    user::{Account, UserDatabase, UserError},
    user_context::UserContext,
};
use crate::{
    isolation::ConfinedTask,
    spool::{Spool, Stream},
    task_dir::{
        DEVICE_GROUPS_VARIABLE, IMAGE_CONFIG, ImageConfig, OWN_CONTAINER_VARIABLE, RUN_DIR_IN_CONTAINER,
        RunnerConfig, TaskPorts,
    },
};

/// Path of the MPI hostfile inside a container; elsewhere it is in the `run` directory.
const HOSTFILE_IN_CONTAINER: &str = "/windlass/mpi/hostfile";
const HOSTFILE: &str = "hostfile";
/// Hostfile in the home directory of a confined task.
const HOSTFILE_HOME: &str = ".windlass-hostfile";
const NOBODY_UID: u32 = 65_534;
const UPLOADS_DIR: &str = "uploads";
/// Name of the uploaded code.
const CODE_UPLOAD: &str = "code";

/// Environment in which the runner runs.
#[derive(Debug)]
pub struct RunnerContext {
    pub run: PathBuf,
    pub config: RunnerConfig,
    pub in_container: bool,
    /// Base environment of everything that is started here.
    pub base: Env,
    /// Working directory of a job that sets none.
    pub home_dir: PathBuf,
    /// Directory of the task for files, outside of containers.
    pub scratch: Option<PathBuf>,
    /// Written before the runner is started, and constant while it runs.
    pub ports: TaskPorts,
    pub uid: u32,
    /// Confinement of a plain process, if it is confined.
    pub confined: Option<ConfinedTask>,
    /// Groups of the host that own the devices of the task: the image does not know them.
    pub device_groups: Vec<u32>,
}

#[derive(Debug, thiserror::Error)]
enum AccountError {
    #[error(transparent)]
    User(#[from] UserError),
    #[error(
        "cannot run as user {name}: plain processes run as separate users on this host (omit `user`, or ask the host's \
         owner to add `{name}` to `users` in its policy)"
    )]
    NotListed { name: String },
    #[error("cannot run as user {name}: plain processes never run as root on this host (omit `user`)")]
    Root { name: String },
    #[error("cannot use group {group}: user {name} is not a member of it")]
    Group { name: String, group: u32 },
}

/// Reads numbers that are separated by commas.
fn parse_groups(text: &str) -> Vec<u32> {
    text.split(',').filter_map(|group| group.parse().ok()).collect()
}

impl RunnerContext {
    pub fn inspect(run: &Path, config: RunnerConfig) -> io::Result<Self> {
        let is_pod = std::env::var_os(OWN_CONTAINER_VARIABLE).is_some_and(|value| value == "1");
        let in_container = is_pod || run == Path::new(RUN_DIR_IN_CONTAINER);
        let scratch = run.parent().map(|task| task.join("scratch")).filter(|dir| dir.is_dir());
        let scratch = scratch.filter(|_| !in_container);
        let home_dir = match &scratch {
            Some(scratch) => scratch.clone(),
            None => std::env::current_dir()?,
        };
        Ok(Self {
            run: run.to_owned(),
            config,
            in_container,
            base: env::base_env(std::env::vars_os(), in_container),
            home_dir,
            scratch,
            ports: TaskPorts::read(run),
            uid: rustix::process::geteuid().as_raw(),
            confined: ConfinedTask::read().filter(|_| !in_container),
            device_groups: parse_groups(&std::env::var(DEVICE_GROUPS_VARIABLE).unwrap_or_default()),
        })
    }

    /// Returns the account of a job that requests this user.
    fn account(&self, users: &UserDatabase, requested: Option<&User>) -> Result<Account, AccountError> {
        let Some(inside) = &self.confined else {
            let mut account = users.account(requested, self.uid)?;
            account.groups.extend(self.device_groups.iter().filter(|group| **group != 0));
            return Ok(account);
        };
        let by_id = |uid: u32| User { uid: Some(uid), ..User::default() };
        let own_id = inside.user.as_ref().map_or(self.uid, |user| user.id);
        let mut own = users.account(Some(&by_id(own_id)), self.uid)?;
        own.home.clone_from(&inside.home);
        let Some(user) = &inside.user else {
            // No other user is possible.
            let requested = users.account(requested, self.uid)?;
            return Ok(Account { home: own.home, ..requested });
        };
        // Of the host's groups, a task gets only those of its GPUs.
        let groups = |gid: u32| std::iter::once(gid).chain(user.groups.iter().copied()).collect();
        (own.gid, own.groups) = (user.id, groups(user.id));
        let Some(requested) = requested.filter(|requested| **requested != User::default()) else {
            return Ok(own);
        };
        let other = users.account(Some(requested), self.uid)?;
        let name = other.name.clone();
        match other.uid {
            uid if uid == own_id => Ok(own),
            0 => Err(AccountError::Root { name }),
            _ if !inside.users.contains(&name) => Err(AccountError::NotListed { name }),
            uid => {
                let belongs = users.account(Some(&by_id(uid)), self.uid)?.groups;
                if !belongs.contains(&other.gid) {
                    return Err(AccountError::Group { name, group: other.gid });
                }
                Ok(Account { groups: groups(other.gid), ..other })
            }
        }
    }

    /// Returns the account that is used if none can be resolved.
    fn fallback_account(&self) -> Account {
        match &self.confined {
            Some(_) => Account { uid: NOBODY_UID, gid: NOBODY_UID, groups: Vec::new(), ..Account::root() },
            None => Account::root(),
        }
    }

    /// Returns the directory and the account with which the job's files are created.
    fn site(&self, account: Account) -> UserContext {
        let mut site = UserContext::new(account, self.home_dir.clone());
        if let Some(inside) = &self.confined {
            site.agent.clone_from(&inside.agent);
        }
        site
    }
}

/// Reason to stop the job early.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StopSignal {
    /// The server called `stop`, with a grace period if it differs from the job's own.
    Stop { grace: Option<Duration> },
    /// The runner received a signal to exit.
    End,
}

/// Decisions about the start, made when `run` is called.
#[derive(Clone, Debug)]
pub struct Plan {
    pub submit: SubmitBody,
    pub site: UserContext,
    pub env: Env,
    pub argv: Vec<String>,
    pub hostfile: Option<PathBuf>,
    /// File to which the job writes its phase, if requested.
    pub phase: Option<PathBuf>,
    /// File for which the job waits until its other nodes are ready, if requested.
    pub gate: Option<PathBuf>,
    /// Host names of other tasks of its group, if requested.
    pub names: Option<HostsFile>,
    /// File that is written if the scheduler ends the job.
    pub preemption: PathBuf,
}

/// Result of a `run` call.
pub enum RunOutcome {
    /// It was called before, or the job cannot start: there is nothing to do.
    Answer(Option<JobStarted>),
    Start(Option<JobStarted>, Box<Plan>),
}

#[derive(Debug)]
pub struct Job {
    pub around: RunnerContext,
    pub spool: Arc<Spool>,
    pub states: StateLog,
    pub keys: AuthorizedKeys,
    pub connections: ConnectionTracker,
    inner: Mutex<Inner>,
    step: watch::Sender<Step>,
    halt: watch::Sender<Option<StopSignal>>,
    end_reported: watch::Sender<bool>,
}

#[derive(Debug, Default)]
struct Inner {
    submit: Option<SubmitBody>,
    was_run: bool,
    started: Option<JobStarted>,
    session: Option<Session>,
    gate: Option<PathBuf>,
    names: Option<HostsFile>,
    preemption: Option<PathBuf>,
}

impl Job {
    pub fn new(around: RunnerContext, spool: Arc<Spool>, states: StateLog) -> Self {
        let keys = AuthorizedKeys::new();
        for line in &around.config.ssh_authorized_keys {
            keys.add(line);
        }
        Self {
            around,
            spool,
            states,
            keys,
            connections: ConnectionTracker::new(),
            inner: Mutex::default(),
            step: watch::Sender::new(Step::WaitSubmit),
            halt: watch::Sender::new(None),
            end_reported: watch::Sender::new(false),
        }
    }

    pub fn step(&self) -> Step {
        *self.step.borrow()
    }

    /// Waits until the runner is at this step or a later one.
    pub async fn reached(&self, step: Step) {
        // This cannot fail: the sender belongs to this struct.
        let _ = self.step.subscribe().wait_for(|at| *at >= step).await;
    }

    /// Waits until the job must stop.
    pub async fn wait_for_stop(&self) -> StopSignal {
        match self.halt.subscribe().wait_for(Option::is_some).await.map(|halt| *halt) {
            Ok(Some(halt)) => halt,
            Ok(None) | Err(_) => std::future::pending().await,
        }
    }

    /// Returns whether the runner itself was asked to exit.
    pub fn is_ending(&self) -> bool {
        *self.halt.borrow() == Some(StopSignal::End)
    }

    /// Waits until the runner itself is asked to exit.
    pub async fn wait_for_shutdown(&self) {
        let _ = self.halt.subscribe().wait_for(|halt| *halt == Some(StopSignal::End)).await;
    }

    /// Returns all states for a caller, and records that the caller has seen the end if it is among them.
    pub fn report_states(&self) -> Vec<JobState> {
        if self.states.end().is_some() {
            self.end_reported.send_replace(true);
        }
        self.states.all()
    }

    /// Waits until a caller has received the end.
    pub async fn end_reported(&self) {
        let _ = self.end_reported.subscribe().wait_for(|reported| *reported).await;
    }

    /// Returns the result that a call would have now.
    pub fn verdict(&self, call: Call) -> CallVerdict {
        steps::evaluate_call(self.step(), call)
    }

    pub fn submit(&self, submit: SubmitBody) -> Result<(), Step> {
        let mut inner = self.inner.lock();
        self.take(Call::Submit)?;
        inner.submit = Some(submit);
        Ok(())
    }

    /// Moves an upload to its final name, unless the step has changed while it was received.
    pub fn store_upload(&self, call: Call, part: &Path, name: &str) -> Result<io::Result<()>, Step> {
        let _inner = self.inner.lock();
        self.take(call)?;
        Ok(std::fs::rename(part, self.uploads().join(name)))
    }

    pub fn uploads(&self) -> PathBuf {
        self.around.run.join(UPLOADS_DIR)
    }

    pub fn code_name() -> &'static str {
        CODE_UPLOAD
    }

    /// Returns the file that was uploaded under a name, if any.
    pub fn uploaded(&self, name: &str) -> Option<PathBuf> {
        Some(self.uploads().join(name)).filter(|file| file.is_file())
    }

    /// Decides on the start. If the decision fails, the job ends here.
    pub fn run(&self) -> Result<RunOutcome, Step> {
        let mut inner = self.inner.lock();
        if !self.take(Call::Run)? {
            // A job that was stopped before its start has no answer to repeat.
            return if inner.was_run {
                Ok(RunOutcome::Answer(inner.started.clone()))
            } else {
                Err(self.step())
            };
        }
        inner.was_run = true;
        let Some(submit) = inner.submit.take() else { return Err(Step::WaitSubmit) };
        match self.plan(submit) {
            Ok(plan) => {
                let started = JobStarted {
                    working_dir: plan.site.working_dir.display().to_string(),
                    username: plan.site.account.name.clone(),
                };
                inner.started = Some(started.clone());
                inner.gate.clone_from(&plan.gate);
                inner.names.clone_from(&plan.names);
                inner.preemption = Some(plan.preemption.clone());
                inner.session = Some(session(&plan.site, &plan.env));
                Ok(RunOutcome::Start(Some(started), Box::new(plan)))
            }
            Err(cause) => {
                drop(inner);
                self.end(cause, None, false);
                Ok(RunOutcome::Answer(None))
            }
        }
    }

    /// Opens the gate: all nodes of the job are prepared. Does nothing for a job without a gate.
    pub fn open_gate(&self) -> io::Result<()> {
        let gate = self.inner.lock().gate.clone();
        gate.map_or(Ok(()), |gate| phase_file::open_gate(&gate))
    }

    /// Writes the names and current addresses of the other tasks of its group. Does nothing for a job that requested
    /// none.
    pub fn send_hosts(&self, hosts: &[HostName]) -> io::Result<()> {
        let names = self.inner.lock().names.clone();
        names.map_or(Ok(()), |names| names.write(self.around.config.task, hosts))
    }

    /// Writes the notice of a job that the scheduler ends, before it is stopped.
    pub fn announce_preemption(&self, grace: Option<std::time::Duration>) {
        let Some(file) = self.inner.lock().preemption.clone() else { return };
        if let Err(error) = phase_file::write_preemption_notice(&file, grace) {
            tracing::warn!(%error, "failed to write the notice of the preemption");
        }
    }

    /// Stops the job, now or as soon as possible.
    pub fn stop(&self, halt: StopSignal) {
        let inner = self.inner.lock();
        let at = self.step();
        let _ = self.take(Call::Stop);
        // A request to exit takes precedence over a stop: then there is no grace period.
        self.halt.send_if_modified(|now| match (*now, halt) {
            (None, _) | (Some(StopSignal::Stop { .. }), StopSignal::End) => {
                *now = Some(halt);
                true
            }
            (Some(_), _) => false,
        });
        drop(inner);
        if matches!(at, Step::WaitSubmit | Step::WaitRun) {
            let cause = match halt {
                StopSignal::Stop { .. } => EndCause::Stopped { killed_after: None },
                StopSignal::End => EndCause::Ended,
            };
            self.record_end(cause, None, false);
        }
    }

    /// Records the end of the job. Its output is completed first, so that a reader who learns of the end finds all of
    /// it.
    pub fn end(&self, cause: EndCause, exit: Option<std::process::ExitStatus>, oom: bool) {
        self.record_end(cause, exit, oom);
        self.happen(StepEvent::JobEnded);
    }

    fn record_end(&self, cause: EndCause, exit: Option<std::process::ExitStatus>, oom: bool) {
        if let Err(error) = self.spool.writer(Stream::Job).finish() {
            tracing::error!(%error, "failed to complete the job's output");
        }
        let mut ending = describe_end(cause, exit, oom);
        if ending.state == JobStateName::Failed && exit.is_some() {
            log_tail::append_last_lines(&mut ending.message, &self.last_output());
        }
        self.states.say(ending);
    }

    /// Returns the end of the job's output; empty if it cannot be read.
    fn last_output(&self) -> Vec<u8> {
        let reader = self.spool.source(Stream::Job).reader();
        let end = reader.end().unwrap_or_default();
        reader.read(end.saturating_sub(log_tail::SCAN_BYTES as u64), log_tail::SCAN_BYTES).unwrap_or_default()
    }

    pub fn happen(&self, what: StepEvent) {
        self.step.send_if_modified(|at| {
            let to = steps::apply_event(*at, what);
            std::mem::replace(at, to) != to
        });
    }

    /// Returns the account and environment for a user who logs in now.
    pub fn session_for(&self) -> Session {
        let known = self.inner.lock().session.clone();
        known.unwrap_or_else(|| {
            let users = UserDatabase::read_file(Path::new("/")).unwrap_or_default();
            let account =
                self.around.account(&users, None).unwrap_or_else(|_| self.around.fallback_account());
            let mut env = self.around.base.clone();
            env::add_account(&mut env, &account);
            session(&self.around.site(account), &env)
        })
    }

    /// Performs the step of a call. Returns `false` if the call was accepted before and there is nothing to do.
    fn take(&self, call: Call) -> Result<bool, Step> {
        match self.verdict(call) {
            CallVerdict::Take(to) => {
                self.step.send_if_modified(|at| std::mem::replace(at, to) != to);
                Ok(true)
            }
            CallVerdict::Repeat => Ok(false),
            CallVerdict::Refuse => Err(self.step()),
        }
    }

    fn plan(&self, submit: SubmitBody) -> Result<Plan, EndCause> {
        let failed = |error: &dyn std::error::Error| EndCause::NotStarted {
            reason: "executor_error",
            why: error_chain(error),
        };
        let users = UserDatabase::read_file(Path::new("/")).map_err(|error| failed(&error))?;
        let image = self.image_config();
        let of_image = image_user(&image.user);
        let user = submit.job_spec.user.as_ref().or(of_image.as_ref());
        let account = self
            .around
            .account(&users, user)
            .map_err(|error| EndCause::CannotStart { why: error_chain(&error) })?;
        let default = self.around.site(account);
        let working_dir = match submit.job_spec.working_dir.as_deref() {
            None | Some("") => default.working_dir.clone(),
            Some(dir) => default.resolve(dir),
        };
        let mut site = UserContext { working_dir, ..default };
        if phase_file::wants_private_home(&submit.job_spec.env, self.around.scratch.as_deref()) {
            site.account.home = site.working_dir.join(phase_file::PRIVATE_HOME_DIR);
        }
        let hostfile = submit.cluster_info.as_ref().filter(|cluster| !cluster.job_ips.is_empty());
        let hostfile = hostfile.map(|_| match (&self.around.confined, self.around.in_container) {
            // The `run` directory is accessible to the runner only.
            (Some(inside), _) => inside.home.join(HOSTFILE_HOME),
            (None, true) => PathBuf::from(HOSTFILE_IN_CONTAINER),
            (None, false) => self.around.run.join(HOSTFILE),
        });
        let mut env = env::job_env(&self.around.base, &submit, &site, hostfile.as_deref());
        let phase =
            phase_file::set_phase_file(&mut env, self.around.scratch.as_deref(), &submit.job_submission.id);
        let gate =
            phase_file::set_gate_file(&mut env, self.around.scratch.as_deref(), &submit.job_submission.id);
        let preemption = phase_file::set_preemption_file(
            &mut env,
            self.around.scratch.as_deref(),
            &submit.job_submission.id,
        );
        let names = HostsFile::from_env(&mut env, self.around.scratch.as_deref());
        names.as_ref().map_or(Ok(()), HostsFile::make).map_err(|error| failed(&error))?;
        set_host_port(&mut env, &self.around.ports);
        if submit.job_spec.python.is_some() {
            python::activate(&mut env, &python::venv_dir(&self.around));
        }
        let argv = if submit.job_spec.commands.is_empty() {
            image.entrypoint.into_iter().chain(image.cmd).collect()
        } else {
            submit.job_spec.commands.clone()
        };
        Ok(Plan { submit, site, env, argv, hostfile, phase, gate, names, preemption })
    }

    /// Returns the image's entry point and user. Empty for a plain process.
    fn image_config(&self) -> ImageConfig {
        let text = std::fs::read(self.around.run.join(IMAGE_CONFIG)).unwrap_or_default();
        serde_json::from_slice(&text).unwrap_or_default()
    }

    /// Returns the location and owner of the files with which the job reaches its other nodes.
    pub fn ssh_config_target<'a>(&self, account: &'a Account) -> node_access::SshConfigTarget<'a> {
        node_access::SshConfigTarget {
            account,
            task: self.around.config.task,
            in_container: self.around.in_container,
        }
    }
}

/// Replaces `PORT` by the host's port if the kernel does not rewrite ports.
fn set_host_port(env: &mut Env, ports: &TaskPorts) {
    let name = std::ffi::OsStr::new("PORT");
    let reported = env.get(name).and_then(|port| port.to_str()?.parse().ok());
    if let Some(reported) = reported.filter(|_| !ports.is_rewritten) {
        env.insert(name.to_owned(), ports.own(reported).to_string().into());
    }
}

/// Parses `USER` of an image: `name`, `uid`, either with `:group`.
fn image_user(text: &str) -> Option<User> {
    let UnixUser { uid, username, gid, groupname } = UnixUser::parse(text).ok()?;
    Some(User { uid, gid, username, groupname })
}

fn session(site: &UserContext, env: &Env) -> Session {
    Session {
        account: site.account.clone(),
        env: env.iter().map(|(name, value)| (name.clone(), value.clone())).collect(),
        dir: site.working_dir.clone(),
    }
}

/// Formats an error and its causes in one line.
pub fn error_chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut next = error.source();
    while let Some(cause) = next {
        text.push_str(": ");
        text.push_str(&cause.to_string());
        next = cause.source();
    }
    text
}
