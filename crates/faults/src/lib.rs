//! The fault matrix: real servers, real agents, real hosts, and something that goes wrong under them.
//!
//! ```text
//! cargo xtask faults                       every row once
//! cargo xtask faults --row F14 --times 20  one row, twenty times, each with another seed
//! cargo xtask faults --row F14 --seed 7    the same again
//! ```
//!
//! A [`Row`] says what is injected, what is expected and within which bound, and which invariants that proves; its
//! `play` does it once. It gets a [`Trial`]: a seed for its timing, a directory, a count of the faults that happened,
//! the times that are held against the bound, and [`Trial::judge`], which runs the checkers over events, journals,
//! processes and containers. A row of which no fault fired has failed: it proved nothing.
//!
//! To add a row: an entry in a table below `rows/`, with a function that takes a `&mut Trial`. Inside it a failed
//! assertion is a violation; so is everything that the checkers find.

mod judge;
mod play;
pub mod report;
mod rows;
mod trial;

use std::pin::Pin;

pub use self::{
    judge::AgentSite,
    play::{RunOptions, TrialOutcome, play},
    rows::all_rows,
    trial::{TimedStep, Trial},
};

/// One line of the matrix.
#[derive(Clone, Copy)]
pub struct FaultRow {
    /// `F1`, `F2`, …
    pub id: &'static str,
    pub injection: &'static str,
    pub expected: &'static str,
    pub bound: &'static str,
    /// Ids of invariants.
    pub proves: &'static str,
    pub play: RowTest,
}

#[derive(Clone, Copy)]
pub enum RowTest {
    Now(fn(&mut Trial) -> TrialFuture<'_>),
    /// Not in continuous integration, and why.
    OutsideCi(&'static str, fn(&mut Trial) -> TrialFuture<'_>),
}

pub type TrialFuture<'a> = Pin<Box<dyn Future<Output = ()> + 'a>>;

impl FaultRow {
    /// Why continuous integration leaves it out.
    pub const fn ci_exclusion(&self) -> Option<&'static str> {
        match self.play {
            RowTest::OutsideCi(why, _) => Some(why),
            RowTest::Now(_) => None,
        }
    }
}
