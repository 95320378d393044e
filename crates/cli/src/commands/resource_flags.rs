//! Flags for required resources and run policies, shared by all commands that select instances.

use serde_json::{Value, json};
use windlass_model::config::{Configuration, error::Diagnosis};

use crate::error::CliError;

#[derive(Clone, Debug, Default, clap::Args)]
pub(crate) struct ResourceArgs {
    /// CPUs: `8`, `4..`, `arm:8..`
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
    /// Maximum price per hour, in dollars
    #[arg(long, value_name = "PRICE", help_heading = "Instances")]
    pub(crate) max_price: Option<f64>,
    /// Backend to use; may be repeated
    #[arg(short, long, value_name = "NAME", help_heading = "Instances")]
    pub(crate) backend: Vec<String>,
    /// Region to use; may be repeated
    #[arg(short, long, value_name = "NAME", help_heading = "Instances")]
    pub(crate) region: Vec<String>,
    /// Instance type to use; may be repeated
    #[arg(long, value_name = "NAME", help_heading = "Instances")]
    pub(crate) instance_type: Vec<String>,
    /// Fleet to use; may be repeated
    #[arg(long, value_name = "FLEET", help_heading = "Instances")]
    pub(crate) fleet: Vec<String>,
    /// Use only existing instances
    #[arg(short = 'R', long, help_heading = "Instances")]
    pub(crate) reuse: bool,
    /// Use only spot instances, which may be preempted
    #[arg(long, help_heading = "Instances", conflicts_with_all = ["on_demand", "spot_auto"])]
    pub(crate) spot: bool,
    /// Use only on-demand instances
    #[arg(long, help_heading = "Instances", conflicts_with = "spot_auto")]
    pub(crate) on_demand: bool,
    /// Use spot or on-demand instances
    #[arg(long, help_heading = "Instances")]
    pub(crate) spot_auto: bool,
}

/// A flag, the field that it sets, and the value.
struct FlagSetting {
    flag: &'static str,
    field: &'static str,
    value: Value,
}

impl FlagSetting {
    fn new(flag: &'static str, field: &'static str, value: impl Into<Value>) -> Self {
        Self { flag, field, value: value.into() }
    }

    fn is_resource(&self) -> bool {
        self.field.starts_with("resources.")
    }

    fn write(&self, configuration: &mut Value) {
        match self.field.split_once('.') {
            Some((outer, inner)) => configuration[outer][inner] = self.value.clone(),
            None => configuration[self.field] = self.value.clone(),
        }
    }
}

impl ResourceArgs {
    fn settings(&self) -> Vec<FlagSetting> {
        let mut all = Vec::new();
        let texts = [
            ("--cpu", "resources.cpu", &self.cpu),
            ("--gpu", "resources.gpu", &self.gpu),
            ("--memory", "resources.memory", &self.memory),
            ("--disk", "resources.disk", &self.disk),
        ];
        for (flag, field, value) in texts {
            all.extend(value.as_deref().map(|value| FlagSetting::new(flag, field, value)));
        }
        all.extend(self.max_price.map(|price| FlagSetting::new("--max-price", "max_price", price)));
        let lists = [
            ("--backend", "backends", &self.backend),
            ("--region", "regions", &self.region),
            ("--instance-type", "instance_types", &self.instance_type),
            ("--fleet", "fleets", &self.fleet),
        ];
        for (flag, field, list) in lists {
            if !list.is_empty() {
                all.push(FlagSetting::new(flag, field, json!(list)));
            }
        }
        if self.reuse {
            all.push(FlagSetting::new("--reuse", "creation_policy", "reuse"));
        }
        let policies = [
            (self.spot, "--spot", "spot"),
            (self.on_demand, "--on-demand", "on-demand"),
            (self.spot_auto, "--spot-auto", "auto"),
        ];
        let message = policies.into_iter().filter(|(message, _, _)| *message);
        all.extend(message.map(|(_, flag, policy)| FlagSetting::new(flag, "spot_policy", policy)));
        all
    }

    /// Writes the given flags into a configuration of a run; other fields stay unchanged.
    pub(crate) fn write_to(&self, configuration: &mut Value) {
        self.settings().iter().for_each(|setting| setting.write(configuration));
    }
}

/// Flags for the lifetime and the retries of a run.
#[derive(Clone, Debug, Default, clap::Args)]
pub(crate) struct RunPolicyArgs {
    /// Maximum duration: `2h`, or `off`
    #[arg(long, value_name = "DURATION", help_heading = "Run")]
    pub(crate) max_duration: Option<String>,
    /// Retry after an error, an interruption or a lack of capacity
    #[arg(long, help_heading = "Run", conflicts_with_all = ["no_retry", "retry_duration"])]
    pub(crate) retry: bool,
    /// Do not retry
    #[arg(long, help_heading = "Run", conflicts_with = "retry_duration")]
    pub(crate) no_retry: bool,
    /// Retry for this duration, counted from the first failure: `1h`
    #[arg(long, value_name = "DURATION", help_heading = "Run")]
    pub(crate) retry_duration: Option<String>,
    /// Policy for the creation of instances: `reuse` uses only existing ones
    #[arg(long, value_name = "POLICY", help_heading = "Instances", conflicts_with = "reuse",
          value_parser = ["reuse", "reuse-or-create"])]
    pub(crate) creation_policy: Option<String>,
    /// Idle time after which an instance that was created for the run is deleted: `1h`, or `off` for never
    #[arg(long, value_name = "DURATION", help_heading = "Instances")]
    pub(crate) idle_duration: Option<String>,
}

impl RunPolicyArgs {
    /// `configuration` is the content of the file: retry events that it lists are kept.
    fn settings(&self, configuration: &Value) -> Vec<FlagSetting> {
        let mut all = Vec::new();
        all.extend(
            self.max_duration
                .as_deref()
                .map(|text| FlagSetting::new("--max-duration", "max_duration", parse_duration(text))),
        );
        if self.retry {
            all.push(FlagSetting::new("--retry", "retry", true));
        }
        if self.no_retry {
            all.push(FlagSetting::new("--no-retry", "retry", false));
        }
        if let Some(text) = &self.retry_duration {
            let mut policy = json!({ "duration": parse_duration(text) });
            let events = &configuration["retry"]["on_events"];
            if !events.is_null() {
                policy["on_events"] = events.clone();
            }
            all.push(FlagSetting::new("--retry-duration", "retry", policy));
        }
        all.extend(
            self.creation_policy
                .as_deref()
                .map(|policy| FlagSetting::new("--creation-policy", "creation_policy", policy)),
        );
        all.extend(
            self.idle_duration
                .as_deref()
                .map(|text| FlagSetting::new("--idle-duration", "idle_duration", parse_duration(text))),
        );
        all
    }
}

/// Parses a duration; a plain number is seconds.
fn parse_duration(text: &str) -> Value {
    text.parse::<i64>().map_or_else(|_| json!(text), |seconds| json!(seconds))
}

/// All flags that change the configuration of a run before it is planned.
#[derive(Clone, Debug, Default, clap::Args)]
pub(crate) struct Overrides {
    #[command(flatten)]
    pub(crate) requirements: ResourceArgs,
    #[command(flatten)]
    pub(crate) lifetime: RunPolicyArgs,
}

impl Overrides {
    /// Replaces the fields of the file with the flags. Fails for configurations without such fields.
    pub(crate) fn apply(&self, configuration: &mut Configuration) -> Result<(), CliError> {
        let mut document = serde_json::to_value(&*configuration)
            .map_err(|error| CliError::from_error("failed to add the flags to the configuration", &error))?;
        let mut settings = self.requirements.settings();
        settings.extend(self.lifetime.settings(&document));
        if settings.is_empty() {
            return Ok(());
        }
        let kind = configuration.kind();
        let listed = |of: &[&FlagSetting]| {
            of.iter().map(|setting| format!("`{}`", setting.flag)).collect::<Vec<_>>().join(", ")
        };
        if configuration.run().is_none() {
            let all = listed(&settings.iter().collect::<Vec<_>>());
            return Err(CliError::usage(format!("{all} cannot be used with a {kind}"))
                .why("these flags apply only to tasks, services and dev environments")
                .hint(format!("set the values in the configuration of the {kind}")));
        }
        let resources: Vec<&FlagSetting> = settings.iter().filter(|setting| setting.is_resource()).collect();
        if !resources.is_empty() && document["groups"].as_array().is_some_and(|groups| !groups.is_empty()) {
            return Err(CliError::usage(format!("{} cannot be used with `groups`", listed(&resources)))
                .why("each group has its own `resources`")
                .hint("change `resources` of the groups in the file"));
        }
        settings.iter().for_each(|setting| setting.write(&mut document));
        *configuration =
            Configuration::from_json(&document).map_err(|problems| invalid_flags(&settings, &problems))?;
        Ok(())
    }
}

/// Maps problems of the configuration to the flags that caused them.
fn invalid_flags(settings: &[FlagSetting], problems: &[Diagnosis]) -> CliError {
    let is_of = |problem: &Diagnosis, setting: &FlagSetting| problem.path.starts_with(setting.field);
    let all: Vec<String> = problems
        .iter()
        .map(|problem| match settings.iter().find(|setting| is_of(problem, setting)) {
            Some(setting) => format!("`{}`: {}", setting.flag, problem.message),
            None => problem.to_string(),
        })
        .collect();
    let hint = problems.iter().find_map(|problem| problem.hint.clone());
    CliError::usage(all.join("; "))
        .hint(hint.unwrap_or_else(|| "run the command with `--help` for the syntax".to_owned()))
}

#[cfg(test)]
mod tests {
    use serde_json::json;
    use windlass_model::config::{self, Configuration};

    use super::{Overrides, ResourceArgs, RunPolicyArgs};

    fn file(text: &str) -> Configuration {
        config::parse(text).unwrap().configuration
    }

    #[test]
    fn flags_override_the_file_and_keep_other_fields() {
        let mut task = file(
            "type: task\ncommands: [a]\nresources: {cpu: 2.., memory: 8GB..}\nretry: {on_events: [interruption], duration: 5m}\n",
        );
        let flags = Overrides {
            requirements: ResourceArgs {
                gpu: Some("H100:80GB:8".to_owned()),
                memory: Some("64GB..".to_owned()),
                max_price: Some(12.5),
                backend: vec!["aws".to_owned()],
                fleet: vec!["rack".to_owned()],
                spot_auto: true,
                ..ResourceArgs::default()
            },
            lifetime: RunPolicyArgs {
                max_duration: Some("2h".to_owned()),
                retry_duration: Some("1h".to_owned()),
                creation_policy: Some("reuse".to_owned()),
                ..RunPolicyArgs::default()
            },
        };
        flags.apply(&mut task).unwrap();
        let changed = serde_json::to_value(&task).unwrap();
        let wanted = file(
            "type: task\ncommands: [a]\nresources: {cpu: 2.., memory: 64GB.., gpu: 'H100:80GB:8'}\n\
             retry: {on_events: [interruption], duration: 1h}\nmax_price: 12.5\nbackends: [aws]\nfleets: [rack]\n\
             spot_policy: auto\nmax_duration: 2h\ncreation_policy: reuse\n",
        );
        assert_eq!(changed, serde_json::to_value(&wanted).unwrap());
    }

    #[test]
    fn invalid_and_inapplicable_flags_are_named_in_the_error() {
        let gpu = |text: &str| Overrides {
            requirements: ResourceArgs { gpu: Some(text.to_owned()), ..ResourceArgs::default() },
            ..Overrides::default()
        };
        let mut task = file("type: task\ncommands: [a]\n");
        let problem = gpu("H100:many:lots").apply(&mut task).unwrap_err().text();
        assert!(problem.starts_with("error[W002]: `--gpu`: "), "{problem}");
        let mut fleet = file("type: fleet\nname: rack\nnodes: 1\n");
        let problem = gpu("1").apply(&mut fleet).unwrap_err().text();
        assert!(problem.contains("`--gpu` cannot be used with a fleet"), "{problem}");
        let mut groups = file("type: task\ngroups: [{commands: [a]}, {commands: [b]}]\n");
        let problem = gpu("1").apply(&mut groups).unwrap_err().text();
        assert!(problem.contains("cannot be used with `groups`"), "{problem}");
        assert!(Overrides::default().apply(&mut fleet).is_ok());
    }

    #[test]
    fn retry_flags_disable_retry_or_set_its_duration() {
        let retry = |lifetime: RunPolicyArgs| {
            let mut task = file("type: task\ncommands: [a]\nretry: true\n");
            Overrides { lifetime, ..Overrides::default() }.apply(&mut task).unwrap();
            serde_json::to_value(&task).unwrap()["retry"].clone()
        };
        assert_eq!(retry(RunPolicyArgs { no_retry: true, ..RunPolicyArgs::default() }), json!(false));
        assert_eq!(retry(RunPolicyArgs::default()), json!(true));
        let for_long =
            retry(RunPolicyArgs { retry_duration: Some("90".to_owned()), ..RunPolicyArgs::default() });
        assert_eq!(for_long["duration"], 90);
    }
}
