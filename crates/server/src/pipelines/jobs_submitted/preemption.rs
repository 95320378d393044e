//! Preemption: jobs of fleets that allow it end, so that a waiting one can start.
//!
//! The request is a column of each job that ends. `jobs_running` performs it, and `jobs_terminating` gives the job its
//! grace period. The blocks are kept for the waiting job in its own row.

use std::collections::{BTreeMap, BTreeSet};

use windlass_engine::{ApplyOutcome, Lease};
use windlass_model::{
    decide::jobs_terminating::{LOGS_GRACE, give_up_timeout},
    id::{FleetId, InstanceId},
    plan::{
        preemption::{BlockPromise, Preemption, PreemptionRule, Victim},
        quota::{HeldResources, Quota, QuotaResource, least_amount},
    },
    time::Timestamp,
};

use super::{JobsSubmittedPipeline, PlacementContext, apply_outcome, due_in, wait_classes::QueuedReplica};
use crate::{
    db::{
        WriteOutcome,
        jobs::Job,
        pipeline_rows::{
            placement::{self, PoolInventory},
            preemption::{self as rows, PreemptionNote, PreemptionUpdate},
            wait_classes as class_rows,
        },
    },
    parsed_fleet_spec,
    pass_error::PassError,
    pipelines::jobs_running,
};

impl JobsSubmittedPipeline {
    /// Reads who runs on the fleets that allow preemption.
    pub(super) async fn load_running(
        &self,
        stock: &mut PoolInventory,
        now: Timestamp,
    ) -> Result<(), PassError> {
        // A fleet whose specification cannot be read is not in the inventory at all.
        let allow = |fleet: &&crate::db::fleets::Fleet| {
            parsed_fleet_spec::for_fleet(fleet).is_ok_and(|shape| shape.preemption().is_some())
        };
        let fleets: BTreeSet<FleetId> = stock.fleets.iter().filter(allow).map(|fleet| fleet.id).collect();
        if !fleets.is_empty() {
            placement::load_running(&self.context.db, stock, &fleets, now).await?;
        }
        Ok(())
    }

    /// Requests the end of the victims and leaves the job in the queue, with the blocks that are kept for it.
    pub(super) async fn preempt(
        &self,
        lease: &Lease,
        job: &Job,
        queued: &QueuedReplica<'_>,
        preemption: &Preemption,
        (why, due): (String, Timestamp),
        site: &PlacementContext<'_>,
    ) -> Result<ApplyOutcome, PassError> {
        let db = &self.context.db;
        let count = preemption.victims.len();
        let what = if count == 1 { "a job".to_owned() } else { format!("{count} jobs") };
        let message = format!("waiting for {what} to end, preempted for this one");
        let set = vec![
            ("shortfalls", why.into()),
            ("status_message", message.into()),
            ("wait_class", crate::db::Val::Null),
            ("parked", false.into()),
        ];
        let left = job.wait_class.as_deref();
        let wakes = left.map(|left| class_rows::wake_if_headless(db, left)).into_iter().collect();
        let instances: BTreeSet<InstanceId> =
            preemption.promises.iter().map(|promise| promise.instance).collect();
        let kept = kept_resources(preemption, site);
        let time_to_lose = give_up_timeout(self.context.lost_after);
        let due_in_us = Some(due_in(lease, due));
        let update = PreemptionUpdate {
            waiting: job.id,
            held: lease.key(),
            due_in_us,
            set,
            promises: &preemption.promises,
            promised_until: site.now + preemption.grace + LOGS_GRACE + time_to_lose,
            victims: requests(queued, preemption),
            budgets: budgets(preemption, site),
            instances: site.stock.instances.iter().filter(|one| instances.contains(&one.id)).collect(),
            now: site.now,
            wakes,
            project: queued.waiting.project,
            run: queued.waiting.run,
            shares: shares(queued, &kept, site),
            kept,
            quotas_of: preemption
                .victims
                .iter()
                .map(|victim| victim.project)
                .chain([queued.waiting.project])
                .collect(),
        };
        let written = rows::apply(db, update).await?;
        if let WriteOutcome::Done { .. } = &written {
            tracing::info!(job = %job.id, victims = count, "preempted jobs");
        }
        let wake = vec![super::QUEUE.pipeline, jobs_running::QUEUE.pipeline];
        Ok(match written {
            WriteOutcome::Stale { at: Some(_) } => ApplyOutcome::RelatedBusy,
            written @ (WriteOutcome::Done { .. } | WriteOutcome::Stale { at: None }) => {
                apply_outcome(&written, due_in_us, wake)
            }
        })
    }
}

/// Resources of the blocks that are kept.
fn kept_resources(preemption: &Preemption, site: &PlacementContext<'_>) -> HeldResources {
    let part = |promise: &BlockPromise| {
        let offer = &site.inventory.instances.iter().find(|one| one.id == promise.instance)?.offer;
        Some(HeldResources::of(offer, promise.blocks, offer.total_blocks))
    };
    let parts = preemption.promises.iter().filter_map(part);
    parts.fold(HeldResources::default(), |sum, part| sum.plus(&part))
}

/// Shares of the project that limit what it may take back, with the requested amount without what is kept.
fn shares(
    queued: &QueuedReplica<'_>,
    kept: &HeldResources,
    site: &PlacementContext<'_>,
) -> Vec<(QuotaResource, i64)> {
    let signed = |amount: u64| i64::try_from(amount).unwrap_or(i64::MAX);
    let own = site.inventory.quotas.iter().filter(|quota| {
        quota.project == queued.waiting.project && quota.member.is_none() && quota.share.is_some()
    });
    let more = |quota: &Quota| {
        let nodes = queued.waiting.nodes.iter().filter_map(|node| node.needs.resources.as_ref());
        let wanted: u64 = nodes.map(|wanted| least_amount(wanted, &quota.resource)).sum();
        let more = signed(wanted) - signed(kept.amount(&quota.resource));
        (wanted > 0).then(|| (quota.resource.clone(), more))
    };
    own.filter_map(more).collect()
}

/// The requests to end. Names of another project are not shown.
fn requests(
    queued: &QueuedReplica<'_>,
    preemption: &Preemption,
) -> Vec<(windlass_model::id::SubmissionId, PreemptionNote)> {
    let of_victim = |victim: &Victim| {
        let is_own = victim.project == queued.waiting.project;
        let whom = match is_own {
            true => format!("run `{}`", queued.run.name),
            false => "a run of another project".to_owned(),
        };
        let rule = match victim.rule {
            PreemptionRule::Class => format!("{whom} is of class `{}`", queued.waiting.class),
            PreemptionRule::Share => {
                format!("{whom} is within its share, and this project holds more than its own")
            }
        };
        let note = PreemptionNote {
            rule: victim.rule,
            grace_us: victim.grace.0,
            message: format!("preempted: {rule}"),
        };
        victim.jobs.iter().map(move |job| (*job, note.clone())).collect::<Vec<_>>()
    };
    preemption.victims.iter().flat_map(of_victim).collect()
}

/// Fleets of the victims, with the whole budget of each.
fn budgets(preemption: &Preemption, site: &PlacementContext<'_>) -> BTreeMap<FleetId, u32> {
    let victims = preemption.victims.iter().map(|victim| (victim.run, victim.replica_num));
    let victims: BTreeSet<_> = victims.collect();
    let replicas = site.inventory.running.iter();
    let replicas = replicas.filter(|one| victims.contains(&(one.run, one.replica_num)));
    let on: BTreeSet<InstanceId> = replicas.flat_map(|one| one.jobs.iter().map(|job| job.instance)).collect();
    let instances = site.stock.instances.iter().filter(|one| on.contains(&one.id));
    let fleets: BTreeSet<FleetId> = instances.filter_map(|one| one.fleet_id).collect();
    let budget = |fleet: &FleetId| {
        let rules = parsed_fleet_spec::for_fleet(site.fleet(*fleet)?).ok()?.preemption()?;
        Some((*fleet, rules.budget_left))
    };
    fleets.iter().filter_map(budget).collect()
}
