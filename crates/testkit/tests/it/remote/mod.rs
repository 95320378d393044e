//! SSH hosts for real: the backend `remote` with the real agent on hosts of the lab.

mod ground;
mod life;
mod refusals;
mod systemd;
