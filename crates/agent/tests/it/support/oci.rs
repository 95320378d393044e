//! Images for containers without an engine, from a registry of the test process.

use std::{
    io::Write as _,
    path::Path,
    process::Command,
    sync::{OnceLock, mpsc},
};

use windlass_agent::{digest::sha256_hex, shim::oci::OciProgram};
use windlass_testkit::{
    lab::registry::{ImageOptions, Registry},
    without_engine,
};

use super::images::Image;

/// Fails with the name of what is missing.
pub(crate) fn require_program() -> OciProgram {
    OciProgram::find().expect("these tests need `crun` or `runc`: install the Debian package `runc`")
}

/// Registry that lives as long as the test process, since the setup of a shim is not async.
fn registry() -> &'static Registry {
    static REGISTRY: OnceLock<Registry> = OnceLock::new();
    REGISTRY.get_or_init(|| {
        let (send, receive) = mpsc::channel();
        std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(async {
                send.send(Registry::start().await).unwrap();
                std::future::pending::<()>().await;
            });
        });
        receive.recv().unwrap()
    })
}

/// Puts the image into the registry and returns its name.
pub(crate) fn serve_image(image: Image) -> String {
    static NAMES: OnceLock<parking_lot::Mutex<Vec<(Image, String)>>> = OnceLock::new();
    let mut names = NAMES.get_or_init(Default::default).lock();
    if let Some((_, name)) = names.iter().find(|(known, _)| *known == image) {
        return name.clone();
    }
    let plain = image.tar();
    let diff = format!("sha256:{}", sha256_hex(&plain));
    let mut gzip = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    gzip.write_all(&plain).unwrap();
    let options = ImageOptions { config: image.config(), ..ImageOptions::default() };
    let repository = format!("{image:?}").to_lowercase();
    let layers = vec![(gzip.finish().unwrap(), diff)];
    let (name, _) = registry().put_layers(&repository, "1", layers, options);
    names.push((image, name.clone()));
    name
}

/// Puts an image of these uncompressed layers into the registry and returns its name.
pub(crate) fn serve_layers(repository: &str, layers: Vec<Vec<u8>>, options: ImageOptions) -> String {
    let compress = |plain: Vec<u8>| {
        let mut gzip = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
        gzip.write_all(&plain).unwrap();
        (gzip.finish().unwrap(), format!("sha256:{}", sha256_hex(&plain)))
    };
    let layers = layers.into_iter().map(compress).collect();
    registry().put_layers(repository, "1", layers, options).0
}

/// Assigns subordinate ids to a user and becomes that user, in a mount namespace of the program that it starts.
const WITH_IDS: &str = "set -e
mount --make-rprivate /
printf '%s:%s:65536\\n' $2 $3 > $1/ids; chmod 644 $1/ids
mount --bind $1/ids /etc/subuid; mount --bind $1/ids /etc/subgid
user=$2; shift 3; exec setpriv --reuid $user --regid $user --clear-groups \"$@\"";

/// Returns a command that runs the program as a user with subordinate ids; its arguments are to be added.
pub(crate) fn command_with_ids(scratch: &Path, user: u32, first_id: u32, program: &Path) -> Command {
    let mut command = Command::new("unshare");
    command.args(["-m", "sh", "-c", WITH_IDS, "sh"]).arg(scratch);
    command.args([user.to_string(), first_id.to_string()]).arg(program);
    command
}

/// Mounts directories over themselves with other options, and becomes a user, in a mount namespace of the program that it
/// starts: in a user namespace the options are locked.
const WITH_LOCKED_MOUNTS: &str = "set -e
mount --make-rprivate /
user=$1; shift
while [ \"$1\" != -- ]; do
    if [ \"$2\" = hidden ]; then mount --bind /dev/null \"$1\"
    else mount --bind \"$1\" \"$1\"; mount -o \"remount,bind,$2\" \"$1\"; fi
    shift 2
done; shift
exec setpriv --reuid $user --regid $user --clear-groups \"$@\"";

/// Returns a command that runs the program as a user for whom these directories are mounted with these options; its
/// arguments are to be added.
pub(crate) fn command_with_locked_mounts(
    mounts: &[(std::path::PathBuf, &str)],
    user: u32,
    program: &Path,
) -> Command {
    let mut command = Command::new("unshare");
    command.args(["-m", "sh", "-c", WITH_LOCKED_MOUNTS, "sh", &user.to_string()]);
    for (dir, options) in mounts {
        command.arg(dir).arg(options);
    }
    command.arg("--").arg(program);
    command
}

/// Returns a command that runs the program where no engine is installed; its arguments are to be added.
pub(crate) fn command_without_engine(scratch: &Path, program: &Path) -> Command {
    let words = without_engine::words(scratch, program);
    let mut command = Command::new(&words[0]);
    command.args(&words[1..]).env_remove("DOCKER_HOST");
    command
}
