//! Planted bugs: deliberate faults that a test switches on to prove that the checkers would notice them.
//!
//! Only the feature `testing` compiles the switch in. Without it [`is_planted`] is a constant `false`, and the
//! planted code disappears from the binaries that people run.

/// A bug that can be planted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Bug {
    /// The heartbeater believes that every lease was extended, and extends none.
    HeartbeatStopsRenewing = 1,
    /// The guard of a write compares the id alone: the write of a stale holder goes through.
    ApplyWithoutTokenCheck,
    /// The pipeline of running jobs writes the final status itself.
    FinishOutsideTerminating,
    /// Slots of managed jobs are granted by an earlier count, which is not repeated when they are written.
    SlotGrantWithoutRecount,
    /// A release by an owner without devices frees the devices that it once had, whoever has them now.
    ReleaseFreesFormerDevices,
    /// A dispatcher treats a job that an incomplete answer of the scheduler omits as ended.
    MissingJobsTreatedAsEnded,
    /// A dispatcher starts containers in order of arrival and ignores their priorities.
    IgnorePriority,
    /// A managed task is launched again as soon as its attempt begins to end.
    RecoverBeforeRelease,
    /// The next task of a managed job starts although the one before it failed.
    StartAfterFailedTask,
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

    /// Whether this bug is planted.
    #[must_use]
    pub fn is_planted(bug: Bug) -> bool {
        PLANTED.load(Ordering::Relaxed) == bug as u8
    }
}

#[cfg(not(feature = "testing"))]
mod switch {
    use super::Bug;

    /// Whether this bug is planted: never in this build.
    #[must_use]
    pub const fn is_planted(_: Bug) -> bool {
        false
    }
}

pub use switch::*;
