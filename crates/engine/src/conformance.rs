//! Conformance suite of lease stores: memory, SQLite and Postgres all pass it.
//!
//! A store provides a [`Harness`] and calls [`lease_conformance!`](crate::lease_conformance) in its tests. No case
//! waits for real time to pass: the harness moves stored times into the past instead.

mod locks;
mod related;

use std::{future::Future, sync::Arc, time::Duration};

use uuid::Uuid;

pub use crate::memory::Row;
use crate::store::{Claim, DbTime, Lease, LeaseKey, LeaseStore, Queue};

pub use locks::*;
pub use related::*;

/// Long enough that nothing expires by itself while a case runs.
pub(crate) const TTL: Duration = Duration::from_secs(300);

/// A store under test, with direct access to its rows and its time.
pub trait Harness: Send + Sync + Sized + 'static {
    type Store: LeaseStore;

    /// Table that pipelines claim from.
    const MAIN: &'static str;
    /// Table whose rows are locked for an item of another pipeline.
    const RELATED: &'static str;
    /// Statuses that the pipeline under test claims; rows of `RELATED` may have them too.
    const CLAIMED: &'static [&'static str];
    /// A status that it does not claim.
    const UNCLAIMED: &'static str;

    /// Opens a store whose two tables are empty, shared with no other case.
    fn open() -> impl Future<Output = Self> + Send;

    fn store(&self) -> Arc<Self::Store>;

    /// Inserts a row with exactly these lock columns.
    fn insert(&self, table: &'static str, row: Row) -> impl Future<Output = ()> + Send;

    fn row(&self, table: &'static str, id: Uuid) -> impl Future<Output = Row> + Send;

    /// Returns the current time of the database.
    fn now(&self) -> impl Future<Output = DbTime> + Send;

    /// Simulates the passing of `by`: moves `lock_expires_at` and `due_at` of every row of the table into the past.
    fn advance_time(&self, table: &'static str, by: Duration) -> impl Future<Output = ()> + Send;
}

/// Defines one test per case of the suite for a [`Harness`](crate::conformance::Harness).
#[macro_export]
macro_rules! lease_conformance {
    ($harness:ty) => {
        $crate::lease_conformance! { @cases $harness:
            a_claim_writes_token_owner_expiry_and_the_next_epoch
            l12_a_claim_takes_exactly_the_due_and_free_rows_of_its_statuses
            l12_a_claim_takes_the_oldest_first_and_no_more_than_requested
            l12_rows_that_are_wanted_come_before_those_whose_time_has_come
            l12_concurrent_claimers_never_get_the_same_row
            l3_rows_owned_by_another_pipeline_are_left_alone
            l3_a_row_locked_for_an_item_is_not_claimed_even_by_its_pipeline
            l4_an_expired_lock_is_taken_over_by_another_replica
            l1_a_stale_token_writes_nothing
            l1_a_mixed_batch_writes_only_what_is_still_held
            l5_expiry_is_written_by_the_databases_clock
            l9_extend_moves_the_expiry_and_answers_only_what_is_held
            l11_finish_unlocks_and_moves_last_processed_at
            l13_a_batch_of_finishes_has_one_now
            a_row_finished_without_a_due_time_is_due_at_once
            a_row_is_not_claimed_before_its_due_time
            l14_a_held_row_that_is_marked_due_is_due_again_at_once
            l14_a_free_row_that_is_marked_due_is_due_at_once
            the_next_due_time_is_the_earliest_of_rows_that_could_be_claimed
            hand_back_unlocks_and_keeps_last_processed_at
            l10_reset_clears_the_lock_keeps_the_owner_and_moves_the_row_to_the_end
            the_store_is_not_called_without_need
            l10_a_busy_related_row_locks_nothing
            l12_a_related_lock_takes_all_rows_and_keeps_their_pipeline_off
            l3_an_item_does_not_get_what_another_item_of_its_pipeline_holds
            l3_an_expired_related_lock_is_left_to_its_item
            a_related_row_that_is_gone_is_busy
            l6_reserving_marks_what_is_free_and_nothing_else
            l6_a_parent_that_reserves_gets_all_its_children_in_the_end
            l6_reserved_rows_stay_out_of_reach_of_another_parent
            the_next_holder_of_an_item_takes_over_its_related_locks_at_once
            l1_unlocking_related_rows_with_stale_tokens_does_nothing
            l11_unlocking_related_rows_clears_lock_and_owner
            l12_concurrent_items_never_share_a_related_row
        }
    };
    (@cases $harness:ty: $($case:ident)*) => {
        $(
            #[tokio::test]
            async fn $case() {
                $crate::conformance::$case::<$harness>().await;
            }
        )*
    };
}

pub(crate) const PIPELINE: &str = "conformance";
pub(crate) const OTHER_PIPELINE: &str = "stranger";

/// Returns the queue of the pipeline under test.
pub(crate) fn queue<H: Harness>() -> Queue {
    Queue { pipeline: PIPELINE, table: H::MAIN, statuses: H::CLAIMED }
}

/// Returns a queue over the same rows for a pipeline with another name.
pub(crate) fn other_pipeline_queue<H: Harness>() -> Queue {
    Queue { pipeline: OTHER_PIPELINE, ..queue::<H>() }
}

/// Returns a version 4 id; ids sort like their numbers.
pub(crate) fn id(number: u64) -> Uuid {
    Uuid::from_u64_pair((number << 16) | 0x4000, 0x8000_0000_0000_0000 | number)
}

pub(crate) fn expect<T, E: std::fmt::Debug>(answer: Result<T, E>) -> T {
    match answer {
        Ok(value) => value,
        Err(error) => panic!("the store failed: {error:?}"),
    }
}

/// Inserts a claimable row into the main table, last processed `age_s` seconds ago.
pub(crate) async fn insert_row<H: Harness>(harness: &H, number: u64, age_s: i64) -> Uuid {
    insert_row_with(harness, number, age_s, |_| {}).await
}

pub(crate) async fn insert_row_with<H: Harness>(
    harness: &H,
    number: u64,
    age_s: i64,
    change: impl FnOnce(&mut Row) + Send,
) -> Uuid {
    let mut row = Row::new(id(number), H::CLAIMED[0], harness.now().await - age_s * 1_000_000);
    change(&mut row);
    harness.insert(H::MAIN, row).await;
    id(number)
}

pub(crate) async fn claim<H: Harness>(harness: &H, limit: usize) -> Claim {
    expect(harness.store().claim(&queue::<H>(), limit, TTL).await)
}

/// Claims one row that must exist.
pub(crate) async fn claim_one<H: Harness>(harness: &H) -> Lease {
    let mut claim = claim(harness, 1).await;
    claim.leases.pop().unwrap_or_else(|| panic!("no row was claimed"))
}

pub(crate) fn ids(leases: &[Lease]) -> Vec<Uuid> {
    leases.iter().map(|lease| lease.id).collect()
}

pub(crate) fn lease_keys(leases: &[Lease]) -> Vec<LeaseKey> {
    leases.iter().map(Lease::key).collect()
}

pub(crate) fn micros(duration: Duration) -> i64 {
    i64::try_from(duration.as_micros()).unwrap_or(i64::MAX)
}
