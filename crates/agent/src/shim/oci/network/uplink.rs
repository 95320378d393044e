//! Programs that connect the network of a container to the outside without the rights of root.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::CONTAINER_INTERFACE;
use crate::isolation::user_map::{find_program, ready_words};

/// A program that passes on the connections of a container as the agent's user. Neither lets a container reach the
/// loopback of the host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(in super::super) enum Uplink {
    /// Continues in the background when the network is ready.
    Pasta(PathBuf),
    Slirp(PathBuf),
}

impl Uplink {
    pub(in super::super) fn find() -> Option<Self> {
        find_program("pasta").map(Self::Pasta).or_else(|| find_program("slirp4netns").map(Self::Slirp))
    }

    /// Returns the command for the network namespace of a process.
    pub(super) fn words(&self, pid: i32) -> Vec<String> {
        let pid = pid.to_string();
        let (program, words): (_, Vec<&str>) = match self {
            Self::Pasta(program) => {
                let closed = ["-t", "none", "-u", "none", "-T", "none", "-U", "none"];
                let words =
                    ["--config-net", "--ns-ifname", CONTAINER_INTERFACE, "--ipv4-only", "--no-map-gw"];
                (program, words.into_iter().chain(closed).chain(["--quiet", &pid]).collect())
            }
            Self::Slirp(program) => {
                let words = ["--configure", "--mtu=65520", "--disable-host-loopback"];
                (
                    program,
                    words.into_iter().chain(ready_words()).chain([&*pid, CONTAINER_INTERFACE]).collect(),
                )
            }
        };
        std::iter::once(program.to_string_lossy().into_owned())
            .chain(words.into_iter().map(str::to_owned))
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn containers_reach_the_outside_and_not_the_loopback_of_the_host() {
        let pasta = Uplink::Pasta("/usr/bin/pasta".into()).words(7).join(" ");
        assert!(pasta.starts_with("/usr/bin/pasta --config-net --ns-ifname eth0 "), "{pasta}");
        assert!(pasta.contains(" --no-map-gw ") && pasta.ends_with(" --quiet 7"), "{pasta}");
        let slirp = Uplink::Slirp("/usr/bin/slirp4netns".into()).words(7).join(" ");
        assert!(slirp.contains(" --disable-host-loopback ") && slirp.ends_with(" 7 eth0"), "{slirp}");
    }
}
