//! Conformance of every backend to the trait.

use std::sync::Arc;

use windlass_api::agent::shim::ProcessMode;
use windlass_backend::{
    Backend,
    conformance::check_backend,
    local::{LocalBackend, Runtime, Settings},
    mock::{MockCloud, script::MockScript},
};
use windlass_testkit::temp_dir;

use crate::support::{StopOnDrop, agent, order};

#[tokio::test]
async fn local_backend_passes_the_conformance_checks() {
    let dir = temp_dir("keeps").unwrap();
    let _sweep = StopOnDrop(dir.path());
    let open = || -> Arc<dyn Backend> {
        Arc::new(LocalBackend::new(Settings {
            home: dir.path().join("local"),
            agent: Some(agent().path().to_owned()),
            runtime: Some(Runtime::Process),
            docker_socket: None,
            processes: ProcessMode::Own,
        }))
    };
    let order = order(&*open(), 1).await;
    check_backend(&open, &order).await;
}

#[tokio::test]
async fn slow_mock_cloud_passes_the_conformance_checks() {
    let dir = temp_dir("keeps").unwrap();
    let _sweep = StopOnDrop(dir.path());
    let script =
        "offers: [{instance_type: a, price: 1.5, cpus: 4, memory_gb: 16, boot_ms: 300, slow_deletes: 2}]";
    let script = MockScript::parse(script).unwrap();
    let open = || -> Arc<dyn Backend> {
        Arc::new(MockCloud::new(script.clone(), dir.path(), Some(agent().path().to_owned())))
    };
    let order = order(&*open(), 1).await;
    check_backend(&open, &order).await;
}
