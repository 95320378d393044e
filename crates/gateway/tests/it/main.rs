//! The proxy with real sockets on both sides.

mod acme;
mod balance;
mod corpus;
mod gate;
mod kit;
mod listener;
mod models;
mod proxying;
mod state;
mod streams;
