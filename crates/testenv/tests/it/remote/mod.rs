//! Real SSH hosts: the backend `remote` with the real agent on hosts of the lab.

mod ground;
mod life;
mod promises;
mod refusals;
mod systemd;
