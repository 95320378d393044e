//! The server and its hosts.

use std::{
    path::Path,
    time::{Duration, Instant},
};

use anyhow::Result;

use super::{Plan, below, history};
use crate::{
    bench::{
        hosts::Hosts,
        runs::{Binaries, hosts_ready},
    },
    server::{Options, Server},
};

pub(super) struct House {
    pub(super) server: Server,
    pub(super) hosts: Hosts,
    /// From the start of the server until all hosts take jobs.
    pub(super) ready: Duration,
}

impl House {
    pub(super) async fn open(binaries: &Binaries<'_>, home: &Path, plan: &Plan) -> Result<Self> {
        let data = below(home, "server")?;
        let log = home.join("server.log");
        let options = Options {
            binary: binaries.windlass,
            data: &data,
            database: plan.postgres.as_deref(),
            core: None,
            local: false,
            env: vec![("WINDLASS_AGENT", binaries.agent.to_owned())],
            log: Some(&log),
        };
        // The first start makes the database and its keys.
        Server::start(&options).await?.stop()?;
        history(&data, plan).await?;
        let postgres = plan.postgres.as_deref();
        let hosts = Hosts::start(binaries.agent, &home.join("hosts"), &data, postgres, plan.hosts).await?;
        let started = Instant::now();
        let server = Server::start(&options).await?;
        hosts_ready(&server, "hollow", plan.hosts).await?;
        Ok(Self { server, hosts, ready: started.elapsed() })
    }

    pub(super) fn close(self) -> Result<()> {
        self.server.stop()
    }
}
