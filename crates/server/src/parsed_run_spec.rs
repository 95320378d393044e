//! A stored run specification, parsed once for the submission and the pipelines.

use std::{collections::BTreeMap, sync::Arc};

use parking_lot::Mutex;
use serde_json::Value;
use windlass_model::{
    config::{
        Configuration,
        decode::{DecodeMode, decode},
        error::{Diagnosis, summary},
        job_spec::{FileArchive, JobSpec},
        job_spec_builder::{self, InheritedSpec, JobSpecInputs},
        name::ResourceReference,
        profile::{
            CreationPolicy, InstanceSelector, Profile, ProfileProperties, RetrySetting, StartupOrder,
            StopCriteria,
        },
        run::RunClass,
        yaml::Node,
    },
    decide::{
        replicas::{self, RolloutPolicy, ScalingPolicy},
        runs::{ReplicaStart, StopCriteria as StopWhen},
    },
    id::RunId,
    money::Price,
    plan::{
        execution_mode::ImageChoice,
        offers::{InstanceFilter, InstanceNeeds},
        place::InstanceCreation,
        pods::PodObstacle,
        preemption::Preemptibility,
        slurm::SlurmObstacle,
    },
    retry::{self, Policy},
    schedule::{CronParseError, CronSchedule},
    time::Span,
};

use crate::{
    db::{DbError, documents::RUN_SPEC, runs::Run},
    queue_rank::QueueRank,
};
use serde::de::DeserializeOwned;

/// Reasons why a specification cannot be parsed.
#[derive(Debug, thiserror::Error)]
pub enum RunSpecError {
    #[error(transparent)]
    Stored(#[from] DbError),
    #[error("failed to read or write a part of the run specification")]
    Document(#[source] serde_json::Error),
    #[error("invalid run specification: {}", summary(.0))]
    Specification(Vec<Diagnosis>),
    #[error("a {kind} is not a run")]
    NotARun { kind: &'static str },
    #[error(transparent)]
    Derive(#[from] job_spec_builder::Error),
    #[error("invalid schedule of the run: {0}")]
    Cron(CronParseError),
    #[error("the run has no job {job} in replica {replica}")]
    NoSuchJob { replica: u32, job: u32 },
}

/// A part that a specification may not have.
pub(crate) fn read_part<T: DeserializeOwned + Default>(spec: &Value, name: &str) -> Result<T, RunSpecError> {
    match spec.get(name) {
        None | Some(Value::Null) => Ok(T::default()),
        Some(part) => T::deserialize(part).map_err(RunSpecError::Document),
    }
}

/// A parsed run specification.
#[derive(Clone, Debug)]
pub struct ParsedRunSpec {
    name: String,
    configuration: Configuration,
    properties: ProfileProperties,
    inherited: InheritedSpec,
    crons: Option<CronSchedule>,
    retry: Option<Policy>,
}

impl ParsedRunSpec {
    pub fn of(run: &Run) -> Result<Self, RunSpecError> {
        Self::parse(run.id, &run.name, &run.spec)
    }

    pub fn parse(run: RunId, name: &str, spec: &str) -> Result<Self, RunSpecError> {
        Self::read(name, &RUN_SPEC.decode(run, spec)?)
    }

    pub fn read(name: &str, spec: &Value) -> Result<Self, RunSpecError> {
        let configuration =
            Configuration::from_json(&spec["configuration"]).map_err(RunSpecError::Specification)?;
        let profile: Option<Profile> = match spec.get("profile").filter(|profile| !profile.is_null()) {
            None => None,
            Some(sent) => Some(
                decode(&Node::from_json(sent), DecodeMode::Lenient).map_err(RunSpecError::Specification)?,
            ),
        };
        let own = configuration.profile().ok_or(RunSpecError::NotARun { kind: configuration.kind() })?;
        let properties = profile.map_or_else(|| own.clone(), |profile| own.or(&profile.properties));
        let crons = match &properties.schedule {
            Some(schedule) => {
                Some(CronSchedule::parse(schedule.cron.0.as_slice()).map_err(RunSpecError::Cron)?)
            }
            None => None,
        };
        let retry = properties.provisioning.retry.as_ref().and_then(retry_policy);
        let text = |key: &str| spec[key].as_str().map(str::to_owned);
        let inherited = InheritedSpec {
            repo_data: spec.get("repo_data").filter(|v| !v.is_null()).cloned(),
            repo_code_hash: text("repo_code_hash"),
            repo_dir: text("repo_dir"),
            working_dir: text("working_dir"),
            file_archives: read_part(spec, "file_archives")?,
            images: read_part(spec, "default_images")?,
            image_architectures: read_part(spec, "image_architectures")?,
        };
        Ok(Self { name: name.to_owned(), configuration, properties, inherited, crons, retry })
    }

    pub(crate) fn set_name(&mut self, name: &str) {
        self.name = name.to_owned();
    }

    pub(crate) fn file_archives(&self) -> &[FileArchive] {
        &self.inherited.file_archives
    }

    pub fn configuration(&self) -> &Configuration {
        &self.configuration
    }

    /// The run's properties, with those of its profile where the run sets none.
    pub(crate) fn properties(&self) -> &ProfileProperties {
        &self.properties
    }

    pub fn retry(&self) -> Option<&Policy> {
        self.retry.as_ref()
    }

    pub fn crons(&self) -> Option<&CronSchedule> {
        self.crons.as_ref()
    }

    pub fn rank(&self) -> QueueRank {
        let run = self.configuration.run();
        let class = run.and_then(|run| run.class).unwrap_or(RunClass::Normal);
        let priority = run.and_then(|run| run.priority).map_or(0, |priority| priority.get());
        QueueRank { class, priority: u32::try_from(priority).unwrap_or_default() }
    }

    /// Returns whether the scheduler may end its jobs. Unless it says so itself, only a run that starts again may be preempted: one
    /// in class `idle`, an attempt of a managed job, a task that is retried after an interruption.
    pub fn preemptibility(&self, is_managed: bool) -> Preemptibility {
        let retries =
            self.retry.as_ref().is_some_and(|retry| retry.on_events.contains(&retry::Event::Interruption));
        let restarts = match &self.configuration {
            Configuration::Task(_) => is_managed || retries || self.rank().class == RunClass::Idle,
            // A service fails with a replica that is not retried.
            Configuration::Service(_) if !retries => return Preemptibility::Never,
            Configuration::Service(_) => self.rank().class == RunClass::Idle,
            Configuration::DevEnvironment(_)
            | Configuration::Fleet(_)
            | Configuration::Gateway(_)
            | Configuration::Volume(_) => return Preemptibility::Never,
        };
        match self.configuration.run().and_then(|run| run.preemptible) {
            Some(true) => Preemptibility::Always,
            None if restarts => Preemptibility::Always,
            Some(false) if restarts => Preemptibility::Borrowed,
            Some(false) | None => Preemptibility::Never,
        }
    }

    pub fn stop_criteria(&self) -> StopWhen {
        match self.properties.stop_criteria {
            Some(StopCriteria::MasterDone) => StopWhen::MasterDone,
            Some(StopCriteria::AllDone) | None => StopWhen::AllDone,
        }
    }

    /// Names of a service's replica groups, by position.
    pub fn replica_group_names(&self) -> Vec<String> {
        job_spec_builder::replica_group_names(&self.configuration)
    }

    /// The replicas that the run starts with, and the number of jobs of each.
    pub fn starts(&self) -> Result<Vec<ReplicaStart>, RunSpecError> {
        let mut starts: Vec<ReplicaStart> = Vec::new();
        for spec in self.jobs()? {
            match starts.last_mut().filter(|start| start.replica == spec.replica_num) {
                Some(start) => start.jobs += 1,
                None => starts.push(ReplicaStart { replica: spec.replica_num, jobs: 1 }),
            }
        }
        Ok(starts)
    }

    /// All jobs that the run starts with.
    pub fn jobs(&self) -> Result<Vec<JobSpec>, RunSpecError> {
        Ok(job_spec_builder::job_specs(&self.derive_inputs())?)
    }

    /// The jobs of one replica of each group, for a plan.
    pub fn plan(&self) -> Result<Vec<JobSpec>, RunSpecError> {
        Ok(job_spec_builder::plan_specs(&self.derive_inputs())?)
    }

    /// Returns the specification of one job and its stored document, which also holds what the pipelines need beyond
    /// the wire format. `group` is set for replicas of services.
    pub fn job(
        &self,
        group: Option<&str>,
        replica: u32,
        job: u32,
    ) -> Result<(JobSpec, String), RunSpecError> {
        let named = group.and_then(|name| self.replica_group_names().iter().position(|known| known == name));
        let specs =
            job_spec_builder::replica_specs(&self.derive_inputs(), named.unwrap_or_default(), replica)?;
        let spec = specs
            .into_iter()
            .find(|spec| spec.job_num == job)
            .ok_or(RunSpecError::NoSuchJob { replica, job })?;
        let document = self.document(&spec)?;
        Ok((spec, document))
    }

    /// Replica range and scaling of each group of a service.
    pub fn groups(&self) -> Result<Vec<ReplicaGroupSpec>, RunSpecError> {
        let Configuration::Service(service) = &self.configuration else { return Ok(Vec::new()) };
        let mut groups = Vec::new();
        for (index, name) in self.replica_group_names().into_iter().enumerate() {
            let replicas = job_spec_builder::replica_range(&self.configuration, index)?;
            let own = service.groups.as_ref().and_then(|groups| groups.get(index));
            let scaling = match own {
                Some(group) => group.scaling.as_ref(),
                None => service.scaling.as_ref(),
            };
            let at_once = service.max_concurrency.and_then(|max| u32::try_from(max.get()).ok());
            let scaling = scaling.map(|scaling| ScalingPolicy {
                metric: scaling.metric,
                max_concurrency: at_once,
                target: scaling.target.0,
                window: scaling.window.map_or(replicas::DEFAULT_WINDOW, |window| Span::secs(window.0)),
                scale_up_delay: Span::secs(scaling.scale_up_delay.0),
                scale_down_delay: Span::secs(scaling.scale_down_delay.0),
            });
            groups.push(ReplicaGroupSpec { name, min: replicas.min, max: replicas.max, scaling });
        }
        Ok(groups)
    }

    /// Limits for the replacement of a service's replicas.
    pub fn pace(&self) -> RolloutPolicy {
        let Configuration::Service(service) = &self.configuration else { return RolloutPolicy::default() };
        let number = |n: i64| u32::try_from(n).unwrap_or_default();
        service.deployment.as_ref().map_or_else(RolloutPolicy::default, |requested| RolloutPolicy {
            surge: number(requested.surge.get()),
            unavailable: number(requested.unavailable.get()),
            ready_timeout: Span::secs(requested.ready_within.0),
            should_roll_back: requested.rollback,
        })
    }

    /// Renders a job's specification as it is stored.
    pub fn document(&self, spec: &JobSpec) -> Result<String, RunSpecError> {
        let mut document = serde_json::to_value(spec).map_err(RunSpecError::Document)?;
        let order = match self.properties.startup_order {
            Some(StartupOrder::MasterFirst) => Some("master-first"),
            Some(StartupOrder::WorkersFirst) => Some("workers-first"),
            Some(StartupOrder::Any) | None => None,
        };
        if let Some(order) = order {
            document["startup_order"] = order.into();
        }
        if let Configuration::DevEnvironment(dev) = &self.configuration
            && let Some(secs) = dev.inactivity_duration.0
        {
            document["inactivity_duration"] = secs.into();
        }
        Ok(document.to_string())
    }

    /// Requirements of a job for its instance.
    pub fn needs_of(&self, spec: &JobSpec) -> InstanceNeeds {
        let requested = &spec.requirements;
        let machines = &self.properties.provisioning;
        let backends = machines.backends.as_ref();
        InstanceNeeds {
            resources: Some(requested.resources.clone()),
            max_price: requested.max_price.map(Price::from_dollars),
            spot: requested.spot,
            is_spot_default: machines.spot_policy.is_none() && requested.spot == Some(false),
            backends: backends.map(|list| list.iter().map(|b| b.as_str().to_owned()).collect()),
            regions: machines.regions.clone(),
            zones: machines.availability_zones.clone(),
            instance_types: machines.instance_types.clone(),
            reservation: requested.reservation.clone(),
            volumes: Vec::new(),
            instances: self
                .properties
                .instances
                .as_ref()
                .map(|list| list.0.iter().map(instance_name).collect()),
            avoid_locations: Vec::new(),
            avoid_instances: Vec::new(),
            needs_whole_instance: requested.multinode == Some(true),
            image: ImageChoice::from_spec(spec),
            image_architectures: spec.image_architectures.clone(),
            slurm_obstacles: SlurmObstacle::find_all(spec, self.is_dev_environment()),
            pod_obstacles: PodObstacle::find_all(spec),
        }
    }

    pub(crate) fn is_dev_environment(&self) -> bool {
        matches!(self.configuration, Configuration::DevEnvironment(_))
    }

    /// Fleets that the run may use; `None` means any.
    pub fn fleet_names(&self) -> Option<&[ResourceReference]> {
        self.properties.fleets.as_deref()
    }

    /// Maximum idle time of instances created for the run, if it is set; -1 means without limit.
    pub fn idle_duration(&self) -> Option<i64> {
        self.properties.provisioning.idle_duration.0
    }

    pub fn tags(&self) -> Option<&BTreeMap<String, String>> {
        self.properties.provisioning.tags.as_ref().map(|tags| &tags.0)
    }

    pub fn creation(&self) -> InstanceCreation {
        match self.properties.creation_policy {
            Some(CreationPolicy::Reuse) => InstanceCreation::Reuse,
            Some(CreationPolicy::ReuseOrCreate) | None => InstanceCreation::ReuseOrCreate,
        }
    }

    fn derive_inputs(&self) -> JobSpecInputs<'_> {
        JobSpecInputs {
            run_name: &self.name,
            configuration: &self.configuration,
            profile: Some(&self.properties),
            inherited: &self.inherited,
            server_url: None,
        }
    }
}

/// One replica group of a service.
#[derive(Clone, Debug)]
pub struct ReplicaGroupSpec {
    pub name: String,
    pub min: u32,
    pub max: u32,
    pub scaling: Option<ScalingPolicy>,
}

/// Cache of parsed specifications: a run is processed many times and its specification rarely changes.
#[derive(Clone, Default)]
pub struct RunSpecCache(Arc<Mutex<CachedRunSpecs>>);

/// The specification text and its parsed form, by run.
type CachedRunSpecs = BTreeMap<RunId, (String, Arc<ParsedRunSpec>)>;

/// More active runs than this are rare; beyond it the cache is emptied.
const CACHED_RUN_SPECS_MAX: usize = 4_096;

impl RunSpecCache {
    pub fn of(&self, run: &Run) -> Result<Arc<ParsedRunSpec>, RunSpecError> {
        if let Some((spec, shape)) = self.0.lock().get(&run.id)
            && *spec == run.spec
        {
            return Ok(Arc::clone(shape));
        }
        let shape = Arc::new(ParsedRunSpec::of(run)?);
        let mut known = self.0.lock();
        if known.len() >= CACHED_RUN_SPECS_MAX {
            known.clear();
        }
        known.insert(run.id, (run.spec.clone(), Arc::clone(&shape)));
        Ok(shape)
    }

    /// Removes a finished run.
    pub fn forget(&self, run: RunId) {
        self.0.lock().remove(&run);
    }
}

fn retry_policy(retry: &RetrySetting) -> Option<Policy> {
    match retry {
        RetrySetting::Flag(false) => None,
        RetrySetting::Flag(true) => Some(Policy::always()),
        RetrySetting::Policy(retry_policy) => Some(Policy {
            on_events: retry_policy.on_events.as_ref().map_or_else(
                || retry::Event::ALL.to_vec(),
                |events| events.iter().filter_map(|e| e.as_str().parse().ok()).collect(),
            ),
            duration: retry_policy.duration.map_or(retry::DURATION_DEFAULT, |d| Span::secs(d.0)),
            max_total: retry::TOTAL_MAX,
        }),
    }
}

fn instance_name(selector: &InstanceSelector) -> InstanceFilter {
    match selector {
        InstanceSelector::Name { name } => InstanceFilter::Name(name.clone()),
        InstanceSelector::Hostname { hostname } => InstanceFilter::Hostname(hostname.clone()),
        InstanceSelector::Member { fleet, instance } => {
            InstanceFilter::Number { fleet: fleet.name.clone(), instance_num: *instance }
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn each_group_of_a_service_has_its_own_replicas_and_scaling() {
        let configuration = json!({"type": "service", "port": 80, "groups": [
            {"name": "small", "replicas": 2, "commands": ["a"]},
            {"replicas": {"min": 1, "max": 4}, "commands": ["b"],
                "scaling": {"metric": "rps", "target": 5, "scale_up_delay": 7, "scale_down_delay": 9}},
        ]});
        let groups =
            ParsedRunSpec::read("run", &json!({"configuration": configuration})).unwrap().groups().unwrap();
        let sizes: Vec<_> = groups.iter().map(|group| (group.name.as_str(), group.min, group.max)).collect();
        assert_eq!(sizes, [("small", 2, 2), ("1", 1, 4)]);
        let scaling = groups[1].scaling.as_ref().unwrap();
        let delays = (scaling.scale_up_delay.as_secs(), scaling.scale_down_delay.as_secs());
        assert_eq!((scaling.target, delays, groups[0].scaling.is_none()), (5.0, (7, 9), true));
    }

    #[test]
    fn a_run_may_be_preempted_if_something_starts_it_again_or_if_it_says_so() {
        let retry = json!({"on_events": ["interruption"], "duration": "1h"});
        let of = |kind: &str, more: Value, is_managed| {
            let mut configuration = match kind {
                "task" => json!({"type": "task", "commands": ["true"]}),
                "service" => json!({"type": "service", "commands": ["true"], "port": 80}),
                _ => json!({"type": "dev-environment", "ide": "vscode"}),
            };
            configuration.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
            let spec = json!({"configuration": configuration});
            ParsedRunSpec::read("run", &spec).unwrap().preemptibility(is_managed)
        };
        let restarting = [json!({"class": "idle"}), json!({"retry": retry})];
        for more in &restarting {
            assert_eq!(of("task", more.clone(), false), Preemptibility::Always, "{more}");
            let mut kept = more.clone();
            kept["preemptible"] = json!(false);
            assert_eq!(of("task", kept, false), Preemptibility::Borrowed, "only a borrowed share: {more}");
        }
        assert_eq!(of("task", json!({}), true), Preemptibility::Always, "an attempt of a managed job");
        assert_eq!(of("task", json!({}), false), Preemptibility::Never, "nothing would start it again");
        assert_eq!(of("task", json!({"preemptible": true}), false), Preemptibility::Always);
        assert_eq!(of("task", json!({"preemptible": false}), false), Preemptibility::Never);
        // A service survives only if its replicas are retried.
        assert_eq!(of("service", json!({"class": "idle"}), false), Preemptibility::Never);
        assert_eq!(of("service", json!({"retry": retry}), false), Preemptibility::Never);
        let idle = json!({"retry": retry, "class": "idle"});
        assert_eq!(of("service", idle, false), Preemptibility::Always);
        let wanted = json!({"retry": retry, "preemptible": true});
        assert_eq!(of("service", wanted, false), Preemptibility::Always);
        for more in [json!({"class": "idle"}), json!({"retry": retry})] {
            assert_eq!(of("dev-environment", more, false), Preemptibility::Never, "its user works in it");
        }
    }

    #[test]
    fn every_limit_of_a_configuration_is_a_requirement_of_its_jobs() {
        let limits = json!({"backends": ["aws"], "regions": ["eu"], "availability_zones": ["eu-1"],
            "instance_types": ["large"], "reservation": "ours", "spot_policy": "spot", "max_price": 1.5,
            "instances": ["a-0"], "fleets": ["a"], "creation_policy": "reuse", "idle_duration": "1h",
            "tags": {"team": "a"}});
        let mut task =
            json!({"type": "task", "commands": ["true"], "resources": {"cpu": "3..", "memory": "5GB.."}});
        let task_needs = |spec: &Value| {
            let run = ParsedRunSpec::read("run", spec).unwrap();
            let job = run.jobs().unwrap().remove(0);
            (run.needs_of(&job), run)
        };
        let (bare, _) = task_needs(&json!({"configuration": task}));
        assert_eq!(
            (bare.backends, bare.max_price, bare.spot, bare.is_spot_default),
            (None, None, Some(false), true)
        );
        let of_profile = json!({"configuration": task, "profile": {"name": "p"}});
        task.as_object_mut().unwrap().extend(limits.as_object().unwrap().clone());
        let mut with_profile = of_profile;
        with_profile["profile"].as_object_mut().unwrap().extend(limits.as_object().unwrap().clone());
        // The same limits, in the configuration and in its profile.
        for spec in [json!({"configuration": task}), with_profile] {
            let (needs, run) = task_needs(&spec);
            let words = |word: &str| Some(vec![word.to_owned()]);
            let lists = [needs.backends, needs.regions, needs.zones, needs.instance_types];
            assert_eq!(lists, [words("aws"), words("eu"), words("eu-1"), words("large")]);
            assert_eq!(
                (needs.reservation.as_deref(), needs.spot, needs.is_spot_default),
                (Some("ours"), Some(true), false)
            );
            assert_eq!(needs.max_price, Some(Price::from_dollars(1.5)));
            assert_eq!(needs.instances, Some(vec![InstanceFilter::Name("a-0".to_owned())]));
            let resources = needs.resources.unwrap();
            assert_eq!((resources.cpu.count.min, resources.memory.min), (Some(3), Some(5.0)));
            assert_eq!(run.fleet_names().unwrap()[0].name, "a");
            assert_eq!((run.creation(), run.idle_duration()), (InstanceCreation::Reuse, Some(3600)));
            assert_eq!(run.tags().unwrap()["team"], "a");
        }
    }
}
