//! Rows of the matrix, by topic.

mod agents;
mod clients;
mod clock;
mod clouds;
mod clusters;
mod database;
mod docker;
mod fixtures;
mod hosts;
mod network;
mod overload;
mod servers;
mod services;
mod submit_load;

use std::time::{Duration, Instant};

use super::FaultRow;

const TIMEOUT: Duration = Duration::from_secs(120);
const POLL_INTERVAL: Duration = Duration::from_millis(10);

/// The whole matrix, in the order of its IDs.
pub fn all_rows() -> Vec<FaultRow> {
    let mut rows: Vec<FaultRow> = [
        agents::ROWS,
        clock::ROWS,
        clouds::ROWS,
        clusters::ROWS,
        overload::ROWS,
        database::ROWS,
        docker::ROWS,
        hosts::ROWS,
        network::ROWS,
        clients::ROWS,
        servers::ROWS,
        services::ROWS,
    ]
    .concat();
    rows.sort_by_key(|row| row.id[1..].parse::<u32>().unwrap_or(u32::MAX));
    rows
}

/// Waits for a condition, and returns how long it took.
async fn wait_until(what: &str, mut holds: impl AsyncFnMut() -> bool) -> Duration {
    let began = Instant::now();
    while !holds().await {
        assert!(began.elapsed() < TIMEOUT, "not so: {what}");
        tokio::time::sleep(POLL_INTERVAL).await;
    }
    began.elapsed()
}
