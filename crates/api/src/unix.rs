//! Unix sockets at paths of any length.

use std::{io, os::fd::AsRawFd as _, path::Path};

use tokio::net::UnixStream;

/// Maximum length of a unix socket address, without the terminating zero.
const ADDRESS_BYTES_MAX: usize = 107;

/// Connects to the socket at `path`. A path longer than an address permits is reached through its directory.
pub async fn connect(path: &Path) -> io::Result<UnixStream> {
    if path.as_os_str().len() <= ADDRESS_BYTES_MAX {
        return UnixStream::connect(path).await;
    }
    let (Some(parent), Some(name)) = (path.parent(), path.file_name()) else {
        return Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            "invalid socket path: expected a directory and a file name",
        ));
    };
    let dir = std::fs::File::open(parent)?;
    let short = Path::new("/proc/self/fd").join(dir.as_raw_fd().to_string()).join(name);
    // The directory stays open until the connection is made.
    let connected = UnixStream::connect(short).await;
    drop(dir);
    connected
}
