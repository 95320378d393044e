//! Checkers of shared fleets. Quotas and kept blocks are checked by triggers at each write (Q1, P1, P4).

use std::collections::{BTreeMap, BTreeSet};

use anyhow::Result;
use uuid::Uuid;
use windlass_server::db::{Db, invariant_queries::pool_watch};

use super::{History, Violation, violation};

/// Preemptions, with what everyone held at that moment.
#[derive(Clone, Debug, Default)]
pub struct PoolRecords {
    pub preemptions: Vec<PreemptionRow>,
    pub held: Vec<HeldRow>,
    pub shares: Vec<ShareRow>,
    /// Time since which nothing fails and no quota or export changes.
    pub calm_since: Option<i64>,
    /// Times in the calm at which a server was killed or frozen.
    pub crashes: Vec<i64>,
    pub now: i64,
}

/// The job for which others were preempted.
#[derive(Clone, Debug)]
pub struct PreemptionRow {
    pub waiting: Uuid,
    pub at: i64,
    pub placed_at: Option<i64>,
    pub finished: bool,
    pub reason: Option<String>,
    /// Time until which blocks are kept for it.
    pub until: i64,
}

/// What a job held when others were preempted.
#[derive(Clone, Debug)]
pub struct HeldRow {
    pub waiting: Uuid,
    pub at: i64,
    pub role: Role,
    pub project: Uuid,
    pub priority: i64,
    pub replica: (Uuid, i64),
    pub gpus: i64,
    pub cpus: i64,
    pub memory_mib: i64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    Held,
    Victim,
    Waiting,
}

#[derive(Clone, Debug)]
pub struct ShareRow {
    pub waiting: Uuid,
    pub at: i64,
    pub project: Uuid,
    pub resource: String,
    pub amount: i64,
}

/// Reads the records of the triggers.
pub async fn read_records(db: &Db) -> Result<PoolRecords> {
    let mut records = PoolRecords { now: db.now().await?.0, ..PoolRecords::default() };
    for row in db.query(pool_watch::WAITING, Vec::new()).await? {
        records.preemptions.push(PreemptionRow {
            waiting: row.uuid(0)?,
            at: row.int(1)?,
            placed_at: row.opt_int(2)?,
            finished: row.bool(3)?,
            reason: row.opt_text(4)?,
            until: row.opt_int(5)?.unwrap_or_default(),
        });
    }
    for row in db.query(pool_watch::HELD, Vec::new()).await? {
        let role = match row.str(2)? {
            "victim" => Role::Victim,
            "waiting" => Role::Waiting,
            _ => Role::Held,
        };
        records.held.push(HeldRow {
            waiting: row.uuid(0)?,
            at: row.int(1)?,
            role,
            project: row.uuid(3)?,
            priority: row.int(4)?,
            replica: (row.uuid(5)?, row.int(6)?),
            gpus: row.int(7)?,
            cpus: row.int(8)?,
            memory_mib: row.int(9)?,
        });
    }
    for row in db.query(pool_watch::SHARES, Vec::new()).await? {
        records.shares.push(ShareRow {
            waiting: row.uuid(0)?,
            at: row.int(1)?,
            project: row.uuid(2)?,
            resource: row.text(3)?,
            amount: row.int(4)?,
        });
    }
    let calm = db.query(pool_watch::CALM_SINCE, Vec::new()).await?;
    records.calm_since = calm.first().map(|row| row.opt_int(0)).transpose()?.flatten();
    Ok(records)
}

pub(super) fn check_always(h: &History) -> Vec<Violation> {
    let mut found = p2_each_preemption_increases_the_sequence(&h.pool);
    found.extend(p3_each_preemption_is_followed_by_its_start(&h.pool));
    found
}

/// What is held within shares, and the number of replicas, in each class and above, from the highest: each preemption,
/// with the start for which it is, must increase it.
fn p2_each_preemption_increases_the_sequence(records: &PoolRecords) -> Vec<Violation> {
    let mut found = Vec::new();
    for one in &records.preemptions {
        let key = (one.waiting, one.at);
        let held: Vec<&HeldRow> = records.held.iter().filter(|row| (row.waiting, row.at) == key).collect();
        let shares: Vec<&ShareRow> =
            records.shares.iter().filter(|row| (row.waiting, row.at) == key).collect();
        let without = |left_out: Role| {
            sequence(&held.iter().copied().filter(|row| row.role != left_out).collect::<Vec<_>>(), &shares)
        };
        let (before, after) = (without(Role::Waiting), without(Role::Victim));
        if after <= before {
            found.push(violation(
                "P2",
                format!("the preemption for job {} leads from {before:?} to {after:?}", one.waiting),
            ));
        }
    }
    found
}

fn sequence(held: &[&HeldRow], shares: &[&ShareRow]) -> Vec<(i64, usize)> {
    let classes = [1_000, 0, i64::MIN];
    let of_class = classes.map(|lowest| {
        let own: Vec<&&HeldRow> = held.iter().filter(|row| row.priority >= lowest).collect();
        let within = shares.iter().map(|share| {
            let amounts =
                own.iter().filter(|row| row.project == share.project).map(|row| row.amount(&share.resource));
            amounts.sum::<i64>().min(share.amount)
        });
        let replicas: BTreeSet<(Uuid, i64)> = own.iter().map(|row| row.replica).collect();
        (within.sum(), replicas.len())
    });
    of_class.into()
}

impl HeldRow {
    fn amount(&self, resource: &str) -> i64 {
        match resource {
            "cpu" => self.cpus,
            "memory" => self.memory_mib,
            // All GPUs of the simulation are of one name.
            "gpu" | "gpu:a100" => self.gpus,
            _ => 0,
        }
    }
}

/// While no host fails and nothing is changed, the job for which others end is placed while blocks are kept for it, unless
/// a server crashed meanwhile: its leases have to expire, which may take longer than the blocks are kept.
fn p3_each_preemption_is_followed_by_its_start(records: &PoolRecords) -> Vec<Violation> {
    let Some(calm_since) = records.calm_since else { return Vec::new() };
    let mut last: BTreeMap<Uuid, &PreemptionRow> = BTreeMap::new();
    for one in records.preemptions.iter().filter(|one| one.at >= calm_since) {
        last.insert(one.waiting, one);
    }
    let mut found = Vec::new();
    for one in last.values() {
        let is_late = match one.placed_at {
            Some(at) => at > one.until,
            None => one.finished || records.now > one.until,
        };
        let has_crashed = records.crashes.iter().any(|at| (one.at..=one.until).contains(at));
        if is_late && !has_crashed {
            found.push(violation(
                "P3",
                format!(
                    "jobs were preempted for {}, which was {} ({})",
                    one.waiting,
                    if one.placed_at.is_some() { "placed too late" } else { "not placed" },
                    one.reason.as_deref().unwrap_or("no reason")
                ),
            ));
        }
    }
    found
}
