//! Interpretation of `infra`, which names a cloud, a region and a zone.
//!
//! A fleet of that name has precedence, then a backend of that name with its regions and zones. A server that rents
//! nothing has none of the clouds that such files name: its own instances stand for all of them, and the caller is
//! warned. A name that is no cloud is that of a fleet, which does not exist.

use super::ServerContext;

/// Kinds of hosts that users own; the name of a fleet follows, as in `ssh/lab`.
const OWNED_KINDS: [&str; 4] = ["ssh", "slurm", "k8s", "kubernetes"];

/// Names that task files use for clouds, and kinds of hosts without the name of a fleet.
const CLOUDS: [&str; 28] = [
    "aws",
    "azure",
    "cudo",
    "digitalocean",
    "do",
    "fluidstack",
    "gcp",
    "hyperbolic",
    "ibm",
    "k8s",
    "kubernetes",
    "lambda",
    "local",
    "mithril",
    "nebius",
    "oci",
    "paperspace",
    "primeintellect",
    "runpod",
    "scp",
    "seeweb",
    "shadeform",
    "slurm",
    "ssh",
    "vast",
    "verda",
    "vsphere",
    "yotta",
];
/// Kinds of hosts that are named one by one in task files, so that another name is a mistake.
const NAMED_KINDS: [&str; 2] = ["ssh", "slurm"];

/// Meaning of an `infra` value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Infra {
    /// Any location: nothing in particular is named.
    Anywhere,
    /// Any location, because the server rents nothing.
    OwnInstances,
    Fleet(String),
    Place {
        /// `None`: any backend that has the region.
        backend: Option<String>,
        region: Option<String>,
        zone: Option<String>,
    },
    /// The server rents instances, but not there.
    Unknown,
}

impl ServerContext {
    /// Parses `cloud/region/zone`, where `*` and absent parts mean any.
    pub fn resolve_infra(&self, text: &str) -> Infra {
        let mut parts = text.split('/').map(str::trim).map(|part| Some(part).filter(|part| *part != "*"));
        let mut next = || parts.next().flatten().filter(|part| !part.is_empty()).map(str::to_owned);
        let (first, second, third) = (next(), next(), next());
        let Some(first) = first else {
            return match (second, third) {
                (None, None) => Infra::Anywhere,
                (_, _) if self.backends.is_empty() => Infra::OwnInstances,
                (region, zone) => Infra::Place { backend: None, region, zone },
            };
        };
        let is_fleet = |name: &&String| self.fleets.iter().any(|fleet| fleet == *name);
        if let Some(fleet) =
            second.as_ref().filter(is_fleet).filter(|_| OWNED_KINDS.contains(&first.as_str()))
        {
            return Infra::Fleet(fleet.clone());
        }
        if let Some(fleet) = Some(&first).filter(is_fleet) {
            return Infra::Fleet(fleet.clone());
        }
        let name = if first == "k8s" { "kubernetes" } else { first.as_str() };
        if let Some(backend) = self.backends.iter().find(|backend| backend.eq_ignore_ascii_case(name)) {
            return Infra::Place { backend: Some(backend.clone()), region: second, zone: third };
        }
        // Without fleets, nothing is known of the project: a file is checked, or the run waits for its first fleet.
        let is_cloud = CLOUDS.iter().any(|cloud| first.eq_ignore_ascii_case(cloud));
        let is_missing_fleet = second.is_some() && NAMED_KINDS.contains(&first.as_str());
        let may_be_anywhere = self.fleets.is_empty() || (is_cloud && !is_missing_fleet);
        if self.backends.is_empty() && may_be_anywhere { Infra::OwnInstances } else { Infra::Unknown }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn site(fleets: &[&str], backends: &[&str]) -> ServerContext {
        let words = |list: &[&str]| list.iter().map(|word| (*word).to_owned()).collect();
        ServerContext { fleets: words(fleets), backends: words(backends), ..ServerContext::default() }
    }

    #[test]
    fn infra_resolves_to_a_fleet_first_then_a_backend_then_own_instances() {
        let place = |backend: &str, region: Option<&str>, zone: Option<&str>| Infra::Place {
            backend: Some(backend.to_owned()).filter(|backend| backend != "*"),
            region: region.map(str::to_owned),
            zone: zone.map(str::to_owned),
        };
        let rents = site(&["lab", "gcp"], &["aws", "kubernetes"]);
        for (text, want) in [
            ("aws", place("aws", None, None)),
            ("AWS/us-east-1/us-east-1a", place("aws", Some("us-east-1"), Some("us-east-1a"))),
            ("aws/*/us-east-1a", place("aws", None, Some("us-east-1a"))),
            ("k8s/context", place("kubernetes", Some("context"), None)),
            ("ssh/lab", Infra::Fleet("lab".to_owned())),
            ("lab", Infra::Fleet("lab".to_owned())),
            ("gcp/europe", Infra::Fleet("gcp".to_owned())),
            ("*", Infra::Anywhere),
            ("*/us-east-1", place("*", Some("us-east-1"), None)),
            ("azure", Infra::Unknown),
        ] {
            assert_eq!(rents.resolve_infra(text), want, "{text}");
        }
        for text in ["aws/us-east-1", "*/us-east-1", "AWS", "k8s/context", "ssh", "slurm"] {
            assert_eq!(site(&["local"], &[]).resolve_infra(text), Infra::OwnInstances, "{text}");
        }
        for text in ["ssh/nope", "slurm/nope/debug", "nope"] {
            assert_eq!(site(&["local"], &[]).resolve_infra(text), Infra::Unknown, "{text} is no fleet");
            assert_eq!(site(&[], &[]).resolve_infra(text), Infra::OwnInstances, "{text}: nothing is known");
        }
    }
}
