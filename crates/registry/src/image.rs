//! Image documents: indexes, manifests and configurations.

use std::{collections::BTreeMap, fmt};

use serde::{Deserialize, Serialize};

pub(crate) const INDEX_TYPES: [&str; 2] =
    ["application/vnd.oci.image.index.v1+json", "application/vnd.docker.distribution.manifest.list.v2+json"];
pub(crate) const MANIFEST_TYPES: [&str; 2] =
    ["application/vnd.oci.image.manifest.v1+json", "application/vnd.docker.distribution.manifest.v2+json"];

/// Operating system and processor architecture: `linux/amd64`, `linux/arm/v7`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Platform {
    pub os: String,
    pub architecture: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub variant: Option<String>,
}

impl Platform {
    pub fn linux(architecture: &str) -> Self {
        Self { os: "linux".to_owned(), architecture: architecture.to_owned(), variant: None }
    }

    /// The platform of this process.
    pub fn current() -> Self {
        Self::linux(match std::env::consts::ARCH {
            "x86_64" => "amd64",
            "aarch64" => "arm64",
            other => other,
        })
    }

    /// Returns whether an instance of this platform can run an image for `other`. A missing variant matches any.
    pub fn can_run(&self, other: &Self) -> bool {
        let variants = self.variant.as_ref().zip(other.variant.as_ref());
        self.os == other.os
            && self.architecture == other.architecture
            && variants.is_none_or(|(own, other)| own == other)
    }
}

impl fmt::Display for Platform {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.os, self.architecture)?;
        self.variant.iter().try_for_each(|variant| write!(f, "/{variant}"))
    }
}

/// An image for one platform.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Image {
    /// Digest of the manifest.
    pub digest: String,
    /// Platforms the name has a build for; several only for an index.
    pub platforms: Vec<Platform>,
    pub config: ImageConfig,
    /// Base layer first.
    pub layers: Vec<Layer>,
}

impl Image {
    /// Download size in bytes.
    pub fn size(&self) -> u64 {
        self.layers.iter().fold(0, |sum, layer| sum.saturating_add(layer.size))
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub struct Layer {
    #[serde(rename = "mediaType")]
    pub media_type: String,
    pub digest: String,
    pub size: u64,
}

/// Defaults for containers of the image.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ImageConfig {
    pub platform: Option<Platform>,
    pub entrypoint: Vec<String>,
    pub command: Vec<String>,
    /// `NAME=VALUE` entries.
    pub environment: Vec<String>,
    /// Empty means root.
    pub user: String,
    pub working_dir: String,
    pub labels: BTreeMap<String, String>,
    pub stop_signal: Option<String>,
    /// Digests of the uncompressed layers, base layer first.
    pub diff_ids: Vec<String>,
}

#[derive(Deserialize)]
pub(crate) struct Descriptor {
    #[serde(rename = "mediaType", default)]
    pub(crate) media_type: String,
    pub(crate) digest: String,
    #[serde(default)]
    pub(crate) platform: Option<Platform>,
    #[serde(default)]
    pub(crate) annotations: BTreeMap<String, String>,
}

/// Index or manifest, distinguished by the media type.
#[derive(Deserialize)]
pub(crate) struct Document {
    #[serde(rename = "mediaType", default)]
    pub(crate) media_type: Option<String>,
    #[serde(default)]
    pub(crate) manifests: Vec<Descriptor>,
    #[serde(default)]
    pub(crate) config: Option<Descriptor>,
    #[serde(default)]
    pub(crate) layers: Vec<Layer>,
}

impl Document {
    /// Returns whether this is an index, by the media type in the document, else by the response header.
    pub(crate) fn is_index(&self, content_type: &str) -> bool {
        let kind = self.media_type.as_deref().unwrap_or(content_type);
        INDEX_TYPES.contains(&kind) || (self.config.is_none() && !self.manifests.is_empty())
    }

    /// Returns the platform images, without attestations added by build tools.
    pub(crate) fn platforms(&self) -> impl Iterator<Item = (&Platform, &Descriptor)> {
        let known = |platform: &&Platform| platform.architecture != "unknown";
        self.manifests.iter().filter_map(move |entry| {
            let is_image = entry.media_type.is_empty() || MANIFEST_TYPES.contains(&entry.media_type.as_str());
            let platform = entry.platform.as_ref().filter(known).filter(|_| is_image)?;
            Some((platform, entry))
        })
    }
}

/// Configuration document as the specification defines it.
#[derive(Default, Deserialize)]
#[serde(default)]
struct ConfigDocument {
    os: String,
    architecture: String,
    variant: Option<String>,
    config: Option<ContainerDocument>,
    rootfs: RootFsDocument,
}

#[derive(Default, Deserialize)]
#[serde(default, rename_all = "PascalCase")]
struct ContainerDocument {
    user: Option<String>,
    env: Option<Vec<String>>,
    entrypoint: Option<Vec<String>>,
    cmd: Option<Vec<String>>,
    working_dir: Option<String>,
    labels: Option<BTreeMap<String, String>>,
    stop_signal: Option<String>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct RootFsDocument {
    diff_ids: Vec<String>,
}

impl ImageConfig {
    /// Parses the configuration document of an image.
    pub fn parse(bytes: &[u8]) -> Result<Self, serde_json::Error> {
        let stored: ConfigDocument = serde_json::from_slice(bytes)?;
        let ConfigDocument { os, architecture, variant, config, rootfs } = stored;
        let container = config.unwrap_or_default();
        let platform = (!architecture.is_empty()).then(|| Platform {
            os: if os.is_empty() { "linux".to_owned() } else { os },
            architecture,
            variant: variant.filter(|variant| !variant.is_empty()),
        });
        Ok(Self {
            platform,
            entrypoint: container.entrypoint.unwrap_or_default(),
            command: container.cmd.unwrap_or_default(),
            environment: container.env.unwrap_or_default(),
            user: container.user.unwrap_or_default(),
            working_dir: container.working_dir.unwrap_or_default(),
            labels: container.labels.unwrap_or_default(),
            stop_signal: container.stop_signal.filter(|signal| !signal.is_empty()),
            diff_ids: rootfs.diff_ids,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn image_config_is_parsed_with_absent_and_null_fields() {
        let full = br#"{"os": "linux", "architecture": "arm", "variant": "v7", "rootfs": {"diff_ids": ["sha256:1"]},
            "config": {"User": "app", "Env": ["A=1"], "Entrypoint": ["/run"], "Cmd": ["serve"], "WorkingDir": "/srv",
                "Labels": {"x": "y"}, "StopSignal": "SIGINT"}}"#;
        let found = ImageConfig::parse(full).unwrap();
        assert_eq!(found.platform.as_ref().map(ToString::to_string).as_deref(), Some("linux/arm/v7"));
        assert_eq!((found.user.as_str(), found.working_dir.as_str()), ("app", "/srv"));
        assert_eq!((found.entrypoint, found.command), (vec!["/run".to_owned()], vec!["serve".to_owned()]));
        assert_eq!(
            (found.environment, found.diff_ids),
            (vec!["A=1".to_owned()], vec!["sha256:1".to_owned()])
        );
        assert_eq!(found.stop_signal.as_deref(), Some("SIGINT"));
        assert_eq!(ImageConfig::parse(b"{}").unwrap(), ImageConfig::default());
        let nulls =
            br#"{"config": {"User": null, "Env": null, "Cmd": null, "Entrypoint": null, "Labels": null}}"#;
        assert_eq!(ImageConfig::parse(nulls).unwrap(), ImageConfig::default());
    }

    #[test]
    fn attestations_in_an_index_do_not_count_as_platforms() {
        let index: Document = serde_json::from_str(
            r#"{"mediaType": "application/vnd.oci.image.index.v1+json", "manifests": [
                {"mediaType": "application/vnd.oci.image.manifest.v1+json", "digest": "sha256:1",
                 "platform": {"os": "linux", "architecture": "amd64"}},
                {"mediaType": "application/vnd.oci.image.manifest.v1+json", "digest": "sha256:2",
                 "platform": {"os": "unknown", "architecture": "unknown"}},
                {"mediaType": "application/vnd.example+json", "digest": "sha256:3",
                 "platform": {"os": "linux", "architecture": "arm64"}}]}"#,
        )
        .unwrap();
        assert!(index.is_index(""));
        let names: Vec<String> = index.platforms().map(|(platform, _)| platform.to_string()).collect();
        assert_eq!(names, ["linux/amd64"]);
    }

    #[test]
    fn an_unspecified_variant_matches_any_variant() {
        let arm = |variant: Option<&str>| Platform {
            variant: variant.map(str::to_owned),
            ..Platform::linux("arm")
        };
        assert!(Platform::linux("amd64").can_run(&Platform::linux("amd64")));
        assert!(!Platform::linux("amd64").can_run(&Platform::linux("arm64")));
        assert!(arm(None).can_run(&arm(Some("v7"))) && arm(Some("v7")).can_run(&arm(None)));
        assert!(!arm(Some("v6")).can_run(&arm(Some("v7"))));
    }
}
