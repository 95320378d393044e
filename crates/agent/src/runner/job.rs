//! The one job of a runner: what was submitted, which step it is at, and what is decided when it starts.

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
    cluster,
    ending::{EndCause, JobStateName, ending},
    env::{self, Env},
    excerpt,
    names::HostsFile,
    phase, python,
    session::Session,
    site::UserContext,
    ssh::{AuthorizedKeys, ConnectionTracker},
    states::StateLog,
    steps::{self, Call, CallVerdict, Step, StepEvent},
    user::{Account, UserDatabase, UserError},
};
use crate::{
    isolation::ConfinedTask,
    spool::{Spool, Stream},
    taskdir::{IMAGE_CONFIG, ImageConfig, RUN_DIR_IN_CONTAINER, RunnerConfig, TaskPorts},
};

/// Where the MPI list of hosts is inside a container; elsewhere it is in the `run` directory.
const HOSTFILE_IN_CONTAINER: &str = "/windlass/mpi/hostfile";
const HOSTFILE: &str = "hostfile";
/// In the home of a task that is confined.
const HOSTFILE_HOME: &str = ".windlass-hostfile";
const NOBODY_UID: u32 = 65_534;
const UPLOADS_DIR: &str = "uploads";
/// What was uploaded as code.
const CODE_UPLOAD: &str = "code";

/// What the runner knows of its surroundings.
#[derive(Debug)]
pub struct RunnerContext {
    pub run: PathBuf,
    pub config: RunnerConfig,
    pub in_container: bool,
    /// What everything started here begins with.
    pub base: Env,
    /// Where a job starts that names no directory.
    pub home_dir: PathBuf,
    /// The task's own directory for files, outside of containers.
    pub scratch: Option<PathBuf>,
    /// Written before the runner is started, and the same for its whole life.
    pub ports: TaskPorts,
    pub uid: u32,
    /// What keeps a plain process in, where something does.
    pub confined: Option<ConfinedTask>,
}

#[derive(Debug, thiserror::Error)]
enum AccountError {
    #[error(transparent)]
    User(#[from] UserError),
    #[error(
        "become user {name}: a plain process has a user of its own here (leave `user` out, or have the host's owner add \
         `{name}` to `users` in its policy)"
    )]
    NotListed { name: String },
    #[error("become user {name}: a plain process is never root here (leave `user` out)")]
    Root { name: String },
    #[error("take group {group} as user {name}: the user does not belong to it")]
    Group { name: String, group: u32 },
}

impl RunnerContext {
    pub fn look(run: &Path, config: RunnerConfig) -> io::Result<Self> {
        let in_container = run == Path::new(RUN_DIR_IN_CONTAINER);
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
            base: env::base(std::env::vars_os(), in_container),
            home_dir,
            scratch,
            ports: TaskPorts::read(run),
            uid: rustix::process::geteuid().as_raw(),
            confined: ConfinedTask::read().filter(|_| !in_container),
        })
    }

    /// As whom a job runs that asks for this user.
    fn account(&self, users: &UserDatabase, asked: Option<&User>) -> Result<Account, AccountError> {
        let Some(inside) = &self.confined else { return Ok(users.account(asked, self.uid)?) };
        let by_id = |uid: u32| User { uid: Some(uid), ..User::default() };
        let own_id = inside.user.as_ref().map_or(self.uid, |user| user.id);
        let mut own = users.account(Some(&by_id(own_id)), self.uid)?;
        own.home.clone_from(&inside.home);
        let Some(user) = &inside.user else {
            // Nobody else can be become.
            let asked = users.account(asked, self.uid)?;
            return Ok(Account { home: own.home, ..asked });
        };
        // Of what the host's groups open, a task gets its GPUs.
        let groups = |gid: u32| std::iter::once(gid).chain(user.groups.iter().copied()).collect();
        (own.gid, own.groups) = (user.id, groups(user.id));
        let Some(asked) = asked.filter(|asked| **asked != User::default()) else { return Ok(own) };
        let other = users.account(Some(asked), self.uid)?;
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

    /// Who somebody is that cannot be found.
    fn fallback_account(&self) -> Account {
        match &self.confined {
            Some(_) => Account { uid: NOBODY_UID, gid: NOBODY_UID, groups: Vec::new(), ..Account::root() },
            None => Account::root(),
        }
    }

    /// Where and as whom its files are made.
    fn site(&self, account: Account) -> UserContext {
        let mut site = UserContext::new(account, self.home_dir.clone());
        if let Some(inside) = &self.confined {
            site.agent.clone_from(&inside.agent);
        }
        site
    }
}

/// Why the job must end before it wants to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StopSignal {
    /// Somebody called `stop`, and said how long it may take where it is not as long as the job says.
    Stop { grace: Option<Duration> },
    /// The runner was told to end by a signal.
    End,
}

/// Everything about the start that is decided when `run` is called.
#[derive(Clone, Debug)]
pub struct Plan {
    pub submit: SubmitBody,
    pub site: UserContext,
    pub env: Env,
    pub argv: Vec<String>,
    pub hostfile: Option<PathBuf>,
    /// Where it writes how far it is, if it does.
    pub phase: Option<PathBuf>,
    /// Where it waits for its other nodes, if it does.
    pub gate: Option<PathBuf>,
    /// Where it finds other tasks of its group by name, if it asks for that.
    pub names: Option<HostsFile>,
}

/// What becomes of a `run`.
pub enum RunOutcome {
    /// It was called before, or the job cannot start: nothing is to be done.
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
    end_told: watch::Sender<bool>,
}

#[derive(Debug, Default)]
struct Inner {
    submit: Option<SubmitBody>,
    was_run: bool,
    started: Option<JobStarted>,
    session: Option<Session>,
    gate: Option<PathBuf>,
    names: Option<HostsFile>,
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
            end_told: watch::Sender::new(false),
        }
    }

    pub fn step(&self) -> Step {
        *self.step.borrow()
    }

    /// Waits until the runner is at this step or a later one.
    pub async fn reached(&self, step: Step) {
        // It cannot fail: the sender is our own.
        let _ = self.step.subscribe().wait_for(|at| *at >= step).await;
    }

    /// Waits until the job must end.
    pub async fn wait_for_stop(&self) -> StopSignal {
        match self.halt.subscribe().wait_for(Option::is_some).await.map(|halt| *halt) {
            Ok(Some(halt)) => halt,
            Ok(None) | Err(_) => std::future::pending().await,
        }
    }

    /// Whether the runner itself was told to end.
    pub fn is_ending(&self) -> bool {
        *self.halt.borrow() == Some(StopSignal::End)
    }

    /// Waits until the runner itself is told to end.
    pub async fn wait_for_shutdown(&self) {
        let _ = self.halt.subscribe().wait_for(|halt| *halt == Some(StopSignal::End)).await;
    }

    /// All states, for somebody who asks for them and will know the end from them.
    pub fn report_states(&self) -> Vec<JobState> {
        if self.states.end().is_some() {
            self.end_told.send_replace(true);
        }
        self.states.all()
    }

    /// Waits until somebody was told the end.
    pub async fn end_told(&self) {
        let _ = self.end_told.subscribe().wait_for(|told| *told).await;
    }

    /// What a call would come to now.
    pub fn verdict(&self, call: Call) -> CallVerdict {
        steps::call(self.step(), call)
    }

    pub fn submit(&self, submit: SubmitBody) -> Result<(), Step> {
        let mut inner = self.inner.lock();
        self.take(Call::Submit)?;
        inner.submit = Some(submit);
        Ok(())
    }

    /// Puts an upload in its place, if its time has not passed while it came.
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

    /// What was uploaded under a name, if anything.
    pub fn uploaded(&self, name: &str) -> Option<PathBuf> {
        Some(self.uploads().join(name)).filter(|file| file.is_file())
    }

    /// Decides on the start. What cannot be decided ends the job here.
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

    /// All nodes of the job are prepared: it goes on. One that waits for nobody has nothing to open.
    pub fn open_gate(&self) -> io::Result<()> {
        let gate = self.inner.lock().gate.clone();
        gate.map_or(Ok(()), |gate| phase::open_gate(&gate))
    }

    /// What the other tasks of its group are called, and where they are now. One that asks for no names gets none.
    pub fn tell_hosts(&self, hosts: &[HostName]) -> io::Result<()> {
        let names = self.inner.lock().names.clone();
        names.map_or(Ok(()), |names| names.write(self.around.config.task, hosts))
    }

    /// Ends the job, now or as soon as it can be.
    pub fn stop(&self, halt: StopSignal) {
        let inner = self.inner.lock();
        let at = self.step();
        let _ = self.take(Call::Stop);
        // Being told to end outweighs a stop: nobody is waited for then.
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

    /// Says the job's last word. Its output is complete before, so whoever learns of the end finds all of it.
    pub fn end(&self, cause: EndCause, exit: Option<std::process::ExitStatus>, oom: bool) {
        self.record_end(cause, exit, oom);
        self.happen(StepEvent::JobEnded);
    }

    fn record_end(&self, cause: EndCause, exit: Option<std::process::ExitStatus>, oom: bool) {
        if let Err(error) = self.spool.writer(Stream::Job).finish() {
            tracing::error!(%error, "complete the job's output");
        }
        let mut ending = ending(cause, exit, oom);
        if ending.state == JobStateName::Failed && exit.is_some() {
            excerpt::append_last_lines(&mut ending.message, &self.last_output());
        }
        self.states.say(ending);
    }

    /// The end of what the job printed; nothing where it cannot be read.
    fn last_output(&self) -> Vec<u8> {
        let reader = self.spool.source(Stream::Job).reader();
        let end = reader.end().unwrap_or_default();
        reader.read(end.saturating_sub(excerpt::SCAN_BYTES as u64), excerpt::SCAN_BYTES).unwrap_or_default()
    }

    pub fn happen(&self, what: StepEvent) {
        self.step.send_if_modified(|at| {
            let to = steps::apply_event(*at, what);
            std::mem::replace(at, to) != to
        });
    }

    /// As whom somebody who comes in works now.
    pub fn session(&self) -> Session {
        let known = self.inner.lock().session.clone();
        known.unwrap_or_else(|| {
            let users = UserDatabase::read(Path::new("/")).unwrap_or_default();
            let account =
                self.around.account(&users, None).unwrap_or_else(|_| self.around.fallback_account());
            let mut env = self.around.base.clone();
            env::add_account(&mut env, &account);
            session(&self.around.site(account), &env)
        })
    }

    /// Takes the step a call leads to. `false`: the call was taken before and nothing is to be done.
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
            why: told(error),
        };
        let users = UserDatabase::read(Path::new("/")).map_err(|error| failed(&error))?;
        let image = self.image_config();
        let of_image = image_user(&image.user);
        let user = submit.job_spec.user.as_ref().or(of_image.as_ref());
        let account = self.around.account(&users, user).map_err(|error| failed(&error))?;
        let default = self.around.site(account);
        let working_dir = match submit.job_spec.working_dir.as_deref() {
            None | Some("") => default.working_dir.clone(),
            Some(dir) => default.resolve(dir),
        };
        let mut site = UserContext { working_dir, ..default };
        if phase::wants_private_home(&submit.job_spec.env, self.around.scratch.as_deref()) {
            site.account.home = site.working_dir.join(phase::PRIVATE_HOME_DIR);
        }
        let hostfile = submit.cluster_info.as_ref().filter(|cluster| !cluster.job_ips.is_empty());
        let hostfile = hostfile.map(|_| match (&self.around.confined, self.around.in_container) {
            // The `run` directory is the runner's alone.
            (Some(inside), _) => inside.home.join(HOSTFILE_HOME),
            (None, true) => PathBuf::from(HOSTFILE_IN_CONTAINER),
            (None, false) => self.around.run.join(HOSTFILE),
        });
        let mut env = env::job_env(&self.around.base, &submit, &site, hostfile.as_deref());
        let phase =
            phase::set_phase_file(&mut env, self.around.scratch.as_deref(), &submit.job_submission.id);
        let gate = phase::gate(&mut env, self.around.scratch.as_deref(), &submit.job_submission.id);
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
        Ok(Plan { submit, site, env, argv, hostfile, phase, gate, names })
    }

    /// What the image itself would run, and as whom. Empty for a plain process.
    fn image_config(&self) -> ImageConfig {
        let text = std::fs::read(self.around.run.join(IMAGE_CONFIG)).unwrap_or_default();
        serde_json::from_slice(&text).unwrap_or_default()
    }

    /// Where the job's files for reaching its other nodes go.
    pub fn ssh_config_target<'a>(&self, account: &'a Account) -> cluster::SshConfigTarget<'a> {
        cluster::SshConfigTarget {
            account,
            task: self.around.config.task,
            in_container: self.around.in_container,
        }
    }
}

/// A program that cannot be given its port by the kernel is told another one.
fn set_host_port(env: &mut Env, ports: &TaskPorts) {
    let name = std::ffi::OsStr::new("PORT");
    let told = env.get(name).and_then(|port| port.to_str()?.parse().ok());
    if let Some(told) = told.filter(|_| !ports.is_rewritten) {
        env.insert(name.to_owned(), ports.own(told).to_string().into());
    }
}

/// `USER` of an image: `name`, `uid`, either with `:group`.
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

/// An error and what caused it, in one line.
pub fn told(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut next = error.source();
    while let Some(cause) = next {
        text.push_str(": ");
        text.push_str(&cause.to_string());
        next = cause.source();
    }
    text
}
