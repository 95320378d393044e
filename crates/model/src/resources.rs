//! Requested resources of a job.
//!
//! `ResourcesSpec` and its parts serialise to the normalised JSON that clients send and expect back. Short syntaxes are
//! parsed in `config/`.

use serde::{Deserialize, Serialize};

/// Inclusive range; an absent end is open. At least one end is set unless it means "any".
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Range<T> {
    pub min: Option<T>,
    pub max: Option<T>,
}

impl<T: PartialOrd + Copy> Range<T> {
    pub const ANY: Self = Self { min: None, max: None };

    pub const fn exactly(n: T) -> Self {
        Self { min: Some(n), max: Some(n) }
    }
    pub const fn at_least(n: T) -> Self {
        Self { min: Some(n), max: None }
    }
    pub fn contains(&self, n: T) -> bool {
        self.min.is_none_or(|min| n >= min) && self.max.is_none_or(|max| n <= max)
    }
    /// Returns the intersection; `None` if it is empty.
    pub fn intersect(&self, other: &Self) -> Option<Self> {
        let later = |a: Option<T>, b: Option<T>, pick: fn(&T, &T) -> bool| match (a, b) {
            (Some(a), Some(b)) => Some(if pick(&a, &b) { a } else { b }),
            (a, b) => a.or(b),
        };
        let min = later(self.min, other.min, |a, b| a > b);
        let max = later(self.max, other.max, |a, b| a < b);
        match (min, max) {
            (Some(low), Some(high)) if low > high => None,
            (min, max) => Some(Self { min, max }),
        }
    }
}

/// Gibibytes, as configurations write memory and disk.
pub type Gb = f64;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum CpuArch {
    X86,
    Arm,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum GpuVendor {
    Nvidia,
    Amd,
    Google,
    Intel,
    Tenstorrent,
}

impl GpuVendor {
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Nvidia => "nvidia",
            Self::Amd => "amd",
            Self::Google => "google",
            Self::Intel => "intel",
            Self::Tenstorrent => "tenstorrent",
        }
    }
}

#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct CpuSpec {
    pub arch: Option<CpuArch>,
    pub count: Range<u32>,
}

impl Default for CpuSpec {
    fn default() -> Self {
        Self { arch: None, count: Range::at_least(2) }
    }
}

#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct GpuSpec {
    pub vendor: Option<GpuVendor>,
    pub name: Option<Vec<String>>,
    pub count: Range<u32>,
    pub memory: Option<Range<Gb>>,
    pub total_memory: Option<Range<Gb>>,
    /// Minimum, NVIDIA only: `[7, 5]`.
    pub compute_capability: Option<(u32, u32)>,
}

impl GpuSpec {
    /// Creates a request for this number of GPUs, of any kind.
    pub const fn count(count: Range<u32>) -> Self {
        Self { vendor: None, name: None, count, memory: None, total_memory: None, compute_capability: None }
    }
}

#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct DiskSpec {
    pub size: Range<Gb>,
}

#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ResourcesSpec {
    pub cpu: CpuSpec,
    pub memory: Range<Gb>,
    pub shm_size: Option<Gb>,
    pub gpu: Option<GpuSpec>,
    pub disk: Option<DiskSpec>,
}

impl Default for ResourcesSpec {
    fn default() -> Self {
        Self {
            cpu: CpuSpec::default(),
            memory: Range::at_least(8.0),
            shm_size: None,
            gpu: Some(GpuSpec::count(Range::at_least(0))),
            disk: Some(DiskSpec { size: Range::at_least(100.0) }),
        }
    }
}
