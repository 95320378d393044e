//! Runs as one line of text, and plans as another.
//!
//! `running retry=all attempt=2; r0: running, done; r1: failed(container_exited_with_error)#3@30s` is a running run
//! with two replicas. A job is `status(reason)#submission@ended ago`; other parts are written only if they matter.
//! `r1?` is on trial, `r1-` has a configuration that no longer exists. Ended jobs had an instance until just now unless
//! they have `@never`.

use windlass_model::{
    decide::runs::{
        FleetUpdate, JobView, Plan, ReplicaRole, ReplicaStart, ReplicaView, RequestedStop, RunView,
        ScheduleState, StopCriteria, SubmissionState, decide,
    },
    job::{self, TerminationReason},
    retry, run,
    schedule::CronSchedule,
    time::{Span, Timestamp},
};

/// 2026-11-20T09:30:00Z: the `now` of every fixture.
pub(crate) const NOW: Timestamp = Timestamp::from_secs(1_795_167_000);

#[track_caller]
pub(crate) fn check(run: &str, expected: &str) {
    assert_eq!(render(&read(run), &decide(&read(run), NOW)), expected, "\n  for {run}");
}

pub(crate) fn read(text: &str) -> RunView {
    let mut parts = text.split(';').map(str::trim);
    let mut run = read_head(parts.next().unwrap());
    run.replicas = parts.map(read_replica).collect();
    // A run that waits has already counted its last failure.
    let failures = run.attempt + u32::from(run.status != run::Status::Pending);
    run.replicas.iter_mut().flat_map(|replica| &mut replica.jobs).for_each(|job| job.failures = failures);
    if run.start.is_empty() {
        let start =
            |replica: &ReplicaView| ReplicaStart { replica: replica.num, jobs: replica.jobs.len() as u32 };
        run.start = run.replicas.iter().map(start).collect();
    }
    run.start.retain(|start| start.jobs > 0);
    run
}

fn read_head(head: &str) -> RunView {
    let mut words = head.split_whitespace();
    let mut run = RunView {
        status: words.next().unwrap().parse().unwrap(),
        ending: None,
        submitted_at: NOW - Span::mins(10),
        attempt: 0,
        pending_since: NOW,
        retry_delay: retry::DELAY_FIRST,
        schedule: None,
        retry: None,
        stop_criteria: StopCriteria::AllDone,
        has_gateway_failed: false,
        requested_stop: None,
        replicas: Vec::new(),
        start: Vec::new(),
        surplus: Vec::new(),
        is_rolling_back: false,
    };
    for word in words {
        let (key, value) = word.split_once('=').unwrap_or((word, ""));
        match key {
            "ending" => run.ending = Some(run::Ending::new(value.parse().unwrap(), "as asked")),
            "stop" => run.requested_stop = Some(RequestedStop { is_abort: false }),
            "abort" => run.requested_stop = Some(RequestedStop { is_abort: true }),
            "submitted" => run.submitted_at = NOW - span(value),
            "attempt" => run.attempt = value.parse().unwrap(),
            "pending" => run.pending_since = NOW - span(value),
            "retry" => run.retry = Some(read_policy(value)),
            "duration" => run.retry.as_mut().unwrap().duration = span(value),
            "max" => run.retry.as_mut().unwrap().max_total = value.parse().unwrap(),
            "master-done" => run.stop_criteria = StopCriteria::MasterDone,
            "gateway-failed" => run.has_gateway_failed = true,
            "rolls-back" => run.is_rolling_back = true,
            "hourly" => run.schedule = Some(hourly()),
            "next" => run.schedule.as_mut().unwrap().next_slot = Some(NOW + span(value)),
            "fired" => run.schedule.as_mut().unwrap().last_slot = Some(NOW - span(value)),
            "surplus" => run.surplus = value.split(',').map(|text| read_start(text).replica).collect(),
            "start" => run.start = value.split(',').map(read_start).collect(),
            other => panic!("unknown word `{other}` in a run's head"),
        }
    }
    run
}

fn hourly() -> ScheduleState {
    ScheduleState { crons: CronSchedule::parse(&["0 * * * *"]).unwrap(), next_slot: None, last_slot: None }
}

fn read_policy(value: &str) -> retry::Policy {
    match value {
        "all" => retry::Policy::always(),
        events => retry::Policy {
            on_events: events.split(',').map(|event| event.parse().unwrap()).collect(),
            ..retry::Policy::always()
        },
    }
}

/// Parses `r1` or `r0x2`; `none` starts nothing.
fn read_start(text: &str) -> ReplicaStart {
    let Some(text) = text.strip_prefix('r') else { return ReplicaStart { replica: 0, jobs: 0 } };
    let (replica, jobs) = text.split_once('x').unwrap_or((text, "1"));
    ReplicaStart { replica: replica.parse().unwrap(), jobs: jobs.parse().unwrap() }
}

fn read_replica(text: &str) -> ReplicaView {
    let (num, jobs) = text.split_once(':').unwrap();
    let num = num.strip_prefix('r').unwrap();
    let weight = match num.chars().last() {
        Some('?') => ReplicaRole::Trial,
        Some('-') => ReplicaRole::Gone,
        Some(_) | None => ReplicaRole::Full,
    };
    let num = num.trim_end_matches(['?', '-']).parse().unwrap();
    ReplicaView {
        num,
        role: weight,
        jobs: (0..).zip(jobs.split(',')).map(|(num, job)| read_job(num, job.trim())).collect(),
    }
}

fn read_job(num: u32, text: &str) -> JobView {
    let (text, ended) = text.split_once('@').unwrap_or((text, ""));
    let (text, submission) = text.split_once('#').unwrap_or((text, "0"));
    let (status, reason) = text.split_once('(').unwrap_or((text, ""));
    let reason = reason.trim_end_matches(')');
    let ending = (!reason.is_empty()).then(|| job::Ending::new(reason.parse().unwrap()));
    let had_instance =
        ending.as_ref().is_some_and(|e| e.reason() != TerminationReason::FailedToStartDueToNoCapacity);
    let submission = submission.parse().unwrap();
    let status: job::Status = status.parse().unwrap();
    let state = SubmissionState::from_stored(status, ending);
    assert_eq!(state.status(), status, "`{text}` does not end like that");
    let failing_since = match ended {
        "" => had_instance.then_some(NOW),
        "never" => None,
        ago => Some(NOW - span(ago)),
    };
    JobView { num, submission, state, attempts: submission + 1, failures: submission + 1, failing_since }
}

/// Parses `30s`, `5m`, `2h`, also negative.
fn span(text: &str) -> Span {
    let (number, unit) = text.split_at(text.len() - 1);
    let number = number.parse().unwrap();
    match unit {
        "s" => Span::secs(number),
        "m" => Span::mins(number),
        "h" => Span::hours(number),
        other => panic!("unknown unit `{other}`"),
    }
}

pub(crate) fn render(run: &RunView, plan: &Plan) -> String {
    let mut words = Vec::new();
    match plan.event {
        Some(event) if plan.status == run.status => words.push(format!("{event}, stays {}", plan.status)),
        Some(event) => words.push(format!("{event} -> {}", plan.status)),
        None => words.push(format!("stays {}", plan.status)),
    }
    if plan.ending != run.ending {
        words.push(plan.ending.as_ref().map_or("no reason".to_owned(), |e| e.reason().to_string()));
    }
    if plan.attempt != run.attempt {
        words.push(format!("attempt {}", plan.attempt));
    }
    if plan.fleet == FleetUpdate::Unset {
        words.push("fleet unset".to_owned());
    }
    for submit in &plan.submit {
        words.push(format!("submit r{}.{}#{}", submit.replica, submit.job, submit.submission));
    }
    for end in &plan.end {
        words.push(format!("end r{}.{} {}", end.replica, end.job, end.ending.reason()));
    }
    if plan.last_slot != run.schedule.as_ref().and_then(|s| s.last_slot) {
        words.push(format!("fired {}", plan.last_slot.unwrap()));
    }
    if plan.next_triggered_at != run.schedule.as_ref().and_then(|s| s.next_slot) {
        words.push(plan.next_triggered_at.map_or("no next".to_owned(), |next| format!("next {next}")));
    }
    match plan.due_at {
        Some(due) => words.push(format!("due {:?}", due.since(NOW))),
        None => words.push("never again".to_owned()),
    }
    format!("{}: {}", words.join("; "), plan.message)
}
