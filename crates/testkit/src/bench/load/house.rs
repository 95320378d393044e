//! The server and its hosts.

use std::{
    path::Path,
    time::{Duration, Instant},
};

use anyhow::Result;

use super::{below, history};
use crate::{
    bench::{
        hosts::Hosts,
        runs::{Binaries, hosts_ready},
    },
    server::{Options, Server},
};

pub(in crate::bench) struct House {
    pub(in crate::bench) server: Server,
    pub(super) hosts: Hosts,
    /// From the start of the server until all hosts take jobs.
    pub(super) ready: Duration,
}

/// What is in it when it opens.
pub(in crate::bench) struct Opening<'a> {
    pub(in crate::bench) hosts: usize,
    /// Finished runs in the database.
    pub(in crate::bench) history: usize,
    pub(in crate::bench) postgres: Option<&'a str>,
}

impl House {
    pub(in crate::bench) async fn open(
        binaries: &Binaries<'_>,
        home: &Path,
        opening: &Opening<'_>,
    ) -> Result<Self> {
        let data = below(home, "server")?;
        let log = home.join("server.log");
        let options = Options {
            binary: binaries.windlass,
            data: &data,
            database: opening.postgres,
            core: None,
            local: false,
            env: vec![("WINDLASS_AGENT", binaries.agent.to_owned())],
            log: Some(&log),
        };
        // The first start makes the database and its keys.
        Server::start(&options).await?.stop()?;
        history(&data, opening).await?;
        let (postgres, count) = (opening.postgres, opening.hosts);
        let hosts = Hosts::start(binaries.agent, &home.join("hosts"), &data, postgres, count).await?;
        let started = Instant::now();
        let server = Server::start(&options).await?;
        hosts_ready(&server, "hollow", opening.hosts).await?;
        Ok(Self { server, hosts, ready: started.elapsed() })
    }

    pub(in crate::bench) fn close(self) -> Result<()> {
        self.server.stop()
    }
}
