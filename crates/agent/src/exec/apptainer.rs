//! Images and commands of Apptainer.

use std::fs;

use super::{
    AttemptError,
    image::{ContainerSpec, refused_error},
};

/// Checks the image name for Apptainer, which runs files and images of registries. A directory would expose its
/// contents, and an instance is another container.
pub(super) fn image_name(image: &str, are_registries_limited: bool) -> Result<&str, AttemptError> {
    const SCHEMES: [&str; 4] = ["docker://", "oras://", "library://", "https://"];
    if image.starts_with('/') {
        return if are_registries_limited {
            Err(refused_error(format!(
                "image `{image}` is a file, but the policy of this host restricts images to `registries`"
            )))
        } else if fs::metadata(image).is_ok_and(|found| found.is_file()) {
            Ok(image)
        } else {
            Err(refused_error(format!("image `{image}` is not a file on this host")))
        };
    }
    match SCHEMES.iter().find_map(|scheme| image.strip_prefix(scheme)) {
        Some(name) => Ok(name),
        None if image.contains("://") => {
            Err(refused_error(format!("unsupported image `{image}`: expected one of {}", SCHEMES.join(", "))))
        }
        None => Ok(image),
    }
}

pub(super) fn command(program: &str, order: &ContainerSpec<'_>) -> Vec<String> {
    let mut words = [program, "exec", "--containall", "--no-home"].map(str::to_owned).to_vec();
    if rustix::process::geteuid().is_root() {
        words.push("--no-privs".to_owned());
    }
    let filters = order.confinement.security_opt.iter().filter_map(|option| option.strip_prefix("seccomp="));
    for filter in filters {
        words.extend(["--security".to_owned(), format!("seccomp:{filter}")]);
    }
    if order.gpus.is_some() {
        words.push("--nv".to_owned());
    }
    for (from, to) in &order.binds {
        words.extend(["--bind".to_owned(), format!("{}:{to}", from.display())]);
    }
    if !order.cwd.is_empty() {
        words.extend(["--pwd".to_owned(), order.cwd.to_owned()]);
    }
    // A file of this host, or an image of a registry.
    let is_file = order.image.starts_with('/') || order.image.contains("://");
    words.push(if is_file { order.image.to_owned() } else { format!("docker://{}", order.image) });
    words.extend(order.command.iter().cloned());
    words
}
