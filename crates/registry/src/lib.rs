//! Image registries, by the distribution specification: what an image is made of, and its layers.
//!
//! A [`Client`] speaks with any registry: with a token, a password or nothing; directly or through a mirror; with the
//! manifest of one platform or an index of many. What it returns was compared with its digest.

mod challenge;
mod client;
mod http;
mod image;
mod name;

pub use client::{Blob, Client, Credentials, RegistryError, Settings};
pub use image::{Image, ImageConfig, Layer, Platform};
pub use name::{ImageName, NameError, Version};
