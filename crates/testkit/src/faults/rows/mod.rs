//! The rows, by what they are about.

mod agents;
mod clock;
mod clusters;
mod crowds;
mod database;
mod docker;
mod ground;
mod hosts;
mod later;
mod load;
mod network;
mod people;
mod servers;
mod services;

use super::Row;

/// The whole matrix, in the order of its ids.
pub fn all() -> Vec<Row> {
    let mut rows: Vec<Row> = [
        agents::ROWS,
        clock::ROWS,
        clusters::ROWS,
        crowds::ROWS,
        database::ROWS,
        docker::ROWS,
        hosts::ROWS,
        network::ROWS,
        people::ROWS,
        servers::ROWS,
        services::ROWS,
        later::ROWS,
    ]
    .concat();
    rows.sort_by_key(|row| row.id[1..].parse::<u32>().unwrap_or(u32::MAX));
    rows
}
