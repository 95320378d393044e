//! Key with which gateways connect to this agent, in the `authorized_keys` of the account that the server logs in to.
//!
//! The key grants one thing: the host's SSH server starts a relay to the shim's socket instead of any requested
//! program, and forwards no port and no other socket. At the shim's socket, a gateway needs a pass for each port. The
//! key is part of the enrolment; the account that has it is recorded in the shim's home, so that the line can be removed
//! from it later.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use serde::{Deserialize, Serialize};
use windlass_model::id::InstanceId;

use super::authorized_keys::{HostAuthorizedKeys, KeysError, MissingDir, parse_key};
use crate::runner::user::UserError;

/// Ends the line, followed by the instance.
const MARK: &str = " windlass-gateway=";
/// File with the name of the account that has the line.
const ACCOUNT_FILE: &str = "gateway-account";

/// Public key of gateways, and the account that they log in to.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GatewayKey {
    pub user: String,
    pub key: String,
}

/// The line of one shim in the accounts of its host.
#[derive(Debug)]
pub(super) struct GatewayLine {
    account_file: PathBuf,
    /// Program that the SSH server starts, with its arguments.
    agent: PathBuf,
    socket: PathBuf,
}

impl GatewayLine {
    pub(super) fn new(home: &Path, agent: &Path, socket: &Path) -> Self {
        Self { account_file: home.join(ACCOUNT_FILE), agent: agent.to_owned(), socket: socket.to_owned() }
    }

    /// Makes `wanted` the only gateway key of this instance. Idempotent.
    pub(super) fn apply(
        &self,
        keys: &HostAuthorizedKeys,
        instance: InstanceId,
        wanted: Option<&GatewayKey>,
    ) -> Result<(), KeysError> {
        let failed = |source| KeysError::Write { file: self.account_file.clone(), source };
        let line = wanted.map(|wanted| self.render(instance, wanted)).transpose()?;
        let mark = format!("{MARK}{instance}");
        let former = match fs::read_to_string(&self.account_file) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => None,
            read => Some(read.map_err(failed)?),
        };
        if let Some(former) = former.filter(|former| wanted.is_none_or(|wanted| wanted.user != *former)) {
            match keys.replace_marked(&former, &mark, None) {
                Err(KeysError::User(UserError::NoUser(_))) | Ok(()) => {}
                Err(error) => return Err(error),
            }
            fs::remove_file(&self.account_file).map_err(failed)?;
        }
        if let Some(wanted) = wanted {
            fs::write(&self.account_file, &wanted.user).map_err(failed)?;
            keys.replace_marked(&wanted.user, &mark, line.as_deref())?;
        }
        Ok(())
    }

    fn render(&self, instance: InstanceId, wanted: &GatewayKey) -> Result<String, KeysError> {
        let (kind, body) = parse_key(&wanted.key).map_err(|why| KeysError::Key { number: 1, why })?;
        let (agent, socket) = (plain_path(&self.agent)?, plain_path(&self.socket)?);
        Ok(format!("restrict,command=\"exec {agent} relay {socket}\" {kind} {body}{MARK}{instance}\n"))
    }
}

/// Returns the path if it means the same in a shell and between the quotes of an option.
fn plain_path(path: &Path) -> Result<&str, KeysError> {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "/._-+@".contains(c);
    path.to_str().filter(|text| text.chars().all(is_plain)).ok_or_else(|| KeysError::Odd {
        file: path.to_owned(),
        why: "its path contains characters that cannot be part of a key's command",
    })
}

impl HostAuthorizedKeys {
    /// Replaces the lines of this crate that end with `mark` by `line`, which ends with a line break.
    fn replace_marked(&self, user: &str, mark: &str, line: Option<&str>) -> Result<(), KeysError> {
        let one_at_a_time = self.writing.lock();
        let missing = if line.is_some() { MissingDir::Create } else { MissingDir::Ignore };
        self.rewrite(&one_at_a_time, user, missing, |old| replace_lines(old, mark, line.unwrap_or_default()))
    }
}

fn replace_lines(old: &[u8], mark: &str, line: &str) -> Vec<u8> {
    let is_ours =
        |line: &[u8]| line.starts_with(b"restrict,") && line.trim_ascii_end().ends_with(mark.as_bytes());
    if !line.is_empty() && old.split_inclusive(|byte| *byte == b'\n').any(|old| old == line.as_bytes()) {
        return old.to_vec();
    }
    let mut new: Vec<u8> = Vec::with_capacity(old.len() + line.len());
    for kept in old.split_inclusive(|byte| *byte == b'\n').filter(|line| !is_ours(line)) {
        new.extend_from_slice(kept);
    }
    if !line.is_empty() && new.last().is_some_and(|last| *last != b'\n') {
        new.push(b'\n');
    }
    new.extend_from_slice(line.as_bytes());
    new
}

#[cfg(test)]
mod tests {
    use windlass_testkit::{TempDir, temp_dir};

    use super::*;

    const KEY: &str =
        "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIFpe1VEr4vk/w2OaNzvZbmmpbRnHzT3XVpqzGkOmFSJN gateways";
    const OTHER: &str = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIGpe1VEr4vk/w2OaNzvZbmmpbRnHzT3XVpqzGkOmFSJN";

    struct Accounts(TempDir);

    impl Accounts {
        fn new(foreign: &str) -> Self {
            let dir = temp_dir("gateway-key").unwrap();
            let root = dir.path();
            let (uid, gid) = (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw());
            let mut passwd = String::new();
            for user in ["ann", "bob"] {
                fs::create_dir_all(root.join(format!("home/{user}/.ssh"))).unwrap();
                fs::write(root.join(format!("home/{user}/.ssh/authorized_keys")), foreign).unwrap();
                passwd += &format!("{user}:x:{uid}:{gid}::/home/{user}:/bin/sh\n");
            }
            fs::create_dir_all(root.join("etc")).unwrap();
            fs::write(root.join("etc/passwd"), passwd).unwrap();
            fs::create_dir_all(root.join("shim")).unwrap();
            Self(dir)
        }

        fn apply(&self, instance: u128, wanted: Option<(&str, &str)>) -> Result<(), KeysError> {
            let home = self.0.path().join("shim");
            let keys = HostAuthorizedKeys::new(self.0.path(), &home);
            let line = GatewayLine::new(&home, Path::new("/opt/agent"), Path::new("/run/shim.sock"));
            let wanted = wanted.map(|(user, key)| GatewayKey { user: user.to_owned(), key: key.to_owned() });
            line.apply(&keys, InstanceId(uuid::Uuid::from_u128(instance)), wanted.as_ref())
        }

        fn file(&self, user: &str) -> String {
            fs::read_to_string(self.0.path().join(format!("home/{user}/.ssh/authorized_keys"))).unwrap()
        }
    }

    fn line(instance: u128, key: &str) -> String {
        let body = key.split(' ').nth(1).unwrap();
        let id = uuid::Uuid::from_u128(instance);
        format!(
            "restrict,command=\"exec /opt/agent relay /run/shim.sock\" ssh-ed25519 {body} windlass-gateway={id}\n"
        )
    }

    #[test]
    fn a_gateway_key_is_one_line_and_foreign_lines_are_kept() {
        let foreign = "ssh-rsa AAAA me\nrestrict, ssh-rsa B windlass-gateway=other";
        let accounts = Accounts::new(foreign);
        accounts.apply(1, Some(("ann", KEY))).unwrap();
        assert_eq!(accounts.file("ann"), format!("{foreign}\n{}", line(1, KEY)));
        accounts.apply(1, Some(("ann", KEY))).unwrap();
        assert_eq!(accounts.file("ann"), format!("{foreign}\n{}", line(1, KEY)), "nothing changed");
        accounts.apply(1, Some(("ann", OTHER))).unwrap();
        assert_eq!(accounts.file("ann"), format!("{foreign}\n{}", line(1, OTHER)), "it was replaced");
        accounts.apply(1, None).unwrap();
        assert_eq!(accounts.file("ann"), format!("{foreign}\n"));
        accounts.apply(1, None).unwrap();
    }

    #[test]
    fn a_gateway_key_moves_with_the_account_and_other_agents_keep_theirs() {
        let accounts = Accounts::new("");
        accounts.apply(2, Some(("ann", OTHER))).unwrap();
        fs::remove_file(accounts.0.path().join("shim").join(ACCOUNT_FILE)).unwrap();
        accounts.apply(1, Some(("ann", KEY))).unwrap();
        assert_eq!(accounts.file("ann"), line(2, OTHER) + &line(1, KEY));
        accounts.apply(1, Some(("bob", KEY))).unwrap();
        assert_eq!((accounts.file("ann"), accounts.file("bob")), (line(2, OTHER), line(1, KEY)));
    }

    #[test]
    fn a_gateway_key_with_options_or_an_odd_path_is_refused() {
        let accounts = Accounts::new("");
        for bad in ["", "ssh-rsa", &format!("command=\"sh\" {KEY}"), &format!("{KEY}\n{OTHER}")] {
            assert!(matches!(accounts.apply(1, Some(("ann", bad))), Err(KeysError::Key { .. })), "{bad}");
        }
        assert_eq!(accounts.file("ann"), "");
        for bad in ["/a b", "/a\"b", "/a'b", "/a$b", "/a;b"] {
            assert!(plain_path(Path::new(bad)).is_err(), "{bad}");
        }
    }
}
