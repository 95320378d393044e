//! Dispatchers against the real thing below.

mod slurm;
