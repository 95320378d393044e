//! Real SSH hosts: the backend `remote` with the real agent on hosts of the lab.

mod backend_contract;
mod fixtures;
mod gateway_key;
mod lifecycle;
mod refusals;
mod systemd;
