//! Images without a container engine: pulls from registries, unpacked layers on disk, and their removal.
//!
//! ```text
//! HOME/oci/
//!   downloads/HEX           layers that are being downloaded, by digest; a download that broke off is resumed
//!   tmp/                    layers that are being unpacked, and those that are being removed; emptied at the start
//!   layers/HEX/fs           files of a layer, as overlay mounts expect them
//!   layers/HEX/layer.json   its size and the digest of its uncompressed contents (`LayerRecord`)
//!   images/HEX.json         configuration and layers of an image (`StoredImage`); its time is that of the last use
//!   names/HEX.json          the image that a name referred to last, by the digest of the name
//! ```
//!
//! Everything appears under its final name by a rename after its contents are on disk, so that a crash at any moment
//! leaves either nothing or the whole. Layers are keyed by the digest that the registry knows: an image that claims the
//! contents of another one has to know that digest.

pub mod layer;
mod pull;
pub mod store;

pub use pull::PullError;
pub use store::{GarbageSummary, ImageStore, StoreSettings, StoredImage};
