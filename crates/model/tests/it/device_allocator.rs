//! The ledger of devices: G1 and G2.

use std::collections::BTreeMap;

use proptest::prelude::*;
use windlass_model::device_allocator::{AcquireError, DeviceAllocator, DeviceCount, RebuildError};

const DEVICES: usize = 4;

#[derive(Clone, Copy, Debug)]
enum Call {
    Acquire(u8, usize),
    Release(u8),
    Restart,
}

fn calls() -> impl Strategy<Value = Vec<Call>> {
    let call = prop_oneof![
        (0_u8..5, 0_usize..6).prop_map(|(owner, want)| Call::Acquire(owner, want)),
        (0_u8..5).prop_map(Call::Release),
        Just(Call::Restart),
    ];
    prop::collection::vec(call, 0..40)
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    /// G1: compared with a model that keeps each owner's devices, no device ever has two owners and no call of one
    /// owner changes what another has.
    #[test]
    fn g1_a_device_has_one_owner_whatever_the_calls(calls in calls()) {
        let mut ledger: DeviceAllocator<usize, u8> = DeviceAllocator::new(0..DEVICES);
        let mut model: BTreeMap<u8, Vec<usize>> = BTreeMap::new();
        for call in calls {
            match call {
                Call::Acquire(owner, want) => match ledger.acquire(&owner, DeviceCount::Count(want)) {
                    Ok(given) => {
                        prop_assert_eq!(given.len(), want);
                        if !given.is_empty() {
                            let before = model.insert(owner, given.clone());
                            prop_assert!(before.is_none_or(|before| before == given), "a repeat gets the same");
                        }
                    }
                    Err(AcquireError::NotEnough { free, .. }) => prop_assert!(free < want),
                    Err(AcquireError::HoldsOtherCount { holds, .. }) => prop_assert_eq!(model[&owner].len(), holds),
                },
                Call::Release(owner) => {
                    prop_assert_eq!(ledger.release(&owner), model.remove(&owner).unwrap_or_default());
                }
                Call::Restart => {
                    ledger = DeviceAllocator::rebuild(0..DEVICES, model.clone()).unwrap();
                }
            }
            let held: usize = model.values().map(Vec::len).sum();
            prop_assert_eq!(ledger.free(), DEVICES - held);
            for (owner, devices) in &model {
                prop_assert_eq!(&ledger.held_by(owner), devices);
            }
        }
    }
}

#[test]
fn g1_a_late_second_release_frees_nothing_of_the_next_owner() {
    let mut ledger: DeviceAllocator<u32, &str> = DeviceAllocator::new(0..2);
    ledger.acquire(&"old", DeviceCount::All).unwrap();
    assert_eq!(ledger.release(&"old"), [0, 1]);
    ledger.acquire(&"new", DeviceCount::Count(2)).unwrap();
    assert_eq!(ledger.release(&"old"), [0_u32; 0]);
    assert_eq!(ledger.held_by(&"new"), [0, 1]);
}

#[test]
fn acquiring_all_devices_of_a_host_without_devices_returns_none() {
    let mut ledger: DeviceAllocator<u32, &str> = DeviceAllocator::new([]);
    assert_eq!(ledger.acquire(&"a", DeviceCount::All), Ok(vec![]));
}

#[test]
fn g2_a_rebuild_restores_held_devices_and_refuses_a_double_claim() {
    let ledger = DeviceAllocator::rebuild(0..3, [("a", vec![1])]).unwrap();
    assert_eq!((ledger.free(), ledger.holder(&1)), (2, Some(&"a")));
    let twice = DeviceAllocator::rebuild(0..3, [("a", vec![1]), ("b", vec![1])]);
    assert_eq!(twice, Err(RebuildError::ClaimedTwice { device: 1, first: "a", second: "b" }));
    let unknown = DeviceAllocator::rebuild(0..3, [("a", vec![7])]);
    assert_eq!(unknown, Err(RebuildError::Unknown { device: 7, owner: "a" }));
}

/// The switch is process-wide; this test runs alone in its process under nextest, and resets it.
#[test]
fn the_planted_bug_frees_devices_of_another_owner() {
    use windlass_planted_bugs::{Bug, plant};
    let mut ledger: DeviceAllocator<u32, &str> = DeviceAllocator::new(0..1);
    ledger.acquire(&"old", DeviceCount::All).unwrap();
    ledger.release(&"old");
    ledger.acquire(&"new", DeviceCount::All).unwrap();
    plant(Some(Bug::ReleaseFreesFormerDevices));
    ledger.release(&"old");
    plant(None);
    assert_eq!(ledger.held_by(&"new"), [0_u32; 0]);
}
