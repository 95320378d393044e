//! SSH destinations of test hosts.

use anyhow::Result;
use windlass_testkit::lab::LabHost;
use windlass_tunnel::{HostKey, HostKeyPin, LoginKey, SshDestination};

/// Login to a host of a lab.
pub trait SshTarget {
    /// Root, with the host's key pinned.
    fn target(&self) -> SshDestination {
        self.target_as("root")
    }

    /// Another user, with the host's key pinned.
    ///
    /// # Panics
    ///
    /// If the keys that the lab has written cannot be read.
    fn target_as(&self, user: &str) -> SshDestination;

    /// Root, through another host.
    fn target_via(&self, jump: &Self) -> SshDestination {
        SshDestination { via: Some(Box::new(jump.target())), ..self.target() }
    }

    /// The host key.
    fn host_key(&self) -> Result<HostKey>;
}

impl SshTarget for LabHost {
    fn target_as(&self, user: &str) -> SshDestination {
        #[expect(clippy::expect_used, reason = "the lab itself has written both keys")]
        let (key, pin) = (
            self.login_key().and_then(|text| Ok(LoginKey::parse(&text)?)).expect("the lab's key"),
            self.host_key().expect("the host's key"),
        );
        SshDestination {
            host: self.addr().to_string(),
            port: 22,
            user: user.to_owned(),
            keys: vec![key],
            pin: HostKeyPin::Known(pin),
            via: None,
        }
    }

    fn host_key(&self) -> Result<HostKey> {
        Ok(HostKey::parse(&self.host_key_line()?)?)
    }
}
