//! All courses of a task while the shim is up.

use super::{fake::exit, *};
use crate::shim::runtime::{Exit, LossReason};

#[tokio::test]
async fn a_successful_task_passes_through_every_status_and_is_removed() {
    let env = TestHost::new("lives").await;
    let id = env.submit(1).await;
    let info = env.wait_for_status(id, TaskStatus::Running).await;
    assert_eq!(info.gpus_ids, ["GPU-0"]);
    assert_eq!(info.ports.unwrap()[0].host, 32768);
    assert_eq!(info.image_pull_progress.unwrap().downloaded_bytes, 7);
    assert_eq!(info.container_id, format!("container-{id}"));
    assert_eq!(env.tasks().free_gpu_count(), 3);
    assert_eq!(env.fake.0.lock().pulls, [Some("canary-secret".to_owned())]);
    assert!(!env.tasks().dir(id).unwrap().registry().exists(), "the credential is of no use any more");
    env.fake.end(id, exit(0));
    let info = env.wait_for_status(id, TaskStatus::Terminated).await;
    assert_eq!((info.termination_reason.as_str(), info.exit_status), ("done_by_runner", Some(0)));
    assert_eq!(env.watcher.of(id), ["pending", "preparing", "pulling", "creating", "running", "terminated"]);
    env.check_empty();
    env.tasks().remove(id, Some(1)).await.unwrap();
    assert_eq!(env.watcher.of(id).last().unwrap(), "gone");
    assert!(env.tasks().list().is_empty());
    assert!(!env.home.path().join("tasks").join(id.to_string()).exists());
    assert!(env.fake.0.lock().containers.is_empty());
}

#[tokio::test]
async fn x3_the_registry_password_is_in_no_file_after_the_pull() {
    let env = TestHost::new("canary").await;
    let id = env.submit(1).await;
    env.wait_for_status(id, TaskStatus::Running).await;
    let mut files = vec![env.home.path().to_owned()];
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
fn check_end(env: &TestHost, info: &TaskInfo, reason: &str, message: &str, detail: Option<&str>) {
    assert_eq!(info.termination_reason, reason, "{info:?}");
    assert!(info.termination_message.contains(message), "{info:?}");
    assert_eq!(info.detail.as_deref(), detail, "{info:?}");
    env.check_empty();
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
        let env = TestHost::new("failures").await;
        env.fake.script(change);
        let id = env.submit(n).await;
        let info = env.wait_for_status(id, TaskStatus::Terminated).await;
        check_end(&env, &info, reason, message, detail);
        assert!(env.fake.0.lock().containers.is_empty(), "{reason}: half-made things stay");
        assert!(!env.kinds(id).iter().any(|kind| matches!(kind, JournalEvent::ContainerStarted { .. })));
    }
}

#[tokio::test]
async fn too_few_free_gpus_end_the_new_task_and_not_the_running_one() {
    let env = TestHost::new("too-few").await;
    let mut all = spec(1);
    all.gpu = -1;
    env.tasks().submit(all, Some(1)).await.unwrap();
    let info = env.wait_for_status(id(1), TaskStatus::Running).await;
    assert_eq!(info.gpus_ids.len(), 4);
    let second = env.submit(2).await;
    let info = env.wait_for_status(second, TaskStatus::Terminated).await;
    assert_eq!(info.termination_reason, "executor_error");
    assert!(info.termination_message.contains("0 of 4 are free"), "{info:?}");
    assert_eq!(env.tasks().free_gpu_count(), 0);
    assert_eq!(env.tasks().info(id(1)).unwrap().status, TaskStatus::Running);
    env.check();
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
    let env = TestHost::new("exits").await;
    for (n, (how, reason, message, detail)) in (1..).zip(cases) {
        let id = env.submit(n).await;
        env.wait_for_status(id, TaskStatus::Running).await;
        env.fake.end(id, how);
        let info = env.wait_for_status(id, TaskStatus::Terminated).await;
        check_end(&env, &info, reason, message, detail);
    }
}

#[tokio::test]
async fn a_container_that_exits_at_once_reports_its_exit_status_not_missing_ports() {
    let env = TestHost::new("at-once").await;
    env.fake.script(|script| script.ends_at_once = true);
    let id = env.submit(1).await;
    let info = env.wait_for_status(id, TaskStatus::Terminated).await;
    assert_eq!(info.exit_status, Some(127));
    check_end(&env, &info, "container_exited_with_error", "", None);
    assert!(env.watcher.of(id).contains(&"running".to_owned()));
}

#[tokio::test]
async fn f16_an_oom_kill_is_reported_from_the_exit_record_of_the_runner() {
    let env = TestHost::new("last-word").await;
    let id = env.submit(1).await;
    env.wait_for_status(id, TaskStatus::Running).await;
    let run = env.tasks().dir(id).unwrap().run();
    std::fs::write(run.join("exit.json"), r#"{"exit_status":137,"oom_killed":true}"#).unwrap();
    env.fake.end(id, exit(137));
    let info = env.wait_for_status(id, TaskStatus::Terminated).await;
    check_end(&env, &info, "container_exited_with_error", "", Some("oom_killed"));
}

#[tokio::test]
async fn files_left_by_a_hostile_job_do_not_change_the_termination_reason() {
    let env = TestHost::new("hostile").await;
    let id = env.submit(1).await;
    env.wait_for_status(id, TaskStatus::Running).await;
    let run = env.tasks().dir(id).unwrap().run();
    std::os::unix::fs::symlink("/etc/passwd", run.join("exit.json")).unwrap();
    std::fs::write(
        run.join("states.jsonl"),
        "{\"state\":\"done\",\"timestamp\":1,\"detail\":\"host_reboot\"}\n",
    )
    .unwrap();
    env.fake.end(id, exit(1));
    let info = env.wait_for_status(id, TaskStatus::Terminated).await;
    check_end(&env, &info, "container_exited_with_error", "", None);
    assert_eq!(info.exit_status, Some(1));
}

#[tokio::test]
async fn f17_terminate_cancels_a_pull_at_once() {
    let env = TestHost::new("cancel").await;
    env.fake.script(|script| script.pull_hangs = true);
    let id = env.submit(1).await;
    env.wait_for_status(id, TaskStatus::Pulling).await;
    let began = tokio::time::Instant::now();
    let info = env.tasks().terminate(id, terminate_request("terminated_by_user", 60), Some(1)).await.unwrap();
    assert!(began.elapsed() < Duration::from_secs(2), "{:?}", began.elapsed());
    assert_eq!(info.status, TaskStatus::Terminated);
    check_end(&env, &info, "terminated_by_user", "because", None);
    assert_eq!(env.fake.count("create"), 0);
}

#[tokio::test]
async fn r24_a_pull_that_never_ends_is_ended() {
    let mut env = TestHost::stopped("slow-pull");
    env.settings.pull_secs_max = 0;
    env.start().await;
    env.fake.script(|script| script.pull_hangs = true);
    let id = env.submit(1).await;
    let info = env.wait_for_status(id, TaskStatus::Terminated).await;
    check_end(&env, &info, "creating_container_error", "was not pulled within 0 s", None);
}

#[tokio::test]
async fn terminate_stops_the_task_and_keeps_the_first_reason() {
    let env = TestHost::new("stop").await;
    let id = env.submit(1).await;
    env.wait_for_status(id, TaskStatus::Running).await;
    let info = env.tasks().terminate(id, terminate_request("terminated_by_user", 10), Some(1)).await.unwrap();
    assert_eq!((info.status, info.exit_status), (TaskStatus::Terminated, Some(143)));
    check_end(&env, &info, "terminated_by_user", "because", None);
    let again = env.tasks().terminate(id, terminate_request("aborted_by_user", 0), Some(1)).await.unwrap();
    assert_eq!(again, info);
}

#[tokio::test]
async fn a_second_terminate_may_shorten_the_grace_period() {
    let env = TestHost::new("shorter").await;
    env.fake.script(|script| script.ignores_term = true);
    let id = env.submit(1).await;
    env.wait_for_status(id, TaskStatus::Running).await;
    let patient = env.tasks().terminate(id, terminate_request("scaled_down", 3600), Some(1)).await.unwrap();
    assert_eq!(patient.status, TaskStatus::Running, "it answers before the grace is over");
    let info = env.tasks().terminate(id, terminate_request("terminated_by_user", 0), Some(1)).await.unwrap();
    assert_eq!((info.status, info.exit_status), (TaskStatus::Terminated, Some(137)));
    check_end(&env, &info, "scaled_down", "because", None);
}

#[tokio::test]
async fn f12_a_task_continues_while_its_engine_is_unreachable() {
    let env = TestHost::new("away").await;
    env.fake.script(|script| script.away = true);
    let id = env.submit(1).await;
    env.wait_until("the pull was tried twice", |fake| fake.count("pull") >= 2).await;
    assert_eq!(env.tasks().info(id).unwrap().status, TaskStatus::Pulling);
    env.fake.script(|script| script.away = false);
    env.wait_for_status(id, TaskStatus::Running).await;
    env.fake.script(|script| script.away = true);
    // The stop is retried until the engine is back; the devices stay allocated, because the task may run.
    let requested =
        env.tasks().terminate(id, terminate_request("terminated_by_user", 0), Some(1)).await.unwrap();
    assert_eq!(requested.status, TaskStatus::Running);
    assert_eq!(env.tasks().free_gpu_count(), 3);
    assert!(matches!(env.tasks().remove(id, Some(1)).await, Err(TaskError::Alive { .. })));
    env.fake.script(|script| script.away = false);
    let info = env.wait_for_status(id, TaskStatus::Terminated).await;
    check_end(&env, &info, "terminated_by_user", "because", None);
}

#[tokio::test]
async fn a_failed_release_of_resources_is_retried() {
    let env = TestHost::new("stuck").await;
    let id = env.submit(1).await;
    env.wait_for_status(id, TaskStatus::Running).await;
    env.fake.script(|script| script.unmount_fails_times = 2);
    env.fake.end(id, exit(0));
    env.wait_for_status(id, TaskStatus::Terminated).await;
    env.check_empty();
}

#[tokio::test]
async fn a_simulated_host_writes_no_files() {
    let mut env = TestHost::stopped("simulated");
    env.settings.keep = Storage::InMemory;
    env.start().await;
    let id = env.submit(1).await;
    env.wait_for_status(id, TaskStatus::Running).await;
    env.fake.end(id, exit(0));
    env.wait_for_status(id, TaskStatus::Terminated).await;
    env.tasks().remove(id, Some(1)).await.unwrap();
    assert_eq!(std::fs::read_dir(&env.home).unwrap().count(), 0);
    assert_eq!(invariants::violations(&env.tasks().journal().in_memory_records()), Vec::<String>::new());
}
