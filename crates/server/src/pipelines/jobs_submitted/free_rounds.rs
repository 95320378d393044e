//! Rounds of placement that read only instances with free blocks.
//!
//! Most rounds place what they claimed, or find that a class still waits whose reason is known. Neither needs the
//! occupied instances, so a round costs the same with ten hosts as with ten thousand.
//!
//! Why not  always? The reasons of a job that waits, the instances that it reserves and those that could be created
//!          depend on everything. Such a round follows at once, but for each class only at intervals.

use std::collections::HashMap;

use parking_lot::Mutex;
use windlass_model::{
    id::ProjectId,
    plan::{
        place::{
            Inventory, NodePlacement, PlacementOutcome, RESERVE_AFTER, ReplicaPlacement, place_replicas,
        },
        preemption::next_wait_end,
    },
    time::{Span, Timestamp},
};

use super::{
    JobsSubmittedPipeline, Outcomes, PlacementContext, RoundScope,
    wait_classes::{QueuedReplica, outcomes_by_job},
};
use crate::{db::pipeline_rows::placement, inventory, pass_error::PassError, plain_processes::ProcessRights};

/// Interval at which the whole inventory is read for a class that waits.
const WHOLE_ROUND_INTERVAL: Span = Span::secs(4);

/// Classes that the whole inventory could not place, and until when that is assumed. Only this server's: another one reads
/// it again.
#[derive(Default)]
pub(in crate::pipelines) struct RecentWaits(Mutex<HashMap<String, Timestamp>>);

impl RecentWaits {
    fn contains(&self, class: &str, now: Timestamp) -> bool {
        self.0.lock().get(class).is_some_and(|until| now < *until)
    }

    fn record<'a>(&self, classes: impl Iterator<Item = (&'a str, Timestamp)>, now: Timestamp) {
        let mut known = self.0.lock();
        known.retain(|_, until| now < *until);
        known.extend(classes.map(|(class, until)| (class.to_owned(), until)));
    }
}

impl JobsSubmittedPipeline {
    /// Performs a round over the free instances. `None` if the whole inventory has to be read. `has_others`: others that it
    /// does not place may reserve instances.
    pub(super) async fn place_on_free(
        &self,
        projects: &[ProjectId],
        queue: &mut [QueuedReplica<'_>],
        has_others: bool,
        allowed: ProcessRights,
        now: Timestamp,
    ) -> Result<Option<Outcomes>, PassError> {
        if queue.iter().any(|one| one.waiting.nodes.len() > 1) {
            return Ok(None);
        }
        let stock = placement::load_free_inventory(&self.context.db, projects, now).await?;
        let inventory = inventory::build_inventory(&stock, &[], allowed)?;
        queue.iter_mut().for_each(|one| one.select_fleets(&stock));
        let views: Vec<_> = queue.iter().map(|one| one.waiting.clone()).collect();
        let mut placements = place_replicas(&views, &inventory, now);
        if !self.is_complete(queue, has_others, &placements, now) {
            return Ok(None);
        }
        let counts = self.wake_counts((queue, &[]), &inventory, now, &mut placements).await?;
        if !self.is_complete(queue, has_others, &placements, now) {
            return Ok(None);
        }
        for placement in &mut placements {
            // Without the occupied instances it is not known that waiting cannot help.
            if let PlacementOutcome::Never { why } = &placement.outcome {
                placement.outcome = PlacementOutcome::Waits { why: why.clone(), reserved: Vec::new() };
            }
        }
        let site = PlacementContext { stock: &stock, inventory: &inventory, now, scope: RoundScope::Free };
        self.write_all(queue, &placements, counts, &site).await.map(Some)
    }

    /// Returns whether the whole inventory would lead to the same placements. `has_others`: others that the round does not
    /// place may reserve instances.
    fn is_complete(
        &self,
        queue: &[QueuedReplica<'_>],
        has_others: bool,
        placements: &[ReplicaPlacement],
        now: Timestamp,
    ) -> bool {
        let outcomes = outcomes_by_job(placements);
        let is_placed = |one: &QueuedReplica<'_>| {
            outcomes.get(&one.job().id).is_some_and(|outcome| is_on_instances(outcome))
        };
        let (placed, waiting): (Vec<_>, Vec<_>) = queue.iter().partition(|one| is_placed(one));
        let is_known = |one: &QueuedReplica<'_>| {
            let is_recent = one.class.as_ref().is_some_and(|class| self.recent_waits.contains(class, now));
            is_recent && one.job().shortfalls.is_some()
        };
        let are_known = waiting.iter().all(|one| is_known(one));
        // One that has waited for long reserves instances, which the others may not use then.
        let may_reserve =
            has_others || waiting.iter().any(|one| now.since(one.waiting.since) >= RESERVE_AFTER);
        are_known && (placed.is_empty() || !may_reserve)
    }

    /// Records the classes that a round over the whole inventory could not place. Others may be preempted for one that has
    /// waited for long enough, which only another such round finds.
    pub(super) fn record_waits(
        &self,
        queue: &[QueuedReplica<'_>],
        placements: &[ReplicaPlacement],
        inventory: &Inventory,
        now: Timestamp,
    ) {
        let outcomes = outcomes_by_job(placements);
        let waits = |one: &&QueuedReplica<'_>| {
            matches!(outcomes.get(&one.job().id), Some(PlacementOutcome::Waits { .. }))
        };
        let until = |one: &QueuedReplica<'_>| {
            let wait_end = next_wait_end(&one.waiting, &inventory.fleets, now);
            wait_end.map_or(now + WHOLE_ROUND_INTERVAL, |end| end.min(now + WHOLE_ROUND_INTERVAL))
        };
        let classes = queue.iter().filter(waits).filter_map(|one| Some((one.class.as_deref()?, until(one))));
        self.recent_waits.record(classes, now);
    }
}

/// Returns whether a replica is placed on instances that exist.
fn is_on_instances(outcome: &PlacementOutcome) -> bool {
    match outcome {
        PlacementOutcome::Placed { seats, .. } => {
            seats.iter().all(|seat| matches!(seat, NodePlacement::Existing { .. }))
        }
        PlacementOutcome::Waits { .. } | PlacementOutcome::Never { .. } => false,
    }
}
