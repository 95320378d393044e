//! From create to remove, in order and repeated.

use std::{
    fs,
    time::{Duration, Instant},
};

use windlass_agent::{
    shim::{
        docker::Docker,
        runtime::{FoundState, Lost, Runtime, RuntimeError},
    },
    taskdir::{IMAGE_CONFIG, ImageConfig},
};

use super::{Host, is_away, read, settings, written};
use crate::support::{Scratch, engine, images::Image};

#[tokio::test]
async fn docker_runs_a_task_to_its_end_and_takes_it_away() {
    let host = Host::new().await;
    let task = host
        .task(
            "echo first >&2; echo $WINDLASS_TASK_ID $FROM_IMAGE $(pwd) $(id -u) > /windlass/run/out; exit 7",
        )
        .await;
    let handle = host.docker.create(&task).await.unwrap();
    assert!(handle.name.starts_with("docker-test-"));
    let states = |found: Vec<windlass_agent::shim::runtime::Found>| -> Vec<_> {
        found.into_iter().map(|one| (one.task, one.handle, one.state)).collect()
    };
    let found = states(host.docker.found().await.unwrap());
    assert_eq!(found, [(task.spec.id, handle.clone(), FoundState::Created)]);
    assert_eq!(host.docker.start(&task, &handle).await.unwrap(), []);
    let exit = host.wait(&task, &handle).await;
    assert_eq!((exit.code, exit.oom_killed, exit.lost), (Some(7), false, None));
    assert_eq!(exit.tail, ["first"]);
    assert_eq!(read(&task, "out"), format!("{} yes /srv/app 0", task.spec.id));
    assert_eq!(states(host.docker.found().await.unwrap())[0].2, FoundState::Ended);
    host.docker.remove(&task.dir, Some(&handle)).await.unwrap();
    assert_eq!(host.docker.found().await.unwrap(), []);
    let exit = host.wait(&task, &handle).await;
    assert_eq!((exit.code, exit.lost), (None, Some(Lost::Vanished)));
}

#[tokio::test]
async fn docker_tells_the_runner_what_the_image_would_have_run() {
    let host = Host::new().await;
    let config = async |image: Image| -> ImageConfig {
        let name = image.ensure(&host.engine).await;
        let task = host.task_of(&name, "");
        host.docker.create(&task).await.unwrap();
        serde_json::from_slice(&fs::read(task.dir.run().join(IMAGE_CONFIG)).unwrap()).unwrap()
    };
    let busybox = config(Image::Busybox).await;
    assert_eq!((busybox.entrypoint, busybox.cmd), (vec![], vec!["/bin/date".to_owned(), "-u".to_owned()]));
    assert_eq!(busybox.workdir, "/srv/app");
    assert_eq!(config(Image::Bare).await.entrypoint, ["/busybox"]);
    assert_eq!(config(Image::Bash).await.user, "job");
}

#[tokio::test]
async fn docker_starts_the_agent_in_an_image_with_nothing_else() {
    let host = Host::at(&engine::shared(), |settings| {
        settings.entrypoint = vec!["/windlass/agent".into(), "--version".into()];
    })
    .await;
    for image in [Image::Bare, Image::Bash] {
        let name = image.ensure(&host.engine).await;
        let exit = host.run(&host.task_of(&name, "")).await;
        assert_eq!(exit.code, Some(0), "{image:?}");
        assert_eq!(exit.tail, [concat!("windlass-agent ", env!("CARGO_PKG_VERSION"))]);
    }
}

#[tokio::test]
async fn a2_docker_calls_repeated_have_one_effect() {
    let host = Host::new().await;
    let task = host.task("echo ran >> /windlass/run/out").await;
    let handle = host.docker.create(&task).await.unwrap();
    assert_eq!(host.docker.create(&task).await.unwrap(), handle, "found again");
    host.docker.start(&task, &handle).await.unwrap();
    host.docker.start(&task, &handle).await.unwrap();
    assert_eq!(host.wait(&task, &handle).await.code, Some(0));
    host.docker.start(&task, &handle).await.unwrap();
    assert_eq!(host.docker.create(&task).await.unwrap(), handle, "after its end too");
    assert_eq!(host.wait(&task, &handle).await, host.wait(&task, &handle).await);
    assert_eq!(read(&task, "out"), "ran", "a task that ended is not run again");
    for _ in 0..2 {
        host.docker.stop(&task.dir, &handle, Duration::ZERO).await.unwrap();
    }
    for _ in 0..2 {
        host.docker.remove(&task.dir, Some(&handle)).await.unwrap();
    }
    host.docker.remove(&task.dir, None).await.unwrap();
    host.docker.stop(&task.dir, &handle, Duration::ZERO).await.unwrap();
}

#[tokio::test]
async fn docker_never_hangs_on_a_container_that_ends_at_once() {
    let host = Host::new().await;
    let name = Image::Busybox.ensure(&host.engine).await;
    let one = async |code: i32| {
        let task = host.task_of(&name, &format!("exit {code}"));
        let handle = host.docker.create(&task).await.unwrap();
        // Somebody who waits already must be told as well as one who comes late.
        let (waited, started) = tokio::join!(
            async {
                written(&task, "image.json").await;
                loop {
                    match host.docker.wait(&task, &handle).await {
                        Err(RuntimeError::Refused { .. }) => tokio::task::yield_now().await,
                        other => return other.unwrap(),
                    }
                }
            },
            host.docker.start(&task, &handle)
        );
        started.unwrap();
        assert_eq!(waited.code, Some(code));
        assert_eq!(host.wait(&task, &handle).await.code, Some(code));
    };
    for round in 0..5 {
        tokio::join!(one(round), one(round + 10), one(round + 20), one(round + 30));
    }
}

#[tokio::test]
async fn docker_asks_politely_and_kills_after_the_grace() {
    let host = Host::new().await;
    let polite = host.task("trap 'echo bye > /windlass/run/out; exit 3' TERM; touch /windlass/run/up; while :; do sleep 0.05; done").await;
    let deaf = host.task("trap '' TERM; touch /windlass/run/up; while :; do sleep 0.05; done").await;
    for (task, code) in [(&polite, 3), (&deaf, 137)] {
        let handle = host.start(task).await;
        written(task, "up").await;
        let begun = Instant::now();
        host.docker.stop(&task.dir, &handle, Duration::from_secs(1)).await.unwrap();
        assert!(begun.elapsed() < Duration::from_secs(10));
        assert_ne!(host.docker.found().await.unwrap()[0].state, FoundState::Running);
        let exit = host.wait(task, &handle).await;
        assert_eq!((exit.code, exit.lost), (Some(code), None));
        host.docker.remove(&task.dir, None).await.unwrap();
    }
    assert_eq!(read(&polite, "out"), "bye");
    assert_eq!(host.docker.found().await.unwrap(), []);
}

#[tokio::test]
async fn docker_removes_a_running_container_without_its_handle_and_its_volumes_with_it() {
    let host = Host::new().await;
    let task = host.task("touch /windlass/run/up; sleep 600").await;
    let handle = host.start(&task).await;
    written(&task, "up").await;
    host.docker.remove(&task.dir, None).await.unwrap();
    assert!(host.engine.inspect_container(&handle.id, None).await.is_err());
}

#[tokio::test]
async fn docker_finds_only_what_is_its_own() {
    let (one, other) = (Host::new().await, Host::new().await);
    let task = one.task("").await;
    let handle = one.docker.create(&task).await.unwrap();
    assert_eq!(other.docker.found().await.unwrap(), []);
    other.docker.remove(&task.dir, None).await.unwrap();
    assert_eq!(one.docker.found().await.unwrap().len(), 1);
    // The same shim after a restart finds it again.
    let again = Docker::connect(settings(&one.socket, one.scratch.path(), |_| {})).await.unwrap();
    assert_eq!(again.found().await.unwrap()[0].handle, handle);
    assert!(
        matches!(other.docker.create(&task).await, Err(RuntimeError::Refused { .. })),
        "the name is taken"
    );
}

#[tokio::test]
async fn docker_says_that_an_image_is_missing_and_that_a_task_was_never_started() {
    let host = Host::new().await;
    let missing = host.task_of("windlass-test/none:1", "");
    assert!(matches!(host.docker.create(&missing).await, Err(RuntimeError::NoImage { .. })));
    let task = host.task("").await;
    let handle = host.docker.create(&task).await.unwrap();
    assert!(matches!(host.docker.wait(&task, &handle).await, Err(RuntimeError::Refused { .. })));
}

#[tokio::test]
async fn docker_that_is_not_there_is_away() {
    let scratch = Scratch::new("away");
    let nothing = scratch.path().join("none.sock");
    let connected = Docker::connect(settings(&nothing, scratch.path(), |_| {})).await;
    assert!(is_away(&connected.err().unwrap()));
    // A socket that takes connections and says nothing.
    let _deaf = std::os::unix::net::UnixListener::bind(&nothing).unwrap();
    let begun = Instant::now();
    let connected = Docker::connect(settings(&nothing, scratch.path(), |_| {})).await;
    assert!(is_away(&connected.err().unwrap()));
    assert!(begun.elapsed() < Duration::from_secs(10));
}

#[tokio::test]
async fn docker_overhead_of_a_start_stays_small() {
    use bollard::{
        models::{ContainerCreateBody, HostConfig},
        query_parameters::RemoveContainerOptionsBuilder,
    };
    const ROUNDS: usize = 5;
    let host = Host::new().await;
    let image = Image::Busybox.ensure(&host.engine).await;
    let mut ours = Vec::new();
    let mut floor = Vec::new();
    for _ in 0..ROUNDS {
        let task = host.task_of(&image, "sleep 60");
        let begun = Instant::now();
        let handle = host.start(&task).await;
        ours.push(begun.elapsed());
        host.docker.remove(&task.dir, Some(&handle)).await.unwrap();

        let label = [("windlass.shim.test".to_owned(), "floor".to_owned())].into();
        let config = HostConfig { network_mode: Some("host".into()), ..HostConfig::default() };
        let entrypoint = Some(vec!["/bin/sleep".to_owned(), "60".to_owned()]);
        let body = ContainerCreateBody {
            image: Some(image.clone()),
            entrypoint,
            labels: Some(label),
            host_config: Some(config),
            ..ContainerCreateBody::default()
        };
        let begun = Instant::now();
        let made = host.engine.create_container(None, body).await.unwrap();
        let started = host.engine.start_container(&made.id, None).await;
        floor.push(begun.elapsed());
        let force = RemoveContainerOptionsBuilder::default().force(true).build();
        host.engine.remove_container(&made.id, Some(force)).await.unwrap();
        started.unwrap();
    }
    let (ours, floor) = (ours.into_iter().min().unwrap(), floor.into_iter().min().unwrap());
    println!("ours {ours:?} floor {floor:?}");
    // The best of a few, since others use the machine too; mounts and limits cost the engine itself something.
    assert!(ours < floor + Duration::from_millis(60), "{ours:?} against {floor:?} of the engine alone");
}
