//! Planted bugs: deliberate faults that a test enables to prove that the checkers detect them.
//!
//! Only the feature `testing` includes the switch. Without it [`is_planted`] is a constant `false`, and the compiler
//! removes the planted code from the shipped binaries.

/// A bug that can be planted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Bug {
    /// The heartbeater reports every lease as extended, and extends none.
    HeartbeatStopsRenewing = 1,
    /// The guard of a write compares only the ID: the write of a stale lease holder succeeds.
    ApplyWithoutTokenCheck,
    /// The pipeline of running jobs writes the final status itself.
    FinishOutsideTerminating,
    /// Slots of managed jobs are granted by an earlier count, which is not repeated when they are written.
    SlotGrantWithoutRecount,
    /// A release by an owner without devices frees the devices that it previously had, even if another owner has them
    /// now.
    ReleaseFreesFormerDevices,
    /// A dispatcher treats a job as ended if an incomplete response of the scheduler omits it.
    MissingJobsTreatedAsEnded,
    /// A dispatcher starts containers in order of arrival and ignores their priorities.
    IgnorePriority,
    /// A managed task is launched again as soon as its attempt starts to end.
    RecoverBeforeRelease,
    /// The next task of a managed job starts although the previous one failed.
    StartAfterFailedTask,
    /// A waiting job that leaves the queue does not wake the next one of its class.
    FollowerNotWoken,
    /// Quotas are read before a job is assigned, and not again in the transaction of the assignment.
    QuotaWithoutRecount,
    /// Blocks for which others were preempted are not kept.
    PromisesForgotten,
    /// Jobs are preempted for a class that is not higher, and of projects that hold no more than their share.
    PreemptionWithoutRule,
    /// A round of placement knows only the reservations of the jobs that it places.
    ReservationsForgotten,
}

#[cfg(feature = "testing")]
mod switch {
    use std::sync::atomic::{AtomicU8, Ordering};

    use super::Bug;

    static PLANTED: AtomicU8 = AtomicU8::new(0);

    /// Plants one bug in the whole process, or removes it.
    pub fn plant(bug: Option<Bug>) {
        PLANTED.store(bug.map_or(0, |bug| bug as u8), Ordering::SeqCst);
    }

    /// Returns whether this bug is planted.
    #[must_use]
    pub fn is_planted(bug: Bug) -> bool {
        PLANTED.load(Ordering::Relaxed) == bug as u8
    }
}

#[cfg(not(feature = "testing"))]
mod switch {
    use super::Bug;

    /// Always false in this build.
    #[must_use]
    pub const fn is_planted(_: Bug) -> bool {
        false
    }
}

pub use switch::*;
