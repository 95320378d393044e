//! The runner itself, under its init: one job from its submission to the last reader of its output.

mod cluster;
mod drain;
mod environment;
mod output;
mod steps;
mod stop;
