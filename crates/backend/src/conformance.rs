//! Conformance tests of the trait for every backend. A backend's tests call [`holds`] with a function that opens it
//! again.

use std::sync::Arc;

use crate::{Backend, BackendInstance, DeleteProgress, InstanceRequest, InstanceSource, InstanceState};

/// Opens the backend as a new process would, without any state in memory.
pub type OpenBackend<'a> = &'a dyn Fn() -> Arc<dyn Backend>;
/// Maximum number of polls until an instance runs or is gone.
const POLLS_MAX: usize = 2000;
const POLL_INTERVAL: std::time::Duration = std::time::Duration::from_millis(10);

/// Runs all checks. `order` is for an instance that does not exist yet; it is deleted at the end.
///
/// Panics if a check fails: this is for tests.
pub async fn check_backend(open: OpenBackend<'_>, order: &InstanceRequest) {
    offers_are_stable(open).await;
    what_was_never_made_is_gone(open, order).await;
    let machine = one_machine_for_any_number_of_creations(open, order).await;
    a_fresh_process_finds_the_machine(open, order, &machine).await;
    deletion_may_be_repeated(open, order, &machine).await;
}

async fn offers_are_stable(open: OpenBackend<'_>) {
    let kinds = async |backend: Arc<dyn Backend>| {
        let offers = backend.offers().await.expect("offers");
        let mut kinds: Vec<_> = offers
            .into_iter()
            .map(|offer| {
                assert_eq!(offer.backend, backend.name(), "an offer names its backend");
                assert!(offer.total_blocks >= 1 && offer.host.cpus >= 1, "{offer:?}");
                (
                    offer.instance_type,
                    offer.region,
                    offer.zones,
                    offer.reservation,
                    offer.host.spot,
                    offer.price,
                )
            })
            .collect();
        kinds.sort();
        kinds
    };
    let first = kinds(open()).await;
    assert_eq!(first, kinds(open()).await, "two looks see the same offers");
    let mut unique = first.clone();
    unique.dedup();
    assert_eq!(first, unique, "no offer is there twice");
}

async fn what_was_never_made_is_gone(open: OpenBackend<'_>, order: &InstanceRequest) {
    assert_eq!(open().delete(order, None).await.expect("delete what was never made"), DeleteProgress::Gone);
}

async fn one_machine_for_any_number_of_creations(
    open: OpenBackend<'_>,
    order: &InstanceRequest,
) -> BackendInstance {
    let (one, other) = (open(), open());
    let (first, second) = tokio::join!(one.create(order), other.create(order));
    let first = first.expect("create");
    assert_eq!(first.id, second.expect("create at the same time").id, "two creations made two machines");
    let again = open().create(order).await.expect("create again");
    assert_eq!(first.id, again.id, "a repeat made another machine");
    wait_until_running(open, order, first).await
}

async fn wait_until_running(
    open: OpenBackend<'_>,
    order: &InstanceRequest,
    mut machine: BackendInstance,
) -> BackendInstance {
    for _ in 0..POLLS_MAX {
        match open().find(order, &machine).await.expect("find") {
            InstanceState::Running(found) => {
                assert!(found.reach.is_some(), "a machine that runs can be reached: {found:?}");
                return found;
            }
            InstanceState::Starting(found) => machine = found,
            InstanceState::Unknown => {}
            InstanceState::Gone { message } => panic!("the machine is gone: {message}"),
        }
        tokio::time::sleep(POLL_INTERVAL).await;
    }
    panic!("the machine does not start: {machine:?}");
}

async fn a_fresh_process_finds_the_machine(
    open: OpenBackend<'_>,
    order: &InstanceRequest,
    machine: &BackendInstance,
) {
    let text = serde_json::to_string(machine).expect("a machine is stored as JSON");
    let stored: BackendInstance = serde_json::from_str(&text).expect("and read again");
    assert_eq!(&stored, machine);
    let found = wait_until_running(open, order, stored).await;
    assert_eq!((&found.id, &found.reach), (&machine.id, &machine.reach));
}

async fn deletion_may_be_repeated(open: OpenBackend<'_>, order: &InstanceRequest, machine: &BackendInstance) {
    let mut looks = 0;
    while open().delete(order, Some(machine)).await.expect("delete") == DeleteProgress::InProgress {
        looks += 1;
        assert!(looks < POLLS_MAX, "the deletion does not end");
        tokio::time::sleep(POLL_INTERVAL).await;
    }
    assert_eq!(open().delete(order, Some(machine)).await.expect("delete twice"), DeleteProgress::Gone);
    assert_eq!(open().delete(order, None).await.expect("delete without the machine"), DeleteProgress::Gone);
    let found = open().find(order, machine).await.expect("find what was deleted");
    match order.want {
        InstanceSource::Offer(_) => {
            assert!(matches!(found, InstanceState::Gone { .. } | InstanceState::Unknown), "{found:?}")
        }
        // A user's host survives its deletion; a later `find` sets it up again.
        InstanceSource::Host(_) => {
            assert!(matches!(found, InstanceState::Running(_)), "{found:?}");
            assert_eq!(
                open().delete(order, Some(machine)).await.expect("delete again"),
                DeleteProgress::Gone
            );
        }
    }
}
