//! Readiness of a replica of a service, from the results of its probes.
//!
//! A replica without probes is ready as soon as it runs. One with probes is ready when each of them has succeeded often
//! enough in a row. A single failure of a ready replica changes nothing: networks have transient failures.

use serde::{Deserialize, Serialize};

use crate::{
    config::job_spec::ProbeSpec,
    time::{Span, Timestamp},
};

/// Consecutive failures after which a ready replica is no longer ready.
pub const FAILURES_MAX: u32 = 3;
/// Maximum length of a stored failure message.
const FAILURE_MESSAGE_MAX: usize = 200;

/// State of one probe.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProbeState {
    pub success_streak: i64,
    #[serde(default)]
    pub failures: u32,
    /// End of the last request; the next starts one interval later.
    #[serde(default)]
    pub last_at: Option<Timestamp>,
    /// Message of the last failure.
    #[serde(default)]
    #[serde(rename = "said")]
    pub message: Option<String>,
    /// The replica received requests before.
    #[serde(default)]
    pub was_ready: bool,
}

/// Result of one request, with the reason if it failed.
pub type ProbeResult = Result<(), String>;

/// Returns as many states as there are probes, whatever was stored.
pub fn resize_states(probes: &[ProbeSpec], mut states: Vec<ProbeState>) -> Vec<ProbeState> {
    states.resize_with(probes.len(), ProbeState::default);
    states
}

/// Returns when to send a probe; `None`: never again.
pub fn next_probe_at(probe: &ProbeSpec, state: &ProbeState) -> Option<Timestamp> {
    if probe.until_ready && state.success_streak >= probe.ready_after {
        return None;
    }
    Some(state.last_at.map_or(Timestamp(0), |at| at + Span::secs(probe.interval)))
}

pub fn apply_result(state: &ProbeState, outcome: ProbeResult, now: Timestamp) -> ProbeState {
    match outcome {
        Ok(()) => ProbeState {
            success_streak: state.success_streak.saturating_add(1),
            failures: 0,
            last_at: Some(now),
            message: None,
            was_ready: state.was_ready,
        },
        Err(message) => ProbeState {
            success_streak: 0,
            failures: state.failures.saturating_add(1),
            last_at: Some(now),
            message: Some(message.chars().take(FAILURE_MESSAGE_MAX).collect()),
            was_ready: state.was_ready,
        },
    }
}

/// Returns whether the replica receives requests from now on.
pub fn is_ready(probes: &[ProbeSpec], states: &[ProbeState], was_ready: bool) -> bool {
    let passes = |(probe, state): (&ProbeSpec, &ProbeState)| {
        state.success_streak >= probe.ready_after || was_ready && state.failures < FAILURES_MAX
    };
    states.len() >= probes.len() && probes.iter().zip(states).all(passes)
}

/// Returns whether a replica that receives no requests now did so before.
pub fn was_ready(states: &[ProbeState]) -> bool {
    !states.is_empty() && states.iter().all(|state| state.was_ready)
}

/// Returns what the replica waits for, for display; `None` if nothing.
pub fn waiting_message(probes: &[ProbeSpec], states: &[ProbeState]) -> Option<String> {
    let open = probes.iter().enumerate().find(|(index, probe)| {
        states.get(*index).is_none_or(|state| state.success_streak < probe.ready_after)
    });
    let (index, probe) = open?;
    let state = states.get(index).cloned().unwrap_or_default();
    let method = probe.method.as_str().to_ascii_uppercase();
    let so_far = format!("{} of {}", state.success_streak, probe.ready_after);
    Some(match state.message {
        Some(message) => format!("probe {method} {}: {so_far} successes in a row; {message}", probe.url),
        None => format!("probe {method} {}: {so_far} successes in a row", probe.url),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::traffic::{Method, ProbeKind};

    fn probe(ready_after: i64, until_ready: bool) -> ProbeSpec {
        ProbeSpec {
            kind: ProbeKind::Http,
            url: "/health".to_owned(),
            method: Method::Get,
            headers: vec![],
            body: None,
            timeout: 10,
            interval: 15,
            ready_after,
            until_ready,
        }
    }

    /// Checks the readiness after each outcome: `+` succeeds, `-` fails.
    #[track_caller]
    fn check(probe: &ProbeSpec, outcomes: &str, ready: &str) {
        let (mut state, mut is, mut seen) = (ProbeState::default(), false, String::new());
        for (second, outcome) in outcomes.chars().enumerate() {
            let outcome = if outcome == '+' { Ok(()) } else { Err("answers 500".to_owned()) };
            state = apply_result(&state, outcome, Timestamp::from_secs(i64::try_from(second).unwrap()));
            is = is_ready(std::slice::from_ref(probe), std::slice::from_ref(&state), is);
            seen.push(if is { 'y' } else { 'n' });
        }
        assert_eq!(seen, ready, "{outcomes}");
    }

    #[test]
    fn a_replica_is_ready_after_consecutive_successes_and_unready_after_three_failures() {
        check(&probe(1, false), "-+-+", "nyyy");
        check(&probe(2, false), "+-++", "nnny");
        check(&probe(1, false), "+--+---+", "yyyyyyny");
    }

    #[test]
    fn a_replica_without_probes_is_ready_and_one_whose_probes_never_ran_is_not() {
        assert!(is_ready(&[], &[], false));
        assert!(!is_ready(&[probe(1, false)], &resize_states(&[probe(1, false)], vec![]), false));
        assert!(!is_ready(&[probe(1, false)], &[], false));
    }

    #[test]
    fn next_probe_is_due_one_interval_after_the_last_and_until_ready_stops_probing() {
        let state = apply_result(&ProbeState::default(), Ok(()), Timestamp::from_secs(100));
        assert_eq!(next_probe_at(&probe(1, false), &state), Some(Timestamp::from_secs(115)));
        assert_eq!(next_probe_at(&probe(2, true), &state), Some(Timestamp::from_secs(115)));
        assert_eq!(next_probe_at(&probe(1, true), &state), None);
        assert_eq!(next_probe_at(&probe(1, true), &ProbeState::default()), Some(Timestamp(0)));
    }

    #[test]
    fn waiting_message_shows_probe_progress_and_the_last_error() {
        let failed = apply_result(&ProbeState::default(), Err("it answers 500".to_owned()), Timestamp(1));
        let reported = waiting_message(&[probe(2, false)], &[failed]);
        assert_eq!(reported.as_deref(), Some("probe GET /health: 0 of 2 successes in a row; it answers 500"));
        assert_eq!(waiting_message(&[], &[]), None);
    }
}
