//! The windlass proxy for one service, on one thread: `proxy-node LISTEN UPSTREAM`.

use std::{net::IpAddr, sync::Arc};

use anyhow::{Context, Result};
use futures_util::future::BoxFuture;
use tokio_util::sync::CancellationToken;
use windlass_gateway::{
    DirectConnector, Gatekeeper, ListenerConfig, ListenerLimits, NoWaker, Proxy, ProxyLimits, RequestRouting,
    Routes, Verdict,
    route::{ReplicaRoute, ReplicaTarget, RouteSnapshot, Service},
    serve,
};

/// nginx does not check tokens either.
struct AllowAll;

impl Gatekeeper for AllowAll {
    fn check<'a>(&'a self, _token: &'a str, _project: &'a str, _peer: IpAddr) -> BoxFuture<'a, Verdict> {
        Box::pin(std::future::ready(Verdict::Allow { identity: None }))
    }

    fn is_known<'a>(
        &'a self,
        _token: &'a str,
        _project: &'a str,
        _peer: IpAddr,
    ) -> BoxFuture<'a, Option<bool>> {
        Box::pin(std::future::ready(Some(false)))
    }

    fn wait_until_revoked(&self, _token: &str, _project: &str) -> BoxFuture<'static, ()> {
        Box::pin(std::future::pending())
    }
}

pub(super) fn run(arguments: &[String]) -> Result<()> {
    let [listen, upstream] = arguments else { anyhow::bail!("expected the arguments LISTEN UPSTREAM") };
    let target = ReplicaTarget::Tcp { address: upstream.parse().context("invalid address of the upstream")? };
    let service = Service {
        domains: vec!["127.0.0.1".to_owned()],
        auth: false,
        ..Service::new("main", "bench").with_replicas(vec![ReplicaRoute { id: "0".to_owned(), target }])
    };
    let routes = Arc::new(Routes::default());
    routes.replace(RouteSnapshot { generation: 1, services: vec![service] })?;
    let proxy = Proxy {
        routes,
        connector: Arc::new(DirectConnector),
        gatekeeper: Arc::new(AllowAll),
        waker: Arc::new(NoWaker),
        log: None,
        certificates: None,
        limits: ProxyLimits::USUAL,
    };
    let listening = ListenerConfig {
        proxy: Arc::new(proxy),
        routing: RequestRouting::Hosts,
        challenges: None,
        tls: None,
        limits: ListenerLimits::USUAL,
    };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let listener = tokio::net::TcpListener::bind(listen).await?;
        serve(listener, listening, CancellationToken::new()).await;
        Ok(())
    })
}
