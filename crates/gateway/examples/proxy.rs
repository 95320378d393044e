//! A proxy for one service on one thread, to be measured: `proxy LISTEN UPSTREAM`, where UPSTREAM is an address or
//! the path of a socket.

use std::{net::IpAddr, sync::Arc};

use anyhow::{Context as _, Result};
use futures_util::future::BoxFuture;
use tokio_util::sync::CancellationToken;
use windlass_gateway::{
    Bounds, Direct, Door, Gatekeeper, Listening, Nobody, Patience, Proxy, Routes, Verdict,
    route::{Replica, Service, Snapshot, Target},
};

struct Open;

impl Gatekeeper for Open {
    fn check<'a>(&'a self, _token: &'a str, _project: &'a str, _peer: IpAddr) -> BoxFuture<'a, Verdict> {
        Box::pin(std::future::ready(Verdict::Allow { identity: None }))
    }
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<()> {
    let mut arguments = std::env::args().skip(1);
    let listen = arguments.next().context("LISTEN is missing")?;
    let upstream = arguments.next().context("UPSTREAM is missing")?;
    let target = match upstream.parse() {
        Ok(address) => Target::Tcp { address },
        Err(_) => Target::Unix { path: upstream.into() },
    };
    let service = Service {
        domains: vec!["127.0.0.1".to_owned(), "localhost".to_owned()],
        auth: false,
        ..Service::new("main", "bench").with_replicas(vec![Replica { id: "0".to_owned(), target }])
    };
    let routes = Arc::new(Routes::default());
    routes.replace(Snapshot { generation: 1, services: vec![service] })?;
    let proxy = Proxy {
        routes,
        connector: Arc::new(Direct),
        gatekeeper: Arc::new(Open),
        wake: Arc::new(Nobody),
        log: None,
        bounds: Bounds::USUAL,
    };
    let listener = tokio::net::TcpListener::bind(&listen).await?;
    let listening = Listening {
        proxy: Arc::new(proxy),
        door: Door::Hosts,
        challenges: None,
        tls: None,
        patience: Patience::USUAL,
    };
    windlass_gateway::serve(listener, listening, CancellationToken::new()).await;
    Ok(())
}
