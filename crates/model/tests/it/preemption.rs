//! Preemption: which running replicas end for which waiting one, and that there is a last preemption.

use std::{collections::BTreeMap, sync::Arc};

use proptest::prelude::*;
use windlass_model::{
    config::run::RunClass,
    id::{InstanceId, ProjectId, RunId, SubmissionId},
    plan::{
        place::{
            BlockHold, FleetSnapshot, InstanceSnapshot, Inventory, NodePlacement, PlacementOutcome,
            WaitingReplica, place_replicas,
        },
        preemption::{
            BlockPromise, HeldByClass, Preemptibility, Preemption, PreemptionRule, PreemptionRules,
            RunningJob, RunningReplica, next_wait_end,
        },
        quota::{HeldResources, Quota, QuotaResource},
    },
    time::Span,
};

use crate::placement::{NOW, fleet, host, instance, needs, offer, uuid, waiting};

const RULES: PreemptionRules = PreemptionRules {
    min_run: Span::mins(30),
    wait: Span::mins(1),
    grace: Span::mins(1),
    budget_left: 1_000,
};

fn project(n: u128) -> ProjectId {
    ProjectId(uuid(n))
}

fn share(owner: u128, share: u64) -> Quota {
    let (resource, share) = (QuotaResource::Cpus, Some(share));
    Quota { project: project(owner), member: None, resource, max: None, share, used: 0, first_end: None }
}

/// A pool of instances with one CPU per block, and the jobs that run and wait there.
#[derive(Clone, Debug)]
struct Pool {
    fleet: FleetSnapshot,
    /// Blocks of each instance.
    instances: Vec<u32>,
    /// Blocks of each instance of a fleet without preemption.
    plain: Vec<u32>,
    quotas: Vec<Quota>,
    running: Vec<RunningReplica>,
    queue: Vec<WaitingReplica>,
    promises: Vec<BlockPromise>,
    preemptible: BTreeMap<RunId, Preemptibility>,
}

fn cpus(blocks: u32) -> HeldResources {
    HeldResources {
        cpus: blocks.into(),
        memory_mib: u64::from(blocks) * 4 * 1024,
        ..HeldResources::default()
    }
}

impl Pool {
    fn new(instances: &[u32], quotas: Vec<Quota>) -> Self {
        let fleet = FleetSnapshot { is_cluster: true, preemption: Some(RULES), ..fleet(1, "f") };
        Self {
            fleet,
            instances: instances.to_vec(),
            plain: Vec::new(),
            quotas,
            running: Vec::new(),
            queue: Vec::new(),
            promises: Vec::new(),
            preemptible: BTreeMap::new(),
        }
    }

    /// Adds a replica that has run for an hour, with these blocks of instances.
    fn run(&mut self, n: u128, owner: u128, class: RunClass, seats: &[(u128, u32)]) -> &mut RunningReplica {
        let jobs = seats.iter().enumerate().map(|(at, (on, blocks))| RunningJob {
            job: SubmissionId(uuid(n * 1000 + at as u128)),
            instance: InstanceId(uuid(*on)),
            blocks: *blocks,
            held: cpus(*blocks),
        });
        self.running.push(RunningReplica {
            project: project(owner),
            run: RunId(uuid(n)),
            replica_num: 0,
            class,
            running_since: Some(NOW - Span::mins(60)),
            preemptibility: Preemptibility::Always,
            is_service: false,
            preempted_before: 0,
            is_ending: false,
            is_preempted: false,
            jobs: jobs.collect(),
        });
        self.running.last_mut().unwrap()
    }

    fn wait(&mut self, n: u128, owner: u128, class: RunClass, nodes: &[u32]) -> &mut WaitingReplica {
        // Not for so long that it reserves instances.
        let since = NOW.0 / 1_000_000 - 200 + i64::try_from(n).unwrap();
        let nodes = nodes.iter().map(|cpus| needs(*cpus, 0)).collect();
        self.queue.push(WaitingReplica { project: project(owner), class, ..waiting(n, since, nodes) });
        self.queue.last_mut().unwrap()
    }

    fn inventory(&self) -> Inventory {
        let mut fleet = self.fleet.clone();
        fleet.instance_nums = (0..u32::try_from(self.instances.len()).unwrap()).collect();
        let mut plain = FleetSnapshot { is_cluster: true, ..crate::placement::fleet(2, "g") };
        plain.instance_nums = (0..u32::try_from(self.plain.len()).unwrap()).collect();
        let mut instances: Vec<InstanceSnapshot> = Vec::new();
        let of_fleet = self.instances.iter().map(|blocks| (&fleet, blocks));
        let all = of_fleet.chain(self.plain.iter().map(|blocks| (&plain, blocks)));
        for (at, (of, blocks)) in all.enumerate() {
            let id = at as u128 + 1;
            let mut one = instance(id, of, offer(host(*blocks, 0), *blocks, 0.0));
            for replica in &self.running {
                for job in replica.jobs.iter().filter(|job| job.instance.0 == uuid(id)) {
                    let (until, is_preempted) = (None, replica.is_preempted);
                    one.holds.push(BlockHold { job: job.job, blocks: job.blocks, until, is_preempted });
                }
            }
            instances.push(one);
        }
        let held_by_class: Vec<HeldByClass> = self.running.iter().map(held_by).collect();
        let mut quotas = self.quotas.clone();
        for quota in &mut quotas {
            let kept = self.promises.iter().filter(|promise| promise.project == quota.project);
            let kept: u64 = kept.map(|promise| cpus(promise.blocks).amount(&quota.resource)).sum();
            quota.used = self.used(quota, RunClass::Idle) + kept;
        }
        Inventory {
            fleets: vec![fleet, plain],
            instances,
            quotas,
            promises: self.promises.clone(),
            running: self.running.clone(),
            held_by_class,
            ..Inventory::default()
        }
    }

    fn used(&self, quota: &Quota, class: RunClass) -> u64 {
        let own = self.running.iter().filter(|one| one.project == quota.project && one.class >= class);
        own.map(|one| held_by(one).held.amount(&quota.resource)).sum()
    }

    /// What is held within shares, and the number of replicas, in each class and above, from the highest.
    fn potential(&self) -> Vec<(u64, usize)> {
        [RunClass::Urgent, RunClass::Normal, RunClass::Idle]
            .into_iter()
            .map(|class| {
                let within =
                    self.quotas.iter().map(|quota| self.used(quota, class).min(quota.share.unwrap_or(0)));
                (within.sum(), self.running.iter().filter(|one| one.class >= class).count())
            })
            .collect()
    }

    /// Performs a round: placed replicas start, and the preemption found first, if any, is returned.
    fn round(&mut self) -> Option<(WaitingReplica, Preemption)> {
        let inventory = self.inventory();
        let placements = place_replicas(&self.queue, &inventory, NOW);
        let mut found = None;
        for placement in placements {
            let at = self.queue.iter().position(|one| one.run == placement.run).unwrap();
            match placement.outcome {
                PlacementOutcome::Placed { seats, .. } => {
                    let waiting = self.queue.remove(at);
                    self.promises.retain(|promise| Some(promise.job) != waiting.first_job());
                    let seats: Vec<(u128, u32)> = seats
                        .iter()
                        .map(|seat| match seat {
                            NodePlacement::Existing { instance, blocks, .. } => {
                                (instance.0.as_u128(), *blocks)
                            }
                            NodePlacement::New { .. } => panic!("nothing can be created"),
                        })
                        .collect();
                    let preemptible = self.preemptible.get(&waiting.run).copied();
                    let started =
                        self.run(waiting.run.0.as_u128(), waiting.project.0.as_u128(), waiting.class, &seats);
                    started.preemptibility = preemptible.unwrap_or(Preemptibility::Always);
                }
                PlacementOutcome::Waits { .. } | PlacementOutcome::Never { .. } => {
                    if let Some(preemption) = placement.preemption {
                        found = found.or(Some((self.queue[at].clone(), preemption)));
                    }
                }
            }
        }
        found
    }

    /// The victims end, or do not.
    fn set_preempted(&mut self, preemption: &Preemption, is_preempted: bool) {
        let is_victim = |run: RunId| preemption.victims.iter().any(|victim| victim.run == run);
        for replica in self.running.iter_mut().filter(|one| is_victim(one.run)) {
            (replica.is_ending, replica.is_preempted) = (is_preempted, is_preempted);
        }
    }

    /// The victims end and wait again.
    fn end_victims(&mut self, preemption: &Preemption) {
        for victim in &preemption.victims {
            let at = self.running.iter().position(|one| one.run == victim.run).unwrap();
            let ended = self.running.remove(at);
            let (n, owner) = (ended.run.0.as_u128(), ended.project.0.as_u128());
            let nodes: Vec<u32> = ended.jobs.iter().map(|job| job.blocks).collect();
            self.preemptible.insert(ended.run, ended.preemptibility);
            self.wait(n, owner, ended.class, &nodes);
        }
    }
}

fn held_by(replica: &RunningReplica) -> HeldByClass {
    let held = replica.jobs.iter().fold(HeldResources::default(), |sum, job| sum.plus(&job.held));
    HeldByClass { project: replica.project, class: replica.class, held }
}

/// Numbers of the runs that are preempted for the only waiting one.
fn victims(pool: &Pool) -> Vec<u128> {
    let placements = place_replicas(&pool.queue, &pool.inventory(), NOW);
    let preemption = placements.into_iter().find_map(|placement| placement.preemption);
    let mut victims: Vec<u128> = preemption
        .map(|preemption| preemption.victims.iter().map(|victim| victim.run.0.as_u128()).collect())
        .unwrap_or_default();
    victims.sort_unstable();
    victims
}

use RunClass::{Idle, Normal, Urgent};

#[test]
fn a_higher_class_takes_from_a_lower_one_and_never_from_its_own() {
    let mut pool = Pool::new(&[4], vec![]);
    pool.run(1, 1, Normal, &[(1, 2)]);
    pool.run(2, 1, Idle, &[(1, 2)]);
    pool.wait(3, 2, Normal, &[1]);
    assert_eq!(victims(&pool), [2]);
    pool.queue[0].class = Idle;
    assert_eq!(victims(&pool), [0; 0]);
    pool.queue[0].class = Urgent;
    pool.running[1].preemptibility = Preemptibility::Never;
    assert_eq!(victims(&pool), [1]);
    pool.running[0].preemptibility = Preemptibility::Borrowed;
    assert_eq!(victims(&pool), [0; 0], "it may be reclaimed only");
    pool.running[0].preemptibility = Preemptibility::Always;
    pool.fleet.preemption = None;
    assert_eq!(victims(&pool), [0; 0], "off");
}

#[test]
fn a_project_reclaims_its_share_from_those_that_borrow_and_from_nobody_within_a_share() {
    let mut pool = Pool::new(&[8], vec![share(1, 4), share(2, 4)]);
    for n in 1..=6 {
        pool.run(n, 1, Normal, &[(1, 1)]);
    }
    pool.run(7, 2, Normal, &[(1, 2)]);
    pool.wait(10, 2, Normal, &[2]);
    assert_eq!(victims(&pool).len(), 2);
    // The next two would be within the share of project 1.
    pool.queue[0].nodes[0].needs = Arc::new(needs(3, 0));
    assert_eq!(victims(&pool), [0; 0], "it would borrow itself");
    pool.queue[0].project = project(1);
    assert_eq!(victims(&pool), [0; 0], "not from itself");
}

#[test]
fn victims_are_of_the_lowest_class_of_the_project_most_over_its_share_and_young() {
    let mut pool = Pool::new(&[8], vec![share(4, 2)]);
    for n in 1..=3 {
        pool.run(n, 1, Normal, &[(1, 1)]);
    }
    for n in 4..=8 {
        pool.run(n, 2, Normal, &[(1, 1)]).running_since = Some(NOW - Span::mins(60 + n as i64));
    }
    pool.wait(10, 4, Normal, &[1]);
    assert_eq!(victims(&pool), [4], "the youngest of project 2");
    pool.run_class(6, Idle);
    assert_eq!(victims(&pool), [6]);
    pool.run_class(1, Idle);
    assert_eq!(victims(&pool), [6], "project 2 holds more");
}

#[test]
fn nobody_is_preempted_unless_all_nodes_fit_then_and_none_in_vain() {
    let mut pool = Pool::new(&[4, 4, 4], vec![]);
    pool.run(1, 1, Idle, &[(1, 4)]);
    pool.run(2, 1, Idle, &[(2, 2)]);
    pool.run(3, 1, Idle, &[(2, 1)]);
    pool.run(4, 1, Normal, &[(3, 1)]);
    pool.wait(10, 1, Normal, &[4, 4]);
    assert_eq!(victims(&pool), [1, 2, 3]);
    pool.running[2].class = Normal;
    assert_eq!(victims(&pool), [0; 0], "one node would not fit");
    // Of a replica with several nodes all end.
    let mut pool = Pool::new(&[4, 4], vec![]);
    pool.run(1, 1, Idle, &[(1, 4), (2, 4)]);
    pool.wait(10, 1, Normal, &[1]);
    let placements = place_replicas(&pool.queue, &pool.inventory(), NOW);
    let preemption = placements[0].preemption.clone().unwrap();
    assert_eq!(preemption.victims[0].jobs.len(), 2);
    assert_eq!(preemption.victims[0].rule, PreemptionRule::Class);
    assert_eq!(preemption.promises.len(), 1);
}

#[test]
fn a_replica_runs_for_the_minimum_and_longer_each_time_and_one_waits_before() {
    let mut pool = Pool::new(&[1], vec![]);
    pool.run(1, 1, Idle, &[(1, 1)]);
    pool.wait(10, 1, Normal, &[1]);
    assert_eq!(victims(&pool), [1]);
    pool.running[0].preempted_before = 2;
    assert_eq!(victims(&pool), [0; 0], "it may run for two hours now");
    pool.running[0].running_since = Some(NOW - Span::mins(120));
    assert_eq!(victims(&pool), [1]);
    pool.queue[0].resubmitted_at = Some(NOW - Span::secs(59));
    assert_eq!(victims(&pool), [0; 0]);
    pool.queue[0].resubmitted_at = Some(NOW - Span::secs(60));
    assert_eq!(victims(&pool), [1]);
    pool.fleet.preemption = Some(PreemptionRules { budget_left: 0, ..RULES });
    assert_eq!(victims(&pool), [0; 0], "the budget is used up");
}

#[test]
fn the_next_round_is_when_the_shortest_wait_of_a_usable_fleet_ends() {
    let mut pool = Pool::new(&[1], vec![]);
    pool.wait(10, 1, Normal, &[1]);
    pool.queue[0].resubmitted_at = Some(NOW - Span::secs(20));
    let mut longer = pool.fleet.clone();
    longer.preemption = Some(PreemptionRules { wait: Span::mins(5), ..RULES });
    let fleets = [longer, fleet(2, "off"), pool.fleet.clone()];
    assert_eq!(next_wait_end(&pool.queue[0], &fleets, NOW), Some(NOW + Span::secs(40)));
    assert_eq!(next_wait_end(&pool.queue[0], &fleets[..2], NOW), Some(NOW + Span::secs(280)));
    let later = NOW + Span::secs(40);
    assert_eq!(next_wait_end(&pool.queue[0], &fleets[2..], later), None, "it has waited for long enough");
    pool.queue[0].usable_fleets = Some(Arc::default());
    assert_eq!(next_wait_end(&pool.queue[0], &fleets, NOW), None);
}

#[test]
fn nothing_is_preempted_for_what_becomes_free_anyway() {
    let mut pool = Pool::new(&[2], vec![]);
    pool.run(1, 1, Idle, &[(1, 1)]);
    pool.run(2, 1, Normal, &[(1, 1)]);
    pool.wait(10, 1, Normal, &[1]);
    let until = |secs: i64| {
        let mut inventory = pool.inventory();
        inventory.instances[0].holds[1].until = Some(NOW + Span::secs(secs));
        place_replicas(&pool.queue, &inventory, NOW)[0].preemption.is_some()
    };
    assert!(!until(60));
    assert!(until(61));
}

#[test]
fn the_last_replica_of_a_service_stays() {
    let mut pool = Pool::new(&[2], vec![]);
    for n in [1, 2] {
        let replica = pool.run(n, 1, Idle, &[(1, 1)]);
        (replica.run, replica.is_service) = (RunId(uuid(1)), true);
        replica.replica_num = u32::try_from(n).unwrap();
        replica.running_since = Some(NOW - Span::mins(100 - n as i64));
    }
    pool.wait(10, 1, Normal, &[1]);
    let placements = place_replicas(&pool.queue, &pool.inventory(), NOW);
    let preemption = placements[0].preemption.clone().unwrap();
    assert_eq!(preemption.victims.iter().map(|victim| victim.replica_num).collect::<Vec<_>>(), [2]);
    pool.running.remove(1);
    pool.instances[0] = 1;
    assert_eq!(victims(&pool), [0; 0]);
}

#[test]
fn freed_blocks_are_kept_for_the_replica_for_which_others_ended() {
    let mut pool = Pool::new(&[2], vec![]);
    pool.run(1, 1, Idle, &[(1, 1)]);
    pool.run(2, 1, Idle, &[(1, 1)]);
    pool.wait(10, 1, Normal, &[1]);
    let (waiting, preemption) = pool.round().unwrap();
    assert_eq!(preemption.victims.len(), 1);
    pool.promises.extend(preemption.promises.clone());
    let at = pool.running.iter().position(|one| one.run == preemption.victims[0].run).unwrap();
    // It is asked for once, and the victim's blocks do not count as free.
    (pool.running[at].is_ending, pool.running[at].is_preempted) = (true, true);
    assert!(pool.round().is_none());
    assert_eq!(pool.queue.len(), 1);
    // An urgent replica comes first in the order and still does not use the block; it preempts the other.
    pool.running.remove(at);
    pool.wait(11, 1, Urgent, &[1]);
    let inventory = pool.inventory();
    let placements = place_replicas(&pool.queue, &inventory, NOW);
    let placed = |n: u128| {
        let one = placements.iter().find(|one| one.run == RunId(uuid(n))).unwrap();
        matches!(one.outcome, PlacementOutcome::Placed { .. })
    };
    assert_eq!((placed(10), placed(11)), (true, false));
    assert_eq!(waiting.run, RunId(uuid(10)));
}

#[test]
fn nobody_is_preempted_for_more_than_a_quota_admits() {
    let max = |max| Quota { max: Some(max), ..share(2, 0) };
    let mut pool = Pool::new(&[2], vec![max(1)]);
    pool.run(1, 1, Idle, &[(1, 1)]);
    pool.run(2, 1, Idle, &[(1, 1)]);
    pool.wait(10, 2, Normal, &[1]);
    pool.wait(11, 2, Normal, &[1]);
    // What is kept for one of them counts for the other, in the same round and in later ones.
    assert_eq!(victims(&pool).len(), 1);
    let (_, preemption) = pool.round().unwrap();
    pool.promises.extend(preemption.promises.clone());
    assert!(pool.round().is_none());
    // The first one starts on what is kept for it; the other waits for the quota.
    pool.running.retain(|one| one.run != preemption.victims[0].run);
    assert!(pool.round().is_none());
    assert_eq!(pool.queue.iter().map(|one| one.run.0.as_u128()).collect::<Vec<_>>(), [11]);
}

impl Pool {
    fn run_class(&mut self, n: u128, class: RunClass) {
        self.running.iter_mut().find(|one| one.run == RunId(uuid(n))).unwrap().class = class;
    }
}

/// Whether a project has a share or a limit of CPUs, and a share of memory.
fn quotas() -> impl Strategy<Value = Vec<Quota>> {
    let of_project = (prop::option::of((0_u64..8, prop::option::of(0_u64..8))), prop::option::of(0_u64..8));
    prop::collection::vec(of_project, 3).prop_map(|projects| {
        let mut quotas = Vec::new();
        for ((of_cpus, of_memory), owner) in projects.into_iter().zip(1..) {
            quotas.extend(of_cpus.map(|(amount, more)| {
                let max = more.map(|more| amount + more);
                Quota { max, ..share(owner, amount) }
            }));
            // In blocks of four gigabytes.
            let resource = QuotaResource::Memory;
            quotas.extend(of_memory.map(|blocks| Quota { resource, ..share(owner, blocks * 4 * 1024) }));
        }
        quotas
    })
}

/// A pool, and replicas that arrive while others end.
fn pools() -> impl Strategy<Value = (Pool, Pool)> {
    let class = || prop::sample::select(vec![Idle, Normal, Normal, Urgent]);
    let kind = || {
        prop::sample::select(vec![
            Preemptibility::Always,
            Preemptibility::Always,
            Preemptibility::Borrowed,
            Preemptibility::Never,
        ])
    };
    let nodes = || {
        prop_oneof![
            4 => prop::collection::vec(1_u32..4, 1),
            1 => prop::collection::vec(1_u32..9, 1..3),
        ]
    };
    let job = || (1_u128..4, class(), nodes(), kind());
    let jobs = |count| prop::collection::vec(job(), count);
    let instances = (prop::collection::vec(1_u32..9, 1..4), prop::collection::vec(1_u32..9, 0..2));
    (instances, quotas(), (jobs(0..12), jobs(1..12), jobs(0..3))).prop_map(|(instances, quotas, jobs)| {
        let ((instances, plain), (early, late, arriving)) = (instances, jobs);
        let mut pool = Pool { plain, ..Pool::new(&instances, quotas) };
        // The first ones start without regard to shares and classes, in the order in which they come.
        let early_count = early.len();
        for (((owner, class, nodes, kind), n), at) in early.into_iter().chain(late).zip(1..).zip(0..) {
            pool.preemptible.insert(RunId(uuid(n)), kind);
            pool.wait(n, owner, class, &nodes);
            if at < early_count {
                pool.round();
            }
        }
        let mut arrivals = Pool::new(&[], Vec::new());
        for ((owner, class, nodes, _), n) in arriving.into_iter().zip(100..) {
            arrivals.wait(n, owner, class, &nodes);
        }
        (pool, arrivals)
    })
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, cases: 10_000, ..ProptestConfig::default() })]

    #[test]
    fn preemptions_come_to_an_end_and_each_starts_what_it_is_for((mut pool, mut arrivals) in pools()) {
        let mut before = pool.potential();
        for step in 0.. {
            let found = pool.round();
            // Starts into free blocks never decrease it.
            prop_assert!(pool.potential() >= before);
            before = pool.potential();
            let Some((waiting, preemption)) = found else { break };
            prop_assert!(step < 5_000, "no end in sight");
            let needed = |pool: &Pool| {
                let mut alone = pool.clone();
                alone.queue = vec![waiting.clone()];
                alone.fleet.preemption = None;
                alone.round();
                alone.queue.is_empty()
            };
            for left_out in 0..preemption.victims.len() {
                let mut without = pool.clone();
                let mut smaller = preemption.clone();
                smaller.victims.remove(left_out);
                without.end_victims(&smaller);
                prop_assert!(!needed(&without), "victim {left_out} is not needed");
            }
            for victim in &preemption.victims {
                let ended = pool.running.iter().find(|one| one.run == victim.run).unwrap();
                prop_assert!(ended.preemptibility != Preemptibility::Never);
                prop_assert!(ended.class <= waiting.class);
                prop_assert!(ended.class < waiting.class || ended.project != waiting.project);
            }
            // Others arrive while the victims end: they leave it what is kept.
            pool.promises = preemption.promises.clone();
            pool.set_preempted(&preemption, true);
            pool.queue.extend(arrivals.queue.pop());
            pool.round();
            pool.set_preempted(&preemption, false);
            prop_assert!(pool.potential() >= before);
            before = pool.potential();
            pool.end_victims(&preemption);
            prop_assert!(needed(&pool), "the replica does not fit");
            // It starts on the blocks that were kept for it, before anybody else.
            let others: Vec<WaitingReplica> =
                pool.queue.iter().filter(|one| one.run != waiting.run).cloned().collect();
            pool.queue = vec![waiting.clone()];
            pool.promises.clear();
            prop_assert!(pool.round().is_none());
            prop_assert!(pool.queue.is_empty());
            pool.queue = others;
            prop_assert!(pool.potential() > before, "{:?} after {before:?}", pool.potential());
            before = pool.potential();
        }
    }
}
