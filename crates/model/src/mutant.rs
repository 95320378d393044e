//! Deliberate faults, so that tests can show they would notice.
//!
//! Only the feature `mutants` compiles the switch in; without it every question is answered "no" at
//! compile time and nothing is left of this module in a binary.

/// A fault that can be switched on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Mutant {
    /// A release by an owner that holds nothing frees what it once had, whoever has it now.
    ReleaseFreesAnother = 1,
    /// A dispatcher takes what a scheduler with holes does not show for gone.
    HolesAreAbsences = 2,
    /// A dispatcher takes containers as they came.
    OrderOfArrival = 3,
    /// A managed task is launched again as soon as its attempt begins to end.
    RecoversBeforeReleased = 4,
    /// The next task of a managed job begins whatever became of the one before.
    FollowsAFailure = 5,
}

#[cfg(feature = "mutants")]
mod switch {
    use std::sync::atomic::{AtomicU8, Ordering};

    use super::Mutant;

    static ACTIVE: AtomicU8 = AtomicU8::new(0);

    /// Switches one fault on for the whole process, or all off.
    pub fn set(mutant: Option<Mutant>) {
        ACTIVE.store(mutant.map_or(0, |mutant| mutant as u8), Ordering::SeqCst);
    }

    pub fn active(mutant: Mutant) -> bool {
        ACTIVE.load(Ordering::SeqCst) == mutant as u8
    }
}

#[cfg(feature = "mutants")]
pub use switch::{active, set};

#[cfg(not(feature = "mutants"))]
pub const fn active(_: Mutant) -> bool {
    false
}
