//! dstack 0.22.5 as it comes from PyPI, its command line and its Python client, against the real server.
//!
//! Each command's transcript is kept under `tests/snapshots/dstack-NAME.txt`.

mod fleets;
mod lists;
mod person;
mod python;
mod replay;
mod tasks;
mod walk;
