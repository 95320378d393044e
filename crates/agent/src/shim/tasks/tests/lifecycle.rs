//! All courses of a task while the shim is up.

use super::{fake::exit, *};
use crate::shim::runtime::{Exit, LossReason};

#[tokio::test]
async fn a_successful_task_passes_through_every_status_and_is_removed() {
    let stage = TestHost::new("lives").await;
    let id = stage.submit(1).await;
    let info = stage.wait_for_status(id, TaskStatus::Running).await;
    assert_eq!(info.gpus_ids, ["GPU-0"]);
    assert_eq!(info.ports.unwrap()[0].host, 32768);
    assert_eq!(info.image_pull_progress.unwrap().downloaded_bytes, 7);
    assert_eq!(info.container_id, format!("container-{id}"));
    assert_eq!(stage.tasks().free_gpu_count(), 3);
    assert_eq!(stage.fake.0.lock().pulls, [Some("canary-secret".to_owned())]);
    assert!(!stage.tasks().dir(id).unwrap().registry().exists(), "the credential is of no use any more");
    stage.fake.end(id, exit(0));
    let info = stage.wait_for_status(id, TaskStatus::Terminated).await;
    assert_eq!((info.termination_reason.as_str(), info.exit_status), ("done_by_runner", Some(0)));
    assert_eq!(
        stage.watcher.of(id),
        ["pending", "preparing", "pulling", "creating", "running", "terminated"]
    );
    stage.check_empty();
    stage.tasks().remove(id, Some(1)).await.unwrap();
    assert_eq!(stage.watcher.of(id).last().unwrap(), "gone");
    assert!(stage.tasks().list().is_empty());
    assert!(!stage.home.path().join("tasks").join(id.to_string()).exists());
    assert!(stage.fake.0.lock().containers.is_empty());
}

#[tokio::test]
async fn x3_the_registry_password_is_in_no_file_after_the_pull() {
    let stage = TestHost::new("canary").await;
    let id = stage.submit(1).await;
    stage.wait_for_status(id, TaskStatus::Running).await;
    let mut files = vec![stage.home.path().to_owned()];
    while let Some(path) = files.pop() {
        if path.is_dir() {
            files.extend(std::fs::read_dir(&path).unwrap().map(|entry| entry.unwrap().path()));
        } else if !path.ends_with("journal.reserve") {
            let bytes = std::fs::read(&path).unwrap();
            let found = bytes.windows(13).any(|window| window == b"canary-secret");
            assert!(!found, "{}", path.display());
        }
    }
}

#[track_caller]
fn check_end(stage: &TestHost, info: &TaskInfo, reason: &str, message: &str, detail: Option<&str>) {
    assert_eq!(info.termination_reason, reason, "{info:?}");
    assert!(info.termination_message.contains(message), "{info:?}");
    assert_eq!(info.detail.as_deref(), detail, "{info:?}");
    stage.check_empty();
}

#[tokio::test]
async fn each_setup_failure_has_its_own_reason_and_releases_everything() {
    type Change = fn(&mut fake::FaultScript);
    let cases: [(Change, &str, &str, Option<&str>); 6] = [
        (|script| script.refused = true, "executor_error", "mount /etc: policy", None),
        (|script| script.keys_fail = true, "executor_error", "add keys", Some("no_disk")),
        (|script| script.mounts_fail = true, "executor_error", "mount", Some("no_disk")),
        (|script| script.pull_fails = true, "creating_container_error", "no such image", None),
        (|script| script.create_fails = true, "creating_container_error", "create: no", None),
        (|script| script.start_fails = true, "creating_container_error", "no space", Some("no_disk")),
    ];
    for (n, (change, reason, message, detail)) in (1..).zip(cases) {
        let stage = TestHost::new("failures").await;
        stage.fake.script(change);
        let id = stage.submit(n).await;
        let info = stage.wait_for_status(id, TaskStatus::Terminated).await;
        check_end(&stage, &info, reason, message, detail);
        assert!(stage.fake.0.lock().containers.is_empty(), "{reason}: half-made things stay");
        assert!(!stage.kinds(id).iter().any(|kind| matches!(kind, JournalEvent::ContainerStarted { .. })));
    }
}

#[tokio::test]
async fn too_few_free_gpus_end_the_new_task_and_not_the_running_one() {
    let stage = TestHost::new("too-few").await;
    let mut all = spec(1);
    all.gpu = -1;
    stage.tasks().submit(all, Some(1)).await.unwrap();
    let info = stage.wait_for_status(id(1), TaskStatus::Running).await;
    assert_eq!(info.gpus_ids.len(), 4);
    let second = stage.submit(2).await;
    let info = stage.wait_for_status(second, TaskStatus::Terminated).await;
    assert_eq!(info.termination_reason, "executor_error");
    assert!(info.termination_message.contains("0 of 4 are free"), "{info:?}");
    assert_eq!(stage.tasks().free_gpu_count(), 0);
    assert_eq!(stage.tasks().info(id(1)).unwrap().status, TaskStatus::Running);
    stage.check();
}

#[tokio::test]
async fn a_container_exit_maps_to_a_termination_reason() {
    let tail = (1..=7).map(|n| format!("line {n}")).collect();
    let cases = [
        (Exit { tail, ..exit(3) }, "container_exited_with_error", "line 3\nline 4", None),
        (Exit { oom_killed: true, ..exit(137) }, "container_exited_with_error", "", Some("oom_killed")),
        (
            Exit { lost: Some(LossReason::EngineRestarted), ..exit(137) },
            "container_exited_with_error",
            "",
            Some("host_runtime_restart"),
        ),
        (
            Exit { lost: Some(LossReason::HostRebooted), ..exit(255) },
            "instance_unreachable",
            "",
            Some("host_reboot"),
        ),
        (
            Exit { lost: Some(LossReason::Vanished), code: None, ..exit(0) },
            "executor_error",
            "vanished",
            None,
        ),
        (Exit { code: None, ..exit(0) }, "executor_error", "vanished", None),
    ];
    let stage = TestHost::new("exits").await;
    for (n, (how, reason, message, detail)) in (1..).zip(cases) {
        let id = stage.submit(n).await;
        stage.wait_for_status(id, TaskStatus::Running).await;
        stage.fake.end(id, how);
        let info = stage.wait_for_status(id, TaskStatus::Terminated).await;
        check_end(&stage, &info, reason, message, detail);
    }
}

#[tokio::test]
async fn a_container_that_exits_at_once_reports_its_exit_status_not_missing_ports() {
    let stage = TestHost::new("at-once").await;
    stage.fake.script(|script| script.ends_at_once = true);
    let id = stage.submit(1).await;
    let info = stage.wait_for_status(id, TaskStatus::Terminated).await;
    assert_eq!(info.exit_status, Some(127));
    check_end(&stage, &info, "container_exited_with_error", "", None);
    assert!(stage.watcher.of(id).contains(&"running".to_owned()));
}

#[tokio::test]
async fn f16_an_oom_kill_is_reported_from_the_exit_record_of_the_runner() {
    let stage = TestHost::new("last-word").await;
    let id = stage.submit(1).await;
    stage.wait_for_status(id, TaskStatus::Running).await;
    let run = stage.tasks().dir(id).unwrap().run();
    std::fs::write(run.join("exit.json"), r#"{"exit_status":137,"oom_killed":true}"#).unwrap();
    stage.fake.end(id, exit(137));
    let info = stage.wait_for_status(id, TaskStatus::Terminated).await;
    check_end(&stage, &info, "container_exited_with_error", "", Some("oom_killed"));
}

#[tokio::test]
async fn files_left_by_a_hostile_job_do_not_change_the_termination_reason() {
    let stage = TestHost::new("hostile").await;
    let id = stage.submit(1).await;
    stage.wait_for_status(id, TaskStatus::Running).await;
    let run = stage.tasks().dir(id).unwrap().run();
    std::os::unix::fs::symlink("/etc/passwd", run.join("exit.json")).unwrap();
    std::fs::write(
        run.join("states.jsonl"),
        "{\"state\":\"done\",\"timestamp\":1,\"detail\":\"host_reboot\"}\n",
    )
    .unwrap();
    stage.fake.end(id, exit(1));
    let info = stage.wait_for_status(id, TaskStatus::Terminated).await;
    check_end(&stage, &info, "container_exited_with_error", "", None);
    assert_eq!(info.exit_status, Some(1));
}

#[tokio::test]
async fn f17_terminate_cancels_a_pull_at_once() {
    let stage = TestHost::new("cancel").await;
    stage.fake.script(|script| script.pull_hangs = true);
    let id = stage.submit(1).await;
    stage.wait_for_status(id, TaskStatus::Pulling).await;
    let began = tokio::time::Instant::now();
    let info =
        stage.tasks().terminate(id, terminate_request("terminated_by_user", 60), Some(1)).await.unwrap();
    assert!(began.elapsed() < Duration::from_secs(2), "{:?}", began.elapsed());
    assert_eq!(info.status, TaskStatus::Terminated);
    check_end(&stage, &info, "terminated_by_user", "because", None);
    assert_eq!(stage.fake.count("create"), 0);
}

#[tokio::test]
async fn r24_a_pull_that_never_ends_is_ended() {
    let mut stage = TestHost::stopped("slow-pull");
    stage.settings.pull_secs_max = 0;
    stage.start().await;
    stage.fake.script(|script| script.pull_hangs = true);
    let id = stage.submit(1).await;
    let info = stage.wait_for_status(id, TaskStatus::Terminated).await;
    check_end(&stage, &info, "creating_container_error", "was not pulled within 0 s", None);
}

#[tokio::test]
async fn terminate_stops_the_task_and_keeps_the_first_reason() {
    let stage = TestHost::new("stop").await;
    let id = stage.submit(1).await;
    stage.wait_for_status(id, TaskStatus::Running).await;
    let info =
        stage.tasks().terminate(id, terminate_request("terminated_by_user", 10), Some(1)).await.unwrap();
    assert_eq!((info.status, info.exit_status), (TaskStatus::Terminated, Some(143)));
    check_end(&stage, &info, "terminated_by_user", "because", None);
    let again = stage.tasks().terminate(id, terminate_request("aborted_by_user", 0), Some(1)).await.unwrap();
    assert_eq!(again, info);
}

#[tokio::test]
async fn a_second_terminate_may_shorten_the_grace_period() {
    let stage = TestHost::new("shorter").await;
    stage.fake.script(|script| script.ignores_term = true);
    let id = stage.submit(1).await;
    stage.wait_for_status(id, TaskStatus::Running).await;
    let patient = stage.tasks().terminate(id, terminate_request("scaled_down", 3600), Some(1)).await.unwrap();
    assert_eq!(patient.status, TaskStatus::Running, "it answers before the grace is over");
    let info =
        stage.tasks().terminate(id, terminate_request("terminated_by_user", 0), Some(1)).await.unwrap();
    assert_eq!((info.status, info.exit_status), (TaskStatus::Terminated, Some(137)));
    check_end(&stage, &info, "scaled_down", "because", None);
}

#[tokio::test]
async fn f12_a_task_continues_while_its_engine_is_unreachable() {
    let stage = TestHost::new("away").await;
    stage.fake.script(|script| script.away = true);
    let id = stage.submit(1).await;
    stage.wait_until("the pull was tried twice", |fake| fake.count("pull") >= 2).await;
    assert_eq!(stage.tasks().info(id).unwrap().status, TaskStatus::Pulling);
    stage.fake.script(|script| script.away = false);
    stage.wait_for_status(id, TaskStatus::Running).await;
    stage.fake.script(|script| script.away = true);
    // The stop is retried until the engine is back; the devices stay allocated, because the task may run.
    let asked =
        stage.tasks().terminate(id, terminate_request("terminated_by_user", 0), Some(1)).await.unwrap();
    assert_eq!(asked.status, TaskStatus::Running);
    assert_eq!(stage.tasks().free_gpu_count(), 3);
    assert!(matches!(stage.tasks().remove(id, Some(1)).await, Err(TaskError::Alive { .. })));
    stage.fake.script(|script| script.away = false);
    let info = stage.wait_for_status(id, TaskStatus::Terminated).await;
    check_end(&stage, &info, "terminated_by_user", "because", None);
}

#[tokio::test]
async fn a_failed_release_of_resources_is_retried() {
    let stage = TestHost::new("stuck").await;
    let id = stage.submit(1).await;
    stage.wait_for_status(id, TaskStatus::Running).await;
    stage.fake.script(|script| script.unmount_fails_times = 2);
    stage.fake.end(id, exit(0));
    stage.wait_for_status(id, TaskStatus::Terminated).await;
    stage.check_empty();
}

#[tokio::test]
async fn a_simulated_host_writes_no_files() {
    let mut stage = TestHost::stopped("hollow");
    stage.settings.keep = Storage::InMemory;
    stage.start().await;
    let id = stage.submit(1).await;
    stage.wait_for_status(id, TaskStatus::Running).await;
    stage.fake.end(id, exit(0));
    stage.wait_for_status(id, TaskStatus::Terminated).await;
    stage.tasks().remove(id, Some(1)).await.unwrap();
    assert_eq!(std::fs::read_dir(&stage.home).unwrap().count(), 0);
    assert_eq!(invariants::violations(&stage.tasks().journal().in_memory_records()), Vec::<String>::new());
}
