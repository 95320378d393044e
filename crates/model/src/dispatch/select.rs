//! Selection of queued containers to lock, and the reasons for leaving the others.

use std::collections::{BTreeMap, BTreeSet};

use windlass_planted_bugs::{Bug, is_planted};

use super::{ContainerNeeds, ContainerView, QueueSnapshot, capacity::NodeClass, turns::TurnOrder};
use crate::{
    container::Status,
    time::{Span, Timestamp},
};

/// Maximum delay before a container is locked again, and the number of doublings up to it.
const RETRY_DELAY_MAX: Span = Span::mins(1);
const RETRY_DELAY_DOUBLINGS: u32 = 6;
/// Delay after the first refusal of the scheduler, and the maximum; it doubles in between.
const REFUSAL_DELAY_MIN: Span = Span::secs(30);
const REFUSAL_DELAY_MAX: Span = Span::mins(60);

/// Fit of a container on this dispatcher.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Fit {
    Now,
    /// It fits, but other containers use the capacity.
    Later(String),
    /// Nothing here can fit it.
    Never(String),
}

/// Known capacity for containers. It only shrinks during one round.
pub trait Capacity {
    fn check_fit(&self, needs: &ContainerNeeds) -> Fit;
    fn allocate(&mut self, needs: &ContainerNeeds);
    /// Reserves the capacity that this container could already use, so that later containers do not use it.
    fn reserve(&mut self, needs: &ContainerNeeds);
    /// Returns the kinds of nodes, if a scheduler reports them: a refused container may be accepted once they change.
    fn node_classes(&self) -> Vec<NodeClass> {
        Vec::new()
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Selection {
    Take {
        uuid: String,
    },
    /// Reported to the queue once per change of the reason, not every round.
    Leave {
        uuid: String,
        why: String,
    },
}

/// Last reported reason of each container that was left in the queue.
#[derive(Clone, Debug, Default)]
pub struct ReportedReasons(BTreeMap<String, String>);

impl ReportedReasons {
    /// Records a reason and returns whether it is new. Also used for refused submissions.
    pub fn record(&mut self, uuid: &str, why: &str) -> bool {
        let before = self.0.insert(uuid.to_owned(), why.to_owned());
        before.is_none_or(|before| before != why)
    }
}

/// Number of times that each container was locked here, and the last time. One that returns to the queue is left for a
/// while: the cause, such as a restarting engine or a full disk, may pass, and its attempts are limited.
#[derive(Clone, Debug, Default)]
pub struct RetryLimiter {
    attempts: BTreeMap<String, (u32, Timestamp)>,
    refused: BTreeMap<String, RefusedSubmission>,
}

/// A submission that the scheduler refused.
#[derive(Clone, Debug)]
struct RefusedSubmission {
    reason: String,
    count: u32,
    at: Timestamp,
    /// The request, and the kinds of nodes at that time.
    needs: ContainerNeeds,
    node_classes: Vec<NodeClass>,
}

impl RetryLimiter {
    pub fn record_attempt(&mut self, uuid: &str, now: Timestamp) {
        let (count, at) = self.attempts.entry(uuid.to_owned()).or_insert((0, now));
        (*count, *at) = (count.saturating_add(1), now);
    }

    /// Records a refusal by the scheduler. The container is submitted again if its request changes, if the kinds of
    /// nodes change, or after a delay that grows with each refusal. Returns the reason to report.
    pub fn refused(
        &mut self,
        container: &ContainerView,
        why: &str,
        kinds: &[NodeClass],
        now: Timestamp,
    ) -> String {
        // It never left the queue, so there is no attempt to recover.
        self.attempts.remove(&container.uuid);
        let before = self.refused.get(&container.uuid).map_or(0, |refused| refused.count);
        let why = format!("the scheduler refused it: {why}");
        let refused = RefusedSubmission {
            reason: why.clone(),
            count: before.saturating_add(1),
            at: now,
            needs: container.needs.clone(),
            node_classes: kinds.to_vec(),
        };
        self.refused.insert(container.uuid.clone(), refused);
        why
    }

    /// Returns why it is not submitted again, as long as nothing has changed.
    fn refusal_reason(
        &self,
        container: &ContainerView,
        kinds: &[NodeClass],
        now: Timestamp,
    ) -> Option<String> {
        let refused = self.refused.get(&container.uuid)?;
        let doublings = refused.count.saturating_sub(1).min(RETRY_DELAY_DOUBLINGS + 1);
        let rest = Span(REFUSAL_DELAY_MIN.0 << doublings).min(REFUSAL_DELAY_MAX);
        let holds = refused.needs == container.needs && refused.node_classes == kinds;
        (holds && now.since(refused.at) < rest).then(|| refused.reason.clone())
    }

    /// Returns the number of attempts, if it is too early to lock it again.
    fn attempts_in_backoff(&self, uuid: &str, now: Timestamp) -> Option<u32> {
        let (count, at) = self.attempts.get(uuid)?;
        let rest = Span::secs(1 << count.saturating_sub(1).min(RETRY_DELAY_DOUBLINGS));
        (now.since(*at) < rest.min(RETRY_DELAY_MAX)).then_some(*count)
    }

    fn retain(&mut self, is_kept: impl Fn(&str) -> bool) {
        self.attempts.retain(|uuid, _| is_kept(uuid));
        self.refused.retain(|uuid, _| is_kept(uuid));
    }
}

/// Selects in the order of turns; at most `takes_max` containers are locked in one round.
pub fn select(
    queue: &QueueSnapshot,
    room: &mut dyn Capacity,
    takes_max: usize,
    message: &mut ReportedReasons,
    tries: &mut RetryLimiter,
) -> Vec<Selection> {
    let mut waiting: Vec<&ContainerView> =
        queue.containers.iter().filter(|one| one.status == Status::Queued && one.priority > 0).collect();
    let still: BTreeSet<&str> = waiting.iter().map(|one| one.uuid.as_str()).collect();
    message.0.retain(|uuid, _| still.contains(uuid.as_str()));
    tries.retain(|uuid| still.contains(uuid) || queue.find(uuid).is_some_and(|one| !one.status.is_final()));
    let kinds = room.node_classes();
    let (mut choices, mut taken) = (Vec::new(), 0);
    let mut order = TurnOrder::new(waiting.iter().copied(), &queue.usage);
    waiting.sort_by_key(|one| one.created_at);
    let mut by_age = waiting.into_iter();
    while let Some(container) = if is_planted(Bug::IgnorePriority) { by_age.next() } else { order.pop() } {
        let uuid = container.uuid.clone();
        if let Some(why) = tries.refusal_reason(container, &kinds, queue.requested_at) {
            if message.record(&uuid, &why) {
                choices.push(Selection::Leave { uuid, why });
            }
            continue;
        }
        if let Some(times) = tries.attempts_in_backoff(&uuid, queue.requested_at) {
            let why = format!(
                "this dispatcher returned it to the queue {times} times; waiting before the next attempt"
            );
            if message.record(&uuid, &why) {
                choices.push(Selection::Leave { uuid, why });
            }
            continue;
        }
        match room.check_fit(&container.needs) {
            Fit::Now if taken < takes_max => {
                room.allocate(&container.needs);
                order.count_as_taken(container);
                message.0.remove(&uuid);
                taken += 1;
                choices.push(Selection::Take { uuid });
            }
            // The next round continues here.
            Fit::Now => break,
            Fit::Later(why) => {
                room.reserve(&container.needs);
                if message.record(&uuid, &why) {
                    choices.push(Selection::Leave { uuid, why });
                }
            }
            Fit::Never(why) => {
                if message.record(&uuid, &why) {
                    choices.push(Selection::Leave { uuid, why });
                }
            }
        }
    }
    choices
}

#[cfg(test)]
mod tests {
    use super::{
        super::capacity::{HostCapacity, ResourceAmount},
        *,
    };
    fn container(uuid: &str, priority: u64, cpus: u32) -> ContainerView {
        ContainerView {
            uuid: uuid.into(),
            status: Status::Queued,
            priority,
            attempt: 0,
            created_at: Timestamp(0),
            owner: "u".into(),
            is_locked_here: false,
            needs: ContainerNeeds { cpus, memory: 1, ..ContainerNeeds::default() },
        }
    }

    fn round(containers: Vec<ContainerView>, free: u32, message: &mut ReportedReasons) -> Vec<Selection> {
        let queue = QueueSnapshot { containers, ..QueueSnapshot::default() };
        let total = ResourceAmount { cpus: 8, memory: 100, gpus: 0 };
        let mut room =
            HostCapacity::new(total, ResourceAmount { cpus: 8 - free, ..ResourceAmount::default() });
        select(&queue, &mut room, 10, message, &mut RetryLimiter::default())
    }

    fn taken(choices: &[Selection]) -> Vec<&str> {
        fn uuid(choice: &Selection) -> Option<&str> {
            match choice {
                Selection::Take { uuid } => Some(uuid),
                Selection::Leave { .. } => None,
            }
        }
        choices.iter().filter_map(uuid).collect()
    }

    #[test]
    fn the_highest_priority_comes_first_then_the_oldest_then_the_smallest_name() {
        let older = ContainerView { created_at: Timestamp(-1), ..container("z", 5, 1) };
        let all = vec![container("b", 5, 1), container("a", 5, 1), older, container("c", 9, 1)];
        assert_eq!(taken(&round(all, 8, &mut ReportedReasons::default())), ["c", "z", "a", "b"]);
    }

    #[test]
    fn r13_a_container_with_priority_zero_or_a_lock_is_not_selected() {
        let held = ContainerView { status: Status::Locked, ..container("h", 5, 1) };
        assert_eq!(round(vec![container("n", 0, 1), held], 8, &mut ReportedReasons::default()), []);
    }

    #[test]
    fn c8_a_lower_priority_container_does_not_take_capacity_a_higher_one_waits_for() {
        let all = vec![container("big", 9, 6), container("small", 1, 1)];
        assert!(taken(&round(all, 4, &mut ReportedReasons::default())).is_empty());
        // Capacity that the big container cannot use is free for others.
        let all = vec![container("big", 9, 6), container("small", 1, 1)];
        assert_eq!(taken(&round(all, 7, &mut ReportedReasons::default())), ["big", "small"]);
    }

    #[test]
    fn a_container_that_can_never_fit_does_not_block_others() {
        let all = vec![container("huge", 9, 64), container("small", 1, 1)];
        let mut message = ReportedReasons::default();
        let choices = round(all.clone(), 4, &mut message);
        assert_eq!(taken(&choices), ["small"]);
        assert!(
            matches!(&choices[0], Selection::Leave { uuid, why } if uuid == "huge" && why.contains("64"))
        );
        assert_eq!(round(all, 4, &mut message).len(), 1, "the reason is told once");
    }

    #[test]
    fn a_round_selects_at_most_its_limit_in_priority_order() {
        let all = vec![container("a", 3, 1), container("b", 2, 1), container("c", 1, 1)];
        let queue = QueueSnapshot { containers: all, ..QueueSnapshot::default() };
        let mut room =
            HostCapacity::new(ResourceAmount { cpus: 8, memory: 100, gpus: 0 }, ResourceAmount::default());
        let chosen =
            select(&queue, &mut room, 2, &mut ReportedReasons::default(), &mut RetryLimiter::default());
        assert_eq!(taken(&chosen), ["a", "b"]);
    }

    #[test]
    fn a_returned_container_backs_off_longer_each_time_without_blocking_others() {
        let (mut message, mut tries) = (ReportedReasons::default(), RetryLimiter::default());
        let mut round = |second: i64, tries: &mut RetryLimiter| {
            let containers = vec![container("comes-back", 9, 1), container("other", 1, 1)];
            let queue = QueueSnapshot {
                containers,
                requested_at: Timestamp(second * 1_000_000),
                ..QueueSnapshot::default()
            };
            let mut room = HostCapacity::new(
                ResourceAmount { cpus: 1, memory: 100, gpus: 0 },
                ResourceAmount::default(),
            );
            let chosen = select(&queue, &mut room, 10, &mut message, tries);
            taken(&chosen)[0].to_owned()
        };
        assert_eq!(round(0, &mut tries), "comes-back");
        tries.record_attempt("comes-back", Timestamp(0));
        assert_eq!(round(0, &mut tries), "other");
        assert_eq!(round(1, &mut tries), "comes-back");
        for _ in 0..20 {
            tries.record_attempt("comes-back", Timestamp(0));
        }
        assert_eq!(round(59, &mut tries), "other", "it rests, and no longer than a minute");
        assert_eq!(round(60, &mut tries), "comes-back");
        let gone = QueueSnapshot::default();
        let mut room = HostCapacity::new(ResourceAmount::default(), ResourceAmount::default());
        select(&gone, &mut room, 10, &mut message, &mut tries);
        assert!(tries.attempts.is_empty(), "what is over is forgotten");
    }

    #[test]
    fn a_container_the_scheduler_refused_is_retried_after_a_change_or_a_growing_delay() {
        let (mut message, mut tries) = (ReportedReasons::default(), RetryLimiter::default());
        let node = |cpus| super::super::capacity::ClusterNode {
            name: "n1".into(),
            is_up: true,
            size: ResourceAmount { cpus, memory: 100, gpus: 0 },
            gpu_types: Vec::new(),
            partitions: vec!["main".into()],
            features: Vec::new(),
        };
        let mut round = |second: i64, requested_nodes: u32, nodes: u32, tries: &mut RetryLimiter| {
            let queue = QueueSnapshot {
                containers: vec![container("c", 5, requested_nodes)],
                requested_at: Timestamp(second * 1_000_000),
                ..QueueSnapshot::default()
            };
            let mut room =
                super::super::capacity::ClusterCapacity { nodes: vec![node(nodes)], free_job_slots: 9 };
            select(&queue, &mut room, 10, &mut message, tries)
        };
        let take = [Selection::Take { uuid: "c".into() }];
        assert_eq!(round(0, 1, 8, &mut tries), take);
        tries.record_attempt("c", Timestamp(0));
        let kinds = super::super::capacity::node_classes(&[node(8)]);
        let why = tries.refused(&container("c", 5, 1), "Invalid account", &kinds, Timestamp(0));
        assert_eq!(why, "the scheduler refused it: Invalid account");
        // The message is kept, and reported once.
        assert_eq!(round(1, 1, 8, &mut tries), [Selection::Leave { uuid: "c".into(), why }]);
        assert_eq!(round(29, 1, 8, &mut tries), []);
        assert_eq!(round(29, 2, 8, &mut tries), take, "it asks for something else");
        assert_eq!(round(29, 1, 4, &mut tries), take, "there are other machines");
        assert_eq!(round(30, 1, 8, &mut tries), take, "it is time to ask again");
        for _ in 0..20 {
            tries.refused(&container("c", 5, 1), "Invalid account", &kinds, Timestamp(0));
        }
        assert_ne!(round(3_599, 1, 8, &mut tries), take, "each time it takes longer");
        assert_eq!(round(3_600, 1, 8, &mut tries), take);
    }
}
