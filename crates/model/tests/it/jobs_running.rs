//! A job from its placement to its end.

use proptest::prelude::*;
use windlass_model::{
    decide::jobs_running::{
        Action, EndKind, Gate, HostState, POLL_RUNNING, POLL_SIBLINGS, POLL_WITH_EVENTS, PULLING_TIMEOUT,
        Plan, ReportedEnd, RunnerReport, RunnerState, RunningJobObservation, RunningJobView,
        SIBLINGS_TIMEOUT, ShimState, Siblings, StartupOrder, TaskState, UNREACHABLE_GRACE, decide, has_ended,
        next_in_pass, probe_targets,
    },
    job::{self, Status, TerminationDetail, TerminationReason},
    state_machine::Step,
    time::{Span, Timestamp},
};

const NOW: Timestamp = Timestamp::from_secs(1_000_000);

fn ago(secs: i64) -> Timestamp {
    NOW - Span::secs(secs)
}

fn job(status: Status, secs: i64) -> RunningJobView {
    RunningJobView {
        status,
        provisioning_since: ago(secs),
        provisioning_max: Span::mins(10),
        pulling_since: (status != Status::Provisioning).then(|| ago(secs)),
        running_since: (status == Status::Running).then(|| ago(secs)),
        disconnected_at: None,
        instance_was_ready: false,
        has_shim: true,
        is_spot: false,
        has_siblings: false,
        is_master: true,
        gate: None,
        startup_order: StartupOrder::Any,
        siblings: Siblings::NONE,
        max_duration: None,
        inactivity_duration: None,
        unreachable_timeout: UNREACHABLE_GRACE,
        pulling_timeout: PULLING_TIMEOUT,
    }
}

fn shim(shim: ShimState) -> RunningJobObservation {
    RunningJobObservation {
        host: HostState::Fine,
        shim,
        runner: RunnerState::NotRequested,
        is_gpu_idle: false,
        has_event_stream: false,
    }
}

fn runner(runner: RunnerState) -> RunningJobObservation {
    let shim = ShimState::Task(TaskState::Running { ports_known: true });
    RunningJobObservation { host: HostState::Fine, shim, runner, is_gpu_idle: false, has_event_stream: false }
}

fn ended(how: EndKind, reason: &str, exit_status: Option<i32>) -> RunningJobObservation {
    let ended = Some(ReportedEnd {
        kind: how,
        reason: reason.into(),
        message: String::new(),
        detail: None,
        exit_status,
    });
    runner(RunnerState::Pulled(RunnerReport { end: ended, disconnected_for: None, is_at_gate: false }))
}

fn failed(reason: &str, message: &str) -> ReportedEnd {
    let (reason, message) = (reason.into(), message.into());
    ReportedEnd { kind: EndKind::Failed, reason, message, detail: None, exit_status: None }
}

fn alive() -> RunningJobObservation {
    runner(RunnerState::Pulled(RunnerReport::default()))
}

fn words(plan: &Plan) -> String {
    let mut words: Vec<String> = plan.actions.iter().map(|action| format!("{action:?}")).collect();
    match (&plan.change, &plan.ending) {
        (Some(change), Some(ending)) => {
            let exit = ending.exit_status().map(|code| format!(" ({code})")).unwrap_or_default();
            words.push(format!("{}: {}{exit}", change.event, ending.reason()));
            assert_eq!(change.reason, ending.reason().as_str());
            assert!(!change.message.is_empty());
        }
        (Some(change), None) => words.push(change.event.to_string()),
        (None, None) => {}
        (None, Some(_)) => panic!("an ending without a change: {plan:?}"),
    }
    words.extend(plan.waits_for.map(|what| format!("waits for {what}")));
    words.extend(plan.disconnected_at.map(|at| format!("silent {} s", NOW.since(at).as_secs())));
    words.push(format!("again in {} s", plan.due.since(NOW).as_secs()));
    words.join(", ")
}

#[track_caller]
fn check(job: &RunningJobView, seen: &RunningJobObservation, expect: &str) {
    assert_eq!(words(&decide(job, seen, NOW)), expect);
}

#[test]
fn a_job_on_a_silent_new_instance_ends_at_the_provisioning_limit() {
    let job = |secs| job(Status::Provisioning, secs);
    check(&job(30), &shim(ShimState::Silent), "waits for the instance, again in 5 s");
    check(&job(597), &shim(ShimState::Silent), "waits for the instance, again in 3 s");
    check(&job(600), &shim(ShimState::Silent), "lost: waiting_instance_limit_exceeded, again in 0 s");
}

#[test]
fn a_silent_instance_that_was_ready_gets_the_short_grace() {
    let job = |silent| RunningJobView {
        instance_was_ready: true,
        disconnected_at: Some(ago(silent)),
        ..job(Status::Provisioning, 130)
    };
    let expect = "waits for the agents to respond again, silent 117 s, again in 3 s";
    check(&job(117), &shim(ShimState::Silent), expect);
    check(&job(120), &shim(ShimState::Silent), "lost: instance_unreachable, again in 0 s");
}

#[test]
fn a_shim_that_answers_gets_the_task_once() {
    let job = job(Status::Provisioning, 3);
    check(&job, &shim(ShimState::NoTask), "SubmitTask, task-taken, again in 0 s");
    check(&job, &shim(ShimState::Task(TaskState::Pulling)), "task-taken, again in 0 s");
}

#[test]
fn r24_a_job_ends_when_its_shim_never_accepts_the_task() {
    let expect = "lost: waiting_runner_limit_exceeded, again in 0 s";
    check(&job(Status::Provisioning, 600), &shim(ShimState::NoTask), expect);
}

#[test]
fn nodes_wait_for_each_other_by_startup_order() {
    let waits = Siblings {
        all_have_ips: true,
        is_master_running: false,
        are_workers_running: false,
        all_at_gate: false,
    };
    let node = |is_master, startup_order| RunningJobView {
        has_siblings: true,
        is_master,
        startup_order,
        siblings: waits,
        ..job(Status::Provisioning, 1_000)
    };
    let none = shim(ShimState::NoTask);
    check(&node(false, StartupOrder::MasterFirst), &none, "waits for the master to start, again in 2 s");
    check(&node(true, StartupOrder::MasterFirst), &none, "SubmitTask, task-taken, again in 0 s");
    check(&node(true, StartupOrder::WorkersFirst), &none, "waits for the workers to start, again in 2 s");
    check(&node(false, StartupOrder::WorkersFirst), &none, "SubmitTask, task-taken, again in 0 s");
    let late = RunningJobView {
        provisioning_since: NOW - SIBLINGS_TIMEOUT,
        ..node(false, StartupOrder::MasterFirst)
    };
    check(&late, &none, "lost: waiting_runner_limit_exceeded, again in 0 s");
}

#[test]
fn a_pulling_job_follows_the_state_of_its_shim_task() {
    let job = job(Status::Pulling, 60);
    check(
        &job,
        &shim(ShimState::Task(TaskState::Preparing)),
        "waits for the host to prepare the task, again in 5 s",
    );
    check(&job, &shim(ShimState::Task(TaskState::Pulling)), "waits for the image, again in 5 s");
    check(&job, &shim(ShimState::Task(TaskState::Creating)), "waits for the container, again in 5 s");
    let no_ports = TaskState::Running { ports_known: false };
    check(&job, &shim(ShimState::Task(no_ports)), "waits for the container's ports, again in 5 s");
    check(&job, &runner(RunnerState::Silent), "waits for the runner, again in 5 s");
    check(&job, &runner(RunnerState::Ready), "SubmitJob, started, again in 10 s");
    check(&job, &alive(), "started, again in 10 s");
}

#[test]
fn a_pulling_job_ends_with_the_termination_reason_of_its_task() {
    let job = job(Status::Pulling, 60);
    let ended = |reason: &str| shim(ShimState::Task(TaskState::Terminated(failed(reason, "m"))));
    check(&job, &ended("CREATING_CONTAINER_ERROR"), "exited: creating_container_error, again in 0 s");
    check(&job, &ended("done_by_runner"), "exited: done_by_runner, again in 0 s");
    check(&job, &ended("a word of tomorrow"), "exited: container_exited_with_error, again in 0 s");
}

#[test]
fn r7_a_task_that_the_host_lost_is_never_submitted_again() {
    check(&job(Status::Pulling, 60), &shim(ShimState::NoTask), "lost: executor_error, again in 0 s");
}

#[test]
fn a_job_that_ended_before_its_start_was_recorded_gets_another_pass_at_once() {
    check(&job(Status::Pulling, 60), &ended(EndKind::Done, "", Some(0)), "started, again in 0 s");
}

#[test]
fn an_ending_keeps_the_detail_exit_status_and_message_of_the_agent() {
    let oom =
        ReportedEnd { detail: Some("oom_killed".into()), exit_status: Some(137), ..failed("", "last line") };
    let plan = decide(&job(Status::Pulling, 60), &shim(ShimState::Task(TaskState::Terminated(oom))), NOW);
    let ending = plan.ending.unwrap();
    assert_eq!(ending.reason(), TerminationReason::ContainerExitedWithError);
    assert_eq!(ending.detail().map(TerminationDetail::as_str), Some("oom_killed"));
    assert_eq!((ending.exit_status(), ending.message()), (Some(137), Some("last line")));
}

#[test]
fn a_node_gets_its_task_only_when_all_nodes_have_addresses() {
    let siblings = Siblings { all_have_ips: false, ..Siblings::NONE };
    let job = RunningJobView { siblings, has_siblings: true, ..job(Status::Provisioning, 60) };
    check(&job, &shim(ShimState::NoTask), "waits for the addresses of the other nodes, again in 2 s");
}

#[test]
fn no_runner_gets_its_job_before_all_nodes_have_addresses() {
    let siblings = Siblings { all_have_ips: false, ..Siblings::NONE };
    let job = RunningJobView { siblings, has_siblings: true, ..job(Status::Pulling, 60) };
    check(&job, &runner(RunnerState::Ready), "waits for the addresses of the other nodes, again in 2 s");
}

#[test]
fn r24_a_pull_that_never_ends_is_ended() {
    let late = job(Status::Pulling, PULLING_TIMEOUT.as_secs());
    let expect = "lost: waiting_runner_limit_exceeded, again in 0 s";
    check(&late, &shim(ShimState::Task(TaskState::Pulling)), expect);
    check(&late, &runner(RunnerState::Silent), expect);
    check(&late, &runner(RunnerState::Ready), expect);
}

#[test]
fn a_job_without_a_shim_is_submitted_directly_to_its_runner() {
    let job = |secs| RunningJobView { has_shim: false, ..job(Status::Provisioning, secs) };
    let seen = |runner| RunningJobObservation { shim: ShimState::NotRequested, ..self::runner(runner) };
    check(&job(9), &seen(RunnerState::Silent), "waits for the runner, again in 5 s");
    check(&job(9), &seen(RunnerState::Ready), "SubmitJob, started, again in 10 s");
    check(&job(600), &seen(RunnerState::Silent), "lost: waiting_runner_limit_exceeded, again in 0 s");
}

#[test]
fn a_running_job_ends_with_the_result_its_runner_reports() {
    let job = job(Status::Running, 90);
    check(&job, &alive(), "PullLogs, again in 10 s");
    check(&job, &ended(EndKind::Done, "", Some(0)), "PullLogs, exited: done_by_runner (0), again in 0 s");
    let failed = "PullLogs, exited: container_exited_with_error (3), again in 0 s";
    check(&job, &ended(EndKind::Failed, "", Some(3)), failed);
    let quota = "PullLogs, exited: log_quota_exceeded, again in 0 s";
    check(&job, &ended(EndKind::Terminated, "LOG_QUOTA_EXCEEDED", None), quota);
}

#[test]
fn f12_a_terminated_runner_leaves_the_reason_to_its_shim() {
    let job = job(Status::Running, 90);
    let reported = ended(EndKind::Terminated, "", Some(143));
    let seen = |shim| RunningJobObservation { shim, ..reported.clone() };
    let running = ShimState::Task(TaskState::Running { ports_known: true });
    let waits = "waits for the host to report why the task ended, again in 5 s";
    check(&job, &seen(running.clone()), waits);
    check(&job, &seen(ShimState::Silent), waits);
    let restart = ReportedEnd { detail: Some("host_runtime_restart".into()), ..failed("executor_error", "") };
    let known = "PullLogs, exited: executor_error, again in 0 s";
    check(&job, &seen(ShimState::Task(TaskState::Terminated(restart))), known);
    let own = "PullLogs, exited: container_exited_with_error (143), again in 0 s";
    check(&job, &seen(ShimState::NoTask), own);
    check(&RunningJobView { has_shim: false, ..job }, &seen(ShimState::NotRequested), own);
    assert!(!has_ended(&reported.runner), "the host has to be asked");
}

#[test]
fn a_silent_agent_gets_its_grace_period() {
    let job = |silent: Option<i64>| RunningJobView {
        disconnected_at: silent.map(ago),
        ..job(Status::Running, 500)
    };
    let silent = RunningJobObservation { shim: ShimState::Silent, ..runner(RunnerState::Silent) };
    check(&job(None), &silent, "waits for the agents to respond again, silent 0 s, again in 5 s");
    check(&job(Some(119)), &silent, "waits for the agents to respond again, silent 119 s, again in 1 s");
    check(&job(Some(120)), &silent, "lost: instance_unreachable, again in 0 s");
    check(&job(Some(119)), &alive(), "PullLogs, again in 10 s");
    let spot = RunningJobView { is_spot: true, ..job(Some(120)) };
    check(&spot, &silent, "lost: interrupted_by_no_capacity, again in 0 s");
}

#[test]
fn a_job_ends_at_once_when_its_silent_runner_has_no_live_container() {
    let task = TaskState::Terminated(failed("container_exited_with_error", "killed"));
    let seen = RunningJobObservation { shim: ShimState::Task(task), ..runner(RunnerState::Silent) };
    check(&job(Status::Running, 50), &seen, "exited: container_exited_with_error, again in 0 s");
    let lost = "lost: executor_error, again in 0 s";
    check(
        &job(Status::Running, 50),
        &RunningJobObservation { shim: ShimState::NoTask, ..runner(RunnerState::Silent) },
        lost,
    );
}

#[test]
fn a_job_ends_when_its_task_terminated_without_a_report_of_the_runner() {
    let task = TaskState::Terminated(failed("executor_error", "the host was rebooted"));
    let seen = RunningJobObservation { shim: ShimState::Task(task), ..alive() };
    check(&job(Status::Running, 50), &seen, "PullLogs, exited: executor_error, again in 0 s");
}

#[test]
fn a_running_job_continues_while_its_runner_has_not_reported_yet() {
    check(&job(Status::Running, 50), &runner(RunnerState::Ready), "PullLogs, again in 10 s");
}

#[test]
fn an_instance_that_is_gone_ends_its_job_at_once() {
    let gone = RunningJobObservation { host: HostState::Gone, ..alive() };
    check(&job(Status::Running, 5), &gone, "lost: instance_unreachable, again in 0 s");
    let spot = RunningJobView { is_spot: true, ..job(Status::Pulling, 5) };
    check(&spot, &gone, "lost: interrupted_by_no_capacity, again in 0 s");
    let never = RunningJobObservation { host: HostState::CreateFailed, ..alive() };
    let no_capacity = "lost: failed_to_start_due_to_no_capacity, again in 0 s";
    check(&job(Status::Provisioning, 5), &never, no_capacity);
    let late = RunningJobObservation { host: HostState::ProvisionTimeout, ..alive() };
    check(&job(Status::Provisioning, 5), &late, "lost: waiting_instance_limit_exceeded, again in 0 s");
    let revoked = RunningJobObservation { host: HostState::AccessRevoked, ..alive() };
    check(&job(Status::Provisioning, 5), &revoked, "lost: instance_access_revoked, again in 0 s");
}

#[test]
fn the_server_enforces_max_duration_two_minutes_after_the_runner() {
    let job = |secs| RunningJobView { max_duration: Some(Span::mins(10)), ..job(Status::Running, secs) };
    check(&job(715), &alive(), "PullLogs, again in 5 s");
    check(&job(720), &alive(), "policy-ended: max_duration_exceeded, again in 0 s");
    check(&job(720), &runner(RunnerState::Silent), "policy-ended: max_duration_exceeded, again in 0 s");
}

#[test]
fn inactivity_and_idle_gpus_end_a_job() {
    let job = RunningJobView { inactivity_duration: Some(Span::secs(100)), ..job(Status::Running, 500) };
    let idle = |secs| {
        let pulled = RunnerReport { end: None, disconnected_for: Some(Span::secs(secs)), is_at_gate: false };
        runner(RunnerState::Pulled(pulled))
    };
    check(&job, &idle(96), "PullLogs, again in 4 s");
    check(&job, &idle(100), "policy-ended: inactivity_duration_exceeded, again in 0 s");
    let gpu = RunningJobObservation { is_gpu_idle: true, ..idle(0) };
    check(&job, &gpu, "policy-ended: terminated_due_to_utilization_policy, again in 0 s");
}

#[test]
fn a_job_whose_host_pushes_events_is_polled_less_often() {
    let due = |job: &RunningJobView, seen: RunningJobObservation| decide(job, &seen, NOW).due.since(NOW);
    let (running, reported) =
        (job(Status::Running, 60), || RunningJobObservation { has_event_stream: true, ..alive() });
    assert_eq!((due(&running, alive()), due(&running, reported())), (POLL_RUNNING, POLL_WITH_EVENTS));
    // Its time limit applies all the same.
    let limited = RunningJobView { max_duration: Some(Span::secs(90)), ..running };
    assert!(due(&limited, reported()) > POLL_RUNNING);
    let nearly = RunningJobView { running_since: Some(ago(200)), ..limited };
    assert_eq!(due(&nearly, reported()), Span::secs(10), "90 s, and the two minutes after");
}

fn any_seen() -> impl Strategy<Value = RunningJobObservation> {
    let task = prop_oneof![
        Just(TaskState::Pending),
        Just(TaskState::Preparing),
        Just(TaskState::Pulling),
        Just(TaskState::Creating),
        any::<bool>().prop_map(|ports_known| TaskState::Running { ports_known }),
        Just(TaskState::Terminated(failed("executor_error", ""))),
    ];
    let shim = prop_oneof![
        Just(ShimState::NotRequested),
        Just(ShimState::Silent),
        Just(ShimState::NoTask),
        task.prop_map(ShimState::Task)
    ];
    let how = prop::sample::select(vec![EndKind::Done, EndKind::Failed, EndKind::Terminated]);
    let ended = how.prop_map(|how| ReportedEnd {
        kind: how,
        reason: String::new(),
        message: String::new(),
        detail: None,
        exit_status: None,
    });
    let pulled = (prop::option::of(ended), prop::option::of(0_i64..4_000));
    let pulled = pulled.prop_map(|(ended, idle)| RunnerReport {
        end: ended,
        disconnected_for: idle.map(Span::secs),
        is_at_gate: false,
    });
    let runner = prop_oneof![
        Just(RunnerState::NotRequested),
        Just(RunnerState::Silent),
        Just(RunnerState::Ready),
        pulled.prop_map(RunnerState::Pulled)
    ];
    let host = prop::sample::select(vec![
        HostState::Fine,
        HostState::Fine,
        HostState::Gone,
        HostState::CreateFailed,
        HostState::ProvisionTimeout,
        HostState::AccessRevoked,
    ]);
    (host, shim, runner, any::<bool>(), any::<bool>()).prop_map(
        |(host, shim, runner, gpu_idle, is_reported)| RunningJobObservation {
            host,
            shim,
            runner,
            is_gpu_idle: gpu_idle,
            has_event_stream: is_reported,
        },
    )
}

fn any_job() -> impl Strategy<Value = RunningJobView> {
    let order = vec![StartupOrder::Any, StartupOrder::MasterFirst, StartupOrder::WorkersFirst];
    let status = vec![Status::Provisioning, Status::Pulling, Status::Running];
    (
        (prop::sample::select(status), 0_i64..8_000, prop::option::of(0_i64..300)),
        prop::sample::select(order),
        any::<[bool; 8]>(),
        (prop::option::of(1_i64..9_000), prop::option::of(1_i64..9_000)),
    )
        .prop_map(|((status, secs, silent), startup_order, flags, (max, idle))| RunningJobView {
            disconnected_at: silent.map(ago),
            instance_was_ready: flags[0],
            has_shim: flags[1],
            is_spot: flags[2],
            has_siblings: flags[3],
            is_master: flags[4],
            startup_order: if flags[3] { startup_order } else { StartupOrder::Any },
            siblings: if flags[3] {
                Siblings {
                    all_have_ips: flags[5],
                    is_master_running: flags[6],
                    are_workers_running: flags[7],
                    all_at_gate: flags[7],
                }
            } else {
                Siblings::NONE
            },
            max_duration: max.map(Span::secs),
            inactivity_duration: idle.map(Span::secs),
            ..job(status, secs)
        })
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, cases: 2_000, ..ProptestConfig::default() })]

    #[test]
    fn r5_running_job_plans_contain_only_transitions_the_state_machine_accepts(job in any_job(), seen in any_seen()) {
        let plan = decide(&job, &seen, NOW);
        if let Some(change) = &plan.change {
            prop_assert!(!matches!(job::step(job.status, change.event), Step::Refuse), "{:?}", change);
            let terminates = job::step(job.status, change.event) == Step::To(Status::Terminating);
            prop_assert_eq!(terminates, plan.ending.is_some());
        } else {
            prop_assert!(plan.due > NOW, "a plan that changes nothing must not spin: {:?}", plan);
        }
        prop_assert!(plan.ending.is_none() || !plan.actions.contains(&Action::SubmitJob));
    }

    /// R24: whatever the shim and runner report short of an end, a job that is not running is terminating by the time
    /// limit. The controller fails every submission, so no change but the end is ever applied.
    #[test]
    fn r24_a_job_without_progress_ends_by_the_time_limit(start in any_job(), seen in any_seen()) {
        let status = if start.status == Status::Running { Status::Pulling } else { start.status };
        let mut job = RunningJobView { status, disconnected_at: None, provisioning_since: NOW, pulling_since: Some(NOW), ..start };
        let bound = NOW + SIBLINGS_TIMEOUT.max(PULLING_TIMEOUT).max(job.provisioning_max);
        let mut now = NOW;
        loop {
            let plan = decide(&job, &seen, now);
            if plan.ending.is_some() {
                break;
            }
            prop_assert!(now < bound, "still {:?} after the bound", plan);
            if plan.change.is_some() && plan.actions.is_empty() {
                // The agent already has it: that is progress, with another limit.
                break;
            }
            job.disconnected_at = plan.disconnected_at;
            now = if plan.due > now { plan.due } else { now + Span::secs(5) };
        }
    }

    #[test]
    fn r24_silence_ends_a_running_job_within_the_grace(start in any_job()) {
        let mut job = RunningJobView { status: Status::Running, disconnected_at: None, running_since: Some(NOW), ..start };
        let silent = RunningJobObservation { host: HostState::Fine, shim: ShimState::Silent, runner: RunnerState::Silent, is_gpu_idle: false, has_event_stream: false };
        let mut now = NOW;
        while decide(&job, &silent, now).ending.is_none() {
            let plan = decide(&job, &silent, now);
            job.disconnected_at = plan.disconnected_at;
            now = plan.due;
            prop_assert!(now.since(NOW) <= UNREACHABLE_GRACE);
        }
    }
}

#[test]
fn the_job_status_determines_which_agents_are_probed() {
    assert!(
        probe_targets(&job(Status::Provisioning, 0)).shim
            && !probe_targets(&job(Status::Provisioning, 0)).runner
    );
    assert!(probe_targets(&job(Status::Pulling, 0)).runner && probe_targets(&job(Status::Running, 0)).runner);
}

#[test]
fn a_pass_continues_only_after_the_shim_accepted_the_task() {
    let placed = job(Status::Provisioning, 5);
    let taken = decide(&placed, &shim(ShimState::NoTask), NOW);
    let on = next_in_pass(&placed, &taken.change.unwrap(), NOW).unwrap();
    assert_eq!((on.status, on.pulling_since), (Status::Pulling, Some(NOW)));
    assert_eq!(words(&decide(&on, &runner(RunnerState::Ready), NOW)), "SubmitJob, started, again in 10 s");

    let pulling = job(Status::Pulling, 5);
    let started = decide(&pulling, &runner(RunnerState::Ready), NOW);
    assert_eq!(next_in_pass(&pulling, &started.change.unwrap(), NOW), None);
    let lost = decide(
        &placed,
        &RunningJobObservation { host: HostState::Gone, ..shim(ShimState::NotRequested) },
        NOW,
    );
    assert_eq!(next_in_pass(&placed, &lost.change.unwrap(), NOW), None);
}

#[test]
fn a_node_waits_at_its_gate_for_the_other_nodes_and_the_gate_opens_once() {
    let at = |all_at_gate, gate| RunningJobView {
        has_siblings: true,
        gate,
        siblings: Siblings { all_at_gate, ..Siblings::NONE },
        ..job(Status::Running, 60)
    };
    let seen = |at_gate| RunningJobObservation {
        host: HostState::Fine,
        shim: ShimState::Task(TaskState::Running { ports_known: true }),
        runner: RunnerState::Pulled(RunnerReport { is_at_gate: at_gate, ..RunnerReport::default() }),
        is_gpu_idle: false,
        has_event_stream: false,
    };
    let opens = |plan: &Plan| plan.actions.contains(&Action::OpenGate);
    let first = decide(&at(false, None), &seen(true), NOW);
    assert_eq!((first.gate, opens(&first)), (Some(Gate::Reached), false));
    assert!(first.waits_for.is_some() && first.due <= NOW + POLL_SIBLINGS);
    // Already stored: nothing new is written.
    assert_eq!(decide(&at(false, Some(Gate::Reached)), &seen(true), NOW).gate, None);
    for gate in [None, Some(Gate::Reached)] {
        let plan = decide(&at(true, gate), &seen(true), NOW);
        assert_eq!((plan.gate, opens(&plan)), (Some(Gate::Open), true));
    }
    for plan in
        [decide(&at(true, Some(Gate::Open)), &seen(true), NOW), decide(&at(true, None), &seen(false), NOW)]
    {
        assert_eq!((plan.gate, opens(&plan)), (None, false));
    }
    assert_eq!(Gate::from_stored(Some("open")), Some(Gate::Open));
}
