//! Tests of the real binary: separate processes, real sockets, a real container engine.

#![expect(clippy::unwrap_used, reason = "tests stop at the first surprise")]

mod authorization;
mod blocks;
mod confinement;
mod directory_access;
mod docker;
mod files;
mod full_disk;
mod fuzz;
mod host;
mod idempotency;
mod image_store;
mod logs;
mod oci;
mod output_stress;
mod policy;
mod process;
mod proxy;
mod repo;
mod restart;
mod runner;
mod simulated_runtime;
mod ssh;
mod support;

#[test]
fn the_binary_prints_its_version() {
    let message = std::process::Command::new(support::agent()).arg("--version").output().unwrap();
    assert_eq!(
        String::from_utf8(message.stdout).unwrap(),
        concat!("windlass-agent ", env!("CARGO_PKG_VERSION"), "\n")
    );
}
mod typed_client;
