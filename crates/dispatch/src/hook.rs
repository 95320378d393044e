//! A place to knock at: hooks of a scheduler make a dispatcher look at once.
//!
//! A knock carries nothing and may be lost: whoever misses it looks a little later.

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
    /// A socket that somebody's end left behind is replaced; any other file stays.
    pub fn bind(path: &Path) -> io::Result<Self> {
        if fs::symlink_metadata(path).is_ok_and(|found| found.file_type().is_socket()) {
            fs::remove_file(path)?;
        }
        let socket = UnixDatagram::bind(path)?;
        // Slurm's controller is somebody else. All that a stranger can do is make us look.
        fs::set_permissions(path, fs::Permissions::from_mode(0o622))?;
        Ok(Self { socket, path: path.to_owned() })
    }

    /// Until somebody has knocked.
    pub async fn next(&self) {
        if self.socket.recv(&mut [0]).await.is_err() {
            std::future::pending::<()>().await;
        }
        // Many at once are one.
        while self.socket.try_recv(&mut [0]).is_ok() {}
    }
}

impl Drop for WakeSocket {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.path);
    }
}

/// Never waits: a full socket is one that has been knocked at.
pub fn notify(path: &Path) -> io::Result<()> {
    let socket = net::UnixDatagram::unbound()?;
    socket.set_nonblocking(true)?;
    match socket.send_to(b"!", path) {
        Err(error) if error.kind() != io::ErrorKind::WouldBlock => Err(error),
        Ok(_) | Err(_) => Ok(()),
    }
}
