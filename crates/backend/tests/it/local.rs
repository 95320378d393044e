//! This machine as a backend, with the real agent.

use std::{path::PathBuf, time::Duration};

use windlass_api::agent::shim::{ProcessMode, TaskStatus};
use windlass_backend::{
    Backend, BackendError, DeleteProgress, InstanceState,
    agent_program::NAME,
    local::{LocalBackend, Runtime, Settings},
    shim_process::ShimHome,
};
use windlass_model::plan::offers::Availability;
use windlass_testkit::{TempDir, temp_dir};

use crate::support::{StopOnDrop, agent, connect, order, submit, wait_until};

fn settings(dir: &TempDir) -> Settings {
    Settings {
        home: dir.path().join("local"),
        agent: Some(agent().path().to_owned()),
        runtime: Some(Runtime::Process),
        docker_socket: None,
        processes: ProcessMode::Own,
    }
}

#[tokio::test]
async fn local_backend_makes_one_offer_with_price_zero() {
    let dir = temp_dir("local").unwrap();
    let local = LocalBackend::new(settings(&dir));
    let offers = local.offers().await.unwrap();
    let [offer] = &offers[..] else { panic!("{offers:?}") };
    assert_eq!((offer.backend.as_str(), offer.price.as_dollars()), ("local", 0.0));
    assert_eq!(offer.availability, Availability::Available);
    assert!(offer.host.cpus > 0 && offer.host.memory_mib > 0 && offer.host.disk_mib > 0, "{offer:?}");
}

#[tokio::test]
async fn jobs_survive_a_server_restart_and_a_killed_agent() {
    let dir = temp_dir("local").unwrap();
    let _sweep = StopOnDrop(dir.path());
    let local = LocalBackend::new(settings(&dir));
    let order = order(&local, 1).await;
    let machine = local.create(&order).await.unwrap();
    assert_eq!(machine.has.as_ref().unwrap().runtime, "process");
    assert_eq!(machine.message(), Some("this machine, jobs as plain processes (as configured)"));
    let shim = connect(&machine).await;
    let task = submit(&shim, &order, 1, "none").await;
    wait_until(&shim, task, TaskStatus::Running).await;
    drop((shim, local));

    // The next server: its stop leaves an agent with tasks running.
    let local = LocalBackend::new(settings(&dir));
    let home = ShimHome::new(&settings(&dir).home);
    let pid = home.pid().unwrap();
    local.rest().await.unwrap();
    assert_eq!(home.pid(), Some(pid));
    // The agent is killed; `find` starts it again, and the task is still there.
    let process = rustix::process::Pid::from_raw(pid).unwrap();
    rustix::process::kill_process(process, rustix::process::Signal::KILL).unwrap();
    while home.pid().is_some() {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    let InstanceState::Running(found) = local.find(&order, &machine).await.unwrap() else {
        panic!("not running")
    };
    assert_eq!(found.reach, machine.reach);
    let shim = connect(&found).await;
    wait_until(&shim, task, TaskStatus::Running).await;

    // Deleted: task, agent and directory.
    assert_eq!(local.delete(&order, Some(&found)).await.unwrap(), DeleteProgress::Gone);
    assert_eq!(home.pid(), None);
    assert!(!home.dir().exists());
    assert!(matches!(local.find(&order, &found).await.unwrap(), InstanceState::Gone { .. }));
}

#[tokio::test]
async fn a_home_directory_may_exceed_the_length_limit_of_socket_paths() {
    let dir = temp_dir("local").unwrap();
    let _sweep = StopOnDrop(dir.path());
    let with = Settings { home: dir.path().join("h".repeat(90)).join("local"), ..settings(&dir) };
    let home = ShimHome::new(&with.home);
    assert!(home.socket().as_os_str().len() > 107);
    let local = LocalBackend::new(with.clone());
    let order = order(&local, 1).await;
    let machine = local.create(&order).await.unwrap();
    let shim = connect(&machine).await;
    let task = submit(&shim, &order, 1, "none").await;
    wait_until(&shim, task, TaskStatus::Running).await;
    // The runner's socket has an even longer path; calls for the job go through it.
    shim.idle_seconds(task).await.unwrap();
    drop((shim, local));

    // The next server finds it there, and deletes it with its task.
    let local = LocalBackend::new(with);
    let InstanceState::Running(found) = local.find(&order, &machine).await.unwrap() else {
        panic!("not running")
    };
    wait_until(&connect(&found).await, task, TaskStatus::Running).await;
    assert_eq!(local.delete(&order, Some(&found)).await.unwrap(), DeleteProgress::Gone);
    assert_eq!(home.pid(), None);
    assert!(!home.dir().exists());
}

#[tokio::test]
async fn an_idle_agent_stops_with_the_server_and_starts_again_with_the_next_one() {
    let dir = temp_dir("local").unwrap();
    let _sweep = StopOnDrop(dir.path());
    let local = LocalBackend::new(settings(&dir));
    let home = ShimHome::new(&settings(&dir).home);
    local.wake().await.unwrap();
    assert_eq!(home.pid(), None, "nobody asked for this machine yet");
    let order = order(&local, 1).await;
    let machine = local.create(&order).await.unwrap();
    local.rest().await.unwrap();
    assert_eq!(home.pid(), None);
    local.wake().await.unwrap();
    assert!(connect(&machine).await.tasks().await.unwrap().tasks.is_empty());
    local.delete(&order, None).await.unwrap();
}

#[tokio::test]
async fn a_newer_build_replaces_the_agent_without_stopping_its_task() {
    let dir = temp_dir("local").unwrap();
    let _sweep = StopOnDrop(dir.path());
    let program: PathBuf = dir.path().join(NAME);
    std::fs::copy(agent().path(), &program).unwrap();
    let local = LocalBackend::new(Settings { agent: Some(program.clone()), ..settings(&dir) });
    let home = ShimHome::new(&settings(&dir).home);
    let order = order(&local, 1).await;
    let machine = local.create(&order).await.unwrap();
    let shim = connect(&machine).await;
    let task = submit(&shim, &order, 1, "none").await;
    wait_until(&shim, task, TaskStatus::Running).await;
    let before = home.pid().unwrap();
    local.find(&order, &machine).await.unwrap();
    assert_eq!(home.pid(), Some(before), "the same build stays");

    let newer = dir.path().join("newer");
    std::fs::copy(agent().path(), &newer).unwrap();
    std::fs::rename(&newer, &program).unwrap();
    let InstanceState::Running(found) = local.find(&order, &machine).await.unwrap() else {
        panic!("not running")
    };
    assert_ne!(home.pid(), Some(before));
    wait_until(&connect(&found).await, task, TaskStatus::Running).await;
    local.delete(&order, Some(&found)).await.unwrap();
}

#[tokio::test]
async fn a_second_instance_is_refused_unless_a_server_with_another_key_requests_it() {
    let dir = temp_dir("local").unwrap();
    let _sweep = StopOnDrop(dir.path());
    let local = LocalBackend::new(settings(&dir));
    let first = order(&local, 1).await;
    let machine = local.create(&first).await.unwrap();
    let task = submit(&connect(&machine).await, &first, 1, "none").await;
    wait_until(&connect(&machine).await, task, TaskStatus::Running).await;
    assert_eq!(local.offers().await.unwrap()[0].availability, Availability::Busy);
    let error = local.create(&order(&local, 1).await).await.unwrap_err();
    let BackendError::NoCapacity { message } = &error else { panic!("{error:?}") };
    assert!(message.contains(&first.instance.to_string()), "{message}");

    let other = order(&local, 2).await;
    let taken = local.create(&other).await.unwrap();
    assert!(connect(&taken).await.tasks().await.unwrap().tasks.is_empty());
    assert!(matches!(local.find(&first, &machine).await.unwrap(), InstanceState::Gone { .. }));
    local.delete(&other, Some(&taken)).await.unwrap();
}

#[tokio::test]
async fn create_without_an_agent_program_fails_with_the_expected_path() {
    let dir = temp_dir("local").unwrap();
    let absent = dir.path().join("no-agent");
    let known = LocalBackend::new(settings(&dir));
    let local = LocalBackend::new(Settings { agent: Some(absent.clone()), ..settings(&dir) });
    let error = local.create(&order(&known, 1).await).await.unwrap_err();
    let BackendError::Refused { message, .. } = &error else { panic!("{error:?}") };
    assert!(message.contains(absent.to_str().unwrap()) && message.contains("WINDLASS_AGENT"), "{message}");
}

#[tokio::test]
async fn jobs_run_in_docker_when_an_engine_responds() {
    let socket = std::env::var("WINDLASS_TEST_DOCKER")
        .expect("WINDLASS_TEST_DOCKER names the socket of a container engine for tests");
    let dir = temp_dir("local").unwrap();
    let _sweep = StopOnDrop(dir.path());
    let with = Settings { runtime: None, docker_socket: Some(socket.clone().into()), ..settings(&dir) };
    let local = LocalBackend::new(with);
    let order = order(&local, 1).await;
    let machine = local.create(&order).await.unwrap();
    assert_eq!(machine.has.as_ref().unwrap().runtime, "any");
    assert!(machine.message().unwrap().contains(&socket), "{:?}", machine.message());
    let shim = connect(&machine).await;
    let task = submit(&shim, &order, 1, &image(&socket)).await;
    wait_until(&shim, task, TaskStatus::Running).await;
    assert_eq!(local.delete(&order, Some(&machine)).await.unwrap(), DeleteProgress::Gone);
}

/// Builds an image with only a static busybox, in the tests' engine.
fn image(socket: &str) -> String {
    let (dir, name) = (temp_dir("image").unwrap(), "windlass-backend/busybox:1");
    let bin = dir.path().join("bin");
    std::fs::create_dir_all(&bin).unwrap();
    std::fs::copy("/usr/bin/busybox", bin.join("busybox")).unwrap();
    std::os::unix::fs::symlink("busybox", bin.join("sh")).unwrap();
    let root = dir.path().display();
    let script = format!("tar -C {root} -c . | docker --host unix://{socket} import - {name}");
    assert!(std::process::Command::new("sh").args(["-c", &script]).output().unwrap().status.success());
    name.to_owned()
}
