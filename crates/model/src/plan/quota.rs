//! Quotas: how much a project or one of its members may hold at once.
//!
//! A quota counts what jobs hold, not what they request: a job that holds half of a machine holds half of its CPUs,
//! memory, GPUs and price. A job over a quota waits until others of the same project or member end; a job that exceeds
//! it by itself never starts.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::{
    id::{ProjectId, UserId},
    money::Price,
    plan::{blocks, offers::Offer, usage},
    resources::ResourcesSpec,
    time::Timestamp,
};

const MIB_PER_GB: f64 = 1024.0;

/// A resource that a quota limits.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum QuotaResource {
    /// GPUs of any name.
    Gpus,
    /// GPUs of one name, in lower case.
    GpusNamed(String),
    Cpus,
    /// In MiB.
    Memory,
    /// In millionths of a dollar per hour.
    Price,
}

impl QuotaResource {
    /// Parses `gpu`, `gpu:H100`, `cpu`, `memory` or `price`.
    pub fn parse(text: &str) -> Option<Self> {
        Some(match text {
            "gpu" => Self::Gpus,
            "cpu" => Self::Cpus,
            "memory" => Self::Memory,
            "price" => Self::Price,
            other => {
                Self::GpusNamed(other.strip_prefix("gpu:").filter(|name| !name.is_empty())?.to_lowercase())
            }
        })
    }

    /// Writes an amount with its unit.
    pub fn amount(&self, amount: u64) -> String {
        match self {
            Self::Gpus | Self::GpusNamed(_) | Self::Cpus => amount.to_string(),
            Self::Memory if amount.is_multiple_of(1024) => format!("{}GB", amount / 1024),
            Self::Memory => format!("{amount}MB"),
            Self::Price => Price(amount).to_string(),
        }
    }
}

impl fmt::Display for QuotaResource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Gpus => f.write_str("gpu"),
            Self::GpusNamed(name) => write!(f, "gpu:{name}"),
            Self::Cpus => f.write_str("cpu"),
            Self::Memory => f.write_str("memory"),
            Self::Price => f.write_str("price"),
        }
    }
}

impl TryFrom<String> for QuotaResource {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        Self::parse(&text).ok_or_else(|| {
            format!("`{text}` is not a resource; expected `gpu`, `gpu:NAME`, `cpu`, `memory` or `price`")
        })
    }
}

impl From<QuotaResource> for String {
    fn from(resource: QuotaResource) -> Self {
        resource.to_string()
    }
}

/// Resources that a job holds, or several jobs together.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HeldResources {
    pub gpus: u64,
    /// Name of the GPUs, if there are any.
    pub gpu_name: Option<String>,
    pub cpus: u64,
    pub memory_mib: u64,
    /// Millionths of a dollar per hour.
    pub price: u64,
}

impl HeldResources {
    /// A share of an instance.
    pub fn of(offer: &Offer, held: u32, total: u32) -> Self {
        let share = blocks::host_share(&offer.host, held, total);
        let (held, total) = (u64::from(held), u64::from(total.max(1)));
        Self {
            gpus: share.gpus.len() as u64,
            gpu_name: share.gpus.first().map(|gpu| gpu.name.clone()),
            cpus: share.cpus.into(),
            memory_mib: share.memory_mib,
            price: offer.price.0 * held / total,
        }
    }

    /// The most that is held if any one of these may be held.
    pub fn largest(choices: impl IntoIterator<Item = Self>) -> Self {
        choices.into_iter().fold(Self::default(), |most, one| Self {
            gpus: most.gpus.max(one.gpus),
            gpu_name: most.gpu_name.or(one.gpu_name),
            cpus: most.cpus.max(one.cpus),
            memory_mib: most.memory_mib.max(one.memory_mib),
            price: most.price.max(one.price),
        })
    }

    /// Both together.
    #[must_use]
    pub fn plus(self, other: &Self) -> Self {
        Self {
            gpus: self.gpus + other.gpus,
            gpu_name: self.gpu_name.or_else(|| other.gpu_name.clone()),
            cpus: self.cpus + other.cpus,
            memory_mib: self.memory_mib + other.memory_mib,
            price: self.price + other.price,
        }
    }

    /// Thousandths of units of usage.
    pub fn milli_units(&self) -> u64 {
        usage::milli_units(self.gpus, self.cpus, self.memory_mib)
    }

    /// Amount that counts for a quota.
    pub fn amount(&self, resource: &QuotaResource) -> u64 {
        match resource {
            QuotaResource::Gpus => self.gpus,
            QuotaResource::GpusNamed(name) => {
                let is_named = self.gpu_name.as_ref().is_some_and(|held| held.to_lowercase() == *name);
                if is_named { self.gpus } else { 0 }
            }
            QuotaResource::Cpus => self.cpus,
            QuotaResource::Memory => self.memory_mib,
            QuotaResource::Price => self.price,
        }
    }
}

/// The least amount that a job requests of a resource, as far as its configuration says.
pub fn least_amount(requested: &ResourcesSpec, resource: &QuotaResource) -> u64 {
    let gpus = requested.gpu.as_ref();
    let count = gpus.and_then(|gpu| gpu.count.min).unwrap_or_default();
    match resource {
        QuotaResource::Gpus => count.into(),
        QuotaResource::GpusNamed(name) => {
            let names = gpus.and_then(|gpu| gpu.name.as_ref());
            // Another name that the request accepts is not limited by this quota.
            let is_only = names.is_some_and(|names| names.iter().all(|one| one.to_lowercase() == *name));
            if is_only { count.into() } else { 0 }
        }
        QuotaResource::Cpus => requested.cpu.count.min.unwrap_or_default().into(),
        QuotaResource::Memory => requested.memory.min.map_or(0, |memory| (memory * MIB_PER_GB) as u64),
        QuotaResource::Price => 0,
    }
}

/// A quota and its use when the round began: by jobs that hold instances, and by jobs for which blocks are kept because
/// others were preempted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Quota {
    pub project: ProjectId,
    /// The member whose jobs it limits; `None`: all jobs of the project.
    pub member: Option<UserId>,
    pub resource: QuotaResource,
    /// The most that may be held; `None`: no limit.
    pub max: Option<u64>,
    /// Amount that is guaranteed to the project: its jobs come before those that borrow.
    pub share: Option<u64>,
    pub used: u64,
    /// Time by which the first job that counts ends, if one of them has a time limit.
    pub first_end: Option<Timestamp>,
}

impl Quota {
    pub fn applies_to(&self, project: ProjectId, user: UserId) -> bool {
        self.project == project && self.member.is_none_or(|member| member == user)
    }
}

/// Excess of a job over a quota.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct QuotaExcess {
    pub resource: QuotaResource,
    pub wanted: u64,
    pub used: u64,
    pub max: u64,
    /// True if the quota is that of a member.
    pub is_members: bool,
    /// Time by which the first job that counts ends, if one of them has a time limit.
    pub first_end: Option<Timestamp>,
}

impl QuotaExcess {
    /// Returns whether the job fits when nothing else is held.
    pub const fn passes(&self) -> bool {
        self.wanted <= self.max
    }
}

impl fmt::Display for QuotaExcess {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { resource, wanted, used, max, is_members, first_end } = self;
        let whose = if *is_members { "member" } else { "project" };
        write!(
            f,
            "needs {} of `{resource}`, of which the {whose} holds {} and may hold {}",
            resource.amount(*wanted),
            resource.amount(*used),
            resource.amount(*max)
        )?;
        match first_end {
            _ if *used == 0 => Ok(()),
            Some(first_end) => write!(f, "; the first of its jobs ends by {first_end}"),
            None => f.write_str("; none of its jobs has a time limit"),
        }
    }
}

/// Quotas of the projects in a round, and what the round adds to their use.
#[derive(Clone, Debug, Default)]
pub struct QuotaBook {
    quotas: Vec<Quota>,
}

impl QuotaBook {
    pub fn new(quotas: Vec<Quota>) -> Self {
        Self { quotas }
    }

    /// Returns whether any quota applies to jobs of this user.
    pub fn applies_to(&self, project: ProjectId, user: UserId) -> bool {
        self.quotas.iter().any(|quota| quota.applies_to(project, user))
    }

    /// First quota that jobs which hold this together would exceed.
    pub fn excess(&self, project: ProjectId, user: UserId, held: &[HeldResources]) -> Option<QuotaExcess> {
        let applying = self.quotas.iter().filter(|quota| quota.applies_to(project, user));
        applying.into_iter().find_map(|quota| {
            let max = quota.max?;
            let wanted = held.iter().map(|held| held.amount(&quota.resource)).sum();
            let is_over = wanted > 0 && quota.used + wanted > max;
            is_over.then(|| QuotaExcess {
                resource: quota.resource.clone(),
                wanted,
                used: quota.used,
                max,
                is_members: quota.member.is_some(),
                first_end: quota.first_end,
            })
        })
    }

    /// Quotas of a project as a whole.
    pub fn shares_of(&self, project: ProjectId) -> impl Iterator<Item = &Quota> {
        self.quotas.iter().filter(move |quota| quota.project == project && quota.member.is_none())
    }

    /// Counts more for a project as a whole.
    pub fn add_to_project(&mut self, project: ProjectId, held: &[HeldResources]) {
        let quotas = self.quotas.iter_mut();
        for quota in quotas.filter(|quota| quota.project == project && quota.member.is_none()) {
            quota.used += held.iter().map(|held| held.amount(&quota.resource)).sum::<u64>();
        }
    }

    /// Counts what jobs hold from now on, or what is kept for them.
    pub fn add(&mut self, project: ProjectId, user: UserId, held: &[HeldResources]) {
        for quota in self.quotas.iter_mut().filter(|quota| quota.applies_to(project, user)) {
            quota.used += held.iter().map(|held| held.amount(&quota.resource)).sum::<u64>();
        }
    }

    /// No longer counts what is kept for jobs.
    pub fn remove(&mut self, project: ProjectId, user: UserId, held: &[HeldResources]) {
        for quota in self.quotas.iter_mut().filter(|quota| quota.applies_to(project, user)) {
            let kept = held.iter().map(|held| held.amount(&quota.resource)).sum::<u64>();
            quota.used = quota.used.saturating_sub(kept);
        }
    }
}

#[cfg(test)]
mod tests {
    use uuid::Uuid;

    use super::*;

    fn project() -> ProjectId {
        ProjectId(Uuid::from_u128(1))
    }

    fn user(number: u128) -> UserId {
        UserId(Uuid::from_u128(number))
    }

    fn quota(member: Option<UserId>, resource: &str, max: u64) -> Quota {
        let resource = QuotaResource::parse(resource).unwrap();
        Quota { project: project(), member, resource, max: Some(max), share: None, used: 0, first_end: None }
    }

    fn gpus(count: u64, name: &str) -> HeldResources {
        HeldResources { gpus: count, gpu_name: Some(name.to_owned()), ..HeldResources::default() }
    }

    #[test]
    fn resources_are_parsed_and_written_alike() {
        for text in ["gpu", "gpu:h100", "cpu", "memory", "price"] {
            assert_eq!(QuotaResource::parse(text).unwrap().to_string(), text);
        }
        assert_eq!(QuotaResource::parse("gpu:H100"), QuotaResource::parse("gpu:h100"));
        for wrong in ["", "gpus", "gpu:", "disk"] {
            assert_eq!(QuotaResource::parse(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn a_quota_of_a_project_counts_all_members_and_one_of_a_member_only_that_member() {
        let mut book = QuotaBook::new(vec![quota(None, "gpu", 4), quota(Some(user(1)), "gpu", 3)]);
        assert_eq!(book.excess(project(), user(1), &[gpus(3, "H100")]), None);
        book.add(project(), user(1), &[gpus(2, "H100")]);
        let excess = book.excess(project(), user(1), &[gpus(2, "H100")]).unwrap();
        assert_eq!((excess.used, excess.max, excess.is_members, excess.passes()), (2, 3, true, true));
        assert_eq!(book.excess(project(), user(2), &[gpus(2, "H100")]), None);
        let excess = book.excess(project(), user(2), &[gpus(1, "H100"), gpus(2, "A100")]).unwrap();
        assert_eq!((excess.wanted, excess.used, excess.max, excess.is_members), (3, 2, 4, false));
        let other = ProjectId(Uuid::from_u128(9));
        assert_eq!(book.excess(other, user(1), &[gpus(99, "H100")]), None);
    }

    #[test]
    fn a_named_gpu_counts_only_for_its_name_and_nothing_held_exceeds_nothing() {
        let book = QuotaBook::new(vec![quota(None, "gpu:H100", 0)]);
        assert_eq!(book.excess(project(), user(1), &[gpus(8, "A100")]), None);
        let excess = book.excess(project(), user(1), &[gpus(1, "H100")]).unwrap();
        assert!(!excess.passes());
        assert_eq!(excess.to_string(), "needs 1 of `gpu:h100`, of which the project holds 0 and may hold 0");
    }
}
