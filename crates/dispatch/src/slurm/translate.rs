//! Translation of a container's requirements to a Slurm job.

use serde_json::{Map, Value, json};
use windlass_model::config::shell::quote;

use super::Settings;
use crate::scheduler::SubmitRequest;

/// Highest priority of a container.
const PRIORITY_MAX: i64 = 1_000;
/// Maximum absolute nice value that Slurm accepts.
const NICE_MAX: i64 = 2_147_483_645;
const MIB: u64 = 1 << 20;
/// Time in which the executor reports the end of a container that exceeded its time limit, before Slurm ends both. The
/// program has its own time to exit before that.
const GRACE_MINUTES: i64 = 5;
/// Delimiter of the token in the script.
const TOKEN_DELIMITER: &str = "END-OF-TOKEN";
const PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// Converts a priority to a nice value. It is absolute, so that it is the same for all dispatchers and after every
/// restart.
pub(super) fn nice(priority: u64, step: i64) -> i64 {
    let below = PRIORITY_MAX - i64::try_from(priority).unwrap_or(PRIORITY_MAX).min(PRIORITY_MAX);
    below.saturating_mul(step).clamp(0, NICE_MAX)
}

/// Converts a nice value back, if it is one of ours.
pub(super) fn priority(nice: i64, step: i64) -> Option<u64> {
    let is_ours = step > 0 && nice >= 0 && nice % step == 0;
    is_ours.then(|| u64::try_from(PRIORITY_MAX - nice / step).ok()).flatten()
}

/// Parameters of a job, independent of the interface to Slurm.
struct JobParameters<'a> {
    name: String,
    comment: &'a str,
    cpus: u32,
    memory_mib: u64,
    nice: i64,
    output: &'a str,
    gres: Option<String>,
    minutes: Option<i64>,
    partition: Option<String>,
    constraint: Option<String>,
    account: Option<&'a str>,
    qos: Option<&'a str>,
}

impl<'a> JobParameters<'a> {
    fn from_request(order: &SubmitRequest, gpu_type: Option<&str>, settings: &'a Settings) -> Self {
        let needs = &order.needs;
        let joined = |words: &[String], by: &str| (!words.is_empty()).then(|| words.join(by));
        Self {
            name: order.attempt.to_string(),
            comment: &settings.tag,
            cpus: needs.cpus.max(1),
            // Without it a job gets all memory of its node.
            memory_mib: needs.memory.div_ceil(MIB).max(1),
            nice: nice(order.priority, settings.nice_step),
            output: &settings.output,
            gres: (needs.gpus > 0).then(|| match gpu_type {
                Some(gpu_type) => format!("gpu:{gpu_type}:{}", needs.gpus),
                None => format!("gpu:{}", needs.gpus),
            }),
            minutes: needs.max_run_time.map(|limit| {
                let secs = limit.as_secs().saturating_add(needs.stop_duration.as_secs());
                secs.div_euclid(60) + 1 + GRACE_MINUTES
            }),
            partition: joined(&needs.partitions, ",").or_else(|| settings.partition.clone()),
            constraint: joined(&needs.features, "&"),
            account: settings.account.as_deref(),
            qos: settings.preemptible_qos.as_deref().filter(|_| needs.is_preemptible),
        }
    }
}

/// Returns the arguments of `sbatch`. Every value is a separate argument: no shell interprets it.
pub(super) fn sbatch_arguments(
    order: &SubmitRequest,
    gpu_type: Option<&str>,
    settings: &Settings,
) -> Vec<String> {
    let requested = JobParameters::from_request(order, gpu_type, settings);
    let mut args = vec![
        "--parsable".to_owned(),
        format!("--job-name={}", requested.name),
        format!("--comment={}", requested.comment),
        "--nodes=1".to_owned(),
        "--ntasks=1".to_owned(),
        format!("--cpus-per-task={}", requested.cpus),
        format!("--mem={}", requested.memory_mib),
        format!("--nice={}", requested.nice),
        "--no-requeue".to_owned(),
        format!("--output={}", requested.output),
        // All variables that `sbatch` has, which are those that the job may have. With a list, or without the option,
        // the node would start a login shell for the rest, and that takes a second.
        "--export=ALL".to_owned(),
    ];
    args.extend(requested.gres.map(|gres| format!("--gres={gres}")));
    args.extend(requested.minutes.map(|minutes| format!("--time={minutes}")));
    args.extend(requested.partition.map(|partition| format!("--partition={partition}")));
    args.extend(requested.constraint.map(|constraint| format!("--constraint={constraint}")));
    args.extend(requested.account.map(|account| format!("--account={account}")));
    args.extend(requested.qos.map(|qos| format!("--qos={qos}")));
    args
}

/// Returns the same for `slurmrestd`, including script and environment.
pub(super) fn rest_submission(order: &SubmitRequest, gpu_type: Option<&str>, settings: &Settings) -> Value {
    let requested = JobParameters::from_request(order, gpu_type, settings);
    let mut environment: Map<String, Value> =
        order.environment.iter().map(|(name, value)| (name.clone(), value.as_str().into())).collect();
    // The daemon provides no variables, and nodes are not asked for theirs.
    environment.entry("PATH").or_insert_with(|| PATH.into());
    let mut job = json!({
        "name": requested.name, "comment": requested.comment, "nodes": 1, "tasks": 1, "cpus_per_task": requested.cpus,
        "memory_per_node": requested.memory_mib, "nice": requested.nice, "requeue": false,
        "standard_output": requested.output, "current_working_directory": "/", "environment": environment,
        "gres": requested.gres, "time_limit": requested.minutes, "partition": requested.partition,
        "constraints": requested.constraint, "account": requested.account, "qos": requested.qos,
    });
    if let Some(job) = job.as_object_mut() {
        job.retain(|_, value| !value.is_null());
    }
    json!({ "job": job, "script": batch_script(order, settings) })
}

/// Returns the batch script: the executor replaces the shell, and reads the token that follows. Only the job's owner
/// can read the script; environments are visible to others. All values are ours, and quoted all the same.
pub(super) fn batch_script(order: &SubmitRequest, settings: &Settings) -> String {
    let executor = quote(&settings.executor.to_string_lossy());
    let SubmitRequest { attempt, token, .. } = order;
    // Tokens have no white space; one that did would be cut after its first part.
    let token = token.split_whitespace().next().unwrap_or_default();
    format!(
        "#!/bin/sh\nexec {executor} exec {} --attempt {} <<'{TOKEN_DELIMITER}'\n{token}\n{TOKEN_DELIMITER}\n",
        quote(&attempt.uuid),
        attempt.number
    )
}

#[cfg(test)]
mod tests {
    use windlass_model::{
        dispatch::{Attempt, ContainerNeeds, GpuRequirement},
        time::Span,
    };

    use super::*;

    fn order(needs: ContainerNeeds) -> SubmitRequest {
        let attempt = Attempt { uuid: "wlass-dz642-a".into(), number: 2 };
        let environment = vec![("WINDLASS_QUEUE_URL".to_owned(), "http://a".to_owned())];
        SubmitRequest { attempt, priority: 600, needs, environment, token: "v2/a/secret".to_owned() }
    }

    #[test]
    fn sbatch_arguments_cover_all_container_needs_and_contain_no_secret() {
        let needs = ContainerNeeds {
            cpus: 4,
            memory: (1 << 30) + 1,
            gpus: 2,
            gpu_requirement: GpuRequirement::default(),
            partitions: vec!["gpu".into(), "night".into()],
            features: vec!["fast".into(), "quiet".into()],
            max_run_time: Some(Span::mins(60)),
            stop_duration: Span::mins(10),
            is_preemptible: true,
        };
        let mut settings = Settings::new("windlass:d1", "/usr/bin/windlass-agent");
        settings.account = Some("lab".into());
        settings.preemptible_qos = Some("low".into());
        let args = sbatch_arguments(&order(needs), Some("a100"), &settings);
        for want in [
            "--job-name=wlass-dz642-a.2",
            "--comment=windlass:d1",
            "--cpus-per-task=4",
            "--mem=1025",
            "--nice=400000",
            "--no-requeue",
            "--export=ALL",
            "--gres=gpu:a100:2",
            "--time=76",
            "--partition=gpu,night",
            "--constraint=fast&quiet",
            "--account=lab",
            "--qos=low",
        ] {
            assert!(args.iter().any(|arg| arg == want), "{want} is not in {args:?}");
        }
        assert!(!args.iter().any(|arg| arg.contains("secret")));
    }

    #[test]
    fn rest_submission_has_only_requested_fields_and_keeps_the_token_in_the_script() {
        let needs = ContainerNeeds { cpus: 4, memory: (1 << 30) + 1, gpus: 2, ..ContainerNeeds::default() };
        let reported =
            rest_submission(&order(needs), None, &Settings::new("windlass:d1", "/usr/bin/windlass-agent"));
        assert_eq!(
            reported["job"],
            json!({"name": "wlass-dz642-a.2", "comment": "windlass:d1", "nodes": 1, "tasks": 1, "cpus_per_task": 4,
                "memory_per_node": 1025, "nice": 400_000, "requeue": false, "standard_output": "/dev/null",
                "current_working_directory": "/", "gres": "gpu:2",
                "environment": {"WINDLASS_QUEUE_URL": "http://a", "PATH": PATH}})
        );
        let script = reported["script"].as_str().unwrap();
        assert!(script.ends_with("--attempt 2 <<'END-OF-TOKEN'\nv2/a/secret\nEND-OF-TOKEN\n"), "{script}");
        assert!(!reported["job"].to_string().contains("secret"), "{reported}");
    }

    #[test]
    fn a_higher_priority_maps_to_a_lower_nice_value_and_back() {
        let all = [0, 1, 500, 999, 1_000];
        assert!(all.windows(2).all(|pair| nice(pair[0], 1_000) > nice(pair[1], 1_000)));
        for one in all {
            assert_eq!(priority(nice(one, 1_000), 1_000), Some(one));
        }
        assert_eq!(nice(1_000, 1_000), 0);
        assert_eq!(nice(u64::MAX, 1_000), 0, "more than the most is the most");
        assert_eq!(priority(-100, 1_000), None, "somebody else set it");
        assert_eq!(priority(1, 1_000), None);
    }

    #[test]
    fn batch_script_starts_the_executor_with_all_values_quoted() {
        let settings = Settings::new("t", "/opt/it's here/windlass-agent");
        let attempt = Attempt { uuid: "a;rm".into(), number: 3 };
        let order = SubmitRequest {
            attempt,
            token: "v2/$(rm)/s \nEND-OF-TOKEN\nrm".into(),
            ..order(ContainerNeeds::default())
        };
        assert_eq!(
            batch_script(&order, &settings),
            "#!/bin/sh\nexec '/opt/it'\"'\"'s here/windlass-agent' exec 'a;rm' --attempt 3 \
             <<'END-OF-TOKEN'\nv2/$(rm)/s\nEND-OF-TOKEN\n"
        );
    }
}
