//! Checks of an SSH fleet's hosts when the fleet is applied: their keys, and their owners.

use serde_json::Value;
use windlass_model::{
    config::fleet::{Host, ProxyJump, SshConfig, SshKey},
    error_chain::format_chain,
    id::{FleetId, ProjectId},
};
use windlass_tunnel::LoginKey;

use crate::{
    app::App,
    db::{documents::FLEET_SPEC, fleets, instances},
    error::{Error, Result},
    job_payload::connection_info::HostLogin,
};

const SSH_PORT: i64 = 22;

/// Rejects private keys that cannot be used to log in.
pub(super) fn check_keys(ssh: &SshConfig) -> Result<()> {
    let of_jump = |jump: Option<&ProxyJump>| {
        jump.map_or(Ok(()), |jump| check_key(&jump.hostname, jump.ssh_key.as_ref()))
    };
    check_key("the fleet", ssh.ssh_key.as_ref())?;
    of_jump(ssh.proxy_jump.as_ref())?;
    for host in ssh.hosts.iter().filter_map(Host::params) {
        check_key(&host.hostname, host.ssh_key.as_ref())?;
        of_jump(host.proxy_jump.as_ref())?;
    }
    Ok(())
}

/// Rejects addresses that hosts may not have. The addresses of a name are checked when the server connects.
pub(super) fn check_addresses(app: &App, ssh: &SshConfig) -> Result<()> {
    let of_host =
        |host: &Host| host.params().and_then(|own| own.proxy_jump.as_ref()).map(|jump| jump.hostname.clone());
    let shared = ssh.proxy_jump.as_ref().map(|jump| jump.hostname.clone());
    // Hosts behind a jump host are reached from there.
    let direct = ssh
        .hosts
        .iter()
        .map(|host| of_host(host).or_else(|| shared.clone()).unwrap_or_else(|| host.hostname().to_owned()));
    let allowed = &app.settings().allowed_hosts;
    match { direct }.find(|host| !allowed.admits_literal(host)) {
        None => Ok(()),
        Some(host) => Err(Error::refused(format!(
            "the address of host `{host}` is not allowed; hint: the operator of the server can allow networks with \
             `--allow-host-networks`"
        ))),
    }
}

fn check_key(whose: &str, key: Option<&SshKey>) -> Result<()> {
    let Some(private) = key.and_then(|key| key.private.as_deref()) else { return Ok(()) };
    LoginKey::parse(private).map(|_| ()).map_err(|error| {
        Error::refused(format!(
            "invalid SSH key of {whose}: {}; expected an RSA, ECDSA or Ed25519 private key without a passphrase",
            format_chain(&error)
        ))
    })
}

/// Rejects hosts of another fleet: both would start jobs on the same GPU.
pub(super) async fn check_not_taken(
    app: &App,
    project: ProjectId,
    ssh: &SshConfig,
    own: Option<FleetId>,
) -> Result<()> {
    let names = ssh.hosts.iter().map(Host::hostname);
    for taken in instances::ssh_hosts(app.db(), names).await? {
        let Some(fleet) = taken.fleet_id.filter(|fleet| Some(*fleet) != own) else { continue };
        let Some(fleet) = fleets::find(app.db(), fleet).await? else { continue };
        let stored: Value = FLEET_SPEC.decode(fleet.id, &fleet.spec)?;
        let Some(login) = HostLogin::of(&taken, Some(&stored))? else { continue };
        let through = login.proxy.as_ref().and_then(|proxy| proxy["hostname"].as_str());
        let is_it = |host: &&Host| {
            taken.hostname.as_deref() == Some(host.hostname())
                && (port(ssh, host), jump(ssh, host)) == (i64::from(login.port), through)
        };
        let Some(host) = ssh.hosts.iter().find(is_it) else { continue };
        let whose = match fleet.project_id == project {
            true => format!("fleet `{}`", fleet.name),
            false => "a fleet of another project".to_owned(),
        };
        let hint = match fleet.termination_asked_at {
            Some(_) => "that fleet is being deleted; apply again when it is deleted",
            None => "remove it from that fleet first",
        };
        return Err(Error::refused(format!("host `{}` belongs to {whose}: {hint}", host.hostname())));
    }
    Ok(())
}

fn port(ssh: &SshConfig, host: &Host) -> i64 {
    let own = host.params().and_then(|own| own.port);
    own.or(ssh.port).map_or(SSH_PORT, |port| port.0)
}

/// Jump host of a host: equal names behind two jump hosts are different hosts.
fn jump<'a>(ssh: &'a SshConfig, host: &'a Host) -> Option<&'a str> {
    let own = host.params().and_then(|own| own.proxy_jump.as_ref());
    own.or(ssh.proxy_jump.as_ref()).map(|jump| jump.hostname.as_str())
}
