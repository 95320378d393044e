//! Last known routes in a file.

use windlass_gateway::{
    route::{ReplicaRoute, ReplicaTarget, RouteGroup, RouteSnapshot},
    route_cache_file::{self, RouteFileError},
};
use windlass_testkit::temp_dir;

use crate::support::service;

fn snapshot() -> RouteSnapshot {
    let targets = [
        ReplicaTarget::Tcp { address: "[::1]:80".parse().unwrap() },
        ReplicaTarget::Unix { path: "/run/x.sock".into() },
        ReplicaTarget::Tunnel { name: "host-1".to_owned(), port: 8000 },
    ];
    let replicas =
        targets.into_iter().enumerate().map(|(n, target)| ReplicaRoute { id: n.to_string(), target });
    let mut service = service(vec![]);
    service.groups = vec![RouteGroup { name: "0".to_owned(), replicas: replicas.collect() }];
    RouteSnapshot { generation: 7, services: vec![service] }
}

#[test]
fn saved_routes_are_loaded_unchanged() {
    let folder = temp_dir("state").unwrap();
    let path = folder.path().join("routes");
    assert!(route_cache_file::load::<RouteSnapshot>(&path).unwrap().is_none());
    route_cache_file::save(&path, &snapshot()).unwrap();
    assert_eq!(route_cache_file::load::<RouteSnapshot>(&path).unwrap(), Some(snapshot()));
    let newer = RouteSnapshot { generation: 8, ..snapshot() };
    route_cache_file::save(&path, &newer).unwrap();
    assert_eq!(route_cache_file::load::<RouteSnapshot>(&path).unwrap(), Some(newer));
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1);
}

#[test]
fn a_truncated_or_modified_route_file_is_detected() {
    let folder = temp_dir("state").unwrap();
    let path = folder.path().join("routes");
    route_cache_file::save(&path, &snapshot()).unwrap();
    let whole = std::fs::read(&path).unwrap();
    for length in 0..whole.len() {
        std::fs::write(&path, &whole[..length]).unwrap();
        assert!(
            matches!(route_cache_file::load::<RouteSnapshot>(&path), Err(RouteFileError::Damaged { .. })),
            "{length} bytes"
        );
    }
    for at in (0..whole.len()).step_by(7) {
        let mut edited = whole.clone();
        edited[at] ^= 1;
        std::fs::write(&path, &edited).unwrap();
        assert!(route_cache_file::load::<RouteSnapshot>(&path).is_err(), "byte {at}");
    }
    std::fs::write(&path, [whole.as_slice(), b"x"].concat()).unwrap();
    assert!(route_cache_file::load::<RouteSnapshot>(&path).is_err());
}
