//! Tests of the real binary: separate processes, real sockets, a real container engine.

#![expect(clippy::unwrap_used, reason = "tests stop at the first surprise")]

mod blocks;
mod confined;
mod cramped;
mod delivery;
mod docker;
mod files;
mod fuzz;
mod gate;
mod hollow;
mod host;
mod logs;
mod passage;
mod policy;
mod process;
mod proxy;
mod repo;
mod restart;
mod runner;
mod ssh;
mod support;
mod torture;

#[test]
fn the_binary_says_its_version() {
    let said = std::process::Command::new(support::agent()).arg("--version").output().unwrap();
    assert_eq!(
        String::from_utf8(said.stdout).unwrap(),
        concat!("windlass-agent ", env!("CARGO_PKG_VERSION"), "\n")
    );
}
mod wire;
