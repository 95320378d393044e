//! Pipeline `instances`: whether a host is there, and that only living jobs are on it.
//!
//! Claims   instances in Idle, Busy.
//! Owns     instances.status, instances.unreachable, instances.unreachable_since, instances.health,
//!          instances.seen_at.
//! Wakes    on hint, else every 7 s.
//! Why not  let placement turn an instance busy? Blocks are what placement takes; the word follows from
//!          them, and one pipeline writes it.

use windlass_engine::{Applied, DbTime, Lease, Pipeline, Queue};
use windlass_model::{
    decide::instances::{self as brain, Kind, Plan, Seen},
    event,
    id::InstanceId,
    instance::{self, Health},
    time::{Span, Timestamp},
};

use super::{Hands, applied, because, due_in};
use crate::{
    agents::{self, AgentError, Call},
    db::{
        Val,
        instances::Instance,
        passes::instances::{self as rows, Stray},
    },
    pass_error::PassError,
};

pub(super) struct Instances(pub(super) Hands);

pub(crate) const QUEUE: Queue =
    Queue { pipeline: "instances", table: "instances", statuses: &["idle", "busy"] };

/// What the host answered, and what on it should not be there.
pub(crate) struct Look {
    seen: Seen,
    strays: Vec<Stray>,
}

pub(crate) struct Next {
    plan: Plan,
    strays: Vec<Stray>,
}

impl Pipeline for Instances {
    type Row = Instance;
    type Seen = Look;
    type Plan = Next;
    type Error = PassError;

    fn queue(&self) -> Queue {
        QUEUE
    }

    async fn load(&self, lease: &Lease) -> Result<Option<Instance>, PassError> {
        Ok(rows::load(&self.0.db, lease).await?)
    }

    async fn observe(&self, lease: &Lease, _row: &Instance) -> Result<Look, PassError> {
        match self.0.agents.tasks(InstanceId(lease.id)).await {
            Ok(tasks) => {
                let strays = rows::strays(&self.0.db, lease.id, &tasks).await?;
                Ok(Look { seen: Seen::Answers { health: Health::Healthy }, strays })
            }
            Err(
                AgentError::Unreachable { .. }
                | AgentError::Barred { .. }
                | AgentError::Fenced { .. }
                | AgentError::Gone { .. }
                | AgentError::Conflict { .. }
                | AgentError::UnknownTask { .. }
                | AgentError::Refused { .. },
            ) => Ok(Look { seen: Seen::Silent, strays: Vec::new() }),
        }
    }

    fn decide(row: &Instance, look: Look, now: DbTime) -> Next {
        Next { plan: brain::decide(&view(row), &look.seen, Timestamp(now)), strays: look.strays }
    }

    /// What a dead job left on the host goes before the host is called reachable again.
    async fn act(&self, lease: &Lease, row: &Instance, next: &mut Next) -> Result<(), PassError> {
        for stray in &next.strays {
            let call =
                Call { instance: InstanceId(lease.id), submission: stray.submission, epoch: stray.epoch };
            if let Err(error) = agents::discard(&*self.0.agents, call, "terminated_by_server").await {
                tracing::debug!(instance = %row.id, stray = %stray.submission, %error, "not removed yet");
                next.plan = brain::decide(&view(row), &Seen::Silent, Timestamp(lease.now()));
                break;
            }
        }
        Ok(())
    }

    async fn apply(&self, lease: &Lease, row: Instance, next: Next) -> Result<Applied, PassError> {
        let plan = next.plan;
        let due_in_us = Some(due_in(lease, plan.due));
        let mut set = vec![
            ("unreachable", plan.unreachable_since.is_some().into()),
            ("unreachable_since", plan.unreachable_since.into()),
            ("health", plan.health.as_str().into()),
        ];
        if plan.unreachable_since.is_none() {
            set.push(("seen_at", Val::Now));
        }
        let mut record = None;
        if let Some(word) = follows(&row) {
            let message = format!("{} of its blocks are in use", row.busy_blocks);
            let why = because(event::Pipeline::Instance, lease, word.as_str(), message);
            let moved = event::transition::<instance::Instance>(row.id, row.status, word, why)?;
            set.push(("status", moved.status.into()));
            record = moved.record;
        } else if let Some(note) = &plan.note {
            let why = because(event::Pipeline::Instance, lease, "reachability", note);
            record = Some(event::Event::note(event::Entity::Instance, row.id, why));
        }
        let back = row.unreachable && plan.unreachable_since.is_none();
        let wake = if back { vec![super::jobs_submitted::QUEUE.pipeline] } else { vec![] };
        let written = rows::apply(&self.0.db, lease.held(), &row, set, record.as_ref(), due_in_us).await?;
        Ok(applied(&written, due_in_us, wake))
    }
}

/// Idle or busy, by the blocks in use.
fn follows(row: &Instance) -> Option<instance::Event> {
    match (row.status, row.busy_blocks > 0) {
        (instance::Status::Idle, true) => Some(instance::Event::JobAssigned),
        (instance::Status::Busy, false) => Some(instance::Event::LastJobFreed),
        (_, _) => None,
    }
}

fn view(row: &Instance) -> brain::Instance {
    brain::Instance {
        kind: Kind::Ssh,
        status: row.status,
        placeholder: false,
        created_at: row.created_at,
        provisioning_max: Span::mins(10),
        jobs: u32::from(row.busy_blocks > 0),
        idle_since: row.idle_since,
        idle_max: row.idle_seconds_max.map(Span::secs),
        above_min: false,
        unreachable_since: row.unreachable_since,
        health: row.health.parse().unwrap_or(Health::Healthy),
        terminating_since: None,
        delete_told: false,
    }
}
