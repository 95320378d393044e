//! The shim is killed at every point of a lifecycle, and restarted.

use super::{fake::exit, *};
use crate::shim::runtime::FoundState;

fn pause_points() -> impl Iterator<Item = (u128, PauseAt)> {
    let statuses = [Status::Pending, Status::Preparing, Status::Pulling, Status::Creating, Status::Running];
    (1..).zip(statuses.map(PauseAt::Status).into_iter().chain([PauseAt::Terminating]))
}

#[tokio::test]
async fn f14_a_task_continues_and_ends_after_the_shim_is_killed_in_any_state() {
    for (n, pause_at) in pause_points() {
        let mut env = TestHost::stopped("f14");
        env.settings.pause_at = Some(pause_at);
        env.start().await;
        let id = env.submit(n).await;
        match pause_at {
            PauseAt::Status(status) => {
                env.wait_for_status(id, task::to_wire_status(status)).await;
                env.restart().await;
                let info = env.wait_for_status(id, TaskStatus::Running).await;
                assert_eq!(info.ports.unwrap()[0].host, 32768, "{pause_at:?}");
                assert_eq!(info.gpus_ids, ["GPU-0"], "{pause_at:?}");
                assert_eq!(env.tasks().free_gpu_count(), 3, "{pause_at:?}");
                env.fake.end(id, exit(5));
            }
            PauseAt::Terminating => {
                env.wait_for_status(id, TaskStatus::Running).await;
                let requested = env
                    .tasks()
                    .terminate(id, terminate_request("terminated_by_user", 0), Some(1))
                    .await
                    .unwrap();
                assert_eq!(requested.status, TaskStatus::Running);
                env.restart().await;
            }
        }
        let info = env.wait_for_status(id, TaskStatus::Terminated).await;
        let reason = match pause_at {
            PauseAt::Status(_) => ("container_exited_with_error", Some(5)),
            PauseAt::Terminating => ("terminated_by_user", Some(137)),
        };
        assert_eq!((info.termination_reason.as_str(), info.exit_status), reason, "{pause_at:?}");
        env.check_empty();
        env.tasks().remove(id, Some(1)).await.unwrap();
        env.restart().await;
        assert!(env.tasks().list().is_empty(), "{pause_at:?}");
    }
}

#[tokio::test]
async fn f14_a_terminate_call_before_the_shim_is_killed_prevents_a_later_start() {
    for (n, pause_at) in pause_points().take(4) {
        let mut env = TestHost::stopped("f14-asked");
        env.settings.pause_at = Some(pause_at);
        env.start().await;
        let id = env.submit(n).await;
        let PauseAt::Status(status) = pause_at else { continue };
        env.wait_for_status(id, task::to_wire_status(status)).await;
        let info =
            env.tasks().terminate(id, terminate_request("terminated_by_user", 0), Some(1)).await.unwrap();
        assert_eq!(info.status, task::to_wire_status(status));
        env.restart().await;
        let info = env.wait_for_status(id, TaskStatus::Terminated).await;
        assert_eq!(info.termination_reason, "terminated_by_user");
        assert!(env.fake.0.lock().starts.is_empty(), "{pause_at:?}");
        env.check_empty();
    }
}

#[tokio::test]
async fn f14_a_container_exit_while_the_shim_is_down_is_reported() {
    let mut env = TestHost::new("while-down").await;
    let id = env.submit(1).await;
    env.wait_for_status(id, TaskStatus::Running).await;
    env.kill().await;
    env.fake.end(id, exit(9));
    env.start().await;
    let info = env.wait_for_status(id, TaskStatus::Terminated).await;
    assert_eq!(
        (info.termination_reason.as_str(), info.exit_status),
        ("container_exited_with_error", Some(9))
    );
    env.check_empty();
}

#[tokio::test]
async fn f15_a_task_lost_in_a_reboot_fails_with_detail_host_reboot_and_never_restarts() {
    for (boot, reason, detail) in
        [("boot-2", "instance_unreachable", Some("host_reboot")), ("boot-1", "executor_error", None)]
    {
        let mut env = TestHost::new("reboot").await;
        let id = env.submit(1).await;
        env.wait_for_status(id, TaskStatus::Running).await;
        env.kill().await;
        env.fake.remove_container(id);
        env.settings.boot = boot.to_owned();
        env.start().await;
        let info = env.wait_for_status(id, TaskStatus::Terminated).await;
        assert_eq!((info.termination_reason.as_str(), info.detail.as_deref()), (reason, detail));
        env.check_empty();
    }
}

#[tokio::test]
async fn f15_a_container_found_ended_after_a_reboot_is_reported_as_lost_to_the_reboot() {
    let mut env = TestHost::new("remembered").await;
    let id = env.submit(1).await;
    env.wait_for_status(id, TaskStatus::Running).await;
    env.kill().await;
    env.fake.end(id, exit(255));
    env.settings.boot = "boot-2".to_owned();
    env.start().await;
    let info = env.wait_for_status(id, TaskStatus::Terminated).await;
    assert_eq!(info.detail.as_deref(), Some("host_reboot"));
    env.check_empty();
}

/// The decision to start was recorded, the start itself was not, and there is no container: it may have run.
#[tokio::test]
async fn r7_an_unconfirmed_container_start_is_not_repeated() {
    let mut env = TestHost::new("unseen").await;
    let id = env.submit(1).await;
    env.wait_for_status(id, TaskStatus::Running).await;
    env.kill().await;
    let path = env.home.path().join("journal");
    let records = env.records();
    let (journal, _) = Journal::open(&path).unwrap();
    let kept: Vec<_> = records
        .into_iter()
        .take_while(|record| !matches!(record.kind, JournalEvent::ContainerStarted { .. }))
        .collect();
    journal.compact(move |_| kept).await.unwrap();
    journal.close().await;
    env.fake.remove_container(id);
    env.start().await;
    let info = env.wait_for_status(id, TaskStatus::Terminated).await;
    assert_eq!(info.termination_reason, "executor_error");
    env.check_empty();
}

#[tokio::test]
async fn g2_after_a_restart_only_running_tasks_hold_gpus() {
    let mut env = TestHost::new("g2").await;
    for n in 1..=4 {
        let id = env.submit(n).await;
        env.wait_for_status(id, TaskStatus::Running).await;
    }
    env.kill().await;
    env.fake.end(id(1), exit(0));
    env.fake.remove_container(id(2));
    env.start().await;
    env.wait_for_status(id(1), TaskStatus::Terminated).await;
    env.wait_for_status(id(2), TaskStatus::Terminated).await;
    assert_eq!(env.tasks().free_gpu_count(), 2);
    for n in 3..=4 {
        assert_eq!(env.tasks().info(id(n)).unwrap().gpus_ids.len(), 1);
        assert_eq!(env.fake.0.lock().containers[&id(n)].gpus, env.tasks().info(id(n)).unwrap().gpus_ids);
    }
    env.check();
}

#[tokio::test]
async fn g6_resources_of_unknown_tasks_are_removed_at_startup() {
    let mut env = TestHost::new("strangers").await;
    let known = env.submit(1).await;
    let other = env.submit(2).await;
    env.wait_for_status(known, TaskStatus::Running).await;
    env.wait_for_status(other, TaskStatus::Running).await;
    env.kill().await;
    // Its records and its files are lost; its container, keys and mounts are not.
    let (journal, _) = Journal::open(&env.home.path().join("journal")).unwrap();
    journal
        .compact(move |records| records.into_iter().filter(|r| r.submission != other).collect())
        .await
        .unwrap();
    journal.close().await;
    std::fs::remove_dir_all(env.home.path().join("tasks").join(other.to_string())).unwrap();
    std::fs::create_dir(env.home.path().join("tasks").join(id(3).to_string())).unwrap();
    env.start().await;
    env.wait_until("the stranger is gone", |fake| !fake.0.lock().containers.contains_key(&other)).await;
    env.wait_for_status(known, TaskStatus::Running).await;
    assert_eq!(env.fake.0.lock().keys, [known].into());
    assert_eq!(env.fake.0.lock().mounts, [known].into());
    assert_eq!(std::fs::read_dir(env.home.path().join("tasks")).unwrap().count(), 1);
    env.check();
}

#[tokio::test]
async fn g6_an_interrupted_removal_is_completed_after_a_restart() {
    let mut env = TestHost::new("burial").await;
    let id = env.submit(1).await;
    env.wait_for_status(id, TaskStatus::Running).await;
    env.tasks().terminate(id, terminate_request("x", 0), Some(1)).await.unwrap();
    env.fake.script(|script| script.away = true);
    assert!(matches!(env.tasks().remove(id, Some(1)).await, Err(TaskError::RemovalPending { .. })));
    assert!(matches!(env.tasks().submit(spec(1), Some(2)).await, Err(TaskError::Gone { .. })));
    env.kill().await;
    env.fake.script(|script| script.away = false);
    env.start().await;
    assert!(env.tasks().list().is_empty());
    env.wait_until("its container is gone", |fake| fake.0.lock().containers.is_empty()).await;
    let dir = env.home.path().join("tasks").join(id.to_string());
    env.wait_until("its files are gone", |_| !dir.exists()).await;
    env.tasks().remove(id, Some(1)).await.unwrap();
    assert!(matches!(env.tasks().submit(spec(1), Some(2)).await, Err(TaskError::Gone { .. })));
    env.check_empty();
}

#[test]
fn a_compacted_journal_keeps_live_tasks_and_recent_tombstones() {
    let day = 24 * 3600 * 1_000_000;
    let record = |seq, task, at, kind| Record { seq, at, submission: id(task), epoch: 1, kind };
    let records = vec![
        record(1, 1, 0, JournalEvent::Submitted),
        record(2, 2, 0, JournalEvent::Submitted),
        record(3, 3, 0, JournalEvent::Submitted),
        record(4, 3, 1, JournalEvent::Removed),
        record(5, 2, 10 * day, JournalEvent::Removed),
        record(6, 4, 10 * day, JournalEvent::RefusedEpoch { seen: 2 }),
        record(7, 1, 10 * day, JournalEvent::KeyAdded),
        record(8, 5, 10 * day, JournalEvent::Submitted),
        record(9, 5, 10 * day, JournalEvent::Withdrawn),
    ];
    let kept = journal_replay::retained_records(records, 31 * day);
    // The tombstone of 3 is too old, 5 never existed.
    assert_eq!(kept.iter().map(|record| record.seq).collect::<Vec<_>>(), [1, 5, 6, 7]);
}

#[tokio::test]
async fn f35_without_its_journal_the_shim_finds_running_tasks_and_starts_nothing() {
    let mut env = TestHost::stopped("no-journal");
    env.start().await;
    let running = env.submit(1).await;
    env.wait_for_status(running, TaskStatus::Running).await;
    env.kill().await;
    env.settings.pause_at = Some(PauseAt::Status(Status::Pulling));
    env.start().await;
    let waiting = env.submit(2).await;
    env.wait_for_status(waiting, TaskStatus::Pulling).await;
    env.kill().await;
    std::fs::remove_file(env.home.path().join("journal")).unwrap();
    env.settings.pause_at = None;
    env.start().await;
    let info = env.wait_for_status(waiting, TaskStatus::Terminated).await;
    assert!(info.termination_message.contains("journal was damaged"), "{info:?}");
    let info = env.wait_for_status(running, TaskStatus::Running).await;
    assert_eq!(info.gpus_ids, ["GPU-0"]);
    assert_eq!(env.tasks().free_gpu_count(), 3, "what it holds is still its own");
    env.fake.end(running, exit(4));
    assert_eq!(env.wait_for_status(running, TaskStatus::Terminated).await.exit_status, Some(4));
    env.check_empty();
}

#[tokio::test]
async fn f35_a_flipped_journal_byte_never_starts_a_task_twice_or_revives_a_removed_one() {
    let mut env = TestHost::new("flips").await;
    let running = env.submit(1).await;
    env.wait_for_status(running, TaskStatus::Running).await;
    let ended = env.submit(2).await;
    env.wait_for_status(ended, TaskStatus::Running).await;
    env.tasks().terminate(ended, terminate_request("x", 0), Some(1)).await.unwrap();
    env.tasks().remove(ended, Some(1)).await.unwrap();
    env.kill().await;
    let good = std::fs::read(env.home.path().join("journal")).unwrap();
    // `torture` covers every byte; here one byte of each range.
    for at in (0..good.len()).step_by(97) {
        let mut damaged = good.clone();
        damaged[at] ^= 0x55;
        std::fs::write(env.home.path().join("journal"), &damaged).unwrap();
        env.start().await;
        env.wait_for_status(running, TaskStatus::Running).await;
        let tasks = Arc::clone(env.tasks());
        let known =
            move |_: &FakeHost| tasks.info(running).unwrap().container_id == format!("container-{running}");
        env.wait_until("its container is found", known).await;
        assert!(env.tasks().submit(spec(2), Some(2)).await.is_err(), "byte {at}");
        assert_eq!(env.fake.0.lock().starts[&running], 1, "byte {at}");
        env.kill().await;
    }
}

#[tokio::test]
async fn the_shim_waits_for_a_runtime_that_is_unreachable_at_startup() {
    let mut env = TestHost::new("away-first").await;
    let id = env.submit(1).await;
    env.wait_for_status(id, TaskStatus::Running).await;
    env.kill().await;
    env.fake.script(|script| script.away = true);
    env.start().await;
    assert_eq!(env.tasks().info(id).unwrap().status, TaskStatus::Running);
    let requested =
        env.tasks().terminate(id, terminate_request("terminated_by_user", 0), Some(2)).await.unwrap();
    assert_eq!(requested.status, TaskStatus::Running);
    env.fake.script(|script| script.away = false);
    env.wait_for_status(id, TaskStatus::Terminated).await;
    env.check_empty();
}

#[test]
fn g2_every_finding_has_its_recovery_action() {
    use journal_replay::{RecoveryAction, recovery_action};
    let state = |status, starting: bool, started: bool| {
        let mut state = TaskState::new(1);
        state.status = status;
        state.container.starting = starting.then(|| "boot".to_owned());
        state.container.started = started;
        state
    };
    let lost = |verdict: RecoveryAction| match verdict {
        RecoveryAction::Finish(end) => {
            format!("lost {} {}", end.reason, end.detail.map_or("", |detail| detail.as_str()))
        }
        RecoveryAction::Watch(found) => format!("watch({found:?})").to_lowercase(),
        RecoveryAction::Keep => "keep".to_owned(),
        RecoveryAction::RemoveOrphan => "endagain".to_owned(),
        RecoveryAction::Resume => "resume".to_owned(),
    };
    let rows = [
        // status, starting, started, found, same boot, doubtful
        ((Status::Pulling, false, false, None, true, false), "resume"),
        ((Status::Pulling, false, false, None, false, false), "resume"),
        ((Status::Pulling, false, false, None, true, true), "lost executor_error "),
        ((Status::Creating, false, false, Some(FoundState::Created), true, false), "resume"),
        ((Status::Creating, true, false, Some(FoundState::Created), true, false), "resume"),
        ((Status::Creating, true, false, None, true, false), "lost executor_error "),
        ((Status::Creating, true, false, None, false, false), "lost instance_unreachable host_reboot"),
        ((Status::Creating, true, false, Some(FoundState::Running), true, false), "watch(running)"),
        ((Status::Creating, true, false, Some(FoundState::Ended), true, false), "watch(ended)"),
        ((Status::Running, true, true, Some(FoundState::Running), true, true), "watch(running)"),
        ((Status::Running, true, true, Some(FoundState::Ended), false, false), "watch(ended)"),
        ((Status::Running, true, true, Some(FoundState::Created), true, false), "lost executor_error "),
        ((Status::Running, true, true, None, false, false), "lost instance_unreachable host_reboot"),
        ((Status::Terminated, true, true, Some(FoundState::Running), true, false), "endagain"),
        ((Status::Terminated, true, true, Some(FoundState::Ended), true, false), "keep"),
        ((Status::Terminated, true, true, None, false, true), "keep"),
    ];
    for ((status, starting, started, found, same_boot, doubtful), expected) in rows {
        let message = lost(recovery_action(&state(status, starting, started), found, same_boot, doubtful));
        assert_eq!(message, expected, "{status} {starting} {started} {found:?} {same_boot} {doubtful}");
    }
}
