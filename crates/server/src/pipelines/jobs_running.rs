//! Pipeline `jobs_running`: from a placed job to its last word.
//!
//! Claims   jobs in Provisioning, Pulling, Running.
//! Owns     jobs.status (from there), jobs.pulling_at, jobs.running_at, jobs.disconnected_at,
//!          jobs.status_message.
//! Wakes    on hint, else every 5 to 10 s; a silent agent is given 2 min.
//! Why not  push from the agent alone? The server must survive forgetting; polling is the one path
//!          that is exercised every day. Events of agents only make the row due.

use windlass_api::agent::{
    runner,
    shim::{NetworkMode, TaskInfo, TaskSpec, TaskStatus},
};
use windlass_engine::{Applied, DbTime, Lease, Pipeline, Queue};
use windlass_model::{
    decide::jobs_running::{self as brain, Action, Plan, Seen},
    event,
    id::InstanceId,
    instance, job,
    time::{Span, Timestamp},
};

use super::{Hands, applied, because, due_in};
use crate::{
    agents::{AgentError, Call, Pulled, Start},
    db::{
        Val, Values,
        mutant::{self, Mutant},
        passes::jobs::{self as rows, Loaded, Moved},
    },
    inventory,
    job_facts::JobFacts,
    job_orders::address,
    pass_error::PassError,
};

pub(super) struct JobsRunning(pub(super) Hands);

pub(crate) const QUEUE: Queue =
    Queue { pipeline: "jobs_running", table: "jobs", statuses: &["provisioning", "pulling", "running"] };

pub(crate) struct Row {
    loaded: Loaded,
    facts: JobFacts,
    job: brain::Job,
}

/// What was seen, unless somebody asked for the end: then there is nothing to look at.
pub(crate) enum Look {
    Asked(job::Ending),
    Seen(Seen),
}

pub(crate) enum Next {
    End(job::Ending),
    Go(Plan),
}

impl Pipeline for JobsRunning {
    type Row = Row;
    type Seen = Look;
    type Plan = Next;
    type Error = PassError;

    fn queue(&self) -> Queue {
        QUEUE
    }

    async fn load(&self, lease: &Lease) -> Result<Option<Row>, PassError> {
        let Some(loaded) = rows::load(&self.0.db, lease).await? else { return Ok(None) };
        let facts = JobFacts::of(&loaded.job)?;
        let job = view(&loaded, &facts);
        Ok(Some(Row { loaded, facts, job }))
    }

    async fn observe(&self, lease: &Lease, row: &Row) -> Result<Look, PassError> {
        if let Some(ending) = row.loaded.job.end_asked() {
            return Ok(Look::Asked(ending));
        }
        let mut seen = Seen {
            host: host(&row.loaded),
            shim: brain::Shim::NotAsked,
            runner: brain::Runner::NotAsked,
            gpu_idle: false,
        };
        let Some(call) = call(lease, &row.loaded) else { return Ok(Look::Seen(seen)) };
        let ask = brain::asks(&row.job);
        if ask.shim {
            seen.shim = shim(self.0.agents.task(call).await);
        }
        let runner_may_be_there =
            !ask.shim || matches!(&seen.shim, brain::Shim::Task(brain::Task::Running { .. }));
        if ask.runner && runner_may_be_there {
            seen.runner = runner(self.0.agents.pull(call).await);
        }
        if row.job.status == job::Status::Running && seen.runner == brain::Runner::Silent {
            // The runner may have gone down with its container: the shim knows.
            seen.shim = shim(self.0.agents.task(call).await);
        }
        Ok(Look::Seen(seen))
    }

    fn decide(row: &Row, look: Look, now: DbTime) -> Next {
        match look {
            Look::Asked(ending) => Next::End(ending),
            Look::Seen(seen) => Next::Go(brain::decide(&row.job, &seen, Timestamp(now))),
        }
    }

    async fn act(&self, lease: &Lease, row: &Row, next: &mut Next) -> Result<(), PassError> {
        let (Next::Go(plan), Some(call)) = (next, call(lease, &row.loaded)) else { return Ok(()) };
        for action in plan.actions.clone() {
            let done = match action {
                Action::SubmitTask => self.0.agents.submit_task(call, &row.task()?).await,
                Action::SubmitJob => self.0.agents.start_job(call, &row.start()?).await.map(drop),
                // The log store arrives with the agents; nothing is lost until the task is removed.
                Action::PullLogs => Ok(()),
            };
            if let Err(error) = done {
                // Not done, so the change that rests on it is not made; the next pass sees for itself.
                tracing::debug!(job = %row.loaded.job.id, ?action, %error, "agent call failed");
                plan.change = None;
                plan.ending = None;
                plan.disconnected_at = row.job.disconnected_at;
                plan.due = Timestamp(lease.now()) + brain::POLL_STARTING;
                break;
            }
        }
        Ok(())
    }

    async fn apply(&self, lease: &Lease, row: Row, next: Next) -> Result<Applied, PassError> {
        let job = &row.loaded.job;
        let (change, ending, mut set, due) = match &next {
            Next::End(ending) => {
                let message = ending.said().unwrap_or("the run asked for its end").to_owned();
                (Some((job::Event::StopAsked, ending.reason().as_str(), message)), Some(ending), vec![], None)
            }
            Next::Go(plan) => {
                let change = plan.change.as_ref().map(|c| (c.event, c.reason, c.message.clone()));
                let set = vec![
                    ("disconnected_at", plan.disconnected_at.into()),
                    ("status_message", plan.waits_for.map(|what| format!("waits for {what}")).into()),
                ];
                (change, plan.ending.as_ref(), set, Some(due_in(lease, plan.due)))
            }
        };
        let mut event = None;
        if let Some((what, reason, message)) = change {
            let why = because(event::Pipeline::JobRunning, lease, reason, message);
            let moved = event::transition::<job::Job>(job.id, job.status, what, why)?;
            event = moved.record;
            set.extend(entered(job.status, moved.status));
        }
        if let Some(ending) = ending {
            set.extend(rows::ending(ending));
            if mutant::active(Mutant::FinishedOutsideTerminating) {
                finish_here(&mut set, event.as_mut(), ending);
            }
        }
        let wake = match &event {
            None => vec![],
            Some(_) if ending.is_some() => {
                vec![super::runs::QUEUE.pipeline, super::jobs_terminating::QUEUE.pipeline]
            }
            Some(_) => vec![super::runs::QUEUE.pipeline, QUEUE.pipeline],
        };
        let written =
            rows::apply(&self.0.db, lease.held(), job, Moved { set, event, due_in_us: due }).await?;
        Ok(applied(&written, due, wake))
    }
}

/// The planted bug: nobody but `jobs_terminating` may do this.
fn finish_here(set: &mut Values, event: Option<&mut event::Event>, ending: &job::Ending) {
    let status = ending.final_status().status();
    set.retain(|(column, _)| *column != "status");
    set.extend([("status", status.into()), ("finished", true.into())]);
    if let Some(event) = event {
        event.to = Some(status.as_str());
        event.is_final = true;
    }
}

/// The columns that a new status brings along.
fn entered(from: job::Status, to: job::Status) -> Vec<(&'static str, Val)> {
    if from == to {
        return Vec::new();
    }
    match to {
        job::Status::Pulling => vec![("status", to.into()), ("pulling_at", Val::Now)],
        job::Status::Running => vec![("status", to.into()), ("running_at", Val::Now)],
        // An end sets its own status and time.
        job::Status::Terminating => Vec::new(),
        job::Status::Submitted
        | job::Status::Provisioning
        | job::Status::Terminated
        | job::Status::Aborted
        | job::Status::Failed
        | job::Status::Done => vec![("status", to.into())],
    }
}

impl Row {
    fn task(&self) -> Result<TaskSpec, PassError> {
        let shared = self.loaded.instance.as_ref().is_some_and(|i| i.total_blocks.unwrap_or(1) > 1);
        // A part of an instance gets ports of its own; several nodes always have the whole one.
        let bridge = shared && self.facts.jobs_per_replica == 1;
        // It gets the devices of its blocks, all of them and no others.
        let gpus = match &self.loaded.instance {
            Some(instance) => inventory::gpus_of(instance, self.loaded.job.blocks)?,
            None => 0,
        };
        Ok(TaskSpec {
            id: self.loaded.job.id,
            name: self.loaded.job.job_name.clone(),
            registry_username: String::new(),
            registry_password: String::new(),
            image_name: self.facts.image_name.clone(),
            container_user: String::new(),
            privileged: false,
            gpu: gpus.into(),
            cpu: 0.0,
            memory: 0,
            shm_size: 0,
            network_mode: if bridge { NetworkMode::Bridge } else { NetworkMode::Host },
            volumes: Vec::new(),
            volume_mounts: Vec::new(),
            instance_mounts: Vec::new(),
            gpu_devices: Vec::new(),
            host_ssh_user: String::new(),
            host_ssh_keys: Vec::new(),
            container_ssh_keys: Vec::new(),
            pids: 0,
            cluster: self.facts.jobs_per_replica > 1,
            claims: None,
        })
    }

    fn start(&self) -> Result<Start, PassError> {
        let job_spec = serde_json::from_str(&self.loaded.job.job_spec).map_err(PassError::document)?;
        let submit = runner::Submit {
            run: runner::Run::default(),
            job_spec,
            job_submission: runner::JobSubmission { id: self.loaded.job.id.to_string() },
            cluster_info: None,
            secrets: std::collections::BTreeMap::new(),
            repo_credentials: None,
            log_quota_hour: None,
            run_spec: None,
        };
        Ok(Start { submit, code: None, archives: Vec::new() })
    }
}

pub(super) fn call(lease: &Lease, loaded: &Loaded) -> Option<Call> {
    let instance: InstanceId = loaded.job.instance_id?;
    Some(Call { instance, submission: loaded.job.id, epoch: lease.epoch })
}

fn view(loaded: &Loaded, facts: &JobFacts) -> brain::Job {
    let Loaded { job, instance, siblings, run: _ } = loaded;
    let since = job.provisioned_at.unwrap_or(job.submitted_at);
    let (backend, kind) =
        instance.as_ref().map_or(("", ""), |i| (i.backend.as_deref().unwrap_or_default(), i.name.as_str()));
    brain::Job {
        status: job.status,
        provisioning_since: since,
        provisioning_max: brain::provisioning_max(backend, kind),
        pulling_since: job.pulling_at,
        running_since: job.running_at,
        disconnected_at: job.disconnected_at,
        instance_was_ready: instance
            .as_ref()
            .is_some_and(|i| matches!(i.status, instance::Status::Idle | instance::Status::Busy)),
        has_shim: true,
        spot: instance.as_ref().is_some_and(|i| i.spot),
        several: facts.jobs_per_replica > 1,
        is_master: job.job_num == 0,
        startup_order: facts.startup_order,
        siblings: brain::Siblings {
            all_have_ips: i64::from(facts.jobs_per_replica) == 1
                || (siblings.len() as i64 + 1 >= i64::from(facts.jobs_per_replica)
                    && siblings.iter().all(|s| address::of(s.machine.as_deref(), s.hostname.as_deref()).is_some())),
            master_runs: siblings.iter().any(|s| s.job_num == 0 && s.ran),
            workers_run: siblings.iter().filter(|s| s.job_num != 0).all(|s| s.ran),
        },
        max_duration: facts.max_duration.map(Span::secs),
        inactivity_duration: facts.inactivity_duration.map(Span::secs),
    }
}

fn host(loaded: &Loaded) -> brain::Host {
    match loaded.instance_status() {
        None | Some(instance::Status::Terminated) => brain::Host::Gone,
        Some(
            instance::Status::Pending
            | instance::Status::Provisioning
            | instance::Status::Idle
            | instance::Status::Busy
            | instance::Status::Terminating,
        ) => brain::Host::Fine,
    }
}

fn shim(answer: Result<TaskInfo, AgentError>) -> brain::Shim {
    let info = match answer {
        Ok(info) => info,
        Err(AgentError::UnknownTask { .. } | AgentError::Gone { .. }) => return brain::Shim::NoTask,
        Err(
            AgentError::Unreachable { .. }
            | AgentError::Barred { .. }
            | AgentError::Fenced { .. }
            | AgentError::Conflict { .. }
            | AgentError::Refused { .. },
        ) => {
            return brain::Shim::Silent;
        }
    };
    brain::Shim::Task(match info.status {
        TaskStatus::Pending => brain::Task::Pending,
        TaskStatus::Preparing => brain::Task::Preparing,
        TaskStatus::Pulling => brain::Task::Pulling,
        TaskStatus::Creating => brain::Task::Creating,
        TaskStatus::Running => brain::Task::Running { ports_known: info.ports.is_some() },
        TaskStatus::Terminated => {
            brain::Task::Terminated { reason: info.termination_reason, message: info.termination_message }
        }
    })
}

fn runner(answer: Result<Pulled, AgentError>) -> brain::Runner {
    let Ok(pulled) = answer else { return brain::Runner::Silent };
    let Some(state) = pulled.record.states.into_iter().next_back() else { return brain::Runner::Ready };
    let how = match state.state.as_str() {
        "done" => Some(brain::How::Done),
        "failed" => Some(brain::How::Failed),
        "terminated" => Some(brain::How::Terminated),
        _ => None,
    };
    brain::Runner::Pulled(brain::Pulled {
        ended: how.map(|how| brain::Ended {
            how,
            reason: state.termination_reason,
            message: state.termination_message,
            exit_status: state.exit_status,
        }),
        no_connections: pulled.no_connections_secs.map(Span::secs),
    })
}
