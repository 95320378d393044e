//! Slurm, through its commands and, for the most frequent calls, its REST daemon.
//!
//! Jobs are identified by name and tag, never by number alone: a controller that crashed reuses the number of a
//! forgotten job. A command that fails means "unknown", never "empty".

mod command;
mod parse;
mod rest;
mod translate;

use std::{collections::BTreeMap, path::PathBuf, time::Duration};

use parking_lot::Mutex;
use tokio::time::Instant;
use windlass_model::{
    dispatch::{
        Attempt, ContainerNeeds, SchedulerSnapshot,
        capacity::{ClusterCapacity, ClusterNode},
    },
    time::Timestamp,
};

use crate::{
    scheduler::{Scheduler, SchedulerError, StopMode, SubmitError, SubmitRequest},
    slurm::{command::SlurmCommands, rest::RestClient},
};

/// Time limit of a command. A controller that hangs makes every command wait for its own timeout first.
const COMMAND_TIMEOUT: Duration = Duration::from_secs(20);
/// Maximum number of our jobs that wait in Slurm's queue.
const PENDING_JOBS_MAX: usize = 1_000;

#[derive(Clone, Debug)]
pub struct Settings {
    /// `SLURM_CONF`, if it is not the default.
    pub config: Option<PathBuf>,
    /// Marks our jobs: those without it are never touched.
    pub tag: String,
    /// Program that a node runs for a container.
    pub executor: PathBuf,
    /// File for the executor's own output; `%j` is the job's number.
    pub output: String,
    /// Nice value per step of priority.
    pub nice_step: i64,
    pub account: Option<String>,
    pub partition: Option<String>,
    /// Quality of service for containers that may be preempted.
    pub preemptible_qos: Option<String>,
    /// Socket of a `slurmrestd`, if jobs are submitted through one.
    pub rest: Option<PathBuf>,
}

impl Settings {
    pub fn new(tag: impl Into<String>, executor: impl Into<PathBuf>) -> Self {
        Self {
            config: None,
            tag: tag.into(),
            executor: executor.into(),
            output: "/dev/null".to_owned(),
            nice_step: 1_000,
            account: None,
            partition: None,
            preemptible_qos: None,
            rest: None,
        }
    }
}

pub struct Slurm {
    settings: Settings,
    commands: SlurmCommands,
    rest: Option<RestClient>,
    begun: Instant,
    /// Time at which the end of each job was first observed.
    ended: Mutex<BTreeMap<Attempt, Timestamp>>,
    /// Node list of the last snapshot.
    nodes: Mutex<String>,
}

impl Slurm {
    pub fn new(settings: Settings) -> Self {
        Self::since(settings, Instant::now())
    }

    /// Creates the scheduler with the start of the dispatcher's clock.
    pub fn since(settings: Settings, begun: Instant) -> Self {
        let commands = SlurmCommands::new(settings.config.clone(), COMMAND_TIMEOUT);
        let rest = settings.rest.clone().map(|socket| RestClient::new(socket, COMMAND_TIMEOUT));
        Self { settings, commands, rest, begun, ended: Mutex::default(), nodes: Mutex::default() }
    }

    /// Current time of the dispatcher's clock. Only differences are meaningful.
    pub fn now(&self) -> Timestamp {
        Timestamp(i64::try_from(self.begun.elapsed().as_micros()).unwrap_or(i64::MAX))
    }

    /// Returns the REST daemon, if there is one with a supported version.
    async fn spoken(&self) -> Result<Option<&RestClient>, SchedulerError> {
        let Some(rest) = &self.rest else { return Ok(None) };
        Ok(rest.version().await?.map(|_| rest))
    }

    async fn list_nodes(&self) -> Result<String, SchedulerError> {
        self.commands.read("sinfo", &["-N", "-h", "-o", parse::NODE_FORMAT]).await
    }

    /// Returns this cluster's name for the requested GPUs.
    fn gpu_type(&self, needs: &ContainerNeeds) -> Option<String> {
        let nodes = parse::nodes(&self.nodes.lock()).unwrap_or_default();
        let cluster = ClusterCapacity { nodes, free_job_slots: 1 };
        cluster.gpu_type(needs).map(str::to_owned)
    }

    /// Changes a job. A job that has ended is not an error.
    async fn update_job(&self, program: &'static str, args: &[&str]) -> Result<(), SchedulerError> {
        match self.commands.read(program, args).await {
            Err(SchedulerError::Failed { message, code, .. })
                if parse::is_already_finished(&message)
                    || code.is_some_and(parse::is_exit_of_finished_job) =>
            {
                Ok(())
            }
            other => other.map(drop),
        }
    }
}

impl Scheduler for Slurm {
    type Room = ClusterCapacity;

    async fn snapshot(&self) -> Result<SchedulerSnapshot, SchedulerError> {
        // With a dead controller this command fails at once, the others after ten seconds.
        self.commands.read("scontrol", &["ping"]).await?;
        let requested_at = self.now();
        let nodes = self.list_nodes().await?;
        // Names of jobs may contain anything, also lines that look like jobs of this dispatcher: only jobs of its own
        // account are listed. Those of a `slurmrestd` may belong to another one.
        let own: &[&str] = if self.settings.rest.is_none() { &["--me"] } else { &[] };
        let words = [own, &["-h", "-t", "all", "-o", parse::JOB_FORMAT]].concat();
        let listed = self.commands.read("squeue", &words).await?;
        let mut ended = self.ended.lock();
        let jobs = parse::jobs(&listed, &self.settings.tag, self.settings.nice_step, |attempt| {
            *ended.entry(attempt.clone()).or_insert(requested_at)
        })?;
        ended.retain(|attempt, _| jobs.iter().any(|job| job.attempt == *attempt && job.state.is_ended()));
        let is_whole = parse::have_all_reported(&nodes);
        *self.nodes.lock() = nodes;
        Ok(SchedulerSnapshot { jobs, requested_at, is_complete: is_whole })
    }

    async fn room(&self, lower: &SchedulerSnapshot) -> Result<ClusterCapacity, SchedulerError> {
        let waiting = lower.jobs.iter().filter(|job| !job.state.is_ended()).count();
        let nodes = parse::nodes(&self.nodes.lock())?;
        Ok(ClusterCapacity { nodes, free_job_slots: PENDING_JOBS_MAX.saturating_sub(waiting) })
    }

    async fn submit(&self, order: &SubmitRequest) -> Result<String, SubmitError> {
        let gpu_type = self.gpu_type(&order.needs);
        if let Some(rest) = self.spoken().await.map_err(SubmitError::Unclear)? {
            return rest
                .submit(&translate::rest_submission(order, gpu_type.as_deref(), &self.settings))
                .await;
        }
        let args = translate::sbatch_arguments(order, gpu_type.as_deref(), &self.settings);
        let script = translate::batch_script(order, &self.settings);
        match self.commands.submit(&args, &order.environment, &script).await {
            Ok(message) => match parse::job_id(&message) {
                Some(id) => Ok(id),
                None => Err(SubmitError::Unclear(SchedulerError::InvalidOutput {
                    program: "sbatch",
                    line: message,
                })),
            },
            Err(SchedulerError::Failed { message, .. }) if parse::is_refusal(&message) => {
                Err(SubmitError::Refused { why: message })
            }
            Err(unclear) => Err(SubmitError::Unclear(unclear)),
        }
    }

    fn refuses_for_long(&self) -> bool {
        true
    }

    async fn stop(&self, job: &str, pressure: StopMode) -> Result<(), SchedulerError> {
        // A waiting job has no executor that could be signalled.
        self.update_job("scancel", &["--state=PENDING", job]).await?;
        match pressure {
            StopMode::Request => self.update_job("scancel", &["--batch", "--signal=TERM", job]).await,
            StopMode::Force => self.update_job("scancel", &[job]).await,
        }
    }

    async fn nodes(&self) -> Result<Vec<ClusterNode>, SchedulerError> {
        parse::nodes(&self.list_nodes().await?)
    }

    async fn renice(&self, job: &str, priority: u64) -> Result<(), SchedulerError> {
        let nice = translate::nice(priority, self.settings.nice_step);
        match self.spoken().await? {
            Some(rest) => rest.renice(job, nice).await,
            None => {
                let (job, nice) = (format!("JobId={job}"), format!("Nice={nice}"));
                self.update_job("scontrol", &["update", &job, &nice]).await
            }
        }
    }
}
