//! Client for OCI image registries: resolves image names to configurations and layers.
//!
//! [`Client`] supports bearer tokens, basic authentication, mirrors, redirects and multi-platform indexes. Every document
//! and layer is verified against its digest. [`local`] reads the same from a directory or an archive of this host.

mod challenge;
mod client;
#[cfg(test)]
mod fuzz;
mod http;
mod image;
mod layer_download;
pub mod local;
mod name;

pub use client::{Client, Credentials, MissingPlatform, RegistryError, Settings};
pub use http::FetchError;
pub use image::{Image, ImageConfig, Layer, Platform};
pub use layer_download::{LayerDownload, LayerHosts};
pub use name::{ImageName, NameError, Version};
