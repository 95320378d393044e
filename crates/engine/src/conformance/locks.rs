//! Cases about the main lock: claim, extend, finish, hand back, reset.

use std::{collections::BTreeSet, time::Duration};

use futures_util::future::join_all;
use uuid::Uuid;

use super::{
    Harness, OTHER_PIPELINE, PIPELINE, TTL, claim, claim_one, expect, id, ids, insert_row, insert_row_with,
    lease_keys, micros, other_pipeline_queue, queue,
};
use crate::store::{LeaseKey, LeaseStore};

const MINUTE: Duration = Duration::from_secs(60);
const NONE: [Uuid; 0] = [];

pub async fn a_claim_writes_token_owner_expiry_and_the_next_epoch<H: Harness>() {
    let harness = H::open().await;
    insert_row_with(&harness, 1, 10, |row| row.lock_epoch = 41).await;
    let before = harness.row(H::MAIN, id(1)).await;
    let lease = claim_one(&harness).await;
    let row = harness.row(H::MAIN, id(1)).await;
    assert_eq!(lease.epoch, 42, "the epoch grows by one with every take");
    assert_eq!(row.lock_epoch, 42);
    assert_eq!(row.lock_token, Some(lease.token));
    assert_eq!(row.lock_owner.as_deref(), Some(PIPELINE));
    assert_eq!(row.lock_expires_at, Some(lease.claimed_at + micros(TTL)));
    assert_eq!(row.last_processed_at, before.last_processed_at, "taking is not processing");
    assert_eq!(row.status, before.status);

    expect(harness.store().finish(&queue::<H>(), &[(lease.key(), None)]).await);
    let again = claim_one(&harness).await;
    assert_eq!(again.epoch, 43);
    assert_ne!(again.token, lease.token, "every take has a token of its own");
}

pub async fn l12_a_claim_takes_exactly_the_due_and_free_rows_of_its_statuses<H: Harness>() {
    let harness = H::open().await;
    let now = harness.now().await;
    let mut expected = Vec::new();
    // Every combination, numbered so that the ids show which one was wrongly claimed or left.
    let mut number = 0;
    for status in [H::CLAIMED[0], H::CLAIMED[H::CLAIMED.len() - 1], H::UNCLAIMED] {
        for due_at in [None, Some(now - micros(MINUTE)), Some(now + micros(MINUTE))] {
            for expires_at in [None, Some(now - micros(MINUTE)), Some(now + micros(MINUTE))] {
                for owner in [None, Some(PIPELINE), Some(OTHER_PIPELINE)] {
                    number += 1;
                    insert_row_with(&harness, number, 10, |row| {
                        row.status = status.to_owned();
                        row.due_at = due_at;
                        row.lock_expires_at = expires_at;
                        row.lock_token = expires_at.map(|_| id(1000 + number));
                        row.lock_owner = owner.map(str::to_owned);
                    })
                    .await;
                    if status != H::UNCLAIMED
                        && due_at.is_none_or(|at| at < now)
                        && expires_at.is_none_or(|at| at < now)
                        && owner != Some(OTHER_PIPELINE)
                    {
                        expected.push(id(number));
                    }
                }
            }
        }
    }
    let mut claimed = ids(&claim(&harness, 1000).await.leases);
    claimed.sort_unstable();
    assert_eq!(claimed, expected);
    assert!(claim(&harness, 1000).await.leases.is_empty(), "what is taken is not taken again");
}

pub async fn l12_a_claim_takes_the_oldest_first_and_no_more_than_requested<H: Harness>() {
    let harness = H::open().await;
    for (number, age_s) in [(1, 20), (2, 50), (3, 10), (4, 40), (5, 30)] {
        insert_row(&harness, number, age_s).await;
    }
    // An expired lock does not change the order of a row.
    let expired_at = harness.now().await - micros(MINUTE);
    insert_row_with(&harness, 6, 45, |row| {
        row.lock_expires_at = Some(expired_at);
        row.lock_token = Some(id(1006));
        row.lock_owner = Some(PIPELINE.to_owned());
    })
    .await;
    assert_eq!(ids(&claim(&harness, 4).await.leases), [id(2), id(6), id(4), id(5)]);
    assert_eq!(ids(&claim(&harness, 4).await.leases), [id(1), id(3)]);
}

pub async fn l12_rows_that_are_wanted_come_before_those_whose_time_has_come<H: Harness>() {
    let harness = H::open().await;
    let now = harness.now().await;
    for (number, age_s, due_s_ago) in [(1, 50, 1), (2, 40, 1), (3, 30, 60), (5, 60, 5)] {
        let due = now - micros(Duration::from_secs(due_s_ago));
        insert_row_with(&harness, number, age_s, |row| row.due_at = Some(due)).await;
    }
    // Its due time is unset: a pass was requested.
    insert_row(&harness, 4, 10).await;
    let mut first = ids(&claim(&harness, 2).await.leases);
    first.sort_unstable();
    assert_eq!(first, [id(3), id(4)], "wanted, and due for long");
    assert_eq!(ids(&claim(&harness, 2).await.leases), [id(5), id(1)]);
    assert_eq!(claim_one(&harness).await.id, id(2));
}

pub async fn l12_concurrent_claimers_never_get_the_same_row<H: Harness>() {
    let harness = H::open().await;
    let rows = 60;
    for number in 0..rows {
        insert_row(&harness, number, 10).await;
    }
    let claimers = (0..6).map(|_| {
        let store = harness.store();
        tokio::spawn(async move {
            let mut mine = Vec::new();
            loop {
                let leases = expect(store.claim(&queue::<H>(), 3, TTL).await).leases;
                if leases.is_empty() {
                    return mine;
                }
                mine.extend(leases);
            }
        })
    });
    let claimed: Vec<_> = join_all(claimers).await.into_iter().flat_map(expect).collect();
    let distinct: BTreeSet<Uuid> = claimed.iter().map(|lease| lease.id).collect();
    let tokens: BTreeSet<Uuid> = claimed.iter().map(|lease| lease.token).collect();
    assert_eq!(claimed.len(), distinct.len(), "a row went to two claimers");
    assert_eq!(claimed.len(), tokens.len(), "two leases have one token");
    // A claim may return nothing while another holds the rows that it found, so the remaining rows are counted with the
    // claimed ones.
    let left = claim(&harness, 1000).await.leases;
    assert_eq!(distinct.len() + left.len(), usize::try_from(rows).unwrap_or(0));
}

pub async fn l3_rows_owned_by_another_pipeline_are_left_alone<H: Harness>() {
    let harness = H::open().await;
    let past = harness.now().await - micros(MINUTE);
    insert_row_with(&harness, 1, 30, |row| row.lock_owner = Some(OTHER_PIPELINE.to_owned())).await;
    insert_row_with(&harness, 2, 20, |row| {
        row.lock_owner = Some(OTHER_PIPELINE.to_owned());
        row.lock_token = Some(id(1002));
        row.lock_expires_at = Some(past);
    })
    .await;
    insert_row_with(&harness, 3, 10, |row| row.lock_owner = Some(PIPELINE.to_owned())).await;
    assert_eq!(ids(&claim(&harness, 10).await.leases), [id(3)]);
    let others = expect(harness.store().claim(&other_pipeline_queue::<H>(), 10, TTL).await);
    assert_eq!(ids(&others.leases), [id(1), id(2)], "the owner itself recovers them");
}

pub async fn l3_a_row_locked_for_an_item_is_not_claimed_even_by_its_pipeline<H: Harness>() {
    let harness = H::open().await;
    let past = harness.now().await - micros(MINUTE);
    let owner = format!("{PIPELINE}:{}", id(77));
    insert_row_with(&harness, 1, 30, |row| row.lock_owner = Some(owner.clone())).await;
    insert_row_with(&harness, 2, 20, |row| {
        row.lock_owner = Some(owner.clone());
        row.lock_token = Some(id(1002));
        row.lock_expires_at = Some(past);
    })
    .await;
    assert!(claim(&harness, 10).await.leases.is_empty());
}

pub async fn l4_an_expired_lock_is_taken_over_by_another_replica<H: Harness>() {
    let harness = H::open().await;
    insert_row(&harness, 1, 10).await;
    let dead = claim_one(&harness).await;
    assert!(claim(&harness, 1).await.leases.is_empty(), "nobody takes what is still locked");
    harness.advance_time(H::MAIN, TTL - MINUTE).await;
    assert!(claim(&harness, 1).await.leases.is_empty(), "nor shortly before it expires");
    harness.advance_time(H::MAIN, MINUTE).await;
    let heir = claim_one(&harness).await;
    assert_eq!(heir.id, dead.id);
    assert_ne!(heir.token, dead.token);
    assert_eq!(heir.epoch, dead.epoch + 1);
}

pub async fn l1_a_stale_token_writes_nothing<H: Harness>() {
    let harness = H::open().await;
    insert_row(&harness, 1, 10).await;
    let stale = claim_one(&harness).await.key();
    harness.advance_time(H::MAIN, TTL).await;
    let heir = claim_one(&harness).await;
    let before = harness.row(H::MAIN, id(1)).await;

    let (store, queue) = (harness.store(), queue::<H>());
    assert_eq!(expect(store.finish(&queue, &[(stale, Some(MINUTE))]).await), NONE);
    assert_eq!(expect(store.extend(&queue, &[stale], TTL * 2).await), NONE);
    assert!(!expect(store.reset(&queue, stale).await));
    expect(store.hand_back(&queue, &[stale]).await);
    assert_eq!(harness.row(H::MAIN, id(1)).await, before);

    // A token is valid for its own row only.
    insert_row(&harness, 2, 10).await;
    let crossed = LeaseKey { id: id(2), token: heir.token };
    assert_eq!(expect(store.finish(&queue, &[(crossed, None)]).await), NONE);
    assert_eq!(harness.row(H::MAIN, id(1)).await, before);
}

pub async fn l1_a_mixed_batch_writes_only_what_is_still_held<H: Harness>() {
    let harness = H::open().await;
    for number in 1..=3 {
        insert_row(&harness, number, 10).await;
    }
    let leases = claim(&harness, 3).await.leases;
    let stale = LeaseKey { id: id(2), token: id(999) };
    let before = harness.row(H::MAIN, id(2)).await;
    let batch = [(leases[0].key(), None), (stale, None), (leases[2].key(), Some(MINUTE))];
    let mut finished = expect(harness.store().finish(&queue::<H>(), &batch).await);
    finished.sort_unstable();
    assert_eq!(finished, [id(1), id(3)]);
    assert_eq!(harness.row(H::MAIN, id(2)).await, before);
    assert!(
        harness.row(H::MAIN, id(1)).await.due_at.is_none_or(|at| at < leases[0].claimed_at + micros(MINUTE))
    );
    assert!(harness.row(H::MAIN, id(3)).await.due_at.is_some(), "each row has its own due time");
}

pub async fn l5_expiry_is_written_by_the_databases_clock<H: Harness>() {
    let harness = H::open().await;
    insert_row(&harness, 1, 10).await;
    let before = harness.now().await;
    let lease = claim_one(&harness).await;
    let after = harness.now().await;
    assert!((before..=after).contains(&lease.claimed_at), "{before} <= {} <= {after}", lease.claimed_at);

    let before = harness.now().await;
    expect(harness.store().extend(&queue::<H>(), &[lease.key()], TTL).await);
    let after = harness.now().await;
    let expires_at = harness.row(H::MAIN, id(1)).await.lock_expires_at.unwrap_or_default();
    assert!((before + micros(TTL)..=after + micros(TTL)).contains(&expires_at));
}

pub async fn l9_extend_moves_the_expiry_and_answers_only_what_is_held<H: Harness>() {
    let harness = H::open().await;
    for number in 1..=4 {
        insert_row(&harness, number, 10).await;
    }
    let leases = claim(&harness, 4).await.leases;
    let all = lease_keys(&leases);
    let (store, queue) = (harness.store(), queue::<H>());
    expect(store.finish(&queue, &[(all[1], None)]).await);
    expect(store.hand_back(&queue, &[all[2]]).await);
    let before = harness.row(H::MAIN, id(1)).await;
    let mut answer = expect(store.extend(&queue, &all, TTL * 2).await);
    answer.sort_unstable();
    assert_eq!(answer, [id(1), id(4)]);
    let row = harness.row(H::MAIN, id(1)).await;
    assert!(row.lock_expires_at > before.lock_expires_at);
    assert_eq!(row.last_processed_at, before.last_processed_at);
    assert_eq!(row.lock_token, before.lock_token, "a heartbeat never takes a new token");
    assert_eq!(row.lock_epoch, before.lock_epoch);
    assert_eq!(harness.row(H::MAIN, id(2)).await.lock_expires_at, None);
    assert_eq!(harness.row(H::MAIN, id(3)).await.lock_expires_at, None);

    harness.advance_time(H::MAIN, TTL).await;
    let claimed: BTreeSet<Uuid> = ids(&claim(&harness, 10).await.leases).into_iter().collect();
    assert_eq!(claimed, BTreeSet::from([id(2), id(3)]), "what was extended is still held");
}

pub async fn l11_finish_unlocks_and_moves_last_processed_at<H: Harness>() {
    let harness = H::open().await;
    insert_row(&harness, 1, 10).await;
    let before = harness.row(H::MAIN, id(1)).await;
    let lease = claim_one(&harness).await;
    assert_eq!(expect(harness.store().finish(&queue::<H>(), &[(lease.key(), None)]).await), [id(1)]);
    let row = harness.row(H::MAIN, id(1)).await;
    assert_eq!((row.lock_token, row.lock_expires_at, row.lock_owner), (None, None, None));
    assert!(row.last_processed_at > before.last_processed_at);
    assert_eq!(row.lock_epoch, lease.epoch, "the epoch is never taken back");
    assert_eq!(expect(harness.store().finish(&queue::<H>(), &[(lease.key(), None)]).await), NONE);
}

pub async fn l13_a_batch_of_finishes_has_one_now<H: Harness>() {
    let harness = H::open().await;
    for number in 1..=20 {
        insert_row(&harness, number, 10).await;
    }
    let leases = claim(&harness, 20).await.leases;
    assert!(leases.iter().all(|lease| lease.claimed_at == leases[0].claimed_at), "one claim, one time");
    let before = harness.now().await;
    let done: Vec<_> = lease_keys(&leases).into_iter().map(|held| (held, Some(MINUTE))).collect();
    expect(harness.store().finish(&queue::<H>(), &done).await);
    let after = harness.now().await;
    let first = harness.row(H::MAIN, id(1)).await;
    assert!((before..=after).contains(&first.last_processed_at), "it is the database's");
    for number in 1..=20 {
        let row = harness.row(H::MAIN, id(number)).await;
        assert_eq!(row.last_processed_at, first.last_processed_at);
        assert_eq!(row.due_at, Some(first.last_processed_at + micros(MINUTE)));
    }
}

pub async fn a_row_finished_without_a_due_time_is_due_at_once<H: Harness>() {
    let harness = H::open().await;
    let past = harness.now().await - micros(MINUTE);
    insert_row_with(&harness, 1, 10, |row| row.due_at = Some(past)).await;
    let lease = claim_one(&harness).await;
    expect(harness.store().finish(&queue::<H>(), &[(lease.key(), None)]).await);
    assert_eq!(claim_one(&harness).await.id, id(1));
}

pub async fn a_row_is_not_claimed_before_its_due_time<H: Harness>() {
    let harness = H::open().await;
    insert_row(&harness, 1, 10).await;
    let lease = claim_one(&harness).await;
    expect(harness.store().finish(&queue::<H>(), &[(lease.key(), Some(2 * MINUTE))]).await);
    let early = claim(&harness, 1).await;
    assert!(early.leases.is_empty());
    let due_in = early.next_due_in.unwrap_or_default();
    assert!(due_in <= 2 * MINUTE && due_in > MINUTE, "{due_in:?}");
    harness.advance_time(H::MAIN, MINUTE).await;
    assert!(claim(&harness, 1).await.leases.is_empty());
    harness.advance_time(H::MAIN, MINUTE).await;
    assert_eq!(claim_one(&harness).await.id, id(1));
}

pub async fn l14_a_held_row_that_is_marked_due_is_due_again_at_once<H: Harness>() {
    let harness = H::open().await;
    insert_row(&harness, 1, 10).await;
    let lease = claim_one(&harness).await;
    expect(harness.store().mark_due(H::MAIN, &[id(1)]).await);
    assert!(claim(&harness, 1).await.leases.is_empty(), "it is still held");
    expect(harness.store().finish(&queue::<H>(), &[(lease.key(), Some(MINUTE))]).await);
    let again = claim_one(&harness).await;
    expect(harness.store().finish(&queue::<H>(), &[(again.key(), Some(MINUTE))]).await);
    assert!(claim(&harness, 1).await.leases.is_empty(), "the wish was heard once");
}

pub async fn l14_a_free_row_that_is_marked_due_is_due_at_once<H: Harness>() {
    let harness = H::open().await;
    let later = harness.now().await + micros(MINUTE);
    insert_row_with(&harness, 1, 10, |row| row.due_at = Some(later)).await;
    assert!(claim(&harness, 1).await.leases.is_empty());
    expect(harness.store().mark_due(H::MAIN, &[id(1)]).await);
    assert_eq!(claim_one(&harness).await.id, id(1));
}

pub async fn the_next_due_time_is_the_earliest_of_rows_that_could_be_claimed<H: Harness>() {
    let harness = H::open().await;
    assert_eq!(claim(&harness, 1).await.next_due_in, None, "no rows, no due time");
    let now = harness.now().await;
    let due_in = |minutes: i64| Some(now + minutes * micros(MINUTE));
    insert_row_with(&harness, 1, 10, |row| row.due_at = due_in(4)).await;
    insert_row_with(&harness, 2, 10, |row| row.due_at = due_in(2)).await;
    insert_row_with(&harness, 3, 10, |row| row.due_at = due_in(6)).await;
    // Not of this queue, of another pipeline, and locked: none of them can be claimed here.
    insert_row_with(&harness, 11, 10, |row| {
        row.due_at = due_in(1);
        row.status = H::UNCLAIMED.to_owned();
    })
    .await;
    insert_row_with(&harness, 12, 10, |row| {
        row.due_at = due_in(1);
        row.lock_owner = Some(OTHER_PIPELINE.to_owned());
    })
    .await;
    insert_row_with(&harness, 13, 10, |row| {
        row.due_at = due_in(1);
        row.lock_owner = Some(PIPELINE.to_owned());
        row.lock_token = Some(id(1013));
        row.lock_expires_at = due_in(9);
    })
    .await;
    let earliest = claim(&harness, 1).await.next_due_in.unwrap_or_default();
    assert!(earliest <= 2 * MINUTE && earliest > MINUTE, "row 2 is next: {earliest:?}");
    harness.advance_time(H::MAIN, 2 * MINUTE).await;
    let claim = claim(&harness, 9).await;
    assert_eq!(ids(&claim.leases), [id(2)]);
    let earliest = claim.next_due_in.unwrap_or_default();
    assert!(earliest <= 2 * MINUTE && earliest > MINUTE, "then row 1: {earliest:?}");
}

pub async fn hand_back_unlocks_and_keeps_last_processed_at<H: Harness>() {
    let harness = H::open().await;
    let past = harness.now().await - micros(MINUTE);
    insert_row_with(&harness, 1, 30, |row| row.due_at = Some(past)).await;
    insert_row(&harness, 2, 20).await;
    let before = harness.row(H::MAIN, id(1)).await;
    let lease = claim_one(&harness).await;
    expect(harness.store().hand_back(&queue::<H>(), &[lease.key()]).await);
    let row = harness.row(H::MAIN, id(1)).await;
    assert_eq!((row.lock_token, row.lock_expires_at, &row.lock_owner), (None, None, &None));
    assert_eq!(row.last_processed_at, before.last_processed_at);
    assert_eq!(row.due_at, before.due_at);
    assert_eq!(row.lock_epoch, lease.epoch);
    assert_eq!(claim_one(&harness).await.id, id(1), "it keeps its turn");
}

pub async fn l10_reset_clears_the_lock_keeps_the_owner_and_moves_the_row_to_the_end<H: Harness>() {
    let harness = H::open().await;
    let past = harness.now().await - micros(MINUTE);
    insert_row_with(&harness, 1, 30, |row| row.due_at = Some(past)).await;
    insert_row(&harness, 2, 20).await;
    let before = harness.row(H::MAIN, id(1)).await;
    let lease = claim_one(&harness).await;
    assert!(expect(harness.store().reset(&queue::<H>(), lease.key()).await));
    let row = harness.row(H::MAIN, id(1)).await;
    assert_eq!((row.lock_token, row.lock_expires_at), (None, None));
    assert_eq!(row.lock_owner.as_deref(), Some(PIPELINE));
    assert!(row.last_processed_at > before.last_processed_at);
    assert_eq!((row.due_at, &row.status, row.lock_epoch), (before.due_at, &before.status, lease.epoch));

    let other = expect(harness.store().claim(&other_pipeline_queue::<H>(), 9, TTL).await);
    assert_eq!(ids(&other.leases), [id(2)], "the owner still says whose it is");
    expect(harness.store().hand_back(&other_pipeline_queue::<H>(), &lease_keys(&other.leases)).await);
    assert_eq!(ids(&claim(&harness, 9).await.leases), [id(2), id(1)]);
    assert!(!expect(harness.store().reset(&queue::<H>(), lease.key()).await), "its token is gone");
}

pub async fn the_store_is_not_called_without_need<H: Harness>() {
    let harness = H::open().await;
    insert_row(&harness, 1, 10).await;
    let (store, queue) = (harness.store(), queue::<H>());
    assert!(claim(&harness, 0).await.leases.is_empty());
    assert_eq!(expect(store.extend(&queue, &[], TTL).await), NONE);
    assert_eq!(expect(store.finish(&queue, &[]).await), NONE);
    expect(store.hand_back(&queue, &[]).await);
    expect(store.unlock_related(H::RELATED, &[]).await);
    assert_eq!(claim_one(&harness).await.epoch, 1);
}
