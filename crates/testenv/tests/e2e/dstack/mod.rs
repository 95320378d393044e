//! The command line and the Python client of dstack 0.22.5 from PyPI, against the real server.
//!
//! The transcript of each command is stored in `tests/snapshots/dstack-NAME.txt`.

mod api_coverage;
mod dstack_user;
mod fleets;
mod lists;
mod python;
mod replay;
mod tasks;
mod warm_client;
