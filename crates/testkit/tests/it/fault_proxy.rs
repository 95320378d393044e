//! The proxy injects the configured faults and counts them.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream, UnixListener, UnixStream},
};
use windlass_testkit::fault_proxy::{ConnectionFaults, FaultProxy};
use windlass_testkit::wait::eventually_async;

/// Starts a server that echoes its input and counts the bytes.
async fn start_echo_server() -> (String, Arc<AtomicUsize>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let (address, received) = (listener.local_addr().unwrap().to_string(), Arc::new(AtomicUsize::new(0)));
    let count = Arc::clone(&received);
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            let count = Arc::clone(&count);
            tokio::spawn(async move {
                let mut buffer = [0; 4096];
                while let Ok(read @ 1..) = stream.read(&mut buffer).await {
                    count.fetch_add(read, Ordering::SeqCst);
                    let _ = stream.write_all(&buffer[..read]).await;
                }
            });
        }
    });
    (address, received)
}

fn count(counter: &AtomicU64) -> u64 {
    counter.load(Ordering::Relaxed)
}

#[tokio::test]
async fn a_proxy_without_faults_forwards_every_byte() {
    let (address, _) = start_echo_server().await;
    let proxy = FaultProxy::tcp(address, 1).await.unwrap();
    let sent: Vec<u8> = (0..100_000u32).map(|n| n as u8).collect();
    let (mut from, mut to) = TcpStream::connect(proxy.address()).await.unwrap().into_split();
    let mut got = vec![0; sent.len()];
    let (wrote, read) = tokio::join!(to.write_all(&sent), from.read_exact(&mut got));
    wrote.unwrap();
    read.unwrap();
    assert!(got == sent);
    assert_eq!((count(&proxy.counts().connections), count(&proxy.counts().delayed)), (1, 0));
}

#[tokio::test]
async fn a_proxy_delays_throttles_and_holds_data() {
    let (address, _) = start_echo_server().await;
    let proxy = FaultProxy::tcp(address, 2).await.unwrap();
    proxy.set(ConnectionFaults {
        latency: Duration::from_millis(60),
        drip: 200,
        ..ConnectionFaults::default()
    });
    let mut stream = TcpStream::connect(proxy.address()).await.unwrap();
    let begun = Instant::now();
    stream.write_all(&[7; 20]).await.unwrap();
    stream.read_exact(&mut [0; 20]).await.unwrap();
    // Two throttled writes of ten bytes, in both directions, of a twentieth of a second each; up to a third less
    // because of the jitter.
    assert!(begun.elapsed() > Duration::from_millis(140), "{:?}", begun.elapsed());
    assert!(count(&proxy.counts().delayed) >= 3);

    proxy.set(ConnectionFaults { hold: true, ..ConnectionFaults::default() });
    stream.write_all(b"held").await.unwrap();
    let mut got = [0; 4];
    assert!(tokio::time::timeout(Duration::from_millis(100), stream.read_exact(&mut got)).await.is_err());
    assert_eq!(count(&proxy.counts().held), 1);
    proxy.set(ConnectionFaults::default());
    stream.read_exact(&mut got).await.unwrap();
    assert_eq!(&got, b"held");
}

#[tokio::test]
async fn a_proxy_cuts_connections_at_once_or_after_some_bytes_and_refuses_new_ones() {
    let (address, _) = start_echo_server().await;
    let proxy = FaultProxy::tcp(address, 3).await.unwrap();
    let mut open = TcpStream::connect(proxy.address()).await.unwrap();
    open.write_all(b"x").await.unwrap();
    open.read_exact(&mut [0]).await.unwrap();
    proxy.cut();
    assert!(matches!(open.read(&mut [0]).await, Ok(0) | Err(_)));

    proxy.set(ConnectionFaults { cut_after: Some(100), ..ConnectionFaults::default() });
    let mut long = TcpStream::connect(proxy.address()).await.unwrap();
    let mut got = 0;
    while long.write_all(&[1; 20]).await.is_ok() {
        match long.read(&mut [0; 20]).await {
            Ok(0) | Err(_) => break,
            Ok(read) => got += read,
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    assert!(got < 200, "{got}");
    assert_eq!(count(&proxy.counts().cut), 2);

    proxy.set(ConnectionFaults { refuse: true, ..ConnectionFaults::default() });
    let mut refused = TcpStream::connect(proxy.address()).await.unwrap();
    assert!(matches!(refused.read(&mut [0]).await, Ok(0) | Err(_)));
    assert_eq!(count(&proxy.counts().refused), 1);
}

#[tokio::test]
async fn a_proxy_replays_all_data_when_configured() {
    let (address, received) = start_echo_server().await;
    let proxy = FaultProxy::tcp(address, 4).await.unwrap();
    proxy.set(ConnectionFaults {
        replay_after: Some(Duration::from_millis(10)),
        ..ConnectionFaults::default()
    });
    let mut stream = TcpStream::connect(proxy.address()).await.unwrap();
    stream.write_all(b"once").await.unwrap();
    stream.read_exact(&mut [0; 4]).await.unwrap();
    drop(stream);
    eventually_async("it is said again", async || (received.load(Ordering::SeqCst) >= 8).then_some(())).await;
    assert_eq!(count(&proxy.counts().replayed), 1);
}

#[tokio::test]
async fn a_proxy_replaces_a_unix_socket_and_restores_it_on_drop() {
    let dir = windlass_testkit::temp_dir("chaos").unwrap();
    let socket = dir.path().join("door.sock");
    let listener = UnixListener::bind(&socket).unwrap();
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            let _ = stream.write_all(b"here").await;
        }
    });
    let message = || async {
        let mut stream = UnixStream::connect(&socket).await.unwrap();
        let mut got = [0; 4];
        stream.read_exact(&mut got).await.map(|_| got)
    };
    let proxy = FaultProxy::before(&socket, 5).unwrap();
    assert_eq!(&message().await.unwrap(), b"here");
    assert_eq!(count(&proxy.counts().connections), 1);
    drop(proxy);
    assert_eq!(&message().await.unwrap(), b"here");
}
