//! Truncation of data that hosts report, so that it can be stored. Hosts are not trusted: they may claim anything, at
//! any length.

use windlass_api::agent::{
    client::LogPart,
    runner::{JobRecord, JobStarted, JobState, Metrics},
    shim::{Dcgm, HostInfo, InstanceHealth, TaskInfo},
};

/// Maximum length of a message for people.
const MESSAGE_BYTES_MAX: usize = 4 * 1024;
/// Maximum length of a name, status word or path.
const NAME_BYTES_MAX: usize = 1024;
/// Maximum number of states kept per job: the first and the latest.
const STATES_MAX: usize = 64;
const ADDRESSES_MAX: usize = 64;
const PORTS_MAX: usize = 256;
const GPUS_MAX: usize = 64;
const PROBLEMS_MAX: usize = 32;
/// Offsets and sizes are stored in signed 64-bit columns.
const NUMBER_MAX: u64 = i64::MAX as u64;

pub(super) fn task(mut info: TaskInfo) -> TaskInfo {
    truncate_text(&mut info.termination_reason, NAME_BYTES_MAX);
    truncate_text(&mut info.termination_message, MESSAGE_BYTES_MAX);
    truncate_text(&mut info.container_name, NAME_BYTES_MAX);
    truncate_text(&mut info.container_id, NAME_BYTES_MAX);
    if let Some(detail) = &mut info.detail {
        truncate_text(detail, NAME_BYTES_MAX);
    }
    if let Some(ports) = &mut info.ports {
        ports.truncate(PORTS_MAX);
    }
    if let Some(progress) = &mut info.image_pull_progress {
        for bytes in
            [&mut progress.downloaded_bytes, &mut progress.extracted_bytes, &mut progress.total_bytes]
        {
            *bytes = (*bytes).min(NUMBER_MAX);
        }
    }
    truncate_list(&mut info.gpus_ids, GPUS_MAX, NAME_BYTES_MAX);
    info
}

pub(super) fn record(mut record: JobRecord) -> JobRecord {
    if record.states.len() > STATES_MAX {
        let latest = record.states.len() - (STATES_MAX - 1);
        record.states.drain(1..latest);
    }
    for state in &mut record.states {
        let JobState { state, termination_reason, termination_message, detail, .. } = state;
        truncate_text(state, NAME_BYTES_MAX);
        truncate_text(termination_reason, NAME_BYTES_MAX);
        truncate_text(termination_message, MESSAGE_BYTES_MAX);
        if let Some(detail) = detail {
            truncate_text(detail, NAME_BYTES_MAX);
        }
    }
    record.log_end = record.log_end.min(NUMBER_MAX);
    record
}

pub(super) fn started(mut started: JobStarted) -> JobStarted {
    truncate_text(&mut started.working_dir, NAME_BYTES_MAX);
    truncate_text(&mut started.username, NAME_BYTES_MAX);
    started
}

/// Truncates a part to the size that was requested.
pub(super) fn log(mut part: LogPart, limit: usize) -> LogPart {
    part.bytes.truncate(limit);
    part.end = part.end.min(NUMBER_MAX);
    part
}

pub(super) fn metrics(mut metrics: Metrics) -> Metrics {
    metrics.gpus.truncate(GPUS_MAX);
    metrics
}

pub(super) fn host(mut info: HostInfo) -> HostInfo {
    truncate_text(&mut info.gpu_vendor, NAME_BYTES_MAX);
    truncate_text(&mut info.gpu_name, NAME_BYTES_MAX);
    truncate_list(&mut info.addresses, ADDRESSES_MAX, NAME_BYTES_MAX);
    if let Some(problem) = info.processes.as_mut().and_then(|processes| processes.problem.as_mut()) {
        truncate_text(problem, MESSAGE_BYTES_MAX);
    }
    for number in [&mut info.gpu_memory, &mut info.disk_size, &mut info.memory] {
        *number = (*number).min(NUMBER_MAX);
    }
    info
}

pub(super) fn health(mut health: InstanceHealth) -> InstanceHealth {
    truncate_list(&mut health.problems, PROBLEMS_MAX, NAME_BYTES_MAX);
    if let Some(engine) = &mut health.engine {
        truncate_text(engine, MESSAGE_BYTES_MAX);
    }
    if let Some(Dcgm { incidents, .. }) = &mut health.dcgm {
        incidents.truncate(PROBLEMS_MAX);
        for incident in incidents {
            truncate_text(&mut incident.error_message, NAME_BYTES_MAX);
        }
    }
    health
}

pub(super) fn name(mut text: String) -> String {
    truncate_text(&mut text, NAME_BYTES_MAX);
    text
}

pub(super) fn message(mut text: String) -> String {
    truncate_text(&mut text, MESSAGE_BYTES_MAX);
    text
}

fn truncate_list(list: &mut Vec<String>, most: usize, longest: usize) {
    list.truncate(most);
    list.iter_mut().for_each(|word| truncate_text(word, longest));
}

fn truncate_text(text: &mut String, longest: usize) {
    if text.len() > longest {
        text.truncate(text.floor_char_boundary(longest));
        text.shrink_to_fit();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_text_is_truncated_at_a_character_boundary() {
        let mut text = "ü".repeat(NAME_BYTES_MAX);
        truncate_text(&mut text, NAME_BYTES_MAX - 1);
        assert_eq!(text.len(), NAME_BYTES_MAX - 2);
    }

    #[test]
    fn excess_job_states_are_dropped_between_the_first_and_the_last() {
        let state = |timestamp| JobState {
            state: "running".into(),
            timestamp,
            termination_reason: String::new(),
            termination_message: "x".repeat(1 << 20),
            detail: None,
            exit_status: None,
        };
        let states = (0..1000).map(state).collect();
        let kept = record(JobRecord { states, log_end: u64::MAX, log_complete: false });
        assert_eq!(kept.states.len(), STATES_MAX);
        assert_eq!((kept.states[0].timestamp, kept.states[1].timestamp), (0, 937));
        assert_eq!(kept.states[STATES_MAX - 1].timestamp, 999);
        assert!(kept.states.iter().all(|state| state.termination_message.len() == MESSAGE_BYTES_MAX));
        assert_eq!(i64::try_from(kept.log_end), Ok(i64::MAX));
    }

    #[test]
    fn a_log_part_is_truncated_to_the_requested_length() {
        let part = LogPart { bytes: vec![0; 100].into(), end: u64::MAX, is_complete: false };
        let part = log(part, 10);
        assert_eq!((part.bytes.len(), i64::try_from(part.end)), (10, Ok(i64::MAX)));
    }
}
