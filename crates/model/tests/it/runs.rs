//! Runs, rule by rule.

use windlass_model::{
    decide::runs::{RunView, SubmissionState, decide, decide_to_end},
    job, run,
};

use crate::runs_fixture::{NOW, check, read, render};

// Derivation: the rules in their order.

#[test]
fn any_running_job_makes_the_run_running() {
    check(
        "submitted attempt=2; r0: running; r1: provisioning; r2: submitted",
        "runs -> running; attempt 0; due 300s: running",
    );
}

#[test]
fn provisioning_and_pulling_jobs_make_the_run_provisioning() {
    check(
        "submitted attempt=1; r0: provisioning; r1: submitted",
        "provisions -> provisioning; attempt 0; due 10s: provisioning",
    );
    check("running; r0: pulling", "provisions -> provisioning; due 10s: provisioning");
}

#[test]
fn a_run_whose_jobs_all_wait_is_submitted() {
    check("submitted attempt=3; r0: submitted, submitted", "waits, stays submitted; due 300s: submitted");
    check("running; r0: done(done_by_runner); r1: submitted#1", "waits -> submitted; due 300s: submitted");
}

#[test]
fn a_failure_without_retry_ends_the_run_and_its_other_jobs() {
    check(
        "running; r0: running; r1: failed(container_exited_with_error)",
        "end-decided -> terminating; job_failed; end r0.0 terminated_by_server; due 5s: \
         job 0 of replica 1 ended: container_exited_with_error; retry is off",
    );
}

#[test]
fn a_failure_counts_as_soon_as_the_job_is_terminating() {
    check(
        "running; r0: terminating(ports_binding_failed)",
        "end-decided -> terminating; job_failed; due 5s: \
         job 0 of replica 0 ended: ports_binding_failed; retry is off",
    );
}

#[test]
fn a_run_whose_jobs_are_all_done_ends_as_done() {
    check(
        "running; r0: done(done_by_runner); r1: terminating(done_by_runner)",
        "end-decided -> terminating; all_jobs_done; due 5s: all jobs are done",
    );
    check(
        "running; r0: done(done_by_runner), done(done_by_runner)",
        "end-decided -> terminating; all_jobs_done; due 0s: all jobs are done",
    );
}

#[test]
fn r20_a_job_failure_outranks_the_retry_limit_which_outranks_a_gateway_error() {
    check(
        "running retry=interruption duration=1m gateway-failed; r0: failed(interrupted_by_no_capacity)@2m; \
         r1: failed(volume_error)",
        "end-decided -> terminating; job_failed; due 0s: \
         job 0 of replica 1 ended: volume_error; retry does not cover error",
    );
    check(
        "running retry=interruption duration=1m gateway-failed; r0: failed(interrupted_by_no_capacity)@2m; \
         r1: running",
        "end-decided -> terminating; retry_limit_exceeded; end r1.0 terminated_by_server; due 5s: \
         job 0 of replica 0 ended: interrupted_by_no_capacity; retry duration of 60 s exceeded after 1 attempt (120 s elapsed)",
    );
}

#[test]
fn a_gateway_that_refuses_the_service_ends_the_run() {
    check(
        "running gateway-failed; r0: running",
        "end-decided -> terminating; gateway_error; end r0.0 terminated_by_server; due 5s: \
         its gateway was deleted",
    );
}

#[test]
fn r10_a_finished_master_ends_its_workers_as_done() {
    check(
        "running master-done; r0: done(done_by_runner), running, pulling",
        "end-decided -> terminating; all_jobs_done; end r0.1 done_by_runner; end r0.2 done_by_runner; due 5s: \
         the master job is done",
    );
    check("running; r0: done(done_by_runner), running", "runs, stays running; due 300s: running");
    check("running master-done; r0: running, done(done_by_runner)", "runs, stays running; due 300s: running");
}

#[test]
fn a_failed_worker_outranks_the_master_that_is_done() {
    check(
        "running master-done; r0: done(done_by_runner), failed(executor_error)",
        "end-decided -> terminating; job_failed; due 0s: job 1 of replica 0 ended: executor_error; retry is off",
    );
}

// Retry in place.

#[test]
fn a_failed_replica_is_resubmitted_in_place_while_others_run() {
    check(
        "running retry=all; r0: running; r1: failed(container_exited_with_error)#2",
        "runs, stays running; submit r1.0#3; due 10s: resubmitted in place: replica 1",
    );
}

#[test]
fn r6_a_replica_is_resubmitted_only_when_its_former_jobs_are_final() {
    check(
        "running retry=all; r0: running; r1: terminating(container_exited_with_error)",
        "runs, stays running; due 10s: running",
    );
}

#[test]
fn r9_a_failed_node_ends_its_siblings_and_then_all_are_resubmitted() {
    check(
        "running retry=all; r0: running; r1: running, terminating(instance_unreachable), done(done_by_runner)",
        "runs, stays running; end r1.0 terminated_by_server; due 10s: running",
    );
    check(
        "running retry=all; r0: running; \
         r1: terminating(terminated_by_server), failed(instance_unreachable), done(done_by_runner)",
        "runs, stays running; due 10s: running",
    );
    check(
        "running retry=all; r0: running; \
         r1: terminated(terminated_by_server), failed(instance_unreachable), done(done_by_runner)",
        "runs, stays running; submit r1.0#1; submit r1.1#1; submit r1.2#1; due 10s: \
         resubmitted in place: replica 1",
    );
}

#[test]
fn a_failed_job_beats_the_retry_of_its_sibling() {
    check(
        "running retry=interruption; r0: failed(interrupted_by_no_capacity), failed(executor_error)",
        "end-decided -> terminating; job_failed; due 0s: \
         job 1 of replica 0 ended: executor_error; retry does not cover error",
    );
}

#[test]
fn a_job_the_server_ended_without_a_failed_sibling_counts_as_failed() {
    check(
        "running retry=all; r0: terminated(terminated_by_server)",
        "end-decided -> terminating; job_failed; due 0s: job 0 of replica 0 ended: terminated_by_server",
    );
}

// Pending and resubmission.

#[test]
fn a_run_with_nothing_but_retries_goes_back_to_pending() {
    check(
        "submitted retry=all; r0: failed(failed_to_start_due_to_no_capacity)",
        "idles -> pending; attempt 1; fleet unset; due 15s: \
         job 0 of replica 0 ended: failed_to_start_due_to_no_capacity; retried on no-capacity",
    );
    check(
        "submitted retry=all attempt=3; r0: failed(failed_to_start_due_to_no_capacity); r1: done(done_by_runner)",
        "idles -> pending; attempt 4; fleet unset; due 120s: \
         job 0 of replica 0 ended: failed_to_start_due_to_no_capacity; retried on no-capacity",
    );
}

#[test]
fn r9_the_live_siblings_of_a_run_that_goes_pending_are_ended() {
    check(
        "running retry=all; r0: failed(container_exited_with_error), running",
        "idles -> pending; attempt 1; fleet unset; end r0.1 terminated_by_server; due 15s: \
         job 0 of replica 0 ended: container_exited_with_error; retried on error",
    );
}

#[test]
fn r11_a_pending_run_waits_for_its_delay() {
    check(
        "pending retry=all attempt=2 pending=29s; r0: failed(container_exited_with_error)@30s",
        "stays pending; due 1s: waiting for the delay of retry 2",
    );
    check(
        "pending retry=all attempt=2 pending=30s; r0: failed(container_exited_with_error)@31s, \
         terminated(terminated_by_server)@31s",
        "resubmitted -> submitted; submit r0.0#1; submit r0.1#1; due 5s: the retry delay is over",
    );
}

#[test]
fn a_replica_that_is_done_is_not_repeated_by_a_retry() {
    check(
        "pending retry=all attempt=1 pending=15s; r0: done(done_by_runner); r1: failed(executor_error)#4",
        "resubmitted -> submitted; submit r1.0#5; due 5s: the retry delay is over",
    );
}

#[test]
fn r6_a_retry_waits_for_the_previous_jobs_even_after_its_delay() {
    check(
        "pending retry=all attempt=1 pending=1m; r0: failed(executor_error), terminating(terminated_by_server)",
        "stays pending; due 5s: waiting for its previous jobs to end",
    );
}

#[test]
fn r11_a_retry_delay_is_shortened_to_fit_the_retry_duration() {
    check(
        "running retry=all duration=5s; r0: failed(container_exited_with_error)@1s",
        "idles -> pending; attempt 1; fleet unset; due 4s: \
         job 0 of replica 0 ended: container_exited_with_error; retried on error",
    );
    check(
        "pending retry=all duration=5s attempt=1 pending=4s; r0: failed(container_exited_with_error)@5s",
        "resubmitted -> submitted; submit r0.0#1; due 5s: the retry delay is over",
    );
    check(
        "running retry=all duration=5s attempt=1; r0: failed(container_exited_with_error)#1@6s",
        "end-decided -> terminating; retry_limit_exceeded; due 0s: job 0 of replica 0 ended: \
         container_exited_with_error; retry duration of 5 s exceeded after 2 attempts (6 s elapsed)",
    );
}

#[test]
fn r11_submissions_are_bounded_in_number() {
    check(
        "running retry=all max=3; r0: failed(container_exited_with_error)#2",
        "end-decided -> terminating; retry_limit_exceeded; due 0s: job 0 of replica 0 ended: \
         container_exited_with_error; all 3 attempts are used up",
    );
}

// Services.

#[test]
fn r21_scaled_down_replicas_do_not_count() {
    check(
        "running start=r0; r0: running; r1: terminated(scaled_down); r2: terminating(scaled_down)",
        "runs, stays running; due 300s: running",
    );
}

#[test]
fn a_service_at_zero_is_pending_until_requests_arrive() {
    check(
        "running start=none; r0: terminating(scaled_down)",
        "idles -> pending; fleet unset; due 0s: no replicas are needed",
    );
    check("pending start=none; r0: terminated(scaled_down)", "stays pending; due 10s: waiting for requests");
    check(
        "pending start=r0,r1; r0: terminated(scaled_down)#1",
        "resubmitted -> submitted; submit r0.0#2; submit r1.0#0; due 5s: requests arrived",
    );
}

#[test]
fn a_terminating_replica_does_not_delay_the_start_of_others() {
    check(
        "pending start=r0,r1; r0: terminating(scaled_down)",
        "resubmitted -> submitted; submit r1.0#0; due 5s: requests arrived",
    );
}

#[test]
fn an_active_service_grows_and_shrinks_by_whole_replicas() {
    check(
        "running start=r0,r1,r2; r0: running; r1: terminated(scaled_down)#1",
        "runs, stays running; submit r1.0#2; submit r2.0#0; due 10s: added: replicas 1, 2",
    );
    check(
        "running surplus=r1 start=r0; r0: running; r1: running",
        "runs, stays running; end r1.0 scaled_down; due 10s: scaled down: replica 1",
    );
    check(
        "running surplus=r0 start=r1; r0: terminating(scaled_down); r1: running",
        "runs, stays running; due 300s: running",
    );
}

#[test]
fn a_finished_replica_of_a_task_is_not_added_again() {
    check(
        "running start=r0,r1; r0: running; r1: done(done_by_runner)",
        "runs, stays running; due 300s: running",
    );
}

#[test]
fn a_failed_trial_replica_does_not_end_a_run_with_other_replicas_or_a_rollback() {
    check(
        "running start=r0,r1; r0: running; r1?: failed(container_exited_with_error)",
        "runs, stays running; due 300s: running",
    );
    check(
        "running start=r1; r1?: failed(container_exited_with_error)",
        "end-decided -> terminating; job_failed; due 0s: \
         job 0 of replica 1 ended: container_exited_with_error; retry is off",
    );
    check(
        "running rolls-back start=none; r1?: failed(container_exited_with_error)",
        "idles -> pending; fleet unset; due 0s: its deployment is being rolled back",
    );
    check(
        "running rolls-back start=none; r1?: done(done_by_runner)",
        "idles -> pending; fleet unset; due 0s: its deployment is being rolled back",
    );
}

#[test]
fn a_failed_replica_of_an_old_configuration_is_not_retried_and_frees_its_number() {
    check(
        "running retry=all start=r1; r0-: failed(container_exited_with_error); r1: running",
        "runs, stays running; due 300s: running",
    );
    check(
        "running start=r0,r1; r0-: failed(container_exited_with_error)#2; r1: running",
        "runs, stays running; submit r0.0#3; due 10s: added: replica 0",
    );
    // While it runs it counts like any other.
    check("running start=r0; r0-: running", "runs, stays running; due 300s: running");
}

// Terminating.

#[test]
fn a_terminating_run_ends_its_jobs_with_the_matching_reason() {
    check(
        "terminating ending=stopped_by_user; r0: running, submitted, done(done_by_runner)",
        "stays terminating; end r0.0 terminated_by_user; end r0.1 terminated_by_user; due 5s: \
         waiting for its jobs to end",
    );
    check(
        "terminating ending=aborted_by_user; r0: pulling",
        "stays terminating; end r0.0 aborted_by_user; due 5s: waiting for its jobs to end",
    );
}

#[test]
fn an_abort_after_a_stop_aborts_the_jobs_that_are_stopping() {
    check(
        "terminating ending=aborted_by_user; r0: terminating(terminated_by_user), terminating(done_by_runner)",
        "stays terminating; end r0.0 aborted_by_user; due 5s: waiting for its jobs to end",
    );
}

#[test]
fn r4_a_run_is_final_only_when_all_its_jobs_are() {
    check(
        "terminating ending=job_failed; r0: failed(executor_error), terminating(terminated_by_server)",
        "stays terminating; due 5s: waiting for its jobs to end",
    );
    for (reason, last) in [
        ("all_jobs_done", "finished-done -> done"),
        ("job_failed", "finished-failed -> failed"),
        ("retry_limit_exceeded", "finished-failed -> failed"),
        ("server_error", "finished-failed -> failed"),
        ("gateway_error", "finished-failed -> failed"),
        ("stopped_by_user", "finished-terminated -> terminated"),
        ("aborted_by_user", "finished-terminated -> terminated"),
    ] {
        check(
            &format!("terminating ending={reason}; r0: done(done_by_runner)"),
            &format!("{last}; never again: the run is {}", last.rsplit(' ').next().unwrap_or_default()),
        );
    }
}

#[test]
fn r3_a_final_run_is_left_alone() {
    check(
        "done ending=all_jobs_done; r0: done(done_by_runner)",
        "stays done; never again: the run has ended",
    );
}

// Schedules.

#[test]
fn a_scheduled_run_waits_for_its_slot_and_starts_then() {
    check("pending hourly next=30m start=r0x2", "stays pending; due 1800s: waiting for its cron slot");
    check(
        "pending hourly next=0s start=r0x2",
        "resubmitted -> submitted; submit r0.0#0; submit r0.1#0; fired 2026-11-20T09:30:00Z; no next; due 5s: \
         its cron slot was reached",
    );
}

#[test]
fn r18_a_missed_slot_fires_late_and_once() {
    check(
        "pending hourly next=-3h start=r0; r0: done(done_by_runner)#7",
        "resubmitted -> submitted; submit r0.0#8; fired 2026-11-20T06:30:00Z; no next; due 5s: its cron slot was reached",
    );
}

#[test]
fn r25_a_scheduled_run_that_ended_waits_for_the_next_slot() {
    check(
        "terminating hourly fired=30m ending=job_failed attempt=2; r0: failed(executor_error)",
        "rescheduled -> pending; no reason; attempt 0; fleet unset; next 2026-11-20T10:00:00Z; due 1800s: \
         as asked; the next execution is scheduled",
    );
    check(
        "terminating hourly fired=-30m ending=all_jobs_done; r0: done(done_by_runner)",
        "rescheduled -> pending; no reason; fleet unset; next 2026-11-20T11:00:00Z; due 5400s: \
         as asked; the next execution is scheduled",
    );
}

#[test]
fn r25_a_scheduled_run_that_a_user_stopped_stays_stopped() {
    check(
        "terminating hourly fired=30m ending=stopped_by_user; r0: terminated(terminated_by_user)",
        "finished-terminated -> terminated; never again: the run is terminated",
    );
    check(
        "terminating hourly ending=aborted_by_user",
        "finished-terminated -> terminated; never again: the run is terminated",
    );
}

#[test]
fn the_retry_clock_of_a_scheduled_run_starts_with_its_slot() {
    check(
        "submitted hourly fired=30m submitted=24h retry=no-capacity; r0: failed(failed_to_start_due_to_no_capacity)",
        "idles -> pending; attempt 1; fleet unset; due 15s: \
         job 0 of replica 0 ended: failed_to_start_due_to_no_capacity; retried on no-capacity",
    );
    check(
        "submitted submitted=24h retry=no-capacity; r0: failed(failed_to_start_due_to_no_capacity)",
        "end-decided -> terminating; retry_limit_exceeded; due 0s: job 0 of replica 0 ended: \
         failed_to_start_due_to_no_capacity; retry duration of 3600 s exceeded after 1 attempt (86400 s elapsed)",
    );
}

#[test]
fn r12_a_stop_ends_the_run_despite_pending_retries_and_failures() {
    check(
        "running stop; r0: running, submitted",
        "stop-asked -> terminating; stopped_by_user; end r0.0 terminated_by_user; end r0.1 terminated_by_user; \
         due 5s: stopped by a user",
    );
    check(
        "pending stop retry=all attempt=2 pending=1h; r0: failed(executor_error)@61m",
        "stop-asked -> terminating; stopped_by_user; due 0s: stopped by a user",
    );
    check(
        "running abort retry=all; r0: failed(container_exited_with_error); r1: running",
        "stop-asked -> terminating; aborted_by_user; end r1.0 aborted_by_user; due 5s: aborted by a user",
    );
}

#[test]
fn an_abort_overrides_a_stop_but_a_stop_does_not_override_an_earlier_ending() {
    check(
        "terminating abort ending=stopped_by_user; r0: terminating(terminated_by_user)",
        "stays terminating; aborted_by_user; end r0.0 aborted_by_user; due 5s: waiting for its jobs to end",
    );
    check(
        "terminating stop ending=job_failed; r0: terminating(terminated_by_server)",
        "stays terminating; due 5s: waiting for its jobs to end",
    );
    check(
        "terminating stop hourly fired=30m ending=all_jobs_done; r0: done(done_by_runner)",
        "finished-terminated -> terminated; stopped_by_user; never again: stopped by a user",
    );
}

#[test]
fn a_run_whose_jobs_are_all_final_makes_both_ending_transitions_in_one_pass() {
    let moves = |text: &str| {
        let (before, last) = decide_to_end(&read(text), NOW);
        (before.map(|plan| plan.status), last.status)
    };
    let both = |last| (Some(run::Status::Terminating), last);
    assert_eq!(moves("running; r0: done(done_by_runner)"), both(run::Status::Done));
    assert_eq!(moves("running; r0: failed(container_exited_with_error)"), both(run::Status::Failed));
    assert_eq!(moves("running stop; r0: done(done_by_runner)"), both(run::Status::Terminated));
    assert_eq!(moves("running hourly; r0: done(done_by_runner)"), both(run::Status::Pending));
    // One job is still terminating.
    assert_eq!(moves("running; r0: terminating(done_by_runner)"), (None, run::Status::Terminating));
    assert_eq!(moves("running; r0: running"), (None, run::Status::Running));
    assert_eq!(
        moves("terminating ending=all_jobs_done; r0: done(done_by_runner)"),
        (None, run::Status::Done)
    );
}

#[test]
fn a_full_region_is_followed_by_another_without_a_retry_policy() {
    let text = "submitted; r0: failed(failed_to_start_due_to_no_capacity), terminating(terminated_by_server)";
    let mut run = read(text);
    let full = job::Ending::no_capacity("no capacity").with_detail(job::TerminationDetail::RegionFull);
    run.replicas[0].jobs[0].state = SubmissionState::Final(full);
    let message =
        "job 0 of replica 0 ended: failed_to_start_due_to_no_capacity (region_full); trying another region";
    assert_eq!(
        render(&run, &decide(&run, NOW)),
        format!("idles -> pending; attempt 1; fleet unset; due 0s: {message}")
    );
    let mut waits = RunView { status: run::Status::Pending, attempt: 1, ..run.clone() };
    assert_eq!(
        render(&waits, &decide(&waits, NOW)),
        "stays pending; due 5s: waiting for its previous jobs to end"
    );
    waits.replicas[0].jobs[1].state =
        SubmissionState::Final(job::Ending::new(job::TerminationReason::TerminatedByServer));
    assert_eq!(
        render(&waits, &decide(&waits, NOW)),
        "resubmitted -> submitted; submit r0.0#1; submit r0.1#1; due 5s: the retry delay is over"
    );
}
