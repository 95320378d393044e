//! Nothing is left of containers whose shim is killed, whatever it was doing.

use std::{
    fs,
    path::{Path, PathBuf},
    time::Duration,
};

use serde_json::json;
use windlass_agent::digest::sha256_hex;
use windlass_testkit::{lab::registry::ImageOptions, rng::Rng, wait::eventually_async};

use crate::support::{
    images::{Image, Tar},
    leftover_check, oci,
    shim::{Setup, Shim},
};

/// A user without an account.
const USER: u32 = 61_236;
/// Times that the shim is killed.
const ROUNDS: u64 = 8;
/// Containers that are started in each round.
const TASKS: usize = 4;
/// The part of the journal after which the shim is killed at the latest: all containers run before.
const JOURNAL_BYTES_MAX: u64 = 6000;
/// Maximum time after the last record, to be killed between two of them.
const MOMENT_US_MAX: u64 = 4000;

fn journal_size(home: &Path) -> u64 {
    fs::metadata(home.join("journal")).unwrap().len()
}

/// Waits until the shim has written this much to its journal, or has no more to write.
async fn wait_for_journal(shim: &Shim, size: u64, ids: &[windlass_model::id::SubmissionId]) {
    eventually_async("the shim goes on", async || {
        if journal_size(&shim.home()) >= size {
            return Some(());
        }
        for id in ids {
            if shim.info(*id).await.status != windlass_api::agent::shim::TaskStatus::Running {
                return None;
            }
        }
        Some(())
    })
    .await;
}

async fn check_kills(setup: Setup, seed: u64) {
    let mut rng = Rng::new(seed);
    let image = oci::serve_image(Image::Busybox);
    let mut shim = Shim::start(setup);
    for _ in 0..ROUNDS {
        let before = journal_size(&shim.home());
        let mut ids = Vec::new();
        for at in 0..TASKS {
            let mut spec = shim.spec("killed");
            spec["image_name"] = image.clone().into();
            spec["network_mode"] = json!(if at % 2 == 0 { "host" } else { "bridge" });
            ids.push(shim.submit(&spec, 1).await);
        }
        wait_for_journal(&shim, before + rng.below(JOURNAL_BYTES_MAX), &ids).await;
        tokio::time::sleep(Duration::from_micros(rng.below(MOMENT_US_MAX))).await;
        shim.kill();
        shim.restart();
        for id in &ids {
            shim.terminate(*id, 1, 0).await;
            shim.remove(*id, 1).await;
        }
        leftover_check::assert_clean(&shim.home(), &ids).await;
    }
    let unfinished = fs::read_dir(shim.home().join("oci/tmp")).unwrap().count();
    assert_eq!(unfinished, 0, "of the image store");
}

#[tokio::test]
async fn g6_nothing_is_left_of_containers_whose_shim_is_killed_at_random_moments() {
    check_kills(Setup::oci(), 28).await;
}

#[tokio::test]
async fn g6_nothing_is_left_of_rootless_containers_whose_shim_is_killed_at_random_moments() {
    check_kills(Setup::oci().user(USER), 29).await;
}

/// Parts of a pull, each of which is entered after the one before it.
const PULL_STEPS: [&str; 5] = ["tasks", "downloads", "tmp", "layers", "images"];
/// Size of the file in the layer of a pull.
const PULL_BYTES: usize = 400_000;

/// Returns the number of the last step that the pull of these layers has entered.
fn pull_step(home: &Path, is_known: impl Fn(&str) -> bool) -> usize {
    let entered = |part: &str| {
        let entries = fs::read_dir(home.join("oci").join(part)).into_iter().flatten().flatten();
        entries.filter_map(|entry| entry.file_name().into_string().ok()).any(|name| !is_known(&name))
    };
    PULL_STEPS.iter().rposition(|part| entered(part)).unwrap_or(0)
}

fn layer_dirs(home: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(home.join("oci/layers")).unwrap();
    entries.map(|entry| entry.unwrap().path()).collect()
}

#[tokio::test]
async fn g6_a_shim_that_is_killed_during_a_pull_leaves_a_store_that_is_whole() {
    let mut rng = Rng::new(30);
    let mut shim = Shim::start(Setup::oci());
    let mut known: Vec<String> = Vec::new();
    for round in 0..PULL_STEPS.len() {
        // A separate layer in each round; the other one is common.
        let own = rng.bytes(PULL_BYTES);
        let mut tar = Tar::new();
        tar.file("own", &own, 0o644);
        let options = ImageOptions { config: Image::Busybox.config(), ..ImageOptions::default() };
        let layers = vec![Image::Busybox.tar(), tar.done()];
        let image = oci::serve_layers(&format!("killed{round}"), layers, options);
        let mut spec = shim.spec("killed");
        spec["image_name"] = image.clone().into();
        let id = shim.submit(&spec, 1).await;
        let step = round;
        eventually_async("the pull goes on", async || {
            (pull_step(&shim.home(), |name| known.iter().any(|known| known == name)) >= step).then_some(())
        })
        .await;
        tokio::time::sleep(Duration::from_micros(rng.below(MOMENT_US_MAX))).await;
        shim.kill();
        shim.restart();
        assert_eq!(fs::read_dir(shim.home().join("oci/tmp")).unwrap().count(), 0, "nothing unfinished");
        // The task goes on where it was, and gets the whole image.
        shim.wait_for(id, windlass_api::agent::shim::TaskStatus::Running).await;
        let mut contents = Vec::new();
        for layer in layer_dirs(&shim.home()) {
            assert!(layer.join("layer.json").is_file(), "{} has no record", layer.display());
            contents.extend(fs::read(layer.join("fs/own")).ok().map(|bytes| sha256_hex(&bytes)));
        }
        assert!(contents.contains(&sha256_hex(&own)), "round {round}");
        assert_eq!(contents.len(), round + 1, "one layer for each round");
        assert_eq!(fs::read_dir(shim.home().join("oci/downloads")).unwrap().count(), 0);
        shim.terminate(id, 1, 0).await;
        shim.remove(id, 1).await;
        leftover_check::assert_clean(&shim.home(), &[id]).await;
        for part in &PULL_STEPS[1..] {
            let entries = fs::read_dir(shim.home().join("oci").join(part)).unwrap();
            known.extend(entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()));
        }
    }
}
