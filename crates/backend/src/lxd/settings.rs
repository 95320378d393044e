//! Settings of the backend, as `config.yml` has them.

use std::{collections::BTreeMap, path::PathBuf};

use serde::{Deserialize, Deserializer};
use windlass_dial::{ClientIdentity, ServerUrl, ServerUrlError, TlsRootsError};
use windlass_model::config::quantities::parse_memory;

const MIB_PER_GB: f64 = 1024.0;

#[derive(Debug, thiserror::Error)]
pub enum SettingsError {
    #[error("invalid `url` value `{url}`: expected `unix:///PATH` or `https://HOST:PORT`")]
    Url { url: String },
    #[error("`{missing}` is required with an `https` URL: LXD identifies clients by their certificate")]
    Certificate { missing: &'static str },
    #[error("invalid `url` value")]
    Endpoint(#[from] ServerUrlError),
    #[error("cannot use `client_certificate` and `client_key`")]
    Identity(#[from] TlsRootsError),
    #[error("`{name}` is required")]
    Missing { name: &'static str },
    #[error("two instance types have the name `{name}`")]
    DuplicateType { name: String },
    #[error("invalid instance type `{name}`: `cpus` and `memory` must be greater than 0")]
    EmptyType { name: String },
    #[error("`config` cannot set `{key}`, which windlass sets itself")]
    ReservedKey { key: String },
}

/// Text of a value that may be written as a number or as a boolean.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Text(pub String);

impl<'de> Deserialize<'de> for Text {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        match serde_json::Value::deserialize(deserializer)? {
            serde_json::Value::String(text) => Ok(Self(text)),
            value @ (serde_json::Value::Number(_) | serde_json::Value::Bool(_)) => {
                Ok(Self(value.to_string()))
            }
            value
            @ (serde_json::Value::Null | serde_json::Value::Array(_) | serde_json::Value::Object(_)) => {
                Err(serde::de::Error::custom(format!("expected a text, not `{value}`")))
            }
        }
    }
}

/// Memory or disk: `16GB`, `512MB`, or a number of GB.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Size {
    pub mib: u64,
}

impl<'de> Deserialize<'de> for Size {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let Text(text) = Text::deserialize(deserializer)?;
        let gb = parse_memory_text(&text).map_err(serde::de::Error::custom)?;
        Ok(Self { mib: (gb * MIB_PER_GB) as u64 })
    }
}

fn parse_memory_text(text: &str) -> Result<f64, String> {
    let gb = parse_memory(text)?;
    if gb >= 0.0 { Ok(gb) } else { Err(format!("invalid size `{text}`")) }
}

/// Kind of the instances.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Kind {
    #[default]
    Container,
    VirtualMachine,
}

impl Kind {
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Container => "container",
            Self::VirtualMachine => "virtual-machine",
        }
    }
}

/// Size of machines that is offered.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct InstanceType {
    pub name: String,
    pub cpus: u32,
    pub memory: Size,
    /// Size of the root disk; absent: as the profile has it.
    #[serde(default)]
    pub disk: Size,
    /// Dollars per hour.
    #[serde(default)]
    pub price: f64,
}

/// Part of the host that windlass may use; what is absent is the whole host.
#[derive(Clone, Copy, Debug, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Capacity {
    pub instances: Option<usize>,
    pub cpus: Option<u32>,
    pub memory: Option<Size>,
}

#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Settings {
    /// `unix:///PATH` or `https://HOST:8443`; absent: the socket of LXD or Incus on this machine.
    #[serde(default)]
    pub url: Option<String>,
    /// Certificate and key that LXD trusts, as PEM files; only with `https`.
    #[serde(default)]
    pub client_certificate: Option<PathBuf>,
    #[serde(default)]
    pub client_key: Option<PathBuf>,
    /// Certificate of the server, as a PEM file or text; absent: one that the system trusts.
    #[serde(default)]
    pub server_certificate: Option<String>,
    #[serde(default = "default_name")]
    pub project: String,
    #[serde(default = "default_profiles")]
    pub profiles: Vec<String>,
    /// Alias of the image.
    #[serde(default)]
    pub image: String,
    /// Region that offers show.
    #[serde(default = "default_region")]
    pub region: String,
    #[serde(default)]
    pub kind: Kind,
    /// Pool of root disks with a size, and of volumes.
    #[serde(default = "default_name")]
    pub storage_pool: String,
    /// More configuration of every instance, such as `security.nesting`.
    #[serde(default)]
    pub config: BTreeMap<String, Text>,
    /// Sizes on offer; absent: sizes that fit the host.
    #[serde(default)]
    pub instance_types: Vec<InstanceType>,
    #[serde(default)]
    pub capacity: Capacity,
}

fn default_name() -> String {
    "default".to_owned()
}

fn default_region() -> String {
    super::NAME.to_owned()
}

fn default_profiles() -> Vec<String> {
    vec![default_name()]
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            url: None,
            client_certificate: None,
            client_key: None,
            server_certificate: None,
            project: default_name(),
            profiles: default_profiles(),
            image: String::new(),
            region: default_region(),
            kind: Kind::default(),
            storage_pool: default_name(),
            config: BTreeMap::new(),
            instance_types: Vec::new(),
            capacity: Capacity::default(),
        }
    }
}

impl Settings {
    /// Checks what can be checked without a connection.
    pub fn validated(self) -> Result<Self, SettingsError> {
        if self.image.is_empty() {
            return Err(SettingsError::Missing { name: "image" });
        }
        let mut names = std::collections::BTreeSet::new();
        for size in &self.instance_types {
            let name = || size.name.clone();
            if !names.insert(&size.name) {
                return Err(SettingsError::DuplicateType { name: name() });
            }
            if size.cpus == 0 || size.memory.mib == 0 {
                return Err(SettingsError::EmptyType { name: name() });
            }
        }
        let is_ours = |key: &&String| {
            key.starts_with("user.windlass-")
                || ["limits.cpu", "limits.memory", "user.user-data"].contains(&key.as_str())
        };
        match self.config.keys().find(is_ours) {
            Some(key) => Err(SettingsError::ReservedKey { key: key.clone() }),
            None => Ok(self),
        }
    }

    pub(super) fn https(&self, url: &str) -> Result<ServerUrl, SettingsError> {
        if !url.starts_with("https://") {
            return Err(SettingsError::Url { url: url.to_owned() });
        }
        let missing = |missing| SettingsError::Certificate { missing };
        let certificate = self.client_certificate.as_ref().ok_or_else(|| missing("client_certificate"))?;
        let key = self.client_key.as_ref().ok_or_else(|| missing("client_key"))?;
        let identity = ClientIdentity::read(certificate, key)?;
        Ok(ServerUrl::parse_as(url, self.server_certificate.as_deref(), &identity)?)
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
    fn settings_have_defaults_and_sizes_with_units() {
        let settings = read(json!({
            "image": "debian12", "config": {"security.nesting": true, "boot.autostart": "false"},
            "instance_types": [{"name": "small", "cpus": 1, "memory": "512MB", "disk": 4, "price": 0.02}],
            "capacity": {"instances": 3, "memory": "8GB"},
        }))
        .unwrap();
        assert_eq!((settings.project.as_str(), settings.region.as_str()), ("default", "lxd"));
        let small = &settings.instance_types[0];
        assert_eq!(
            (small.memory.mib, small.disk.mib, settings.capacity.memory.unwrap().mib),
            (512, 4096, 8192)
        );
        assert_eq!(settings.config["security.nesting"].0, "true");
    }

    #[test]
    fn wrong_settings_are_refused_with_their_name() {
        for (wrong, expected) in [
            (json!({}), "`image` is required"),
            (json!({"image": "i", "images": "j"}), "images"),
            (json!({"image": "i", "kind": "vm"}), "virtual-machine"),
            (json!({"image": "i", "config": {"limits.cpu": 2}}), "limits.cpu"),
            (json!({"image": "i", "config": {"user.windlass-instance": "x"}}), "windlass sets itself"),
            (
                json!({"image": "i", "instance_types": [{"name": "a", "cpus": 0, "memory": 1}]}),
                "greater than 0",
            ),
            (
                json!({"image": "i", "instance_types": [{"name": "a", "cpus": 1, "memory": 1}, {"name": "a", "cpus": 2, "memory": 1}]}),
                "two instance types",
            ),
            (json!({"image": "i", "instance_types": [{"name": "a", "cpus": 1, "memory": "x"}]}), "x"),
        ] {
            let refused = read(wrong.clone()).unwrap_err();
            assert!(refused.contains(expected), "{wrong}: {refused}");
        }
    }

    #[test]
    fn an_https_url_needs_a_client_certificate() {
        let settings = Settings { image: "i".into(), ..Settings::default() };
        let error = settings.https("https://lxd:8443").unwrap_err().to_string();
        assert!(error.contains("client_certificate"), "{error}");
        let error = settings.https("http://lxd").unwrap_err().to_string();
        assert!(error.contains("expected `unix:///PATH` or `https://"), "{error}");
    }
}
