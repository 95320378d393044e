//! Connection pool: reuse, checks, reconnection.

use std::{sync::Arc, time::Duration};

use windlass_dial::AllowedAddresses;
use windlass_testkit::wait::eventually_async;
use windlass_tunnel::{Backoff, SshDestination, SshPool, TunnelError};

use crate::sshd::Sshd;

#[tokio::test]
async fn a_connection_is_shared_and_reopened_after_the_host_restarts() {
    let mut sshd = Sshd::start();
    let hosts = SshPool::new(Backoff { initial: Duration::ZERO, max: Duration::ZERO });
    let target = sshd.target();
    let (first, _) = hosts.control_connection(&"a", &target).await.unwrap();
    let (second, _) = hosts.control_connection(&"a", &target).await.unwrap();
    assert!(Arc::ptr_eq(&first, &second));
    let (traffic, _) = hosts.traffic_connection(&"a", &target).await.unwrap();
    assert!(!Arc::ptr_eq(&first, &traffic), "people's traffic has a connection of its own");

    sshd.restart();
    // The end of a connection is detected when it is read, a moment after the server has stopped.
    eventually_async("the connection is closed", async || first.is_closed().then_some(())).await;
    let (third, _) = hosts.control_connection(&"a", &target).await.unwrap();
    assert_eq!(third.run_checked("echo back", b"").await.unwrap(), "back\n");
}

#[tokio::test]
async fn a_failed_connection_backs_off_and_the_error_names_the_next_try() {
    let mut sshd = Sshd::start();
    let target = sshd.target();
    sshd.stop();
    let hosts = SshPool::new(Backoff { initial: Duration::from_secs(3600), max: Duration::from_secs(3600) });
    let error = hosts.control_connection(&1, &target).await.unwrap_err();
    assert!(matches!(error, TunnelError::Connect { .. }), "{error:?}");
    let error = hosts.control_connection(&1, &target).await.unwrap_err();
    assert!(matches!(error, TunnelError::BackingOff { .. }), "{error}");
    assert!(error.to_string().contains("next attempt in"), "{error}");
    assert!(!error.is_final());
}

#[tokio::test]
async fn a_corrected_destination_is_tried_without_backoff() {
    let (sshd, outsider) = (Sshd::start(), Sshd::start());
    let hosts = SshPool::new(Backoff { initial: Duration::from_secs(3600), max: Duration::from_secs(3600) });
    let mut target = sshd.target();
    target.keys = outsider.target().keys;
    assert!(matches!(hosts.control_connection(&1, &target).await, Err(TunnelError::Denied { .. })));
    let waiting = hosts.control_connection(&1, &target).await.unwrap_err();
    assert!(waiting.is_final() && matches!(waiting, TunnelError::BackingOff { .. }), "{waiting}");
    let (right, _) = hosts.control_connection(&1, &sshd.target()).await.unwrap();
    let (other, _) = hosts.control_connection(&1, &outsider.target()).await.unwrap();
    assert!(!Arc::ptr_eq(&right, &other));
}

#[tokio::test]
async fn hosts_and_jump_hosts_at_disallowed_addresses_are_not_dialled() {
    let sshd = Sshd::start();
    let target = sshd.target();
    let hosts = SshPool::new(Backoff::STANDARD).with_allowed(AllowedAddresses::External { but: Vec::new() });
    let error = hosts.control_connection(&1, &target).await.unwrap_err();
    assert!(matches!(error, TunnelError::NotAllowed { .. }) && error.is_final(), "{error}");
    let named = SshDestination { host: "localhost".into(), ..target.clone() };
    let error = hosts.control_connection(&2, &named).await.unwrap_err();
    assert!(matches!(error, TunnelError::NotAllowed { .. }), "by name: {error}");
    let behind = SshDestination { host: "192.0.2.1".into(), via: Some(Box::new(named)), ..target.clone() };
    let error = hosts.control_connection(&3, &behind).await.unwrap_err();
    assert!(matches!(error.cause(), TunnelError::NotAllowed { .. }), "a jump host: {error}");
    let but = vec!["127.0.0.0/8".parse().unwrap()];
    let hosts = SshPool::new(Backoff::STANDARD).with_allowed(AllowedAddresses::External { but });
    hosts.control_connection(&1, &target).await.unwrap();
}

#[tokio::test]
async fn a_frozen_host_times_out_and_its_connection_is_replaced() {
    let sshd = Sshd::start();
    let hosts = SshPool::new(Backoff::STANDARD);
    let (connection, _) = hosts.control_connection(&1, &sshd.target()).await.unwrap();
    hosts.check(&1).await.unwrap();
    sshd.signal("STOP");
    let error = hosts.check(&1).await.unwrap_err();
    assert!(matches!(error, TunnelError::Timeout { .. }), "{error}");
    sshd.signal("CONT");
    let (again, _) = hosts.control_connection(&1, &sshd.target()).await.unwrap();
    assert!(!Arc::ptr_eq(&connection, &again));
}

/// Returns the resident memory, in KiB.
fn resident_kib() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with("VmRSS:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse().unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn hundreds_of_hosts_connect_concurrently_and_close_when_forgotten() {
    const HOSTS: usize = 200;
    let sshd = Sshd::start();
    let hosts = Arc::new(SshPool::new(Backoff::STANDARD));
    let before = resident_kib();
    let target = sshd.target();
    let all = (0..HOSTS).map(|host| {
        let (hosts, target) = (Arc::clone(&hosts), target.clone());
        tokio::spawn(async move {
            hosts.control_connection(&host, &target).await.map(|(connection, _)| connection)
        })
    });
    let mut open = Vec::new();
    for one in all.collect::<Vec<_>>() {
        open.push(one.await.unwrap().unwrap());
    }
    println!("{} KiB per host", (resident_kib() - before) / HOSTS as u64);
    assert_eq!(sshd.connections(), HOSTS);
    for connection in &open {
        connection.ping(Duration::from_secs(30)).await.unwrap();
    }
    drop(open);
    for host in 0..HOSTS {
        hosts.forget(&host);
    }
    eventually_async("no connection is left", async || (sshd.connections() == 0).then_some(())).await;
}

#[tokio::test]
async fn hosts_behind_one_jump_host_share_its_connection() {
    let (gate, inner) = (Sshd::start(), Sshd::start());
    let hosts = SshPool::new(Backoff::STANDARD);
    let mut target = inner.target();
    target.via = Some(Box::new(gate.target()));
    let mut open = Vec::new();
    for host in 0..5 {
        let (connection, _) = hosts.control_connection(&host, &target).await.unwrap();
        assert_eq!(connection.run_checked("echo here", b"").await.unwrap(), "here\n");
        let names: Vec<String> = connection.host_keys().into_iter().map(|seen| seen.host).collect();
        assert_eq!(names, [gate.target().known_hosts_name(), target.known_hosts_name()]);
        open.push(connection);
    }
    assert_eq!((gate.connections(), inner.connections()), (1, 5));
    let (traffic, _) = hosts.traffic_connection(&0, &target).await.unwrap();
    assert_eq!(gate.connections(), 2, "people's traffic does not go where control goes");
    drop((open, traffic));
    for host in 0..5 {
        hosts.forget(&host);
    }
    eventually_async("the way there is closed", async || (gate.connections() == 0).then_some(())).await;
}

#[tokio::test]
async fn a_jump_host_that_is_down_is_named_and_backs_off_for_all_hosts_behind_it() {
    let (mut gate, inner) = (Sshd::start(), Sshd::start());
    let hosts = SshPool::new(Backoff { initial: Duration::from_secs(3600), max: Duration::from_secs(3600) });
    let mut target = inner.target();
    target.via = Some(Box::new(gate.target()));
    gate.stop();
    let first = hosts.control_connection(&1, &target).await.unwrap_err();
    assert!(matches!(first, TunnelError::Connect { .. }), "{first}");
    assert_eq!(first.host(), gate.target().name());
    let second = hosts.control_connection(&2, &target).await.unwrap_err();
    assert!(matches!(second, TunnelError::BackingOff { .. }), "{second}");
    assert!(matches!(second.cause(), TunnelError::Connect { .. }));
}

#[test]
fn backoff_delays_double_up_to_a_limit_with_jitter() {
    let backoff = Backoff { initial: Duration::from_secs(1), max: Duration::from_secs(30) };
    let waits: Vec<u128> = (1..=7).map(|n| backoff.delay(n, 128).as_millis()).collect();
    assert_eq!(waits, [1000, 2000, 4000, 8000, 16000, 30000, 30000]);
    assert!(backoff.delay(1, 0) < backoff.delay(1, 255));
    assert!(backoff.delay(u32::MAX, 255) < Duration::from_secs(38));
}
