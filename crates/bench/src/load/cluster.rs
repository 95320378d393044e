//! The server and the hosts of the load benchmark.

use std::{
    path::Path,
    time::{Duration, Instant},
};

use anyhow::Result;

use super::{create_history, create_subdir};
use crate::runs::{Binaries, wait_for_hosts};
use windlass_testenv::{
    server::{Server, ServerOptions},
    simulated_hosts::SimulatedHosts,
};

pub(crate) struct LoadCluster {
    pub(crate) server: Server,
    pub(super) hosts: SimulatedHosts,
    /// Time from the start of the server until all hosts accept jobs.
    pub(super) ready: Duration,
}

/// Initial content.
pub(crate) struct ClusterOptions<'a> {
    pub(crate) hosts: usize,
    /// Number of finished runs in the database.
    pub(crate) history: usize,
    pub(crate) postgres: Option<&'a str>,
}

impl LoadCluster {
    pub(crate) async fn open(
        binaries: &Binaries<'_>,
        home: &Path,
        opening: &ClusterOptions<'_>,
    ) -> Result<Self> {
        let data = create_subdir(home, "server")?;
        let log = home.join("server.log");
        let options = ServerOptions { database: opening.postgres, log: Some(&log), ..binaries.server(&data) };
        // The first start creates the database and its keys.
        Server::start(&options).await?.stop()?;
        create_history(&data, opening).await?;
        let (postgres, count) = (opening.postgres, opening.hosts);
        let hosts =
            SimulatedHosts::start(binaries.agent, &home.join("hosts"), &data, postgres, count).await?;
        let started = Instant::now();
        let server = Server::start(&options).await?;
        wait_for_hosts(&server, "simulated", opening.hosts).await?;
        Ok(Self { server, hosts, ready: started.elapsed() })
    }

    pub(crate) fn close(self) -> Result<()> {
        self.server.stop()
    }
}
