//! From what a container needs to what `sbatch` is told.

use windlass_model::dispatch::Attempt;

use super::Settings;
use crate::scheduler::Order;

/// Highest priority of a container.
const PRIORITY_MAX: i64 = 1_000;
/// What Slurm takes either way.
const NICE_MAX: i64 = 2_147_483_645;
const MIB: u64 = 1 << 20;
/// Time for the executor to end a container that is over its time, before Slurm ends both.
const GRACE_MINUTES: i64 = 5;

/// Absolute, so that it is the same for all dispatchers and after every restart.
pub(super) fn nice(priority: u64, step: i64) -> i64 {
    let below = PRIORITY_MAX - i64::try_from(priority).unwrap_or(PRIORITY_MAX).min(PRIORITY_MAX);
    below.saturating_mul(step).clamp(0, NICE_MAX)
}

/// Back again, where the nice value is one of ours.
pub(super) fn priority(nice: i64, step: i64) -> Option<u64> {
    let is_ours = step > 0 && nice >= 0 && nice % step == 0;
    is_ours.then(|| u64::try_from(PRIORITY_MAX - nice / step).ok()).flatten()
}

/// Every value is an argument of its own: nothing is read by a shell.
pub(super) fn arguments(order: &Order, settings: &Settings) -> Vec<String> {
    let needs = &order.needs;
    let names: Vec<&str> = order.environment.iter().map(|(name, _)| name.as_str()).collect();
    let mut args = vec![
        "--parsable".to_owned(),
        format!("--job-name={}", order.attempt),
        format!("--comment={}", settings.tag),
        "--nodes=1".to_owned(),
        "--ntasks=1".to_owned(),
        format!("--cpus-per-task={}", needs.cpus.max(1)),
        // Without it a job gets all memory of its node.
        format!("--mem={}", needs.memory.div_ceil(MIB).max(1)),
        format!("--nice={}", nice(order.priority, settings.nice_step)),
        "--no-requeue".to_owned(),
        format!("--output={}", settings.output),
        // By name: everything else of the environment stays here.
        format!("--export={}", if names.is_empty() { "NIL".to_owned() } else { names.join(",") }),
    ];
    if needs.gpus > 0 {
        args.push(format!("--gres=gpu:{}", needs.gpus));
    }
    if let Some(limit) = needs.max_run_time {
        args.push(format!("--time={}", limit.as_secs().div_euclid(60) + 1 + GRACE_MINUTES));
    }
    if !needs.partitions.is_empty() {
        args.push(format!("--partition={}", needs.partitions.join(",")));
    } else if let Some(partition) = &settings.partition {
        args.push(format!("--partition={partition}"));
    }
    if !needs.features.is_empty() {
        args.push(format!("--constraint={}", needs.features.join("&")));
    }
    args.extend(settings.account.iter().map(|account| format!("--account={account}")));
    if needs.preemptible {
        args.extend(settings.preemptible_qos.iter().map(|qos| format!("--qos={qos}")));
    }
    args
}

/// The batch script: the executor takes its place. Both words are ours, and quoted all the same.
pub(super) fn script(attempt: &Attempt, settings: &Settings) -> String {
    let executor = quoted(&settings.executor.to_string_lossy());
    format!("#!/bin/sh\nexec {executor} exec {} --attempt {}\n", quoted(&attempt.uuid), attempt.number)
}

fn quoted(word: &str) -> String {
    format!("'{}'", word.replace('\'', r"'\''"))
}

#[cfg(test)]
mod tests {
    use windlass_model::{dispatch::Needs, time::Span};

    use super::*;

    fn order(needs: Needs) -> Order {
        let attempt = Attempt { uuid: "wlass-dz642-a".into(), number: 2 };
        let environment = vec![("WINDLASS_TOKEN".to_owned(), "secret".to_owned())];
        Order { attempt, priority: 600, needs, environment }
    }

    #[test]
    fn everything_a_container_needs_is_told_and_no_secret_is() {
        let needs = Needs {
            cpus: 4,
            memory: (1 << 30) + 1,
            gpus: 2,
            partitions: vec!["gpu".into(), "night".into()],
            features: vec!["fast".into(), "quiet".into()],
            max_run_time: Some(Span::mins(60)),
            preemptible: true,
        };
        let mut settings = Settings::new("windlass:d1", "/usr/bin/windlass-agent");
        settings.account = Some("lab".into());
        settings.preemptible_qos = Some("low".into());
        let args = arguments(&order(needs), &settings);
        for want in [
            "--job-name=wlass-dz642-a.2",
            "--comment=windlass:d1",
            "--cpus-per-task=4",
            "--mem=1025",
            "--nice=400000",
            "--no-requeue",
            "--export=WINDLASS_TOKEN",
            "--gres=gpu:2",
            "--time=66",
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
    fn a_higher_priority_is_less_nice_and_both_read_back() {
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
    fn the_script_starts_the_executor_and_nothing_in_it_is_read_twice() {
        let settings = Settings::new("t", "/opt/it's here/windlass-agent");
        let script = script(&Attempt { uuid: "a;rm".into(), number: 3 }, &settings);
        assert_eq!(script, "#!/bin/sh\nexec '/opt/it'\\''s here/windlass-agent' exec 'a;rm' --attempt 3\n");
    }
}
