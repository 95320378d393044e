//! Published ports: connections to the loopback of the host are passed on to the container.

use std::{
    io,
    net::{SocketAddr, TcpListener},
    sync::Arc,
    time::Duration,
};

use tokio::{net::TcpStream, sync::Semaphore};

/// Connections of one container at the same time.
const CONNECTIONS_MAX: usize = 512;
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
const ACCEPT_RETRY_DELAY: Duration = Duration::from_millis(100);

/// Serves the listeners in a thread, until the process ends.
pub(in super::super) fn serve_ports(listeners: Vec<(TcpListener, SocketAddr)>) -> io::Result<()> {
    if listeners.is_empty() {
        return Ok(());
    }
    let runtime = tokio::runtime::Builder::new_current_thread().enable_io().enable_time().build()?;
    let serve = move || {
        runtime.block_on(async {
            let permits = Arc::new(Semaphore::new(CONNECTIONS_MAX));
            let all =
                listeners.into_iter().map(|(listener, target)| serve(listener, target, Arc::clone(&permits)));
            let _: Vec<io::Result<()>> = futures_util::future::join_all(all).await;
        });
    };
    std::thread::Builder::new().name("ports".to_owned()).spawn(serve).map(drop)
}

async fn serve(listener: TcpListener, target: SocketAddr, permits: Arc<Semaphore>) -> io::Result<()> {
    listener.set_nonblocking(true)?;
    let listener = tokio::net::TcpListener::from_std(listener)?;
    loop {
        let Ok(permit) = Arc::clone(&permits).acquire_owned().await else { return Ok(()) };
        match listener.accept().await {
            Ok((client, _)) => {
                tokio::spawn(async move {
                    let _permit = permit;
                    let _ = pass_on(client, target).await;
                });
            }
            // Out of descriptors, or the client is gone.
            Err(_) => tokio::time::sleep(ACCEPT_RETRY_DELAY).await,
        }
    }
}

async fn pass_on(mut client: TcpStream, target: SocketAddr) -> io::Result<()> {
    let connected = tokio::time::timeout(CONNECT_TIMEOUT, TcpStream::connect(target)).await;
    let mut server = connected.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()))?;
    client.set_nodelay(true)?;
    server.set_nodelay(true)?;
    tokio::io::copy_bidirectional(&mut client, &mut server).await.map(drop)
}
