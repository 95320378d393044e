//! The connections of all hosts: kept, checked, made again.

use std::{sync::Arc, time::Duration};

use windlass_tunnel::{Backoff, Hosts, TunnelError};

use crate::sshd::Sshd;

#[tokio::test]
async fn a_connection_is_shared_and_made_again_after_the_host_restarts() {
    let mut sshd = Sshd::start();
    let hosts = Hosts::new(Backoff { first: Duration::ZERO, last: Duration::ZERO });
    let target = sshd.target();
    let (first, _) = hosts.control(&"a", &target).await.unwrap();
    let (second, _) = hosts.control(&"a", &target).await.unwrap();
    assert!(Arc::ptr_eq(&first, &second));
    let (traffic, _) = hosts.traffic(&"a", &target).await.unwrap();
    assert!(!Arc::ptr_eq(&first, &traffic), "people's traffic has a connection of its own");

    sshd.start_again();
    // The end of a connection is seen when its bytes are read, a moment after the server went.
    let until = tokio::time::Instant::now() + Duration::from_secs(10);
    while !first.is_closed() {
        assert!(tokio::time::Instant::now() < until);
        tokio::task::yield_now().await;
    }
    let (third, _) = hosts.control(&"a", &target).await.unwrap();
    assert_eq!(third.read("echo back", b"").await.unwrap(), "back\n");
}

#[tokio::test]
async fn after_a_failure_the_next_try_waits_and_says_so() {
    let mut sshd = Sshd::start();
    let target = sshd.target();
    sshd.stop();
    let hosts = Hosts::new(Backoff { first: Duration::from_secs(3600), last: Duration::from_secs(3600) });
    assert!(matches!(hosts.control(&1, &target).await, Err(TunnelError::Connect { .. })));
    let error = hosts.control(&1, &target).await.unwrap_err();
    assert!(matches!(error, TunnelError::Waiting { .. }), "{error}");
    assert!(error.to_string().contains("next try is in"), "{error}");
    assert!(!error.is_final());
}

#[tokio::test]
async fn a_frozen_host_is_noticed_and_given_up() {
    let sshd = Sshd::start();
    let hosts = Hosts::new(Backoff::STANDARD);
    let (connection, _) = hosts.control(&1, &sshd.target()).await.unwrap();
    hosts.check(&1).await.unwrap();
    sshd.signal("STOP");
    let error = hosts.check(&1).await.unwrap_err();
    assert!(matches!(error, TunnelError::Timeout { .. }), "{error}");
    sshd.signal("CONT");
    let (again, _) = hosts.control(&1, &sshd.target()).await.unwrap();
    assert!(!Arc::ptr_eq(&connection, &again));
}

#[test]
fn waits_double_up_to_a_bound_and_are_spread() {
    let backoff = Backoff { first: Duration::from_secs(1), last: Duration::from_secs(30) };
    let waits: Vec<u128> = (1..=7).map(|n| backoff.wait(n, 128).as_millis()).collect();
    assert_eq!(waits, [1000, 2000, 4000, 8000, 16000, 30000, 30000]);
    assert!(backoff.wait(1, 0) < backoff.wait(1, 255));
    assert!(backoff.wait(u32::MAX, 255) < Duration::from_secs(38));
}
