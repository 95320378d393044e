//! The model, tested as data: one binary, one module per part.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on should stop where it stands")]

mod ledger;
mod machines;
mod placement;
mod placement_offers;
mod placement_properties;
