//! All steps from create to remove, in order and repeated.

use std::{
    fs,
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, Instant},
};

use parking_lot::Mutex;

use windlass_agent::{
    shim::{
        docker::DockerRuntime,
        runtime::{FoundState, LossReason, Runtime, RuntimeError},
    },
    task_dir::{IMAGE_CONFIG, ImageConfig},
};
use windlass_testkit::wait::eventually_async;

use super::{DockerHost, is_unavailable, read, settings, wait_written};
use crate::support::{TempDir, engine, images::Image, temp_dir};

#[tokio::test]
async fn docker_runs_a_task_to_its_end_and_removes_it() {
    let host = DockerHost::new().await;
    let task = host
        .task(
            "echo first >&2; echo $WINDLASS_TASK_ID $FROM_IMAGE $(pwd) $(id -u) > /windlass/run/out; exit 7",
        )
        .await;
    let handle = host.docker.create(&task).await.unwrap();
    assert!(handle.name.starts_with("docker-test-"));
    let states = |found: Vec<windlass_agent::shim::runtime::FoundTask>| -> Vec<_> {
        found.into_iter().map(|one| (one.task, one.handle, one.state)).collect()
    };
    let found = states(host.docker.found().await.unwrap());
    assert_eq!(found, [(task.spec.id, handle.clone(), FoundState::Created)]);
    assert_eq!(host.docker.start(&task, &handle).await.unwrap(), []);
    let exit = host.wait(&task, &handle).await;
    assert_eq!((exit.code, exit.oom_killed, exit.lost), (Some(7), false, None));
    assert_eq!(exit.tail, ["first"]);
    assert_eq!(read(&task, "out"), format!("{} yes /opt/app 0", task.spec.id));
    assert_eq!(states(host.docker.found().await.unwrap())[0].2, FoundState::Ended);
    host.docker.remove(&task.dir, Some(&handle)).await.unwrap();
    assert_eq!(host.docker.found().await.unwrap(), []);
    let exit = host.wait(&task, &handle).await;
    assert_eq!((exit.code, exit.lost), (None, Some(LossReason::Vanished)));
}

#[tokio::test]
async fn docker_passes_the_image_configuration_to_the_runner() {
    let host = DockerHost::new().await;
    let config = async |image: Image| -> ImageConfig {
        let name = image.ensure(&host.engine).await;
        let task = host.task_with_image(&name, "");
        host.docker.create(&task).await.unwrap();
        serde_json::from_slice(&fs::read(task.dir.run().join(IMAGE_CONFIG)).unwrap()).unwrap()
    };
    let busybox = config(Image::Busybox).await;
    assert_eq!((busybox.entrypoint, busybox.cmd), (vec![], vec!["/bin/date".to_owned(), "-u".to_owned()]));
    assert_eq!(busybox.workdir, "/opt/app");
    assert_eq!(config(Image::Bare).await.entrypoint, ["/busybox"]);
    assert_eq!(config(Image::Bash).await.user, "job");
}

#[tokio::test]
async fn docker_starts_the_agent_in_a_minimal_image() {
    let host = DockerHost::at(&engine::shared_socket(), |settings| {
        settings.entrypoint = vec!["/windlass/agent".into(), "--version".into()];
    })
    .await;
    for image in [Image::Bare, Image::Bash] {
        let name = image.ensure(&host.engine).await;
        let exit = host.run(&host.task_with_image(&name, "")).await;
        assert_eq!(exit.code, Some(0), "{image:?}");
        assert_eq!(exit.tail, [concat!("windlass-agent ", env!("CARGO_PKG_VERSION"))]);
    }
}

#[tokio::test]
async fn a2_repeated_docker_calls_have_one_effect() {
    let host = DockerHost::new().await;
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
async fn docker_wait_never_hangs_on_a_container_that_exits_at_once() {
    let host = DockerHost::new().await;
    let name = Image::Busybox.ensure(&host.engine).await;
    let one = async |code: i32| {
        let task = host.task_with_image(&name, &format!("exit {code}"));
        let handle = host.docker.create(&task).await.unwrap();
        // A caller that already waits must get the exit, as must one that calls late.
        let (waited, started) = tokio::join!(
            async {
                wait_written(&task, "image.json").await;
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
async fn docker_stop_sends_sigterm_and_kills_after_the_grace_period() {
    let host = DockerHost::new().await;
    let polite = host.task("trap 'echo bye > /windlass/run/out; exit 3' TERM; touch /windlass/run/up; while :; do sleep 0.05; done").await;
    let deaf = host.task("trap '' TERM; touch /windlass/run/up; while :; do sleep 0.05; done").await;
    for (task, code) in [(&polite, 3), (&deaf, 137)] {
        let handle = host.start(task).await;
        wait_written(task, "up").await;
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
async fn docker_removes_a_running_container_and_its_volumes_without_a_handle() {
    let host = DockerHost::new().await;
    let task = host.task("touch /windlass/run/up; sleep 600").await;
    let handle = host.start(&task).await;
    wait_written(&task, "up").await;
    host.docker.remove(&task.dir, None).await.unwrap();
    assert!(host.engine.inspect_container(&handle.id, None).await.is_err());
}

#[tokio::test]
async fn docker_finds_only_containers_of_its_own_shim() {
    let (one, other) = (DockerHost::new().await, DockerHost::new().await);
    let task = one.task("").await;
    let handle = one.docker.create(&task).await.unwrap();
    assert_eq!(other.docker.found().await.unwrap(), []);
    other.docker.remove(&task.dir, None).await.unwrap();
    assert_eq!(one.docker.found().await.unwrap().len(), 1);
    // The same shim finds it again after a restart.
    let again = DockerRuntime::connect(settings(&one.socket, one.scratch.path(), |_| {})).await.unwrap();
    assert_eq!(again.found().await.unwrap()[0].handle, handle);
    assert!(
        matches!(other.docker.create(&task).await, Err(RuntimeError::Refused { .. })),
        "the name is taken"
    );
}

#[tokio::test]
async fn docker_keeps_an_older_agent_binary_while_a_task_uses_it() {
    let host = DockerHost::new().await;
    let copies = || fs::read_dir(host.scratch.path().join("bin")).unwrap().count();
    let task = host.task("").await;
    let handle = host.docker.create(&task).await.unwrap();
    let newer = host.scratch.path().join("newer");
    fs::copy("/bin/busybox", &newer).unwrap();
    let upgraded = settings(&host.socket, host.scratch.path(), |settings| settings.agent = newer);
    let again = DockerRuntime::connect(upgraded.clone()).await.unwrap();
    assert_eq!(copies(), 2);
    again.start(&task, &handle).await.unwrap();
    again.remove(&task.dir, Some(&handle)).await.unwrap();
    DockerRuntime::connect(upgraded).await.unwrap();
    assert_eq!(copies(), 1);
}

#[tokio::test]
async fn docker_reports_a_missing_image_and_a_task_that_was_never_started() {
    let host = DockerHost::new().await;
    let missing = host.task_with_image("windlass-test/none:1", "");
    assert!(matches!(host.docker.create(&missing).await, Err(RuntimeError::NoImage { .. })));
    let task = host.task("").await;
    let handle = host.docker.create(&task).await.unwrap();
    assert!(matches!(host.docker.wait(&task, &handle).await, Err(RuntimeError::Refused { .. })));
}

#[tokio::test]
async fn an_absent_or_unresponsive_docker_engine_is_reported_as_away() {
    let scratch = temp_dir("away").unwrap();
    let nothing = scratch.path().join("none.sock");
    let connected = DockerRuntime::connect(settings(&nothing, scratch.path(), |_| {})).await;
    assert!(is_unavailable(&connected.err().unwrap()));
    // A socket that accepts connections and never responds.
    let _deaf = std::os::unix::net::UnixListener::bind(&nothing).unwrap();
    let begun = Instant::now();
    let connected = DockerRuntime::connect(settings(&nothing, scratch.path(), |_| {})).await;
    assert!(is_unavailable(&connected.err().unwrap()));
    assert!(begun.elapsed() < Duration::from_secs(10));
}

/// Proxy in front of an engine that measures the time in which at least one request is open.
struct EngineTimingProxy {
    taken: Arc<Mutex<EngineTiming>>,
    scratch: TempDir,
    /// Dropped with the rest, which ends the thread.
    _end: tokio::sync::oneshot::Sender<()>,
}

#[derive(Default)]
struct EngineTiming {
    questions: usize,
    open: usize,
    since: Option<Instant>,
    busy: Duration,
}

impl EngineTimingProxy {
    fn start(engine: &Path) -> Self {
        let scratch = temp_dir("stopwatch").unwrap();
        let taken: Arc<Mutex<EngineTiming>> = Arc::default();
        let (at, engine, shared) = (scratch.path().join("sock"), engine.to_owned(), Arc::clone(&taken));
        let (end, ended) = tokio::sync::oneshot::channel();
        let listener = std::os::unix::net::UnixListener::bind(at).unwrap();
        listener.set_nonblocking(true).unwrap();
        // In a separate thread: the guard of the host still sends requests when the test's runtime ends.
        std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(async {
                let listener = tokio::net::UnixListener::from_std(listener).unwrap();
                let serve = async {
                    while let Ok((client, _)) = listener.accept().await {
                        tokio::spawn(forward_request(client, engine.clone(), Arc::clone(&shared)));
                    }
                };
                tokio::select! {
                    () = serve => {}
                    _ = ended => {}
                }
            });
        });
        Self { taken, scratch, _end: end }
    }

    fn socket(&self) -> PathBuf {
        self.scratch.path().join("sock")
    }

    /// Returns the number of requests and the engine's time since the last call.
    async fn read(&self) -> (usize, Duration) {
        let is_closed = async || (self.taken.lock().open == 0).then_some(());
        eventually_async("the last connection is closed", is_closed).await;
        let taken = std::mem::take(&mut *self.taken.lock());
        (taken.questions, taken.busy)
    }
}

/// Forwards one request to the engine and its response back.
async fn forward_request(
    mut client: tokio::net::UnixStream,
    engine: PathBuf,
    taken: Arc<Mutex<EngineTiming>>,
) {
    {
        let mut taken = taken.lock();
        taken.questions += 1;
        taken.open += 1;
        taken.since.get_or_insert_with(Instant::now);
    }
    let mut server = tokio::net::UnixStream::connect(engine).await.unwrap();
    let _ = tokio::io::copy_bidirectional(&mut client, &mut server).await;
    let mut taken = taken.lock();
    taken.open -= 1;
    if taken.open == 0 {
        let since = taken.since.take().unwrap();
        taken.busy += since.elapsed();
    }
}

#[tokio::test]
async fn docker_start_adds_little_overhead_to_the_engine() {
    let watch = EngineTimingProxy::start(&engine::shared_socket());
    let host = DockerHost::at(&watch.socket(), |_| {}).await;
    let image = Image::Busybox.ensure(&host.engine).await;
    let mut least = Duration::MAX;
    for _ in 0..5 {
        let task = host.task_with_image(&image, "sleep 60");
        watch.read().await;
        let begun = Instant::now();
        host.docker.pull(&task, None, super::ignore_progress()).await.unwrap();
        let handle = host.start(&task).await;
        let took = begun.elapsed();
        let (questions, engine) = watch.read().await;
        // Check for the image; create, with the image inspected meanwhile; check whether it was started; start.
        assert_eq!(questions, 5);
        least = least.min(took.saturating_sub(engine));
        host.docker.remove(&task.dir, Some(&handle)).await.unwrap();
    }
    assert!(least < Duration::from_millis(20), "{least:?}");
}
