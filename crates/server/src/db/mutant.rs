//! Planted bugs, compiled in by the feature `mutants` only: a check that does not notice them is blind.

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Mutant {
    /// The guard of a unit compares the id alone: a stale holder's write goes through.
    ApplyWithoutTokenCheck = 1,
    /// The pipeline of running jobs writes the final status itself.
    FinishedOutsideTerminating = 2,
    /// Slots of managed jobs are granted by what was read before, and not counted again where they are written.
    GrantWithoutCount = 3,
}

#[cfg(feature = "mutants")]
mod switch {
    use std::sync::atomic::{AtomicU8, Ordering};

    use super::Mutant;

    static ACTIVE: AtomicU8 = AtomicU8::new(0);

    /// Process-wide, like the code it stands in for.
    pub fn set(mutant: Option<Mutant>) {
        ACTIVE.store(mutant.map_or(0, |mutant| mutant as u8), Ordering::SeqCst);
    }

    pub fn active(mutant: Mutant) -> bool {
        ACTIVE.load(Ordering::SeqCst) == mutant as u8
    }
}

#[cfg(not(feature = "mutants"))]
mod switch {
    use super::Mutant;

    pub const fn active(_mutant: Mutant) -> bool {
        false
    }
}

pub use switch::*;
