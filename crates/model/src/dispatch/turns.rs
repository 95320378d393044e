//! Order in which a dispatcher considers queued containers: that of waiting runs (`plan/queue_order.rs`).
//!
//! A container that is the job of a run counts for the project of the run and has the class of the run; any other counts
//! for the user who requested it, and has the class `normal`. Between the containers of one owner, priority and age
//! decide.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use serde::{Deserialize, Deserializer, Serialize, Serializer, de::Error as _};

use super::{ContainerNeeds, ContainerView};
use crate::{
    config::run::RunClass,
    plan::{
        queue_order::{OrderInputs, OrderKey, usage_score},
        usage,
    },
    time::Timestamp,
};

const MIB_SHIFT: u32 = 20;

/// Guaranteed share of a project.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct OwnerShare {
    /// As in a quota.
    pub resource: String,
    pub share: u64,
    /// Amount that the jobs of the project hold, without those that wait in the queue of containers.
    pub used: u64,
}

/// Usage of a project or of a user.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct OwnerUsage {
    /// Id of the project, or uuid of the user.
    pub owner: String,
    /// Seconds of thousandths of units, decayed.
    pub used: f64,
    /// Thousandths of units that are held now.
    pub held: u64,
    pub weight: u32,
    pub shares: Vec<OwnerShare>,
}

impl OwnerUsage {
    fn none(owner: &str) -> Self {
        Self { owner: owner.to_owned(), used: 0.0, held: 0, weight: 1, shares: Vec::new() }
    }
}

/// A queued container that is the job of a run.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct JobRank {
    /// Id of the project.
    pub owner: String,
    #[serde(serialize_with = "write_class", deserialize_with = "read_class")]
    pub class: RunClass,
    /// Amounts that it will hold of the resources of which the project has shares.
    pub amounts: BTreeMap<String, u64>,
}

fn write_class<S: Serializer>(class: &RunClass, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(class.as_str())
}

fn read_class<'de, D: Deserializer<'de>>(deserializer: D) -> Result<RunClass, D::Error> {
    let word = String::deserialize(deserializer)?;
    RunClass::parse(&word).ok_or_else(|| D::Error::custom(format!("unknown class `{word}`")))
}

/// Data on which the order depends in addition to the containers.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct QueueUsage {
    /// By the clock of the server.
    pub now: Timestamp,
    pub owners: Vec<OwnerUsage>,
    /// By uuid of the container.
    pub jobs: BTreeMap<String, JobRank>,
}

impl QueueUsage {
    fn owner<'a>(&'a self, container: &'a ContainerView) -> &'a str {
        self.jobs.get(&container.uuid).map_or(&container.owner, |job| &job.owner)
    }
}

impl ContainerNeeds {
    fn milli_units(&self) -> u64 {
        usage::milli_units(self.gpus.into(), self.cpus.into(), self.memory >> MIB_SHIFT)
    }
}

/// Queued containers by owner, each owner in the order of its containers.
pub(super) struct TurnOrder<'a> {
    usage: &'a QueueUsage,
    queues: BTreeMap<&'a str, VecDeque<&'a ContainerView>>,
    owners: BTreeMap<&'a str, OwnerUsage>,
    /// The next container of each owner.
    next: BTreeSet<(OrderKey<&'a str>, &'a str)>,
}

impl<'a> TurnOrder<'a> {
    pub(super) fn new(waiting: impl Iterator<Item = &'a ContainerView>, usage: &'a QueueUsage) -> Self {
        let owners = usage.owners.iter().map(|one| (one.owner.as_str(), one.clone())).collect();
        let mut order = Self { usage, queues: BTreeMap::new(), owners, next: BTreeSet::new() };
        let mut by_owner: BTreeMap<&str, Vec<&ContainerView>> = BTreeMap::new();
        for container in waiting {
            by_owner.entry(usage.owner(container)).or_default().push(container);
        }
        for (owner, mut waiting) in by_owner {
            waiting.sort_by_cached_key(|one| order.key(one).without_project());
            order.queues.insert(owner, waiting.into());
            order.refresh(owner);
        }
        order
    }

    /// Removes and returns the container that is considered next.
    pub(super) fn pop(&mut self) -> Option<&'a ContainerView> {
        let (_, owner) = self.next.pop_first()?;
        let container = self.queues.get_mut(owner)?.pop_front();
        self.refresh(owner);
        container
    }

    /// Counts a container that is taken for its owner, which changes the place of the owner's next one.
    pub(super) fn count_as_taken(&mut self, container: &'a ContainerView) {
        let owner = self.usage.owner(container);
        let key = self.queues.get(owner).and_then(VecDeque::front).map(|first| self.key(first));
        if let Some(key) = key {
            self.next.remove(&(key, owner));
        }
        let counted = self.owners.entry(owner).or_insert_with(|| OwnerUsage::none(owner));
        counted.held = counted.held.saturating_add(container.needs.milli_units());
        if let Some(job) = self.usage.jobs.get(&container.uuid) {
            for share in &mut counted.shares {
                share.used += job.amounts.get(&share.resource).copied().unwrap_or_default();
            }
        }
        self.refresh(owner);
    }

    fn refresh(&mut self, owner: &'a str) {
        if let Some(first) = self.queues.get(owner).and_then(VecDeque::front) {
            self.next.insert((self.key(first), owner));
        }
    }

    fn key(&self, container: &'a ContainerView) -> OrderKey<&'a str> {
        let job = self.usage.jobs.get(&container.uuid);
        let owner = self.owners.get(self.usage.owner(container));
        OrderKey::new(OrderInputs {
            waited: self.usage.now.since(container.created_at),
            class: job.map_or(RunClass::Normal, |job| job.class),
            borrows: !owner.zip(job).is_some_and(|(owner, job)| is_within_share(owner, job)),
            usage: owner.map_or(0, |owner| usage_score(owner.used, owner.held, owner.weight)),
            priority: u32::try_from(container.priority).unwrap_or(u32::MAX),
            since: container.created_at,
            id: container.uuid.as_str(),
        })
    }
}

/// Returns whether the project has a guaranteed share and keeps within it if the container starts.
fn is_within_share(owner: &OwnerUsage, job: &JobRank) -> bool {
    let mut is_guaranteed = false;
    for share in &owner.shares {
        let wanted = job.amounts.get(&share.resource).copied().unwrap_or_default();
        if wanted == 0 {
            continue;
        }
        if share.used.saturating_add(wanted) > share.share {
            return false;
        }
        is_guaranteed = true;
    }
    is_guaranteed
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{container::Status, plan::queue_order::OVERDUE_AFTER};

    const GPU: &str = "gpu";

    fn container(uuid: &str, owner: &str, priority: u64) -> ContainerView {
        ContainerView {
            uuid: uuid.into(),
            status: Status::Queued,
            priority,
            attempt: 0,
            created_at: Timestamp(0),
            owner: owner.into(),
            is_locked_here: false,
            needs: ContainerNeeds { cpus: 8, ..ContainerNeeds::default() },
        }
    }

    fn owner(owner: &str, used: f64, weight: u32) -> OwnerUsage {
        OwnerUsage { used, weight, ..OwnerUsage::none(owner) }
    }

    fn job(owner: &str, class: RunClass, gpus: u64) -> JobRank {
        JobRank { owner: owner.into(), class, amounts: BTreeMap::from([(GPU.to_owned(), gpus)]) }
    }

    fn taken_in_order(waiting: &[ContainerView], usage: &QueueUsage) -> Vec<String> {
        let mut order = TurnOrder::new(waiting.iter(), usage);
        let mut taken = Vec::new();
        while let Some(next) = order.pop() {
            order.count_as_taken(next);
            taken.push(next.uuid.clone());
        }
        taken
    }

    fn usage(owners: Vec<OwnerUsage>, jobs: Vec<(&str, JobRank)>) -> QueueUsage {
        let jobs = jobs.into_iter().map(|(uuid, job)| (uuid.to_owned(), job)).collect();
        QueueUsage { now: Timestamp(0), owners, jobs }
    }

    #[test]
    fn owners_take_turns_whatever_their_priorities_are() {
        let all = [
            container("a1", "ada", 1000),
            container("a2", "ada", 1000),
            container("a3", "ada", 1000),
            container("b1", "bob", 1),
            container("b2", "bob", 2),
        ];
        assert_eq!(taken_in_order(&all, &QueueUsage::default()), ["a1", "b2", "a2", "b1", "a3"]);
    }

    #[test]
    fn the_owner_that_used_less_for_its_weight_comes_first() {
        let all = [container("a1", "ada", 5), container("a2", "ada", 5), container("b", "bob", 5)];
        let used = |ada, bob| usage(vec![ada, bob], Vec::new());
        // One unit that is held counts for ten minutes.
        let (little, much) = (599_000.0, 601_000.0);
        assert_eq!(
            taken_in_order(&all, &used(owner("ada", 0.0, 1), owner("bob", little, 1))),
            ["a1", "b", "a2"]
        );
        assert_eq!(
            taken_in_order(&all, &used(owner("ada", 0.0, 1), owner("bob", much, 1))),
            ["a1", "a2", "b"]
        );
        assert_eq!(taken_in_order(&all, &used(owner("ada", 1.0, 1), owner("bob", 0.0, 1)))[0], "b");
        assert_eq!(
            taken_in_order(&all, &used(owner("ada", 0.0, 1), owner("bob", much, 2))),
            ["a1", "b", "a2"],
            "a project with twice the weight may use twice as much"
        );
    }

    #[test]
    fn a_higher_class_comes_first_and_then_a_project_within_its_share() {
        let all = [
            container("idle", "u1", 1),
            container("borrows", "u2", 500),
            container("within", "u3", 500),
            container("urgent", "u1", 1000),
            container("request", "u4", 1000),
        ];
        let share = |share, used| vec![OwnerShare { resource: GPU.into(), share, used }];
        let owners = vec![
            OwnerUsage { shares: share(2, 2), ..owner("vision", 0.0, 1) },
            OwnerUsage { shares: share(2, 1), ..owner("speech", 9e9, 1) },
        ];
        let jobs = vec![
            ("idle", job("vision", RunClass::Idle, 1)),
            ("borrows", job("vision", RunClass::Normal, 1)),
            ("within", job("speech", RunClass::Normal, 1)),
            ("urgent", job("vision", RunClass::Urgent, 1)),
        ];
        assert_eq!(
            taken_in_order(&all, &usage(owners, jobs)),
            ["urgent", "within", "request", "borrows", "idle"]
        );
    }

    #[test]
    fn a_project_is_within_its_share_until_what_it_takes_exceeds_it() {
        let all = [
            container("a1", "u", 5),
            container("a2", "u", 5),
            container("a3", "u", 5),
            container("b1", "bob", 5),
        ];
        let shares = vec![OwnerShare { resource: GPU.into(), share: 2, used: 0 }];
        let jobs = ["a1", "a2", "a3"].map(|uuid| (uuid, job("vision", RunClass::Normal, 1)));
        let owners = vec![OwnerUsage { shares, ..owner("vision", 9e9, 1) }];
        assert_eq!(taken_in_order(&all, &usage(owners, jobs.into())), ["a1", "a2", "b1", "a3"]);
    }

    #[test]
    fn a_container_that_has_waited_for_a_week_comes_first() {
        let all = [container("old", "ada", 1), container("new", "bob", 1000)];
        let new = ContainerView { created_at: Timestamp(1), ..all[1].clone() };
        let all = [all[0].clone(), new];
        let mut usage = usage(vec![owner("ada", 9e9, 1)], Vec::new());
        usage.now = Timestamp(OVERDUE_AFTER.0 - 1);
        assert_eq!(taken_in_order(&all, &usage), ["new", "old"]);
        usage.now = Timestamp(OVERDUE_AFTER.0);
        assert_eq!(taken_in_order(&all, &usage), ["old", "new"]);
    }

    #[test]
    fn the_usage_of_a_queue_is_read_as_it_was_written() {
        let shares = vec![OwnerShare { resource: GPU.into(), share: 4, used: 1 }];
        let owners = vec![OwnerUsage { shares, held: 3, ..owner("vision", 12.5, 2) }];
        let written = usage(owners, vec![("c", job("vision", RunClass::Idle, 2))]);
        let text = serde_json::to_string(&written).unwrap();
        assert_eq!(serde_json::from_str::<QueueUsage>(&text).unwrap(), written);
    }
}
