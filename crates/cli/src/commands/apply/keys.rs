//! Private keys of SSH fleets: read locally and sent to the server, which stores them encrypted.

use std::path::{Path, PathBuf};

use windlass_model::config::fleet::{Fleet, Host, ProxyJump, SshKey};
use windlass_tunnel::LoginKey;

use super::archive::local_path;
use crate::error::{CliError, ErrorCode};

/// Maximum size of a key file.
const KEY_BYTES_MAX: u64 = 64 << 10;

/// Replaces each reference to a key file with the content of the file.
pub(super) fn load_private_keys(fleet: &mut Fleet, dir: &Path) -> Result<(), CliError> {
    let Some(ssh) = &mut fleet.ssh_config else { return Ok(()) };
    load_key(&mut ssh.ssh_key, ssh.identity_file.as_deref(), dir)?;
    load_proxy_key(ssh.proxy_jump.as_mut(), dir)?;
    for host in &mut ssh.hosts {
        let Host::Params(host) = host else { continue };
        load_key(&mut host.ssh_key, host.identity_file.as_deref(), dir)?;
        load_proxy_key(host.proxy_jump.as_mut(), dir)?;
    }
    Ok(())
}

fn load_proxy_key(jump: Option<&mut ProxyJump>, dir: &Path) -> Result<(), CliError> {
    let Some(jump) = jump else { return Ok(()) };
    let file = jump.identity_file.clone();
    load_key(&mut jump.ssh_key, Some(&file), dir)
}

fn load_key(key: &mut Option<SshKey>, file: Option<&str>, dir: &Path) -> Result<(), CliError> {
    if key.is_none()
        && let Some(file) = file
    {
        *key = Some(read_key(&local_path(dir, file)?)?);
    }
    Ok(())
}

pub(super) fn read_key(path: &PathBuf) -> Result<SshKey, CliError> {
    let what = format!("failed to read the private key `{}`", path.display());
    let size = std::fs::metadata(path)
        .map_err(|error| CliError::from_error(&what, &error).code(ErrorCode::UnusableKey))?
        .len();
    if size > KEY_BYTES_MAX {
        return Err(CliError::new(what)
            .code(ErrorCode::UnusableKey)
            .why("the file is too large to be a key"));
    }
    let private = std::fs::read_to_string(path)
        .map_err(|error| CliError::from_error(&what, &error).code(ErrorCode::UnusableKey))?;
    let key = LoginKey::parse(&private).map_err(|error| {
        CliError::from_error(&what, &error).code(ErrorCode::UnusableKey).hint(
            "use an RSA, ECDSA or Ed25519 key without a passphrase; `ssh-keygen -p` removes a passphrase",
        )
    })?;
    Ok(SshKey { public: key.public_line(), private: Some(private) })
}
