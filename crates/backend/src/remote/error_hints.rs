//! Conversion of SSH errors to backend errors: with a hint for users, and whether a retry can help.

use std::{error::Error as _, io::ErrorKind};

use windlass_tunnel::{SshDestination, TunnelError};

use crate::BackendError;

/// Converts an error, for the message and the decision to retry.
pub(super) fn to_backend_error(error: &TunnelError, target: &SshDestination) -> BackendError {
    let cause = error.cause();
    let (host, is_gate) = (cause.host(), cause.host() != target.name());
    let who = if is_gate { format!("jump host {host}") } else { host.to_owned() };
    let unavailable = |what, message: String| {
        let message = match error {
            TunnelError::BackingOff { wait, .. } => {
                format!("{message}. The next attempt is in {} s", wait.as_secs())
            }
            TunnelError::Lookup { .. }
            | TunnelError::NotAllowed { .. }
            | TunnelError::Connect { .. }
            | TunnelError::Timeout { .. }
            | TunnelError::HostKeyChanged { .. }
            | TunnelError::Denied { .. }
            | TunnelError::Protocol { .. }
            | TunnelError::Command { .. }
            | TunnelError::ChecksumMismatch { .. } => message,
        };
        BackendError::Unavailable { what, message }
    };
    match cause {
        TunnelError::HostKeyChanged { expected, shown, .. } => BackendError::HostKeyChanged {
            host: who,
            expected: expected.to_string(),
            shown: shown.to_string(),
        },
        TunnelError::Denied { user, offered, .. } => BackendError::Refused {
            what: "log in",
            message: format!(
                "{who} accepts none of the {offered} keys for user `{user}`. Check the user name, and that the public \
                 key is in ~{user}/.ssh/authorized_keys on that host"
            ),
        },
        TunnelError::NotAllowed { .. } => BackendError::Refused {
            what: "connect",
            message: format!(
                "{who} cannot be reached: its address is not allowed for hosts. The operator of the server can allow \
                 networks with `--allow-host-networks`"
            ),
        },
        TunnelError::Lookup { message, .. } => {
            unavailable("connect", format!("cannot resolve the name of {who}: {message}. Check its spelling"))
        }
        TunnelError::Connect { source, .. } => {
            let hint = connect_hint(source.kind());
            unavailable("connect", format!("{who}: {source}: {hint}"))
        }
        TunnelError::Timeout { what, limit, .. } => {
            let message = format!(
                "{who}: timed out after {} s ({what}). The host may be overloaded or disconnected",
                limit.as_secs()
            );
            unavailable("connect", message)
        }
        TunnelError::Protocol { what, source, .. } if *what == "connect through the jump host" => {
            unavailable("connect", format!("the jump host cannot reach {host}: {source}. Check the address"))
        }
        TunnelError::Protocol { what, source, .. } => {
            let mut message = format!("{who}: {what}: {source}");
            let mut below = source.source();
            while let Some(deeper) = below {
                message += &format!(": {deeper}");
                below = deeper.source();
            }
            unavailable("communicate with the host", message)
        }
        TunnelError::Command { message, status, .. } => unavailable(
            "run a command on the host",
            format!("it ended with {status}: {}", super::shell_scripts::sanitize(message)),
        ),
        TunnelError::ChecksumMismatch { .. } => unavailable("upload the agent", cause.to_string()),
        // A cause is never `BackingOff`.
        TunnelError::BackingOff { .. } => unavailable("connect", cause.to_string()),
    }
}

#[expect(
    clippy::wildcard_enum_match_arm,
    reason = "a foreign enum that grows; only these say something here"
)]
fn connect_hint(kind: ErrorKind) -> &'static str {
    match kind {
        ErrorKind::ConnectionRefused => {
            "no SSH server listens there. Check that it is running, and check the port"
        }
        ErrorKind::TimedOut => "no response. Check that the host is up and that no firewall blocks the port",
        ErrorKind::HostUnreachable | ErrorKind::NetworkUnreachable => {
            "no route to the host. Check that the host is up, and check the address"
        }
        _ => "check that the host is up",
    }
}

#[cfg(test)]
mod tests {
    use std::{io, sync::Arc, time::Duration};

    use windlass_tunnel::{HostKey, HostKeyPin};

    use super::*;

    fn target() -> SshDestination {
        let (keys, pin, via) = (Vec::new(), HostKeyPin::FirstUse, None);
        SshDestination { host: "gpu-1".into(), port: 22, user: "ada".into(), keys, pin, via }
    }

    #[track_caller]
    fn check(error: TunnelError, is_final: bool, words: &[&str]) {
        let reported = to_backend_error(&error, &target());
        let refused = matches!(reported, BackendError::Refused { .. } | BackendError::HostKeyChanged { .. });
        assert_eq!(refused, is_final, "{reported}");
        for word in words {
            assert!(reported.to_string().contains(word), "{reported}");
        }
    }

    #[test]
    fn f18_each_connection_failure_has_its_own_message_and_hint() {
        let ours = || "ada@gpu-1:22".to_owned();
        let connect =
            |host: String, kind: io::ErrorKind| TunnelError::Connect { host, source: Arc::new(kind.into()) };
        check(connect(ours(), ErrorKind::ConnectionRefused), false, &["ada@gpu-1:22", "check the port"]);
        check(connect(ours(), ErrorKind::TimedOut), false, &["firewall"]);
        check(connect(ours(), ErrorKind::HostUnreachable), false, &["no route to the host"]);
        check(connect("eve@gate:22".into(), ErrorKind::ConnectionRefused), false, &["jump host eve@gate:22"]);
        let denied = TunnelError::Denied { host: ours(), user: "ada".into(), offered: 2 };
        check(denied.clone(), true, &["none of the 2 keys", "authorized_keys"]);
        let wait = Duration::from_secs(9);
        check(TunnelError::BackingOff { last: Arc::new(denied), wait }, true, &["none of the 2 keys"]);
        let refused = Arc::new(connect(ours(), ErrorKind::ConnectionRefused));
        check(
            TunnelError::BackingOff { last: refused, wait },
            false,
            &["The next attempt is in 9 s", "SSH server"],
        );
        check(
            TunnelError::NotAllowed { host: ours() },
            true,
            &["cannot be reached", "--allow-host-networks"],
        );
        check(
            TunnelError::Lookup { host: ours(), message: "no such name".into() },
            false,
            &["Check its spelling"],
        );
        let key = |text: &str| Box::new(HostKey::parse(text).unwrap());
        let old = key("ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIDCzPmT7HUvaLWl2sUvZ8vgXEpBh1mBwyHZ/b0DfKpcM");
        let new = key("ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIBqYk1ZVbFyiqxrSfl1gKI6lgO5YRbMcmyJ2kzYkCN1e");
        check(
            TunnelError::HostKeyChanged { host: ours(), expected: old, shown: new },
            true,
            &["changed", "SHA256:"],
        );
    }
}
