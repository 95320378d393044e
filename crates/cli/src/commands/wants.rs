//! Flags that say what machines are wanted: the same for all commands that look for some.

use serde_json::{Value, json};

#[derive(Clone, Debug, Default, clap::Args)]
pub(crate) struct Wants {
    /// Processors: `8`, `4..`, `arm:8..`
    #[arg(long, value_name = "SPEC", help_heading = "Resources")]
    pub(crate) cpu: Option<String>,
    /// GPUs: `1`, `H100`, `A100:80GB:8`, `amd:2..`
    #[arg(long, value_name = "SPEC", help_heading = "Resources")]
    pub(crate) gpu: Option<String>,
    /// Memory: `64GB..`, `16GB..32GB`
    #[arg(long, value_name = "RANGE", help_heading = "Resources")]
    pub(crate) memory: Option<String>,
    /// Disk: `100GB..`
    #[arg(long, value_name = "RANGE", help_heading = "Resources")]
    pub(crate) disk: Option<String>,
    /// The highest price per hour, in dollars
    #[arg(long, value_name = "PRICE", help_heading = "Machines")]
    pub(crate) max_price: Option<f64>,
    /// Only of this backend; may be repeated
    #[arg(short, long, value_name = "NAME", help_heading = "Machines")]
    pub(crate) backend: Vec<String>,
    /// Only in this region; may be repeated
    #[arg(short, long, value_name = "NAME", help_heading = "Machines")]
    pub(crate) region: Vec<String>,
    /// Only of this instance type; may be repeated
    #[arg(long, value_name = "NAME", help_heading = "Machines")]
    pub(crate) instance_type: Vec<String>,
    /// Only in this fleet; may be repeated
    #[arg(long, value_name = "FLEET", help_heading = "Machines")]
    pub(crate) fleet: Vec<String>,
    /// Only machines that are there already
    #[arg(short = 'R', long, help_heading = "Machines")]
    pub(crate) reuse: bool,
    /// Only spot machines, which may be taken away
    #[arg(long, help_heading = "Machines", conflicts_with_all = ["on_demand", "spot_auto"])]
    pub(crate) spot: bool,
    /// Only machines that are not taken away
    #[arg(long, help_heading = "Machines", conflicts_with = "spot_auto")]
    pub(crate) on_demand: bool,
    /// Either kind
    #[arg(long, help_heading = "Machines")]
    pub(crate) spot_auto: bool,
}

impl Wants {
    /// Writes what was said into a configuration of a run; what was not said stays as it is.
    pub(crate) fn onto(&self, configuration: &mut Value) {
        let resources =
            [("cpu", &self.cpu), ("gpu", &self.gpu), ("memory", &self.memory), ("disk", &self.disk)];
        for (key, value) in resources {
            if let Some(value) = value {
                configuration["resources"][key] = json!(value);
            }
        }
        if let Some(price) = self.max_price {
            configuration["max_price"] = json!(price);
        }
        let lists = [
            ("backends", &self.backend),
            ("regions", &self.region),
            ("instance_types", &self.instance_type),
            ("fleets", &self.fleet),
        ];
        for (key, list) in lists {
            if !list.is_empty() {
                configuration[key] = json!(list);
            }
        }
        if self.reuse {
            configuration["creation_policy"] = json!("reuse");
        }
        let policies = [(self.spot, "spot"), (self.on_demand, "on-demand"), (self.spot_auto, "auto")];
        for (said, policy) in policies {
            if said {
                configuration["spot_policy"] = json!(policy);
            }
        }
    }
}
