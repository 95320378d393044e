//! Script that a new machine runs at its first start.
//!
//! It is plain `/bin/sh`, which cloud-init runs on every cloud. It contains a public key and nothing secret, so it does
//! not matter who reads it later.

/// Returns the script that creates the account, lets the server log in to it, and gives it sudo.
///
/// Where the image has no SSH server or no sudo, the script installs them with the image's package manager.
pub fn login_script(user: &str, public_key: &str) -> String {
    SCRIPT.replace("@USER@", user).replace("@KEY@", &public_key.trim().replace('\'', ""))
}

const SCRIPT: &str = r#"#!/bin/sh
# Lets the windlass server log in to this machine over SSH. Contains nothing secret.
set -eu
user='@USER@'
key='@KEY@'

install_packages() {
  if command -v apt-get >/dev/null; then apt-get -q update; DEBIAN_FRONTEND=noninteractive apt-get -q -y install "$@"
  elif command -v dnf >/dev/null; then dnf -q -y install "$@"
  elif command -v apk >/dev/null; then apk add "$@"
  else echo "windlass: cannot install $*" >&2; return 1; fi
}

command -v sudo >/dev/null || install_packages sudo
command -v sshd >/dev/null || [ -x /usr/sbin/sshd ] || install_packages openssh-server

if ! id "$user" >/dev/null 2>&1; then
  useradd --create-home --shell /bin/sh "$user" 2>/dev/null || adduser -D -s /bin/sh "$user"
fi
# No password opens the account, and it is not locked: SSH servers refuse locked accounts, also with a key.
usermod -p '*' "$user" 2>/dev/null || true
home=$(awk -F: -v user="$user" '$1 == user { print $6 }' /etc/passwd)
mkdir -p "$home/.ssh"
[ -f "$home/.ssh/authorized_keys" ] && grep -qxF "$key" "$home/.ssh/authorized_keys" ||
  printf '%s\n' "$key" >>"$home/.ssh/authorized_keys"
chmod 700 "$home/.ssh"
chmod 600 "$home/.ssh/authorized_keys"
chown -R "$user:" "$home/.ssh"
mkdir -p /etc/sudoers.d
printf '%s ALL=(ALL) NOPASSWD: ALL\n' "$user" >/etc/sudoers.d/90-windlass
chmod 440 /etc/sudoers.d/90-windlass

if command -v systemctl >/dev/null; then
  systemctl -q enable --now ssh 2>/dev/null || systemctl -q enable --now sshd 2>/dev/null || true
elif command -v rc-service >/dev/null; then
  rc-service sshd start || true
fi
"#;

#[cfg(test)]
mod tests {
    use std::{
        io::Write as _,
        process::{Command, Stdio},
    };

    use super::*;

    #[test]
    fn login_script_is_valid_shell_with_the_key_and_the_user() {
        let script = login_script("windlass", "ssh-ed25519 AAAA server\n");
        assert!(script.starts_with("#!/bin/sh\n"), "cloud-init runs it as a script");
        assert!(script.contains("\nkey='ssh-ed25519 AAAA server'\n"), "{script}");
        assert!(!script.contains("@USER@") && !script.contains("@KEY@"), "{script}");
        let mut shell = Command::new("sh").arg("-n").stdin(Stdio::piped()).spawn().unwrap();
        shell.stdin.take().unwrap().write_all(script.as_bytes()).unwrap();
        assert!(shell.wait().unwrap().success());
    }

    #[test]
    fn a_key_cannot_leave_its_quotes() {
        let script = login_script("windlass", "ssh-ed25519 AAAA'; reboot; '");
        assert!(script.contains("\nkey='ssh-ed25519 AAAA; reboot; '\n"), "{script}");
    }
}
