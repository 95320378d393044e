//! Engines that are killed, stopped, restarted and frozen under a task. Each test has a private engine.

use std::{
    fs,
    time::{Duration, Instant},
};

use windlass_agent::shim::{
    docker::DockerRuntime,
    runtime::{FoundState, LossReason, Runtime, RuntimeError},
};
use windlass_testkit::wait::TIMEOUT;

use super::{DockerHost, is_unavailable, read, settings, wait_written};
use crate::support::{
    engine::{EngineKind, PrivateEngine},
    images::Tar,
    registry::Registry,
};

const WAIT_FOR_GO: &str =
    "cd /windlass/run; touch up; while ! [ -e go ]; do sleep 0.05; done; echo done > out; exit 4";

#[tokio::test]
async fn f12_a_killed_docker_engine_ends_the_task_and_the_loss_is_reported() {
    let mut engine = PrivateEngine::start(EngineKind::Plain).await;
    let host = DockerHost::at(&engine.socket(), |_| {}).await;
    let task = host.task(WAIT_FOR_GO).await;
    let handle = host.start(&task).await;
    wait_written(&task, "up").await;
    let mut waiting = host.docker.wait(&task, &handle);
    assert!(tokio::time::timeout(Duration::from_millis(300), &mut waiting).await.is_err());
    engine.kill_dockerd();
    let (exit, ()) = tokio::join!(waiting, engine.start_dockerd());
    let exit = exit.unwrap();
    assert_eq!((exit.code, exit.lost), (Some(137), Some(LossReason::EngineRestarted)));
    // A shim that was down at the time derives it from the times alone.
    let late = DockerRuntime::connect(settings(&engine.socket(), host.scratch.path(), |_| {})).await.unwrap();
    let reported = late.wait(&task, &handle).await.unwrap();
    assert_eq!(reported.lost, Some(LossReason::EngineRestarted));
    // The next task ends by itself, although right after the engine's start.
    let next = host.task("exit 137").await;
    let exit = host.run(&next).await;
    assert_eq!((exit.code, exit.lost), (Some(137), None));
}

#[tokio::test]
async fn f12_an_orderly_docker_shutdown_ends_the_task_and_the_loss_is_reported() {
    let mut engine = PrivateEngine::start(EngineKind::Plain).await;
    let host = DockerHost::at(&engine.socket(), |_| {}).await;
    let task = host.task("trap 'exit 9' TERM; touch /windlass/run/up; while :; do sleep 0.05; done").await;
    let handle = host.start(&task).await;
    wait_written(&task, "up").await;
    let waiting = host.docker.wait(&task, &handle);
    let restart = async {
        engine.stop_dockerd().await;
        engine.start_dockerd().await;
    };
    let (exit, ()) = tokio::join!(waiting, restart);
    let exit = exit.unwrap();
    assert_eq!((exit.code, exit.lost), (Some(9), Some(LossReason::EngineRestarted)));
}

#[tokio::test]
async fn f12_tasks_survive_a_docker_restart_with_live_restore() {
    let mut engine = PrivateEngine::start(EngineKind::LiveRestore).await;
    let host = DockerHost::at(&engine.socket(), |_| {}).await;
    let (task, second) = (host.task(WAIT_FOR_GO).await, host.task(WAIT_FOR_GO).await);
    let (handle, other) = (host.start(&task).await, host.start(&second).await);
    wait_written(&task, "up").await;
    wait_written(&second, "up").await;
    let waiting = async {
        let exit = host.docker.wait(&task, &handle).await.unwrap();
        (exit.code, exit.lost)
    };
    let restart = async {
        engine.kill_dockerd();
        // One ends while the engine is down.
        fs::write(second.dir.run().join("go"), "").unwrap();
        wait_written(&second, "out").await;
        engine.start_dockerd().await;
        assert_eq!(
            host.docker.found().await.unwrap().iter().filter(|one| one.state == FoundState::Running).count(),
            1
        );
        fs::write(task.dir.run().join("go"), "").unwrap();
    };
    let (exit, ()) = tokio::time::timeout(TIMEOUT, async { tokio::join!(waiting, restart) }).await.unwrap();
    assert_eq!(exit, (Some(4), None));
    assert_eq!(read(&task, "out"), "done");
    let exit = host.wait(&second, &other).await;
    assert_eq!(
        (exit.code, exit.lost),
        (Some(4), None),
        "what ended in the engine's absence keeps its own status"
    );
}

#[tokio::test]
async fn f13_a_stop_with_a_frozen_docker_engine_times_out_and_can_be_repeated() {
    let engine = PrivateEngine::start(EngineKind::Plain).await;
    let host = DockerHost::at(&engine.socket(), |_| {}).await;
    let task = host.task(WAIT_FOR_GO).await;
    let handle = host.start(&task).await;
    wait_written(&task, "up").await;
    engine.freeze();
    let begun = Instant::now();
    let stopped = host.docker.stop(&task.dir, &handle, Duration::ZERO).await;
    assert!(is_unavailable(&stopped.unwrap_err()));
    assert!(begun.elapsed() < Duration::from_secs(30));
    assert!(is_unavailable(&host.docker.found().await.unwrap_err()));
    engine.thaw();
    let begun = Instant::now();
    host.docker.stop(&task.dir, &handle, Duration::ZERO).await.unwrap();
    let exit = host.wait(&task, &handle).await;
    assert_eq!((exit.code, exit.lost), (Some(137), None));
    host.docker.remove(&task.dir, Some(&handle)).await.unwrap();
    assert!(begun.elapsed() < Duration::from_secs(15));
    assert_eq!(host.docker.found().await.unwrap(), []);
}

#[tokio::test]
async fn f11_docker_without_disk_space_reports_it_and_still_removes_tasks() {
    let engine = PrivateEngine::start(EngineKind::SmallDisk(24 << 20)).await;
    let host = DockerHost::at(&engine.socket(), |_| {}).await;
    let task = host.task("touch /windlass/run/up; sleep 600").await;
    let handle = host.start(&task).await;
    wait_written(&task, "up").await;
    let registry = Registry::start().await;
    let mut tar = Tar::new();
    tar.file("much", &vec![7; 40 << 20], 0o644);
    let (name, _) = registry.put("much", "1", tar.done());
    let pulled = host.docker.pull(&host.task_with_image(&name, ""), None, super::ignore_progress()).await;
    assert!(matches!(pulled, Err(RuntimeError::NoDisk { .. })), "{pulled:?}");
    host.docker.stop(&task.dir, &handle, Duration::ZERO).await.unwrap();
    assert_eq!(host.wait(&task, &handle).await.code, Some(137));
    host.docker.remove(&task.dir, Some(&handle)).await.unwrap();
    assert_eq!(host.docker.found().await.unwrap(), []);
}

#[tokio::test]
async fn docker_creates_one_network_for_concurrent_requests() {
    let engine = PrivateEngine::start(EngineKind::Plain).await;
    let (one, two) =
        (DockerHost::at(&engine.socket(), |_| {}).await, DockerHost::at(&engine.socket(), |_| {}).await);
    let mut tasks = Vec::new();
    for host in [&one, &two, &one, &two, &one, &two] {
        tasks.push((host, host.bridged_task("touch /windlass/run/up; sleep 600").await));
    }
    let created = tasks.iter().map(|(host, task)| host.docker.create(task));
    let handles = futures_util::future::try_join_all(created).await.unwrap();
    let networks = one.engine.list_networks(None).await.unwrap();
    let ours: Vec<_> = networks.iter().filter(|one| one.name.as_deref() == Some("windlass")).collect();
    assert_eq!(ours.len(), 1);
    let (host, task) = &tasks[0];
    assert_eq!(host.docker.start(task, &handles[0]).await.unwrap().len(), 1);
}
