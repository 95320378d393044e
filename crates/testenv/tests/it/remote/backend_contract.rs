//! The backend `remote` passes the conformance tests of backends, on a real host.

use std::sync::Arc;

use windlass_backend::{Backend, conformance::check_backend, remote::ROOT};
use windlass_testenv::ssh::SshTarget as _;
use windlass_testkit::lab::{Lab, WORKER};

use super::fixtures::{agent, instance_order, remote};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_ssh_host_fulfils_the_backend_contract() {
    let lab = Lab::start(1).unwrap();
    let host = lab.host(1);
    let agent = agent();
    let open = || -> Arc<dyn Backend> { Arc::new(remote(&agent)) };
    for target in [host.target(), host.target_as(WORKER)] {
        check_backend(&open, &instance_order(target)).await;
        assert!(!host.path(ROOT).exists());
        let left = host.processes().unwrap();
        assert!(!left.iter().any(|process| process.command.contains("windlass")), "{left:?}");
    }
}
