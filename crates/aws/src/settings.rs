//! Settings of the backend, as `config.yml` has them. Where dstack has a setting, it has the same name here.

use std::{collections::BTreeMap, path::PathBuf};

use serde::{Deserialize, Deserializer, de::Error as _};
use windlass_dial::{ServerUrl, ServerUrlError};
use windlass_model::config::quantities::parse_memory;

/// Regions that are used where none are configured; those of dstack.
const REGIONS: [&str; 11] = [
    "us-east-2",
    "us-east-1",
    "us-west-1",
    "us-west-2",
    "ca-central-1",
    "eu-north-1",
    "eu-west-1",
    "eu-central-1",
    "eu-west-2",
    "eu-west-3",
    "ap-southeast-1",
];
/// Types that are offered where none are configured: present general-purpose families, and all with NVIDIA GPUs.
const INSTANCE_TYPES: [&str; 16] = [
    "t3.*",
    "m7i.*",
    "c7i.*",
    "r7i.*",
    "g4dn.*",
    "g5.*",
    "g6.*",
    "g6e.*",
    "gr6.*",
    "p3.*",
    "p4d.*",
    "p4de.*",
    "p5.*",
    "p5e.*",
    "p5en.*",
    "p6-b200.*",
];
const DISK_GB: u32 = 100;
/// Smallest and largest root disk.
const DISK_GB_RANGE: std::ops::RangeInclusive<u32> = 8..=16_384;
const SECURITY_GROUP: &str = "windlass";
const ANYWHERE: &str = "0.0.0.0/0";
const UBUNTU_X86: &str = "/aws/service/canonical/ubuntu/server/24.04/stable/current/amd64/hvm/ebs-gp3/ami-id";
const UBUNTU_ARM: &str = "/aws/service/canonical/ubuntu/server/24.04/stable/current/arm64/hvm/ebs-gp3/ami-id";
/// Ubuntu with the driver of NVIDIA, by AWS.
const UBUNTU_NVIDIA: &str =
    "/aws/service/deeplearning/ami/x86_64/base-oss-nvidia-driver-gpu-ubuntu-22.04/latest/ami-id";

#[derive(Debug, thiserror::Error)]
pub enum SettingsError {
    #[error("invalid `endpoint` value")]
    Endpoint(#[from] ServerUrlError),
    #[error("invalid `regions` entry `{region}`: expected a name like `eu-central-1`")]
    Region { region: String },
    #[error("`regions` is empty: name at least one, or leave it out")]
    NoRegion,
    #[error("`regions` lists `{region}` twice")]
    DuplicateRegion { region: String },
    #[error("`vpc_name` and `vpc_ids` exclude each other")]
    TwoVpcs,
    #[error("with `default_vpcs: false`, `vpc_name` or `vpc_ids` is required")]
    NoVpc,
    #[error("`vpc_ids` has no VPC for region `{region}`; with `default_vpcs: true` its default VPC is used")]
    MissingVpc { region: String },
    #[error("invalid `disk_size`: expected {} to {} GB", DISK_GB_RANGE.start(), DISK_GB_RANGE.end())]
    Disk,
    #[error("invalid tag `{key}`: expected at most 128 characters, not starting with `aws:` or `windlass-`")]
    Tag { key: String },
    #[error("`{name}` is empty")]
    Empty { name: &'static str },
}

/// Credentials.
#[derive(Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum Creds {
    /// As AWS's own tools find them.
    #[default]
    Default,
    AccessKey(AccessKey),
    Profile(Profile),
}

/// Contains no secret.
impl std::fmt::Debug for Creds {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Default => f.write_str("Default"),
            Self::AccessKey(keys) => f.debug_tuple("AccessKey").field(&keys.access_key).finish(),
            Self::Profile(profile) => f.debug_tuple("Profile").field(&profile.profile).finish(),
        }
    }
}

#[derive(Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AccessKey {
    pub access_key: String,
    pub secret_key: String,
    #[serde(default)]
    pub session_token: Option<String>,
}

/// Section of a credentials file.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Profile {
    #[serde(default = "default_profile")]
    pub profile: String,
    /// Absent: `AWS_SHARED_CREDENTIALS_FILE`, or `~/.aws/credentials`.
    #[serde(default)]
    pub file: Option<PathBuf>,
}

fn default_profile() -> String {
    "default".to_owned()
}

/// Image, by its id, by a parameter of Systems Manager, or as the newest with a name. Cloud-init must be in it.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(untagged)]
pub enum Image {
    /// `ami-…` or `/aws/service/…`.
    Reference(String),
    Named(NamedImage),
}

#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NamedImage {
    /// May contain `*`.
    pub name: String,
    #[serde(default = "default_owner")]
    pub owner: String,
    /// Accepted from dstack's configuration, and not used: the server creates its own user.
    #[serde(default)]
    pub user: Option<String>,
}

fn default_owner() -> String {
    "self".to_owned()
}

/// Images of machines, by their hardware.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct OsImages {
    pub cpu: Image,
    pub arm: Image,
    pub nvidia: Image,
}

impl Default for OsImages {
    fn default() -> Self {
        let of = |name: &str| Image::Reference(name.to_owned());
        Self { cpu: of(UBUNTU_X86), arm: of(UBUNTU_ARM), nvidia: of(UBUNTU_NVIDIA) }
    }
}

#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Settings {
    pub creds: Creds,
    pub regions: Vec<String>,
    /// Names of types, with `*` for any text.
    pub instance_types: Vec<String>,
    pub vpc_name: Option<String>,
    /// VPC of each region.
    pub vpc_ids: BTreeMap<String, String>,
    /// Regions that `vpc_ids` does not name use their default VPC.
    pub default_vpcs: bool,
    /// False: machines have private addresses only, which the server must reach.
    pub public_ips: bool,
    /// Name of the security group, which is created where it does not exist.
    pub security_group: String,
    /// Networks that may connect to port 22 of machines, for a group that is created.
    pub ssh_sources: Vec<String>,
    /// Name or ARN of the profile with the role of the machines.
    pub iam_instance_profile: Option<String>,
    /// Key pair of EC2 with which the owner of the account may log in to the machines.
    pub key_name: Option<String>,
    pub tags: BTreeMap<String, String>,
    pub os_images: OsImages,
    /// Root disk of each machine, in GB.
    #[serde(deserialize_with = "disk_size")]
    pub disk_size: u32,
    /// Catalogue of on-demand prices: a file, or a URL.
    pub prices: Option<String>,
    /// One endpoint for all services, for tests and private endpoints.
    pub endpoint: Option<String>,
}

impl Default for Settings {
    fn default() -> Self {
        let owned = |list: &[&str]| list.iter().map(|one| (*one).to_owned()).collect();
        Self {
            creds: Creds::default(),
            regions: owned(&REGIONS),
            instance_types: owned(&INSTANCE_TYPES),
            vpc_name: None,
            vpc_ids: BTreeMap::new(),
            default_vpcs: true,
            public_ips: true,
            security_group: SECURITY_GROUP.to_owned(),
            ssh_sources: owned(&[ANYWHERE]),
            iam_instance_profile: None,
            key_name: None,
            tags: BTreeMap::new(),
            os_images: OsImages::default(),
            disk_size: DISK_GB,
            prices: None,
            endpoint: None,
        }
    }
}

/// `100GB`, or a number of GB.
fn disk_size<'de, D: Deserializer<'de>>(deserializer: D) -> Result<u32, D::Error> {
    let size = serde_json::Value::deserialize(deserializer)?;
    let text = size.as_str().map_or_else(|| size.to_string(), str::to_owned);
    parse_memory(&text).map(|gb| gb as u32).map_err(D::Error::custom)
}

impl Settings {
    /// Checks what can be checked without a connection.
    pub fn validated(self) -> Result<Self, SettingsError> {
        if let Some(endpoint) = &self.endpoint {
            ServerUrl::parse(endpoint, None)?;
        }
        let mut names = std::collections::BTreeSet::new();
        for region in &self.regions {
            let is_plain = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
            if region.is_empty() || !region.contains('-') || !region.chars().all(is_plain) {
                return Err(SettingsError::Region { region: region.clone() });
            }
            if !names.insert(region) {
                return Err(SettingsError::DuplicateRegion { region: region.clone() });
            }
            if self.vpc_name.is_none() && !self.default_vpcs && !self.vpc_ids.contains_key(region) {
                return Err(match self.vpc_ids.is_empty() {
                    true => SettingsError::NoVpc,
                    false => SettingsError::MissingVpc { region: region.clone() },
                });
            }
        }
        if self.regions.is_empty() {
            return Err(SettingsError::NoRegion);
        }
        if self.vpc_name.is_some() && !self.vpc_ids.is_empty() {
            return Err(SettingsError::TwoVpcs);
        }
        if !DISK_GB_RANGE.contains(&self.disk_size) {
            return Err(SettingsError::Disk);
        }
        let is_reserved = |key: &&String| {
            key.is_empty() || key.len() > 128 || key.starts_with("aws:") || key.starts_with("windlass-")
        };
        if let Some(key) = self.tags.keys().find(is_reserved) {
            return Err(SettingsError::Tag { key: key.clone() });
        }
        let lists = [("instance_types", &self.instance_types), ("ssh_sources", &self.ssh_sources)];
        match lists.iter().find(|(_, list)| list.is_empty()) {
            Some((name, _)) => Err(SettingsError::Empty { name }),
            None if self.security_group.is_empty() => Err(SettingsError::Empty { name: "security_group" }),
            None => Ok(self),
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn read(value: serde_json::Value) -> Result<Settings, String> {
        let settings: Settings = serde_json::from_value(value).map_err(|error| error.to_string())?;
        settings.validated().map_err(|error| error.to_string())
    }

    #[test]
    fn settings_of_dstack_are_read_and_have_defaults() {
        let settings = read(json!({
            "creds": {"type": "access_key", "access_key": "AK", "secret_key": "canary"},
            "regions": ["us-west-2"], "vpc_ids": {"us-west-2": "vpc-1"}, "default_vpcs": true, "public_ips": false,
            "iam_instance_profile": "arn:aws:iam::1:instance-profile/x", "tags": {"team": "ml"},
            "os_images": {"nvidia": {"name": "ours-*", "owner": "123", "user": "ubuntu"}, "cpu": "ami-1"},
        }))
        .unwrap();
        assert_eq!((settings.disk_size, settings.public_ips), (100, false));
        assert_eq!(settings.os_images.arm, OsImages::default().arm);
        assert!(!format!("{settings:?}").contains("canary"));
        assert_eq!(read(json!({})).unwrap().creds, Creds::Default);
        assert_eq!(read(json!({"disk_size": "200GB"})).unwrap().disk_size, 200);
        assert_eq!(
            read(json!({"creds": {"type": "profile"}})).unwrap().creds,
            Creds::Profile(Profile { profile: "default".into(), file: None })
        );
    }

    #[test]
    fn wrong_settings_are_refused_with_their_name() {
        for (wrong, expected) in [
            (json!({"region": ["eu-west-1"]}), "unknown field `region`"),
            (json!({"creds": {"type": "access_key", "access_key": "a"}}), "secret_key"),
            (json!({"creds": {"type": "password"}}), "access_key"),
            (json!({"regions": []}), "`regions` is empty"),
            (json!({"regions": ["Frankfurt"]}), "expected a name like `eu-central-1`"),
            (json!({"regions": ["eu-west-1", "eu-west-1"]}), "twice"),
            (json!({"vpc_name": "a", "vpc_ids": {"eu-west-1": "vpc-1"}}), "exclude each other"),
            (json!({"default_vpcs": false}), "`vpc_name` or `vpc_ids` is required"),
            (
                json!({"default_vpcs": false, "regions": ["eu-west-1"], "vpc_ids": {"eu-west-2": "v"}}),
                "no VPC for region `eu-west-1`",
            ),
            (json!({"disk_size": "4GB"}), "8 to 16384 GB"),
            (json!({"tags": {"windlass-instance": "x"}}), "invalid tag"),
            (json!({"endpoint": "moto"}), "invalid `endpoint`"),
            (json!({"instance_types": []}), "`instance_types` is empty"),
        ] {
            let refused = read(wrong.clone()).unwrap_err();
            assert!(refused.contains(expected), "{wrong}: {refused}");
        }
    }
}
