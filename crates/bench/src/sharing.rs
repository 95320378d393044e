//! Sharing of a fleet between projects: one day of a generated trace on virtual time under three policies, and the time
//! of a placement round with a long queue.

use std::{
    collections::{BTreeMap, BTreeSet},
    io::Write,
    path::Path,
    sync::Arc,
    time::Instant,
};

use anyhow::{Context, Result, ensure};
use uuid::Uuid;
use windlass_model::{
    config::run::RunClass,
    id::{FleetId, InstanceId, ProjectId, RunId, SubmissionId, UserId},
    money::Price,
    plan::{
        blocks::Blocks,
        offers::{Availability, Gpu, HostSpec, InstanceNeeds, Offer},
        place::{
            BlockHold, FleetChoice, FleetSnapshot, InstanceCreation, InstanceSnapshot, Inventory,
            NodePlacement, PlacementOutcome, Readiness, WaitingNode, WaitingReplica, place_replicas,
        },
        preemption::{
            BlockPromise, HeldByClass, Preemptibility, PreemptionRules, RunningJob, RunningReplica,
        },
        queue_order::ProjectUsage,
        quota::{HeldResources, Quota, QuotaResource},
    },
    resources::{CpuSpec, GpuSpec, GpuVendor, Range, ResourcesSpec},
    time::{Span, Timestamp},
};

/// The page with the table, from the root of the repository.
const PAGE: &str = "docs/sharing.md";
const TABLE_START: &str = "<!-- replay -->\n";
const TABLE_END: &str = "<!-- end -->";

/// Longest time of a round with 10,000 waiting jobs.
const ROUND_MS_MAX: f64 = 20.0;

const INSTANCES: u32 = 8;
const GPUS: u32 = 8;
const SHARES: [u64; 3] = [24, 24, 16];
const TICK: i64 = 30;
const DAY: i64 = 24 * 3_600;
const START: i64 = 1_793_000_000;
const RULES: PreemptionRules =
    PreemptionRules { min_run: Span::mins(30), wait: Span::mins(1), grace: Span::mins(1), budget_left: 32 };

#[derive(Clone, Copy, PartialEq, Eq)]
enum Policy {
    PriorityThenAge,
    Order,
    OrderAndPreemption,
}

#[derive(Clone)]
struct TraceJob {
    project: usize,
    class: RunClass,
    gpus: u32,
    arrives: i64,
    lasts: i64,
}

/// Numbers that are the same in every run.
struct Numbers(u64);

impl Numbers {
    fn next(&mut self) -> f64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 11) as f64 / (1_u64 << 53) as f64
    }
}

/// A project that fills the queue in the morning, one that submits all day, and one with bursts.
fn trace() -> Vec<TraceJob> {
    let mut numbers = Numbers(26);
    let mut jobs = Vec::new();
    for (project, count) in [(0, 700), (1, 250), (2, 150)] {
        for _ in 0..count {
            let at = numbers.next();
            let arrives = match project {
                0 => (at * 2.0 * 3_600.0) as i64,
                1 => (at * DAY as f64) as i64,
                _ => [6, 12, 18][(at * 2.999) as usize] * 3_600 + (numbers.next() * 900.0) as i64,
            };
            let gpus = [1, 1, 1, 2, 2, 4, 8][(numbers.next() * 6.999) as usize];
            let class = match numbers.next() {
                part if part < 0.1 => RunClass::Urgent,
                part if part < 0.7 => RunClass::Normal,
                _ => RunClass::Idle,
            };
            let mut lasts = (300.0 * (numbers.next() * 3.2).exp()) as i64;
            if class == RunClass::Urgent {
                lasts = lasts.min(1_200);
            }
            jobs.push(TraceJob { project, class, gpus, arrives, lasts });
        }
    }
    jobs.sort_by_key(|job| job.arrives);
    jobs
}

fn project(number: usize) -> ProjectId {
    ProjectId(Uuid::from_u128(number as u128 + 1))
}

fn offer() -> Offer {
    let gpu = Gpu {
        vendor: GpuVendor::Nvidia,
        name: "H100".into(),
        memory_mib: 80 * 1024,
        compute_capability: None,
    };
    let host = HostSpec {
        cpus: GPUS * 8,
        arch: None,
        memory_mib: u64::from(GPUS) * 64 * 1024,
        disk_mib: 0,
        gpus: vec![gpu; GPUS as usize],
        spot: false,
        runtimes: None,
    };
    Offer {
        backend: "ssh".into(),
        region: "here".into(),
        zones: Vec::new(),
        instance_type: "big".into(),
        price: Price(0),
        availability: Availability::Available,
        reservation: None,
        host,
        total_blocks: GPUS,
    }
}

fn needs(gpus: u32) -> Arc<InstanceNeeds> {
    let gpu = GpuSpec {
        vendor: None,
        name: None,
        count: Range::at_least(gpus),
        memory: None,
        total_memory: None,
        compute_capability: None,
    };
    let cpu = CpuSpec { arch: None, count: Range::at_least(1) };
    let resources = ResourcesSpec {
        cpu,
        memory: Range::at_least(0.0),
        gpu: Some(gpu),
        disk: None,
        ..ResourcesSpec::default()
    };
    Arc::new(InstanceNeeds { resources: Some(resources), ..InstanceNeeds::default() })
}

fn held(gpus: u32) -> HeldResources {
    HeldResources {
        gpus: gpus.into(),
        gpu_name: Some("H100".into()),
        cpus: u64::from(gpus) * 8,
        memory_mib: u64::from(gpus) * 64 * 1024,
        price: 0,
    }
}

fn waiting(number: usize, job: &TraceJob, needs: &Arc<InstanceNeeds>) -> WaitingReplica {
    let id = number as u128 + 1;
    WaitingReplica {
        project: project(job.project),
        user: UserId(Uuid::nil()),
        run: RunId(Uuid::from_u128(id)),
        replica_num: 0,
        class: job.class,
        priority: 0,
        since: Timestamp::from_secs(START + job.arrives),
        nodes: vec![WaitingNode { job: SubmissionId(Uuid::from_u128(id)), needs: Arc::clone(needs) }],
        fleet_choice: FleetChoice::Choose,
        usable_fleets: None,
        fleets: None,
        missing_fleets: Vec::new(),
        creation: InstanceCreation::Reuse,
        max_duration: None,
        resubmitted_at: None,
    }
}

fn fleet(preemption: Option<PreemptionRules>, instances: u32) -> FleetSnapshot {
    FleetSnapshot {
        id: FleetId(Uuid::from_u128(1)),
        name: "gpus".into(),
        is_cluster: false,
        can_create: false,
        nodes_min: 0,
        nodes_max: None,
        instance_nums: (0..instances).collect::<BTreeSet<u32>>(),
        limits: InstanceNeeds::default(),
        blocks: Blocks::Count(1),
        preemption,
    }
}

fn instances(fleet: &FleetSnapshot, count: u32) -> Vec<InstanceSnapshot> {
    let one = |number: u32| InstanceSnapshot {
        id: InstanceId(Uuid::from_u128(u128::from(number) + 1)),
        fleet: fleet.id,
        name: format!("gpus-{number}"),
        instance_num: number,
        hostname: None,
        offer: offer(),
        readiness: Readiness::Ready,
        holds: Vec::new(),
        is_kept: true,
    };
    (0..count).map(one).collect()
}

/// A job of the trace that runs.
struct Running {
    number: usize,
    on: InstanceId,
    since: i64,
    ends: i64,
    is_preempted: bool,
}

/// Result of a policy.
struct ReplayRow {
    name: &'static str,
    fairness: f64,
    satisfaction: Vec<f64>,
    utilisation: f64,
    lost: f64,
    preempted: usize,
    waits: Vec<(f64, f64)>,
}

struct Replay<'a> {
    policy: Policy,
    jobs: &'a [TraceJob],
    queue: Vec<WaitingReplica>,
    running: Vec<Running>,
    promises: Vec<BlockPromise>,
    preempted_before: BTreeMap<usize, u32>,
    used: [f64; 3],
    started: BTreeMap<usize, i64>,
    lost: f64,
    preempted: usize,
}

impl Replay<'_> {
    fn inventory(&self) -> Inventory {
        let fleet = fleet((self.policy == Policy::OrderAndPreemption).then_some(RULES), INSTANCES);
        let mut instances = instances(&fleet, INSTANCES);
        let mut replicas = Vec::new();
        for one in &self.running {
            let job = &self.jobs[one.number];
            let (id, blocks) = (SubmissionId(Uuid::from_u128(one.number as u128 + 1)), job.gpus);
            if let Some(instance) = instances.iter_mut().find(|instance| instance.id == one.on) {
                let (until, is_preempted) = (None, one.is_preempted);
                instance.holds.push(BlockHold { job: id, blocks, until, is_preempted });
            }
            let is_idle = job.class == RunClass::Idle;
            replicas.push(RunningReplica {
                project: project(job.project),
                run: RunId(id.0),
                replica_num: 0,
                class: job.class,
                running_since: Some(Timestamp::from_secs(START + one.since)),
                // Half of the other tasks are retried after an interruption.
                preemptibility: match is_idle || one.number % 2 == 0 {
                    true => Preemptibility::Always,
                    false => Preemptibility::Never,
                },
                is_service: false,
                preempted_before: self.preempted_before.get(&one.number).copied().unwrap_or_default(),
                is_ending: one.is_preempted,
                is_preempted: one.is_preempted,
                jobs: vec![RunningJob { job: id, instance: one.on, blocks, held: held(blocks) }],
            });
        }
        let by_class = |replica: &RunningReplica| HeldByClass {
            project: replica.project,
            class: replica.class,
            held: replica.jobs[0].held.clone(),
        };
        let mut inventory = Inventory { fleets: vec![fleet], instances, ..Inventory::default() };
        if self.policy == Policy::PriorityThenAge {
            return inventory;
        }
        for (number, share) in SHARES.into_iter().enumerate() {
            let (project, held) = (project(number), self.held(number));
            let kept = self.promises.iter().filter(|promise| promise.project == project);
            let used = held + kept.map(|promise| u64::from(promise.blocks)).sum::<u64>();
            let (resource, share) = (QuotaResource::Gpus, Some(share));
            inventory.quotas.push(Quota {
                project,
                member: None,
                resource,
                max: None,
                share,
                used,
                first_end: None,
            });
            let used = self.used[number];
            inventory.usage.push(ProjectUsage { project, used, held: held * 1_000, weight: 1 });
        }
        if self.policy == Policy::OrderAndPreemption {
            inventory.held_by_class = replicas.iter().map(by_class).collect();
            inventory.running = replicas;
            inventory.promises.clone_from(&self.promises);
        }
        inventory
    }

    fn held(&self, project: usize) -> u64 {
        let own = self.running.iter().map(|one| &self.jobs[one.number]).filter(|job| job.project == project);
        own.map(|job| u64::from(job.gpus)).sum()
    }

    fn waits(&self, project: usize) -> u64 {
        let own = self.queue.iter().map(|one| &self.jobs[number_of(one.run)]);
        own.filter(|job| job.project == project).map(|job| u64::from(job.gpus)).sum()
    }

    fn end_jobs(&mut self, at: i64, all_needs: &BTreeMap<u32, Arc<InstanceNeeds>>) {
        let (ended, left): (Vec<_>, Vec<_>) = self.running.drain(..).partition(|one| one.ends <= at);
        self.running = left;
        for one in ended.into_iter().filter(|one| one.is_preempted) {
            let job = &self.jobs[one.number];
            self.lost += f64::from(job.gpus) * (one.ends - one.since) as f64;
            *self.preempted_before.entry(one.number).or_default() += 1;
            let mut again = waiting(one.number, job, &all_needs[&job.gpus]);
            again.resubmitted_at = Some(Timestamp::from_secs(START + at));
            self.queue.push(again);
        }
    }

    fn round(&mut self, at: i64) {
        let now = Timestamp::from_secs(START + at);
        let mut queue = self.queue.clone();
        if self.policy == Policy::PriorityThenAge {
            for one in &mut queue {
                one.priority = match one.class {
                    RunClass::Urgent => 100,
                    RunClass::Normal => 50,
                    RunClass::Idle => 0,
                };
                (one.class, one.project) = (RunClass::Normal, project(0));
            }
        }
        let inventory = self.inventory();
        for placement in place_replicas(&queue, &inventory, now) {
            let number = number_of(placement.run);
            if let PlacementOutcome::Placed { seats, .. } = &placement.outcome
                && let Some(NodePlacement::Existing { instance, .. }) = seats.first()
            {
                let ends = at + self.jobs[number].lasts;
                self.running.push(Running { number, on: *instance, since: at, ends, is_preempted: false });
                self.queue.retain(|one| one.run != placement.run);
                self.promises.retain(|promise| promise.job.0 != placement.run.0);
                self.started.entry(number).or_insert(at);
            }
            let Some(preemption) = placement.preemption else { continue };
            self.promises.extend(preemption.promises);
            for victim in preemption.victims {
                let victim = number_of(victim.run);
                if let Some(one) = self.running.iter_mut().find(|one| one.number == victim) {
                    (one.is_preempted, one.ends) = (true, one.ends.min(at + RULES.grace.as_secs()));
                    self.preempted += 1;
                }
            }
        }
    }
}

fn number_of(run: RunId) -> usize {
    usize::try_from(run.0.as_u128()).unwrap_or(1) - 1
}

fn replay(policy: Policy, name: &'static str, jobs: &[TraceJob]) -> ReplayRow {
    let all_needs: BTreeMap<u32, _> = [1, 2, 4, 8].into_iter().map(|gpus| (gpus, needs(gpus))).collect();
    let mut replay = Replay {
        policy,
        jobs,
        queue: Vec::new(),
        running: Vec::new(),
        promises: Vec::new(),
        preempted_before: BTreeMap::new(),
        used: [0.0; 3],
        started: BTreeMap::new(),
        lost: 0.0,
        preempted: 0,
    };
    let (mut next, mut held_time, mut demand_time) = (0, 0.0, 0.0);
    let mut satisfied = [(0.0, 0.0); 3];
    for at in (0..DAY).step_by(TICK as usize) {
        replay.end_jobs(at, &all_needs);
        while let Some(job) = jobs.get(next).filter(|job| job.arrives <= at) {
            replay.queue.push(waiting(next, job, &all_needs[&job.gpus]));
            next += 1;
        }
        replay.round(at);
        let total = u64::from(INSTANCES * GPUS);
        let (mut held_now, mut demand) = (0, 0);
        for number in 0..3 {
            let (held, waits) = (replay.held(number), replay.waits(number));
            (held_now, demand) = (held_now + held, demand + held + waits);
            let decay = (-(TICK as f64) / (7.0 * DAY as f64)).exp2();
            replay.used[number] = replay.used[number] * decay + (held * 1_000) as f64 * TICK as f64;
            let due = SHARES[number].min(held + waits);
            if due > 0 {
                satisfied[number].0 += (held as f64 / due as f64).min(1.0);
                satisfied[number].1 += 1.0;
            }
        }
        held_time += held_now as f64;
        demand_time += demand.min(total) as f64;
    }
    let satisfaction: Vec<f64> = satisfied.iter().map(|(sum, count)| sum / f64::max(*count, 1.0)).collect();
    let (sum, squares) = (satisfaction.iter().sum::<f64>(), satisfaction.iter().map(|x| x * x).sum::<f64>());
    let waits = [RunClass::Urgent, RunClass::Normal, RunClass::Idle].into_iter().map(|class| {
        let of_class = jobs.iter().enumerate().filter(|(_, job)| job.class == class);
        // One that has not started waits at least until the end of the day.
        let mut waits: Vec<i64> = of_class
            .map(|(number, job)| replay.started.get(&number).copied().unwrap_or(DAY) - job.arrives)
            .collect();
        waits.sort_unstable();
        let at = |share: f64| waits[((waits.len() - 1) as f64 * share) as usize] as f64 / 60.0;
        (at(0.5), at(0.95))
    });
    ReplayRow {
        name,
        fairness: sum * sum / (3.0 * squares),
        utilisation: held_time / demand_time,
        lost: replay.lost / TICK as f64 / held_time,
        preempted: replay.preempted,
        waits: waits.collect(),
        satisfaction,
    }
}

fn render(rows: &[ReplayRow]) -> String {
    let mut text = "| order | Jain's index | satisfaction of the projects | utilisation | preempted | work lost | wait of urgent \
                    | normal | idle |\n|---|--:|--:|--:|--:|--:|--:|--:|--:|\n"
        .to_owned();
    for row in rows {
        let satisfaction: Vec<String> = row.satisfaction.iter().map(|x| format!("{x:.2}")).collect();
        let waits: Vec<String> =
            row.waits.iter().map(|(median, high)| format!("{median:.0} / {high:.0} min")).collect();
        text.push_str(&format!(
            "| {} | {:.3} | {} | {:.1} % | {} | {:.1} % | {} |\n",
            row.name,
            row.fairness,
            satisfaction.join(", "),
            row.utilisation * 100.0,
            row.preempted,
            row.lost * 100.0,
            waits.join(" | ")
        ));
    }
    text
}

/// Times rounds over a full fleet of 100 instances with 10,000 waiting jobs of 20 projects; the median in milliseconds.
/// Every second project holds more than its share if `some_borrow`, and the others less.
fn time_rounds(preemption: Option<PreemptionRules>, some_borrow: bool) -> f64 {
    let fleet = fleet(preemption, 100);
    let mut inventory = Inventory { instances: instances(&fleet, 100), ..Inventory::default() };
    inventory.fleets.push(fleet);
    for at in 0..100 * GPUS {
        let job = SubmissionId(Uuid::from_u128(1_000_000 + u128::from(at)));
        let instance = &mut inventory.instances[(at / GPUS) as usize];
        let on = instance.id;
        instance.holds.push(BlockHold { job, blocks: 1, until: None, is_preempted: false });
        if preemption.is_some() {
            let project = project(at as usize % 20);
            inventory.held_by_class.push(HeldByClass { project, class: RunClass::Normal, held: held(1) });
            inventory.running.push(RunningReplica {
                project,
                run: RunId(job.0),
                replica_num: 0,
                class: RunClass::Normal,
                running_since: Some(Timestamp::from_secs(START)),
                preemptibility: Preemptibility::Always,
                is_service: false,
                preempted_before: 0,
                is_ending: false,
                is_preempted: false,
                jobs: vec![RunningJob { job, instance: on, blocks: 1, held: held(1) }],
            });
        }
    }
    for number in 0..20 {
        let (project, resource) = (project(number), QuotaResource::Gpus);
        inventory.quotas.push(Quota {
            project,
            member: None,
            resource,
            max: None,
            share: Some(if !some_borrow {
                40
            } else if number % 2 == 0 {
                30
            } else {
                50
            }),
            used: 40,
            first_end: None,
        });
        let used = number as f64 * 1e6;
        inventory.usage.push(ProjectUsage { project, used, held: 40_000, weight: 1 });
    }
    let all_needs: Vec<_> = (1..=8).map(needs).collect();
    let queue: Vec<WaitingReplica> = (0..10_000_usize)
        .map(|number| {
            let class = [RunClass::Normal, RunClass::Idle][number % 2];
            let gpus = u32::try_from(number % 8).unwrap_or_default() + 1;
            let arrives = i64::try_from(number).unwrap_or_default() % 3_000;
            let job = TraceJob { project: number % 20, class, gpus, arrives, lasts: 0 };
            waiting(number, &job, &all_needs[number % 8])
        })
        .collect();
    let now = Timestamp::from_secs(START + 3_600);
    let mut times: Vec<f64> = (0..21)
        .map(|_| {
            let began = Instant::now();
            let placed = place_replicas(&queue, &inventory, now);
            let time = began.elapsed();
            assert_eq!(placed.len(), queue.len());
            assert_eq!(placed.iter().any(|one| one.preemption.is_some()), some_borrow);
            time.as_secs_f64() * 1_000.0
        })
        .collect();
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

/// Replays the trace, times the rounds, prints both, and writes them into the page of the repository at `root`.
pub fn run(root: &Path) -> Result<()> {
    let jobs = trace();
    let rows = [
        replay(Policy::PriorityThenAge, "priority, then age", &jobs),
        replay(Policy::Order, "class, share, usage, priority, age", &jobs),
        replay(Policy::OrderAndPreemption, "the same, with preemption", &jobs),
    ];
    let mut text = render(&rows);
    let times = [time_rounds(None, false), time_rounds(Some(RULES), false), time_rounds(Some(RULES), true)];
    let [without, idle, busy] = times;
    text.push_str(&format!(
        "\nA round with 10,000 waiting jobs of 20 projects on 100 full instances takes {without:.1} ms, {idle:.1} ms with \
         preemption, and {busy:.1} ms if projects take their shares back in it (median of 21).\n"
    ));
    write!(std::io::stdout(), "{text}")?;
    let slowest = times.into_iter().fold(0.0, f64::max);
    ensure!(slowest <= ROUND_MS_MAX, "a round took {slowest:.1} ms: expected {ROUND_MS_MAX:.0} ms at most");
    let page = root.join(PAGE);
    let old = std::fs::read_to_string(&page).with_context(|| format!("failed to read {PAGE}"))?;
    let from = old.find(TABLE_START).with_context(|| format!("{PAGE} has no part `replay`"))?;
    let from = from + TABLE_START.len();
    let to = from + old[from..].find(TABLE_END).context("the part `replay` has no end mark")?;
    std::fs::write(&page, format!("{}\n{text}\n{}", &old[..from], &old[to..]))?;
    Ok(())
}
