//! The fault matrix: real servers, agents and hosts, with injected faults.
//!
//! ```text
//! cargo xtask faults                       every row once
//! cargo xtask faults --row F14 --times 20  one row, twenty times, each with another seed
//! cargo xtask faults --row F14 --seed 7    the same again
//! ```
//!
//! A [`Row`] defines the injected fault, the expected behaviour with its time bound, and the invariants that it proves;
//! its `play` runs it once. It gets a [`Trial`]: a seed for its timing, a directory, a count of the faults that
//! occurred, the times to compare with the bound, and [`Trial::judge`], which runs the checkers over events, journals,
//! processes and containers. A row without any fault has failed, because it proved nothing.
//!
//! To add a row, add an entry to a table below `rows/`, with a function that accepts a `&mut Trial`. A failed assertion
//! in it is a violation; so is everything that the checkers find.

mod checks;
pub mod report;
mod rows;
mod run;
mod trial;

use std::pin::Pin;

pub use self::{
    checks::AgentSite,
    rows::all_rows,
    run::{RunOptions, TrialOutcome, run_trials},
    trial::{TimedStep, Trial},
};

/// One row of the matrix.
#[derive(Clone, Copy)]
pub struct FaultRow {
    /// `F1`, `F2`, …
    pub id: &'static str,
    pub injection: &'static str,
    pub expected: &'static str,
    pub bound: &'static str,
    /// IDs of invariants.
    pub proves: &'static str,
    pub play: RowTest,
}

#[derive(Clone, Copy)]
pub enum RowTest {
    Now(fn(&mut Trial) -> TrialFuture<'_>),
    /// Not in continuous integration, with the reason.
    OutsideCi(&'static str, fn(&mut Trial) -> TrialFuture<'_>),
}

pub type TrialFuture<'a> = Pin<Box<dyn Future<Output = ()> + 'a>>;

impl FaultRow {
    /// Reason why continuous integration skips it.
    pub const fn ci_exclusion(&self) -> Option<&'static str> {
        match self.play {
            RowTest::OutsideCi(why, _) => Some(why),
            RowTest::Now(_) => None,
        }
    }
}
