//! Cures of shortfalls as changes of a configuration.

use super::Shortfall;
use crate::resources::Gb;

/// A change of a configuration: values by path, such as `resources.gpu.count`. Null removes the field.
pub type Patch = std::collections::BTreeMap<&'static str, serde_json::Value>;

impl Shortfall {
    /// Returns the cure as a change of the configuration, if a single field resolves it.
    #[expect(clippy::wildcard_enum_match_arm, reason = "a new shortfall has no patch until it gets one")]
    pub fn patch(&self) -> Option<Patch> {
        let set = |path: &'static str, value: serde_json::Value| Some(Patch::from([(path, value)]));
        match self {
            Self::Cpus { wanted, has } if is_below(wanted.min, *has) => {
                set("resources.cpu.count", (*has).into())
            }
            Self::Memory { wanted, has } if is_below(wanted.min, *has) => {
                set("resources.memory", format_at_least(*has).into())
            }
            Self::Disk { wanted, has } if is_below(wanted.min, *has) => {
                set("resources.disk", format_at_least(*has).into())
            }
            Self::GpuCount { wanted, has } if *has > 0 && is_below(wanted.min, *has) => {
                set("resources.gpu.count", (*has).into())
            }
            Self::GpuMemory { wanted, has } if *has > 0.0 && is_below(wanted.min, *has) => {
                set("resources.gpu.memory", format_at_least(*has).into())
            }
            Self::GpuTotalMemory { wanted, has } if *has > 0.0 && is_below(wanted.min, *has) => {
                set("resources.gpu.total_memory", format_at_least(*has).into())
            }
            Self::ComputeCapability { has: Some((major, minor)), .. } => {
                set("resources.gpu.compute_capability", format!("{major}.{minor}").into())
            }
            Self::ComputeCapability { has: None, .. } => {
                set("resources.gpu.compute_capability", serde_json::Value::Null)
            }
            Self::NotListed { what, .. } => {
                let field = match *what {
                    "backend" => "backends",
                    "region" => "regions",
                    "zone" => "availability_zones",
                    "instance type" => "instance_types",
                    _ => return None,
                };
                set(field, serde_json::Value::Null)
            }
            Self::Price { costs, .. } => set("max_price", costs.known_dollars().into()),
            Self::Spot { .. } => set("spot_policy", "auto".into()),
            Self::Reservation { has, .. } => set("reservation", has.clone().into()),
            Self::ReuseOnly => set("creation_policy", "reuse-or-create".into()),
            Self::TooFewNodes { wanted, could, .. } if *could > 0 && could < wanted => {
                set("nodes", (*could).into())
            }
            _ => None,
        }
    }
}

fn is_below<T: PartialOrd>(min: Option<T>, has: T) -> bool {
    min.is_some_and(|min| has < min)
}

/// Formats a minimum that a location with this size meets: rounded down.
fn format_at_least(size: Gb) -> String {
    format!("{}GB..", (size * 100.0).floor() / 100.0)
}
