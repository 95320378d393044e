//! Ledger of devices or blocks: one owner per device, stored by owner.
//!
//! Every call names the owner and is safe to repeat: an owner that acquires again receives the devices it already has,
//! an owner that releases again releases nothing. So a late or repeated message of one task can never release a device
//! of another (the holder is looked up, never assumed).

use windlass_planted_bugs::{Bug, is_planted};

use std::collections::BTreeMap;

/// Number of devices that an owner requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeviceCount {
    /// All devices, even if there are none.
    All,
    Count(usize),
}

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AcquireError {
    #[error("cannot allocate {wanted} devices: {free} of {total} are free")]
    NotEnough { wanted: usize, free: usize, total: usize },
    #[error("cannot allocate {wanted} devices: the owner already holds {holds}")]
    HoldsOtherCount { wanted: usize, holds: usize },
}

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RebuildError<D, O> {
    #[error("device {device} is claimed by two live owners")]
    ClaimedTwice { device: D, first: O, second: O },
    #[error("device {device} is claimed but does not exist")]
    Unknown { device: D, owner: O },
}

/// The devices of one host and their owners.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceAllocator<D, O> {
    /// Every device; `None` is free.
    holders: BTreeMap<D, Option<O>>,
    /// First devices of each owner, for the planted bug in `release`.
    #[cfg(feature = "testing")]
    once: BTreeMap<O, Vec<D>>,
}

impl<D: Ord + Clone, O: Ord + Clone> DeviceAllocator<D, O> {
    pub fn new(devices: impl IntoIterator<Item = D>) -> Self {
        Self {
            holders: devices.into_iter().map(|device| (device, None)).collect(),
            #[cfg(feature = "testing")]
            once: BTreeMap::new(),
        }
    }

    /// Rebuilds the ledger after a restart: only live owners hold devices.
    pub fn rebuild(
        devices: impl IntoIterator<Item = D>,
        live: impl IntoIterator<Item = (O, Vec<D>)>,
    ) -> Result<Self, RebuildError<D, O>> {
        let mut ledger = Self::new(devices);
        for (owner, held) in live {
            for device in held {
                match ledger.holders.get_mut(&device) {
                    None => return Err(RebuildError::Unknown { device, owner }),
                    Some(Some(first)) if *first != owner => {
                        return Err(RebuildError::ClaimedTwice {
                            device,
                            first: first.clone(),
                            second: owner,
                        });
                    }
                    Some(holder) => *holder = Some(owner.clone()),
                }
            }
            ledger.remember(&owner);
        }
        Ok(ledger)
    }

    /// Assigns devices to `owner`, all or none. A repeated call returns the same ones.
    pub fn acquire(&mut self, owner: &O, want: DeviceCount) -> Result<Vec<D>, AcquireError> {
        let total = self.holders.len();
        let wanted = match want {
            DeviceCount::All => total,
            DeviceCount::Count(count) => count,
        };
        let held = self.held_by(owner);
        if !held.is_empty() {
            return if held.len() == wanted {
                Ok(held)
            } else {
                Err(AcquireError::HoldsOtherCount { wanted, holds: held.len() })
            };
        }
        let free = self.free();
        if free < wanted {
            return Err(AcquireError::NotEnough { wanted, free, total });
        }
        let mut given = Vec::with_capacity(wanted);
        for (device, holder) in self.holders.iter_mut().filter(|(_, holder)| holder.is_none()).take(wanted) {
            *holder = Some(owner.clone());
            given.push(device.clone());
        }
        self.remember(owner);
        Ok(given)
    }

    /// Releases the devices of `owner` and returns them; none if it holds none.
    pub fn release(&mut self, owner: &O) -> Vec<D> {
        let held = self.held_by(owner);
        if held.is_empty() && is_planted(Bug::ReleaseFreesFormerDevices) {
            return self.release_once_held(owner);
        }
        for device in &held {
            self.holders.insert(device.clone(), None);
        }
        held
    }

    pub fn held_by(&self, owner: &O) -> Vec<D> {
        let held = self.holders.iter().filter(|(_, holder)| holder.as_ref() == Some(owner));
        held.map(|(device, _)| device.clone()).collect()
    }

    pub fn holder(&self, device: &D) -> Option<&O> {
        self.holders.get(device)?.as_ref()
    }

    pub fn free(&self) -> usize {
        self.holders.values().filter(|holder| holder.is_none()).count()
    }

    pub fn total(&self) -> usize {
        self.holders.len()
    }

    #[cfg(feature = "testing")]
    fn remember(&mut self, owner: &O) {
        let held = self.held_by(owner);
        self.once.insert(owner.clone(), held);
    }

    #[cfg(not(feature = "testing"))]
    fn remember(&mut self, _: &O) {}

    #[cfg(feature = "testing")]
    fn release_once_held(&mut self, owner: &O) -> Vec<D> {
        let devices = self.once.get(owner).cloned().unwrap_or_default();
        for device in &devices {
            self.holders.insert(device.clone(), None);
        }
        devices
    }

    #[cfg(not(feature = "testing"))]
    fn release_once_held(&mut self, _: &O) -> Vec<D> {
        Vec::new()
    }
}
