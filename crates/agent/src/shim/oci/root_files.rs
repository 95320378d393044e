//! Files of an image that are read before its container exists: users and groups. And files that the container gets.

use std::{
    fs::{self, File},
    io::{self, Read as _},
    os::unix::fs::FileTypeExt as _,
    path::{Path, PathBuf},
};

use rustix::fs::{Mode, OFlags, ResolveFlags};

use windlass_api::agent::shim::NetworkMode;

use super::{
    config::{Bundle, NETWORK_FILES},
    network::container_resolv_conf,
};

/// Beginning of `/etc/hosts` of a container with a separate network.
const HOSTS: &str = "127.0.0.1\tlocalhost\n::1\tlocalhost ip6-localhost ip6-loopback\n";
/// Servers that the name service of systemd asks.
const UPSTREAM_RESOLV_CONF: &str = "/run/systemd/resolve/resolv.conf";
const FILE_BYTES_MAX: u64 = 16 << 20;

/// Reads a text file of an image from its layers, the topmost first; empty if there is none.
pub(super) fn read_from_layers(layers: &[PathBuf], path: &str) -> io::Result<String> {
    for layer in layers.iter().rev() {
        let handle = match open_in_layer(layer, path) {
            Ok(Some(handle)) => handle,
            Ok(None) => continue,
            Err(error) => return Err(error),
        };
        let kind = handle.metadata()?.file_type();
        if kind.is_char_device() || kind.is_dir() {
            // Removed by this layer, or not what it should be.
            return Ok(String::new());
        }
        let path = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&handle));
        let mut bytes = Vec::new();
        if kind.is_file() {
            File::open(path)?.take(FILE_BYTES_MAX).read_to_end(&mut bytes)?;
        }
        return Ok(String::from_utf8_lossy(&bytes).into_owned());
    }
    Ok(String::new())
}

/// Returns a handle of the file that cannot be read yet: opening a device or a pipe may have an effect.
fn open_in_layer(layer: &Path, path: &str) -> io::Result<Option<File>> {
    let root = File::open(layer)?;
    let resolve = ResolveFlags::IN_ROOT | ResolveFlags::NO_MAGICLINKS;
    match rustix::fs::openat2(&root, path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty(), resolve) {
        Ok(handle) => Ok(Some(File::from(handle))),
        Err(rustix::io::Errno::NOENT | rustix::io::Errno::NOTDIR | rustix::io::Errno::LOOP) => Ok(None),
        Err(errno) => Err(errno.into()),
    }
}

/// Writes the files of a container's network: copies of those of the host for a container on its network. The container
/// may change them.
pub(super) fn write_network_files(bundle: &Bundle, hostname: &str, network: NetworkMode) -> io::Result<()> {
    fs::create_dir_all(bundle.files())?;
    let of_host = |name: &str| fs::read(Path::new("/etc").join(name)).unwrap_or_default();
    for name in NETWORK_FILES {
        let text = match (name, network) {
            ("hostname", _) => format!("{hostname}\n").into_bytes(),
            // The address of the container is added when it is known.
            ("hosts", NetworkMode::Bridge) => HOSTS.to_owned().into_bytes(),
            ("resolv.conf", NetworkMode::Bridge) => {
                let upstream = fs::read_to_string(UPSTREAM_RESOLV_CONF).unwrap_or_default();
                container_resolv_conf(&String::from_utf8_lossy(&of_host(name)), &upstream).into_bytes()
            }
            (name, _) => of_host(name),
        };
        fs::write(bundle.files().join(name), text)?;
    }
    Ok(())
}

/// Name of the host.
pub(super) fn hostname() -> String {
    let name = rustix::system::uname().nodename().to_string_lossy().into_owned();
    if name.is_empty() { "localhost".to_owned() } else { name }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_topmost_layer_that_has_or_removed_a_file_counts() {
        let dir = windlass_testkit::temp_dir("layers").unwrap();
        let layers: Vec<PathBuf> = ["0", "1", "2"].map(|name| dir.path().join(name)).to_vec();
        for layer in &layers {
            fs::create_dir_all(layer.join("etc")).unwrap();
        }
        let read = || read_from_layers(&layers, "etc/passwd").unwrap();
        assert_eq!(read(), "");
        fs::write(layers[0].join("etc/passwd"), "base").unwrap();
        assert_eq!(read(), "base");
        fs::write(layers[1].join("etc/passwd"), "middle").unwrap();
        assert_eq!(read(), "middle");
        std::os::unix::fs::symlink("/etc/hidden", layers[2].join("etc/passwd")).unwrap();
        fs::write(layers[2].join("etc/hidden"), "linked").unwrap();
        assert_eq!(read(), "linked");
        fs::remove_file(layers[2].join("etc/passwd")).unwrap();
        let kind = rustix::fs::FileType::CharacterDevice;
        rustix::fs::mknodat(rustix::fs::CWD, layers[2].join("etc/passwd"), kind, Mode::empty(), 0).unwrap();
        assert_eq!(read(), "");
    }
}
