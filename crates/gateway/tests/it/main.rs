//! Tests of the proxy with real sockets on both sides.

#![expect(clippy::unwrap_used, reason = "tests stop at the first surprise")]

mod acme;
mod balance;
mod corpus;
mod gate;
mod kit;
mod listener;
mod models;
mod node;
mod proxying;
mod state;
mod streams;
