//! A stored fleet specification, parsed once, with what placement and the pipelines of fleets and instances need from
//! it.

use std::{
    collections::BTreeMap,
    sync::{Arc, LazyLock},
};

use parking_lot::Mutex;
use serde_json::Value;
use windlass_model::{
    config::{
        Configuration,
        fleet::{Blocks as GivenBlocks, Fleet as Config, FleetNodes, Placement},
        profile::{Provisioning, SpotPolicy},
    },
    id::FleetId,
    money::Price,
    plan::{blocks::Blocks, offers::InstanceNeeds, preemption::PreemptionRules},
    time::Span,
};

use crate::db::{DbError, documents::FLEET_SPEC, fleets::Fleet};

/// Default idle time, in seconds, of an instance that a fleet created for itself.
const FLEET_IDLE_DEFAULT: i64 = 3 * 24 * 60 * 60;
/// Default idle time, in seconds, of an instance that was created for a run.
const RUN_IDLE_DEFAULT: i64 = 5 * 60;
/// Configuration value for no limit.
const FOR_EVER: i64 = -1;

#[derive(Clone, Debug, PartialEq)]
pub struct ParsedFleetSpec {
    /// `None`: it cannot be parsed (any more). Such a fleet keeps its instances and creates no new ones.
    configuration: Option<Box<Config>>,
    is_ssh: bool,
    is_cluster: bool,
    limits: InstanceNeeds,
}

impl ParsedFleetSpec {
    pub fn parse(spec: &Value) -> Self {
        let document = &spec["configuration"];
        let configuration = match Configuration::from_json(document) {
            Ok(Configuration::Fleet(config)) => Some(config),
            Ok(_) | Err(_) => None,
        };
        let unknown = || InstanceNeeds { is_spot_default: true, ..InstanceNeeds::default() };
        let limits = configuration.as_deref().map_or_else(unknown, limits);
        Self {
            is_ssh: !document["ssh_config"].is_null(),
            is_cluster: document["placement"] == Placement::Cluster.as_str(),
            configuration,
            limits,
        }
    }

    pub fn is_ssh(&self) -> bool {
        self.is_ssh
    }

    /// True for `placement: cluster`.
    pub fn is_cluster(&self) -> bool {
        self.is_cluster
    }

    /// Returns whether the fleet may create instances.
    pub fn creates(&self) -> bool {
        !self.is_ssh && self.configuration.is_some()
    }

    pub fn nodes(&self) -> Option<FleetNodes> {
        self.configuration.as_ref()?.nodes
    }

    /// Requirements on new instances.
    pub fn limits(&self) -> &InstanceNeeds {
        &self.limits
    }

    /// Requirements on instances that the fleet creates for itself: on demand, unless configured otherwise.
    pub fn own_limits(&self) -> InstanceNeeds {
        let spot = if self.limits.is_spot_default { Some(false) } else { self.limits.spot };
        InstanceNeeds { spot, ..self.limits.clone() }
    }

    pub fn blocks(&self) -> Blocks {
        match self.configuration.as_ref().map(|config| config.blocks) {
            Some(GivenBlocks::Auto) => Blocks::Auto,
            Some(GivenBlocks::Count(count)) => Blocks::Count(count),
            None => Blocks::Count(1),
        }
    }

    /// Rules by which its jobs may be preempted, with the whole budget; `None`: they are not.
    pub fn preemption(&self) -> Option<PreemptionRules> {
        let policy = self.configuration.as_ref()?.preemption.as_ref()?.policy()?;
        Some(PreemptionRules {
            min_run: Span::secs(policy.min_run.0),
            wait: Span::secs(policy.wait.0),
            grace: Span::secs(policy.grace.0),
            budget_left: u32::try_from(policy.budget.get()).unwrap_or(u32::MAX),
        })
    }

    /// Environment of the agents on its hosts, and of the jobs there, which may override it.
    pub fn env(&self) -> BTreeMap<String, String> {
        self.configuration.as_ref().map(|config| config.env.values()).unwrap_or_default()
    }

    fn provisioning(&self) -> Option<&Provisioning> {
        Some(&self.configuration.as_ref()?.provisioning)
    }

    /// Tags of the fleet, overridden by those of a run.
    pub fn tags(&self, run: Option<&BTreeMap<String, String>>) -> BTreeMap<String, String> {
        let own = self.provisioning().and_then(|machines| machines.tags.as_ref());
        let mut tags = own.map(|tags| tags.0.clone()).unwrap_or_default();
        tags.extend(run.into_iter().flatten().map(|(key, value)| (key.clone(), value.clone())));
        tags
    }

    /// Seconds that an instance created by the fleet for itself may be idle; `None`: no limit.
    pub fn idle(&self) -> Option<i64> {
        let given = self.provisioning().and_then(|machines| machines.idle_duration.0);
        Some(given.unwrap_or(FLEET_IDLE_DEFAULT)).filter(|secs| *secs != FOR_EVER)
    }

    /// Seconds that an instance created for a run may be idle: the shorter of both settings.
    pub fn run_idle_secs(&self, run: Option<i64>) -> Option<i64> {
        let own = self.provisioning().and_then(|machines| machines.idle_duration.0);
        let shorter = match (own, run) {
            (Some(FOR_EVER), Some(other)) | (Some(other), Some(FOR_EVER)) => other,
            (Some(own), Some(run)) => own.min(run),
            (Some(one), None) | (None, Some(one)) => one,
            (None, None) => RUN_IDLE_DEFAULT,
        };
        Some(shorter).filter(|secs| *secs != FOR_EVER)
    }
}

fn limits(config: &Config) -> InstanceNeeds {
    let machines = &config.provisioning;
    InstanceNeeds {
        resources: config.resources.clone(),
        max_price: machines.max_price.map(|price| Price::from_dollars(price.0)),
        spot: match machines.spot_policy {
            Some(SpotPolicy::Spot) => Some(true),
            Some(SpotPolicy::OnDemand) => Some(false),
            Some(SpotPolicy::Auto) | None => None,
        },
        is_spot_default: machines.spot_policy.is_none(),
        backends: machines
            .backends
            .clone()
            .or_else(|| config.backend.map(|backend| vec![backend]))
            .map(|list| list.iter().map(|b| b.as_str().to_owned()).collect()),
        regions: machines.regions.clone().or_else(|| config.dispatcher.clone().map(|name| vec![name])),
        zones: machines
            .availability_zones
            .clone()
            .or_else(|| config.partition.clone().map(|name| vec![name])),
        instance_types: machines.instance_types.clone(),
        reservation: machines.reservation.clone(),
        volumes: Vec::new(),
        instances: None,
        image: None,
        image_architectures: Vec::new(),
        needs_whole_instance: false,
        slurm_obstacles: Vec::new(),
        pod_obstacles: Vec::new(),
        avoid_locations: Vec::new(),
        avoid_instances: Vec::new(),
    }
}

/// Specification and its parsed form, by fleet.
type SpecCache = BTreeMap<FleetId, (String, Arc<ParsedFleetSpec>)>;

/// Maximum number of entries; more fleets are rare, and then the cache is cleared.
const CACHED_SPECS_MAX: usize = 4_096;

/// Cached specification of a fleet: it is read with every placement and hardly ever changes.
pub fn for_fleet(fleet: &Fleet) -> Result<Arc<ParsedFleetSpec>, DbError> {
    for_spec(fleet.id, &fleet.spec)
}

pub fn for_spec(id: FleetId, spec: &str) -> Result<Arc<ParsedFleetSpec>, DbError> {
    static KNOWN: LazyLock<Mutex<SpecCache>> = LazyLock::new(Mutex::default);
    if let Some((text, shape)) = KNOWN.lock().get(&id)
        && text == spec
    {
        return Ok(Arc::clone(shape));
    }
    let shape = Arc::new(ParsedFleetSpec::parse(&FLEET_SPEC.decode(id, spec)?));
    let mut known = KNOWN.lock();
    if known.len() >= CACHED_SPECS_MAX {
        known.clear();
    }
    known.insert(id, (spec.to_owned(), Arc::clone(&shape)));
    Ok(shape)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shape(configuration: Value) -> ParsedFleetSpec {
        ParsedFleetSpec::parse(&serde_json::json!({ "configuration": configuration }))
    }

    #[test]
    fn the_shorter_idle_duration_applies_and_off_is_the_longest() {
        let of = |idle: Value| shape(serde_json::json!({"type": "fleet", "nodes": 1, "idle_duration": idle}));
        assert_eq!(of(Value::Null).idle(), Some(FLEET_IDLE_DEFAULT));
        assert_eq!(of("off".into()).idle(), None);
        assert_eq!(of(Value::Null).run_idle_secs(None), Some(RUN_IDLE_DEFAULT));
        assert_eq!(of("1h".into()).run_idle_secs(None), Some(3600));
        assert_eq!(of("1h".into()).run_idle_secs(Some(60)), Some(60));
        assert_eq!(of("off".into()).run_idle_secs(Some(60)), Some(60));
        assert_eq!(of("1h".into()).run_idle_secs(Some(FOR_EVER)), Some(3600));
        assert_eq!(of("off".into()).run_idle_secs(None), None);
    }

    #[test]
    fn fleet_spec_is_parsed_into_instance_limits() {
        let shape = shape(serde_json::json!({"type": "fleet", "nodes": "1..4", "blocks": "auto",
            "backends": ["aws"], "regions": ["eu"], "max_price": 2.5, "spot_policy": "spot",
            "availability_zones": ["eu-1"], "instance_types": ["large"], "reservation": "ours",
            "resources": {"gpu": "H100"}, "tags": {"team": "a", "cost": "b"}}));
        assert_eq!(shape.limits().backends.as_deref(), Some(&["aws".to_owned()][..]));
        assert_eq!(
            (shape.limits().spot, shape.limits().max_price),
            (Some(true), Some(Price::from_dollars(2.5)))
        );
        let limits = shape.limits();
        assert_eq!(limits.regions.as_deref(), Some(&["eu".to_owned()][..]));
        assert_eq!(limits.zones.as_deref(), Some(&["eu-1".to_owned()][..]));
        assert_eq!(limits.instance_types.as_deref(), Some(&["large".to_owned()][..]));
        assert_eq!(limits.reservation.as_deref(), Some("ours"));
        assert!(shape.limits().resources.is_some() && shape.creates() && !shape.is_ssh());
        assert_eq!(shape.blocks(), Blocks::Auto);
        let run = BTreeMap::from([("cost".to_owned(), "run".to_owned())]);
        assert_eq!(shape.tags(Some(&run))["cost"], "run");
        assert_eq!(shape.tags(Some(&run))["team"], "a");
        let cluster = self::shape(serde_json::json!({"type": "fleet", "nodes": "0..1", "backend": "slurm",
            "dispatcher": "main", "partition": "gpu"}));
        let limits = cluster.limits();
        assert_eq!(limits.backends.as_deref(), Some(&["slurm".to_owned()][..]));
        assert_eq!(limits.regions.as_deref(), Some(&["main".to_owned()][..]));
        assert_eq!(limits.zones.as_deref(), Some(&["gpu".to_owned()][..]));
    }

    #[test]
    fn an_unreadable_fleet_spec_creates_no_instances() {
        let odd = shape(serde_json::json!({"type": "fleet", "placement": "cluster", "nodes": "x"}));
        assert!(odd.is_cluster() && !odd.creates());
        let fleet = FleetId(uuid::Uuid::nil());
        let error = for_spec(fleet, "no document").unwrap_err().to_string();
        assert!(error.contains("`fleets`") && error.contains(&fleet.to_string()), "{error}");
    }
}
