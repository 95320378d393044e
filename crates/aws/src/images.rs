//! Images of machines.

use windlass_model::{
    plan::offers::HostSpec,
    resources::{CpuArch, GpuVendor},
};

use crate::{
    api::{Api, Params},
    errors::ApiError,
    settings::{Image, OsImages},
};

const PARAMETER_PREFIX: &str = "/";
/// Reference that EC2 resolves in other calls; here the parameter is read, so that its value is known.
const RESOLVE_PREFIX: &str = "resolve:ssm:";

/// Image in a region.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct RegionImage {
    pub(crate) id: String,
    /// Name of its root disk.
    pub(crate) root_device: String,
    pub(crate) root_gb: u32,
}

#[derive(Clone, Debug, thiserror::Error)]
pub(crate) enum ImageError {
    #[error(transparent)]
    Api(#[from] ApiError),
    #[error("{message}")]
    Missing { message: String },
}

/// Returns the image for this hardware.
pub(crate) fn for_host<'a>(images: &'a OsImages, host: &HostSpec) -> &'a Image {
    let is_nvidia = host.gpus.iter().any(|gpu| gpu.vendor == GpuVendor::Nvidia);
    match (is_nvidia, host.arch) {
        (true, _) => &images.nvidia,
        (false, Some(CpuArch::Arm)) => &images.arm,
        (false, Some(CpuArch::X86) | None) => &images.cpu,
    }
}

/// Name of an image for messages, and as a key.
pub(crate) fn label(image: &Image) -> String {
    match image {
        Image::Reference(text) => text.clone(),
        Image::Named(named) => format!("{} of {}", named.name, named.owner),
    }
}

/// Finds the image in a region.
pub(crate) async fn find(api: &Api, region: &str, image: &Image) -> Result<RegionImage, ImageError> {
    let missing = |message: String| ImageError::Missing { message };
    let query = match image {
        Image::Reference(text) => {
            let name = text.strip_prefix(RESOLVE_PREFIX).unwrap_or(text);
            let id = match name.starts_with(PARAMETER_PREFIX) {
                false => name.to_owned(),
                true => match api.parameter(region, name).await {
                    Ok(id) => id,
                    Err(error) if error.is_not_found() => {
                        return Err(missing(format!("region {region} has no parameter `{name}`")));
                    }
                    Err(error) => return Err(error.into()),
                },
            };
            Params::new().with_list("ImageId", [id])
        }
        Image::Named(named) => Params::new()
            .with_list("Owner", [&named.owner])
            .with_filter("name", [&named.name])
            .with_filter("state", ["available"]),
    };
    let none = || missing(format!("region {region} has no image `{}`", label(image)));
    let found = match api.list(region, "DescribeImages", query, "imagesSet").await {
        Ok(found) => found,
        Err(error) if error.is_not_found() => return Err(none()),
        Err(error) => return Err(error.into()),
    };
    // Dates in this format sort as text.
    let newest = found.iter().max_by_key(|image| image.text("creationDate").unwrap_or_default().to_owned());
    let newest = newest.ok_or_else(none)?;
    let root = newest.text("rootDeviceName").unwrap_or("/dev/sda1").to_owned();
    let mut disks = newest.items("blockDeviceMapping");
    let disk = disks.find(|disk| disk.text("deviceName") == Some(&root));
    Ok(RegionImage {
        id: newest.text("imageId").ok_or_else(none)?.to_owned(),
        root_gb: disk.and_then(|disk| disk.number("ebs/volumeSize")).unwrap_or_default(),
        root_device: root,
    })
}
