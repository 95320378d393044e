//! Cases about locks on rows of another table, held for one item of a pipeline.

use std::{collections::BTreeSet, time::Duration};

use futures_util::future::join_all;
use uuid::Uuid;

use super::{Harness, OTHER_PIPELINE, PIPELINE, Row, TTL, expect, id, ids, lease_keys, micros};
use crate::store::{Lease, LeaseStore, Queue, RelatedLock, RelatedLockOutcome};

/// Pipeline that owns these rows.
const CHILDREN: &str = "children";

fn children<H: Harness>() -> Queue {
    Queue { pipeline: CHILDREN, table: H::RELATED, statuses: H::CLAIMED }
}

fn owner(item: Uuid) -> String {
    format!("{PIPELINE}:{item}")
}

async fn put<H: Harness>(harness: &H, numbers: impl IntoIterator<Item = u64>) {
    let now = harness.now().await;
    for number in numbers {
        harness.insert(H::RELATED, Row::new(id(number), H::CLAIMED[0], now - 10_000_000)).await;
    }
}

async fn lock<H: Harness>(harness: &H, numbers: &[u64], item: Uuid, reserve: bool) -> RelatedLockOutcome {
    let ids: Vec<Uuid> = numbers.iter().map(|number| id(*number)).collect();
    let lock = RelatedLock { table: H::RELATED, ids: &ids, pipeline: PIPELINE, item, ttl: TTL, reserve };
    expect(harness.store().lock_related(lock).await)
}

#[track_caller]
fn locked(answer: RelatedLockOutcome) -> Vec<Lease> {
    match answer {
        RelatedLockOutcome::Locked(leases) => leases,
        RelatedLockOutcome::Busy => panic!("expected the rows to be locked"),
    }
}

#[track_caller]
fn busy(answer: &RelatedLockOutcome) {
    assert!(matches!(answer, RelatedLockOutcome::Busy), "expected the rows to be busy: {answer:?}");
}

async fn claim_children<H: Harness>(harness: &H, limit: usize) -> Vec<Lease> {
    expect(harness.store().claim(&children::<H>(), limit, TTL).await).leases
}

async fn rows<H: Harness>(harness: &H, numbers: impl IntoIterator<Item = u64>) -> Vec<Row> {
    let mut rows = Vec::new();
    for number in numbers {
        rows.push(harness.row(H::RELATED, id(number)).await);
    }
    rows
}

pub async fn l10_a_busy_related_row_locks_nothing<H: Harness>() {
    let harness = H::open().await;
    put(&harness, 1..=3).await;
    let child = claim_children(&harness, 1).await;
    assert_eq!(child.len(), 1);
    let before = rows(&harness, 1..=3).await;
    busy(&lock(&harness, &[1, 2, 3], id(100), false).await);
    assert_eq!(rows(&harness, 1..=3).await, before);

    expect(harness.store().finish(&children::<H>(), &[(child[0].key(), None)]).await);
    assert_eq!(locked(lock(&harness, &[1, 2, 3], id(100), false).await).len(), 3, "the retry gets them");
}

pub async fn l12_a_related_lock_takes_all_rows_and_keeps_their_pipeline_off<H: Harness>() {
    let harness = H::open().await;
    put(&harness, 1..=4).await;
    let before = harness.now().await;
    let leases = locked(lock(&harness, &[1, 2, 3], id(100), false).await);
    let after = harness.now().await;
    let distinct: BTreeSet<Uuid> = leases.iter().map(|lease| lease.token).collect();
    assert_eq!(distinct.len(), 3, "each row has its own token");
    for lease in &leases {
        let row = harness.row(H::RELATED, lease.id).await;
        assert_eq!(row.lock_token, Some(lease.token));
        assert_eq!(row.lock_owner, Some(owner(id(100))));
        assert_eq!((row.lock_epoch, lease.epoch), (1, 1));
        assert!((before..=after).contains(&lease.claimed_at));
        assert_eq!(row.lock_expires_at, Some(lease.claimed_at + micros(TTL)));
    }
    assert_eq!(ids(&claim_children(&harness, 9).await), [id(4)]);
}

pub async fn l3_an_item_does_not_get_what_another_item_of_its_pipeline_holds<H: Harness>() {
    let harness = H::open().await;
    put(&harness, 1..=2).await;
    locked(lock(&harness, &[1], id(100), false).await);
    let before = rows(&harness, 1..=2).await;
    busy(&lock(&harness, &[1, 2], id(200), false).await);
    assert_eq!(rows(&harness, 1..=2).await, before);
}

pub async fn l3_an_expired_related_lock_is_left_to_its_item<H: Harness>() {
    let harness = H::open().await;
    put(&harness, 1..=1).await;
    let first = locked(lock(&harness, &[1], id(100), false).await);
    harness.advance_time(H::RELATED, TTL * 2).await;
    // The item's main lock may have been extended all along, so expiry alone proves nothing here.
    busy(&lock(&harness, &[1], id(200), false).await);
    assert!(claim_children(&harness, 9).await.is_empty());
    let again = locked(lock(&harness, &[1], id(100), false).await);
    assert_eq!(again[0].epoch, first[0].epoch + 1);
}

pub async fn a_related_row_that_is_gone_is_busy<H: Harness>() {
    let harness = H::open().await;
    put(&harness, 1..=1).await;
    let before = rows(&harness, 1..=1).await;
    busy(&lock(&harness, &[1, 2], id(100), false).await);
    assert_eq!(rows(&harness, 1..=1).await, before);
}

pub async fn l6_reserving_marks_what_is_free_and_nothing_else<H: Harness>() {
    let harness = H::open().await;
    put(&harness, 1..=5).await;
    let child = claim_children(&harness, 1).await;
    assert_eq!(ids(&child), [id(1)]);
    locked(lock(&harness, &[2], id(200), false).await);
    let mut reserved_by_other = harness.row(H::RELATED, id(3)).await;
    reserved_by_other.id = id(6);
    reserved_by_other.lock_owner = Some(OTHER_PIPELINE.to_owned());
    harness.insert(H::RELATED, reserved_by_other).await;
    let before = rows(&harness, 1..=6).await;

    busy(&lock(&harness, &[1, 2, 3, 4, 6], id(100), true).await);
    let after = rows(&harness, 1..=6).await;
    for (before, after) in before.iter().zip(&after) {
        let mut expected = before.clone();
        if before.id == id(3) || before.id == id(4) {
            expected.lock_owner = Some(owner(id(100)));
        }
        assert_eq!(*after, expected);
    }
}

pub async fn l6_a_parent_that_reserves_gets_all_its_children_in_the_end<H: Harness>() {
    let harness = H::open().await;
    put(&harness, 1..=4).await;
    // The children's pipeline always processes two of them, and claims more whenever it has finished one.
    let mut at_work = claim_children(&harness, 2).await;
    for _ in 0..4 {
        if let RelatedLockOutcome::Locked(leases) = lock(&harness, &[1, 2, 3, 4], id(100), true).await {
            assert_eq!(leases.len(), 4);
            return;
        }
        let done = at_work.remove(0);
        expect(harness.store().finish(&children::<H>(), &[(done.key(), None)]).await);
        if at_work.is_empty() {
            // Only the last one was left to them, and the parent tries again before their next claim.
            continue;
        }
        let more = claim_children(&harness, 2).await;
        assert!(more.iter().all(|lease| lease.id == done.id), "they let go of what is reserved");
        expect(harness.store().hand_back(&children::<H>(), &lease_keys(&more)).await);
    }
    panic!("the parent starved");
}

pub async fn l6_reserved_rows_stay_out_of_reach_of_another_parent<H: Harness>() {
    let harness = H::open().await;
    put(&harness, 1..=2).await;
    let child = claim_children(&harness, 1).await;
    busy(&lock(&harness, &[1, 2], id(100), true).await);
    busy(&lock(&harness, &[2], id(200), false).await);
    busy(&lock(&harness, &[2], id(200), true).await);
    assert_eq!(harness.row(H::RELATED, id(2)).await.lock_owner, Some(owner(id(100))));
    expect(harness.store().hand_back(&children::<H>(), &lease_keys(&child)).await);
    assert_eq!(locked(lock(&harness, &[1, 2], id(100), true).await).len(), 2);
}

pub async fn the_next_holder_of_an_item_takes_over_its_related_locks_at_once<H: Harness>() {
    let harness = H::open().await;
    put(&harness, 1..=2).await;
    let dead = locked(lock(&harness, &[1, 2], id(100), false).await);
    let heir = locked(lock(&harness, &[1, 2], id(100), false).await);
    for (dead, heir) in dead.iter().zip(&heir) {
        assert_eq!(dead.id, heir.id);
        assert_ne!(dead.token, heir.token);
        assert_eq!(heir.epoch, dead.epoch + 1);
    }
}

pub async fn l1_unlocking_related_rows_with_stale_tokens_does_nothing<H: Harness>() {
    let harness = H::open().await;
    put(&harness, 1..=2).await;
    let stale = locked(lock(&harness, &[1, 2], id(100), false).await);
    locked(lock(&harness, &[1, 2], id(100), false).await);
    let before = rows(&harness, 1..=2).await;
    expect(harness.store().unlock_related(H::RELATED, &lease_keys(&stale)).await);
    assert_eq!(rows(&harness, 1..=2).await, before);
}

pub async fn l11_unlocking_related_rows_clears_lock_and_owner<H: Harness>() {
    let harness = H::open().await;
    put(&harness, 1..=3).await;
    let leases = locked(lock(&harness, &[1, 2, 3], id(100), false).await);
    expect(harness.store().unlock_related(H::RELATED, &lease_keys(&leases[..2])).await);
    for row in rows(&harness, 1..=2).await {
        assert_eq!((row.lock_token, row.lock_expires_at, &row.lock_owner), (None, None, &None));
        assert_eq!(row.lock_epoch, 1);
    }
    assert_eq!(ids(&claim_children(&harness, 9).await), [id(1), id(2)], "their pipeline goes on");
}

pub async fn l12_concurrent_items_never_share_a_related_row<H: Harness>() {
    let harness = H::open().await;
    put(&harness, 1..=1).await;
    let items = (0..8).map(|item| {
        let store = harness.store();
        tokio::spawn(async move {
            let lock = RelatedLock {
                table: H::RELATED,
                ids: &[id(1)],
                pipeline: PIPELINE,
                item: id(100 + item),
                ttl: Duration::from_secs(60),
                reserve: false,
            };
            matches!(expect(store.lock_related(lock).await), RelatedLockOutcome::Locked(_))
        })
    });
    let winners = join_all(items).await.into_iter().filter(|won| matches!(won, Ok(true))).count();
    assert_eq!(winners, 1);
}
