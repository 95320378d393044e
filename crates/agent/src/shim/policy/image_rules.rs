//! Entry `images`: where the agent pulls images from, and how much disk they may use. Applies where the agent itself pulls
//! images.

use std::{collections::BTreeMap, time::Duration};

use windlass_model::config::{
    decode::{self, Ctx, Decode},
    quantities::{MemorySize, Seconds},
    yaml::Node,
};

const BYTES_PER_GB: f64 = 1024.0 * 1024.0 * 1024.0;

#[derive(Clone, Debug, Default, PartialEq)]
pub struct ImageRules {
    /// Mirrors by registry, tried in this order before the registry itself.
    pub mirrors: BTreeMap<String, Vec<String>>,
    /// Maximum size of all images in bytes; `None`: half of the file system, which images in use may exceed.
    pub max_size: Option<u64>,
    /// Time after which an unused image is removed; `None`: 30 days.
    pub max_age: Option<Duration>,
}

impl Decode for ImageRules {
    fn decode(node: &Node, cx: &mut Ctx) -> Option<Self> {
        decode::expect_map(node, cx)?;
        decode::check_keys(node, &["mirrors", "max_size", "max_age"], cx);
        let mirrors = decode::optional_field(node, "mirrors", cx, BTreeMap::new);
        let max_size = decode::optional_field::<Option<MemorySize>>(node, "max_size", cx, || None);
        let max_age = decode::optional_field::<Option<Seconds>>(node, "max_age", cx, || None);
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a size is not negative")]
        let bytes = |size: MemorySize| (size.0 * BYTES_PER_GB) as u64;
        Some(Self {
            mirrors: mirrors?,
            max_size: max_size?.map(bytes),
            max_age: max_age?.map(|age| Duration::from_secs(age.0.unsigned_abs())),
        })
    }
}
