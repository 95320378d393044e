//! Planted bugs, to prove that the checks can fail. Compiled in only with the `mutants` feature.

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mutant {
    /// The guard of a unit compares the id alone: a stale holder's write goes through.
    ApplyWithoutTokenCheck,
}

#[cfg(feature = "mutants")]
mod switch {
    use std::sync::atomic::{AtomicBool, Ordering};

    static APPLY_WITHOUT_TOKEN_CHECK: AtomicBool = AtomicBool::new(false);

    fn flag(mutant: super::Mutant) -> &'static AtomicBool {
        match mutant {
            super::Mutant::ApplyWithoutTokenCheck => &APPLY_WITHOUT_TOKEN_CHECK,
        }
    }

    pub fn set(mutant: super::Mutant, on: bool) {
        flag(mutant).store(on, Ordering::SeqCst);
    }

    pub fn is_on(mutant: super::Mutant) -> bool {
        flag(mutant).load(Ordering::SeqCst)
    }
}

#[cfg(feature = "mutants")]
pub use switch::{is_on, set};

#[cfg(not(feature = "mutants"))]
pub(super) const fn is_on(_: Mutant) -> bool {
    false
}
