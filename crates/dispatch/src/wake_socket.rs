//! Wake-up socket: hooks of a scheduler make a dispatcher start a round at once.
//!
//! A wake-up carries no data and may be lost: the dispatcher then starts its round a little later.

use std::{
    fs, io,
    os::unix::{
        fs::{FileTypeExt as _, PermissionsExt as _},
        net,
    },
    path::{Path, PathBuf},
};

use tokio::net::UnixDatagram;

pub struct WakeSocket {
    socket: UnixDatagram,
    path: PathBuf,
}

impl WakeSocket {
    /// Binds the socket. A socket left by a process that exited is replaced; any other file stays.
    pub fn bind(path: &Path) -> io::Result<Self> {
        if fs::symlink_metadata(path).is_ok_and(|found| found.file_type().is_socket()) {
            fs::remove_file(path)?;
        }
        let socket = UnixDatagram::bind(path)?;
        // Slurm's controller runs as another user. All that another user can do is cause a round.
        fs::set_permissions(path, fs::Permissions::from_mode(0o622))?;
        Ok(Self { socket, path: path.to_owned() })
    }

    /// Waits until a wake-up arrives.
    pub async fn next(&self) {
        if self.socket.recv(&mut [0]).await.is_err() {
            std::future::pending::<()>().await;
        }
        // Several pending wake-ups count as one.
        while self.socket.try_recv(&mut [0]).is_ok() {}
    }
}

impl Drop for WakeSocket {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.path);
    }
}

/// Sends a wake-up. Never blocks: a full socket already has one pending.
pub fn notify(path: &Path) -> io::Result<()> {
    let socket = net::UnixDatagram::unbound()?;
    socket.set_nonblocking(true)?;
    match socket.send_to(b"!", path) {
        Err(error) if error.kind() != io::ErrorKind::WouldBlock => Err(error),
        Ok(_) | Err(_) => Ok(()),
    }
}
