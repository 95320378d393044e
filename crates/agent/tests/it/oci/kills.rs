//! Nothing is left of containers whose shim is killed, whatever it was doing.

use std::{fs, path::Path, time::Duration};

use serde_json::json;
use windlass_testkit::{rng::Rng, wait::eventually_async};

use crate::support::{
    images::Image,
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
