//! Wake-ups of a dispatcher.

use windlass_dispatch::wake_socket::{WakeSocket, notify};

#[tokio::test]
async fn repeated_notifications_wake_once_and_a_stale_socket_is_replaced() {
    let dir = windlass_testkit::temp_dir("hook").unwrap();
    let path = dir.path().join("sock");
    assert!(notify(&path).is_err(), "nobody is there");
    drop(std::os::unix::net::UnixDatagram::bind(&path).unwrap());
    let hook = WakeSocket::bind(&path).unwrap();
    for _ in 0..1_000 {
        notify(&path).unwrap();
    }
    hook.next().await;
    assert!(futures_util::poll!(Box::pin(hook.next())).is_pending(), "it was heard twice");
    drop(hook);
    assert!(!path.exists());
    std::fs::write(&path, "mine").unwrap();
    assert!(WakeSocket::bind(&path).is_err());
    assert_eq!(std::fs::read_to_string(&path).unwrap(), "mine");
}
