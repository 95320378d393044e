//! Order in which waiting replicas are considered.
//!
//! Overdue  Replicas that have waited for `OVERDUE_AFTER`, by age: so every wait has a bound, whatever the class is.
//! Class    Then `urgent` before `normal` before `idle`.
//! Share    Then projects that stay within what is guaranteed to them, before those that borrow.
//! Usage    Then the project that used least, relative to its weight. What a project holds counts as if it were held
//!          for a while longer, so that projects which start together take turns.
//! Queue    Within a project, and between equals: priority, then age. A priority does not get a job ahead of other projects.
//!
//! Only the next replica of a project can change place when another one of the same project is placed, so the order
//! costs the logarithm of the number of projects per replica.

use std::{
    cmp::Reverse,
    collections::{BTreeMap, BTreeSet, VecDeque},
};

use crate::{
    config::run::RunClass,
    id::{ProjectId, RunId, SubmissionId},
    plan::{
        place::WaitingReplica,
        quota::{HeldResources, Quota, QuotaBook, least_amount},
        usage,
    },
    resources::ResourcesSpec,
    state_machine::words,
    time::{Span, Timestamp},
};

/// Time for which held resources count as used in advance.
const USED_AHEAD: Span = Span::mins(10);

/// Time after which a waiting replica comes before all that wait for less, whatever their class, share and usage. Longer
/// than any of these rules should decide alone.
pub const OVERDUE_AFTER: Span = Span::mins(7 * 24 * 60);

/// Usage of a project when the round began.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ProjectUsage {
    pub project: ProjectId,
    /// Seconds of thousandths of units, decayed.
    pub used: f64,
    /// Thousandths of units that it holds now.
    pub held: u64,
    /// A project with twice the weight may use twice as much. 0 counts as 1.
    pub weight: u32,
}

impl ProjectUsage {
    fn score(&self) -> u64 {
        usage_score(self.used, self.held, self.weight)
    }
}

/// Usage by which projects and users are ordered: what they used, and what they hold as if it were held for a while
/// longer, relative to their weight.
pub(crate) fn usage_score(used: f64, held: u64, weight: u32) -> u64 {
    let ahead = held.saturating_mul(USED_AHEAD.as_secs().unsigned_abs());
    (used.max(0.0) as u64).saturating_add(ahead) / u64::from(weight.max(1))
}

words! {
    /// Rule that puts one waiting run before another.
    pub enum OrderRule: "order rule" {
        /// a higher class
        Class = "class",
        /// its project stays within its guaranteed share
        Share = "share",
        /// its project used less, relative to its weight
        Usage = "usage",
        /// a higher priority
        Priority = "priority",
        /// waits for longer
        Age = "age",
    }
}

/// Returns the waiting runs in the order in which their first replicas are considered, each with the rule that puts it
/// after the one before. Each counts as if it were placed, as in a round.
pub fn list_order(
    queue: &[WaitingReplica],
    usage: &[ProjectUsage],
    quotas: Vec<Quota>,
    now: Timestamp,
) -> Vec<(RunId, Option<OrderRule>)> {
    let mut quotas = QuotaBook::new(quotas);
    let mut order = QueueOrder::new(queue, usage, &quotas, now);
    let mut seen = BTreeSet::new();
    let mut listed = Vec::new();
    let mut last: Option<(ProjectId, ReplicaKey)> = None;
    while let Some(next) = order.pop() {
        if seen.insert(next.run) {
            // As it was when the one before was considered.
            let key = order.key(next, &quotas);
            let rule = last.map(|(project, before)| rule_between(&before, &key, project == next.project));
            listed.push((next.run, rule));
            last = Some((next.project, key));
        }
        order.count_as_placed(next, &mut quotas);
    }
    listed
}

/// Returns the runs of the replicas that come before the first one of a run, in order, each with the rule that puts it
/// there. Each counts as if it were placed, as in a round.
pub fn list_before(
    queue: &[WaitingReplica],
    usage: &[ProjectUsage],
    quotas: Vec<Quota>,
    run: RunId,
    now: Timestamp,
) -> Vec<(RunId, OrderRule)> {
    let mut quotas = QuotaBook::new(quotas);
    let mut order = QueueOrder::new(queue, usage, &quotas, now);
    let own = queue.iter().filter(|waiting| waiting.run == run);
    let Some(own) = own.min_by_key(|waiting| order.key(waiting, &quotas).without_project()) else {
        return Vec::new();
    };
    let mut before = Vec::new();
    while let Some(next) = order.pop().filter(|next| next.run != run) {
        let keys = [next, own].map(|waiting| order.key(waiting, &quotas));
        before.push((next.run, rule_between(&keys[0], &keys[1], next.project == own.project)));
        order.count_as_placed(next, &mut quotas);
    }
    before
}

/// Properties that decide about the place in a queue, of replicas and of containers.
pub(crate) struct OrderInputs<T> {
    pub(crate) waited: Span,
    pub(crate) class: RunClass,
    /// It would exceed the share of its project, or there is none.
    pub(crate) borrows: bool,
    pub(crate) usage: u64,
    pub(crate) priority: u32,
    pub(crate) since: Timestamp,
    /// Decides between equals.
    pub(crate) id: T,
}

/// Smaller comes first.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct OrderKey<T> {
    is_overdue: Reverse<bool>,
    class: Reverse<RunClass>,
    borrows: bool,
    usage: u64,
    priority: Reverse<u32>,
    since: Timestamp,
    id: T,
}

/// Id of a replica in the order: its run, its number, and its first job.
type ReplicaKey = OrderKey<(RunId, u32, Option<SubmissionId>)>;

/// Waiting replicas by project, each project in the order of its queue.
pub(super) struct QueueOrder<'a> {
    queues: BTreeMap<ProjectId, VecDeque<&'a WaitingReplica>>,
    usage: BTreeMap<ProjectId, ProjectUsage>,
    /// The next replica of each project.
    next: BTreeSet<(ReplicaKey, ProjectId)>,
    now: Timestamp,
}

impl<'a> QueueOrder<'a> {
    pub(super) fn new(
        queue: &'a [WaitingReplica],
        usage: &[ProjectUsage],
        quotas: &QuotaBook,
        now: Timestamp,
    ) -> Self {
        let mut by_project: BTreeMap<ProjectId, Vec<&WaitingReplica>> = BTreeMap::new();
        for waiting in queue.iter().filter(|waiting| !waiting.nodes.is_empty()) {
            by_project.entry(waiting.project).or_default().push(waiting);
        }
        let usage = usage.iter().map(|one| (one.project, *one)).collect();
        let mut order = Self { queues: BTreeMap::new(), usage, next: BTreeSet::new(), now };
        for (project, mut waiting) in by_project {
            waiting.sort_by_cached_key(|one| order.key(one, quotas).without_project());
            order.queues.insert(project, waiting.into());
            order.refresh(project, quotas);
        }
        order
    }

    /// Removes and returns the replica that is considered next.
    pub(super) fn pop(&mut self) -> Option<&'a WaitingReplica> {
        let (_, project) = self.next.pop_first()?;
        self.queues.get_mut(&project)?.pop_front()
    }

    /// Must follow each `pop`, with the outcome.
    pub(super) fn record(&mut self, waiting: &WaitingReplica, is_placed: bool, quotas: &QuotaBook) {
        if is_placed {
            let project = waiting.project;
            let nothing = ProjectUsage { project, used: 0.0, held: 0, weight: 1 };
            let units = waiting.nodes.iter().map(|node| requested_units(node.needs.resources.as_ref()));
            self.usage.entry(project).or_insert(nothing).held += units.sum::<u64>();
        }
        self.refresh(waiting.project, quotas);
    }

    fn count_as_placed(&mut self, waiting: &WaitingReplica, quotas: &mut QuotaBook) {
        let requested = waiting.nodes.iter().map(|node| requested_amounts(node.needs.resources.as_ref()));
        let held: Vec<HeldResources> = requested.collect();
        quotas.add_to_project(waiting.project, &held);
        self.record(waiting, true, quotas);
    }

    fn refresh(&mut self, project: ProjectId, quotas: &QuotaBook) {
        if let Some(first) = self.queues.get(&project).and_then(VecDeque::front) {
            self.next.insert((self.key(first, quotas), project));
        }
    }

    fn key(&self, waiting: &WaitingReplica, quotas: &QuotaBook) -> ReplicaKey {
        OrderKey::new(OrderInputs {
            waited: waiting.waited(self.now),
            class: waiting.class,
            borrows: !is_within_share(waiting, quotas),
            usage: self.usage.get(&waiting.project).map_or(0, ProjectUsage::score),
            priority: waiting.priority,
            since: waiting.since,
            id: (waiting.run, waiting.replica_num, waiting.first_job()),
        })
    }
}

/// Returns the first rule by which two replicas differ.
fn rule_between(one: &ReplicaKey, other: &ReplicaKey, is_same_project: bool) -> OrderRule {
    if one.is_overdue != other.is_overdue {
        OrderRule::Age
    } else if one.class != other.class {
        OrderRule::Class
    } else if !is_same_project && one.borrows != other.borrows {
        OrderRule::Share
    } else if !is_same_project && one.usage != other.usage {
        OrderRule::Usage
    } else if one.priority != other.priority {
        OrderRule::Priority
    } else {
        OrderRule::Age
    }
}

impl<T> OrderKey<T> {
    pub(crate) fn new(inputs: OrderInputs<T>) -> Self {
        let OrderInputs { waited, class, borrows, usage, priority, since, id } = inputs;
        if waited >= OVERDUE_AFTER {
            let (class, priority) = (Reverse(RunClass::Urgent), Reverse(0));
            return Self { is_overdue: Reverse(true), class, borrows: false, usage: 0, priority, since, id };
        }
        let (class, priority) = (Reverse(class), Reverse(priority));
        Self { is_overdue: Reverse(false), class, borrows, usage, priority, since, id }
    }

    /// Order within a project, where neither its share nor its usage matters.
    pub(crate) fn without_project(self) -> Self {
        Self { borrows: false, usage: 0, ..self }
    }
}

/// Returns whether the project has a guaranteed share and keeps within it if the replica starts.
pub fn is_within_share(waiting: &WaitingReplica, quotas: &QuotaBook) -> bool {
    let mut is_guaranteed = false;
    for quota in quotas.shares_of(waiting.project) {
        let Some(share) = quota.share else { continue };
        let nodes = waiting.nodes.iter().filter_map(|node| node.needs.resources.as_ref());
        let wanted: u64 = nodes.map(|wanted| least_amount(wanted, &quota.resource)).sum();
        if wanted == 0 {
            continue;
        }
        if quota.used.saturating_add(wanted) > share {
            return false;
        }
        is_guaranteed = true;
    }
    is_guaranteed
}

fn requested_amounts(requested: Option<&ResourcesSpec>) -> HeldResources {
    use crate::plan::quota::QuotaResource::{Cpus, Gpus, Memory};
    let Some(requested) = requested else { return HeldResources::default() };
    let [gpus, cpus, memory_mib] = [Gpus, Cpus, Memory].map(|resource| least_amount(requested, &resource));
    HeldResources { gpus, cpus, memory_mib, ..HeldResources::default() }
}

fn requested_units(requested: Option<&ResourcesSpec>) -> u64 {
    use crate::plan::quota::QuotaResource::{Cpus, Gpus, Memory};
    let Some(requested) = requested else { return usage::milli_units(0, 1, 0) };
    let [gpus, cpus, memory] = [Gpus, Cpus, Memory].map(|resource| least_amount(requested, &resource));
    usage::milli_units(gpus, cpus, memory)
}
