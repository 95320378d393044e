//! Images from registries that work, refuse, stall and return false data.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use parking_lot::Mutex;
use windlass_agent::shim::runtime::{PreparedTask, RegistryAuth, Runtime, RuntimeError};
use windlass_api::agent::shim::PullProgress;
use windlass_testkit::wait::eventually_async;

use super::{DockerHost, ignore_progress, random};
use crate::support::{
    engine,
    images::{Image, Tar},
    registry::{LayerDelivery, Registry},
};

const STALL_TIMEOUT: Duration = Duration::from_secs(3);

async fn stalling_host() -> DockerHost {
    DockerHost::at(&engine::shared_socket(), |settings| settings.stall = STALL_TIMEOUT).await
}

/// Returns new content, so that it must be transferred.
fn random_layer(size: usize) -> Vec<u8> {
    let mut tar = Tar::new();
    let seed: [u8; 32] = random();
    let noise: Vec<u8> = seed.iter().cycle().take(size).copied().collect();
    tar.file("noise", &noise, 0o644);
    tar.done()
}

fn auth(username: &str, password: &str) -> RegistryAuth {
    RegistryAuth { username: username.into(), password: password.into() }
}

/// Removes an image at the end.
struct ImageCleanup<'a>(&'a DockerHost, Vec<String>);

impl Drop for ImageCleanup<'_> {
    fn drop(&mut self) {
        let (socket, names) = (self.0.socket.clone(), std::mem::take(&mut self.1));
        let cleaned = std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(async {
                let engine = engine::client(&socket);
                for name in names {
                    let force =
                        bollard::query_parameters::RemoveImageOptionsBuilder::default().force(true).build();
                    let _ = engine.remove_image(&name, Some(force), None).await;
                }
            });
        });
        let _ = cleaned.join();
    }
}

async fn pull(
    host: &DockerHost,
    task: &PreparedTask,
    auth: Option<&RegistryAuth>,
) -> Result<(), RuntimeError> {
    host.docker.pull(task, auth, ignore_progress()).await
}

#[tokio::test]
async fn docker_pulls_by_tag_and_by_digest_and_reports_progress() {
    let (host, registry) = (stalling_host().await, Registry::start().await);
    let (by_tag, _) = registry.put("tagged", "1", random_layer(3 << 20));
    let (_, by_digest) = registry.put("digested", "1", random_layer(1000));
    let _pulled = ImageCleanup(&host, vec![by_tag.clone(), by_digest.clone()]);
    let seen: Arc<Mutex<Vec<PullProgress>>> = Arc::default();
    let keep = Arc::clone(&seen);
    let task = host.task_with_image(&by_tag, "");
    registry.set_layers(LayerDelivery::Slow(Duration::from_millis(5)));
    host.docker.pull(&task, None, Arc::new(move |progress| keep.lock().push(progress))).await.unwrap();
    let seen = seen.lock().clone();
    let last = seen.last().unwrap();
    assert!(last.is_total_bytes_final && last.total_bytes > 3 << 20, "{last:?}");
    assert_eq!((last.downloaded_bytes, last.extracted_bytes), (last.total_bytes, last.total_bytes));
    assert!(seen.iter().any(|one| one.downloaded_bytes > 0 && one.downloaded_bytes < one.total_bytes));
    pull(&host, &host.task_with_image(&by_digest, ""), None).await.unwrap();
    host.docker.create(&host.task_with_image(&by_digest, "")).await.unwrap();
    drop(registry);
    pull(&host, &task, None).await.unwrap();
}

#[tokio::test]
async fn docker_uses_a_local_latest_image_when_the_registry_is_unreachable() {
    let (host, registry) = (stalling_host().await, Registry::start().await);
    let (name, _) = registry.put("moving", "latest", random_layer(1000));
    let _pulled = ImageCleanup(&host, vec![name.clone()]);
    let task = host.task_with_image(name.trim_end_matches(":latest"), "");
    pull(&host, &task, None).await.unwrap();
    let first = host.engine.inspect_image(&name).await.unwrap().id;
    registry.put("moving", "latest", random_layer(1000));
    pull(&host, &task, None).await.unwrap();
    let second = host.engine.inspect_image(&name).await.unwrap().id;
    assert_ne!(first, second, "the name moves, so the registry is asked each time");
    drop(registry);
    pull(&host, &task, None).await.unwrap();
    assert_eq!(host.engine.inspect_image(&name).await.unwrap().id, second);
}

#[tokio::test]
async fn f17_docker_pull_failures_report_their_cause() {
    let (host, registry) = (stalling_host().await, Registry::start().await);
    let missing = host.task_with_image(&registry.name("none:1"), "");
    assert!(matches!(pull(&host, &missing, None).await, Err(RuntimeError::NoImage { .. })));
    let bad = host.task_with_image(&registry.name("UPPER:1"), "");
    assert!(matches!(pull(&host, &bad, None).await, Err(RuntimeError::Refused { .. })));

    let (corrupt, _) = registry.put("corrupt", "1", random_layer(100_000));
    registry.set_layers(LayerDelivery::Corrupt);
    let corrupt = pull(&host, &host.task_with_image(&corrupt, ""), None).await.unwrap_err();
    assert!(matches!(corrupt, RuntimeError::Failed { .. }), "{corrupt:?}");

    let (stalled, _) = registry.put("stalled", "1", random_layer(1 << 20));
    registry.set_layers(LayerDelivery::Stall);
    let begun = Instant::now();
    let stalled = pull(&host, &host.task_with_image(&stalled, ""), None).await;
    assert!(matches!(stalled, Err(RuntimeError::Stalled { secs: 3, .. })), "{stalled:?}");
    assert!(begun.elapsed() < STALL_TIMEOUT * 3);

    let gone = registry.name("gone:1");
    drop(registry);
    let gone = pull(&host, &host.task_with_image(&gone, ""), None).await;
    assert!(matches!(gone, Err(RuntimeError::Failed { .. })), "{gone:?}");
}

#[tokio::test]
async fn f17_docker_pull_is_cancelled_within_two_seconds() {
    let (host, registry) = (stalling_host().await, Registry::start().await);
    let (name, _) = registry.put("slow", "1", random_layer(8 << 20));
    registry.set_layers(LayerDelivery::Slow(Duration::from_millis(1600)));
    let task = host.task_with_image(&name, "");
    {
        let mut pulling = host.docker.pull(&task, None, ignore_progress());
        let begun = eventually_async("a layer comes", async || (registry.open() > 0).then_some(()));
        tokio::select! {
            ended = &mut pulling => panic!("{ended:?}"),
            () = begun => {}
        }
    }
    let begun = Instant::now();
    eventually_async("nothing comes any more", async || (registry.open() == 0).then_some(())).await;
    assert!(begun.elapsed() <= Duration::from_secs(2));
    assert!(host.engine.inspect_image(&name).await.is_err());
}

#[tokio::test]
async fn docker_credentials_with_any_characters_reach_the_registry() {
    let (host, registry) = (stalling_host().await, Registry::start().await);
    let (name, _) = registry.put("private", "1", random_layer(1000));
    let _pulled = ImageCleanup(&host, vec![name.clone()]);
    // Each of the three positions of a character in base64, with characters that are encoded as `+` and `/`.
    let right = auth("ann", "a?b~c>??~~>>ü");
    registry.set_password(&right.username, &right.password);
    let task = host.task_with_image(&name, "");
    for wrong in [None, Some(auth("ann", "wrong"))] {
        let refused = pull(&host, &task, wrong.as_ref()).await;
        assert!(matches!(refused, Err(RuntimeError::Unauthorized { .. })), "{refused:?}");
    }
    pull(&host, &task, Some(&right)).await.unwrap();
}

#[tokio::test]
async fn docker_rechecks_credentials_for_a_local_private_image() {
    let (host, registry) = (stalling_host().await, Registry::start().await);
    let (name, _) = registry.put("kept", "1", random_layer(1000));
    let _pulled = ImageCleanup(&host, vec![name.clone()]);
    let (ann, bob) = (auth("ann", "secret"), auth("bob", "guess"));
    registry.set_password(&ann.username, &ann.password);
    let task = host.task_with_image(&name, "");
    pull(&host, &task, Some(&ann)).await.unwrap();
    for other in [None, Some(&bob)] {
        let refused = pull(&host, &task, other).await;
        assert!(matches!(refused, Err(RuntimeError::Unauthorized { .. })), "{refused:?}");
    }
    let requested = registry.manifests_requested();
    pull(&host, &task, Some(&ann)).await.unwrap();
    assert_eq!(registry.manifests_requested(), requested, "proven a moment ago");
    registry.set_password("bob", "guess");
    pull(&host, &task, Some(&bob)).await.unwrap();
    assert!(registry.manifests_requested() > requested);
    drop(registry);
    pull(&host, &task, Some(&bob)).await.unwrap();
    assert!(pull(&host, &task, None).await.is_err(), "no answer is no permission");
}

#[tokio::test]
async fn docker_uses_a_local_image_without_contacting_a_registry() {
    let host = stalling_host().await;
    let task = host.task_with_image(&Image::Busybox.ensure(&host.engine).await, "");
    pull(&host, &task, None).await.unwrap();
    pull(&host, &task, Some(&auth("ann", "secret"))).await.unwrap();
}
