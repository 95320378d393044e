//! Images from registries that work, refuse, stall and return false data.

use std::{
    fs,
    sync::Arc,
    time::{Duration, Instant},
};

use parking_lot::Mutex;
use windlass_agent::shim::runtime::{PreparedTask, RegistryAuth, Runtime, RuntimeError};
use windlass_api::agent::shim::PullProgress;
use windlass_testkit::wait::eventually_async;

use super::{OciHost, ignore_progress};
use crate::{
    image_store::write_docker_archive,
    support::{
        images::Tar,
        registry::{LayerDelivery, Registry},
        shim::random_uuid,
    },
};

const STALL_TIMEOUT: Duration = Duration::from_secs(3);

fn stalling_host() -> OciHost {
    OciHost::with(|settings| settings.store.stall = STALL_TIMEOUT)
}

/// Returns new content, so that it must be transferred.
fn random_layer(size: usize) -> Vec<u8> {
    let mut tar = Tar::new();
    let seed = *random_uuid().as_bytes();
    let noise: Vec<u8> = seed.iter().cycle().take(size).copied().collect();
    tar.file("noise", &noise, 0o644);
    tar.done()
}

fn auth(username: &str, password: &str) -> RegistryAuth {
    RegistryAuth { username: username.into(), password: password.into() }
}

async fn pull(host: &OciHost, task: &PreparedTask, auth: Option<&RegistryAuth>) -> Result<(), RuntimeError> {
    host.oci.pull(task, auth, ignore_progress()).await
}

#[tokio::test]
async fn oci_pulls_by_tag_and_by_digest_and_reports_progress() {
    let (host, registry) = (stalling_host(), Registry::start().await);
    let (by_tag, _) = registry.put("tagged", "1", random_layer(3 << 20));
    let (_, by_digest) = registry.put("digested", "1", random_layer(1000));
    let seen: Arc<Mutex<Vec<PullProgress>>> = Arc::default();
    let keep = Arc::clone(&seen);
    let task = host.task_named(&by_tag, "");
    registry.set_layers(LayerDelivery::Slow(Duration::from_millis(5)));
    host.oci.pull(&task, None, Arc::new(move |progress| keep.lock().push(progress))).await.unwrap();
    let seen = seen.lock().clone();
    let last = seen.last().unwrap();
    assert!(last.is_total_bytes_final && last.total_bytes > 3 << 20, "{last:?}");
    assert_eq!((last.downloaded_bytes, last.extracted_bytes), (last.total_bytes, last.total_bytes));
    assert!(seen.iter().any(|one| one.downloaded_bytes > 0 && one.downloaded_bytes < one.total_bytes));
    pull(&host, &host.task_named(&by_digest, ""), None).await.unwrap();
    host.oci.create(&host.task_named(&by_digest, "")).await.unwrap();
    drop(registry);
    pull(&host, &task, None).await.unwrap();
}

#[tokio::test]
async fn oci_uses_a_local_latest_image_when_the_registry_is_unreachable() {
    let (host, registry) = (stalling_host(), Registry::start().await);
    let (name, _) = registry.put("moving", "latest", random_layer(1000));
    let task = host.task_named(name.trim_end_matches(":latest"), "");
    pull(&host, &task, None).await.unwrap();
    let digest = async || {
        host.oci.create(&task).await.unwrap();
        let record = fs::read_to_string(task.dir.root().join("container/record.json")).unwrap();
        host.oci.remove(&task.dir, None).await.unwrap();
        serde_json::from_str::<serde_json::Value>(&record).unwrap()["layers"].clone()
    };
    let first = digest().await;
    registry.put("moving", "latest", random_layer(1000));
    pull(&host, &task, None).await.unwrap();
    let second = digest().await;
    assert_ne!(first, second, "the name moves, so the registry is asked each time");
    drop(registry);
    pull(&host, &task, None).await.unwrap();
    assert_eq!(digest().await, second);
}

#[tokio::test]
async fn f17_oci_pull_failures_report_their_cause() {
    let (host, registry) = (stalling_host(), Registry::start().await);
    let missing = host.task_named(&registry.name("none:1"), "");
    assert!(matches!(pull(&host, &missing, None).await, Err(RuntimeError::NoImage { .. })));
    let bad = host.task_named(&registry.name("UPPER:1"), "");
    assert!(matches!(pull(&host, &bad, None).await, Err(RuntimeError::Refused { .. })));

    let (corrupt, _) = registry.put("corrupt", "1", random_layer(100_000));
    registry.set_layers(LayerDelivery::Corrupt);
    let corrupt = pull(&host, &host.task_named(&corrupt, ""), None).await.unwrap_err();
    assert!(matches!(corrupt, RuntimeError::Failed { .. }), "{corrupt:?}");

    let (stalled, _) = registry.put("stalled", "1", random_layer(1 << 20));
    registry.set_layers(LayerDelivery::Stall);
    let begun = Instant::now();
    let stalled = pull(&host, &host.task_named(&stalled, ""), None).await;
    assert!(matches!(stalled, Err(RuntimeError::Stalled { secs: 3, .. })), "{stalled:?}");
    assert!(begun.elapsed() < STALL_TIMEOUT * 3);

    let gone = registry.name("gone:1");
    drop(registry);
    let gone = pull(&host, &host.task_named(&gone, ""), None).await;
    assert!(matches!(gone, Err(RuntimeError::Failed { .. })), "{gone:?}");
}

#[tokio::test]
async fn f17_oci_pull_is_cancelled_within_two_seconds() {
    let (host, registry) = (stalling_host(), Registry::start().await);
    let (name, _) = registry.put("slow", "1", random_layer(8 << 20));
    registry.set_layers(LayerDelivery::Slow(Duration::from_millis(1600)));
    let task = host.task_named(&name, "");
    {
        let mut pulling = host.oci.pull(&task, None, ignore_progress());
        let begun = eventually_async("a layer comes", async || (registry.open() > 0).then_some(()));
        tokio::select! {
            ended = &mut pulling => panic!("{ended:?}"),
            () = begun => {}
        }
    }
    let begun = Instant::now();
    eventually_async("nothing comes any more", async || (registry.open() == 0).then_some(())).await;
    assert!(begun.elapsed() <= Duration::from_secs(2));
    assert!(matches!(host.oci.create(&task).await, Err(RuntimeError::NoImage { .. })));
}

#[tokio::test]
async fn oci_credentials_with_any_characters_reach_the_registry() {
    let (host, registry) = (stalling_host(), Registry::start().await);
    let (name, _) = registry.put("private", "1", random_layer(1000));
    // Each of the three positions of a character in base64, with characters that are encoded as `+` and `/`.
    let right = auth("ann", "a?b~c>??~~>>ü");
    registry.set_password(&right.username, &right.password);
    let task = host.task_named(&name, "");
    for wrong in [None, Some(auth("ann", "wrong"))] {
        let refused = pull(&host, &task, wrong.as_ref()).await;
        assert!(matches!(refused, Err(RuntimeError::Unauthorized { .. })), "{refused:?}");
    }
    pull(&host, &task, Some(&right)).await.unwrap();
}

#[tokio::test]
async fn oci_rechecks_credentials_for_a_local_private_image() {
    let (host, registry) = (stalling_host(), Registry::start().await);
    let (name, _) = registry.put("kept", "1", random_layer(1000));
    let (ann, bob) = (auth("ann", "secret"), auth("bob", "guess"));
    registry.set_password(&ann.username, &ann.password);
    let task = host.task_named(&name, "");
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
async fn oci_removes_unused_images_if_there_is_no_space_for_another_one() {
    const SIZE: usize = 100_000;
    let host = OciHost::with(|settings| {
        (settings.store.bytes_max, settings.store.age_min) = (Some(250_000), Duration::ZERO);
    });
    let registry = Registry::start().await;
    let layers = || fs::read_dir(host.home.join("oci/layers")).unwrap().count();
    let used = host.task_named(&registry.put("used", "1", random_layer(SIZE)).0, "");
    pull(&host, &used, None).await.unwrap();
    host.oci.create(&used).await.unwrap();
    for at in 0..2 {
        let (name, _) = registry.put("other", &at.to_string(), random_layer(SIZE));
        pull(&host, &host.task_named(&name, ""), None).await.unwrap();
        assert_eq!(layers(), 2, "that of a container, and the last one");
    }
    // The same for an image of this host.
    let archive = host.scratch.path().join("saved.tar");
    write_docker_archive(&archive, &random_layer(SIZE));
    let local = host.task_named(&format!("docker-archive:{}", archive.display()), "");
    pull(&host, &local, None).await.unwrap();
    assert_eq!(layers(), 2);
    host.oci.create(&local).await.unwrap();
    let (name, _) = registry.put("other", "last", random_layer(SIZE));
    let full = pull(&host, &host.task_named(&name, ""), None).await;
    assert!(matches!(full, Err(RuntimeError::NoDisk { .. })), "containers use both: {full:?}");
    assert_eq!(layers(), 2);
}
