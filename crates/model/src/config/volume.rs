//! `type: volume`: storage that outlives jobs.

use serde::Serialize;

use super::{
    config_macros::{deserialize_by_decoding, schema_literal, table},
    decode::{Ctx, Decode, decode_word, scalar},
    error::{Code, Diagnosis},
    name::{Name, Tags},
    profile::BackendType,
    quantities::{IdleDuration, MemorySize},
    yaml::Node,
};

table! {
    /// A disk in a cloud.
    pub struct AwsVolume {
        /// Region of the disk.
        pub region: String,
        /// Availability zone of the disk.
        pub availability_zone: Option<String> = None,
        /// Size of a new disk.
        pub size: Option<MemorySize> = None,
        /// ID of an existing disk, instead of a new one.
        pub volume_id: Option<String> = None,
    }
    flatten {
        pub shared: VolumeProperties,
    }
    check = Self::check;
}

impl AwsVolume {
    fn check(&self, node: &Node, cx: &mut Ctx) {
        self.shared.check_external(self.volume_id.is_some(), "volume_id", node, cx);
        check_one_of(self.size.is_some(), self.volume_id.is_some(), "volume_id", node, cx);
    }
}

table! {
    /// A persistent volume claim in Kubernetes.
    pub struct KubernetesVolume {
        /// Region of the volume, if the cluster has regions.
        pub region: String = String::new(),
        /// Size of a new claim.
        pub size: Option<MemorySize> = None,
        /// Name of an existing claim, instead of a new one.
        pub claim_name: Option<String> = None,
        /// Storage class of a new claim.
        pub storage_class_name: Option<String> = None,
        /// Access modes of a new claim.
        pub access_modes: Vec<String> = vec!["ReadWriteOnce".to_owned()],
        /// Mounts the volume read-only.
        pub read_only: bool = false,
    }
    flatten {
        pub shared: VolumeProperties,
    }
    check = Self::check;
}

impl KubernetesVolume {
    fn check(&self, node: &Node, cx: &mut Ctx) {
        self.shared.check_external(self.claim_name.is_some(), "claim_name", node, cx);
        check_one_of(self.size.is_some(), self.claim_name.is_some(), "claim_name", node, cx);
    }
}

table! {
    /// A disk of a backend that needs no further settings.
    pub struct PlainVolume {
        /// ID of an existing disk, instead of a new one.
        pub volume_id: Option<String> = None,
    }
    flatten {
        pub shared: VolumeProperties,
    }
    check = Self::check;
}

impl PlainVolume {
    fn check(&self, node: &Node, cx: &mut Ctx) {
        self.shared.check_external(self.volume_id.is_some(), "volume_id", node, cx);
    }
}

table! {
    /// A directory on the server's machine.
    pub struct LocalVolume {}
    flatten {
        pub shared: VolumeProperties,
    }
}

table! {
    /// Properties of every volume.
    pub struct VolumeProperties {
        /// Name of the volume. Generated if absent.
        pub name: Option<Name> = None,
        /// Deletes the volume after this time without use.
        pub auto_cleanup_duration: IdleDuration = IdleDuration(None),
        /// Labels for billing and search.
        pub tags: Option<Tags> = None,
    }
    title = "VolumeProperties";
}

impl VolumeProperties {
    fn check_external(&self, external: bool, key: &'static str, node: &Node, cx: &mut Ctx) {
        if external && self.auto_cleanup_duration.0.is_some_and(|secs| secs >= 0) {
            let message = format!("`auto_cleanup_duration` cannot be used with an external volume (`{key}`)");
            cx.conflict(node, "auto_cleanup_duration", message);
        }
    }
}

fn check_one_of(size: bool, external: bool, key: &'static str, node: &Node, cx: &mut Ctx) {
    if size && external {
        cx.conflict(node, "size", format!("`size` and `{key}` are mutually exclusive"));
    }
    if !size && !external {
        let message = format!("either `size` or `{key}` is required");
        cx.problem(Diagnosis::new(Code::MissingField, node.span, message).at("size"));
    }
}

/// A volume, by backend.
#[derive(Clone, Debug, PartialEq)]
pub enum Volume {
    Aws(AwsVolume),
    Gcp(AwsVolume),
    Runpod(AwsVolume),
    Kubernetes(KubernetesVolume),
    Daytona(PlainVolume),
    Lium(PlainVolume),
    /// A directory on the server's machine, managed by the agent there.
    Local(LocalVolume),
    /// A storage volume of an LXD or Incus server.
    Lxd(AwsVolume),
    /// A disk of the scripted cloud, for trials.
    Mock(AwsVolume),
}

/// Backends that provide volumes.
const BACKENDS: [BackendType; 9] = [
    BackendType::Aws,
    BackendType::Gcp,
    BackendType::Runpod,
    BackendType::Kubernetes,
    BackendType::Daytona,
    BackendType::Lium,
    BackendType::Local,
    BackendType::Lxd,
    BackendType::Mock,
];

impl Volume {
    pub const fn backend(&self) -> &'static str {
        let backend = match self {
            Self::Aws(_) => BackendType::Aws,
            Self::Gcp(_) => BackendType::Gcp,
            Self::Runpod(_) => BackendType::Runpod,
            Self::Kubernetes(_) => BackendType::Kubernetes,
            Self::Daytona(_) => BackendType::Daytona,
            Self::Lium(_) => BackendType::Lium,
            Self::Local(_) => BackendType::Local,
            Self::Lxd(_) => BackendType::Lxd,
            Self::Mock(_) => BackendType::Mock,
        };
        backend.as_str()
    }

    pub const fn shared(&self) -> &VolumeProperties {
        match self {
            Self::Aws(volume)
            | Self::Gcp(volume)
            | Self::Runpod(volume)
            | Self::Lxd(volume)
            | Self::Mock(volume) => &volume.shared,
            Self::Kubernetes(volume) => &volume.shared,
            Self::Daytona(volume) | Self::Lium(volume) => &volume.shared,
            Self::Local(volume) => &volume.shared,
        }
    }

    /// Returns the region; empty if the backend has none.
    pub fn region(&self) -> &str {
        match self {
            Self::Aws(volume)
            | Self::Gcp(volume)
            | Self::Runpod(volume)
            | Self::Lxd(volume)
            | Self::Mock(volume) => &volume.region,
            Self::Kubernetes(volume) => &volume.region,
            // The region of the local offer.
            Self::Local(_) => BackendType::Local.as_str(),
            Self::Daytona(_) | Self::Lium(_) => "",
        }
    }

    pub fn zone(&self) -> Option<&str> {
        match self {
            Self::Aws(volume)
            | Self::Gcp(volume)
            | Self::Runpod(volume)
            | Self::Lxd(volume)
            | Self::Mock(volume) => volume.availability_zone.as_deref(),
            Self::Kubernetes(_) | Self::Daytona(_) | Self::Lium(_) | Self::Local(_) => None,
        }
    }

    pub fn size_gb(&self) -> Option<f64> {
        match self {
            Self::Aws(volume)
            | Self::Gcp(volume)
            | Self::Runpod(volume)
            | Self::Lxd(volume)
            | Self::Mock(volume) => volume.size.map(|size| size.0),
            Self::Kubernetes(volume) => volume.size.map(|size| size.0),
            Self::Daytona(_) | Self::Lium(_) | Self::Local(_) => None,
        }
    }

    /// Returns the backend's ID of a volume that windlass did not create.
    pub fn external_id(&self) -> Option<&str> {
        match self {
            Self::Aws(volume)
            | Self::Gcp(volume)
            | Self::Runpod(volume)
            | Self::Lxd(volume)
            | Self::Mock(volume) => volume.volume_id.as_deref(),
            Self::Kubernetes(volume) => volume.claim_name.as_deref(),
            Self::Daytona(volume) | Self::Lium(volume) => volume.volume_id.as_deref(),
            Self::Local(_) => None,
        }
    }

    /// Returns the time without use after which the volume is deleted.
    pub fn cleanup_after_secs(&self) -> Option<i64> {
        self.shared().auto_cleanup_duration.0.filter(|secs| *secs >= 0)
    }

    /// Returns whether windlass did not create the volume; deleting it leaves the disk untouched.
    pub const fn is_external(&self) -> bool {
        match self {
            Self::Aws(volume)
            | Self::Gcp(volume)
            | Self::Runpod(volume)
            | Self::Lxd(volume)
            | Self::Mock(volume) => volume.volume_id.is_some(),
            Self::Kubernetes(volume) => volume.claim_name.is_some(),
            Self::Daytona(volume) | Self::Lium(volume) => volume.volume_id.is_some(),
            Self::Local(_) => false,
        }
    }
}

/// Decodes the rest of a volume once `type` and `backend` have been read.
fn decode_for_backend<T: super::decode::Fields>(node: &Node, cx: &mut Ctx) -> Option<T> {
    let mut keys = vec!["type", "backend"];
    T::keys(&mut keys);
    super::decode::check_keys(node, &keys, cx);
    T::decode_fields(node, cx)
}

impl Decode for Volume {
    #[expect(clippy::wildcard_enum_match_arm, reason = "only the listed backends are decoded")]
    fn decode(node: &Node, cx: &mut Ctx) -> Option<Self> {
        super::decode::expect_map(node, cx)?;
        let Some(backend) = node.field("backend") else {
            cx.missing(node, "backend", "missing field `backend`");
            return None;
        };
        if scalar(backend).is_some_and(|word| word.text == BackendType::Remote.as_str()) {
            let message = "volumes on SSH hosts are not supported";
            let hint = "mount a directory of the host instead: `volumes: [/mnt/data:/data]`";
            return cx
                .fail(Diagnosis::new(Code::Unsupported, backend.span, message).at("backend").hint(hint));
        }
        let known = BACKENDS.map(BackendType::as_str);
        let find = |word: &str| BackendType::parse(word).filter(|found| BACKENDS.contains(found));
        match cx.under("backend", |cx| decode_word(backend, cx, &known, find))? {
            BackendType::Aws => decode_for_backend(node, cx).map(Self::Aws),
            BackendType::Gcp => decode_for_backend(node, cx).map(Self::Gcp),
            BackendType::Runpod => decode_for_backend(node, cx).map(Self::Runpod),
            BackendType::Kubernetes => decode_for_backend(node, cx).map(Self::Kubernetes),
            BackendType::Daytona => decode_for_backend(node, cx).map(Self::Daytona),
            BackendType::Local => decode_for_backend(node, cx).map(Self::Local),
            BackendType::Lxd => decode_for_backend(node, cx).map(Self::Lxd),
            BackendType::Mock => decode_for_backend(node, cx).map(Self::Mock),
            _ => decode_for_backend(node, cx).map(Self::Lium),
        }
    }
}

impl Serialize for Volume {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        use super::decode::Fields as _;
        use serde::ser::SerializeMap as _;
        let mut map = serializer.serialize_map(None)?;
        map.serialize_entry("type", "volume")?;
        map.serialize_entry("backend", self.backend())?;
        match self {
            Self::Aws(volume)
            | Self::Gcp(volume)
            | Self::Runpod(volume)
            | Self::Lxd(volume)
            | Self::Mock(volume) => volume.write_fields(&mut map)?,
            Self::Kubernetes(volume) => volume.write_fields(&mut map)?,
            Self::Daytona(volume) | Self::Lium(volume) => volume.write_fields(&mut map)?,
            Self::Local(volume) => volume.write_fields(&mut map)?,
        }
        map.end()
    }
}

deserialize_by_decoding!(Volume);

/// Returns the schema of one backend's volumes: its fields, and the two that select it.
fn backend_schema<T: super::decode::Fields>(
    generator: &mut schemars::SchemaGenerator,
    backends: &[BackendType],
) -> schemars::Schema {
    let mut schema = super::schema::object::<T>(generator, "");
    if let Some(serde_json::Value::Object(properties)) = schema.get_mut("properties") {
        properties.insert("type".to_owned(), serde_json::json!({ "const": "volume" }));
        let names: Vec<&str> = backends.iter().map(|backend| backend.as_str()).collect();
        properties.insert("backend".to_owned(), serde_json::json!({ "enum": names }));
    }
    let mut required = vec![serde_json::json!("type"), serde_json::json!("backend")];
    if let Some(serde_json::Value::Array(more)) = schema.remove("required") {
        required.extend(more);
    }
    schema.insert("required".to_owned(), serde_json::Value::Array(required));
    schema
}

schema_literal! {
    Volume, "Volume" => generator {
        "description": "A disk that outlives runs.",
        "oneOf": [
            backend_schema::<AwsVolume>(
                generator,
                &[BackendType::Aws, BackendType::Gcp, BackendType::Runpod, BackendType::Lxd, BackendType::Mock],
            ),
            backend_schema::<KubernetesVolume>(generator, &[BackendType::Kubernetes]),
            backend_schema::<PlainVolume>(generator, &[BackendType::Daytona, BackendType::Lium]),
            backend_schema::<LocalVolume>(generator, &[BackendType::Local]),
        ],
    };
}
