//! SSH connection: login, host keys, commands, streams.

use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, UnixListener},
};
use windlass_tunnel::{Connection, HostKeyPin, TunnelError};

use crate::sshd::Sshd;

const CAP: usize = 1 << 20;

#[tokio::test]
async fn a_remote_command_gets_its_input_and_returns_output_and_status() {
    let sshd = Sshd::start();
    let (connection, host_keys) = Connection::open(&sshd.target(), CAP).await.unwrap();
    assert!(host_keys.is_empty());
    let input = vec![b'x'; 3 << 20];
    let output = connection.run("wc -c; echo oops >&2; exit 7", &input).await.unwrap();
    assert_eq!(output.status, Some(7));
    assert_eq!(String::from_utf8(output.stdout).unwrap().trim(), input.len().to_string());
    assert_eq!(output.stderr, b"oops\n");
    let error = connection.run_checked("echo no luck >&2; exit 3", b"").await.unwrap_err();
    assert!(error.to_string().contains("no luck"), "{error}");
}

#[tokio::test]
async fn the_first_host_key_is_learned_and_a_changed_one_is_a_final_error() {
    let mut sshd = Sshd::start();
    let mut target = sshd.target();
    target.pin = HostKeyPin::FirstUse;
    let (_, host_keys) = Connection::open(&target, CAP).await.unwrap();
    assert_eq!(host_keys[0].key, sshd.host_key());

    target.pin = HostKeyPin::Known(host_keys[0].key.clone());
    Connection::open(&target, CAP).await.unwrap();
    sshd.change_host_key();
    let error = Connection::open(&target, CAP).await.unwrap_err();
    assert!(error.is_final());
    let TunnelError::HostKeyChanged { expected, shown, .. } = error else { panic!("{error}") };
    assert_eq!((*expected, *shown), (host_keys[0].key.clone(), sshd.host_key()));
}

#[tokio::test]
async fn an_unauthorised_key_is_denied_with_a_final_error() {
    let (sshd, other) = (Sshd::start(), Sshd::start());
    let mut target = sshd.target();
    target.keys = other.target().keys;
    let error = Connection::open(&target, CAP).await.unwrap_err();
    assert!(matches!(error, TunnelError::Denied { offered: 1, .. }), "{error}");
    assert!(error.is_final());
}

#[tokio::test]
async fn streams_reach_ports_and_unix_sockets_of_the_host() {
    let sshd = Sshd::start();
    let (connection, _) = Connection::open(&sshd.target(), CAP).await.unwrap();
    let tcp = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let path = sshd.home().join("echo.sock");
    let unix = UnixListener::bind(&path).unwrap();

    let mut stream = connection.open_tcp("127.0.0.1", tcp.local_addr().unwrap().port()).await.unwrap();
    let (mut there, _) = tcp.accept().await.unwrap();
    stream.write_all(b"over tcp").await.unwrap();
    let mut got = [0; 8];
    there.read_exact(&mut got).await.unwrap();
    assert_eq!(&got, b"over tcp");
    drop(there);
    assert_eq!(stream.read(&mut got).await.unwrap(), 0);

    let mut stream = connection.open_unix(path.to_str().unwrap()).await.unwrap();
    let (mut there, _) = unix.accept().await.unwrap();
    there.write_all(b"unixwise").await.unwrap();
    stream.read_exact(&mut got).await.unwrap();
    assert_eq!(&got, b"unixwise");
    drop(stream);
    assert_eq!(there.read(&mut got).await.unwrap(), 0, "a dropped stream closes its channel");
    let absent = connection.open_unix("/nonexistent/socket").await;
    assert!(absent.is_err());
}

#[tokio::test]
async fn a_stalled_reader_loses_its_channel_without_delaying_others() {
    let sshd = Sshd::start();
    let (connection, _) = Connection::open(&sshd.target(), CAP).await.unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    let mut stalled = connection.open_tcp("127.0.0.1", port).await.unwrap();
    let (mut there, _) = listener.accept().await.unwrap();
    let flood = tokio::spawn(async move {
        let block = vec![0u8; 1 << 20];
        while there.write_all(&block).await.is_ok() {}
    });
    // More than the cap has been sent: the stalled channel is closed by now or soon.
    for _ in 0..20 {
        assert_eq!(connection.run_checked("echo alive", b"").await.unwrap(), "alive\n");
    }
    let mut sink = Vec::new();
    let error = stalled.read_to_end(&mut sink).await.unwrap_err();
    assert_eq!(error.kind(), std::io::ErrorKind::ConnectionAborted);
    assert!(sink.len() <= CAP);
    drop(stalled);
    flood.await.unwrap();
}

#[tokio::test]
async fn a_host_is_reached_through_its_jump_host() {
    let (gate, inner) = (Sshd::start(), Sshd::start());
    let mut target = inner.target();
    target.via = Some(Box::new(gate.target()));
    let (connection, _) = Connection::open(&target, CAP).await.unwrap();
    // The inner server sees the connection come from its own machine, through the session on the jump host.
    assert_eq!(connection.run_checked("echo here", b"").await.unwrap(), "here\n");
    drop(gate);
    assert!(connection.run_checked("echo here", b"").await.is_err());
}

#[tokio::test]
async fn an_interrupted_upload_resumes_where_it_stopped() {
    let sshd = Sshd::start();
    let (connection, _) = Connection::open(&sshd.target(), CAP).await.unwrap();
    let bytes: Vec<u8> = (0..600_000u32).map(|n| n.wrapping_mul(2_654_435_761).to_be_bytes()[0]).collect();
    let path = sshd.home().join("agent").display().to_string();
    std::fs::write(sshd.home().join("source"), &bytes).unwrap();
    let sum =
        connection.run_checked(&format!("sha256sum < {}/source", sshd.home().display()), b"").await.unwrap();
    let sum = sum.split_whitespace().next().unwrap().to_owned();
    // No process has the pid 0; the other pid is that of this test.
    let left = format!("{path}.{}.0.part", &sum[..16]);
    let busy = format!("{path}.{}.{}.part", &sum[..16], std::process::id());
    std::fs::write(&left, &bytes[..200_000]).unwrap();
    std::fs::write(&busy, &bytes[..300_000]).unwrap();

    let uploaded = connection.upload(&path, &bytes, &sum).await.unwrap();
    assert_eq!(uploaded.resumed_at, 200_000);
    assert_eq!(std::fs::read(&uploaded.path).unwrap(), bytes);
    assert!(!std::fs::exists(&left).unwrap() && std::fs::read(&busy).unwrap().len() == 300_000);

    std::fs::write(&left, b"garbage").unwrap();
    let error = connection.upload(&path, &bytes, &sum).await.unwrap_err();
    assert!(matches!(error, TunnelError::ChecksumMismatch { .. }), "{error}");
    let (one, other) = (connection.upload(&path, &bytes, &sum), connection.upload(&path, &bytes, &sum));
    let (one, other) = tokio::join!(one, other);
    for uploaded in [one.unwrap(), other.unwrap()] {
        assert_eq!(uploaded.resumed_at, 0);
        assert_eq!(std::fs::read(&uploaded.path).unwrap(), bytes);
    }
}
