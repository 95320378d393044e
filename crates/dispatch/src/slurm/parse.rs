//! Parsers for the output of Slurm's commands.

use std::collections::BTreeMap;

use windlass_model::{
    dispatch::{
        Attempt, SchedulerJob, SchedulerJobState,
        capacity::{ClusterNode, ResourceAmount},
    },
    time::Timestamp,
};

use super::translate;
use crate::scheduler::{NODE_LOST, SchedulerError};

/// Number, name, state, nice, nodes, reason, tag. The tag is last because it may contain anything.
pub(super) const JOB_FORMAT: &str = "%i;%j;%T;%y;%N;%r;%k";
/// Node, state, cpus, memory in MiB, partition, features, generic resources.
pub(super) const NODE_FORMAT: &str = "%N;%T;%c;%m;%P;%f;%G";

const MIB: u64 = 1 << 20;

/// Parses the jobs with our tag. `ended` returns when an end was first observed.
pub(super) fn jobs(
    listed: &str,
    tag: &str,
    nice_step: i64,
    mut ended: impl FnMut(&Attempt) -> Timestamp,
) -> Result<Vec<SchedulerJob>, SchedulerError> {
    let mut jobs: BTreeMap<Attempt, SchedulerJob> = BTreeMap::new();
    for line in listed.lines() {
        let garbled = || SchedulerError::InvalidOutput { program: "squeue", line: line.to_owned() };
        let mut parts = line.splitn(7, ';');
        let mut part = || parts.next().ok_or_else(garbled);
        let (id, name, state, nice) = (part()?, part()?, part()?, part()?);
        let (nodes, reason, comment) = (part()?, part()?, part()?);
        if comment != tag {
            continue;
        }
        // A foreign job with our tag is ignored as well.
        let Ok(attempt) = name.parse::<Attempt>() else { continue };
        let life = job_state(state, || ended(&attempt));
        let priority = nice.parse().ok().and_then(|nice| translate::priority(nice, nice_step));
        let message = state_message(life, state, nodes, reason);
        let job =
            SchedulerJob { attempt: attempt.clone(), id: id.to_owned(), state: life, priority, message };
        // A duplicate name: a controller that lost a job and got it again. The living one counts.
        match jobs.get(&attempt) {
            Some(known) if !known.state.is_ended() => {}
            Some(_) | None => drop(jobs.insert(attempt, job)),
        }
    }
    Ok(jobs.into_values().collect())
}

/// Returns why a job waits, or how it ended: `Resources`, `NODE_FAIL on n3`, `FAILED (NonZeroExitCode)`.
fn state_message(life: SchedulerJobState, state: &str, nodes: &str, reason: &str) -> Option<String> {
    let reason =
        Some(reason.trim_matches(['(', ')'])).filter(|reason| !matches!(*reason, "" | "None" | "null"));
    match life {
        SchedulerJobState::Waiting => reason.map(str::to_owned),
        SchedulerJobState::Ended(_) if state == NODE_LOST && !matches!(nodes, "" | "(null)") => {
            Some(format!("{state} on {nodes}"))
        }
        SchedulerJobState::Ended(_) => Some(match reason {
            Some(reason) => format!("{state} ({reason})"),
            None => state.to_owned(),
        }),
        SchedulerJobState::Running | SchedulerJobState::Unknown => None,
    }
}

/// Maps a state. An unknown state may mean anything, so the job is assumed to live.
fn job_state(state: &str, ended: impl FnOnce() -> Timestamp) -> SchedulerJobState {
    match state {
        "PENDING" | "CONFIGURING" | "REQUEUED" | "REQUEUE_HOLD" | "SPECIAL_EXIT" => {
            SchedulerJobState::Waiting
        }
        "RUNNING" | "SUSPENDED" | "COMPLETING" | "STAGE_OUT" | "SIGNALING" | "STOPPED" | "RESIZING" => {
            SchedulerJobState::Running
        }
        "COMPLETED" | "FAILED" | "CANCELLED" | "TIMEOUT" | "NODE_FAIL" | "PREEMPTED" | "BOOT_FAIL"
        | "DEADLINE" | "OUT_OF_MEMORY" | "REVOKED" => SchedulerJobState::Ended(ended()),
        _ => SchedulerJobState::Unknown,
    }
}

/// Returns whether every node has reported its jobs to the controller.
pub(super) fn have_all_reported(listed: &str) -> bool {
    // A node that Slurm considers down has no jobs left: that counts as a report too.
    let is_final_state = |state: &str| ["down", "drained"].iter().any(|word| state.starts_with(word));
    let silent = |state: &str| state.starts_with("unknown") || state.ends_with('*') && !is_final_state(state);
    let mut states = listed.lines().filter_map(|line| line.split(';').nth(1)).peekable();
    states.peek().is_some() && !states.any(silent)
}

/// Parses nodes. A node is listed once for each of its partitions.
pub(super) fn nodes(listed: &str) -> Result<Vec<ClusterNode>, SchedulerError> {
    let mut nodes: BTreeMap<String, ClusterNode> = BTreeMap::new();
    for line in listed.lines() {
        let garbled = || SchedulerError::InvalidOutput { program: "sinfo", line: line.to_owned() };
        let parts: Vec<&str> = line.split(';').collect();
        let [name, state, cpus, memory, partition, features, gres] = parts[..] else { return Err(garbled()) };
        // The default partition is marked with a star.
        let partition = partition.trim_end_matches('*').to_owned();
        let (cpus, memory) = (cpus.parse(), memory.trim_end_matches('+').parse::<u64>());
        let (Ok(cpus), Ok(memory)) = (cpus, memory) else { return Err(garbled()) };
        let made = || ClusterNode {
            name: name.to_owned(),
            is_up: is_up(state),
            size: ResourceAmount {
                cpus,
                memory: memory.saturating_mul(MIB),
                gpus: parse_gpus(gres).fold(0, |sum: u32, (_, count)| sum.saturating_add(count)),
            },
            gpu_types: parse_gpus(gres)
                .filter_map(|(name, count)| Some((name.filter(|name| !name.is_empty())?.to_owned(), count)))
                .collect(),
            partitions: Vec::new(),
            features: parse_list(features),
        };
        nodes.entry(name.to_owned()).or_insert_with(made).partitions.push(partition);
    }
    Ok(nodes.into_values().collect())
}

fn is_up(state: &str) -> bool {
    let word = state.trim_end_matches(['*', '~', '#', '!', '%', '$', '@', '^', '-']);
    matches!(word, "idle" | "mixed" | "allocated" | "completing" | "planned" | "reserved")
        && !state.ends_with('*')
}

fn parse_list(text: &str) -> Vec<String> {
    if text == "(null)" { Vec::new() } else { text.split(',').map(str::to_owned).collect() }
}

/// Parses type and count: `gpu:2`, `gpu:a100:4(S:0-1),shard:8`, `gpu:a100`, `(null)`.
fn parse_gpus(gres: &str) -> impl Iterator<Item = (Option<&str>, u32)> {
    gres.split(',').filter_map(|one| {
        let one = one.split('(').next().unwrap_or_default();
        let mut words = one.split(':');
        if words.next() != Some("gpu") {
            return None;
        }
        Some(match (words.next(), words.next()) {
            (Some(word), None) => word.parse().map_or((Some(word), 1), |count| (None, count)),
            (name, Some(count)) => (name, count.parse().unwrap_or(1)),
            (None, None) => (None, 1),
        })
    })
}

/// Parses the output of `sbatch --parsable`: the number, followed by the cluster if there are several.
pub(super) fn job_id(message: &str) -> Option<String> {
    let id = message.trim().split(';').next().unwrap_or_default();
    (!id.is_empty() && id.bytes().all(|byte| byte.is_ascii_digit())).then(|| id.to_owned())
}

/// Returns whether the controller read the request and refused it. Any other failure of a submission may have happened
/// after it was accepted.
pub(super) fn is_refusal(message: &str) -> bool {
    let not_there = ["Unable to contact", "Socket timed out", "timed out", "Connection", "Zero Bytes"];
    message.contains("Batch job submission failed") && !not_there.iter().any(|word| message.contains(word))
}

pub(super) fn is_already_finished(message: &str) -> bool {
    message.contains("Invalid job id")
        || message.contains("already completing")
        || message.contains("already completed")
        || message.contains("already finished")
        || message.contains("Job/step already")
}

/// `scancel` exits with the low byte of Slurm's error number. About a job that has ended since, or is forgotten, it prints
/// nothing.
pub(super) fn is_exit_of_finished_job(code: i32) -> bool {
    const INVALID_JOB_ID: i32 = 2017;
    const ALREADY_DONE: i32 = 2021;
    [INVALID_JOB_ID, ALREADY_DONE].iter().any(|number| number & 0xff == code)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const TAG: &str = "windlass:d1";

    fn read(listed: &str) -> Vec<SchedulerJob> {
        jobs(listed, TAG, 1_000, |_| Timestamp(7)).unwrap()
    }

    #[test]
    fn c5_only_jobs_with_the_dispatchers_tag_and_a_container_name_are_listed() {
        let listed = "1;wlass-dz642-a.1;RUNNING;400000;n1;None;windlass:d1\n\
                      2;wlass-dz642-b.1;RUNNING;0;n1;None;(null)\n\
                      3;wlass-dz642-c.1;RUNNING;0;n1;None;windlass:d2\n4;interactive;RUNNING;0;n1;None;windlass:d1\n";
        let jobs = read(listed);
        assert_eq!(jobs.len(), 1);
        assert_eq!(
            (jobs[0].id.as_str(), jobs[0].state, jobs[0].priority),
            ("1", SchedulerJobState::Running, Some(600))
        );
    }

    #[test]
    fn exit_codes_of_a_signal_to_a_finished_job_are_no_failures() {
        // Seen with Slurm 22.05: `scancel --batch --signal=TERM` about a job that had just ended.
        assert!(is_exit_of_finished_job(229));
        assert!(is_exit_of_finished_job(225));
        assert!(![0, 1, 2, 127].into_iter().any(is_exit_of_finished_job));
    }

    #[test]
    fn every_documented_state_is_parsed_and_an_unknown_state_is_not_an_end() {
        let of = |state: &str| read(&format!("1;a.1;{state};0;;None;{TAG}"))[0].state;
        for waiting in ["PENDING", "CONFIGURING", "REQUEUED"] {
            assert_eq!(of(waiting), SchedulerJobState::Waiting, "{waiting}");
        }
        for running in ["RUNNING", "SUSPENDED", "COMPLETING"] {
            assert_eq!(of(running), SchedulerJobState::Running, "{running}");
        }
        for ended in ["COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY"] {
            assert_eq!(of(ended), SchedulerJobState::Ended(Timestamp(7)), "{ended}");
        }
        assert_eq!(of("LEVITATING"), SchedulerJobState::Unknown);
    }

    #[test]
    fn the_active_job_wins_when_two_jobs_have_the_same_name() {
        for listed in [
            "1;a.1;FAILED;0;n1;None;windlass:d1\n2;a.1;RUNNING;0;n1;None;windlass:d1",
            "2;a.1;RUNNING;0;n1;None;windlass:d1\n1;a.1;FAILED;0;n1;None;windlass:d1",
        ] {
            let jobs = read(listed);
            assert_eq!((jobs.len(), jobs[0].id.as_str()), (1, "2"));
        }
    }

    #[test]
    fn slurm_reports_why_a_job_waits_and_how_it_ended() {
        for (line, reported) in [
            ("PENDING;0;;Resources", Some("Resources")),
            (
                "PENDING;0;;(ReqNodeNotAvail, UnavailableNodes:n1)",
                Some("ReqNodeNotAvail, UnavailableNodes:n1"),
            ),
            ("PENDING;0;;None", None),
            ("RUNNING;0;n1;None", None),
            ("NODE_FAIL;0;n3;NodeDown", Some("NODE_FAIL on n3")),
            ("FAILED;0;n1;NonZeroExitCode", Some("FAILED (NonZeroExitCode)")),
            ("TIMEOUT;0;n1;TimeLimit", Some("TIMEOUT (TimeLimit)")),
            ("COMPLETED;0;n1;None", Some("COMPLETED")),
        ] {
            assert_eq!(read(&format!("1;a.1;{line};{TAG}"))[0].message.as_deref(), reported, "{line}");
        }
    }

    #[test]
    fn a_truncated_line_is_an_error_and_not_a_shorter_list() {
        assert!(jobs("1;a.1;RUNNING", TAG, 1, |_| Timestamp(0)).is_err());
        assert!(nodes("n1;idle;4").is_err());
    }

    #[test]
    fn r15_an_unresponsive_node_makes_the_snapshot_incomplete() {
        assert!(have_all_reported(
            "n1;idle;4;4000;main*;(null);(null)\nn2;mixed;4;4000;main*;(null);(null)\nn3;down;4;4000;main*;(null);(null)\n"
        ));
        assert!(
            have_all_reported("n1;idle;4;4000;main*;(null);(null)\nn2;down*;4;4000;main*;(null);(null)\n"),
            "given up for good is known"
        );
        assert!(!have_all_reported(
            "n1;idle;4;4000;main*;(null);(null)\nn2;allocated*;4;4000;main*;(null);(null)\n"
        ));
        assert!(!have_all_reported("n1;unknown;4;4000;main*;(null);(null)\n"));
        assert!(!have_all_reported(""), "no node at all is no picture");
    }

    #[test]
    fn a_node_in_several_partitions_is_listed_once_with_all_of_them() {
        let listed = "n1;idle;4;4000;main*;(null);gpu:2(S:0)\nn1;idle;4;4000;night;(null);gpu:2(S:0)\n\
                      n2;down*;2;2000;main*;fast,quiet;(null)\n";
        let nodes = nodes(listed).unwrap();
        assert_eq!(nodes[0].partitions, ["main", "night"]);
        assert_eq!(nodes[0].size, ResourceAmount { cpus: 4, memory: 4000 * MIB, gpus: 2 });
        assert!(nodes[0].is_up && !nodes[1].is_up);
        assert_eq!(nodes[1].features, ["fast", "quiet"]);
    }

    #[test]
    fn gpus_are_counted_per_gres_type() {
        for (gres, reported) in [
            ("gpu:2", vec![(None, 2)]),
            ("gpu:a100:4(S:0-1),shard:8", vec![(Some("a100"), 4)]),
            ("(null)", vec![]),
            ("gpu", vec![(None, 1)]),
            ("gpu:a100", vec![(Some("a100"), 1)]),
            ("gpu:a:1,gpu:b:2", vec![(Some("a"), 1), (Some("b"), 2)]),
        ] {
            assert_eq!(parse_gpus(gres).collect::<Vec<_>>(), reported, "{gres}");
        }
    }

    #[test]
    fn an_unreachable_controller_does_not_count_as_a_refusal() {
        assert!(is_refusal(
            "sbatch: error: Batch job submission failed: Requested node configuration is not available"
        ));
        assert!(!is_refusal(
            "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation"
        ));
        assert!(!is_refusal(
            "sbatch: error: Batch job submission failed: Unable to contact slurm controller (connect failure)"
        ));
    }

    proptest! {
        #![proptest_config(ProptestConfig {
            cases: windlass_testkit::fuzz_cases(),
            failure_persistence: None,
            ..ProptestConfig::default()
        })]

        /// Every output is parsed or rejected.
        #[test]
        fn fuzz_of_slurm_output(
            fields in prop::collection::vec(
                prop_oneof![
                    prop::sample::select(vec![
                        "", TAG, "a.1", "RUNNING", "(null)", "18446744073709551615", "4294967295", "-9", "gpu:4294967295",
                        "gpu:a100:4294967295,gpu:a100:1(S:0-1)", "idle*", "unknown", "partition*", "\n",
                    ])
                    .prop_map(str::to_owned),
                    "(?s).{0,12}",
                ],
                0..40,
            ),
            text in "(?s).{0,60}",
        ) {
            for text in [&fields.join(";"), &text] {
                if let Ok(jobs) = jobs(text, TAG, 1_000, |_| Timestamp(7)) {
                    prop_assert!(jobs.len() <= text.lines().count());
                }
                let _ = (nodes(text), have_all_reported(text), is_refusal(text), is_already_finished(text));
                prop_assert!(job_id(text).is_none_or(|id| id.bytes().all(|byte| byte.is_ascii_digit())));
            }
        }
    }
}
