//! Private keys of SSH fleets: read here, sent to the server, sealed there.

use std::path::{Path, PathBuf};

use windlass_model::config::fleet::{Fleet, Host, ProxyJump, SshKey};
use windlass_tunnel::Key;

use super::archive::local_path;
use crate::problem::{Code, Problem};

/// Larger files are no keys.
const KEY_BYTES_MAX: u64 = 64 << 10;

/// Puts the key into every place that names a file.
pub(super) fn fill_in(fleet: &mut Fleet, dir: &Path) -> Result<(), Problem> {
    let Some(ssh) = &mut fleet.ssh_config else { return Ok(()) };
    put(&mut ssh.ssh_key, ssh.identity_file.as_deref(), dir)?;
    proxy(ssh.proxy_jump.as_mut(), dir)?;
    for host in &mut ssh.hosts {
        let Host::Params(host) = host else { continue };
        put(&mut host.ssh_key, host.identity_file.as_deref(), dir)?;
        proxy(host.proxy_jump.as_mut(), dir)?;
    }
    Ok(())
}

fn proxy(jump: Option<&mut ProxyJump>, dir: &Path) -> Result<(), Problem> {
    let Some(jump) = jump else { return Ok(()) };
    let file = jump.identity_file.clone();
    put(&mut jump.ssh_key, Some(&file), dir)
}

fn put(key: &mut Option<SshKey>, file: Option<&str>, dir: &Path) -> Result<(), Problem> {
    if key.is_none()
        && let Some(file) = file
    {
        *key = Some(read(&local_path(dir, file)?)?);
    }
    Ok(())
}

pub(super) fn read(path: &PathBuf) -> Result<SshKey, Problem> {
    let what = format!("read the private key `{}`", path.display());
    let size =
        std::fs::metadata(path).map_err(|error| Problem::caused(&what, &error).code(Code::Unfit))?.len();
    if size > KEY_BYTES_MAX {
        return Err(Problem::new(what).code(Code::Unfit).why("it is too large to be a key"));
    }
    let private =
        std::fs::read_to_string(path).map_err(|error| Problem::caused(&what, &error).code(Code::Unfit))?;
    let key = Key::parse(&private).map_err(|error| {
        Problem::caused(&what, &error)
            .code(Code::Unfit)
            .hint("the key must be RSA, ECDSA or Ed25519 and have no passphrase; `ssh-keygen -p` removes one")
    })?;
    Ok(SshKey { public: key.public_line(), private: Some(private) })
}
