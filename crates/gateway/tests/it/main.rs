//! Tests of the proxy with real sockets on both sides.

#![expect(clippy::unwrap_used, reason = "tests stop at the first surprise")]

mod access;
mod acme;
mod balance;
mod corpus;
mod listener;
mod models;
mod node;
mod proxying;
mod route_cache_file;
mod streams;
mod support;
